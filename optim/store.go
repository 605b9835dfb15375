package optim

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu/array"
	"github.com/kasmina-go/kasmina/internal/parallel"
	"github.com/kasmina-go/kasmina/internal/params"
)

// stepField is the suffix of the tensor that counts a parameter's steps.
const stepField = "step"

// maxSteps is the last count of steps up to which float64, in which bias correction computes, has
// all whole numbers. A step a nanosecond takes more than 100 days to get there.
const maxSteps = min(1<<53, math.MaxInt-1)

// ErrOverflow is wrapped by the error of a step whose update made a parameter NaN or infinite.
// Unlike after other errors the parameters have changed then, and what the optimiser remembers of
// them: go on from a checkpoint.
var ErrOverflow = errors.New("the update overflowed")

// entry is what an optimizer remembers of one parameter. The moments, of the parameter's size, are
// nil before its first step.
type entry struct {
	shape   []int
	dtype   tensor.Dtype
	kernel  *Kernel
	step    int
	moments []any // each []float32 or []float64
}

// steps returns the tensor that counts the steps of a parameter.
func (e *entry) steps(name string) Tensor {
	return Tensor{name + "." + stepField, []int{1}, []int64{int64(e.step)}}
}

// overflowed returns an ErrOverflow if a step has made one of the parameters NaN or infinite.
func overflowed(ps []params.Param) error {
	for _, p := range ps {
		if at := nonFinite(p.Value); at >= 0 {
			return fmt.Errorf("%w: parameter %q is not finite at element %d of shape %v",
				ErrOverflow, p.Name, at, p.Shape)
		}
	}
	return nil
}

// nonFinite returns the index of the first NaN or infinity in a slice of floats, and −1 if there is
// none.
func nonFinite(data any) int {
	switch d := data.(type) {
	case []float32:
		return array.FirstNonFinite(d)
	case []float64:
		return array.FirstNonFinite(d)
	}
	return -1
}

// declarations returns an empty entry for each parameter of a model, by name. Gradients need not be
// there yet.
func declarations(model []gorgonia.ValueGrad) (map[string]*entry, error) {
	decls := make(map[string]*entry, len(model))
	for i, vg := range model {
		if params.Missing(vg) {
			return nil, fmt.Errorf("parameter #%d is nil", i)
		}
		name, v := params.Name(vg), vg.Value()
		switch {
		case name == "":
			return nil, fmt.Errorf("parameter #%d has no name, under which its state could be kept",
				i)
		case decls[name] != nil:
			return nil, fmt.Errorf("two parameters have the name %q", name)
		case v == nil:
			return nil, fmt.Errorf("parameter %q has no value", name)
		case v.Dtype() != tensor.Float32 && v.Dtype() != tensor.Float64:
			return nil, fmt.Errorf("parameter %q is %v, want float32 or float64", name, v.Dtype())
		}
		decls[name] = &entry{shape: v.Shape().Clone(), dtype: v.Dtype()}
	}
	return decls, nil
}

// parse returns the entries that state holds. Each must be complete: the moments of the parameter's
// kernel, of one shape and type, and a step count.
func parse(state []Tensor, kernelOf func(name string, shape []int) *Kernel) (map[string]*entry,
	error) {
	parts := map[string]map[string]Tensor{}
	for _, t := range state {
		dot := strings.LastIndexByte(t.Name, '.')
		if dot < 1 {
			return nil, fmt.Errorf("tensor %q: want a name such as \"weight.%s\"", t.Name,
				stepField)
		}
		name, field := t.Name[:dot], t.Name[dot+1:]
		if parts[name] == nil {
			parts[name] = map[string]Tensor{}
		}
		if _, ok := parts[name][field]; ok {
			return nil, fmt.Errorf("there are two tensors %q", t.Name)
		}
		parts[name][field] = t
	}
	names := slices.Sorted(maps.Keys(parts))
	parsed, errs := make([]*entry, len(names)), make([]error, len(names))
	parallel.Each(len(names), func(i int) {
		kernel := func(shape []int) *Kernel { return kernelOf(names[i], shape) }
		parsed[i], errs[i] = parseEntry(parts[names[i]], kernel)
	})
	entries := make(map[string]*entry, len(parts))
	for i, name := range names {
		if errs[i] != nil {
			return nil, fmt.Errorf("parameter %q: %w", name, errs[i])
		}
		entries[name] = parsed[i]
	}
	return entries, nil
}

func parseEntry(parts map[string]Tensor, kernelOf func(shape []int) *Kernel) (*entry, error) {
	steps, ok := parts[stepField].Data.([]int64)
	if !ok || len(steps) != 1 || steps[0] < 1 || steps[0] > maxSteps {
		return nil, fmt.Errorf("%s is %v, want one int64 of 1 to %d", stepField,
			shortened(parts[stepField].Data), int64(maxSteps))
	}
	e := &entry{step: int(steps[0])}
	for _, field := range slices.Sorted(maps.Keys(parts)) {
		if field != stepField {
			e.shape = slices.Clone(parts[field].Shape)
		}
	}

	e.kernel = kernelOf(e.shape)
	wanted := e.kernel.MomentNames()
	for _, f := range slices.Sorted(maps.Keys(parts)) {
		if f != stepField && !slices.Contains(wanted, f) {
			return nil, fmt.Errorf("it has %s, but %s keeps %s: the state is that of another "+
				"optimizer, or of one with other options", f, e.kernel,
				strings.Join(wanted, " and "))
		}
	}

	for _, m := range e.kernel.Moments {
		f := m.Name
		t, ok := parts[f]
		dtype, n := dtypeOf(t.Data)
		switch {
		case !ok:
			return nil, fmt.Errorf("there is no %s", f)
		case n < 0:
			return nil, fmt.Errorf("%s holds a %T, want []float32 or []float64", f, t.Data)
		case elements(t.Shape) < 0:
			return nil, fmt.Errorf("%s has shape %v, which no tensor has", f, t.Shape)
		case n != elements(t.Shape):
			return nil, fmt.Errorf("%s has %d elements, want %d for shape %v", f, n,
				elements(t.Shape), t.Shape)
		case !slices.Equal(t.Shape, e.shape) || len(e.moments) > 0 && dtype != e.dtype:
			return nil, fmt.Errorf("%s is %v of shape %v, unlike the parameter's other moments", f,
				dtype, t.Shape)
		}
		if err := checkMoment(m, t.Data); err != nil {
			return nil, err
		}
		e.dtype = dtype
		e.moments = append(e.moments, clone(t.Data))
	}
	return e, nil
}

// checkMoment returns an error unless the elements of a moment are finite and, for means of squares,
// not negative. Any other element would make a weight NaN or infinite.
//
// Whatever steps leave must pass, with any betas. So the mean of the gradients is not compared with
// the mean of their squares. For β2 ≤ β1² their ratio has no bound: where gradients stay away, the
// squares decay faster, down to zero.
func checkMoment(m Moment, data any) error {
	at, want := nonFinite(data), "a finite number"
	if at < 0 && m.Mean == OfSquares {
		at, want = negative(data), "a mean of squares, which is at least 0"
	}
	if at < 0 {
		return nil
	}
	return fmt.Errorf("%s is %v at element %d, want %s: the state is damaged, or of a run that "+
		"diverged; go on from an older checkpoint", m.Name,
		reflect.ValueOf(data).Index(at), at, want)
}

// negative returns the index of the first element below zero, and −1 if there is none.
func negative(data any) int {
	switch d := data.(type) {
	case []float32:
		return parallel.Index(len(d), func(i int) bool { return d[i] < 0 })
	case []float64:
		return parallel.Index(len(d), func(i int) bool { return d[i] < 0 })
	}
	return -1
}

// elements returns the number of elements of a shape that comes from outside, and −1 if it has none
// that an int can hold.
func elements(shape []int) int {
	n := 1
	for _, d := range shape {
		if d < 0 || d > 0 && n > math.MaxInt/d {
			return -1
		}
		n *= d
	}
	return n
}

// shortened is a value for messages: a long slice would fill them.
func shortened(data any) any {
	if v := reflect.ValueOf(data); v.Kind() == reflect.Slice && v.Len() > 8 {
		return fmt.Sprintf("a %T of %d elements", data, v.Len())
	}
	return data
}

// dtypeOf returns type and length of a slice of floats, and −1 for anything else.
func dtypeOf(data any) (tensor.Dtype, int) {
	switch d := data.(type) {
	case []float32:
		return tensor.Float32, len(d)
	case []float64:
		return tensor.Float64, len(d)
	}
	return tensor.Dtype{}, -1
}

func clone(data any) any {
	switch d := data.(type) {
	case []float32:
		return parallel.Clone(d)
	case []float64:
		return parallel.Clone(d)
	}
	return data
}
