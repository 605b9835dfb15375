package normalize

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/internal/cpu/array"
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
				y, work := g.Alloc(n, yt, i%2), g.Alloc(NormalizeWorkspace/4, kerneltest.F32, 0)
				want := slices.Clone(xr)
				array.ScaleBy(want, 1/(math.Sqrt(array.SumSquares(xr))+1e-7))
				g.Must(Forward{Y: y.Ptr, X: x.Ptr, Workspace: work.Ptr, N: n, YType: yt,
					XType: xt}.Launch(g.Set, g.Stream))
				g.Near("y", y, want, kerneltest.Forward(yt))
			})
		}
	}
}

func TestNormalizeZero(t *testing.T) {
	g := kerneltest.NewRig(t)
	x, zero := g.Upload(make([]float64, 77), kerneltest.F32, 0)
	y, work := g.Alloc(77, kerneltest.F32, 0), g.Alloc(NormalizeWorkspace/4, kerneltest.F32, 0)
	g.Must(Forward{Y: y.Ptr, X: x.Ptr, Workspace: work.Ptr, N: 77}.Launch(g.Set, g.Stream))
	g.Near("y", y, zero, 0)
}
