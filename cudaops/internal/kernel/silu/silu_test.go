package silu

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
)

func TestSiLUMul(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, shape := range [][2]int{{1, 1}, {3, 7}, {5, 8}, {13, 1000}, {129, 704}, {40, 2816}} {
		for _, dt := range kerneltest.StorageTypes {
			for _, gelu := range []bool{false, true} {
				rows, f := shape[0], shape[1]
				g.Scope(fmt.Sprintf("%dx%d/%v/%v", rows, f, dt, gelu),
					func(g *kerneltest.Rig) {
						n, skew := rows*f, i%2
						ab, abr := g.Normal(2*n, dt, skew)
						dh, dhr := g.Normal(n, dt, skew)
						h, h2, dab := g.Alloc(n, dt, skew), g.Alloc(n, dt, skew),
							g.Alloc(2*n, dt, skew)
						g.Must(g.Launch(g.Stream, Mul{H: h.Ptr, AB: ab.Ptr, Rows: rows, F: f,
							GELU: gelu, Type: dt}))
						back := MulBackward{H: h2.Ptr, DAB: dab.Ptr, DH: dh.Ptr, AB: ab.Ptr,
							Rows: rows, F: f, GELU: gelu, Type: dt}
						if i%2 == 0 { // in place
							back.DAB, back.H, dab, h2 = ab.Ptr, 0, ab, h
						}
						g.Must(g.Launch(g.Stream, back))

						var a, b []float64
						for row := range slices.Chunk(abr, 2*f) {
							a, b = append(a, row[:f]...), append(b, row[f:]...)
						}
						wantH, da, db := make([]float64, n), make([]float64, n), make([]float64, n)
						backward := layer.SiLUMulBackward[float64]
						if gelu {
							backward = layer.GELUMulBackward[float64]
						}
						backward(wantH, da, db, dhr, a, b)
						var want []float64
						for r := range rows {
							want = append(append(want, da[r*f:][:f]...), db[r*f:][:f]...)
						}
						g.Near("h", h, wantH, kerneltest.Forward(dt))
						g.Near("h again", h2, wantH, kerneltest.Forward(dt))
						g.Near("da, db", dab, want, kerneltest.Backward(dt))
					})
			}
		}
	}
}
