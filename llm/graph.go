package llm

import (
	"errors"
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/llm/internal/kvcache"
	"github.com/kasmina-go/kasmina/op"
)

// GraphKind says what a graph computes.
type GraphKind uint8

// The kinds of graph.
const (
	ForTraining GraphKind = iota + 1 // the loss and its gradients; Kasmina layers gather telemetry
	ForLoss                          // the loss alone; lattices only count what is not finite
	// the logits of one position of each sequence; lattices only count what is not finite
	ForLogits
)

// Graph is a model's computation on one batch. Every graph of a model shares the memory of its
// parameters.
type Graph struct {
	G       *gorgonia.ExprGraph
	Kind    GraphKind
	Batch   int            // sequences
	IDs     *gorgonia.Node // int [Batch·Seq]
	Targets *gorgonia.Node // int [Batch·Seq], below 0 where nothing is predicted; nil ForLogits
	Starts  *gorgonia.Node // int [Batch·Seq], Batch.Starts; nil without, and ForLogits
	Loss    *gorgonia.Node // mean cross-entropy in nats per token; nil ForLogits
	Rows    *gorgonia.Node // int [Batch], the rows of Batch·Seq whose logits are wanted, ForLogits
	Logits  *gorgonia.Node // [Batch, Vocab], ForLogits
	Params  gorgonia.Nodes // one for each of the model's Params

	keys, values gorgonia.Nodes // of the blocks' attentions, but for a graph with a cache of them
}

// GraphOption changes how a graph is built.
type GraphOption func(*graphBuilder)

// WithRecompute makes the backward pass of a ForTraining graph compute each block again from its
// input instead of keeping what is inside: less memory for about a third more work.
func WithRecompute() GraphOption { return func(b *graphBuilder) { b.recompute = true } }

// withLossShare differentiates 1/n of the loss, so that the gradients of n batches add up to those
// of their mean loss.
func withLossShare(n int) GraphOption { return func(b *graphBuilder) { b.shares = n } }

// Graph builds the model's computation on batches of the given number of sequences. ForTraining it
// includes the gradients of all parameters; run it on a machine made with
// gorgonia.BindDualValues(g.Params...).
func (m *Model) Graph(kind GraphKind, batch int, opts ...GraphOption) (*Graph, error) {
	if err := m.made(); err != nil {
		return nil, fmt.Errorf("llm: Graph: %w", err)
	}
	if batch < 1 || batch > maxField {
		return nil, fmt.Errorf("llm: a batch of %d sequences, want 1 to %d", batch, maxField)
	}
	b := &graphBuilder{Model: m, g: gorgonia.NewGraph(), kind: kind, seq: m.Config.Seq,
		nodes: map[string]*gorgonia.Node{}}
	for _, opt := range opts {
		if opt == nil {
			return nil, errors.New("llm: Graph: an option is nil")
		}
		opt(b)
	}
	g, err := b.build(batch)
	if err != nil {
		return nil, fmt.Errorf("llm: building the model: %w", err)
	}
	return g, nil
}

type graphBuilder struct {
	*Model
	g         *gorgonia.ExprGraph
	kind      GraphKind
	recompute bool
	shares    int
	seq       int            // positions of a sequence, up to Config.Seq
	cache     *kvcache.Cache // ForLogits: of the positions before the only one that the graph computes
	out       *Graph
	nodes     map[string]*gorgonia.Node // parameters by name
}

func (b *graphBuilder) build(batch int) (*Graph, error) {
	c, rows := b.Config, batch*b.seq
	if b.cache != nil {
		rows = 1
	}
	out := &Graph{G: b.g, Kind: b.kind, Batch: batch}
	b.out = out
	out.IDs = gorgonia.NewTensor(b.g, tensor.Int, 1, gorgonia.WithShape(rows),
		gorgonia.WithName("ids"))
	if c.Documents && b.kind != ForLogits {
		out.Starts = gorgonia.NewTensor(b.g, tensor.Int, 1, gorgonia.WithShape(rows),
			gorgonia.WithName("starts"))
	}
	for _, p := range b.Params {
		n := gorgonia.NodeFromAny(b.g, p.Value, gorgonia.WithName(p.Name))
		b.nodes[p.Name] = n
		out.Params = append(out.Params, n)
	}
	x, err := op.Embedding(out.IDs, b.nodes[embedName])
	for i := range c.Layers {
		if err == nil {
			x, err = b.block(i, x)
		}
	}
	if err != nil {
		return nil, err
	}
	if b.kind == ForLogits && b.cache == nil {
		out.Rows = gorgonia.NewTensor(b.g, tensor.Int, 1, gorgonia.WithShape(batch),
			gorgonia.WithName("rows"))
		if x, err = op.Embedding(out.Rows, x); err != nil { // a table's rows, or a matrix's
			return nil, err
		}
	}
	if x, err = op.RMSNorm(x, b.nodes[normName], c.Eps); err != nil {
		return nil, err
	}
	head := b.nodes[headName]
	if !c.Untied {
		head = b.nodes[embedName]
	}
	switch b.kind {
	case ForLogits:
		out.Logits, err = op.Linear(x, head)
		return out, err
	case ForTraining, ForLoss:
		out.Targets = gorgonia.NewTensor(b.g, tensor.Int, 1, gorgonia.WithShape(rows),
			gorgonia.WithName("targets"))
		if out.Loss, err = op.LinearCrossEntropy(x, head, out.Targets); err != nil ||
			b.kind == ForLoss {
			return out, err
		}
		return out, b.differentiate(out)
	}
	return nil, errors.New("unknown kind of graph")
}

// differentiate adds the gradients of the loss, or of its share where several batches make a step.
func (b *graphBuilder) differentiate(g *Graph) error {
	cost := g.Loss
	if b.shares > 1 {
		share := gorgonia.NewConstant(float32(1 / float64(b.shares)))
		if b.Dtype() == tensor.Float64 {
			share = gorgonia.NewConstant(1 / float64(b.shares))
		}
		var err error
		if cost, err = gorgonia.Mul(cost, share); err != nil {
			return err
		}
	}
	_, err := gorgonia.Grad(cost, g.Params...)
	return err
}

// block adds block i and the Kasmina layer behind it, if there is one, to the residual stream x.
func (b *graphBuilder) block(i int, x *gorgonia.Node) (*gorgonia.Node, error) {
	p := blockPrefix(i)
	inputs := gorgonia.Nodes{x}
	for _, name := range blockParams {
		inputs = append(inputs, b.nodes[p+name])
	}
	if b.out.Starts != nil {
		inputs = append(inputs, b.out.Starts)
	}
	var err error
	if b.recompute && b.kind == ForTraining {
		x, err = autodiff.Recompute(inputs, b.decoder)
	} else {
		x, err = b.decoder(inputs)
	}
	if err != nil {
		return nil, fmt.Errorf("block %d: %w", i, err)
	}
	for n, after := range b.Config.Kasmina {
		if after != i {
			continue
		}
		x, err = op.Kasmina(x, b.nodes[p+kasminaWeights], b.nodes[p+kasminaScales],
			b.Kasmina.Lattice(n), b.Config.KasminaOptions.options(b.kind)...)
		if err != nil {
			return nil, fmt.Errorf("the Kasmina layer after block %d: %w", i, err)
		}
	}
	return x, nil
}

// blockParams are the parameters of one block, in the order in which decoder takes them.
var blockParams = []string{
	"input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight",
	"self_attn.v_proj.weight", "self_attn.o_proj.weight",
	"post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
	"mlp.down_proj.weight",
}

// decoder computes one block, x + attention(norm(x)) and then x + mlp(norm(x)), from x, its
// parameters and, where attention is to keep documents apart, their starts.
func (b *graphBuilder) decoder(in gorgonia.Nodes) (*gorgonia.Node, error) {
	x, norm1, wq, wk, wv, wo := in[0], in[1], in[2], in[3], in[4], in[5]
	norm2, gate, up, down := in[6], in[7], in[8], in[9]
	c := b.Config
	h, err := op.RMSNorm(x, norm1, c.Eps)
	if err != nil {
		return nil, err
	}
	if h, err = b.attention(h, wq, wk, wv, in[1+len(blockParams):]...); err != nil {
		return nil, err
	}
	if h, err = op.Linear(h, wo); err != nil {
		return nil, err
	}
	if x, err = gorgonia.Add(x, h); err != nil {
		return nil, err
	}
	if h, err = op.RMSNorm(x, norm2, c.Eps); err != nil {
		return nil, err
	}
	if h, err = op.SiLUMLP(h, gate, up, down); err != nil {
		return nil, err
	}
	return gorgonia.Add(x, h)
}

// attention computes that of a block, without its output layer.
func (b *graphBuilder) attention(h, wq, wk, wv *gorgonia.Node,
	starts ...*gorgonia.Node) (*gorgonia.Node, error) {
	c := b.Config
	v, err := op.Linear(h, wv)
	if err != nil {
		return nil, err
	}
	if b.cache != nil {
		return b.cache.Attention(h, wq, wk, v)
	}
	q, err := b.project(h, wq, c.Heads)
	if err != nil {
		return nil, err
	}
	k, err := b.project(h, wk, c.KVHeads)
	if err != nil {
		return nil, err
	}
	b.out.keys, b.out.values = append(b.out.keys, k), append(b.out.values, v)
	a := op.AttentionConfig{Seq: b.seq, Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim,
		Causal: true}
	if len(starts) > 0 {
		return op.DocumentAttention(q, k, v, starts[0], a)
	}
	return op.Attention(q, k, v, a)
}

// project computes queries or keys: a linear layer and the rotation by position.
func (b *graphBuilder) project(h, w *gorgonia.Node, heads int) (*gorgonia.Node, error) {
	y, err := op.Linear(h, w)
	if err != nil {
		return nil, err
	}
	c := b.Config
	return op.RoPE(y, op.RoPEConfig{Seq: b.seq, Heads: heads, HeadDim: c.HeadDim, Base: c.Base})
}
