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

// Loss scaling. Gradients of activations are often too small for float16. The loss, and therefore every
// gradient, is multiplied by a scale S, a power of two, and the optimizer divides by S again. A step with
// a gradient overflow has no effect other than halving S. After 2000 successful steps, S is doubled. The
// method is from Micikevicius et al., "Mixed Precision Training", 2018, and the parameters are the
// defaults of PyTorch's GradScaler.
//
// gorgonia.Grad starts from the constant 1 as the gradient of the loss. The compiler replaces it with S,
// stored in device memory where the optimizer's kernels modify it, so that captured runs and updates work
// with any value of S.
//
// Everything derived from the loss is linear in its gradient. The compiler follows the gradient through
// the graph to find out which nodes carry S, and verifies that S is never multiplied by itself or added
// to a term without it.

// scale allocates S and follows the gradient of the loss through the graph. It does nothing if no
// parameter has a gradient.
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

// lossGradient returns the constant 1 that is the derivative of a loss, and the set of nodes that the
// loss depends on. Within this set, the constant is an ordinary number.
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

// isOne reports whether a node is the constant 1, as the gradient of a loss is.
func isOne(n *gorgonia.Node) bool {
	one, ok := number(n)
	return ok && one == 1 && graph.IsConstant(n)
}

// followAll calls follow for all nodes that are not yet known to carry the scale.
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

// follow determines from a node's inputs whether the node carries the scale.
//
// Gorgonia may use the same constant 1 for the gradient of the loss and for an ordinary number in a
// derivative, as in 1 − y². If there are several consistent interpretations, follow chooses the one with
// more gradients. A wrong interpretation would lead to a product of gradients or to an inconsistent sum.
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

	for numbers := range 1 << len(open) { // bit i is set if open[i] is an ordinary number
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

// operandOf returns the value of a node's input, or the loss scale if the input is the gradient of the
// loss.
func (c *compiler) operandOf(n *gorgonia.Node, input int) *program.Array {
	if c.Scaling.Edges[program.Edge{Node: n, Input: input}] {
		return c.Scale.View(0)
	}
	return c.Values[graph.Children(n)[input]]
}

// linear determines whether a node's value carries the scale (out), and whether the value is jointly
// linear in the inputs that do (ok).
func linear(n *gorgonia.Node, c carriers) (out, ok bool) {
	if c.count() == 0 {
		return false, true
	}

	scaled := ownOps[reflect.TypeOf(n.Op())].scaled
	if scaled == nil {
		scaled = stockOps[graph.OpType(n)].scaled
	}

	if scaled == nil {
		scaled = nonlinear
	}

	return scaled(n, c)
}

// linearity is the version of linear for one op. At least one input carries the scale.
type linearity func(n *gorgonia.Node, c carriers) (out, ok bool)

// carriers records for each input of a node whether it carries the scale.
type carriers []bool

func (c carriers) count() (n int) {
	for _, carries := range c {
		if carries {
			n++
		}
	}
	return n
}

// linearIn returns the linearity of an op that is linear in one input. Negative numbers count from the
// last input.
func linearIn(input int) linearity {
	return func(_ *gorgonia.Node, c carriers) (bool, bool) {
		return true, c.count() == 1 && c[(input+len(c))%len(c)]
	}
}

// linearInEach is the linearity of an op that is linear in each input separately.
func linearInEach(_ *gorgonia.Node, c carriers) (bool, bool) { return true, c.count() == 1 }

// linearInAll is the linearity of an op that is linear in all inputs jointly.
func linearInAll(_ *gorgonia.Node, c carriers) (bool, bool) { return true, c.count() == len(c) }

// linearInSecond is the linearity of an op that is linear in the second input and uses only the shape
// of the first.
func linearInSecond(_ *gorgonia.Node, c carriers) (bool, bool) { return c[1], true }

// sizeOnly is the linearity of an op that uses only shapes.
func sizeOnly(*gorgonia.Node, carriers) (bool, bool) { return false, true }

// linearIfNegation is the linearity of elementwise functions. Only neg is linear.
func linearIfNegation(n *gorgonia.Node, _ carriers) (bool, bool) {
	return true, fmt.Sprint(n.Op()) == "neg"
}

// linearInOperands is the linearity of elementwise functions of two operands.
func linearInOperands(n *gorgonia.Node, c carriers) (bool, bool) {
	switch symbol, _, _ := strings.Cut(fmt.Sprint(n.Op()), " "); symbol {
	case "+", "-":
		return linearInAll(n, c)
	case "⊙":
		return linearInEach(n, c)
	case "÷":
		return linearIn(0)(n, c)
	}
	return nonlinear(n, c)
}

// nonlinear is the linearity of an op that is not linear. Without a kernel such an op is still allowed,
// because the host computes it without the scale.
func nonlinear(n *gorgonia.Node, _ carriers) (bool, bool) { return true, loweringOf(n) == nil }
