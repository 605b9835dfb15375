package llm

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"path"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/llm/internal/block"
)

// LoRA describes low-rank adapters: two narrow matrices a and b next to the weight w of a linear layer,
// which computes
//
//	y = x·wᵀ + s·(x·aᵀ)·bᵀ
//
// w stays frozen, without gradient or optimizer state. The layer never forms w + s·b·a. (Hu et al.,
// "LoRA: Low-Rank Adaptation of Large Language Models", 2021.)
//
// [Adapt] adds adapters to a model, and [Model.Plain] merges them into its weights.
type LoRA struct {
	Rank  int     `json:"rank"`
	Alpha float64 `json:"alpha"` // s is Alpha/rank

	// RankStabilized sets s to Alpha/√rank, so that high-rank adapters learn as fast as others.
	// (Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023.)
	RankStabilized bool `json:"rank_stabilized,omitempty"`

	// Magnitude adds a vector m to each adapter and normalizes the rows of the weight:
	//
	//	y = m/‖w + s·b·a‖ ⊙ (x·wᵀ + s·(x·aᵀ)·bᵀ)
	//
	// (Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", 2024.)
	Magnitude bool `json:"magnitude,omitempty"`

	// Dropout is the probability with which an element of x is dropped in x·aᵀ, during training only.
	Dropout float64 `json:"dropout,omitempty"`

	// Targets names the layers to adapt, such as "model.layers.0.self_attn.q_proj", in the order of
	// [Config.LinearLayers], with [EmbeddingLayer] before and [OutputLayer] after them.
	// [Config.MatchLayers] resolves patterns.
	//
	// An adapter of the embedding adds s·b·a[id] to the vector of a token, without Magnitude and Dropout.
	// The output layer has its own adapter even if it shares its weight with the embedding.
	Targets []string `json:"targets"`

	// Ranks and Alphas override Rank and Alpha for individual targets.
	Ranks  map[string]int     `json:"ranks,omitempty"`
	Alphas map[string]float64 `json:"alphas,omitempty"`

	// Growing permits a [RankGrowth] to change Targets, Ranks and Alphas during training. Rank and Alpha then
	// determine the factor s of all adapters, regardless of their rank.
	Growing bool `json:"growing,omitempty"`
}

// IsZero reports whether l describes no adapters.
func (a LoRA) IsZero() bool { return a.Rank == 0 && a.Alpha == 0 && len(a.Targets) == 0 }

// RankOf returns the rank of a target's adapter.
func (a LoRA) RankOf(target string) int {
	if r, ok := a.Ranks[target]; ok {
		return r
	}
	return a.Rank
}

// ScaleOf returns the factor s of a target's adapter.
func (a LoRA) ScaleOf(target string) float64 {
	alpha, ok := a.Alphas[target]
	if !ok {
		alpha = a.Alpha
	}

	rank := float64(a.RankOf(target))
	if a.RankStabilized {
		return alpha / math.Sqrt(rank)
	}
	return alpha / rank
}

// growingScale returns the factor s of growing adapters, which does not depend on their rank.
func (a LoRA) growingScale() float64 {
	if a.RankStabilized {
		return a.Alpha / math.Sqrt(float64(a.Rank))
	}
	return a.Alpha / float64(a.Rank)
}

// withRanks returns growing adapters with other targets and ranks, and with the same factor s.
func (a LoRA) withRanks(targets []string, rank func(target string) int) LoRA {
	scale := a.growingScale()
	a.Targets, a.Ranks, a.Alphas = slices.Clone(targets), map[string]int{}, map[string]float64{}
	for _, target := range targets {
		n := rank(target)
		a.Ranks[target], a.Alphas[target] = n, scale*float64(n)
		if a.RankStabilized {
			a.Alphas[target] = scale * math.Sqrt(float64(n))
		}
	}
	return a
}

// sameLayers reports whether two sets of adapters for a model have the same parameters and factors.
func (a LoRA) sameLayers(b LoRA) bool {
	return a.Magnitude == b.Magnitude && slices.Equal(a.Targets, b.Targets) &&
		!slices.ContainsFunc(a.Targets, func(target string) bool {
			return a.RankOf(target) != b.RankOf(target) || a.ScaleOf(target) != b.ScaleOf(target)
		})
}

// AllLinear is the [Config.MatchLayers] pattern for all linear layers of the blocks.
const AllLinear = "all-linear"

// LinearLayers returns the names of the linear layers of all blocks, such as
// "model.layers.0.self_attn.q_proj".
func (c Config) LinearLayers() (names []string) {
	for i := range c.Layers {
		for _, p := range c.BlockShape().All() {
			if len(p.Shape) == 2 {
				names = append(names, blockPrefix(i)+strings.TrimSuffix(p.Name, ".weight"))
			}
		}
	}
	return names
}

// The layers outside the blocks that can have adapters.
const (
	EmbeddingLayer = "model.embed_tokens"
	OutputLayer    = "lm_head"
)

// adaptable returns the names of all layers that can have adapters.
func (c Config) adaptable() []string {
	return append(append([]string{EmbeddingLayer}, c.LinearLayers()...), OutputLayer)
}

// adapts reports whether a layer has an adapter.
func (c Config) adapts(layer string) bool { return slices.Contains(c.Adapter.Targets, layer) }

// layerParam returns the name of the weight of a layer that can have an adapter.
func (c Config) layerParam(layer string) string {
	if layer == OutputLayer {
		return c.headParam()
	}
	return layer + ".weight"
}

// MatchLayers returns the layers that at least one pattern matches: linear layers of blocks, the
// embedding and the output layer. A pattern is [AllLinear], which stands for the linear layers of all
// blocks, a layer's name, or the part of a name after a dot, such as "q_proj" or "self_attn.q_proj". It
// may contain the wildcards of [path.Match], as in "layers.[0-3].*.q_proj". It is an error if a pattern
// matches nothing.
func (c Config) MatchLayers(patterns ...string) ([]string, error) {
	all := c.adaptable()
	used := make([]bool, len(patterns))
	var names []string
	for _, name := range all {
		found := false
		for i, pattern := range patterns {
			if pattern == AllLinear && (name == EmbeddingLayer || name == OutputLayer) {
				continue
			}
			ok, err := matchesLayer(pattern, name)
			if err != nil {
				return nil, fmt.Errorf("llm: the pattern %.100q of linear layers: %w", pattern, err)
			}
			used[i], found = used[i] || ok, found || ok
		}
		if found {
			names = append(names, name)
		}
	}

	if i := slices.Index(used, false); i >= 0 {
		return nil, fmt.Errorf("llm: no linear layer of the model matches %.100q: the layers of a block are %s, and the "+
			"others are embed_tokens and lm_head", patterns[i], strings.Join(c.layersOfBlock(), ", "))
	}

	return names, nil
}

// matchesLayer reports whether a pattern matches the name of a layer or its end after a dot.
func matchesLayer(pattern, name string) (bool, error) {
	if pattern == AllLinear {
		return true, nil
	}

	for {
		if ok, err := path.Match(pattern, name); ok || err != nil {
			return ok, err
		}
		_, rest, more := strings.Cut(name, ".")
		if !more {
			return false, nil
		}
		name = rest
	}
}

// layersOfBlock returns the names of the linear layers of a block.
func (c Config) layersOfBlock() (names []string) {
	for _, p := range c.BlockShape().All() {
		if name, ok := strings.CutSuffix(p.Name, ".weight"); ok && len(p.Shape) == 2 {
			names = append(names, name)
		}
	}
	return names
}

// LastBlocks returns the value of TrainConfig.Tuned that trains the last n blocks and the final norm.
func (c Config) LastBlocks(n int) (tuned []string, err error) {
	if n < 1 || n > c.Layers {
		return nil, fmt.Errorf("llm: the last %d blocks of a model that has %d: want 1 to %d", n, c.Layers,
			c.Layers)
	}
	for i := c.Layers - n; i < c.Layers; i++ {
		tuned = append(tuned, blockPrefix(i)+"*")
	}
	return append(tuned, "model.norm.*"), nil
}

// IsAdapterParam reports whether a parameter belongs to a low-rank adapter.
func IsAdapterParam(name string) bool {
	return strings.HasSuffix(name, block.EndingA) || strings.HasSuffix(name, block.EndingB) ||
		strings.HasSuffix(name, block.EndingMagnitude) || strings.HasSuffix(name, block.EndingEmbeddingA) ||
		strings.HasSuffix(name, block.EndingEmbeddingB)
}

// headParam returns the name of the weight of the output layer.
func (c Config) headParam() string {
	if c.Untied {
		return headName
	}
	return embedName
}

// adapterSpecs returns the parameters of the adapters. At the start, b is 0, so that an adapter changes
// nothing, and a is random, with the standard deviation that PyTorch uses for linear layers.
func (c Config) adapterSpecs() (all []ParamSpec) {
	if c.Adapter.IsZero() {
		return nil
	}

	shapes := c.layerShapes()
	for _, target := range c.Adapter.Targets {
		weight, rank := shapes[target], c.Adapter.RankOf(target)
		if weight == nil {
			continue // Check reports the unknown target
		}

		out, in := weight[0], weight[1]
		if target == EmbeddingLayer { // as in PEFT, a is 0 at first
			all = append(all, ParamSpec{Name: target + block.EndingEmbeddingA, Shape: []int{out, rank}},
				ParamSpec{Name: target + block.EndingEmbeddingB, Shape: []int{in, rank}, Deviation: 1})
			continue
		}
		all = append(all,
			ParamSpec{Name: target + block.EndingA, Shape: []int{rank, in}, Deviation: 1 / math.Sqrt(3*float64(in))},
			ParamSpec{Name: target + block.EndingB, Shape: []int{out, rank}})
		if c.Adapter.Magnitude {
			all = append(all, ParamSpec{Name: target + block.EndingMagnitude, Shape: []int{out}, Start: 1})
		}
	}

	return all
}

// layerShapes returns the shapes of the weights of all layers that can have adapters.
func (c Config) layerShapes() map[string][]int {
	shapes := map[string][]int{EmbeddingLayer: {c.Vocab, c.Dim}, OutputLayer: {c.Vocab, c.Dim}}
	for i := range c.Layers {
		for _, p := range c.BlockShape().All() {
			if len(p.Shape) == 2 {
				shapes[blockPrefix(i)+strings.TrimSuffix(p.Name, ".weight")] = p.Shape
			}
		}
	}
	return shapes
}

// adaptersOf returns the adapters of block i.
func (c Config) adaptersOf(i int) (all []block.Adapter) {
	for k, target := range c.Adapter.Targets {
		if layer, ok := strings.CutPrefix(target, blockPrefix(i)); ok {
			all = append(all, block.Adapter{Layer: layer, Scale: c.Adapter.ScaleOf(target),
				Magnitude: c.Adapter.Magnitude, Dropout: c.Adapter.Dropout, Salt: uint64(k)})
		}
	}
	return all
}

// headAdapter returns the adapter of the output layer, without dropout unless the graph trains.
func (c Config) headAdapter(trains bool) (a block.Adapter, ok bool) {
	k := slices.Index(c.Adapter.Targets, OutputLayer)
	if k < 0 {
		return a, false
	}
	a = block.Adapter{Layer: OutputLayer, Scale: c.Adapter.ScaleOf(OutputLayer), Magnitude: c.Adapter.Magnitude,
		Salt: uint64(k)}
	if trains {
		a.Dropout = c.Adapter.Dropout
	}
	return a, true
}

// checkAdapter checks the adapters.
func (c Config) checkAdapter() error {
	a := c.Adapter
	if a.IsZero() {
		return nil
	}

	if len(c.Kasmina)+len(c.Weights)+len(c.Streams) > 0 || c.Depth > 0 {
		return errors.New("llm: Config.Adapter is for models without seeds: leave out Kasmina, Weights, " +
			"Streams and Depth")
	}

	if len(a.Targets) == 0 {
		return errors.New("llm: Config.Adapter.Targets is empty, want names of linear layers, as " +
			"Config.MatchLayers returns them")
	}

	if !(a.Dropout >= 0 && a.Dropout < 1) {
		return fmt.Errorf("llm: Config.Adapter.Dropout is %v, want at least 0 and less than 1", a.Dropout)
	}

	if a.Magnitude && c.adapts(EmbeddingLayer) {
		return fmt.Errorf("llm: Config.Adapter: the embedding has no adapters with magnitudes: leave out %s, or "+
			"Magnitude", EmbeddingLayer)
	}

	layers := c.adaptable()
	last := -1
	for _, target := range a.Targets {
		i := slices.Index(layers, target)
		if i < 0 {
			return fmt.Errorf("llm: Config.Adapter.Targets names %.100q, and the model has no such linear layer",
				target)
		}
		if i <= last {
			return fmt.Errorf("llm: Config.Adapter.Targets names %s twice or out of order", target)
		}
		last = i

		if rank := a.RankOf(target); rank < 1 || rank > maxField {
			return fmt.Errorf("llm: the adapter of %s has rank %d, want 1 to %d", target, rank, maxField)
		}
		if s := a.ScaleOf(target); !(s > 0) || math.IsInf(s, 0) {
			return fmt.Errorf("llm: the adapter of %s has the factor %v, want a finite Alpha above 0", target, s)
		}
	}

	for _, target := range slices.Concat(slices.Sorted(maps.Keys(a.Ranks)),
		slices.Sorted(maps.Keys(a.Alphas))) {
		if !slices.Contains(a.Targets, target) {
			return fmt.Errorf("llm: Config.Adapter has a rank or an alpha for %.100q, which is no target", target)
		}
	}

	return nil
}
