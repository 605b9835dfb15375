// Package value turns Gorgonia's values into what lies in device memory, and back. It knows types
// and shapes, no device.
package value

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// Encode writes the n elements of a value to raw, stored as t.
func Encode(raw []byte, t gpu.DType, v gorgonia.Value, n int) error {
	if t != gpu.Int64 {
		x, err := Floats(v, t, n)
		if err == nil {
			gpu.Encode(raw, t, x)
		}
		return err
	}
	x, err := elements[int](v, t, n)
	for i, v := range x {
		gpu.View[int64](raw)[i] = int64(v)
	}
	return err
}

// Floats returns the n elements of a value that can be stored as t, a type of floats.
func Floats(v gorgonia.Value, t gpu.DType, n int) ([]float32, error) {
	return elements[float32](v, t, n)
}

func elements[T any](v gorgonia.Value, t gpu.DType, n int) ([]T, error) {
	flat, err := opbase.Flat(v)
	if err != nil {
		return nil, err
	}
	if x, ok := flat.([]T); ok && len(x) == n {
		return x, nil
	}
	return nil, fmt.Errorf("the value is a %v of shape %v, want %d elements to store as %v",
		v.Dtype(), v.Shape(), n, t)
}

// Convert writes elements that are stored in one type to raw, stored as t.
func Convert(raw []byte, t gpu.DType, from []byte, stored gpu.DType) {
	if stored == t {
		copy(raw, from)
		return
	}
	var x [1024]float32
	for len(from) > 0 {
		n := min(len(x), len(from)/stored.Size())
		gpu.Decode(x[:n], stored, from)
		gpu.Encode(raw, t, x[:n])
		raw, from = raw[n*t.Size():], from[n*stored.Size():]
	}
}

// Decode returns elements stored as t as a value of type dt.
func Decode(raw []byte, t gpu.DType, dt tensor.Dtype, shape []int) (gorgonia.Value, error) {
	n := opbase.Size(shape)
	switch {
	case dt == tensor.Float32 && t != gpu.Int64:
		x := make([]float32, n)
		gpu.Decode(x, t, raw)
		return opbase.ValueOf(x, shape), nil
	case dt == tensor.Int && t == gpu.Int64:
		x := make([]int, n)
		for i, v := range gpu.View[int64](raw)[:n] {
			x[i] = int(v)
		}
		return opbase.ValueOf(x, shape), nil
	}
	return nil, fmt.Errorf("cannot make a %v of what is stored as %v", dt, t)
}
