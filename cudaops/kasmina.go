package cudaops

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// kasminaLayer is a Kasmina op with its replays and its backward op. The lattice's state is mirrored on the device, and sent
// again before a run when it has changed. What a run measures comes back behind it ([kasminaReports]), and is given to the
// lattice when the machine next meets it there: at [Machine.Value], at a later run, or at [Machine.Close]. Two runs may be
// on their way, so no run waits for the figures of the one before, unless its limits are made of them.
type kasminaLayer struct {
	m          *Machine
	op         *op.KasminaOp
	rows       int
	chunk      int
	width      int // of a slot
	elem       elem
	state      *array // kernels.KasminaState, and kernels.KasminaMixing behind it where slots are wide
	reports    *kasminaReports
	first      int  // seed of the layer, among those of all layers
	forward    bool // the graph has the op itself, not replays or the backward op alone
	backward   bool // the graph has the backward op
	mode       kasminaMode
	hosted     bool   // the run under way computes the layer on the host: see choose
	next, last []byte // the state as encoded for the run, and as the device has it
	staging    []byte
	opened     bool // all that the machine has not allocated is there
	flights    [2]kasminaFlight
	counts     []uint32 // as last seen
}

// kasminaMode is what a run measures. It is part of what is captured.
type kasminaMode struct {
	telemetry, histogram bool
	reduction            kernels.KasminaReduction
}

// kasminaFlight is a run whose report may still be on its way.
type kasminaFlight struct {
	pass    *op.KasminaPass
	mode    kasminaMode
	scale   float32   // that gradients carry
	report  []byte    // of all layers, of which the memory belongs to kasminaReports
	arrived gpu.Event // likewise
	busy    bool
}

func (l *kasminaLayer) seeds() int { return len(l.counts) / kasminaHealth }

func (l *kasminaLayer) latticeState() kernels.KasminaState {
	return kernels.KasminaState{Ptr: l.state.ptr(), Seeds: l.seeds(), Slots: l.op.InputShape(1)[0]}
}

// wide is whether slots have more weights than chunks have features: the kernels of the kinds that mix are launched too.
func (l *kasminaLayer) wide() bool { return l.width > l.chunk }

func (l *kasminaLayer) wideSlots(workspace *array) kernels.KasminaWide {
	st := l.latticeState()
	return kernels.KasminaWide{Mixing: kernels.KasminaMixing{Ptr: st.Ptr.Offset(st.Bytes()), Seeds: st.Seeds, Slots: st.Slots}, Width: l.width,
		Workspace: workspace.ptr()}
}

// wideSpace is the workspace that wide slots take in a pass; it is as good as none where they are not wide.
func (l *kasminaLayer) wideSpace(c *compiler, backward bool) *array {
	if !l.wide() {
		return c.bytes(1)
	}
	return c.bytes(c.m.k.KasminaWideWorkspace(l.shape(), kernels.KasminaWide{Width: l.width}, backward))
}

func (l *kasminaLayer) at(word int) gpu.Ptr {
	return l.reports.memory.ptr().Offset(4 * l.place(word))
}

// layer describes the layer to the kernels.
func (l *kasminaLayer) layer(x, weights, scales *array) kernels.KasminaLayer {
	k := l.shape()
	k.X, k.Weights, k.Scales, k.State = x.ptr(), weights.ptr(), scales.ptr(), l.latticeState()
	return k
}

// shape is the part of the description that does not depend on where things lie.
func (l *kasminaLayer) shape() kernels.KasminaLayer {
	c := l.op.Config
	return kernels.KasminaLayer{
		State: kernels.KasminaState{Seeds: l.seeds(), Slots: l.op.InputShape(1)[0]}, Rows: l.rows, Chunk: l.chunk, Eps: c.Epsilon,
		Stability: map[op.Stability]kernels.KasminaStability{
			op.Adaptive: kernels.KasminaAdaptive, op.Fast: kernels.KasminaFast, op.Strict: kernels.KasminaStrict,
		}[c.Stability],
		Type: l.elem.dtype(),
	}
}

func (l *kasminaLayer) clips() bool { return l.op.Config.GradClip > 0 || l.op.Config.AdaptiveClip > 0 }

// kasminaLayerOf returns the layer that o belongs to.
func (c *compiler) kasminaLayerOf(o *op.KasminaOp) (*kasminaLayer, error) {
	for _, a := range c.m.attendants {
		if l, ok := a.(*kasminaLayer); ok && l.op.SharesRun(o) {
			return l, nil
		}
	}
	x, weights, seeds := o.InputShape(0), o.InputShape(1), o.Lattice.Seeds()
	l := &kasminaLayer{m: c.m, op: o, rows: x[0], chunk: o.Chunk(), width: weights[1], elem: c.m.activations(),
		counts: make([]uint32, kasminaHealth*seeds)}
	bytes := (kernels.KasminaState{Seeds: seeds, Slots: weights[0]}).Bytes()
	if l.wide() {
		bytes += (kernels.KasminaMixing{Seeds: seeds, Slots: weights[0]}).Bytes()
	}
	l.next = gpu.Bytes(make([]uint32, bytes/4))
	pass := o.NewPass()
	pass.Begin()
	if err := l.choose(l.encode(pass)); err != nil {
		return nil, err
	}
	l.state = c.newResident(float32s, len(l.next)/4)
	c.reportsOf().add(l)
	c.m.attendants = append(c.m.attendants, l)
	return l, nil
}

func lowerKasmina(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	o := n.Op().(*op.KasminaOp)
	l, err := c.kasminaLayerOf(o)
	c.startsSlots(o, in[1], in[2])
	if err != nil {
		return nil, err
	}
	if l.forward && !o.Replaying { // whose figures this pass replaces
		c.figureEnds.flush(c)
	}
	l.forward = l.forward || !o.Replaying
	x, weights, scales := c.act(n, in[0]), c.as(n, in[1], float32s), c.as(n, in[2], float32s)
	y, m := c.like(x), c.m
	workspace, wide := c.bytes(m.k.KasminaForwardWorkspace(l.shape())), l.wideSpace(c, false)
	launch := func(f kernels.KasminaForward) error {
		if l.wide() {
			return m.k.KasminaWideForward(m.stream, f, l.wideSlots(wide))
		}
		return m.k.KasminaForward(m.stream, f)
	}
	bare := func() error {
		return launch(kernels.KasminaForward{KasminaLayer: l.layer(x, weights, scales), Y: y.ptr(), Workspace: workspace.ptr(),
			Bad: l.at(kasminaIgnored)})
	}
	touched := []*array{x, weights, scales, y, workspace, wide}
	onHost := func() error { return m.passOnHost(n, []*array{x, weights, scales}, y) }
	if o.Replaying {
		c.do(n, l.either(bare, onHost), touched...)
		c.tasks[len(c.tasks)-1].layer = l
		return y, nil
	}
	left := new(kernels.KasminaRecords)
	c.do(n, l.either(func() error {
		f := kernels.KasminaForward{KasminaLayer: l.layer(x, weights, scales), Y: y.ptr(), Workspace: workspace.ptr(), Leave: later(m, left)}
		f.Bad, f.Figures = l.at(kasminaBadX), l.at(kasminaHealth)
		f.Telemetry, f.Reduction = l.mode.telemetry, l.mode.reduction
		if l.mode.histogram {
			f.Histogram = l.at(kasminaBins)
		}
		return launch(f)
	}, func() error {
		*left = kernels.KasminaRecords{}
		return onHost()
	}), touched...)
	c.tasks[len(c.tasks)-1].layer, c.tasks[len(c.tasks)-1].bare = l, bare
	leave(c, &c.figureEnds, left, n, nil, []*array{workspace}) // the figures are read behind the run
	return y, nil
}

func lowerKasminaGrad(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	l, err := c.kasminaLayerOf(n.Op().(*op.KasminaGradOp).Forward)
	if err != nil {
		return nil, err
	}
	if l.backward { // likewise
		c.gradientEnds.flush(c)
	}
	l.backward = true
	x, weights, scales, g := c.act(n, in[0]), c.as(n, in[1], float32s), c.as(n, in[2], float32s), c.act(n, in[4])
	dx, dw, ds, m := g, c.aux(weights.shape...), c.aux(scales.shape...), c.m
	var spare *array // for what comes ahead of the pass, which needs g as it is
	if l.inPlace(c, n, x, g) {
		of := opbase.Children(n)[4]
		c.values[of] = folded(of) // for nobody to be given dx in its place
		if m.config.monitor > 0 {
			spare = c.like(g)
		}
	} else {
		dx = c.like(x)
	}
	workspace, wide := c.bytes(m.k.KasminaBackwardWorkspace(l.shape(), l.clips())), l.wideSpace(c, true)
	launch := func(b kernels.KasminaBackward, dx, g *array) error {
		b.KasminaLayer, b.G, b.Clip, b.Workspace = l.layer(x, weights, scales), g.ptr(), l.clips(), workspace.ptr()
		b.DX, b.DWeights, b.DScales = dx.ptr(), dw.ptr(), ds.ptr()
		if l.wide() {
			return m.k.KasminaWideBackward(m.stream, b, l.wideSlots(wide))
		}
		return m.k.KasminaBackward(m.stream, b)
	}
	left := new(kernels.KasminaParts)
	c.do(n, l.either(func() error {
		return launch(kernels.KasminaBackward{Telemetry: l.mode.telemetry, Reduction: l.mode.reduction, Figures: l.at(kasminaGradient),
			Bad: l.at(kasminaBadG), Clipped: l.at(kasminaClipped), Leave: later(m, left)}, dx, g)
	}, func() error {
		*left = kernels.KasminaParts{}
		return m.passOnHost(n, []*array{x, weights, scales, nil, g}, dx, dw, ds)
	}), x, weights, scales, g, dx, dw, ds, workspace, wide)
	t := &c.tasks[len(c.tasks)-1]
	t.layer, t.inPlace = l, dx == g
	bareDX, bareG := dx, g
	if spare != nil {
		c.touch(spare, len(c.tasks)-1)
		bareDX, bareG = spare, spare
		t.spare = func() error { return m.device.ctx.CopyOnDevice(spare.ptr(), g.ptr(), g.extent(), m.stream) }
	}
	t.bare = func() error {
		return launch(kernels.KasminaBackward{Bad: l.at(kasminaIgnored), Clipped: l.at(kasminaIgnored)}, bareDX, bareG)
	}
	if !l.wide() {
		leave(c, &c.gradientEnds, left, n, []*array{dw, ds}, []*array{workspace}, weights, scales)
	}
	return packed(dx, dw, ds), nil
}

// inPlace reports whether the backward pass, of node n, can leave the gradient of x where that of y, g, is. x of an input may begin
// anywhere.
func (l *kasminaLayer) inPlace(c *compiler, n *gorgonia.Node, x, g *array) bool {
	return !l.wide() && l.shape().InPlace() && c.spends(n, 4, g) && !x.resident && x.block != g.block &&
		x.at%vectorBytes == 0 && g.at%vectorBytes == 0
}

// moving is of how many seeds the backward pass of the last run read x at least, and wrote the gradient of x.
func (l *kasminaLayer) moving(inPlace bool) (reads, writes int) {
	if l.wide() { // those that mix, which Residual ones stand for below
		reads = int(gpu.View[uint32](l.last[l.latticeState().Bytes():])[0])
	}
	for _, word := range gpu.View[uint32](l.last)[:l.seeds()] { // as KasminaState.Encode has them
		if l.op.Config.Stability == op.Strict || blueprints.Kind(word&0xff) != blueprints.Residual {
			reads++ // what is dormant is Residual there
		}
		if !inPlace || l.clips() || word>>8&1 != 0 {
			writes++ // what blends or is clipped
		}
	}
	return reads, writes
}

// encode writes the state for a pass to l.next: for the kernels of all kinds but those that mix, and for those.
func (l *kasminaLayer) encode(pass *op.KasminaPass) error {
	st := kernels.KasminaState{Seeds: l.seeds(), Slots: l.op.InputShape(1)[0]}
	var narrow error
	seed := func(i int) kernels.KasminaSeed {
		s := pass.Seed(i)
		k := kernels.KasminaSeed{Kind: uint8(s.Kind), Slot: s.Slot, Blend: s.Blend, Learn: s.Learn, Alpha: s.Alpha,
			Low: float32(s.Low), High: float32(s.High), Limit: float32(s.Limit) * l.m.scale.Scale}
		if k.Mixes() && narrow == nil {
			if _, err := blueprints.Size(s.Kind, l.chunk, l.width); err != nil {
				narrow = fmt.Errorf("seed %d: %w", i, err)
			}
		}
		return k
	}
	err := st.Encode(l.next, func(i int) kernels.KasminaSeed {
		s := seed(i)
		if s.Mixes() {
			s.Slot = 0
		}
		return s
	})
	if narrow != nil || err != nil || !l.wide() {
		return errors.Join(narrow, err)
	}
	return kernels.KasminaMixing{Seeds: st.Seeds, Slots: st.Slots}.Encode(l.next[st.Bytes():], seed)
}

// open takes what the layer needs beside the arrays that the machine has allocated. After an error it goes on with what is lacking.
func (l *kasminaLayer) open() (err error) {
	if l.staging == nil {
		l.staging, err = l.m.device.ctx.AllocHost(len(l.next))
	}
	for i := range l.flights {
		f := &l.flights[i]
		f.pass, f.report, f.arrived = l.op.NewPass(), l.reports.host[i], l.reports.arrived[i]
	}
	l.opened = err == nil
	return err
}

// begin takes the snapshot for a run. Where op and backward op are computed apart, that of the op serves both.
func (l *kasminaLayer) begin(pass *op.KasminaPass) error {
	if !l.forward {
		return pass.Resume()
	}
	pass.Begin()
	if l.m.config.lone != nil {
		pass.Leave()
	}
	return nil
}

func (l *kasminaLayer) before() error {
	if !l.opened {
		if err := l.open(); err != nil {
			return err
		}
	}
	f := &l.flights[l.reports.runs%2]
	if err := l.receive(f, true); err != nil { // two runs ago
		return err
	}
	if err := l.receive(l.flight(), f.pass.NeedsLast()); err != nil {
		return err
	}
	if err := l.begin(f.pass); err != nil {
		return fmt.Errorf("%v: %w", l.op, err)
	}
	if err := l.choose(l.encode(f.pass)); err != nil {
		return fmt.Errorf("%v: %w", l.op, err)
	}
	f.scale = l.m.scale.Scale
	if l.hosted { // the op tells the lattice what it measures, behind what is still on its way
		f.mode, l.mode = kasminaMode{}, kasminaMode{}
		return l.receive(l.flight(), true)
	}
	ctx := l.m.device.ctx
	if !bytes.Equal(l.next, l.last) {
		copy(l.staging, l.next)
		if err := ctx.CopyToDevice(l.state.ptr(), l.staging, l.m.stream); err != nil {
			return err
		}
		l.last = append(l.last[:0], l.next...)
	}
	f.mode = modeOf(f.pass)
	l.mode = f.mode
	return nil
}

// modeOf is what a pass shall measure.
func modeOf(pass *op.KasminaPass) (m kasminaMode) {
	t := pass.Snapshot().Telemetry
	if m.telemetry = pass.Measures(); m.telemetry {
		m.histogram = t.Mode == state.Debug
		m.reduction = map[state.Reduction]kernels.KasminaReduction{
			state.Hierarchical: kernels.KasminaExact, state.MeanOfRows: kernels.KasminaMean, state.MaxOfRows: kernels.KasminaMax,
		}[t.Reduction]
	}
	return m
}

// flight is that of the last run.
func (l *kasminaLayer) flight() *kasminaFlight { return &l.flights[(l.reports.runs+1)%2] }

func (l *kasminaLayer) appendMode(b []byte) []byte {
	mode := byte(l.mode.reduction) << 2
	if l.mode.telemetry {
		mode |= 1
	}
	if l.mode.histogram {
		mode |= 2
	}
	if l.hosted {
		mode |= 1 << 4
	}
	return append(b, mode)
}

// after comes behind that of the reports.
func (l *kasminaLayer) after() error {
	l.flight().busy = !l.hosted
	return nil
}

func (l *kasminaLayer) settle() error {
	return errors.Join(l.receive(&l.flights[l.reports.runs%2], true), l.receive(l.flight(), true))
}

// receive gives the lattice what a run has measured, if it has arrived or shall be waited for.
func (l *kasminaLayer) receive(f *kasminaFlight, wait bool) error {
	ctx := l.m.device.ctx
	switch {
	case !f.busy:
		return nil
	case wait:
		if err := ctx.SyncEvent(f.arrived); err != nil {
			return err
		}
	default:
		if done, err := ctx.EventDone(f.arrived); err != nil || !done {
			return err
		}
	}
	f.busy = false
	if err := l.deliver(f); err != nil {
		return fmt.Errorf("%v: %w", l.op, err)
	}
	return nil
}

func (l *kasminaLayer) deliver(f *kasminaFlight) error {
	seeds := l.seeds()
	words, figures := gpu.View[uint32](f.report), gpu.View[float32](f.report)
	counts := words[l.place(0):][:len(l.counts)]
	counted := slices.Clone(counts)
	for i, v := range l.counts {
		counted[i] -= v
	}
	copy(l.counts, counts)
	count := func(what, seed int) int { return int(counted[what*seeds+seed]) }
	figure := func(what, i, seed int) float64 { return float64(figures[l.place(what+i)+seed]) }
	elements := float64(l.rows * l.chunk)

	health := func(seed int) state.HealthSample {
		h := state.HealthSample{NonFinite: count(kasminaBadX, seed)}
		if !f.mode.telemetry {
			return h
		}
		v := func(i int) float64 { return figure(kasminaHealth, i, seed) }
		h.Health = state.Health{Variance: v(0), Mean: v(1), Min: v(2), Max: v(3), DeadRatio: v(4), SNR: v(5)}
		h.Moments = state.Moments{Count: elements - float64(h.NonFinite), Mean: v(kernels.KasminaMoments), Variance: v(kernels.KasminaMoments + 1)}
		if f.mode.histogram {
			h.Histogram = (*state.Histogram)(words[l.place(kasminaBins)+seed*kernels.KasminaBins:])
		}
		return h
	}
	var err error
	if l.forward {
		err = f.pass.RecordHealth(health)
	}
	if !l.backward {
		return err
	}
	gradient := func(seed int) state.GradientSample {
		g := state.GradientSample{NonFinite: count(kasminaBadG, seed), Clipped: count(kasminaClipped, seed)}
		if !f.mode.telemetry {
			return g
		}
		v := func(i int) float64 { return figure(kasminaGradient, i, seed) }
		s := float64(f.scale)
		g.Gradient = state.Gradient{Norm: v(0) / s, Variance: v(1) / s / s, Max: v(2) / s}
		g.Norms = state.Moments{Count: v(kernels.KasminaNorms + 2), Mean: v(kernels.KasminaNorms) / s, Variance: v(kernels.KasminaNorms+1) / s / s}
		return g
	}
	return errors.Join(err, unlessScaled(f.pass.RecordGradient(gradient), f.scale))
}

// unlessScaled is the error of a backward pass, but for gradients that are not finite and carry a loss scale above 1: it may have
// made them so. They count all the same, and the step is skipped. At a scale of 1 nothing else can be the cause.
func unlessScaled(err error, scale float32) error {
	if scale > 1 && errors.Is(err, op.ErrNonFinite) {
		return nil
	}
	return err
}

func (l *kasminaLayer) close() error {
	if l.staging == nil {
		return nil
	}
	return l.m.device.ctx.FreeHost(l.staging)
}
