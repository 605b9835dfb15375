package attention

import (
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/cputest"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// TestAt checks that At computes the same rows as Forward, up to rounding.
func TestAt(t *testing.T) {
	// Scores reach 20, where the float32 rounding error of 1e-6 becomes a relative error of their
	// exponentials.
	t.Run("float32", func(t *testing.T) { testAttentionAt[float32](t, 1e-5) })
	t.Run("float64", func(t *testing.T) { testAttentionAt[float64](t, 1e-14) })
}

func testAttentionAt[T cpu.Float](t *testing.T, tolerance float64) {
	seed := randtest.Seed(t)
	r := rand.New(rand.NewPCG(seed, 1))
	for _, s := range []Shape{{Heads: 1, KVHeads: 1, HeadDim: 2},
		{Heads: 6, KVHeads: 2, HeadDim: 18}, {Heads: 3, KVHeads: 3, HeadDim: 64}} {
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
		want, normalizers := make([]T, len(q)), make([]T, 2*s.Seq*s.Heads)
		Forward(want, normalizers, q, k, v, s)

		// Errors are measured relative to the sums of the terms' magnitudes, because the terms may
		// nearly cancel.
		size := make([]T, len(q))
		Forward(size, normalizers, q, k, cputest.Absolute(slices.Clone(v)), s)
		for _, rows := range [][2]int{{0, 1}, {1, 1}, {63, 1}, {64, 1}, {65, 1}, {149, 1}, {0, 150},
			{31, 2}, {40, 100}, {64, 64}, {0, 1 + r.IntN(150)}} {
			from, n := rows[0], rows[1]
			y := make([]T, n*qd)
			for i := range y {
				y[i] = T(math.NaN())
			}
			At(y, q[from*qd:][:n*qd], k[:(from+n)*kd], v[:(from+n)*kd], from, n, s)
			var diff, norm float64
			for i, w := range want[from*qd:][:n*qd] {
				diff, norm = diff+math.Pow(float64(y[i]-w), 2),
					norm+math.Pow(float64(size[from*qd+i]), 2)
			}
			if off := math.Sqrt(diff / norm); !(off < tolerance) {
				t.Errorf("%+v: %d rows from %d differ by %.2g", s, n, from, off)
			}
		}
	}
}

// TestDocumentTiles checks that documents that start at tile boundaries are independent, so that a NaN in one document
// does not reach another.
func TestDocumentTiles(t *testing.T) {
	t.Run("float32", testDocumentTiles[float32])
	t.Run("float64", testDocumentTiles[float64])
}

func testDocumentTiles[T cpu.Float](t *testing.T) {
	seed := randtest.Seed(t)
	r := rand.New(rand.NewPCG(seed, 1))
	const border = 2 * queryTile
	s := Shape{Batch: 2, Seq: border + queryTile + 5, Heads: 4, KVHeads: 2, HeadDim: 6,
		Causal: true, Scale: 0.4}
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
	var in [4][]T // q, k, v and the output gradient
	for i, n := range []int{qn, kn, kn, qn} {
		in[i] = nan(n)
		for at, width := 0, n/rows; at < rows; at++ {
			for e := range width {
				// the first document of the second sequence remains NaN
				if s.Starts[at] > 0 || at < s.Seq {
					in[i][at*width+e] = T(r.NormFloat64())
				}
			}
		}
	}

	y, normalizers, dq, dk, dv := nan(qn), nan(2*rows*s.Heads), nan(qn), nan(kn), nan(kn)
	Forward(y, normalizers, in[0], in[1], in[2], s)
	Backward(dq, dk, dv, in[3], in[0], in[1], in[2], y, normalizers, s)
	for name, x := range map[string][]T{"y": y, "dq": dq, "dk": dk, "dv": dv} {
		width := len(x) / rows
		for i, v := range x {
			at := i / width
			if poisoned := at >= s.Seq && s.Starts[at] == 0; (v != v) != poisoned {
				t.Fatalf("%s[%d], of position %d of sequence %d, is %v", name, i,
					at%s.Seq, at/s.Seq, v)
			}
		}
	}
}

// TestLongAttention compares the outputs and gradients for sequences of several tiles with those of plainAttention.
func TestLongAttention(t *testing.T) {
	t.Run("float32", func(t *testing.T) { testLongAttention[float32](t, 2e-6) })
	t.Run("float64", func(t *testing.T) { testLongAttention[float64](t, 1e-13) })
}

func testLongAttention[T cpu.Float](t *testing.T, tolerance float64) {
	seed := randtest.Seed(t)
	r := rand.New(rand.NewPCG(seed, 1))
	for _, s := range []Shape{{Heads: 2, KVHeads: 1, HeadDim: 16, Causal: true},
		{Heads: 2, KVHeads: 2, HeadDim: 7},
		{Heads: 1, KVHeads: 1, HeadDim: 5, Causal: true, Starts: []int{}}} {
		s.Batch, s.Seq, s.Scale = 2, keyTile+1+r.IntN(queryTile), 0.3
		rows := s.Batch * s.Seq
		if s.Starts != nil {
			for i := range rows {
				start := 0
				if at := i % s.Seq; at > 0 {
					start = s.Starts[i-1]
					if r.IntN(60) == 0 {
						start = at
					}
				}
				s.Starts = append(s.Starts, start)
			}
		}

		qd, kd := s.Heads*s.HeadDim, s.KVHeads*s.HeadDim
		values := func(n int, of func() float64) []T {
			x := make([]T, n)
			for i := range x {
				x[i] = T(of())
			}
			return x
		}
		q, k, v := values(rows*qd, r.NormFloat64), values(rows*kd, r.NormFloat64),
			values(rows*kd, r.NormFloat64)
		g := values(rows*qd, r.NormFloat64)
		y, dq, dk, dv, normalizers := values(rows*qd, math.NaN), values(rows*qd, math.NaN),
			values(rows*kd, math.NaN), values(rows*kd, math.NaN),
			values(2*rows*s.Heads, math.NaN)
		Forward(y, normalizers, q, k, v, s)
		Backward(dq, dk, dv, g, q, k, v, y, normalizers, s)
		want := plainAttention(q, k, v, g, s)
		for i, got := range [][]T{y, dq, dk, dv} {
			var diff, norm float64
			for j, w := range want[i] {
				diff, norm = diff+math.Pow(float64(got[j])-w, 2), norm+w*w
			}
			if off := math.Sqrt(diff / norm); !(off < tolerance) {
				t.Errorf("%d heads, causal %v, documents %v, sequence %d: %s differs by %.2g",
					s.Heads, s.Causal, s.Starts != nil, s.Seq, []string{"y", "dq", "dk", "dv"}[i],
					off)
			}
		}
	}
}

// plainAttention returns y, dq, dk and dv, computed from the definition in float64, one query at a time.
func plainAttention[T cpu.Float](q, k, v, g []T, s Shape) [4][]float64 {
	var out [4][]float64
	for i, n := range []int{len(q), len(q), len(k), len(v)} {
		out[i] = make([]float64, n)
	}

	y, dq, dk, dv := out[0], out[1], out[2], out[3]
	product := func(a, b []T) (sum float64) {
		for i, x := range a {
			sum += float64(x) * float64(b[i])
		}
		return sum
	}

	add := func(y []float64, a float64, x []T) {
		for i, x := range x {
			y[i] += a * float64(x)
		}
	}
	p := make([]float64, s.Seq)
	for row := range s.Batch * s.Seq {
		b, i := row/s.Seq, row%s.Seq
		from, to := 0, s.Seq
		if s.Causal {
			to = i + 1
		}
		if s.Starts != nil {
			from = s.Starts[row]
		}
		for h := range s.Heads {
			at := (row*s.Heads + h) * s.HeadDim
			of := func(j int) int {
				return ((b*s.Seq+j)*s.KVHeads + h*s.KVHeads/s.Heads) * s.HeadDim
			}
			qi, gi := q[at:][:s.HeadDim], g[at:][:s.HeadDim]
			var sum, d float64
			for j := from; j < to; j++ {
				p[j] = math.Exp(s.Scale * product(qi, k[of(j):]))
				sum += p[j]
			}

			for j := from; j < to; j++ {
				p[j] /= sum
				d += p[j] * product(gi, v[of(j):])
				add(y[at:], p[j], v[of(j):][:s.HeadDim])
			}

			for j := from; j < to; j++ {
				ds := s.Scale * p[j] * (product(gi, v[of(j):]) - d)
				add(dv[of(j):], p[j], gi)
				add(dq[at:], ds, k[of(j):][:s.HeadDim])
				add(dk[of(j):], ds, qi)
			}
		}
	}

	return out
}

// TestWindowTiles checks that tiles of keys before a window are skipped. A NaN in such a key must not reach queries that
// do not see it, unless they share a tile with queries that do.
func TestWindowTiles(t *testing.T) {
	t.Run("float32", testWindowTiles[float32])
	t.Run("float64", testWindowTiles[float64])
}

func testWindowTiles[T cpu.Float](t *testing.T) {
	seed := randtest.Seed(t)
	r := rand.New(rand.NewPCG(seed, 1))
	const poisoned = 70
	s := Shape{Batch: 1, Seq: 900, Heads: 4, KVHeads: 2, HeadDim: 6, Causal: true, Scale: 0.4,
		Window: 1 + r.IntN(300)}
	normal := func(width int) []T {
		x := make([]T, s.Seq*width)
		for i := range x {
			if x[i] = T(r.NormFloat64()); i < poisoned*width {
				x[i] = T(math.NaN())
			}
		}
		return x
	}

	qd, kd := s.Heads*s.HeadDim, s.KVHeads*s.HeadDim
	q, k, v, g := normal(qd), normal(kd), normal(kd), normal(qd)
	y, normalizers, dq := make([]T, len(q)), make([]T, 2*s.Seq*s.Heads), make([]T, len(q))
	dk, dv := make([]T, len(k)), make([]T, len(k))
	Forward(y, normalizers, q, k, v, s)
	Backward(dq, dk, dv, g, q, k, v, y, normalizers, s)

	// after the tile of the last query that sees one of these keys
	first := poisoned + s.Window + queryTile
	for name, x := range map[string][]T{"y": y, "dq": dq, "dk": dk, "dv": dv} {
		width := len(x) / s.Seq
		if i := slices.IndexFunc(x[first*width:], func(v T) bool { return v != v }); i >= 0 {
			t.Errorf("window %d: %s of position %d is NaN", s.Window, name, first+i/width)
		}
	}
}

// BenchmarkWindow measures both passes over 4096 positions with windows of different sizes.
func BenchmarkWindow(b *testing.B) {
	for _, window := range []int{0, 1024, 256} {
		b.Run(strconv.Itoa(window), func(b *testing.B) {
			s := Shape{Batch: 1, Seq: 4096, Heads: 4, KVHeads: 4, HeadDim: 64, Causal: true,
				Scale: 0.125, Window: window}
			x := make([]float32, 9*s.Seq*s.Heads*s.HeadDim)
			for i := range x {
				x[i] = float32(i%17) / 17
			}
			n := s.Seq * s.Heads * s.HeadDim
			at := func(i int) []float32 { return x[i*n : (i+1)*n] }
			normalizers := make([]float32, 2*s.Seq*s.Heads)
			for b.Loop() {
				Forward(at(0), normalizers, at(1), at(2), at(3), s)
				Backward(at(4), at(5), at(6), at(7), at(1), at(2), at(3), at(0), normalizers, s)
			}
		})
	}
}
