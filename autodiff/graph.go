package autodiff

import (
	"cmp"
	"fmt"
	"runtime/debug"
	"slices"

	"github.com/kasmina-go/kasmina/internal/graph"

	"gorgonia.org/gorgonia"
)

// replayer is an op that records its runs and provides a variant that does not: op.Replayer.
type replayer interface {
	Replay() gorgonia.Op
}

// copied is a copy of everything that a node depends on, in a separate graph. Ops are shared with the
// original; values are not, and the copy's inputs remain unset until [copied.bind].
type copied struct {
	graph  *gorgonia.ExprGraph
	out    *gorgonia.Node
	inputs gorgonia.Nodes                    // of the original graph, in the order found
	node   map[*gorgonia.Node]*gorgonia.Node // nodes of the copy, keyed by original node
}

// copyGraph copies everything that out depends on. With replay set, ops that record their runs are
// replaced by their replays.
//
// The functions of this package work on copies in order not to change the user's graph.
// Differentiating a graph adds nodes and marks existing ones, so a second derivative of the same
// graph can be wrong, and running it binds values.
func copyGraph(out *gorgonia.Node, replay bool) (*copied, error) {
	c := &copied{graph: gorgonia.NewGraph(), node: make(map[*gorgonia.Node]*gorgonia.Node)}
	err := guard(func() error {
		// Nodes are copied in the order of their creation, because it determines how Gorgonia orders
		// the gradients of a node when it adds them. The copy's results are then bit-identical to the
		// original's.
		for _, n := range dependencies(out) {
			if err := c.add(n, replay); err != nil {
				return err
			}
		}
		return nil
	})

	if err != nil {
		return nil, err
	}
	c.out = c.node[out]
	return c, nil
}

// dependencies returns out and all nodes on which it depends in the order of their creation, that
// is, children before parents.
func dependencies(out *gorgonia.Node) gorgonia.Nodes {
	seen := map[*gorgonia.Node]bool{out: true}
	nodes := gorgonia.Nodes{out}
	for i := 0; i < len(nodes); i++ {
		for _, child := range graph.Children(nodes[i]) {
			if !seen[child] {
				seen[child] = true
				nodes = append(nodes, child)
			}
		}
	}

	slices.SortFunc(nodes, func(a, b *gorgonia.Node) int { return cmp.Compare(a.ID(), b.ID()) })
	return nodes
}

// add copies a node after its children have been copied.
func (c *copied) add(n *gorgonia.Node, replay bool) (err error) {
	switch {
	case graph.IsConstant(n):
		c.node[n] = n.CloneTo(c.graph)
	case isInput(n):
		c.node[n] = newInput(c.graph, n, len(c.inputs))
		c.inputs = append(c.inputs, n)
	default:
		children := graph.Children(n)
		for i, child := range children {
			children[i] = c.node[child]
		}
		op := n.Op()
		if r, ok := op.(replayer); ok && replay {
			op = r.Replay()
		}
		c.node[n], err = gorgonia.ApplyOp(op, children...)
	}

	return err
}

// bind sets the value of the copy's counterpart of the original input n.
func (c *copied) bind(n *gorgonia.Node, v gorgonia.Value) error {
	return gorgonia.Let(c.node[n], v)
}

// newInput adds an input like n to g. number distinguishes inputs of the same name, which Gorgonia
// would otherwise merge.
func newInput(g *gorgonia.ExprGraph, n *gorgonia.Node, number int) *gorgonia.Node {
	return gorgonia.NewUniqueNode(gorgonia.In(g), gorgonia.WithType(n.Type()),
		gorgonia.WithShape(n.Shape()...),
		gorgonia.WithName(fmt.Sprintf("%s#%d", n.Name(), number)))
}

// isInput reports whether n is a variable or a source of random numbers, which Gorgonia treats as
// an input.
func isInput(n *gorgonia.Node) bool { return n.Op() == nil || isRandomSource(n) }

// isRandomSource reports whether n is a source of random numbers.
func isRandomSource(n *gorgonia.Node) bool {
	return n.Op() != nil && graph.OpType(n) == "gorgonia.randomOp"
}

// isRandom reports whether n draws random numbers when it runs.
func isRandom(n *gorgonia.Node) bool {
	return isRandomSource(n) || n.Op() != nil && graph.OpType(n) == "*gorgonia.dropoutOp"
}

// guard returns f's error, or an error describing its panic, since Gorgonia panics on graphs it
// cannot differentiate or compile. It also catches panics in user functions that f calls.
func guard(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v\n\n%s", r, debug.Stack())
		}
	}()
	return f()
}

// newMachine returns a tape machine for g.
func newMachine(g *gorgonia.ExprGraph) (vm gorgonia.VM, err error) {
	err = guard(func() error {
		vm = gorgonia.NewTapeMachine(g)
		return nil
	})
	return vm, err
}

// label returns the name of a node for messages.
func label(n *gorgonia.Node) string { return fmt.Sprintf("%q", n.Name()) }
