package graft

import (
	"fmt"
	"math"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// NormOp is the op that [Norm] applies.
type NormOp struct{ opbase.Base }

// Norm computes the Euclidean norm of a tensor, such as the gradient of a parameter:
//
//	y = sqrt(Σ x²)
//
// x is float32 or float64, and y is [1]. The op has no gradient.
func Norm(x *gorgonia.Node) (*gorgonia.Node, error) {
	if err := checkFloat("Norm", x); err != nil {
		return nil, err
	}
	o := &NormOp{}
	opbase.Init(&o.Base, o, "GraftNorm", "", gorgonia.Nodes{x}, x.Dtype(), tensor.Shape{1},
		norm[float32], norm[float64])
	return gorgonia.ApplyOp(o, x)
}

func norm[T cpu.Float](_ *NormOp, y []T, in opbase.Args) error {
	var sum float64
	for _, v := range opbase.Slice[T](in, 0) {
		sum += float64(v) * float64(v)
	}
	y[0] = T(math.Sqrt(sum))
	return nil
}

// DiffWRT reports that the op is not differentiable.
func (o *NormOp) DiffWRT(int) []bool { return []bool{false} }

// SymDiff returns an error, because the op has no gradient.
func (o *NormOp) SymDiff(gorgonia.Nodes, *gorgonia.Node, *gorgonia.Node) (gorgonia.Nodes, error) {
	return nil, fmt.Errorf("%v has no gradient", o)
}

// HealthRows is the maximum number of rows that [Health] measures, starting with the first.
const HealthRows = 256

// DeadBelow is the magnitude below which [Health] counts an element as dead.
const DeadBelow = 1e-8

// Indices of the figures in the result of [Health].
const (
	Mean = iota
	Variance
	Min
	Max
	DeadRatio // fraction of the elements with |x| < DeadBelow

	Figures = iota // the number of figures
)

// HealthOp is the op that [Health] applies.
type HealthOp struct{ opbase.Base }

// Health measures the first [HealthRows] rows of activations x [rows, D] of type float32 or float64.
// The result is a vector of [Figures] elements, which are the [Mean], [Variance], [Min], [Max] and
// [DeadRatio] of x. The op has no gradient.
func Health(x *gorgonia.Node) (*gorgonia.Node, error) {
	if err := checkFloat("Health", x); err != nil {
		return nil, err
	}
	if len(x.Shape()) != 2 {
		return nil, fmt.Errorf("graft.Health: x has shape %v, want [rows, D]", x.Shape())
	}
	o := &HealthOp{}
	opbase.Init(&o.Base, o, "GraftHealth", "", gorgonia.Nodes{x}, x.Dtype(),
		tensor.Shape{Figures}, health[float32], health[float64])
	return gorgonia.ApplyOp(o, x)
}

func health[T cpu.Float](o *HealthOp, y []T, in opbase.Args) error {
	x := opbase.Slice[T](in, 0)
	s := o.InputShape(0)
	x = x[:min(s[0], HealthRows)*s[1]]
	n := float64(len(x))
	var sum, squares float64
	low, high, dead := math.Inf(1), math.Inf(-1), 0
	for _, v := range x {
		v := float64(v)
		sum += v
		low, high = min(low, v), max(high, v)
		if math.Abs(v) < DeadBelow {
			dead++
		}
	}

	mean := sum / n
	for _, v := range x {
		d := float64(v) - mean
		squares += d * d
	}

	for i, v := range []float64{mean, squares / n, low, high, float64(dead) / n} {
		y[i] = T(v)
	}

	return nil
}

// DiffWRT reports that the op is not differentiable.
func (o *HealthOp) DiffWRT(int) []bool { return []bool{false} }

// SymDiff returns an error, because the op has no gradient.
func (o *HealthOp) SymDiff(gorgonia.Nodes, *gorgonia.Node, *gorgonia.Node) (gorgonia.Nodes,
	error) {
	return nil, fmt.Errorf("%v has no gradient", o)
}

// checkFloat returns an error unless x is a node of a graph and of a float type.
func checkFloat(name string, x *gorgonia.Node) error {
	if x == nil || x.Graph() == nil || x.Dtype() != tensor.Float32 && x.Dtype() != tensor.Float64 {
		return fmt.Errorf("graft.%s: x is %v, want a node of float32 or float64", name, x)
	}
	return nil
}
