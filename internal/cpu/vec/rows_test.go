package vec

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/internal/cpu/cputest"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// TestRows compares the row kernels of every instruction set with the same code in float64, for all
// lengths up to several vectors and some longer ones, with canaries around the results.
func TestRows(t *testing.T) {
	adam := AdamW[float64]{Keep: 0.999, Rate: 3e-3, Root: 0.3, Gain1: 0.1, Beta2: 0.95,
		Gain2: 0.05, Eps: 1e-8}
	adam32 := AdamW[float32]{Keep: float32(adam.Keep), Rate: float32(adam.Rate),
		Root: float32(adam.Root), Gain1: float32(adam.Gain1),
		Beta2: float32(adam.Beta2), Gain2: float32(adam.Gain2), Eps: float32(adam.Eps)}

	// Each has a float32 and a float64 form over the same six vectors, and returns a sum or 0.
	type kernels struct {
		f32 func(x [][]float32) float64
		f64 func(x [][]float64) float64
	}
	for name, k := range map[string]kernels{
		"squares": {func(x [][]float32) float64 {
			return SumSquares(x[0])
		}, func(x [][]float64) float64 { return SumSquares(x[0]) }},
		"sum64": {func(x [][]float32) float64 { return Sum64(x[0]) },
			func(x [][]float64) float64 { return Sum64(x[0]) }},
		"dot3": {func(x [][]float32) float64 { return Dot3(x[0], x[1], x[2]) },
			func(x [][]float64) float64 { return Dot3(x[0], x[1], x[2]) }},
		"dot": {func(x [][]float32) float64 {
			return float64(Dot(x[0], x[1]))
		}, func(x [][]float64) float64 { return Dot(x[0], x[1]) }},
		"mulScaled": {func(x [][]float32) float64 { MulScaled(x[0], x[1], x[2], 0.7); return 0 },
			func(x [][]float64) float64 { MulScaled(x[0], x[1], x[2], 0.7); return 0 }},
		"normGradient": {func(x [][]float32) float64 {
			NormGradient(x[0], x[1], x[2], x[3], 0.7, -0.2)
			return 0
		},
			func(x [][]float64) float64 {
				NormGradient(x[0], x[1], x[2], x[3], 0.7, -0.2)
				return 0
			}},
		"addScaled": {func(x [][]float32) float64 { AddScaled(x[0], x[1], x[2], -1.3); return 0 },
			func(x [][]float64) float64 { AddScaled(x[0], x[1], x[2], -1.3); return 0 }},
		"rotate": {func(x [][]float32) float64 {
			Rotate(x[0], x[1], x[2], x[3], x[4], x[5], -1)
			return 0
		},
			func(x [][]float64) float64 {
				Rotate(x[0], x[1], x[2], x[3], x[4], x[5], -1)
				return 0
			}},
		"addVectors": {func(x [][]float32) float64 { Add(x[0], x[0], x[1]); return 0 },
			func(x [][]float64) float64 { Add(x[0], x[0], x[1]); return 0 }},
		"addNumber": {func(x [][]float32) float64 { AddNumber(x[0], x[1], 1.7); return 0 },
			func(x [][]float64) float64 { AddNumber(x[0], x[1], 1.7); return 0 }},
		"scale": {func(x [][]float32) float64 {
			Scale(x[0], -2.5)
			return 0
		}, func(x [][]float64) float64 { Scale(x[0], -2.5); return 0 }},
		"softmaxGradient": {func(x [][]float32) float64 {
			SoftmaxGradient(x[0], x[1], 0.3)
			return 0
		},
			func(x [][]float64) float64 { SoftmaxGradient(x[0], x[1], 0.3); return 0 }},
		"adamW": {func(x [][]float32) float64 {
			adam32.Step(x[0], x[1], x[2], cputest.Absolute(x[3]))
			return 0
		},
			func(x [][]float64) float64 {
				adam.Step(x[0], x[1], x[2], cputest.Absolute(x[3]))
				return 0
			}},
	} {
		t.Run(name, func(t *testing.T) {
			cputest.EachISA(t, func(t *testing.T) {
				r := randtest.New(t)
				for _, n := range append(span(0, 70), 255, 1000, 1025) {
					var buffers, x [6][]float32
					var want [6][]float64
					for i := range x {
						buffers[i], x[i] = cputest.Padded(n)
						copy(x[i], cputest.Normal(r, n, 1))
						want[i] = make([]float64, n)
						for j, v := range x[i] {
							want[i][j] = float64(v)
						}
					}

					var sizes [6][]float64 // Σ of the terms' magnitudes, because the terms may cancel
					for i := range want {
						sizes[i] = cputest.Absolute(slices.Clone(want[i]))
					}
					size := math.Abs(k.f64(sizes[:]))
					got, sum := k.f32(x[:]), k.f64(want[:])
					if !(math.Abs(got-sum) <= 1e-6*size) {
						t.Fatalf("%d elements: the sum is %v, want %v", n, got, sum)
					}

					for i := range x {
						cputest.CanariesLive(t, buffers[i])
						for j, v := range x[i] {
							if w := want[i][j]; math.Abs(float64(v)-w) > 1e-6*(1+math.Abs(w)) {
								t.Fatalf("%d elements: vector %d is %v at %d, want %v", n, i, v, j,
									w)
							}
						}
					}
				}
			})
		})
	}
}

func span(lo, hi int) []int {
	var all []int
	for i := lo; i < hi; i++ {
		all = append(all, i)
	}
	return all
}

// TestFinite puts each kind of non-finite value at every position of a row.
func TestFinite(t *testing.T) {
	cputest.EachISA(t, func(t *testing.T) {
		r := rand.New(rand.NewPCG(1, 2))
		for n := range 70 {
			x := cputest.Normal(r, n, 1e30)
			if !Finite(x) {
				t.Fatalf("%d finite elements are called otherwise", n)
			}
			for i := range x {
				for _, v := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
					kept := x[i]
					x[i] = float32(v)
					if Finite(x) {
						t.Fatalf("%v at %d of %d is not seen", v, i, n)
					}
					x[i] = kept
				}
			}
		}
	})
}
