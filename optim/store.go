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

// maxSteps is the maximum step count. Bias correction uses float64, which represents all integers up
// to this one. At one step per nanosecond, reaching it takes more than 100 days.
const maxSteps = min(1<<53, math.MaxInt-1)

// ErrOverflow is wrapped by the error of a step if its update made a parameter NaN or infinite.
// Unlike after other errors, parameters and optimizer state have changed, so continue from a
// checkpoint.
var ErrOverflow = errors.New("the update overflowed")

// entry is the state of one parameter. Before the parameter's first step, there are no moments.
type entry struct {
	shape   []int
	dtype   tensor.Dtype
	kernel  *Kernel
	step    int
	moments []any // each []float32, []float64 or []uint8
}

// steps returns the tensor with the parameter's step count.
func (e *entry) steps(name string) Tensor {
	return Tensor{name + "." + stepField, []int{1}, []int64{int64(e.step)}}
}

// overflowed returns an ErrOverflow if a parameter is not finite after a step.
func overflowed(ps []params.Param) error {
	for _, p := range ps {
		if at := nonFinite(p.Value); at >= 0 {
			return fmt.Errorf("%w: parameter %q is not finite at element %d of shape %v",
				ErrOverflow, p.Name, at, p.Shape)
		}
	}
	return nil
}

// nonFinite returns the index of the first NaN or infinity among floats, or −1.
func nonFinite(data any) int {
	switch d := data.(type) {
	case []float32:
		return array.FirstNonFinite(d)
	case []float64:
		return array.FirstNonFinite(d)
	}
	return -1
}

// declarations returns an empty entry for each parameter of a model, by name. Parameters do not need
// gradients yet.
func declarations(model []gorgonia.ValueGrad) (map[string]*entry, error) {
	decls := make(map[string]*entry, len(model))
	for i, vg := range model {
		if params.Missing(vg) {
			return nil, fmt.Errorf("parameter #%d is nil", i)
		}

		name, v := params.Name(vg), vg.Value()
		switch {
		case name == "":
			return nil, fmt.Errorf("parameter #%d has no name, which its state needs",
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

// fieldsOf groups the tensors of a state by parameter and field, and returns the parameters in
// their order in the state. If two tensors have the same name, the last one counts. Names without a
// dot are ignored.
func fieldsOf(state []Tensor) (fields map[string]map[string]Tensor, order []string) {
	fields = map[string]map[string]Tensor{}
	for _, t := range state {
		dot := strings.LastIndexByte(t.Name, '.')
		if dot < 1 {
			continue
		}

		name := t.Name[:dot]
		if fields[name] == nil {
			fields[name] = map[string]Tensor{}
			order = append(order, name)
		}
		fields[name][t.Name[dot+1:]] = t
	}

	return fields, order
}

// widest returns the shape of the largest moment among a parameter's tensors. This is the parameter's
// shape, since every kernel keeps a moment of that shape and none that is larger.
func widest(fields map[string]Tensor) (shape []int) {
	most := -2 // an impossible shape counts as −1
	for _, field := range slices.Sorted(maps.Keys(fields)) {
		if n := elements(fields[field].Shape); field != stepField && n > most {
			shape, most = fields[field].Shape, n
		}
	}
	return shape
}

// parse returns the entries of a state. Each entry must be complete, with a step count and all
// moments of the parameter's kernel in the right shapes and types.
func (u *updater) parse(state []Tensor) (map[string]*entry, error) {
	seen := map[string]bool{}
	for _, t := range state {
		if strings.LastIndexByte(t.Name, '.') < 1 {
			return nil, fmt.Errorf("tensor %q: want a name such as \"weight.%s\"", t.Name, stepField)
		}
		if seen[t.Name] {
			return nil, fmt.Errorf("there are two tensors %q", t.Name)
		}
		seen[t.Name] = true
	}

	fields, names := fieldsOf(state)
	slices.Sort(names)
	parsed, errs := make([]*entry, len(names)), make([]error, len(names))
	parallel.Each(len(names), func(i int) {
		parsed[i], errs[i] = u.parseEntry(names[i], fields[names[i]])
	})

	entries := make(map[string]*entry, len(names))
	for i, name := range names {
		if errs[i] != nil {
			return nil, fmt.Errorf("parameter %q: %w", name, errs[i])
		}
		entries[name] = parsed[i]
	}

	return entries, nil
}

// parseEntry returns the entry that consists of a parameter's tensors.
func (u *updater) parseEntry(name string, fields map[string]Tensor) (*entry, error) {
	steps, ok := fields[stepField].Data.([]int64)
	if !ok || len(steps) != 1 || steps[0] < 1 || steps[0] > maxSteps {
		return nil, fmt.Errorf("%s is %v, want one int64 of 1 to %d", stepField,
			shortened(fields[stepField].Data), int64(maxSteps))
	}

	e := &entry{step: int(steps[0]), shape: slices.Clone(widest(fields))}
	e.kernel = u.Rule(name, e.shape).Kernel
	wanted := e.kernel.MomentNames()
	for _, f := range slices.Sorted(maps.Keys(fields)) {
		if f != stepField && !slices.Contains(wanted, f) {
			return nil, fmt.Errorf("it has %s, but %s keeps %s: the state belongs to another "+
				"optimizer, or to one with other options", f, e.kernel,
				strings.Join(wanted, " and "))
		}
	}

	for _, m := range e.kernel.Moments {
		t, ok := fields[m.Name]
		if !ok {
			return nil, fmt.Errorf("there is no %s", m.Name)
		}
		if err := e.add(m, t); err != nil {
			return nil, err
		}
	}

	return e, nil
}

// add checks a tensor and appends a copy of it to the entry's moments.
func (e *entry) add(m Moment, t Tensor) error {
	dtype, n := dtypeOf(t.Data)
	codes, isCodes := t.Data.([]uint8)
	if isCodes {
		n = len(codes)
	}

	switch {
	case m.Codes == nil && (n < 0 || isCodes):
		return fmt.Errorf("%s holds a %T, want []float32 or []float64", m.Name, t.Data)
	case m.Codes != nil && !isCodes:
		return fmt.Errorf("%s holds a %T, want []uint8", m.Name, t.Data)
	case elements(t.Shape) < 0:
		return fmt.Errorf("%s has shape %v, which no tensor can have", m.Name, t.Shape)
	case n != elements(t.Shape):
		return fmt.Errorf("%s has %d elements, want %d for shape %v", m.Name, n,
			elements(t.Shape), t.Shape)
	case !slices.Equal(t.Shape, m.Shape(e.shape)),
		!isCodes && e.dtype != (tensor.Dtype{}) && dtype != e.dtype:
		return fmt.Errorf("%s is %v of shape %v, unlike the parameter's other moments", m.Name,
			dtype, t.Shape)
	}

	if err := checkMoment(m, t.Data); err != nil {
		return err
	}

	if !isCodes {
		e.dtype = dtype
	}

	e.moments = append(e.moments, clone(t.Data))
	return nil
}

// checkMoment returns an error unless all elements are finite and means of squares and scales are
// not negative. Other elements would make a weight NaN or infinite. All codes are valid.
//
// Every state that steps produce must pass, regardless of the betas. The mean of the gradients is
// therefore not compared with the mean of their squares: for β2 ≤ β1² their ratio is unbounded,
// since without gradients the squares decay to zero faster.
func checkMoment(m Moment, data any) error {
	at, want := nonFinite(data), "a finite number"
	switch {
	case at >= 0:
	case m.Mean == OfSquares:
		at, want = negative(data), "a mean of squares, which is at least 0"
	case m.Mean == IsScale:
		at, want = negative(data), "a scale, which is at least 0"
	}

	if at < 0 {
		return nil
	}

	return fmt.Errorf("%s is %v at element %d, want %s: the state is corrupted, or from a run that "+
		"diverged; continue from an older checkpoint", m.Name,
		reflect.ValueOf(data).Index(at), at, want)
}

// negative returns the index of the first element below zero, or −1.
func negative(data any) int {
	switch d := data.(type) {
	case []float32:
		return parallel.Index(len(d), func(i int) bool { return d[i] < 0 })
	case []float64:
		return parallel.Index(len(d), func(i int) bool { return d[i] < 0 })
	}
	return -1
}

// elements returns the number of elements of an untrusted shape, or −1 if no int can hold it.
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

// shortened returns data in a form short enough for messages.
func shortened(data any) any {
	if v := reflect.ValueOf(data); v.Kind() == reflect.Slice && v.Len() > 8 {
		return fmt.Sprintf("a %T of %d elements", data, v.Len())
	}
	return data
}

// dtypeOf returns the type and length of a slice of floats, and −1 for anything else.
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
	case []uint8:
		return slices.Clone(d)
	}
	return data
}
