package cudaops

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/cudaops/internal/update"
	"github.com/kasmina-go/kasmina/internal/cpu/optimizer"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

func newAdamW() (optim.Optimizer, error) {
	return optim.NewAdamW(optim.WithLR(0.01), optim.WithWeightDecay(0.1),
		optim.WithGroup(optim.Vectors, optim.Decay(0), optim.LRScale(2)))
}

func newMuon() (optim.Optimizer, error) {
	return optim.NewMuon(optim.WithLR(0.01), optim.WithWeightDecay(0.1),
		optim.WithAdamW(optim.WithLR(0.003)))
}

// TestUpdate trains a model on both machines, each with an optimiser of its own, moving what is
// known in mid-run from the host to the device, and wants the same losses, parameters and optimiser
// states.
func TestUpdate(t *testing.T) {
	for name, newOptimizer := range map[string]func() (optim.Optimizer, error){"AdamW": newAdamW, "Muon": newMuon} {
		t.Run(name+"/fake", func(t *testing.T) {
			device, _, fakeOption := openFake(t, fake.Config{})
			testUpdate(t, device, newOptimizer, nil, fakeOption)
		})
		t.Run(name+"/apart", func(t *testing.T) {
			device, _, fakeOption := openFake(t, fake.Config{})
			testUpdate(t, device, newOptimizer, []int{1, 3}, fakeOption)
		})
		t.Run(name+"/apart/GPU", func(t *testing.T) {
			testUpdate(t, openGPU(t), newOptimizer, []int{1, 3})
		})
		t.Run(name+"/scaled", func(t *testing.T) {
			device, _, fakeOption := openFake(t, fake.Config{})
			testUpdate(t, device, newOptimizer, nil, fakeOption, scaledGradients)
		})
		t.Run(name+"/GPU", func(t *testing.T) { testUpdate(t, openGPU(t), newOptimizer, nil) })
	}
}

// testUpdate is TestUpdate with the parameters of the given numbers clipped apart from the others.
func testUpdate(t *testing.T, device *Device, newOptimizer func() (optim.Optimizer, error),
	apart []int, opts ...MachineOption) {
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
	groups := make([][]gorgonia.ValueGrad, 2)
	for i, p := range b.Params {
		if !slices.Contains(apart, i) {
			groups[0] = append(groups[0], grads[i])
			continue
		}
		groups[1] = append(groups[1], grads[i])
		opts = append(slices.Clip(opts), WithApart(p))
	}
	const limit = 0.5
	hostStep := func(i uint64, o optim.Optimizer) (loss, norm float64) {
		same.draw(t, seed+i)
		tape.Reset()
		if err := tape.RunAll(); err != nil {
			t.Fatal(err)
		}
		loss = float64(same.Loss.Value().Data().(float32))
		norm, err := autodiff.ClipGlobalNorm(groups[0], limit)
		if err == nil && len(apart) > 0 {
			_, err = autodiff.ClipGlobalNorm(groups[1], limit)
		}
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
	machine, err := NewMachine(device, b.G, append(opts, WithParams(b.Params...),
		WithOutputs(b.Loss))...)
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
			if err := errors.Join(onHost.Forget(p.Name(), 3, 10),
				machine.Forget(p, 3, 10)); err != nil {
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
		if got := float64(v.Data().(float32)); math.Abs(got-loss) > 1e-4*loss ||
			math.Abs(gotNorm-norm) > 1e-3*norm {
			t.Errorf("step %d: loss %v and gradient norm %v, want %v and %v", i,
				got, gotNorm, loss, norm)
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

// TestAccumulation wants the gradients of two runs to add up to the update of their sum, and the
// next update to begin anew.
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
	machine, err := NewMachine(device, b.G, append(opts, WithParams(b.Params...),
		WithAccumulation())...)
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

// TestUpdateRefuses wants an update with gradients that are not finite to change nothing, and clear
// errors before one can be.
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

// TestNonFinite wants each parameter's gradient to be found that is not finite, ahead of an update
// and after it, and the first of two.
func TestNonFinite(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	for name, opts := range map[string][]MachineOption{"plain": nil,
		"gathered": {WithAccumulation()}} {
		l := newLifetime(t, newMuon)
		if err := l.open(device, append(opts, fakeOption)...); err != nil {
			t.Fatal(err)
		}
		m := l.machine
		if _, err := m.NonFinite(); err == nil || !strings.Contains(err.Error(),
			"cudaops.Machine.NonFinite: the machine has not run") {
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
			i := slices.IndexFunc(m.optimizer.Params, func(s *update.Param) bool {
				return s.Input.Node == p
			})
			g := m.optimizer.Params[i].Grad
			bad := gpu.Bytes([]float32{float32(math.Inf(-1))})
			if err := device.ctx.CopyToDevice(g.Ptr().Offset(g.Extent()-4), bad,
				m.runner.Stream); err != nil {
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
	for name, opts := range map[string][]MachineOption{"plain": nil, "float8": {float8Products},
		"gathered": {WithAccumulation()}, "scaled": {scaledGradients}} {
		device, _, fakeOption := openFake(t, fake.Config{})
		before := device.ctx.Stats().DeviceBytes
		_, b := float8Model(t, llm.ForTraining, 3, 32)
		m := newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss},
			append([]MachineOption{fakeOption}, opts...))
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

// TestStepLoss wants a step whose loss is infinite to change nothing, though its gradients are
// finite, and that after it to be made.
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
	// steps are launched one by one at first, and replayed later
	for i, first := range []float32{0, 2, 0, 2, float32(math.NaN()), 1e-3} {
		before, err := m.Value(w)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(gorgonia.Let(x,
			tensor.New(tensor.WithBacking([]float32{first, 1, 0.5}))), m.RunAll()); err != nil {
			t.Fatal(err)
		}
		value, norm, err := m.Step(gorgonia.Nodes{loss, vector}[i/2%2])
		after, fetched := m.Value(w)
		if err != nil || fetched != nil {
			t.Fatal(err, fetched)
		}
		finite := first*3e38-first*3e38 == 0
		if moved := !slices.Equal(flat(t, before), flat(t, after)); moved != finite ||
			(value-value == 0) != finite || (norm-norm == 0) != finite {
			t.Errorf("step %d: loss %v, norm %v, and the parameters change: %v",
				i, value, norm, moved)
		}
		v, err := m.Value(loss)
		if err != nil || math.Float32bits(flat(t, v)[0]) != math.Float32bits(float32(value)) &&
			value == value {
			t.Errorf("step %d: loss %v, want %v, %v", i, value, v, err)
		}
	}
	if _, _, err := m.Step(w); err == nil || !strings.Contains(err.Error(),
		"cudaops.Machine.Step: ") {
		t.Errorf("of something that is no loss: %v", err)
	}
}

// TestNewtonSchulz compares the iteration and its gradient with Gorgonia's machine, on wide, square
// and tall matrices.
func TestNewtonSchulz(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testNewtonSchulz(t, device, 5, 1e-4, fakeOption)
	})
	t.Run("scaled", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testNewtonSchulz(t, device, 3, 1e-4, fakeOption, scaledGradients)
	})
	t.Run("float32", func(t *testing.T) { testNewtonSchulz(t, openGPU(t), few(5, 2), 1e-4) })
	t.Run("bfloat16", func(t *testing.T) {
		testNewtonSchulz(t, openGPU(t), few(2, 1), 5e-2, WithPrecision(BFloat16))
	})
	t.Run("float16", func(t *testing.T) {
		testNewtonSchulz(t, openGPU(t), few(2, 1), 1e-2, WithPrecision(Float16))
	})
}

func testNewtonSchulz(t *testing.T, device *Device, most int, tolerance float64,
	opts ...MachineOption) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	for _, s := range []shape{{1, 9}, {7, 13}, {13, 7}, {11, 11}, {65, 33}} {
		for steps := 1; steps <= most; steps++ {
			t.Run(fmt.Sprint(s, " ", steps), func(t *testing.T) {
				g := gorgonia.NewGraph()
				input := func(name string) *gorgonia.Node {
					values := make([]float32, opbase.Size(s))
					for i := range values {
						values[i] = float32(r.NormFloat64())
					}
					return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(s...),
						tensor.WithBacking(values)), gorgonia.WithName(name))
				}
				x, w := input("x"), input("w")
				y, err := op.NewtonSchulz(x, steps)
				if err != nil {
					t.Fatal(err)
				}
				loss := gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.HadamardProd(y, w))))
				if _, err := gorgonia.Grad(loss, x); err != nil {
					t.Fatal(err)
				}
				m, err := NewMachine(device, g,
					append(opts, WithParams(x), WithOutputs(y), WithStrict())...)
				if err != nil {
					t.Fatal(err)
				}
				defer m.Close()
				tape := gorgonia.NewTapeMachine(g)
				defer tape.Close()
				if err := errors.Join(m.RunAll(), m.RunAll(), tape.RunAll()); err != nil {
					t.Fatal(err)
				}
				// Gorgonia's machine writes other results over y.
				want := make([]float32, opbase.Size(s))
				optimizer.NewtonSchulz(want, flat(t, x.Value()), s[0], s[1], steps)
				for n, want := range map[*gorgonia.Node]gorgonia.Value{y: tensor.New(
					tensor.WithShape(s...), tensor.WithBacking(want)),
					x.Deriv(): x.Deriv().Value()} {
					v, err := m.Value(n)
					if err != nil {
						t.Fatal(err)
					}
					if d := distance(t, v, want); !(d < tolerance) {
						t.Errorf("%v differs by %.2g", n.Op(), d)
					}
				}
			})
		}
	}
}

// iterationWays runs a test in every way of the iteration: on the fake, and on a GPU in bfloat16,
// where only Hopper has them all.
func iterationWays(t *testing.T, test func(t *testing.T, device *Device, way string,
	tolerance float64, opts ...MachineOption)) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	for _, way := range []string{"products", "symmetric", "gram"} {
		rule := WithWays("NewtonSchulz=" + way)
		t.Run("fake/"+way, func(t *testing.T) {
			device, _, fakeOption := openFake(t, fake.Config{})
			test(t, device, way, 1e-3, fakeOption, rule)
		})
		t.Run("bfloat16/"+way, func(t *testing.T) {
			device := openGPU(t)
			if device.info.Capability() != 90 && way != "products" {
				t.Skip("needs a GPU of compute capability 9.0")
			}
			test(t, device, way, 2e-2, rule, WithPrecision(BFloat16), WithTuning(TuneOff))
		})
	}
}

func chose(m *Machine, way string) bool {
	return slices.ContainsFunc(m.Choices(), func(c Choice) bool {
		return c.Op == "NewtonSchulz" && c.Way == way
	})
}

func TestNewtonSchulzWays(t *testing.T) {
	iterationWays(t, func(t *testing.T, device *Device, way string, tolerance float64,
		opts ...MachineOption) {
		seed := rand.Uint64()
		t.Logf("random seed %d", seed)
		r := rand.New(rand.NewPCG(seed, 1))
		for _, s := range []shape{{8, 24}, {16, 72}, {72, 16}, {136, 136}, {24, 1000}} {
			for steps := 1; steps <= few(7, 5); steps++ {
				x := make([]float32, opbase.Size(s))
				for i := range x {
					x[i] = float32(r.NormFloat64())
				}
				g := gorgonia.NewGraph()
				y, err := op.NewtonSchulz(gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(s...),
					tensor.WithBacking(x)), gorgonia.WithName("x")), steps)
				if err != nil {
					t.Fatal(err)
				}
				m, err := NewMachine(device, g, append(opts, WithOutputs(y), WithStrict())...)
				if err != nil {
					t.Fatal(err)
				}
				err = m.RunAll()
				v, valueErr := m.Value(y)
				if err := errors.Join(err, valueErr, m.Close()); err != nil {
					t.Fatal(err)
				}
				want := make([]float32, opbase.Size(s))
				optimizer.NewtonSchulz(want, x, s[0], s[1], steps)
				d := distance(t, v, tensor.New(tensor.WithShape(s...), tensor.WithBacking(want)))
				if !(d < tolerance) || !chose(m, way) {
					t.Errorf("%v, %d steps: differs by %.2g; choices %+v", s, steps, d, m.Choices())
				}
			}
		}
	})
}

// TestNewtonSchulzTuned wants iterations that are worth timing timed in every way, and no others,
// whatever a rule leaves of the ways.
func TestNewtonSchulzTuned(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	for _, c := range []struct {
		shape  shape
		least  float64
		rule   string
		of     int
		source Source
	}{
		{shape{16, 40}, 1, "", 3, Measured},
		{shape{16, 40}, 1e9, "", 3, ByRule},
		{shape{16, 40}, 1e9, "NewtonSchulz!=" + "products", 3, Forced},
		{shape{13, 40}, 1, "", 1, ByRule},
	} {
		t.Setenv("KASMINA_WAYS", c.rule)
		device, _, fakeOption := openFake(t, fake.Config{Devices: smallCache("GPU")})
		g := gorgonia.NewGraph()
		x := tensor.New(tensor.WithShape(c.shape...),
			tensor.WithBacking(tensor.Random(tensor.Float32, opbase.Size(c.shape))))
		y, err := op.NewtonSchulz(gorgonia.NodeFromAny(g, x, gorgonia.WithName("x")), 5)
		if err != nil {
			t.Fatal(err)
		}
		var log bytes.Buffer
		private := func(m *machineConfig) error {
			m.tuneLeast, m.tunePath = c.least, filepath.Join(t.TempDir(), "tune.json")
			return nil
		}
		m, err := NewMachine(device, g, fakeOption, private, WithTuning(TuneCached), WithOutputs(y),
			WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(m.Choices(), func(c Choice) bool { return c.Op == "NewtonSchulz" })
		if got := m.Choices()[i]; got.Of != c.of || got.Source != c.source || log.Len() > 0 {
			t.Errorf("%v, least %g, rule %q: %+v; %s", c.shape, c.least, c.rule, got, log.String())
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestMuonTogether updates matrices of which some have the same shape, and wants what the optimiser
// makes of them on the CPU.
func TestMuonTogether(t *testing.T) {
	iterationWays(t, func(t *testing.T, device *Device, way string, tolerance float64,
		opts ...MachineOption) {
		seed := rand.Uint64()
		t.Logf("random seed %d", seed)
		r := rand.New(rand.NewPCG(seed, 1))
		g := gorgonia.NewGraph()
		var params, terms gorgonia.Nodes
		var start [][]float32
		for i, s := range []shape{{16, 40}, {5, 7}, {16, 40}, {40, 16}, {24, 24},
			{16, 40}, {5, 7}, {40, 16}} {
			input := func(name string) *gorgonia.Node {
				x := make([]float32, opbase.Size(s))
				for i := range x {
					x[i] = float32(r.NormFloat64())
				}
				return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(s...),
					tensor.WithBacking(x)), gorgonia.WithName(name))
			}
			w := input(fmt.Sprint("w", i))
			params = append(params, w)
			start = append(start, slices.Clone(flat(t, w.Value())))
			terms = append(terms,
				gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.HadamardProd(w,
					input(fmt.Sprint("c", i)))))))
		}
		loss := gorgonia.Must(gorgonia.ReduceAdd(terms))
		if _, err := gorgonia.Grad(loss, params...); err != nil {
			t.Fatal(err)
		}
		newOptimizer := func() optim.Optimizer {
			o, err := optim.NewMuon(optim.WithLR(0.1))
			if err != nil {
				t.Fatal(err)
			}
			return o
		}
		m, err := NewMachine(device, g, append(opts, WithParams(params...), WithOutputs(loss))...)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		if err := m.SetOptimizer(newOptimizer(), 0); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := m.RunAll(); err != nil {
				t.Fatal(err)
			}
			if _, err := m.Update(); err != nil {
				t.Fatal(err)
			}
		}
		if err := m.Download(); err != nil {
			t.Fatal(err)
		}
		var got []gorgonia.Value
		for i, p := range params {
			v, err := gorgonia.CloneValue(p.Value())
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, v)
			copy(flat(t, p.Value()), start[i])
		}
		tape, host := gorgonia.NewTapeMachine(g, gorgonia.BindDualValues(params...)), newOptimizer()
		defer tape.Close()
		for range 2 {
			tape.Reset()
			if err := errors.Join(tape.RunAll(),
				host.Step(gorgonia.NodesToValueGrads(params))); err != nil {
				t.Fatal(err)
			}
		}
		for i, p := range params {
			if d := distance(t, got[i], p.Value()); !(d < tolerance) {
				t.Errorf("%v differs by %.2g", p.Shape(), d)
			}
		}
		if !chose(m, way) {
			t.Errorf("choices %+v", m.Choices())
		}
	})
}

// normChain is a loss behind norms of rows of d elements, each of the result of the one before, and
// their weights.
func normChain(t *testing.T, seed uint64, norms, rows, d int, shared bool) (loss *gorgonia.Node,
	weights gorgonia.Nodes) {
	t.Helper()
	g, r := gorgonia.NewGraph(), rand.New(rand.NewPCG(seed, 3))
	values := func(shape ...int) gorgonia.NodeConsOpt {
		x := make([]float32, tensor.Shape(shape).TotalSize())
		for i := range x {
			x[i] = float32(r.NormFloat64())
		}
		return gorgonia.WithValue(tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x)))
	}
	y := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(rows, d),
		gorgonia.WithName("x"), values(rows, d))
	for i := range norms {
		if i == 0 || !shared {
			weights = append(weights, gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(d),
				gorgonia.WithName(fmt.Sprintf("w%d", i)),
				values(d)))
		}
		var err error
		if y, err = op.RMSNorm(y, weights[len(weights)-1], 1e-5); err != nil {
			t.Fatal(err)
		}
	}
	target := gorgonia.NewVector(g, tensor.Int, gorgonia.WithShape(rows),
		gorgonia.WithName("target"),
		gorgonia.WithValue(tensor.New(tensor.WithShape(rows),
			tensor.WithBacking(make([]int, rows)))))
	loss, err := op.CrossEntropy(y, target)
	if err == nil {
		_, err = gorgonia.Grad(loss, weights...)
	}
	if err != nil {
		t.Fatal(err)
	}
	return loss, weights
}

// partsMemory is as much as is kept for later launches.
const partsMemory = 64 << 20

// TestSums wants what passes leave in parts to be added up together, but before a result is needed
// and without keeping too much, and the gradients of a tape machine.
func TestSums(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	// whose parts take so many bytes a column
	pass := norm.RMSNormBackward{D: 1 << 20, Type: gpu.Float32}
	each := pass.WorkspaceBytes(fake.New(fake.Config{}).Devices()[0]) / pass.D
	for _, c := range []struct {
		name           string
		norms, rows, d int
		shared         bool // all norms have the same weights, whose gradients are added up
		opts           []MachineOption
		launches       int
		compiled       bool // and not run
	}{
		{name: "all at once", norms: 5, rows: 4, d: 6, launches: 1},
		{name: "gathered", norms: 5, rows: 4, d: 6, launches: 1,
			opts: []MachineOption{WithAccumulation()}},
		{name: "added up", norms: 4, rows: 4, d: 6, shared: true, launches: 1},
		{name: "much memory", norms: 4, rows: 1, d: partsMemory/each/2 - 64,
			launches: 2, compiled: true},
		{name: "much memory each", norms: 3, rows: 1, d: partsMemory/each + 64,
			launches: 3, compiled: true},
	} {
		check := func(t *testing.T, device *Device, opts ...MachineOption) {
			loss, weights := normChain(t, seed, c.norms, c.rows, c.d, c.shared)
			m, err := NewMachine(device, loss.Graph(), append(append(opts, c.opts...),
				WithParams(weights...), WithOutputs(loss))...)
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			if got := tasksOf(m)["RMSNormWeightGrad"]; got != c.launches {
				t.Errorf("%d launches, want %d", got, c.launches)
			}
			if c.compiled {
				return
			}
			same, want := normChain(t, seed, c.norms, c.rows, c.d, c.shared)
			tape := gorgonia.NewTapeMachine(same.Graph())
			defer tape.Close()
			if err := errors.Join(m.RunAll(), tape.RunAll()); err != nil {
				t.Fatal(err)
			}
			for i, w := range weights {
				if d := distance(t, gathered(t, m, w), want[i].Deriv().Value()); !(d < 1e-4) {
					t.Errorf("the gradient of weights %d differs by %.2g", i, d)
				}
			}
		}
		t.Run(c.name+"/fake", func(t *testing.T) {
			device, _, fakeOption := openFake(t, fake.Config{})
			check(t, device, fakeOption, WithStrict())
		})
		if !c.compiled {
			t.Run(c.name+"/GPU", func(t *testing.T) { check(t, openGPU(t), WithStrict()) })
		}
	}
}

// gathered is the gradient of a parameter, with WithAccumulation as added up over the runs.
func gathered(t *testing.T, m *Machine, p *gorgonia.Node) gorgonia.Value {
	t.Helper()
	var v gorgonia.Value
	var err error
	if sum := m.runner.Program.Sums[p]; sum != nil {
		v, err = m.runner.Fetch(sum, tensor.Float32)
	} else {
		v, err = m.Value(p.Deriv())
	}
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// TestKasminaSumsGathered wants the gradients of slots before they are added to those of other
// runs.
func TestKasminaSumsGathered(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	telemetry, seeds := []state.Telemetry{{Mode: state.Production}, {Mode: state.Off}}, []int{8, 4}
	chain, same := newKasminaChain(t, 1, telemetry, seeds), newKasminaChain(t, 1, telemetry, seeds)
	m, err := NewMachine(device, chain.loss.Graph(), fakeOption, WithStrict(), WithAccumulation(),
		WithParams(chain.params...))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	tape := gorgonia.NewTapeMachine(same.loss.Graph())
	defer tape.Close()
	if err := errors.Join(m.RunAll(), tape.RunAll()); err != nil {
		t.Fatal(err)
	}
	for i, p := range chain.params {
		if d := distance(t, gathered(t, m, p), same.params[i].Deriv().Value()); !(d < 1e-4) {
			t.Errorf("the gradient of %s differs by %.2g", p.Name(), d)
		}
	}
}

// TestKasminaSumsTwice wants two backward passes of one layer not to be ended by one launch, which
// would write figures of both to one place in any order.
func TestKasminaSumsTwice(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	chain := newKasminaChain(t, 1, []state.Telemetry{{Mode: state.Production}}, []int{8})
	g := gradientsOfLayers(chain.loss.Graph())[0]
	var layer *gorgonia.Node
	for _, n := range chain.loss.Graph().AllNodes() {
		if isOp[*op.KasminaOp](n) {
			layer = n
		}
	}
	again, err := layer.Op().(gorgonia.SDOp).SymDiff(graph.Children(layer), layer,
		gorgonia.Must(gorgonia.Add(g, g)))
	if err != nil {
		t.Fatal(err)
	}
	m, err := NewMachine(device, chain.loss.Graph(), fakeOption, WithParams(chain.params...),
		WithOutputs(again[1]))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if n := tasksOf(m); n["KasminaGrad"] != 2 || n["KasminaWeightGrad"] != 2 {
		t.Errorf("%v", n)
	}
}

// summing counts launches that finish Kasmina passes, by how many passes have left something.
type summing struct {
	run.Launcher
	figures, gradients map[int]int
}

func (k *summing) Launch(s gpu.Stream, params any) error {
	switch p := params.(type) {
	case kasmina.MergeRecords:
		k.figures[len(p.All)-count(values(p.All), kasmina.Records{})]++
	case kasmina.SumParts:
		k.gradients[len(p.All)-count(values(p.All), kasmina.Parts{})]++
	}
	return k.Launcher.Launch(s, params)
}

func count[E comparable](all []E, e E) (n int) {
	for _, a := range all {
		if a == e {
			n++
		}
	}
	return n
}

// TestKasminaSums wants the ends of all Kasmina passes to be made together, as far as they measure,
// but by each pass where a monitor times it.
func TestKasminaSums(t *testing.T) {
	production, off := state.Telemetry{Mode: state.Production}, state.Telemetry{Mode: state.Off}
	seeds := []int{8, 4, 2}
	for name, c := range map[string]struct {
		telemetry []state.Telemetry
		figures   int // passes that leave some
		opts      []MachineOption
	}{
		"production": {[]state.Telemetry{production, production, production}, 3, nil},
		"some":       {[]state.Telemetry{production, off, production}, 2, nil},
		"off":        {[]state.Telemetry{off, off, off}, 0, nil},
		"with a monitor": {[]state.Telemetry{production, production, off}, 2,
			[]MachineOption{WithMonitor(2)}},
	} {
		device, _, fakeOption := openFake(t, fake.Config{})
		k, chain := &summing{figures: map[int]int{}, gradients: map[int]int{}},
			newKasminaChain(t, 1, c.telemetry, seeds)
		wrap := withKernels(func(inner run.Launcher) run.Launcher { k.Launcher = inner; return k })
		m, err := NewMachine(device, chain.loss.Graph(),
			append(c.opts, fakeOption, WithParams(chain.params...), wrap)...)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		if n := tasksOf(m); n["KasminaFigures"] != 1 || n["KasminaWeightGrad"] != 1 {
			t.Errorf("%s: %v", name, n)
		}
		for range 5 {
			if err := m.RunAll(); err != nil {
				t.Fatal(err)
			}
		}
		figures, gradients := k.figures[c.figures], k.gradients[len(seeds)]
		if figures < 2 || gradients < 2 { // a run as it is, and a capture
			t.Errorf("%s: %d launches for figures of %d passes, %d for gradients of %d", name,
				figures, c.figures, gradients, len(seeds))
		}
		var apart [2]int
		if c.opts != nil {
			apart = [2]int{k.figures[0], k.gradients[0]}
			if apart != [2]int{1, 1} {
				t.Errorf("%s: launches for nothing: %v", name, apart)
			}
		}
		if n := len(k.figures) + len(k.gradients); n != 2+apart[0]+apart[1] {
			t.Errorf("%s: launches for other numbers of passes: %v, %v", name,
				k.figures, k.gradients)
		}
	}
}
