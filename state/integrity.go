package state

import (
	"context"
	"fmt"
	"time"

	"github.com/kasmina-go/kasmina/state/internal/columns"
)

// Every change of a seed's fields is followed by a new checksum. Code that changes seeds without
// verifying them first (passes, and restoring a Mark) preserves a mismatch by XORing the old syndrome
// into the new checksum, so that a corrupt seed does not look intact afterwards.

// faults returns the seeds that do not match their checksums.
func (l *Lattice) faults() []columns.Fault {
	if l.n == 0 {
		return nil
	}
	return l.sums.All(l.seeds.crc)
}

// faultError returns an error wrapping ErrCorrupt that names the first of the given faults, or nil
// if there are none.
func faultError(c *columns.Checksums, found []columns.Fault, n int) error {
	if len(found) == 0 {
		return nil
	}
	return fmt.Errorf("%w: seed %d does not match its checksum: %s (%d of %d seeds do not)",
		ErrCorrupt, found[0].Row, c.Locate(found[0].Syndrome), len(found), n)
}

// seal recomputes the checksums of seeds [lo, hi).
func (l *Lattice) seal(lo, hi int) {
	l.sums.Seal(lo, hi, l.seeds.crc)
}

// checkIntact returns an error if the seed addressed by a command does not match its checksum.
func (l *Lattice) checkIntact(method string, seed int) error {
	if err := faultError(l.sums, l.sums.Faults(seed, seed+1, l.seeds.crc), l.n); err != nil {
		return fmt.Errorf("state.%s: %w", method, err)
	}
	return nil
}

// Verify recomputes all checksums. If a seed does not match, it returns an error wrapping
// [ErrCorrupt] that names the first such seed, the field and bit if a single bit has flipped, and
// the number of corrupt seeds.
func (l *Lattice) Verify() error {
	l.mu.RLock()
	defer l.mu.RUnlock()

	if err := faultError(l.sums, l.faults(), l.n); err != nil {
		return fmt.Errorf("state.Verify: %w", err)
	}
	return nil
}

// Quarantine resets every seed that does not match its checksum to a new, dormant one and returns a
// Quarantined event for each. Other seeds are not affected. Use it if corruption must not stop a run;
// see [WithQuarantine].
func (l *Lattice) Quarantine() []Event {
	l.mu.Lock()
	defer l.unlockAndDeliver()
	return l.quarantine(l.faults())
}

// quarantine resets the given corrupt seeds. The caller holds the lock.
func (l *Lattice) quarantine(found []columns.Fault) (events []Event) {
	for _, f := range found {
		l.seeds.reset(f.Row)
		delete(l.kept, f.Row)
		l.seal(f.Row, f.Row+1)
		events = append(events, Event{Kind: Quarantined, Seed: f.Row, Epoch: int(l.epoch),
			Reason: l.sums.Locate(f.Syndrome)})
	}

	if len(events) > 0 {
		l.countUsers()
	}
	l.notify(events...)
	return events
}

// scrubSpan is the number of seeds that a scrub verifies while holding the lock, which makes commands
// and passes wait for a few dozen microseconds.
const scrubSpan = 1024

// Scrub verifies all seeds once every period until ctx is done. It locks the lattice for only a small
// number of seeds at a time and changes nothing.
//
// Whenever it finds corrupt seeds, it calls found, unless nil, with the error that [Lattice.Verify]
// would return. Scrub blocks, so run it on its own goroutine.
//
// It returns nil when ctx is done, and an error at once if period is not positive.
func (l *Lattice) Scrub(ctx context.Context, period time.Duration, found func(error)) error {
	if err := checkScrub(ctx, period); err != nil {
		return err
	}

	ticker := time.NewTicker(max(period, time.Millisecond))
	defer ticker.Stop()
	for {
		for lo := 0; lo < l.Seeds() && ctx.Err() == nil; lo += scrubSpan {
			if err := l.verifySpan(lo); err != nil && found != nil {
				found(err)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// verifySpan verifies the seeds of the span that starts at lo.
func (l *Lattice) verifySpan(lo int) error {
	l.mu.RLock()
	defer l.mu.RUnlock()

	if lo >= l.n { // the lattice has been replaced by a smaller one
		return nil
	}
	if err := faultError(l.sums, l.sums.Faults(lo, min(lo+scrubSpan, l.n), l.seeds.crc),
		l.n); err != nil {
		return fmt.Errorf("state.Scrub: %w", err)
	}
	return nil
}

// checkScrub checks the arguments of Scrub.
func checkScrub(ctx context.Context, period time.Duration) error {
	if period <= 0 {
		return fmt.Errorf("state.Scrub: %w: the context is %v and the period is %v, want a "+
			"period above 0", ErrArgument, ctx, period)
	}
	return nil
}
