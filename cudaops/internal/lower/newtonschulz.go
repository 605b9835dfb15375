package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/schulz"
	"github.com/kasmina-go/kasmina/op"
)

// The op's gradient has no lowering: nothing that trains asks for it, so the host computes it.
func lowerNewtonSchulz(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	b := schulz.Builder{Program: c.Program, Chooser: c.o.Chooser, Activation: c.o.Activation,
		Call: func(params any, args ...program.Arg) *program.Call {
			return c.newCall(n, params, args...)
		}}
	x := in[0]
	it, err := b.Iterate(x.Shape, 1, n.Op().(*op.NewtonSchulzOp).Steps)
	if err != nil {
		return nil, err
	}
	c.Add(b.Normalized(it.Start, x))
	c.Calls = append(c.Calls, it.Calls...)
	return c.act(n, it.Result.View(0, x.Shape...)), nil
}
