package lower

import (
	"fmt"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// onHost computes a node with its op's own Do, between two copies. It sees gradients without the loss
// scale.
func (c *compiler) onHost(n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	return c.hosted(n, in, fmt.Sprintf("there is no kernel for %T", n.Op()))
}

// onHostByRule computes a node on the host although there is a kernel.
func (c *compiler) onHostByRule(n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	return c.hosted(n, in, "a rule wants it there")
}

// hosted is onHost for some reason.
func (c *compiler) hosted(n *gorgonia.Node, in []*program.Array, why string) (*program.Array, error) {
	if c.o.Strict {
		return nil, fmt.Errorf("%s, and WithStrict forbids computing it on the host", why)
	}
	c.o.Warn(fmt.Sprintf("%v: %s: it is computed on the host, which waits for the device and copies %d values there and back",
		n.Op(), why, len(opbase.Children(n))))
	out := c.NewArray(typeOf(n.Dtype()), n.Shape()...)
	call := program.HostOp{Node: n, In: in, Out: out}
	args := []program.Arg{program.Writes("", out)}
	for _, a := range in {
		args = append(args, program.Reads("", a))
	}
	c.call(n, call, args...)
	return out, nil
}
