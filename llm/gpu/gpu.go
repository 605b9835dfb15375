// Package gpu trains the models of package llm on an NVIDIA GPU.
//
//	device, err := cudaops.Open()
//	t, err := llm.NewTrainer(model, loader, optimizer, llm.TrainConfig{..., Engine: gpu.Engine(device, cudaops.BFloat16)})
//
// With cudaops.Float16 the engine is an llm.Scaler: a step whose gradients overflow is skipped, and the loss scale is saved
// with the run.
package gpu

import (
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/optim"
)

// Engine returns what makes the engine of a trainer on the device. Parameters and the optimiser's state live there, as
// float32 whatever the precision, and come back when a checkpoint is saved and when the trainer is closed. The device must
// stay open until then. Options, such as that of tuning, are for all machines that the engine makes.
func Engine(device *cudaops.Device, precision cudaops.Precision, opts ...cudaops.MachineOption) func(*llm.Model, optim.Optimizer, llm.TrainConfig) (llm.Engine, error) {
	return func(m *llm.Model, o optim.Optimizer, c llm.TrainConfig) (llm.Engine, error) {
		e, err := newEngine("cuda "+precision.String(), device, append(slices.Clip(opts), cudaops.WithPrecision(precision)), m, o, c)
		if err != nil {
			return nil, fmt.Errorf("llm/gpu: %w", err)
		}
		if precision == cudaops.Float16 {
			return scaler{e}, nil
		}
		return e, nil
	}
}

// engine is an llm.Engine. Losses and logits come from machines that share the parameters' memory.
type engine struct {
	name      string
	device    *cudaops.Device
	options   []cudaops.MachineOption
	model     *llm.Model
	optimizer optim.Optimizer
	limit     float64
	train     runner
	losses    map[int]*runner
	generator *runner
	changed   bool // the device is ahead of the host
}

// scaler is an engine that computes with float16, an llm.Scaler.
type scaler struct{ *engine }

func (s scaler) LossScale() llm.LossScale { return llm.LossScale(s.train.machine.LossScale()) }

func (s scaler) SetLossScale(l llm.LossScale) error {
	return s.train.machine.SetLossScale(cudaops.LossScale(l))
}

// runner is a graph on its machine.
type runner struct {
	*llm.Graph
	machine *cudaops.Machine
}

func newEngine(name string, device *cudaops.Device, opts []cudaops.MachineOption, m *llm.Model, o optim.Optimizer, c llm.TrainConfig) (*engine, error) {
	if m.Dtype() != tensor.Float32 {
		return nil, fmt.Errorf("the model is of %v, want float32", m.Dtype())
	}
	g, err := c.Graph(m)
	if err != nil {
		return nil, err
	}
	if err := o.Declare(gorgonia.NodesToValueGrads(g.Params)); err != nil {
		return nil, err
	}
	e := &engine{name: name, device: device, options: slices.Clip(opts), model: m, optimizer: o, limit: c.Clip,
		losses: map[int]*runner{}}
	opts = append(e.options, cudaops.WithParams(g.Params...), cudaops.WithOutputs(g.Loss))
	if c.Accumulate > 1 {
		opts = append(opts, cudaops.WithAccumulation())
	}
	machine, err := cudaops.NewMachine(device, g.G, opts...)
	if err != nil {
		return nil, err
	}
	e.train = runner{g, machine}
	if err := machine.SetOptimizer(o, c.Clip); err != nil {
		return nil, errors.Join(err, machine.Close())
	}
	return e, nil
}

func (e *engine) Name() string { return e.name }

func (e *engine) Gradients(b llm.Batch) (float64, error) { return e.train.run(b) }

func (e *engine) Update() (float64, error) {
	norm, err := e.train.machine.Update()
	if errors.Is(err, cudaops.ErrNonFinite) {
		return norm, llm.ErrGradients
	}
	e.changed = e.changed || err == nil
	return norm, err
}

// OpTimes needs the option cudaops.WithMonitor.
func (e *engine) OpTimes() ([]llm.OpTime, error) { return e.train.machine.Monitor() }

func (e *engine) Drop() error { return e.train.machine.DropGradients() }

// FirstNonFinite looks at the values on the host after pulling them, and then at the gradients of the last run.
func (e *engine) FirstNonFinite() (name, kind string, found bool) {
	if err := e.Pull(); err != nil {
		return "", "", false
	}
	for i, p := range e.train.Params {
		if !finite(e.model.Params[i].Value) {
			return p.Name(), "value", true
		}
	}
	for _, p := range e.train.Params {
		if v, err := e.train.machine.Value(p.Deriv()); err == nil && !finite(v) {
			return p.Name(), "gradient", true
		}
	}
	return "", "", false
}

func (e *engine) Loss(b llm.Batch) (float64, error) {
	sequences := len(b.Inputs) / e.model.Config.Seq
	d := e.losses[sequences]
	if d == nil {
		var err error
		if d, err = e.beside(llm.ForLoss, sequences); err != nil {
			return 0, err
		}
		e.losses[sequences] = d
	}
	return d.run(b)
}

// beside returns a graph on a machine that uses the parameters of the one that trains.
func (e *engine) beside(kind llm.GraphKind, batch int) (*runner, error) {
	g, err := e.model.Graph(kind, batch)
	if err != nil {
		return nil, err
	}
	m, err := cudaops.NewMachine(e.device, g.G, append(e.options, cudaops.WithParamsOf(e.train.machine))...)
	if err != nil {
		return nil, err
	}
	return &runner{g, m}, nil
}

func (e *engine) Logits(tokens []int) (any, error) {
	if e.generator == nil {
		var err error
		if e.generator, err = e.beside(llm.ForLogits, 1); err != nil {
			return nil, err
		}
	}
	g := e.generator
	if err := g.LetTokens(tokens); err != nil {
		return nil, err
	}
	if err := g.machine.RunAll(); err != nil {
		return nil, err
	}
	v, err := g.machine.Value(g.Logits)
	if err != nil {
		return nil, err
	}
	return v.Data(), nil
}

func (r *runner) run(b llm.Batch) (float64, error) {
	if err := r.Let(b); err != nil {
		return 0, err
	}
	if err := r.machine.RunAll(); err != nil {
		return 0, err
	}
	v, err := r.machine.Value(r.Loss)
	if err != nil {
		return 0, err
	}
	x, ok := v.Data().(float32)
	if !ok {
		return 0, fmt.Errorf("the loss is a %T", v.Data())
	}
	return float64(x), nil
}

// Pull fetches the named parameters; without names all, and what the optimiser remembers.
func (e *engine) Pull(names ...string) error {
	if !e.changed {
		return nil
	}
	for _, name := range names {
		if err := e.pull(name); err != nil {
			return err
		}
	}
	if len(names) > 0 {
		return nil
	}
	if err := e.train.machine.Download(); err != nil {
		return err
	}
	e.changed = false
	return nil
}

// find returns the number of a parameter.
func (e *engine) find(name string) (int, error) {
	i := slices.IndexFunc(e.train.Params, func(p *gorgonia.Node) bool { return p.Name() == name })
	if i < 0 {
		return 0, fmt.Errorf("the model has no parameter %s", name)
	}
	return i, nil
}

// pull fetches a parameter.
func (e *engine) pull(name string) error {
	i, err := e.find(name)
	if err != nil {
		return err
	}
	v, err := e.train.machine.Value(e.train.Params[i])
	if err != nil {
		return err
	}
	x, ok := v.Data().([]float32)
	if !ok {
		return fmt.Errorf("parameter %s is a %T", name, v.Data())
	}
	copy(e.model.Params[i].Value.Float32s(), x)
	return nil
}

// Push sends the named parameters; without names all, and what the optimiser remembers.
func (e *engine) Push(names ...string) error {
	if len(names) == 0 {
		return errors.Join(e.train.machine.Upload(e.train.Params...), e.train.machine.SetOptimizer(e.optimizer, e.limit))
	}
	var nodes gorgonia.Nodes
	for _, p := range e.train.Params {
		if slices.Contains(names, p.Name()) {
			nodes = append(nodes, p)
		}
	}
	return e.train.machine.Upload(nodes...)
}

func (e *engine) Forget(param string, from, to int) error {
	i, err := e.find(param)
	if err != nil {
		return err
	}
	return errors.Join(e.train.machine.Forget(e.train.Params[i], from, to), e.optimizer.Forget(param, from, to))
}

func (e *engine) Close() error {
	var err error
	for _, r := range e.losses {
		err = errors.Join(err, r.machine.Close())
	}
	if e.generator != nil {
		err = errors.Join(err, e.generator.machine.Close())
	}
	return errors.Join(err, e.train.machine.Close())
}

func finite(v gorgonia.Value) bool {
	switch x := v.Data().(type) {
	case []float32:
		return cpu.FirstNonFinite(x) < 0
	case float32:
		return x-x == 0
	}
	return true
}
