package llm

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm/internal/block"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/op/chunks"
	"github.com/kasmina-go/kasmina/state"
)

// A SeedLayer holds the seeds of the Kasmina layer after a block, separately from a model.
type SeedLayer struct {
	Block  int         // the block before the layer
	Chunks int         // the number of equal chunks into which the features are divided
	Seeds  []ChunkSeed // in the order of their chunks
}

// A ChunkSeed replaces a chunk x of the features by x + Alpha·(t(x) − x), where t is the transform of its kind.
type ChunkSeed struct {
	Chunk   int
	Kind    string // the name of the blueprint
	Alpha   float64
	Scale   float64
	Weights *tensor.Dense // a vector
}

// SeedAdapter returns an adapter with copies of all seeds at chunks and at weights that change the model's output. Seeds
// at weights become low-rank adapters. A [Batcher] for the model without the seeds can choose the adapter for some of
// its texts. The result is correct only if the two models have the same parameters apart from the seeds, as after
// [TuneSeeds], or after training with TrainConfig.Frozen.
//
// SeedAdapter returns an error if seeds in the stream or in depth change the output, if the kind of a chunk seed is a
// graph, or if the Kasmina layers are in Strict mode.
func (m *Model) SeedAdapter() (*Adapter, error) {
	done, err := m.Current()
	if err != nil {
		return nil, fmt.Errorf("llm: SeedAdapter: %w", err)
	}
	defer done()

	a, err := m.seedAdapter()
	if err != nil {
		return nil, fmt.Errorf("llm: SeedAdapter: %w", err)
	}
	return a, nil
}

// seedAdapter implements SeedAdapter for a locked model.
func (m *Model) seedAdapter() (*Adapter, error) {
	c, a := m.Config, &Adapter{}
	if m.KasminaOptions.Stability == op.Strict {
		return nil, errors.New("the Kasmina layers are in the mode Strict, whose limits depend on training")
	}

	width := c.KasminaWidth()
	for layer, block := range c.Kasmina {
		var pass state.Pass
		m.Kasmina.Lattice(layer).Begin(&pass, false)
		prefix := blockPrefix(block)
		l := SeedLayer{Block: block, Chunks: c.Seeds}
		for i, stage := range pass.Stage {
			if !stage.Blends() || pass.Slot[i] == 0 || pass.Alpha[i] == 0 {
				continue
			}
			kind := pass.Kind[i]
			if blueprints.IsGraph(kind) {
				return nil, fmt.Errorf("seed %d after block %d has a %v, which is a graph and can only be part of a model", i,
					block, kind)
			}
			n, err := blueprints.Size(kind, c.Dim/c.Seeds, width)
			if err != nil {
				return nil, err
			}
			at := int(pass.Slot[i]) * width
			s := ChunkSeed{Chunk: i, Kind: kind.String(), Alpha: float64(pass.Alpha[i])}
			switch w := m.Param(prefix + kasminaWeights).Data().(type) {
			case []float32:
				s.Weights = tensor.New(tensor.WithShape(n), tensor.WithBacking(slices.Clone(w[at:at+n])))
				s.Scale = float64(m.Param(prefix + kasminaScales).Float32s()[pass.Slot[i]])
			case []float64:
				s.Weights = tensor.New(tensor.WithShape(n), tensor.WithBacking(slices.Clone(w[at:at+n])))
				s.Scale = m.Param(prefix + kasminaScales).Float64s()[pass.Slot[i]]
			}
			l.Seeds = append(l.Seeds, s)
		}
		if len(l.Seeds) > 0 {
			a.Seeds = append(a.Seeds, l)
		}
	}
	if err := m.addWeightSeeds(a); err != nil {
		return nil, err
	}
	if len(a.Seeds) == 0 && a.LoRA.IsZero() {
		return nil, errors.New("no seed at a chunk or a weight changes the model's output")
	}
	return a, nil
}

// addWeightSeeds adds the seeds at weights as low-rank adapters. Several seeds at one weight become one adapter.
func (m *Model) addWeightSeeds(a *Adapter) error {
	var pass state.Pass
	planted := map[string][]Planted{} // by target
	scales := map[Planted]float64{}
	for _, p := range m.Planted {
		m.Kasmina.Lattice(m.LayerAt(p.Site)).Begin(&pass, false)
		if !pass.Stage[p.Seed].Blends() || pass.Alpha[p.Seed] == 0 {
			continue
		}
		if p.Site != blueprints.Weight || p.Kind != blueprints.LoRA.String() {
			return fmt.Errorf("seed %d of site %v has a %s, which texts cannot choose: want LoRAs at weights, and chunk seeds",
				p.Seed, p.Site, p.Kind)
		}
		target := strings.TrimSuffix(m.Config.WeightName(m.Config.Weights[p.Seed]), ".weight")
		planted[target] = append(planted[target], p)
		scales[p] = float64(pass.Alpha[p.Seed]) * m.Config.LoRAScale(p.Size)
	}
	if len(planted) == 0 {
		return nil
	}

	// Each Alpha equals its rank, so the adapter itself adds no factor. The seeds' factors are multiplied into b.
	a.LoRA = LoRA{Rank: 1, Alpha: 1, Ranks: map[string]int{}, Alphas: map[string]float64{}}
	for _, target := range m.Config.LinearLayers() {
		seeds := planted[target]
		if seeds == nil {
			continue
		}
		rank := 0
		for _, p := range seeds {
			rank += p.Size
		}
		a.LoRA.Targets = append(a.LoRA.Targets, target)
		a.LoRA.Ranks[target], a.LoRA.Alphas[target] = rank, float64(rank)
		delete(planted, target)

		first, second := m.stackLoRA(seeds, scales, rank)
		a.Params = append(a.Params, Param{target + block.EndingA, first}, Param{target + block.EndingB, second})
	}
	for _, target := range slices.Sorted(maps.Keys(planted)) {
		return fmt.Errorf("a seed at %s changes the embedding or the output layer, which texts cannot choose", target)
	}
	return nil
}

// stackLoRA returns the matrices a and b of an adapter that computes the sum of several seeds at one weight. scales holds
// the factor of each seed, and rank is the sum of their ranks.
func (m *Model) stackLoRA(seeds []Planted, scales map[Planted]float64, rank int) (a, b *tensor.Dense) {
	shape := func(ending string) tensor.Shape { return m.Param(seeds[0].Prefix() + ending).Shape() }
	in, out := shape("a")[1], shape("b")[0]
	a = newParamValue(m.Dtype(), []int{rank, in}, nil)
	b = newParamValue(m.Dtype(), []int{out, rank}, nil)
	from := 0
	for _, p := range seeds {
		narrow, wide := m.Param(p.Prefix()+"a"), m.Param(p.Prefix()+"b")
		switch to := a.Data().(type) {
		case []float32:
			copy(to[from*in:], narrow.Float32s())
			placeColumns(b.Float32s(), wide.Float32s(), float32(scales[p]), rank, p.Size, from)
		case []float64:
			copy(to[from*in:], narrow.Float64s())
			placeColumns(b.Float64s(), wide.Float64s(), scales[p], rank, p.Size, from)
		}
		from += p.Size
	}
	return a, b
}

// placeColumns multiplies a matrix of n columns by s and writes it to n consecutive columns, starting at column from, of a
// matrix with width columns.
func placeColumns[T float32 | float64](to, columns []T, s T, width, n, from int) {
	for i := range len(columns) / n {
		for j := range n {
			to[i*width+from+j] = s * columns[i*n+j]
		}
	}
}

// TuneSeeds returns a model with a Kasmina layer after each block. Each layer has one seed, which holds a new blueprint
// of the given kind and rank in the stage FineTuning. The kind is [blueprints.LowRank] or [blueprints.ChunkMLP]. The new
// model initially computes the same function as m. Both models share the memory of m's parameters.
//
// Train it with TrainConfig.Tuned set to [SeedPatterns], so that only the seeds learn.
func TuneSeeds(m *Model, kind blueprints.Kind, rank int) (*Model, error) {
	done, err := m.Current()
	if err != nil {
		return nil, fmt.Errorf("llm: TuneSeeds: %w", err)
	}
	defer done()

	if m.Base != nil {
		return nil, errors.New("llm: TuneSeeds: the model has compact weights, want a plain one")
	}
	c, err := SeedConfig(m.Config, kind, rank)
	if err != nil {
		return nil, fmt.Errorf("llm: TuneSeeds: %w", err)
	}
	next, err := m.withLayers(c)
	if err != nil {
		return nil, fmt.Errorf("llm: TuneSeeds: %w", err)
	}
	for layer := range c.Kasmina {
		if err := next.activate(layer, 0, 1, kind, state.FineTuning); err != nil {
			return nil, fmt.Errorf("llm: TuneSeeds: %w", err)
		}
	}
	return next, nil
}

// SeedConfig returns the configuration that [TuneSeeds] gives to a model with configuration c.
func SeedConfig(c Config, kind blueprints.Kind, rank int) (Config, error) {
	switch {
	case len(c.Kasmina)+len(c.Weights)+len(c.Streams)+c.Depth > 0 || !c.Adapter.IsZero():
		return c, errors.New("the model has seeds or adapters already, want a plain one")
	case kind != blueprints.LowRank && kind != blueprints.ChunkMLP:
		return c, fmt.Errorf("the kind is %v, want LowRank or ChunkMLP, which have ranks", kind)
	case rank < 1 || rank > c.Dim:
		return c, fmt.Errorf("the rank is %d, want 1 to %d, the number of features", rank, c.Dim)
	}
	c.Seeds, c.Slots, c.SlotWidth = 1, 2, 2*rank*c.Dim
	for i := range c.Layers {
		c.Kasmina = append(c.Kasmina, i)
	}
	return c, nil
}

// SeedPatterns returns patterns for TrainConfig.Tuned that match the parameters of chunk seeds and nothing else.
func SeedPatterns() []string { return []string{"*." + kasminaWeights, "*." + kasminaScales} }

// withLayers returns a model that shares m's parameters and has configuration c, which is m's configuration with added
// Kasmina layers.
func (m *Model) withLayers(c Config) (next *Model, err error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	next = &Model{Config: c, KasminaOptions: m.KasminaOptions, Base: m.Base, byName: map[string]int{}}
	for p := range c.Specs() {
		v := m.Param(p.Name)
		if v == nil && !m.Base.Has(p.Name) {
			v = newParamValue(m.Dtype(), p.Shape, nil)
		}
		next.byName[p.Name] = len(next.Params)
		next.Params = append(next.Params, Param{p.Name, v})
	}
	next.Kasmina, err = next.newNetwork(state.WithoutGates())
	return next, err
}

// activate plants a blueprint in a dormant seed, and moves the seed through all stages up to the given one.
func (m *Model) activate(layer, seed, slot int, kind blueprints.Kind, to state.Stage) error {
	commands := []state.Command{{Action: state.Germinate, Layer: layer, Seed: seed,
		Request: state.GerminationRequest{Slot: slot, Kind: kind}}}
	for _, stage := range []state.Stage{state.Training, state.Grafting, state.Stabilization, state.Evaluating,
		state.FineTuning, state.Fossilized} {
		commands = append(commands, state.Command{Action: state.Move, Layer: layer, Seed: seed, To: stage})
		if stage == to {
			break
		}
	}
	return m.Kasmina.Do(commands...)
}

// layer converts l to a layer of package chunks.
func (l SeedLayer) layer() (*chunks.Layer, error) {
	out := &chunks.Layer{Chunks: l.Chunks}
	for _, s := range l.Seeds {
		kind, ok := blueprints.ByName(s.Kind)
		if !ok {
			return nil, fmt.Errorf("%w %.40q: register it first", blueprints.ErrUnknownKind, s.Kind)
		}
		if s.Weights == nil {
			return nil, fmt.Errorf("the seed at chunk %d has no weights", s.Chunk)
		}
		out.Seeds = append(out.Seeds, chunks.Seed{Chunk: s.Chunk, Kind: kind, Alpha: s.Alpha, Scale: s.Scale,
			Weights: s.Weights.Data()})
	}
	return out, nil
}

// seedsFit returns an error unless the adapter's seeds fit models of configuration c with parameters of type dt.
func (a *Adapter) seedsFit(c Config, dt tensor.Dtype) error {
	before := -1
	for _, l := range a.Seeds {
		if l.Block <= before || l.Block >= c.Layers {
			return fmt.Errorf("the adapter does not fit the model: it has seeds after block %d after those of block %d, and "+
				"the model has %d blocks", l.Block, before, c.Layers)
		}
		before = l.Block
		layer, err := l.layer()
		if err == nil {
			err = layer.Check(c.Dim, dt)
		}
		if err != nil {
			return fmt.Errorf("the adapter does not fit the model: its seeds after block %d: %w", l.Block, err)
		}
	}
	return nil
}
