package graph

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// small returns cost = Σ(x·w + x·w) and a node that no other node needs.
func small() (g *gorgonia.ExprGraph, x, w, cost, aside *gorgonia.Node) {
	g = gorgonia.NewGraph()
	x = gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(2, 3), gorgonia.WithName("x"))
	w = gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(3, 5), gorgonia.WithName("w"))
	y := gorgonia.Must(gorgonia.Mul(x, w))
	cost = gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.Add(y, y))))
	return g, x, w, cost, gorgonia.Must(gorgonia.Neg(x))
}

// TestResults checks that results consist of outputs, unneeded nodes and gradients of parameters,
// and that nodes follow their inputs.
func TestResults(t *testing.T) {
	g, x, w, cost, aside := small()
	_, err := gorgonia.Grad(cost, w)
	require.NoError(t, err)
	var a Asked
	require.NoError(t, a.AddParams(w, x))
	require.NoError(t, a.AddOutputs(cost))
	require.NoError(t, a.Within(g))
	results, gradients := a.Results(g)
	require.Equal(t, cost, results[0])
	require.Contains(t, results, aside)
	require.NotContains(t, results, w)
	require.Equal(t, gorgonia.Nodes{w.Deriv()}, gradients, "x has none")
	require.Equal(t, map[*gorgonia.Node]gorgonia.Nodes{w.Deriv(): {w}}, a.Gradients())
	order, err := Order(append(results, gradients...)...)
	require.NoError(t, err)
	for i, n := range order {
		for _, child := range Children(n) {
			require.Less(t, slices.Index(order, child), i, "an input of %v", n)
			require.Contains(t, order, child)
		}
	}

	all, err := OrderOfAll(g)
	require.NoError(t, err)
	require.ElementsMatch(t, g.AllNodes(), all)
}

// TestAskedErrors checks that errors name invalid parameters and outputs.
func TestAskedErrors(t *testing.T) {
	_, x, _, cost, _ := small()
	other := gorgonia.NewGraph()
	var a Asked
	require.ErrorContains(t, a.AddParams(x, cost), "WithParams: node 1 is not an input")
	require.ErrorContains(t, a.AddParams(nil), "WithParams: node 0 is not an input")
	require.ErrorContains(t, a.AddOutputs(cost, nil), "WithOutputs: a node is nil")
	require.Empty(t, a)
	require.NoError(t, a.AddOutputs(cost))
	require.ErrorContains(t, a.Within(other), "WithOutputs: "+Describe(cost)+" is not in the graph")
}

// TestNames checks the names and types of ops.
func TestNames(t *testing.T) {
	_, x, w, cost, aside := small()
	sum := Children(cost)[0]
	y := Children(sum)[0]
	require.Equal(t, gorgonia.Nodes{y, y}, Children(sum))
	require.Equal(t, gorgonia.Nodes{x, w}, Children(y))
	require.Equal(t, "+", Symbol(sum))
	for _, n := range []*gorgonia.Node{x, y, cost, aside} {
		require.Empty(t, Symbol(n))
		require.NoError(t, HasValue(n))
	}

	require.Equal(t, "gorgonia.linAlgBinOp", OpType(y))
	require.Equal(t, "input x (2, 3)", Describe(x))
	require.True(t, IsInput(x) && IsInput(gorgonia.NewConstant(float32(2))) && !IsInput(y))
	require.ErrorContains(t, HasValue(gorgonia.Read(y, new(gorgonia.Value))), "WithOutputs")
}

// TestLayers checks that nodes belong to the layer of the parameter that they read, or of their
// last input.
func TestLayers(t *testing.T) {
	g := gorgonia.NewGraph()
	matrix := func(name string) *gorgonia.Node {
		return gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(3, 3),
			gorgonia.WithName(name))
	}
	x, w0, w1 := matrix("x.5.x"), matrix("model.layers.0.w"), matrix("model.layers.1.w")
	first := gorgonia.Must(gorgonia.Mul(x, w0))
	second := gorgonia.Must(gorgonia.Mul(first, w1))
	both := gorgonia.Must(gorgonia.Add(first, second))
	unlabeled := gorgonia.Must(gorgonia.Neg(x))
	order, err := Order(both, unlabeled)
	require.NoError(t, err)
	l := Layers{IsParam: gorgonia.Nodes{w0, w1}.Contains}
	l.Add(order)
	for n, want := range map[*gorgonia.Node]string{first: "model.layers.0",
		second: "model.layers.1",
		both:   "model.layers.1", x: "", unlabeled: "", nil: ""} {
		require.Equal(t, want, l.Of(n))
	}

	inner := matrix("inner")
	l.Join(inner, second)
	require.Equal(t, "model.layers.1", l.Of(inner))
}
