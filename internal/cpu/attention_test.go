package cpu

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestAttentionAt wants single rows to be those of the whole.
func TestAttentionAt(t *testing.T) {
	// Scores reach 20, whose float32 rounding, 1e-6, becomes a relative error of their exponentials.
	t.Run("float32", func(t *testing.T) { testAttentionAt[float32](t, 1e-5) })
	t.Run("float64", func(t *testing.T) { testAttentionAt[float64](t, 1e-14) })
}

func testAttentionAt[T Float](t *testing.T, tolerance float64) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	for _, s := range []AttentionShape{{Heads: 1, KVHeads: 1, HeadDim: 2}, {Heads: 6, KVHeads: 2, HeadDim: 18}, {Heads: 3, KVHeads: 3, HeadDim: 64}} {
		s.Batch, s.Seq, s.Causal, s.Scale = 1, 150, true, 0.3
		normal := func(n int) []T {
			x := make([]T, n)
			for i := range x {
				x[i] = T(r.NormFloat64())
			}
			return x
		}
		qd, kd := s.Heads*s.HeadDim, s.KVHeads*s.HeadDim
		q, k, v := normal(s.Seq*qd), normal(s.Seq*kd), normal(s.Seq*kd)
		want, lse := make([]T, len(q)), make([]T, s.Seq*s.Heads)
		Attention(want, lse, q, k, v, s)
		// The sums of the terms' sizes: what the terms themselves sum to may nearly cancel, and then has few right digits.
		size := make([]T, len(q))
		Attention(size, lse, q, k, absolute(slices.Clone(v)), s)
		for _, p := range []int{0, 1, 63, 64, 65, 149} {
			y := make([]T, qd)
			for i := range y {
				y[i] = T(math.NaN())
			}
			AttentionAt(y, q[p*qd:][:qd], k[:(p+1)*kd], v[:(p+1)*kd], p, s)
			var diff, norm float64
			for i, w := range want[p*qd:][:qd] {
				diff, norm = diff+math.Pow(float64(y[i]-w), 2), norm+math.Pow(float64(size[p*qd+i]), 2)
			}
			if off := math.Sqrt(diff / norm); !(off < tolerance) {
				t.Errorf("%+v: row %d differs by %.2g", s, p, off)
			}
		}
	}
}
