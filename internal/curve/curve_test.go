package curve

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
)

// run returns the losses of a run up to the given share of its budget, with noise of the given
// deviation.
func run(t *testing.T, upTo, noise float64, loss func(x float64) float64) (points []Point) {
	t.Helper()
	r := randtest.New(t)
	for x := 0.01; x <= upTo; x += 0.005 {
		points = append(points, Point{x, loss(x) + noise*r.NormFloat64()})
	}
	return points
}

// TestFit checks that a fit of the first part of a run predicts its end, if the loss follows a law
// or a logarithm, or has a steep start that does not follow the law.
func TestFit(t *testing.T) {
	steep := func(x float64) float64 { return 2 + 0.3*math.Pow(x, -0.4) + 5*math.Exp(-100*x) }
	for name, loss := range map[string]func(float64) float64{
		"law":    func(x float64) float64 { return 1.5 + 0.4*math.Pow(x, -0.7) },
		"log":    func(x float64) float64 { return 2 - 0.3*math.Log(x) },
		"steep":  steep,
		"slower": func(x float64) float64 { return 1 + math.Pow(x, -0.1) },
	} {
		t.Run(name, func(t *testing.T) {
			l, ok := Fit(run(t, 0.4, 0, loss))
			require.True(t, ok)
			for _, x := range []float64{0.4, 0.5, 0.59} {
				require.InDelta(t, loss(x), l.At(x), 0.06*(loss(0.1)-loss(x)), "at %v", x)
			}
			require.InDelta(t, l.At(0.6), l.At(1), 0.01)
			l, ok = Fit(run(t, 0.4, 0.003, loss))
			require.True(t, ok)
			require.InDelta(t, loss(0.5), l.At(0.5), 0.1*(loss(0.1)-loss(0.5)))
		})
	}
}

// TestNoFit checks that curves that do not follow a law yield no fit.
func TestNoFit(t *testing.T) {
	for name, points := range map[string][]Point{
		"bends":    run(t, 0.4, 0, func(x float64) float64 { return 2 - x + 8*math.Max(0, 0.25-x) }),
		"none":     nil,
		"few":      run(t, 0.04, 0, func(x float64) float64 { return 1 / x }),
		"rises":    run(t, 0.4, 0, func(x float64) float64 { return x }),
		"together": {{1, 3}, {1, 3}, {1, 2}, {1, 2}, {1, 2}, {1, 1}, {1, 1}, {1, 1}, {1, 1}},
		"at 0":     make([]Point, 20),
	} {
		_, ok := Fit(points)
		require.False(t, ok, name)
	}
}
