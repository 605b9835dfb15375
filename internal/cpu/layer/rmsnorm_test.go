package layer

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// TestRMSNormBackward compares the gradients with the formula, including cases where several spans of
// rows contribute to the gradient of w.
func TestRMSNormBackward(t *testing.T) {
	t.Run("float32", func(t *testing.T) { testRMSNormBackward[float32](t, 2e-6) })
	t.Run("float64", func(t *testing.T) { testRMSNormBackward[float64](t, 1e-13) })
}

func testRMSNormBackward[T cpu.Float](t *testing.T, tolerance float64) {
	seed := randtest.Seed(t)
	r := rand.New(rand.NewPCG(seed, 1))
	for _, d := range []int{7, 33, 256, 600} {
		rows := 1 + r.IntN(200)
		values := func(n int, of func() float64) []T {
			x := make([]T, n)
			for i := range x {
				x[i] = T(of())
			}
			return x
		}
		x, g, w := values(rows*d, r.NormFloat64), values(rows*d, r.NormFloat64),
			values(d, r.NormFloat64)
		y, rstd, dx, dw := values(rows*d, math.NaN), values(rows, math.NaN),
			values(rows*d, math.NaN), values(d, math.NaN)
		RMSNorm(y, rstd, x, w, 1e-5)
		RMSNormBackward(dx, dw, g, x, w, rstd)
		wantX, wantW := make([]float64, rows*d), make([]float64, d)
		for row := range rows {
			x, g := x[row*d:][:d], g[row*d:][:d]
			var squares, along float64
			for i := range d {
				squares += float64(x[i]) * float64(x[i])
			}
			s := 1 / math.Sqrt(squares/float64(d)+1e-5)
			for i := range d {
				along += float64(g[i]) * float64(w[i]) * float64(x[i]) * s / float64(d)
			}
			for i := range d {
				n := float64(x[i]) * s
				wantX[row*d+i] = s * (float64(g[i])*float64(w[i]) - n*along)
				wantW[i] += float64(g[i]) * n
			}
		}

		for name, c := range map[string]struct {
			got  []T
			want []float64
		}{"dx": {dx, wantX}, "dw": {dw, wantW}} {
			var diff, norm float64
			for i, v := range c.want {
				diff, norm = diff+math.Pow(float64(c.got[i])-v, 2), norm+v*v
			}
			if off := math.Sqrt(diff) / max(math.Sqrt(norm), 1e-3); !(off < tolerance) {
				t.Errorf("%d×%d: %s differs by %.2g", rows, d, name, off)
			}
		}
	}
}
