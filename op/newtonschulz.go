// The parts of NewtonSchulz:
//   - shapes and gradients: this file
//   - CPU: internal/cpu/optimizer/newtonschulz.go
//   - GPU: cudaops/internal/lower/norm.go,
//     cudaops/internal/schulz,
//     cudaops/internal/kernel/gemm,
//     cudaops/internal/kernel/normalize
//   - test cases and benchmark: internal/opcase/newtonschulz.go

package op

import (
	"fmt"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/optimizer"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// NewtonSchulzOp is the op that [NewtonSchulz] applies.
type NewtonSchulzOp struct {
	opbase.Base
	Steps int
}

// NewtonSchulz approximates the orthogonal factor U·Vᵀ of x = U·Σ·Vᵀ by the quintic iteration of
// Muon:
//
//	X = x / (‖x‖ + 1e-7);   steps times:  A = X·Xᵀ,  X ← 3.4445·X + (−4.7750·A + 2.0315·A²)·X
//
// x is a float32 or float64 matrix. A tall matrix is transposed for the iteration, so that the size
// of A is that of the smaller dimension. steps must be at least 1. Muon uses 5, after which singular
// values above 1e-3·‖x‖ lie in about [0.7, 1.2]. The backward pass computes the steps again. (Keller
// Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024.)
func NewtonSchulz(x *gorgonia.Node, steps int) (*gorgonia.Node, error) {
	const name = "NewtonSchulz"
	ax := arg{"x", x}
	if err := checkFloats(name, ax); err != nil {
		return nil, err
	}

	if err := checkDims(name, ax, 2, "[rows, columns]"); err != nil {
		return nil, err
	}

	if steps < 1 {
		return nil, fmt.Errorf("op.%s: steps is %d, want at least 1", name, steps)
	}

	o := &NewtonSchulzOp{Steps: steps}
	opbase.Init(&o.Base, o, name, fmt.Sprintf("steps=%d", steps), gorgonia.Nodes{x}, x.Dtype(),
		x.Shape(),
		newtonSchulz[float32], newtonSchulz[float64])
	return gorgonia.ApplyOp(o, x)
}

func newtonSchulz[T cpu.Float](o *NewtonSchulzOp, y []T, in opbase.Args) error {
	s := o.InputShape(0)
	optimizer.NewtonSchulz(y, opbase.Slice[T](in, 0), s[0], s[1], o.Steps)
	return nil
}

// DiffWRT reports that the op is differentiable in x.
func (o *NewtonSchulzOp) DiffWRT(int) []bool { return []bool{true} }

// SymDiff returns the gradient of x.
func (o *NewtonSchulzOp) SymDiff(inputs gorgonia.Nodes,
	output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, inputs, output, grad); err != nil {
		return nil, err
	}
	b := &NewtonSchulzGradOp{Forward: o}
	return backward(&b.Base, b, "NewtonSchulzGrad", o, gorgonia.Nodes{inputs[0], grad}, 1,
		newtonSchulzGrad[float32], newtonSchulzGrad[float64])
}

// NewtonSchulzGradOp computes dx from x and the output's gradient.
type NewtonSchulzGradOp struct {
	opbase.Base
	Forward *NewtonSchulzOp
}

func newtonSchulzGrad[T cpu.Float](o *NewtonSchulzGradOp, dx []T, in opbase.Args) error {
	s := o.InputShape(0)
	optimizer.NewtonSchulzBackward(dx, opbase.Slice[T](in, 0), opbase.Slice[T](in, 1), s[0],
		s[1], o.Forward.Steps)
	return nil
}
