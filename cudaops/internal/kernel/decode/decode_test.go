package decode

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	cpuattention "github.com/kasmina-go/kasmina/internal/cpu/attention"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/op/kvcache"
)

// TestAttention checks that decoding one token after another gives the same outputs as attention
// over the whole sequence, and that a launch does not change the cached keys and values of other
// positions.
func TestAttention(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, c := range []struct{ heads, kvHeads, dim, tokens, window int }{
		{1, 1, 1, 3, 0}, {3, 1, 6, 5, 0}, {2, 2, 64, 200, 0}, {8, 2, 128, 700, 0},
		{14, 2, 64, 300, 0}, {4, 1, 256, 300, 70}, {9, 3, 80, 150, 20}, {20, 1, 16, 90, 0},
		{32, 8, 64, 1030, 0}, {6, 6, 10, 40, 7}, {4, 4, 64, 500, 0}, {64, 8, 128, 300, 0}, {30, 5, 80, 90, 33},
		{5, 5, 256, 300, 70}, {16, 4, 256, 120, 0}, {6, 6, 16, 9, 7}, {8, 4, 96, 1200, 0}, {32, 4, 64, 333, 0},
	} {
		for _, dt := range kerneltest.StorageTypes {
			for _, turned := range []bool{false, true} {
				if turned && c.dim%2 != 0 || !g.Some() {
					continue
				}
				g.Scope(fmt.Sprintf("%+v/%v/%v", c, dt, turned), func(g *kerneltest.Rig) {
					s := Geometry{Heads: c.heads, KVHeads: c.kvHeads, HeadDim: c.dim,
						Capacity: c.tokens + i%3, Window: c.window, Scale: 0.3}
					decodeAll(g, s, c.tokens, dt, turned)
				})
			}
		}
	}
}

// TestClustered checks that attention runs in clusters if the kernels support its heads and type, and the clusters keep
// the GPU busy.
func TestClustered(t *testing.T) {
	h200 := gpu.DeviceInfo{SMs: 132, Major: 9, SharedPerBlock: 227 << 10}
	base := Attention{Geometry: Geometry{Heads: 32, KVHeads: 8, HeadDim: 64, Capacity: 2048}, Type: gpu.BFloat16}
	for _, c := range []struct {
		change func(*Attention)
		want   bool
	}{
		{func(a *Attention) {}, true},
		{func(a *Attention) { a.Capacity = 4096 }, false},
		{func(a *Attention) { a.Capacity, a.Window = 4096, 512 }, true},
		{func(a *Attention) { a.Heads, a.KVHeads = 4, 1 }, false},
		{func(a *Attention) { a.Type = gpu.Float32 }, false},
		{func(a *Attention) { a.HeadDim = 72 }, false},
		{func(a *Attention) { a.K = 2 }, false},
		{func(a *Attention) { a.Heads, a.HeadDim = 64, 256 }, true},
	} {
		a := base
		c.change(&a)
		require.Equal(t, c.want, a.clustered(h200), "%+v", a)
	}
	require.False(t, base.clustered(gpu.DeviceInfo{SMs: 108, Major: 8, SharedPerBlock: 163 << 10}))
}

// decodeAll decodes the last tokens of a sequence, starting from a cache filled with the earlier
// keys and values.
func decodeAll(g *kerneltest.Rig, s Geometry, tokens int, dt gpu.DType, turned bool) {
	qd, kd, half := s.Heads*s.HeadDim, s.KVHeads*s.HeadDim, s.HeadDim/2
	q, qr := g.Normal(tokens*qd, dt, 0)
	k, kr := g.Normal(tokens*kd, dt, 0)
	v, vr := g.Normal(tokens*kd, dt, 0)
	a := Attention{Geometry: s, Type: dt}
	kept := kr
	if turned {
		angles := make([]float64, s.Capacity*half)
		cosines, sines := make([]float64, len(angles)), make([]float64, len(angles))
		for i := range angles {
			cosines[i], sines[i] = math.Sincos(g.Rand.Float64() * 7)
		}
		cos, cr := g.Upload(cosines, kerneltest.F32, 0)
		sin, sr := g.Upload(sines, kerneltest.F32, 0)
		a.Cos, a.Sin = cos.Ptr, sin.Ptr
		wideQ, wideK := make([]float64, len(qr)), make([]float64, len(kr))
		layer.RoPE(wideQ, qr, cr[:tokens*half], sr[:tokens*half], tokens, s.Heads, s.HeadDim, false)
		layer.RoPE(wideK, kr, cr[:tokens*half], sr[:tokens*half], tokens, s.KVHeads, s.HeadDim,
			false)
		qr, kept = wideQ, kerneltest.Decode(kerneltest.Encode(wideK, dt), dt)
	}

	want, normalizers := make([]float64, tokens*qd), make([]float64, 2*s.Heads*tokens)
	cpuattention.Forward(want, normalizers, qr, kept, vr, cpuattention.Shape{Batch: 1, Seq: tokens,
		Heads: s.Heads, KVHeads: s.KVHeads, HeadDim: s.HeadDim, Causal: true, Scale: s.Scale,
		Window: s.Window})
	first := max(0, tokens-5)
	keys, values := g.Alloc(s.Capacity*kd, dt, 0), g.Alloc(s.Capacity*kd, dt, 0)
	before, _ := g.Upload(kept[:first*kd], dt, 0)
	g.Must(g.Ctx.CopyOnDevice(keys.Ptr, before.Ptr, first*kd*dt.Size(), g.Stream))
	g.Must(g.Ctx.CopyOnDevice(values.Ptr, v.Ptr, first*kd*dt.Size(), g.Stream))
	parts := g.Alloc(s.PartsBytes(g.Info)/4, kerneltest.F32, 0)
	arrived, _ := g.Upload(make([]float64, s.Counters()), kerneltest.F32, 0)
	y := g.Alloc(qd, dt, 0)
	a.Keys, a.Values, a.Y, a.Parts, a.Arrived = keys.Ptr, values.Ptr, y.Ptr, parts.Ptr, arrived.Ptr
	a.Early = s.Heads%2 == 0
	for p := first; p < tokens; p++ {
		a.Position = g.UploadInts([]int{p})
		at := func(b *kerneltest.Buffer, n int) gpu.Ptr { return b.Offset(p * n * dt.Size()) }
		a.Q, a.K, a.V = at(q, qd), at(k, kd), at(v, kd)
		g.Must(g.Launch(g.Stream, a))
		mean := want[p*qd:][:qd]
		g.Near(fmt.Sprint("y of ", p), y, mean, kerneltest.Forward(dt)*cancelled(vr, mean))
		once := g.Read(y)
		g.Must(g.Launch(g.Stream, a))
		if kerneltest.Distance(g.Read(y), once) != 0 {
			g.Error("two runs give different bits")
		}
	}

	all := func(b *kerneltest.Buffer, from, to int) []float64 { return g.Read(b)[from*kd : to*kd] }
	if e := kerneltest.Distance(all(keys, 0, tokens), kept); !(e <= kerneltest.Forward(dt)) {
		g.Errorf("keys are off by %.3g", e)
	}

	if kerneltest.Distance(all(values, 0, tokens), vr) != 0 {
		g.Error("values differ")
	}

	for _, x := range append(all(keys, tokens, s.Capacity), all(values, tokens, s.Capacity)...) {
		if x == x {
			g.Fatal("something was written after the position")
		}
	}
}

// cancelled returns the RMS of values divided by the RMS of their mean, but at least 1. Rounding
// errors are proportional to the values even where the values cancel.
func cancelled(values, mean []float64) float64 {
	rms := func(x []float64) float64 {
		sum := 0.0
		for _, v := range x {
			sum += v * v
		}
		return math.Sqrt(sum / float64(len(x)))
	}
	return max(1, rms(values)/rms(mean))
}

// TestProducts compares products and gated products of one row with sums in float64.
func TestProducts(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, c := range []struct{ rows, depth int }{{1, 1}, {5, 3}, {9, 64}, {130, 1000}, {513, 2048},
		{70, 2056}, {70, 4096}, {33, 14336}, {4, 897}, {9100, 64}, {3000, 576}, {1500, 2048}} {
		for _, dt := range kerneltest.StorageTypes {
			g.Scope(fmt.Sprintf("%+v/%v", c, dt), func(g *kerneltest.Rig) {
				x, xr := g.Normal(c.depth, dt, i%2)
				// Keep the sums near 1, so that no gated product overflows float16.
				w, wr := g.Upload(scaled(g.Rand, 2*c.rows*c.depth, c.depth), dt, 0)
				add, ar := g.Normal(c.rows, dt, 0)
				y, h := g.Alloc(c.rows, dt, 0), g.Alloc(c.rows, dt, 1)
				sums := product(xr, wr, 1, 2*c.rows, c.depth)
				o := Overlap{Steady: i%3 == 0, Early: i%2 == 0}
				p := Product{Y: y.Ptr, X: x.Ptr, W: w.Ptr, Columns: c.rows, D: c.depth, Type: dt,
					Overlap: o}
				g.Must(g.Launch(g.Stream, p))
				g.Near("y", y, sums[:c.rows], kerneltest.Forward(dt))
				p.C = add.Ptr
				g.Must(g.Launch(g.Stream, p))
				for r := range ar {
					ar[r] += sums[r]
				}
				g.Near("y + c", y, ar, kerneltest.Forward(dt))
				factors, fr := g.Normal(c.depth, kerneltest.F32, 0)
				normed := make([]float64, c.depth)
				layer.RMSNorm(normed, make([]float64, 1), xr, fr, 1e-5)
				normedSums := product(normed, wr, 1, 2*c.rows, c.depth)
				p.C, p.Norm = 0, Norm{factors.Ptr, 1e-5}
				g.Must(g.Launch(g.Stream, p))
				g.Near("normed", y, normedSums[:c.rows], kerneltest.Forward(dt))

				want := make([]float64, c.rows)
				for _, gelu := range []bool{false, true} {
					for _, n := range []Norm{{}, p.Norm} {
						of := sums
						if n.W != 0 {
							of = normedSums
						}
						g.Must(g.Launch(g.Stream, Gated{H: h.Ptr, X: x.Ptr, W: w.Ptr, F: c.rows,
							D: c.depth, GELU: gelu, Norm: n, Overlap: o, Type: dt}))
						if gelu {
							layer.GELUMul(want, of[:c.rows], of[c.rows:])
						} else {
							layer.SiLUMul(want, of[:c.rows], of[c.rows:])
						}
						g.Near(fmt.Sprint("gated ", gelu, n), h, want, 4*kerneltest.Forward(dt))
					}
				}
			})
		}
	}
}

// TestLost checks that Lost covers the rounding error of tiny float16 numbers without being too
// generous.
func TestLost(t *testing.T) {
	r := rand.New(rand.NewPCG(randtest.Seed(t), 0))
	for _, squares := range []int{1, 1e10, 1e16} { // factors that make the numbers small
		x := scaled(r, 999, squares)
		got := kerneltest.Decode(kerneltest.Encode(x, kerneltest.F16), kerneltest.F16)
		d, lost := kerneltest.Distance(got, x), kerneltest.Lost(x, kerneltest.F16)
		require.LessOrEqual(t, d, lost+0x1p-11)
		require.Greater(t, d, lost/4)
	}
}

func TestConstantsMatchSources(t *testing.T) {
	kerneltest.MatchSource(t, "decode_attention.cu",
		fmt.Sprintf("kThreads = %d;", threads))
	kerneltest.MatchSource(t, "decode_attention.cuh",
		fmt.Sprintf("kElements = %d,", elements),
		fmt.Sprintf("kLeastKeys = %d;", minKeys), fmt.Sprintf("kMostSlices = %d;", maxSlices))
	kerneltest.MatchSource(t, "decode_attention.cuh", fmt.Sprintf("kPageTokens = %d;", PageTokens))
	kerneltest.MatchSource(t, "decode_grouped.cu", fmt.Sprintf("kWarps = %d,", groupedWarps),
		fmt.Sprintf("kKeys = %d, kHeads = %d, kStages = %d;", groupedKeys, groupedHeads, groupedStages))
	kerneltest.MatchSource(t, "decode_product.cu", fmt.Sprintf("kWarps = %d, kDeep = %d;", warps, deep))
	kerneltest.MatchSource(t, "decode_packed.cuh", fmt.Sprintf("kMostParts = %d,", MostParts))
	kerneltest.MatchSource(t, "decode_packed.cu", fmt.Sprintf("kPackedWarps = %d, kChunk = %d,", packedWarps, packedChunk))
	kerneltest.MatchSource(t, "decode_stream.cuh", fmt.Sprintf("kStreamWarps = %d,", streamWarps),
		fmt.Sprintf("kRows = %d;", streamRows), "kPacks = 2,")
	kerneltest.MatchSource(t, "decode_stream.cu", fmt.Sprintf("kColumns = %d, kStages = %d;", streamColumns, streamStages),
		fmt.Sprintf("kBatch = %d;", streamBatch))
	kerneltest.MatchSource(t, "decode_stream_packed.cu", fmt.Sprintf("kRowBytes = %d;", packedStreamBytes),
		fmt.Sprintf("kFloat8Stages = %d, kNF4Stages = %d;", packedStreamFloat8, packedStreamNF4),
		fmt.Sprintf("kBatch = %d;", packedStreamBatch))
	kerneltest.MatchSource(t, "decode_norm.cu", fmt.Sprintf("kThreads = %d;", normThreads))
	kerneltest.MatchSource(t, "decode_rows.cu", fmt.Sprintf("kTile = %d, kDepth = %d, kStages = %d, kThreads = %d;",
		rowsTile, rowsDepth, rowsStages, rowsThreads))
	kerneltest.MatchSource(t, "decode_chunk.cu", fmt.Sprintf("kWarps = %d,", groupedWarps),
		fmt.Sprintf("kKeys = %d, kStages = %d, kRows = 16 * kWarps;", groupedKeys, groupedStages))
	kerneltest.MatchSource(t, "decode_cluster.cu", fmt.Sprintf("kThreads = %d, kBlocks = %d;", threads, clusterBlocks),
		"rounds = L == 8 ? 4 : 8,", "together = G * L > 128 ? 4 : G;")
	require.Equal(t, PageTokens, kvcache.PageTokens)
}

// TestSpread checks that large products with a norm occupy more than half of a multiprocessor, together with the
// products of Llama-3.1-8B that have no norm.
func TestSpread(t *testing.T) {
	h200 := gpu.DeviceInfo{Major: 9, SMs: 132, SharedPerBlock: 227 << 10}
	all := h200.SharedPerBlock + 1024
	fits := func(blocks ...int) bool {
		sum := 0
		for _, b := range blocks {
			sum += b + 1024
		}
		return sum <= all
	}

	n := Norm{W: 1 << 20}
	large := spread(90<<10, n, 100<<20, streamRings, h200)
	require.False(t, fits(large, large))
	down := streamed{x: 1 << 20, w: 1 << 20, rows: 4096, depth: 14336, t: gpu.BFloat16}
	require.True(t, fits(large, down.shared()))
	for _, nf4 := range []bool{false, true} {
		_, shared := PackedProduct{D: 14336, NF4: nf4}.streamShared()
		require.True(t, fits(large, shared))
	}

	require.Equal(t, 90<<10, spread(90<<10, n, 10<<20, streamRings, h200))
	require.Equal(t, 90<<10, spread(90<<10, Norm{}, 100<<20, streamRings, h200))
	require.Equal(t, 120<<10, spread(120<<10, n, 100<<20, streamRings, h200))
}

// scaled returns n normally distributed numbers, divided by the square root of depth.
func scaled(r *rand.Rand, n, depth int) []float64 {
	x := make([]float64, n)
	for i := range x {
		x[i] = r.NormFloat64() / math.Sqrt(float64(depth))
	}
	return x
}

// TestPaged compares attention to pages with attention to contiguous keys and values, for several sequences
// with tokens in random order.
func TestPaged(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, c := range []struct{ heads, kvHeads, dim, window int }{
		{2, 2, 64, 0}, {8, 2, 128, 0}, {14, 2, 64, 0}, {4, 1, 256, 70}, {32, 2, 64, 70}, {9, 3, 80, 20}, {6, 6, 10, 7},
		{20, 1, 16, 0}, {3, 1, 128, 40},
	} {
		for _, dt := range kerneltest.StorageTypes {
			g.Scope(fmt.Sprintf("%+v/%v", c, dt), func(g *kerneltest.Rig) {
				s := Geometry{Heads: c.heads, KVHeads: c.kvHeads, HeadDim: c.dim, Capacity: 400, Window: c.window,
					Scale: 0.3}
				paged(g, s, dt, i, []int{2, 30, 1}, g.Rand.Perm)
				// Prompts in order, in more rows than texts can have.
				paged(g, s, dt, i, []int{3, 100, 20}, func(n int) (order []int) {
					for i := range n {
						order = append(order, i)
					}
					return order
				})
			})
		}
	}
}

// paged decodes the last tokens of three sequences in one launch, whose rows have the given order.
func paged(g *kerneltest.Rig, s Geometry, dt gpu.DType, i int, last []int, permutation func(n int) []int) {
	lengths := []int{3, 130, 390} // of the sequences
	const columns, pages, gap = 8, 20, 3
	qd, kd, half := s.Heads*s.HeadDim, s.KVHeads*s.HeadDim, s.HeadDim/2
	rows := 0
	for _, n := range last {
		rows += n
	}
	rows++ // an unused row, which belongs to no sequence

	angles := make([]float64, s.Capacity*half)
	cosines, sines := make([]float64, len(angles)), make([]float64, len(angles))
	for i := range angles {
		sines[i], cosines[i] = math.Sincos(g.Rand.Float64() * 7)
	}
	cos, cr := g.Upload(cosines, kerneltest.F32, 0)
	sin, sr := g.Upload(sines, kerneltest.F32, 0)

	// Rows of queries, keys and values lie next to each other, with a gap.
	stride := qd + 2*kd + gap*8
	in := make([]float64, rows*stride)
	table := make([]int, rows*columns)
	for r := range rows {
		table[r*columns] = -1
	}
	free := g.Rand.Perm(pages)
	cache := [2][]float64{make([]float64, pages*PageTokens*kd), make([]float64, pages*PageTokens*kd)}
	want := make([]float64, rows*qd)
	order, row := permutation(rows), 0
	for n, length := range lengths {
		draw := func(n int) []float64 {
			x := make([]float64, n)
			for i := range x {
				x[i] = g.Rand.NormFloat64()
			}
			return kerneltest.Decode(kerneltest.Encode(x, dt), dt)
		}
		q, k, v := draw(length*qd), draw(length*kd), draw(length*kd)
		turnedQ, turnedK := make([]float64, len(q)), make([]float64, len(k))
		layer.RoPE(turnedQ, q, cr[:length*half], sr[:length*half], length, s.Heads, s.HeadDim, false)
		layer.RoPE(turnedK, k, cr[:length*half], sr[:length*half], length, s.KVHeads, s.HeadDim, false)
		turnedK = kerneltest.Decode(kerneltest.Encode(turnedK, dt), dt)
		y, normalizers := make([]float64, length*qd), make([]float64, 2*s.Heads*length)
		cpuattention.Forward(y, normalizers, turnedQ, turnedK, v, cpuattention.Shape{Batch: 1, Seq: length,
			Heads: s.Heads, KVHeads: s.KVHeads, HeadDim: s.HeadDim, Causal: true, Scale: s.Scale, Window: s.Window})

		own := free[:(length+PageTokens-1)/PageTokens]
		free = free[len(own):]
		for p := range length {
			to := own[p/PageTokens]*PageTokens + p%PageTokens
			if p < length-last[n] {
				copy(cache[0][to*kd:], turnedK[p*kd:][:kd])
				copy(cache[1][to*kd:], v[p*kd:][:kd])
				continue
			}
			r := order[row]
			row++
			copy(in[r*stride:], q[p*qd:][:qd])
			copy(in[r*stride+qd:], k[p*kd:][:kd])
			copy(in[r*stride+qd+kd:], v[p*kd:][:kd])
			table[r*columns] = p
			copy(table[r*columns+1:], own)
			copy(want[r*qd:], y[p*qd:][:qd])
		}
	}

	wide, _ := g.Upload(in, dt, 0)
	at := func(column int) kernel.Rows { return kernel.Rows{Ptr: wide.Offset(column * dt.Size()), Stride: stride} }
	keys, _ := g.Upload(cache[0], dt, 0)
	values, _ := g.Upload(cache[1], dt, 0)
	y := g.Alloc(rows*qd, dt, 0)
	a := Paged{Geometry: s, Y: y.Ptr, Keys: keys.Ptr, Values: values.Ptr, Q: at(0), K: at(qd), V: at(qd + kd),
		Cos: cos.Ptr, Sin: sin.Ptr, Table: g.UploadInts(table), Rows: rows, Columns: columns, Type: dt}
	a.Early = i%2 == 0
	arrived, _ := g.Upload(make([]float64, a.Counters()), kerneltest.F32, 0)
	a.Arrived, a.Parts = arrived.Ptr, g.Alloc(a.PartsBytes(g.Info)/4, kerneltest.F32, 0).Ptr
	for _, grouped := range []bool{false, true} {
		if grouped && !a.CanGroup() {
			continue
		}
		a.Grouped = grouped
		a.Parts = g.Alloc(a.PartsBytes(g.Info)/4, kerneltest.F32, 0).Ptr
		for range 2 {
			g.Must(g.Ctx.Memset8(y.Ptr, 0xff, y.Bytes(), g.Stream))
			g.Must(g.Launch(g.Stream, a))
			g.Near(fmt.Sprint("y ", grouped), y, want, 4*kerneltest.Forward(dt))
		}
	}
}
