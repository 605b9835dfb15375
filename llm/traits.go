package llm

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm/internal/block"
	"github.com/kasmina-go/kasmina/op"
)

// Traits describes how a published model family differs from Llama 2, which is the zero value.
type Traits struct {
	// Scaling adjusts the rotary angles of Base for contexts longer than the model was first trained on.
	// The zero value does not scale.
	Scaling op.RoPEScaling `json:"rope_scaling,omitzero"`
	// AttentionScale is the factor applied to attention scores; 0 means 1/sqrt(HeadDim). Gemma uses
	// 1/sqrt(query_pre_attn_scalar).
	AttentionScale float64 `json:"attention_scale,omitempty"`
	// QKVBias adds a bias to queries, keys and values, as Qwen2 does.
	QKVBias bool `json:"qkv_bias,omitempty"`
	// QKNorm normalizes every head of queries and keys before the rotation, as Qwen3 and Gemma 3 do.
	QKNorm bool `json:"qk_norm,omitempty"`
	// NormPlusOne makes every RMSNorm scale by 1 + weight, as Gemma does. Weights then start at 0.
	NormPlusOne bool `json:"norm_plus_one,omitempty"`
	// PostNorms normalizes the outputs of attention and MLP before they are added to the residual
	// stream, as Gemma does.
	PostNorms bool `json:"post_norms,omitempty"`
	// GELU replaces SiLU in the gate of the MLP with the tanh approximation of GELU.
	GELU bool `json:"gelu,omitempty"`
	// PlainMLP omits the gate of the MLP, as GPT-2 does: down(gelu(up(x))). It requires GELU.
	PlainMLP bool `json:"plain_mlp,omitempty"`
	// OutBias adds a bias to the output layer of attention, and MLPBias to both layers of a PlainMLP,
	// as GPT-2 does.
	OutBias bool `json:"out_bias,omitempty"`
	MLPBias bool `json:"mlp_bias,omitempty"`
	// LayerNorm uses layer norms, with biases, instead of RMSNorm, as GPT-2 does.
	LayerNorm bool `json:"layer_norm,omitempty"`
	// WideQKNorm normalizes all heads of queries together, and all heads of keys, as OLMo 2 does. It
	// requires QKNorm.
	WideQKNorm bool `json:"wide_qk_norm,omitempty"`
	// NoPreNorms makes attention and MLP read the residual stream without a norm, as OLMo 2 does. It
	// requires PostNorms.
	NoPreNorms bool `json:"no_pre_norms,omitempty"`
	// Positions, if not 0, is the number of learned position embeddings, which are added to the token
	// embeddings as in GPT-2. Seq is then at most Positions. Such models usually set NoRoPE in their
	// blocks.
	Positions int `json:"positions,omitempty"`
	// EmbedScale is a factor applied to embeddings, but not to an output layer that shares their
	// weights; 0 means 1. Gemma uses sqrt(Dim).
	EmbedScale float64 `json:"embed_scale,omitempty"`
	// Blocks holds the attention settings of individual blocks as a repeating pattern: block i uses
	// Blocks[i mod len(Blocks)]. It has at most Layers entries; if it is empty, all blocks are alike.
	Blocks []Block `json:"blocks,omitempty"`
}

// Block holds the attention settings of a block. The zero value is Llama 2's.
type Block struct {
	// Window is the number of positions a token attends to, including its own; 0 means all.
	Window int `json:"window,omitempty"`
	// NoRoPE disables the rotation of queries and keys by their positions.
	NoRoPE bool `json:"no_rope,omitempty"`
	// Base, if not 0, replaces Config.Base, and Scaling then replaces Config.Scaling.
	Base    float64        `json:"rope_base,omitempty"`
	Scaling op.RoPEScaling `json:"rope_scaling,omitzero"`
}

// Block returns the attention settings of block i, with Base and Scaling filled in unless it has NoRoPE.
func (c Config) Block(i int) Block {
	var b Block
	if n := len(c.Blocks); n > 0 {
		b = c.Blocks[i%n]
	}
	if b.Base == 0 && !b.NoRoPE {
		b.Base, b.Scaling = c.Base, c.Scaling
	}
	return b
}

// BlockShape returns the shape that all blocks share.
func (c Config) BlockShape() block.Shape {
	return block.Shape{Dim: c.Dim, FF: c.FF, Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim,
		Eps: c.Eps, Scale: c.AttentionScale, QKVBias: c.QKVBias, QKNorm: c.QKNorm,
		NormPlusOne: c.NormPlusOne, PostNorms: c.PostNorms, GELU: c.GELU,
		PlainMLP: c.PlainMLP, OutBias: c.OutBias, MLPBias: c.MLPBias, LayerNorm: c.LayerNorm,
		WideQKNorm: c.WideQKNorm, NoPreNorms: c.NoPreNorms}
}

// Attention returns the settings of [Config.Block] in the form used by the graph builder.
func (c Config) Attention(i int) block.Attention {
	b := c.Block(i)
	return block.Attention{Window: b.Window, NoRoPE: b.NoRoPE, Base: b.Base, Scaling: b.Scaling}
}

func validBase(b float64) bool { return b > 1 && !math.IsInf(b, 0) }

// checkTraits checks Traits for Config.Check.
func (c Config) checkTraits() error {
	for _, f := range []struct {
		name  string
		value float64
	}{{"AttentionScale", c.AttentionScale}, {"EmbedScale", c.EmbedScale}} {
		if !(f.value >= 0) || math.IsInf(f.value, 0) {
			return fmt.Errorf("llm: Config.%s is %v, want a finite number above 0, or 0 for the "+
				"default",
				f.name, f.value)
		}
	}

	if c.ZeroOutputs && c.PostNorms {
		return errors.New("llm: Config.ZeroOutputs and PostNorms are both set, want one of them: " +
			"the gradient of a norm of zeros has no bound")
	}

	if err := c.checkTogether(); err != nil {
		return err
	}

	if err := c.Scaling.Check(); err != nil {
		return fmt.Errorf("llm: Config.%w", err)
	}

	if len(c.Blocks) > c.Layers {
		return fmt.Errorf("llm: Config.Blocks has %d entries, want Layers, %d, at most",
			len(c.Blocks),
			c.Layers)
	}

	for i, b := range c.Blocks {
		switch {
		case b.Window < 0 || b.Window > maxField:
			return fmt.Errorf("llm: Config.Blocks[%d].Window is %d, want 1 to %d, or 0 for all "+
				"positions",
				i, b.Window, maxField)
		case b.Base != 0 && !validBase(b.Base):
			return fmt.Errorf("llm: Config.Blocks[%d].Base is %v, want a finite number greater "+
				"than 1, or 0 for Config.Base", i, b.Base)
		case b.Scaling != op.RoPEScaling{} && b.Base == 0:
			return fmt.Errorf("llm: Config.Blocks[%d].Scaling is set, want a Base with it", i)
		case b.NoRoPE && b.Base != 0:
			return fmt.Errorf("llm: Config.Blocks[%d] has NoRoPE and a Base, want one of them", i)
		}
		if err := b.Scaling.Check(); err != nil {
			return fmt.Errorf("llm: Config.Blocks[%d].%w", i, err)
		}
	}

	return nil
}

// checkTogether checks traits that require or exclude one another.
func (c Config) checkTogether() error {
	for _, t := range []struct {
		set        bool
		name, want string
		fits       bool
	}{
		{c.PlainMLP, "PlainMLP", "GELU", c.GELU},
		{c.MLPBias, "MLPBias", "PlainMLP", c.PlainMLP},
		{c.WideQKNorm, "WideQKNorm", "QKNorm", c.QKNorm},
		{c.NoPreNorms, "NoPreNorms", "PostNorms", c.PostNorms},
		{c.LayerNorm, "LayerNorm", "none of NormPlusOne, QKNorm and PostNorms",
			!c.NormPlusOne && !c.QKNorm && !c.PostNorms},
	} {
		if t.set && !t.fits {
			return fmt.Errorf("llm: Config.%s is set, want %s with it", t.name, t.want)
		}
	}

	switch {
	case c.Positions < 0 || c.Positions > maxField:
		return fmt.Errorf("llm: Config.Positions is %d, want 1 to %d, or 0 for none", c.Positions,
			maxField)
	case c.Positions > 0 && c.Seq > c.Positions:
		return fmt.Errorf("llm: Config.Seq is %d, want at most Positions, %d: the model has no "+
			"other position vectors", c.Seq, c.Positions)
	}

	return nil
}

// blocks returns the attention settings of every block, or nil if all blocks are alike.
func (c Config) blocks() []Block {
	if len(c.Blocks) == 0 {
		return nil
	}
	all := make([]Block, c.Layers)
	for i := range all {
		all[i] = c.Blocks[i%len(c.Blocks)]
	}
	return all
}

// blockPattern returns the shortest repeating pattern for the given blocks, so that equal models have
// equal configurations.
func blockPattern(all []Block) []Block {
	for n := range all {
		repeats := true
		for i, b := range all {
			repeats = repeats && (n == 0 && b == Block{} || n > 0 && b == all[i%n])
		}
		if repeats {
			if n == 0 {
				return nil
			}
			return slices.Clone(all[:n])
		}
	}

	return all
}

// reorderedBlocks returns the pattern of attention settings after the blocks were reordered. A new block
// copies the settings of the block before it; new blocks at the start copy the first old block's.
func reorderedBlocks(all []Block, order []int) []Block {
	if all == nil {
		return nil
	}

	from := slices.Clone(order)
	for i := range from {
		if from[i] == blueprints.NewBlock && i > 0 {
			from[i] = from[i-1]
		}
	}

	for i := len(from) - 2; i >= 0; i-- {
		if from[i] == blueprints.NewBlock {
			from[i] = from[i+1]
		}
	}

	next := make([]Block, len(order))
	for i, f := range from {
		next[i] = all[f]
	}

	return blockPattern(next)
}

// restoredBlocks reverses reorderedBlocks, returning the settings of the blocks before they were
// reordered.
func restoredBlocks(all []Block, order []int) []Block {
	if all == nil {
		return nil
	}
	before := make([]Block, slices.Max(order)+1)
	for i := range before {
		if at := slices.Index(order, i); at >= 0 {
			before[i] = all[at]
		}
	}
	return before
}
