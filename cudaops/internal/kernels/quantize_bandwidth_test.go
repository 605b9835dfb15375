package kernels

import (
	"fmt"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// TestFloat8Bandwidth measures what stores rows or columns as float8, in every shape that a block can have, beside the same ops
// without.
func TestFloat8Bandwidth(t *testing.T) {
	if !benchmark {
		t.Skip("set KASMINA_GPU_BENCH to measure bandwidths")
	}
	g := newRig(t)
	g.scope("defaults", func(g *rig) { g.float8Bandwidth(nil) })
	g.scope("shapes", func(g *rig) { g.float8Bandwidth([]int{1, 2, 4, 8}) })
}

// float8Bandwidth takes the default shapes of blocks, or all that have one of so many rows.
func (g *rig) float8Bandwidth(rowsOf []int) {
	g.Helper()
	for _, shape := range [][2]int{{32768, 768}, {32768, 2304}, {16384, 1024}, {16384, 5632}} {
		rows, d := shape[0], shape[1]
		g.scope(fmt.Sprintf("quantize %dx%d", rows, d), func(g *rig) {
			var sets []Quantize
			for range 2 {
				y, scale := g.rows8Alloc(rows, d, 0)
				sets = append(sets, Quantize{Y: y.Ptr, Scale: scale.Ptr, X: g.large(rows*d, bf16).Ptr, Rows: rows, D: d, XStride: d, Type: bf16})
			}
			for _, h := range blockShapes(d, rowsOf) {
				g.benchSets(fmt.Sprint("quantize ", h), 3*rows*d, len(sets), func(i int) error {
					return g.quantize(g.stream, sets[i], h)
				})
			}
		})
	}
	for _, shape := range [][2]int{{32768, 2048}, {16384, 5632}} {
		g.scope(fmt.Sprintf("gate %dx%d", shape[0], shape[1]), func(g *rig) { g.gateBandwidth(shape[0], shape[1], rowsOf) })
	}
	if rowsOf != nil {
		return
	}
	for _, shape := range [][2]int{{32768, 768}, {16384, 1024}, {16384, 2048}} {
		g.scope(fmt.Sprintf("norm %dx%d", shape[0], shape[1]), func(g *rig) { g.normFloat8Bandwidth(shape[0], shape[1]) })
	}
	for _, shape := range [][2]int{{5632, 2048}, {2304, 768}} {
		rows, d := shape[0], shape[1]
		g.scope(fmt.Sprintf("columns %dx%d", rows, d), func(g *rig) {
			const sets = 8
			var a [sets]QuantizeColumns
			work := g.alloc(g.QuantizeColumnsWorkspace(rows, d)/4, f32, 0)
			for i := range a {
				y, scale := g.rows8Alloc(d, rows, 0)
				a[i] = QuantizeColumns{Y: y.Ptr, Scale: scale.Ptr, X: g.large(rows*d, bf16).Ptr, Workspace: work.Ptr, Rows: rows, D: d, Type: bf16}
			}
			g.benchSets("columns", 3*rows*d, sets, func(i int) error { return g.QuantizeColumns(g.stream, a[i]) })
			g.benchSets("columns of what is in the cache", 3*rows*d, 1, func(i int) error { return g.QuantizeColumns(g.stream, a[i]) })
			scale := g.alloc(rows, f32, 0)
			g.benchSets("rows", 3*rows*d, sets, func(i int) error {
				return g.Quantize(g.stream, Quantize{Y: a[i].Y, Scale: scale.Ptr, X: a[i].X, Rows: rows, D: d, Type: bf16})
			})
		})
	}
}

// blockShapes is the default shape, or all of them with each of so many rows.
func blockShapes(d int, rowsOf []int) (shapes []heldShape) {
	all := heldShapes(d, bf16)
	if rowsOf == nil {
		return all[:1]
	}
	for _, h := range all {
		for _, h.rows = range rowsOf {
			if n := h.rows * h.across; 64 <= n && n <= heldThreads {
				shapes = append(shapes, h)
			}
		}
	}
	return shapes
}

// benchSets reports the bandwidth of launches over so many sets of arrays in turn.
func (g *rig) benchSets(name string, bytes, sets int, launch func(i int) error) {
	g.Helper()
	var each []func()
	for i := range sets {
		each = append(each, func() { g.must(launch(i)) })
	}
	g.bench(name, bytes, each)
}

func (g *rig) gateBandwidth(rows, f int, rowsOf []int) {
	g.Helper()
	n := rows * f
	var plain, rounded, both [2]SiLUMul
	var back, backRounded [2]SiLUMulBackward
	for i := range plain {
		ab, h, dh := g.large(2*n, bf16), g.alloc(n, bf16, 0), g.large(n, bf16)
		out, scale := g.rows8Alloc(rows, 2*f, 0)
		beside := gpu.Ptr(2 * f)
		a := SiLUMul{H: h.Ptr, A: ab.Ptr, B: ab.Ptr + beside, Rows: rows, F: f, Stride: 2 * f, Type: bf16}
		plain[i] = a
		a.H8, a.Scale8 = out.Ptr, scale.Ptr
		both[i] = a
		a.H = 0
		rounded[i] = a
		dab := g.alloc(2*n, bf16, 0)
		b := SiLUMulBackward{DA: dab.Ptr, DB: dab.Ptr + beside, DH: dh.Ptr, A: ab.Ptr, B: ab.Ptr + beside, Rows: rows, F: f,
			Stride: 2 * f, GradStride: 2 * f, Type: bf16}
		back[i] = b
		b.DAB8, b.Scale8 = out.Ptr, scale.Ptr
		backRounded[i] = b
	}
	if rowsOf == nil {
		g.benchSets("gate", 6*n, 2, func(i int) error { return g.SiLUMul(g.stream, plain[i]) })
		g.benchSets("gate backward", 10*n, 2, func(i int) error { return g.SiLUMulBackward(g.stream, back[i]) })
		for i := range back {
			back[i].H, backRounded[i].H = plain[i].H, plain[i].H
		}
		g.benchSets("gate backward with h", 12*n, 2, func(i int) error { return g.SiLUMulBackward(g.stream, back[i]) })
		g.benchSets("gate backward with h and float8", 14*n, 2, func(i int) error { return g.SiLUMulBackward(g.stream, backRounded[i]) })
		for i := range back {
			backRounded[i].H = 0
		}
	}
	for _, h := range blockShapes(f, rowsOf) {
		g.benchSets(fmt.Sprint("gate, float8 alone ", h), 5*n, 2, func(i int) error { return g.siluMulFloat8(g.stream, rounded[i], h) })
		g.benchSets(fmt.Sprint("gate and float8 ", h), 7*n, 2, func(i int) error { return g.siluMulFloat8(g.stream, both[i], h) })
		g.benchSets(fmt.Sprint("gate backward and float8 ", h), 12*n, 2, func(i int) error {
			return g.siluMulBackwardFloat8(g.stream, backRounded[i], h)
		})
	}
}

func (g *rig) normFloat8Bandwidth(rows, d int) {
	g.Helper()
	n := rows * d
	w, _ := g.normal(d, f32, 0)
	rstd, dw, work := g.alloc(rows, f32, 0), g.alloc(d, f32, 0), g.alloc(g.RMSNormWorkspace(d, bf16)/4, f32, 0)
	for _, float8 := range []bool{false, true} {
		var forward, add [2]RMSNorm
		var backward [2]RMSNormBackward
		for i := range forward {
			x, y, r := g.large(n, bf16), g.large(n, bf16), g.large(n, bf16)
			forward[i] = RMSNorm{Y: y.Ptr, Rstd: rstd.Ptr, X: x.Ptr, W: w.Ptr, Rows: rows, D: d, Eps: 1e-5, Type: bf16}
			backward[i] = RMSNormBackward{DX: r.Ptr, DW: dw.Ptr, G: y.Ptr, X: x.Ptr, W: w.Ptr, Rstd: rstd.Ptr, Add: r.Ptr, Rows: rows, D: d,
				Type: bf16, DWType: f32, Workspace: work.Ptr}
			if float8 {
				out, scale := g.rows8Alloc(rows, d, 0)
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
			sets  *[2]RMSNorm
			bytes int
		}{{"norm", &forward, size}, {"add and norm", &add, size + 4*n}} {
			ways, err := g.RMSNormWays(ops.sets[0])
			g.must(err)
			for _, way := range ways[:len(ways)-1] {
				g.benchSets(fmt.Sprint(ops.name, what, " ", way), ops.bytes, 2, func(i int) error {
					a := ops.sets[i]
					a.Way = way
					return g.RMSNorm(g.stream, a)
				})
			}
		}
		ways, err := g.RMSNormBackwardWays(backward[0])
		g.must(err)
		for _, way := range ways[:len(ways)-1] {
			g.benchSets(fmt.Sprint("norm backward", what, " ", way), size+4*n, 2, func(i int) error {
				a := backward[i]
				a.Way = way
				return g.RMSNormBackward(g.stream, a)
			})
		}
	}
}
