package comm

import (
	"fmt"
)

// Leg is the part of a route that sends bytes to a rank or receives bytes from it.
type Leg struct {
	Rank  int
	At    Ptr
	Bytes int
}

// Route is an exchange that ranks perform repeatedly over the same memory.
type Route interface {
	// Enqueue enqueues the exchange. When the stream has passed it, the received data has arrived
	// and the sent memory may be overwritten. All ranks must call it, for several routes in the
	// same order.
	Enqueue(s Stream) error
	// Release declares that the received data may be overwritten once the stream has reached this
	// point. It must follow every Enqueue.
	Release(s Stream) error
	// Hold declares that the route's destinations serve other purposes between exchanges. Release
	// must then precede every Enqueue, at a point where the destinations are free. All ranks must
	// call Hold before the first Release.
	Hold() error
	// Open declares that the destinations are always free when a rank enqueues, as the ranks ensure
	// by other means. Release must then not be called. All ranks must call Open before the first
	// Enqueue.
	Open()
	// Close shuts the route down, after which its memory may be freed. All ranks must call it after
	// their streams have passed the enqueued work.
	Close() error
}

// Uncapturable is a [Group] whose work cannot be captured in a CUDA graph.
type Uncapturable interface {
	Group

	// Uncaptured does nothing.
	Uncaptured()
}

// Router is implemented by groups with their own, cheaper form of routes.
type Router interface {
	// Route creates a route. All ranks must call it with matching legs: the n-th leg to a rank
	// corresponds to the n-th one from there. Routes that share a slot must use the same memory for
	// received data, and may do so only one after another.
	Route(slot int, sends, receives []Leg) (Route, error)
}

// NewRoute creates a route: the group's own if it is a [Router], otherwise a Batch of sends and
// receives. Invalid legs are errors.
func NewRoute(g Group, slot int, sends, receives []Leg) (Route, error) {
	for _, l := range append(append([]Leg{}, sends...), receives...) {
		if l.Rank < 0 || l.Rank >= g.Size() || l.Rank == g.Rank() || l.Bytes < 1 {
			return nil, fmt.Errorf("comm: route: a leg of %d bytes for rank %d: want at least 1 byte for "+
				"another of the %d ranks", l.Bytes, l.Rank, g.Size())
		}
	}

	if r, ok := g.(Router); ok {
		return r.Route(slot, sends, receives)
	}

	return batched{g, sends, receives}, nil
}

// batched is a route implemented by a Batch.
type batched struct {
	g               Group
	sends, receives []Leg
}

// Enqueue implements [Route].
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
