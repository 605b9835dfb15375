// The parts of LinearLogProbs:
//   - shapes and gradients: this file
//   - CPU: internal/cpu/crossentropy, internal/cpu/gemm
//   - GPU: cudaops/internal/lower/logprobs.go, with the kernels of the cross-entropy
//   - test cases and benchmark: internal/opcase/preference.go

package op

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/crossentropy"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// LinearLogProbsOp is the op that [LinearLogProbs] applies.
type LinearLogProbsOp struct {
	opbase.Base
	Frozen      bool       // the weight has no gradient
	normalizers opbase.Aux // two numbers per row, reused by the backward op
}

// LinearLogProbs computes the output layer of a language model and the log-probability, in nats, of each
// row's target:
//
//	y[r] = log softmax(x[r]·wᵀ)[targets[r]]
//
// x is [rows, D] and w is [V, D], both float32 or both float64. targets is [rows] of type int, and y is
// [rows]. In rows with a negative target, y is 0. Running the op fails if a target is V or greater.
//
// Like [LinearCrossEntropy], the op computes the logits for a few rows at a time.
func LinearLogProbs(x, w, targets *gorgonia.Node) (*gorgonia.Node, error) {
	return newLinearLogProbs("LinearLogProbs", "", x, w, targets)
}

// FrozenLinearLogProbs is [LinearLogProbs] with a frozen weight. The backward pass computes only the
// gradient of x.
func FrozenLinearLogProbs(x, w, targets *gorgonia.Node) (*gorgonia.Node, error) {
	return newLinearLogProbs("FrozenLinearLogProbs", frozenConfig, x, w, targets)
}

func newLinearLogProbs(name, config string, x, w, targets *gorgonia.Node) (*gorgonia.Node, error) {
	if err := checkOutputLayer(name, x, w, targets); err != nil {
		return nil, err
	}

	o := &LinearLogProbsOp{Frozen: config == frozenConfig}
	o.Owns(&o.normalizers)
	in := gorgonia.Nodes{x, w, targets}
	opbase.Init(&o.Base, o, "LinearLogProbs", config, in, x.Dtype(), tensor.Shape{x.Shape()[0]},
		linearLogProbs[float32], linearLogProbs[float64])
	return gorgonia.ApplyOp(o, in...)
}

func linearLogProbs[T cpu.Float](o *LinearLogProbsOp, y []T, in opbase.Args) error {
	x, targets := opbase.Slice[T](in, 0), opbase.Slice[int](in, 2)
	v, d := o.InputShape(1)[0], o.InputShape(1)[1]
	if err := opbase.CheckIDs("targets", targets, v, true); err != nil {
		return err
	}
	normalizers := opbase.AuxSlice[T](&o.normalizers, 2*len(targets))
	if w := in.CompactWeights(1); w != nil {
		crossentropy.CompactLogProbs(any(y).([]float32), any(normalizers).([]float32), any(x).([]float32), w, targets)
		return nil
	}
	crossentropy.LogProbs(y, normalizers, x, opbase.Slice[T](in, 1), targets, d, v)
	return nil
}

// ReadsCompact reports that the op can read a compact w.
func (o *LinearLogProbsOp) ReadsCompact(input int) bool { return input == 1 }

// DiffWRT reports that the op is differentiable in x and, unless it is frozen, in w.
func (o *LinearLogProbsOp) DiffWRT(int) []bool { return []bool{true, !o.Frozen, false} }

// SymDiff returns the gradients of x and w. The gradient of a frozen w is nil.
func (o *LinearLogProbsOp) SymDiff(in gorgonia.Nodes,
	output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, in, output, grad); err != nil {
		return nil, err
	}

	learning := 2
	if o.Frozen {
		learning = 1
	}

	b := &LinearLogProbsGradOp{Forward: o}
	grads, err := backward(&b.Base, b, "LinearLogProbsGrad", o,
		gorgonia.Nodes{in[0], in[1], in[2], output, grad}, learning,
		linearLogProbsGrad[float32], linearLogProbsGrad[float64])
	if err != nil {
		return nil, err
	}

	return append(grads, nil, nil)[:3], nil
}

// LinearLogProbsGradOp computes the packed gradients [dx | dw] from x, w, the targets, the
// log-probabilities and their gradients. If the weight is frozen, it computes only dx.
type LinearLogProbsGradOp struct {
	opbase.Base
	Forward *LinearLogProbsOp
}

func linearLogProbsGrad[T cpu.Float](o *LinearLogProbsGradOp, out []T, in opbase.Args) error {
	x, targets, g := opbase.Slice[T](in, 0), opbase.Slice[int](in, 2), opbase.Slice[T](in, 4)
	normalizers := opbase.AuxSlice[T](&o.Forward.normalizers, 2*len(targets))
	v, d := o.InputShape(1)[0], o.InputShape(1)[1]
	if w := in.CompactWeights(1); w != nil {
		crossentropy.CompactLogProbsBackward(any(out).([]float32), any(x).([]float32), w,
			any(normalizers).([]float32), targets, any(g).([]float32))
		return nil
	}
	crossentropy.LogProbsBackward(out[:len(x)], out[len(x):], x, opbase.Slice[T](in, 1), normalizers, targets,
		d, v, g)
	return nil
}

// ReadsCompact reports that the op can read a compact w if that is frozen.
func (o *LinearLogProbsGradOp) ReadsCompact(input int) bool { return input == 1 && o.Forward.Frozen }

// checkOutputLayer returns an error unless x is [rows, D], w is [V, D], and targets are [rows] integers.
func checkOutputLayer(name string, x, w, targets *gorgonia.Node) error {
	ax, aw, at := arg{"x", x}, arg{"w", w}, arg{"targets", targets}
	if err := checkGraph(name, ax, aw, at); err != nil {
		return err
	}

	if err := checkFloats(name, ax, aw); err != nil {
		return err
	}

	if err := checkDims(name, ax, 2, "[rows, D]"); err != nil {
		return err
	}

	if err := checkDims(name, aw, 2, "[V, D]"); err != nil {
		return err
	}

	if err := checkShape(name, aw, fmt.Sprintf("[V, D] with the D of x %v", x.Shape()),
		w.Shape()[0], x.Shape()[1]); err != nil {
		return err
	}

	return checkInts(name, at, x.Shape()[0], fmt.Sprintf("one for each row of x %v", x.Shape()))
}
