package comm

import (
	"context"
	"errors"
	"time"
)

// Watch keeps an eye on a group until the context ends. When another rank cannot go on it aborts
// the group, so that no work waits for a rank that is gone. When the group's own work fails it
// tells the other ranks. It asks the group every interval, 100 ms where that is 0.
//
// Its error is the cause, or nil where the context ended first.
func Watch(ctx context.Context, w *World, g Group, interval time.Duration) error {
	if ctx == nil || g == nil || !w.made() {
		return errors.New("comm: Watch: the context, the world or the group is nil or a zero value")
	}
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

// ErrPeer marks work that failed because another rank was not there for it.
var ErrPeer = errors.New("comm: another rank is gone")

// hearsay is how long a rank that misses another waits to hear from the store what happened there.
const hearsay = 2 * time.Second

// Blame finds why work of this rank failed, and tells the others. Where the error is [ErrPeer] it
// waits a little for the cause: the rank that is gone says it, or its death does. Any other error
// is this rank's own, and becomes the others' cause by Fail.
func (w *World) Blame(err error) error {
	if errors.Is(err, ErrPeer) {
		select {
		case <-w.Done():
		case <-time.After(hearsay):
		}
	}
	if cause := w.Err(); cause != nil {
		return cause
	}
	w.Fail(err)
	return err
}
