package cpuops_test

import (
	"errors"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/cpu/cputest"
	"github.com/kasmina-go/kasmina/op"
)

// weighed returns a graph that uses every op that can read compact weights. Its matrices have the keys of
// values as their names. If bound is set, they also have the values.
func weighed(t *testing.T, bound bool, values map[string]*tensor.Dense) (g *gorgonia.ExprGraph, outputs gorgonia.Nodes) {
	t.Helper()
	must := check[*gorgonia.Node](t)
	g = gorgonia.NewGraph()
	w := func(name string) *gorgonia.Node {
		if bound {
			return gorgonia.NodeFromAny(g, values[name], gorgonia.WithName(name))
		}
		return gorgonia.NewTensor(g, tensor.Float32, 2, gorgonia.WithShape(values[name].Shape()...),
			gorgonia.WithName(name))
	}
	ids := gorgonia.NodeFromAny(g, tensor.New(tensor.WithBacking([]int{3, 0, 39, 7, 3})), gorgonia.WithName("ids"))
	table := w("table")
	x := must(op.Embedding(ids, table))
	y := must(gorgonia.Add(x, must(op.Linear(x, w("square"))))) // one step
	z := must(op.SiLUMLP(y, w("gate"), w("up"), w("down")))
	z = must(op.GELUMLP(z, w("gate2"), w("up2"), w("down2")))
	// Four linear layers read y, and one call can compute three of these layers.
	q, k, v, o := must(op.Linear(y, w("q"))), must(op.Linear(y, w("k"))), must(op.Linear(y, w("v"))),
		must(op.Linear(y, w("o")))
	z = must(gorgonia.Add(z, must(gorgonia.Add(must(gorgonia.HadamardProd(k, v)), must(gorgonia.Sub(q, o))))))
	norms := must(op.RowNorms(w("adapted"), w("a"), w("b"), 0.5))
	return g, gorgonia.Nodes{x, y, z, must(op.LinearCrossEntropy(z, table, ids)), norms}
}

func weighedValues(t *testing.T) map[string]*tensor.Dense {
	const v, d, f, r = 40, 36, 70, 3
	values := map[string]*tensor.Dense{}
	random := random(t)
	shapes := map[string][]int{"table": {v, d}, "square": {d, d}, "gate": {f, d}, "up": {f, d}, "down": {d, f}, "q": {d, d},
		"k": {d, d}, "v": {d, d}, "o": {d, d}, "gate2": {f, d}, "up2": {f, d}, "down2": {d, f}, "adapted": {f, d}, "a": {r, d}, "b": {f, r}}
	for _, name := range slices.Sorted(maps.Keys(shapes)) {
		shape := shapes[name]
		values[name] = normal(random, tensor.Float32, shape...)
		x := values[name].Float32s()
		for i := range x { // few digits, which all types represent
			x[i] = float32(math.Round(float64(x[i]) * 8))
		}
		for row := range slices.Chunk(x, shape[1]) {
			for block := range slices.Chunk(row, 32) {
				block[0] = 127 // the scale of a block is 1
			}
			for i := range row {
				row[i] /= 64
			}
		}
	}
	return values
}

// TestWeights checks that graphs with compact weights compute the same results as graphs with float32
// values. All types represent the test's weights exactly.
func TestWeights(t *testing.T) {
	values := weighedValues(t)
	g, nodes := weighed(t, true, values)
	m := check[*cpuops.Machine](t)(cpuops.NewMachine(g, cpuops.WithOutputs(nodes...)))
	require.NoError(t, m.RunAll())
	var want []any
	for _, n := range nodes {
		want = append(want, flat(t, check[gorgonia.Value](t)(m.Value(n))))
	}

	for _, typ := range []cpuops.WeightType{cpuops.Float32, cpuops.BFloat16, cpuops.Q8} {
		var w cpuops.Weights
		for name, x := range values {
			require.NoError(t, w.Add(typ, name, x.Shape()[0], x.Shape()[1], func(put func([]float32) error) error {
				for part := range slices.Chunk(x.Float32s(), 101) {
					if err := put(part); err != nil {
						return err
					}
				}
				return nil
			}))
		}

		g, nodes := weighed(t, false, values)
		for _, n := range g.AllNodes() {
			if n.Op() == nil && n.Name() != "ids" {
				require.True(t, cpuops.CanBeCompact(g, n), n.Name())
			}
		}
		m := check[*cpuops.Machine](t)(cpuops.NewMachine(g, cpuops.WithOutputs(nodes...), cpuops.WithWeights(&w)))
		for range 2 {
			require.NoError(t, m.RunAll())
			for i, n := range nodes {
				got := flat(t, check[gorgonia.Value](t)(m.Value(n)))
				off := cputest.Relative(wide(got), wide(want[i]))
				require.Less(t, off, 1e-5, "output %d with weights of type %v", i, typ)
			}
			m.Release()
		}

		named := 0
		for _, c := range m.Choices() {
			if strings.HasSuffix(c.Variant, " "+typ.String()) {
				named++
			}
		}
		require.Equal(t, 6, named, "%v", m.Choices()) // and the fused one
		require.NoError(t, m.Close())
	}
}

func wide(x any) []float64 { return cputest.Widen(x.([]float32)) }

// TestWeightsErrors checks the errors for invalid matrices, and for graphs with ops that cannot read
// compact weights.
func TestWeightsErrors(t *testing.T) {
	var w cpuops.Weights
	all := func(x ...float32) func(func([]float32) error) error {
		return func(put func([]float32) error) error { return put(x) }
	}
	broken := errors.New("broken")
	nan := float32(math.NaN())
	for _, c := range []struct {
		err  error
		want string
	}{
		{w.Add(9, "w", 1, 2, all(1, 2)), "want Float32, BFloat16, Q8, Float8 or NF4"},
		{w.Add(cpuops.Q8, "w", 0, 2, all()), "is empty"},
		{w.Add(cpuops.Q8, "w", 1, 2, all(1)), "w: it has 1 elements, want 1×2"},
		{w.Add(cpuops.Q8, "w", 1, 2, all(1, 2, 3)), "elements, want 1×2"},
		{w.Add(cpuops.BFloat16, "w", 2, 2, all(1, 2, 3, nan)), "rows 0 to 1: a weight is not finite"},
		{w.Add(cpuops.Q8, "w", 1, 2, func(func([]float32) error) error { return broken }), "broken"},
	} {
		require.ErrorContains(t, c.err, c.want)
	}
	require.Zero(t, w.Bytes())
	require.NoError(t, w.Add(cpuops.Q8, "w", 2, 2, all(1, 2, 3, 4)))
	require.Equal(t, 32*34, w.Bytes())

	require.ErrorContains(t, w.Alias("v", "u"), `no matrix "u"`)
	require.NoError(t, w.Alias("v", "w"))
	require.ErrorContains(t, w.Alias("v", "w"), `the name "v" already`)
	require.Same(t, w.Compact("w"), w.Compact("v"))

	must := check[*gorgonia.Node](t)
	g := gorgonia.NewGraph()
	n := gorgonia.NewTensor(g, tensor.Float32, 2, gorgonia.WithShape(2, 2), gorgonia.WithName("w"))
	must(gorgonia.Tanh(n))
	require.False(t, cpuops.CanBeCompact(g, n))
	_, err := cpuops.NewMachine(g, cpuops.WithWeights(&w))
	require.ErrorContains(t, err, "it reads input w (2, 2), which only Linear")

	g = gorgonia.NewGraph()
	n = gorgonia.NewTensor(g, tensor.Float32, 2, gorgonia.WithShape(3, 2), gorgonia.WithName("w"))
	must(op.Linear(n, n))
	_, err = cpuops.NewMachine(g, cpuops.WithWeights(&w))
	require.ErrorContains(t, err, "of shape (2, 2), and the input is a float32 of shape (3, 2)")

	var typ cpuops.WeightType
	require.NoError(t, typ.UnmarshalText([]byte("Q8_0")))
	require.Equal(t, cpuops.Q8, typ)
	require.ErrorContains(t, typ.UnmarshalText([]byte("q4")), "want f32, bf16, q8_0, f8 or nf4")
}

// TestRead checks that Read returns the elements of an output, and an error for any other node.
func TestRead(t *testing.T) {
	g, w, y := residual(t)
	m := check[*cpuops.Machine](t)(cpuops.NewMachine(g, cpuops.WithOutputs(y)))
	_, err := m.Read(y)
	require.ErrorContains(t, err, "has not run")
	require.NoError(t, m.RunAll())
	got := check[any](t)(m.Read(y))
	require.Equal(t, flat(t, check[gorgonia.Value](t)(m.Value(y))), got)
	for _, n := range []*gorgonia.Node{nil, w} {
		_, err = m.Read(n)
		require.ErrorContains(t, err, "not an output")
	}
	require.NoError(t, m.Close())
	_, err = m.Read(y)
	require.ErrorContains(t, err, "closed")
}
