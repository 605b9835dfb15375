package op

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/opbase"
)

// Replayer is an op that records its runs, for example as telemetry. When [autodiff.Recompute]
// computes part of a graph a second time for its gradient, it runs the op's replay instead, which
// performs the same arithmetic from the same record and adds nothing to it.
//
// [autodiff.Recompute]: https://pkg.go.dev/github.com/kasmina-go/kasmina/autodiff#Recompute
type Replayer interface {
	gorgonia.Op
	Replay() gorgonia.Op
}

// arg is a constructor's argument with its name in the documentation.
type arg struct {
	name string
	node *gorgonia.Node
}

// checkFloats returns an error unless all arguments are nodes of the same graph and of the same float
// type.
func checkFloats(op string, args ...arg) error {
	if err := checkGraph(op, args...); err != nil {
		return err
	}

	for _, a := range args {
		if dt := a.node.Dtype(); dt != tensor.Float32 && dt != tensor.Float64 {
			return fmt.Errorf("op.%s: %s is of type %v, want float32 or float64", op, a.name, dt)
		}
		if first := args[0]; a.node.Dtype() != first.node.Dtype() {
			return fmt.Errorf(
				"op.%s: %s is of type %v, but %s is of type %v: want one type for all",
				op, a.name, a.node.Dtype(), first.name, first.node.Dtype())
		}
	}

	return nil
}

// checkGraph returns an error unless all arguments are nodes of the same graph.
func checkGraph(op string, args ...arg) error {
	for _, a := range args {
		if a.node == nil {
			return fmt.Errorf("op.%s: %s is nil, want a node", op, a.name)
		}
		if a.node.Graph() == nil {
			return fmt.Errorf("op.%s: %s is in no graph", op, a.name)
		}
		if a.node.Graph() != args[0].node.Graph() {
			return fmt.Errorf("op.%s: %s and %s are in different graphs", op, a.name, args[0].name)
		}
	}

	return nil
}

// checkDims returns an error unless a has the given number of dimensions and no dimension is 0. want
// describes the dimensions, for example "[rows, D]".
func checkDims(op string, a arg, dims int, want string) error {
	got := a.node.Shape()
	if len(got) != dims {
		return fmt.Errorf("op.%s: %s has shape %v, want %d dimensions, %s", op,
			a.name, got, dims, want)
	}
	if opbase.Size(got) == 0 {
		return fmt.Errorf("op.%s: %s has shape %v, want at least one element", op, a.name, got)
	}
	return nil
}

// checkShape returns an error unless a has the given shape. because gives the reason for that shape,
// and becomes the last part of the error.
func checkShape(op string, a arg, because string, want ...int) error {
	if got := a.node.Shape(); !slices.Equal(got, want) {
		return fmt.Errorf("op.%s: %s has shape %v, want %v: %s", op, a.name, got,
			tensor.Shape(want), because)
	}
	return nil
}

// checkInts returns an error unless a is a vector of n ints, one per row. A negative n accepts any
// length.
func checkInts(op string, a arg, n int, because string) error {
	if dt := a.node.Dtype(); dt != tensor.Int {
		return fmt.Errorf("op.%s: %s is of type %v, want int", op, a.name, dt)
	}
	if err := checkDims(op, a, 1, "[rows]"); err != nil || n < 0 {
		return err
	}
	return checkShape(op, a, because, n)
}

// backward applies the backward op b, which differentiates forward, and returns one node per
// gradient. in holds the inputs of b. Its packed result holds the gradients of the first n inputs.
func backward[O gorgonia.Op](base *opbase.Base, b O, name string, forward gorgonia.Op,
	in gorgonia.Nodes, n int,
	f32 opbase.Kernel[O, float32], f64 opbase.Kernel[O, float64]) (gorgonia.Nodes, error) {
	shapes := make([]tensor.Shape, n)
	for i := range shapes {
		shapes[i] = in[i].Shape()
	}

	opbase.Init(base, b, name, fmt.Sprint(forward), in, in[0].Dtype(),
		tensor.Shape{opbase.PackedSize(shapes...)}, f32, f64)
	base.Differentiates(forward)
	packed, err := gorgonia.ApplyOp(b, in...)
	if err != nil {
		return nil, err
	}

	return opbase.Unpack(packed, shapes...)
}

// checkHeads returns an error unless a is [rows, heads·headDim] and rows is a multiple of seq.
func checkHeads(op string, a arg, seq int, headsName string, heads, headDim int) error {
	rows, d := a.node.Shape()[0], a.node.Shape()[1]
	if d != heads*headDim {
		return fmt.Errorf("op.%s: %s has shape %v, want %d features: %s %d × HeadDim %d",
			op, a.name, a.node.Shape(), heads*headDim, headsName, heads, headDim)
	}
	if rows%seq != 0 {
		return fmt.Errorf("op.%s: %s has %d rows (shape %v), want a multiple of Seq %d", op, a.name,
			rows, a.node.Shape(), seq)
	}
	return nil
}
