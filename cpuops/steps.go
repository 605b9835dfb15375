package cpuops

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/array"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// viewOf reports whether the result of n is a view of its first operand, which needs no computation, and
// the index of the view's first element.
func viewOf(n *gorgonia.Node, in []*value) (from *value, at int, ok bool) {
	if p, ok := n.Op().(*opbase.PartOp); ok {
		return in[0], p.Offset, true
	}
	// Gorgonia does not export the types of its ops.
	if graph.OpType(n) == "gorgonia.reshapeOp" && elementSize(n.Dtype()) > 0 &&
		opbase.Size(n.Shape()) == opbase.Size(in[0].shape) {
		return in[0], 0, true
	}
	return nil, 0, false
}

// choose sets the function that computes a step.
func (c *compiler) choose(s *step) {
	if base := baseOf(s.node); base != nil {
		s.run = func(s *step) error { return base.RunUntil(s.stop, s.out.flat, s.args) }
		return
	}

	s.run = (*step).do
	f, ok := arithmetic(s)
	if !ok {
		return
	}

	s.variants = []string{cpu.Level().String(), gorgoniaVariant}
	if s.variant = c.variant(s.name(), s.variants...); s.variant != gorgoniaVariant {
		s.inPlace = true
		s.run = func(s *step) error {
			switch y := s.out.flat.(type) {
			case []float32:
				array.Arithmetic(f, y, s.args[0].([]float32), s.args[1].([]float32))
			case []float64:
				array.Arithmetic(f, y, s.args[0].([]float64), s.args[1].([]float64))
			}
			return nil
		}
	}
}

var symbols = map[string]array.Op{"+": array.Add, "-": array.Sub, "⊙": array.Mul, "÷": array.Div}

// arithmetic recognizes Gorgonia's elementwise arithmetic on tensors of the same shape, or on a tensor
// and a scalar.
func arithmetic(s *step) (array.Op, bool) {
	f, ok := symbols[graph.Symbol(s.node)]
	for _, v := range s.in {
		ok = ok && v.dt == s.out.dt && (v.dt == tensor.Float32 || v.dt == tensor.Float64) &&
			(len(v.shape) == 0 || slices.Equal(v.shape, s.out.shape))
	}
	return f, ok
}

// do calls the op's own Do and copies the result into planned memory.
func (s *step) do() error {
	values := make([]gorgonia.Value, len(s.in))
	for i, v := range s.in {
		values[i] = v.box(s.args[i])
	}

	o := s.node.Op()
	if i := o.OverwritesInput(); i >= 0 && i < len(values) {
		clone, err := gorgonia.CloneValue(values[i])
		if err != nil {
			return err
		}
		values[i] = clone
	}

	result, err := o.Do(values...)
	if err != nil {
		return err
	}

	if s.out.flat == nil {
		s.out.loose = result
		return nil
	}

	flat, err := opbase.Flat(result)
	if err != nil {
		return err
	}

	if n := move(s.out.flat, flat); n != opbase.Size(s.out.shape) {
		return fmt.Errorf("the result is a %v of shape %v, want %v of shape %v", result.Dtype(),
			result.Shape(), s.out.dt, s.out.shape)
	}

	return nil
}

// move copies elements and returns their number, or −1 if the types or lengths differ.
func move(dst, src any) int {
	switch d := dst.(type) {
	case []float32:
		if x, ok := src.([]float32); ok && len(x) == len(d) {
			return copy(d, x)
		}
	case []float64:
		if x, ok := src.([]float64); ok && len(x) == len(d) {
			return copy(d, x)
		}
	case []int:
		if x, ok := src.([]int); ok && len(x) == len(d) {
			return copy(d, x)
		}
	}

	return -1
}

// box wraps the memory flat in a value that can be passed to an op's Do.
func (v *value) box(flat any) gorgonia.Value {
	switch {
	case v.loose != nil:
		return v.loose
	case v.isInput && len(v.shape) == 0 || flat == nil:
		return v.bound
	}
	return opbase.ValueOf(flat, v.shape)
}

// newValue returns a new value of zeros.
func newValue(dt tensor.Dtype, shape tensor.Shape) gorgonia.Value {
	return tensor.New(tensor.Of(dt), tensor.WithShape(shape...))
}

// show sets v.shown to the value computed by the last run.
func (v *value) show() {
	switch x := v.shown.(type) {
	case nil:
		if v.loose != nil {
			v.shown = v.loose
			return
		}
		v.shown = opbase.ValueOf(v.flat, v.shape)
	case *gorgonia.F32:
		*x = gorgonia.F32(v.flat.([]float32)[0])
	case *gorgonia.F64:
		*x = gorgonia.F64(v.flat.([]float64)[0])
	case *gorgonia.I:
		*x = gorgonia.I(v.flat.([]int)[0])
	}

	if v.loose != nil {
		v.shown = v.loose
	}
}
