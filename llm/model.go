package llm

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/memory"
	"github.com/kasmina-go/kasmina/state"
)

// Model holds the parameters and seed lattices of the architecture described by a [Config]. It holds
// no graph of its own. Graph builds as many as needed (to train, to evaluate, to sample), and they
// all share the model's parameters.
//
// While a trainer runs, any goroutine may call Save, Germinate, the methods for blueprints, Kasmina.Do
// and Kasmina.Submit. All but Submit wait for the end of the current step. Params and graphs are then
// reserved for callbacks.
type Model struct {
	Config Config
	Params []Param // in the model's order of use
	// Base holds the matrices that LoadFrozen has read in a compact type. Their Params have no Value. It is
	// nil if there are none.
	Base    *cpuops.Weights
	Kasmina *state.Network // the seed lattices: a layer for each entry of Config.Kasmina

	// Planted lists the blueprints with parameters of their own, at weights and in the stream. The
	// trainer sets it.
	Planted []Planted

	// KasminaOptions configures the computation of the Kasmina layers. Set it before building graphs and
	// trainers. Files of the model contain the options.
	KasminaOptions KasminaOptions

	byName map[string]int

	turn     sync.Mutex    // guards the fields below and the parameters; see Current
	holder   paramHolder   // trainer that holds the parameters; nil if they are only on the host
	trainers int           // number of open trainers
	runs     int           // number of runs in progress
	changes  atomic.Uint64 // number of parameter changes so far
	shape    uint64        // number of times the blocks changed; graphs depend on them
}

// NewModel returns a model with new parameters of type dt, float32 or float64. They are drawn from a
// normal distribution with standard deviation 0.02; the weights that write to the residual stream are
// divided by sqrt(2·Layers) (Radford et al., "Language Models are Unsupervised Multitask Learners",
// 2019). Norm weights are 1 or, with NormPlusOne, 0; biases are 0; and Kasmina slots start at the
// identity of the Residual kind. The same seed gives the same parameters.
//
// The lattices of the Kasmina layers are created with the given options, except that Config.Slots
// determines their number of slots.
func NewModel(c Config, dt tensor.Dtype, seed uint64, lattice ...state.Option) (*Model, error) {
	return newModel(layout{Config: c}, dt, seed, lattice...)
}

// newModel is like NewModel for a model with planted blueprints.
func newModel(l layout, dt tensor.Dtype, seed uint64, lattice ...state.Option) (*Model, error) {
	// Each parameter has its own random stream, so that adding one does not change the rest.
	return buildModel(l, dt, func(i int, p ParamSpec) func() float64 {
		r := rand.New(rand.NewPCG(seed, uint64(i)))
		return func() float64 { return p.Start + p.Deviation*r.NormFloat64() }
	}, lattice...)
}

// NewModelFrom returns a model initialized by fill, for example with published weights.
//
// fill is called once for each parameter, from several goroutines at once. Values it does not write
// keep their initial value, which is 0 for matrices, 1 for norms, and the identity for Kasmina
// layers. The first error stops the initialization.
func NewModelFrom(c Config, dt tensor.Dtype, fill func(Param) error,
	lattice ...state.Option) (*Model, error) {
	return modelFrom(layout{Config: c}, dt, fill, lattice...)
}

// modelFrom is like NewModelFrom for a model with planted blueprints.
func modelFrom(l layout, dt tensor.Dtype, fill func(Param) error, lattice ...state.Option) (*Model,
	error) {
	m, err := buildModel(l, dt, func(_ int, p ParamSpec) func() float64 {
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

// buildModel returns a model. The values of parameter i are the successive results of the function that
// start returns for it; they are zeros if start or that function is nil.
func buildModel(l layout, dt tensor.Dtype, start func(i int, p ParamSpec) func() float64,
	lattice ...state.Option) (*Model, error) {
	if err := l.Check(); err != nil {
		return nil, err
	}

	if dt != tensor.Float32 && dt != tensor.Float64 {
		return nil, fmt.Errorf("llm: parameters of type %v, want float32 or float64", dt)
	}

	m := &Model{Config: l.Config, Planted: l.Planted, byName: map[string]int{}}
	specs := slices.Collect(l.Specs())
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

// Param returns the parameter with the given name. It returns nil if there is none, or if it is a matrix in
// Base.
func (m *Model) Param(name string) *tensor.Dense {
	i, ok := m.byName[name]
	if !ok {
		return nil
	}
	return m.Params[i].Value
}

// Dtype returns the type of the parameters.
func (m *Model) Dtype() tensor.Dtype { return m.Parts().dtype() }

// NumParams returns the number of values in all parameters, including those that do not learn.
func (m *Model) NumParams() int {
	n := 0
	for _, p := range m.Params {
		n += m.sizeOf(p)
	}
	return n
}

// NumSeeds returns the number of seeds in all Kasmina layers.
func (m *Model) NumSeeds() int {
	return m.Kasmina.Seeds()
}

// errZeroModel is the error for a nil or uninitialized model.
var errZeroModel = errors.New("the model is nil or its zero value: NewModel and LoadModel make one")

// Graph builds the model's computation on batches of the given number of sequences. A [ForTraining] graph
// includes the gradients of the parameters that learn; run it on a machine created with
// gorgonia.BindDualValues(g.Learning...).
func (m *Model) Graph(kind GraphKind, batch int, opts ...GraphOption) (*Graph, error) {
	return BuildGraph(m.Parts(), kind, batch, opts...)
}

// Parts returns the configuration, parameters and lattices for building graphs.
func (m *Model) Parts() ModelParts {
	return ModelParts{Config: m.Config, Planted: m.Planted, KasminaOptions: m.KasminaOptions,
		Params: m.Params, Base: m.Base, Kasmina: m.Kasmina}
}
