package lower_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/choose"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/lower"
	"github.com/kasmina-go/kasmina/cudaops/internal/passtest"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/variantrule"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

var must = gorgonia.Must

// TestLower compares the calls of small graphs with the expected ones.
func TestLower(t *testing.T) {
	type build func(g *gorgonia.ExprGraph) *gorgonia.Node
	node := passtest.Node
	for name, c := range map[string]struct {
		build build
		want  []string
	}{
		"an elementwise op": {
			func(g *gorgonia.ExprGraph) *gorgonia.Node { return must(gorgonia.Tanh(node(g, "x", 3, 4))) },
			[]string{"tanh elementwise.Unary x w:float32[3,4]"},
		},
		"a number known beforehand becomes a parameter": {
			func(g *gorgonia.ExprGraph) *gorgonia.Node {
				return must(gorgonia.Mul(node(g, "x", 3, 4), gorgonia.NewConstant(float32(2))))
			},
			[]string{"⊙ false elementwise.Unary x w:float32[3,4]"},
		},
		"a product takes in the sum of its result": {
			func(g *gorgonia.ExprGraph) *gorgonia.Node {
				y := must(op.Linear(node(g, "x", 6, 4), node(g, "weight", 5, 4)))
				return must(gorgonia.Add(node(g, "d", 6, 5), y))
			},
			[]string{"Linear program.Matmul w:float32[6,5] x weight d"},
		},
		"a sum and a norm of it": {
			func(g *gorgonia.ExprGraph) *gorgonia.Node {
				sum := must(gorgonia.Add(node(g, "a", 3, 8), node(g, "b", 3, 8)))
				return must(gorgonia.Add(sum, must(op.RMSNorm(sum, node(g, "weight", 8), 1e-5))))
			},
			[]string{"RMSNorm norm.RMSNorm w:float32[3,8] w:float32[3] a weight b w:float32[3,8]",
				"+ false elementwise.Binary float32[3,8] float32[3,8] w:float32[3,8]"},
		},
		"a product reads the matrix of a transposition": {
			func(g *gorgonia.ExprGraph) *gorgonia.Node {
				return must(gorgonia.Mul(node(g, "x", 3, 4), must(gorgonia.Transpose(node(g, "y", 5, 4)))))
			},
			[]string{"A × B program.Matmul w:float32[3,5] x y"},
		},
		"a shape costs nothing": {
			func(g *gorgonia.ExprGraph) *gorgonia.Node {
				return must(gorgonia.Neg(must(gorgonia.Reshape(node(g, "x", 3, 4), []int{12}))))
			},
			[]string{"neg elementwise.Unary x w:float32[12]"},
		},
		"a perceptron": {
			func(g *gorgonia.ExprGraph) *gorgonia.Node {
				return must(op.SiLUMLP(node(g, "x", 3, 4), node(g, "gate", 6, 4), node(g, "up", 6, 4),
					node(g, "down", 4, 6)))
			},
			[]string{"SiLUMLP elementwise.Cast w:float32[6,4] gate",
				"SiLUMLP elementwise.Cast w:float32[6,4] up",
				"SiLUMLP program.Matmul w:float32[3,12] x float32[12,4]",
				"SiLUMLP silu.Mul w:float32[3,6] float32[3,12]",
				"SiLUMLP program.Matmul w:float32[3,4] float32[3,6] down"},
		},
		"queries, keys and values are one product, and turned together": {
			func(g *gorgonia.ExprGraph) *gorgonia.Node {
				x, turn := node(g, "x", 4, 8), op.RoPEConfig{Seq: 4, Heads: 2, HeadDim: 4, Base: 1e4}
				q := must(op.RoPE(must(op.Linear(x, node(g, "q", 8, 8))), turn))
				k := must(op.RoPE(must(op.Linear(x, node(g, "k", 8, 8))), turn))
				v := must(op.Linear(x, node(g, "v", 8, 8)))
				return must(op.Attention(q, k, v, op.AttentionConfig{Seq: 4, Heads: 2, HeadDim: 4,
					Causal: true}))
			},
			[]string{"Linear elementwise.Cast w:float32[8,8] q",
				"Linear elementwise.Cast w:float32[8,8] k",
				"Linear elementwise.Cast w:float32[8,8] v",
				"Linear program.Matmul w:float32[4,24] x float32[24,8]",
				"RoPE rope.Rotate float32[4,16] u:float32[4,16] float32[8] float32[8]",
				"Attention attention.Forward w:float32[4,8] float32[4,8] float32[4,8] float32[4,8] " +
					"w:float32[1,2,4,2]"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := gorgonia.NewGraph()
			c.build(g)
			require.Equal(t, c.want, passtest.Calls(passtest.Lower(t, g, lower.Options{})))
		})
	}
}

// TestLowerGradients lowers the backward pass of a linear layer. Accumulated gradients must be added
// last, so that a run that fails earlier adds nothing.
func TestLowerGradients(t *testing.T) {
	for _, accumulate := range []bool{false, true} {
		g := gorgonia.NewGraph()
		x, w := passtest.Node(g, "x", 3, 4), passtest.Node(g, "weight", 5, 4)
		loss := must(op.CrossEntropy(must(op.Linear(x, w)), passtest.Ints(g, "targets", 1, 0, 4)))
		_, err := gorgonia.Grad(loss, w)
		require.NoError(t, err)

		p := passtest.Lower(t, g, lower.Options{Asked: graph.Asked{Params: gorgonia.Nodes{w}},
			Accumulate: accumulate})
		calls := passtest.Calls(p)
		gradient := "LinearGrad program.Matmul w:float32[5,4] float32[3,5] x"
		require.Contains(t, calls, gradient)
		if !accumulate {
			require.Nil(t, p.Sums)
			continue
		}
		require.True(t, p.Sums[w].Resident)
		require.Equal(t, calls[len(calls)-1],
			"Part elementwise.Axpby u:float32[5,4] float32[5,4]")
	}
}

// TestLowerOnHost lowers an op without a kernel, and an op that a rule sends to the host. Both must be
// computed on the host with a warning. With Strict, the former is an error.
func TestLowerOnHost(t *testing.T) {
	g := gorgonia.NewGraph()
	must(gorgonia.Tanh(passtest.Node(g, "x", 3, 4)))
	r := passtest.New(t, g, lower.Options{OnHost: func(op string) bool { return op == "tanh" }})
	require.Equal(t, []string{"tanh program.HostOp w:float32[3,4] x"}, passtest.Calls(r.Program))
	require.Len(t, r.Warnings, 1)
	require.Contains(t, r.Warnings[0], "tanh: a rule requires this")

	_, _, err := lower.Lower(g, lower.Options{Strict: true, Chooser: r.Chooser,
		OnHost: func(string) bool { return true }})
	require.ErrorContains(t, err, "WithStrict forbids computing it on the host")
}

// TestLowerTypes lowers a product with two-byte activations. Each operand must be converted only once,
// and copies of parameters must outlive the run.
func TestLowerTypes(t *testing.T) {
	g := gorgonia.NewGraph()
	x, w := passtest.Node(g, "x", 3, 4), passtest.Node(g, "weight", 4, 4)
	must(op.Linear(must(op.Linear(x, w)), w))
	p := passtest.Lower(t, g, lower.Options{Activation: gpu.BFloat16,
		Asked: graph.Asked{Params: gorgonia.Nodes{w}}})

	require.Equal(t, []string{"Linear elementwise.Cast w:bfloat16[3,4] x",
		"Linear program.Matmul w:bfloat16[3,4] bfloat16[3,4] bfloat16[4,4]",
		"Linear program.Matmul w:bfloat16[3,4] bfloat16[3,4] bfloat16[4,4]"}, passtest.Calls(p))
	weight := p.Inputs[slices.IndexFunc(p.Inputs, func(in *program.Input) bool { return in.Node == w })]
	require.Len(t, weight.Copies, 1)
	require.True(t, weight.Copies[0].Resident)
	require.NotNil(t, weight.Copies[0].Convert, "the call that makes the copy again")
}

// TestLowerKasmina lowers a Kasmina layer and its gradient. They must become two passes of one layer, and
// the backward pass may overwrite the gradient that it reads.
func TestLowerKasmina(t *testing.T) {
	g := gorgonia.NewGraph()
	lattice, err := state.NewLattice(2, 8, state.WithoutGates())
	require.NoError(t, err)
	x := must(gorgonia.Tanh(passtest.Node(g, "x", 3, 8)))
	weights, scales := passtest.Node(g, "weights", 3, 4), passtest.Node(g, "scales", 3)
	y := must(op.Kasmina(x, weights, scales, lattice))
	loss := must(op.CrossEntropy(y, passtest.Ints(g, "targets", 1, 0, 4)))
	_, err = gorgonia.Grad(loss, weights, scales)
	require.NoError(t, err)
	p := passtest.Lower(t, g, lower.Options{Asked: graph.Asked{
		Params: gorgonia.Nodes{weights, scales}}})

	require.Len(t, p.Kasmina, 1)
	layer := p.Kasmina[0]
	require.True(t, layer.Forward && layer.Backward)
	var passes []*program.KasminaPass
	for _, c := range p.Calls {
		if pass, ok := c.Params.(*program.KasminaPass); ok {
			require.Same(t, layer, pass.Layer)
			require.Equal(t, pass.Grad, c.InPlace.From != nil)
			passes = append(passes, pass)
		}
	}

	require.Len(t, passes, 2)
	require.False(t, passes[0].Grad)
	require.True(t, passes[1].Grad)
	require.Equal(t, []int{program.KasminaWords, 2}, p.Reports.Shape)
}

// TestLowerFused lowers a perceptron with a chooser that prefers a fused kernel to a product with a
// separate gate.
func TestLowerFused(t *testing.T) {
	g := gorgonia.NewGraph()
	must(op.SiLUMLP(passtest.Node(g, "x", 3, 8), passtest.Node(g, "gate", 8, 8),
		passtest.Node(g, "up", 8, 8), passtest.Node(g, "down", 8, 8)))
	r := passtest.New(t, g, lower.Options{Activation: gpu.BFloat16})
	rules, err := variantrule.Parse([]string{"SiLUProduct=fused"})
	require.NoError(t, err)
	config := r.Chooser.Config
	config.Rules = rules
	fused := choose.New(r.Runner.Executor, config)

	p, _, err := lower.Lower(g, lower.Options{Activation: gpu.BFloat16, Chooser: fused,
		Device: r.Ctx.Device(), OnHost: func(string) bool { return false }})
	require.NoError(t, err)
	i := slices.IndexFunc(p.Calls, func(c *program.Call) bool {
		_, ok := c.Params.(*gemm.SiLUProduct)
		return ok
	})
	require.GreaterOrEqual(t, i, 0)
	require.Equal(t, "fused", p.Calls[i].Choice.Variant)
}
