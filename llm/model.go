package llm

import (
	"fmt"
	"math"
	"math/rand/v2"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
)

// Param is a trainable tensor of a model.
type Param struct {
	Name  string
	Value *tensor.Dense
}

// Model is a set of parameters and seed lattices in the shape that a [Config] describes. It holds no graph: Graph builds as
// many as needed (to train, to evaluate, to sample), all of which share the model's parameters.
type Model struct {
	Config   Config
	Params   []Param          // in the order in which the model uses them
	Lattices []*state.Lattice // one for each entry of Config.Kasmina

	byName         map[string]int
	latticeOptions []state.Option
}

// NewModel returns a model with fresh parameters of type dt, float32 or float64: normal with deviation 0.02, those that
// write to the residual stream divided by sqrt(2·Layers) (Radford et al., "Language Models are Unsupervised Multitask
// Learners", 2019), norms at 1, and Kasmina slots at the Residual kind's identity. The same seed gives the same parameters.
// The lattices get the given options.
func NewModel(c Config, dt tensor.Dtype, seed uint64, lattice ...state.Option) (*Model, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	if dt != tensor.Float32 && dt != tensor.Float64 {
		return nil, fmt.Errorf("llm: parameters of type %v, want float32 or float64", dt)
	}
	m := &Model{Config: c, byName: map[string]int{}, latticeOptions: lattice}
	normal := func(deviation float64) func(*rand.Rand) float64 {
		return func(r *rand.Rand) float64 { return deviation * r.NormFloat64() }
	}
	constant := func(v float64) func(*rand.Rand) float64 { return func(*rand.Rand) float64 { return v } }
	add := func(name string, fill func(*rand.Rand) float64, shape ...int) {
		// Each parameter has a stream of its own, so that adding one does not change the others.
		r := rand.New(rand.NewPCG(seed, uint64(len(m.Params))))
		m.byName[name] = len(m.Params)
		m.Params = append(m.Params, Param{name, newParam(dt, shape, func() float64 { return fill(r) })})
	}
	in, out := normal(0.02), normal(0.02/math.Sqrt(2*float64(c.Layers)))
	qd, kd := c.Heads*c.HeadDim, c.KVHeads*c.HeadDim
	add(embedName, in, c.Vocab, c.Dim)
	for i := range c.Layers {
		p := blockPrefix(i)
		add(p+"input_layernorm.weight", constant(1), c.Dim)
		add(p+"self_attn.q_proj.weight", in, qd, c.Dim)
		add(p+"self_attn.k_proj.weight", in, kd, c.Dim)
		add(p+"self_attn.v_proj.weight", in, kd, c.Dim)
		add(p+"self_attn.o_proj.weight", out, c.Dim, qd)
		add(p+"post_attention_layernorm.weight", constant(1), c.Dim)
		add(p+"mlp.gate_proj.weight", in, c.FF, c.Dim)
		add(p+"mlp.up_proj.weight", in, c.FF, c.Dim)
		add(p+"mlp.down_proj.weight", out, c.Dim, c.FF)
	}
	for _, b := range c.Kasmina {
		p := blockPrefix(b)
		add(p+kasminaWeights, constant(0), c.Slots, c.Dim/c.Seeds)
		add(p+kasminaScales, constant(1), c.Slots)
		l, err := m.newLattice()
		if err != nil {
			return nil, fmt.Errorf("llm: Kasmina layer after block %d: %w", b, err)
		}
		m.Lattices = append(m.Lattices, l)
	}
	add(normName, constant(1), c.Dim)
	if c.Untied {
		add(headName, in, c.Vocab, c.Dim)
	}
	return m, nil
}

func (m *Model) newLattice() (*state.Lattice, error) {
	opts := append([]state.Option{state.WithSlots(m.Config.Slots)}, m.latticeOptions...)
	return state.NewLattice(m.Config.Seeds, m.Config.Dim, opts...)
}

// Germinate plants a blueprint in a seed of Kasmina layer i, counted as in Config.Kasmina: it sets the slot to the kind's
// identity start and requests germination. On an error nothing has changed.
func (m *Model) Germinate(i, seed int, r state.GerminationRequest) error {
	if i < 0 || i >= len(m.Lattices) {
		return fmt.Errorf("llm: Germinate: Kasmina layer %d, want one of %d", i, len(m.Lattices))
	}
	if err := m.Lattices[i].RequestGermination(seed, r); err != nil {
		return fmt.Errorf("llm: Germinate: Kasmina layer %d: %w", i, err)
	}
	p := blockPrefix(m.Config.Kasmina[i])
	w, s := m.Param(p+kasminaWeights), m.Param(p+kasminaScales)
	if m.Dtype() == tensor.Float32 {
		return blueprints.Identity(r.Kind, r.Slot, w.Float32s(), s.Float32s())
	}
	return blueprints.Identity(r.Kind, r.Slot, w.Float64s(), s.Float64s())
}

// Names of parameters are those of the Llama weights that circulate as safetensors files.
const (
	embedName = "model.embed_tokens.weight"
	normName  = "model.norm.weight"
	headName  = "lm_head.weight"

	kasminaWeights = "kasmina.weights"
	kasminaScales  = "kasmina.scales"
)

func blockPrefix(i int) string { return fmt.Sprintf("model.layers.%d.", i) }

func newParam(dt tensor.Dtype, shape []int, next func() float64) *tensor.Dense {
	n := tensor.Shape(shape).TotalSize()
	if dt == tensor.Float32 {
		data := make([]float32, n)
		for i := range data {
			data[i] = float32(next())
		}
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
	}
	data := make([]float64, n)
	for i := range data {
		data[i] = next()
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
}

// Param returns the parameter with the given name, or nil.
func (m *Model) Param(name string) *tensor.Dense {
	i, ok := m.byName[name]
	if !ok {
		return nil
	}
	return m.Params[i].Value
}

// Dtype returns the type of the parameters.
func (m *Model) Dtype() tensor.Dtype { return m.Params[0].Value.Dtype() }

// NumParams returns the number of trainable values.
func (m *Model) NumParams() int {
	n := 0
	for _, p := range m.Params {
		n += p.Value.Size()
	}
	return n
}

// NumSeeds returns the number of seeds in all Kasmina layers.
func (m *Model) NumSeeds() int { return len(m.Lattices) * m.Config.Seeds }
