// Package lossscale follows the gradient of a loss through a graph, so that a scale can take its
// place.
package lossscale

import (
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// Loss scaling. Gradients of activations are often smaller than what float16 holds. So the loss is
// multiplied by a scale S, a power of two, and with it every gradient. The optimiser divides by S
// again. A step in which a gradient overflows changes nothing but S, which becomes half as large;
// after 2000 good steps it doubles. That is from Micikevicius et al., "Mixed Precision Training",
// 2018, and the figures are those of PyTorch's GradScaler.
//
// gorgonia.Grad begins with the constant 1 as the gradient of the loss. S takes its place, in
// device memory, where the optimiser's kernels change it. So neither a captured run nor a captured
// update knows its value. Everything derived from the loss is linear in that gradient. [Follow]
// follows it through the graph, which shows what carries S, and that nothing multiplies S by itself
// or adds what does not carry it.

// Follow follows the gradient of the loss through the graph; without gradients of parameters it
// is nil.
func Follow(g *gorgonia.ExprGraph, params gorgonia.Nodes, of Linearity) (*program.Scaling, error) {
	if !slices.ContainsFunc(params, func(p *gorgonia.Node) bool { return p.Deriv() != nil }) {
		return nil, nil
	}
	sorted, err := graph.OrderOfAll(g)
	if err != nil {
		return nil, err
	}
	root, forward := lossGradient(sorted)
	if root == nil {
		return nil,
			errors.New("the graph has no loss whose gradient Float16 could scale: derive the " +
				"parameters with gorgonia.Grad")
	}
	s := scaling{&program.Scaling{Edges: map[program.Edge]bool{},
		Carried: map[*gorgonia.Node]bool{}}, of}
	for _, n := range sorted {
		if err := s.follow(n, root, forward[n]); err != nil {
			return nil, fmt.Errorf("%s: %w", graph.Describe(n), err)
		}
	}
	for _, p := range params {
		if d := p.Deriv(); d != nil && !s.Carried[d] {
			return nil,
				fmt.Errorf("Float16 scales the gradient of the loss, and that of %s does not "+
					"depend on it", graph.Describe(p))
		}
	}
	return s.Scaling, nil
}

// scaling is what is found of it so far.
type scaling struct {
	*program.Scaling
	of Linearity // of every node's op
}

// lossGradient returns the constant 1 that is the derivative of a loss, and what the loss depends
// on, where that constant is but a number.
func lossGradient(sorted gorgonia.Nodes) (root *gorgonia.Node, forward map[*gorgonia.Node]bool) {
	forward = map[*gorgonia.Node]bool{}
	for _, n := range slices.Backward(sorted) {
		if d := n.Deriv(); d != nil && IsOne(d) {
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

// followWithin is follow for the nodes of a graph inside a node.
func (s scaling) followWithin(o *autodiff.RecomputeGradOp) error {
	sorted, err := graph.OrderOfAll(o.OutputGrad.Graph())
	if err != nil {
		return err
	}
	s.Carried[o.OutputGrad] = true
	for _, n := range sorted {
		if n != o.OutputGrad {
			if err := s.follow(n, nil, false); err != nil {
				return fmt.Errorf("%s: %w", graph.Describe(n), err)
			}
		}
	}
	return nil
}

// follow decides whether a node carries the scale, from whether its inputs do. Gorgonia may share
// the constant 1 between the gradient of the loss and a number in a derivative, such as that in 1 −
// y². Of the readings that make sense, the one with more gradients counts. A wrong reading leads to
// a product of gradients, or to a sum that makes no sense.
func (s scaling) follow(n, root *gorgonia.Node, forward bool) error {
	if o, ok := n.Op().(*autodiff.RecomputeGradOp); ok {
		if err := s.followWithin(o); err != nil {
			return err
		}
	}
	children := graph.Children(n)
	carries := make([]bool, len(children))
	var open []int
	for i, child := range children {
		carries[i] = s.Carried[child]
		if child == root && !forward {
			open = append(open, i)
		}
	}
	for numbers := range 1 << len(open) { // bit i: the ith of them is a number
		for i, input := range open {
			carries[input] = numbers>>i&1 == 0
		}
		out, ok := s.linear(n, carries)
		if !ok {
			continue
		}
		for _, input := range open {
			s.Edges[program.Edge{Node: n, Input: input}] = carries[input]
		}
		s.Carried[n] = out
		return nil
	}
	return errors.New("it is not linear in the gradient of the loss, which Float16 scales")
}

// Carriers are the inputs of a node that carry the scale, at least one.
type Carriers []bool

func (c Carriers) count() (n int) {
	for _, carries := range c {
		if carries {
			n++
		}
	}
	return n
}

// Linearity reports whether a node's value is linear in those inputs that carry the scale, all
// together, and whether it carries the scale itself.
type Linearity func(n *gorgonia.Node, c Carriers) (out, ok bool)

// In is linear in one input.
func In(input int) Linearity {
	return func(_ *gorgonia.Node, c Carriers) (bool, bool) {
		return true, c.count() == 1 && c[input]
	}
}

// InLast is linear in the last input.
func InLast(n *gorgonia.Node, c Carriers) (bool, bool) { return In(len(c)-1)(n, c) }

// InOne is linear in each input, but not in two together.
func InOne(_ *gorgonia.Node, c Carriers) (bool, bool) { return true, c.count() == 1 }

// InAll is linear in all inputs together.
func InAll(_ *gorgonia.Node, c Carriers) (bool, bool) { return true, c.count() == len(c) }

// InAdded is linear in the second input. Of the first it needs the shape.
func InAdded(_ *gorgonia.Node, c Carriers) (bool, bool) { return c[1], true }

// SizeOnly needs nothing but the shape.
func SizeOnly(*gorgonia.Node, Carriers) (bool, bool) { return false, true }

// InRecomputed is linear in the gradient, which follows the inputs of what is recomputed.
func InRecomputed(n *gorgonia.Node, c Carriers) (bool, bool) {
	return In(len(n.Op().(*autodiff.RecomputeGradOp).Inputs))(n, c)
}

// InNegated is for elementwise functions, of which one is linear.
func InNegated(n *gorgonia.Node, _ Carriers) (bool, bool) {
	return true, fmt.Sprint(n.Op()) == "neg"
}

// linear is the linearity of a node's op, where an input may carry the scale.
func (s scaling) linear(n *gorgonia.Node, c Carriers) (out, ok bool) {
	if c.count() == 0 {
		return false, true
	}
	return s.of(n, c)
}

// IsOne reports whether a node is the constant 1, which is the gradient of a loss.
func IsOne(n *gorgonia.Node) bool {
	if !graph.IsConstant(n) {
		return false
	}
	x, err := opbase.Flat(n.Value())
	one, ok := x.([]float32)
	return err == nil && ok && len(one) == 1 && one[0] == 1
}
