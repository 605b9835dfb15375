package norm

import (
	"fmt"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
)

// TestNormBandwidth runs every way, of long and of short rows, on two sets of arrays in turn.
func TestNormBandwidth(t *testing.T) {
	if !kerneltest.Benchmark {
		t.Skip("set KASMINA_GPU_BENCH to measure bandwidths")
	}
	g := kerneltest.NewRig(t)
	for _, shape := range [][2]int{{32768, 4096}, {16384, 2048}, {32768, 768}, {16384, 1024}, {32768, 512}, {32768, 256}} {
		g.Scope(fmt.Sprintf("%dx%d", shape[0], shape[1]), func(g *kerneltest.Rig) { normBandwidth(g, shape[0], shape[1]) })
	}
}

func normBandwidth(g *kerneltest.Rig, rows, d int) {
	g.Helper()
	size := 2 * rows * d
	w, _ := g.Normal(d, kerneltest.F32, 0)
	rstd, dw, work := g.Alloc(rows, kerneltest.F32, 0), g.Alloc(d, kerneltest.F32, 0), g.Alloc(RMSNormWorkspace(g.Set, d, kerneltest.Bf16)/4, kerneltest.F32, 0)
	var forward [2]RMSNorm
	var backward [2]RMSNormBackward
	for i := range forward {
		x, y, add := g.Large(rows*d, kerneltest.Bf16), g.Large(rows*d, kerneltest.Bf16), g.Large(rows*d, kerneltest.Bf16)
		forward[i] = RMSNorm{Y: y.Ptr, Rstd: rstd.Ptr, X: x.Ptr, W: w.Ptr, Rows: rows, D: d, Eps: 1e-5, Type: kerneltest.Bf16}
		backward[i] = RMSNormBackward{DX: add.Ptr, DW: dw.Ptr, G: y.Ptr, X: x.Ptr, W: w.Ptr, Rstd: rstd.Ptr, Add: add.Ptr, Rows: rows, D: d,
			Type: kerneltest.Bf16, DWType: kerneltest.F32, Workspace: work.Ptr}
	}
	measure := func(name string, arrays int, ways []kernel.Way, launch func(i int, w kernel.Way) error) {
		for _, way := range ways {
			var each []func()
			for i := range forward {
				each = append(each, func() { g.Must(launch(i, way)) })
			}
			g.Bench(fmt.Sprint(name, " ", way), arrays*size, each)
		}
	}
	ways, err := RMSNormWays(g.Set, forward[0])
	g.Must(err)
	measure("forward", 2, ways, func(i int, w kernel.Way) error {
		a := forward[i]
		a.Way = w
		return a.Launch(g.Set, g.Stream)
	})
	ways, err = RMSNormBackwardWays(g.Set, backward[0])
	g.Must(err)
	measure("backward with residual gradient", 4, ways, func(i int, w kernel.Way) error {
		a := backward[i]
		a.Way = w
		return a.Launch(g.Set, g.Stream)
	})
}
