// The parts of RowNorms:
//   - shapes: this file
//   - CPU: internal/cpu/layer/scale.go
//   - GPU: cudaops/internal/lower/adapter.go,
//     cudaops/internal/kernel/gemm
//   - test cases and benchmark: internal/opcase/adapter.go

package op

import (
	"errors"
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// RowNormsOp is the op that [RowNorms] applies.
type RowNormsOp struct {
	opbase.Base
	Scale float64

	p, q, square opbase.Aux // scratch memory
}

// RowNorms computes the norms of the rows of a weight with its low-rank adapter, without forming their
// sum:
//
//	y[o] = ‖w[o] + scale·b[o]·a‖
//
// w is [out, in], a is [r, in], b is [out, r], and y is [out]. All are float32 or all are float64.
// Gradients treat the norms as constants, as DoRA does to save memory. (Liu et al., "DoRA:
// Weight-Decomposed Low-Rank Adaptation", 2024, section 4.3.)
func RowNorms(w, a, b *gorgonia.Node, scale float64) (*gorgonia.Node, error) {
	const name = "RowNorms"
	aw, aa, ab := arg{"w", w}, arg{"a", a}, arg{"b", b}
	if err := checkFloats(name, aw, aa, ab); err != nil {
		return nil, err
	}

	if err := checkDims(name, aw, 2, "[out, in]"); err != nil {
		return nil, err
	}

	if err := checkDims(name, aa, 2, "[r, in]"); err != nil {
		return nil, err
	}

	out, in, r := w.Shape()[0], w.Shape()[1], a.Shape()[0]
	if err := checkShape(name, aa, fmt.Sprintf("[r, in] for w %v", w.Shape()), r, in); err != nil {
		return nil, err
	}

	if err := checkShape(name, ab, fmt.Sprintf("[out, r] for w %v and a %v", w.Shape(), a.Shape()), out,
		r); err != nil {
		return nil, err
	}

	if scale-scale != 0 {
		return nil, fmt.Errorf("op.RowNorms: scale is %v, want a finite number", scale)
	}

	o := &RowNormsOp{Scale: scale}
	o.Owns(&o.p, &o.q, &o.square)
	nodes := gorgonia.Nodes{w, a, b}
	opbase.Init(&o.Base, o, name, fmt.Sprint("scale=", scale), nodes, w.Dtype(), tensor.Shape{out},
		rowNorms[float32], rowNorms[float64])
	return gorgonia.ApplyOp(o, nodes...)
}

func rowNorms[T cpu.Float](o *RowNormsOp, y []T, args opbase.Args) error {
	w, releaseW := opbase.Expanded[T](args, 0)
	defer releaseW()
	a, releaseA := opbase.Expanded[T](args, 1)
	defer releaseA()
	b, releaseB := opbase.Expanded[T](args, 2)
	defer releaseB()

	out, in, r := o.InputShape(0)[0], o.InputShape(0)[1], o.InputShape(1)[0]
	p, q, square := opbase.AuxSlice[T](&o.p, out*r), opbase.AuxSlice[T](&o.q, out*r),
		opbase.AuxSlice[T](&o.square, r*r)

	gemm.Linear(p, w, a, out, in, r)
	gemm.Linear(square, a, a, r, in, r)
	gemm.Linear(q, b, square, out, r, r) // a·aᵀ is its own transpose
	layer.RowNorms(y, w, b, p, q, r, o.Scale)
	return nil
}

// ReadsCompact reports that the op can read compact weights, which it widens first.
func (o *RowNormsOp) ReadsCompact(int) bool { return true }

// DiffWRT reports that gradients treat the norms as constants.
func (o *RowNormsOp) DiffWRT(int) []bool { return []bool{false, false, false} }

// DoDiff adds nothing to the gradients of w, a and b, because gradients treat the norms as constants.
func (o *RowNormsOp) DoDiff(gorgonia.ExecutionContext, gorgonia.Nodes, *gorgonia.Node) error {
	return nil
}

// SymDiff returns an error, because the op is not differentiable.
func (o *RowNormsOp) SymDiff(gorgonia.Nodes, *gorgonia.Node, *gorgonia.Node) (gorgonia.Nodes, error) {
	return nil, errors.New("op.RowNorms is not differentiable")
}
