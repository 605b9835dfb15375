package lower

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
)

// Loss scaling. Gradients of activations are often smaller than what float16 holds. So the loss is
// multiplied by a scale S, a power of two, and with it every gradient. The optimiser divides by S
// again. A step in which a gradient overflows changes nothing but S, which becomes half as large;
// after 2000 good steps it doubles. That is from Micikevicius et al., "Mixed Precision Training",
// 2018, and the figures are those of PyTorch's GradScaler.
//
// gorgonia.Grad begins with the constant 1 as the gradient of the loss. S takes its place, in
// device memory, where the optimiser's kernels change it. So neither a captured run nor a captured
// update knows its value. Everything derived from the loss is linear in that gradient. It is
// followed through the graph, which shows what carries S, and that nothing multiplies S by itself
// or adds what does not carry it.

// scale gives S a place, and follows the gradient of the loss through the graph. Without gradients
// of parameters there is none.
func (c *compiler) scale(g *gorgonia.ExprGraph) error {
	if !slices.ContainsFunc(c.o.Params, func(p *gorgonia.Node) bool { return p.Deriv() != nil }) {
		return nil
	}

	sorted, err := graph.OrderOfAll(g)
	if err != nil {
		return err
	}

	root, forward := lossGradient(sorted)
	if root == nil {
		return errors.New("the graph has no loss whose gradient Float16 could scale: derive the " +
			"parameters with gorgonia.Grad")
	}

	c.Scaling = program.Scaling{Edges: map[program.Edge]bool{}, Carried: map[*gorgonia.Node]bool{}}
	if err := c.followAll(sorted, root, forward); err != nil {
		return err
	}

	for _, p := range c.o.Params {
		if d := p.Deriv(); d != nil && !c.Scaling.Carried[d] {
			return fmt.Errorf("Float16 scales the gradient of the loss, and that of %s does not "+
				"depend on it", graph.Describe(p))
		}
	}

	c.Scale = c.NewResident(gpu.Float32, optimizer.LossScaleBytes/4)
	return nil
}

// lossGradient returns the constant 1 that is the derivative of a loss, and what the loss depends
// on, where that constant is but a number.
func lossGradient(sorted gorgonia.Nodes) (root *gorgonia.Node, forward map[*gorgonia.Node]bool) {
	forward = map[*gorgonia.Node]bool{}
	for _, n := range slices.Backward(sorted) {
		if d := n.Deriv(); d != nil && isOne(d) {
			root, forward[n] = d, true
		}
		if forward[n] {
			for _, child := range graph.Children(n) {
				forward[child] = true
			}
		}
	}

	return root, forward
}

// isOne reports whether a node is the constant 1, which is the gradient of a loss.
func isOne(n *gorgonia.Node) bool {
	one, ok := number(n)
	return ok && one == 1 && graph.IsConstant(n)
}

// followAll is follow of nodes, but for what carries the scale to them.
func (c *compiler) followAll(sorted gorgonia.Nodes, root *gorgonia.Node,
	forward map[*gorgonia.Node]bool) error {
	for _, n := range sorted {
		if c.Scaling.Carried[n] {
			continue
		}
		if err := c.follow(n, root, forward[n]); err != nil {
			return fmt.Errorf("%s: %w", graph.Describe(n), err)
		}
	}
	return nil
}

// follow decides whether a node carries the scale, from whether its inputs do. Gorgonia may share
// the constant 1 between the gradient of the loss and a number in a derivative, such as that in 1 −
// y². Of the readings that make sense, the one with more gradients counts. A wrong reading leads to
// a product of gradients, or to a sum that makes no sense.
func (c *compiler) follow(n, root *gorgonia.Node, forward bool) error {
	if o, ok := n.Op().(*autodiff.RecomputeGradOp); ok {
		within, err := graph.OrderOfAll(o.OutputGrad.Graph())
		if err != nil {
			return err
		}
		c.Scaling.Carried[o.OutputGrad] = true
		if err := c.followAll(within, nil, nil); err != nil {
			return err
		}
	}

	children := graph.Children(n)
	carries := make(carriers, len(children))
	var open []int
	for i, child := range children {
		carries[i] = c.Scaling.Carried[child]
		if child == root && !forward {
			open = append(open, i)
		}
	}

	for numbers := range 1 << len(open) { // bit i: the ith of them is a number
		for i, input := range open {
			carries[input] = numbers>>i&1 == 0
		}
		out, ok := linear(n, carries)
		if !ok {
			continue
		}
		for _, input := range open {
			c.Scaling.Edges[program.Edge{Node: n, Input: input}] = carries[input]
		}
		c.Scaling.Carried[n] = out
		return nil
	}

	return errors.New("it is not linear in the gradient of the loss, which Float16 scales")
}

// operand is the value of a node's input: the scale where that is the gradient of the loss.
func (c *compiler) operand(n *gorgonia.Node, input int) *program.Array {
	if c.Scaling.Edges[program.Edge{Node: n, Input: input}] {
		return c.Scale.View(0)
	}
	return c.Values[graph.Children(n)[input]]
}

// linear reports whether a node's value is linear in those inputs that carry the scale, all
// together, and whether it carries the scale itself.
func linear(n *gorgonia.Node, c carriers) (out, ok bool) {
	if c.count() == 0 {
		return false, true
	}

	scaled := ownOps[reflect.TypeOf(n.Op())].scaled
	if scaled == nil {
		scaled = stockOps[graph.OpType(n)].scaled
	}

	if scaled == nil {
		scaled = inNone
	}

	return scaled(n, c)
}

// linearity is linear for an op, of which at least one input carries the scale.
type linearity func(n *gorgonia.Node, c carriers) (out, ok bool)

// carriers are the inputs of a node that carry the scale.
type carriers []bool

func (c carriers) count() (n int) {
	for _, carries := range c {
		if carries {
			n++
		}
	}
	return n
}

// inInput is linear in one input, −1 for the last and −2 for that ahead of it.
func inInput(input int) linearity {
	return func(_ *gorgonia.Node, c carriers) (bool, bool) {
		return true, c.count() == 1 && c[(input+len(c))%len(c)]
	}
}

// inOne is linear in each input, but not in two together.
func inOne(_ *gorgonia.Node, c carriers) (bool, bool) { return true, c.count() == 1 }

// inAll is linear in all inputs together.
func inAll(_ *gorgonia.Node, c carriers) (bool, bool) { return true, c.count() == len(c) }

// inAdded is linear in the second input. Of the first it needs the shape.
func inAdded(_ *gorgonia.Node, c carriers) (bool, bool) { return c[1], true }

// sizeOnly needs nothing but the shape.
func sizeOnly(*gorgonia.Node, carriers) (bool, bool) { return false, true }

// inNegated is for elementwise functions, of which one is linear.
func inNegated(n *gorgonia.Node, _ carriers) (bool, bool) {
	return true, fmt.Sprint(n.Op()) == "neg"
}

// inOperands is for elementwise functions of two operands.
func inOperands(n *gorgonia.Node, c carriers) (bool, bool) {
	switch symbol, _, _ := strings.Cut(fmt.Sprint(n.Op()), " "); symbol {
	case "+", "-":
		return inAll(n, c)
	case "⊙":
		return inOne(n, c)
	case "÷":
		return inInput(0)(n, c)
	}
	return inNone(n, c)
}

// inNone is for an op that is not linear. It can be computed all the same if it has no kernel,
// since the host does it without the scale.
func inNone(n *gorgonia.Node, _ carriers) (bool, bool) { return true, loweringOf(n) == nil }
