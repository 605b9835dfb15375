// The parts of RMSNorm:
//   - shapes and gradients: this file
//   - CPU: internal/cpu/layer/rmsnorm.go
//   - GPU: cudaops/internal/lower/norm.go,
//     cudaops/internal/kernel/norm
//   - test cases and benchmark: internal/opcase/rmsnorm.go

package op

import (
	"fmt"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// RMSNormOp is the op that [RMSNorm] applies. With [EachHead], the weight's length D is less than the
// number of columns of x.
type RMSNormOp struct {
	opbase.Base
	Eps float64
	// PlusOne is set by [WeightPlusOne].
	PlusOne bool

	rstd   opbase.Aux // 1/rms of every row or head, reused by the backward op
	factor opbase.Aux // 1 + weight if PlusOne is set
}

// RMSNormOption configures [RMSNorm].
type RMSNormOption func(*rmsNormSettings)

type rmsNormSettings struct{ plusOne, heads bool }

// WeightPlusOne scales the features by 1 + weight instead of weight, as in Gemma.
func WeightPlusOne() RMSNormOption { return func(s *rmsNormSettings) { s.plusOne = true } }

// EachHead normalizes each head of a row separately, with one weight for all heads. x is then
// [rows, heads·D]. (Henry et al., "Query-Key Normalization for Transformers", 2020.)
func EachHead() RMSNormOption { return func(s *rmsNormSettings) { s.heads = true } }

// RMSNorm divides every row of x by its root mean square and scales the features:
//
//	y[r] = x[r] / sqrt(mean(x[r]²) + eps) ⊙ weight
//
// x and y are [rows, D], and weight is [D]. All are float32 or all are float64. eps must be finite
// and not negative. (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.)
func RMSNorm(x, weight *gorgonia.Node, eps float64, opts ...RMSNormOption) (*gorgonia.Node, error) {
	const name = "RMSNorm"
	var s rmsNormSettings
	for _, opt := range opts {
		opt(&s)
	}

	ax, aw := arg{"x", x}, arg{"weight", weight}
	if err := checkFloats(name, ax, aw); err != nil {
		return nil, err
	}

	if err := checkDims(name, ax, 2, "[rows, D]"); err != nil {
		return nil, err
	}

	if s.heads {
		if err := checkDims(name, aw, 1, "[D]"); err != nil {
			return nil, err
		}
		if d := weight.Shape()[0]; x.Shape()[1]%d != 0 {
			return nil, fmt.Errorf(
				"op.%s: x has shape %v, want heads of %d features, as weight has",
				name, x.Shape(), d)
		}
	} else if err := checkShape(name, aw, fmt.Sprintf("one for each feature of x %v", x.Shape()),
		x.Shape()[1]); err != nil {
		return nil, err
	}

	if !(eps >= 0) || math.IsInf(eps, 0) {
		return nil, fmt.Errorf("op.%s: eps is %v, want a finite number of at least 0", name, eps)
	}

	o := &RMSNormOp{Eps: eps, PlusOne: s.plusOne}
	o.Owns(&o.rstd, &o.factor)
	config := fmt.Sprintf("eps=%v", eps)
	if s.plusOne {
		config += " 1+weight"
	}

	opbase.Init(&o.Base, o, name, config, gorgonia.Nodes{x, weight}, x.Dtype(), x.Shape(),
		rmsNorm[float32], rmsNorm[float64])
	return gorgonia.ApplyOp(o, x, weight)
}

func rmsNorm[T cpu.Float](o *RMSNormOp, y []T, in opbase.Args) error {
	layer.RMSNorm(y, rstdOf[T](o), opbase.Slice[T](in, 0), factorOf[T](o, in), o.Eps)
	return nil
}

// rstdOf returns the memory for 1/rms of every row or head.
func rstdOf[T cpu.Float](o *RMSNormOp) []T {
	return opbase.AuxSlice[T](&o.rstd, opbase.Size(o.InputShape(0))/o.InputShape(1)[0])
}

// factorOf returns the factors of the features: the weight, or 1 + weight if PlusOne is set.
func factorOf[T cpu.Float](o *RMSNormOp, in opbase.Args) []T {
	w := opbase.Slice[T](in, 1)
	if !o.PlusOne {
		return w
	}
	f := opbase.AuxSlice[T](&o.factor, len(w))
	for i, v := range w {
		f[i] = 1 + v
	}
	return f
}

// DiffWRT reports that the op is differentiable in x and in the weight.
func (o *RMSNormOp) DiffWRT(int) []bool { return []bool{true, true} }

// SymDiff returns the gradients of x and of the weight.
func (o *RMSNormOp) SymDiff(inputs gorgonia.Nodes,
	output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, inputs, output, grad); err != nil {
		return nil, err
	}
	b := &RMSNormGradOp{Forward: o}
	return backward(&b.Base, b, "RMSNormGrad", o,
		gorgonia.Nodes{inputs[0], inputs[1], output, grad}, 2,
		rmsNormGrad[float32], rmsNormGrad[float64])
}

// RMSNormGradOp computes the packed gradients [dx | dweight] from x, weight, the forward output and
// its gradient.
type RMSNormGradOp struct {
	opbase.Base
	Forward *RMSNormOp
}

func rmsNormGrad[T cpu.Float](o *RMSNormGradOp, out []T, in opbase.Args) error {
	x, g, w := opbase.Slice[T](in, 0), opbase.Slice[T](in, 3), factorOf[T](o.Forward, in)
	layer.RMSNormBackward(out[:len(x)], out[len(x):], g, x, w, rstdOf[T](o.Forward))
	return nil
}
