package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// The graph within a RecomputeOp is lowered as if it stood in the op's place. Nothing of it but the
// result is used outside. So the memory of what is in between serves other nodes as soon as the
// result is there. The graph within its backward op has nodes of its own, which compute all that
// again.

func lowerRecompute(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	o := n.Op().(*autodiff.RecomputeOp)
	return c.inline(n, o.Inputs, in, gorgonia.Nodes{o.Output})[0]
}

func lowerRecomputeGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	o := n.Op().(*autodiff.RecomputeGradOp)
	inputs := append(append(gorgonia.Nodes{}, o.Inputs...), o.OutputGrad)
	offset, asked := 0, map[*gorgonia.Node]bool{}
	for _, g := range o.Grads { // what is asked for outside is within
		part := c.partOf(n, offset)
		asked[g] = asked[g] || !c.updating[part] || len(c.users[part]) > 0
		c.updating[g] = !asked[g]
		offset += opbase.Size(g.Shape())
	}
	return packed(c.inline(n, inputs, in[:len(inputs)], o.Grads)...)
}

// inline lowers what the results depend on, in the graph within a node, whose inputs have the given
// values. The graph's nodes lose their values: an op that two nodes of the outer graph share is
// lowered for each.
func (c *compiler) inline(around *gorgonia.Node, inputs gorgonia.Nodes, values []*program.Array,
	results gorgonia.Nodes) (out []*program.Array) {
	outside := graph.Children(around)
	for i, n := range inputs {
		c.Values[n] = values[i]
		c.layers.Join(n, outside[i])
	}
	for _, n := range results { // none may be left to those that use it
		c.kept[n] = true
	}
	c.lowerAll(results)
	for _, n := range results {
		out = append(out, c.Values[n])
		delete(c.kept, n)
	}
	for _, n := range inputs[0].Graph().AllNodes() {
		delete(c.Values, n)
	}
	return out
}
