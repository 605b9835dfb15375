package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/reduce"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

func lowerBias(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	x := c.act(n, in[0])
	b := repeated{c.act(n, in[1]), spread{repeat: 1, period: in[1].Len()}}
	return c.map2(n, elementwise.Add, c.like(x), repeated{Array: x}, b), nil
}

func lowerBiasGrad(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	g := c.act(n, in[0])
	return c.reduceMiddle(n, reduce.Sum, g, 1, g.Shape[0], g.Shape[1]).View(0, n.Shape()...),
		nil
}
