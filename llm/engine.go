package llm

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"time"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/optime"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/optim"
)

// Engine computes what a trainer asks for. The CPU's does so in the model's own memory, another
// machine's with copies of the parameters and of what the optimiser remembers. Package llm/gpu has
// one for NVIDIA GPUs. A trainer calls its methods one at a time.
type Engine interface {
	// Name is what computes and in which precision, such as "cuda bf16": a run goes on with other
	// bits under another name.
	Name() string
	// Gradients adds those of a batch to what is gathered for the step, and returns the batch's
	// loss.
	Gradients(b data.Batch) (loss float64, err error)
	// Update applies them at the optimiser's learning rate, and returns their global norm before
	// clipping. That is of the model's own parameters. Where nothing else learns it is of those of
	// seeds, which are clipped by a norm of their own. After ErrGradients nothing has changed;
	// after ErrOverflow parameters have, and one is no longer finite or the norm was not. A
	// [Scaler] may make no update, without an error, and return a norm that is not finite.
	Update() (norm float64, err error)
	// Drop forgets the gradients gathered so far.
	Drop() error
	// Loss returns the model's loss on a batch, without a trace in it.
	Loss(b data.Batch) (float64, error)
	// Decoder returns a function that returns the logits for what follows some tokens, which fit
	// the model's window: a []float32 or a []float64. It may remember the tokens of its last call,
	// so it is no longer right once the model has changed. It may end with the context.
	Decoder() (func(ctx context.Context, tokens []int) (any, error), error)
	// FirstNonFinite says where the first NaN or infinity stands, as autodiff.FirstNonFinite does.
	FirstNonFinite() (name, kind string, found bool)
	// Pull makes the model's parameters of the given names on the host those of the engine, and
	// without names all, and the optimiser's state.
	Pull(params ...string) error
	// Push makes the engine's parameters of the given names those on the host, and without names
	// all, and what it keeps of the optimiser.
	Push(params ...string) error
	// Forget is the optimiser's, of what the engine remembers.
	Forget(param string, from, to int) error
	Close() error
}

// Why an update cannot be trusted. The CPU's engine looks for a parameter that is no longer finite
// after every update. That of llm/gpu does not, where it would take another pass over all
// parameters. There the next loss shows it, and ends the run with ErrDiverged too.
var (
	ErrGradients = errors.New("the gradient norm is not finite")
	ErrOverflow  = errors.New("the update overflowed")
)

// cpuEngine is the engine on the CPU; NewCPU makes one. It is for one goroutine at a time.
type cpuEngine struct {
	Inference
	optimizer optim.Optimizer
	limit     float64
	train     Runner
	machine   *cpuops.Machine // train's
	grads     []gorgonia.ValueGrad
	clippers  []*autodiff.Clipper // of the model's own gradients, and of those of seeds

	updates int           // so far
	took    time.Duration // all of them
}

// newCPUEngine returns the engine on the CPU for a graph of the model whose gradients are wanted. The
// global gradient norm is clipped at the limit, 0 for none, and apart from it that of the seeds'
// blueprints. Options are for its machine.
func newCPUEngine(m *Model, g *Graph, o optim.Optimizer, limit float64,
	opts ...cpuops.Option) (Engine, error) {
	if m == nil || g == nil || o == nil {
		return nil, errors.New("llm: NewCPU: the model, the graph or the optimiser is nil")
	}

	machine, err := cpuops.NewMachine(g.G, append(slices.Clip(opts),
		cpuops.WithParams(g.Learning...), cpuops.WithOutputs(g.Outputs()...))...)
	if err != nil {
		return nil, err
	}

	t := &cpuEngine{Inference: Inference{Model: m}, optimizer: o, limit: limit,
		train: Runner{Graph: g, Machine: machine}, machine: machine,
		grads: machine.ValueGrads()}
	if t.limit == 0 {
		t.limit = math.Inf(1)
	}

	t.clippers = clipGroups(t.grads)
	if !g.Updates() {
		return t, nil
	}

	if err := o.Declare(t.grads); err != nil {
		return nil, fmt.Errorf("llm: %w", err)
	}

	return t, nil
}

// clipGroups divides parameters into the model's own and those of seeds, without an empty group.
func clipGroups(all []gorgonia.ValueGrad) (groups []*autodiff.Clipper) {
	for _, seeds := range []bool{false, true} {
		var group []gorgonia.ValueGrad
		for _, p := range all {
			n, named := p.(interface{ Name() string })
			if seeds == (named && IsSeedParam(n.Name())) {
				group = append(group, p)
			}
		}
		if len(group) > 0 {
			groups = append(groups, autodiff.NewClipper(group))
		}
	}

	return groups
}

func (t *cpuEngine) Name() string {
	if gemm.RoundsToBFloat16() {
		return "cpu bf16"
	}
	return "cpu"
}

func (t *cpuEngine) Gradients(b data.Batch) (float64, error) { return t.train.Run(b) }

// OpTimes needs the option cpuops.WithMonitor.
func (t *cpuEngine) OpTimes() ([]OpTime, error) {
	if t.machine == nil {
		return nil, errZeroEngine
	}
	times := t.machine.Monitor()
	if len(times) > 0 && t.updates > 0 {
		times = optime.Gather(append(times, OpTime{Op: "Update", Tasks: 1,
			Time: t.took / time.Duration(t.updates)}))
	}
	return times, nil
}

// Figures is that of [Sensor].
func (t *cpuEngine) Figures() ([]SeedFigures, error) { return t.train.Figures(t.machine.Value) }

// Choices is that of [Chooser].
func (t *cpuEngine) Choices() []Choice {
	if t.machine == nil {
		return nil
	}
	return t.machine.Choices()
}

// Ceiling is that of float32 multiply-adds on all cores.
func (t *cpuEngine) Ceiling() (Ceiling, error) {
	cores := runtime.GOMAXPROCS(0)
	return Ceiling{Product: gemm.FMAPeak(cores, ceilingTime), Type: "float32"}, nil
}

// ceilingTime is how long the ceiling is measured.
const ceilingTime = 50 * time.Millisecond

func (t *cpuEngine) Update() (float64, error) {
	if t.optimizer == nil {
		return 0, errZeroEngine
	}

	defer func(from time.Time) {
		t.updates, t.took = t.updates+1, t.took+time.Since(from)
	}(time.Now())

	norm := 0.0
	for i, c := range t.clippers {
		n, err := c.Clip(t.limit)
		if err != nil {
			return 0, ErrGradients
		}
		if i == 0 {
			norm = n
		}
	}

	err := t.optimizer.Step(t.grads)
	if errors.Is(err, optim.ErrOverflow) {
		return norm, ErrOverflow
	}
	if err != nil {
		return norm, err
	}

	if _, ok := t.optimizer.(optim.Rules); ok { // which has looked
		return norm, nil
	}

	if _, _, found := t.FirstNonFinite(); found {
		return norm, ErrOverflow
	}

	return norm, nil
}

// ValueGrads are the parameters with the gradients gathered so far.
func (t *cpuEngine) ValueGrads() []gorgonia.ValueGrad { return t.grads }

// Gradient is that of [Listener].
func (t *cpuEngine) Gradient(param string) (any, error) {
	for _, p := range t.grads {
		if n, ok := p.(interface{ Name() string }); !ok || n.Name() != param {
			continue
		}
		g, err := p.Grad()
		if err != nil || g == nil {
			return nil, fmt.Errorf("the gradient of %s: %v, %w", param, g, err)
		}
		return g.Data(), nil
	}

	return nil, fmt.Errorf("no gradient of a parameter %s is gathered", param)
}

func (t *cpuEngine) Drop() error {
	for _, p := range t.grads {
		if g, err := p.Grad(); err == nil && g != nil {
			gorgonia.ZeroValue(g)
		}
	}
	return nil
}

func (t *cpuEngine) FirstNonFinite() (name, kind string, found bool) {
	return autodiff.FirstNonFinite(t.grads)
}

func (t *cpuEngine) Pull(...string) error { return nil }
func (t *cpuEngine) Push(...string) error { return nil }

func (t *cpuEngine) Forget(param string,
	from, to int) error {
	if t.optimizer == nil {
		return errZeroEngine
	}
	return t.optimizer.Forget(param, from, to)
}

func (t *cpuEngine) Close() error {
	if t.machine == nil {
		return nil
	}
	return errors.Join(t.train.Machine.Close(), t.Inference.Close())
}

// errZeroEngine is the error of an engine that nobody has made.
var errZeroEngine = errors.New("llm: the engine is its zero value, want one that NewCPU returns")

// CPUEngine returns a function that makes the engine of a trainer on the CPU, as a trainer does whose
// TrainConfig.Engine is nil. The options are for the machine that trains, such as
// cpuops.WithMonitor.
func CPUEngine(opts ...cpuops.Option) func(*Model, optim.Optimizer, TrainConfig) (Engine, error) {
	return func(m *Model, o optim.Optimizer, c TrainConfig) (Engine, error) {
		g, err := c.Graph(m)
		if err != nil {
			return nil, err
		}
		return newCPUEngine(m, g, o, c.Clip, opts...)
	}
}

// Graph builds the graph of a model that computes the gradients which c asks for.
func (c TrainConfig) Graph(m *Model) (*Graph, error) {
	opts := []GraphOption{withLossShare(c.Accumulate)}
	if c.Recompute {
		opts = append(opts, WithRecompute())
	}
	if c.listen != nil {
		opts = append(opts, withGradients(c.listen...))
	}
	return m.Graph(ForTraining, c.Batch, opts...)
}
