package gemm

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/attention"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
)

// split is a matrix of two parts, side by side or one above the other, on the device: as a whole and in
// parts.
type split struct{ all, first, second gpu.Ptr }

// sideBySide uploads a random matrix with d + r columns.
func sideBySide(g *kerneltest.Rig, rows, d, r int, deviation float64, t gpu.DType) split {
	var all, first, second []float64
	for range rows {
		row := make([]float64, d+r)
		for i := range row {
			row[i] = deviation * g.Rand.NormFloat64()
		}
		all, first, second = append(all, row...), append(first, row[:d]...), append(second, row[d:]...)
	}
	return uploadSplit(g, all, first, second, t)
}

// stacked uploads a random matrix with d + r rows.
func stacked(g *kerneltest.Rig, d, r, columns int, deviation float64, t gpu.DType) split {
	all := make([]float64, (d+r)*columns)
	for i := range all {
		all[i] = deviation * g.Rand.NormFloat64()
	}
	return uploadSplit(g, all, all[:d*columns], all[d*columns:], t)
}

func uploadSplit(g *kerneltest.Rig, all, first, second []float64, t gpu.DType) (s split) {
	for i, v := range [][]float64{all, first, second} {
		b, _ := g.Upload(v, t, 0)
		*[]*gpu.Ptr{&s.all, &s.first, &s.second}[i] = b.Ptr
	}
	return s
}

// TestTerms checks that a product plus a term is the product of the joined operands. If the depth of the
// product is a whole number of steps, the results are bit-identical.
func TestTerms(t *testing.T) {
	g := newHopperRig(t)
	for _, s := range []struct{ batch, heads, d, r int }{
		{1, 1, 64, 8}, {1, 3, 128, 16}, {2, 4, 136, 48}, {3, 2, 320, 64}, {1, 5, 72, 200},
		{20, 32, 448, 32}, // several tiles per block
	} {
		for _, dt := range []gpu.DType{kerneltest.Bf16, kerneltest.F16} {
			g.Scope(fmt.Sprintf("%+v/%v", s, dt), func(g *kerneltest.Rig) {
				testTerms(g, s.batch, s.heads, s.d, s.r, dt)
			})
		}
	}
}

func testTerms(g *kerneltest.Rig, batch, heads, d, r int, dt gpu.DType) {
	g.Helper()
	const seq, headDim = 128, 64
	rows, columns := batch*seq, heads*headDim
	small := 1 / math.Sqrt(float64(d+r))
	x := sideBySide(g, rows, d, r, 1, dt)
	wide := sideBySide(g, columns, d, r, small, dt)   // columns along the depth
	tall := stacked(g, d, r, columns, small, dt)      // rows along the depth
	both := sideBySide(g, 2*columns, d, r, small, dt) // of gate and up
	add, _ := g.Normal(rows*columns, dt, 0)
	pair, _ := g.Normal(2*rows*columns, dt, 0)
	ones := make([]float64, RoPEAnglesLen(seq, headDim/2))
	for i := range ones {
		ones[i] = 0.5
	}
	angles, _ := g.Upload(ones, kerneltest.F32, 0)
	normalizers, _ := g.Normal(2*rows*heads, kerneltest.F32, 0)
	geometry := attention.Geometry{Batch: batch, Seq: seq, Heads: heads, KVHeads: heads, HeadDim: headDim}
	workspace := attention.Backward{Geometry: geometry, Type: dt}.WorkspaceBytes(g.Info) / 4

	compare := func(what string, size int, launch func(y gpu.Ptr, a, b gpu.Ptr, d int, t Term) kernel.Launch, w split) {
		g.Helper()
		joined, parts := g.Alloc(size, dt, 0), g.Alloc(size, dt, 0)
		g.Must(g.Launch(g.Stream, launch(joined.Ptr, x.all, w.all, d+r, Term{})))
		g.Must(g.Launch(g.Stream, launch(parts.Ptr, x.first, w.first, d, Term{x.second, w.second, r})))
		want, got := g.Read(joined), g.Read(parts)
		if d%gemmDepth == 0 && !slices.Equal(want, got) {
			g.Errorf("%s: the bits differ from those of the joined operands", what)
		}
		if off := kerneltest.Distance(got, want); !(off < 1e-3) {
			g.Errorf("%s: off by %.3g", what, off)
		}
	}

	gate := func(d int) Gate { return Gate{Rows: rows, F: columns, D: d, Type: dt} }
	for _, c := range []gpu.Ptr{0, add.Ptr} {
		compare("nt", rows*columns, func(y, a, b gpu.Ptr, d int, t Term) kernel.Launch {
			return ProductSum{Product: Product{Y: y, X: a, W: b, C: c, Rows: rows, Columns: columns, D: d,
				TransW: true, Type: dt}, Term: t}
		}, wide)
		compare("nn", rows*columns, func(y, a, b gpu.Ptr, d int, t Term) kernel.Launch {
			return ProductSum{Product: Product{Y: y, X: a, W: b, C: c, Rows: rows, Columns: columns, D: d,
				Type: dt}, Term: t}
		}, tall)
	}

	compare("RoPE", rows*columns, func(y, a, b gpu.Ptr, d int, t Term) kernel.Launch {
		return RoPEProduct{Y: y, X: a, Weights: b, Angles: angles.Ptr, Rows: rows, Columns: columns, D: d,
			Turned: columns, Seq: seq, HeadDim: headDim, Type: dt, Term: t}
	}, wide)
	compare("gate and up", 2*rows*columns, func(y, a, b gpu.Ptr, d int, t Term) kernel.Launch {
		return SiLUProduct{H: g.Alloc(rows*columns, dt, 0).Ptr, AB: y, X: a, Weights: b, Gate: gate(d),
			Term: t}
	}, both)
	compare("the gate's gradient", 2*rows*columns, func(y, a, b gpu.Ptr, d int, t Term) kernel.Launch {
		return SiLUProductBackward{H: g.Alloc(rows*columns, dt, 0).Ptr, DAB: y, G: a, Down: b, AB: pair.Ptr,
			Gate: gate(d), Term: t}
	}, tall)
	compare("the gate's gradient without h", 2*rows*columns, func(y, a, b gpu.Ptr, d int, t Term) kernel.Launch {
		return SiLUProductBackward{DAB: y, G: a, Down: b, AB: pair.Ptr, Gate: gate(d), Term: t}
	}, tall)
	compare("statistics", rows*columns, func(y, a, b gpu.Ptr, d int, t Term) kernel.Launch {
		return StatisticsProduct{G: y, X: a, W: b, Y: add.Ptr, Normalizers: normalizers.Ptr,
			Workspace: g.Alloc(workspace, kerneltest.F32, 0).Ptr, Geometry: geometry, D: d, Type: dt, Term: t}
	}, tall)
}
