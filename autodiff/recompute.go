package autodiff

import (
	"fmt"
	"slices"
	"sync/atomic"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// RecomputeOp is the op that [Recompute] adds: a graph inside a node. Inputs and Output are nodes
// of the inner graph.
type RecomputeOp struct {
	opbase.Base
	Inputs gorgonia.Nodes
	Output *gorgonia.Node

	diff []bool // whether the output is differentiable with respect to each input
	eval bool   // evaluation mode, as set by the outer machine
	run  inner
}

// Recompute adds the result of build to the graph of inputs as a single op. The op retains its inputs
// and its result but no intermediate results, which the gradient computes again (gradient
// checkpointing). A deep model's memory then grows with the number of blocks rather than with their
// contents, at the cost of one more forward pass.
//
// build receives nodes like inputs in another graph. It must return a node of that graph that depends
// only on those nodes and on constants, and may itself use Recompute. Inputs may be floats or ints.
// Float inputs on which the result depends must share its type, and receive gradients.
//
// Loss and gradients are bit-identical to those without Recompute, except that Gorgonia may add up
// three or more gradients of an outer node in another order. Ops that record their runs, such as
// telemetry, count once, because their Replay is run the second time. Random ops are rejected, since
// they would draw different numbers the second time.
//
// The inner graph is necessary because Gorgonia's machines keep every intermediate result until the
// run ends: computing nodes again in the same graph would save nothing. (Chen et al., "Training
// Deep Nets with Sublinear Memory Cost", 2016.)
func Recompute(inputs gorgonia.Nodes,
	build func(inputs gorgonia.Nodes) (*gorgonia.Node, error)) (*gorgonia.Node, error) {
	n, err := recompute(inputs, build)
	if err != nil {
		return nil, fmt.Errorf("autodiff.Recompute: %w", err)
	}
	return n, nil
}

// recompute implements Recompute.
func recompute(inputs gorgonia.Nodes,
	build func(gorgonia.Nodes) (*gorgonia.Node, error)) (*gorgonia.Node, error) {
	if len(inputs) == 0 || build == nil {
		return nil, fmt.Errorf(
			"got %d inputs and a build function: %v, want at least one input and a function",
			len(inputs), build != nil)
	}

	g := gorgonia.NewGraph()
	within := make(gorgonia.Nodes, len(inputs))
	for i, n := range inputs {
		if n == nil || n.Graph() == nil || n.Graph() != inputs[0].Graph() {
			return nil, fmt.Errorf("input %d is nil or in another graph than the first input", i)
		}
		within[i] = newInput(g, n, i)
	}

	var out *gorgonia.Node
	err := guard(func() (err error) {
		out, err = build(slices.Clone(within))
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := checkBuilt(g, within, out); err != nil {
		return nil, err
	}

	o, err := newRecomputeOp(inputs, within, out, false)
	if err != nil {
		return nil, err
	}
	return gorgonia.ApplyOp(o, inputs...)
}

// checkBuilt returns an error unless out, the result of build, can be recomputed.
func checkBuilt(g *gorgonia.ExprGraph, inputs gorgonia.Nodes, out *gorgonia.Node) error {
	switch {
	case out == nil || out.Graph() != g:
		return fmt.Errorf("build's result is nil or in another graph than the inputs it was given")
	case isInput(out) || graph.IsConstant(out):
		return fmt.Errorf("build's result is %s: there is nothing to compute", label(out))
	case out.Dtype() != tensor.Float32 && out.Dtype() != tensor.Float64:
		return fmt.Errorf("build's result is %v, want float32 or float64", out.Dtype())
	}

	for _, n := range dependencies(out) {
		switch {
		case isRandom(n):
			return fmt.Errorf("build uses %s, which is random: the gradient would see different "+
				"numbers from the result", label(n))
		case isInput(n) && !slices.Contains(inputs, n):
			return fmt.Errorf(
				"build creates the input %s: pass it in, because no gradient would reach it",
				label(n))
		}
	}

	return nil
}

// serial numbers the RecomputeOps. Gorgonia merges nodes with the same inputs whose ops have equal
// hashes. The hash of an op does not cover its inner graph, so the number makes it unique.
var serial atomic.Int64

// newRecomputeOp returns an op with a copy of out and its dependencies as its inner graph. The inputs are
// nodes of out's graph. The op's own inputs, outer, have the same types.
func newRecomputeOp(outer, inputs gorgonia.Nodes, out *gorgonia.Node,
	replay bool) (*RecomputeOp, error) {
	c, err := copyGraph(out, replay)
	if err != nil {
		return nil, err
	}

	o := &RecomputeOp{Inputs: make(gorgonia.Nodes, len(inputs)), Output: c.out,
		diff: make([]bool, len(inputs))}
	reached := differentiable(out)
	for i, n := range inputs {
		o.Inputs[i] = c.node[n]
		if o.Inputs[i] == nil {
			// The result does not depend on this input, so the copy lacks it. The copied nodes have the
			// numbers below len(c.node).
			o.Inputs[i] = newInput(c.graph, n, len(c.node)+i)
		}

		o.diff[i] = reached[n]
		if o.diff[i] && n.Dtype() != out.Dtype() {
			return nil, fmt.Errorf("input %s is %v, but the result, %v: want one float type",
				label(n), n.Dtype(), out.Dtype())
		}
	}

	o.run = inner{inputs: o.Inputs, outputs: gorgonia.Nodes{c.out}}
	opbase.Init(&o.Base, o, "Recompute", fmt.Sprintf("#%d", serial.Add(1)), outer,
		out.Dtype(), out.Shape(),
		recomputeForward[float32], recomputeForward[float64])
	return o, nil
}

// differentiable returns the nodes with a chain of derivatives to out.
func differentiable(out *gorgonia.Node) map[*gorgonia.Node]bool {
	reached := map[*gorgonia.Node]bool{out: true}
	for _, n := range slices.Backward(dependencies(out)) {
		op, ok := n.Op().(gorgonia.SDOp)
		if !reached[n] || !ok {
			continue
		}
		children := graph.Children(n)
		diff := op.DiffWRT(len(children))
		for i, child := range children {
			reached[child] = reached[child] || i < len(diff) && diff[i]
		}
	}

	return reached
}

// recomputeForward runs the inner graph.
func recomputeForward[T cpu.Float](o *RecomputeOp, out []T, in opbase.Args) error {
	return o.run.do(in, o.eval, out)
}

// ReadsCompact reports whether the inner graph can read a weight in compact form.
func (o *RecomputeOp) ReadsCompact(input int) bool { return o.run.readsCompact(input) }

// SetTraining passes the machine's mode on to the inner ops.
func (o *RecomputeOp) SetTraining(training bool) error {
	o.eval = !training
	return o.run.setTraining(training)
}

// Replay returns an op with the same inner graph, except that the replays of ops replace the ops that
// record their runs.
func (o *RecomputeOp) Replay() gorgonia.Op {
	r, err := newRecomputeOp(o.Inputs, o.Inputs, o.Output, true)
	if err != nil { // cannot happen: this graph has been copied before
		return o
	}
	return r
}

// DiffWRT reports, for each input, whether the result has a derivative with respect to it.
func (o *RecomputeOp) DiffWRT(int) []bool { return o.diff }

// SymDiff returns the gradients of the differentiable inputs, and nil for all other inputs.
func (o *RecomputeOp) SymDiff(inputs gorgonia.Nodes,
	output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, inputs, output, grad); err != nil {
		return nil, err
	}
	grads, err := o.symDiff(inputs, output, grad)
	if err != nil {
		return nil, fmt.Errorf("autodiff.Recompute: %w", err)
	}
	return grads, nil
}

// symDiff implements SymDiff.
func (o *RecomputeOp) symDiff(inputs gorgonia.Nodes,
	output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	c, err := copyGraph(o.Output, true)
	if err != nil {
		return nil, err
	}

	// The copied nodes have the numbers below len(c.node). The gradient of the output has the next number,
	// and inputs that the result does not depend on have the numbers after it.
	b := &RecomputeGradOp{Forward: o, Output: c.out,
		OutputGrad: newInput(c.graph, o.Output, len(c.node))}
	var wrt gorgonia.Nodes    // the differentiable inputs
	var shapes []tensor.Shape // of wrt
	for i, n := range o.Inputs {
		input := c.node[n]
		if input == nil {
			input = newInput(c.graph, n, len(c.node)+1+i)
		}
		b.Inputs = append(b.Inputs, input)
		if o.diff[i] {
			wrt, shapes = append(wrt, input), append(shapes, n.Shape())
		}
	}

	err = guard(func() (err error) {
		b.Grads, err = gorgonia.Backpropagate(gorgonia.Nodes{c.out}, gorgonia.Nodes{b.OutputGrad},
			wrt)
		return err
	})
	if err != nil {
		return nil, err
	}

	b.run = inner{inputs: append(slices.Clone(b.Inputs), b.OutputGrad), outputs: b.Grads}

	// The output is an input only to ensure that the forward op runs first.
	in := append(slices.Clone(inputs), grad, output)
	opbase.Init(&b.Base, b, "RecomputeGrad", o.String(), in, output.Dtype(),
		tensor.Shape{opbase.PackedSize(shapes...)},
		recomputeBackward[float32], recomputeBackward[float64])
	packed, err := gorgonia.ApplyOp(b, in...)
	if err != nil {
		return nil, err
	}

	parts, err := opbase.Unpack(packed, shapes...)
	if err != nil {
		return nil, err
	}

	grads := make(gorgonia.Nodes, len(inputs))
	for i, d := range o.diff {
		if d {
			grads[i], parts = parts[0], parts[1:]
		}
	}

	return grads, nil
}

// RecomputeGradOp computes the packed gradients of a RecomputeOp's differentiable inputs from the
// inputs, the gradient of the output, and the output. Its nodes belong to a second inner graph,
// which contains the forward and the backward pass.
type RecomputeGradOp struct {
	opbase.Base
	Forward    *RecomputeOp
	Inputs     gorgonia.Nodes
	Output     *gorgonia.Node
	OutputGrad *gorgonia.Node
	Grads      gorgonia.Nodes

	run inner
}

// ReadsCompact reports whether the inner graph can read a weight in compact form.
func (o *RecomputeGradOp) ReadsCompact(input int) bool { return o.run.readsCompact(input) }

// recomputeBackward runs the second inner graph. The last argument is the output of the forward op, which
// the graph computes again.
func recomputeBackward[T cpu.Float](o *RecomputeGradOp, out []T, in opbase.Args) error {
	return o.run.do(in[:len(in)-1], o.Forward.eval, out)
}
