// The parts of Linear:
//   - shapes and gradients: this file
//   - CPU: internal/cpu/gemm
//   - GPU: cudaops/internal/lower/linear.go,
//     cudaops/internal/kernel/gemm
//   - test cases and benchmark: internal/opcase/linear.go

package op

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// LinearOp is the op that [Linear] applies, and [FrozenLinear] if Frozen is set.
type LinearOp struct {
	opbase.Base
	Frozen bool // the weight has no gradient
}

// Linear multiplies x by a weight stored in PyTorch's layout:
//
//	y = x·wᵀ
//
// x is [rows, in], w is [out, in], and y is [rows, out]. All are float32 or all are float64.
func Linear(x, w *gorgonia.Node) (*gorgonia.Node, error) { return newLinear("Linear", "", x, w) }

// FrozenLinear is [Linear] with a frozen weight. The backward pass computes only the gradient of x:
//
//	y = x·wᵀ;  dx = dy·w
func FrozenLinear(x, w *gorgonia.Node) (*gorgonia.Node, error) {
	return newLinear("FrozenLinear", frozenConfig, x, w)
}

// frozenConfig is the configuration of ops with frozen weights.
const frozenConfig = "frozen"

func newLinear(name, config string, x, w *gorgonia.Node) (*gorgonia.Node, error) {
	ax, aw := arg{"x", x}, arg{"w", w}
	if err := checkFloats(name, ax, aw); err != nil {
		return nil, err
	}

	if err := checkDims(name, ax, 2, "[rows, in]"); err != nil {
		return nil, err
	}

	if err := checkDims(name, aw, 2, "[out, in]"); err != nil {
		return nil, err
	}

	rows, in, out := x.Shape()[0], x.Shape()[1], w.Shape()[0]
	if err := checkShape(name, aw, fmt.Sprintf("[out, in] with the features of x %v", x.Shape()),
		out, in); err != nil {
		return nil, err
	}

	o := &LinearOp{Frozen: config == frozenConfig}
	opbase.Init(&o.Base, o, "Linear", config, gorgonia.Nodes{x, w}, x.Dtype(), tensor.Shape{rows, out},
		linear[float32], linear[float64])
	return gorgonia.ApplyOp(o, x, w)
}

func linear[T cpu.Float](o *LinearOp, y []T, args opbase.Args) error {
	weigh(o.Stop(), y, opbase.Slice[T](args, 0), args, 1, o.InputShape(1))
	return nil
}

// weigh computes y = x·wᵀ, where w is an argument of the given shape, in compact form or not.
func weigh[T cpu.Float](stop *cpu.Stop, y, x []T, args opbase.Args, w int, shape tensor.Shape) {
	out, in := shape[0], shape[1]
	rows := len(x) / in
	if c := args.CompactWeights(w); c != nil {
		c.Linear(stop, any(y).([]float32), any(x).([]float32), rows)
		return
	}
	gemm.LinearUntil(stop, y, x, opbase.Slice[T](args, w), rows, in, out)
}

// weighGrad computes dx = dy·w, the gradient of weigh's x.
func weighGrad[T cpu.Float](stop *cpu.Stop, dx, dy []T, args opbase.Args, w int, shape tensor.Shape) {
	out, in := shape[0], shape[1]
	rows := len(dy) / out
	if c := args.CompactWeights(w); c != nil {
		c.InputGrad(stop, any(dx).([]float32), any(dy).([]float32), rows)
		return
	}
	gemm.Mul(false, false, rows, in, out, 1, dy, out, opbase.Slice[T](args, w), in, 0, dx, in)
}

// ReadsCompact reports that the op can read a compact w.
func (o *LinearOp) ReadsCompact(input int) bool { return input == 1 }

// DiffWRT reports that the op is differentiable in x and, unless it is frozen, in w.
func (o *LinearOp) DiffWRT(int) []bool { return []bool{true, !o.Frozen} }

// SymDiff returns the gradients of x and w. The gradient of a frozen w is nil.
func (o *LinearOp) SymDiff(inputs gorgonia.Nodes,
	output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, inputs, output, grad); err != nil {
		return nil, err
	}
	if o.Frozen {
		dx, err := o.inputGradient(inputs, grad)
		return gorgonia.Nodes{dx, nil}, err
	}

	b := &LinearGradOp{}
	return backward(&b.Base, b, "LinearGrad", o, gorgonia.Nodes{inputs[0], inputs[1], grad}, 2,
		linearGrad[float32], linearGrad[float64])
}

// inputGradient returns the gradient of x.
func (o *LinearOp) inputGradient(inputs gorgonia.Nodes, grad *gorgonia.Node) (*gorgonia.Node, error) {
	b := &LinearInputGradOp{}
	opbase.Init(&b.Base, b, "LinearInputGrad", "", gorgonia.Nodes{grad, inputs[1]}, grad.Dtype(),
		inputs[0].Shape(), linearInputGrad[float32], linearInputGrad[float64])
	b.Differentiates(o)
	return gorgonia.ApplyOp(b, grad, inputs[1])
}

// LinearInputGradOp computes the gradient of x, dy·w, from the output's gradient and a frozen w.
type LinearInputGradOp struct{ opbase.Base }

func linearInputGrad[T cpu.Float](o *LinearInputGradOp, dx []T, args opbase.Args) error {
	weighGrad(o.Stop(), dx, opbase.Slice[T](args, 0), args, 1, o.InputShape(1))
	return nil
}

// ReadsCompact reports that the op can read a compact w.
func (o *LinearInputGradOp) ReadsCompact(input int) bool { return input == 1 }

// LinearGradOp computes the packed gradients [dx | dw] from x, w and the output's gradient.
type LinearGradOp struct{ opbase.Base }

func linearGrad[T cpu.Float](o *LinearGradOp, out []T, args opbase.Args) error {
	x, w, g := opbase.Slice[T](args, 0), opbase.Slice[T](args, 1), opbase.Slice[T](args, 2)
	rows, in := o.InputShape(0)[0], o.InputShape(0)[1]
	gemm.LinearBackward(out[:len(x)], out[len(x):], g, x, w, rows, in, o.InputShape(1)[0])
	return nil
}
