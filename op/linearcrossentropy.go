// The parts of LinearCrossEntropy:
//   - shapes and gradients: this file
//   - CPU: internal/cpu/crossentropy, internal/cpu/gemm
//   - GPU: cudaops/internal/lower/loss.go,
//     cudaops/internal/kernel/gemm,
//     cudaops/internal/kernel/crossentropy
//   - test cases and benchmark: internal/opcase/crossentropy.go

package op

import (
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/crossentropy"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// LinearCrossEntropyOp is the op that [LinearCrossEntropy] applies.
type LinearCrossEntropyOp struct {
	opbase.Base
	Frozen      bool       // the weight has no gradient
	normalizers opbase.Aux // two numbers per row, reused by the backward op
}

// LinearCrossEntropy computes the output layer of a language model and its loss in one op:
//
//	loss = CrossEntropy(x·wᵀ, targets)
//
// x is [rows, D] and w is [V, D], both float32 or both float64. targets is [rows] of type int, and
// loss is a scalar. Targets are treated as in [CrossEntropy].
//
// The logits are often the largest tensor in a model. This op therefore computes them for a few rows
// at a time, keeps only two numbers per row, and computes them again in the backward pass. (Wijmans
// et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024.)
func LinearCrossEntropy(x, w, targets *gorgonia.Node) (*gorgonia.Node, error) {
	return newLinearCrossEntropy("LinearCrossEntropy", "", x, w, targets)
}

// FrozenLinearCrossEntropy is [LinearCrossEntropy] with a frozen weight. The backward pass computes
// only the gradient of x.
func FrozenLinearCrossEntropy(x, w, targets *gorgonia.Node) (*gorgonia.Node, error) {
	return newLinearCrossEntropy("FrozenLinearCrossEntropy", frozenConfig, x, w, targets)
}

func newLinearCrossEntropy(name, config string, x, w, targets *gorgonia.Node) (*gorgonia.Node, error) {
	if err := checkOutputLayer(name, x, w, targets); err != nil {
		return nil, err
	}

	o := &LinearCrossEntropyOp{Frozen: config == frozenConfig}
	o.Owns(&o.normalizers)
	in := gorgonia.Nodes{x, w, targets}
	opbase.Init(&o.Base, o, "LinearCrossEntropy", config, in, x.Dtype(), tensor.Shape{}, linearCrossEntropy[float32],
		linearCrossEntropy[float64])
	return gorgonia.ApplyOp(o, in...)
}

func linearCrossEntropy[T cpu.Float](o *LinearCrossEntropyOp, loss []T, in opbase.Args) error {
	x, targets := opbase.Slice[T](in, 0), opbase.Slice[int](in, 2)
	v, d := o.InputShape(1)[0], o.InputShape(1)[1]
	if err := checkTargets(targets, v); err != nil {
		return err
	}
	normalizers := opbase.AuxSlice[T](&o.normalizers, 2*len(targets))
	if w := in.CompactWeights(1); w != nil {
		loss[0] = T(crossentropy.CompactForward(any(normalizers).([]float32), any(x).([]float32), w,
			targets))
		return nil
	}
	w := opbase.Slice[T](in, 1)
	loss[0] = T(crossentropy.LinearForward(normalizers, x, w, targets, d, v))
	return nil
}

// ReadsCompact reports that the op can read a compact w.
func (o *LinearCrossEntropyOp) ReadsCompact(input int) bool { return input == 1 }

// DiffWRT reports that the op is differentiable in x and, unless it is frozen, in w.
func (o *LinearCrossEntropyOp) DiffWRT(int) []bool { return []bool{true, !o.Frozen, false} }

// SymDiff returns the gradients of x and w. The gradient of a frozen w is nil.
func (o *LinearCrossEntropyOp) SymDiff(in gorgonia.Nodes,
	output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, in, output, grad); err != nil {
		return nil, err
	}

	learning := 2
	if o.Frozen {
		learning = 1
	}

	b := &LinearCrossEntropyGradOp{Forward: o}
	grads, err := backward(&b.Base, b, "LinearCrossEntropyGrad", o,
		gorgonia.Nodes{in[0], in[1], in[2], output, grad}, learning,
		linearCrossEntropyGrad[float32], linearCrossEntropyGrad[float64])
	if err != nil {
		return nil, err
	}

	return append(grads, nil, nil)[:3], nil
}

// LinearCrossEntropyGradOp computes the packed gradients [dx | dw] from x, w, the targets, the loss
// and the gradient of the loss. If the weight is frozen, it computes only dx.
type LinearCrossEntropyGradOp struct {
	opbase.Base
	Forward *LinearCrossEntropyOp
}

func linearCrossEntropyGrad[T cpu.Float](o *LinearCrossEntropyGradOp, out []T,
	in opbase.Args) error {
	x, targets := opbase.Slice[T](in, 0), opbase.Slice[int](in, 2)
	g := opbase.Slice[T](in, 4)[0] / T(crossentropy.Targets(targets))
	normalizers := opbase.AuxSlice[T](&o.Forward.normalizers, 2*len(targets))
	v, d := o.InputShape(1)[0], o.InputShape(1)[1]
	if w := in.CompactWeights(1); w != nil {
		crossentropy.CompactBackward(any(out).([]float32), any(x).([]float32), w,
			any(normalizers).([]float32), targets, any(g).(float32))
		return nil
	}
	w := opbase.Slice[T](in, 1)
	crossentropy.LinearBackward(out[:len(x)], out[len(x):], x, w, normalizers, targets, d, v, g)
	return nil
}

// ReadsCompact reports that the op can read a compact w if that is frozen.
func (o *LinearCrossEntropyGradOp) ReadsCompact(input int) bool {
	return input == 1 && o.Forward.Frozen
}
