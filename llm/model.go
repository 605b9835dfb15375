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
	"github.com/kasmina-go/kasmina/llm/arch"
	"github.com/kasmina-go/kasmina/state"
)

// Model is a set of parameters and seed lattices in the shape that a [Config] describes. It holds
// no graph: Graph builds as many as needed (to train, to evaluate, to sample), all of which share
// the model's parameters.
//
// While a [Trainer] runs, any goroutine may call Save, Germinate, the methods for blueprints and
// Kasmina.Do and Submit: they wait for the end of the present step. Params and graphs are for
// callbacks alone then.
type Model struct {
	Config  Config
	Params  []Param        // in the order in which the model uses them
	Kasmina *state.Network // the seed lattices: a layer for each entry of Config.Kasmina

	byName map[string]int

	turn     sync.Mutex    // see take; guards what follows and the parameters
	trainer  *Trainer      // which has the model; nil if it is on the host alone
	trainers int           // that are not closed
	changes  atomic.Uint64 // so far, of parameters
	shape    uint64        // how often the blocks have become others, on which graphs depend
}

// NewModel returns a model with fresh parameters of type dt, float32 or float64: normal with
// deviation 0.02, those that write to the residual stream divided by sqrt(2·Layers) (Radford et
// al., "Language Models are Unsupervised Multitask Learners", 2019), norms at 1 or, with
// NormPlusOne, at 0, biases at 0, and Kasmina slots at the Residual kind's identity. The same seed
// gives the same parameters. The lattices of the Kasmina layers get the given options; Config.Slots
// is their number of slots.
func NewModel(c Config, dt tensor.Dtype, seed uint64, lattice ...state.Option) (*Model, error) {
	// Each parameter has a stream of its own, so that adding one does not change the others.
	return newModel(c, dt, func(i int, p arch.Spec) func() float64 {
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
	m, err := newModel(c, dt, func(_ int, p arch.Spec) func() float64 {
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

// newModel returns a model whose i-th parameter has the numbers that start gives one after the
// other; zeros if start is nil.
func newModel(c Config, dt tensor.Dtype, start func(i int, p arch.Spec) func() float64,
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
				Value: newParam(dt, specs[i].Shape, next)}
		}
	})
	var err error
	if m.Kasmina, err = m.newNetwork(lattice...); err != nil {
		return nil, err
	}
	return m, nil
}

// mirror is the engine whose parameters are the model's, nil if they are on the host alone.
func (m *Model) mirror() Engine {
	if m.trainer == nil || m.trainer.apart != nil {
		return nil
	}
	return m.trainer.engine
}

// pull makes parameters on the host, those of the given names or all, what they are where a trainer
// has them.
func (m *Model) pull(params ...string) error {
	if e := m.mirror(); e != nil {
		return e.Pull(params...)
	}
	return nil
}

// newParam returns a tensor of the numbers that next gives, of zeros if next is nil.
func newParam(dt tensor.Dtype, shape []int, next func() float64) *tensor.Dense {
	n := tensor.Shape(shape).TotalSize()
	if dt == tensor.Float32 {
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(numbers[float32](n, next)))
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(numbers[float64](n, next)))
}

func numbers[T float32 | float64](n int, next func() float64) []T {
	x := make([]T, n)
	if next != nil {
		for i := range x {
			x[i] = T(next())
		}
	}
	return x
}

// Param returns the parameter with the given name, or nil.
func (m *Model) Param(name string) *tensor.Dense {
	if m.made() != nil {
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
	if m.made() != nil {
		return tensor.Dtype{}
	}
	return m.Params[0].Value.Dtype()
}

// NumParams returns the number of trainable values.
func (m *Model) NumParams() int {
	if m.made() != nil {
		return 0
	}
	n := 0
	for _, p := range m.Params {
		n += p.Value.Size()
	}
	return n
}

// NumSeeds returns the number of seeds in all Kasmina layers.
func (m *Model) NumSeeds() int {
	if m.made() != nil {
		return 0
	}
	return m.Kasmina.Seeds()
}

var (
	errZeroModel = errors.New("the model is nil or its zero value: NewModel and LoadModel " +
		"make one")
	errZeroTrainer = errors.New("the trainer is nil or its zero value: NewTrainer makes one")
)

// made returns an error for a model that nobody has made.
func (m *Model) made() error {
	if m == nil || m.Kasmina == nil || len(m.Params) == 0 {
		return errZeroModel
	}
	return nil
}

// made returns an error for a trainer that nobody has made.
func (t *Trainer) made() error {
	if t == nil || t.engine == nil || t.Model.made() != nil {
		return errZeroTrainer
	}
	return nil
}

// A model is changed by one goroutine at a time, whose turn it is: a step with all that it changes
// is one turn, and so is each save, score, sample's token, blueprint and command. A run has no turn
// while callbacks and listeners are called, so that these may do all of that too, and other
// goroutines with them.
//
// The turn comes before the locks of the lattices, and before a Trainer's own.

// take waits for a turn, for what changes no seeds.
func (m *Model) take() (done func()) {
	m.turn.Lock()
	return m.turn.Unlock
}

// takeToChange waits for a turn in which seeds change. Listeners hear of it when it is over.
func (m *Model) takeToChange() (done func()) {
	tell := m.Kasmina.HoldEvents()
	m.turn.Lock()
	return sync.OnceFunc(func() {
		m.turn.Unlock()
		tell()
	})
}

// Lock and Unlock are called by state.Network.Do.
func (s slots) Lock()   { s.m.turn.Lock() }
func (s slots) Unlock() { s.m.turn.Unlock() }

// inTurn calls f when it is the trainer's turn with its model, unless the trainer cannot be used.
func (t *Trainer) inTurn(f func() error) error {
	if err := t.made(); err != nil {
		return err
	}
	defer t.Model.take()()
	if err := t.usable(); err != nil {
		return err
	}
	return f()
}
