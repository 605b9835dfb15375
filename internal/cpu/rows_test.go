package cpu

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestRows compares the row kernels of every instruction set with the same code in float64, over all lengths up to several
// vectors and some beyond, with canaries around what they write.
func TestRows(t *testing.T) {
	adam := adamW[float64]{keep: 0.999, rate: 3e-3, root: 0.3, gain1: 0.1, beta2: 0.95, gain2: 0.05, eps: 1e-8}
	adam32 := adamW[float32]{keep: float32(adam.keep), rate: float32(adam.rate), root: float32(adam.root), gain1: float32(adam.gain1),
		beta2: float32(adam.beta2), gain2: float32(adam.gain2), eps: float32(adam.eps)}
	// Each has a float32 and a float64 form over the same six vectors, and returns a sum or 0.
	type kernels struct {
		f32 func(x [][]float32) float64
		f64 func(x [][]float64) float64
	}
	for name, k := range map[string]kernels{
		"squares": {func(x [][]float32) float64 { return Squares(x[0]) }, func(x [][]float64) float64 { return Squares(x[0]) }},
		"dot3": {func(x [][]float32) float64 { return dot3(x[0], x[1], x[2]) },
			func(x [][]float64) float64 { return dot3(x[0], x[1], x[2]) }},
		"dot": {func(x [][]float32) float64 { return float64(dot(x[0], x[1])) }, func(x [][]float64) float64 { return dot(x[0], x[1]) }},
		"mulScaled": {func(x [][]float32) float64 { mulScaled(x[0], x[1], x[2], 0.7); return 0 },
			func(x [][]float64) float64 { mulScaled(x[0], x[1], x[2], 0.7); return 0 }},
		"normGradient": {func(x [][]float32) float64 { normGradient(x[0], x[1], x[2], x[3], 0.7, -0.2); return 0 },
			func(x [][]float64) float64 { normGradient(x[0], x[1], x[2], x[3], 0.7, -0.2); return 0 }},
		"addScaled": {func(x [][]float32) float64 { addScaled(x[0], x[1], x[2], -1.3); return 0 },
			func(x [][]float64) float64 { addScaled(x[0], x[1], x[2], -1.3); return 0 }},
		"rotate": {func(x [][]float32) float64 { rotate(x[0], x[1], x[2], x[3], x[4], x[5], -1); return 0 },
			func(x [][]float64) float64 { rotate(x[0], x[1], x[2], x[3], x[4], x[5], -1); return 0 }},
		"addVectors": {func(x [][]float32) float64 { addVectors(x[0], x[0], x[1]); return 0 },
			func(x [][]float64) float64 { addVectors(x[0], x[0], x[1]); return 0 }},
		"scale": {func(x [][]float32) float64 { scale(x[0], -2.5); return 0 }, func(x [][]float64) float64 { scale(x[0], -2.5); return 0 }},
		"softmaxGradient": {func(x [][]float32) float64 { softmaxGradient(x[0], x[1], 0.3); return 0 },
			func(x [][]float64) float64 { softmaxGradient(x[0], x[1], 0.3); return 0 }},
		"adamW": {func(x [][]float32) float64 { adam32.step(x[0], x[1], x[2], absolute(x[3])); return 0 },
			func(x [][]float64) float64 { adam.step(x[0], x[1], x[2], absolute(x[3])); return 0 }},
	} {
		t.Run(name, func(t *testing.T) {
			eachISA(t, func(t *testing.T) {
				r := newRand(t)
				for _, n := range append(span(0, 70), 255, 1000, 1025) {
					var buffers, x [6][]float32
					var want [6][]float64
					for i := range x {
						buffers[i], x[i] = padded(n)
						copy(x[i], normal(r, n, 1))
						want[i] = make([]float64, n)
						for j, v := range x[i] {
							want[i][j] = float64(v)
						}
					}
					var sizes [6][]float64 // Σ of the terms' sizes: the terms themselves may cancel
					for i := range want {
						sizes[i] = absolute(slices.Clone(want[i]))
					}
					size := math.Abs(k.f64(sizes[:]))
					got, sum := k.f32(x[:]), k.f64(want[:])
					if !(math.Abs(got-sum) <= 1e-6*size) {
						t.Fatalf("%d elements: the sum is %v, want %v", n, got, sum)
					}
					for i := range x {
						canariesLive(t, buffers[i])
						for j, v := range x[i] {
							if w := want[i][j]; math.Abs(float64(v)-w) > 1e-6*(1+math.Abs(w)) {
								t.Fatalf("%d elements: vector %d is %v at %d, want %v", n, i, v, j, w)
							}
						}
					}
				}
			})
		})
	}
}

func absolute[T Float](x []T) []T {
	for i, v := range x {
		x[i] = max(v, -v)
	}
	return x
}

func span(lo, hi int) []int {
	var all []int
	for i := lo; i < hi; i++ {
		all = append(all, i)
	}
	return all
}

// TestFinite hides each kind of value that is not finite at every place of a row.
func TestFinite(t *testing.T) {
	eachISA(t, func(t *testing.T) {
		r := rand.New(rand.NewPCG(1, 2))
		for n := range 70 {
			x := normal(r, n, 1e30)
			if !Finite(x) {
				t.Fatalf("%d finite elements are called otherwise", n)
			}
			for i := range x {
				for _, v := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
					kept := x[i]
					x[i] = float32(v)
					if Finite(x) || FirstNonFinite(x) != i {
						t.Fatalf("%v at %d of %d is not seen", v, i, n)
					}
					x[i] = kept
				}
			}
		}
	})
}
