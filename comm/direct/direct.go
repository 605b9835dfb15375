// Package direct has the GPUs of one host write into each other's memory. Their copy engines do so,
// beside which kernels run undisturbed; NCCL's kernels would take multiprocessors from them.
//
// [New] makes of a group one whose routes ([comm.Route]) are such copies. Ranks tell each other by
// words in memory how far they are. A stream waits for such a word without a kernel, also in what is
// captured. A word says that something has arrived, or that its place is free. Whoever waits for it
// sets it back, so that what is captured can be replayed.
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

// Device is the GPU of this process.
type Device interface {
	// Do runs f on a thread on which the GPU's context is current.
	Do(f func() error) error
}

// group is one whose routes are copies into other ranks' memory.
type group struct {
	comm.Group
	world  *comm.World
	device Device
	api    memory

	words  comm.Ptr   // of this rank
	theirs []comm.Ptr // words of each rank, as this process reaches them

	mu       sync.Mutex
	imported map[imported]*mapping // allocations of other ranks
	stop     chan struct{}         // closed by Close
	aborted  sync.Once
	closed   sync.Once
}

// imported is an allocation of another rank.
type imported struct {
	rank   int
	handle string
}

// mapping is where one lies here.
type mapping struct {
	base comm.Ptr
	uses int
}

// slots is how many slots routes may have, and so the words of a rank.
const slots = 256

// The words of a slot and a rank.
const (
	arrived = iota // what that rank has sent to this one is there
	free           // that rank is done with what this one has sent last
	wordKinds
)

// word is where one lies, of a rank's.
func (g *group) word(of comm.Ptr, slot, rank, kind int) comm.Ptr {
	return of + comm.Ptr(4*((slot*g.Size()+rank)*wordKinds+kind))
}

func (g *group) wordCount() int { return slots * g.Size() * wordKinds }

// New returns the group with routes of its own where all ranks are on one host and their GPUs reach
// each other's memory. Otherwise it returns the group as it is, and why. All ranks call it, and get
// the same.
func New(ctx context.Context, w *comm.World, d Device, of comm.Group) (g comm.Group, why error,
	err error) {
	if ctx == nil || w == nil || d == nil || of == nil {
		return nil, nil, errors.New("direct: New: the context, the world, the device or the group " +
			"is nil")
	}
	if err := w.Err(); err != nil {
		return nil, nil, err
	}
	api, why := load()
	return newGroup(ctx, w, d, of, api, why)
}

func newGroup(ctx context.Context, w *comm.World, d Device, of comm.Group, api memory,
	why error) (comm.Group, error, error) {
	g := &group{Group: of, world: w, device: d, api: api,
		imported: map[imported]*mapping{}, stop: make(chan struct{})}
	if why == nil && w.Place().LocalSize != w.Size() {
		why = errors.New("direct: the ranks are on several hosts")
	}
	var own offer
	if why == nil {
		own, why = g.open()
	}
	all, err := swap(ctx, w, "direct", said{own, text(why)})
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
	if all, err = swap(ctx, w, "direct", said{Err: text(why)}); err != nil {
		return nil, nil, errors.Join(err, g.shut())
	}
	if why = firstOf(all); why != nil {
		return of, why, g.shut()
	}
	return g, nil, nil
}

// said is what a rank says when routes are made.
type said struct {
	Offer offer
	Err   string
}

// offer is memory as other processes find it.
type offer struct {
	Handle string // of the allocation
	Offset int
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func firstOf(all []said) error {
	for r, s := range all {
		if s.Err != "" {
			return fmt.Errorf("rank %d: %s", r, s.Err)
		}
	}
	return nil
}

// swap hands a value to all ranks, and returns those of all.
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

// open takes the words, all places free, and offers them.
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

// offered is memory of this rank as others find it.
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

// reach is where memory that a rank offers lies in this process, until leave is called as often.
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

// leave gives up what reach has found.
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

// shut gives back what open and reach have taken.
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

// Abort ends all work. Streams that wait for a word go on: what they compute is of no use, and Err
// says so.
func (g *group) Abort(cause error) {
	g.Group.Abort(cause)
	g.aborted.Do(func() { go g.letPass() })
}

// letPass sets all words, again and again, until the group is closed: each lets a stream pass but
// one place where it waits.
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
		if err != nil { // the context is lost, and nothing waits any more
			return
		}
	}
}

// Close frees the group. The other ranks' streams have passed all that reaches this one.
func (g *group) Close() error {
	g.closed.Do(func() { close(g.stop) })
	return errors.Join(g.shut(), g.Group.Close())
}
