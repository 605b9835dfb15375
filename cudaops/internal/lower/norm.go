package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	normkernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
)

func lowerRMSNorm(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	o := n.Op().(*op.RMSNormOp)
	y, _ := c.norm(n, o, c.act(n, in[0]), nil, in[1])
	return y, nil
}

// norm adds a normalisation of x or, where there is a residual, of the sum of both.
func (c *compiler) norm(n *gorgonia.Node, o *op.RMSNormOp, x, residual, weight *program.Array) (y, sum *program.Array) {
	w := c.as(n, weight, gpu.Float32)
	y, rstd := c.like(x), c.aux(x.Shape[0])
	c.saved[o] = rstd
	if residual != nil {
		sum = c.like(x)
	}
	q := c.quantizing(y, c.multiplied(n))
	a := normkernel.RMSNorm{Rows: x.Shape[0], D: x.Shape[1], Eps: o.Eps, Type: x.Type,
		Ascending: residual == nil && isOp[*op.KasminaOp](opbase.Children(n)[0])} // whose first rows come last
	c.call(n, a, program.Writes("Y", y), program.Writes("Rstd", rstd), program.Reads("X", x),
		program.Reads("W", w), program.Reads("Residual", residual), program.Writes("Sum", sum),
		program.Writes("Y8", q.Values), program.Writes("Scale8", q.Scales))
	return y, sum
}

func lowerRMSNormGrad(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	return c.normGrad(n, in, nil, c.partOf(n, 0)), nil
}

// normGrad adds the gradients of a normalisation. To that of its input it adds another one, if
// there is one; node to has the result as its value.
func (c *compiler) normGrad(n *gorgonia.Node, in []*program.Array, add *program.Array, to *gorgonia.Node) *program.Array {
	x, w, g := c.act(n, in[0]), c.as(n, in[1], gpu.Float32), c.act(n, in[3])
	rstd := c.saved[n.Op().(*op.RMSNormGradOp).Forward].(*program.Array)
	parts := new(normkernel.RMSNormParts)
	a := normkernel.RMSNormBackward{Rows: x.Shape[0], D: x.Shape[1], Type: x.Type, DWType: gpu.Float32, Parts: parts}
	dx, dw, workspace := c.like(x), c.aux(w.Shape...), c.bytes(a.WorkspaceBytes(c.o.Device))
	q := c.quantizing(dx, c.multiplied(to))
	c.call(n, a, program.Writes("DX", dx), program.Writes("DW", dw), program.Reads("G", g),
		program.Reads("X", x), program.Reads("W", w), program.Reads("Rstd", rstd),
		program.Reads("Add", add), program.Uses("Workspace", workspace),
		program.Writes("DX8", q.Values), program.Writes("Scale8", q.Scales))
	sum := c.call(n, normkernel.SumRMSNormParts{All: []*normkernel.RMSNormParts{parts}},
		program.Writes("", dw), program.Reads("", workspace))
	sum.Op = "RMSNormWeightGrad"
	return packed(dx, dw)
}
