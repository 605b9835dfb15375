package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/op"
)

func init() {
	register[*op.GELUOp](lowerGELU, nil)
	register[*op.GELUGradOp](lowerGELUGrad, linearIn(1))
}

func lowerGELU(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x := c.asActivation(n, in[0])
	return c.map1(n, elementwise.GELU, c.Like(x), x, 0)
}

func lowerGELUGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x, g := c.asActivations(n, in[0], in[1])
	return c.map2(n, elementwise.GELUGradient, c.Like(x), g, x)
}
