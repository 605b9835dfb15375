package program

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// Product is D = Alpha·op(A)·op(B) + Beta·C, for row-major matrices without gaps; D's shape and A's
// give the sizes. Dimensions ahead of the last two are of so many products. A zero Alpha counts as
// 1, and C is D where it is nil. Operands of float8 have a factor for each row of op(A) and each
// column of op(B).
type Product struct {
	D, A, B, C     *Array
	ScaleA, ScaleB *Array
	TransA, TransB bool
	Alpha, Beta    float32
}

// Plus is the product with another matrix added, if there is one.
func (p Product) Plus(add *Array) Product {
	if add != nil {
		p.C, p.Beta = add, 1
	}
	return p
}

// sizes are the rows and columns of D, how many products are added up for an element, and how many
// such matrices there are.
func (p Product) sizes() (m, n, k, batch int) {
	d, a := p.D.Shape, p.A.Shape
	last := len(d) - 1
	if k = a[last]; p.TransA {
		k = a[last-1]
	}
	return d[last-1], d[last], k, opbase.Size(d[:last-1])
}

// FLOPs is the multiplications and additions of all products.
func (p Product) FLOPs() float64 {
	m, n, k, batch := p.sizes()
	return 2 * float64(batch) * float64(m) * float64(n) * float64(k)
}

// spec is the product as cuBLASLt sees it.
func (p Product) spec() gpu.MatmulSpec {
	at := p.A.At | p.B.At | p.D.At
	if p.C != nil {
		at |= p.C.At
	}
	m, n, k, batch := p.sizes()
	spec := gpu.MatmulSpec{M: m, N: n, K: k, TransA: p.TransA, TransB: p.TransB,
		A: p.A.Type, B: p.B.Type, D: p.D.Type, Batch: batch, Align: Alignment}
	for spec.Align > 2 && at%spec.Align != 0 {
		spec.Align /= 2
	}
	return spec
}

// Params is the product as a call's.
func (p Product) Params() Matmul {
	m := Matmul{Spec: p.spec(), Alpha: p.Alpha, Beta: p.Beta}
	if m.Alpha == 0 {
		m.Alpha = 1
	}
	return m
}

// Args is the operands of the product's call.
func (p Product) Args() []Arg {
	d := Writes("D", p.D)
	if p.Beta != 0 && (p.C == nil || p.C == p.D) {
		d.Role = Update
	}
	args := []Arg{d, Reads("A", p.A), Reads("B", p.B),
		Reads("ScaleA", p.ScaleA), Reads("ScaleB", p.ScaleB)}
	if p.Beta != 0 && p.C != nil && p.C != p.D {
		args = append(args, Reads("C", p.C))
	}
	return args
}
