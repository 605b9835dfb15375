package norm

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
)

// TestRMSNorm checks rows that fit in registers, and rows that don't because they are too long or
// not aligned.
func TestRMSNorm(t *testing.T) {
	g := kerneltest.NewRig(t)
	shapes := [][2]int{{1, 1}, {3, 7}, {5, 32}, {9, 256}, {130, 768}, {67, 1000}, {33, 2048},
		{17, 4096}, {3, 8192}, {2, 8200}, {3, 16384}, {3, 4099}}
	for i, shape := range shapes {
		for _, dt := range kerneltest.StorageTypes {
			for _, residual := range []bool{false, true} {
				for skew := range 2 {
					name := fmt.Sprintf("%dx%d/%v/%v/%d", shape[0], shape[1], dt, residual, skew)
					g.Scope(name, func(g *kerneltest.Rig) {
						rmsNorm(g, shape[0], shape[1], dt, residual, skew, i%3 == 0)
					})
				}
			}
		}
	}
}

func rmsNorm(g *kerneltest.Rig, rows, d int, dt gpu.DType, residual bool, skew int,
	inPlace bool) {
	x, xr := g.Normal(rows*d, dt, skew)
	w, wr := g.Normal(d, kerneltest.F32, 0)
	y, rstd := g.Alloc(rows*d, dt, skew), g.Alloc(rows, kerneltest.F32, 0)
	a := RMSNorm{Y: y.Ptr, Rstd: rstd.Ptr, X: x.Ptr, W: w.Ptr, Rows: rows,
		D: d, Eps: 1e-5, Type: dt,
		Ascending: g.Rand.IntN(2) == 0}
	if residual {
		r, rr := g.Normal(rows*d, dt, skew)
		sum := x
		if !inPlace {
			sum = g.Alloc(rows*d, dt, skew)
			defer g.Near("x", x, slices.Clone(xr), 0)
		}
		a.Residual, a.Sum, x = r.Ptr, sum.Ptr, sum
		for i := range xr {
			xr[i] += rr[i]
		}
		xr = kerneltest.Decode(kerneltest.Encode(xr, dt), dt)
	}

	g.Must(g.Launch(g.Stream, a))
	wantY, wantR := make([]float64, rows*d), make([]float64, rows)
	layer.RMSNorm(wantY, wantR, xr, wr, 1e-5)
	g.Near("sum", x, xr, 0)
	g.Near("y", y, wantY, kerneltest.Forward(dt))
	g.Near("rstd", rstd, wantR, 1e-6)
}

// TestRMSNormBackward checks shapes for both fast kernels, in which a warp or a block processes many rows one after
// another, and shapes that neither of them accepts.
func TestRMSNormBackward(t *testing.T) {
	g := kerneltest.NewRig(t)
	shapes := [][2]int{{2, 3}, {3, 7}, {50, 32}, {1000, 256}, {2003, 768}, {67, 1000}, {333, 2048},
		{1500, 4096}, {1003, 2056}, {5, 3000}, {30, 8192}, {2, 8200},
		{700, 4099}, {5, 512}, {4444, 512}, {3, 1024}, {2222, 1024}, {33, 904}, {999, 904}, {2, 9},
		{1, 520}, {1111, 1288}, {3, 1544}}
	for i, shape := range shapes {
		for _, dt := range kerneltest.StorageTypes {
			for _, add := range []bool{false, true} {
				if !g.Some() {
					continue
				}
				for skew := range 1 + i%2 { // test half of the shapes without alignment as well
					name := fmt.Sprintf("%dx%d/%v/%v/%d", shape[0], shape[1], dt, add, skew)
					g.Scope(name, func(g *kerneltest.Rig) {
						rmsNormBackward(g, shape[0], shape[1], dt, add, skew)
					})
				}
			}
		}
	}
}

func rmsNormBackward(g *kerneltest.Rig, rows, d int, dt gpu.DType, add bool, skew int) {
	x, xr := g.Normal(rows*d, dt, skew)
	dy, gr := g.Normal(rows*d, dt, skew)
	w, wr := g.Normal(d, kerneltest.F32, 0)
	wantRstd, discard := make([]float64, rows), make([]float64, rows*d)
	layer.RMSNorm(discard, wantRstd, xr, wr, 1e-5)
	rstd, rr := g.Upload(wantRstd, kerneltest.F32, 0)
	wantX, wantW := make([]float64, rows*d), make([]float64, d)
	layer.RMSNormBackward(wantX, wantW, gr, xr, wr, rr)

	work := g.Alloc(RMSNormBackward{D: d, Type: dt}.WorkspaceBytes(g.Info)/4, kerneltest.F32, 0)
	dx, dw := g.Alloc(rows*d, dt, skew), g.Alloc(d, kerneltest.F32, 0)
	a := RMSNormBackward{DX: dx.Ptr, DW: dw.Ptr, G: dy.Ptr, X: x.Ptr, W: w.Ptr, Rstd: rstd.Ptr,
		Rows: rows, D: d, Type: dt, Workspace: work.Ptr}
	if add {
		b, br := g.Normal(rows*d, dt, skew)
		a.Add, a.DX, dx = b.Ptr, b.Ptr, b
		for i, v := range br {
			wantX[i] += v
		}
	}

	g.Must(g.Launch(g.Stream, a))
	g.Near("dx", dx, wantX, kerneltest.Backward(dt))
	g.Near("dw", dw, wantW, kerneltest.Backward(kerneltest.F32))

	if !add {
		frozen := g.Alloc(rows*d, dt, skew)
		a.DX, a.DW = frozen.Ptr, 0
		g.Must(g.Launch(g.Stream, a))
		require.Equal(g, g.Read(dx), g.Read(frozen))
	}
}

func TestConstantsMatchSources(t *testing.T) {
	kerneltest.MatchSource(t, "norm.cu", fmt.Sprintf("kStages = %d;", walkStages),
		fmt.Sprintf("kOwnStages = %d;", ownStages),
		fmt.Sprintf("kOwn = P > 3 ? %d : %d;", ownWarps[4], ownWarps[3]))
}
