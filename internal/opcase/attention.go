package opcase

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/op"
)

var attention = &Op{
	Name: "Attention",
	Cases: func(r *rand.Rand) (cases []Case) {
		for _, c := range attentions(r) {
			cases = append(cases, attentionCase(r, 2, c, false))
		}
		return cases
	},
	Bench: &Bench{
		Shape: "batch, positions, heads, key-value heads, head size",
		Small: []int{2, 16, 3, 3, 8}, Usual: []int{4, 256, 4, 4, 64},
		Check:    divides("a multiple of the key-value heads for heads", 2, 3),
		Elements: sum(product(2, 0, 1, 2, 4), product(2, 0, 1, 3, 4)),
		FLOPs:    product(2, 0, 1, 1, 2, 4), // two products of 2, and the mask hides half
		Case: func(r *rand.Rand, s []int) (Case, error) {
			return attentionCase(r, s[0], op.AttentionConfig{Seq: s[1], Heads: s[2], KVHeads: s[3],
				HeadDim: s[4], Causal: true}, false), nil
		},
		Stock: stockAttention,
		Room: func(s []int) (string, float64) {
			return "scores of all heads take", product(6, 0, 2, 1, 1)(s)
		},
	},
}

// documentAttention is attention limited to each token's own document.
var documentAttention = &Op{
	Name: "DocumentAttention",
	Cases: func(r *rand.Rand) (cases []Case) {
		for _, c := range attentions(r) {
			if c.Causal {
				cases = append(cases, attentionCase(r, 2, c, true))
			}
		}
		return cases
	},
}

func attentions(r *rand.Rand) []op.AttentionConfig {
	return []op.AttentionConfig{
		{Seq: 1, Heads: 1, KVHeads: 1, HeadDim: 1, Causal: true},
		{Seq: 7, Heads: 2, KVHeads: 2, HeadDim: 3, Causal: true},
		{Seq: 5, Heads: 4, KVHeads: 2, HeadDim: 5},
		{Seq: 65, Heads: 3, KVHeads: 1, HeadDim: 4, Causal: true, Scale: 0.3},
		{Seq: 130, Heads: 2, KVHeads: 1, HeadDim: 8, Causal: true},
		{Seq: 129, Heads: 1, KVHeads: 1, HeadDim: 2},
		{Seq: 9, Heads: 2, KVHeads: 2, HeadDim: 3, Causal: true, Window: 1},
		{Seq: 9, Heads: 2, KVHeads: 2, HeadDim: 3, Causal: true, Window: 2 + r.IntN(7)},
		{Seq: 530, Heads: 2, KVHeads: 1, HeadDim: 2, Causal: true, Window: 2 + r.IntN(500)},
		{Seq: 300, Heads: 1, KVHeads: 1, HeadDim: 2, Causal: true, Window: 1 + r.IntN(40)},
	}
}

func attentionCase(r *rand.Rand, batch int, c op.AttentionConfig, documents bool) Case {
	rows, width, kv := batch*c.Seq, c.Heads*c.HeadDim, c.KVHeads*c.HeadDim
	a := Case{Config: fmt.Sprintf("%+v", c),
		In: []Input{Normal(r, rows, width), Normal(r, rows, kv), Normal(r, rows, kv)},
		Build: func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.Attention(in[0], in[1], in[2], c)
		},
		Want: func(in []Input) []float64 {
			return refAttention(in[0].Values, in[1].Values, in[2].Values, nil, batch, c)
		}}

	if documents {
		a.In = append(a.In, starts(r, batch, c.Seq))
		a.Build = func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.DocumentAttention(in[0], in[1], in[2], in[3], c)
		}
		a.Want = func(in []Input) []float64 {
			return refAttention(in[0].Values, in[1].Values, in[2].Values, in[3].IDs, batch, c)
		}
	}

	return a
}

// starts returns the starts of documents of random lengths, in sequences of seq tokens. The first
// document spans at least half a sequence, because one-token documents give queries and keys no
// gradients to compare.
func starts(r *rand.Rand, sequences, seq int) Input {
	x := make([]int, sequences*seq)
	longest := 1 + r.IntN(2*seq)
	for b := range sequences {
		for start := 0; start < seq; {
			end := min(seq, start+1+r.IntN(longest))
			if b == 0 && start == 0 {
				end = max(end, (seq+1)/2)
			}
			for i := start; i < end; i++ {
				x[b*seq+i] = start
			}
			start = end
		}
	}

	return Input{Shape: []int{len(x)}, IDs: x}
}

// refAttention computes attention. Unless starts is nil, queries see no keys before their starts.
func refAttention(q, k, v []float64, starts []int, batch int, c op.AttentionConfig) []float64 {
	if c.Scale == 0 {
		c.Scale = 1 / math.Sqrt(float64(c.HeadDim))
	}

	y := make([]float64, len(q))
	at := func(b, position, head, heads, i int) int {
		return ((b*c.Seq+position)*heads+head)*c.HeadDim + i
	}

	for b := range batch {
		for h := range c.Heads {
			kvh := h / (c.Heads / c.KVHeads)
			for i := range c.Seq {
				var z float64
				p := make([]float64, c.Seq)
				for j := range c.Seq {
					if c.Causal && j > i || starts != nil && j < starts[b*c.Seq+i] ||
						c.Window > 0 && i-j >= c.Window {
						continue
					}
					var s float64
					for e := range c.HeadDim {
						s += q[at(b, i, h, c.Heads, e)] * k[at(b, j, kvh, c.KVHeads, e)]
					}
					p[j] = math.Exp(c.Scale * s)
					z += p[j]
				}

				for j := range c.Seq {
					for e := range c.HeadDim {
						y[at(b, i, h, c.Heads, e)] += p[j] / z * v[at(b, j, kvh, c.KVHeads, e)]
					}
				}
			}
		}
	}

	return y
}

// stockAttention computes softmax(q·kᵀ/√d + mask)·v for every head. Heads cannot share keys and values.
func stockAttention(in gorgonia.Nodes, shape []int) (*gorgonia.Node, error) {
	batch, seq, heads, d := shape[0], shape[1], shape[2], shape[4]
	if shape[3] != heads {
		return nil, errors.New(
			"no ops of Gorgonia for heads that share keys and values")
	}

	hidden := make([]float64, batch*heads*seq*seq)
	for i := range hidden {
		if i%seq > i/seq%seq {
			hidden[i] = -1e9
		}
	}

	q := in[0]
	mask := gorgonia.NodeFromAny(q.Graph(), Dense(q.Dtype(), hidden, batch*heads, seq, seq),
		gorgonia.WithName("mask"))

	var c chain
	reshape := func(x *gorgonia.Node, to ...int) *gorgonia.Node {
		return c.do(func() (*gorgonia.Node, error) { return gorgonia.Reshape(x, tensor.Shape(to)) })
	}
	split := func(x *gorgonia.Node) *gorgonia.Node {
		x = reshape(x, batch, seq, heads, d)
		x = c.do(func() (*gorgonia.Node, error) { return gorgonia.Transpose(x, 0, 2, 1, 3) })
		return reshape(x, batch*heads, seq, d)
	}
	qh, kh, vh := split(q), split(in[1]), split(in[2])

	p := c.do(func() (*gorgonia.Node, error) { return gorgonia.BatchedMatMul(qh, kh, false, true) })
	p = c.do(func() (*gorgonia.Node, error) {
		return gorgonia.Mul(p, number(q, 1/math.Sqrt(float64(d))))
	})
	p = c.do(func() (*gorgonia.Node, error) { return gorgonia.Add(p, mask) })
	p = reshape(p, batch*heads*seq, seq)
	p = c.do(func() (*gorgonia.Node, error) { return gorgonia.SoftMax(p) })
	p = reshape(p, batch*heads, seq, seq)

	p = c.do(func() (*gorgonia.Node, error) { return gorgonia.BatchedMatMul(p, vh) })
	p = reshape(p, batch, heads, seq, d)
	p = c.do(func() (*gorgonia.Node, error) { return gorgonia.Transpose(p, 0, 2, 1, 3) })
	return reshape(p, batch*seq, heads*d), c.err
}
