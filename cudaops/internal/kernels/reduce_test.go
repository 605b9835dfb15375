package kernels

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

func TestReduce(t *testing.T) {
	g := newRig(t)
	for i, c := range [][3]int{
		{1, 1, 1}, {1, 100003, 1}, {1, 1 << 20, 1}, {77, 1000, 1}, {5, 70001, 1}, {3000, 9, 1},
		{1, 5000, 768}, {1, 300, 33}, {7, 129, 64}, {4, 3, 5}, {2, 2000, 1000},
		{3, 3000, 1}, {9, 4096, 1}, {1, 65, 8}, {1, 3001, 512},
		{1, few(400_003, 9000), 8}, {1, few(400_003, 9000), 3}, // some parts come late
	} {
		for _, types := range [][2]gpu.DType{{f32, f32}, {f32, bf16}, {bf16, bf16}, {f32, f16}, {f16, f16}} {
			for _, op := range []Reduction{Sum, Max} {
				g.scope(fmt.Sprintf("%v/%v/%v/%s", c, types[0], types[1], op), func(g *rig) {
					outer, n, inner := c[0], c[1], c[2]
					x := make([]float64, outer*n*inner)
					for i := range x {
						x[i] = 1 + g.rand.NormFloat64()
					}
					in, xr := g.upload(x, types[1], i%2)
					y := g.alloc(outer*inner, types[0], i%2)
					a := Reduce{Op: op, Y: y.Ptr, X: in.Ptr, Outer: outer, N: n, Inner: inner, YType: types[0], XType: types[1]}
					if op == Sum {
						a.Scale = 1 / float64(n)
					}
					a.Workspace = g.alloc(g.ReduceWorkspace(a)/4, f32, 0).Ptr
					g.must(g.Reduce(g.stream, a))
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
					g.near("y", y, want, forward(types[0]))
				})
			}
		}
	}
}

func TestMaxKeepsNaN(t *testing.T) {
	g := newRig(t)
	for _, inner := range []int{1, 3} {
		x := make([]float64, 5000*inner)
		x[1234*inner] = math.NaN()
		in, _ := g.upload(x, f32, 0)
		y := g.alloc(inner, f32, 0)
		a := Reduce{Op: Max, Y: y.Ptr, X: in.Ptr, Outer: 1, N: 5000, Inner: inner}
		a.Workspace = g.alloc(g.ReduceWorkspace(a)/4+1, f32, 0).Ptr
		g.must(g.Reduce(g.stream, a))
		if got := g.read(y); !math.IsNaN(got[0]) || inner > 1 && got[1] != 0 {
			t.Errorf("the maximum is %v", got)
		}
	}
}

func TestFirstNonFinite(t *testing.T) {
	g := newRig(t)
	for _, dt := range storageTypes {
		for _, n := range []int{1, 9, 5000, 300_000} {
			for _, bad := range []int{-1, 0, n / 2, n - 1} {
				g.scope(fmt.Sprintf("%v/%d/%d", dt, n, bad), func(g *rig) {
					x := make([]float64, n)
					for i := range x {
						x[i] = 6e4 * g.rand.NormFloat64() / 8
					}
					if bad >= 0 {
						x[bad] = []float64{math.NaN(), math.Inf(1), math.Inf(-1)}[g.rand.IntN(3)]
						x[n-1] = math.NaN()
					}
					in, _ := g.upload(x, dt, bad&1)
					first := g.alloc(2, f32, 0)
					g.must(g.FirstNonFinite(g.stream, first.Ptr, in.Ptr, n, dt))
					raw := make([]byte, 8)
					g.must(g.ctx.CopyToHost(raw, first.Ptr, g.stream))
					if got := int(int64(binary.LittleEndian.Uint64(raw))); got != bad {
						g.Errorf("got %d, want %d", got, bad)
					}
				})
			}
		}
	}
}

func TestSoftmax(t *testing.T) {
	g := newRig(t)
	for i, shape := range [][2]int{{1, 1}, {5, 3}, {33, 32}, {9, 1000}, {6, 1024}, {5, 1025}, {7, 4096}, {3, 50257}, {4, 9000}} {
		for _, dt := range storageTypes {
			g.scope(fmt.Sprintf("%v/%v", shape, dt), func(g *rig) {
				rows, n := shape[0], shape[1]
				x, xr := g.normal(rows*n, dt, i%2)
				dy, gr := g.normal(rows*n, dt, i%2)
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
				g.must(g.Softmax(g.stream, x.Ptr, x.Ptr, rows, n, dt))
				g.near("y", x, want, forward(dt))
				yr := g.read(x)
				for r := range rows {
					var dot float64
					for k := r * n; k < (r+1)*n; k++ {
						dot += yr[k] * gr[k]
					}
					for k := r * n; k < (r+1)*n; k++ {
						want[k] = yr[k] * (gr[k] - dot)
					}
				}
				g.must(g.SoftmaxBackward(g.stream, dy.Ptr, dy.Ptr, x.Ptr, rows, n, dt))
				if n > 1 { // else it is zero but for rounding
					g.near("dx", dy, want, backward(dt))
				}
			})
		}
	}
}

func TestCopy(t *testing.T) {
	g := newRig(t)
	check := func(name string, dims, ys, xs []int, skew int) {
		for size, dt := range map[int]gpu.DType{2: bf16, 4: f32} {
			g.scope(fmt.Sprintf("%s/%d", name, size), func(g *rig) {
				extent := func(strides []int) int {
					n := 1
					for i, d := range dims {
						n += (d - 1) * strides[i]
					}
					return n
				}
				x, xr := g.normal(extent(xs), dt, skew)
				y, want := g.normal(extent(ys), dt, skew)
				g.must(g.Copy(g.stream, Copy{Y: y.Ptr, X: x.Ptr, Dims: dims, YStrides: ys, XStrides: xs, Size: size}))
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
				g.near("y", y, want, 0)
			})
		}
	}
	check("plain", []int{7, 9, 5}, contiguous([]int{7, 9, 5}), contiguous([]int{7, 9, 5}), 0)
	check("transpose", []int{100, 77}, contiguous([]int{100, 77}), []int{1, 100}, 1)
	check("whole tiles", []int{2, 128, 192}, contiguous([]int{2, 128, 192}), []int{128 * 192, 1, 128}, 0)
	check("whole tiles at odd addresses", []int{128, 128}, contiguous([]int{128, 128}), []int{1, 128}, 1)
	check("small transpose", []int{5, 3}, contiguous([]int{5, 3}), []int{1, 5}, 0)
	check("heads", []int{3, 4, 33, 16}, contiguous([]int{3, 4, 33, 16}), []int{33 * 64, 16, 64, 1}, 0)
	check("slice", []int{10, 24}, contiguous([]int{10, 24}), []int{56, 1}, 1)
	check("concat", []int{10, 24}, []int{64, 1}, contiguous([]int{10, 24}), 0)
	check("repeat", []int{6, 8, 12}, contiguous([]int{6, 8, 12}), []int{12, 0, 1}, 0)
	check("row everywhere", []int{9, 100}, contiguous([]int{9, 100}), []int{0, 1}, 0)
	check("column everywhere", []int{9, 100}, contiguous([]int{9, 100}), []int{1, 0}, 0)
	check("every third", []int{50}, []int{1}, []int{3}, 0)
	check("one", []int{1, 1}, []int{5, 1}, []int{9, 4}, 0)
	for range 30 { // any permutation
		dims := make([]int, 2+g.rand.IntN(4))
		for i := range dims {
			dims[i] = 1 + g.rand.IntN(14)
		}
		order := rand.New(g.rand).Perm(len(dims))
		shuffled, xs := make([]int, len(dims)), make([]int, len(dims))
		for i, o := range order {
			shuffled[i] = dims[o]
		}
		for i, s := range contiguous(shuffled) {
			xs[order[i]] = s
		}
		check(fmt.Sprintf("%v in order %v", dims, order), dims, contiguous(dims), xs, g.rand.IntN(2))
	}
}
