package op_test

import (
	"math"
	"math/rand/v2"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// random returns a generator whose seed is new on every run and is logged.
func random(t testing.TB) *rand.Rand {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// normal returns normal numbers that float32 holds exactly, so that both precisions start from the same ones.
func normal(r *rand.Rand, n int) []float64 {
	x := make([]float64, n)
	for i := range x {
		x[i] = float64(float32(r.NormFloat64()))
	}
	return x
}

// dense returns x as a tensor of type dt, float32 or float64.
func dense(dt tensor.Dtype, x []float64, shape ...int) *tensor.Dense {
	if dt == tensor.Float32 {
		y := make([]float32, len(x))
		for i, v := range x {
			y[i] = float32(v)
		}
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(y))
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(append([]float64(nil), x...)))
}

func ints(x []int) *tensor.Dense { return tensor.New(tensor.WithShape(len(x)), tensor.WithBacking(x)) }

// floats returns the elements of a value as float64.
func floats(t testing.TB, v gorgonia.Value) []float64 {
	t.Helper()
	switch d := v.Data().(type) {
	case []float64:
		return d
	case []float32:
		y := make([]float64, len(d))
		for i, v := range d {
			y[i] = float64(v)
		}
		return y
	case float64:
		return []float64{d}
	case float32:
		return []float64{float64(d)}
	}
	t.Fatalf("value of type %T", v)
	return nil
}

// distance returns ‖a − b‖ / ‖b‖, or infinity for a NaN or a different length.
func distance(a, b []float64) float64 {
	if len(a) != len(b) {
		return math.Inf(1)
	}
	var diff, norm float64
	for i, v := range b {
		diff += (a[i] - v) * (a[i] - v)
		norm += v * v
	}
	if diff == 0 {
		return 0
	}
	if math.IsNaN(diff) {
		return math.Inf(1)
	}
	return math.Sqrt(diff / norm)
}

// run computes the whole graph.
func run(t testing.TB, g *gorgonia.ExprGraph) {
	t.Helper()
	if err := tryRun(g); err != nil {
		t.Fatal(err)
	}
}

func tryRun(g *gorgonia.ExprGraph) error {
	m := gorgonia.NewTapeMachine(g)
	defer m.Close()
	return m.RunAll()
}

func must(t testing.TB) func(*gorgonia.Node, error) *gorgonia.Node {
	return func(n *gorgonia.Node, err error) *gorgonia.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
}
