package kernels

import (
	"fmt"
	"math"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/cpu"
)

func TestCrossEntropy(t *testing.T) {
	g := newRig(t)
	for i, shape := range [][2]int{{1, 1}, {5, 3}, {64, 256}, {33, 1001}, {20, 50304}, {7, 50257}} {
		for _, dt := range storageTypes {
			rows, v := shape[0], shape[1]
			g.scope(fmt.Sprintf("%dx%d/%v", rows, v, dt), func(g *rig) {
				x := make([]float64, rows*v)
				for i := range x {
					x[i] = 3*g.rand.NormFloat64() + 20
				}
				logits, xr := g.upload(x, dt, i%2)
				ids := g.classes(rows, v)
				targets := Ints{Ptr: g.uploadInts(ids, 4+4*(i%2)), Wide: i%2 == 1}
				// As under loss scaling: float16 has no numbers for a share of 1/50304 of a mean's gradient.
				grad, gr := g.upload([]float64{1024 * (1 + g.rand.Float64())}, f32, 0)
				losses, lse := g.alloc(rows, f32, 0), g.alloc(rows, f32, 0)
				scale, mean := g.alloc(1, f32, 0), g.alloc(1, f32, 0)
				a := CrossEntropy{Logits: logits.Ptr, Losses: losses.Ptr, LSE: lse.Ptr, Targets: targets, Rows: rows, V: v, Type: dt}

				wantLSE, want := make([]float64, rows), make([]float64, rows*v)
				wantMean := cpu.CrossEntropy(wantLSE, xr, ids, v)
				cpu.CrossEntropyBackward(want, xr, wantLSE, ids, v, gr[0])

				g.must(g.CrossEntropyScale(g.stream, scale.Ptr, targets, rows))
				g.must(g.CrossEntropy(g.stream, a))
				g.must(g.CrossEntropyMean(g.stream, mean.Ptr, losses.Ptr, scale.Ptr, rows))
				g.near("lse", lse, wantLSE, 2e-6)
				if v > 1 { // a small difference of large numbers where the target is the likeliest
					g.near("mean", mean, []float64{wantMean}, 1e-5)
				}

				out := g.alloc(rows*v, dt, i%2)
				a.Scale, a.Grad = scale.Ptr, grad.Ptr
				for j := range want {
					want[j] /= float64(cpu.Targets(ids))
				}
				check := func(what string, b *buffer) {
					g.Helper()
					if v > 1 { // else the gradient is zero but for rounding
						g.near(what, b, want, backward(dt))
					}
				}
				g.must(g.CrossEntropyBackward(g.stream, out.Ptr, a))
				check("gradient", out)
				a.Losses = g.alloc(rows, f32, 0).Ptr
				again := g.bufs[len(g.bufs)-1]
				g.must(g.CrossEntropy(g.stream, a)) // in place
				check("gradient in place", logits)
				if d := distance(g.read(again), g.read(losses)); d != 0 {
					t.Errorf("losses with and without gradient differ by %g", d)
				}
			})
		}
	}
}

func TestCrossEntropyExtremes(t *testing.T) {
	g := newRig(t)
	inf, nan := math.Inf(1), math.NaN()
	rows := [][]float64{{inf, 0, 0}, {-inf, 0, -inf}, {nan, 0, 0}, {3e4, -3e4, 0}, {-inf, -inf, -inf}, {0, 0, 0}}
	want := []float64{nan, 0, nan, 6e4, nan, nan}
	targets := []int{0, 1, 1, 1, 1, 3}
	for _, dt := range storageTypes {
		var flat []float64
		for _, r := range rows {
			flat = append(flat, r...)
		}
		logits, _ := g.upload(flat, dt, 0)
		losses := g.alloc(len(rows), f32, 0)
		g.must(g.CrossEntropy(g.stream, CrossEntropy{Logits: logits.Ptr, Losses: losses.Ptr,
			Targets: Ints{Ptr: g.uploadInts(targets, 4)}, Rows: len(rows), V: 3, Type: dt}))
		if got := g.read(losses); !(distance(got, want) < 5e-3) {
			t.Errorf("%v: losses %v, want %v", dt, got, want)
		}
	}
}

// TestCrossEntropyRows wants the number of targets and the sum of losses to be those of all rows, also of more than a block takes at a time.
func TestCrossEntropyRows(t *testing.T) {
	g := newRig(t)
	for i, rows := range []int{1, 511, 513, 8191, 8193, 16384, 20011} {
		g.scope(fmt.Sprint(rows), func(g *rig) {
			ids := g.classes(rows, 1000)
			targets := Ints{Ptr: g.uploadInts(ids, 4+4*(i%2)), Wide: i%2 == 1}
			losses, values := g.normal(rows, f32, 0)
			scale, mean, again := g.alloc(1, f32, 0), g.alloc(1, f32, 0), g.alloc(1, f32, 0)
			g.must(g.CrossEntropyScale(g.stream, scale.Ptr, targets, rows))
			want, sum, size := 1/float64(cpu.Targets(ids)), 0.0, 0.0
			g.near("scale", scale, []float64{want}, 1e-7)
			for _, v := range values {
				sum, size = sum+v, size+math.Abs(v)
			}
			g.must(g.CrossEntropyMean(g.stream, mean.Ptr, losses.Ptr, scale.Ptr, rows))
			if got := g.read(mean)[0]; !(math.Abs(got-sum*want) <= 1e-6*size*want) {
				t.Errorf("%d rows: mean %v, want %v", rows, got, sum*want)
			}
			g.must(g.CrossEntropyMean(g.stream, again.Ptr, losses.Ptr, scale.Ptr, rows))
			if distance(g.read(again), g.read(mean)) != 0 {
				t.Errorf("%d rows: two runs give different bits", rows)
			}
		})
	}
}

func TestEmbedding(t *testing.T) {
	g := newRig(t)
	for i, c := range []struct{ rows, vocab, d int }{{1, 1, 1}, {7, 5, 3}, {100, 50, 64}, {513, 1000, 768}, {2000, 37, 260}, {64, 9, 2048},
		{700, 4099, 4}, {900, 50257, 12}, {40, 200003, 3}} {
		for _, types := range [][2]gpu.DType{{f32, f32}, {bf16, bf16}, {bf16, f32}, {f16, f16}, {f16, f32}} {
			yt, tt := types[0], types[1]
			g.scope(fmt.Sprintf("%+v/%v/%v", c, yt, tt), func(g *rig) {
				ids := make([]int, c.rows)
				for i := range ids {
					ids[i] = min(g.rand.IntN(c.vocab), g.rand.IntN(c.vocab)) // some more often than others
				}
				dids := Ints{Ptr: g.uploadInts(ids, 4+4*(i%2)), Wide: i%2 == 1}
				table, tr := g.normal(c.vocab*c.d, tt, i%2)
				y := g.alloc(c.rows*c.d, yt, i%2)
				g.must(g.Embedding(g.stream, Embedding{Y: y.Ptr, IDs: dids, Table: table.Ptr, Rows: c.rows, Vocab: c.vocab, D: c.d,
					Type: yt, TableType: tt}))
				want := make([]float64, c.rows*c.d)
				cpu.Embedding(want, ids, tr, c.d)
				g.near("y", y, decode(encode(want, yt), yt), 0)

				dy, gr := g.normal(c.rows*c.d, yt, i%2)
				grad := make([]float64, c.vocab*c.d)
				cpu.EmbeddingBackward(grad, ids, gr, c.d)
				dt := g.alloc(c.vocab*c.d, tt, i%2)
				work := g.alloc(EmbeddingWorkspace(c.rows, c.vocab, c.d)/4, f32, 0)
				a := EmbeddingBackward{DT: dt.Ptr, IDs: dids, G: dy.Ptr, Rows: c.rows, Vocab: c.vocab, D: c.d, DTType: tt, GType: yt,
					Workspace: work.Ptr}
				g.must(g.EmbeddingBackward(g.stream, a))
				g.near("gradient", dt, grad, backward(tt))
				first := g.read(dt)
				a.Accumulate = true
				g.must(g.EmbeddingBackward(g.stream, a))
				for i := range grad {
					grad[i] *= 2
				}
				g.near("added gradient", dt, grad, backward(tt))
				a.Accumulate = false
				g.must(g.EmbeddingBackward(g.stream, a))
				if distance(g.read(dt), first) != 0 {
					t.Error("two runs give different bits")
				}
			})
		}
	}
}

func TestEmbeddingUnknownIDs(t *testing.T) {
	g := newRig(t)
	ids := Ints{Ptr: g.uploadInts([]int{0, -1, 2, 1, 1 << 30}, 4)}
	table, tr := g.normal(2*3, f32, 0)
	y, dt, work := g.alloc(5*3, f32, 0), g.alloc(2*3, f32, 0), g.alloc(EmbeddingWorkspace(5, 2, 3)/4, f32, 0)
	g.must(g.Embedding(g.stream, Embedding{Y: y.Ptr, IDs: ids, Table: table.Ptr, Rows: 5, Vocab: 2, D: 3}))
	nan := math.NaN()
	want := []float64{tr[0], tr[1], tr[2], nan, nan, nan, nan, nan, nan, tr[3], tr[4], tr[5], nan, nan, nan}
	g.near("y", y, want, 0)
	dy, gr := g.normal(5*3, f32, 0)
	g.must(g.EmbeddingBackward(g.stream, EmbeddingBackward{DT: dt.Ptr, IDs: ids, G: dy.Ptr, Rows: 5, Vocab: 2, D: 3, Workspace: work.Ptr}))
	g.near("gradient", dt, []float64{gr[0], gr[1], gr[2], gr[9], gr[10], gr[11]}, 0)
}
