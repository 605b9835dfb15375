package graph

import (
	"errors"
	"fmt"
	"strings"

	"gorgonia.org/gorgonia"
)

// Children returns the inputs of a node's op in order, duplicates included, in a slice of the
// caller's.
func Children(n *gorgonia.Node) gorgonia.Nodes {
	g := n.Graph()
	// Gorgonia has removed nodes, as it does in Log(Sigmoid(x)), and finds others in their places
	if g.Node(n.ID()) != n {
		g = g.ExactSubgraphRoots(n)
	}
	var children gorgonia.Nodes
	for it := g.From(n.ID()); it.Next(); {
		if child, ok := it.Node().(*gorgonia.Node); ok {
			children = append(children, child)
		}
	}
	return children
}

// HasValue returns an error for a statement, which is a node that no machine of this module can
// compute.
func HasValue(n *gorgonia.Node) error {
	if n.Type() == nil {
		return errors.New("gorgonia.Read and gorgonia.Set are for Gorgonia's machines: in place " +
			"of Read, name the node with WithOutputs and ask Machine.Value for it")
	}
	return nil
}

// IsInput reports whether a node's value is there before a run: it is an input or a constant.
func IsInput(n *gorgonia.Node) bool { return n.Op() == nil || IsConstant(n) }

// IsConstant reports whether n is one of Gorgonia's constants, whose op holds the value.
func IsConstant(n *gorgonia.Node) bool {
	return n.Op() != nil && strings.HasPrefix(OpType(n), "gorgonia.constant")
}

// OpType is the type of a node's op, by whose name those of Gorgonia's are told apart that it does
// not export: gorgonia.reshapeOp. It is <nil> for an input.
func OpType(n *gorgonia.Node) string { return fmt.Sprintf("%T", n.Op()) }

// Symbol is what Gorgonia's elementwise arithmetic of two operands does: + - ⊙ ÷ and so on. It is
// empty for other ops.
func Symbol(n *gorgonia.Node) string {
	if OpType(n) != "gorgonia.elemBinOp" {
		return ""
	}
	symbol, _, _ := strings.Cut(fmt.Sprint(n.Op()), " ")
	return symbol
}

// OpName is the name of this module's ops, and the description of others.
func OpName(n *gorgonia.Node) string {
	if o, ok := n.Op().(interface{ Name() string }); ok {
		return o.Name()
	}
	return fmt.Sprint(n.Op())
}

// Describe says what a node is, for errors.
func Describe(n *gorgonia.Node) string {
	if n.Op() == nil {
		return fmt.Sprintf("input %s %v", n.Name(), n.Shape())
	}
	return fmt.Sprintf("node %d, %v %v", n.ID(), n.Op(), n.Shape())
}
