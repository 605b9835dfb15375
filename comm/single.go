package comm

import "errors"

// ErrZero is the error of a group that nobody has made, and of a batch without a function.
var ErrZero = errors.New("comm: the group is its zero value, want one that New returns, or the " +
	"function is nil")

// Singles are a group's collectives one by one, each a batch of its own. Implementations of [Group]
// embed it.
type Singles struct {
	batch func(f func(c Collectives) error) error
}

// NewSingles returns those of a group with that method Batch.
func NewSingles(batch func(f func(c Collectives) error) error) Singles { return Singles{batch} }

func (g Singles) one(f func(c Collectives) error) error {
	if g.batch == nil {
		return ErrZero
	}
	return g.batch(f)
}

// AllReduce is described at [Collectives], as are those below.
func (g Singles) AllReduce(dst, src Ptr, count int, t Type, op Op,
	s Stream) error {
	return g.one(func(c Collectives) error { return c.AllReduce(dst, src, count, t, op, s) })
}

// ReduceScatter reduces to parts.
func (g Singles) ReduceScatter(dst, src Ptr, count int, t Type, op Op,
	s Stream) error {
	return g.one(func(c Collectives) error {
		return c.ReduceScatter(dst, src, count, t, op, s)
	})
}

// AllGather copies everybody's part to all.
func (g Singles) AllGather(dst, src Ptr, count int, t Type, s Stream) error {
	return g.one(func(c Collectives) error { return c.AllGather(dst, src, count, t, s) })
}

// Broadcast copies one rank's buffer to all.
func (g Singles) Broadcast(buffer Ptr, count int, t Type, root int, s Stream) error {
	return g.one(func(c Collectives) error { return c.Broadcast(buffer, count, t, root, s) })
}

// Send hands elements to a rank.
func (g Singles) Send(src Ptr, count int, t Type, to int, s Stream) error {
	return g.one(func(c Collectives) error { return c.Send(src, count, t, to, s) })
}

// Recv takes elements from a rank.
func (g Singles) Recv(dst Ptr, count int, t Type, from int, s Stream) error {
	return g.one(func(c Collectives) error { return c.Recv(dst, count, t, from, s) })
}
