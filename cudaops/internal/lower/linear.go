package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/decode"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// newProduct is the call of a matrix product.
func (c *compiler) newProduct(n *gorgonia.Node, p program.Product) *program.Call {
	call := c.newCall(n, p.Params(), p.Args()...)
	call.FLOPs, call.Float8 = p.FLOPs(), p.ScaleA != nil
	return call
}

// matmul adds a matrix product.
func (c *compiler) matmul(n *gorgonia.Node, p program.Product) { c.Add(c.newProduct(n, p)) }

// product adds y = x·wᵀ of activations, and another matrix to it, if there is one.
func (c *compiler) product(n *gorgonia.Node, y, x, w, add *program.Array) {
	if x.Shape[0] > 1 {
		c.matmul(n, program.Product{D: y, A: x, B: w, TransB: true}.Plus(add))
		return
	}
	call := c.call(n, decode.Product{Columns: w.Shape[0], D: w.Shape[1], Type: x.Type,
		Steady: w.Resident && len(c.Calls) > 0},
		program.Writes("Y", y), program.Reads("X", x), program.Reads("W", w), program.Reads("C", add))
	call.FLOPs = 2 * float64(w.Len())
}

func lowerLinear(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	return c.linear(n, in, nil)
}

// linear adds a linear layer, to whose result it adds another matrix, if there is one.
func (c *compiler) linear(n *gorgonia.Node, in []*program.Array,
	add *program.Array) (*program.Array, error) {
	x, w := c.acts(n, in[0], in[1])
	y := c.NewArray(x.Type, n.Shape()...)
	c.linearProduct(n, y, x, w, add)
	return y, nil
}

func lowerLinearGrad(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	return c.linearGrad(n, in, nil, nil), nil
}

// linearGrad adds the gradients of a linear layer. To that of its input it adds another one, if
// there is one.
func (c *compiler) linearGrad(n *gorgonia.Node, in []*program.Array, add *program.Array,
	_ *gorgonia.Node) *program.Array {
	x, w := c.acts(n, in[0], in[1])
	g := c.act(n, in[2])
	dx, dw := c.like(x), c.weightGradient(w.Shape, c.partOf(n, x.Len()))
	c.linearProductGrad(n, dx, g, w, add)
	c.matmul(n, program.Product{D: dw, A: g, B: x, TransA: true})
	return packed(dx, dw)
}
