package comm

import (
	"context"
	"errors"
	"time"
)

// Watch monitors a group until ctx is done. If another rank fails, it aborts the group, so that no
// work waits for a rank that is gone. If the group's own work fails, it notifies the other ranks.
// It checks the group once per interval, or every 100 ms if interval is not positive.
//
// It returns the cause of the failure, or nil if ctx is done first.
func Watch(ctx context.Context, w *World, g Group, interval time.Duration) error {
	if interval <= 0 {
		interval = 100 * time.Millisecond
	}

	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.Done():
			cause := w.Err()
			g.Abort(cause)
			return cause
		case <-tick.C:
			if err := g.Err(); err != nil {
				cause := w.Blame(err)
				g.Abort(cause)
				return cause
			}
		}
	}
}

// ErrPeer reports that work failed because another rank was gone.
var ErrPeer = errors.New("comm: another rank is gone")

// explanationWait limits the wait of a rank for the store to explain the loss of another rank.
const explanationWait = 2 * time.Second

// Blame determines the cause of a failure of this rank's work, and notifies the other ranks. If err
// wraps [ErrPeer], Blame waits briefly for a report from the rank that is gone, or of its death, and
// returns the reported cause. If there is no report, or if err is this rank's own error, Blame
// passes err to Fail and returns it.
func (w *World) Blame(err error) error {
	if errors.Is(err, ErrPeer) {
		select {
		case <-w.Done():
		case <-time.After(explanationWait):
		}
	}

	if cause := w.Err(); cause != nil {
		return cause
	}

	w.Fail(err)
	return err
}
