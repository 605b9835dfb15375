package llm

import (
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"strings"

	"github.com/kasmina-go/kasmina/llm/internal/block"
)

// Parameters yields the names and shapes of the parameters of a model without planted blueprints, in the
// model's order of use.
func (c Config) Parameters() iter.Seq2[string, []int] { return parametersOf(c.Specs()) }

// parametersOf yields the names and shapes of parameters.
func parametersOf(specs iter.Seq[ParamSpec]) iter.Seq2[string, []int] {
	return func(yield func(string, []int) bool) {
		for p := range specs {
			if !yield(p.Name, p.Shape) {
				return
			}
		}
	}
}

// ParamSpec describes a parameter. Its initial values are normally distributed with mean Start and
// standard deviation Deviation.
type ParamSpec struct {
	Name             string
	Shape            []int
	Start, Deviation float64
	// Closed, if not nil, is the value that keeps a new block from adding anything to the residual
	// stream.
	Closed *float64
}

// Specs yields the parameters of a model without planted blueprints, in the model's order of use.
func (c Config) Specs() iter.Seq[ParamSpec] {
	return func(yield func(ParamSpec) bool) {
		if !yield(ParamSpec{embedName, []int{c.Vocab, c.Dim}, 0, innerDeviation, nil}) ||
			c.Positions > 0 &&
				!yield(ParamSpec{PositionsName, []int{c.Positions, c.Dim}, 0, innerDeviation, nil}) {
			return
		}
		for i := range c.Layers {
			for _, p := range c.BlockShape().All() {
				if !yield(c.blockSpec(blockPrefix(i), p)) {
					return
				}
			}
		}
		for _, b := range c.Kasmina {
			weights := []int{c.Slots, c.KasminaWidth()}
			if !yield(ParamSpec{blockPrefix(b) + kasminaWeights, weights, 0, 0, nil}) ||
				!yield(ParamSpec{blockPrefix(b) + kasminaScales, []int{c.Slots}, 1, 0, nil}) {
				return
			}
		}
		if !yield(ParamSpec{normName, []int{c.Dim}, c.norm(), 0, nil}) ||
			c.LayerNorm && !yield(ParamSpec{NormBiasName, []int{c.Dim}, 0, 0, nil}) ||
			c.Untied && !yield(ParamSpec{headName, []int{c.Vocab, c.Dim}, 0, innerDeviation, nil}) {
			return
		}
		for _, p := range c.adapterSpecs() {
			if !yield(p) {
				return
			}
		}
	}
}

// innerDeviation is the initial standard deviation of weights that do not write to the residual stream.
const innerDeviation = 0.02

// norm returns the initial value of norm weights.
func (c Config) norm() float64 {
	if c.NormPlusOne {
		return 0
	}
	return 1
}

// blockSpec returns the spec of a parameter of a block.
func (c Config) blockSpec(prefix string, p block.Param) ParamSpec {
	spec, noNorm := ParamSpec{Name: prefix + p.Name, Shape: p.Shape}, c.norm()-1
	switch p.Role {
	case block.Norm:
		spec.Start = c.norm()
	case block.Closing:
		spec.Start, spec.Closed = c.norm(), &noNorm
	case block.Inner:
		spec.Deviation = innerDeviation
	case block.OutputBias:
		if !c.PostNorms {
			spec.Closed = new(float64)
		}
	case block.Output:
		if spec.Deviation = innerDeviation / math.Sqrt(2*float64(c.Layers)); !c.PostNorms {
			spec.Closed = new(float64)
		}
		if c.ZeroOutputs {
			spec.Deviation = 0
		}
	}

	return spec
}

// Fresh returns a function that generates the initial values of a parameter of a new block.
func (p ParamSpec) Fresh(step uint64, number int) func() float64 {
	if p.Closed != nil {
		return func() float64 { return *p.Closed }
	}
	r := rand.New(rand.NewPCG(step, uint64(number)))
	return func() float64 { return p.Start + p.Deviation*r.NormFloat64() }
}

// Names of parameters, as used by Llama weights in safetensors files.
const (
	embedName     = "model.embed_tokens.weight"
	PositionsName = "model.embed_positions.weight"
	normName      = "model.norm.weight"
	NormBiasName  = "model.norm.bias"
	headName      = "lm_head.weight"

	blocksPrefix = "model.layers."

	kasminaWeights = "kasmina.weights"
	kasminaScales  = "kasmina.scales"
)

// blockPrefix returns the prefix of the names of the parameters of block i.
func blockPrefix(i int) string { return fmt.Sprintf("%s%d.", blocksPrefix, i) }

// FLOPs returns the number of floating-point operations for training on one token, forward and backward.
//
// Each weight of a matrix product, including the output layer's, takes six operations. In each block,
// causal attention takes six operations for each feature of its heads and each position of the
// sequence, where a window W in a sequence of S positions counts as 2W − W²/S positions. (Kaplan et
// al., "Scaling Laws for Neural Language Models", 2020.)
//
// In a model with adapters, only these learn, so that each weight of the model's own takes four operations,
// two forward and two for the gradient of its input, or just the forward ones in blocks before the first
// adapter.
//
// Planted blueprints are not counted.
func (c Config) FLOPs() float64 {
	if !c.Adapter.IsZero() {
		return c.tuningFLOPs(learning{adapted: true})
	}
	return 6 * c.forwardFLOPs()
}

// tuningFLOPs returns the number of operations for training some parameters on one token. A model with seeds
// does not train like this.
func (c Config) tuningFLOPs(l learning) float64 {
	first := c.firstLearner(l)
	backward := func(block int) float64 { // for the gradient of the input, or for attention's
		if block < first {
			return 0
		}
		return 2
	}

	flops := 0.0
	for p := range c.Specs() {
		if len(p.Shape) != 2 || p.Name == PositionsName || p.Name == embedName && c.Untied ||
			p.Name == EmbeddingLayer+block.EndingEmbeddingA {
			continue
		}
		each := 2 + backward(c.blockOf(p.Name))
		if l.includes(p.Name) {
			each += 2
		}
		flops += each * float64(p.Shape[0]) * float64(p.Shape[1])
	}

	heads := float64(c.Heads * c.HeadDim)
	for i := range c.Layers {
		flops += (2 + 2*backward(i)) * heads * c.seen(i)
	}
	return flops
}

// blockOf returns the block of a parameter, or c.Layers if it is in no block. This suits parameters after the
// last block, and the embedding in its role as the output layer.
func (c Config) blockOf(param string) (block int) {
	if _, err := fmt.Sscanf(param, blocksPrefix+"%d.", &block); err != nil {
		return c.Layers
	}
	return block
}

// firstLearner returns the first block with a parameter that learns: the first of all if the embedding
// learns, and the number of blocks plus 1 if nothing does.
func (c Config) firstLearner(l learning) int {
	first := c.Layers + 1
	for p := range c.Specs() {
		switch {
		case !l.includes(p.Name):
		case strings.HasPrefix(p.Name, EmbeddingLayer+".") || p.Name == PositionsName:
			return 0
		default:
			first = min(first, c.blockOf(p.Name))
		}
	}
	return first
}

// forwardFLOPs returns the number of multiplications of a forward pass for one token.
func (c Config) forwardFLOPs() float64 {
	heads, kv := float64(c.Heads*c.HeadDim), float64(c.KVHeads*c.HeadDim)
	layers := 3.0 // layers in an MLP
	if c.PlainMLP {
		layers = 2
	}

	block := float64(c.Dim) * (2*heads + 2*kv + layers*float64(c.FF))
	flops := float64(c.Vocab) * float64(c.Dim)
	for i := range c.Layers {
		flops += block + heads*c.seen(i)
	}

	return flops
}

// seen returns twice the mean number of positions a token attends to in a block.
func (c Config) seen(block int) float64 {
	w, seq := float64(c.Seq), float64(c.Seq)
	if window := c.Block(block).Window; window > 0 {
		w = min(seq, float64(window))
	}
	return 2*w - w*w/seq
}
