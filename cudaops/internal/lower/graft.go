package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/op/graft"
)

// control is a number of the controls, which a kernel reads where they lie: it may be another one
// in every run.
func control(controls *program.Array, row int, which graft.Control) *program.Array {
	return controls.View(row*graft.Controls+int(which), 1)
}

// times is f·x for a number f on the device.
func (c *compiler) times(n *gorgonia.Node, x, f *program.Array) *program.Array {
	number := repeated{c.as(n, f, x.Type), spread{period: 1}}
	return c.map2(n, elementwise.Mul, c.like(x), repeated{Array: x}, number)
}

// lowerBlend lowers x + Forward·t. What is not finite in t shows in the sum, unlike on a CPU, also
// where Forward is 0. The step fails either way, since the gradients' norm is not finite.
func lowerBlend(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	x, t := c.as(n, in[0], in[0].Type), c.as(n, in[1], in[0].Type)
	t = c.times(n, t, control(in[2], n.Op().(*graft.BlendOp).Row, graft.Forward))
	return c.map2(n, elementwise.Add, c.like(x), repeated{Array: x}, repeated{Array: t}), nil
}

// lowerIsolate lowers what passes on its input: the same memory.
func lowerIsolate(_ *compiler, _ *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	return in[0], nil
}

func lowerGraftScale(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	o := n.Op().(*graft.ScaleOp)
	return c.times(n, in[0], control(in[1], o.Row, o.Control)), nil
}

// lowerLowRank lowers w + Forward·scale·b·a in float32, as weights are kept: what is merged into w
// later is the same.
func lowerLowRank(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	o := n.Op().(*graft.LowRankOp)
	w, a, b := c.as(n, in[0], gpu.Float32), c.as(n, in[1], gpu.Float32), c.as(n, in[2], gpu.Float32)
	y := c.aux(n.Shape()...)
	c.matmul(n, program.Product{D: y, A: b, B: c.times(n, a, control(in[3], o.Row, graft.Forward)),
		Alpha: float32(o.Scale)}.Plus(w))
	return y, nil
}

// lowerLowRankGrad lowers k·scale·bᵀ·g and k·scale·g·aᵀ, of which k = Backward·Learning.
func lowerLowRankGrad(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	o := n.Op().(*graft.LowRankGradOp).Forward
	a, b, g := c.as(n, in[0], gpu.Float32), c.as(n, in[1], gpu.Float32), c.as(n, in[3], gpu.Float32)
	k := c.times(n, control(in[2], o.Row, graft.Backward), control(in[2], o.Row, graft.Learning))
	da, db := c.like(a), c.like(b)
	c.matmul(n, program.Product{D: da, A: b, B: g, TransA: true, Alpha: float32(o.Scale)})
	c.matmul(n, program.Product{D: db, A: g, B: a, TransB: true, Alpha: float32(o.Scale)})
	return packed(c.times(n, da, k), c.times(n, db, k)), nil
}

// grownWeight lowers a weight with what seeds have grown on it ahead of its turn. So products which
// take several weights at once find it.
func (c *compiler) grownWeight(n *gorgonia.Node) error {
	if !isOp[*graft.LowRankOp](n) {
		return nil
	}
	for _, child := range graph.Children(n) {
		if c.there(child) == nil {
			return nil
		}
	}
	return c.lower(n)
}
