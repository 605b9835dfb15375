package llm

import (
	"errors"
	"fmt"
	"math"
	"path"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm/internal/block"
)

// WeightSite is a linear layer that carries a seed.
type WeightSite struct {
	Block int    `json:"block"` // counted from 0; 0 for the output layer
	Layer string `json:"layer"` // "q", "k", "v", "o", "gate", "up", "down" or "head"
}

// headLayer is the output layer. If it shares its weight with the embedding, a seed on it grows both.
const headLayer = "head"

// linearLayers maps layer names to the parameters of a block that weight seeds may grow.
var linearLayers = map[string]string{"q": "self_attn.q_proj.weight", "k": "self_attn.k_proj.weight",
	"v": "self_attn.v_proj.weight", "o": "self_attn.o_proj.weight", "gate": "mlp.gate_proj.weight",
	"up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight"}

// WeightSites returns the sites of the named layers in every block, in order.
func (c Config) WeightSites(layers ...string) (sites []WeightSite) {
	for i := range c.Layers {
		for _, l := range layers {
			if l != headLayer {
				sites = append(sites, WeightSite{i, l})
			}
		}
	}

	if slices.Contains(layers, headLayer) {
		sites = append(sites, WeightSite{0, headLayer})
	}

	return sites
}

// Planted is a blueprint with its own parameters at a weight or in the stream.
type Planted struct {
	Site blueprints.Site `json:"site"`
	Seed int             `json:"seed"` // in the site's lattice
	Kind string          `json:"kind"`
	Size int             `json:"size"`
}

// seedsPrefix is the prefix of all parameters of blueprints at weights and in the stream.
const seedsPrefix = "kasmina."

// IsSeedParam reports whether a parameter belongs to a blueprint on a chunk, at a weight or in the
// stream, rather than to the model itself.
func IsSeedParam(param string) bool {
	return strings.HasPrefix(param, seedsPrefix) || strings.HasSuffix(param, "."+kasminaWeights) ||
		strings.HasSuffix(param, "."+kasminaScales)
}

// learning determines which parameters learn.
type learning struct {
	frozen  bool     // only the parameters of planted blueprints
	tuned   []string // only these and the parameters of adapters; patterns
	adapted bool     // the model has adapters: without tuned, only their parameters
}

// includes reports whether a parameter learns.
func (l learning) includes(param string) bool {
	switch {
	case l.frozen:
		return strings.HasPrefix(param, seedsPrefix)
	case IsAdapterParam(param):
		return true
	case len(l.tuned) == 0:
		return !l.adapted
	}
	return slices.ContainsFunc(l.tuned, func(pattern string) bool {
		ok, _ := path.Match(pattern, param) // checkTuned has reported errors
		return ok
	})
}

// Learns reports whether training with c changes a parameter. If c comes from a trainer, the adapters of
// the trainer's model count.
func (c TrainConfig) Learns(param string) bool {
	return learning{c.Frozen, c.Tuned, c.adapted}.includes(param)
}

// checkTuned returns an error if a model lacks parameters named by Tuned, or cannot leave the others
// unchanged.
func (c TrainConfig) checkTuned(m Config) error {
	if len(c.Tuned) == 0 {
		return nil
	}

	if c.Frozen || len(m.Weights)+len(m.Streams) > 0 || m.Depth > 0 ||
		len(m.Kasmina) > 0 && !slices.Equal(c.Tuned, SeedPatterns()) {
		return errors.New("llm: TrainConfig.Tuned is for models without seeds: leave out Frozen, and Kasmina, " +
			"Weights, Streams and Depth of the Config. In a model with Kasmina layers, it can be SeedPatterns()")
	}

	for _, pattern := range c.Tuned {
		found := false
		for name := range m.Parameters() {
			ok, err := path.Match(pattern, name)
			if err != nil {
				return fmt.Errorf("llm: TrainConfig.Tuned has the pattern %.100q: %w", pattern, err)
			}
			found = found || ok && !IsAdapterParam(name)
		}
		if !found {
			return fmt.Errorf("llm: TrainConfig.Tuned names %.100q, and the model has no such parameter",
				pattern)
		}
	}

	return nil
}

// checkFrozen returns an error if a model cannot be trained with c's settings for Frozen and
// Directed.
func (c TrainConfig) checkFrozen(m Config) error {
	if c.Frozen && (len(m.Weights)+len(m.Streams) == 0 || len(m.Kasmina) > 0 || m.Depth > 0) {
		return fmt.Errorf("llm: TrainConfig.Frozen is set, and the model has %d seeds at Weights, %d in "+
			"Streams, %d Kasmina layers and %d seeds in Depth: want seeds at Weights or in Streams alone",
			len(m.Weights), len(m.Streams), len(m.Kasmina), m.Depth)
	}
	if c.Directed && !c.Frozen {
		return errors.New("llm: TrainConfig.Directed is set, and Frozen is not: want both")
	}
	return nil
}

// trainableIn returns the number of values that training with c changes.
func trainableIn(m *Model, c TrainConfig) (n int) {
	for _, p := range m.Params {
		if !c.Learns(p.Name) {
			continue
		}
		n += m.sizeOf(p)
		if len(c.Tuned) > 0 && IsSeedParam(p.Name) { // slot 0 is never used
			n -= m.sizeOf(p) / m.Config.Slots
		}
	}
	return n
}

// seedPrefix returns the prefix of the names of a blueprint's parameters. It does not change when the
// blueprint's place moves.
func seedPrefix(site blueprints.Site, seed int) string {
	return fmt.Sprintf("%s%v.%d.", seedsPrefix, site, seed)
}

// Prefix returns the prefix of the names of p's parameters.
func (p Planted) Prefix() string { return seedPrefix(p.Site, p.Seed) }

// Seeded returns the number of seeds at a site other than chunks.
func (c Config) Seeded(site blueprints.Site) int {
	switch site {
	case blueprints.Depth:
		return c.Depth
	case blueprints.Weight:
		return len(c.Weights)
	case blueprints.Stream:
		return len(c.Streams)
	}
	return 0
}

// Sites returns the sites other than chunks that have seeds, in the order of their lattices.
func (c Config) Sites() (sites []blueprints.Site) {
	for _, s := range []blueprints.Site{blueprints.Weight, blueprints.Stream, blueprints.Depth} {
		if c.Seeded(s) > 0 {
			sites = append(sites, s)
		}
	}
	return sites
}

// BlockOf returns the block that a blueprint grows in, Layers for the head, and -1 for an unknown seed.
func (c Config) BlockOf(p Planted) int {
	places := len(c.Weights)
	if p.Site == blueprints.Stream {
		places = len(c.Streams)
	}

	switch {
	case p.Seed < 0 || p.Seed >= places:
		return -1
	case p.Site == blueprints.Stream:
		return c.Streams[p.Seed]
	case c.Weights[p.Seed].Layer == headLayer:
		return c.Layers
	}

	return c.Weights[p.Seed].Block
}

// WeightName returns the name of the parameter that a weight seed grows.
func (c Config) WeightName(s WeightSite) string {
	switch {
	case s.Layer != headLayer:
		return blockPrefix(s.Block) + linearLayers[s.Layer]
	case c.Untied:
		return headName
	}
	return embedName
}

// host returns the dimensions of the layer or stream that a seed's blueprint grows on.
func (c Config) host(site blueprints.Site, seed int) blueprints.Host {
	h := blueprints.Host{In: c.Dim, Out: c.Dim, Seq: c.Seq}
	if site != blueprints.Weight {
		return h
	}

	s := c.Weights[seed]
	if s.Layer == headLayer {
		h.Out = c.Vocab
		return h
	}

	for _, p := range c.BlockShape().All() {
		if p.Name == linearLayers[s.Layer] {
			h.Out, h.In = p.Shape[0], p.Shape[1]
		}
	}

	return h
}

// LoRAScale returns the factor on B·A for a blueprint of the given rank: LoRAAlpha/rank, or 1.
func (c Config) LoRAScale(rank int) float64 {
	if c.LoRAAlpha == 0 {
		return 1
	}
	return c.LoRAAlpha / float64(rank)
}

// StreamShape returns the shape of an Attention with size heads, or of a Perceptron with size hidden
// features, as one half of a block. It returns an error if the blueprint would not fit into a block of
// the model.
func (c Config) StreamShape(kind blueprints.Kind, size int) (s block.Shape, attention bool,
	err error) {
	s = c.BlockShape()
	if kind == blueprints.Perceptron {
		if size < 1 || size > c.FF {
			err = fmt.Errorf("a Perceptron of %d hidden features, want at least 1 and at most those of "+
				"a block, %d, since it becomes a block", size, c.FF)
		}
		s.FF = size
		return s, false, err
	}

	if c.Heads < 1 || c.KVHeads < 1 {
		return s, true, errors.New("the configuration has no heads: see Config.Default")
	}

	group := c.Heads / c.KVHeads
	if size < 1 || size > c.Heads || size > group && size%group != 0 {
		return s, true, fmt.Errorf("an Attention of %d heads, want 1 to %d, or a multiple of that "+
			"up to %d, to match the key-value heads of the model's blocks, since it becomes a block", size,
			group, c.Heads)
	}

	if c.WideQKNorm && size != c.Heads {
		return s, true, fmt.Errorf("an Attention of %d heads, want %d: the model normalizes queries "+
			"over all heads, so one with fewer heads cannot become a block", size, c.Heads)
	}

	s.Heads, s.KVHeads = size, max(1, size/group)
	return s, true, nil
}

// SeedParams returns the parameters of a planted blueprint, in the order that its graph expects. It
// returns an error if the blueprint cannot grow there.
func (c Config) SeedParams(p Planted) (all []ParamSpec, err error) {
	kind, ok := blueprints.ByName(p.Kind)
	if !ok {
		return nil, fmt.Errorf("%w %.40q: register it first", blueprints.ErrUnknownKind, p.Kind)
	}

	if b, err := blueprints.Lookup(kind); err != nil || b.Site != p.Site {
		return nil, fmt.Errorf("a %v does not grow at a %v", kind, p.Site)
	}

	if p.Seed < 0 || p.Seed >= c.Seeded(p.Site) {
		return nil, fmt.Errorf("seed %d of site %v, which has %d", p.Seed, p.Site,
			c.Seeded(p.Site))
	}

	h := c.host(p.Site, p.Seed)
	switch kind {
	case blueprints.LoRA:
		if p.Size < 1 || p.Size > min(h.In, h.Out) {
			return nil, fmt.Errorf("a LoRA of rank %d on a layer from %d to %d features, want 1 to "+
				"the smaller number", p.Size, h.In, h.Out)
		}
		// Hidden features of a normal x are normal; the product is 0 at first.
		return []ParamSpec{
			{p.Prefix() + "a", []int{p.Size, h.In}, 0, 1 / math.Sqrt(float64(h.In)), nil},
			{p.Prefix() + "b", []int{h.Out, p.Size}, 0, 0, nil}}, nil
	case blueprints.Attention, blueprints.Perceptron:
		shape, attention, err := c.StreamShape(kind, p.Size)
		if err != nil {
			return nil, err
		}
		for _, q := range shape.Half(attention) {
			spec := c.blockSpec(p.Prefix(), q)
			if spec.Closed != nil { // initially without effect on the stream
				spec.Start, spec.Deviation = *spec.Closed, 0
			}
			all = append(all, spec)
		}
		return all, nil
	}

	if p.Site == blueprints.Stream {
		all = append(all, ParamSpec{p.Prefix() + "norm", []int{c.Dim}, c.norm(), 0, nil})
		if c.LayerNorm {
			all = append(all, ParamSpec{p.Prefix() + "norm.bias", []int{c.Dim}, 0, 0, nil})
		}
	}

	params, err := blueprints.ParametersOf(kind, h, p.Size)
	for _, q := range params {
		all = append(all, ParamSpec{p.Prefix() + q.Name, q.Shape, q.Start, q.Deviation, nil})
	}

	return all, err
}

// SeedSize returns the number of elements in a blueprint's parameters, whether or not it is planted.
// It returns an error if the blueprint cannot grow there.
func (c Config) SeedSize(p Planted) (n int, err error) {
	specs, err := c.SeedParams(p)
	if err != nil {
		return 0, err
	}

	for _, s := range specs {
		size := 1
		for _, d := range s.Shape {
			size *= d
		}
		n += size
	}

	return n, nil
}

// checkSites returns an error unless Weights and Streams name valid places and every planted blueprint
// fits its place.
func (c Config) checkSites() error {
	const most = 1 << 14
	if len(c.Weights) > most || len(c.Streams) > most {
		return fmt.Errorf("llm: Config.Weights has %d sites and Streams %d, want at most %d",
			len(c.Weights), len(c.Streams), most)
	}

	if !(c.LoRAAlpha >= 0) || math.IsInf(c.LoRAAlpha, 0) {
		return fmt.Errorf("llm: Config.LoRAAlpha is %v, want a finite number above 0, or 0 for "+
			"the rank", c.LoRAAlpha)
	}

	for i, s := range c.Weights {
		if _, ok := linearLayers[s.Layer]; !ok && s.Layer != headLayer {
			return fmt.Errorf("llm: Config.Weights[%d].Layer is %.40q, want q, k, v, o, gate, up, "+
				"down or head", i, s.Layer)
		}
		if s.Layer == "gate" && c.PlainMLP {
			return fmt.Errorf("llm: Config.Weights[%d].Layer is gate, and perceptrons of a model with "+
				"PlainMLP have none: want q, k, v, o, up, down or head", i)
		}
		if s.Block < 0 || s.Block >= c.Layers || s.Layer == headLayer && s.Block != 0 {
			return fmt.Errorf("llm: Config.Weights[%d].Block is %d, want 0 to %d, and 0 for the "+
				"head", i, s.Block, c.Layers-1)
		}
	}

	for i, b := range c.Streams {
		if b < 0 || b >= c.Layers {
			return fmt.Errorf("llm: Config.Streams[%d] names block %d, want 0 to %d", i, b,
				c.Layers-1)
		}
	}

	return nil
}

// StreamOrder returns the order of blocks with a new one inserted at a seed of the stream.
func (c Config) StreamOrder(seed int) (order []int) {
	for i := range c.Layers {
		order = append(order, i)
		if seed >= 0 && seed < len(c.Streams) && i == c.Streams[seed] {
			order = append(order, blueprints.NewBlock)
		}
	}
	return order
}

// moved returns the configuration with the places of seeds updated for a new order of blocks. A seed
// moves with the first copy of its block.
func (c Config) moved(order []int) Config {
	c.Streams, c.Weights = slices.Clone(c.Streams), slices.Clone(c.Weights)
	for i, b := range c.Streams {
		c.Streams[i] = slices.Index(order, b)
	}
	for i, s := range c.Weights {
		if s.Layer != headLayer {
			c.Weights[i].Block = slices.Index(order, s.Block)
		}
	}
	return c
}

// unmoved reverses moved. A seed at a new block returns to the old block before it.
func (c Config) unmoved(order []int) Config {
	c.Streams, c.Weights = slices.Clone(c.Streams), slices.Clone(c.Weights)
	from := func(b int) int {
		for b > 0 && order[b] == blueprints.NewBlock {
			b--
		}
		return order[b]
	}

	for i, b := range c.Streams {
		c.Streams[i] = from(b)
	}

	for i, s := range c.Weights {
		if s.Layer != headLayer {
			c.Weights[i].Block = from(s.Block)
		}
	}

	return c
}
