package gemm

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/attention"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	cpugemm "github.com/kasmina-go/kasmina/internal/cpu/gemm"
)

// TestStatisticsProduct compares the statistics that a product computes for attention's backward pass with sums over
// its rounded results, and checks that the product itself is bit-identical to a plain one.
func TestStatisticsProduct(t *testing.T) {
	g := newHopperRig(t)
	for _, s := range []struct{ batch, seq, heads, headDim, d int }{
		{1, 128, 1, 64, 8}, {1, 128, 1, 128, 72}, {3, 128, 3, 64, 136}, {2, 256, 3, 128, 264},
		{5, 384, 6, 64, 776}, {3, 640, 7, 128, 1096},
		{7, 640, 40, 64, 520}, {7, 640, 20, 128, 584}, // several tiles per block
	} {
		if testing.Short() && s.batch*s.seq > 2000 {
			continue
		}
		a := StatisticsProduct{D: s.d, Geometry: attention.Geometry{Batch: s.batch, Seq: s.seq,
			Heads: s.heads, KVHeads: s.heads, HeadDim: s.headDim}}
		for _, a.Type = range []gpu.DType{kerneltest.Bf16, kerneltest.F16} {
			g.Scope(fmt.Sprintf("%+v/%v", s, a.Type), func(g *kerneltest.Rig) {
				testStatisticsProduct(g, a)
			})
		}
	}
}

func testStatisticsProduct(g *kerneltest.Rig, a StatisticsProduct) {
	g.Helper()
	rows, columns := a.Batch*a.Seq, a.Heads*a.HeadDim
	x, xr := g.Normal(rows*a.D, a.Type, 0)
	w, wr := scaledNormal(g, a.D*columns, a.D, a.Type)
	y, yr := g.Normal(rows*columns, a.Type, 0)
	pairs := make([]float64, 2*rows*a.Heads)
	for i := range pairs {
		pairs[i] = g.Rand.NormFloat64()
		if i%2 == 0 { // include large scores
			pairs[i] *= []float64{1, 100, 1e4, 1e6, 1e8}[g.Rand.IntN(5)]
		}
	}

	normalizers, lr := g.Upload(pairs, kerneltest.F32, 0)
	a.X, a.W, a.Y, a.Normalizers = x.Ptr, w.Ptr, y.Ptr, normalizers.Ptr
	want := make([]float64, rows*columns)
	cpugemm.Mul(false, false, rows, columns, a.D, 1, xr, a.D, wr, columns, 0, want, columns)
	require.Len(g, a.Variants(g.Set), 1)
	size := attention.Backward{Geometry: a.Geometry, Type: a.Type}.WorkspaceBytes(g.Info) / 4
	first, n := a.Counters(0)
	counters, inStats := int(first)/4, 3*rows*a.Heads
	var bits, statsBits []float64
	for range 2 {
		out, stats := g.Alloc(len(want), a.Type, 0), g.Alloc(size, kerneltest.F32, 0)
		a.G, a.Workspace = out.Ptr, stats.Ptr
		g.Must(g.Launch(g.Stream, a))
		g.Near("product", out, want, kerneltest.Forward(a.Type))
		got, all := g.Read(out), g.Read(stats)
		products := make([]float64, rows*a.Heads)
		sums := slices.Clone(products)
		for r := range rows {
			for h := range a.Heads {
				of, position := r/a.Seq*a.Heads+h, r%a.Seq
				i := of*a.Seq + position
				for c := r*columns + h*a.HeadDim; c < r*columns+(h+1)*a.HeadDim; c++ {
					sums[i] += got[c] * yr[c] // of the rounded result
				}
				products[i] = all[(3*of+1)*a.Seq+position]
				requireExponent(g, lr[2*i], lr[2*i+1], all[3*of*a.Seq+position],
					all[(3*of+2)*a.Seq+position])
			}
		}
		require.Less(g, kerneltest.Distance(products, sums), 1e-5)
		require.Falsef(g, slices.ContainsFunc(all[inStats:counters], func(v float64) bool {
			return v == v
		}), "the sums of dq have changed")
		require.Equal(g, make([]float64, n), all[counters:][:n])
		if bits == nil {
			bits, statsBits = got, all[:inStats]
		}
		require.True(g, slices.Equal(bits, got) && slices.Equal(statsBits, all[:inStats]),
			"results differ from run to run")
	}

	plain := g.Alloc(len(want), a.Type, 0)
	g.Must(g.Launch(g.Stream, Product{Y: plain.Ptr, X: a.X, W: a.W, Type: a.Type,
		Rows: rows, Columns: columns, D: a.D}))
	require.True(g, slices.Equal(g.Read(plain), bits), "the bits differ from those of a plain product")
}

// requireExponent checks that h and ρ match the normalizer (m, log l), as defined in exponent.cuh.
func requireExponent(g *kerneltest.Rig, m, logL, h, rho float64) {
	g.Helper()
	log2e := float64(float32(math.Log2E))
	exact := m*log2e + logL*log2e
	marked := math.Float32bits(float32(h))&1 == 1
	if !marked {
		require.Equal(g, 1.0, rho, "m %g, log l %g: h is %g", m, logL, h)
		require.Less(g, math.Abs(h), 128.0)
		require.InDelta(g, exact, h, 1e-6+math.Abs(exact)*0x1p-22)
		return
	}

	require.GreaterOrEqual(g, math.Abs(h), 128.0)
	require.InDelta(g, exact, h, math.Abs(exact)*0x1p-22)
	require.InDelta(g, exact, h-math.Log2(rho), 1e-5, "m %g, log l %g: h is %g, rho %g", m, logL, h,
		rho)
}

// TestBackwardStatistics compares the gradients of attention for three sources of the backward pass's statistics. The
// gradients with a separate statistics kernel must be bit-identical to those with the pass's own statistics, and the
// gradients with a StatisticsProduct must be close to them.
func TestBackwardStatistics(t *testing.T) {
	g := newHopperRig(t)
	for _, headDim := range []int{64, 128} {
		for _, documents := range []bool{false, true} {
			g.Scope(fmt.Sprintf("%d, documents %v", headDim, documents), func(g *kerneltest.Rig) {
				testBackwardStatistics(g, attention.Geometry{Batch: 2, Seq: 384, Heads: 6, KVHeads: 3,
					HeadDim: headDim, Causal: true}, documents)
			})
		}
	}
}

func testBackwardStatistics(g *kerneltest.Rig, s attention.Geometry, documents bool) {
	g.Helper()
	bf16, rows := kerneltest.Bf16, s.Batch*s.Seq
	wide, narrow := s.Heads*s.HeadDim, s.KVHeads*s.HeadDim
	if documents {
		s.Documents = g.Alloc(attention.DocumentsBytes(s.Batch, s.Seq)/4, kerneltest.F32, 0).Ptr
		starts := make([]int, rows)
		for i := range starts {
			if i%s.Seq >= 131 {
				starts[i] = 131
			}
		}
		g.Must(g.Launch(g.Stream, attention.Documents{Table: s.Documents,
			Starts: g.UploadInts(starts), Batch: s.Batch, Seq: s.Seq}))
	}

	matrix := func(columns int) kernel.Rows {
		b, _ := g.Normal(rows*columns, bf16, 0)
		return kernel.Rows{Ptr: b.Ptr, Stride: columns}
	}
	const depth = 200
	x := matrix(depth)
	w, _ := scaledNormal(g, depth*wide, depth, bf16)
	q, k, v, y, gradient := matrix(wide), matrix(narrow), matrix(narrow), matrix(wide), matrix(wide)
	normalizers := g.Alloc(2*rows*s.Heads, kerneltest.F32, 0).Ptr
	variant := kernel.Variant{Family: attention.Hopper}
	g.Must(g.Launch(g.Stream, attention.Forward{Geometry: s, Y: y, Q: q, K: k, V: v,
		Normalizers: normalizers, Type: bf16, Variant: variant}))
	back := attention.Backward{Geometry: s, G: gradient, Q: q, K: k, V: v, Y: y,
		Normalizers: normalizers, Type: bf16, Variant: variant}
	gradients := func(before ...kernel.Launch) (d [3][]float64) {
		back.Workspace = g.Alloc(back.WorkspaceBytes(g.Info)/4, kerneltest.F32, 0).Ptr
		back.HasStatistics = len(before) > 1
		for _, l := range before {
			switch f := l.(type) {
			case attention.Statistics:
				f.Workspace = back.Workspace
				l = f
			case StatisticsProduct:
				f.Workspace = back.Workspace
				l = f
			}
			g.Must(g.Launch(g.Stream, l))
		}
		var to [3]*kerneltest.Buffer
		for i, d := range []*kernel.Rows{&back.DQ, &back.DK, &back.DV} {
			columns := []int{wide, narrow, narrow}[i]
			to[i] = g.Alloc(rows*columns, bf16, 0)
			*d = kernel.Rows{Ptr: to[i].Ptr, Stride: columns}
		}
		g.Must(g.Launch(g.Stream, back))
		for i, b := range to {
			d[i] = g.Read(b)
		}
		return d
	}

	product := Product{Y: gradient.Ptr, X: x.Ptr, W: w.Ptr, Type: bf16,
		Rows: rows, Columns: wide, D: depth}
	alone := gradients(product)
	for i, d := range gradients(product, attention.Statistics{Geometry: s, G: gradient, Y: y,
		Normalizers: normalizers, Type: bf16}) {
		require.True(g, slices.Equal(d, alone[i]), i)
	}

	formed := StatisticsProduct{G: gradient.Ptr, X: x.Ptr, W: w.Ptr, Y: y.Ptr,
		Normalizers: normalizers, Geometry: s, D: depth, Type: bf16}
	for i, d := range gradients(product, formed) {
		require.Less(g, kerneltest.Distance(d, alone[i]), 1e-3, i)
	}
}
