package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/reduce"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/op"
)

func init() {
	register[*op.ScaleColumnsOp](lowerScaleColumns, nil)
	register[*op.ScaleColumnsGradOp](lowerScaleColumnsGrad, linearIn(2))
	register[*op.RowNormsOp](lowerRowNorms, nil)
	register[*op.DropoutOp](lowerDropout, linearIn(0))
}

func lowerDropout(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	o, x := n.Op().(*op.DropoutOp), c.asActivation(n, in[0])
	y := c.Like(x)
	a := elementwise.Dropout{P: o.P, Salt: o.Salt, N: x.Len(), Type: x.Type}
	addCall(c, n, &a, program.Writes(&a.Y, y), program.Reads(&a.X, x), program.Reads(&a.Key, in[1]))
	return y
}

func lowerScaleColumns(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x, f := c.asActivations(n, in[0], in[1])
	return c.map2(n, elementwise.Mul, c.Like(x), x, f, elementwise.Operand{}, rowOf(f.Len()))
}

func lowerScaleColumnsGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x, f := c.asActivations(n, in[0], in[1])
	g := c.asActivation(n, in[2])
	dx := c.map2(n, elementwise.Mul, c.Like(x), g, f, elementwise.Operand{}, rowOf(f.Len()))
	products := c.map2(n, elementwise.Mul, c.Like(x), g, x)
	df := c.reduceMiddle(n, reduce.Sum, products, 1, x.Shape[0], x.Shape[1])
	return packed(dx, df.View(0, f.Len()))
}

// lowerRowNorms lowers the norms of the rows of w + s·b·a in float32:
//
//	y[o]² = ‖w[o]‖² + Σ_r b[o, r]·(2s·(w·aᵀ)[o, r] + s²·(b·a·aᵀ)[o, r])
func lowerRowNorms(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	w, a, b := c.as(n, in[0], gpu.Float32), c.as(n, in[1], gpu.Float32), c.as(n, in[2], gpu.Float32)
	out, columns, rank := w.Shape[0], w.Shape[1], a.Shape[0]
	s := float32(n.Op().(*op.RowNormsOp).Scale)

	squares := c.map1(n, elementwise.Square, c.Like(w), w, 0)
	sum := c.reduceMiddle(n, reduce.Sum, squares, out, columns, 1)

	product, gram, cross := c.aux(out, rank), c.aux(rank, rank), c.aux(out, rank)
	c.matmul(n, program.Product{D: product, A: w, B: a, TransB: true, Alpha: 2 * s})
	c.matmul(n, program.Product{D: gram, A: a, B: a, TransB: true, Alpha: s * s})
	c.matmul(n, program.Product{D: cross, A: b, B: gram}.Plus(product))
	cross = c.map2(n, elementwise.Mul, c.Like(b), b, cross)
	more := c.reduceMiddle(n, reduce.Sum, cross, out, rank, 1)

	all := c.map2(n, elementwise.Add, c.aux(out), sum.View(0, out), more.View(0, out))
	return c.map1(n, elementwise.Sqrt, c.aux(out), all, 0)
}
