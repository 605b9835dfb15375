package reduce

import (
	"fmt"
	"math"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
)

func TestReduce(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, c := range [][3]int{
		{1, 1, 1}, {1, 100003, 1}, {1, 1 << 20, 1}, {77, 1000, 1}, {5, 70001, 1}, {3000, 9, 1},
		{1, 5000, 768}, {1, 300, 33}, {7, 129, 64}, {4, 3, 5}, {2, 2000, 1000},
		{3, 3000, 1}, {9, 4096, 1}, {1, 65, 8}, {1, 3001, 512},
		// with late parts
		{1, kerneltest.Few(400_003, 9000), 8}, {1, kerneltest.Few(400_003, 9000), 3},
	} {
		for _, types := range [][2]gpu.DType{{kerneltest.F32, kerneltest.F32},
			{kerneltest.F32, kerneltest.Bf16}, {kerneltest.Bf16, kerneltest.Bf16},
			{kerneltest.F32, kerneltest.F16}, {kerneltest.F16, kerneltest.F16}} {
			for _, op := range []Reduction{Sum, Max} {
				g.Scope(fmt.Sprintf("%v/%v/%v/%s", c, types[0], types[1], op),
					func(g *kerneltest.Rig) {
						outer, n, inner := c[0], c[1], c[2]
						x := make([]float64, outer*n*inner)
						for i := range x {
							x[i] = 1 + g.Rand.NormFloat64()
						}
						in, xr := g.Upload(x, types[1], i%2)
						y := g.Alloc(outer*inner, types[0], i%2)
						a := Reduce{Op: op, Y: y.Ptr, X: in.Ptr, Outer: outer, N: n, Inner: inner,
							YType: types[0], XType: types[1]}
						if op == Sum {
							a.Scale = 1 / float64(n)
						}
						a.Workspace = g.Alloc(a.WorkspaceBytes(g.Info)/4, kerneltest.F32, 0).Ptr
						g.Must(g.Launch(g.Stream, a))
						want := make([]float64, outer*inner)
						for o := range outer {
							for k := range inner {
								r := xr[o*n*inner+k]
								for j := 1; j < n; j++ {
									v := xr[(o*n+j)*inner+k]
									if op == Sum {
										r += v
									} else {
										r = max(r, v)
									}
								}
								if op == Sum {
									r /= float64(n)
								}
								want[o*inner+k] = r
							}
						}
						g.Near("y", y, want, kerneltest.Forward(types[0]))
					})
			}
		}
	}
}

func TestMaxKeepsNaN(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, inner := range []int{1, 3} {
		x := make([]float64, 5000*inner)
		x[1234*inner] = math.NaN()
		in, _ := g.Upload(x, kerneltest.F32, 0)
		y := g.Alloc(inner, kerneltest.F32, 0)
		a := Reduce{Op: Max, Y: y.Ptr, X: in.Ptr, Outer: 1, N: 5000, Inner: inner}
		a.Workspace = g.Alloc(a.WorkspaceBytes(g.Info)/4+1, kerneltest.F32, 0).Ptr
		g.Must(g.Launch(g.Stream, a))
		if got := g.Read(y); !math.IsNaN(got[0]) || inner > 1 && got[1] != 0 {
			t.Errorf("the maximum is %v", got)
		}
	}
}

func TestConstantsMatchSources(t *testing.T) {
	kerneltest.MatchSource(t, "reduce.cu", fmt.Sprintf("kRun = %d;", columnRun),
		fmt.Sprintf("kRowUnroll = %d;", rowUnroll))
}
