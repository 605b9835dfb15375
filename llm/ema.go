package llm

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/parallel"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/internal/settings"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// An EMA is a [Part] that keeps an exponential moving average of a model's weights. The average often
// has a lower held-out loss than the weights of the last step.
//
// The average starts as the weights after the first step of the EMA. After every further step,
// average = decay·average + (1−decay)·weights. When a model grows, copies of a block start with the
// average of the original block, and new parameters start with their own values. When growth is
// undone, the remaining parameters keep their averages.
//
// A checkpoint contains the average, and a resumed run continues it bit for bit. Every rank maintains
// the same average, which takes up as much memory as the weights.
//
// [EMA.Model] returns the averaged model for evaluating and saving. Other goroutines may call it
// while a run is in progress.
type EMA struct {
	decay float64

	mu       sync.Mutex
	layout   layout // of the averaged model
	lattices []state.Array
	params   []Param

	preference *op.Preference // of the run
}

// NewEMA returns an average with a decay of at least 0 and less than 1, such as 0.999. [Trainer.Use]
// adds it to a trainer.
func NewEMA(decay float64) (*EMA, error) {
	if !(decay >= 0 && decay < 1) {
		return nil, fmt.Errorf("llm: NewEMA: the decay is %v, want at least 0 and less than 1", decay)
	}
	return &EMA{decay: decay}, nil
}

// Name implements [Part].
func (e *EMA) Name() string { return "ema" }

// FinishStep implements [StepFinisher].
func (e *EMA) FinishStep(u Turn) error {
	if err := u.Model().checkWhole("llm: EMA"); err != nil {
		return err
	}
	now, err := u.Params()
	if err != nil {
		return err
	}

	e.mu.Lock()
	defer e.mu.Unlock()
	m := u.Model()
	e.preference = u.t.Config.Preference
	source := e.sources(m.Config)
	next := make([]Param, len(now))
	parallel.Each(len(now), func(i int) {
		p := now[i]
		next[i] = Param{Name: p.Name, Value: p.Value.Clone().(*tensor.Dense)}
		if old, ok := source(p.Name); ok && old.Shape().Eq(p.Value.Shape()) {
			average(next[i].Value, old, 1-e.decay)
		}
	})

	e.layout, e.params, e.lattices = m.layout(), next, m.Kasmina.Arrays()
	return nil
}

// average sets value to old + share·(value − old).
func average(value, old *tensor.Dense, share float64) {
	switch x := value.Data().(type) {
	case []float32:
		share := float32(share)
		for i, a := range old.Float32s() {
			x[i] = a + share*(x[i]-a)
		}
	case []float64:
		for i, a := range old.Float64s() {
			x[i] = a + share*(x[i]-a)
		}
	}
}

// sources returns a function that maps a parameter of the current model to the average that it
// continues. The model may have grown since the last step, and growth may have been undone.
func (e *EMA) sources(now Config) func(name string) (*tensor.Dense, bool) {
	values := map[string]*tensor.Dense{}
	for _, p := range e.params {
		values[p.Name] = p.Value
	}

	common := 0
	for common < min(len(now.Grown), len(e.layout.Grown)) &&
		slices.Equal(now.Grown[common].Order, e.layout.Grown[common].Order) {
		common++
	}

	return func(name string) (*tensor.Dense, bool) {
		for _, g := range slices.Backward(now.Grown[common:]) {
			name = g.Source(name)
		}
		for _, g := range e.layout.Grown[common:] {
			name = g.firstCopy(name)
		}
		value, ok := values[name]
		return value, ok
	}
}

var errNoAverage = errors.New("there is no average before the first step")

// Model returns a new model with the averaged weights. Its seeds are in their state after the last step.
func (e *EMA) Model() (*Model, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.params == nil {
		return nil, fmt.Errorf("llm: EMA.Model: %w", errNoAverage)
	}

	values := map[string]*tensor.Dense{}
	for _, p := range e.params {
		values[p.Name] = p.Value
	}

	m, err := modelFrom(e.layout, e.params[0].Value.Dtype(), func(p Param) error {
		copyNumbers(p.Value, values[p.Name])
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("llm: EMA.Model: %w", err)
	}

	install, err := m.loadLattices(e.lattices)
	if err != nil {
		return nil, fmt.Errorf("llm: EMA.Model: %w", err)
	}

	install()
	return m, nil
}

// Evaluate returns the averaged model's mean loss on held-out text, in nats per token, and its bits
// per byte.
func (e *EMA) Evaluate(ctx context.Context, text *data.Evaluation) (loss, bitsPerByte float64, err error) {
	m, err := e.Model()
	if err != nil {
		return 0, 0, err
	}

	i := &Inference{Model: m, Preference: e.preference}
	defer i.Close()

	sum := 0.0
	for b := range text.Batches() {
		if err := context.Cause(ctx); err != nil {
			return 0, 0, err
		}
		l, err := i.Loss(b)
		if err != nil {
			return 0, 0, fmt.Errorf("llm: EMA.Evaluate: %w", err)
		}
		sum += l * float64(b.Count)
	}

	loss, bitsPerByte = text.Score(sum)
	return loss, bitsPerByte, nil
}

// An averagedLayout is the layout of the averaged model in a checkpoint. It differs from the layout of the model if the
// model has grown for a step that then failed.
type averagedLayout struct {
	Config  Config    `json:"config"`
	Planted []Planted `json:"planted,omitempty"`
}

// averagedValue is the name of the averagedLayout in a checkpoint.
const averagedValue = "model"

// Save implements [Part].
func (e *EMA) Save(w *CheckpointWriter) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	w.Value("decay", e.decay)
	if e.params != nil {
		w.Value(averagedValue, averagedLayout{e.layout.Config, e.layout.Planted})
	}
	for _, p := range e.params {
		if err := w.Tensor(p.Name, p.Value.Shape(), p.Value.Data()); err != nil {
			return err
		}
	}
	return nil
}

// Load implements [Part].
func (e *EMA) Load(r *CheckpointReader) (install func(), err error) {
	var decay float64
	if err := r.Value("decay", &decay); err != nil {
		return nil, err
	}

	if decay != e.decay {
		r.Differs("the decay is %v here and %v there", e.decay, decay)
	}

	averaged, err := e.layoutIn(r)
	if err != nil {
		return nil, err
	}

	var params []Param
	shapes := maps.Collect(averaged.Parameters())
	for _, name := range r.Tensors() {
		shape, values, err := r.Tensor(name)
		if err != nil {
			return nil, err
		}
		if want, ok := shapes[name]; !ok || !slices.Equal(shape, want) {
			return nil, fmt.Errorf("%w: the average of parameter %.100q has shape %v, the model's is %v",
				ErrArchitecture, name, shape, want)
		}
		if !isFinite(values) {
			return nil, fmt.Errorf("%w: the average of parameter %s is not finite", ErrDiverged, name)
		}
		params = append(params, Param{Name: name, Value: tensor.New(tensor.WithShape(shape...),
			tensor.WithBacking(values))})
	}

	if n := len(params); n > 0 && n < len(shapes) {
		return nil, fmt.Errorf("%w: there are averages of %d parameters, the model has %d",
			ErrArchitecture, n, len(shapes))
	}

	lattices := r.run.lattices
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.layout, e.params, e.lattices = averaged, params, lattices()
	}, nil
}

// layoutIn returns the layout of the averaged model in a checkpoint. Checkpoints of earlier versions do not contain
// it, and neither do checkpoints from before the first step.
func (e *EMA) layoutIn(r *CheckpointReader) (l layout, err error) {
	now := r.run.model.layout
	if _, ok := r.values[averagedValue]; !ok {
		return now, nil
	}

	var saved averagedLayout
	if err := r.Value(averagedValue, &saved); err != nil {
		return l, err
	}
	l = layout{saved.Config, saved.Planted}
	if err := l.Check(); err != nil {
		return l, fmt.Errorf("the averaged model: %w", err)
	}

	have, want := l.Origin(), now.Origin()
	have.Adapter = want.Adapter // its ranks may have grown
	if diff := settings.Fields(want, have); len(diff) > 0 {
		return l, fmt.Errorf("%w: the averaged model differs: %s", ErrArchitecture, strings.Join(diff, "; "))
	}
	return l, nil
}
