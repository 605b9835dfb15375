package silu

import (
	"fmt"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
)

func TestSiLUMul(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, shape := range [][2]int{{1, 1}, {3, 7}, {5, 8}, {13, 1000}, {129, 704}, {40, 2816}} {
		for _, dt := range kerneltest.StorageTypes {
			for variant := range 4 {
				beside, gelu := variant%2 > 0, variant > 1
				rows, f := shape[0], shape[1]
				g.Scope(fmt.Sprintf("%dx%d/%v/%v/%s", rows, f, dt, beside, gate(gelu)),
					func(g *kerneltest.Rig) {
						n, skew := rows*f, i%2
						ab, abr := g.Normal(2*n, dt, skew) // [a; b], or [a | b]
						dh, dhr := g.Normal(n, dt, skew)
						h, h2, dab := g.Alloc(n, dt, skew), g.Alloc(n, dt, skew),
							g.Alloc(2*n, dt, skew)
						stride, half := 0, n
						if beside {
							stride, half = 2*f, f
						}
						at := func(r, c int) int { // of a in [a | b] or [a; b]
							if beside {
								return 2*r*f + c
							}
							return r*f + c
						}
						b, db := ab.Offset(half*dt.Size()), dab.Offset(half*dt.Size())
						g.Must(Mul{H: h.Ptr, A: ab.Ptr, B: b, Rows: rows, F: f, Stride: stride,
							GELU: gelu, Type: dt}.Launch(g.Set, g.Stream))
						back := MulBackward{H: h2.Ptr, DA: dab.Ptr, DB: db, DH: dh.Ptr, A: ab.Ptr,
							B: b, Rows: rows, F: f,
							Stride: stride, GradStride: stride, GELU: gelu, Type: dt}
						if i%2 == 0 { // in place
							back.DA, back.DB, back.H, dab, h2 = ab.Ptr, b, 0, ab, h
						}
						g.Must(back.Launch(g.Set, g.Stream))

						ra, rb := make([]float64, n), make([]float64, n)
						for r := range rows {
							for c := range f {
								ra[r*f+c], rb[r*f+c] = abr[at(r, c)], abr[at(r, c)+half]
							}
						}
						wantH, da, dbr, want := make([]float64, n), make([]float64, n),
							make([]float64, n), make([]float64, 2*n)
						backward := layer.SiLUMulBackward[float64]
						if gelu {
							backward = layer.GELUMulBackward[float64]
						}
						backward(wantH, da, dbr, dhr, ra, rb)
						for r := range rows {
							for c := range f {
								want[at(r, c)], want[at(r, c)+half] = da[r*f+c], dbr[r*f+c]
							}
						}
						g.Near("h", h, wantH, kerneltest.Forward(dt))
						g.Near("h again", h2, wantH, kerneltest.Forward(dt))
						g.Near("da, db", dab, want, kerneltest.Backward(dt))
					})
			}
		}
	}
}
