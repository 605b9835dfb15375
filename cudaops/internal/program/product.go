package program

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Product is D = Alpha·op(A)·op(B) + Beta·C, for row-major matrices without gaps; D's shape and A's
// give the sizes. A zero Alpha counts as 1, and C is D where it is nil. Operands of float8 have a
// factor for each row of op(A) and each column of op(B).
type Product struct {
	D, A, B, C     *Array
	ScaleA, ScaleB *Array
	TransA, TransB bool
	Alpha, Beta    float32
	Batch          int // so many products, of matrices one behind the other; 0 counts as 1
}

// Repeated is a batch of the product.
func (p Product) Repeated(batch int) Product {
	p.Batch = batch
	return p
}

// Plus is the product with another matrix added, if there is one.
func (p Product) Plus(add *Array) Product {
	if add != nil {
		p.C, p.Beta = add, 1
	}
	return p
}

// Depth is how many products are added up for an element.
func (p Product) Depth() int {
	if p.TransA {
		return p.A.Shape[0]
	}
	return p.A.Shape[1]
}

// FLOPs is the multiplications and additions of all products of a batch.
func (p Product) FLOPs() float64 {
	return 2 * float64(max(1, p.Batch)) * float64(p.D.Shape[0]) *
		float64(p.D.Shape[1]) * float64(p.Depth())
}

// spec is the product as cuBLASLt sees it.
func (p Product) spec() gpu.MatmulSpec {
	at := p.A.At | p.B.At | p.D.At
	if p.C != nil {
		at |= p.C.At
	}
	spec := gpu.MatmulSpec{M: p.D.Shape[0], N: p.D.Shape[1], K: p.Depth(),
		TransA: p.TransA, TransB: p.TransB,
		A: p.A.Type, B: p.B.Type, D: p.D.Type, Align: Alignment}
	if p.ScaleA != nil {
		spec.Scaling, spec.FastAccumulation = gpu.ScaledRows, true
	}
	if p.Batch > 1 {
		spec.Batch, spec.StrideA, spec.StrideB, spec.StrideD = p.Batch,
			p.A.Len(), p.B.Len(), p.D.Len()
	}
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
	if p.Batch > 1 { // all matrices of an operand
		whole := func(a *Array) *Array {
			return a.View(0, p.Batch, a.Shape[0], a.Shape[1])
		}
		if p.C == p.D {
			p.C = nil
		}
		p.D, p.A, p.B = whole(p.D), whole(p.A), whole(p.B)
		if p.C != nil {
			p.C = whole(p.C)
		}
	}
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
