package directions

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// matrixOf returns an out×in matrix with the given singular values, and its right singular vectors. The
// singular vectors are columns of Householder reflections, in a different order than their values.
func matrixOf(out, in int, sigma []float64, r *rand.Rand) (g []float32, right [][]float64) {
	vectors := func(n int) [][]float64 {
		v, square := make([]float64, n), 0.0
		for i := range v {
			v[i] = r.NormFloat64()
			square += v[i] * v[i]
		}
		all := make([][]float64, len(sigma))
		for k := range all {
			all[k] = make([]float64, n)
			for i := range n {
				all[k][i] = -2 * v[k] * v[i] / square
			}
			all[k][k]++
		}
		return all
	}

	left := vectors(out)
	right = vectors(in)
	g = make([]float32, out*in)
	for i := range out {
		for j := range in {
			sum := 0.0
			for k, s := range sigma {
				sum += s * left[k][i] * right[k][j]
			}
			g[i*in+j] = float32(sum)
		}
	}

	return g, right
}

// TestOf compares singular values and directions with the known ones for matrices of various shapes, and
// checks that the result is reproducible.
func TestOf(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, shape := range [][2]int{{40, 70}, {70, 40}, {12, 12}, {300, 20}} {
		out, in := shape[0], shape[1]
		sigma := []float64{1, 9, 0.01, 4, 2, 0.5, 0.1, 0.05}
		order := []int{1, 3, 4, 0, 5}
		g, right := matrixOf(out, in, sigma, r)
		h := Of(g, out, in, len(order))
		square := 0.0
		for _, s := range sigma {
			square += s * s
		}
		require.InDelta(t, math.Sqrt(square/float64(out*in)), h.Norm, 1e-6)
		require.Len(t, h.Sigma, len(order))
		for k, at := range order {
			require.InEpsilon(t, sigma[at], h.Sigma[k], 1e-3, "%v: value %d", shape, k)
			along, length := 0.0, 0.0
			for i, v := range h.Directions[k] {
				along += float64(v) * right[at][i]
				length += float64(v) * float64(v)
			}
			require.InDelta(t, 1, math.Abs(along), 1e-3, "%v: direction %d", shape, k)
			require.InDelta(t, 1, length, 1e-4)
		}
		require.Equal(t, h, Of(g, out, in, len(order)))
	}
}

// TestLowRank checks that directions beyond the rank of the gradient have singular values of almost 0,
// that there are no more directions than columns, and that a gradient that is 0 or not finite has no
// directions.
func TestLowRank(t *testing.T) {
	g := make([]float32, 6*5)
	require.Empty(t, Of(g, 6, 5, 3).Directions)
	for i := range 5 {
		g[2*5+i] = float32(i) // a single row, so the rank is 1
	}

	h := Of(g, 6, 5, 3)
	require.InEpsilon(t, math.Sqrt(30), h.Sigma[0], 1e-5)
	for _, s := range h.Sigma[1:] {
		require.Less(t, s, 1e-5)
	}

	require.LessOrEqual(t, len(Of(g, 6, 5, 100).Directions), 5)
	g[0] = float32(math.NaN())
	require.Empty(t, Of(g, 6, 5, 3).Directions)
}
