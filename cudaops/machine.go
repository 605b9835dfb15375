package cudaops

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// Machine runs a Gorgonia graph on a GPU. It is a gorgonia.VM: where a program has gorgonia.NewTapeMachine(g), it can have
// cudaops.NewMachine(dev, g) instead.
//
// The graph is compiled once, into kernel launches over memory that is planned before anything runs. Parameters (see
// [WithParams]) go up once and stay on the device; other inputs go up before every run, and results come back when
// [Machine.Value] asks for them. Where the device has memory to spare, a graph that trains takes some of it to save time, and leaves a
// tenth free, beside what AdamW will take for this machine and for others on the device that have no optimiser yet. A node for which
// there is no kernel is computed on the host, between two copies, with one warning that names it; [WithStrict] makes that an error.
//
// A Machine is not safe for use by several goroutines at once.
type Machine struct {
	device *Device
	graph  *gorgonia.ExprGraph
	config machineConfig
	stream gpu.Stream
	k      kernelSet
	blas   *matmuls

	program   *program
	optimizer *optimizer
	arena     gpu.Ptr
	owned     map[gpu.Ptr]int // bytes of each allocation
	expected  int             // bytes of Device.expected that are this machine's
	sent      gpu.Event       // the last run's inputs have left their staging memory
	ran       bool
	read      bool // the stream has been waited for since the last run
	gathered  bool // there are gradients of runs since the last update, which WithAccumulation keeps

	bound bool // values lie in memory of the program's

	returned  []byte                // pinned, for values that come back
	recorded  map[string]*recording // by what the attendants measure
	now       *recording            // that of the run under way, or of the last one
	warned    map[string]bool
	borrowed  []*input // parameters of another machine
	tuner     *tuner
	monitor   *monitor  // nil without WithMonitor
	profiler  *profiler // nil but during a profile
	capturing bool
	apart     bool // the passes of Kasmina layers make their ends, for the time of a pass to hold all that the layer takes
	closed    bool

	scale   kernels.LossScale // as on the device
	carried float32           // the scale that the gradients of the last run carry

	attendants []attendant
}

var errClosed = errors.New("the machine is closed")

// attendant has work of its own around every run, on the machine's stream but outside of what is captured.
type attendant interface {
	// appendMode adds to b what tells this run's work from that of other runs, which are captured apart.
	appendMode(b []byte) []byte
	before() error // ahead of a run, when the last one's inputs have left their staging memory
	after() error  // when a run's work is on its way, to bring back what it leaves
	settle() error // all that was asked for is done: take in what came back
	close() error
}

// NewMachine compiles the graph for the device, allocates its memory and copies the parameters there. The graph's floats
// must be float32. The caller closes the machine, before the device.
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
	config := machineConfig{kernels: realKernels}
	for _, opt := range opts {
		if opt == nil {
			return nil, errors.New("an option is nil")
		}
		if err := opt(&config); err != nil {
			return nil, err
		}
	}
	if config.logger == nil {
		config.logger = slog.Default()
	}
	if err := joined(config.narrowGradients(), config.within(g)); err != nil {
		return nil, err
	}
	if config.share != nil && config.share.device != d {
		return nil, errors.New("WithParamsOf: the other machine is on another device")
	}
	m := &Machine{device: d, graph: g, config: config, warned: map[string]bool{}, recorded: map[string]*recording{}, owned: map[gpu.Ptr]int{},
		scale: kernels.LossScale{Scale: 1}}
	defer func() {
		if err != nil {
			err = joined(err, m.Close())
		}
	}()
	if m.k, err = config.kernels(d.ctx); err != nil {
		return nil, err
	}
	if m.stream = config.stream; m.stream == 0 {
		if m.stream, err = d.ctx.NewStream(); err != nil {
			return nil, err
		}
	}
	if m.sent, err = d.ctx.NewEvent(false); err != nil {
		return nil, err
	}
	if m.tuner, err = newTuner(m); err != nil {
		return nil, err
	}
	m.k = tunedKernels{m.k, m.tuner}
	m.blas = newMatmuls(m)
	if err := m.plan(); err != nil {
		return nil, err
	}
	if config.share != nil && len(m.borrowed) == 0 {
		return nil, errors.New("WithParamsOf: no input has name, type and shape of one of the other machine's parameters")
	}
	if err := m.allocate(); err != nil {
		return nil, err
	}
	m.expect(m.momentsToCome())
	for _, t := range m.program.tables {
		if err := d.ctx.CopyToDevice(t.ptr(), gpu.Bytes(t.data), m.stream); err != nil {
			return nil, err
		}
	}
	for _, in := range m.program.inputs {
		if in.constant {
			if err := m.send(in); err != nil {
				return nil, err
			}
		}
	}
	if err := m.quantizeAgain(func(*input) bool { return true }); err != nil {
		return nil, err
	}
	if m.program.scale != nil {
		if err := m.setLossScale(LossScale{Scale: firstLossScale}); err != nil {
			return nil, err
		}
	}
	if err := m.clearSums(); err != nil {
		return nil, err
	}
	if config.monitor > 0 {
		if m.monitor, err = newMonitor(m); err != nil {
			return nil, err
		}
	}
	return m, d.ctx.SyncStream(m.stream)
}

// plan compiles the graph: to a program that saves time with memory, or where that would leave too little to one that does without.
func (m *Machine) plan() (err error) {
	kept := m.keep()
	if m.program, err = compile(m, kept, true); err != nil || !m.program.spent {
		return err
	}
	if room, err := m.hasRoom(); room || err != nil {
		return err
	}
	m.attendants = nil // which have taken nothing so far
	if err := m.blas.again(); err != nil {
		return err
	}
	m.tuner.again()
	m.program, err = compile(m, kept, false)
	return err
}

// roomLeft is the share of the card's memory that saving time must leave free: for machines beside this one, as for evaluation, for what
// the tuner takes while it times, and for other programs.
const roomLeft = 0.1

// hasRoom reports whether the program leaves enough of the device's memory to the optimisers that are still to come, the machine's and
// those of others on the device, and to what roomLeft is for.
func (m *Machine) hasRoom() (bool, error) {
	free, total, err := m.device.ctx.MemInfo()
	need := m.program.arena + m.program.resident() + m.momentsToCome() + int(m.device.expected.Load())
	return float64(need)+roomLeft*float64(total) <= float64(free), err
}

// expect tells machines that are made later how much memory this one is still to take.
func (m *Machine) expect(bytes int) {
	m.device.expected.Add(int64(bytes - m.expected))
	m.expected = bytes
}

// momentsToCome is the bytes of the moments that the machine would have with AdamW, 0 if it has an optimiser. Muon has one moment, and
// directions.
func (m *Machine) momentsToCome() (bytes int) {
	if m.optimizer != nil {
		return 0
	}
	for _, in := range m.program.inputs {
		if g := m.gradientIn(m.program, in); g != nil {
			bytes += 2 * 4 * g.len()
		}
	}
	return bytes
}

// gradientIn returns the gradient that a program has of an input that is a parameter, nil if there is none.
func (m *Machine) gradientIn(p *program, in *input) *array {
	if d := in.node.Deriv(); d != nil && slices.Contains(m.config.params, in.node) {
		return p.values[d]
	}
	return nil
}

// keep returns the nodes whose values outlive a run: outputs, gradients of parameters, and what no node needs.
func (m *Machine) keep() gorgonia.Nodes {
	kept := slices.Clone(m.config.outputs)
	used := map[*gorgonia.Node]bool{}
	for _, n := range m.graph.AllNodes() {
		for _, c := range opbase.Children(n) {
			used[c] = true
		}
	}
	for _, n := range m.graph.AllNodes() {
		if !used[n] && n.Op() != nil {
			kept = append(kept, n)
		}
	}
	for _, p := range m.config.params {
		if g := p.Deriv(); g != nil {
			kept = append(kept, g)
		}
	}
	return kept
}

// alloc takes device memory that Close gives back.
func (m *Machine) alloc(bytes int, what string) (gpu.Ptr, error) {
	p, err := m.device.ctx.Alloc(bytes)
	if err != nil {
		return 0, fmt.Errorf("allocating %s for %s: %w", gpu.Size(uint64(bytes)), what, err)
	}
	m.owned[p] = bytes
	return p, nil
}

// free gives back what alloc has taken.
func (m *Machine) free(p gpu.Ptr) error {
	delete(m.owned, p)
	return m.device.ctx.Free(p)
}

// returnedBytes is the size up to which values come back by way of pinned memory, which for small ones takes less time.
const returnedBytes = 4 << 10

// allocate takes the memory that the program was planned for.
func (m *Machine) allocate() error {
	need := uint64(m.program.arena + m.program.resident())
	if free, _, err := m.device.ctx.MemInfo(); err != nil {
		return err
	} else if need > free {
		return fmt.Errorf("the graph needs %s of device memory (%s for parameters and constants, %s for a run), and %s are free: %w",
			gpu.Size(need), gpu.Size(uint64(m.program.resident())), gpu.Size(uint64(m.program.arena)), gpu.Size(free), gpu.OutOfMemory)
	}
	var err error
	if m.program.arena > 0 {
		if m.arena, err = m.alloc(m.program.arena, "a run"); err != nil {
			return err
		}
	}
	for _, b := range m.program.blocks {
		if !b.resident {
			b.base = m.arena.Offset(b.Offset)
		} else if b.base, err = m.alloc(b.Bytes, "parameters and constants"); err != nil {
			return err
		}
	}
	for _, in := range m.program.inputs {
		if in.staging, err = m.device.ctx.AllocHost(max(1, in.array.extent())); err != nil {
			return err
		}
	}
	m.returned, err = m.device.ctx.AllocHost(returnedBytes)
	return err
}

// Memory returns the device memory in bytes that the machine holds: parameters and constants, everything a run needs, the
// optimiser's state and workspace.
func (m *Machine) Memory() int {
	held := 0
	for _, n := range m.owned {
		held += n
	}
	if t := m.blas.table; t != nil {
		held += t.Bytes
	}
	if m.optimizer != nil {
		for _, t := range m.optimizer.tables() {
			held += t.Bytes
		}
	}
	return held
}

// RunAll computes the graph. It returns when the work is on its way to the device; [Machine.Value] waits for it. An error
// on the device may show in a later call.
func (m *Machine) RunAll() error {
	if err := m.run(); err != nil {
		return fmt.Errorf("cudaops.Machine.RunAll: %w", err)
	}
	return nil
}

func (m *Machine) run() error {
	if m.closed {
		return errClosed
	}
	if s := m.config.share; s != nil && s.closed {
		return errors.New("the machine whose parameters this one uses (WithParamsOf) is closed")
	}
	if x := m.optimizer; x != nil {
		x.looked = false
	}
	if m.ran {
		if err := m.device.ctx.SyncEvent(m.sent); err != nil {
			return err
		}
	}
	if err := m.profiler.start(); err != nil {
		return err
	}
	defer m.profiler.call("RunAll")()
	for _, a := range m.attendants {
		if err := a.before(); err != nil {
			return err
		}
	}
	for _, in := range m.program.inputs {
		var err error
		switch {
		case in.bound:
			err = in.refresh()
		case !in.constant:
			err = m.send(in)
		}
		if err != nil {
			return err
		}
	}
	bound := func(in *input) bool { return in.bound }
	if err := joined(m.quantizeAgain(bound), m.device.ctx.Record(m.sent, m.stream)); err != nil {
		return err
	}
	if err := m.compute(); err != nil {
		return err
	}
	for _, a := range m.attendants {
		if err := a.after(); err != nil {
			return err
		}
	}
	if m.optimizer == nil {
		m.profiler.finish()
	}
	return nil
}

// settle lets the attendants take in what came back.
func (m *Machine) settle() error {
	var errs []error
	for _, a := range m.attendants {
		errs = append(errs, a.settle())
	}
	return errors.Join(errs...)
}

// activations is how the machine stores activations.
func (m *Machine) activations() elem { return m.config.act }

// param returns the parameter that n is an image of in another graph, nil if there is none.
func (m *Machine) param(n *gorgonia.Node) *input {
	if m == nil {
		return nil
	}
	for _, in := range m.program.inputs {
		if slices.Contains(m.config.params, in.node) && in.node.Name() == n.Name() && n.Dtype() == in.node.Dtype() &&
			slices.Equal(n.Shape(), in.node.Shape()) {
			return in
		}
	}
	return nil
}

// owns reports whether an input is this machine's.
func (m *Machine) owns(in *input) bool { return m != nil && slices.Contains(m.program.inputs, in) }

// Value waits for the device and copies a node's value back. The node must be an input, an output (see [WithOutputs]), the
// gradient of a parameter, or one that no other node needs: other values give way to later ones during a run.
func (m *Machine) Value(n *gorgonia.Node) (gorgonia.Value, error) {
	v, err := m.value(n)
	if err == nil {
		err = m.settle()
	}
	if err != nil {
		return nil, fmt.Errorf("cudaops.Machine.Value: %w", err)
	}
	return v, nil
}

func (m *Machine) value(n *gorgonia.Node) (gorgonia.Value, error) {
	defer m.profiler.call("Value")()
	a, err := m.lasting(n)
	if err != nil {
		return nil, err
	}
	if !m.ran && n.Op() != nil {
		return nil, errors.New("the machine has not run")
	}
	v, err := m.fetch(a, n.Dtype())
	if err != nil {
		return nil, err
	}
	if m.program.scaling != nil && m.program.scaling.carried[n] {
		if m.carried == 0 {
			return nil, fmt.Errorf("%s was dropped with the loss scale that it carried", describe(n))
		}
		if v, err = divided(v, m.carried); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// fetch copies an array back as a value of type dt.
func (m *Machine) fetch(a *array, dt tensor.Dtype) (gorgonia.Value, error) {
	raw := m.returned
	if n := a.extent(); n <= len(raw) {
		raw = raw[:n]
	} else {
		raw = make([]byte, n)
	}
	if err := m.device.ctx.CopyToHost(raw, a.ptr(), m.stream); err != nil {
		return nil, err
	}
	if err := m.device.ctx.SyncStream(m.stream); err != nil {
		return nil, err
	}
	m.read = m.ran
	return decode(raw, a.elem, dt, a.shape)
}

// Reset does nothing: every run begins anew. It is part of gorgonia.VM.
func (m *Machine) Reset() {}

// Close waits for the device and frees what the machine holds there.
func (m *Machine) Close() error {
	if m.closed {
		return nil
	}
	m.closed = true
	m.expect(0)
	for _, in := range m.borrowed {
		in.sharers--
	}
	ctx := m.device.ctx
	var errs []error
	if m.stream != 0 {
		errs = append(errs, ctx.SyncStream(m.stream))
	}
	errs = append(errs, m.settle())
	for _, a := range m.attendants {
		errs = append(errs, a.close())
	}
	errs = append(errs, m.dropRecordings())
	if m.monitor != nil {
		errs = append(errs, m.monitor.close())
	}
	errs = append(errs, m.profiler.close())
	if m.optimizer != nil {
		errs = append(errs, m.optimizer.close(m))
	}
	if m.blas != nil {
		errs = append(errs, m.blas.close())
	}
	for p := range m.owned {
		errs = append(errs, m.free(p))
	}
	if m.program != nil {
		for _, in := range m.program.inputs {
			if in.staging != nil {
				errs = append(errs, ctx.FreeHost(in.staging))
			}
		}
	}
	if m.returned != nil {
		errs = append(errs, ctx.FreeHost(m.returned))
	}
	if m.sent != 0 {
		errs = append(errs, ctx.DestroyEvent(m.sent))
	}
	if m.stream != 0 && m.config.stream == 0 {
		errs = append(errs, ctx.DestroyStream(m.stream))
	}
	if m.k != nil {
		errs = append(errs, m.k.Close())
	}
	if err := joined(errs...); err != nil {
		return fmt.Errorf("cudaops.Machine.Close: %w", err)
	}
	return nil
}

// warn logs a message once.
func (m *Machine) warn(message string) {
	if !m.warned[message] {
		m.warned[message] = true
		m.config.logger.Warn("cudaops: " + message)
	}
}
