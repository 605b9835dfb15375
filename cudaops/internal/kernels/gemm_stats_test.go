package kernels

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/internal/cpu"
)

// TestAttentionGradProduct compares with float64.
func TestAttentionGradProduct(t *testing.T) {
	g := newHopperRig(t)
	for _, s := range []struct{ batch, seq, heads, headDim, d int }{
		{1, 128, 1, 64, 8}, {1, 128, 1, 128, 72}, {3, 128, 3, 64, 136}, {2, 256, 3, 128, 264}, {5, 384, 6, 64, 776}, {3, 640, 7, 128, 1096},
		{7, 640, 40, 64, 520}, {7, 640, 20, 128, 584}, // several tiles a block
	} {
		if testing.Short() && s.batch*s.seq > 2000 {
			continue
		}
		a := AttentionGradProduct{D: s.d,
			AttentionShape: AttentionShape{Batch: s.batch, Seq: s.seq, Heads: s.heads, KVHeads: s.heads, HeadDim: s.headDim, Variant: AttentionHopperFused}}
		for _, a.Type = range []driver.DType{bf16, f16} {
			g.scope(fmt.Sprintf("%+v/%v", s, a.Type), func(g *rig) { testAttentionGradProduct(g, a) })
		}
	}
}

func testAttentionGradProduct(g *rig, a AttentionGradProduct) {
	g.Helper()
	rows, columns := a.Batch*a.Seq, a.Heads*a.HeadDim
	x, xr := g.normal(rows*a.D, a.Type, 0)
	w, wr := g.scaled(a.D*columns, a.D, a.Type)
	y, yr := g.normal(rows*columns, a.Type, 0)
	lse, lr := g.normal(rows*a.Heads, f32, 0)
	a.X, a.W, a.Y, a.LSE = x.Ptr, w.Ptr, y.Ptr, lse.Ptr
	want := make([]float64, rows*columns)
	cpu.Gemm(false, false, rows, columns, a.D, 1, xr, a.D, wr, columns, 0, want, columns)
	ways := g.AttentionGradProductWays(a.AttentionShape, a.D, a.Type)
	if len(ways) == 0 {
		g.Fatal("no way takes it")
	}
	size := g.AttentionStatsBytes(a.AttentionShape, a.Type) / 4
	inStats := 2 * rows * a.Heads
	_, counters, n := a.fusedWorkspace(0)
	for _, a.Way = range ways {
		var bits, statsBits []float64
		for range 2 {
			out, stats := g.alloc(len(want), a.Type, 0), g.alloc(size, f32, 0)
			a.G, a.Stats = out.Ptr, stats.Ptr
			g.must(g.AttentionGradProduct(g.stream, a))
			g.near(a.Way.String(), out, want, forward(a.Type))
			got, all := g.read(out), g.read(stats)
			// Of the result as it is rounded.
			products, logs := make([]float64, rows*a.Heads), make([]float64, rows*a.Heads)
			at := func(row, head int) int { return (row/a.Seq*a.Heads+head)*a.Seq + row%a.Seq }
			sums, exponents := slices.Clone(products), slices.Clone(products)
			for r := range rows {
				for h := range a.Heads {
					i := at(r, h)
					for c := r*columns + h*a.HeadDim; c < r*columns+(h+1)*a.HeadDim; c++ {
						sums[i] += got[c] * yr[c]
					}
					exponents[i] = lr[i] * math.Log2E
					head := 2 * (i / a.Seq) * a.Seq
					logs[i], products[i] = all[head+i%a.Seq], all[head+a.Seq+i%a.Seq]
				}
			}
			if e := distance(products, sums); !(e < 1e-5) {
				g.Errorf("%v: sums of g·y: relative error %.3g", a.Way, e)
			}
			if e := distance(logs, exponents); !(e < 1e-6) {
				g.Errorf("%v: logarithms: relative error %.3g", a.Way, e)
			}
			for i, v := range all[inStats : counters/4] {
				if v == v {
					g.Fatalf("%v: number %d of the sums of dq is %g, want it as it was", a.Way, i, v)
				}
			}
			zeros := all[counters/4:]
			if len(zeros) != n || slices.ContainsFunc(zeros, func(v float64) bool { return v != 0 }) {
				g.Errorf("%v: of %d counters, of which there are to be %d, not all are zero", a.Way, len(zeros), n)
			}
			if bits == nil {
				bits, statsBits = got, all[:inStats]
			} else if !slices.Equal(bits, got) || !slices.Equal(statsBits, all[:inStats]) {
				g.Errorf("%v: results differ from run to run", a.Way)
			}
		}
		plain := g.alloc(len(want), a.Type, 0)
		g.must(g.Product(g.stream, Product{Y: plain.Ptr, X: a.X, W: a.W, ProductShape: ProductShape{Rows: rows, Columns: columns, D: a.D}, Type: a.Type}))
		if !slices.Equal(g.read(plain), bits) {
			g.Errorf("%v: the bits are not those of the product alone", a.Way)
		}
	}
}

// TestAttentionHasStatistics compares the gradients of an attention that begins with what a product has left for it with float64, and with
// those of one that does not.
func TestAttentionHasStatistics(t *testing.T) {
	g := newHopperRig(t)
	for _, headDim := range []int{64, 128} {
		for _, documents := range []bool{false, true} {
			g.scope(fmt.Sprintf("%d, documents %v", headDim, documents), func(g *rig) {
				c := attentionCase{dtype: bf16, AttentionShape: AttentionShape{Batch: 2, Seq: 384, Heads: 6, KVHeads: 3, HeadDim: headDim,
					Causal: true, Variant: AttentionHopperFused}}
				if documents {
					c.starts = startsOf(c.Batch, c.Seq, cuts(g.rand)["long"])
				}
				testHasStatistics(g, c)
			})
		}
	}
}

func testHasStatistics(g *rig, c attentionCase) {
	g.Helper()
	a := AttentionGradProduct{AttentionShape: c.AttentionShape, D: 200, Type: bf16}
	a.Documents = c.documents(g)
	rows, wide, narrow := a.Batch*a.Seq, a.Heads*a.HeadDim, a.KVHeads*a.HeadDim
	x, _ := g.normal(rows*a.D, bf16, 0)
	w, _ := g.scaled(a.D*wide, a.D, bf16)
	q, qr := g.normal(rows*wide, bf16, 0)
	k, kr := g.normal(rows*narrow, bf16, 0)
	v, vr := g.normal(rows*narrow, bf16, 0)
	y, lse, grad := g.alloc(rows*wide, bf16, 0), g.alloc(rows*a.Heads, f32, 0), g.alloc(rows*wide, bf16, 0)
	stats := g.alloc(g.AttentionStatsBytes(a.AttentionShape, bf16)/4, f32, 0)
	a.G, a.X, a.W, a.Y, a.LSE, a.Stats = grad.Ptr, x.Ptr, w.Ptr, y.Ptr, lse.Ptr, stats.Ptr
	query, key := func(b *buffer) Rows { return Rows{b.Ptr, wide} }, func(b *buffer) Rows { return Rows{b.Ptr, narrow} }
	g.must(g.Attention(g.stream, a.AttentionShape, query(y), lse.Ptr, query(q), key(k), key(v), bf16))
	gradients := func(has bool) (d [3][]float64) {
		if has {
			g.must(g.AttentionGradProduct(g.stream, a))
		} else {
			g.must(g.Product(g.stream, Product{Y: a.G, X: a.X, W: a.W, ProductShape: ProductShape{Rows: rows, Columns: wide, D: a.D}, Type: bf16}))
		}
		to := []*buffer{g.alloc(rows*wide, bf16, 0), g.alloc(rows*narrow, bf16, 0), g.alloc(rows*narrow, bf16, 0)}
		s := a.AttentionShape
		s.HasStatistics = has
		g.must(g.AttentionBackward(g.stream, s, query(to[0]), key(to[1]), key(to[2]), a.Stats, query(grad), query(q), key(k), key(v), query(y),
			lse.Ptr, bf16))
		for i, b := range to {
			d[i] = g.read(b)
		}
		return d
	}
	without := gradients(false)
	want := [3][]float64{make([]float64, rows*wide), make([]float64, rows*narrow), make([]float64, rows*narrow)}
	c.reference(make([]float64, rows*wide), make([]float64, rows*a.Heads), want[0], want[1], want[2], g.read(grad), qr, kr, vr)
	for run := range 2 {
		for i, got := range gradients(true) {
			if e := distance(got, want[i]); !(e < backward(bf16)) {
				g.Errorf("run %d, gradient %d: relative error %.3g", run, i, e)
			}
			if e := distance(got, without[i]); !(e < 1e-3) {
				g.Errorf("run %d, gradient %d: %.3g from that without", run, i, e)
			}
		}
	}
}

func TestAttentionGradProductRefusals(t *testing.T) {
	for _, capability := range []int{89, 90} {
		k, c, p := fakeAttention(t, capability, 227<<10)
		ok := AttentionGradProduct{G: p, X: p, W: p, Y: p, LSE: p, Stats: p, D: 264, Type: bf16,
			AttentionShape: AttentionShape{Batch: 3, Seq: 128, Heads: 3, KVHeads: 1, HeadDim: 64}}
		for what, change := range map[string]func(a *AttentionGradProduct){
			"batch":      func(a *AttentionGradProduct) { a.Batch = -1 },
			"seq":        func(a *AttentionGradProduct) { a.Seq = 192 },
			"heads":      func(a *AttentionGradProduct) { a.HeadDim = 96 },
			"scale":      func(a *AttentionGradProduct) { a.Scale = -1 },
			"d":          func(a *AttentionGradProduct) { a.D = 268 },
			"type":       func(a *AttentionGradProduct) { a.Type = f32 },
			"result":     func(a *AttentionGradProduct) { a.G += 8 },
			"input":      func(a *AttentionGradProduct) { a.X += 2 },
			"weights":    func(a *AttentionGradProduct) { a.W += 8 },
			"y":          func(a *AttentionGradProduct) { a.Y += 8 },
			"statistics": func(a *AttentionGradProduct) { a.Stats += 4 },
			"way":        func(a *AttentionGradProduct) { a.Way = Way{"fused", 64} },
		} {
			a := ok
			change(&a)
			if k.AttentionGradProduct(0, a) == nil {
				t.Errorf("capability %d, %s: no error", capability, what)
			}
		}
		takes := len(k.AttentionGradProductWays(ok.AttentionShape, ok.D, bf16)) == 1
		if takes != (capability == 90) {
			t.Errorf("capability %d: takes it: %v", capability, takes)
		}
		c.ClearTrace()
		names := map[string]bool{}
		for _, ok.HeadDim = range []int{64, 128} {
			for _, ok.Type = range []driver.DType{bf16, f16} {
				if takes != (k.AttentionGradProduct(0, ok) == nil) {
					t.Errorf("capability %d: takes %+v: %v", capability, ok, !takes)
				}
			}
		}
		for _, op := range c.Trace() {
			if op.Name == "" {
				continue
			}
			if names[op.Name] = true; op.Config.Shared > 227<<10 || op.Config.Cluster.X < 2 || op.Config.Grid.X%op.Config.Cluster.X != 0 {
				t.Errorf("launched with %v", op.Config)
			}
		}
		if want := map[bool]int{true: 4}[takes]; len(names) != want {
			t.Errorf("capability %d: launched %v, want %d kernels", capability, names, want)
		}
		ok.Batch = 0
		if err := k.AttentionGradProduct(0, ok); err != nil {
			t.Errorf("no rows: %v", err)
		}
	}
}

// Only a backward pass in one kernel begins with what a product has left; the others form it themselves.
func TestAttentionStatisticsLaunches(t *testing.T) {
	k, c, p := fakeAttention(t, 90, 227<<10)
	for _, s := range []struct {
		dim     int
		variant AttentionVariant
		want    bool // the statistics, although they have been left
	}{{64, AttentionHopper, false}, {64, AttentionHopperFused, false}, {128, AttentionHopper, false}, {128, AttentionMMA, true},
		{64, AttentionPlain, true}} {
		for _, has := range []bool{false, true} {
			a := AttentionShape{Batch: 2, Seq: 256, Heads: 4, KVHeads: 2, HeadDim: s.dim, Causal: true, Variant: s.variant, HasStatistics: has}
			q, kv := Rows{p, 4 * s.dim}, Rows{p, 2 * s.dim}
			c.ClearTrace()
			if err := k.AttentionBackward(0, a, q, kv, kv, p, q, q, kv, kv, q, p, bf16); err != nil {
				t.Fatal(err)
			}
			got := false
			for _, op := range c.Trace() {
				got = got || strings.HasPrefix(op.Name, "attention_stats")
			}
			if want := s.want || !has && a.Fused(); got != want {
				t.Errorf("%v, head dimension %d, there %v: statistics launched: %v, want %v", s.variant, s.dim, has, got, want)
			}
		}
	}
}

// TestAttentionGradProductSpeed compares with cuBLASLt's product, in the fastest of its ways, and the statistics' own kernel.
func TestAttentionGradProductSpeed(t *testing.T) {
	if !benchmark {
		t.Skip("set KASMINA_GPU_BENCH to run it")
	}
	g := newHopperRig(t)
	for _, s := range []struct{ batch, seq, heads, headDim int }{{32, 1024, 12, 64}, {16, 1024, 16, 64}, {8, 2048, 16, 128}} {
		g.scope(fmt.Sprintf("%+v", s), func(g *rig) {
			rows, d := s.batch*s.seq, s.heads*s.headDim
			a := AttentionGradProduct{D: d, Type: bf16, AttentionShape: AttentionShape{Batch: s.batch, Seq: s.seq, Heads: s.heads, KVHeads: s.heads,
				HeadDim: s.headDim, Variant: AttentionHopperFused}}
			a.X, a.W, a.Y, a.G = g.random(rows*d), g.random(d*d), g.random(rows*d), g.random(rows*d)
			lse, _ := g.normal(rows*s.heads, f32, 0)
			a.LSE, a.Stats = lse.Ptr, g.alloc(g.AttentionStatsBytes(a.AttentionShape, bf16)/4, f32, 0).Ptr
			show := func(what string, run func()) {
				took := g.time([]func(){run}).Seconds()
				g.Logf("%-28s %8.1f µs %6.0f TFLOP/s", what, took*1e6, 2*float64(rows)*float64(d)*float64(d)/took/1e12)
			}
			product := g.fastestProduct(driver.MatmulSpec{M: rows, N: d, K: d, A: bf16, B: bf16, D: bf16}, a.X, a.W, a.G)
			own := func() {
				g.must(g.Product(g.stream, Product{Y: a.G, X: a.X, W: a.W, ProductShape: ProductShape{Rows: rows, Columns: d, D: d}, Type: bf16}))
			}
			statistics := func() {
				g.must(g.AttentionStatistics(g.stream, a.AttentionShape, a.Stats, Rows{a.G, d}, Rows{a.Y, d}, a.LSE, bf16))
			}
			show("cuBLASLt alone", product)
			show("hopper-256 alone", own)
			show("cuBLASLt, then statistics", func() { product(); statistics() })
			show("hopper-256, then statistics", func() { own(); statistics() })
			show("fused", func() { g.must(g.AttentionGradProduct(g.stream, a)) })
		})
	}
}
