package opcase

import (
	"math"
	"math/rand/v2"

	"gorgonia.org/gorgonia"
)

// Ops of Gorgonia for benchmarks. Every machine computes the same graph.

var matMul = stock("MatMul", &Bench{
	Shape: "m, k, n", Small: []int{32, 48, 64}, Usual: []int{512, 512, 512},
	Elements: sum(product(1, 0, 1), product(1, 1, 2), product(1, 0, 2)),
	FLOPs:    product(2, 0, 1, 2),
}, func(r *rand.Rand, s []int) []Input {
	deviation := 1 / math.Sqrt(float64(s[1]))
	return []Input{scaled(r, deviation, s[0], s[1]), Normal(r, s[1], s[2])}
}, func(in gorgonia.Nodes) (*gorgonia.Node, error) { return gorgonia.Mul(in[0], in[1]) })

var add = stock("Add", rowwise(3), func(r *rand.Rand, s []int) []Input {
	return []Input{Normal(r, s...), Normal(r, s...)}
}, func(in gorgonia.Nodes) (*gorgonia.Node, error) { return gorgonia.Add(in[0], in[1]) })

var tanh = stock("Tanh", rowwise(2), func(r *rand.Rand, s []int) []Input {
	return []Input{Normal(r, s...)}
}, func(in gorgonia.Nodes) (*gorgonia.Node, error) { return gorgonia.Tanh(in[0]) })

var softMax = stock("SoftMax", rowwise(2), func(r *rand.Rand, s []int) []Input {
	return []Input{Normal(r, s...)}
}, func(in gorgonia.Nodes) (*gorgonia.Node, error) { return gorgonia.SoftMax(in[0]) })

// rowwise returns the benchmark of an op that reads and writes the given number of matrices and has no
// matrix products.
func rowwise(matrices float64) *Bench {
	return &Bench{Shape: "rows, features", Small: []int{64, 48}, Usual: []int{1024, 1024},
		Elements: product(matrices, 0, 1), FLOPs: noFLOPs}
}

func stock(name string, b *Bench, inputs func(r *rand.Rand, shape []int) []Input, build Build) *Op {
	b.Case = func(r *rand.Rand, shape []int) (Case, error) {
		return Case{In: inputs(r, shape), Build: build}, nil
	}
	b.Stock = func(in gorgonia.Nodes, _ []int) (*gorgonia.Node, error) { return build(in) }
	return &Op{Name: name, Bench: b}
}
