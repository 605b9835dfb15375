package decode

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
)

// TestRows compares products of several rows with sums in float64, with and without an added matrix, twice in the same
// bits.
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

				p := RowsProduct{Y: y.Ptr, X: x.Ptr, W: w.Ptr, Rows: c.rows, Columns: c.columns, D: c.depth, Type: dt,
					Steady: i%2 == 0}
				parts := g.Alloc(p.PartsBytes(g.Info)/4, kerneltest.F32, 0)
				arrived, _ := g.Upload(make([]float64, p.Counters()), kerneltest.F32, 0)
				p.Parts, p.Arrived = parts.Ptr, arrived.Ptr
				g.Must(g.Launch(g.Stream, p))
				g.Near("y", y, want, kerneltest.Forward(dt))
				once := g.Read(y)
				g.Must(g.Launch(g.Stream, p))
				if kerneltest.Distance(g.Read(y), once) != 0 {
					g.Error("two runs give different bits")
				}

				p.C = add.Ptr
				g.Must(g.Launch(g.Stream, p))
				for j := range ar {
					ar[j] += want[j]
				}
				g.Near("y + c", y, ar, kerneltest.Forward(dt))
			})
		}
	}
}

// TestRanges checks that products fill the GPU, and that every range has enough steps.
func TestRanges(t *testing.T) {
	h200 := gpu.DeviceInfo{SMs: 132}
	for _, c := range []struct{ columns, depth, want int }{{2048, 2048, 8}, {3072, 2048, 8}, {16384, 2048, 2},
		{2048, 8192, 16}, {128256, 2048, 1}, {1, 8, 1}} {
		p := RowsProduct{Rows: 32, Columns: c.columns, D: c.depth}
		require.Equal(t, c.want, p.ranges(h200), "%+v", c)
		require.LessOrEqual(t, p.ranges(h200)*rowsStages, max(rowsStages, c.depth/rowsDepth))
	}
	kerneltest.MatchSource(t, "decode_rows.cu", fmt.Sprintf("kTile = %d, kDepth = %d, kStages = %d, kThreads = %d;",
		rowsTile, rowsDepth, rowsStages, rowsThreads))
}
