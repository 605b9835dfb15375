package graph

import (
	"errors"
	"fmt"
	"strings"

	"gorgonia.org/gorgonia"
)

// Children returns a new slice of the inputs of a node's op, in order and including duplicates.
func Children(n *gorgonia.Node) gorgonia.Nodes {
	g := n.Graph()

	// Gorgonia removes nodes, for example in Log(Sigmoid(x)), and would then return the wrong nodes
	// in their place.
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

// HasValue returns an error if n is a statement, which no machine of this module can compute.
func HasValue(n *gorgonia.Node) error {
	if n.Type() == nil {
		return errors.New("gorgonia.Read and gorgonia.Set are for Gorgonia's machines: in place " +
			"of Read, name the node with WithOutputs and ask Machine.Value for it")
	}
	return nil
}

// IsInput reports whether a node's value exists before a run, that is, whether it is an input or a
// constant.
func IsInput(n *gorgonia.Node) bool { return n.Op() == nil || IsConstant(n) }

// IsConstant reports whether n is a constant of Gorgonia, which stores its value in the op.
func IsConstant(n *gorgonia.Node) bool {
	return n.Op() != nil && strings.HasPrefix(OpType(n), "gorgonia.constant")
}

// OpType returns the type name of a node's op, which distinguishes Gorgonia's unexported types,
// such as gorgonia.reshapeOp. It returns "<nil>" for an input.
func OpType(n *gorgonia.Node) string { return fmt.Sprintf("%T", n.Op()) }

// Symbol returns the operator of Gorgonia's elementwise arithmetic of two operands, such as + - ⊙
// ÷, or "" for other ops.
func Symbol(n *gorgonia.Node) string {
	if OpType(n) != "gorgonia.elemBinOp" {
		return ""
	}
	symbol, _, _ := strings.Cut(fmt.Sprint(n.Op()), " ")
	return symbol
}

// OpName returns the name of this module's ops, and the description of all other ops.
func OpName(n *gorgonia.Node) string {
	if o, ok := n.Op().(interface{ Name() string }); ok {
		return o.Name()
	}
	return fmt.Sprint(n.Op())
}

// Describe describes a node for error messages. It omits the settings of ops, because the number of a lattice
// depends on the process, and the messages of equal runs must be equal.
func Describe(n *gorgonia.Node) string {
	if n.Op() == nil {
		return fmt.Sprintf("input %s %v", n.Name(), n.Shape())
	}
	return fmt.Sprintf("node %d, %s %v", n.ID(), OpName(n), n.Shape())
}
