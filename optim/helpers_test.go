package optim_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// param is a parameter as a solver sees it.
type param struct {
	name        string
	value, grad gorgonia.Value
}

func (p *param) Name() string                  { return p.name }
func (p *param) Value() gorgonia.Value         { return p.value }
func (p *param) Grad() (gorgonia.Value, error) { return p.grad, nil }

func matrix[T float32 | float64](data []T, shape ...int) *tensor.Dense {
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(slices.Clone(data)))
}

// newParam returns a parameter with a zero gradient.
func newParam[T float32 | float64](name string, data []T, shape ...int) *param {
	return &param{name, matrix(data, shape...), matrix(make([]T, len(data)), shape...)}
}

func (p *param) data() []float64     { return p.value.(*tensor.Dense).Float64s() }
func (p *param) gradient() []float64 { return p.grad.(*tensor.Dense).Float64s() }

func model(ps ...*param) []gorgonia.ValueGrad {
	m := make([]gorgonia.ValueGrad, len(ps))
	for i, p := range ps {
		m[i] = p
	}
	return m
}

func freshRand(t *testing.T) *rand.Rand {
	t.Helper()
	return randtest.New(t)
}

func normals(r *rand.Rand, shape ...int) []float64 {
	x := make([]float64, opbase.Size(shape))
	for i := range x {
		x[i] = r.NormFloat64()
	}
	return x
}

func narrow(x []float64) []float32 {
	y := make([]float32, len(x))
	for i, v := range x {
		y[i] = float32(v)
	}
	return y
}

// closeTo checks that ‖got − want‖ ≤ tol·‖want‖.
func closeTo(t *testing.T, what string, got, want []float64, tol float64) {
	t.Helper()
	var d, n float64
	for i := range want {
		d += (got[i] - want[i]) * (got[i] - want[i])
		n += want[i] * want[i]
	}
	if !(math.Sqrt(d) <= tol*math.Sqrt(n)) {
		t.Errorf("%s: relative error %.2g\ngot  %v\nwant %v", what, math.Sqrt(d/n), got, want)
	}
}
