package opbase

import (
	"fmt"
	"sync"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/graph"
)

// derivative holds the result of an op's SymDiff in a separate graph, for machines that
// differentiate during a run.
type derivative struct {
	once   sync.Once
	err    error
	inputs gorgonia.Nodes
	output *gorgonia.Node
	grad   *gorgonia.Node
	grads  gorgonia.Nodes // by input; nil if the op is not differentiable with respect to it
}

// DoDiff adds to the gradients of the inputs the contribution of the output's gradient, using the
// backward op that SymDiff returns. Gorgonia's LispMachine calls it. An op without SymDiff accepts
// only a gradient of 0, and on a GPU every op fails.
func (b *Base) DoDiff(ctx gorgonia.ExecutionContext, inputs gorgonia.Nodes,
	output *gorgonia.Node) error {
	if err := b.doDiff(ctx, inputs, output); err != nil {
		return fmt.Errorf("%s: gradient: %w", b.name, err)
	}
	return nil
}

// doDiff implements DoDiff.
func (b *Base) doDiff(ctx gorgonia.ExecutionContext, inputs gorgonia.Nodes,
	output *gorgonia.Node) error {
	if ctx.Device != gorgonia.CPU {
		return fmt.Errorf(
			"the node is on %v, want %v: the LispMachine can differentiate this op only there",
			ctx.Device, gorgonia.CPU)
	}

	if len(inputs) != len(b.in) || output == nil {
		return fmt.Errorf("got %d inputs, want %d and an output", len(inputs), len(b.in))
	}

	grad, err := output.Grad()
	if err != nil {
		return err
	}

	d := b.derivative
	if d.once.Do(func() { d.err = d.build(b) }); d.err != nil {
		if zero, err := isZero(grad); err == nil && zero {
			return nil
		}
		return d.err
	}

	values := map[*gorgonia.Node]gorgonia.Value{d.output: output.Value(), d.grad: grad}
	for i, n := range d.inputs {
		values[n] = inputs[i].Value()
	}

	for i, n := range d.grads {
		if n == nil || graph.IsConstant(inputs[i]) {
			continue
		}
		v, err := evaluate(n, values)
		if err != nil {
			return err
		}
		sum, err := inputs[i].Grad()
		if err == nil {
			err = accumulate(sum, v)
		}
		if err != nil {
			return fmt.Errorf("of input %d: %w", i, err)
		}
	}

	return nil
}

// build differentiates the op that contains b.
func (d *derivative) build(b *Base) error {
	op, ok := b.self.(gorgonia.SDOp)
	if !ok {
		return fmt.Errorf("%s is not differentiable: it is a gradient itself", b.name)
	}

	g := gorgonia.NewGraph()
	node := func(o operand, name string) *gorgonia.Node {
		return gorgonia.NewUniqueNode(gorgonia.In(g), gorgonia.WithType(o.typ),
			gorgonia.WithShape(o.shape...), gorgonia.WithName(name))
	}
	for i, in := range b.in {
		d.inputs = append(d.inputs, node(in, fmt.Sprintf("input %d", i)))
	}

	d.output, d.grad = node(b.out, "output"), node(b.out, "gradient")
	var err error
	if d.grads, err = op.SymDiff(d.inputs, d.output, d.grad); err != nil {
		return err
	}

	if len(d.grads) > len(d.inputs) {
		return fmt.Errorf("SymDiff returned %d gradients, want one for each of %d inputs",
			len(d.grads), len(d.inputs))
	}

	return nil
}

// evaluate computes a node from the nodes in values, and adds all intermediate values to them.
func evaluate(n *gorgonia.Node, values map[*gorgonia.Node]gorgonia.Value) (gorgonia.Value, error) {
	if v, ok := values[n]; ok {
		return v, nil
	}

	if graph.IsConstant(n) {
		return n.Value(), nil
	}

	children := graph.Children(n)
	in := make([]gorgonia.Value, len(children))
	for i, child := range children {
		var err error
		if in[i], err = evaluate(child, values); err != nil {
			return nil, err
		}
	}

	v, err := n.Op().Do(in...)
	if err != nil {
		return nil, err
	}

	values[n] = v
	return v, nil
}

// accumulate adds v to sum in place.
func accumulate(sum, v gorgonia.Value) error {
	from, err := Flat(v)
	if err != nil {
		return err
	}

	switch to := sum.(type) {
	case *gorgonia.F32:
		if x, ok := from.([]float32); ok && len(x) == 1 {
			*to += gorgonia.F32(x[0])
			return nil
		}
	case *gorgonia.F64:
		if x, ok := from.([]float64); ok && len(x) == 1 {
			*to += gorgonia.F64(x[0])
			return nil
		}
	case *tensor.Dense:
		if !to.Shape().Eq(v.Shape()) {
			break
		}
		if to.IsMaterializable() || to.DataOrder().IsColMajor() {
			_, err := tensor.Add(to, v, tensor.UseUnsafe())
			return err
		}
		switch x := from.(type) {
		case []float32:
			return add(sliceOf(to), x)
		case []float64:
			return add(sliceOf(to), x)
		}
	}

	return fmt.Errorf("cannot add a %v of shape %v to a %T", v.Dtype(), v.Shape(), sum)
}

// add adds x to sum.
func add[T cpu.Float](sum any, x []T) error {
	to, ok := sum.([]T)
	if !ok || len(to) != len(x) {
		return fmt.Errorf("cannot add %d elements of type %T to a %T", len(x), *new(T), sum)
	}
	for i, v := range x {
		to[i] += v
	}
	return nil
}

// isZero reports whether all elements of v are 0.
func isZero(v gorgonia.Value) (bool, error) {
	flat, err := Flat(v)
	if err != nil {
		return false, err
	}

	switch x := flat.(type) {
	case []float32:
		return allZero(x), nil
	case []float64:
		return allZero(x), nil
	}

	return false, fmt.Errorf("the gradient is a %T", v)
}

// allZero reports whether all elements of x are 0.
func allZero[T cpu.Float](x []T) bool {
	for _, v := range x {
		if v != 0 {
			return false
		}
	}
	return true
}
