package llm

import (
	"fmt"
	"iter"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/op"
)

// Config describes a Llama-style decoder: blocks of attention and a gated MLP around a residual
// stream, with RMSNorm before each, rotary position embeddings, and Kasmina layers after chosen
// blocks. [Traits] adds the features of other families. Every checkpoint contains the Config.
type Config struct {
	Vocab   int     `json:"vocab"`             // token ids are 0 to Vocab−1
	Dim     int     `json:"dim"`               // features of the residual stream
	Layers  int     `json:"layers"`            // blocks
	Heads   int     `json:"heads"`             // query heads
	KVHeads int     `json:"kv_heads"`          // key-value heads, a divisor of Heads
	HeadDim int     `json:"head_dim"`          // features of a head, even
	FF      int     `json:"ff"`                // hidden features of the MLP
	Seq     int     `json:"seq"`               // positions of a sequence, and the longest context
	Base    float64 `json:"rope_base"`         // base of the rotary angles
	Eps     float64 `json:"eps"`               // RMSNorm's epsilon
	Untied  bool    `json:"untied,omitempty"`  // the output layer uses its own weight
	Kasmina []int   `json:"kasmina,omitempty"` // blocks, counted from 0, with a Kasmina layer after them
	Seeds   int     `json:"seeds,omitempty"`   // seeds of each Kasmina layer, a divisor of Dim
	// rows of a Kasmina layer's weights; row 0 is unused
	Slots int `json:"slots,omitempty"`

	// SlotWidth is the number of weights in a slot, at least Dim/Seeds; 0 means Dim/Seeds. The blueprints
	// LowRank and ChunkMLP have rank SlotWidth·Seeds/(2·Dim), which must be at least 1.
	SlotWidth int `json:"slot_width,omitempty"`

	// Documents limits attention to the token's document, if the batches of training and evaluation mark
	// where documents start. Generated text is a single document.
	Documents bool `json:"documents,omitempty"`

	// Depth is the number of seeds that grow the stack of blocks. Their lattice comes last. The model
	// grows between two steps.
	Depth int `json:"depth,omitempty"`
	// Weights lists linear layers with a seed on each. Streams lists blocks, counted from 0, with a seed
	// in the residual stream after each. A place may be listed several times. Each list has its own
	// lattice, after the lattices of the Kasmina layers and before the lattice of depth.
	Weights []WeightSite `json:"weights,omitempty"`
	Streams []int        `json:"streams,omitempty"`
	// LoRAAlpha is the α of LoRAs planted at weights: their product is multiplied by LoRAAlpha/rank.
	// 0 means that α is the rank.
	LoRAAlpha float64 `json:"lora_alpha,omitempty"`
	// Grown records how the model acquired its blocks. The trainer sets it.
	Grown []Grown `json:"grown,omitempty"`

	// Adapter describes low-rank adapters of linear layers. While a model has adapters, only they and
	// the parameters named by TrainConfig.Tuned learn.
	Adapter LoRA `json:"adapter,omitzero"`

	// ZeroOutputs initializes the weights that write to the residual stream, the output projections
	// of attention and MLP, to 0, so that every block of a new model is the identity. It affects only
	// the initial values, not the architecture.
	ZeroOutputs bool `json:"zero_outputs,omitempty"`

	// Boundary changes the architecture of a model that grows by copies of its blocks: wherever a pass
	// over copied blocks begins, the residual stream x becomes norm(x) + Boundary·e, with the final norm
	// of the model and the embedding e. A model that has grown with a Boundary above 0 is no longer a
	// Llama, and other programs cannot load it. 0 disables the operator.
	Boundary float64 `json:"boundary,omitempty"`

	Traits
}

// Grown describes a growth of a model's stack of blocks.
type Grown struct {
	// Stream reports whether the new block comes from a seed of the stream.
	Stream bool `json:"stream,omitempty"`

	Seed  int    `json:"seed"` // in the lattice of depth, or of the stream
	Kind  string `json:"kind"` // of the blueprint
	Size  int    `json:"size"`
	Step  int    `json:"step"`  // steps the model had been trained for
	Order []int  `json:"order"` // as returned by blueprints.Order
}

// KasminaOptions holds the options of a model's Kasmina layers. The zero value selects the defaults of
// [op.Kasmina].
type KasminaOptions struct {
	Stability op.Stability `json:"stability,omitempty"` // see op.WithStability
	Epsilon   float64      `json:"epsilon,omitempty"`   // see op.WithEpsilon; 0 means its default
	GradClip  float64      `json:"grad_clip,omitempty"` // see op.WithGradClip; 0 disables it

	// AdaptiveClip is the limit for op.WithAdaptiveGradClip; 0 disables it. It excludes GradClip.
	AdaptiveClip float64 `json:"adaptive_clip,omitempty"`
	// StopOnNonFinite stops a run if a layer encounters NaN or Inf during training, like
	// op.StopOnNonFinite. The error wraps op.ErrNonFinite and llm.ErrDiverged.
	StopOnNonFinite bool `json:"stop_on_non_finite,omitempty"`
}

func (o KasminaOptions) check() error {
	for _, f := range []struct {
		name  string
		value float64
	}{{"Epsilon", o.Epsilon}, {"GradClip", o.GradClip}, {"AdaptiveClip", o.AdaptiveClip}} {
		if !(f.value >= 0) || math.IsInf(f.value, 0) {
			return fmt.Errorf("llm: KasminaOptions.%s is %v, want a finite number of at "+
				"least 0",
				f.name, f.value)
		}
	}

	if _, err := o.Stability.MarshalText(); err != nil {
		return fmt.Errorf("llm: KasminaOptions.Stability is %v, want Adaptive, Fast or "+
			"Strict",
			o.Stability)
	}

	if o.GradClip > 0 && o.AdaptiveClip > 0 {
		return fmt.Errorf("llm: KasminaOptions: GradClip is %v and AdaptiveClip is %v, "+
			"want one of them to be 0", o.GradClip, o.AdaptiveClip)
	}

	return nil
}

// Options returns the options for op.Kasmina in a graph for training or, unless training is set,
// for another purpose.
func (o KasminaOptions) Options(training bool) []op.KasminaOption {
	opts := []op.KasminaOption{op.WithStability(o.Stability)}
	if o.Epsilon > 0 {
		opts = append(opts, op.WithEpsilon(o.Epsilon))
	}

	if o.GradClip > 0 {
		opts = append(opts, op.WithGradClip(o.GradClip))
	}

	if o.AdaptiveClip > 0 {
		opts = append(opts, op.WithAdaptiveGradClip(o.AdaptiveClip))
	}

	if !training {
		return append(opts, op.WithoutTelemetry())
	}

	if o.StopOnNonFinite {
		opts = append(opts, op.StopOnNonFinite())
	}

	return opts
}

// KasminaWidth returns the number of columns in the weights of a Kasmina layer.
func (c Config) KasminaWidth() int {
	if c.Seeds < 1 {
		return c.SlotWidth
	}
	return max(c.SlotWidth, c.Dim/c.Seeds)
}

// Default fills in fields of c that are 0 and can be derived: KVHeads, HeadDim (Dim/Heads, if that is an
// integer), FF (8/3·Dim, rounded up to a multiple of 32), Base and Eps. If there are Kasmina layers, it
// also sets Slots to Seeds + 1: one slot for each seed, and slot 0, which means no slot.
func (c Config) Default() Config {
	set := func(v *int, to int) {
		if *v == 0 {
			*v = to
		}
	}
	set(&c.KVHeads, c.Heads)
	if c.Heads > 0 && c.Dim%c.Heads == 0 {
		set(&c.HeadDim, c.Dim/c.Heads)
	}

	set(&c.FF, (c.Dim*8/3+31)/32*32)
	if c.Base == 0 {
		c.Base = 10000
	}

	if c.Eps == 0 {
		c.Eps = 1e-5
	}

	if len(c.Kasmina) > 0 {
		set(&c.Slots, c.Seeds+1)
	}

	return c
}

// maxField is the maximum value of any size in a configuration.
const maxField = 1 << 24

// Limits that keep quantities derived from a configuration within the range of int.
const (
	maxLayers = 1 << 16
	maxParams = 1 << 36
)

// Knows returns an error that names the first id outside the vocabulary.
func (c Config) Knows(ids iter.Seq[int]) error {
	if ids == nil {
		return nil
	}
	for id := range ids {
		if id < 0 || id >= c.Vocab {
			return fmt.Errorf("token %d is outside the model's vocabulary (Config.Vocab is %d): "+
				"it comes from another tokenizer", id, c.Vocab)
		}
	}
	return nil
}

// Check returns an error that names the first invalid field, its value, and the valid values.
func (c Config) Check() error {
	if c.HeadDim == 0 && c.Heads > 0 && c.Dim%c.Heads != 0 {
		return fmt.Errorf("llm: Config.Dim is %d, want a multiple of Heads, %d, or an "+
			"explicit HeadDim", c.Dim, c.Heads)
	}

	for _, check := range []func() error{c.checkFields, c.checkKasmina,
		c.checkTraits, c.checkSites, c.checkGrown, c.checkAdapter} {
		if err := check(); err != nil {
			return err
		}
	}

	dim, heads := float64(c.Dim), float64(c.Heads+c.KVHeads)*float64(c.HeadDim)
	block := dim*(2*heads+3*float64(c.FF)+2) + float64(max(c.Slots, 0))*max(dim,
		float64(c.SlotWidth))
	if n := 2*float64(c.Vocab)*dim + float64(c.Layers)*block; n > maxParams {
		return fmt.Errorf("llm: Config describes about %.2g parameters, want at most %.2g", n,
			float64(maxParams))
	}

	return nil
}

func (c Config) checkFields() error {
	for _, f := range []struct {
		name       string
		value, max int
	}{{"Vocab", c.Vocab, maxField}, {"Dim", c.Dim, maxField}, {"Layers", c.Layers, maxLayers},
		{"Heads", c.Heads, maxField}, {"KVHeads", c.KVHeads, maxField},
		{"HeadDim", c.HeadDim, maxField}, {"FF", c.FF, maxField}, {"Seq", c.Seq, maxField}} {
		if f.value < 1 || f.value > f.max {
			hint := ""
			if f.value == 0 && slices.Contains([]string{"KVHeads", "HeadDim", "FF"}, f.name) {
				hint = "; Config.Default fills it in"
			}
			return fmt.Errorf("llm: Config.%s is %d, want 1 to %d%s", f.name, f.value, f.max, hint)
		}
	}

	switch {
	case c.Heads%c.KVHeads != 0:
		return fmt.Errorf("llm: Config.Heads is %d, want a multiple of KVHeads %d", c.Heads,
			c.KVHeads)
	case c.HeadDim%2 != 0:
		return fmt.Errorf("llm: Config.HeadDim is %d, want an even number: rotary positions rotate "+
			"features in pairs", c.HeadDim)
	case !validBase(c.Base):
		return fmt.Errorf("llm: Config.Base is %v, want a finite number greater than 1", c.Base)
	case !(c.Eps >= 0) || math.IsInf(c.Eps, 0):
		return fmt.Errorf("llm: Config.Eps is %v, want a finite number of at least 0", c.Eps)
	case !(c.Boundary >= 0) || math.IsInf(c.Boundary, 0):
		return fmt.Errorf("llm: Config.Boundary is %v, want a finite number of at least 0", c.Boundary)
	}

	return nil
}

// checkKasmina checks the blocks that carry Kasmina layers, and the layers' sizes.
func (c Config) checkKasmina() error {
	seen := make(map[int]bool, min(len(c.Kasmina), c.Layers))
	for _, b := range c.Kasmina {
		if b < 0 || b >= c.Layers {
			return fmt.Errorf("llm: Config.Kasmina names block %d, want 0 to %d", b, c.Layers-1)
		}
		if seen[b] {
			return fmt.Errorf("llm: Config.Kasmina names block %d twice", b)
		}
		seen[b] = true
	}

	if len(c.Kasmina) == 0 {
		return nil
	}

	switch {
	case c.Seeds < 1 || c.Dim%c.Seeds != 0:
		return fmt.Errorf("llm: Config.Seeds is %d, want a divisor of Dim %d", c.Seeds, c.Dim)
	case c.SlotWidth != 0 && (c.SlotWidth < c.Dim/c.Seeds || c.SlotWidth > maxField):
		return fmt.Errorf("llm: Config.SlotWidth is %d, want Dim/Seeds, %d, to %d", c.SlotWidth,
			c.Dim/c.Seeds, maxField)
	case c.Slots < 2 || c.Slots > 1<<16:
		return fmt.Errorf("llm: Config.Slots is %d, want 2 (slot 0 means none) to 65536",
			c.Slots)
	}

	return nil
}
