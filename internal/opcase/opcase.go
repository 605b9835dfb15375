// Package opcase is a table of ops for tests and benchmarks. An entry contains the op's test cases, each
// with a float64 reference that follows the op's formula, and the op's benchmark.
//
// The tests of every machine run the same cases, through package optest. Package opbench times the
// benchmarks, and examples/gradcheck checks the gradients. Adding an op to [All] adds it to all these
// tests and benchmarks.
package opcase

import (
	"fmt"
	"math"
	"math/rand/v2"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// All holds an entry for each op in package op and for a few of Gorgonia's own.
var All = []*Op{
	rmsNorm, layerNorm, bias, linear, linearAdd, frozenLinear, geluOp, siluMul, geluMul, siluMLP, geluMLP,
	adaptedLinear, rowNorms, scaleColumns, dropout, rope, attention, documentAttention, embedding,
	crossEntropy, linearCrossEntropy, frozenLinearCrossEntropy, linearLogProbs, preferenceLoss, newtonSchulz, kasminaLayer, matMul, add, tanh, softMax,
}

// Op is the entry of an op.
type Op struct {
	Name string
	// Cases returns test cases with fresh random inputs at several shapes, odd ones included. It is
	// nil for ops that are only timed.
	Cases func(r *rand.Rand) []Case
	Bench *Bench // nil for an op that is not timed
}

// Case is an op with inputs and, for a test, the expected result.
type Case struct {
	Config string // options and other settings, to tell the op's cases apart
	In     []Input
	Build  Build
	// Want computes the result in float64 from the inputs.
	Want func(in []Input) []float64
	// Size, unless it is nil, computes the scale of rounding errors when terms of the result may cancel:
	// the sum of the terms' absolute values.
	Size func(in []Input) []float64
	// Loss is the op's amplification of rounding errors, relative to most ops; 0 means 1.
	Loss float64
}

// Build adds the op to the graph of its inputs.
type Build func(in gorgonia.Nodes) (*gorgonia.Node, error)

// Input is an operand: numbers in Values, or integers in IDs.
type Input struct {
	Shape  []int
	Values []float64
	IDs    []int
	Frozen bool // the op has no gradient for it
}

// frozen returns the input with its gradient disabled.
func (in Input) frozen() Input {
	in.Frozen = true
	return in
}

// String describes the configuration and the shapes of the inputs.
func (c Case) String() string {
	s := c.Config
	for _, in := range c.In {
		if s != "" {
			s += " "
		}
		s += fmt.Sprint(in.Shape)
	}
	return s
}

// Nodes adds the inputs to a new graph, as tensors of type dt and of int. It returns the nodes of all
// inputs, and the subset of nodes that have gradients.
func (c Case) Nodes(dt tensor.Dtype) (in, wrt gorgonia.Nodes) {
	g := gorgonia.NewGraph()
	for i, a := range c.In {
		name := gorgonia.WithName(fmt.Sprintf("input %d", i))
		if a.IDs != nil {
			ids := tensor.New(tensor.WithShape(a.Shape...), tensor.WithBacking(a.IDs))
			in = append(in, gorgonia.NodeFromAny(g, ids, name))
			continue
		}

		n := gorgonia.NodeFromAny(g, Dense(dt, a.Values, a.Shape...), name)
		in = append(in, n)
		if !a.Frozen {
			wrt = append(wrt, n)
		}
	}

	return in, wrt
}

// Sizes returns the result of Size for the absolute values of the inputs, or nil without a Size.
func (c Case) Sizes() []float64 {
	if c.Size == nil {
		return nil
	}
	in := make([]Input, len(c.In))
	for i, a := range c.In {
		in[i] = Input{Shape: a.Shape, Values: mapped(a.Values, math.Abs), IDs: a.IDs}
	}
	return c.Size(in)
}

// Bench is the benchmark of an op, at a shape that consists of several numbers.
type Bench struct {
	Shape    string                  // names of the dimensions, such as "rows, in, out"
	Small    []int                   // a shape for tests
	Usual    []int                   // the shape in a small model
	Check    func(shape []int) error // rejects shapes that the op does not support; nil for none
	Elements func(shape []int) float64
	FLOPs    func(shape []int) float64
	// Case returns the op with random inputs. Its Want may be nil.
	Case func(r *rand.Rand, shape []int) (Case, error)
	// Stock computes the same with Gorgonia's ops; nil if Gorgonia has no such ops.
	Stock func(in gorgonia.Nodes, shape []int) (*gorgonia.Node, error)
	// Room, unless it is nil, returns the number of intermediate values that Stock keeps in memory,
	// and a description.
	Room func(shape []int) (what string, elements float64)
}

// Dense returns a new tensor of type float32 or float64 with copies of the numbers.
func Dense(dt tensor.Dtype, x []float64, shape ...int) *tensor.Dense {
	if dt == tensor.Float64 {
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(append([]float64{}, x...)))
	}

	y := make([]float32, len(x))
	for i, v := range x {
		y[i] = float32(v)
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(y))
}

// Normal returns an input of normal numbers, rounded to float32 so that both types start from the
// same numbers.
func Normal(r *rand.Rand, shape ...int) Input { return scaled(r, 1, shape...) }

// weight returns a matrix [out, in] of normal numbers, scaled so that products with rows of normal
// numbers have a deviation of 1.
func weight(r *rand.Rand, out, in int) Input {
	return scaled(r, 1/math.Sqrt(float64(in)), out, in)
}

func scaled(r *rand.Rand, deviation float64, shape ...int) Input {
	x := make([]float64, tensor.Shape(shape).TotalSize())
	for i := range x {
		x[i] = float64(float32(deviation * r.NormFloat64()))
	}
	return Input{Shape: shape, Values: x}
}

// ids returns an input of n random integers, at least low and below high.
func ids(r *rand.Rand, n, low, high int) Input {
	x := make([]int, n)
	for i := range x {
		x[i] = low + r.IntN(high-low)
	}
	return Input{Shape: []int{n}, IDs: x}
}

func mapped(x []float64, f func(float64) float64) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = f(v)
	}
	return y
}

// number returns a constant of the type of a node.
func number(like *gorgonia.Node, v float64) *gorgonia.Node {
	if like.Dtype() == tensor.Float64 {
		return gorgonia.NewConstant(v)
	}
	return gorgonia.NewConstant(float32(v))
}

// chain builds a graph node by node, until the first error.
type chain struct{ err error }

// do takes the node and the error of a function that adds a node.
func (c *chain) do(build func() (*gorgonia.Node, error)) *gorgonia.Node {
	if c.err != nil {
		return nil
	}
	var n *gorgonia.Node
	n, c.err = build()
	return n
}

// product returns a function that multiplies a factor by the numbers of a shape at some indices. It
// counts elements, or operations.
func product(factor float64, at ...int) func([]int) float64 {
	return func(shape []int) float64 {
		n := factor
		for _, i := range at {
			n *= float64(shape[i])
		}
		return n
	}
}

// sum returns a function that adds up the results of several functions.
func sum(all ...func([]int) float64) func([]int) float64 {
	return func(shape []int) (n float64) {
		for _, f := range all {
			n += f(shape)
		}
		return n
	}
}

// noFLOPs is the FLOPs function of ops without matrix products.
func noFLOPs([]int) float64 { return 0 }

// divides returns a check that one number of a shape is a multiple of another.
func divides(what string, of, by int) func([]int) error {
	return func(shape []int) error {
		if shape[of]%shape[by] != 0 {
			return fmt.Errorf("want %s", what)
		}
		return nil
	}
}

// matrices lists the shapes, as rows and features, that most ops are tested with.
var matrices = [][2]int{{1, 1}, {3, 7}, {5, 64}, {70, 33}}
