package block

import (
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestBuild checks that a block preserves the shape of its input, and that each input with a wrong shape
// is an error.
func TestBuild(t *testing.T) {
	const seq, dim, kv, ff = 4, 6, 2, 5
	b := Builder{Shape: Shape{Dim: dim, FF: ff, Heads: 3, KVHeads: 1, HeadDim: 2, Eps: 1e-5},
		Seq: seq}
	a := Attention{Base: 10000}
	inputs := func(g *gorgonia.ExprGraph) gorgonia.Nodes {
		var in gorgonia.Nodes
		for _, shape := range [][]int{{2 * seq, dim}, {dim}, {dim, dim}, {kv, dim}, {kv, dim},
			{dim, dim}, {dim}, {ff, dim}, {ff, dim}, {dim, ff}} {
			in = append(in, gorgonia.NewTensor(g, tensor.Float32, len(shape),
				gorgonia.WithShape(shape...)))
		}
		return in
	}

	in := inputs(gorgonia.NewGraph())
	require.Len(t, in, 1+len(b.Params()))
	y, err := b.Build(in, a, Tuning{})
	require.NoError(t, err)
	require.Equal(t, tensor.Shape{2 * seq, dim}, y.Shape())
	require.Len(t, b.Keys, 1)
	require.Equal(t, tensor.Shape{2 * seq, kv}, b.Keys[0].Shape())

	for i, name := range b.Params() {
		for _, side := range []int{0, len(in[1+i].Shape()) - 1} {
			g := gorgonia.NewGraph()
			in := inputs(g)
			wrong := in[1+i].Shape().Clone()
			wrong[side]++
			in[1+i] = gorgonia.NewTensor(g, tensor.Float32, len(wrong),
				gorgonia.WithShape(wrong...))
			_, err := b.Build(in, a, Tuning{})
			require.Error(t, err, "%s of shape %v", name, wrong)
		}
	}

	heads := b
	heads.HeadDim = 3
	_, err = heads.Build(inputs(gorgonia.NewGraph()), a, Tuning{})
	require.Error(t, err)
}
