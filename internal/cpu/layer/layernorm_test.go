package layer

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// TestLayerNormFar checks rows with a mean that is large relative to their deviation, and rows of
// equal numbers.
func TestLayerNormFar(t *testing.T) {
	t.Run("float32", func(t *testing.T) { testLayerNormFar[float32](t, 1e-6) })
	t.Run("float64", func(t *testing.T) { testLayerNormFar[float64](t, 1e-12) })
}

func testLayerNormFar[T cpu.Float](t *testing.T, tolerance float64) {
	seed := randtest.Seed(t)
	r := rand.New(rand.NewPCG(seed, 1))
	for _, d := range []int{5, 16, 64, 769, 3000} {
		for _, offset := range []float64{0, 1e3, -1e5, 1e7, 16e6} {
			t.Run(fmt.Sprintf("%d at %g", d, offset), func(t *testing.T) {
				const rows, eps = 3, 1e-5
				x, w, b, g := make([]T, rows*d), make([]T, d), make([]T, d), make([]T, rows*d)
				for i := range x {
					x[i] = T(offset + math.Round(8*r.NormFloat64()))
					g[i] = T(r.NormFloat64())
				}
				for i := range w {
					w[i], b[i] = T(r.NormFloat64()), T(r.NormFloat64())
				}

				y, stats := make([]T, rows*d), make([]T, rows*LayerNormStats)
				LayerNorm(y, stats, x, w, b, eps)
				dx, dw, db := make([]T, rows*d), make([]T, d), make([]T, d)
				LayerNormBackward(dx, dw, db, g, x, w, stats)

				wantY, wantX, wantW := layerNormOfShifted(x, w, b, g, offset, eps)
				near(t, "y", y, wantY, tolerance)
				near(t, "dx", dx, wantX, 10*tolerance)
				near(t, "dw", dw, wantW, 10*tolerance)
			})
		}

		equal, zero := make([]T, d), make([]T, d)
		y, stats := make([]T, d), make([]T, LayerNormStats)
		for i := range equal {
			equal[i], zero[i] = 1e7, T(i)
		}
		LayerNorm(y, stats, equal, equal, zero, 1e-5)
		near(t, "a row of equal numbers", y, float64s(zero), 1e-7)
	}
}

// layerNormOfShifted computes y, dx and dw in float64. It subtracts offset from x first, which does not change the
// results.
func layerNormOfShifted[T cpu.Float](x, w, b, g []T, offset, eps float64) (y, dx, dw []float64) {
	d := len(w)
	dw = make([]float64, d)
	for r := 0; r < len(x); r += d {
		var mean, variance, meanGW, along float64
		c, gw := make([]float64, d), make([]float64, d)
		for i := range d {
			c[i], gw[i] = float64(x[r+i])-offset, float64(g[r+i])*float64(w[i])
			mean += c[i] / float64(d)
			meanGW += gw[i] / float64(d)
		}
		for i := range d {
			c[i] -= mean
			variance += c[i] * c[i] / float64(d)
		}
		s := 1 / math.Sqrt(variance+eps)
		for i := range d {
			along += gw[i] * c[i] * s / float64(d)
		}

		for i := range d {
			n := c[i] * s
			y = append(y, n*float64(w[i])+float64(b[i]))
			dx = append(dx, s*(gw[i]-meanGW-n*along))
			dw[i] += float64(g[r+i]) * n
		}
	}

	return y, dx, dw
}

func near[T cpu.Float](t *testing.T, what string, got []T, want []float64, tolerance float64) {
	t.Helper()
	var diff, size float64
	for i, v := range want {
		diff += (float64(got[i]) - v) * (float64(got[i]) - v)
		size += v * v
	}
	if off := math.Sqrt(diff / (size + 1e-12)); !(off <= tolerance) {
		t.Errorf("%s differs by %.2g, want at most %g", what, off, tolerance)
	}
}

func float64s[T cpu.Float](x []T) (y []float64) {
	for _, v := range x {
		y = append(y, float64(v))
	}
	return y
}
