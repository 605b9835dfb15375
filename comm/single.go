package comm

// Singles implements the collectives of a group, each as its own batch. Implementations of [Group]
// embed it.
type Singles struct {
	batch func(f func(c Collectives) error) error
}

// NewSingles returns the collectives of a group, given the group's method Batch.
func NewSingles(batch func(f func(c Collectives) error) error) Singles { return Singles{batch} }

// AllReduce implements [Collectives].
func (g Singles) AllReduce(dst, src Ptr, count int, t Type, op Op,
	s Stream) error {
	return g.batch(func(c Collectives) error { return c.AllReduce(dst, src, count, t, op, s) })
}

// ReduceScatter implements [Collectives].
func (g Singles) ReduceScatter(dst, src Ptr, count int, t Type, op Op,
	s Stream) error {
	return g.batch(func(c Collectives) error {
		return c.ReduceScatter(dst, src, count, t, op, s)
	})
}

// AllGather implements [Collectives].
func (g Singles) AllGather(dst, src Ptr, count int, t Type, s Stream) error {
	return g.batch(func(c Collectives) error { return c.AllGather(dst, src, count, t, s) })
}

// Broadcast implements [Collectives].
func (g Singles) Broadcast(buffer Ptr, count int, t Type, root int, s Stream) error {
	return g.batch(func(c Collectives) error { return c.Broadcast(buffer, count, t, root, s) })
}

// Send implements [Collectives].
func (g Singles) Send(src Ptr, count int, t Type, to int, s Stream) error {
	return g.batch(func(c Collectives) error { return c.Send(src, count, t, to, s) })
}

// Recv implements [Collectives].
func (g Singles) Recv(dst Ptr, count int, t Type, from int, s Stream) error {
	return g.batch(func(c Collectives) error { return c.Recv(dst, count, t, from, s) })
}
