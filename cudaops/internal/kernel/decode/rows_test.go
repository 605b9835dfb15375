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
				want := make([]float64, c.rows*c.columns)
				for r := range c.rows {
					for n := range c.columns {
						for k, v := range xr[r*c.depth:][:c.depth] {
							want[r*c.columns+n] += v * wr[n*c.depth+k]
						}
					}
				}

				p := RowsProduct{Y: y.Ptr, X: x.Ptr, W: w.Ptr, Rows: c.rows, Columns: c.columns, D: c.depth, Type: dt}
				p.Steady, p.Early = i%2 == 0, i%4 < 2
				p.Ahead.From[0], p.Ahead.Bytes[0] = w.Ptr, c.columns*c.depth*2/16*16
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
				gated := make([]float64, c.rows*f)
				for r := range c.rows {
					row := want[r*c.columns:][:c.columns]
					layer.SiLUMul(gated[r*f:][:f], row[:f], row[f:2*f])
				}
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

// TestRanges checks that products fill the GPU, and that every range has enough steps.
func TestRanges(t *testing.T) {
	h200 := gpu.DeviceInfo{SMs: 132, Major: 9}
	for _, c := range []struct{ columns, depth, want int }{{2048, 2048, 8}, {3072, 2048, 8}, {16384, 2048, 2},
		{2048, 8192, 8}, {128256, 2048, 1}, {1, 8, 1}} {
		p := RowsProduct{Rows: 32, Columns: c.columns, D: c.depth}
		require.Equal(t, c.want, p.ranges(h200), "%+v", c)
		require.LessOrEqual(t, p.ranges(h200)*rowsStages, max(rowsStages, c.depth/rowsDepth))
	}
	require.Equal(t, 1, RowsProduct{Rows: 32, Columns: 2048, D: 2048}.ranges(gpu.DeviceInfo{SMs: 132, Major: 8}))
	kerneltest.MatchSource(t, "decode_norm.cu", fmt.Sprintf("kThreads = %d;", normThreads))
	kerneltest.MatchSource(t, "decode_rows.cu", fmt.Sprintf("kTile = %d, kDepth = %d, kStages = %d, kThreads = %d;",
		rowsTile, rowsDepth, rowsStages, rowsThreads))
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
