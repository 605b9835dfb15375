package state

import (
	"context"
	"fmt"
	"time"

	"github.com/kasmina-go/kasmina/state/internal/columns"
)

// A seed's checksum is renewed with every change of its fields, after a look at whether they still
// matched the old one. A change keeps the syndrome, so that a seed that was corrupt before does not
// look intact after it.

func (l *Lattice) faults() []columns.Fault {
	if l.n == 0 {
		return nil
	}
	return l.sums.All(l.seeds.crc)
}

// faultError returns an error wrapping ErrCorrupt that names the first of the given faults, nil if
// there is none.
func faultError(c *columns.Checksums, found []columns.Fault, n int) error {
	if len(found) == 0 {
		return nil
	}
	return fmt.Errorf("%w: seed %d does not match its checksum: %s (%d of %d seeds do not)",
		ErrCorrupt, found[0].Row, c.Locate(found[0].Syndrome), len(found), n)
}

// seal renews the checksums of the seeds in [lo, hi), after a change to their fields.
func (l *Lattice) seal(lo, hi int) {
	l.sums.Seal(lo, hi, l.seeds.crc)
}

// checkIntact returns an error when a seed that a command is for does not match its checksum.
func (l *Lattice) checkIntact(method string, seed int) error {
	if err := faultError(l.sums, l.sums.Faults(seed, seed+1, l.seeds.crc), l.n); err != nil {
		return fmt.Errorf("state.%s: %w", method, err)
	}
	return nil
}

// Verify recomputes all checksums. It returns an error wrapping [ErrCorrupt] that names the first
// seed whose fields do not match its checksum. The error has the field and its bit if a single one
// has flipped, and how many such seeds there are.
func (l *Lattice) Verify() error {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if err := faultError(l.sums, l.faults(), l.n); err != nil {
		return fmt.Errorf("state.Verify: %w", err)
	}
	return nil
}

// Quarantine makes every seed that does not match its checksum a new, dormant one, and returns a
// Quarantined event for each. What the others are doing goes on. It is for lattices whose
// corruption shall not end a run; see [WithQuarantine].
func (l *Lattice) Quarantine() []Event {
	l.mu.Lock()
	defer l.unlockAndTell()
	return l.quarantine(l.faults())
}

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
	l.tell(events...)
	return events
}

// scrubSpan is how many seeds a scrub checks at a time: a few dozen microseconds' work, for which
// commands and passes wait.
const scrubSpan = 1024

// Scrub verifies all seeds once every period, a span at a time, until the context ends. It calls
// found, if that is not nil, with an error as [Lattice.Verify] returns it whenever it meets corrupt
// seeds. It changes nothing; run it on a goroutine of its own. Without a context, or with a period
// that is not above 0, it returns an error at once, else nil.
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

func (l *Lattice) verifySpan(lo int) error {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if lo >= l.n { // the lattice was loaded anew, smaller
		return nil
	}
	if err := faultError(l.sums, l.sums.Faults(lo, min(lo+scrubSpan, l.n), l.seeds.crc),
		l.n); err != nil {
		return fmt.Errorf("state.Scrub: %w", err)
	}
	return nil
}

func checkScrub(ctx context.Context, period time.Duration) error {
	if ctx == nil || period <= 0 {
		return fmt.Errorf("state.Scrub: %w: context %v and period %v, want a context and a "+
			"period above 0", ErrArgument, ctx, period)
	}
	return nil
}
