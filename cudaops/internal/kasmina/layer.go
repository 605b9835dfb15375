// Package kasmina keeps the Kasmina layers of a machine synchronized with their lattices. It sends the
// lattices' state to the device, enqueues the layers' passes, and returns telemetry to the lattices. Its
// Layers type is the runner's attendant.
package kasmina

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	kasminakernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/internal/seed"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// Runtime is the machine that the layers belong to.
type Runtime struct {
	*run.Runner
	Strict         bool                 // treat a kind of blueprint without a kernel as an error
	SeparateGraphs bool                 // op and backward op are in separate graphs
	Warn           func(message string) // called once per distinct message
}

// layer mirrors a lattice's state on the device, and sends it before a run if it has changed.
//
// The report of a run arrives after the run, and is passed to the lattice at the next opportunity: when a
// value is requested, at a later run, or at the end. Up to two runs may be in flight, so that no run has
// to wait for the telemetry of its predecessor, unless its limits depend on it.
type layer struct {
	*program.KasminaLayer
	*Layers
	onHost  bool   // the current run computes the layer on the host: see chooseProcessor
	encoded []byte // encoded state for the current run
	staging []byte // pinned; the state last copied to the device, if sent is set
	sent    bool
	flights [2]flight
	counts  []uint32 // counts in the last report
	started []bool   // by slot: used by a seed in the previous run
}

// mode selects the telemetry of a run. Runs with different modes are captured separately.
type mode struct {
	telemetry, histogram bool
	reduction            seed.Reduction
}

// flight is a run that may not have delivered its report yet.
type flight struct {
	pass  *op.KasminaPass
	mode  mode
	scale float32 // loss scale of the run's gradients
	busy  bool
}

// Layers are the Kasmina layers of a machine. Their reports are stored contiguously, so that a single
// copy fetches them all. Each copy adds 8 µs to a step.
type Layers struct {
	m      *Runtime
	layers []*layer
	of     map[*program.KasminaLayer]*layer

	host    [2][]byte    // pinned reports of two consecutive runs
	arrived [2]gpu.Event // signaled when a report has arrived
	next    int          // index into host and arrived for the current or next run

	// unreported is set while counts on the device may include a run that has not been reported. It stays
	// set if the run fails.
	unreported bool
}

// New prepares the layers of a machine's program, and installs them as the runner's attendant.
func New(m *Runtime) (ls *Layers, err error) {
	p := m.Program
	ls = &Layers{m: m, of: map[*program.KasminaLayer]*layer{}}
	m.Attendant = ls
	if p.Reports == nil {
		return ls, nil
	}

	for i := range ls.host {
		if ls.host[i], err = m.Memory.AllocHost(p.Reports.Extent()); err != nil {
			return nil, err
		}
		if ls.arrived[i], err = m.Memory.NewEvent(false); err != nil {
			return nil, err
		}
	}

	for _, k := range p.Kasmina {
		l := &layer{KasminaLayer: k, Layers: ls, encoded: gpu.Bytes(make([]uint32, k.Memory.Len())),
			counts: make([]uint32, program.KasminaHealth*k.State.Seeds)}
		if l.staging, err = m.Memory.AllocHost(len(l.encoded)); err != nil {
			return nil, err
		}
		for i := range l.flights {
			l.flights[i].pass = k.Op.NewPass()
		}
		pass := k.Op.NewPass()
		pass.Begin()
		if err := l.chooseProcessor(l.encode(pass)); err != nil {
			return nil, fmt.Errorf("%s: %w", k.Node, err)
		}
		ls.of[k], ls.layers = l, append(ls.layers, l)
	}

	return ls, m.Ctx.Memset8(p.Reports.Ptr(), 0, p.Reports.Extent(), m.Stream)
}

// Before receives pending reports and sends the lattices' states to the device.
func (ls *Layers) Before() error {
	if err := ls.discardUnreported(); err != nil {
		return err
	}
	ls.unreported = len(ls.layers) > 0
	for _, l := range ls.layers {
		if err := run.InOrder(l.before, l.start); err != nil {
			return err
		}
	}
	return nil
}

// After copies the report of a run to the host.
func (ls *Layers) After() error {
	if len(ls.layers) == 0 {
		return nil
	}

	ctx, i := ls.m.Ctx, ls.next
	ls.next = 1 - i
	if err := run.Joined(ctx.CopyToHost(ls.host[i], ls.m.Program.Reports.Ptr(), ls.m.Stream),
		ctx.Record(ls.arrived[i], ls.m.Stream)); err != nil {
		return err
	}

	for _, l := range ls.layers {
		l.flights[i].busy = !l.onHost
	}

	ls.unreported = false
	return nil
}

// discardUnreported resets the baseline of the counts if a run has failed between Before and After. The
// failed run may have counted rows on the device, but they must not reach a lattice because the run has
// no result.
func (ls *Layers) discardUnreported() error {
	if !ls.unreported {
		return nil
	}

	// Earlier reports contain counts from before the failure.
	if err := ls.Flush(); err != nil {
		return err
	}

	report := ls.host[ls.next]
	if err := run.InOrder(
		func() error { return ls.m.Ctx.CopyToHost(report, ls.m.Program.Reports.Ptr(), ls.m.Stream) },
		func() error { return ls.m.Ctx.SyncStream(ls.m.Stream) }); err != nil {
		return err
	}

	for _, l := range ls.layers {
		copy(l.counts, l.countsIn(report))
	}

	ls.unreported = false
	return nil
}

// countsIn returns the layer's counts in a report.
func (l *layer) countsIn(report []byte) []uint32 {
	return gpu.View[uint32](report)[l.ReportOffset(0):][:len(l.counts)]
}

// AppendMode appends the telemetry mode of every layer, and whether the host computes the layer.
func (ls *Layers) AppendMode(b []byte) []byte {
	for _, l := range ls.layers {
		b = fmt.Appendf(b, "%v %v,", l.current().mode, l.onHost)
	}
	return b
}

// OnHost reports whether the current run computes a layer on the host.
func (ls *Layers) OnHost() bool {
	return slices.ContainsFunc(ls.layers, func(l *layer) bool { return l.onHost })
}

// Flush waits for pending reports and passes them to the lattices.
func (ls *Layers) Flush() error {
	if ls == nil { // the machine was never fully constructed
		return nil
	}
	var errs []error
	for _, l := range ls.layers {
		errs = append(errs, l.receive(ls.next, true), l.receive(1-ls.next, true))
	}
	return errors.Join(errs...)
}

// address returns the device address of one of the arrays in the layer's report.
func (l *layer) address(word int) gpu.Ptr {
	return l.m.Program.Reports.Ptr().Offset(4 * l.ReportOffset(word))
}

// chunksMoved returns the number of seed-sized chunks that the last run's backward pass moved: the
// gradient of y, x where needed, and the gradient of x where written.
func (l *layer) chunksMoved(inPlace bool) int {
	n := l.State.Seeds
	if l.State.Wide { // seeds that mix; the loop below counts them like Residual ones
		n += int(gpu.View[uint32](l.staging[l.State.List():])[0])
	}

	for _, word := range gpu.View[uint32](l.staging)[:l.State.Seeds] { // in the layout of State.Encode
		if l.Op.Config.Stability == op.Strict || blueprints.Kind(word&0xff) != blueprints.Residual {
			n++ // dormant seeds are encoded as Residual
		}
		if !inPlace || l.Clips() || word>>8&1 != 0 {
			n++ // seeds that blend or are clipped
		}
	}

	return n
}

// encode writes the state of a pass to l.encoded.
func (l *layer) encode(pass *op.KasminaPass) error {
	var narrow error
	err := l.State.Encode(l.encoded, func(i int) seed.Seed {
		s := pass.Seed(i)
		s.Limit = float64(float32(s.Limit) * l.m.Scale.Current.Scale)
		if kasminakernel.Mixes(s) && narrow == nil {
			if _, err := blueprints.Size(s.Kind, l.Chunk, l.Width); err != nil {
				narrow = fmt.Errorf("seed %d: %w", i, err)
			}
		}
		return s
	})

	return errors.Join(narrow, err)
}

// begin takes a snapshot of the lattice for a run. If op and backward op are computed separately, the
// op's snapshot serves both. It is an error if a seed's kind is a graph that the surrounding graph does not
// compute, or if a backward op finds no snapshot.
func (l *layer) begin(pass *op.KasminaPass) error {
	if !l.Forward {
		return pass.Resume()
	}
	pass.Begin()
	if l.m.SeparateGraphs {
		pass.Leave()
	}
	return pass.Attached()
}

// before receives reports and sends the lattice's state.
func (l *layer) before() error {
	f, last := l.current(), 1-l.next
	if err := l.receive(l.next, true); err != nil { // from two runs ago
		return err
	}

	if err := l.receive(last, f.pass.NeedsLast()); err != nil {
		return err
	}

	err := l.begin(f.pass)
	if err == nil {
		err = l.chooseProcessor(l.encode(f.pass))
	}
	if err != nil {
		return fmt.Errorf("%s: %w", l.Node, err)
	}

	f.scale, f.mode = l.m.Scale.Current.Scale, mode{}
	if l.onHost { // the op itself reports to the lattice, after pending reports
		return l.receive(last, true)
	}

	if t := f.pass.Snapshot().Telemetry; f.pass.Measures() {
		f.mode = mode{true, t.Mode == state.Debug, seed.Reduction(t.Reduction)}
	}

	if l.sent && bytes.Equal(l.encoded, l.staging) {
		return nil
	}

	copy(l.staging, l.encoded)
	err = l.m.Ctx.CopyToDevice(l.Memory.Ptr(), l.staging, l.m.Stream)
	l.sent = err == nil
	return err
}

// current returns the flight of the current or next run.
func (l *layer) current() *flight { return &l.flights[l.next] }

// receive passes the report of flight i to the lattice if it has arrived or wait is set.
func (l *layer) receive(i int, wait bool) error {
	ctx, f, arrived := l.m.Ctx, &l.flights[i], l.arrived[i]
	switch {
	case !f.busy:
		return nil
	case wait:
		if err := ctx.SyncEvent(arrived); err != nil {
			return err
		}
	default:
		if done, err := ctx.EventDone(arrived); err != nil || !done {
			return err
		}
	}

	f.busy = false
	if err := l.deliver(f, l.host[i]); err != nil {
		return fmt.Errorf("%s: %w", l.Node, err)
	}

	return nil
}

// Health returns the health of a seed's chunk from the figures of a forward pass, as
// [kasminakernel.Forward] writes them. The chunk has the given number of elements, some of them not
// finite.
func Health(figures []float32, seeds, seed, elements, nonFinite int) state.HealthSample {
	v := func(i int) float64 { return float64(figures[i*seeds+seed]) }
	return state.HealthSample{NonFinite: nonFinite,
		Health: state.Health{Variance: v(0), Mean: v(1), Min: v(2), Max: v(3), DeadRatio: v(4), SNR: v(5)},
		Moments: state.Moments{Count: float64(elements - nonFinite), Mean: v(kasminakernel.Moments),
			Variance: v(kasminakernel.Moments + 1)}}
}

// deliver passes a report to the lattice.
func (l *layer) deliver(f *flight, report []byte) error {
	seeds := l.State.Seeds
	words, figures := gpu.View[uint32](report), gpu.View[float32](report)
	counts := l.countsIn(report)
	counted := slices.Clone(counts)
	for i, v := range l.counts {
		counted[i] -= v
	}

	copy(l.counts, counts)
	count := func(what, seed int) int { return int(counted[what*seeds+seed]) }
	figure := func(what, i, seed int) float64 { return float64(figures[l.ReportOffset(what+i)+seed]) }
	health := func(seed int) state.HealthSample {
		h := state.HealthSample{NonFinite: count(program.KasminaBadX, seed)}
		if !f.mode.telemetry {
			return h
		}
		h = Health(figures[l.ReportOffset(program.KasminaHealth):], seeds, seed, l.Rows*l.Chunk, h.NonFinite)
		if f.mode.histogram {
			h.Histogram = (*state.Histogram)(words[l.ReportOffset(program.KasminaBins)+
				seed*kasminakernel.Bins:])
		}
		return h
	}

	var err error
	if l.Forward {
		err = f.pass.RecordHealth(health)
	}

	if !l.Backward {
		return err
	}

	gradient := func(seed int) state.GradientSample {
		g := state.GradientSample{NonFinite: count(program.KasminaBadG, seed),
			Clipped: count(program.KasminaClipped, seed)}
		if !f.mode.telemetry {
			return g
		}
		v := func(i int) float64 { return figure(program.KasminaGradient, i, seed) }
		s := float64(f.scale)
		g.Gradient = state.Gradient{Norm: v(0) / s, Variance: v(1) / s / s, Max: v(2) / s}
		g.Norms = state.Moments{Count: v(kasminakernel.Norms + 2), Mean: v(kasminakernel.Norms) / s,
			Variance: v(kasminakernel.Norms+1) / s / s}
		return g
	}

	return errors.Join(err, ignoreScaledOverflow(f.pass.RecordGradient(gradient), f.scale))
}

// ignoreScaledOverflow returns the error of a backward pass, except for non-finite gradients at a loss
// scale above 1. The scale itself may have caused them, so they are counted and the step is skipped.
// At a scale of 1 there is another cause.
func ignoreScaledOverflow(err error, scale float32) error {
	if scale > 1 && errors.Is(err, op.ErrNonFinite) {
		return nil
	}
	return err
}
