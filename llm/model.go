package llm

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/memory"
	"github.com/kasmina-go/kasmina/state"
)

// Model is a set of parameters and seed lattices in the shape that an [arch.Config] describes. It
// holds no graph: Graph builds as many as needed (to train, to evaluate, to sample), all of which share
// the model's parameters.
//
// While a trainer runs, any goroutine may call Save, Germinate, the methods for blueprints and
// Kasmina.Do and Submit. They wait for the end of the present step. Params and graphs are for
// callbacks alone then.
type Model struct {
	Config  Config
	Params  []Param        // in the order in which the model uses them
	Kasmina *state.Network // the seed lattices: a layer for each entry of Config.Kasmina

	byName map[string]int

	turn     sync.Mutex    // see Take; guards what follows and the parameters
	holder   paramHolder   // who has the parameters; nil if they are on the host alone
	trainers int           // that are not closed
	runs     int           // that go on
	changes  atomic.Uint64 // so far, of parameters
	shape    uint64        // how often the blocks have become others, on which graphs depend
}

// NewModel returns a model with fresh parameters of type dt, float32 or float64. They are normal with
// deviation 0.02, those that write to the residual stream divided by sqrt(2·Layers) (Radford et
// al., "Language Models are Unsupervised Multitask Learners", 2019). Norms are 1 or, with
// NormPlusOne, 0, biases are 0, and Kasmina slots are at the Residual kind's identity. The same
// seed gives the same parameters. The lattices of the Kasmina layers get the given options;
// Config.Slots is their number of slots.
func NewModel(c Config, dt tensor.Dtype, seed uint64, lattice ...state.Option) (*Model, error) {
	// Each parameter has a stream of its own, so that adding one does not change the others.
	return buildModel(c, dt, func(i int, p ParamSpec) func() float64 {
		r := rand.New(rand.NewPCG(seed, uint64(i)))
		return func() float64 { return p.Start + p.Deviation*r.NormFloat64() }
	}, lattice...)
}

// NewModelFrom returns a model whose parameters fill writes: those of weights that others have
// trained. It is called once for each parameter, from several goroutines at once. What it leaves as
// it is stays at its start, which is 0 for matrices, 1 for norms, and the identity for Kasmina
// layers. Its first error ends the filling.
func NewModelFrom(c Config, dt tensor.Dtype, fill func(Param) error,
	lattice ...state.Option) (*Model, error) {
	if fill == nil {
		return nil, errors.New("llm: NewModelFrom: fill is nil, want what writes parameters")
	}

	m, err := buildModel(c, dt, func(_ int, p ParamSpec) func() float64 {
		if p.Deviation != 0 {
			return nil
		}
		return func() float64 { return p.Start }
	}, lattice...)
	if err != nil {
		return nil, err
	}

	errs := make([]error, len(m.Params))
	var failed atomic.Bool
	cpu.Parallel(len(m.Params), 1, func(lo, hi int) {
		for i := lo; i < hi && !failed.Load(); i++ {
			if errs[i] = fill(m.Params[i]); errs[i] != nil {
				failed.Store(true)
			}
		}
	})

	if err := errors.Join(errs...); err != nil {
		return nil, err
	}

	return m, nil
}

// buildModel returns a model whose i-th parameter has the numbers that start gives one after the
// other; zeros if start is nil.
func buildModel(c Config, dt tensor.Dtype, start func(i int, p ParamSpec) func() float64,
	lattice ...state.Option) (*Model, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}

	if dt != tensor.Float32 && dt != tensor.Float64 {
		return nil, fmt.Errorf("llm: parameters of type %v, want float32 or float64", dt)
	}

	m := &Model{Config: c, byName: map[string]int{}}
	specs := slices.Collect(c.Specs())
	bytes := uint64(0)
	for _, p := range specs {
		bytes += uint64(tensor.Shape(p.Shape).TotalSize()) * uint64(dt.Size())
	}

	if err := memory.Check("the parameters take", bytes); err != nil {
		return nil, fmt.Errorf("llm: NewModel: %w", err)
	}

	m.Params = make([]Param, len(specs))
	for i, p := range specs {
		m.byName[p.Name] = i
	}

	cpu.Parallel(len(specs), 1, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			var next func() float64
			if start != nil {
				next = start(i, specs[i])
			}
			m.Params[i] = Param{Name: specs[i].Name,
				Value: newParamValue(dt, specs[i].Shape, next)}
		}
	})

	var err error
	if m.Kasmina, err = m.newNetwork(lattice...); err != nil {
		return nil, err
	}

	return m, nil
}

// Param returns the parameter with the given name, or nil.
func (m *Model) Param(name string) *tensor.Dense {
	if checkMade(m) != nil {
		return nil
	}
	i, ok := m.byName[name]
	if !ok {
		return nil
	}
	return m.Params[i].Value
}

// Dtype returns the type of the parameters.
func (m *Model) Dtype() tensor.Dtype {
	if checkMade(m) != nil {
		return tensor.Dtype{}
	}
	return m.Params[0].Value.Dtype()
}

// NumParams returns the number of trainable values.
func (m *Model) NumParams() int {
	if checkMade(m) != nil {
		return 0
	}
	n := 0
	for _, p := range m.Params {
		n += p.Value.Size()
	}
	return n
}

// NumTrainable returns the number of elements of those parameters that training changes. In a frozen
// model these are only the parameters of what is planted in it.
func (m *Model) NumTrainable() int {
	if checkMade(m) != nil {
		return 0
	}
	n := 0
	for _, p := range m.Params {
		if m.Config.Learns(p.Name) {
			n += p.Value.Size()
		}
	}
	return n
}

// NumSeeds returns the number of seeds in all Kasmina layers.
func (m *Model) NumSeeds() int {
	if checkMade(m) != nil {
		return 0
	}
	return m.Kasmina.Seeds()
}

// errZeroModel is the error of a model that nobody has made.
var errZeroModel = errors.New("the model is nil or its zero value: NewModel and LoadModel make one")

// Graph builds the model's computation on batches of the given number of sequences. For
// graph.ForTraining it includes the gradients of all parameters; run it on a machine made with
// gorgonia.BindDualValues(g.Params...).
func (m *Model) Graph(kind GraphKind, batch int, opts ...GraphOption) (*Graph, error) {
	if err := checkMade(m); err != nil {
		return nil, fmt.Errorf("llm: Graph: %w", err)
	}
	return BuildGraph(m.Parts(), kind, batch, opts...)
}

// Parts is what graphs of the model are built of.
func (m *Model) Parts() ModelParts {
	return ModelParts{Config: m.Config, Params: m.Params, Kasmina: m.Kasmina}
}
