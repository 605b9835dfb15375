package loopback

import "github.com/kasmina-go/kasmina/comm"

// AllReduce is described at [comm.Collectives], as are those below.
func (g *Group) AllReduce(dst, src comm.Ptr, count int, t comm.Type, op comm.Op,
	s comm.Stream) error {
	return g.Batch(func(c comm.Collectives) error { return c.AllReduce(dst, src, count, t, op, s) })
}

// ReduceScatter reduces to parts.
func (g *Group) ReduceScatter(dst, src comm.Ptr, count int, t comm.Type, op comm.Op,
	s comm.Stream) error {
	return g.Batch(func(c comm.Collectives) error {
		return c.ReduceScatter(dst, src, count, t, op, s)
	})
}

// AllGather copies everybody's part to all.
func (g *Group) AllGather(dst, src comm.Ptr, count int, t comm.Type, s comm.Stream) error {
	return g.Batch(func(c comm.Collectives) error { return c.AllGather(dst, src, count, t, s) })
}

// Broadcast copies one rank's buffer to all.
func (g *Group) Broadcast(buffer comm.Ptr, count int, t comm.Type, root int, s comm.Stream) error {
	return g.Batch(func(c comm.Collectives) error { return c.Broadcast(buffer, count, t, root, s) })
}

// Send hands elements to a rank.
func (g *Group) Send(src comm.Ptr, count int, t comm.Type, to int, s comm.Stream) error {
	return g.Batch(func(c comm.Collectives) error { return c.Send(src, count, t, to, s) })
}

// Recv takes elements from a rank.
func (g *Group) Recv(dst comm.Ptr, count int, t comm.Type, from int, s comm.Stream) error {
	return g.Batch(func(c comm.Collectives) error { return c.Recv(dst, count, t, from, s) })
}
