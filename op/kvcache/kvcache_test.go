package kvcache

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/op"
)

// TestAttention checks that attention over tokens one after another equals op.Attention over all tokens
// at once, with and without filling in the first positions.
func TestAttention(t *testing.T) {
	const tokens, heads, kvHeads, dim = 40, 4, 2, 6
	rope := op.RoPEConfig{Seq: tokens, HeadDim: dim, Base: 100}
	for name, c := range map[string]Config{
		"plain": {}, "turned": {RoPE: &rope}, "window": {RoPE: &rope, Window: 5, Scale: 0.7},
	} {
		for _, filled := range []int{0, 7} {
			t.Run(name, func(t *testing.T) {
				random := rand.New(rand.NewPCG(1, 2))
				normal := func(columns int) *tensor.Dense {
					x := make([]float64, tokens*columns)
					for i := range x {
						x[i] = random.NormFloat64()
					}
					return tensor.New(tensor.WithShape(tokens, columns), tensor.WithBacking(x))
				}
				q, k, v := normal(heads*dim), normal(kvHeads*dim), normal(kvHeads*dim)
				c.Heads, c.KVHeads, c.HeadDim, c.Capacity = heads, kvHeads, dim, tokens
				want, keys := whole(t, q, k, v, c)
				g := gorgonia.NewGraph()
				row := func(name string, columns int) *gorgonia.Node {
					return gorgonia.NewTensor(g, tensor.Float64, 2, gorgonia.WithShape(1, columns),
						gorgonia.WithName(name))
				}
				nodes := gorgonia.Nodes{row("q", heads*dim), row("k", kvHeads*dim),
					row("v", kvHeads*dim),
					gorgonia.NewTensor(g, tensor.Int, 1, gorgonia.WithShape(1))}
				y, err := Attention(nodes[0], nodes[1], nodes[2], nodes[3], c)
				require.NoError(t, err)
				o := y.Op().(*AttentionOp)
				if filled > 0 {
					o.Fill(keys[:filled*kvHeads*dim:filled*kvHeads*dim], v.Float64s()[:filled*kvHeads*dim])
				}
				machine := gorgonia.NewTapeMachine(g)
				defer machine.Close()
				for p := filled; p < tokens; p++ {
					for i, x := range []*tensor.Dense{q, k, v} {
						n := x.Shape()[1]
						require.NoError(t, gorgonia.Let(nodes[i], tensor.New(tensor.WithShape(1, n),
							tensor.WithBacking(append([]float64(nil), x.Float64s()[p*n:][:n]...)))))
					}
					require.NoError(t, gorgonia.Let(nodes[3], tensor.New(tensor.WithShape(1),
						tensor.WithBacking([]int{p}))))
					require.NoError(t, machine.RunAll())
					require.InDeltaSlice(t, want[p*heads*dim:][:heads*dim], y.Value().Data(), 1e-12)
					machine.Reset()
				}
			})
		}
	}
}

// whole computes attention over all tokens, and their keys as the cache stores them.
func whole(t *testing.T, q, k, v *tensor.Dense, c Config) (y, keys []float64) {
	g := gorgonia.NewGraph()
	input := func(name string, x *tensor.Dense) *gorgonia.Node {
		return gorgonia.NodeFromAny(g, x.Clone().(*tensor.Dense), gorgonia.WithName(name))
	}
	turned := func(n *gorgonia.Node, heads int) *gorgonia.Node {
		if c.RoPE == nil {
			return n
		}
		r := *c.RoPE
		r.Heads = heads
		n, err := op.RoPE(n, r)
		require.NoError(t, err)
		return n
	}

	key := turned(input("k", k), c.KVHeads)
	out, err := op.Attention(turned(input("q", q), c.Heads), key, input("v", v), op.AttentionConfig{
		Seq: c.Capacity, Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim, Causal: true,
		Scale: c.Scale, Window: c.Window})
	require.NoError(t, err)
	var values [2]gorgonia.Value
	gorgonia.Read(out, &values[0])
	gorgonia.Read(key, &values[1])
	machine := gorgonia.NewTapeMachine(g)
	defer machine.Close()
	require.NoError(t, machine.RunAll())
	return values[0].Data().([]float64), values[1].Data().([]float64)
}

// TestRefusals checks the errors for inputs that aren't a single token, and for positions outside the
// capacity.
func TestRefusals(t *testing.T) {
	g := gorgonia.NewGraph()
	row := func(rows, columns int) *gorgonia.Node {
		return gorgonia.NewTensor(g, tensor.Float32, 2, gorgonia.WithShape(rows, columns),
			gorgonia.WithInit(gorgonia.Zeroes()))
	}
	position := func(p ...int) *gorgonia.Node {
		return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(len(p)), tensor.WithBacking(p)),
			gorgonia.WithName(fmt.Sprint(p)))
	}
	c := Config{Heads: 2, KVHeads: 1, HeadDim: 4, Capacity: 3}
	q, k := row(1, 8), row(1, 4)
	for want, call := range map[string]func() (*gorgonia.Node, error){
		"an input is nil": func() (*gorgonia.Node, error) { return Attention(q, nil, k, position(0), c) },
		"want floats of one type": func() (*gorgonia.Node, error) {
			return Attention(row(2, 8), k, k, position(0), c)
		},
		"want an int of shape": func() (*gorgonia.Node, error) {
			return Attention(q, k, k, position(0, 1), c)
		},
		"do not fit": func() (*gorgonia.Node, error) {
			c := c
			c.KVHeads = 3
			return Attention(q, k, k, position(0), c)
		},
	} {
		_, err := call()
		require.ErrorContains(t, err, want)
	}

	y, err := Attention(q, k, k, position(3), c)
	require.NoError(t, err)
	_, err = y.Op().(*AttentionOp).SymDiff(nil, nil, nil)
	require.ErrorContains(t, err, "no gradient")
	machine := gorgonia.NewTapeMachine(g)
	defer machine.Close()
	require.ErrorContains(t, machine.RunAll(), "position is 3, want 0 to 2")
}
