package opbase

import (
	"fmt"
	"strings"

	"gorgonia.org/gorgonia"
)

// Children returns the inputs of a node's op in order, duplicates included, in a slice of the
// caller's.
func Children(n *gorgonia.Node) gorgonia.Nodes {
	g := n.Graph()
	if g.Node(n.ID()) != n { // Gorgonia has removed nodes, as it does in Log(Sigmoid(x)), and finds others in their places
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

// IsConstant reports whether n is one of Gorgonia's constants, whose types it does not export and
// whose op holds the value.
func IsConstant(n *gorgonia.Node) bool {
	return n.Op() != nil && strings.HasPrefix(fmt.Sprintf("%T", n.Op()), "gorgonia.constant")
}
