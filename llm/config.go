package llm

import (
	"fmt"
	"iter"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/op"
)

// Config describes a Llama-style decoder: blocks of attention and a gated perceptron around a
// residual stream. It has RMSNorm before each, rotary positions, and Kasmina layers after chosen
// blocks. [Traits] are what other families have beyond Llama 2. It is stored with every checkpoint.
type Config struct {
	Vocab   int     `json:"vocab"`             // token ids are 0 to Vocab−1
	Dim     int     `json:"dim"`               // features of the residual stream
	Layers  int     `json:"layers"`            // blocks
	Heads   int     `json:"heads"`             // query heads
	KVHeads int     `json:"kv_heads"`          // key-value heads, a divisor of Heads
	HeadDim int     `json:"head_dim"`          // features of a head, even
	FF      int     `json:"ff"`                // hidden features of the perceptron
	Seq     int     `json:"seq"`               // positions of a sequence, and the longest context
	Base    float64 `json:"rope_base"`         // base of the rotary angles
	Eps     float64 `json:"eps"`               // RMSNorm's epsilon
	Untied  bool    `json:"untied,omitempty"`  // the output layer has a weight of its own
	Kasmina []int   `json:"kasmina,omitempty"` // blocks, from 0, after which a Kasmina layer stands
	Seeds   int     `json:"seeds,omitempty"`   // seeds of each Kasmina layer, a divisor of Dim
	// rows of a Kasmina layer's weights, of which row 0 is unused
	Slots int `json:"slots,omitempty"`

	// SlotWidth is how many weights a slot has, at least Dim/Seeds, which 0 stands for. The
	// blueprints LowRank and ChunkMLP have rank SlotWidth·Seeds/(2·Dim), and need it to be at least
	// 1.
	SlotWidth int `json:"slot_width,omitempty"`

	// Documents keeps attention to the document that a token belongs to, where the batches of
	// training and evaluation say where documents start. Text that is generated is one document.
	Documents bool `json:"documents,omitempty"`

	// Depth is how many seeds grow the stack of blocks. Their lattice stands behind those of the
	// Kasmina layers. See llm.Trainer.Run for when it
	// changes the model.
	Depth int `json:"depth,omitempty"`
	// Weights are linear layers on each of which a seed sits. Streams are blocks, from 0, behind
	// each of which one sits in the residual stream. A place may be named several times. Each list
	// has a lattice of its own, behind those of the Kasmina layers and before that of depth.
	Weights []WeightSite `json:"weights,omitempty"`
	Streams []int        `json:"streams,omitempty"`
	// LoRAAlpha is that of LoRA, whose product is multiplied by LoRAAlpha/rank; 0 means the rank.
	LoRAAlpha float64 `json:"lora_alpha,omitempty"`
	// Frozen says that only what is planted at Weights and in Streams learns. The model's own
	// parameters keep their bits until something is merged into them.
	Frozen bool `json:"frozen,omitempty"`
	// Directed has the rows of A of a LoRA begin along the gradient of its weight, instead of at
	// random. They are its right singular vectors of the largest singular values. It is for frozen
	// models.
	Directed bool `json:"directed,omitempty"`
	// Planted are the blueprints at these places, and Grown is how the model came to its blocks.
	// The trainer writes both.
	Planted []Planted `json:"planted,omitempty"`
	Grown   []Grown   `json:"grown,omitempty"`

	// ZeroOutputs starts the weights that write to the residual stream, the output projections of
	// attention and perceptron, at 0, so that every block of a new model is the identity. It
	// changes where training starts and nothing else: the model stays a plain one.
	ZeroOutputs bool `json:"zero_outputs,omitempty"`

	Traits

	// KasminaOptions say how the Kasmina layers compute. They are no part of the architecture: a
	// run that goes on with others has other settings.
	KasminaOptions KasminaOptions `json:"kasmina_options,omitzero"`
}

// Grown is a growth of a model's stack of blocks.
type Grown struct {
	// Stream says that it is the block which the blueprint of a seed of the stream became.
	Stream bool `json:"stream,omitempty"`

	Seed  int    `json:"seed"` // of the lattice of depth, or of the stream
	Kind  string `json:"kind"` // of its blueprint
	Size  int    `json:"size"`
	Step  int    `json:"step"`  // steps that the model had seen
	Order []int  `json:"order"` // as blueprints.Order returned it
}

// KasminaOptions are the options of a model's Kasmina layers. The zero value has the defaults of
// [op.Kasmina].
type KasminaOptions struct {
	Stability op.Stability `json:"stability,omitempty"` // as op.WithStability
	Epsilon   float64      `json:"epsilon,omitempty"`   // as op.WithEpsilon; 0 means its default
	GradClip  float64      `json:"grad_clip,omitempty"` // as op.WithGradClip; 0 for none

	// AdaptiveClip is as op.WithAdaptiveGradClip, 0 for none. It excludes GradClip.
	AdaptiveClip float64 `json:"adaptive_clip,omitempty"`
	// StopOnNonFinite ends a run at a step of training in which a layer meets NaN or Inf, as
	// op.StopOnNonFinite does. The error wraps op.ErrNonFinite and llm.ErrDiverged.
	StopOnNonFinite bool `json:"stop_on_non_finite,omitempty"`
}

func (o KasminaOptions) check() error {
	for _, f := range []struct {
		name  string
		value float64
	}{{"Epsilon", o.Epsilon}, {"GradClip", o.GradClip}, {"AdaptiveClip", o.AdaptiveClip}} {
		if !(f.value >= 0) || math.IsInf(f.value, 0) {
			return fmt.Errorf("llm: Config.KasminaOptions.%s is %v, want a finite number of at "+
				"least 0",
				f.name, f.value)
		}
	}

	if _, err := o.Stability.MarshalText(); err != nil {
		return fmt.Errorf("llm: Config.KasminaOptions.Stability is %v, want Adaptive, Fast or "+
			"Strict",
			o.Stability)
	}

	if o.GradClip > 0 && o.AdaptiveClip > 0 {
		return fmt.Errorf("llm: Config.KasminaOptions: GradClip is %v and AdaptiveClip is %v, "+
			"want one of them to be 0", o.GradClip, o.AdaptiveClip)
	}

	return nil
}

// Options are those of a layer in a graph that trains, or in another one.
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

// KasminaWidth is the number of columns of a Kasmina layer's weights.
func (c Config) KasminaWidth() int {
	if c.Seeds < 1 {
		return c.SlotWidth
	}
	return max(c.SlotWidth, c.Dim/c.Seeds)
}

// Default fills in what c leaves at zero and can be derived. That is KVHeads, HeadDim (Dim/Heads,
// where that is whole), FF (8/3·Dim, rounded up to 32), Base and Eps. If there are Kasmina layers,
// it fills in Slots too: Seeds + 1, one for each seed, and slot 0, which means none.
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

// maxField is the most that a size in a configuration can be.
const maxField = 1 << 24

// Limits that keep what is derived from a configuration inside the range of int.
const (
	maxLayers = 1 << 16
	maxParams = 1 << 36
)

// Knows returns an error that names the first of the ids which is outside the vocabulary.
func (c Config) Knows(ids iter.Seq[int]) error {
	if ids == nil {
		return nil
	}
	for id := range ids {
		if id < 0 || id >= c.Vocab {
			return fmt.Errorf("token %d is outside the model's vocabulary of Config.Vocab, %d: "+
				"another tokenizer made it", id, c.Vocab)
		}
	}
	return nil
}

// Check returns an error that names the first field that does not fit, what it holds and what it
// could.
func (c Config) Check() error {
	if c.HeadDim == 0 && c.Heads > 0 && c.Dim%c.Heads != 0 {
		return fmt.Errorf("llm: Config.Dim is %d, want a multiple of Heads, %d, or a HeadDim of "+
			"its own", c.Dim, c.Heads)
	}

	for _, check := range []func() error{c.checkFields, c.KasminaOptions.check, c.checkKasmina,
		c.checkTraits, c.checkSites, c.checkGrown} {
		if err := check(); err != nil {
			return err
		}
	}

	dim, heads := float64(c.Dim), float64(c.Heads+c.KVHeads)*float64(c.HeadDim)
	block := dim*(2*heads+3*float64(c.FF)+2) + float64(max(c.Slots, 0))*max(dim,
		float64(c.SlotWidth))
	if n := 2*float64(c.Vocab)*dim + float64(c.Layers)*block; n > maxParams {
		return fmt.Errorf("llm: Config describes some %.2g parameters, want at most %.2g", n,
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
		return fmt.Errorf("llm: Config.HeadDim is %d, want an even number: rotary positions turn "+
			"features in pairs", c.HeadDim)
	case !validBase(c.Base):
		return fmt.Errorf("llm: Config.Base is %v, want a finite number of more than 1", c.Base)
	case !(c.Eps >= 0) || math.IsInf(c.Eps, 0):
		return fmt.Errorf("llm: Config.Eps is %v, want a finite number of at least 0", c.Eps)
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
