package normalize

import (
	"fmt"
	"math"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
)

func TestNormalize(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, n := range []int{2, 9, 1024, 5003, 3_000_000} {
		for _, types := range [][2]gpu.DType{{kerneltest.F32, kerneltest.F32},
			{kerneltest.Bf16, kerneltest.Bf16}, {kerneltest.F16, kerneltest.F16},
			{kerneltest.Bf16, kerneltest.F32}, {kerneltest.F16, kerneltest.F32},
			{kerneltest.F16, kerneltest.Bf16}} {
			yt, xt := types[0], types[1]
			g.Scope(fmt.Sprintf("%d/%v/%v", n, yt, xt), func(g *kerneltest.Rig) {
				x, xr := g.Normal(n, xt, i%2)
				dy, gr := g.Normal(n, xt, i%2)
				y, work := g.Alloc(n, yt, i%2), g.Alloc(WorkspaceBytes/4, kerneltest.F32, 0)
				var xx, gx float64
				for i, v := range xr {
					xx += v * v
					gx += v * gr[i]
				}
				norm := math.Sqrt(xx)
				r := norm + 1e-7
				want, dx := make([]float64, n), make([]float64, n)
				for i, v := range xr {
					want[i] = v / r
					dx[i] = gr[i]/r - v*gx/(r*r*norm)
				}
				g.Must(g.Launch(g.Stream, Forward{Y: y.Ptr, X: x.Ptr, Workspace: work.Ptr, N: n,
					YType: yt, XType: xt}))
				g.Near("y", y, want, kerneltest.Forward(yt))
				g.Must(g.Launch(g.Stream, Backward{DX: dy.Ptr, G: dy.Ptr, X: x.Ptr,
					Workspace: work.Ptr, N: n, Type: xt}))
				if n > 2 { // otherwise g and x may be parallel, and dx zero except for rounding
					g.Near("dx", dy, dx, kerneltest.Backward(xt))
				}
			})
		}
	}
}

func TestNormalizeZero(t *testing.T) {
	g := kerneltest.NewRig(t)
	x, zero := g.Upload(make([]float64, 77), kerneltest.F32, 0)
	dy, gr := g.Normal(77, kerneltest.F32, 0)
	y, work := g.Alloc(77, kerneltest.F32, 0), g.Alloc(WorkspaceBytes/4, kerneltest.F32, 0)
	g.Must(g.Launch(g.Stream, Forward{Y: y.Ptr, X: x.Ptr, Workspace: work.Ptr, N: 77}))
	g.Near("y", y, zero, 0)
	g.Must(g.Launch(g.Stream, Backward{DX: dy.Ptr, G: dy.Ptr, X: x.Ptr, Workspace: work.Ptr,
		N: 77}))
	for i := range gr {
		gr[i] /= 1e-7
	}

	g.Near("dx", dy, gr, 1e-6)
}
