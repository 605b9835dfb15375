package hf

import (
	"fmt"
	"regexp"
	"slices"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm"
)

// stored is a tensor in the files of weights. It holds one parameter, or the rows of several
// parameters.
type stored struct {
	name   string
	shape  []int
	params []string
	// transposed means that the parameters' rows are the columns of the tensor.
	transposed bool
}

// layout returns the tensors that a family's files contain for a configuration.
type layout func(c llm.Config) []stored

// plainLayout stores each parameter as a separate tensor with the parameter's name.
func plainLayout(c llm.Config) (all []stored) {
	for name, shape := range c.Parameters() {
		all = append(all, stored{name: name, shape: shape, params: []string{name}})
	}
	return all
}

// place locates a parameter as a range of rows in a stored tensor, or of columns if the tensor is
// transposed.
type place struct {
	stored
	from, rows, width int
}

// places locates the parameters of a configuration in stored tensors.
func places(c llm.Config, all []stored) map[string]place {
	shapes := map[string][]int{}
	for name, shape := range c.Parameters() {
		shapes[name] = shape
	}

	at := map[string]place{}
	for _, t := range all {
		from := 0
		for _, name := range t.params {
			shape := shapes[name]
			p := place{stored: t, from: from, rows: shape[0], width: 1}
			if len(shape) == 2 {
				p.width = shape[1]
			}
			at[name] = p
			from += p.rows
		}
	}

	return at
}

// whole reports whether the parameter is the entire stored tensor.
func (p place) whole() bool { return len(p.params) == 1 && !p.transposed }

// elements returns the number of the parameter's elements.
func (p place) elements() int { return p.rows * p.width }

// index returns the index of a parameter's element in the stored tensor.
func (p place) index(row, column int) int {
	if p.transposed {
		return column*p.shape[1] + p.from + row
	}
	return (p.from+row)*p.width + column
}

// extract returns the parameter's bytes, in the parameter's order. The argument all holds the bytes of
// the stored tensor.
func (p place) extract(all []byte, size int) []byte {
	if !p.transposed {
		return all[p.from*p.width*size:][:p.elements()*size]
	}

	part := make([]byte, 0, p.elements()*size)
	for row := range p.rows {
		for column := range p.width {
			part = append(part, all[p.index(row, column)*size:][:size]...)
		}
	}

	return part
}

// assemble returns the values of a stored tensor. If the tensor is a parameter, the result shares its
// memory.
func (t stored) assemble(m *llm.Model) *tensor.Dense {
	at := places(m.Config, []stored{t})
	if p := at[t.params[0]]; p.whole() {
		return m.Param(t.params[0])
	}

	values := make([]float32, tensor.Shape(t.shape).TotalSize())
	for _, name := range t.params {
		p := at[name]
		for i := range p.elements() {
			row, column := i/p.width, i%p.width
			switch x := m.Param(name).Data().(type) {
			case []float32:
				values[p.index(row, column)] = x[i]
			case []float64:
				values[p.index(row, column)] = float32(x[i])
			}
		}
	}

	return tensor.New(tensor.WithShape(t.shape...), tensor.WithBacking(values))
}

// fit checks that the weights consist of the stored tensors of a configuration. Tensors with ignored
// names may be present as well.
func (w *weights) fit(c llm.Config, all []stored, ignored *regexp.Regexp) error {
	rest := map[string]*safetensors.File{}
	for name, f := range w.in {
		if !ignored.MatchString(name) {
			rest[name] = f
		}
	}

	for _, t := range all {
		f, ok := rest[t.name]
		if !ok {
			return fmt.Errorf("tensor %s is missing from the weights, which have %d tensors", t.name,
				len(w.in))
		}
		dtype, have, err := f.Info(t.name)
		if err != nil {
			return err
		}
		if !readable(dtype) {
			return fmt.Errorf("tensor %s is of type %s, want F32, F16 or BF16", t.name, dtype)
		}
		if !slices.Equal(have, t.shape) {
			return fmt.Errorf("tensor %s has shape %v, but config.json implies %v", t.name, have,
				t.shape)
		}
		delete(rest, t.name)
	}

	w.places = places(c, all)
	return w.checkLeftover(c, rest)
}
