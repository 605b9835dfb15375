// Package gpu trains the models of package llm on an NVIDIA GPU.
//
//	device, err := cudaops.Open()
//	t, err := llm.NewTrainer(model, loader, optimizer, llm.TrainConfig{..., Engine: gpu.Engine(device, cudaops.BFloat16)})
//
// With cudaops.Float16, the engine is an llm.Scaler: it skips a step if the gradients overflow, and
// checkpoints include the loss scale.
package gpu

import (
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/cpu/array"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/optime"
)

// Engine returns a function for [llm.TrainConfig.Engine] that creates engines on the device.
// Parameters and optimizer state stay on the device, as float32 in every precision. They are copied
// to the host when a checkpoint is saved, when another trainer takes the model, and when the trainer
// is closed. The device must stay open until then. The options, for example for tuning, apply to all
// machines of the engine.
func Engine(device *cudaops.Device, precision cudaops.Precision,
	opts ...cudaops.MachineOption) func(*llm.Model, optim.Optimizer, llm.TrainConfig) (llm.Engine,
	error) {
	return func(m *llm.Model, o optim.Optimizer, c llm.TrainConfig) (llm.Engine, error) {
		b := builder{name: "cuda " + precision.String(), device: device,
			opts:  append(slices.Clip(opts), cudaops.WithPrecision(precision)),
			model: m, optimizer: o, config: c, scales: precision == cudaops.Float16}
		if c.Accumulate > 1 {
			b.training = append(b.training, cudaops.WithAccumulation())
		}
		return b.engine()
	}
}

// engine implements llm.Engine on a GPU.
type engine struct {
	name          string
	llm.Inference // on machines that share the memory of the parameters
	optimizer     optim.Optimizer
	limit         float64
	graph         *llm.Graph
	machine       *cudaops.Machine
	changed       bool    // the device is ahead of the host
	builder       builder // creates further engines
	optimizes     bool    // the machine has the optimizer
}

// Optional abilities of the engines.
var (
	_ llm.Stepper  = (*engine)(nil)
	_ llm.Sensor   = (*engine)(nil)
	_ llm.Listener = (*engine)(nil)
	_ llm.Keeper   = (*engine)(nil)
	_ llm.Profiler = (*engine)(nil)
	_ llm.Chooser  = (*engine)(nil)
	_ llm.Measurer = (*engine)(nil)

	_ llm.MemoryPlanner = (*engine)(nil)
	_ llm.Tracer        = (*engine)(nil)
	_ llm.Scaler        = scaler{}
)

// scaler is an engine for float16. It implements llm.Scaler.
type scaler struct{ *engine }

func (s scaler) LossScale() llm.LossScale { return llm.LossScale(s.machine.LossScale()) }

func (s scaler) SetLossScale(l llm.LossScale) error {
	return s.machine.SetLossScale(cudaops.LossScale(l))
}

// builder creates engines in two stages: compile and optimize.
type builder struct {
	name   string
	device *cudaops.Device
	// opts apply to all machines, and training only to the machine that trains
	opts, training []cudaops.MachineOption
	model          *llm.Model
	optimizer      optim.Optimizer
	config         llm.TrainConfig
	scales         bool // the loss
}

// engine creates an engine. The options in more are appended to the builder's own.
func (b builder) engine(more ...cudaops.MachineOption) (llm.Engine, error) {
	e, err := b.compile(more...)
	if err != nil {
		return nil, fmt.Errorf("llm/gpu: %w", err)
	}

	if err := e.optimize(); err != nil {
		return nil, errors.Join(fmt.Errorf("llm/gpu: %w", err), e.machine.Close())
	}

	if b.scales && e.graph.Updates() { // a frozen model may not contain anything that learns yet
		return scaler{e}, nil
	}

	return e, nil
}

// compile creates an engine without an optimizer.
func (b builder) compile(more ...cudaops.MachineOption) (*engine, error) {
	if b.model.Dtype() != tensor.Float32 {
		return nil, fmt.Errorf("the model is of %v, want float32", b.model.Dtype())
	}

	g, err := b.config.Graph(b.model)
	if err != nil {
		return nil, err
	}

	if g.Updates() {
		if err := b.optimizer.Declare(gorgonia.NodesToValueGrads(g.Learning)); err != nil {
			return nil, err
		}
	}

	own := append(slices.Clip(b.opts), cudaops.WithParams(g.Learning...),
		cudaops.WithOutputs(g.Outputs()...))
	var seeds gorgonia.Nodes
	for _, p := range g.Learning {
		if llm.IsSeedParam(p.Name()) {
			seeds = append(seeds, p)
		}
	}

	own = append(own, cudaops.WithSeparateClipping(seeds...))
	if rules, ok := b.optimizer.(optim.Rules); ok {
		own = append(own, cudaops.WithOptimizer(rules))
	}

	frozen := slices.DeleteFunc(g.Frozen(), func(n *gorgonia.Node) bool { return isPacked(g, n) })
	if g.Base != nil {
		own = append(own, cudaops.WithWeights(g.Base))
	}
	if len(frozen) > 0 {
		own = append(own, cudaops.WithFrozen(readBase(g.Base), frozen...))
	}

	own = append(append(own, b.training...), more...)
	machine, err := cudaops.NewMachine(b.device, g.G, own...)
	if err != nil {
		return nil, err
	}

	makeMachine := func(g *llm.Graph) (llm.Machine, error) {
		opts := append(slices.Clip(b.opts), append(draws(g), cudaops.WithParamsOf(machine),
			cudaops.WithOutputs(g.Outputs()...))...)
		if g.Kind == llm.ForLoss || g.Rows != nil && g.Pages == nil { // all but the graphs that decode step by step
			opts = append(opts, cudaops.WithSharedRuns())
		}
		return cudaops.NewMachine(b.device, g.G, opts...)
	}
	name := b.name
	if p := machine.GradientPrecision(); p != cudaops.Float32 { // the gradient precision affects the results of a run
		name += ", gradients " + p.String()
	}

	return &engine{name, llm.Inference{Model: b.model, Make: makeMachine, Preference: b.config.Preference,
		DrawsOnDevice: cudaops.DecodesOnDevice()}, b.optimizer, b.config.Clip,
		g, machine, false, b, false}, nil
}

// isPacked reports whether the device holds a parameter in float8 or NF4. It never changes.
func isPacked(g *llm.Graph, n *gorgonia.Node) bool {
	t, _, _, ok := g.Base.Matrix(n.Name())
	return ok && (t == cpuops.Float8 || t == cpuops.NF4)
}

// readBase returns a function that reads matrices of a model's Base for the device. It returns nil if there
// are none.
func readBase(base *cpuops.Weights) func(*gorgonia.Node, func([]byte, cudaops.Precision) error) error {
	if base == nil {
		return nil
	}

	return func(n *gorgonia.Node, put func([]byte, cudaops.Precision) error) error {
		_, rows, width, ok := base.Matrix(n.Name())
		if !ok {
			return fmt.Errorf("%s has no value", n.Name())
		}

		step := max(1, baseNumbers/width)
		numbers := make([]float32, min(rows, step)*width)
		for row := 0; row < rows; row += step {
			to := min(row+step, rows)
			if err := base.Rows(n.Name(), numbers, row, to); err != nil {
				return err
			}
			if err := put(safetensors.Memory(numbers[:(to-row)*width]), cudaops.Float32); err != nil {
				return err
			}
		}
		return nil
	}
}

// baseNumbers is the number of weights that readBase passes on at once.
const baseNumbers = 1 << 20

// optimize adds the optimizer to the machine.
func (e *engine) optimize() error {
	if !e.graph.Updates() {
		return nil
	}
	err := e.machine.SetOptimizer(e.optimizer, e.limit)
	e.optimizes = err == nil
	return err
}

func (e *engine) Name() string { return e.name }

func (e *engine) Gradients(b data.Batch) (float64, error) {
	return llm.Runner{Graph: e.graph, Machine: e.machine}.Run(b)
}

func (e *engine) Update() (float64, error) { return e.updated(e.machine.Update()) }

func (e *engine) updated(norm float64, err error) (float64, error) {
	if errors.Is(err, cudaops.ErrNonFinite) {
		return norm, llm.ErrGradients
	}
	e.changed = true // whatever the error: some come after the update
	return norm, err
}

// Step implements [llm.Stepper].
func (e *engine) Step(b data.Batch) (loss, norm float64, err error) {
	if err := e.graph.Let(b); err != nil {
		return 0, 0, err
	}
	if err := e.machine.RunAll(); err != nil {
		return 0, 0, err
	}
	loss, norm, err = e.machine.Step(e.graph.Loss)
	norm, err = e.updated(norm, err)
	return loss, norm, err
}

// TakePreferences implements [llm.PreferenceMeter].
func (e *engine) TakePreferences() op.PreferenceFigures {
	return e.graph.TakePreferences().Plus(e.Inference.TakePreferences())
}

// Figures implements [llm.Sensor].
func (e *engine) Figures() ([]llm.SeedFigures, error) { return e.graph.Figures(e.machine.Value) }

// OpTimes returns the times of ops. It needs the option cudaops.WithMonitor.
func (e *engine) OpTimes() ([]optime.OpTime, error) { return e.machine.Monitor() }

// Choices implements [llm.Chooser].
func (e *engine) Choices() []optime.Choice { return e.machine.Choices() }

// MemoryPlan implements [llm.MemoryPlanner].
func (e *engine) MemoryPlan() llm.MemoryPlan { return llm.MemoryPlan(e.machine.MemoryPlan()) }

// Ceiling implements [llm.Measurer].
func (e *engine) Ceiling() (optime.Ceiling, error) { return e.machine.Ceiling() }

// StartProfile and Profile profile the machine.
func (e *engine) StartProfile() error               { return e.machine.StartProfile() }
func (e *engine) Profile() (*optime.Profile, error) { return e.machine.Profile() }

func (e *engine) Drop() error { return e.machine.DropGradients() }

// FirstNonFinite pulls the values and searches them, followed by the gradients of the step. Pull may
// fail because of non-finite moments, but only after fetching the values.
func (e *engine) FirstNonFinite() (name, kind string, found bool) {
	_ = e.Pull()
	for i, p := range e.graph.Params {
		if v := e.Model.Params[i].Value; v != nil && !finite(v) {
			return p.Name(), "value", true
		}
	}
	if p, err := e.machine.NonFinite(); err == nil && p != nil {
		return p.Name(), "gradient", true
	}
	return "", "", false
}

// Pull fetches the named parameters or, without names, all parameters and the optimizer state.
func (e *engine) Pull(names ...string) error {
	if !e.changed {
		return nil
	}

	if len(names) > 0 {
		var nodes gorgonia.Nodes
		for _, name := range names {
			i, err := e.find(name)
			if err != nil {
				return err
			}
			nodes = append(nodes, e.graph.Params[i])
		}
		return e.machine.Download(nodes...)
	}

	// Download fetches the moments after the parameters.
	if err := e.machine.Download(); errors.Is(err, cudaops.ErrNonFinite) {
		return fmt.Errorf("%w: %w", llm.ErrDiverged, err)
	} else if err != nil {
		return err
	}

	e.changed = false
	return nil
}

// find returns the index of a parameter.
func (e *engine) find(name string) (int, error) {
	i := slices.IndexFunc(e.graph.Params, func(p *gorgonia.Node) bool { return p.Name() == name })
	if i < 0 {
		return 0, fmt.Errorf("the model has no parameter %s", name)
	}
	return i, nil
}

// Gradient implements [llm.Listener].
func (e *engine) Gradient(param string) (any, error) {
	i, err := e.find(param)
	if err != nil {
		return nil, err
	}

	g := e.graph.Params[i].Deriv()
	if g == nil {
		return nil, fmt.Errorf("no gradient of parameter %s is gathered", param)
	}

	v, err := e.machine.Value(g)
	if err != nil {
		return nil, err
	}

	return v.Data(), nil
}

// Push sends the named parameters or, without names, all parameters and the optimizer state.
func (e *engine) Push(names ...string) error {
	if len(names) == 0 {
		params := slices.DeleteFunc(slices.Clone(e.graph.Params), func(n *gorgonia.Node) bool {
			return isPacked(e.graph, n)
		})
		if err := e.machine.Upload(params...); err != nil {
			return err
		}
		return e.optimize()
	}

	var nodes gorgonia.Nodes
	for _, p := range e.graph.Params {
		if slices.Contains(names, p.Name()) {
			nodes = append(nodes, p)
		}
	}

	return e.machine.Upload(nodes...)
}

func (e *engine) Forget(ranges ...llm.ParamRange) error {
	if err := e.Model.CheckRanges(ranges...); err != nil {
		return err
	}

	params := make([]*gorgonia.Node, len(ranges))
	for k, r := range ranges {
		i, err := e.find(r.Param)
		if err != nil {
			return err
		}
		params[k] = e.graph.Params[i]
	}

	// Only a lost device can fail from here on, and it fails everything that follows.
	for k, r := range ranges {
		if err := e.machine.Forget(params[k], r.From, r.To); err != nil {
			return err
		}
		if err := e.optimizer.Forget(r.Param, r.From, r.To); err != nil {
			return err
		}
	}
	return nil
}

func (e *engine) Close() error {
	return errors.Join(e.Inference.Close(), e.machine.Close())
}

// CanKeep implements [llm.Keeper]. The parameters can stay on the device if the machine has an optimizer,
// which is not the case after a failed Push.
func (e *engine) CanKeep() bool { return e.optimizes }

// Keep implements [llm.Keeper].
func (e *engine) Keep() (llm.Kept, error) {
	if err := e.Inference.Close(); err != nil {
		return nil, err
	}
	k, err := e.machine.CloseKept()
	if err != nil {
		return nil, err
	}
	return kept{k, e.builder}, nil
}

// kept implements llm.Kept.
type kept struct {
	*cudaops.Kept
	builder builder
}

// Engine implements [llm.Kept].
func (k kept) Engine(from map[string]string) (llm.Engine, error) {
	e, err := k.builder.engine(cudaops.WithKept(k.Kept, from))
	switch e := e.(type) {
	case *engine:
		e.changed = true
	case scaler:
		e.changed = true
	}
	return e, err
}

func finite(v gorgonia.Value) bool {
	switch x := v.Data().(type) {
	case []float32:
		return array.FirstNonFinite(x) < 0
	case float32:
		return x-x == 0
	}
	return true
}
