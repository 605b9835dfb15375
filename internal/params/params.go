// Package params reads what optimisers and gradient tools need from the parameters that Gorgonia hands them: name, shape
// and the memory of value and gradient.
package params

import (
	"fmt"
	"slices"
	"strings"
	"unsafe"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// Param is one parameter. Value and Grad are both []float32 or both []float64: the memory of the parameter itself, in
// row-major order, so that writes reach it.
type Param struct {
	Name        string
	Shape       tensor.Shape
	Dtype       tensor.Dtype
	Value, Grad any
}

// Read returns the parameters of model in its order. Every one must have a value and a gradient of the same shape and
// float type, each contiguous and row-major; no two may have the same name.
func Read(model []gorgonia.ValueGrad) ([]Param, error) {
	params := make([]Param, len(model))
	seen := make(map[string]int, len(model))
	for i, vg := range model {
		p, err := read(vg)
		if err != nil {
			return nil, fmt.Errorf("parameter %s: %w", Label(Name(vg), i), err)
		}
		if first, ok := seen[p.Name]; ok && p.Name != "" {
			return nil, fmt.Errorf("parameters %d and %d have the same name %q", first, i, p.Name)
		}
		seen[p.Name] = i
		params[i] = p
	}
	return params, nil
}

func read(vg gorgonia.ValueGrad) (Param, error) {
	if vg == nil {
		return Param{}, fmt.Errorf("is nil")
	}
	p := Param{Name: Name(vg)}
	v := vg.Value()
	if v == nil {
		return p, fmt.Errorf("has no value: bind one with gorgonia.Let")
	}
	g, err := vg.Grad()
	if err != nil || g == nil {
		return p, fmt.Errorf("has no gradient: run a machine made with gorgonia.BindDualValues for this parameter")
	}
	p.Shape, p.Dtype = v.Shape().Clone(), v.Dtype()
	if g.Dtype() != p.Dtype || !slices.Equal(g.Shape(), p.Shape) {
		return p, fmt.Errorf("value is %v of shape %v, but the gradient is %v of shape %v",
			p.Dtype, p.Shape, g.Dtype(), g.Shape())
	}
	if p.Value, err = Memory(v); err != nil {
		return p, fmt.Errorf("value %w", err)
	}
	if p.Grad, err = Memory(g); err != nil {
		return p, fmt.Errorf("gradient %w", err)
	}
	return p, nil
}

// Memory returns the elements of v, a float scalar or a contiguous row-major tensor of floats, as the slice that v holds.
func Memory(v gorgonia.Value) (any, error) {
	switch v := v.(type) {
	case *gorgonia.F32:
		return slice((*float32)(v)), nil
	case *gorgonia.F64:
		return slice((*float64)(v)), nil
	case *tensor.Dense:
		if v.IsMaterializable() || v.DataOrder().IsColMajor() && v.Dims() > 1 {
			return nil, fmt.Errorf("is a view, a lazy transpose or column-major: want a contiguous, row-major tensor")
		}
		switch v.Dtype() {
		case tensor.Float32:
			return v.Float32s()[:opbase.Size(v.Shape())], nil
		case tensor.Float64:
			return v.Float64s()[:opbase.Size(v.Shape())], nil
		}
	}
	return nil, fmt.Errorf("is a %T of %v: want a dense tensor or a scalar of float32 or float64", v, v.Dtype())
}

// slice returns the one element that p points at.
func slice[T cpu.Float](p *T) []T { return unsafe.Slice(p, 1) }

// NonFinite returns the index of the first NaN or infinity in the gradient, and −1 if there is none.
func (p Param) NonFinite() int {
	if g, ok := p.Grad.([]float32); ok {
		return cpu.FirstNonFinite(g)
	}
	return cpu.FirstNonFinite(p.Grad.([]float64))
}

// Name returns the name that the user gave vg, and "" if there is none.
func Name(vg gorgonia.ValueGrad) string {
	nm, ok := vg.(gorgonia.Namer)
	if !ok {
		return ""
	}
	name := nm.Name()
	if n, ok := vg.(*gorgonia.Node); ok && n.Op() == nil && strings.HasPrefix(name, "%!s(<nil>)(") {
		return "" // what Node.Name makes up for an input without a name
	}
	return name
}

// Label returns a parameter's name for messages: quoted, or its number where it has none.
func Label(name string, i int) string {
	if name == "" {
		return fmt.Sprintf("#%d (unnamed)", i)
	}
	return fmt.Sprintf("%q", name)
}
