package optim

import (
	"cmp"
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
	"github.com/kasmina-go/kasmina/internal/opbase"
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

var errZero = errors.New(
	"the optimiser is nil or its zero value: NewAdamW and NewMuon make optimisers")

// What the update rules keep of a parameter beside its count of steps.
var (
	adamWFields = []string{"exp_avg", "exp_avg_sq"}
	muonFields  = []string{"momentum_buffer"}
	keptBy      = map[string]string{"exp_avg": "AdamW", "exp_avg_sq": "AdamW",
		"momentum_buffer": "Muon"}
)

// store holds what an optimiser remembers of each parameter, by name.
type store struct {
	fields  []string // names of the moments
	entries map[string]*entry
	reader  params.Reader
}

// entry is what a store remembers of one parameter: moments of its size, nil before its first step.
type entry struct {
	shape   []int
	dtype   tensor.Dtype
	step    int
	moments []any // each []float32 or []float64
}

func newStore(fields ...string) store { return store{fields: fields, entries: map[string]*entry{}} }

// readModel returns the parameters of a step, all of which can be updated: with names and finite
// gradients.
func (s *store) readModel(model []gorgonia.ValueGrad) ([]params.Param, error) {
	ps, err := s.reader.Read(model)
	if err != nil {
		return nil, err
	}
	for i, p := range ps {
		if p.Name == "" {
			return nil, fmt.Errorf("parameter #%d has no name, under which its state could be kept",
				i)
		}
		if at := p.NonFinite(); at >= 0 {
			return nil, fmt.Errorf(
				"parameter %q: the gradient is not finite at element %d of shape %v",
				p.Name, at, p.Shape)
		}
	}
	return ps, nil
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

// fits returns an error if a parameter is not what the store knows under its name.
func (s *store) fits(name string, shape []int, dtype tensor.Dtype) error {
	e, ok := s.entries[name]
	if ok && (e.dtype != dtype || !slices.Equal(e.shape, shape)) {
		return fmt.Errorf(
			"parameter %q is %v of shape %v, but %v of shape %v is known under this name",
			name, dtype, tensor.Shape(shape), e.dtype, tensor.Shape(e.shape))
	}
	return nil
}

// allFit is fits for all entries. With closed, no entry may be new to the store.
func (s *store) allFit(entries map[string]*entry, closed bool) error {
	for _, name := range slices.Sorted(maps.Keys(entries)) {
		if closed && s.entries[name] == nil {
			return fmt.Errorf("there is no parameter %q", name)
		}
		if err := s.fits(name, entries[name].shape, entries[name].dtype); err != nil {
			return err
		}
	}
	return nil
}

// declare adds entries, which fit, where there are none.
func (s *store) declare(entries map[string]*entry) {
	for name, e := range entries {
		if s.entries[name] == nil {
			s.entries[name] = e
		}
	}
}

// entry returns the parameter's entry, with moments.
func (s *store) entry(p params.Param) *entry {
	e := s.entries[p.Name]
	if e == nil {
		e = &entry{shape: p.Shape, dtype: p.Dtype}
		s.entries[p.Name] = e
	}
	for len(e.moments) < len(s.fields) {
		if n := opbase.Size(p.Shape); p.Dtype == tensor.Float32 {
			e.moments = append(e.moments, make([]float32, n))
		} else {
			e.moments = append(e.moments, make([]float64, n))
		}
	}
	return e
}

// forget makes the elements from ≤ i < to of a parameter's moments zero.
func (s *store) forget(name string, from, to int) error {
	e := s.entries[name]
	if e == nil {
		return nil
	}
	if n := opbase.Size(e.shape); from < 0 || to < from || to > n {
		return fmt.Errorf("elements %d to %d of parameter %q, which has %d", from, to, name, n)
	}
	for _, m := range e.moments {
		switch m := m.(type) {
		case []float32:
			clear(m[from:to])
		case []float64:
			clear(m[from:to])
		}
	}
	return nil
}

// drop forgets that there are parameters of some names.
func (s *store) drop(names []string) {
	for _, name := range names {
		delete(s.entries, name)
	}
}

// state returns copies of all moments and step counts, in order of names.
func (s *store) state() []Tensor {
	var state []Tensor
	for name, e := range s.entries {
		if e.step == 0 {
			continue
		}
		state = append(state, Tensor{name + "." + stepField, []int{1}, []int64{int64(e.step)}})
		for i, f := range s.fields {
			state = append(state, Tensor{name + "." + f, slices.Clone(e.shape), e.moments[i]})
		}
	}
	slices.SortFunc(state, func(a, b Tensor) int { return cmp.Compare(a.Name, b.Name) })
	parallel.Each(len(state), func(i int) { state[i].Data = clone(state[i].Data) })
	return state
}

// restore replaces everything remembered by entries; parameters that are declared but not among
// them start anew.
func (s *store) restore(entries map[string]*entry) {
	for name, e := range s.entries {
		s.entries[name] = &entry{shape: e.shape, dtype: e.dtype}
	}
	maps.Copy(s.entries, entries)
}

// parse returns the entries that state holds. Each must be complete: the moments that fieldsOf
// names, of one shape and type, and a step count.
func parse(state []Tensor,
	fieldsOf func(name string, shape []int) []string) (map[string]*entry, error) {
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
		fields := func(shape []int) []string { return fieldsOf(names[i], shape) }
		parsed[i], errs[i] = parseEntry(parts[names[i]], fields)
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

func parseEntry(parts map[string]Tensor, fieldsOf func(shape []int) []string) (*entry, error) {
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
	fields := fieldsOf(e.shape)
	for _, f := range slices.Sorted(maps.Keys(parts)) {
		if owner := keptBy[f]; owner != "" && !slices.Contains(fields, f) {
			return nil, fmt.Errorf("it has %s, which %s keeps, where %s is wanted, which %s "+
				"keeps: the state is that of another optimiser, or of one with other "+
				"options", f, owner, strings.Join(fields, " and "),
				keptBy[fields[0]])
		}
	}
	for _, f := range fields {
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
		if err := checkMoment(f, t.Data); err != nil {
			return nil, err
		}
		e.dtype = dtype
		e.moments = append(e.moments, clone(t.Data))
	}
	for _, field := range slices.Sorted(maps.Keys(parts)) {
		if field != stepField && !slices.Contains(fields, field) {
			return nil, fmt.Errorf("%s means nothing to this optimiser, which keeps %v for it",
				field, fields)
		}
	}
	return e, nil
}

// checkMoment returns an error unless the elements of a moment are finite and, for means of squares,
// not negative. Any other element would make a weight NaN or infinite.
//
// Whatever steps leave must pass, with any betas. So the mean of the gradients is not compared with
// the mean of their squares. For β2 ≤ β1² their ratio has no bound: where gradients stay away, the
// squares decay faster, down to zero.
func checkMoment(field string, data any) error {
	at, want := nonFinite(data), "a finite number"
	if at < 0 && field == "exp_avg_sq" {
		at, want = negative(data), "a mean of squares, which is at least 0"
	}
	if at < 0 {
		return nil
	}
	return fmt.Errorf("%s is %v at element %d, want %s: the state is damaged, or of a run that "+
		"diverged; go on from an older checkpoint", field,
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
