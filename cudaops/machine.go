package cudaops

import (
	"context"
	"errors"
	"fmt"
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

// Machine runs a Gorgonia graph on a GPU. It implements gorgonia.VM: a program can use
// cudaops.NewMachine(dev, g) in place of gorgonia.NewTapeMachine(g).
//
// NewMachine compiles the graph once, into kernel launches over memory that is planned before anything
// runs. Parameters (see [WithParams]) are copied to the device once and stay there. Other inputs are
// copied before every run, and [Machine.Value] copies results back.
//
// A machine with gradients uses spare device memory to save time. It keeps a tenth of the device's memory
// free, in addition to the moments of its future optimizer (see [WithOptimizer]). Therefore call
// SetOptimizer of one machine before making the next machine.
//
// Nodes without a kernel are computed on the host, between two copies. Each such op is logged once as a
// warning; [WithStrict] makes it an error.
//
// A Machine is not safe for concurrent use by multiple goroutines.
type Machine struct {
	device    *Device
	config    machineConfig
	runner    *run.Runner
	layers    *kasmina.Layers
	chooser   *choose.Chooser
	optimizer *update.Optimizer
	measured  *profile.Target
	monitor   *profile.Monitor  // nil without WithMonitor
	profiler  *profile.Profiler // nil unless a profile has been started

	sent   gpu.Event               // recorded once the inputs of the last run have left their staging memory
	filled map[*gorgonia.Node]bool // attentions with a cache filled by Keep
	draws  *draws                  // nil without WithDraws

	meters *meters // nil if no op measures figures

	runs *sharedRuns // nil if no machine shares the memory of the runs
}

// sharedRuns belongs to several machines that use the same memory for their runs.
type sharedRuns struct{ last *Machine } // the machine that ran last

// hasValues returns an error if the run of another machine has overwritten the values of the last run.
func (m *Machine) hasValues() error {
	if m.runs == nil || m.runs.last == m {
		return nil
	}
	return errors.New("another machine has run in the same memory since (see WithSharedRuns): run this machine again")
}

// enterRuns waits until the machine may use the memory of its runs.
func (m *Machine) enterRuns() error {
	if m.runs == nil || m.runs.last == m {
		return nil
	}

	last := m.runs.last.runner
	m.runs.last = m
	if last.State.Closed() {
		return nil
	}
	return m.device.ctx.SyncStream(last.Stream)
}

// borrowsRuns reports whether the machine computes in the memory of the runs of the machine whose parameters it
// uses.
func (m *Machine) borrowsRuns(p *program.Program) bool {
	if !m.config.sharesRuns {
		return false
	}
	other := m.config.share.runner.Program
	return p.Arena <= other.Arena && len(p.Kasmina)+len(other.Kasmina) == 0
}

// annotate adds the method's name to the error that it returns.
func annotate(method string, err *error) {
	if *err != nil {
		*err = fmt.Errorf("cudaops.%s: %w", method, *err)
	}
}

// usable returns an error if the machine is closed.
func usable(m *Machine) error {
	if m.runner.State.Closed() {
		return errors.New("the machine is closed")
	}
	return nil
}

// NewMachine compiles the graph for the device, allocates its memory and copies the parameters there. The
// graph's floats must be float32. The caller must close the machine before the device.
func NewMachine(d *Device, g *gorgonia.ExprGraph, opts ...MachineOption) (_ *Machine, err error) {
	defer annotate("NewMachine", &err)
	config, err := configOf(d, g, opts)
	if err != nil {
		return nil, err
	}

	clock := phases.Start()
	x, err := newExecutor(d, &config)
	if err != nil {
		return nil, err
	}

	m := &Machine{device: d, config: config, runner: &run.Runner{Executor: x,
		Scale: run.Scale{Current: optimizerkernel.LossScale{Scale: 1}}}}
	defer func() {
		if err != nil {
			err = run.Joined(err, m.Close())
		}
	}()

	m.chooser = choose.New(x, m.config.variants)
	m.config.Chooser, m.config.OnHost = m.chooser, m.chooser.Rules.OnHost
	clock.End("kernels")
	p, err := compileWithinBudget(m, g)
	if err != nil {
		return nil, err
	}

	clock.End("program")
	if m.config.ranks != nil {
		m.chooser.StopTiming()
	}

	if err := m.load(p); err != nil {
		return nil, err
	}

	clock.End("memory and parameters")
	config.variants.Logger.Debug("cudaops: machine compiled", "in", clock)
	return m, nil
}

// newExecutor returns the executor on which a machine enqueues its work, with kernels and a stream.
func newExecutor(d *Device, c *machineConfig) (x *run.Executor, err error) {
	x = &run.Executor{Ctx: d.ctx, Stream: c.stream, Kernels: d.kernels,
		Memory: &run.Memory{Ctx: d.ctx, Kept: c.kept}}
	if c.kernels != nil {
		x.Kernels = c.kernels(x.Kernels)
	}

	if c.single {
		x.Workspace = d.workspace
	}
	if c.sharesRuns {
		owner := c.share.runner
		if err := d.ctx.SyncStream(owner.Stream); err != nil { // it may be using the workspace
			return nil, err
		}
		x.Workspace = owner.Workspace
	}

	if x.Stream == 0 {
		x.Stream, err = d.ctx.NewStream(false)
	}

	return x, err
}

// compileWithinBudget compiles the graph. The first attempt may spend any amount of memory to save time.
// If that exceeds the memory budget, a second attempt spends only as much as the limit of WithMemory
// allows, and the last attempt spends nothing.
func compileWithinBudget(m *Machine, g *gorgonia.ExprGraph) (*program.Program, error) {
	m.config.Room = math.MaxInt
	for {
		p, err := compile(m, g)
		if err != nil || p.Spent == 0 {
			return p, err
		}
		shortfall, err := memoryShortfall(m, p)
		if shortfall <= 0 || err != nil {
			return p, err
		}
		m.runner.ClearPlans()
		m.chooser.Reset()
		if m.config.limit > 0 && m.config.Room == math.MaxInt {
			m.config.Room = p.Spent - shortfall
		} else {
			m.config.Room = 0
		}
	}
}

// compile turns a graph into a program, in several passes. Only the pass that chooses variants depends on
// the device.
func compile(m *Machine, g *gorgonia.ExprGraph) (*program.Program, error) {
	p, results, err := lower.Lower(g, m.config.Options)
	if err != nil {
		return nil, err
	}

	if err := m.chooser.Program(p); err != nil {
		return nil, err
	}

	if m.config.ranks != nil {
		schedule.DeferProducts(p, lastProducts)
	}

	var retained []*program.Array
	for _, n := range results {
		retained = append(retained, p.Values[n])
	}

	place.Arena(p, retained)
	return p, nil
}

// lastProducts is the number of matrix products that are computed while the last gradients are being
// sent.
const lastProducts = 2

// roomLeft is the share of the device's memory that stays free when a machine spends memory to save time.
// Further machines (such as one for evaluation), the timing of variants and other programs need it.
const roomLeft = 0.1

// memoryShortfall returns how many bytes the program, together with the moments of its future optimizer,
// needs beyond its memory budget. The budget keeps the share roomLeft of the device's memory free and
// does not exceed the limit of WithMemory.
func memoryShortfall(m *Machine, p *program.Program) (int, error) {
	free, total, err := m.device.ctx.MemInfo()
	moments, divided := memoryToCome(m, p)
	own := p.Arena + p.Resident() + moments
	shortfall := own + int(roomLeft*float64(total)) - int(free) - m.runner.Memory.Kept.Held()
	if m.config.limit > 0 {
		shortfall = max(shortfall, own-divided-m.config.limit)
	}
	return shortfall, err
}

// memoryToCome returns the size in bytes of the moments that the machine's optimizer will have, and the
// approximate number of bytes of parameters that the machine frees once the optimizer has divided them
// among ranks.
func memoryToCome(m *Machine, p *program.Program) (moments, divided int) {
	ranks := 1
	if r := m.config.ranks; r != nil {
		ranks = r.Group.Size()
	}

	for _, in := range p.Inputs {
		g := gradientOf(m, p, in)
		if g == nil {
			continue
		}
		moments += m.config.momentBytes(in.Node, g.Len())
		if len(in.Copies) > 0 {
			divided += in.Array.Extent() - in.Array.Extent()/ranks
		}
	}

	return moments / ranks, divided
}

// load allocates the program's memory and copies the initial values to it.
func (m *Machine) load(p *program.Program) (err error) {
	if m.config.share != nil {
		if err := borrowable(p, m.config.Activation); err != nil {
			return err
		}
	}

	ctx, r, memory := m.device.ctx, m.runner, m.runner.Memory
	r.Program = p
	for _, b := range p.Borrowed {
		b.Sharers++
	}

	borrows := m.borrowsRuns(p)
	if err := memory.Fits(p, borrows); err != nil {
		return err
	}

	for _, in := range p.Inputs {
		if k := m.config.inherited(in); k != nil && memory.Take(k.Value, in.Array.Buffer.Bytes) {
			in.Array.Base = k.Value
		}
	}

	if borrows {
		owner := m.config.share
		if owner.runs == nil {
			owner.runs = &sharedRuns{last: owner}
		}
		m.runs, err = owner.runs, memory.PlaceIn(p, owner.runner.Program.Base)
	} else {
		err = memory.Place(p, "a run")
	}
	if err != nil {
		return err
	}

	if m.sent, err = memory.NewEvent(false); err != nil {
		return err
	}

	if r.Inputs, err = run.NewInputs(r.Executor, p, m.config.read); err != nil {
		return err
	}

	if m.draws, err = newDraws(m); err != nil {
		return err
	}

	if m.meters, err = newMeters(m); err != nil {
		return err
	}

	warn := m.config.Warn
	if m.layers, err = kasmina.New(&kasmina.Runtime{Runner: r, Strict: m.config.Strict,
		Warn: warn, SeparateGraphs: m.config.single}); err != nil {
		return err
	}

	r.Host, r.Pass = r.ComputeOnHost, m.layers.Run
	m.measured = &profile.Target{Runner: r, Layers: m.layers, Warn: warn,
		Operands: m.config.Activation, Float8: m.config.Float8, Copy: m.config.ceilingBytes}
	if m.config.monitor > 0 {
		m.monitor = profile.NewMonitor(m.measured, m.config.monitor)
	}

	for _, b := range p.Buffers {
		contents := gpu.Bytes(b.Data)
		if b.Table != nil {
			if contents, err = b.Table(); err != nil {
				return err
			}
		}
		if len(contents) > 0 {
			if err := ctx.CopyToDevice(b.Base, contents, r.Stream); err != nil {
				return err
			}
		}
	}

	once := slices.DeleteFunc(slices.Clone(p.Inputs), func(in *program.Input) bool {
		return !in.Constant
	})
	if err := r.Inputs.SendSome(once, m.config.inherited); err != nil {
		return err
	}

	if p.Scale != nil {
		if err := m.SetLossScale(LossScale{Scale: firstLossScale}); err != nil {
			return err
		}
	}

	return run.Joined(update.ClearSums(r), ctx.SyncStream(r.Stream))
}

// borrowable returns an error for a program that cannot use the parameters of another machine. t is the type of the
// program's activations.
func borrowable(p *program.Program, t gpu.DType) error {
	if len(p.Borrowed) == 0 {
		return errors.New("WithParamsOf: no input has the name, type and shape of one of the " +
			"other machine's parameters")
	}

	for _, b := range p.Borrowed {
		reads := func(c *program.Call) bool { return c.Touches(b.Array.Buffer) }
		if b.Part == nil || !slices.ContainsFunc(p.Calls, reads) {
			continue
		}

		// The program would read a copy in the type of its activations, if that copy were aligned (borrowedCopies in
		// package lower).
		if i := slices.IndexFunc(b.Copies, func(c program.Copy) bool { return c.Type == t }); i >= 0 &&
			b.Copies[i].At%program.VectorBytes != 0 {
			return fmt.Errorf("WithParamsOf: %s is divided among ranks, and the other machine's copy of all of it does not "+
				"start at a multiple of %d bytes: give every parameter a multiple of %d elements", graph.Describe(b.Node),
				program.VectorBytes, program.VectorBytes/t.Size())
		}
		return fmt.Errorf("WithParamsOf: %s is divided among ranks, and each rank has all of "+
			"it only in the other machine's precision: give both machines the same precision",
			graph.Describe(b.Node))
	}

	return nil
}

// Memory returns the number of bytes of device memory that the machine holds: parameters, constants,
// values of a run, optimizer state and workspace.
func (m *Machine) Memory() int {
	return m.runner.Memory.Held() + m.optimizer.Held()
}

// MemoryPlan is the device memory that a machine needs, in bytes.
type MemoryPlan struct {
	Weights   int // parameters, their copies in other types, and constants
	Gradients int // sums of gradients over several runs
	Moments   int // state of the optimizer that the machine has or will have (see WithOptimizer)
	Run       int // values, gradients and scratch memory of a run, which share memory
	Workspace int // workspace of matrix products
}

// Total returns the sum.
func (p MemoryPlan) Total() int { return p.Weights + p.Gradients + p.Moments + p.Run + p.Workspace }

// MemoryPlan returns the memory that the machine needs for training, before any run. With several ranks, it
// does not include the buffers that they exchange.
func (m *Machine) MemoryPlan() MemoryPlan {
	if usable(m) != nil {
		return MemoryPlan{}
	}

	p := m.runner.Program
	plan := MemoryPlan{Run: p.Arena, Workspace: run.WorkspaceBytes}
	for _, sum := range p.Sums {
		plan.Gradients += sum.Extent()
	}
	plan.Weights = p.Resident() - plan.Gradients
	plan.Moments, _ = memoryToCome(m, p)
	return plan
}

// RunAll is Run without cancellation. It makes Machine a gorgonia.VM.
func (m *Machine) RunAll() error { return m.Run(context.Background()) }

// Run computes the graph. It returns once the work has been enqueued on the device; [Machine.Value]
// waits for the results. An error on the device may be reported by a later call.
//
// If ctx is canceled, Run returns context.Cause(ctx). It looks at ctx before it enqueues anything and
// before each op that is computed on the host. Work that has already been enqueued is not interrupted.
// The machine can run again afterwards.
func (m *Machine) Run(ctx context.Context) (err error) {
	defer annotate("Machine.Run", &err)
	if err = usable(m); err != nil {
		return
	}

	if ctx.Err() != nil {
		return context.Cause(ctx)
	}

	device, r := m.device.ctx, m.runner
	r.Context = ctx
	defer func() { r.Context = nil }()

	// Usually, a run waits for a parameter from another rank only before the first call that reads it. If the
	// run is timed, if Kasmina layers may change parameters before it, or if the parameters belong to another
	// machine, the run waits for all parameters before it starts.
	owner, err := ownerOf(m)
	if err != nil {
		return err
	}

	var awaited *update.Optimizer
	if owner != m || m.monitor != nil || m.profiler.Busy() || len(r.Program.Kasmina) > 0 {
		awaited = owner.optimizer
	}

	if err := m.enterRuns(); err != nil {
		return err
	}

	r.State.On(run.Begin)
	if r.State.Ran() {
		if err := device.SyncEvent(m.sent); err != nil {
			return err
		}
	}

	if err := m.meters.read(); err != nil {
		return err
	}

	if err := m.profiler.Start(); err != nil {
		return err
	}
	defer m.profiler.Call("Run")()

	if err := run.InOrder(func() error { return awaited.Arrive(r.Stream) }, m.layers.Before,
		r.Inputs.SendAll, func() error { return m.draws.send(m) }, func() error { return device.Record(m.sent, r.Stream) },
		func() error { return r.Compute(m.observer(), m.optimizer) }, m.meters.send, m.layers.After); err != nil {
		return err
	}

	if m.optimizer == nil {
		m.profiler.Finish()
	}

	return nil
}

// observer returns the observer of the work that is enqueued next. A profile takes precedence over the
// monitor.
func (m *Machine) observer() run.Observer {
	switch {
	case m.profiler.Open():
		return m.profiler
	case m.monitor != nil:
		return m.monitor
	}
	return run.Unobserved{}
}

// Reset does nothing, because every run starts from scratch. It is part of gorgonia.VM.
func (m *Machine) Reset() {}

// Close waits for the device and frees the machine's memory there.
func (m *Machine) Close() (err error) {
	defer annotate("Machine.Close", &err)
	if m.runner.State.Closed() {
		return nil
	}

	m.runner.State.On(run.Close)
	if p := m.runner.Program; p != nil {
		for _, b := range p.Borrowed {
			b.Sharers--
		}
	}

	ctx, x := m.device.ctx, m.runner.Executor
	err = run.Joined(m.runner.DropCaptures(), m.layers.Flush(), m.monitor.Close(),
		m.profiler.Close(), m.optimizer.Close(), x.Memory.Close())
	if m.config.stream == 0 {
		err = run.Joined(err, ctx.DestroyStream(x.Stream))
	}

	return err
}

// gradientOf returns the gradient of an input in a program, or nil if the input is not a parameter or has
// no gradient.
func gradientOf(m *Machine, p *program.Program, in *program.Input) *program.Array {
	if d := in.Node.Deriv(); d != nil && slices.Contains(m.config.Params, in.Node) {
		return p.Values[d]
	}
	return nil
}
