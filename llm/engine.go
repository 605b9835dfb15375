package llm

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"time"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/optime"
)

// Engine computes a trainer's steps. The CPU engine works in the model's own memory; other engines work
// on copies of the parameters and the optimizer state. Package llm/gpu has an engine for NVIDIA GPUs. A
// trainer calls the methods of its engine one at a time.
type Engine interface {
	// Name identifies the device and the precision, such as "cuda bf16". A run that continues on an
	// engine with another name is not bit-identical.
	Name() string
	// Gradients adds the gradients of a batch to those gathered for the step, and returns the batch's
	// loss.
	Gradients(b data.Batch) (loss float64, err error)
	// Update applies the gathered gradients at the optimizer's learning rate and returns their global
	// norm before clipping. The gradients of seeds are clipped separately, and their norm is returned
	// only if no other parameters are being trained.
	//
	// After ErrGradients, nothing has changed. After ErrOverflow, parameters have changed, and a
	// parameter or the norm is not finite. A [Scaler] may skip the update and return a norm that is
	// not finite, without an error.
	Update() (norm float64, err error)
	// Drop discards the gradients gathered so far.
	Drop() error
	// Loss returns the model's loss on a batch and does not affect training.
	Loss(b data.Batch) (float64, error)
	// Decoder returns a function that computes the logits, a []float32 or []float64, for the token that
	// follows the given tokens, which must fit the model's window. The function may cache the tokens of
	// its last call, so it is no longer valid after the model has changed. It may return early when ctx
	// is done, and its next call may overwrite the logits.
	Decoder() (func(ctx context.Context, tokens []int) (any, error), error)
	// FirstNonFinite locates the first NaN or infinity, like autodiff.FirstNonFinite.
	FirstNonFinite() (name, kind string, found bool)
	// Pull copies the engine's parameters with the given names, or without names all parameters and the
	// optimizer state, to the host.
	Pull(params ...string) error
	// Push copies the parameters with the given names, or without names all parameters and the optimizer
	// state, from the host to the engine.
	Push(params ...string) error
	// Forget clears the engine's optimizer state for ranges of parameters. If it returns an error, it has
	// cleared none of them.
	Forget(ranges ...ParamRange) error
	Close() error
}

// ParamRange identifies the elements From ≤ i < To of a parameter, in row-major order.
type ParamRange struct {
	Param    string
	From, To int
}

// CheckRanges returns an error unless the model has all elements of the ranges. Engines call it before they
// clear any of them.
func (m *Model) CheckRanges(ranges ...ParamRange) error {
	if err := checkMade(m); err != nil {
		return err
	}

	for _, r := range ranges {
		p := m.Param(r.Param)
		if p == nil {
			return fmt.Errorf("llm: the model has no parameter %q", r.Param)
		}
		if n := p.Size(); r.From < 0 || r.To < r.From || r.To > n {
			return fmt.Errorf("llm: elements %d to %d of parameter %q, which has %d", r.From, r.To, r.Param, n)
		}
	}
	return nil
}

// Errors of an update that cannot be trusted. The CPU engine checks all parameters after every
// update. The engine of llm/gpu does not, because the check would take another pass over all
// parameters. There, the next loss reveals the problem and stops the run with ErrDiverged.
var (
	ErrGradients = errors.New("the gradient norm is not finite")
	ErrOverflow  = errors.New("the update overflowed")
)

// cpuEngine is the engine on the CPU; newCPUEngine creates one. Only one goroutine may use it at a time.
type cpuEngine struct {
	Inference
	optimizer optim.Optimizer
	limit     float64 // of the gradient norms; infinite if gradients are not clipped
	train     Runner
	machine   *cpuops.Machine // the machine of train
	grads     []gorgonia.ValueGrad
	clippers  []*autodiff.Clipper // one for the model's own gradients, one for seed gradients

	updates int           // number of updates
	took    time.Duration // total time of the updates
}

// newCPUEngine returns a CPU engine that trains on the given graph of the model. It clips the global
// gradient norm at limit, and separately the norm of the seeds' gradients; a limit of 0 disables
// clipping. The options configure its machine.
func newCPUEngine(m *Model, g *Graph, o optim.Optimizer, limit float64,
	opts ...cpuops.Option) (Engine, error) {
	if m == nil || g == nil || o == nil {
		return nil, errors.New("llm: CPUEngine: the model, the graph or the optimizer is nil")
	}

	machine, err := cpuops.NewMachine(g.G, g.cpuOptions(append(slices.Clip(opts),
		cpuops.WithParams(g.Learning...), cpuops.WithOutputs(g.Outputs()...))...)...)
	if err != nil {
		return nil, err
	}

	t := &cpuEngine{Inference: Inference{Model: m, Preference: g.preference}, optimizer: o, limit: limit,
		train: Runner{Graph: g, Machine: machine}, machine: machine,
		grads: machine.ValueGrads()}
	if t.limit == 0 {
		t.limit = math.Inf(1)
	}

	t.clippers = clipGroups(t.grads)
	if !g.Updates() {
		return t, nil // nothing learns, so the optimizer needs no state
	}

	if err := o.Declare(t.grads); err != nil {
		return nil, fmt.Errorf("llm: %w", err)
	}

	return t, nil
}

// clipGroups returns a clipper for the model's own parameters followed by one for the parameters of seeds. It
// leaves out empty groups.
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

// OpTimes implements [Profiler]. It needs the option cpuops.WithMonitor.
func (t *cpuEngine) OpTimes() ([]optime.OpTime, error) {
	times := t.machine.Monitor()
	if len(times) > 0 && t.updates > 0 {
		times = optime.Gather(append(times, optime.OpTime{Op: "Update", Tasks: 1,
			Time: t.took / time.Duration(t.updates)}))
	}
	return times, nil
}

// TakePreferences implements [PreferenceMeter].
func (t *cpuEngine) TakePreferences() op.PreferenceFigures {
	return t.train.TakePreferences().Plus(t.Inference.TakePreferences())
}

// Figures implements [Sensor].
func (t *cpuEngine) Figures() ([]SeedFigures, error) { return t.train.Figures(t.machine.Value) }

// Choices implements [Chooser].
func (t *cpuEngine) Choices() []optime.Choice {
	return t.machine.Choices()
}

// Ceiling implements [Measurer]: it returns the peak of float32 multiply-adds on all cores. A process
// measures it once.
func (t *cpuEngine) Ceiling() (optime.Ceiling, error) {
	ceiling.Lock()
	defer ceiling.Unlock()
	if cores := runtime.GOMAXPROCS(0); cores != ceiling.cores {
		ceiling.cores, ceiling.product = cores, gemm.FMAPeak(cores, ceilingTime)
	}
	return optime.Ceiling{Product: ceiling.product, Type: "float32"}, nil
}

// ceilingTime is the duration of the ceiling measurement.
const ceilingTime = 20 * time.Millisecond

// ceiling is the last measurement of [cpuEngine.Ceiling].
var ceiling struct {
	sync.Mutex
	cores   int
	product float64 // operations per second
}

func (t *cpuEngine) Update() (float64, error) {
	defer func(from time.Time) {
		t.updates, t.took = t.updates+1, t.took+time.Since(from)
	}(time.Now())

	// Return the norm of the first group, which is the model's own parameters unless only seeds learn.
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

	if _, ok := t.optimizer.(optim.Rules); ok {
		return norm, nil // Step has checked the parameters, as optim.Rules requires
	}

	if _, _, found := t.FirstNonFinite(); found {
		return norm, ErrOverflow
	}

	return norm, nil
}

// ValueGrads returns the parameters with the gradients gathered so far.
func (t *cpuEngine) ValueGrads() []gorgonia.ValueGrad { return t.grads }

// Gradient implements [Listener].
func (t *cpuEngine) Gradient(param string) (any, error) {
	for _, p := range t.grads {
		if n, ok := p.(interface{ Name() string }); !ok || n.Name() != param {
			continue
		}
		g, err := p.Grad()
		if err != nil {
			return nil, fmt.Errorf("the gradient of %s: %w", param, err)
		}
		if g == nil {
			return nil, fmt.Errorf("the gradient of %s has not been computed", param)
		}
		return g.Data(), nil
	}

	return nil, fmt.Errorf("no gradient of parameter %s has been gathered", param)
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

func (t *cpuEngine) Forget(ranges ...ParamRange) error {
	if err := t.Model.CheckRanges(ranges...); err != nil {
		return err
	}

	for _, r := range ranges {
		if err := t.optimizer.Forget(r.Param, r.From, r.To); err != nil {
			return err
		}
	}
	return nil
}

func (t *cpuEngine) Close() error {
	return errors.Join(t.train.Machine.Close(), t.Inference.Close())
}

// CPUEngine returns a function that creates a trainer's engine on the CPU. It is the default when
// TrainConfig.Engine is nil. The options, such as cpuops.WithMonitor, apply to the machine that trains.
func CPUEngine(opts ...cpuops.Option) func(*Model, optim.Optimizer, TrainConfig) (Engine, error) {
	return func(m *Model, o optim.Optimizer, c TrainConfig) (Engine, error) {
		g, err := c.Graph(m)
		if err != nil {
			return nil, err
		}
		return newCPUEngine(m, g, o, c.Clip, opts...)
	}
}

// Graph builds a graph of the model that computes the gradients for a batch.
func (c TrainConfig) Graph(m *Model) (*Graph, error) {
	opts := []GraphOption{withLossShare(c.Accumulate)}
	if c.masked {
		opts = append(opts, withTokenMean())
	}
	if c.Recompute {
		opts = append(opts, WithRecompute())
	}
	if c.RecomputeMLPs > 0 {
		opts = append(opts, WithRecomputedMLPs(c.RecomputeMLPs))
	}
	if c.Frozen {
		opts = append(opts, WithFrozen())
	}
	if c.Preference != nil {
		opts = append(opts, WithPreference(*c.Preference))
	}
	if len(c.Tuned) > 0 {
		opts = append(opts, WithTuned(c.Tuned...))
	}
	if c.listen != nil {
		opts = append(opts, withGradients(c.listen...))
	}

	return m.Graph(ForTraining, c.Batch, opts...)
}
