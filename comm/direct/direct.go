// Package direct lets the GPUs of one host write into each other's memory. It uses the GPUs' copy
// engines, which do not disturb running kernels, whereas NCCL's kernels would compete with them for
// multiprocessors.
//
// [New] returns a group with routes ([comm.Route]) that consist of such copies. Ranks synchronize
// through words in memory: a word signals that data has arrived or that its destination is free. A
// stream waits for a word without a kernel, even in captured work, and the waiting side resets the
// word, so that captured work can be replayed.
package direct

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kasmina-go/kasmina/comm"
)

// Device provides access to the GPU of this process.
type Device interface {
	// Do runs f on a thread with the GPU's context current.
	Do(f func() error) error
}

// group is a group with routes that copy into the memory of other ranks.
type group struct {
	comm.Group
	world  *comm.World
	device Device
	api    memory

	words  comm.Ptr   // words of this rank
	theirs []comm.Ptr // words of each rank, at their addresses in this process

	mu       sync.Mutex
	imported map[imported]*mapping // allocations of other ranks that are mapped here
	stop     chan struct{}         // closed by Close
	aborted  sync.Once
	closed   sync.Once
}

// imported identifies an allocation of another rank.
type imported struct {
	rank   int
	handle string
}

// mapping is the address of an imported allocation in this process, with the number of its users.
type mapping struct {
	base comm.Ptr
	uses int
}

// slots is the maximum number of slots for routes. It determines the number of words of a rank.
const slots = 256

// Words of a slot and another rank.
const (
	arrived = iota // the data sent by that rank has arrived here
	free           // that rank no longer needs the data that this rank sent last
	wordKinds
)

// word returns the address of a word within the words of a rank.
func (g *group) word(of comm.Ptr, slot, rank, kind int) comm.Ptr {
	return of + comm.Ptr(4*((slot*g.Size()+rank)*wordKinds+kind))
}

// wordCount returns the number of words of a rank.
func (g *group) wordCount() int { return slots * g.Size() * wordKinds }

// New returns a group with direct routes on top of the group base, if all ranks run on one host and
// their GPUs can access each other's memory. Otherwise it returns base itself and the reason. All
// ranks must call New, and all get the same kind of group.
func New(ctx context.Context, w *comm.World, d Device, base comm.Group) (g comm.Group, why error,
	err error) {
	if err := w.Err(); err != nil {
		return nil, nil, err
	}
	api, why := load()
	return newGroup(ctx, w, d, base, api, why)
}

// newGroup implements New. why is nil if this rank can provide direct routes.
func newGroup(ctx context.Context, w *comm.World, d Device, base comm.Group, api memory,
	why error) (comm.Group, error, error) {
	g := &group{Group: base, world: w, device: d, api: api,
		imported: map[imported]*mapping{}, stop: make(chan struct{})}
	if why == nil && w.Place().LocalSize != w.Size() {
		why = errors.New("direct: the ranks are on several hosts")
	}

	var own offer
	if why == nil {
		own, why = g.open()
	}

	all, err := swap(ctx, w, "direct", vote{own, text(why)})
	if err != nil {
		return nil, nil, errors.Join(err, g.shut())
	}

	if why = firstOf(all); why == nil {
		for r, s := range all {
			at := g.words
			if r != g.Rank() && why == nil {
				at, why = g.reach(r, s.Offer)
			}
			g.theirs = append(g.theirs, at)
		}
	}

	if all, err = swap(ctx, w, "direct", vote{Err: text(why)}); err != nil {
		return nil, nil, errors.Join(err, g.shut())
	}

	if why = firstOf(all); why != nil {
		return base, why, g.shut()
	}

	return g, nil, nil
}

// vote is a rank's contribution to the agreement on direct routes.
type vote struct {
	Offer offer
	Err   string
}

// offer describes memory in a form that other processes can map.
type offer struct {
	Handle string // handle of the allocation
	Offset int
}

// text returns the text of an error, or "".
func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// firstOf returns the first error among the contributions of the ranks.
func firstOf(all []vote) error {
	for r, s := range all {
		if s.Err != "" {
			return fmt.Errorf("rank %d: %s", r, s.Err)
		}
	}
	return nil
}

// swap sends a value to all ranks and returns the values of all ranks.
func swap[T any](ctx context.Context, w *comm.World, key string, own T) ([]T, error) {
	b, err := json.Marshal(own)
	if err != nil {
		return nil, err
	}

	texts, err := w.Gather(ctx, key, b)
	if err != nil {
		return nil, err
	}

	all := make([]T, len(texts))
	for r, t := range texts {
		if err := json.Unmarshal(t, &all[r]); err != nil {
			return nil, fmt.Errorf("direct: rank %d: %w", r, err)
		}
	}

	return all, nil
}

// open allocates the synchronization words, marks all destinations as free, and offers the words to
// the other ranks.
func (g *group) open() (o offer, err error) {
	err = g.device.Do(func() error {
		var err error
		if g.words, err = g.api.Alloc(4 * g.wordCount()); err != nil {
			return err
		}
		start := make([]uint32, g.wordCount())
		for i := free; i < len(start); i += wordKinds {
			start[i] = 1
		}
		return g.api.Fill(g.words, start)
	})

	if err != nil {
		return o, err
	}

	return g.offered(g.words)
}

// offered returns an offer of memory of this rank.
func (g *group) offered(p comm.Ptr) (o offer, err error) {
	err = g.device.Do(func() error {
		base, err := g.api.Allocation(p)
		if err != nil {
			return err
		}
		handle, err := g.api.Export(base)
		o = offer{handle, int(p - base)}
		return err
	})
	return o, err
}

// reach returns the address in this process of memory offered by a rank. Each call must be matched
// by a call of leave.
func (g *group) reach(rank int, o offer) (p comm.Ptr, err error) {
	err = g.device.Do(func() error {
		g.mu.Lock()
		defer g.mu.Unlock()

		m := g.imported[imported{rank, o.Handle}]
		if m == nil {
			base, err := g.api.Import(o.Handle)
			if err != nil {
				return err
			}
			m = &mapping{base: base}
			g.imported[imported{rank, o.Handle}] = m
		}

		m.uses++
		p = m.base + comm.Ptr(o.Offset)
		return nil
	})

	return p, err
}

// leave releases the result of reach.
func (g *group) leave(rank int, o offer) error {
	return g.device.Do(func() error {
		g.mu.Lock()
		defer g.mu.Unlock()

		m := g.imported[imported{rank, o.Handle}]
		if m == nil {
			return nil
		}
		if m.uses--; m.uses > 0 {
			return nil
		}
		delete(g.imported, imported{rank, o.Handle})
		return g.api.Forget(m.base)
	})
}

// shut releases everything that open and reach have acquired.
func (g *group) shut() error {
	return g.device.Do(func() error {
		g.mu.Lock()
		defer g.mu.Unlock()

		var errs []error
		for key, m := range g.imported {
			errs = append(errs, g.api.Forget(m.base))
			delete(g.imported, key)
		}

		if g.words != 0 {
			errs = append(errs, g.api.Free(g.words))
			g.words = 0
		}

		return errors.Join(errs...)
	})
}

// Abort terminates all work. Streams waiting for a word continue with meaningless results, and Err
// returns the cause.
func (g *group) Abort(cause error) {
	g.Group.Abort(cause)
	g.aborted.Do(func() { go g.letPass() })
}

// letPass sets all words repeatedly until the group is closed. Each round lets every stream pass
// one wait.
func (g *group) letPass() {
	ones := make([]uint32, g.wordCount())
	for i := range ones {
		ones[i] = 1
	}

	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-g.stop:
			return
		case <-tick.C:
		}
		err := g.device.Do(func() error {
			g.mu.Lock()
			defer g.mu.Unlock()

			if g.words == 0 {
				return nil
			}
			return g.api.Fill(g.words, ones)
		})
		if err != nil { // the context is lost, so no stream is waiting any longer
			return
		}
	}
}

// Close frees the group. The streams of other ranks must have passed all work that accesses this
// rank.
func (g *group) Close() error {
	g.closed.Do(func() { close(g.stop) })
	return errors.Join(g.shut(), g.Group.Close())
}
