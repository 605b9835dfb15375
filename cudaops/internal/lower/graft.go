package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/reduce"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/op/graft"
)

func init() {
	register[*graft.BlendOp](lowerBlend, nil)
	register[*graft.ScaleOp](lowerGraftScale, linearIn(0))
	register[*graft.IsolateOp](lowerIsolate, nil)
	register[*graft.LowRankOp](lowerLowRank, nil)
	register[*graft.LowRankGradOp](lowerLowRankGrad, linearIn(3))
	register[*graft.NormOp](lowerNorm, linearIn(0))
	register[*graft.HealthOp](lowerHealth, nil)
}

// control returns one element of the controls as an array. Kernels read it from device memory, because it
// may change from run to run.
func control(controls *program.Array, row int, which graft.Control) *program.Array {
	return controls.View(row*graft.Controls+int(which), 1)
}

// multiply adds f·x for a number f on the device.
func (c *compiler) multiply(n *gorgonia.Node, x, f *program.Array) *program.Array {
	return c.map2(n, elementwise.Mul, c.Like(x), x, c.as(n, f, x.Type))
}

// lowerBlend lowers x + Forward·t. Unlike on the CPU, non-finite elements of t affect the sum even if
// Forward is 0. In both cases the step fails, since the gradient norm is not finite.
func lowerBlend(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x, t := c.as(n, in[0], in[0].Type), c.as(n, in[1], in[0].Type)
	t = c.multiply(n, t, control(in[2], n.Op().(*graft.BlendOp).Row, graft.Forward))
	return c.map2(n, elementwise.Add, c.Like(x), x, t)
}

// lowerIsolate lowers an op that returns its input unchanged, without a copy.
func lowerIsolate(_ *compiler, _ *gorgonia.Node, in []*program.Array) *program.Array {
	return in[0]
}

func lowerGraftScale(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	o := n.Op().(*graft.ScaleOp)
	return c.multiply(n, in[0], control(in[1], o.Row, o.Control))
}

// lowerLowRank lowers w + Forward·scale·b·a. It computes in float32, the type of stored weights, so that
// merging into w later gives the same result.
func lowerLowRank(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	o := n.Op().(*graft.LowRankOp)
	w, a, b := c.as(n, in[0], gpu.Float32), c.as(n, in[1], gpu.Float32), c.as(n, in[2], gpu.Float32)
	y := c.aux(n.Shape()...)
	c.matmul(n, program.Product{D: y, A: b, B: c.multiply(n, a, control(in[3], o.Row, graft.Forward)),
		Alpha: float32(o.Scale)}.Plus(w))
	return y
}

// lowerLowRankGrad lowers the gradients k·scale·bᵀ·g and k·scale·g·aᵀ with k = Backward·Learning.
func lowerLowRankGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	o := n.Op().(*graft.LowRankGradOp).Forward
	a, b, g := c.as(n, in[0], gpu.Float32), c.as(n, in[1], gpu.Float32), c.as(n, in[3], gpu.Float32)
	k := c.multiply(n, control(in[2], o.Row, graft.Backward), control(in[2], o.Row, graft.Learning))
	da, db := c.Like(a), c.Like(b)
	c.matmul(n, program.Product{D: da, A: b, B: g, TransA: true, Alpha: float32(o.Scale)})
	c.matmul(n, program.Product{D: db, A: g, B: a, TransB: true, Alpha: float32(o.Scale)})
	return packed(c.multiply(n, da, k), c.multiply(n, db, k))
}

// reduceAll reduces an array to a single number.
func (c *compiler) reduceAll(n *gorgonia.Node, r reduce.Reduction,
	x *program.Array) *program.Array {
	return c.reduceMiddle(n, r, x, 1, x.Len(), 1).View(0, 1)
}

// lowerNorm lowers sqrt(Σ x²). The result carries the loss scale of x.
func lowerNorm(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x := c.as(n, in[0], gpu.Float32)
	squares := c.map1(n, elementwise.Square, c.Like(x), x, 0)
	return c.map1(n, elementwise.Sqrt, c.aux(1), c.reduceAll(n, reduce.Sum, squares), 0)
}

// lowerHealth lowers the telemetry of the first rows of activations. The number of rows is limited
// because each of the launches takes some microseconds.
func lowerHealth(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	rows, d := min(in[0].Shape[0], graft.HealthRows), in[0].Shape[1]
	x := c.as(n, in[0].View(0, rows, d), gpu.Float32)
	y := c.aux(graft.Figures)
	put := func(figure int, f elementwise.UnaryOp, v *program.Array, p float64) {
		c.map1(n, f, y.View(figure, 1), v, p)
	}
	part := 1 / float64(x.Len())
	put(graft.Mean, elementwise.MulScalar, c.reduceAll(n, reduce.Sum, x), part)
	off := c.map2(n, elementwise.Sub, c.Like(x), x, y.View(graft.Mean, 1))
	squares := c.map1(n, elementwise.Square, c.Like(x), off, 0)
	put(graft.Variance, elementwise.MulScalar, c.reduceAll(n, reduce.Sum, squares), part)
	put(graft.Max, elementwise.Identity, c.reduceAll(n, reduce.Max, x), 0)
	turned := c.map1(n, elementwise.Neg, c.Like(x), x, 0)
	put(graft.Min, elementwise.Neg, c.reduceAll(n, reduce.Max, turned), 0)
	size := c.map1(n, elementwise.Abs, c.Like(x), x, 0)
	below := c.map1(n, elementwise.SubFrom, c.Like(x), size, graft.DeadBelow)
	dead := c.map1(n, elementwise.Step, c.Like(x), below, 0)
	put(graft.DeadRatio, elementwise.MulScalar, c.reduceAll(n, reduce.Sum, dead), part)
	return y
}
