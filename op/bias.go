// The parts of Bias:
//   - shapes and gradients: this file
//   - CPU: internal/cpu/layer/bias.go
//   - GPU: cudaops/internal/lower/linear.go,
//     cudaops/internal/kernel/elementwise,
//     cudaops/internal/kernel/reduce
//   - test cases and benchmark: internal/opcase/linear.go

package op

import (
	"fmt"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// BiasOp is the op that [Bias] applies.
type BiasOp struct{ opbase.Base }

// Bias adds a bias to the features of every row:
//
//	y[r] = x[r] + b
//
// x and y are [rows, D], and b is [D]. All are float32 or all are float64.
func Bias(x, b *gorgonia.Node) (*gorgonia.Node, error) {
	const name = "Bias"
	ax, ab := arg{"x", x}, arg{"b", b}
	if err := checkFloats(name, ax, ab); err != nil {
		return nil, err
	}

	if err := checkDims(name, ax, 2, "[rows, D]"); err != nil {
		return nil, err
	}

	if err := checkShape(name, ab, fmt.Sprintf("one for each feature of x %v", x.Shape()),
		x.Shape()[1]); err != nil {
		return nil, err
	}

	o := &BiasOp{}
	opbase.Init(&o.Base, o, name, "", gorgonia.Nodes{x, b}, x.Dtype(), x.Shape(),
		bias[float32], bias[float64])
	return gorgonia.ApplyOp(o, x, b)
}

func bias[T cpu.Float](_ *BiasOp, y []T, in opbase.Args) error {
	layer.Bias(y, opbase.Slice[T](in, 0), opbase.Slice[T](in, 1))
	return nil
}

// DiffWRT reports that the op is differentiable in x and b.
func (o *BiasOp) DiffWRT(int) []bool { return []bool{true, true} }

// SymDiff returns the gradients of x and b. The gradient of x is the output's gradient.
func (o *BiasOp) SymDiff(in gorgonia.Nodes, output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, in, output, grad); err != nil {
		return nil, err
	}

	b := &BiasGradOp{}
	opbase.Init(&b.Base, b, "BiasGrad", "", gorgonia.Nodes{grad}, grad.Dtype(), in[1].Shape(),
		biasGrad[float32], biasGrad[float64])
	b.Differentiates(o)
	db, err := gorgonia.ApplyOp(b, grad)
	if err != nil {
		return nil, err
	}

	return gorgonia.Nodes{grad, db}, nil
}

// BiasGradOp computes the gradient of the bias, which is the sum of the rows of the output's
// gradient.
type BiasGradOp struct{ opbase.Base }

func biasGrad[T cpu.Float](_ *BiasGradOp, db []T, in opbase.Args) error {
	layer.BiasBackward(db, opbase.Slice[T](in, 0))
	return nil
}
