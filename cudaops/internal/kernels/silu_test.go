package kernels

import (
	"fmt"
	"testing"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

func TestSiLUMul(t *testing.T) {
	g := newRig(t)
	for i, shape := range [][2]int{{1, 1}, {3, 7}, {5, 8}, {13, 1000}, {129, 704}, {40, 2816}} {
		for _, dt := range storageTypes {
			for _, beside := range []bool{false, true} {
				rows, f := shape[0], shape[1]
				g.scope(fmt.Sprintf("%dx%d/%v/%v", rows, f, dt, beside), func(g *rig) {
					n, skew := rows*f, i%2
					ab, abr := g.normal(2*n, dt, skew) // [a; b], or [a | b]
					dh, dhr := g.normal(n, dt, skew)
					h, h2, dab := g.alloc(n, dt, skew), g.alloc(n, dt, skew), g.alloc(2*n, dt, skew)
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
					g.must(g.SiLUMul(g.stream, SiLUMul{H: h.Ptr, A: ab.Ptr, B: b, Rows: rows, F: f, Stride: stride, Type: dt}))
					back := SiLUMulBackward{H: h2.Ptr, DA: dab.Ptr, DB: db, DH: dh.Ptr, A: ab.Ptr, B: b, Rows: rows, F: f,
						Stride: stride, GradStride: stride, Type: dt}
					if i%2 == 0 { // in place
						back.DA, back.DB, back.H, dab, h2 = ab.Ptr, b, 0, ab, h
					}
					g.must(g.SiLUMulBackward(g.stream, back))

					ra, rb := make([]float64, n), make([]float64, n)
					for r := range rows {
						for c := range f {
							ra[r*f+c], rb[r*f+c] = abr[at(r, c)], abr[at(r, c)+half]
						}
					}
					wantH, da, dbr, want := make([]float64, n), make([]float64, n), make([]float64, n), make([]float64, 2*n)
					cpu.SiLUMulBackward(wantH, da, dbr, dhr, ra, rb)
					for r := range rows {
						for c := range f {
							want[at(r, c)], want[at(r, c)+half] = da[r*f+c], dbr[r*f+c]
						}
					}
					g.near("h", h, wantH, forward(dt))
					g.near("h again", h2, wantH, forward(dt))
					g.near("da, db", dab, want, backward(dt))
				})
			}
		}
	}
}
