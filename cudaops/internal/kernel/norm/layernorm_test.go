package norm

import (
	"fmt"
	"math"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
)

// layerNormShapes has rows that take one to four packs of registers, and rows that don't fit in
// registers because they are too long or not aligned.
var layerNormShapes = [][2]int{{1, 1}, {3, 7}, {5, 32}, {9, 256}, {130, 768}, {67, 1000}, {33, 2048},
	{17, 4096}, {3, 8192}, {2, 8200}, {3, 16384}, {3, 4099}, {2003, 768}, {700, 1032}}

func TestLayerNorm(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, shape := range layerNormShapes {
		for _, dt := range kerneltest.StorageTypes {
			for skew := range 2 {
				name := fmt.Sprintf("%dx%d/%v/%d", shape[0], shape[1], dt, skew)
				g.Scope(name, func(g *kerneltest.Rig) {
					layerNorm(g, shape[0], shape[1], dt, skew, 0)
				})
			}
		}
	}
}

// TestLayerNormFar checks rows with a mean that is ten million times their deviation.
func TestLayerNormFar(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, d := range []int{7, 768, 4099} {
		g.Scope(fmt.Sprint(d), func(g *kerneltest.Rig) {
			layerNorm(g, 5, d, kerneltest.F32, 0, 1e7)
		})
	}
}

func layerNorm(g *kerneltest.Rig, rows, d int, dt gpu.DType, skew int, offset float64) {
	_, xr := g.Normal(rows*d, dt, skew)
	for i := range xr {
		xr[i] += offset
	}

	x, xr := g.Upload(xr, dt, skew)
	w, wr := g.Normal(d, kerneltest.F32, 0)
	b, br := g.Normal(d, kerneltest.F32, 0)
	y := g.Alloc(rows*d, dt, skew)
	stats := g.Alloc(rows*LayerNormStats, kerneltest.F32, 0)

	g.Must(g.Launch(g.Stream, LayerNorm{Y: y.Ptr, Stats: stats.Ptr, X: x.Ptr, W: w.Ptr, B: b.Ptr,
		Rows: rows, D: d, Eps: 1e-5, Type: dt}))
	want, discard := make([]float64, rows*d), make([]float64, rows*LayerNormStats)
	layer.LayerNorm(want, discard, xr, wr, br, 1e-5)
	g.Near("y", y, want, kerneltest.Forward(dt))
}

func TestLayerNormBackward(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, shape := range layerNormShapes {
		for _, dt := range kerneltest.StorageTypes {
			for _, add := range []bool{false, true} {
				for skew := range 1 + i%2 { // test half of the shapes without alignment as well
					name := fmt.Sprintf("%dx%d/%v/%v/%d", shape[0], shape[1], dt, add, skew)
					g.Scope(name, func(g *kerneltest.Rig) {
						layerNormBackward(g, shape[0], shape[1], dt, add, skew)
					})
				}
			}
		}
	}
}

func layerNormBackward(g *kerneltest.Rig, rows, d int, dt gpu.DType, add bool, skew int) {
	x, xr := g.Normal(rows*d, dt, skew)
	dy, gr := g.Normal(rows*d, dt, skew)
	w, wr := g.Normal(d, kerneltest.F32, 0)

	discard, wantStats := make([]float64, rows*d), make([]float64, rows*LayerNormStats)
	layer.LayerNorm(discard, wantStats, xr, wr, make([]float64, d), 1e-5)
	stats, sr := g.Upload(wantStats, kerneltest.F32, 0)
	wantX, wantW, wantB := make([]float64, rows*d), make([]float64, d), make([]float64, d)
	layer.LayerNormBackward(wantX, wantW, wantB, gr, xr, wr, sr)

	dx, dw, db := g.Alloc(rows*d, dt, skew), g.Alloc(d, kerneltest.F32, 0), g.Alloc(d, kerneltest.F32, 0)
	a := LayerNormBackward{DX: dx.Ptr, DW: dw.Ptr, DB: db.Ptr, G: dy.Ptr, X: x.Ptr, W: w.Ptr,
		Stats: stats.Ptr, Rows: rows, D: d, Type: dt}
	a.Workspace = g.Alloc(a.WorkspaceBytes(g.Info)/4, kerneltest.F32, 0).Ptr
	if add {
		b, br := g.Normal(rows*d, dt, skew)
		a.Add, a.DX, dx = b.Ptr, b.Ptr, b
		for i, v := range br {
			wantX[i] += v
		}
	}

	g.Must(g.Launch(g.Stream, a))
	if d > 1 || add {
		g.Near("dx", dx, wantX, kerneltest.Backward(dt))
	} else { // the gradient of a single feature is 0: the rounding error of a difference of equal terms
		for i, got := range g.Read(dx) {
			if bound := math.Abs(gr[i]*wr[0]/math.Sqrt(1e-5)) * kerneltest.Backward(dt); math.Abs(got) > bound {
				g.Errorf("dx[%d] = %g, want at most %g", i, got, bound)
			}
		}
	}
	g.Near("dw", dw, wantW, kerneltest.Backward(kerneltest.F32))
	g.Near("db", db, wantB, kerneltest.Backward(kerneltest.F32))
}
