// The parts of LayerNorm:
//   - shapes and gradients: this file
//   - CPU: internal/cpu/layer/layernorm.go
//   - GPU: cudaops/internal/lower/layernorm.go,
//     cudaops/internal/kernel/norm/layernorm.go, cudaops/internal/kernel/norm/layernorm.cu
//   - test cases and benchmark: internal/opcase/layernorm.go

package op

import (
	"fmt"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// LayerNormOp is the op that [LayerNorm] applies.
type LayerNormOp struct {
	opbase.Base
	Eps float64

	stats opbase.Aux // the statistics of every row, which the backward op reuses
}

// LayerNorm normalizes every row of x to mean 0 and variance 1, scales its features and adds a bias:
//
//	y[r] = (x[r] − mean(x[r])) / sqrt(var(x[r]) + eps) ⊙ weight + bias
//
// The variance is taken over all features, without Bessel's correction. It is computed from the
// deviations from the mean, so that a large mean does not reduce precision.
//
// x is [rows, D], weight and bias are [D], y is [rows, D]; all are float32 or all float64. eps must
// not be negative. (Ba, Kiros and Hinton, "Layer Normalization", 2016.)
func LayerNorm(x, weight, bias *gorgonia.Node, eps float64) (*gorgonia.Node, error) {
	const name = "LayerNorm"
	ax, aw, ab := arg{"x", x}, arg{"weight", weight}, arg{"bias", bias}
	if err := checkFloats(name, ax, aw, ab); err != nil {
		return nil, err
	}

	if err := checkDims(name, ax, 2, "[rows, D]"); err != nil {
		return nil, err
	}

	for _, a := range []arg{aw, ab} {
		because := fmt.Sprintf("one for each feature of x %v", x.Shape())
		if err := checkShape(name, a, because, x.Shape()[1]); err != nil {
			return nil, err
		}
	}

	if !(eps >= 0) || math.IsInf(eps, 0) {
		return nil, fmt.Errorf("op.%s: eps is %v, want a finite number of at least 0", name, eps)
	}

	o := &LayerNormOp{Eps: eps}
	o.Owns(&o.stats)
	in := gorgonia.Nodes{x, weight, bias}
	opbase.Init(&o.Base, o, name, fmt.Sprintf("eps=%v", eps), in, x.Dtype(), x.Shape(),
		layerNorm[float32], layerNorm[float64])
	return gorgonia.ApplyOp(o, in...)
}

func layerNorm[T cpu.Float](o *LayerNormOp, y []T, in opbase.Args) error {
	layer.LayerNorm(y, layerNormStats[T](o), opbase.Slice[T](in, 0), opbase.Slice[T](in, 1),
		opbase.Slice[T](in, 2), o.Eps)
	return nil
}

func layerNormStats[T cpu.Float](o *LayerNormOp) []T {
	return opbase.AuxSlice[T](&o.stats, layer.LayerNormStats*o.InputShape(0)[0])
}

// DiffWRT reports that the op is differentiable in x, the weight and the bias.
func (o *LayerNormOp) DiffWRT(int) []bool { return []bool{true, true, true} }

// SymDiff returns the gradients of x, the weight and the bias.
func (o *LayerNormOp) SymDiff(inputs gorgonia.Nodes,
	output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, inputs, output, grad); err != nil {
		return nil, err
	}
	b := &LayerNormGradOp{Forward: o}
	return backward(&b.Base, b, "LayerNormGrad", o,
		gorgonia.Nodes{inputs[0], inputs[1], inputs[2], output, grad}, 3,
		layerNormGrad[float32], layerNormGrad[float64])
}

// LayerNormGradOp computes the packed gradients [dx | dweight | dbias] from x, weight, bias, the forward
// output and its gradient.
type LayerNormGradOp struct {
	opbase.Base
	Forward *LayerNormOp
}

func layerNormGrad[T cpu.Float](o *LayerNormGradOp, out []T, in opbase.Args) error {
	x, w, g := opbase.Slice[T](in, 0), opbase.Slice[T](in, 1), opbase.Slice[T](in, 4)
	dx, rest := out[:len(x)], out[len(x):]
	layer.LayerNormBackward(dx, rest[:len(w)], rest[len(w):], g, x, w,
		layerNormStats[T](o.Forward))
	return nil
}
