package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/reduce"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/op/graft"
)

// all reduces an array to a number.
func (c *compiler) all(n *gorgonia.Node, r reduce.Reduction,
	x *program.Array) *program.Array {
	return c.reduceMiddle(n, r, x, 1, x.Len(), 1).View(0, 1)
}

// lowerNorm lowers sqrt(Σ x²). A loss scale on x is one on the result too.
func lowerNorm(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	x := c.as(n, in[0], gpu.Float32)
	squares := c.map1(n, elementwise.Square, c.like(x), x, 0)
	return c.map1(n, elementwise.Sqrt, c.aux(1), c.all(n, reduce.Sum, squares), 0), nil
}

// lowerHealth lowers the figures of the first rows of activations. They are few: each of these
// launches takes some microseconds.
func lowerHealth(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	rows, d := min(in[0].Shape[0], graft.HealthRows), in[0].Shape[1]
	x := c.as(n, in[0].View(0, rows, d), gpu.Float32)
	y := c.aux(graft.Figures)
	put := func(figure int, f elementwise.UnaryOp, v *program.Array, p float64) {
		c.map1(n, f, y.View(figure, 1), v, p)
	}
	part := 1 / float64(x.Len())
	put(graft.Mean, elementwise.MulScalar, c.all(n, reduce.Sum, x), part)
	off := c.map2(n, elementwise.Sub, c.like(x), repeated{Array: x},
		repeated{y.View(graft.Mean, 1), spread{period: 1}})
	squares := c.map1(n, elementwise.Square, c.like(x), off, 0)
	put(graft.Variance, elementwise.MulScalar, c.all(n, reduce.Sum, squares), part)
	put(graft.Max, elementwise.Identity, c.all(n, reduce.Max, x), 0)
	turned := c.map1(n, elementwise.Neg, c.like(x), x, 0)
	put(graft.Min, elementwise.Neg, c.all(n, reduce.Max, turned), 0)
	size := c.map1(n, elementwise.Abs, c.like(x), x, 0)
	below := c.map1(n, elementwise.SubFrom, c.like(x), size, graft.DeadBelow)
	dead := c.map1(n, elementwise.Step, c.like(x), below, 0)
	put(graft.DeadRatio, elementwise.MulScalar, c.all(n, reduce.Sum, dead), part)
	return y, nil
}
