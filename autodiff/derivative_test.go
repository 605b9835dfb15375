package autodiff

import (
	"math"
	"testing"
)

func TestDerivative(t *testing.T) {
	for name, c := range map[string]struct {
		f    func(t float64) float64
		want float64
	}{
		"smooth": {func(t float64) float64 {
			return math.Exp(math.Sin(1 + t))
		}, math.Exp(math.Sin(1)) * math.Cos(1)},
		"much faster than the step": {func(t float64) float64 {
			return math.Sin(2000*t + 1)
		}, 2000 * math.Cos(1)},
		"kink within the step": {func(t float64) float64 { return math.Max(t+1e-3, 0) * 3 }, 3},
		"jump within the step": {func(t float64) float64 {
			return 2*t + math.Copysign(5, t+2e-3)
		}, 2},
		"edge of the domain": {func(t float64) float64 {
			return math.Sqrt(t + 1e-3)
		}, 0.5 / math.Sqrt(1e-3)},
		"pole within the step": {func(t float64) float64 { return 1 / (t + 4e-3) }, -1 / 16e-6},
		"rounding":             {func(t float64) float64 { return (1e6 + 0.1*t) - 1e6 }, 0.1},
		"constant":             {func(t float64) float64 { return 7 }, 0},
		"mean of both sides":   {func(t float64) float64 { return math.Max(t, 0) }, 0.5},
	} {
		got, spread, err := derivative(func(t float64) (float64, error) {
			return c.f(t), nil
		}, 0.01,
			func(d float64) float64 { return 1e-8 * math.Max(math.Abs(d), 1e-5) })
		if err != nil || !(math.Abs(got-c.want) <= 5e-7*math.Abs(c.want)) {
			t.Errorf("%s: derivative %v ± %v, error %v, want %v", name, got, spread, err, c.want)
		}
	}
	got, _, err := derivative(func(float64) (float64, error) {
		return math.NaN(), nil
	}, 0.01, math.Abs)
	if err != nil || !math.IsNaN(got) {
		t.Errorf("the derivative of NaN is %v, error %v", got, err)
	}
}
