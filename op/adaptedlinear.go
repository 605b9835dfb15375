// The parts of AdaptedLinear:
//   - shapes and gradients: this file
//   - CPU: internal/cpu/gemm
//   - GPU: cudaops/internal/lower/adapted.go,
//     cudaops/internal/kernel/gemm
//   - test cases and benchmark: internal/opcase/adapter.go

package op

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// AdaptedLinearOp is the op that [AdaptedLinear] applies.
type AdaptedLinearOp struct {
	opbase.Base
	Scale float64

	h opbase.Aux // scale·x·aᵀ
}

// AdaptedLinear multiplies x by a frozen weight with a low-rank adapter:
//
//	y = x·wᵀ + scale·(x·aᵀ)·bᵀ
//
// x is [rows, in], w is [out, in], a is [r, in], b is [out, r], and y is [rows, out]. All are float32 or
// all are float64. The backward pass computes the gradients of x, a and b, but not of w, and neither pass
// forms w + scale·b·a. (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.)
func AdaptedLinear(x, w, a, b *gorgonia.Node, scale float64) (*gorgonia.Node, error) {
	const name = "AdaptedLinear"
	ax, aw, aa, ab := arg{"x", x}, arg{"w", w}, arg{"a", a}, arg{"b", b}
	if err := checkFloats(name, ax, aw, aa, ab); err != nil {
		return nil, err
	}

	if err := checkDims(name, ax, 2, "[rows, in]"); err != nil {
		return nil, err
	}

	if err := checkDims(name, aw, 2, "[out, in]"); err != nil {
		return nil, err
	}

	if err := checkDims(name, aa, 2, "[r, in]"); err != nil {
		return nil, err
	}

	rows, in, out, r := x.Shape()[0], x.Shape()[1], w.Shape()[0], a.Shape()[0]
	if err := checkShape(name, aw, fmt.Sprintf("[out, in] with the features of x %v", x.Shape()),
		out, in); err != nil {
		return nil, err
	}

	if err := checkShape(name, aa, fmt.Sprintf("[r, in] with the features of x %v", x.Shape()),
		r, in); err != nil {
		return nil, err
	}

	if err := checkShape(name, ab, fmt.Sprintf("[out, r] for w %v and a %v", w.Shape(), a.Shape()),
		out, r); err != nil {
		return nil, err
	}

	if scale-scale != 0 {
		return nil, fmt.Errorf("op.AdaptedLinear: scale is %v, want a finite number", scale)
	}

	o := &AdaptedLinearOp{Scale: scale}
	o.Owns(&o.h)
	nodes := gorgonia.Nodes{x, w, a, b}
	opbase.Init(&o.Base, o, name, fmt.Sprint("scale=", scale), nodes, x.Dtype(), tensor.Shape{rows, out},
		adaptedLinear[float32], adaptedLinear[float64])
	return gorgonia.ApplyOp(o, nodes...)
}

func adaptedLinear[T cpu.Float](o *AdaptedLinearOp, y []T, args opbase.Args) error {
	x, a, b := opbase.Slice[T](args, 0), opbase.Slice[T](args, 2), opbase.Slice[T](args, 3)
	rows, in, out, r := o.InputShape(0)[0], o.InputShape(0)[1], o.InputShape(1)[0], o.InputShape(2)[0]
	weigh(o.Stop(), y, x, args, 1, o.InputShape(1))

	h := opbase.AuxSlice[T](&o.h, rows*r)
	gemm.Mul(false, true, rows, r, in, T(o.Scale), x, in, a, in, 0, h, r)
	gemm.Mul(false, true, rows, out, r, 1, h, r, b, r, 1, y, out)
	return nil
}

// ReadsCompact reports that the op can read a compact w.
func (o *AdaptedLinearOp) ReadsCompact(input int) bool { return input == 1 }

// DiffWRT reports that the op is differentiable in x, a and b.
func (o *AdaptedLinearOp) DiffWRT(int) []bool { return []bool{true, false, true, true} }

// SymDiff returns the gradients of x, a and b. The gradient of w is nil.
func (o *AdaptedLinearOp) SymDiff(inputs gorgonia.Nodes,
	output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, inputs, output, grad); err != nil {
		return nil, err
	}

	g := &AdaptedLinearGradOp{Forward: o}
	g.Owns(&g.h, &g.dh)
	all, err := backward(&g.Base, g, "AdaptedLinearGrad", o,
		gorgonia.Nodes{inputs[0], inputs[2], inputs[3], inputs[1], grad}, 3,
		adaptedLinearGrad[float32], adaptedLinearGrad[float64])
	if err != nil {
		return nil, err
	}

	return gorgonia.Nodes{all[0], nil, all[1], all[2]}, nil
}

// AdaptedLinearGradOp computes the packed gradients [dx | da | db] from x, a, b, w and the output's
// gradient g:
//
//	dx = g·w + dh·a,  da = dhᵀ·x,  db = scale·gᵀ·(x·aᵀ),  dh = scale·g·b
type AdaptedLinearGradOp struct {
	opbase.Base
	Forward *AdaptedLinearOp

	h, dh opbase.Aux
}

func adaptedLinearGrad[T cpu.Float](o *AdaptedLinearGradOp, d []T, args opbase.Args) error {
	x, a, b := opbase.Slice[T](args, 0), opbase.Slice[T](args, 1), opbase.Slice[T](args, 2)
	g := opbase.Slice[T](args, 4)
	rows, in, r, out := o.InputShape(0)[0], o.InputShape(0)[1], o.InputShape(1)[0], o.InputShape(2)[0]
	dx, da, db := d[:len(x)], d[len(x):len(x)+len(a)], d[len(x)+len(a):]
	scale := T(o.Forward.Scale)
	h, dh := opbase.AuxSlice[T](&o.h, rows*r), opbase.AuxSlice[T](&o.dh, rows*r)

	gemm.Mul(false, true, rows, r, in, scale, x, in, a, in, 0, h, r)
	gemm.Mul(false, false, rows, r, out, scale, g, out, b, r, 0, dh, r)
	weighGrad(o.Stop(), dx, g, args, 3, o.InputShape(3))
	gemm.Mul(false, false, rows, in, r, 1, dh, r, a, in, 1, dx, in)
	gemm.Mul(true, false, r, in, rows, 1, dh, r, x, in, 0, da, in)
	gemm.Mul(true, false, out, r, rows, 1, g, out, h, r, 0, db, r)
	return nil
}

// ReadsCompact reports that the op can read a compact w.
func (o *AdaptedLinearGradOp) ReadsCompact(input int) bool { return input == 3 }
