package quantize_test

import (
	"fmt"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/silu"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// TestFloat8Bandwidth measures what stores rows or columns as float8, in every shape that a block can have, beside the same ops
// without.
func TestFloat8Bandwidth(t *testing.T) {
	if !kerneltest.Benchmark {
		t.Skip("set KASMINA_GPU_BENCH to measure bandwidths")
	}
	g := kerneltest.NewRig(t)
	g.Scope("defaults", func(g *kerneltest.Rig) { float8Bandwidth(g, nil) })
	g.Scope("shapes", func(g *kerneltest.Rig) { float8Bandwidth(g, []int{1, 2, 4, 8}) })
}

// float8Bandwidth takes the default shapes of blocks, or all that have one of so many rows.
func float8Bandwidth(g *kerneltest.Rig, rowsOf []int) {
	g.Helper()
	for _, shape := range [][2]int{{32768, 768}, {32768, 2304}, {16384, 1024}, {16384, 5632}} {
		rows, d := shape[0], shape[1]
		g.Scope(fmt.Sprintf("quantize %dx%d", rows, d), func(g *kerneltest.Rig) {
			var sets []quantize.Rows
			for range 2 {
				y, scale := rows8Alloc(g, rows, d, 0)
				sets = append(sets, quantize.Rows{Y: y.Ptr, Scale: scale.Ptr, X: g.Large(rows*d, kerneltest.Bf16).Ptr, Rows: rows, D: d, XStride: d, Type: kerneltest.Bf16})
			}
			for _, h := range blockShapes(d, rowsOf) {
				benchSets(g, fmt.Sprint("quantize ", h), 3*rows*d, len(sets), func(i int) error {
					return quantize.Quantize(g.Set, g.Stream, sets[i], h)
				})
			}
		})
	}
	for _, shape := range [][2]int{{32768, 2048}, {16384, 5632}} {
		g.Scope(fmt.Sprintf("gate %dx%d", shape[0], shape[1]), func(g *kerneltest.Rig) { gateBandwidth(g, shape[0], shape[1], rowsOf) })
	}
	if rowsOf != nil {
		return
	}
	for _, shape := range [][2]int{{32768, 768}, {16384, 1024}, {16384, 2048}} {
		g.Scope(fmt.Sprintf("norm %dx%d", shape[0], shape[1]), func(g *kerneltest.Rig) { normFloat8Bandwidth(g, shape[0], shape[1]) })
	}
	for _, shape := range [][2]int{{5632, 2048}, {2304, 768}} {
		rows, d := shape[0], shape[1]
		g.Scope(fmt.Sprintf("columns %dx%d", rows, d), func(g *kerneltest.Rig) {
			const sets = 8
			var a [sets]quantize.Columns
			work := g.Alloc(quantize.QuantizeColumnsWorkspace(g.Set, rows, d)/4, kerneltest.F32, 0)
			for i := range a {
				y, scale := rows8Alloc(g, d, rows, 0)
				a[i] = quantize.Columns{Y: y.Ptr, Scale: scale.Ptr, X: g.Large(rows*d, kerneltest.Bf16).Ptr, Workspace: work.Ptr, Rows: rows, D: d, Type: kerneltest.Bf16}
			}
			benchSets(g, "columns", 3*rows*d, sets, func(i int) error { return a[i].Launch(g.Set, g.Stream) })
			benchSets(g, "columns of what is in the cache", 3*rows*d, 1, func(i int) error { return a[i].Launch(g.Set, g.Stream) })
			scale := g.Alloc(rows, kerneltest.F32, 0)
			benchSets(g, "rows", 3*rows*d, sets, func(i int) error {
				return quantize.Rows{Y: a[i].Y, Scale: scale.Ptr, X: a[i].X, Rows: rows, D: d, Type: kerneltest.Bf16}.Launch(g.Set, g.Stream)
			})
		})
	}
}

// blockShapes is the default shape, or all of them with each of so many rows.
func blockShapes(d int, rowsOf []int) (shapes []quantize.HeldShape) {
	all := quantize.HeldShapes(d, kerneltest.Bf16)
	if rowsOf == nil {
		return all[:1]
	}
	for _, h := range all {
		for _, h.Rows = range rowsOf {
			if n := h.Rows * h.Across; 64 <= n && n <= quantize.HeldThreads {
				shapes = append(shapes, h)
			}
		}
	}
	return shapes
}

// benchSets reports the bandwidth of launches over so many sets of arrays in turn.
func benchSets(g *kerneltest.Rig, name string, bytes, sets int, launch func(i int) error) {
	g.Helper()
	var each []func()
	for i := range sets {
		each = append(each, func() { g.Must(launch(i)) })
	}
	g.Bench(name, bytes, each)
}

func gateBandwidth(g *kerneltest.Rig, rows, f int, rowsOf []int) {
	g.Helper()
	n := rows * f
	var plain, rounded, both [2]silu.Mul
	var back, backRounded [2]silu.MulBackward
	for i := range plain {
		ab, h, dh := g.Large(2*n, kerneltest.Bf16), g.Alloc(n, kerneltest.Bf16, 0), g.Large(n, kerneltest.Bf16)
		out, scale := rows8Alloc(g, rows, 2*f, 0)
		beside := gpu.Ptr(2 * f)
		a := silu.Mul{H: h.Ptr, A: ab.Ptr, B: ab.Ptr + beside, Rows: rows, F: f, Stride: 2 * f, Type: kerneltest.Bf16}
		plain[i] = a
		a.H8, a.Scale8 = out.Ptr, scale.Ptr
		both[i] = a
		a.H = 0
		rounded[i] = a
		dab := g.Alloc(2*n, kerneltest.Bf16, 0)
		b := silu.MulBackward{DA: dab.Ptr, DB: dab.Ptr + beside, DH: dh.Ptr, A: ab.Ptr, B: ab.Ptr + beside, Rows: rows, F: f,
			Stride: 2 * f, GradStride: 2 * f, Type: kerneltest.Bf16}
		back[i] = b
		b.DAB8, b.Scale8 = out.Ptr, scale.Ptr
		backRounded[i] = b
	}
	if rowsOf == nil {
		benchSets(g, "gate", 6*n, 2, func(i int) error { return plain[i].Launch(g.Set, g.Stream) })
		benchSets(g, "gate backward", 10*n, 2, func(i int) error { return back[i].Launch(g.Set, g.Stream) })
		for i := range back {
			back[i].H, backRounded[i].H = plain[i].H, plain[i].H
		}
		benchSets(g, "gate backward with h", 12*n, 2, func(i int) error { return back[i].Launch(g.Set, g.Stream) })
		benchSets(g, "gate backward with h and float8", 14*n, 2, func(i int) error { return backRounded[i].Launch(g.Set, g.Stream) })
		for i := range back {
			backRounded[i].H = 0
		}
	}
	for _, h := range blockShapes(f, rowsOf) {
		benchSets(g, fmt.Sprint("gate, float8 alone ", h), 5*n, 2, func(i int) error { return silu.SiluMulFloat8(g.Set, g.Stream, rounded[i], h) })
		benchSets(g, fmt.Sprint("gate and float8 ", h), 7*n, 2, func(i int) error { return silu.SiluMulFloat8(g.Set, g.Stream, both[i], h) })
		benchSets(g, fmt.Sprint("gate backward and float8 ", h), 12*n, 2, func(i int) error {
			return silu.SiluMulBackwardFloat8(g.Set, g.Stream, backRounded[i], h)
		})
	}
}

func normFloat8Bandwidth(g *kerneltest.Rig, rows, d int) {
	g.Helper()
	n := rows * d
	w, _ := g.Normal(d, kerneltest.F32, 0)
	rstd, dw, work := g.Alloc(rows, kerneltest.F32, 0), g.Alloc(d, kerneltest.F32, 0), g.Alloc(norm.RMSNormWorkspace(g.Set, d, kerneltest.Bf16)/4, kerneltest.F32, 0)
	for _, float8 := range []bool{false, true} {
		var forward, add [2]norm.RMSNorm
		var backward [2]norm.RMSNormBackward
		for i := range forward {
			x, y, r := g.Large(n, kerneltest.Bf16), g.Large(n, kerneltest.Bf16), g.Large(n, kerneltest.Bf16)
			forward[i] = norm.RMSNorm{Y: y.Ptr, Rstd: rstd.Ptr, X: x.Ptr, W: w.Ptr, Rows: rows, D: d, Eps: 1e-5, Type: kerneltest.Bf16}
			backward[i] = norm.RMSNormBackward{DX: r.Ptr, DW: dw.Ptr, G: y.Ptr, X: x.Ptr, W: w.Ptr, Rstd: rstd.Ptr, Add: r.Ptr, Rows: rows, D: d,
				Type: kerneltest.Bf16, DWType: kerneltest.F32, Workspace: work.Ptr}
			if float8 {
				out, scale := rows8Alloc(g, rows, d, 0)
				forward[i].Y8, forward[i].Scale8 = out.Ptr, scale.Ptr
				backward[i].DX8, backward[i].Scale8 = out.Ptr, scale.Ptr
			}
			add[i] = forward[i]
			add[i].Residual, add[i].Sum = r.Ptr, r.Ptr
		}
		size, what := 4*n, ""
		if float8 {
			size, what = 5*n, " and float8"
		}
		for _, ops := range []struct {
			name  string
			sets  *[2]norm.RMSNorm
			bytes int
		}{{"norm", &forward, size}, {"add and norm", &add, size + 4*n}} {
			ways, err := norm.RMSNormWays(g.Set, ops.sets[0])
			g.Must(err)
			for _, way := range ways[:len(ways)-1] {
				benchSets(g, fmt.Sprint(ops.name, what, " ", way), ops.bytes, 2, func(i int) error {
					a := ops.sets[i]
					a.Way = way
					return a.Launch(g.Set, g.Stream)
				})
			}
		}
		ways, err := norm.RMSNormBackwardWays(g.Set, backward[0])
		g.Must(err)
		for _, way := range ways[:len(ways)-1] {
			benchSets(g, fmt.Sprint("norm backward", what, " ", way), size+4*n, 2, func(i int) error {
				a := backward[i]
				a.Way = way
				return a.Launch(g.Set, g.Stream)
			})
		}
	}
}
