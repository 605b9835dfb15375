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

// TestDocumentTiles wants documents that begin where tiles do to leave those before them alone: no NaN in one reaches another.
func TestDocumentTiles(t *testing.T) {
	t.Run("float32", testDocumentTiles[float32])
	t.Run("float64", testDocumentTiles[float64])
}

func testDocumentTiles[T Float](t *testing.T) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	const border = 2 * queryTile
	s := AttentionShape{Batch: 2, Seq: border + queryTile + 5, Heads: 4, KVHeads: 2, HeadDim: 6, Causal: true, Scale: 0.4}
	rows := s.Batch * s.Seq
	for i := range rows {
		s.Starts = append(s.Starts, i%s.Seq/border*border)
	}
	nan := func(n int) []T {
		x := make([]T, n)
		for i := range x {
			x[i] = T(math.NaN())
		}
		return x
	}
	qn, kn := rows*s.Heads*s.HeadDim, rows*s.KVHeads*s.HeadDim
	var in [4][]T // q, k, v and the output's gradient
	for i, n := range []int{qn, kn, kn, qn} {
		in[i] = nan(n)
		for at, width := 0, n/rows; at < rows; at++ {
			for e := range width {
				if s.Starts[at] > 0 || at < s.Seq { // the first document of the second sequence stays NaN
					in[i][at*width+e] = T(r.NormFloat64())
				}
			}
		}
	}
	y, lse, dq, dk, dv := nan(qn), nan(rows*s.Heads), nan(qn), nan(kn), nan(kn)
	Attention(y, lse, in[0], in[1], in[2], s)
	AttentionBackward(dq, dk, dv, in[3], in[0], in[1], in[2], y, lse, s)
	for name, x := range map[string][]T{"y": y, "dq": dq, "dk": dk, "dv": dv} {
		width := len(x) / rows
		for i, v := range x {
			at := i / width
			if spoilt := at >= s.Seq && s.Starts[at] == 0; (v != v) != spoilt {
				t.Fatalf("%s[%d], of position %d of sequence %d, is %v", name, i, at%s.Seq, at/s.Seq, v)
			}
		}
	}
}
