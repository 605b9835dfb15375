// Package optest runs the cases of package opcase on a machine: one suite for Gorgonia's tape
// machine, the CPU machine, the GPU machine and the fake GPU.
package optest

import (
	"math"
	"math/rand/v2"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/opcase"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// Machine computes a graph.
type Machine interface {
	RunAll() error
	Value(*gorgonia.Node) (gorgonia.Value, error)
	Close() error
}

// Setup describes the machine under test and its precision.
type Setup struct {
	Dtype tensor.Dtype
	// Open returns a machine for a graph. The suite reads the values of the outputs. The graph has
	// gradients with respect to the parameters.
	Open func(g *gorgonia.ExprGraph, params, outputs gorgonia.Nodes) (Machine, error)
	// Forward and Backward bound the relative distances of results from the reference, and of
	// gradients from those in float64.
	Forward, Backward float64
	// Prepare, unless it is nil, changes each case before it runs.
	Prepare func(opcase.Case) opcase.Case
	// Share, if it is at least 2, runs a random 1/Share of the cases.
	Share int
}

// Tape returns Gorgonia's tape machine as a Machine.
func Tape(g *gorgonia.ExprGraph, _, _ gorgonia.Nodes) (Machine, error) {
	return tape{gorgonia.NewTapeMachine(g)}, nil
}

type tape struct{ gorgonia.VM }

func (tape) Value(n *gorgonia.Node) (gorgonia.Value, error) { return n.Value(), nil }

// Run runs every case of every op as a subtest. It compares the result with the case's reference, and the
// gradients with the float64 gradients of Gorgonia's tape machine. The tests of package op compare the
// latter with central differences.
func Run(t *testing.T, s Setup) {
	r := randtest.New(t)
	for _, o := range opcase.All {
		if o.Cases == nil {
			continue
		}
		t.Run(o.Name, func(t *testing.T) {
			for _, c := range o.Cases(r) {
				if s.Share > 1 && r.IntN(s.Share) > 0 {
					continue
				}
				t.Run(c.String(), func(t *testing.T) { s.run(t, c, r) })
			}
		})
	}
}

// run checks one case.
func (s Setup) run(t *testing.T, c opcase.Case, r *rand.Rand) {
	if s.Prepare != nil {
		c = s.Prepare(c)
	}
	want := c.Want(c.In)
	weights := opcase.Normal(r, len(want)).Values
	exact := Setup{Dtype: tensor.Float64, Open: Tape}
	wantGradients, err := exact.compute(c, weights)
	if err != nil {
		t.Fatal(err)
	}

	got, err := s.compute(c, weights)
	if err != nil {
		t.Fatal(err)
	}

	loss := max(c.Loss, 1)

	relative := Distance(got[0], want)
	if sizes := c.Sizes(); sizes != nil && relative > 0 {
		relative *= norm(want) / norm(sizes)
	}

	if !(relative <= loss*s.Forward) {
		t.Errorf("the result differs from the reference by %.2g, want at most %g", relative,
			loss*s.Forward)
	}

	var largest float64
	for _, g := range wantGradients[1:] {
		largest = max(largest, norm(g))
	}

	for i, g := range wantGradients[1:] {
		if len(g) < 16 {
			continue // a single gradient may be the small difference of large terms
		}

		// With a window of one key, the gradients of queries and keys are 0. Compare their rounding
		// errors with the largest gradient.
		relative := Distance(got[1+i], g)
		if norm(g) < 1e-12*largest {
			relative = norm(got[1+i]) / largest
		}
		if !(relative <= loss*s.Backward) {
			t.Errorf("gradient %d differs from the float64 gradient by %.2g, want at most %g", i, relative,
				loss*s.Backward)
		}
	}
}

// compute returns the result of a case and the gradients of Σ weights ⊙ result + Σ x², where x is the
// first differentiable input. The second term makes the gradients of two uses accumulate, and
// surrounds the op with stock ops.
func (s Setup) compute(c opcase.Case, weights []float64) (values [][]float64, err error) {
	in, wrt := c.Nodes(s.Dtype)
	y, err := c.Build(in)
	if err != nil {
		return nil, err
	}

	cost, err := Cost(y, wrt[0], weights)
	if err != nil {
		return nil, err
	}

	gradients, err := gorgonia.Grad(cost, wrt...)
	if err != nil {
		return nil, err
	}

	outputs := append(gorgonia.Nodes{y}, gradients...)
	m, err := s.Open(cost.Graph(), wrt, outputs)
	if err != nil {
		return nil, err
	}

	defer func() {
		if closed := m.Close(); err == nil {
			err = closed
		}
	}()

	if err := m.RunAll(); err != nil {
		return nil, err
	}

	for _, n := range outputs {
		v, err := m.Value(n)
		if err != nil {
			return nil, err
		}
		values = append(values, Floats(v))
	}

	return values, nil
}

// Cost returns Σ weights ⊙ y + Σ x² for a matrix y, and y² + Σ x² for a scalar.
func Cost(y, x *gorgonia.Node, weights []float64) (*gorgonia.Node, error) {
	cost, err := weighted(y, weights)
	if err != nil {
		return nil, err
	}

	squares, err := gorgonia.Square(x)
	if err != nil {
		return nil, err
	}

	if squares, err = gorgonia.Sum(squares); err != nil {
		return nil, err
	}

	return gorgonia.Add(cost, squares)
}

func weighted(y *gorgonia.Node, weights []float64) (*gorgonia.Node, error) {
	if y.IsScalar() {
		return gorgonia.Square(y)
	}
	w := gorgonia.NodeFromAny(y.Graph(), opcase.Dense(y.Dtype(), weights, y.Shape()...),
		gorgonia.WithName("weights of the cost"))
	product, err := gorgonia.HadamardProd(y, w)
	if err != nil {
		return nil, err
	}
	return gorgonia.Sum(product)
}

// Floats returns a copy of the elements of a value, as float64.
func Floats(v gorgonia.Value) []float64 {
	flat, err := opbase.Flat(v)
	if err != nil {
		return nil
	}

	switch x := flat.(type) {
	case []float64:
		return append([]float64{}, x...)
	case []float32:
		y := make([]float64, len(x))
		for i, v := range x {
			y[i] = float64(v)
		}
		return y
	}

	return nil
}

// Distance returns ‖a − b‖/‖b‖, or infinity for a NaN or another length.
func Distance(a, b []float64) float64 {
	if len(a) != len(b) {
		return math.Inf(1)
	}

	var difference, size float64
	for i, v := range b {
		difference += (a[i] - v) * (a[i] - v)
		size += v * v
	}

	switch {
	case difference == 0:
		return 0
	case math.IsNaN(difference):
		return math.Inf(1)
	}

	return math.Sqrt(difference / size)
}

// norm returns ‖x‖.
func norm(x []float64) (n float64) {
	for _, v := range x {
		n = math.Hypot(n, v)
	}
	return n
}
