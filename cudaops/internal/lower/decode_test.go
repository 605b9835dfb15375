package lower_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/decode"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/lower"
	"github.com/kasmina-go/kasmina/cudaops/internal/passtest"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/op/kvcache"
)

// decodingGraph lowers a block and an output layer that decode one token. The function outside, if it is not nil, adds
// nodes that read the results of both norms.
func decodingGraph(t *testing.T, d lower.Decoding, outside func(first, second *gorgonia.Node)) *program.Program {
	g := gorgonia.NewGraph()
	const dim = 64
	var params gorgonia.Nodes
	node := func(name string, shape ...int) *gorgonia.Node {
		params = append(params, passtest.Node(g, name, shape...))
		return params[len(params)-1]
	}
	ids := passtest.Ints(g, "ids", 0)
	x := must(op.Embedding(ids, node("table", 9, dim)))
	first := must(op.RMSNorm(x, node("norm1", dim), 1e-5))
	part := func(name string) *gorgonia.Node { return must(op.Linear(first, node(name, dim, dim))) }
	position := passtest.Ints(g, "position", 0)
	y := must(kvcache.Attention(part("q"), part("k"), part("v"), position,
		kvcache.Config{Heads: 4, KVHeads: 4, HeadDim: 16, Capacity: 128}))
	x = must(gorgonia.Add(x, must(op.Linear(y, node("o", dim, dim)))))
	second := must(op.RMSNorm(x, node("norm2", dim), 1e-6))
	x = must(gorgonia.Add(x, must(op.SiLUMLP(second, node("gate", 128, dim), node("up", 128, dim), node("down", dim, 128)))))
	must(op.Linear(x, node("head", 9, dim)))
	if outside != nil {
		outside(first, second)
	}
	return passtest.Lower(t, g, lower.Options{Asked: graph.Asked{Params: params}, Activation: gpu.BFloat16,
		Decoding: d})
}

// TestDecodingNorms checks that products of one row take over the norms before them, except norms that something else
// reads too.
func TestDecodingNorms(t *testing.T) {
	count := func(p *program.Program) (norms int, folded []float64) {
		for _, call := range p.Calls {
			switch l := call.Params.(type) {
			case *norm.RMSNorm, *decode.NormRows:
				norms++
			case *decode.Product:
				if call.Operand(&l.Norm.W) != nil {
					folded = append(folded, l.Norm.Eps)
				}
			case *decode.Gated:
				if call.Operand(&l.Norm.W) != nil {
					folded = append(folded, l.Norm.Eps)
				}
			}
		}
		return norms, folded
	}

	norms, folded := count(decodingGraph(t, lower.Decoding{}, nil))
	require.Equal(t, 2, norms)
	require.Empty(t, folded)

	norms, folded = count(decodingGraph(t, lower.Decoding{Norms: true}, nil))
	require.Zero(t, norms)
	require.Equal(t, []float64{1e-5, 1e-6}, folded)

	norms, folded = count(decodingGraph(t, lower.Decoding{Norms: true}, func(first, second *gorgonia.Node) {
		must(gorgonia.Neg(second))
	}))
	require.Equal(t, 1, norms)
	require.Equal(t, []float64{1e-5}, folded)
}

// TestDecodingSteady checks that a product loads its weights before the preceding launch has ended only if no launch
// computes the weights of its norm, which it loads at the same time.
func TestDecodingSteady(t *testing.T) {
	for _, plusOne := range []bool{false, true} {
		g := gorgonia.NewGraph()
		var params gorgonia.Nodes
		node := func(name string, shape ...int) *gorgonia.Node {
			params = append(params, passtest.Node(g, name, shape...))
			return params[len(params)-1]
		}
		x := must(op.Embedding(passtest.Ints(g, "ids", 0), node("table", 9, 64)))
		var opts []op.RMSNormOption
		if plusOne {
			opts = append(opts, op.WeightPlusOne())
		}
		y := must(op.RMSNorm(x, node("norm", 64), 1e-5, opts...))
		part := func(name string) *gorgonia.Node { return must(op.Linear(y, node(name, 64, 64))) }
		must(kvcache.Attention(part("q"), part("k"), part("v"), passtest.Ints(g, "position", 0),
			kvcache.Config{Heads: 4, KVHeads: 4, HeadDim: 16, Capacity: 128}))
		normed := 0
		for _, call := range passtest.Lower(t, g, lower.Options{Asked: graph.Asked{Params: params},
			Activation: gpu.BFloat16, Decoding: lower.Decoding{Norms: true, Early: true}}).Calls {
			if l, ok := call.Params.(*decode.Product); ok && call.Operand(&l.Norm.W) != nil {
				require.Equal(t, !plusOne, l.Steady)
				normed++
			}
		}
		require.Equal(t, 1, normed)
	}
}

// TestDecodingEarly checks that all launches after the first one, which waits for everything, may overlap.
func TestDecodingEarly(t *testing.T) {
	early, seen := 0, false
	for _, call := range decodingGraph(t, lower.Decoding{Norms: true, Early: true}, nil).Calls {
		var isEarly bool
		switch l := call.Params.(type) {
		case *decode.Product:
			isEarly = l.Early
		case *decode.Gated:
			isEarly = l.Early
		case *decode.Attention:
			isEarly = l.Early
		default:
			seen = true
			continue
		}
		require.Equal(t, seen, isEarly, "%s", call.Op)
		early++
	}
	require.Equal(t, 6, early)
}

// TestFirstLaunchIsNotEarly checks that a program whose first launch overlaps with its predecessor does not let a later
// one start before the work that precedes the program has ended.
func TestFirstLaunchIsNotEarly(t *testing.T) {
	g := gorgonia.NewGraph()
	x := passtest.Node(g, "x", 1, 64)
	var params gorgonia.Nodes
	part := func(name string) *gorgonia.Node {
		params = append(params, passtest.Node(g, name, 64, 64))
		return must(op.Linear(x, params[len(params)-1]))
	}
	must(kvcache.Attention(part("q"), part("k"), part("v"), passtest.Ints(g, "position", 0),
		kvcache.Config{Heads: 4, KVHeads: 4, HeadDim: 16, Capacity: 128}))
	products := 0
	for i, call := range passtest.Lower(t, g, lower.Options{Asked: graph.Asked{Params: params},
		Decoding: lower.Decoding{Early: true}}).Calls {
		if l, ok := call.Params.(*decode.Product); ok {
			require.Equal(t, products, i, "the first calls are not products")
			require.False(t, l.Early)
			products++
		}
	}
	require.Positive(t, products)
}
