package cpuops_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/op"
)

// randomGraph returns a graph of random ops, its inputs, and its outputs: some gradients of a cost and
// some results of other nodes.
func randomGraph(t *testing.T,
	r *rand.Rand) (g *gorgonia.ExprGraph, inputs, outputs gorgonia.Nodes) {
	const d = 6
	g = gorgonia.NewGraph()
	must := check[*gorgonia.Node](t)
	input := func(name string, shape ...int) *gorgonia.Node {
		return gorgonia.NewTensor(g, tensor.Float64, len(shape), gorgonia.WithShape(shape...),
			gorgonia.WithName(name))
	}
	weight, matrices := input("weight", d), gorgonia.Nodes{input("a", d, d),
		input("b", d, d), input("c", d, d)}
	inputs = append(gorgonia.Nodes{weight}, matrices...)
	pick := func() *gorgonia.Node { // prefers the latest matrices
		return matrices[max(r.IntN(len(matrices)), r.IntN(len(matrices)))]
	}
	makers := []func() (*gorgonia.Node, error){
		func() (*gorgonia.Node, error) { return gorgonia.Add(pick(), pick()) },
		func() (*gorgonia.Node, error) { return gorgonia.Sub(pick(), pick()) },
		func() (*gorgonia.Node, error) { return gorgonia.HadamardProd(pick(), pick()) },
		func() (*gorgonia.Node, error) { return gorgonia.Tanh(pick()) },
		func() (*gorgonia.Node, error) {
			return gorgonia.Mul(must(gorgonia.Tanh(must(gorgonia.Sum(pick())))), pick())
		},
		func() (*gorgonia.Node, error) {
			flat := must(gorgonia.Reshape(pick(), tensor.Shape{d * d / 4, 4}))
			return gorgonia.Reshape(must(gorgonia.Add(flat, flat)), tensor.Shape{d, d})
		},
		func() (*gorgonia.Node, error) { return op.Linear(pick(), pick()) },
		func() (*gorgonia.Node, error) {
			product := must(op.Linear(must(gorgonia.Tanh(pick())), pick()))
			return gorgonia.Add(product, must(gorgonia.Sub(must(gorgonia.Tanh(pick())), pick())))
		},
		func() (*gorgonia.Node, error) { return op.RMSNorm(pick(), weight, 1e-3) },
		func() (*gorgonia.Node, error) { return op.SiLUMLP(pick(), pick(), pick(), pick()) },
	}

	for range 3 + r.IntN(25) {
		matrices = append(matrices, must(makers[r.IntN(len(makers))]()))
	}

	last := must(op.RMSNorm(matrices[len(matrices)-1], weight, 1e-3))
	grads := check[gorgonia.Nodes](t)(gorgonia.Grad(must(gorgonia.Sum(must(gorgonia.Tanh(last)))),
		weight))
	for _, n := range append(grads, matrices[3:]...) {
		if r.IntN(3) == 0 && !slices.Contains(outputs, n) {
			outputs = append(outputs, n)
		}
	}

	return g, inputs, append(outputs, last)
}

// computeByNode computes a node, and recursively its operands, from copies.
func computeByNode(t *testing.T, n *gorgonia.Node, known map[*gorgonia.Node]gorgonia.Value) gorgonia.Value {
	if known[n] == nil && len(graph.Children(n)) == 0 {
		known[n] = n.Value()
	}

	if known[n] == nil {
		var in []gorgonia.Value
		for _, child := range graph.Children(n) {
			in = append(in, check[gorgonia.Value](t)(gorgonia.CloneValue(computeByNode(t, child, known))))
		}
		known[n] = check[gorgonia.Value](t)(n.Op().Do(in...))
	}

	return known[n]
}

// TestRandomGraphs compares random graphs, with gradients and views, with a computation node by node.
func TestRandomGraphs(t *testing.T) {
	r := random(t)
	for range 40 {
		g, inputs, outputs := randomGraph(t, r)
		m := check[*cpuops.Machine](t)(cpuops.NewMachine(g, cpuops.WithOutputs(outputs...)))
		for range 2 {
			for _, n := range inputs {
				if err := gorgonia.Let(n, normal(r, tensor.Float64, n.Shape()...)); err != nil {
					t.Fatal(err)
				}
			}
			if err := m.RunAll(); err != nil {
				t.Fatal(err)
			}
			known := map[*gorgonia.Node]gorgonia.Value{}
			for _, n := range outputs {
				got := flat(t, check[gorgonia.Value](t)(m.Value(n))).([]float64)
				want := flat(t, computeByNode(t, n, known)).([]float64)
				for i, w := range want {
					if got[i] == w || got[i] != got[i] && w != w { // ∞, or NaN in both
						continue
					}
					if !(math.Abs(got[i]-w) <= 1e-9*(1+math.Abs(w))) {
						t.Fatalf("element %d of node %d, %v, is %v, want %v", i,
							n.ID(), n.Op(), got[i], w)
					}
				}
			}
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
