// Package params reads the data that optimizers and gradient tools need from Gorgonia's parameters:
// name, shape, and the memory of value and gradient.
package params

import (
	"fmt"
	"slices"
	"strings"
	"unsafe"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/array"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// Param is one parameter. Value and Grad are both []float32 or both []float64, and are the
// parameter's own memory in row-major order, so writes to them change the parameter.
type Param struct {
	Name        string
	Shape       tensor.Shape
	Dtype       tensor.Dtype
	Value, Grad any
}

// Reader reads parameters. It caches the result, so that reading the same parameters again
// allocates nothing. The zero value is ready to use. A Reader must not be used concurrently.
type Reader struct {
	params []Param
	kept   []values
	names  map[string]int
}

// values are the Gorgonia values that a parameter was read from.
type values struct {
	value, grad gorgonia.Value
}

// Read returns the parameters of model in order. The slice is valid until the next call. Every
// parameter must have a value and a gradient of the same shape and float type, both contiguous and
// row-major, and names must be unique.
func (r *Reader) Read(model []gorgonia.ValueGrad) ([]Param, error) {
	if r.fresh(model) {
		return r.params, nil
	}

	r.params, r.kept = slices.Grow(r.params[:0], len(model)), slices.Grow(r.kept[:0], len(model))
	r.names = make(map[string]int, len(model))
	for i, vg := range model {
		p, v, err := read(vg)
		if err != nil {
			*r = Reader{}
			return nil, fmt.Errorf("parameter %s: %w", Label(Name(vg), i), err)
		}
		if first, ok := r.names[p.Name]; ok && p.Name != "" {
			*r = Reader{}
			return nil, fmt.Errorf("parameters %d and %d have the same name %q", first, i, p.Name)
		}
		r.names[p.Name] = i
		r.params, r.kept = append(r.params, p), append(r.kept, v)
	}

	return r.params, nil
}

// fresh reports whether the cached parameters belong to model.
func (r *Reader) fresh(model []gorgonia.ValueGrad) bool {
	if len(model) != len(r.params) {
		return false
	}

	for i, vg := range model {
		if Missing(vg) {
			return false
		}
		g, err := vg.Grad()
		if p := &r.params[i]; err != nil || p.Name != Name(vg) ||
			!same(vg.Value(), r.kept[i].value, p, p.Value) ||
			!same(g, r.kept[i].grad, p, p.Grad) {
			return false
		}
	}

	return true
}

// same reports whether v is the value read before and still has the given memory and p's shape.
func same(v, read gorgonia.Value, p *Param, memory any) bool {
	switch v := v.(type) {
	case *gorgonia.F32, *gorgonia.F64:
		return v == read
	case *tensor.Dense:
		if v != read || !slices.Equal(v.Shape(), p.Shape) || v.Dtype() != p.Dtype ||
			v.IsMaterializable() {
			return false
		}
		switch x := memory.(type) {
		case []float32:
			return v.Uintptr() == uintptr(unsafe.Pointer(unsafe.SliceData(x)))
		case []float64:
			return v.Uintptr() == uintptr(unsafe.Pointer(unsafe.SliceData(x)))
		}
	}

	return false
}

// read reads one parameter.
func read(vg gorgonia.ValueGrad) (Param, values, error) {
	if Missing(vg) {
		return Param{}, values{}, fmt.Errorf("is nil")
	}

	p, v := Param{Name: Name(vg)}, vg.Value()
	if v == nil {
		return p, values{}, fmt.Errorf("has no value: bind one with gorgonia.Let")
	}

	g, err := vg.Grad()
	if err != nil || g == nil {
		return p, values{}, fmt.Errorf(
			"has no gradient: run a machine created with gorgonia.BindDualValues for this parameter")
	}

	p.Shape, p.Dtype = v.Shape().Clone(), v.Dtype()
	if g.Dtype() != p.Dtype || !slices.Equal(g.Shape(), p.Shape) {
		return p, values{}, fmt.Errorf(
			"value is %v of shape %v, but the gradient is %v of shape %v",
			p.Dtype, p.Shape, g.Dtype(), g.Shape())
	}

	if p.Value, err = Memory(v); err != nil {
		return p, values{}, fmt.Errorf("value %w", err)
	}

	if p.Grad, err = Memory(g); err != nil {
		return p, values{}, fmt.Errorf("gradient %w", err)
	}

	return p, values{v, g}, nil
}

// Memory returns the elements of v, a float scalar or a contiguous row-major tensor of floats,
// without copying them.
func Memory(v gorgonia.Value) (any, error) {
	switch v := v.(type) {
	case *gorgonia.F32:
		return slice((*float32)(v)), nil
	case *gorgonia.F64:
		return slice((*float64)(v)), nil
	case *tensor.Dense:
		if v.IsMaterializable() || v.DataOrder().IsColMajor() && v.Dims() > 1 {
			return nil, fmt.Errorf(
				"is a view, a lazy transpose or column-major: want a contiguous, row-major tensor")
		}
		switch v.Dtype() {
		case tensor.Float32:
			return v.Float32s()[:opbase.Size(v.Shape())], nil
		case tensor.Float64:
			return v.Float64s()[:opbase.Size(v.Shape())], nil
		}
	}

	return nil, fmt.Errorf("is a %T of %v: want a dense tensor or a scalar of float32 or float64",
		v, v.Dtype())
}

// slice returns a slice of the element that p points to.
func slice[T cpu.Float](p *T) []T { return unsafe.Slice(p, 1) }

// NonFinite returns the index of the first NaN or infinity in the gradient, or −1 if all elements
// are finite.
func (p Param) NonFinite() int {
	if g, ok := p.Grad.([]float32); ok {
		return array.FirstNonFinite(g)
	}
	return array.FirstNonFinite(p.Grad.([]float64))
}

// Missing reports whether vg is nil or a nil node.
func Missing(vg gorgonia.ValueGrad) bool {
	n, isNode := vg.(*gorgonia.Node)
	return vg == nil || isNode && n == nil
}

// Name returns the name that the user gave vg, or "" if it has none.
func Name(vg gorgonia.ValueGrad) string {
	nm, ok := vg.(gorgonia.Namer)
	if !ok || Missing(vg) {
		return ""
	}
	name := nm.Name()
	if n, ok := vg.(*gorgonia.Node); ok && n.Op() == nil && strings.HasPrefix(name, "%!s(<nil>)(") {
		return "" // Node.Name generates this for an input without a name
	}
	return name
}

// Label returns a parameter's name for messages: quoted, or its number if it has no name.
func Label(name string, i int) string {
	if name == "" {
		return fmt.Sprintf("#%d (unnamed)", i)
	}
	return fmt.Sprintf("%q", name)
}
