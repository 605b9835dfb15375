package autodiff

import (
	"cmp"
	"fmt"
	"runtime/debug"
	"slices"

	"github.com/kasmina-go/kasmina/internal/graph"

	"gorgonia.org/gorgonia"
)

// replayer is an op with a record of its runs, which its replay reads and does not add to:
// op.Replayer.
type replayer interface {
	Replay() gorgonia.Op
}

// copied is a copy, in a graph of its own, of everything that a node depends on. Ops are shared
// with the original, values are not: the copy's inputs have none until [copied.bind].
type copied struct {
	graph  *gorgonia.ExprGraph
	out    *gorgonia.Node
	inputs gorgonia.Nodes                    // of the original graph, in the order met
	node   map[*gorgonia.Node]*gorgonia.Node // of the copy, by the original's
}

// copyGraph copies what out depends on. With replay, ops that keep a record are replaced by their
// replays.
//
// The functions here work on copies, to leave the user's graph alone. Differentiating adds nodes to
// a graph and marks others, so a second derivative of the same graph can come out wrong. Running a
// graph binds values.
func copyGraph(out *gorgonia.Node, replay bool) (*copied, error) {
	c := &copied{graph: gorgonia.NewGraph(), node: make(map[*gorgonia.Node]*gorgonia.Node)}
	err := guard(func() error {
		// In order of creation: Gorgonia adds up the gradients of a node in an order that follows
		// from it. The copy then computes the same bits as the original.
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

// dependencies returns out and all nodes on which it depends, in order of creation, children before
// parents.
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

// bind gives the copy's input for the original input n a value.
func (c *copied) bind(n *gorgonia.Node, v gorgonia.Value) error {
	return gorgonia.Let(c.node[n], v)
}

// newInput adds an input like n to g. The number keeps inputs of one name, which Gorgonia would
// merge, apart.
func newInput(g *gorgonia.ExprGraph, n *gorgonia.Node, number int) *gorgonia.Node {
	return gorgonia.NewUniqueNode(gorgonia.In(g), gorgonia.WithType(n.Type()),
		gorgonia.WithShape(n.Shape()...),
		gorgonia.WithName(fmt.Sprintf("%s#%d", n.Name(), number)))
}

// isInput reports whether n is a variable, or a source of random numbers, which Gorgonia counts
// among the inputs.
func isInput(n *gorgonia.Node) bool { return n.Op() == nil || isRandomSource(n) }

func isRandomSource(n *gorgonia.Node) bool {
	return n.Op() != nil && graph.OpType(n) == "gorgonia.randomOp"
}

// isRandom reports whether n draws random numbers when it runs.
func isRandom(n *gorgonia.Node) bool {
	return isRandomSource(n) || n.Op() != nil && graph.OpType(n) == "*gorgonia.dropoutOp"
}

// guard returns f's error, or as an error what Gorgonia panicked with: it does so on graphs that it
// cannot differentiate or compile. A function of the user's that f calls counts too.
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

// label names a node in messages.
func label(n *gorgonia.Node) string { return fmt.Sprintf("%q", n.Name()) }
