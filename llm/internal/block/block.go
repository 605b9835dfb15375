// Package block builds one block of a Llama-style decoder as a graph: attention and a gated
// perceptron around a residual stream, with RMSNorm before each and rotary positions.
package block

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/llm/internal/kvcache"
	"github.com/kasmina-go/kasmina/op"
)

// Params are the names of a block's parameters, in the order in which Build takes them.
var Params = []string{
	"input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight",
	"self_attn.v_proj.weight", "self_attn.o_proj.weight",
	"post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
	"mlp.down_proj.weight",
}

// Builder builds the blocks of one model.
type Builder struct {
	Heads, KVHeads, HeadDim int
	Base                    float64 // of the rotary angles
	Eps                     float64 // of RMSNorm
	Seq                     int     // positions of a sequence

	// Cache, unless it is nil, has the keys and values of the positions before the only one that the
	// graph computes.
	Cache *kvcache.Cache

	Keys, Values gorgonia.Nodes // of the blocks built so far, but with a Cache
}

// Build adds a block, x + attention(norm(x)) and then x + mlp(norm(x)). in is x, its Params and,
// where attention is to keep documents apart, their starts.
func (b *Builder) Build(in gorgonia.Nodes) (*gorgonia.Node, error) {
	x, norm1, wq, wk, wv, wo := in[0], in[1], in[2], in[3], in[4], in[5]
	norm2, gate, up, down := in[6], in[7], in[8], in[9]
	h, err := op.RMSNorm(x, norm1, b.Eps)
	if err != nil {
		return nil, err
	}
	if h, err = b.attention(h, wq, wk, wv, in[1+len(Params):]...); err != nil {
		return nil, err
	}
	if h, err = op.Linear(h, wo); err != nil {
		return nil, err
	}
	if x, err = gorgonia.Add(x, h); err != nil {
		return nil, err
	}
	if h, err = op.RMSNorm(x, norm2, b.Eps); err != nil {
		return nil, err
	}
	if h, err = op.SiLUMLP(h, gate, up, down); err != nil {
		return nil, err
	}
	return gorgonia.Add(x, h)
}

// attention computes that of a block, without its output layer.
func (b *Builder) attention(h, wq, wk, wv *gorgonia.Node,
	starts ...*gorgonia.Node) (*gorgonia.Node, error) {
	v, err := op.Linear(h, wv)
	if err != nil {
		return nil, err
	}
	if b.Cache != nil {
		return b.Cache.Attention(h, wq, wk, v)
	}
	q, err := b.project(h, wq, b.Heads)
	if err != nil {
		return nil, err
	}
	k, err := b.project(h, wk, b.KVHeads)
	if err != nil {
		return nil, err
	}
	b.Keys, b.Values = append(b.Keys, k), append(b.Values, v)
	a := op.AttentionConfig{Seq: b.Seq, Heads: b.Heads, KVHeads: b.KVHeads, HeadDim: b.HeadDim,
		Causal: true}
	if len(starts) > 0 {
		return op.DocumentAttention(q, k, v, starts[0], a)
	}
	return op.Attention(q, k, v, a)
}

// project computes queries or keys: a linear layer and the rotation by position.
func (b *Builder) project(h, w *gorgonia.Node, heads int) (*gorgonia.Node, error) {
	y, err := op.Linear(h, w)
	if err != nil {
		return nil, err
	}
	return op.RoPE(y, op.RoPEConfig{Seq: b.Seq, Heads: heads, HeadDim: b.HeadDim, Base: b.Base})
}
