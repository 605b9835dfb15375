package kernels

import (
	"fmt"
	"math"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

func TestNormalize(t *testing.T) {
	g := newRig(t)
	for i, n := range []int{2, 9, 1024, 5003, 3_000_000} {
		for _, types := range [][2]gpu.DType{{f32, f32}, {bf16, bf16}, {f16, f16}, {bf16, f32}, {f16, f32}, {f16, bf16}} {
			yt, xt := types[0], types[1]
			g.scope(fmt.Sprintf("%d/%v/%v", n, yt, xt), func(g *rig) {
				x, xr := g.normal(n, xt, i%2)
				dy, gr := g.normal(n, xt, i%2)
				y, work := g.alloc(n, yt, i%2), g.alloc(NormalizeWorkspace/4, f32, 0)
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
				g.must(g.Normalize(g.stream, Normalize{Y: y.Ptr, X: x.Ptr, Workspace: work.Ptr, N: n, YType: yt, XType: xt}))
				g.near("y", y, want, forward(yt))
				g.must(g.NormalizeBackward(g.stream, NormalizeBackward{DX: dy.Ptr, G: dy.Ptr, X: x.Ptr, Workspace: work.Ptr, N: n, Type: xt}))
				if n > 2 { // else g and x may be parallel, and dx zero but for rounding
					g.near("dx", dy, dx, backward(xt))
				}
			})
		}
	}
}

func TestNormalizeZero(t *testing.T) {
	g := newRig(t)
	x, zero := g.upload(make([]float64, 77), f32, 0)
	dy, gr := g.normal(77, f32, 0)
	y, work := g.alloc(77, f32, 0), g.alloc(NormalizeWorkspace/4, f32, 0)
	g.must(g.Normalize(g.stream, Normalize{Y: y.Ptr, X: x.Ptr, Workspace: work.Ptr, N: 77}))
	g.near("y", y, zero, 0)
	g.must(g.NormalizeBackward(g.stream, NormalizeBackward{DX: dy.Ptr, G: dy.Ptr, X: x.Ptr, Workspace: work.Ptr, N: 77}))
	for i := range gr {
		gr[i] /= 1e-7
	}
	g.near("dx", dy, gr, 1e-6)
}
