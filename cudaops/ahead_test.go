package cudaops

import (
	"bytes"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// twins train the same model: plain run by run, ahead with runs that begin while the update before them is made.
type twins struct {
	t            *testing.T
	plain, ahead *lifetime
	batch        uint64  // the next one
	gather       int     // runs of an update
	norms        float64 // what the norms may differ by, as a share
}

func newTwins(t *testing.T, device *Device, gather int, opts ...MachineOption) *twins {
	t.Helper()
	return newTwinsOf(t, device, gather, func(*op.KasminaOp) {}, opts...)
}

// newTwinsOf makes twins with another Kasmina layer.
func newTwinsOf(t *testing.T, device *Device, gather int, layer func(*op.KasminaOp), opts ...MachineOption) *twins {
	t.Helper()
	w := &twins{t: t, plain: newLifetime(t, newMuon), ahead: newLifetime(t, newMuon), gather: gather}
	if gather > 1 {
		opts = append(slices.Clip(opts), WithAccumulation())
	}
	w.open(device, layer, func(*lifetime) []MachineOption { return opts })
	return w
}

// open makes the machines.
func (w *twins) open(device *Device, layer func(*op.KasminaOp), opts func(*lifetime) []MachineOption) {
	t := w.t
	t.Helper()
	w.each(func(l *lifetime) error {
		for _, n := range l.batch.G.AllNodes() {
			if o, ok := n.Op().(*op.KasminaOp); ok {
				layer(o)
			}
		}
		lattice := l.model.Kasmina.Lattice(0)
		err := errors.Join(l.model.Germinate(0, 1, state.GerminationRequest{Slot: 1, Kind: blueprints.ConvFilter}),
			lattice.Transition(1, state.Training), lattice.Transition(1, state.Grafting), lattice.SetAlpha(1, 0.5), l.open(device, opts(l)...))
		if err == nil {
			t.Cleanup(func() {
				if err := l.machine.Close(); err != nil {
					t.Error(err)
				}
			})
		}
		return err
	})
}

// each does something with both.
func (w *twins) each(f func(*lifetime) error) {
	w.t.Helper()
	for _, l := range []*lifetime{w.plain, w.ahead} {
		if err := f(l); err != nil {
			w.t.Fatal(err)
		}
	}
}

// made is what a step gives.
type made struct {
	loss, norm float64
	taken      bool // the first run had begun before
}

// step makes a step, and meanwhile what is given.
func (w *twins) step(l *lifetime, meanwhile func()) (s made) {
	w.t.Helper()
	m := l.machine
	for i := range w.gather {
		l.batch.draw(w.t, w.batch+uint64(i))
		before := m.device.ctx.Stats()
		if err := m.RunAll(); err != nil {
			w.t.Fatal(err)
		}
		if work := m.device.ctx.Stats().Sub(before); i == 0 {
			s.taken = work.ToDevice.Count == 0 && work.Launches+work.GraphLaunches+work.Matmuls == 0
		}
		if l == w.ahead && i == w.gather-1 {
			continue
		}
		v, err := m.Peek(l.batch.Loss)
		if err != nil {
			w.t.Fatal(err)
		}
		s.loss += float64(flat(w.t, v)[0])
	}
	var err error
	if l == w.plain {
		s.norm, err = m.UpdateWhile(meanwhile)
	} else {
		var loss float64
		loss, s.norm, err = m.StepWhile(l.batch.Loss, meanwhile)
		s.loss += loss
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

// both makes a step of both, and then what is given, and wants them to stay the same.
func (w *twins) both(what string, taken bool, then func(*lifetime) error) {
	w.t.Helper()
	w.steps(what, taken)
	if then != nil {
		w.each(then)
	}
	w.same(what)
}

// steps makes a step of both.
func (w *twins) steps(what string, taken bool) {
	w.t.Helper()
	want := w.step(w.plain, func() {})
	got := w.step(w.ahead, func() {
		w.ahead.batch.draw(w.t, w.batch+uint64(w.gather))
		if _, err := w.ahead.machine.Start(); err != nil {
			w.t.Error(err)
		}
	})
	if want.taken || got.taken != taken {
		w.t.Errorf("%s: the run had begun: %v and %v, want false and %v", what, want.taken, got.taken, taken)
	}
	if math.Abs(got.norm-want.norm) <= w.norms*want.norm {
		got.norm = want.norm
	}
	if got.taken = want.taken; got != want {
		w.t.Errorf("%s: %+v, want %+v", what, got, want)
	}
	w.batch += uint64(w.gather)
}

// same wants the same lattices and parameters.
func (w *twins) same(what string) {
	w.t.Helper()
	var lattices [][]byte
	w.each(func(l *lifetime) error {
		b, err := l.model.Kasmina.Lattice(0).MarshalBinary()
		lattices = append(lattices, b)
		return errors.Join(err, l.machine.Download())
	})
	if !bytes.Equal(lattices[0], lattices[1]) {
		w.t.Errorf("%s: the lattices differ", what)
	}
	for i, p := range w.plain.model.Params {
		if !bytes.Equal(driver.Bytes(p.Value.Float32s()), driver.Bytes(w.ahead.model.Params[i].Value.Float32s())) {
			w.t.Errorf("%s: parameter %s differs", what, p.Name)
		}
	}
}

// TestStart wants the same losses, norms, parameters and lattices, bit for bit, from a machine whose runs begin early, whatever
// happens between two steps; runs to be begun in vain where that changes what they compute, and to be taken over elsewhere.
func TestStart(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	t.Run("fake", func(t *testing.T) { newTwins(t, device, 1, fakeOption).testStart() })
	t.Run("GPU", func(t *testing.T) { newTwins(t, openGPU(t), 1, WithPrecision(BFloat16)).testStart() })
}

// TestStartGathered is TestStart where an update gathers the gradients of three runs.
func TestStartGathered(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	t.Run("fake", func(t *testing.T) { newTwins(t, device, 3, fakeOption).testStart() })
	t.Run("GPU", func(t *testing.T) { newTwins(t, openGPU(t), 3).testStart() })
}

func (w *twins) testStart() {
	telemetry := func(c state.Telemetry) func(*lifetime) error {
		return func(l *lifetime) error { return l.model.Kasmina.Lattice(0).SetTelemetry(c) }
	}
	cases := []struct {
		name string
		vain bool
		then func(*lifetime) error
	}{
		{"nothing", false, nil},
		{"a seed that changes", true, func(l *lifetime) error { return l.model.Kasmina.Lattice(0).SetAlpha(1, 0.25) }},
		{"telemetry with histograms", true, telemetry(state.Telemetry{Mode: state.Debug})},
		{"telemetry of every other run", true, telemetry(state.Telemetry{Mode: state.Sampling, Every: 2})},
		{"another learning rate", false, func(l *lifetime) error { return l.optimizer.SetLR(l.optimizer.LR() / 2) }},
		{"other parameters", true, func(l *lifetime) error { return l.poke(0, 0.5) }},
		{"moments that are forgotten", false, func(l *lifetime) error { return l.machine.Forget(l.batch.Params[1], 0, 3) }},
		{"gradients that are dropped", true, func(l *lifetime) error { return l.machine.DropGradients() }},
		{"a profile", true, func(l *lifetime) error { return l.machine.StartProfile() }},
		{"another batch", true, func(l *lifetime) error {
			if l == w.ahead {
				w.batch += 1000
			}
			return nil
		}},
		{"telemetry off", true, telemetry(state.Telemetry{Mode: state.Off})},
	}
	w.both("the first step", false, nil)
	for _, c := range cases[:few(len(cases), 2)] {
		w.ahead.machine.lost = 0 // of which a few suffice for Start to do nothing
		w.both(c.name, true, c.then)
		w.both("the step after "+c.name, !c.vain, nil)
		w.both("the second step after "+c.name, true, nil)
	}
	w.testCounts()
	w.testVain()
}

// poke changes a number of a parameter.
func (l *lifetime) poke(i int, v float32) error {
	if err := l.machine.Download(); err != nil {
		return err
	}
	l.model.Params[0].Value.Float32s()[i] = v
	return l.machine.Upload(l.batch.Params[0])
}

// testCounts wants lattices to hear of the NaN that runs met which were asked for, and not of others.
func (w *twins) testCounts() {
	w.t.Helper()
	before := w.ahead.model.Params[0].Value.Float32s()[0]
	w.each(func(l *lifetime) error { return l.poke(0, float32(math.NaN())) })
	w.ahead.machine.lost = -100
	for i := range few(6, 2) {
		w.each(func(l *lifetime) error {
			l.batch.draw(w.t, w.batch)
			if err := l.machine.RunAll(); err != nil {
				return err
			}
			_, err := l.machine.Value(l.batch.Loss)
			return errors.Join(err, l.machine.DropGradients())
		})
		w.same("a run that meets NaN")
		w.batch++
		w.ahead.batch.draw(w.t, w.batch+100*uint64(i%2))
		if _, err := w.ahead.machine.Start(); err != nil {
			w.t.Fatal(err)
		}
	}
	if n := w.ahead.model.Kasmina.Lattice(0).Report().Layer.Errors; n == 0 {
		w.t.Error("no NaN was met")
	}
	w.each(func(l *lifetime) error { return l.poke(0, before) })
}

// testVain wants Start to give up where runs are always begun in vain.
func (w *twins) testVain() {
	w.t.Helper()
	m := w.ahead.machine
	m.lost = 0
	for i := range 10 {
		w.ahead.batch.draw(w.t, w.batch+uint64(2*i))
		if _, err := m.Start(); err != nil {
			w.t.Fatal(err)
		}
		w.ahead.batch.draw(w.t, w.batch+uint64(2*i+1))
		if err := errors.Join(m.RunAll(), m.DropGradients()); err != nil {
			w.t.Fatal(err)
		}
	}
	if m.lost > 2+m.runs/vainRuns {
		w.t.Errorf("%d of %d runs were begun in vain", m.lost, m.runs)
	}
}

// TestStartLimits is TestStart for a layer whose limits are made of what the run before has measured.
func TestStartLimits(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	w := newTwinsOf(t, device, 1, func(o *op.KasminaOp) { o.Config.AdaptiveClip, o.Config.Stability = 1, op.Strict }, fakeOption)
	for i := range 6 {
		w.both("a step", i > 0, nil)
	}
}

// TestStartStops wants the error of a layer that stops at NaN from the update behind the run that meets it, and nothing to be
// begun then.
func TestStartStops(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	w := newTwinsOf(t, device, 1, func(o *op.KasminaOp) { o.Config.StopOnNonFinite = true }, fakeOption)
	w.both("the first step", false, nil)
	l := w.ahead
	l.batch.draw(t, 1)
	err := errors.Join(l.poke(18*l.batch.ids[0], float32(math.NaN())), l.machine.RunAll())
	if err != nil {
		t.Fatal(err)
	}
	loss, _, err := l.machine.StepWhile(l.batch.Loss, func() { t.Error("the step goes on") })
	if !errors.Is(err, op.ErrNonFinite) || l.machine.begun {
		t.Errorf("the loss is %v, and the step's error %v", loss, err)
	}
}

// TestStartProfile wants the profile of steps that begin early to have what that of others has.
func TestStartProfile(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	w := newTwins(t, device, 1, fakeOption, withCeilingBytes(1<<12))
	w.both("the first step", false, nil)
	w.both("the second step", true, func(l *lifetime) error { return l.machine.StartProfile() })
	for i := range ProfileSteps {
		w.steps("a step", i > 0)
	}
	var spans [][]string
	w.each(func(l *lifetime) error {
		p, err := l.machine.Profile()
		if err != nil {
			return err
		}
		checkProfile(t, l.machine, p, 1)
		var names []string
		for _, s := range p.Spans {
			names = append(names, s.Op+" "+s.Layer)
		}
		spans = append(spans, names)
		return nil
	})
	if !slices.Equal(slices.Compact(spans[0]), slices.Compact(spans[1])) { // one update looks at the loss too
		t.Errorf("%d spans, want %d:\n%q\n%q", len(spans[1]), len(spans[0]), spans[1], spans[0])
	}
	w.both("the step after it", true, nil)
}

// TestStartRefuses covers machines that begin nothing early, and calls that make no sense then.
func TestStartRefuses(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	w := newTwins(t, device, 1, fakeOption, scaledGradients)
	for range 3 {
		w.both("with a loss scale", false, nil)
	}
	w = newTwins(t, device, 2, fakeOption)
	w.both("the first step", false, nil)
	m := w.ahead.machine
	if _, err := m.Update(); err == nil || !strings.Contains(err.Error(), "Start has begun another run") {
		t.Errorf("an update with the gradients of a run that nobody asked for: %v", err)
	}
	w.ahead.batch.draw(t, w.batch)
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	if begun, err := m.Start(); begun || err != nil || m.begun {
		t.Errorf("on top of gathered gradients a run has begun: %v, %v", begun, err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Start(); !errors.Is(err, errClosed) || !strings.Contains(err.Error(), "cudaops.Machine.Start") {
		t.Errorf("after Close: %v", err)
	}
}

// TestUpdateWhileRefuses covers what cannot be done while the device makes an update.
func TestUpdateWhileRefuses(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	for want, do := range map[string]func(*lifetime) error{
		"under way":         func(l *lifetime) error { _, err := l.machine.Update(); return err },
		"another optimiser": func(l *lifetime) error { return l.machine.SetOptimizer(l.optimizer, 1) },
		"was closed":        func(l *lifetime) error { return l.machine.Close() },
	} {
		w := newTwins(t, device, 1, fakeOption)
		l, m := w.ahead, w.ahead.machine
		l.batch.draw(t, 0)
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		var done error
		_, err := m.UpdateWhile(func() { done = do(l) })
		if err = errors.Join(done, err); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", want, err)
		}
	}
}

// TestStartFails makes calls of CUDA fail while a run begins early, and wants nothing to have been begun.
func TestStartFails(t *testing.T) {
	for _, call := range []string{"cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuGraphLaunch", "cuEventRecord", "cuEventSynchronize"} {
		for nth := 1; nth <= few(3, 1); nth++ {
			device, cuda, fakeOption := openFake(t, fake.Config{})
			w := newTwins(t, device, 1, fakeOption)
			for range 3 {
				w.both("a step", false, func(l *lifetime) error { return l.machine.DropGradients() })
			}
			w.ahead.batch.draw(t, w.batch)
			cuda.Fail(call, nth, driver.OutOfMemory)
			_, err := w.ahead.machine.Start()
			if err == nil {
				break // it makes no more of these calls
			}
			if !errors.Is(err, driver.OutOfMemory) || !strings.Contains(err.Error(), "cudaops.Machine.Start: ") || w.ahead.machine.begun {
				t.Errorf("%s %d: %v", call, nth, err)
			}
			w.both(call, false, nil)
			w.both(call, true, nil)
		}
	}
}

// TestStartOrder wants the next run to be on its way before the update is waited for.
func TestStartOrder(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	c := &calls{Context: device.ctx.Context}
	device.ctx.Context = c
	defer func() { device.ctx.Context = c.Context }()
	w := newTwins(t, device, 1, fakeOption)
	for range 4 {
		w.both("a step", w.batch > 0, nil)
	}
	for l, want := range map[*lifetime]string{
		w.plain: "run: wait up up launch down, step: down wait launch down wait wait",
		w.ahead: "run:, step: launch down down wait wait wait up up launch down wait",
	} {
		c.made = nil
		l.batch.draw(t, w.batch)
		c.note("run:")
		err := l.machine.RunAll()
		c.note(", step:")
		var stepped error
		if l == w.plain {
			_, peeked := l.machine.Peek(l.batch.Loss)
			_, updated := l.machine.Update()
			stepped = errors.Join(peeked, updated)
		} else {
			_, _, stepped = l.machine.StepWhile(l.batch.Loss, func() {
				l.batch.draw(t, w.batch+1)
				if begun, err := l.machine.Start(); !begun || err != nil {
					t.Error(err)
				}
			})
		}
		if err := errors.Join(err, stepped); err != nil {
			t.Fatal(err)
		}
		if got := strings.ReplaceAll(strings.Join(c.made, " "), " ,", ","); got != want {
			t.Errorf("calls %q, want %q", got, want)
		}
	}
}

// TestStepLoss wants a step whose loss is infinite to change nothing, though its gradients are finite, and that after it to be made.
func TestStepLoss(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	t.Run("fake", func(t *testing.T) { testStepLoss(t, device, fakeOption) })
	t.Run("scaled", func(t *testing.T) { testStepLoss(t, device, fakeOption, scaledGradients) })
	t.Run("GPU", func(t *testing.T) { testStepLoss(t, openGPU(t)) })
}

func testStepLoss(t *testing.T, device *Device, opts ...MachineOption) {
	g := gorgonia.NewGraph()
	w := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithName("w"), gorgonia.WithShape(3),
		gorgonia.WithValue(tensor.New(tensor.WithBacking([]float32{3e38, 1, 2}))))
	x := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithName("x"), gorgonia.WithShape(3))
	loss := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.HadamardProd(w, x))))
	vector := gorgonia.Must(gorgonia.Reshape(loss, tensor.Shape{1}))
	if _, err := gorgonia.Grad(loss, w); err != nil {
		t.Fatal(err)
	}
	m, err := NewMachine(device, g, append(opts, WithParams(w), WithOutputs(loss, vector))...)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	o, err := newAdamW()
	if err != nil {
		t.Fatal(err)
	}
	if err := m.SetOptimizer(o, 0); err != nil {
		t.Fatal(err)
	}
	for i, first := range []float32{0, 2, 0, 2, float32(math.NaN()), 1e-3} { // steps are launched one by one at first, and replayed later
		before, err := m.Value(w)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(gorgonia.Let(x, tensor.New(tensor.WithBacking([]float32{first, 1, 0.5}))), m.RunAll()); err != nil {
			t.Fatal(err)
		}
		value, norm, err := m.StepWhile(gorgonia.Nodes{loss, vector}[i/2%2], nil)
		after, fetched := m.Value(w)
		if err != nil || fetched != nil {
			t.Fatal(err, fetched)
		}
		finite := first*3e38-first*3e38 == 0
		if moved := !slices.Equal(flat(t, before), flat(t, after)); moved != finite || (value-value == 0) != finite || (norm-norm == 0) != finite {
			t.Errorf("step %d: loss %v, norm %v, and the parameters change: %v", i, value, norm, moved)
		}
		v, err := m.Value(loss)
		if err != nil || math.Float32bits(flat(t, v)[0]) != math.Float32bits(float32(value)) && value == value {
			t.Errorf("step %d: loss %v, want %v, %v", i, value, v, err)
		}
	}
	if _, _, err := m.StepWhile(w, func() {}); err == nil || !strings.Contains(err.Error(), "cudaops.Machine.StepWhile: ") {
		t.Errorf("of something that is no loss: %v", err)
	}
}

// calls is a context that notes calls that copy, launch and wait.
type calls struct {
	driver.Context
	made []string
}

func (c *calls) note(what string) { c.made = append(c.made, what) }

func (c *calls) CopyToDevice(dst driver.Ptr, src []byte, s driver.Stream) error {
	c.note("up")
	return c.Context.CopyToDevice(dst, src, s)
}

func (c *calls) CopyToHost(dst []byte, src driver.Ptr, s driver.Stream) error {
	c.note("down")
	return c.Context.CopyToHost(dst, src, s)
}

func (c *calls) LaunchGraph(g *driver.Graph, s driver.Stream) error {
	c.note("launch")
	return c.Context.LaunchGraph(g, s)
}

func (c *calls) SyncStream(s driver.Stream) error {
	c.note("wait")
	return c.Context.SyncStream(s)
}

func (c *calls) SyncEvent(e driver.Event) error {
	c.note("wait")
	return c.Context.SyncEvent(e)
}

// TestStartBind wants runs to read and write where values are bound to, if one has begun that did so elsewhere.
func TestStartBind(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	h := host{t, device.ctx}
	for _, output := range []bool{false, true} {
		k := newKasminaGraph(t, 1, nil)
		m := k.open(t, device, fakeOption)
		defer m.Close()
		if begun, err := m.Start(); !begun || err != nil {
			t.Fatalf("a run has begun: %v, %v", begun, err)
		}
		n := k.x
		if output {
			n = k.x.Deriv()
		}
		at := h.place(slices.Repeat([]float32{float32(math.NaN())}, k.rows*k.dim))
		if err := errors.Join(m.Bind(n, at, 4*k.rows*k.dim), m.RunAll()); err != nil {
			t.Fatal(err)
		}
		v, err := m.Value(k.x.Deriv())
		if err != nil {
			t.Fatal(err)
		}
		if dx := flat(t, v); slices.ContainsFunc(dx, func(d float32) bool { return d != d }) == output {
			t.Errorf("with %v bound, the gradient of x is %v …", n, dx[:3])
		}
		if begun, err := m.Start(); begun || err != nil {
			t.Errorf("with %v bound, a run has begun: %v, %v", n, begun, err)
		}
	}
}
