package autodiff

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/params"
)

// rowMajorCopy returns a contiguous row-major copy of v, whatever its layout.
func rowMajorCopy(v gorgonia.Value) (gorgonia.Value, error) {
	d, ok := v.(*tensor.Dense)
	if !ok {
		return gorgonia.CloneValue(v)
	}
	if !d.IsMaterializable() && !d.DataOrder().IsColMajor() {
		return gorgonia.CloneValue(v)
	}

	flat, err := opbase.Flat(d)
	if err != nil {
		return nil, err
	}
	return tensor.New(tensor.WithShape(d.Shape()...), tensor.WithBacking(flat)), nil
}

// floats returns the float64 elements of v without copying them.
func floats(v gorgonia.Value) ([]float64, error) {
	m, err := params.Memory(v)
	if err != nil {
		return nil, err
	}
	f, ok := m.([]float64)
	if !ok {
		return nil, fmt.Errorf("is %v, want float64", v.Dtype())
	}
	return f, nil
}
