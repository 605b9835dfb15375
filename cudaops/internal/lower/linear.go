package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/decode"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/embedding"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/reduce"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/op"
)

func init() {
	register[*op.EmbeddingOp](lowerEmbedding, nil)
	register[*op.EmbeddingGradOp](lowerEmbeddingGrad, linearIn(1))
	register[*op.BiasOp](lowerBias, nil)
	register[*op.BiasGradOp](lowerBiasGrad, linearIn(0))
	register[*op.LinearOp](lowerLinear, linearInEach)
	register[*op.LinearGradOp](lowerLinearGrad, linearIn(2))
	register[*op.LinearInputGradOp](lowerLinearInputGrad, linearIn(0))
}

// newProduct returns a call that computes a matrix product for a node.
func (c *compiler) newProduct(n *gorgonia.Node, p program.Product) *program.Call {
	return c.named(n, p.Call())
}

// matmul adds a matrix product.
func (c *compiler) matmul(n *gorgonia.Node, p program.Product) { c.Add(c.newProduct(n, p)) }

// linear adds y = x·wᵀ for activations, plus the matrix add if it is not nil.
func (c *compiler) linear(n *gorgonia.Node, y, x, w, add *program.Array) {
	if x.Shape[0] > 1 {
		c.matmul(n, c.weighted(n, y, x, w, false).Plus(add))
		return
	}
	w = c.widened(n, w)
	a := decode.Product{Columns: w.Shape[0], D: w.Shape[1], Type: x.Type}
	a.Steady = w.Resident && len(c.Calls) > 0
	addCall(c, n, &a, program.Writes(&a.Y, y), program.Reads(&a.X, x), program.Reads(&a.W, w),
		program.Reads(&a.C, add)).FLOPs = 2 * float64(w.Len())
}

func lowerLinear(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	if n.Op().(*op.LinearOp).Frozen {
		return lowerFrozenLinear(c, n, in)
	}
	if c.fuseProjections(n) {
		return c.Values[n]
	}
	x, w := c.asActivations(n, in[0], in[1])
	y := c.NewArray(x.Type, n.Shape()...)
	_, add := c.addend(n, y)
	c.linear(n, y, x, w, add)
	return y
}

func lowerLinearGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x, w := c.asActivations(n, in[0], in[1])
	g := c.asActivation(n, in[2])
	dx, dw := c.Like(x), c.weightGradient(w.Shape, c.partOf(n, x.Len()))
	_, add := c.addend(c.partOf(n, 0), dx)
	c.matmul(n, c.weighted(n, dx, g, w, true).Plus(add))
	c.matmul(n, program.Product{D: dw, A: g, B: x, TransA: true})
	return packed(dx, dw)
}

func lowerLinearInputGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	if g, ok := c.saved[n.Op().(*op.LinearInputGradOp).Forward().Op()].(*frozenGroup); ok {
		return c.lowerFrozenGrad(n, g, in[0])
	}

	g, w := c.asActivations(n, in[0], in[1])
	dx := c.NewArray(g.Type, n.Shape()...)
	c.matmul(n, c.weighted(n, dx, g, w, true))
	return dx
}

func lowerBias(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x, b := c.asActivations(n, in[0], in[1])
	return c.map2(n, elementwise.Add, c.Like(x), x, b, elementwise.Operand{}, rowOf(b.Len()))
}

func lowerBiasGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	g := c.asActivation(n, in[0])
	return c.reduceMiddle(n, reduce.Sum, g, 1, g.Shape[0], g.Shape[1]).View(0, n.Shape()...)
}

func lowerEmbedding(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	ids, table := in[0], c.asActivation(n, in[1])
	c.constrain(n, ids, program.IDRange{Argument: "ids", Vocab: table.Shape[0]})
	y := c.NewArray(table.Type, n.Shape()...)
	a := embedding.Forward{Rows: y.Shape[0], Vocab: table.Shape[0], D: table.Shape[1], Type: y.Type,
		TableType: table.Type}
	addCall(c, n, &a, program.Reads(&a.IDs, ids), program.Reads(&a.Table, table),
		program.Writes(&a.Y, y))
	return y
}

// lowerEmbeddingGrad lowers the gradient of an embedding table. For tied embeddings it accumulates into
// the gradient of the output layer.
func lowerEmbeddingGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	g, sum := c.asActivation(n, in[1]), c.tiedGradient(n)
	a := embedding.Backward{Rows: g.Shape[0], Vocab: n.Shape()[0], D: n.Shape()[1], Type: g.Type,
		Accumulate: sum != nil}
	dt := program.Updates(&a.DT, sum)
	if sum == nil {
		dt = program.Writes(&a.DT, c.aux(n.Shape()...))
	}
	addCall(c, n, &a, program.Reads(&a.IDs, in[0]), program.Reads(&a.G, g), dt)
	return dt.Array
}
