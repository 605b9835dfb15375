package program

import (
	"cmp"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// Product is D = Alpha·op(A)·op(B) + Beta·C for contiguous row-major matrices, with sizes given by the
// shapes of D and A.
//
// Leading dimensions before the last two form a batch. A zero Alpha means 1, and a nil C means D. Float8
// operands have a scale for each row of op(A) and each column of op(B).
type Product struct {
	D, A, B, C     *Array
	ScaleA, ScaleB *Array
	TransA, TransB bool
	Alpha, Beta    float32
}

// Plus returns the product with the matrix add added to it, or the product unchanged if add is nil.
func (p Product) Plus(add *Array) Product {
	if add != nil {
		p.C, p.Beta = add, 1
	}
	return p
}

// Matmul is the Params of a product's call. A null C means D.
type Matmul struct {
	Spec    gpu.MatmulSpec
	Variant int // index into the variants of the product's plan
	gpu.MatmulArgs
}

// Params returns the product in the form that cuBLASLt expects, with null operands.
func (p Product) Params() Matmul {
	d, a := p.D.Shape, p.A.Shape
	last := len(d) - 1
	k := a[last]
	if p.TransA {
		k = a[last-1]
	}

	spec := gpu.MatmulSpec{M: d[last-1], N: d[last], K: k, TransA: p.TransA, TransB: p.TransB,
		A: p.A.Type, B: p.B.Type, D: p.D.Type, Batch: opbase.Size(d[:last-1]), Align: Alignment}
	at := p.A.At | p.B.At | p.D.At
	if p.C != nil {
		at |= p.C.At
	}

	for spec.Align > 2 && at%spec.Align != 0 {
		spec.Align /= 2
	}

	return Matmul{Spec: spec, MatmulArgs: gpu.MatmulArgs{Alpha: cmp.Or(p.Alpha, 1), Beta: p.Beta}}
}

// Call returns a call that computes the product.
func (p Product) Call() *Call {
	m := p.Params()
	d := Writes(&m.D, p.D)
	if p.Beta != 0 && (p.C == nil || p.C == p.D) {
		d.Role = Update
	}

	args := []Arg{d, Reads(&m.A, p.A), Reads(&m.B, p.B),
		Reads(&m.ScaleA, p.ScaleA), Reads(&m.ScaleB, p.ScaleB)}
	if p.Beta != 0 && p.C != nil && p.C != p.D {
		args = append(args, Reads(&m.C, p.C))
	}

	return NewCall(&m, args...)
}
