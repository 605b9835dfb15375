package cudaops

import (
	"errors"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/cudaops/internal/update"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/optim"
)

func newAdamW() (optim.Optimizer, error) {
	return optim.NewAdamW(optim.WithLR(0.01), optim.WithWeightDecay(0.1), optim.WithGroup(optim.Vectors, optim.Decay(0), optim.LRScale(2)))
}

func newMuon() (optim.Optimizer, error) {
	return optim.NewMuon(optim.WithLR(0.01), optim.WithWeightDecay(0.1), optim.WithAdamW(optim.WithLR(0.003)))
}

// TestUpdate trains a model on both machines, each with an optimiser of its own, moving what is known in mid-run from the
// host to the device, and wants the same losses, parameters and optimiser states.
func TestUpdate(t *testing.T) {
	for name, newOptimizer := range map[string]func() (optim.Optimizer, error){"AdamW": newAdamW, "Muon": newMuon} {
		t.Run(name+"/fake", func(t *testing.T) {
			device, _, fakeOption := openFake(t, fake.Config{})
			testUpdate(t, device, newOptimizer, fakeOption)
		})
		t.Run(name+"/scaled", func(t *testing.T) {
			device, _, fakeOption := openFake(t, fake.Config{})
			testUpdate(t, device, newOptimizer, fakeOption, scaledGradients)
		})
		t.Run(name+"/GPU", func(t *testing.T) { testUpdate(t, openGPU(t), newOptimizer) })
	}
}

func testUpdate(t *testing.T, device *Device, newOptimizer func() (optim.Optimizer, error), opts ...MachineOption) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	model, b := newBatch(t, llm.ForTraining, seed)
	sameModel, same := newBatch(t, llm.ForTraining, seed)
	onDevice, err := newOptimizer()
	if err != nil {
		t.Fatal(err)
	}
	onHost, err := newOptimizer()
	if err != nil {
		t.Fatal(err)
	}
	tape := gorgonia.NewTapeMachine(same.G, gorgonia.BindDualValues(same.Params...))
	defer tape.Close()
	grads := gorgonia.NodesToValueGrads(same.Params)
	const limit = 0.5
	hostStep := func(i uint64, o optim.Optimizer) (loss, norm float64) {
		same.draw(t, seed+i)
		tape.Reset()
		if err := tape.RunAll(); err != nil {
			t.Fatal(err)
		}
		loss = float64(same.Loss.Value().Data().(float32))
		norm, err := autodiff.ClipGlobalNorm(grads, limit)
		if err == nil {
			err = o.Step(grads)
		}
		if err != nil {
			t.Fatal(err)
		}
		return loss, norm
	}
	// Three steps on the host: what the device starts from is not empty.
	for i := range uint64(3) {
		hostStep(i, onHost)
	}
	for i, p := range sameModel.Params {
		copy(model.Params[i].Value.Float32s(), p.Value.Float32s())
	}
	if err := onDevice.SetState(onHost.State()); err != nil {
		t.Fatal(err)
	}
	machine, err := NewMachine(device, b.G, append(opts, WithParams(b.Params...), WithOutputs(b.Loss))...)
	if err != nil {
		t.Fatal(err)
	}
	defer machine.Close()
	if err := machine.SetOptimizer(onDevice, limit); err != nil {
		t.Fatal(err)
	}
	for i := uint64(3); i < uint64(few(8, 5)); i++ {
		rate := 0.01 / float64(i)
		if err := errors.Join(onHost.SetLR(rate), onDevice.SetLR(rate)); err != nil {
			t.Fatal(err)
		}
		if i == 4 { // of a part of a matrix
			p := b.Params[1]
			if err := errors.Join(onHost.Forget(p.Name(), 3, 10), machine.Forget(p, 3, 10)); err != nil {
				t.Fatal(err)
			}
		}
		loss, norm := hostStep(i, onHost)
		b.draw(t, seed+i)
		if err := machine.RunAll(); err != nil {
			t.Fatal(err)
		}
		v, err := machine.Value(b.Loss)
		if err != nil {
			t.Fatal(err)
		}
		gotNorm, err := machine.Update()
		if err != nil {
			t.Fatal(err)
		}
		if got := float64(v.Data().(float32)); math.Abs(got-loss) > 1e-4*loss || math.Abs(gotNorm-norm) > 1e-3*norm {
			t.Errorf("step %d: loss %v and gradient norm %v, want %v and %v", i, got, gotNorm, loss, norm)
		}
	}
	// A graph that scores the model uses the parameters where they are.
	score, err := model.Graph(llm.ForLoss, 3)
	if err != nil {
		t.Fatal(err)
	}
	scoring := &batch{Graph: score}
	scoring.draw(t, seed)
	scorer, err := NewMachine(device, score.G, append(opts, WithParamsOf(machine))...)
	if err != nil {
		t.Fatal(err)
	}
	defer scorer.Close()
	if held, all := scorer.Memory(), machine.Memory(); held > all/2+run.WorkspaceBytes {
		t.Errorf("the scoring machine holds %d bytes beside %d", held, all)
	}
	if err := scorer.RunAll(); err != nil {
		t.Fatal(err)
	}
	scored, err := scorer.Value(score.Loss)
	if err != nil {
		t.Fatal(err)
	}
	same.draw(t, seed)
	tape.Reset()
	if err := tape.RunAll(); err != nil {
		t.Fatal(err)
	}
	if d := distance(t, scored, same.Loss.Value()); !(d < 1e-4) {
		t.Errorf("the loss of the updated model differs by %.2g", d)
	}
	if err := machine.Download(); err != nil {
		t.Fatal(err)
	}
	for i, p := range model.Params {
		if d := distance(t, p.Value, sameModel.Params[i].Value); !(d < 1e-4) {
			t.Errorf("parameter %s differs by %.2g", p.Name, d)
		}
	}
	got, want := onDevice.State(), onHost.State()
	if len(got) != len(want) {
		t.Fatalf("the optimiser remembers %d tensors, want %d", len(got), len(want))
	}
	for i, w := range want {
		g := got[i]
		if steps, ok := w.Data.([]int64); ok {
			if g.Name != w.Name || g.Data.([]int64)[0] != steps[0] {
				t.Errorf("%s: %v, want %s: %v", g.Name, g.Data, w.Name, steps)
			}
			continue
		}
		if d := distance(t, asTensor(g), asTensor(w)); g.Name != w.Name || !(d < 1e-3) {
			t.Errorf("%s differs from %s by %.2g", g.Name, w.Name, d)
		}
	}
}

func asTensor(s optim.Tensor) *tensor.Dense {
	return tensor.New(tensor.WithShape(s.Shape...), tensor.WithBacking(s.Data))
}

// TestAccumulation wants the gradients of two runs to add up to the update of their sum, and the next update to begin anew.
func TestAccumulation(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testAccumulation(t, device, fakeOption)
	})
	t.Run("scaled", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testAccumulation(t, device, fakeOption, scaledGradients)
	})
	t.Run("GPU", func(t *testing.T) { testAccumulation(t, openGPU(t)) })
}

func testAccumulation(t *testing.T, device *Device, opts ...MachineOption) {
	const seed = 4
	model, b := newBatch(t, llm.ForTraining, seed)
	sameModel, same := newBatch(t, llm.ForTraining, seed)
	onDevice, err := newAdamW()
	if err != nil {
		t.Fatal(err)
	}
	onHost, err := newAdamW()
	if err != nil {
		t.Fatal(err)
	}
	machine, err := NewMachine(device, b.G, append(opts, WithParams(b.Params...), WithAccumulation())...)
	if err != nil {
		t.Fatal(err)
	}
	defer machine.Close()
	if err := machine.SetOptimizer(onDevice, 0); err != nil {
		t.Fatal(err)
	}
	tape := gorgonia.NewTapeMachine(same.G, gorgonia.BindDualValues(same.Params...))
	defer tape.Close()
	for step := range uint64(few(6, 4)) {
		b.draw(t, step)
		same.draw(t, step)
		tape.Reset()
		if err := errors.Join(machine.RunAll(), tape.RunAll()); err != nil {
			t.Fatal(err)
		}
		if step%2 == 0 {
			continue
		}
		if _, err := machine.Update(); err != nil {
			t.Fatal(err)
		}
		if err := onHost.Step(gorgonia.NodesToValueGrads(same.Params)); err != nil {
			t.Fatal(err)
		}
	}
	if err := machine.Download(); err != nil {
		t.Fatal(err)
	}
	for i, p := range model.Params {
		if d := distance(t, p.Value, sameModel.Params[i].Value); !(d < 1e-4) {
			t.Errorf("parameter %s differs by %.2g", p.Name, d)
		}
	}
}

// TestUpdateRefuses wants an update with gradients that are not finite to change nothing, and clear errors before one can be.
func TestUpdateRefuses(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	model, b := newBatch(t, llm.ForTraining, 1)
	adamw, err := newAdamW()
	if err != nil {
		t.Fatal(err)
	}
	machine, err := NewMachine(device, b.G, fakeOption, WithParams(b.Params...))
	if err != nil {
		t.Fatal(err)
	}
	defer machine.Close()
	wants := func(err error, want string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error that says %q", err, want)
		}
	}
	_, err = machine.Update()
	wants(err, "no optimiser")
	wants(machine.Forget(b.Params[0], 0, 1), "no optimiser")
	wants(machine.SetOptimizer(adamw, -1), "maxNorm")
	wants(machine.SetOptimizer(nil, 0), "no kernels")
	if err := machine.SetOptimizer(adamw, 1); err != nil {
		t.Fatal(err)
	}
	if held := machine.Memory(); machine.SetOptimizer(adamw, 1) != nil || machine.Memory() != held {
		t.Errorf("an optimiser in the place of another takes %d bytes more", machine.Memory()-held)
	}
	_, err = machine.Update()
	wants(err, "has not run")
	wants(machine.Forget(b.Params[0], 2, 1), "elements 2 to 1")
	wants(machine.Forget(b.Params[0], 0, b.Params[0].Shape().TotalSize()+1), "which has")
	wants(machine.Forget(b.Loss, 0, 1), "no parameter")
	wants(machine.Forget(nil, 0, 1), "nil")
	model.Params[2].Value.Float32s()[3] = float32(math.Inf(1))
	if err := machine.Upload(b.Params[2]); err != nil {
		t.Fatal(err)
	}
	if err := machine.RunAll(); err != nil {
		t.Fatal(err)
	}
	before := append([]float32(nil), model.Params[0].Value.Float32s()...)
	if _, err := machine.Update(); !errors.Is(err, ErrNonFinite) {
		t.Errorf("got %v, want ErrNonFinite", err)
	}
	if err := machine.Download(); err != nil {
		t.Fatal(err)
	}
	for i, v := range model.Params[0].Value.Float32s() {
		if v != before[i] {
			t.Fatal("an update that was refused has changed a parameter")
		}
	}
	if s := adamw.State(); len(s) != 0 {
		t.Errorf("an update that was refused is remembered: %v", s)
	}
}

// TestNonFinite wants each parameter's gradient to be found that is not finite, ahead of an update and after it, and the first of two.
func TestNonFinite(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	for name, opts := range map[string][]MachineOption{"plain": nil, "gathered": {WithAccumulation()}} {
		l := newLifetime(t, newMuon)
		if err := l.open(device, append(opts, fakeOption)...); err != nil {
			t.Fatal(err)
		}
		m := l.machine
		if _, err := m.NonFinite(); err == nil || !strings.Contains(err.Error(), "cudaops.Machine.NonFinite: the machine has not run") {
			t.Errorf("%s: before a run: %v", name, err)
		}
		check := func(what string, want *gorgonia.Node) {
			t.Helper()
			if got, err := m.NonFinite(); got != want || err != nil {
				t.Errorf("%s, %s: got %v, %v, want %v", name, what, got, err, want)
			}
		}
		spoil := func(p *gorgonia.Node) {
			t.Helper()
			i := slices.IndexFunc(m.optimizer.Params, func(s *update.Param) bool { return s.Input.Node == p })
			g := m.optimizer.Params[i].Grad
			bad := gpu.Bytes([]float32{float32(math.Inf(-1))})
			if err := device.ctx.CopyToDevice(g.Ptr().Offset(g.Extent()-4), bad, m.runner.Stream); err != nil {
				t.Fatal(err)
			}
		}
		for i, p := range l.batch.Params {
			if err := m.RunAll(); err != nil {
				t.Fatal(err)
			}
			check("a run", nil)
			if i == 0 {
				if _, err := m.Update(); err != nil {
					t.Fatal(err)
				}
				check("after an update that was made", nil)
				if err := m.RunAll(); err != nil {
					t.Fatal(err)
				}
			}
			spoil(p)
			if i > 0 && i+1 < len(l.batch.Params) {
				spoil(l.batch.Params[i+1])
			}
			if i%2 == 0 {
				check("ahead of an update", p)
			}
			if _, err := m.Update(); !errors.Is(err, ErrNonFinite) {
				t.Errorf("%s: the update: %v", name, err)
			}
			check("after an update", p)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestMemory wants a machine to tell of all memory that it holds on the device.
func TestMemory(t *testing.T) {
	for name, opts := range map[string][]MachineOption{"plain": nil, "float8": {float8Products}, "gathered": {WithAccumulation()}, "scaled": {scaledGradients}} {
		device, _, fakeOption := openFake(t, fake.Config{})
		before := device.ctx.Stats().DeviceBytes
		_, b := float8Model(t, llm.ForTraining, 3, 32)
		m := newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss}, append([]MachineOption{fakeOption}, opts...))
		check := func(what string) {
			t.Helper()
			if held, told := int(device.ctx.Stats().DeviceBytes-before), m.Memory(); held != told {
				t.Errorf("%s, %s: it holds %d bytes and tells of %d", name, what, held, told)
			}
		}
		check("without an optimiser")
		for _, newOptimizer := range []func() (optim.Optimizer, error){newMuon, newAdamW} {
			o, err := newOptimizer()
			if err == nil {
				err = errors.Join(m.SetOptimizer(o, 1), m.RunAll())
			}
			if err == nil {
				_, err = m.Update()
			}
			if err != nil {
				t.Fatal(err)
			}
			check(reflect.TypeOf(o).String())
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
		value, norm, err := m.Step(gorgonia.Nodes{loss, vector}[i/2%2])
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
	if _, _, err := m.Step(w); err == nil || !strings.Contains(err.Error(), "cudaops.Machine.Step: ") {
		t.Errorf("of something that is no loss: %v", err)
	}
}
