package array

import (
	"math"
	"testing"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/cputest"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

func TestVectorReductions(t *testing.T) {
	r := randtest.New(t)
	for _, n := range []int{0, 1, cpu.VectorGrain - 1, cpu.VectorGrain, 2*cpu.VectorGrain + 3} {
		x := cputest.Normals(r, n)
		var want float64
		for _, v := range x {
			want += v * v
		}
		if got := SumSquares(x); math.Abs(got-want) > 1e-10*want {
			t.Errorf("n=%d: sum of squares %v, want %v", n, got, want)
		}

		blocks, sum := make([]float64, cpu.CeilDiv(n, cpu.VectorGrain)), 0.0
		if BlockSquares(blocks, x); n > 0 {
			for _, b := range blocks {
				sum += b
			}
		}

		if got := SumSquares(x); got != sum {
			t.Errorf("n=%d: blocks add up to %v, want %v", n, sum, got)
		}
		if i := FirstNonFinite(x); i != -1 {
			t.Errorf("n=%d: index %d of finite numbers is called non-finite", n, i)
		}
		if n < 2 {
			continue
		}

		at := r.IntN(n - 1)
		x[at], x[n-1] = math.Inf(-1), math.NaN()
		if i := FirstNonFinite(x); i != at {
			t.Errorf("n=%d: first non-finite element at %d, want %d", n, i, at)
		}
	}
}

func BenchmarkFirstNonFinite(b *testing.B) {
	x := make([]float32, 1<<20)
	b.SetBytes(4 * int64(len(x)))
	for b.Loop() {
		FirstNonFinite(x)
	}
}

// TestFirstNonFinite puts each kind of non-finite value at every position of a vector.
func TestFirstNonFinite(t *testing.T) {
	cputest.EachISA(t, func(t *testing.T) {
		r := randtest.New(t)
		for n := range 70 {
			x := cputest.Normal(r, n, 1e30)
			for i := range x {
				for _, v := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
					kept := x[i]
					x[i] = float32(v)
					if at := FirstNonFinite(x); at != i {
						t.Fatalf("%v at %d of %d is seen at %d", v, i, n, at)
					}
					x[i] = kept
				}
			}
		}
	})
}
