package kernels

import (
	"fmt"
	"testing"
)

// TestNormBandwidth runs every way, of long and of short rows, on two sets of arrays in turn.
func TestNormBandwidth(t *testing.T) {
	if !benchmark {
		t.Skip("set KASMINA_GPU_BENCH to measure bandwidths")
	}
	g := newRig(t)
	for _, shape := range [][2]int{{32768, 4096}, {16384, 2048}, {32768, 768}, {16384, 1024}, {32768, 512}, {32768, 256}} {
		g.scope(fmt.Sprintf("%dx%d", shape[0], shape[1]), func(g *rig) { g.normBandwidth(shape[0], shape[1]) })
	}
}

func (g *rig) normBandwidth(rows, d int) {
	g.Helper()
	size := 2 * rows * d
	w, _ := g.normal(d, f32, 0)
	rstd, dw, work := g.alloc(rows, f32, 0), g.alloc(d, f32, 0), g.alloc(g.RMSNormWorkspace(d, bf16)/4, f32, 0)
	var forward [2]RMSNorm
	var backward [2]RMSNormBackward
	for i := range forward {
		x, y, add := g.large(rows*d, bf16), g.large(rows*d, bf16), g.large(rows*d, bf16)
		forward[i] = RMSNorm{Y: y.Ptr, Rstd: rstd.Ptr, X: x.Ptr, W: w.Ptr, Rows: rows, D: d, Eps: 1e-5, Type: bf16}
		backward[i] = RMSNormBackward{DX: add.Ptr, DW: dw.Ptr, G: y.Ptr, X: x.Ptr, W: w.Ptr, Rstd: rstd.Ptr, Add: add.Ptr, Rows: rows, D: d,
			Type: bf16, DWType: f32, Workspace: work.Ptr}
	}
	measure := func(name string, arrays int, ways []Way, launch func(i int, w Way) error) {
		for _, way := range ways {
			var each []func()
			for i := range forward {
				each = append(each, func() { g.must(launch(i, way)) })
			}
			g.bench(fmt.Sprint(name, " ", way), arrays*size, each)
		}
	}
	ways, err := g.RMSNormWays(forward[0])
	g.must(err)
	measure("forward", 2, ways, func(i int, w Way) error {
		a := forward[i]
		a.Way = w
		return g.RMSNorm(g.stream, a)
	})
	ways, err = g.RMSNormBackwardWays(backward[0])
	g.must(err)
	measure("backward with residual gradient", 4, ways, func(i int, w Way) error {
		a := backward[i]
		a.Way = w
		return g.RMSNormBackward(g.stream, a)
	})
}
