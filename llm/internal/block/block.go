// Package block builds one block of a decoder as a graph, for Llama, the families that followed it,
// and GPT-2. A block consists of attention and an MLP around a residual stream.
package block

import (
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/op/kvcache"
)

// Shape holds the settings that all blocks of a model share.
type Shape struct {
	Dim, FF, Heads, KVHeads, HeadDim int
	Eps                              float64 // of the norms
	Scale                            float64 // factor on the scores; 0 means 1/sqrt(HeadDim)

	QKVBias     bool // queries, keys and values have biases
	OutBias     bool // the output layer of attention has a bias
	MLPBias     bool // the layers of an ungated MLP have biases
	QKNorm      bool // each head of queries and keys is normalized before rotation
	WideQKNorm  bool // with QKNorm: all heads of queries, or of keys, are normalized together
	LayerNorm   bool // norms are layer norms with biases instead of RMSNorm
	NormPlusOne bool // norms scale by 1 + weight
	PostNorms   bool // outputs are normalized before they are added to the residual stream
	NoPreNorms  bool // with PostNorms: attention and the MLP read the stream without a norm
	GELU        bool // the MLP applies GELU instead of SiLU
	PlainMLP    bool // the MLP is ungated
}

// Attention holds the attention settings of a single block.
type Attention struct {
	Window  int // positions a token attends to; 0 means all
	NoRoPE  bool
	Base    float64 // of the rotary angles
	Scaling op.RoPEScaling
}

// Role is the role of a parameter, which determines its initial values.
type Role uint8

// The roles.
const (
	Norm       Role = iota // the weight of a norm
	Closing                // the weight of a norm after attention or the MLP
	Bias                   // added to activations
	OutputBias             // added to the output of a layer with the role Output
	Inner                  // a linear layer
	Output                 // a linear layer that writes to the residual stream
)

// Param describes a parameter of a block.
type Param struct {
	Name  string
	Shape []int
	Role  Role
}

// Names of optional parameters.
const (
	qBias, kBias, vBias = "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"
	qNorm, kNorm        = "self_attn.q_norm.weight", "self_attn.k_norm.weight"
)

// Names of norms, without .weight or .bias.
const (
	preNorm         = "input_layernorm"
	postNorm        = "post_attention_layernorm"
	preMLP, postMLP = "pre_feedforward_layernorm", "post_feedforward_layernorm"
)

// All returns a block's parameters, in the order that Build expects.
func (s Shape) All() []Param {
	q, kv := s.Heads*s.HeadDim, s.KVHeads*s.HeadDim
	var all []Param
	add := func(present bool, params ...Param) {
		if present {
			all = append(all, params...)
		}
	}
	norm := func(present bool, name string, role Role) {
		add(present, Param{name + ".weight", []int{s.Dim}, role})
		add(present && s.LayerNorm, Param{name + ".bias", []int{s.Dim}, Bias})
	}

	norm(!s.NoPreNorms, preNorm, Norm)
	add(true, Param{"self_attn.q_proj.weight", []int{q, s.Dim}, Inner},
		Param{"self_attn.k_proj.weight", []int{kv, s.Dim}, Inner},
		Param{"self_attn.v_proj.weight", []int{kv, s.Dim}, Inner})
	add(s.QKVBias, Param{qBias, []int{q}, Bias}, Param{kBias, []int{kv}, Bias},
		Param{vBias, []int{kv}, Bias})
	if s.WideQKNorm {
		add(s.QKNorm, Param{qNorm, []int{q}, Norm}, Param{kNorm, []int{kv}, Norm})
	} else {
		add(s.QKNorm, Param{qNorm, []int{s.HeadDim}, Norm}, Param{kNorm, []int{s.HeadDim}, Norm})
	}

	add(true, Param{"self_attn.o_proj.weight", []int{s.Dim, q}, Output})
	add(s.OutBias, Param{"self_attn.o_proj.bias", []int{s.Dim}, OutputBias})

	if s.PostNorms {
		norm(true, postNorm, Closing)
		norm(!s.NoPreNorms, preMLP, Norm)
	} else {
		norm(true, postNorm, Norm)
	}

	add(!s.PlainMLP, Param{"mlp.gate_proj.weight", []int{s.FF, s.Dim}, Inner})
	add(true, Param{"mlp.up_proj.weight", []int{s.FF, s.Dim}, Inner})
	add(s.MLPBias, Param{"mlp.up_proj.bias", []int{s.FF}, Bias})
	add(true, Param{"mlp.down_proj.weight", []int{s.Dim, s.FF}, Output})
	add(s.MLPBias, Param{"mlp.down_proj.bias", []int{s.Dim}, OutputBias})
	norm(s.PostNorms, postMLP, Closing)
	return all
}

// Half returns the parameters of attention and its norms, or of the MLP and its norms. Each half adds
// once to the residual stream.
func (s Shape) Half(attention bool) (half []Param) {
	for _, p := range s.All() {
		own := strings.HasPrefix(p.Name, preNorm+".") || strings.HasPrefix(p.Name, "self_attn.") ||
			strings.HasPrefix(p.Name, postNorm+".") && s.PostNorms
		if own == attention {
			half = append(half, p)
		}
	}
	return half
}

// Params returns the names of All.
func (s Shape) Params() (names []string) {
	for _, p := range s.All() {
		names = append(names, p.Name)
	}
	return names
}

// Builder builds the blocks of one model.
type Builder struct {
	Shape
	Seq int // positions of a sequence

	// Position, if not nil, is the position, at most Seq - 1, of the single token that the graph
	// computes. Attention then reads cached keys and values.
	Position *gorgonia.Node

	// Spans, if not nil, assigns the rows of the graph to tokens of sequences. Attention then reads the
	// cached keys and values of these sequences.
	Spans *kvcache.Spans

	// Pages, if not nil, holds the keys and values of the sequences of Spans. Table is the input that assigns
	// the rows to them, as in [kvcache.PagedAttention].
	Pages *kvcache.Pages
	Table *gorgonia.Node

	// Recompute, if not nil, adds the second half of a block so that the backward pass computes it again, as
	// autodiff.Recompute does.
	Recompute func(in gorgonia.Nodes, build func(gorgonia.Nodes) (*gorgonia.Node, error)) (*gorgonia.Node, error)

	attentions int // attention layers built so far with Spans

	// Keys and Values hold the keys and values of each block built so far. With a Position, Cached holds
	// the cached attention of each block instead.
	Keys, Values, Cached gorgonia.Nodes
}

// parts holds a block under construction.
type parts struct {
	*Builder
	Attention
	Tuning
	params map[string]*gorgonia.Node
	key    *gorgonia.Node // of the masks of dropout; nil without dropout
	starts gorgonia.Nodes // starts of documents; at most one
	err    error          // first error; nothing is built after it
}

// Build adds a block: x + attention(norm(x)), and then x + mlp(norm(x)). The input nodes in are x,
// the parameters of the block and of its adapters, the key of their dropout if there is any and, if
// attention must not cross document boundaries, the starts of the documents.
func (b *Builder) Build(in gorgonia.Nodes, a Attention, t Tuning) (*gorgonia.Node, error) {
	names := append(b.Params(), t.Params()...)
	p := &parts{Builder: b, Attention: a, Tuning: t, params: map[string]*gorgonia.Node{},
		starts: in[1+len(names):]}
	for i, name := range names {
		p.params[name] = in[1+i]
	}

	if t.Drops() {
		p.key, p.starts = p.starts[0], p.starts[1:]
	}

	x := p.add(in[0], p.attends(in[0]))
	if b.Recompute != nil {
		x = p.recomputed(x)
	} else {
		x = p.add(x, p.perceives(x))
	}
	return x, p.err
}

// recomputed returns x + mlp(norm(x)), added with Recompute.
func (p *parts) recomputed(x *gorgonia.Node) *gorgonia.Node {
	var names []string
	for _, q := range p.Half(false) {
		names = append(names, q.Name)
	}

	drops := false
	for _, a := range p.Adapters {
		if strings.HasPrefix(a.Layer, "mlp.") {
			names, drops = append(names, a.Params()...), drops || a.Dropout > 0
		}
	}

	in := gorgonia.Nodes{x}
	for _, name := range names {
		in = append(in, p.params[name])
	}
	if drops {
		in = append(in, p.key)
	}

	return p.do(func() (*gorgonia.Node, error) {
		return p.Recompute(in, func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			inner := &parts{Builder: p.Builder, Attention: p.Attention, Tuning: p.Tuning,
				params: map[string]*gorgonia.Node{}}
			for i, name := range names {
				inner.params[name] = in[1+i]
			}
			if drops {
				inner.key = in[len(in)-1]
			}
			y := inner.add(in[0], inner.perceives(in[0]))
			return y, inner.err
		})
	})
}

// BuildHalf returns the output of one half of a block: attention(norm(x)) or mlp(norm(x)), normalized
// if the shape has PostNorms. The input nodes in are x, the parameters of the Half and, if attention
// must not cross document boundaries, the starts of the documents.
func (b *Builder) BuildHalf(in gorgonia.Nodes, attention bool, a Attention) (*gorgonia.Node,
	error) {
	half := b.Half(attention)
	p := &parts{Builder: b, Attention: a, params: map[string]*gorgonia.Node{},
		starts: in[1+len(half):]}
	for i, q := range half {
		p.params[q.Name] = in[1+i]
	}

	var h *gorgonia.Node
	if attention {
		h = p.attends(in[0])
	} else {
		h = p.perceives(in[0])
	}

	return h, p.err
}

// attends returns the output of attention, before it is added to x.
func (p *parts) attends(x *gorgonia.Node) *gorgonia.Node {
	h := x
	if !p.NoPreNorms {
		h = p.norm(x, preNorm)
	}
	h = p.linear(p.attention(h), "self_attn.o_proj")
	if p.PostNorms { // in Llama, the norm of this name comes after the sum; in Gemma, before
		h = p.norm(h, postNorm)
	}
	return h
}

// perceives returns the output of the MLP, before it is added to x.
func (p *parts) perceives(x *gorgonia.Node) *gorgonia.Node {
	switch {
	case p.NoPreNorms:
		return p.norm(p.mlp(x), postMLP)
	case p.PostNorms:
		return p.norm(p.mlp(p.norm(x, preMLP)), postMLP)
	}
	return p.mlp(p.norm(x, postNorm))
}

// do calls make and records its error. After an error, it does nothing.
func (p *parts) do(make func() (*gorgonia.Node, error)) *gorgonia.Node {
	if p.err != nil {
		return nil
	}
	var n *gorgonia.Node
	n, p.err = make()
	return n
}

func (p *parts) add(x, h *gorgonia.Node) *gorgonia.Node {
	return p.do(func() (*gorgonia.Node, error) { return gorgonia.Add(x, h) })
}

// norm adds the norm with the given name.
func (p *parts) norm(x *gorgonia.Node, name string) *gorgonia.Node {
	return p.do(func() (*gorgonia.Node, error) {
		return p.Norm(x, p.params[name+".weight"], p.params[name+".bias"])
	})
}

// Norm adds a norm of the kind the model uses before attention, before the MLP, and at the end. The
// bias is required for a layer norm and nil otherwise.
func (s Shape) Norm(x, weight, bias *gorgonia.Node) (*gorgonia.Node, error) {
	if s.LayerNorm {
		return op.LayerNorm(x, weight, bias, s.Eps)
	}
	return s.rmsNorm(x, weight)
}

func (s Shape) rmsNorm(x, weight *gorgonia.Node, opts ...op.RMSNormOption) (*gorgonia.Node, error) {
	if s.NormPlusOne {
		opts = append(opts, op.WeightPlusOne())
	}
	return op.RMSNorm(x, weight, s.Eps, opts...)
}

// linear adds the linear layer with the given name, and its bias if it has one.
func (p *parts) linear(x *gorgonia.Node, name string) *gorgonia.Node {
	y := p.product(x, name)
	b := p.params[name+".bias"]
	if b == nil {
		return y
	}
	return p.do(func() (*gorgonia.Node, error) { return op.Bias(y, b) })
}

// mlp adds the MLP.
func (p *parts) mlp(x *gorgonia.Node) *gorgonia.Node {
	if p.PlainMLP {
		h := p.linear(x, "mlp.up_proj")
		h = p.do(func() (*gorgonia.Node, error) { return op.GELU(h) })
		return p.linear(h, "mlp.down_proj")
	}

	if !p.plain("mlp.gate_proj") || !p.plain("mlp.up_proj") || !p.plain("mlp.down_proj") {
		gate := op.SiLUMul
		if p.GELU {
			gate = op.GELUMul
		}
		a, b := p.linear(x, "mlp.gate_proj"), p.linear(x, "mlp.up_proj")
		h := p.do(func() (*gorgonia.Node, error) { return gate(a, b) })
		return p.linear(h, "mlp.down_proj")
	}

	mlp := op.SiLUMLP
	if p.GELU {
		mlp = op.GELUMLP
	}

	return p.do(func() (*gorgonia.Node, error) {
		return mlp(x, p.params["mlp.gate_proj.weight"], p.params["mlp.up_proj.weight"],
			p.params["mlp.down_proj.weight"])
	})
}

// rope returns the settings of the rotation of queries and keys, or nil without a rotation.
func (p *parts) rope() *op.RoPEConfig {
	if p.NoRoPE {
		return nil
	}
	r := &op.RoPEConfig{Seq: p.Seq, HeadDim: p.HeadDim, Base: p.Base}
	if p.Scaling != (op.RoPEScaling{}) {
		r.Scaling = &p.Scaling
	}
	return r
}

// attention adds the attention of a block, without its output layer.
func (p *parts) attention(h *gorgonia.Node) *gorgonia.Node {
	v := p.linear(h, "self_attn.v_proj")
	q := p.project(h, "self_attn.q_proj", qNorm, p.Heads)
	k := p.project(h, "self_attn.k_proj", kNorm, p.KVHeads)
	cached := kvcache.Config{Heads: p.Heads, KVHeads: p.KVHeads, HeadDim: p.HeadDim, Capacity: p.Seq,
		RoPE: p.rope(), Window: p.Window, Scale: p.Scale}
	switch {
	case p.Spans != nil:
		p.attentions++
		return p.do(func() (*gorgonia.Node, error) {
			if p.Pages != nil {
				return kvcache.PagedAttention(q, k, v, p.Table, p.Pages, p.attentions-1, cached)
			}
			return kvcache.BatchAttention(q, k, v, p.Spans, p.attentions-1, cached)
		})
	case p.Position != nil:
		y := p.do(func() (*gorgonia.Node, error) {
			return kvcache.Attention(q, k, v, p.Position, cached)
		})
		p.Cached = append(p.Cached, y)
		return y
	}

	p.Keys, p.Values = append(p.Keys, k), append(p.Values, v)
	a := op.AttentionConfig{Seq: p.Seq, Heads: p.Heads, KVHeads: p.KVHeads, HeadDim: p.HeadDim,
		Causal: true, Scale: p.Scale, Window: p.Window}
	return p.do(func() (*gorgonia.Node, error) {
		if len(p.starts) > 0 {
			return op.DocumentAttention(q, k, v, p.starts[0], a)
		}
		return op.Attention(q, k, v, a)
	})
}

// project adds queries or keys, which are the output of a linear layer, followed by the block's norm
// and rotation if it uses them. Attention to cached keys performs the rotation itself.
func (p *parts) project(h *gorgonia.Node, name, norm string, heads int) *gorgonia.Node {
	y := p.linear(h, name)
	if p.QKNorm {
		var opts []op.RMSNormOption
		if !p.WideQKNorm {
			opts = append(opts, op.EachHead())
		}
		h := y
		y = p.do(func() (*gorgonia.Node, error) { return p.rmsNorm(h, p.params[norm], opts...) })
	}

	r := p.rope()
	if r == nil || p.Position != nil || p.Spans != nil {
		return y
	}

	r.Heads = heads
	return p.do(func() (*gorgonia.Node, error) { return op.RoPE(y, *r) })
}
