package autodiff

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
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
		"plateau at wide steps": {func(t float64) float64 {
			x := (t + 1e-3) / math.Hypot(t+1e-3, 1e-3)
			return 3 + 1e-7*x*x
		}, 5e-5},
		"rounding":           {func(t float64) float64 { return (1e6 + 0.1*t) - 1e6 }, 0.1},
		"constant":           {func(t float64) float64 { return 7 }, 0},
		"mean of both sides": {func(t float64) float64 { return math.Max(t, 0) }, 0.5},
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

// TestDerivativeOfMany draws functions with scales between the narrowest and the widest steps,
// added to a constant cost, as after norms and gates.
func TestDerivativeOfMany(t *testing.T) {
	type function func(t float64) float64
	type span func(low, high float64) float64
	for name, draw := range map[string]func(between span, r *rand.Rand) (f function, want float64){
		"norm of two elements": func(between span, r *rand.Rand) (function, float64) {
			a, b, w, v := between(1e-3, 3), between(1e-3, 3), between(1e-6, 1), between(1e-6, 1)
			norm := func(t float64) float64 { return math.Sqrt(((a+t)*(a+t)+b*b)/2 + 1e-12) }
			n, tanh := norm(0), math.Tanh(a/norm(0))
			slope := a / (2 * n)
			return func(t float64) float64 {
				return 3 + w*math.Tanh((a+t)/norm(t)) - v*math.Sin(1+b/norm(t))
			}, w*(1-tanh*tanh)*(n-a*slope)/(n*n) + v*math.Cos(1+b/n)*b*slope/(n*n)
		},
		"sine": func(between span, r *rand.Rand) (function, float64) {
			k, phase, w := between(1e-3, 3e3), 2*math.Pi*r.Float64(), between(1e-5, 10)
			return func(t float64) float64 { return 2 + w*math.Sin(k*t+phase) }, w * k * math.Cos(phase)
		},
		"saturating": func(between span, r *rand.Rand) (function, float64) {
			k, at, w := between(1e-3, 1e4), r.NormFloat64(), between(1e-5, 10)
			return func(t float64) float64 {
				return 2 + w*math.Tanh(k*t+at)
			}, w * k / (math.Cosh(at) * math.Cosh(at))
		},
		"kink": func(between span, r *rand.Rand) (function, float64) {
			k, at, w := between(1e-3, 100), between(1e-4, 10), between(1e-5, 10)
			return func(t float64) float64 { return 2 + w*k*math.Max(t+at, 0) }, w * k
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(1, 2))
			between := func(low, high float64) float64 {
				return low * math.Pow(high/low, r.Float64())
			}
			for range 20_000 {
				f, want := draw(between, r)
				floor := math.Max(1e-5*math.Abs(f(0)), math.Abs(want))
				got, spread, err := derivative(func(t float64) (float64, error) {
					return f(t), nil
				}, 0.01, func(d float64) float64 {
					return 1e-8 * math.Max(1e-5*math.Abs(f(0)), math.Abs(d))
				})
				require.NoError(t, err)
				require.InDelta(t, want, got, 1e-6*floor, "the error is estimated to be %v", spread)
			}
		})
	}
}
