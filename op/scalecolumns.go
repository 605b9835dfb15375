// The parts of ScaleColumns:
//   - shapes and gradients: this file
//   - CPU: internal/cpu/layer/scale.go
//   - GPU: cudaops/internal/lower/adapter.go,
//     cudaops/internal/kernel/elementwise,
//     cudaops/internal/kernel/reduce
//   - test cases and benchmark: internal/opcase/adapter.go

package op

import (
	"fmt"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// ScaleColumnsOp is the op that [ScaleColumns] applies.
type ScaleColumnsOp struct{ opbase.Base }

// ScaleColumns multiplies each feature by its own factor:
//
//	y[r] = x[r] ⊙ f
//
// x and y are [rows, D], and f is [D]. All are float32 or all are float64.
func ScaleColumns(x, f *gorgonia.Node) (*gorgonia.Node, error) {
	const name = "ScaleColumns"
	ax, af := arg{"x", x}, arg{"f", f}
	if err := checkFloats(name, ax, af); err != nil {
		return nil, err
	}

	if err := checkDims(name, ax, 2, "[rows, D]"); err != nil {
		return nil, err
	}

	if err := checkShape(name, af, fmt.Sprintf("one for each feature of x %v", x.Shape()),
		x.Shape()[1]); err != nil {
		return nil, err
	}

	o := &ScaleColumnsOp{}
	opbase.Init(&o.Base, o, name, "", gorgonia.Nodes{x, f}, x.Dtype(), x.Shape(),
		scaleColumns[float32], scaleColumns[float64])
	return gorgonia.ApplyOp(o, x, f)
}

func scaleColumns[T cpu.Float](_ *ScaleColumnsOp, y []T, in opbase.Args) error {
	layer.ScaleColumns(y, opbase.Slice[T](in, 0), opbase.Slice[T](in, 1))
	return nil
}

// DiffWRT reports that the op is differentiable in x and f.
func (o *ScaleColumnsOp) DiffWRT(int) []bool { return []bool{true, true} }

// SymDiff returns the gradients of x and f.
func (o *ScaleColumnsOp) SymDiff(in gorgonia.Nodes,
	output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, in, output, grad); err != nil {
		return nil, err
	}
	b := &ScaleColumnsGradOp{}
	return backward(&b.Base, b, "ScaleColumnsGrad", o, gorgonia.Nodes{in[0], in[1], grad}, 2,
		scaleColumnsGrad[float32], scaleColumnsGrad[float64])
}

// ScaleColumnsGradOp computes the packed gradients [dx | df] from x, f and the output's gradient g:
//
//	dx[r] = g[r] ⊙ f,  df = Σ_r g[r] ⊙ x[r]
type ScaleColumnsGradOp struct{ opbase.Base }

func scaleColumnsGrad[T cpu.Float](_ *ScaleColumnsGradOp, out []T, in opbase.Args) error {
	x, f, g := opbase.Slice[T](in, 0), opbase.Slice[T](in, 1), opbase.Slice[T](in, 2)
	layer.ScaleColumns(out[:len(x)], g, f)
	layer.ScaleColumnsBackward(out[len(x):], g, x)
	return nil
}
