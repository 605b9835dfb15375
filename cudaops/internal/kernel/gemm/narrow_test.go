package gemm

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	cpugemm "github.com/kasmina-go/kasmina/internal/cpu/gemm"
)

// TestNarrow compares products with a narrow matrix to the same products in float64.
func TestNarrow(t *testing.T) {
	g := newHopperRig(t)
	for _, s := range []struct{ rows, wide, narrow int }{
		{1, 8, 8}, {63, 72, 16}, {64, 64, 64}, {129, 264, 48}, {300, 520, 72}, {1000, 136, 200},
		{5000, 2056, 32}, {4100, 300 * 8, 48},
	} {
		if testing.Short() && s.rows > 2000 {
			continue
		}
		for _, dt := range []gpu.DType{kerneltest.Bf16, kerneltest.F16} {
			g.Scope(fmt.Sprintf("%+v/%v", s, dt), func(g *kerneltest.Rig) {
				testNarrow(g, s.rows, s.wide, s.narrow, dt)
			})
		}
	}
}

func testNarrow(g *kerneltest.Rig, rows, wide, narrow int, dt gpu.DType) {
	g.Helper()
	x, xr := g.Normal(rows*wide, dt, 0)
	w, wr := scaledNormal(g, narrow*wide, wide, dt)
	v, vr := scaledNormal(g, rows*narrow, rows, dt)

	rowFactors, byRow := g.Normal(rows, kerneltest.F32, 0)
	columnFactors, byColumn := g.Normal(wide, kerneltest.F32, 0)

	twice := func(what string, size int, t gpu.DType, run func(y gpu.Ptr), want []float64, tolerance float64) {
		g.Helper()
		var bits []float64
		for range 2 {
			y := g.Alloc(size, t, 0)
			run(y.Ptr)
			g.Near(what, y, want, tolerance)
			got := g.Read(y)
			if bits != nil && !slices.Equal(bits, got) {
				g.Errorf("%s: results differ from run to run", what)
			}
			bits = got
		}
	}

	if narrow <= 64 {
		b, br := scaledNormal(g, wide*narrow, wide, dt)
		wantV, wantDW := make([]float64, rows*narrow), make([]float64, wide*narrow)
		cpugemm.Mul(false, false, rows, narrow, wide, 2, xr, wide, br, narrow, 0, wantV, narrow)
		cpugemm.Mul(true, false, wide, narrow, rows, 1, xr, wide, vr, narrow, 0, wantDW, narrow)
		scaled := slices.Clone(wantV)
		for i := range scaled {
			scaled[i] *= byRow[i/narrow]
		}

		a := NarrowProducts{X: x.Ptr, W: b.Ptr, U: v.Ptr, Factors: rowFactors.Ptr, Rows: rows, Columns: wide,
			Narrow: narrow, Scale: 2, Type: dt, DWType: kerneltest.F32}
		a.Workspace = g.Alloc(a.WorkspaceBytes(g.Info)/4, kerneltest.F32, 0).Ptr
		var bits []float64
		for range 2 {
			to, dw, too := g.Alloc(rows*narrow, dt, 0), g.Alloc(wide*narrow, kerneltest.F32, 0),
				g.Alloc(rows*narrow, dt, 0)
			a.V, a.DW, a.Scaled = to.Ptr, dw.Ptr, too.Ptr
			g.Must(g.Launch(g.Stream, a))
			g.Near("v of both", to, wantV, kerneltest.Forward(dt))
			g.Near("scaled v of both", too, scaled, kerneltest.Forward(dt))
			g.Near("dw of both", dw, wantDW, 1e-4)
			all := slices.Concat(g.Read(to), g.Read(dw), g.Read(too))
			if bits != nil && !slices.Equal(bits, all) {
				g.Error("both: results differ from run to run")
			}
			bits = all
		}
	}

	for _, trans := range []bool{false, true} {
		stride := narrow
		if trans {
			stride = wide
		}
		want := make([]float64, rows*narrow)
		cpugemm.Mul(false, trans, rows, narrow, wide, 2, xr, wide, wr, stride, 0, want, narrow)
		row := RowProduct{X: x.Ptr, W: w.Ptr, Rows: rows, Columns: narrow, D: wide, TransW: trans, Scale: 2,
			Type: dt}
		twice(fmt.Sprint("rows, transposed ", trans), rows*narrow, dt, func(y gpu.Ptr) {
			row.Y = y
			g.Must(g.Launch(g.Stream, row))
		}, want, kerneltest.Forward(dt))
		for i := range want {
			want[i] *= byRow[i/narrow]
		}
		twice(fmt.Sprint("scaled rows, transposed ", trans), rows*narrow, dt, func(y gpu.Ptr) {
			row.Y, row.Scaled, row.Factors = g.Alloc(rows*narrow, dt, 0).Ptr, y, rowFactors.Ptr
			g.Must(g.Launch(g.Stream, row))
		}, want, kerneltest.Forward(dt))

		want = make([]float64, narrow*wide)
		if trans {
			cpugemm.Mul(true, false, narrow, wide, rows, 1, vr, narrow, xr, wide, 0, want, wide)
		} else {
			cpugemm.Mul(true, false, wide, narrow, rows, 1, xr, wide, vr, narrow, 0, want, narrow)
		}
		for _, to := range []gpu.DType{kerneltest.F32, kerneltest.Bf16} {
			tolerance := 1e-4
			if to == kerneltest.Bf16 {
				tolerance = kerneltest.Forward(to)
			}
			twice(fmt.Sprint("columns, transposed ", trans), narrow*wide, to, func(y gpu.Ptr) {
				a := ColumnProduct{Y: y, X: x.Ptr, V: v.Ptr, Rows: rows, Columns: wide, Narrow: narrow,
					Transposed: trans, Type: dt, YType: to}
				a.Workspace = g.Alloc(a.WorkspaceBytes(g.Info)/4, kerneltest.F32, 0).Ptr
				g.Must(g.Launch(g.Stream, a))
			}, want, tolerance)

			scaled := slices.Clone(want)
			for i := range scaled {
				c := i / narrow
				if trans {
					c = i % wide
				}
				scaled[i] *= byColumn[c]
			}
			twice(fmt.Sprint("scaled columns, transposed ", trans), narrow*wide, to, func(y gpu.Ptr) {
				a := ColumnProduct{Y: y, X: x.Ptr, V: v.Ptr, Factors: columnFactors.Ptr, Rows: rows,
					Columns: wide, Narrow: narrow, Transposed: trans, Type: dt, YType: to}
				a.Workspace = g.Alloc(a.WorkspaceBytes(g.Info)/4, kerneltest.F32, 0).Ptr
				g.Must(g.Launch(g.Stream, a))
			}, scaled, tolerance)
		}
	}
}

// TestBlockDiagonal checks that blocks are copied to the diagonal of a matrix of zeros, and that the reverse copy
// returns them unchanged.
func TestBlockDiagonal(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, a := range []BlockDiagonal{
		{Rows: [3]int{3, 5, 2}, Columns: [3]int{4, 1, 2}},
		{Rows: [3]int{300, 7, 0}, Columns: [3]int{8, 16, 0}},
		{Rows: [3]int{8, 100, 40}, Columns: [3]int{16, 0, 8}},
	} {
		for _, dt := range []gpu.DType{kerneltest.F32, kerneltest.Bf16} {
			g.Scope(fmt.Sprintf("%+v/%v", a, dt), func(g *kerneltest.Rig) {
				a, height, width := a, 0, 0
				a.Size = dt.Size()
				var values [MaxBlocks][]float64
				for i := range a.Blocks {
					height, width = height+a.Rows[i], width+a.Columns[i]
					if n := a.Rows[i] * a.Columns[i]; n > 0 {
						b, v := g.Normal(n, dt, 0)
						a.Blocks[i], values[i] = b.Ptr, v
					}
				}

				want := make([]float64, height*width)
				row, column := 0, 0
				for i, v := range values {
					for k, x := range v {
						want[(row+k/a.Columns[i])*width+column+k%a.Columns[i]] = x
					}
					row, column = row+a.Rows[i], column+a.Columns[i]
				}

				y := g.Alloc(height*width, dt, 0)
				a.Y = y.Ptr
				g.Must(g.Launch(g.Stream, a))
				if !slices.Equal(g.Read(y), want) {
					g.Error("the matrix differs")
				}

				a.Back = true
				var back [MaxBlocks]*kerneltest.Buffer
				for i, v := range values {
					if len(v) > 0 {
						back[i] = g.Alloc(len(v), dt, 0)
						a.Blocks[i] = back[i].Ptr
					}
				}
				g.Must(g.Launch(g.Stream, a))
				for i, v := range values {
					if len(v) > 0 && !slices.Equal(g.Read(back[i]), v) {
						g.Errorf("block %d differs", i)
					}
				}
			})
		}
	}
}
