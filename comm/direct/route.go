package direct

import (
	"context"
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/comm"
)

// route implements comm.Route by copying into other ranks' memory.
type route struct {
	g    *group
	slot int
	to   []copies // copies by rank, starting with the next rank, so that not all ranks write to the same one
	from []int    // ranks that send data to this one
	used []used
	held bool // Hold was called: destinations are free only between Release and the next Enqueue
	open bool // Open was called: destinations are always free
}

// used is another rank's memory, mapped by a route.
type used struct {
	rank int
	at   offer
}

// copies are the copies to one rank.
type copies struct {
	rank   int
	pieces []piece
}

// piece is a contiguous range of memory copied to another rank in one operation.
type piece struct {
	to, from comm.Ptr
	bytes    int
}

// place is the destination of data from another rank.
type place struct {
	From, Bytes int
	At          offer
}

var _ comm.Router = (*group)(nil)

// Route implements [comm.Router].
func (g *group) Route(slot int, sends, receives []comm.Leg) (comm.Route, error) {
	if slot < 0 || slot >= slots {
		return nil, fmt.Errorf("direct: slot %d of a route: want 0 to %d", slot, slots-1)
	}

	var own []place
	for _, l := range receives {
		at, err := g.offered(l.At)
		if err != nil {
			return nil, g.world.Blame(err)
		}
		own = append(own, place{l.Rank, l.Bytes, at})
	}

	all, err := swap(context.Background(), g.world, "route", own)
	if err != nil {
		return nil, err
	}

	r := &route{g: g, slot: slot}
	for i := 1; i < g.Size(); i++ {
		rank := (g.Rank() + i) % g.Size()
		c, err := r.copiesTo(rank, sends, all[rank])
		if err != nil {
			return nil, g.world.Blame(err)
		}
		if len(c.pieces) > 0 {
			r.to = append(r.to, c)
		}
		for _, l := range receives {
			if l.Rank == rank {
				r.from = append(r.from, rank)
				break
			}
		}
	}

	return r, nil
}

// copiesTo returns the copies of sends to a rank, given the destinations that it offers.
func (r *route) copiesTo(rank int, sends []comm.Leg, places []place) (copies, error) {
	g, c := r.g, copies{rank: rank}
	var mine []place
	for _, p := range places {
		if p.From == g.Rank() {
			mine = append(mine, p)
		}
	}

	for _, l := range sends {
		if l.Rank != rank {
			continue
		}
		n := len(c.pieces)
		if n >= len(mine) || mine[n].Bytes != l.Bytes {
			return c, fmt.Errorf("direct: rank %d does not expect the %d bytes of leg %d from rank %d",
				rank, l.Bytes, n, g.Rank())
		}
		at, err := g.reach(rank, mine[n].At)
		if err != nil {
			return c, err
		}
		r.used = append(r.used, used{rank, mine[n].At})
		c.pieces = append(c.pieces, piece{at, l.At, l.Bytes})
	}

	if len(c.pieces) != len(mine) {
		return c, fmt.Errorf("direct: rank %d waits for %d legs from rank %d, which has %d", rank,
			len(mine), g.Rank(), len(c.pieces))
	}

	return c, nil
}

// Enqueue enqueues the copies, and waits for the data of the other ranks.
func (r *route) Enqueue(s comm.Stream) error {
	g := r.g
	return r.do(func() error {
		for _, c := range r.to {
			if !r.open {
				if err := g.await(g.word(g.words, r.slot, c.rank, free), s); err != nil {
					return err
				}
			}
			for _, p := range c.pieces {
				if err := g.api.Copy(p.to, p.from, p.bytes, s); err != nil {
					return err
				}
			}
			if err := g.api.Write(g.word(g.theirs[c.rank], r.slot, g.Rank(), arrived), 1,
				s); err != nil {
				return err
			}
		}

		for _, rank := range r.from {
			if err := g.await(g.word(g.words, r.slot, rank, arrived), s); err != nil {
				return err
			}
		}

		return nil
	})
}

// await makes a stream wait for a word and reset it.
func (g *group) await(word comm.Ptr, s comm.Stream) error {
	if err := g.api.Wait(word, 1, s); err != nil {
		return err
	}
	return g.api.Write(word, 0, s)
}

// Release lets the other ranks overwrite the received data.
func (r *route) Release(s comm.Stream) error {
	g := r.g
	return r.do(func() error {
		for _, rank := range r.from {
			if err := g.api.Write(g.word(g.theirs[rank], r.slot, g.Rank(), free), 1, s); err != nil {
				return err
			}
		}
		return nil
	})
}

// do runs f with the GPU's context current, unless the group has failed.
func (r *route) do(f func() error) error {
	if err := r.g.Err(); err != nil {
		return err
	}
	return r.g.device.Do(f)
}

// Open declares that the destinations are always free.
func (r *route) Open() { r.open = true }

// Hold declares that the destinations are free only between Release and Enqueue.
func (r *route) Hold() error {
	r.held = true
	if err := r.setFree(0); err != nil {
		return r.g.world.Blame(err)
	}
	_, err := swap(context.Background(), r.g.world, "route", struct{}{})
	return err
}

// setFree sets the words that tell this rank whether its destinations are free. No stream may be
// waiting for them.
func (r *route) setFree(v uint32) error {
	g := r.g
	return r.do(func() error {
		for _, c := range r.to {
			if err := g.api.Fill(g.word(g.words, r.slot, c.rank, free), []uint32{v}); err != nil {
				return err
			}
		}
		return nil
	})
}

// Close unmaps the memory of other ranks and returns when all ranks have done so.
func (r *route) Close() error {
	var errs []error
	if r.held && r.g.Err() == nil { // the next route of the slot expects free destinations
		errs = append(errs, r.setFree(1))
	}

	for _, u := range r.used {
		errs = append(errs, r.g.leave(u.rank, u.at))
	}

	r.used = nil
	if r.g.world.Err() == nil { // after a failure, other ranks may be gone
		_, err := swap(context.Background(), r.g.world, "route", struct{}{})
		if r.g.world.Err() == nil {
			errs = append(errs, err)
		}
	}

	return errors.Join(errs...)
}
