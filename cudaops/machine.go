package cudaops

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/choose"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kasmina"
	optimizerkernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/lower"
	"github.com/kasmina-go/kasmina/cudaops/internal/place"
	"github.com/kasmina-go/kasmina/cudaops/internal/profile"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/cudaops/internal/schedule"
	"github.com/kasmina-go/kasmina/cudaops/internal/update"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/phases"
)

// Machine runs a Gorgonia graph on a GPU. It is a gorgonia.VM: where a program has
// gorgonia.NewTapeMachine(g), it can have cudaops.NewMachine(dev, g) instead.
//
// The graph is compiled once, into kernel launches over memory that is planned before anything
// runs. Parameters (see [WithParams]) go up once and stay on the device. Other inputs go up before
// every run, and results come back when [Machine.Value] asks for them. Where the device has memory
// to spare, a graph that trains takes some of it to save time. It leaves a tenth free, beside what
// AdamW will take for this machine and for others on the device that have no optimiser yet. A node
// for which there is no kernel is computed on the host, between two copies, with one warning that
// names it; [WithStrict] makes that an error.
//
// A Machine is not safe for use by several goroutines at once.
type Machine struct {
	device    *Device
	config    machineConfig
	memory    run.Memory
	runner    *run.Runner
	inputs    *run.Inputs
	layers    *kasmina.Layers
	chooser   *choose.Chooser
	options   lower.Options
	optimizer *update.Optimizer
	measured  *profile.Machine
	monitor   *profile.Monitor  // nil without WithMonitor
	profiler  *profile.Profiler // nil but during a profile

	sent     gpu.Event // the last run's inputs have left their staging memory
	expected int       // bytes of Device.expected that are this machine's
	borrowed []*program.Input
	warnings warnings
}

// in names the method in an error that it returns.
func in(method string, err *error) {
	if *err != nil {
		*err = fmt.Errorf("cudaops.Machine.%s: %w", method, *err)
	}
}

// usable refuses a machine that nobody has made, and one that is closed.
func usable(m *Machine) error {
	if m.runner == nil {
		return errors.New("the machine is a zero value: make one with cudaops.NewMachine")
	}
	return m.runner.State.Open()
}

// NewMachine compiles the graph for the device, allocates its memory and copies the parameters
// there. The graph's floats must be float32. The caller closes the machine, before the device.
func NewMachine(d *Device, g *gorgonia.ExprGraph, opts ...MachineOption) (_ *Machine, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("cudaops.NewMachine: %w", err)
		}
	}()
	if d == nil || g == nil {
		return nil, errors.New("device or graph is nil")
	}
	if d.ctx == nil {
		return nil, errNotOpened
	}
	config, err := configOf(d, g, opts)
	if err != nil {
		return nil, err
	}
	if config.share != nil && config.share.device != d {
		return nil, errors.New("WithParamsOf: the other machine is on another device")
	}
	clock := phases.Start()
	m := &Machine{device: d, config: config,
		memory:   run.Memory{Ctx: d.ctx, Kept: config.kept.memory},
		warnings: warnings{config.logger, map[string]bool{}}}
	m.runner = &run.Runner{Executor: &run.Executor{Ctx: d.ctx, Stream: config.stream},
		Scale: run.Scale{Now: optimizerkernel.LossScale{Scale: 1}}}
	defer func() {
		if err != nil {
			err = run.Joined(err, m.Close())
		}
	}()
	if err := m.open(); err != nil {
		return nil, err
	}
	clock.End("kernels")
	if err := m.plan(g); err != nil {
		return nil, err
	}
	clock.End("program")
	if m.config.ranks != nil {
		m.chooser.Settle()
	}
	if err := m.load(clock); err != nil {
		return nil, err
	}
	clock.End("the rest")
	config.logger.Debug("cudaops: a machine is made", "in", clock)
	return m, nil
}

// configOf gathers the options.
func configOf(d *Device, g *gorgonia.ExprGraph, opts []MachineOption) (machineConfig, error) {
	config := machineConfig{kept: &Kept{run.NewKept(d.ctx), d}}
	for _, opt := range opts {
		if opt == nil {
			return config, errors.New("an option is nil")
		}
		if err := opt(&config); err != nil {
			return config, err
		}
	}
	if k := config.kept; k.device != d {
		return config, errors.New("WithKept: what was kept is on another device")
	}
	if config.logger == nil {
		config.logger = slog.Default()
	}
	return config, run.Joined(config.narrowGradients(), config.Within(g))
}

// open takes what the machine has beside a program: kernels, a stream, a chooser.
func (m *Machine) open() (err error) {
	x, ctx := m.runner.Executor, m.device.ctx
	if x.Kernels = m.device.kernels; m.config.kernels != nil {
		x.Kernels = m.config.kernels(x.Kernels)
	}
	c := &m.config
	x.Pieces = &run.Pieces{Alloc: m.memory.AllocHost}
	x.Products = &run.Products{Kernels: x.Kernels, Ctx: ctx, Alloc: m.memory.Alloc}
	if c.single != nil {
		x.Products.Workspace = c.single.workspace
	}
	if x.Stream == 0 {
		if x.Stream, err = ctx.NewStream(); err != nil {
			return err
		}
	}
	if m.sent, err = m.memory.NewEvent(false); err != nil {
		return err
	}
	if m.chooser, err = newChooser(m); err != nil {
		return err
	}
	if err := checkFloat8(m); err != nil {
		return err
	}
	m.options = lower.Options{Asked: c.Asked, Frozen: c.frozen, Device: m.device.info,
		Activation: c.act, Gradient: c.narrow, Float8: c.float8, Scaled: c.scaled,
		Accumulate: c.gather, Strict: c.strict,
		Timed: c.monitor > 0, OnHost: m.chooser.Rules.OnHost, Warn: m.warnings.add,
		Chooser: m.chooser}
	if s := c.share; s != nil {
		m.options.Shared, m.options.SharedParams = s.runner.Program, s.config.Params
	}
	return nil
}

// plan compiles the graph: to a program that saves time with memory, or where that would leave too
// little to one that does so with less of it, or does without.
func (m *Machine) plan(g *gorgonia.ExprGraph) (err error) {
	m.options.Room = math.MaxInt
	for {
		if m.runner.Program, err = compile(m, g); err != nil || m.runner.Program.Spent == 0 {
			return err
		}
		lacks, err := lacking(m)
		if lacks <= 0 || err != nil {
			return err
		}
		if err := m.runner.Products.Forget(); err != nil {
			return err
		}
		m.chooser.Again()
		if m.config.limit > 0 && m.options.Room == math.MaxInt {
			m.options.Room = m.runner.Program.Spent - lacks
		} else {
			m.options.Room = 0
		}
	}
}

// compile makes a program of a graph: in passes, of which only the choice of ways knows the device.
func compile(m *Machine, g *gorgonia.ExprGraph) (*program.Program, error) {
	p, kept, err := lower.Lower(g, m.options)
	if err != nil {
		return nil, err
	}
	if err := m.chooser.Program(p); err != nil {
		return nil, err
	}
	if m.config.ranks != nil {
		schedule.PutOff(p, lastProducts)
	}
	var lasting []*program.Array
	for _, n := range kept {
		lasting = append(lasting, p.Values[n])
	}
	place.Arena(p, lasting)
	return p, nil
}

// lastProducts is how many products are made while the last gradients travel.
const lastProducts = 2

// roomLeft is the share of the card's memory that saving time must leave free. It is for machines
// beside this one, as for evaluation, for what is taken while ways are timed, and for other
// programs.
const roomLeft = 0.1

// lacking is how many bytes the program takes too many. It is to leave enough of the device's
// memory to the optimisers that are still to come and to what roomLeft is for, and to stay within
// what WithMemory says. The optimisers are the machine's and those of others on the device.
func lacking(m *Machine) (int, error) {
	free, total, err := m.device.ctx.MemInfo()
	p := m.runner.Program
	own := p.Arena + p.Resident() + momentsToCome(m)
	lacks := own + int(m.device.expected.Load()) + int(roomLeft*float64(total)) -
		int(free) - m.memory.Kept.Held()
	if m.config.limit > 0 {
		lacks = max(lacks, own-toDivide(m)-m.config.limit)
	}
	return lacks, err
}

// toDivide is about the bytes of parameters that the machine gives back when its optimiser has
// divided them among ranks.
func toDivide(m *Machine) (bytes int) {
	r := m.config.ranks
	if r == nil {
		return 0
	}
	for _, in := range m.runner.Program.Inputs {
		if gradientOf(m, in) != nil && len(in.Copies) > 0 {
			bytes += in.Array.Extent() - in.Array.Extent()/r.Group.Size()
		}
	}
	return bytes
}

// expect tells machines that are made later how much memory this one is still to take.
func expect(m *Machine, bytes int) {
	m.device.expected.Add(int64(bytes - m.expected))
	m.expected = bytes
}

// load takes the program's memory and fills what is there from the start.
func (m *Machine) load(clock *phases.Clock) error {
	p, ctx, x := m.runner.Program, m.device.ctx, m.runner.Executor
	if err := m.borrow(); err != nil {
		return err
	}
	if err := m.memory.Fits(p); err != nil {
		return err
	}
	for _, in := range p.Inputs {
		if k := m.kept(in); k != nil && m.memory.Take(k.Value, in.Array.Buffer.Bytes) {
			in.Array.Base = k.Value
		}
	}
	if err := m.memory.Place(p, "a run"); err != nil {
		return err
	}
	clock.End("memory")
	var err error
	if m.inputs, err = run.NewInputs(x, p, m.config.read); err != nil {
		return err
	}
	m.layers, err = kasmina.New(&kasmina.Machine{Runner: m.runner, Memory: &m.memory,
		Strict: m.config.strict, Warn: m.warnings.add,
		Apart: m.config.single != nil, Refresh: m.inputs.Refresh})
	if err != nil {
		return err
	}
	x.Host, x.Pass = m.runner.OnTheHost, m.layers.Run
	expect(m, momentsToCome(m))
	for _, b := range p.Buffers {
		if b.Data != nil {
			if err := ctx.CopyToDevice(b.Base, gpu.Bytes(b.Data), x.Stream); err != nil {
				return err
			}
		}
	}
	clock.End("inputs and layers")
	if err := m.inputs.SendConstants(m.kept); err != nil {
		return err
	}
	clock.End("parameters")
	if p.Scale != nil {
		if err := m.SetLossScale(LossScale{Scale: firstLossScale}); err != nil {
			return err
		}
	}
	return run.InTurn(func() error { return update.ClearSums(m.runner) }, m.observed,
		func() error { return ctx.SyncStream(x.Stream) })
}

// observed makes what times the machine's work.
func (m *Machine) observed() (err error) {
	m.measured = &profile.Machine{Runner: m.runner, Layers: m.layers,
		Chooser: m.chooser, Warn: m.warnings.add,
		Name: m.device.Name(), Operands: m.config.act, Float8: m.config.float8,
		Copy: m.config.ceilingBytes}
	if m.config.monitor > 0 {
		m.monitor, err = profile.NewMonitor(m.measured, m.config.monitor)
	}
	return err
}

// borrow takes the parameters of another machine, where the options name one.
func (m *Machine) borrow() error {
	s, p := m.config.share, m.runner.Program
	if s == nil {
		return nil
	}
	if len(p.Borrowed) == 0 {
		return errors.New("WithParamsOf: no input has name, type and shape of one of the " +
			"other machine's parameters")
	}
	for _, b := range p.Borrowed {
		if b.Part != nil && slices.ContainsFunc(p.Calls, func(c *program.Call) bool {
			return c.Touches(b.Array.Buffer)
		}) {
			return fmt.Errorf("WithParamsOf: %s is divided among ranks, which have it whole "+
				"in the other machine's precision alone: give both the same",
				graph.Describe(b.Node))
		}
	}
	for _, b := range p.Borrowed {
		b.Sharers++
	}
	m.borrowed = p.Borrowed
	return nil
}

// Memory returns the device memory in bytes that the machine holds: parameters and constants,
// everything a run needs, the optimiser's state and workspace.
func (m *Machine) Memory() int { return m.memory.Held() + m.inputs.Held() + m.optimizer.Held() }

// RunAll computes the graph. It returns when the work is on its way to the device; [Machine.Value]
// waits for it. An error on the device may show in a later call.
func (m *Machine) RunAll() (err error) {
	defer in("RunAll", &err)
	if err = usable(m); err != nil {
		return
	}
	if s := m.config.share; s != nil && s.runner.State.Closed() {
		return errors.New("the machine whose parameters this one uses (WithParamsOf) is closed")
	}
	ctx, ran := m.device.ctx, m.runner.State.Ran()
	m.runner.State.On(run.Begin)
	if ran {
		if err := ctx.SyncEvent(m.sent); err != nil {
			return err
		}
	}
	if err := m.profiler.Start(); err != nil {
		return err
	}
	defer m.profiler.Call("RunAll")()
	if err := m.arrived(); err != nil {
		return err
	}
	if err := m.layers.Before(); err != nil {
		return err
	}
	if err := run.InTurn(m.inputs.SendAll,
		func() error { return ctx.Record(m.sent, m.runner.Stream) },
		func() error { return m.runner.Compute(m.observe) }); err != nil {
		return err
	}
	if err := m.layers.After(); err != nil {
		return err
	}
	if m.optimizer == nil {
		m.profiler.Finish()
	}
	return nil
}

// arrived has a run wait for parameters that come from other ranks, where it does not do so call by
// call. That is where it has marks, where Kasmina layers may change parameters ahead of it, and
// where the parameters are another machine's.
func (m *Machine) arrived() error {
	if s := m.config.share; s != nil {
		return s.optimizer.Arrive(m.runner.Stream)
	}
	if m.monitor == nil && !m.profiler.Busy() && len(m.runner.Program.Starts) == 0 {
		return nil
	}
	return m.optimizer.Arrive(m.runner.Stream)
}

// observe enqueues a run, with the marks of a profiler or of the monitor.
func (m *Machine) observe(capture bool, run func() error) error {
	plain := run
	if m.monitor != nil && m.runner.Now().Loaded && !m.profiler.Busy() {
		run = func() error { return m.monitor.Run(plain) }
	}
	return m.profiler.Around(capture, m.optimizer, run, func() error { return m.profiler.Marked() })
}

// Reset does nothing: every run begins anew. It is part of gorgonia.VM.
func (m *Machine) Reset() {}

// Close waits for the device and frees what the machine holds there.
func (m *Machine) Close() (err error) {
	defer in("Close", &err)
	if m.runner == nil || m.runner.State.Closed() {
		return nil
	}
	m.runner.State.On(run.Close)
	expect(m, 0)
	for _, b := range m.borrowed {
		b.Sharers--
	}
	ctx, x := m.device.ctx, m.runner.Executor
	if x.Stream == 0 { // which comes first
		return nil
	}
	err = run.Joined(ctx.SyncStream(x.Stream), m.runner.Settle(), m.runner.Drop(),
		m.monitor.Close(), m.profiler.Close(), m.optimizer.Close(), x.Products.Forget(),
		m.inputs.Close(), m.memory.Close())
	if m.config.stream == 0 {
		err = run.Joined(err, ctx.DestroyStream(x.Stream))
	}
	return err
}

// warnings are logged once.
type warnings struct {
	logger *slog.Logger
	logged map[string]bool
}

// add logs a message unless it has been logged.
func (w warnings) add(message string) {
	if !w.logged[message] {
		w.logged[message] = true
		w.logger.Warn("cudaops: " + message)
	}
}

// gradientOf returns the gradient that the program has of an input that is a parameter, nil if
// there is none.
func gradientOf(m *Machine, in *program.Input) *program.Array {
	if d := in.Node.Deriv(); d != nil && slices.Contains(m.config.Params, in.Node) {
		return m.runner.Program.Values[d]
	}
	return nil
}

// momentsToCome is the bytes of the moments that the machine would have with AdamW, 0 if it has an
// optimiser. Muon has one moment, and directions.
func momentsToCome(m *Machine) (bytes int) {
	if m.optimizer != nil {
		return 0
	}
	for _, in := range m.runner.Program.Inputs {
		if g := gradientOf(m, in); g != nil {
			bytes += 2 * 4 * g.Len()
		}
	}
	if r := m.config.ranks; r != nil {
		bytes /= r.Group.Size()
	}
	return bytes
}
