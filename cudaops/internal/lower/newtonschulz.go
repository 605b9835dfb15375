package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/schulz"
	"github.com/kasmina-go/kasmina/op"
)

// schulz builds the calls of a node's Newton-Schulz iteration.
func (c *compiler) schulz(n *gorgonia.Node) schulz.Builder {
	return schulz.Builder{Program: c.Program, Chooser: c.o.Chooser, Activation: c.o.Activation,
		Call: func(params any, args ...program.Arg) *program.Call {
			return c.newCall(n, params, args...)
		}}
}

func lowerNewtonSchulz(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x, b := in[0], c.schulz(n)
	it, err := b.Iterate(x.Shape, 1, n.Op().(*op.NewtonSchulzOp).Steps)
	if c.fail(err); err != nil {
		return nil
	}
	c.Add(b.Normalized(it.Start, x))
	c.Calls = append(c.Calls, it.Calls...)
	return c.act(n, it.Result.View(0, x.Shape...))
}

func lowerNewtonSchulzGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x, g := c.acts(n, in[0], in[1])
	steps := n.Op().(*op.NewtonSchulzGradOp).Forward.Steps
	return packed(c.schulz(n).Gradient(x, g, steps))
}
