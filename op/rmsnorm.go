package op

import (
	"fmt"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// RMSNormOp is the op behind [RMSNorm].
type RMSNormOp struct {
	opbase.Base
	Eps  float64
	rstd opbase.Aux // 1/rms of every row, which the backward op reuses
}

// RMSNorm divides every row of x by its root mean square and scales its features:
//
//	y[r] = x[r] / sqrt(mean(x[r]²) + eps) ⊙ weight
//
// x is [rows, D], weight is [D], y is [rows, D]; all are float32 or all float64. eps must not be
// negative. (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.)
func RMSNorm(x, weight *gorgonia.Node, eps float64) (*gorgonia.Node, error) {
	const name = "RMSNorm"
	ax, aw := arg{"x", x}, arg{"weight", weight}
	if err := checkFloats(name, ax, aw); err != nil {
		return nil, err
	}
	if err := checkDims(name, ax, 2, "[rows, D]"); err != nil {
		return nil, err
	}
	if err := checkShape(name, aw, fmt.Sprintf("one for each feature of x %v", x.Shape()), x.Shape()[1]); err != nil {
		return nil, err
	}
	if !(eps >= 0) || math.IsInf(eps, 0) {
		return nil, fmt.Errorf("op.%s: eps is %v, want a finite number of at least 0", name, eps)
	}
	o := &RMSNormOp{Eps: eps}
	o.Owns(&o.rstd)
	opbase.Init(&o.Base, o, name, fmt.Sprintf("eps=%v", eps), gorgonia.Nodes{x, weight}, x.Dtype(), x.Shape(),
		rmsNorm[float32], rmsNorm[float64])
	return gorgonia.ApplyOp(o, x, weight)
}

func rmsNorm[T cpu.Float](o *RMSNormOp, y []T, in opbase.Args) error {
	rstd := opbase.AuxSlice[T](&o.rstd, o.InputShape(0)[0])
	layer.RMSNorm(y, rstd, opbase.Slice[T](in, 0), opbase.Slice[T](in, 1), o.Eps)
	return nil
}

// DiffWRT reports that the op is differentiable in x and in the weight.
func (o *RMSNormOp) DiffWRT(int) []bool { return []bool{true, true} }

// SymDiff returns the gradients of x and of the weight.
func (o *RMSNormOp) SymDiff(inputs gorgonia.Nodes, output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	b := &RMSNormGradOp{Forward: o}
	return backward(&b.Base, b, "RMSNormGrad", o, gorgonia.Nodes{inputs[0], inputs[1], output, grad}, 2,
		rmsNormGrad[float32], rmsNormGrad[float64])
}

// RMSNormGradOp computes [dx | dweight], packed, from x, weight, the forward output and its
// gradient.
type RMSNormGradOp struct {
	opbase.Base
	Forward *RMSNormOp
}

func rmsNormGrad[T cpu.Float](o *RMSNormGradOp, out []T, in opbase.Args) error {
	x, w, g := opbase.Slice[T](in, 0), opbase.Slice[T](in, 1), opbase.Slice[T](in, 3)
	rstd := opbase.AuxSlice[T](&o.Forward.rstd, o.InputShape(0)[0])
	layer.RMSNormBackward(out[:len(x)], out[len(x):], g, x, w, rstd)
	return nil
}
