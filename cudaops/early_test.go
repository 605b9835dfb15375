package cudaops

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// updateEarly has machines update in runs what they can, however little there is of it.
func updateEarly(c *machineConfig) error {
	c.late = lateRule{leastEarly: 1, group: 1, earlyBandwidth: math.Inf(1)}
	return WithEarlyUpdates()(c)
}

// newEarlyTwins are twins of which the one that begins runs early also updates parameters in them, since it takes steps by StepWhile. On a
// GPU both have the option, without which products may be computed in other ways.
func newEarlyTwins(t *testing.T, device *Device, opts ...MachineOption) *twins {
	t.Helper()
	return newEarlyTwinsOf(t, device, nil, opts...)
}

// newEarlyTwinsOf makes twins with another graph.
func newEarlyTwinsOf(t *testing.T, device *Device, how []llm.GraphOption, opts ...MachineOption) *twins {
	t.Helper()
	w := &twins{t: t, plain: newWideLifetime(t, how...), ahead: newWideLifetime(t, how...), gather: 1, norms: 1e-6}
	w.plain.unlimited = true
	w.open(device, func(*op.KasminaOp) {}, func(l *lifetime) []MachineOption {
		if _, isFake := device.ctx.Context.(*fake.Context); isFake && l == w.plain {
			return opts
		}
		return append(slices.Clip(opts), updateEarly)
	})
	return w
}

// TestEarlyBits wants a machine that updates in its runs to compute the same bits as one that does not, in steps that follow one
// another and whatever happens between two.
func TestEarlyBits(t *testing.T) {
	t.Setenv("KASMINA_WAYS", "")
	check := func(t *testing.T, device *Device, opts ...MachineOption) {
		w := newEarlyTwins(t, device, opts...)
		for i := range 5 {
			w.steps("a step", i > 0)
		}
		if e := w.plain.machine.optimizer.early; !w.ahead.machine.optimizer.early.looked || e != nil && e.looked {
			t.Error("updated early was nothing, or too much")
		}
		w.ahead.machine.lost = 0
		w.batch += 1000 // of which the run that has begun knows nothing
		w.steps("a step with another batch", false)
		w.same("several steps")
		if !testing.Short() {
			newEarlyTwins(t, device, opts...).testStart()
		}
	}
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		check(t, device, fakeOption, narrowGradients)
		w := newEarlyTwinsOf(t, device, []llm.GraphOption{llm.WithRecompute()}, fakeOption)
		for i := range 3 {
			w.steps("a step that recomputes", i > 0)
		}
		if w.same("steps that recompute"); !w.ahead.machine.optimizer.early.looked {
			t.Error("nothing was updated early")
		}
	})
	t.Run("GPU", func(t *testing.T) {
		device := openGPU(t)
		if device.info.Capability() != 90 {
			t.Skip("compute capability 9.0 has it")
		}
		check(t, device, WithPrecision(BFloat16), WithTuning(TuneOff))
		check(t, device, WithPrecision(BFloat16), WithGradientPrecision(BFloat16), WithTuning(TuneOff))
	})
}

// TestEarlyBetween wants the same bits whatever is asked of a machine between a run and its update, when a part of the run has not been
// sent yet.
func TestEarlyBetween(t *testing.T) {
	t.Setenv("KASMINA_WAYS", "")
	device, _, fakeOption := openFake(t, fake.Config{})
	cases := map[string]func(*lifetime) error{
		"nothing":      func(*lifetime) error { return nil },
		"the loss":     func(l *lifetime) error { _, err := l.machine.Peek(l.batch.Loss); return err },
		"a gradient":   func(l *lifetime) error { _, err := l.machine.Value(l.batch.Params[3].Deriv()); return err },
		"parameters":   func(l *lifetime) error { return l.machine.Download() },
		"moments":      func(l *lifetime) error { return l.machine.Forget(l.batch.Params[2], 1, 3) },
		"not finite":   func(l *lifetime) error { _, err := l.machine.NonFinite(); return err },
		"another run":  func(l *lifetime) error { return l.machine.RunAll() },
		"a new Muon":   func(l *lifetime) error { return setNew(l, newMuon) },
		"a new AdamW":  func(l *lifetime) error { return setNew(l, newAdamW) },
		"an address":   func(l *lifetime) error { _, _, err := l.machine.Address(l.batch.Params[0]); return err },
		"the stream":   func(l *lifetime) error { l.machine.Stream(); return nil },
		"a profile":    func(l *lifetime) error { return l.machine.StartProfile() },
		"a run begun":  func(l *lifetime) error { return errors.Join(l.begin(), l.machine.RunAll()) },
		"a vain start": func(l *lifetime) error { return errors.Join(l.begin(), l.machine.DropGradients(), l.machine.RunAll()) },
	}
	left := few(len(cases), 3)
	for what, ask := range cases {
		if left--; left < 0 {
			break
		}
		w := newEarlyTwins(t, device, fakeOption)
		w.steps("the first step", false)
		for range 2 {
			var losses []float64
			w.each(func(l *lifetime) error {
				l.batch.draw(t, w.batch)
				if err := errors.Join(l.machine.RunAll(), ask(l)); err != nil {
					return err
				}
				if l == w.plain {
					v, err := l.machine.Value(l.batch.Loss)
					if err != nil {
						return err
					}
					losses = append(losses, float64(flat(t, v)[0]))
					_, err = l.machine.Update()
					return err
				}
				loss, _, err := l.machine.StepWhile(l.batch.Loss, nil)
				losses = append(losses, loss)
				return err
			})
			if losses[0] != losses[1] {
				t.Errorf("%s: losses %v", what, losses)
			}
			w.batch++
		}
		w.same(what)
	}
}

// begin begins a run that is as the one before.
func (l *lifetime) begin() error {
	_, err := l.machine.Start()
	return err
}

// setNew gives a machine another optimiser.
func setNew(l *lifetime, newOptimizer func() (optim.Optimizer, error)) error {
	o, err := newOptimizer()
	if err != nil {
		return err
	}
	if err := o.Declare(gorgonia.NodesToValueGrads(l.batch.Params)); err != nil {
		return err
	}
	l.optimizer = o
	return l.machine.SetOptimizer(o, 0)
}

// overflow gives a block of the model weights with which the squares of a gradient are too large for float32, and the loss is not.
func (l *lifetime) overflow(block int) (gradient string, err error) {
	if err := l.machine.Download(); err != nil {
		return "", err
	}
	prefix := fmt.Sprintf("model.layers.%d.mlp.", block)
	for i, p := range l.model.Params {
		v := p.Value.Float32s()
		switch strings.TrimPrefix(p.Name, prefix) {
		case "gate_proj.weight", "up_proj.weight":
			for j := range v {
				v[j] = 1e12 * float32(rand.NormFloat64())
			}
		case "down_proj.weight":
			gradient = p.Name
			clear(v)
		default:
			continue
		}
		if err := l.machine.Upload(l.batch.Params[i]); err != nil {
			return "", err
		}
	}
	return gradient, nil
}

// TestEarlyNonFinite wants a step whose gradients are not finite to say that parameters have been updated, where that shows first, and to
// count; and one whose loss is not finite to change nothing.
func TestEarlyNonFinite(t *testing.T) {
	t.Setenv("KASMINA_WAYS", "")
	device, _, fakeOption := openFake(t, fake.Config{})
	for _, early := range []bool{true, false} {
		for i := range few(4, 1) {
			bandwidth, again := math.Inf(1), i%2 == 1 // another run is asked for meanwhile
			if i > 1 {
				bandwidth = 1e13 // with which some parameters are updated behind the run
			}
			l := newWideLifetime(t)
			opts := []MachineOption{fakeOption, updateEarly, func(c *machineConfig) error { c.late.earlyBandwidth = bandwidth; return nil }}
			if err := l.open(device, opts...); err != nil {
				t.Fatal(err)
			}
			x := l.machine.optimizer
			if behind := x.early.chunks[0]; (behind > 0) == math.IsInf(bandwidth, 1) || behind == x.adamw.Chunks {
				t.Fatalf("%d of %d chunks are updated behind the run", behind, x.adamw.Chunks)
			}
			for range 3 {
				if err := l.step(); err != nil {
					t.Fatal(err)
				}
			}
			block := 2 * rand.IntN(2) // the last one is updated first
			want, err := l.overflow(block)
			if err != nil {
				t.Fatal(err)
			}
			if !early {
				if err := l.poke(18*l.batch.ids[0], float32(math.NaN())); err != nil {
					t.Fatal(err)
				}
			}
			steps := x.steps
			if err := l.machine.RunAll(); err != nil {
				t.Fatal(err)
			}
			loss, norm, err := l.machine.StepWhile(l.batch.Loss, func() {
				if again {
					if err := l.machine.RunAll(); err != nil {
						t.Error(err)
					}
				}
			})
			at, lookErr := l.machine.NonFinite()
			if lookErr != nil {
				t.Fatal(lookErr)
			}
			before := slices.Clone(l.model.Params[5].Value.Float32s())
			if err := l.machine.Download(); err != nil {
				t.Fatal(err)
			}
			changed := !slices.Equal(before, l.model.Params[5].Value.Float32s())
			switch {
			case early && (loss-loss != 0 || norm-norm == 0 || !errors.Is(err, ErrNonFinite) || !errors.Is(err, ErrUpdated) || x.steps != steps+1 || !changed):
				t.Errorf("loss %v, norm %v, error %v, %d steps behind %d, parameters changed: %v", loss, norm, err, x.steps, steps, changed)
			case early && !again && (at == nil || at.Name() != want):
				t.Errorf("the first gradient that is not finite is %v, want that of %s", at, want)
			case !early && (loss-loss == 0 || norm-norm == 0 || err != nil || x.steps != steps || changed):
				t.Errorf("a loss of %v: norm %v, error %v, %d steps behind %d, parameters changed: %v", loss, norm, err, x.steps, steps, changed)
			case !early && at == nil:
				t.Error("with a loss that is not finite, all gradients are")
			}
			if err := l.machine.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestEarlyWhere wants parameters updated in runs only where there are multiprocessors to spare, and nothing else between a gradient and
// its update.
func TestEarlyWhere(t *testing.T) {
	t.Setenv("KASMINA_WAYS", "")
	cases := []struct {
		what       string
		major, sms int
		opt        MachineOption
		optimizer  func() (optim.Optimizer, error)

		planned, early bool
	}{
		{"a Hopper", 9, 132, nil, newAdamW, true, true},
		{"another GPU", 8, 132, nil, newAdamW, false, false},
		{"a smaller Hopper", 9, 114, nil, newAdamW, false, false},
		{"Muon", 9, 132, nil, newMuon, true, false},
		{"sums of gradients", 9, 132, WithAccumulation(), newAdamW, false, false},
		{"a loss scale", 9, 132, scaledGradients, newAdamW, false, false},
		{"runs of which every other one is timed", 9, 132, WithMonitor(2), newAdamW, true, false},
		{"too little to do", 9, 132, func(c *machineConfig) error { c.late.leastEarly = 1 << 30; return nil }, newAdamW, false, false},
		{"too little time", 9, 132, func(c *machineConfig) error { c.late.earlyBandwidth = 1; return nil }, newAdamW, false, false},
	}
	for _, c := range cases[:few(len(cases), 4)] {
		device, _, fakeOption := openFake(t, gpuOf(c.major, c.sms))
		l := newWideLifetime(t)
		var err error
		if l.optimizer, err = c.optimizer(); err != nil {
			t.Fatal(err)
		}
		opts := []MachineOption{fakeOption, updateEarly}
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
		x := l.machine.optimizer
		if early := x.early != nil && x.early.looked; l.machine.program.early != nil != c.planned || early != c.early || x.late != nil {
			t.Errorf("%s: planned: %v, done: %v", c.what, l.machine.program.early != nil, early)
		}
		if err := l.machine.Close(); err != nil {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}

// TestEarlyLimit wants a limit of the norm refused, with what to do, and the machine to go on without.
func TestEarlyLimit(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	l := newWideLifetime(t)
	if err := l.open(device, fakeOption, updateEarly); err != nil {
		t.Fatal(err)
	}
	err := l.machine.SetOptimizer(l.optimizer, 1)
	if err == nil || !strings.Contains(err.Error(), "maxNorm is 1") || !strings.Contains(err.Error(), "WithEarlyUpdates") {
		t.Errorf("a limit: %v", err)
	}
	if err := errors.Join(l.machine.SetOptimizer(l.optimizer, 0), l.step(), l.step(), l.machine.Close()); err != nil {
		t.Error(err)
	}
}

// TestEarlyLossTooLate wants no update in a run whose loss is known only behind the first of them.
func TestEarlyLossTooLate(t *testing.T) {
	t.Setenv("KASMINA_WAYS", "")
	device, _, fakeOption := openFake(t, fake.Config{})
	l := newWideLifetime(t)
	if err := l.open(device, fakeOption, updateEarly); err != nil {
		t.Fatal(err)
	}
	m := l.machine
	m.program.last[m.program.values[l.batch.Loss].block] = m.optimizer.early.split
	for range 3 {
		if err := l.step(); err != nil {
			t.Fatal(err)
		}
		if m.optimizer.early.looked {
			t.Error("parameters were updated before the loss was known")
		}
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

// TestEarlyFirst wants the first update of an optimiser to be behind its run, also where that is in two pieces, since it loads kernels.
func TestEarlyFirst(t *testing.T) {
	t.Setenv("KASMINA_WAYS", "")
	device, _, fakeOption := openFake(t, fake.Config{})
	l := newWideLifetime(t)
	if err := l.open(device, fakeOption, updateEarly); err != nil {
		t.Fatal(err)
	}
	m := l.machine
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		if !m.pending {
			t.Errorf("run %d is not in two pieces", i)
		}
		if _, _, err := m.StepWhile(l.batch.Loss, nil); err != nil {
			t.Fatal(err)
		}
		if early := m.optimizer.early.looked; early != (i > 0) {
			t.Errorf("update %d was early: %v", i, early)
		}
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

// TestEarlyForgetFails wants a machine that cannot send the rest of a run before it takes another optimiser to send it when it is asked again.
func TestEarlyForgetFails(t *testing.T) {
	t.Setenv("KASMINA_WAYS", "")
	for _, call := range []string{"cuStreamBeginCapture", "cuGraphLaunch"} {
		device, cuda, fakeOption := openFake(t, fake.Config{})
		l := newWideLifetime(t)
		if err := l.open(device, fakeOption, updateEarly); err != nil {
			t.Fatal(err)
		}
		m := l.machine
		if err := errors.Join(l.step(), l.step(), m.RunAll()); err != nil {
			t.Fatal(err)
		}
		cuda.Fail(call, 1, driver.OutOfMemory)
		if err := setNew(l, newAdamW); !errors.Is(err, driver.OutOfMemory) {
			t.Errorf("%s: %v", call, err)
		}
		if _, err := m.Value(l.batch.Loss); err != nil || m.pending {
			t.Errorf("%s: the loss behind it: %v", call, err)
		}
		if err := errors.Join(m.RunAll(), setNew(l, newAdamW), l.step(), l.step(), m.Close()); err != nil {
			t.Errorf("%s: %v", call, err)
		}
	}
}
