package optim_test

import (
	"encoding/json"
	"math"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/optim"
)

// goldenSettings holds the settings of a case in testdata/golden_optim.safetensors. See make_golden.py in
// the same folder.
type goldenSettings struct {
	Op                                 string
	Rates                              []float64 // the learning rate of every step
	Beta1, Beta2, Eps, Momentum, Decay float64
	Nesterov, RMSScale                 bool
	Steps                              int
}

func (s goldenSettings) optimizer() (optim.Optimizer, error) {
	if s.Op == "AdamW" {
		return optim.NewAdamW(optim.WithBetas(s.Beta1, s.Beta2), optim.WithEps(s.Eps),
			optim.WithWeightDecay(s.Decay))
	}

	scale := optim.SpectralScale
	if s.RMSScale {
		scale = optim.RMSScale
	}

	return optim.NewMuon(optim.WithMomentum(s.Momentum), optim.WithNesterov(s.Nesterov),
		optim.WithIterations(s.Steps),
		optim.WithWeightDecay(s.Decay), optim.WithScale(scale))
}

// TestGolden compares the parameter after every step with PyTorch's.
func TestGolden(t *testing.T) {
	tensors, metadata, err := safetensors.Load("../testdata/golden_optim.safetensors")
	if err != nil {
		t.Fatal(err)
	}

	var cases map[string]goldenSettings
	if err := json.Unmarshal([]byte(metadata["cases"]), &cases); err != nil {
		t.Fatal(err)
	}

	data := make(map[string]safetensors.Tensor)
	for _, x := range tensors {
		data[x.Name] = x
	}

	for name, s := range cases {
		start, grads, after := data[name+"/p"], data[name+"/g"].Data.([]float32),
			data[name+"/y"].Data.([]float64)
		t.Run(name+"/float64", func(t *testing.T) {
			checkGolden[float64](t, s, start, grads, after, 1e-13)
		})
		t.Run(name+"/float32", func(t *testing.T) {
			checkGolden[float32](t, s, start, grads, after, 1e-6)
		})
	}
}

func checkGolden[T float32 | float64](t *testing.T, s goldenSettings, start safetensors.Tensor,
	grads []float32, after []float64, most float64) {
	o, err := s.optimizer()
	if err != nil {
		t.Fatal(err)
	}

	value := goldenConvert[T](start.Data.([]float32))
	n := len(value)
	for i, rate := range s.Rates {
		if err := o.SetLR(rate); err != nil {
			t.Fatal(err)
		}
		p := goldenParameter{goldenDense(value, start.Shape),
			goldenDense(goldenConvert[T](grads[i*n:][:n]), start.Shape)}
		if err := o.Step([]gorgonia.ValueGrad{p}); err != nil {
			t.Fatal(err)
		}
		var difference, norm float64
		for j, want := range after[i*n:][:n] {
			difference += math.Pow(float64(value[j])-want, 2)
			norm += want * want
		}
		if e := math.Sqrt(difference / norm); !(e <= most) {
			t.Fatalf(
				"after step %d the parameter has error %.3g, want at most %g\n got %v\nwant %v",
				i+1, e, most, value, after[i*n:][:n])
		}
	}
}

// goldenParameter is a value with a gradient, as Gorgonia passes them to a solver.
type goldenParameter struct{ value, grad gorgonia.Value }

func (p goldenParameter) Name() string                  { return "w" }
func (p goldenParameter) Value() gorgonia.Value         { return p.value }
func (p goldenParameter) Grad() (gorgonia.Value, error) { return p.grad, nil }

func goldenDense[T float32 | float64](data []T, shape []int) *tensor.Dense {
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
}

func goldenConvert[T float32 | float64](data []float32) []T {
	out := make([]T, len(data))
	for i, v := range data {
		out[i] = T(v)
	}
	return out
}
