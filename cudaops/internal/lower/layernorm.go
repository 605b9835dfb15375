package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/op"
)

func init() {
	register[*op.LayerNormOp](lowerLayerNorm, nil)
	register[*op.LayerNormGradOp](lowerLayerNormGrad, linearIn(4))
}

func lowerLayerNorm(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	o := n.Op().(*op.LayerNormOp)
	x, w, b := c.asActivation(n, in[0]), c.as(n, in[1], gpu.Float32), c.as(n, in[2], gpu.Float32)
	y, stats := c.Like(x), c.aux(x.Shape[0], norm.LayerNormStats)
	c.saved[o] = stats

	a := norm.LayerNorm{Rows: x.Shape[0], D: w.Len(), Eps: o.Eps, Type: x.Type}
	addCall(c, n, &a, program.Writes(&a.Y, y), program.Writes(&a.Stats, stats),
		program.Reads(&a.X, x), program.Reads(&a.W, w), program.Reads(&a.B, b))
	return y
}

func lowerLayerNormGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x, g := c.asActivation(n, in[0]), c.asActivation(n, in[4])
	w := c.as(n, in[1], gpu.Float32)
	stats := c.saved[n.Op().(*op.LayerNormGradOp).Forward].(*program.Array)
	dx := c.Like(x)
	dw, db := c.normGrads(n, x, w)
	_, add := c.addend(c.partOf(n, 0), dx)

	a := norm.LayerNormBackward{Rows: x.Shape[0], D: w.Len(), Type: x.Type}
	addCall(c, n, &a, program.Writes(&a.DX, dx), program.Writes(&a.DW, dw),
		program.Writes(&a.DB, db), program.Reads(&a.G, g), program.Reads(&a.X, x),
		program.Reads(&a.W, w), program.Reads(&a.Stats, stats), program.Reads(&a.Add, add))
	return packed(dx, dw, db)
}
