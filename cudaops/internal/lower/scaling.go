package lower

import (
	"fmt"
	"reflect"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/lossscale"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
)

// operand is the value of a node's input: the scale where that is the gradient of the loss.
func (c *compiler) operand(n *gorgonia.Node, input int) *program.Array {
	if s := c.Scaling; s != nil && s.Edges[program.Edge{Node: n, Input: input}] {
		return c.Scale.View(0)
	}
	return c.Values[graph.Children(n)[input]]
}

// operands is the values of a node's inputs.
func (c *compiler) operands(n *gorgonia.Node) []*program.Array {
	in := make([]*program.Array, len(graph.Children(n)))
	for i := range in {
		in[i] = c.operand(n, i)
	}
	return in
}

// inOperands is for elementwise functions of two operands.
func inOperands(n *gorgonia.Node, c lossscale.Carriers) (bool, bool) {
	switch symbol, _, _ := strings.Cut(fmt.Sprint(n.Op()), " "); symbol {
	case "+", "-":
		return lossscale.InAll(n, c)
	case "⊙":
		return lossscale.InOne(n, c)
	case "÷":
		return lossscale.In(0)(n, c)
	}
	return onHost(n, c)
}

// linear is the linearity of a node's op.
func linear(n *gorgonia.Node, c lossscale.Carriers) (out, ok bool) {
	own, known := ownOps[reflect.TypeOf(n.Op())]
	scaled := own.scaled
	if !known {
		scaled = stockOps[graph.OpType(n)].scaled
	}
	switch {
	case scaled != nil:
		return scaled(n, c)
	case known:
		return true, false
	}
	return onHost(n, c)
}

// onHost is for an op that is not linear. It can be computed all the same if it has no kernel,
// since the host does it without the scale.
func onHost(n *gorgonia.Node, _ lossscale.Carriers) (bool, bool) { return true, stock(n) == nil }
