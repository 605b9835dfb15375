package cudaops

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// lateKernels counts the launches that update something late, and of products those that leave multiprocessors.
type lateKernels struct {
	kernelSet
	seen *lateSeen
}

type lateSeen struct {
	updates, leaving, astray int
	left                     int
}

func (k lateKernels) AdamWLate(s driver.Stream, control driver.Ptr, t *kernels.Table, from, to int, squares driver.Ptr) error {
	k.seen.updates++
	return k.kernelSet.AdamWLate(s, control, t, from, to, squares)
}

func (k lateKernels) Leave(n int) {
	k.seen.left = n
	k.kernelSet.Leave(n)
}

func (k lateKernels) Product(s driver.Stream, a kernels.Product) error {
	if k.seen.left > 0 {
		k.seen.leaving++
		if !a.TransW { // of a backward pass
			k.seen.astray++
		}
	}
	return k.kernelSet.Product(s, a)
}

// ownAlone has products computed by kernels of this module.
func ownAlone(t *testing.T, onGPU bool) MachineOption {
	rule := WithWays(productOp + "=hopper-*")
	if onGPU {
		return rule
	}
	plain, adding := new(int), new(int)
	own := withOwnProducts(plain, adding)
	return func(c *machineConfig) error { return errors.Join(rule(c), own(c)) }
}

// late has machines leave for later what they can of an update, however little there is of it.
func (s *lateSeen) late(c *machineConfig) error {
	c.late = lateRule{least: 1, group: 1, bandwidth: math.Inf(1)}
	inner := c.kernels
	c.kernels = func(ctx driver.Context) (kernelSet, error) {
		k, err := inner(ctx)
		return lateKernels{k, s}, err
	}
	return nil
}

// TestUpdateLate is TestUpdate of a machine that leaves some of it for later.
func TestUpdateLate(t *testing.T) {
	t.Setenv("KASMINA_WAYS", "")
	device, _, fakeOption := openFake(t, fake.Config{})
	var seen lateSeen
	testUpdate(t, device, newAdamW, fakeOption, ownAlone(t, false), seen.late)
	if seen.updates == 0 || seen.leaving == 0 {
		t.Errorf("%+v: nothing was updated late", seen)
	}
}

// newLateTwins are twins of which the one that begins runs early leaves updates for later.
func newLateTwins(t *testing.T, device *Device, seen *lateSeen, opts ...MachineOption) *twins {
	t.Helper()
	w := &twins{t: t, plain: newWideLifetime(t), ahead: newWideLifetime(t), gather: 1}
	w.open(device, func(*op.KasminaOp) {}, func(l *lifetime) []MachineOption {
		if l == w.ahead {
			return append(slices.Clip(opts), seen.late)
		}
		return opts
	})
	return w
}

// newWideLifetime trains a model whose products kernels of this module take.
func newWideLifetime(t *testing.T, how ...llm.GraphOption) *lifetime {
	t.Helper()
	c := llm.Config{Vocab: 19, Dim: 48, Layers: 3, Heads: 3, KVHeads: 1, Seq: 8, FF: 136, Kasmina: []int{1}, Seeds: 6}.Default()
	model, err := llm.NewModel(c, gorgonia.Float32, 2, state.WithoutGates())
	if err != nil {
		t.Fatal(err)
	}
	g, err := model.Graph(llm.ForTraining, 3, how...)
	if err != nil {
		t.Fatal(err)
	}
	o, err := newAdamW()
	if err != nil {
		t.Fatal(err)
	}
	l := &lifetime{model: model, batch: &batch{Graph: g}, optimizer: o}
	l.batch.draw(t, 2)
	return l
}

// TestLateBits wants a machine that leaves updates for later to compute the same bits as one that does not, in steps that follow one
// another and whatever happens between two.
func TestLateBits(t *testing.T) {
	t.Setenv("KASMINA_WAYS", "")
	check := func(t *testing.T, device *Device, opts ...MachineOption) {
		var seen lateSeen
		w := newLateTwins(t, device, &seen, opts...)
		if w.ahead.machine.optimizer.late == nil || w.plain.machine.optimizer.late != nil {
			t.Fatal("the machines are not what they should be")
		}
		for i := range 5 {
			w.steps("a step", i > 0)
		}
		w.ahead.machine.lost = 0
		w.batch += 1000 // of which the run that has begun knows nothing
		w.steps("a step with another batch", false)
		w.same("several steps")
		newLateTwins(t, device, &seen, opts...).testStart()
		if seen.updates < 10 || seen.leaving == 0 {
			t.Errorf("%+v: hardly anything was updated late", seen)
		}
	}
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		check(t, device, fakeOption, ownAlone(t, false))
		check(t, device, fakeOption, ownAlone(t, false), narrowGradients)
	})
	t.Run("GPU", func(t *testing.T) {
		device := openGPU(t)
		if device.info.Capability() != 90 {
			t.Skip("compute capability 9.0 has it")
		}
		check(t, device, ownAlone(t, true), WithPrecision(BFloat16), WithTuning(TuneOff))
		check(t, device, ownAlone(t, true), WithPrecision(BFloat16), WithGradientPrecision(BFloat16), WithTuning(TuneOff))
	})
}

// TestLateJoined wants whoever asks for a parameter behind an update, or works with it, to have what the whole update made of it.
func TestLateJoined(t *testing.T) {
	t.Setenv("KASMINA_WAYS", "")
	device, _, fakeOption := openFake(t, fake.Config{})
	var seen lateSeen
	w := newLateTwins(t, device, &seen, fakeOption, ownAlone(t, false))
	var scorers []*Machine
	var scores []*llm.Graph
	w.each(func(l *lifetime) error {
		score, err := l.model.Graph(llm.ForLoss, 3)
		if err != nil {
			return err
		}
		m, err := NewMachine(device, score.G, fakeOption, WithParamsOf(l.machine))
		if err != nil {
			return err
		}
		t.Cleanup(func() { m.Close() })
		scorers, scores = append(scorers, m), append(scores, score)
		(&batch{Graph: score}).draw(t, 7)
		for range 2 { // of which the second one is captured
			err = errors.Join(err, m.RunAll())
		}
		_, valueErr := m.Value(score.Loss)
		return errors.Join(err, valueErr)
	})
	last := func(l *lifetime) *gorgonia.Node {
		groups := w.ahead.machine.optimizer.late.groups
		name := groups[len(groups)-1].params[0].node.Name()
		return l.batch.Params[slices.IndexFunc(l.batch.Params, func(p *gorgonia.Node) bool { return p.Name() == name })]
	}
	for _, c := range []struct {
		name string
		ask  func(i int, l *lifetime) ([]float32, error)
	}{
		{"Value", func(_ int, l *lifetime) ([]float32, error) {
			v, err := l.machine.Value(last(l))
			return flat(t, v), err
		}},
		{"a run of another kind, which is not captured yet", func(_ int, l *lifetime) ([]float32, error) {
			err := l.model.Kasmina.Lattice(0).SetTelemetry(state.Telemetry{Mode: state.Debug})
			if err := errors.Join(err, l.machine.RunAll()); err != nil {
				return nil, err
			}
			v, err := l.machine.Value(l.batch.Loss)
			return flat(t, v), err
		}},
		{"Upload", func(_ int, l *lifetime) ([]float32, error) {
			if err := l.machine.Upload(last(l)); err != nil {
				return nil, err
			}
			v, err := l.machine.Value(last(l))
			return flat(t, v), err
		}},
		{"another machine", func(i int, l *lifetime) ([]float32, error) {
			(&batch{Graph: scores[i]}).draw(t, 7)
			if err := scorers[i].RunAll(); err != nil {
				return nil, err
			}
			v, err := scorers[i].Value(scores[i].Loss)
			return flat(t, v), err
		}},
		{"another machine behind a run that has begun", func(i int, l *lifetime) ([]float32, error) {
			if begun, err := l.machine.Start(); !begun || err != nil {
				return nil, fmt.Errorf("begun: %v, %w", begun, err)
			}
			if err := scorers[i].RunAll(); err != nil {
				return nil, err
			}
			v, err := scorers[i].Value(scores[i].Loss)
			return flat(t, v), err
		}},
		{"a machine that is made then", func(_ int, l *lifetime) ([]float32, error) {
			score, err := l.model.Graph(llm.ForLoss, 3)
			if err != nil {
				return nil, err
			}
			m, err := NewMachine(device, score.G, fakeOption, WithParamsOf(l.machine))
			if err != nil {
				return nil, err
			}
			defer m.Close()
			(&batch{Graph: score}).draw(t, 7)
			if err := m.RunAll(); err != nil {
				return nil, err
			}
			v, err := m.Value(score.Loss)
			return flat(t, v), err
		}},
		{"an update without a run between", func(_ int, l *lifetime) ([]float32, error) {
			if _, err := l.machine.Update(); err != nil {
				return nil, err
			}
			v, err := l.machine.Value(last(l))
			return flat(t, v), err
		}},
		{"another optimiser", func(_ int, l *lifetime) ([]float32, error) {
			err := errors.Join(l.machine.Download(), l.machine.SetOptimizer(l.optimizer, 1), l.step())
			if err != nil {
				return nil, err
			}
			v, err := l.machine.Value(last(l))
			return flat(t, v), err
		}},
		{"another optimiser at once", func(_ int, l *lifetime) ([]float32, error) {
			o, err := newAdamW()
			if err := errors.Join(err, l.machine.SetOptimizer(o, 1), l.step()); err != nil {
				return nil, err
			}
			v, err := l.machine.Value(last(l))
			return flat(t, v), err
		}},
		{"Address", func(_ int, l *lifetime) ([]float32, error) {
			at, n, err := l.machine.Address(last(l))
			if err != nil {
				return nil, err
			}
			got := make([]float32, n/4)
			ctx, s := device.ctx, driver.Stream(l.machine.Stream())
			return got, errors.Join(ctx.CopyToHost(driver.Bytes(got), driver.Ptr(at), s), ctx.SyncStream(s))
		}},
	} {
		w.each(func(l *lifetime) error { // three steps, of which the last has just been made
			for i := range uint64(3) {
				l.batch.draw(t, 50+i)
				if err := l.step(); err != nil {
					return err
				}
			}
			return nil
		})
		if x := w.ahead.machine.optimizer.late; !x.running {
			t.Fatalf("%s: nothing is left for later", c.name)
		}
		var got [][]float32
		i := 0
		w.each(func(l *lifetime) error {
			v, err := c.ask(i, l)
			got = append(got, v)
			i++
			return err
		})
		if !slices.Equal(got[0], got[1]) {
			t.Errorf("%s: %.8g, want %.8g", c.name, got[1][:1], got[0][:1])
		}
	}
	// Others may go by the stream now.
	if err := w.ahead.step(); err != nil || w.ahead.machine.optimizer.late.running {
		t.Errorf("an update behind Address is left for later (%v)", err)
	}
}

// TestLateShared wants a machine that works with another one's parameters to tell it that others go by their addresses, and values of
// its own to be there still when that is closed.
func TestLateShared(t *testing.T) {
	t.Setenv("KASMINA_WAYS", "")
	device, _, fakeOption := openFake(t, fake.Config{})
	for _, expose := range []bool{false, true} {
		l := newWideLifetime(t)
		if err := l.open(device, fakeOption, ownAlone(t, false), new(lateSeen).late); err != nil {
			t.Fatal(err)
		}
		score, err := l.model.Graph(llm.ForLoss, 3)
		if err != nil {
			t.Fatal(err)
		}
		m, err := NewMachine(device, score.G, fakeOption, WithParamsOf(l.machine))
		if err != nil {
			t.Fatal(err)
		}
		(&batch{Graph: score}).draw(t, 7)
		if err := errors.Join(m.RunAll(), l.step()); err != nil {
			t.Fatal(err)
		}
		if expose {
			if _, _, err := m.Address(score.Params[0]); err != nil {
				t.Fatal(err)
			}
		}
		if err := l.step(); err != nil {
			t.Fatal(err)
		}
		if running := l.machine.optimizer.late.running; running == expose {
			t.Errorf("with the address of a parameter: %v, left for later: %v", expose, running)
		}
		if err := l.machine.Close(); err != nil {
			t.Error(err)
		}
		if _, err := m.Value(score.Loss); err != nil {
			t.Errorf("behind Close of the other machine: %v", err)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestLateSetOptimizerFails wants runs to go on behind an error of SetOptimizer, which leaves no optimiser: nothing that was captured may
// wait for what that has let go of.
func TestLateSetOptimizerFails(t *testing.T) {
	t.Setenv("KASMINA_WAYS", "")
	device, cuda, fakeOption := openFake(t, fake.Config{})
	l := newWideLifetime(t)
	if err := l.open(device, fakeOption, ownAlone(t, false), new(lateSeen).late); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := l.step(); err != nil {
			t.Fatal(err)
		}
	}
	cuda.Fail("cuStreamSynchronize", 1, driver.InvalidValue)
	if err := l.machine.SetOptimizer(l.optimizer, 1); err == nil || l.machine.optimizer != nil {
		t.Errorf("SetOptimizer: %v", err)
	}
	if err := l.machine.RunAll(); err != nil {
		t.Error(err)
	}
	if err := l.machine.Close(); err != nil {
		t.Error(err)
	}
}

// gpuOf is a GPU of a compute capability with so many multiprocessors.
func gpuOf(major, sms int) fake.Config {
	info := smallCache("Card")
	info[0].Major, info[0].SMs = major, sms
	return fake.Config{Devices: info}
}

// TestLateWhere wants updates left for later only where there are multiprocessors to spare, and nothing behind an update needs them.
func TestLateWhere(t *testing.T) {
	t.Setenv("KASMINA_WAYS", "")
	for _, c := range []struct {
		what  string
		major int
		opt   MachineOption
		sms   int // 132

		planned, late, leaving bool // of updates, and of products
	}{
		{"a Hopper", 9, nil, 0, true, true, true},
		{"another GPU", 8, nil, 0, false, false, false},
		{"a smaller Hopper", 9, nil, 114, false, false, false},
		{"sums of gradients", 9, WithAccumulation(), 0, false, false, false},
		{"cuBLASLt's products", 9, WithWays("Matmul=0*"), 0, true, true, false}, // of what the first of them needs
		{"runs of which every other one is timed", 9, WithMonitor(2), 0, true, false, true},
		{"too little to do", 9, func(c *machineConfig) error { c.late.least = 1 << 30; return nil }, 0, false, false, false},
		{"too little time", 9, func(c *machineConfig) error { c.late.bandwidth = 1; return nil }, 0, false, false, false},
	} {
		device, _, fakeOption := openFake(t, gpuOf(c.major, cmp.Or(c.sms, 132)))
		l := newWideLifetime(t)
		var seen lateSeen
		opts := []MachineOption{fakeOption, ownAlone(t, false), seen.late}
		if c.opt != nil {
			opts = append(opts, c.opt)
		}
		if err := l.open(device, opts...); err != nil {
			t.Fatalf("%s: %v", c.what, err)
		}
		for range 3 {
			if err := l.step(); err != nil {
				t.Fatalf("%s: %v", c.what, err)
			}
		}
		p := l.machine.program
		if p.late != nil != c.planned || seen.updates > 0 != c.late || seen.leaving > 0 != c.leaving || seen.astray > 0 {
			t.Errorf("%s: planned: %v, done: %+v", c.what, p.late != nil, seen)
		}
		if p.late != nil && slices.ContainsFunc(p.tasks[:p.late.end], func(t task) bool { return t.crowds }) {
			t.Errorf("%s: a task that takes all multiprocessors comes before the last that waits", c.what)
		}
		if err := l.machine.Close(); err != nil {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}

// TestLatePlan wants parameters in the order in which they are needed, from the last on as many as there is time for, each before the
// first task that needs it, and the memory of their gradients left alone from the first task on.
func TestLatePlan(t *testing.T) {
	t.Setenv("KASMINA_WAYS", "")
	device, _, fakeOption := openFake(t, fake.Config{})
	held := map[float64]int{}
	for _, bandwidth := range []float64{math.Inf(1), 3e13, 0} {
		l := newWideLifetime(t)
		var seen lateSeen
		rule := func(c *machineConfig) error { c.late.bandwidth = bandwidth; return nil }
		if err := l.open(device, fakeOption, ownAlone(t, false), seen.late, rule); err != nil {
			t.Fatal(err)
		}
		p := l.machine.program
		if p.late == nil {
			p.late = new(latePlan)
		}
		task := 0
		for _, g := range p.late.groups {
			if g.task < task || len(g.params) == 0 {
				t.Errorf("a group of %d parameters is needed at task %d, the one before at %d", len(g.params), g.task, task)
			}
			task = g.task
			for _, in := range g.params {
				held[bandwidth]++
				if grad := p.values[in.node.Deriv()]; grad.First != 0 || grad.Last < len(p.tasks) {
					t.Errorf("%s: its gradient has memory from %d to %d", in.node.Name(), grad.First, grad.Last)
				}
			}
		}
		if p.late.end != task || task >= len(p.tasks)/2 {
			t.Errorf("multiprocessors are left until task %d of %d, and something waits until %d", p.late.end, len(p.tasks), task)
		}
		if err := l.machine.Close(); err != nil {
			t.Error(err)
		}
	}
	if !(held[3e13] > 0 && held[3e13] < held[math.Inf(1)]) || held[0] > 0 {
		t.Errorf("late are so many parameters, by bytes a second: %v", held)
	}
}
