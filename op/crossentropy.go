// The parts of CrossEntropy:
//   - shapes and gradients: this file
//   - CPU: internal/cpu/crossentropy
//   - GPU: cudaops/internal/lower/loss.go,
//     cudaops/internal/kernel/crossentropy
//   - test cases and benchmark: internal/opcase/crossentropy.go

package op

import (
	"errors"
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/crossentropy"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// ErrNoTargets is wrapped by the error of a cross-entropy if no row of the batch has a target of at
// least 0, because the mean is then undefined.
var ErrNoTargets = errors.New("no row has a target")

// CrossEntropyOp is the op that [CrossEntropy] applies.
type CrossEntropyOp struct {
	opbase.Base
	normalizers opbase.Aux // two numbers per row, reused by the backward op
}

// CrossEntropy computes the mean negative log-likelihood of the targets under softmax(logits), in
// nats:
//
//	loss = mean over rows r with targets[r] ≥ 0 of  log Σ_v exp(logits[r, v]) − logits[r, targets[r]]
//
// logits is [rows, V] of float32 or float64, targets is [rows] of type int, and loss is a scalar.
// Rows with a negative target are ignored. The run returns an error if a target is V or greater, or
// if no row has a target ([ErrNoTargets]).
func CrossEntropy(logits, targets *gorgonia.Node) (*gorgonia.Node, error) {
	const name = "CrossEntropy"
	al, at := arg{"logits", logits}, arg{"targets", targets}
	if err := checkGraph(name, al, at); err != nil {
		return nil, err
	}

	if err := checkFloats(name, al); err != nil {
		return nil, err
	}

	if err := checkDims(name, al, 2, "[rows, V]"); err != nil {
		return nil, err
	}

	if err := checkInts(name, at, logits.Shape()[0], fmt.Sprintf("one for each row of logits %v",
		logits.Shape())); err != nil {
		return nil, err
	}

	o := &CrossEntropyOp{}
	o.Owns(&o.normalizers)
	opbase.Init(&o.Base, o, name, "", gorgonia.Nodes{logits, targets},
		logits.Dtype(), tensor.Shape{},
		crossEntropy[float32], crossEntropy[float64])
	return gorgonia.ApplyOp(o, logits, targets)
}

// checkTargets returns an error unless at least one row has a target and all targets are less than
// the vocabulary size v.
func checkTargets(targets []int, v int) error {
	if err := opbase.CheckIDs("targets", targets, v, true); err != nil {
		return err
	}
	if crossentropy.Targets(targets) == 0 {
		return fmt.Errorf("all %d targets are negative: %w", len(targets), ErrNoTargets)
	}
	return nil
}

func crossEntropy[T cpu.Float](o *CrossEntropyOp, loss []T, in opbase.Args) error {
	logits, targets := opbase.Slice[T](in, 0), opbase.Slice[int](in, 1)
	v := o.InputShape(0)[1]
	if err := checkTargets(targets, v); err != nil {
		return err
	}
	normalizers := opbase.AuxSlice[T](&o.normalizers, 2*len(targets))
	loss[0] = T(crossentropy.Forward(normalizers, logits, targets, v))
	return nil
}

// DiffWRT reports that the op is differentiable in the logits.
func (o *CrossEntropyOp) DiffWRT(int) []bool { return []bool{true, false} }

// SymDiff returns the gradient of the logits.
func (o *CrossEntropyOp) SymDiff(in gorgonia.Nodes,
	output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, in, output, grad); err != nil {
		return nil, err
	}

	b := &CrossEntropyGradOp{Forward: o}
	b.Differentiates(o)
	inputs := gorgonia.Nodes{in[0], in[1], output, grad}
	opbase.Init(&b.Base, b, "CrossEntropyGrad", "", inputs, in[0].Dtype(), in[0].Shape(),
		crossEntropyGrad[float32], crossEntropyGrad[float64])
	dx, err := gorgonia.ApplyOp(b, inputs...)
	if err != nil {
		return nil, err
	}

	return gorgonia.Nodes{dx, nil}, nil
}

// CrossEntropyGradOp computes the gradient of the logits from the logits, the targets, the loss and
// the gradient of the loss.
type CrossEntropyGradOp struct {
	opbase.Base
	Forward *CrossEntropyOp
}

func crossEntropyGrad[T cpu.Float](o *CrossEntropyGradOp, out []T, in opbase.Args) error {
	logits, targets, g := opbase.Slice[T](in, 0), opbase.Slice[int](in, 1),
		opbase.Slice[T](in, 3)[0]
	normalizers := opbase.AuxSlice[T](&o.Forward.normalizers, 2*len(targets))
	crossentropy.Backward(out, logits, normalizers, targets, o.InputShape(0)[1],
		g/T(crossentropy.Targets(targets)))
	return nil
}
