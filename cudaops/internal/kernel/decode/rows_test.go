package decode

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
)

// TestRows compares products of several rows with sums in float64, with and without an added matrix, and checks that a
// second run is bit-identical.
func TestRows(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, c := range []struct{ rows, columns, depth int }{{2, 5, 8}, {7, 130, 72}, {16, 128, 2048}, {17, 300, 1000},
		{32, 2048, 2048}, {33, 129, 4096}, {64, 640, 8192}, {32, 9000, 512}, {48, 1, 264}} {
		for _, dt := range []gpu.DType{kerneltest.Bf16, kerneltest.F16} {
			g.Scope(fmt.Sprintf("%+v/%v", c, dt), func(g *kerneltest.Rig) {
				x, xr := g.Normal(c.rows*c.depth, dt, 0)
				w, wr := g.Upload(scaled(g.Rand, c.columns*c.depth, c.depth), dt, 0)
				add, ar := g.Normal(c.rows*c.columns, dt, i%3)
				y := g.Alloc(c.rows*c.columns, dt, i%2)
				want := product(xr, wr, c.rows, c.columns, c.depth)

				p := RowsProduct{Y: y.Ptr, X: x.Ptr, W: w.Ptr, Rows: c.rows, Columns: c.columns, D: c.depth, Type: dt}
				p.Steady, p.Early = i%2 == 0, i%4 < 2
				g.Must(g.Launch(g.Stream, p))
				g.Near("y", y, want, kerneltest.Forward(dt))
				once := g.Read(y)
				g.Must(g.Launch(g.Stream, p))
				if kerneltest.Distance(g.Read(y), once) != 0 {
					g.Error("two runs are not bit-identical")
				}

				p.C = add.Ptr
				g.Must(g.Launch(g.Stream, p))
				for j := range ar {
					ar[j] += want[j]
				}
				g.Near("y + c", y, ar, kerneltest.Forward(dt))

				// The rows of w are half gate and half up.
				f := c.columns / 2
				gated := gatedRows(want, c.rows, c.columns, layer.SiLUMul)
				h := g.Alloc(c.rows*f, dt, 0)
				p.Y, p.C, p.Columns, p.Gate = h.Ptr, 0, f, GateSiLU
				if f > 0 {
					g.Must(g.Launch(g.Stream, p))
					g.Near("gated", h, gated, 4*kerneltest.Forward(dt))
				}
			})
		}
	}
}

// product returns x·wᵀ for x [rows, depth] and w [columns, depth].
func product(x, w []float64, rows, columns, depth int) []float64 {
	y := make([]float64, rows*columns)
	for r := range rows {
		for n := range columns {
			for k, v := range x[r*depth:][:depth] {
				y[r*columns+n] += v * w[n*depth+k]
			}
		}
	}
	return y
}

// gatedRows applies a gate to the rows of x [rows, columns]: the first half of a row is the gate's argument, and the
// second half its factors.
func gatedRows(x []float64, rows, columns int, gate func(h, a, b []float64)) []float64 {
	f := columns / 2
	h := make([]float64, rows*f)
	for r := range rows {
		row := x[r*columns:][:columns]
		gate(h[r*f:][:f], row[:f], row[f:2*f])
	}
	return h
}

// TestRanges checks that products fill the GPU with clusters that all fit on it, and that every range has enough steps.
func TestRanges(t *testing.T) {
	h200 := gpu.DeviceInfo{SMs: 132, Major: 9}
	fit := func(n int) int { return map[int]int{2: 132, 4: 62, 8: 30}[n] } // as on an H200
	for _, c := range []struct{ columns, depth, want int }{{2048, 2048, 8}, {3072, 2048, 8}, {16384, 2048, 2},
		{2048, 8192, 8}, {4096, 14336, 4}, {6144, 4096, 4}, {28672, 4096, 1}, {128256, 2048, 1}, {1, 8, 1}} {
		p := RowsProduct{Rows: 32, Columns: c.columns, D: c.depth}
		got := p.ranges(h200, fit)
		require.Equal(t, c.want, got, "%+v", c)
		require.LessOrEqual(t, got*rowsStages, max(rowsStages, c.depth/rowsDepth))
	}
	require.Equal(t, 1, RowsProduct{Rows: 32, Columns: 2048, D: 2048}.ranges(gpu.DeviceInfo{SMs: 132, Major: 8}, fit))
}

// TestNormRows compares norms of a few rows with sums in float64.
func TestNormRows(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, c := range []struct{ rows, depth int }{{2, 8}, {5, 7}, {32, 2048}, {64, 4104}, {3, 768}} {
		for _, dt := range kerneltest.StorageTypes {
			g.Scope(fmt.Sprintf("%+v/%v", c, dt), func(g *kerneltest.Rig) {
				x, xr := g.Normal(c.rows*c.depth, dt, 0)
				w, wr := g.Normal(c.depth, kerneltest.F32, 0)
				y := g.Alloc(c.rows*c.depth, dt, i%2)
				want, rstd := make([]float64, len(xr)), make([]float64, c.rows)
				layer.RMSNorm(want, rstd, xr, wr, 1e-5)
				g.Must(g.Launch(g.Stream, NormRows{Y: y.Ptr, X: x.Ptr, W: w.Ptr, Rows: c.rows, D: c.depth, Eps: 1e-5,
					Type: dt, Early: i%2 == 0}))
				g.Near("y", y, want, kerneltest.Forward(dt))
			})
		}
	}
}
