package optimizer

import (
	"math"
	"testing"

	"github.com/kasmina-go/kasmina/internal/cpu/cputest"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// nsReference is the iteration in float64 by the formula, with plain loops and without transposing.
func nsReference(x []float64, rows, cols, steps int) []float64 {
	mul := func(a, b []float64, m, k, n int) []float64 {
		c := make([]float64, m*n)
		for i := range m {
			for j := range n {
				for p := range k {
					c[i*n+j] += a[i*k+p] * b[p*n+j]
				}
			}
		}
		return c
	}

	flip := func(a []float64, rows, cols int) []float64 {
		t := make([]float64, len(a))
		for i := range rows {
			for j := range cols {
				t[j*rows+i] = a[i*cols+j]
			}
		}
		return t
	}

	var norm float64
	for _, v := range x {
		norm += v * v
	}

	norm = math.Sqrt(norm) + 1e-7
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = v / norm
	}

	for range steps {
		a := mul(y, flip(y, rows, cols), rows, cols, rows)
		aa := mul(a, a, rows, rows, rows)
		ay, aay := mul(a, y, rows, rows, cols), mul(aa, y, rows, rows, cols)
		for i := range y {
			y[i] = 3.4445*y[i] - 4.7750*ay[i] + 2.0315*aay[i]
		}
	}

	return y
}

func TestNewtonSchulzFollowsTheFormula(t *testing.T) {
	r := randtest.New(t)
	for _, s := range [][3]int{{1, 1, 5}, {1, 7, 3}, {7, 1, 3}, {5, 5, 5}, {3, 11, 5}, {11, 3, 5},
		{33, 65, 5}, {65, 33, 1}} {
		rows, cols, steps := s[0], s[1], s[2]
		x := cputest.Normals(r, rows*cols)
		want := nsReference(x, rows, cols, steps)
		y := make([]float64, len(x))
		y[0] = math.NaN()
		NewtonSchulz(y, x, rows, cols, steps)
		if e := cputest.Relative(y, want); !(e < 1e-12) {
			t.Errorf("%v float64: relative error %.2g", s, e)
		}

		x32 := cputest.Narrow(x)
		y32 := make([]float32, len(x))
		NewtonSchulz(y32, x32, rows, cols, steps)
		if e := cputest.Relative(cputest.Widen(y32), nsReference(cputest.Widen(x32), rows, cols,
			steps)); !(e < 2e-5) {
			t.Errorf("%v float32: relative error %.2g", s, e)
		}
	}
}

// TestNewtonSchulzOrthogonalizes checks that five steps make a well-conditioned matrix nearly
// orthogonal, so that y·yᵀ is close to the identity.
func TestNewtonSchulzOrthogonalizes(t *testing.T) {
	r := randtest.New(t)
	const m, n = 8, 200
	y := make([]float64, m*n)
	NewtonSchulz(y, cputest.Normals(r, m*n), m, n, 5)
	for i := range m {
		for j := range m {
			var dot, want float64
			for k := range n {
				dot += y[i*n+k] * y[j*n+k]
			}
			if i == j {
				want = 1
			}
			if math.Abs(dot-want) > 0.5 {
				t.Errorf("(y·yᵀ)[%d,%d] = %.3f, want about %v", i, j, dot, want)
			}
		}
	}
}

func TestNewtonSchulzZeroStaysZero(t *testing.T) {
	y, dx := []float64{1, 2, 3, 4}, make([]float64, 4)
	NewtonSchulz(y, make([]float64, 4), 2, 2, 5)
	NewtonSchulzBackward(dx, make([]float64, 4), []float64{1, 0, 0, 0}, 2, 2, 5)
	for i := range y {
		if y[i] != 0 || math.IsNaN(dx[i]) || math.IsInf(dx[i], 0) {
			t.Fatalf("y = %v, dx = %v, want zeros and finite numbers", y, dx)
		}
	}
}

func TestNewtonSchulzBackwardAgreesWithDifferences(t *testing.T) {
	r := randtest.New(t)
	for _, s := range [][3]int{{1, 1, 2}, {4, 4, 3}, {3, 6, 5}, {6, 3, 5}} {
		rows, cols, steps := s[0], s[1], s[2]
		x, g := cputest.Normals(r, rows*cols), cputest.Normals(r, rows*cols)
		if len(x) == 1 { // away from zero, where the sign jumps
			x[0] = math.Copysign(1+math.Abs(x[0]), x[0])
		}
		dx := make([]float64, len(x))
		NewtonSchulzBackward(dx, x, g, rows, cols, steps)
		loss := func() (sum float64) {
			for i, v := range nsReference(x, rows, cols, steps) {
				sum += v * g[i]
			}
			return sum
		}
		num := make([]float64, len(x))
		central := func(i int, h float64) float64 {
			old := x[i]
			x[i] = old + h
			up := loss()
			x[i] = old - h
			down := loss()
			x[i] = old
			return (up - down) / (2 * h)
		}
		for i := range x {
			num[i] = (4*central(i, 5e-5) - central(i, 1e-4)) / 3
		}
		if rows*cols == 1 {
			if math.Abs(dx[0]) > 1e-5 { // the result for a 1×1 matrix is its sign
				t.Errorf("%v: gradient %v, want about 0", s, dx[0])
			}
			continue
		}

		if e := cputest.Relative(dx, num); !(e < 1e-6) {
			t.Errorf("%v: relative error %.2g", s, e)
		}
	}
}
