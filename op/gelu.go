// The parts of GELU:
//   - shapes and gradients: this file
//   - CPU: internal/cpu/layer/gelu.go
//   - GPU: cudaops/internal/lower/gelu.go, cudaops/internal/kernel/elementwise
//   - test cases and benchmark: internal/opcase/gelu.go

package op

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// GELUOp is the op that [GELU] applies.
type GELUOp struct{ opbase.Base }

// GELU applies the Gaussian error linear unit, in its tanh approximation, to every element:
//
//	y = x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³)))
//
// x and y are [rows, D], float32 or float64. [GELUMLP] is a gated MLP with this activation function.
// (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.)
func GELU(x *gorgonia.Node) (*gorgonia.Node, error) {
	const name = "GELU"
	ax := arg{"x", x}
	if err := checkFloats(name, ax); err != nil {
		return nil, err
	}

	if err := checkDims(name, ax, 2, "[rows, D]"); err != nil {
		return nil, err
	}

	o := &GELUOp{}
	opbase.Init(&o.Base, o, name, "", gorgonia.Nodes{x}, x.Dtype(), x.Shape(),
		gelu[float32], gelu[float64])
	return gorgonia.ApplyOp(o, x)
}

func gelu[T cpu.Float](_ *GELUOp, y []T, in opbase.Args) error {
	layer.GELU(y, opbase.Slice[T](in, 0))
	return nil
}

// DiffWRT reports that the op is differentiable in x.
func (o *GELUOp) DiffWRT(int) []bool { return []bool{true} }

// SymDiff returns the gradient of x.
func (o *GELUOp) SymDiff(in gorgonia.Nodes, output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, in, output, grad); err != nil {
		return nil, err
	}

	b := &GELUGradOp{}
	opbase.Init(&b.Base, b, "GELUGrad", "", gorgonia.Nodes{in[0], grad}, grad.Dtype(), in[0].Shape(),
		geluGrad[float32], geluGrad[float64])
	b.Differentiates(o)
	dx, err := gorgonia.ApplyOp(b, in[0], grad)
	if err != nil {
		return nil, err
	}

	return gorgonia.Nodes{dx}, nil
}

// GELUGradOp computes the gradient of x from x and the gradient of the result.
type GELUGradOp struct{ opbase.Base }

func geluGrad[T cpu.Float](_ *GELUGradOp, dx []T, in opbase.Args) error {
	layer.GELUBackward(dx, opbase.Slice[T](in, 1), opbase.Slice[T](in, 0))
	return nil
}
