package layout

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
)

func TestCopy(t *testing.T) {
	g := kerneltest.NewRig(t)
	check := func(name string, dims, ys, xs []int, skew int) {
		for size, dt := range map[int]gpu.DType{2: kerneltest.Bf16, 4: kerneltest.F32} {
			g.Scope(fmt.Sprintf("%s/%d", name, size), func(g *kerneltest.Rig) {
				extent := func(strides []int) int {
					n := 1
					for i, d := range dims {
						n += (d - 1) * strides[i]
					}
					return n
				}
				x, xr := g.Normal(extent(xs), dt, skew)
				y, want := g.Normal(extent(ys), dt, skew)
				g.Must(g.Launch(g.Stream, Copy{Y: y.Ptr, X: x.Ptr, Dims: dims, YStrides: ys,
					XStrides: xs, Size: size}))
				index := make([]int, len(dims))
				for {
					to, from := 0, 0
					for i, v := range index {
						to, from = to+v*ys[i], from+v*xs[i]
					}
					want[to] = xr[from]
					i := len(dims) - 1
					for ; i >= 0; i-- {
						if index[i]++; index[i] < dims[i] {
							break
						}
						index[i] = 0
					}
					if i < 0 {
						break
					}
				}
				g.Near("y", y, want, 0)
			})
		}
	}

	check("plain", []int{7, 9, 5}, tensor.Shape([]int{7, 9, 5}).CalcStrides(),
		tensor.Shape([]int{7, 9, 5}).CalcStrides(), 0)
	check("transpose", []int{100, 77}, tensor.Shape([]int{100, 77}).CalcStrides(), []int{1, 100}, 1)
	check("whole tiles", []int{2, 128, 192}, tensor.Shape([]int{2, 128, 192}).CalcStrides(),
		[]int{128 * 192, 1, 128}, 0)
	check("whole tiles at odd addresses", []int{128, 128}, tensor.Shape([]int{128, 128}).CalcStrides(),
		[]int{1, 128}, 1)
	check("small transpose", []int{5, 3}, tensor.Shape([]int{5, 3}).CalcStrides(), []int{1, 5}, 0)
	check("heads", []int{3, 4, 33, 16}, tensor.Shape([]int{3, 4, 33, 16}).CalcStrides(),
		[]int{33 * 64, 16, 64, 1}, 0)
	check("slice", []int{10, 24}, tensor.Shape([]int{10, 24}).CalcStrides(), []int{56, 1}, 1)
	check("concat", []int{10, 24}, []int{64, 1}, tensor.Shape([]int{10, 24}).CalcStrides(), 0)
	check("repeat", []int{6, 8, 12}, tensor.Shape([]int{6, 8, 12}).CalcStrides(), []int{12, 0, 1}, 0)
	check("row everywhere", []int{9, 100}, tensor.Shape([]int{9, 100}).CalcStrides(), []int{0, 1}, 0)
	check("column everywhere", []int{9, 100}, tensor.Shape([]int{9, 100}).CalcStrides(), []int{1, 0}, 0)
	check("every third", []int{50}, []int{1}, []int{3}, 0)
	check("one", []int{1, 1}, []int{5, 1}, []int{9, 4}, 0)
	for range 30 { // a random permutation
		dims := make([]int, 2+g.Rand.IntN(4))
		for i := range dims {
			dims[i] = 1 + g.Rand.IntN(14)
		}
		order := rand.New(g.Rand).Perm(len(dims))
		shuffled, xs := make([]int, len(dims)), make([]int, len(dims))
		for i, o := range order {
			shuffled[i] = dims[o]
		}
		for i, s := range tensor.Shape(shuffled).CalcStrides() {
			xs[order[i]] = s
		}
		check(fmt.Sprintf("%v in order %v", dims, order), dims, tensor.Shape(dims).CalcStrides(), xs,
			g.Rand.IntN(2))
	}
}
