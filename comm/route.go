package comm

import (
	"errors"
	"fmt"
)

// Leg is a part of a route: bytes that go to a rank, or come from it.
type Leg struct {
	Rank  int
	At    Ptr
	Bytes int
}

// Route is an exchange that ranks make again and again, over the same memory.
type Route interface {
	// Enqueue makes the exchange: when the stream has passed it, what comes is there, and what has
	// left may be overwritten. All ranks call it, and for several routes in the same order.
	Enqueue(s Stream) error
	// Release says that what came may be overwritten once the stream has come to this point. It
	// follows every Enqueue.
	Release(s Stream) error
	// Hold is for a route whose places serve for something else between exchanges: Release comes
	// ahead of every Enqueue then, where they are free. All ranks call it ahead of the first.
	Hold() error
	// Open is for a route whose places are free whenever a rank enqueues, which the ranks know of
	// each other without it: nobody calls Release then. All ranks call it ahead of the first
	// Enqueue.
	Open()
	// Close ends the route, whose memory may be given back then. All ranks call it, when their
	// streams have passed what was enqueued.
	Close() error
}

// Router is a group that has routes of its own, which take less than a Batch.
type Router interface {
	// Route makes a route. All ranks call it with what fits: the n-th leg to a rank meets the n-th
	// one from there. Routes of one slot use the same memory for what comes, one after the other.
	Route(slot int, sends, receives []Leg) (Route, error)
}

// NewRoute makes a route of a group: its own, or a Batch of sends and receives. Without a group, and
// for legs that it cannot have, it is an error.
func NewRoute(g Group, slot int, sends, receives []Leg) (Route, error) {
	if g == nil {
		return nil, errors.New("comm: NewRoute: the group is nil")
	}
	for _, l := range append(append([]Leg{}, sends...), receives...) {
		if l.Rank < 0 || l.Rank >= g.Size() || l.Rank == g.Rank() || l.Bytes < 1 {
			return nil, fmt.Errorf("comm: a route with %d bytes for rank %d: want some for "+
				"another of %d ranks", l.Bytes, l.Rank, g.Size())
		}
	}
	if r, ok := g.(Router); ok {
		return r.Route(slot, sends, receives)
	}
	return batched{g, sends, receives}, nil
}

// batched is a route as a Batch.
type batched struct {
	g               Group
	sends, receives []Leg
}

func (b batched) Enqueue(s Stream) error {
	return b.g.Batch(func(c Collectives) error {
		for _, l := range b.sends {
			if err := c.Send(l.At, l.Bytes, Uint8, l.Rank, s); err != nil {
				return err
			}
		}
		for _, l := range b.receives {
			if err := c.Recv(l.At, l.Bytes, Uint8, l.Rank, s); err != nil {
				return err
			}
		}
		return nil
	})
}

func (b batched) Release(Stream) error { return nil }
func (b batched) Hold() error          { return nil }
func (b batched) Open()                {}
func (b batched) Close() error         { return nil }
