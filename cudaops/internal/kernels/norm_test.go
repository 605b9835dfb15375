package kernels

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/cpu"
)

// TestRMSNorm takes every way that takes the arguments.
func TestRMSNorm(t *testing.T) {
	g := newRig(t)
	shapes := [][2]int{{1, 1}, {3, 7}, {5, 32}, {9, 256}, {130, 768}, {67, 1000}, {33, 2048}, {17, 4096}, {3, 8192}, {2, 8200}, {3, 16384}, {3, 4099}}
	for i, shape := range shapes {
		for _, dt := range storageTypes {
			for _, residual := range []bool{false, true} {
				for way, ways := 0, 1; way < ways; way++ {
					name := fmt.Sprintf("%dx%d/%v/%v/%d", shape[0], shape[1], dt, residual, way)
					g.scope(name, func(g *rig) { ways = g.rmsNorm(shape[0], shape[1], dt, residual, i%2, i%3 == 0, way) })
				}
			}
		}
	}
}

// rmsNorm checks one of the ways and returns how many there are.
func (g *rig) rmsNorm(rows, d int, dt gpu.DType, residual bool, skew int, inPlace bool, way int) int {
	x, xr := g.normal(rows*d, dt, skew)
	w, wr := g.normal(d, f32, 0)
	y, rstd := g.alloc(rows*d, dt, skew), g.alloc(rows, f32, 0)
	a := RMSNorm{Y: y.Ptr, Rstd: rstd.Ptr, X: x.Ptr, W: w.Ptr, Rows: rows, D: d, Eps: 1e-5, Type: dt,
		Ascending: g.rand.IntN(2) == 0}
	if residual {
		r, rr := g.normal(rows*d, dt, skew)
		sum := x
		if !inPlace {
			sum = g.alloc(rows*d, dt, skew)
			defer g.near("x", x, slices.Clone(xr), 0)
		}
		a.Residual, a.Sum, x = r.Ptr, sum.Ptr, sum
		for i := range xr {
			xr[i] += rr[i]
		}
		xr = decode(encode(xr, dt), dt)
	}
	ways, err := g.RMSNormWays(a)
	g.must(err)
	a.Way = ways[way]
	g.must(g.RMSNorm(g.stream, a))
	wantY, wantR := make([]float64, rows*d), make([]float64, rows)
	cpu.RMSNorm(wantY, wantR, xr, wr, 1e-5)
	g.near("sum", x, xr, 0)
	g.near("y", y, wantY, forward(dt))
	g.near("rstd", rstd, wantR, 1e-6)
	return len(ways)
}

// TestRMSNormBackward takes every way that takes the arguments.
func TestRMSNormBackward(t *testing.T) {
	g := newRig(t)
	shapes := [][2]int{{2, 3}, {3, 7}, {50, 32}, {1000, 256}, {2003, 768}, {67, 1000}, {333, 2048}, {1500, 4096}, {1003, 2056}, {5, 3000}, {30, 8192}, {2, 8200},
		{700, 4099}, {5, 512}, {4444, 512}, {3, 1024}, {2222, 1024}, {33, 904}, {999, 904}, {2, 9}, {1, 520}, {1111, 1288}, {3, 1544}}
	for i, shape := range shapes {
		for _, dt := range storageTypes {
			for _, add := range []bool{false, true} {
				if !g.some() {
					continue
				}
				for way, ways := 0, 1; way < ways; way++ {
					name := fmt.Sprintf("%dx%d/%v/%v/%d", shape[0], shape[1], dt, add, way)
					g.scope(name, func(g *rig) { ways = g.rmsNormBackward(shape[0], shape[1], dt, add, i%2, i%3 == 0, way) })
				}
			}
		}
	}
}

// rmsNormBackward checks one of the ways and returns how many there are. same is whether DW is of X's type.
func (g *rig) rmsNormBackward(rows, d int, dt gpu.DType, add bool, skew int, same bool, way int) int {
	x, xr := g.normal(rows*d, dt, skew)
	dy, gr := g.normal(rows*d, dt, skew)
	w, wr := g.normal(d, f32, 0)
	wantRstd, discard := make([]float64, rows), make([]float64, rows*d)
	cpu.RMSNorm(discard, wantRstd, xr, wr, 1e-5)
	rstd, rr := g.upload(wantRstd, f32, 0)
	wantX, wantW := make([]float64, rows*d), make([]float64, d)
	cpu.RMSNormBackward(wantX, wantW, gr, xr, wr, rr)

	dwType := f32
	if same {
		dwType = dt
	}
	work := g.alloc(g.RMSNormWorkspace(d, dt)/4, f32, 0)
	dx, dw := g.alloc(rows*d, dt, skew), g.alloc(d, dwType, 0)
	a := RMSNormBackward{DX: dx.Ptr, DW: dw.Ptr, G: dy.Ptr, X: x.Ptr, W: w.Ptr, Rstd: rstd.Ptr,
		Rows: rows, D: d, Type: dt, DWType: dwType, Workspace: work.Ptr}
	if add {
		b, br := g.normal(rows*d, dt, skew)
		a.Add, a.DX, dx = b.Ptr, b.Ptr, b
		for i, v := range br {
			wantX[i] += v
		}
	}
	ways, err := g.RMSNormBackwardWays(a)
	g.must(err)
	a.Way = ways[way]
	g.must(g.RMSNormBackward(g.stream, a))
	g.near("dx", dx, wantX, backward(dt))
	g.near("dw", dw, wantW, backward(dwType))
	return len(ways)
}

// TestRMSNormPartsTogether wants launches that add up what many passes have left to give the bits of a launch each.
func TestRMSNormPartsTogether(t *testing.T) {
	g := newRig(t)
	shapes := [][2]int{{2003, 768}, {50, 32}, {333, 2048}, {700, 4099}, {1, 8}, {300, 4096}}
	var left []RMSNormParts
	var sums []*buffer
	var want [][]float64
	for i := range rmsNormPartsMost + 9 {
		rows, d := shapes[i%len(shapes)][0], shapes[i%len(shapes)][1]
		x, _ := g.normal(rows*d, bf16, 0)
		dy, _ := g.normal(rows*d, bf16, 0)
		w, _ := g.normal(d, f32, 0)
		rstd, _ := g.normal(rows, f32, 0)
		a := RMSNormBackward{DX: g.alloc(rows*d, bf16, 0).Ptr, G: dy.Ptr, X: x.Ptr, W: w.Ptr, Rstd: rstd.Ptr, Rows: rows, D: d, Type: bf16, DWType: f32,
			Workspace: g.alloc(g.RMSNormWorkspace(d, bf16)/4, f32, 0).Ptr}
		if i%11 == 0 {
			a.DWType = bf16
		}
		single, dw := g.alloc(d, a.DWType, 0), g.alloc(d, a.DWType, 0)
		a.DW = single.Ptr
		g.must(g.RMSNormBackward(g.stream, a))
		want = append(want, g.read(single))
		a.DW, a.Parts = dw.Ptr, new(RMSNormParts)
		g.must(g.RMSNormBackward(g.stream, a))
		left, sums = append(left, *a.Parts), append(sums, dw)
	}
	left = append(left, RMSNormParts{}) // of a pass over no rows
	g.must(g.AddRMSNormParts(g.stream, left))
	for i, dw := range sums {
		if got := g.read(dw); !slices.Equal(got, want[i]) {
			t.Errorf("weights %d, of %d: their gradient differs", i, len(got))
		}
	}
}
