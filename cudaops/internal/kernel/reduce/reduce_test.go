package reduce

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/layout"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/softmax"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

func TestReduce(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, c := range [][3]int{
		{1, 1, 1}, {1, 100003, 1}, {1, 1 << 20, 1}, {77, 1000, 1}, {5, 70001, 1}, {3000, 9, 1},
		{1, 5000, 768}, {1, 300, 33}, {7, 129, 64}, {4, 3, 5}, {2, 2000, 1000},
		{3, 3000, 1}, {9, 4096, 1}, {1, 65, 8}, {1, 3001, 512},
		{1, kerneltest.Few(400_003, 9000), 8}, {1, kerneltest.Few(400_003, 9000), 3}, // some parts come late
	} {
		for _, types := range [][2]gpu.DType{{kerneltest.F32, kerneltest.F32}, {kerneltest.F32, kerneltest.Bf16}, {kerneltest.Bf16, kerneltest.Bf16}, {kerneltest.F32, kerneltest.F16}, {kerneltest.F16, kerneltest.F16}} {
			for _, op := range []Reduction{Sum, Max} {
				g.Scope(fmt.Sprintf("%v/%v/%v/%s", c, types[0], types[1], op), func(g *kerneltest.Rig) {
					outer, n, inner := c[0], c[1], c[2]
					x := make([]float64, outer*n*inner)
					for i := range x {
						x[i] = 1 + g.Rand.NormFloat64()
					}
					in, xr := g.Upload(x, types[1], i%2)
					y := g.Alloc(outer*inner, types[0], i%2)
					a := Reduce{Op: op, Y: y.Ptr, X: in.Ptr, Outer: outer, N: n, Inner: inner, YType: types[0], XType: types[1]}
					if op == Sum {
						a.Scale = 1 / float64(n)
					}
					a.Workspace = g.Alloc(ReduceWorkspace(g.Set, a)/4, kerneltest.F32, 0).Ptr
					g.Must(a.Launch(g.Set, g.Stream))
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
		a.Workspace = g.Alloc(ReduceWorkspace(g.Set, a)/4+1, kerneltest.F32, 0).Ptr
		g.Must(a.Launch(g.Set, g.Stream))
		if got := g.Read(y); !math.IsNaN(got[0]) || inner > 1 && got[1] != 0 {
			t.Errorf("the maximum is %v", got)
		}
	}
}

func TestFirstNonFinite(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, dt := range kerneltest.StorageTypes {
		for _, n := range []int{1, 9, 5000, 300_000} {
			for _, bad := range []int{-1, 0, n / 2, n - 1} {
				g.Scope(fmt.Sprintf("%v/%d/%d", dt, n, bad), func(g *kerneltest.Rig) {
					x := make([]float64, n)
					for i := range x {
						x[i] = 6e4 * g.Rand.NormFloat64() / 8
					}
					if bad >= 0 {
						x[bad] = []float64{math.NaN(), math.Inf(1), math.Inf(-1)}[g.Rand.IntN(3)]
						x[n-1] = math.NaN()
					}
					in, _ := g.Upload(x, dt, bad&1)
					first := g.Alloc(2, kerneltest.F32, 0)
					g.Must(FirstNonFinite(g.Set, g.Stream, first.Ptr, in.Ptr, n, dt))
					raw := make([]byte, 8)
					g.Must(g.Ctx.CopyToHost(raw, first.Ptr, g.Stream))
					if got := int(int64(binary.LittleEndian.Uint64(raw))); got != bad {
						g.Errorf("got %d, want %d", got, bad)
					}
				})
			}
		}
	}
}

func TestSoftmax(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, shape := range [][2]int{{1, 1}, {5, 3}, {33, 32}, {9, 1000}, {6, 1024}, {5, 1025}, {7, 4096}, {3, 50257}, {4, 9000}} {
		for _, dt := range kerneltest.StorageTypes {
			g.Scope(fmt.Sprintf("%v/%v", shape, dt), func(g *kerneltest.Rig) {
				rows, n := shape[0], shape[1]
				x, xr := g.Normal(rows*n, dt, i%2)
				dy, gr := g.Normal(rows*n, dt, i%2)
				want := make([]float64, rows*n)
				for r := range rows {
					var sum float64
					for k, v := range xr[r*n:][:n] {
						want[r*n+k] = math.Exp(v)
						sum += want[r*n+k]
					}
					for k := range n {
						want[r*n+k] /= sum
					}
				}
				g.Must(softmax.Forward{Y: x.Ptr, X: x.Ptr, Rows: rows, N: n, Type: dt}.Launch(g.Set, g.Stream))
				g.Near("y", x, want, kerneltest.Forward(dt))
				yr := g.Read(x)
				for r := range rows {
					var dot float64
					for k := r * n; k < (r+1)*n; k++ {
						dot += yr[k] * gr[k]
					}
					for k := r * n; k < (r+1)*n; k++ {
						want[k] = yr[k] * (gr[k] - dot)
					}
				}
				g.Must(softmax.Backward{DX: dy.Ptr, G: dy.Ptr, Y: x.Ptr, Rows: rows, N: n, Type: dt}.Launch(g.Set, g.Stream))
				if n > 1 { // else it is zero but for rounding
					g.Near("dx", dy, want, kerneltest.Backward(dt))
				}
			})
		}
	}
}

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
				g.Must(layout.Copy{Y: y.Ptr, X: x.Ptr, Dims: dims, YStrides: ys, XStrides: xs, Size: size}.Launch(g.Set, g.Stream))
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
	check("plain", []int{7, 9, 5}, kerneltest.Contiguous([]int{7, 9, 5}), kerneltest.Contiguous([]int{7, 9, 5}), 0)
	check("transpose", []int{100, 77}, kerneltest.Contiguous([]int{100, 77}), []int{1, 100}, 1)
	check("whole tiles", []int{2, 128, 192}, kerneltest.Contiguous([]int{2, 128, 192}), []int{128 * 192, 1, 128}, 0)
	check("whole tiles at odd addresses", []int{128, 128}, kerneltest.Contiguous([]int{128, 128}), []int{1, 128}, 1)
	check("small transpose", []int{5, 3}, kerneltest.Contiguous([]int{5, 3}), []int{1, 5}, 0)
	check("heads", []int{3, 4, 33, 16}, kerneltest.Contiguous([]int{3, 4, 33, 16}), []int{33 * 64, 16, 64, 1}, 0)
	check("slice", []int{10, 24}, kerneltest.Contiguous([]int{10, 24}), []int{56, 1}, 1)
	check("concat", []int{10, 24}, []int{64, 1}, kerneltest.Contiguous([]int{10, 24}), 0)
	check("repeat", []int{6, 8, 12}, kerneltest.Contiguous([]int{6, 8, 12}), []int{12, 0, 1}, 0)
	check("row everywhere", []int{9, 100}, kerneltest.Contiguous([]int{9, 100}), []int{0, 1}, 0)
	check("column everywhere", []int{9, 100}, kerneltest.Contiguous([]int{9, 100}), []int{1, 0}, 0)
	check("every third", []int{50}, []int{1}, []int{3}, 0)
	check("one", []int{1, 1}, []int{5, 1}, []int{9, 4}, 0)
	for range 30 { // any permutation
		dims := make([]int, 2+g.Rand.IntN(4))
		for i := range dims {
			dims[i] = 1 + g.Rand.IntN(14)
		}
		order := rand.New(g.Rand).Perm(len(dims))
		shuffled, xs := make([]int, len(dims)), make([]int, len(dims))
		for i, o := range order {
			shuffled[i] = dims[o]
		}
		for i, s := range kerneltest.Contiguous(shuffled) {
			xs[order[i]] = s
		}
		check(fmt.Sprintf("%v in order %v", dims, order), dims, kerneltest.Contiguous(dims), xs, g.Rand.IntN(2))
	}
}
