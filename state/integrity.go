package state

import (
	"context"
	"fmt"
	"hash/crc32"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// A seed's checksum is renewed with every change of its fields, after a look at whether they still matched the old one. Its
// syndrome is its checksum XOR that of its fields: 0 while it is intact. A change keeps the syndrome, so that a seed that was
// corrupt before does not look intact after it.
type fault struct {
	seed     int
	syndrome uint32
}

// faults returns the corrupt seeds in [lo, hi).
func (c *checksummer) faults(lo, hi int, crc []uint32) (found []fault) {
	c.each(lo, hi, func(seed int, sum uint32) {
		if sum != crc[seed] {
			found = append(found, fault{seed, sum ^ crc[seed]})
		}
	})
	return found
}

// locate says which bit of a seed's row has flipped, if a single one has: CRC-32 is linear, and gives every bit of a message
// as short as this a syndrome of its own.
func (c *checksummer) locate(syndrome uint32) string {
	for bit := range 32 {
		if syndrome == 1<<bit {
			return fmt.Sprintf("bit %d of its checksum has flipped", bit)
		}
	}
	row := make([]byte, c.stride)
	zero := crc32.ChecksumIEEE(row)
	for k, col := range c.columns {
		for bit := range 8 * widths[col.typ()] {
			at := &row[c.offsets[k]+bit/8]
			*at = 1 << (bit % 8)
			if crc32.ChecksumIEEE(row)^zero == syndrome {
				return fmt.Sprintf("bit %d of %s has flipped", bit, col.name)
			}
			*at = 0
		}
	}
	return "more than one bit has changed"
}

// all returns the corrupt seeds of the first n, in order.
func (c *checksummer) all(n int, crc []uint32) (found []fault) {
	const grain = 1024
	spans := make([][]fault, (n+grain-1)/grain)
	cpu.Parallel(n, grain, func(lo, hi int) { spans[lo/grain] = c.faults(lo, hi, crc) })
	return slices.Concat(spans...)
}

func (l *Lattice) faults() []fault {
	if l.n == 0 {
		return nil
	}
	return l.sums.all(l.n, l.seeds.crc)
}

// faultError returns an error wrapping ErrCorrupt that names the first of the given faults, nil if there is none.
func (c *checksummer) faultError(found []fault, n int) error {
	if len(found) == 0 {
		return nil
	}
	return fmt.Errorf("%w: seed %d does not match its checksum: %s (%d of %d seeds do not)",
		ErrCorrupt, found[0].seed, c.locate(found[0].syndrome), len(found), n)
}

// seal renews the checksums of the seeds in [lo, hi), after a change to their fields.
func (l *Lattice) seal(lo, hi int) {
	l.sums.each(lo, hi, func(seed int, sum uint32) { l.seeds.crc[seed] = sum })
}

// checkIntact returns an error when a seed that a command is for does not match its checksum.
func (l *Lattice) checkIntact(method string, seed int) error {
	if err := l.sums.faultError(l.sums.faults(seed, seed+1, l.seeds.crc), l.n); err != nil {
		return fmt.Errorf("state.%s: %w", method, err)
	}
	return nil
}

// Verify recomputes all checksums. It returns an error wrapping [ErrCorrupt] that names the first seed whose fields do not
// match its checksum, the field and its bit if a single one has flipped, and how many such seeds there are.
func (l *Lattice) Verify() error {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if err := l.sums.faultError(l.faults(), l.n); err != nil {
		return fmt.Errorf("state.Verify: %w", err)
	}
	return nil
}

// Quarantine makes every seed that does not match its checksum a new, dormant one, and returns a Quarantined event for each.
// What the others are doing goes on. It is for lattices whose corruption shall not end a run; see [WithQuarantine].
func (l *Lattice) Quarantine() []Event {
	l.mu.Lock()
	defer l.unlockAndTell()
	return l.quarantine(l.faults())
}

func (l *Lattice) quarantine(found []fault) (events []Event) {
	for _, f := range found {
		l.seeds.reset(f.seed)
		delete(l.kept, f.seed)
		l.seal(f.seed, f.seed+1)
		events = append(events, Event{Kind: Quarantined, Seed: f.seed, Epoch: int(l.epoch), Reason: l.sums.locate(f.syndrome)})
	}
	if len(events) > 0 {
		l.countUsers()
	}
	l.tell(events...)
	return events
}

// scrubSpan is how many seeds a scrub checks at a time: a few dozen microseconds' work, for which commands and passes wait.
const scrubSpan = 1024

// Scrub verifies all seeds once every period, a span at a time, until the context ends. It calls found, if that is not nil,
// with an error as [Lattice.Verify] returns it whenever it meets corrupt seeds. It changes nothing; run it on a goroutine of
// its own. Without a context, or with a period that is not above 0, it returns an error at once, else nil.
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
	if err := l.sums.faultError(l.sums.faults(lo, min(lo+scrubSpan, l.n), l.seeds.crc), l.n); err != nil {
		return fmt.Errorf("state.Scrub: %w", err)
	}
	return nil
}

func checkScrub(ctx context.Context, period time.Duration) error {
	if ctx == nil || period <= 0 {
		return fmt.Errorf("state.Scrub: %w: context %v and period %v, want a context and a period above 0", ErrArgument, ctx, period)
	}
	return nil
}
