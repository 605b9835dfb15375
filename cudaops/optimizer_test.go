package cudaops

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/comm/loopback"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	tables "github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/cudaops/internal/update"
	"github.com/kasmina-go/kasmina/internal/cpu/optimizer"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/optime"
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

// newLion returns Lion with small steps. If an element's interpolated gradient is close to zero, two
// machines may disagree about its sign.
func newLion() (optim.Optimizer, error) {
	return optim.NewLion(optim.WithLR(0.01), optim.WithWeightDecay(0.1),
		optim.WithGroup(optim.Vectors, optim.Decay(0), optim.LRScale(0.004)),
		optim.WithGroup(optim.NameContains(""), optim.LRScale(0.002)))
}

// newAdamW8bit returns AdamW with eight-bit moments for all parameters but the smallest.
func newAdamW8bit() (optim.Optimizer, error) {
	return optim.NewAdamW8bit(optim.WithLR(0.01), optim.WithWeightDecay(0.1), optim.WithEps(1e-6),
		optim.WithMin8bitSize(40),
		optim.WithFloatMomentsFor(func(string, []int) bool { return false }),
		optim.WithGroup(optim.Vectors, optim.Decay(0), optim.LRScale(2)))
}

var optimizers = map[string]func() (optim.Optimizer, error){"AdamW": newAdamW, "Muon": newMuon,
	"Lion": newLion, "AdamW8bit": newAdamW8bit}

// TestUpdate trains a model on a Machine and on the tape machine, each with its own optimizer, and
// compares losses, parameters and optimizer states. After several steps on the host, the optimizer state
// is moved to the device.
func TestUpdate(t *testing.T) {
	for name, newOptimizer := range optimizers {
		t.Run(name+"/fake", func(t *testing.T) {
			device, _ := openFake(t, fake.Config{})
			testUpdate(t, device, newOptimizer, nil)
		})
		t.Run(name+"/separate", func(t *testing.T) {
			device, _ := openFake(t, fake.Config{})
			testUpdate(t, device, newOptimizer, []int{1, 3})
		})
		t.Run(name+"/separate/GPU", func(t *testing.T) {
			testUpdate(t, openGPU(t), newOptimizer, []int{1, 3})
		})
		t.Run(name+"/scaled", func(t *testing.T) {
			device, _ := openFake(t, fake.Config{})
			testUpdate(t, device, newOptimizer, nil, scaledGradients)
		})
		t.Run(name+"/GPU", func(t *testing.T) { testUpdate(t, openGPU(t), newOptimizer, nil) })
	}
}

// testUpdate is TestUpdate with the parameters at the given indices clipped separately.
func testUpdate(t *testing.T, device *Device, newOptimizer func() (optim.Optimizer, error),
	separate []int, opts ...MachineOption) {
	seed := randomSeed(t)
	model, b := newBatch(t, llm.ForTraining, seed)
	sameModel, same := newBatch(t, llm.ForTraining, seed)
	onDevice, err := newOptimizer()
	require.NoError(t, err)
	onHost, err := newOptimizer()
	require.NoError(t, err)
	tape := tapeMachine(t, same.G, gorgonia.BindDualValues(same.Params...))
	grads := gorgonia.NodesToValueGrads(same.Params)
	groups := make([][]gorgonia.ValueGrad, 2)
	training := slices.Clip(opts)
	for i, p := range b.Params {
		if !slices.Contains(separate, i) {
			groups[0] = append(groups[0], grads[i])
			continue
		}
		groups[1] = append(groups[1], grads[i])
		training = append(training, WithSeparateClipping(p))
	}

	const limit = 0.5
	hostStep := func(i uint64, o optim.Optimizer) (loss, norm float64) {
		same.draw(t, seed+i)
		tape.Reset()
		require.NoError(t, tape.RunAll())
		loss = float64(same.Loss.Value().Data().(float32))
		norm, err := autodiff.ClipGlobalNorm(groups[0], limit)
		if err == nil && len(separate) > 0 {
			_, err = autodiff.ClipGlobalNorm(groups[1], limit)
		}
		if err == nil {
			err = o.Step(grads)
		}
		require.NoError(t, err)
		return loss, norm
	}

	// With three steps on the host, the device starts from a nonempty state.
	for i := range uint64(3) {
		hostStep(i, onHost)
	}

	for i, p := range sameModel.Params {
		copy(model.Params[i].Value.Float32s(), p.Value.Float32s())
	}

	require.NoError(t, onDevice.SetState(onHost.State()))
	machine := openMachine(t, device, b.G, append(training, WithParams(b.Params...),
		WithOutputs(b.Loss))...)
	require.NoError(t, machine.SetOptimizer(onDevice, limit))
	for i := uint64(3); i < uint64(few(8, 5)); i++ {
		rate := 0.01 / float64(i)
		require.NoError(t, errors.Join(onHost.SetLR(rate), onDevice.SetLR(rate)))
		if i == 4 { // of a part of a matrix
			p := b.Params[1]
			require.NoError(t, errors.Join(onHost.Forget(p.Name(), 3, 10),
				machine.Forget(p, 3, 10)))
		}
		loss, norm := hostStep(i, onHost)
		b.draw(t, seed+i)
		require.NoError(t, machine.RunAll())
		v := valueIn(t, machine, b.Loss)
		gotNorm, err := machine.Update()
		require.NoError(t, err)
		require.LessOrEqual(t, math.Abs(float64(v.Data().(float32))-loss), 1e-4*loss, i)
		require.LessOrEqual(t, math.Abs(gotNorm-norm), 1e-3*norm, i)
	}

	// A graph that scores the model shares the parameters.
	score, err := model.Graph(llm.ForLoss, 3)
	require.NoError(t, err)
	scoring := &batch{Graph: score}
	scoring.draw(t, seed)
	scorer := openMachine(t, device, score.G, append(opts, WithParamsOf(machine))...)
	require.LessOrEqual(t, scorer.Memory(), machine.Memory()/2+run.WorkspaceBytes)
	require.NoError(t, scorer.RunAll())
	scored := valueIn(t, scorer, score.Loss)
	same.draw(t, seed)
	tape.Reset()
	require.NoError(t, tape.RunAll())
	require.Less(t, distance(t, scored, same.Loss.Value()), 1e-4)
	require.NoError(t, machine.Download())
	got, want := onDevice.State(), onHost.State()

	// If gradients differ by rounding, a moment halfway between two codes may get a different code, and
	// the parameter's next steps differ by a few percent.
	tolerance := 1e-4
	if slices.ContainsFunc(want, func(s optim.Tensor) bool { _, ok := s.Data.([]uint8); return ok }) {
		tolerance = 1e-2
	}

	for i, p := range model.Params {
		require.Less(t, distance(t, p.Value, sameModel.Params[i].Value), tolerance, p.Name)
	}

	require.Len(t, got, len(want))
	for i, w := range want {
		g := got[i]
		if steps, ok := w.Data.([]int64); ok {
			require.Equal(t, w.Name, g.Name)
			require.Equal(t, steps[0], g.Data.([]int64)[0])
			continue
		}
		require.Equal(t, w.Name, g.Name)
		require.Less(t, distance(t, asTensor(g), asTensor(w)), 10*tolerance)
	}
}

// TestSeparateClippingOfAll checks that WithSeparateClipping for all parameters clips them together.
func TestSeparateClippingOfAll(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	seed := randomSeed(t)
	var norms []float64
	var values [][][]float32
	for _, separate := range []bool{false, true} {
		_, b := newBatch(t, llm.ForTraining, seed)
		b.draw(t, seed)
		opts := []MachineOption{WithParams(b.Params...)}
		if separate {
			opts = append(opts, WithSeparateClipping(b.Params...))
		}
		m := openMachine(t, device, b.G, opts...)
		o, err := newAdamW()
		require.NoError(t, err)
		require.NoError(t, errors.Join(m.SetOptimizer(o, 0.1), m.RunAll()))
		norm, err := m.Update()
		require.NoError(t, err)
		require.Greater(t, norm, 0.1, "nothing is clipped")
		norms, values = append(norms, norm), append(values, numbersOf(t, m, b.Params))
	}

	require.Equal(t, norms[0], norms[1])
	require.Equal(t, values[0], values[1])
}

func asTensor(s optim.Tensor) *tensor.Dense {
	if codes, ok := s.Data.([]uint8); ok {
		numbers := make([]float32, len(codes))
		for i, c := range codes {
			numbers[i] = float32(c)
		}
		s.Data = numbers
	}
	return tensor.New(tensor.WithShape(s.Shape...), tensor.WithBacking(s.Data))
}

// TestAccumulation checks that an update applies the sum of the gradients of two runs, and that the next
// update starts with new sums.
func TestAccumulation(t *testing.T) {
	onEach(t, testAccumulation, exactly("fake", "scaled", "float32"))
}

func testAccumulation(t *testing.T, device *Device, _ float64, opts ...MachineOption) {
	const seed = 4
	model, b := newBatch(t, llm.ForTraining, seed)
	sameModel, same := newBatch(t, llm.ForTraining, seed)
	onDevice, err := newAdamW()
	require.NoError(t, err)
	onHost, err := newAdamW()
	require.NoError(t, err)
	machine := openMachine(t, device, b.G, append(opts, WithParams(b.Params...),
		WithAccumulation())...)
	require.NoError(t, machine.SetOptimizer(onDevice, 0))
	tape := tapeMachine(t, same.G, gorgonia.BindDualValues(same.Params...))
	for step := range uint64(few(6, 4)) {
		b.draw(t, step)
		same.draw(t, step)
		tape.Reset()
		require.NoError(t, errors.Join(machine.RunAll(), tape.RunAll()))
		if step%2 == 0 {
			continue
		}
		require.NoError(t, errOf(machine.Update()))
		require.NoError(t, onHost.Step(gorgonia.NodesToValueGrads(same.Params)))
	}

	require.NoError(t, machine.Download())
	for i, p := range model.Params {
		require.Less(t, distance(t, p.Value, sameModel.Params[i].Value), 1e-4, p.Name)
	}
}

// TestUpdateRefuses checks that an update with gradients that are not finite changes nothing, and checks
// the errors before an update is possible.
func TestUpdateRefuses(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	model, b := newBatch(t, llm.ForTraining, 1)
	adamw, err := newAdamW()
	require.NoError(t, err)
	machine := openMachine(t, device, b.G, WithParams(b.Params...))
	wants := func(err error, want string) {
		t.Helper()
		require.ErrorContains(t, err, want)
	}
	_, err = machine.Update()
	wants(err, "no optimizer")
	wants(machine.Forget(b.Params[0], 0, 1), "no optimizer")
	wants(machine.SetOptimizer(adamw, -1), "maxNorm")
	wants(machine.SetOptimizer(nil, 0), "does not declare its rules")
	require.NoError(t, machine.SetOptimizer(adamw, 1))
	held := machine.Memory()
	require.NoError(t, machine.SetOptimizer(adamw, 1))
	require.Equal(t, held, machine.Memory(), "a new optimizer does not release the old one")
	_, err = machine.Update()
	wants(err, "has not run")
	wants(machine.Forget(b.Params[0], 2, 1), "elements 2 to 1")
	wants(machine.Forget(b.Params[0], 0, b.Params[0].Shape().TotalSize()+1), "which has")
	wants(machine.Forget(b.Loss, 0, 1), "no parameter")
	wants(machine.Forget(nil, 0, 1), "nil")
	model.Params[2].Value.Float32s()[3] = float32(math.Inf(1))
	require.NoError(t, machine.Upload(b.Params[2]))
	require.NoError(t, machine.RunAll())
	before := append([]float32(nil), model.Params[0].Value.Float32s()...)
	require.ErrorIs(t, errOf(machine.Update()), ErrNonFinite)
	require.NoError(t, machine.Download())
	require.Equal(t, before, model.Params[0].Value.Float32s(), "a failed update has changed a parameter")
	require.Empty(t, adamw.State())
}

// TestNonFinite checks that NonFinite finds each parameter with a bad gradient, before and after an
// update, and the first one if there are two.
func TestNonFinite(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	for name, opts := range map[string][]MachineOption{"plain": nil,
		"gathered": {WithAccumulation()}} {
		l := newLifetime(t, newMuon)
		require.NoError(t, l.open(device, opts...))
		m := l.machine
		require.ErrorContains(t, errOf(m.NonFinite()),
			"cudaops.Machine.NonFinite: the machine has not run", name)
		check := func(what string, want *gorgonia.Node) {
			t.Helper()
			got, err := m.NonFinite()
			require.NoError(t, err)
			require.True(t, got == want, "%s, %s: got %v, want %v", name, what, got, want)
		}
		spoil := func(p *gorgonia.Node) {
			t.Helper()
			i := slices.IndexFunc(m.optimizer.Params, func(s *update.Param) bool {
				return s.Input.Node == p
			})
			g := m.optimizer.Params[i].Grad
			bad := gpu.Bytes([]float32{float32(math.Inf(-1))})
			require.NoError(t, device.ctx.CopyToDevice(g.Ptr().Offset(g.Extent()-4), bad,
				m.runner.Stream))
		}
		for i, p := range l.batch.Params {
			require.NoError(t, m.RunAll())
			check("a run", nil)
			if i == 0 {
				require.NoError(t, errOf(m.Update()))
				check("after a successful update", nil)
				require.NoError(t, m.RunAll())
			}
			spoil(p)
			if i > 0 && i+1 < len(l.batch.Params) {
				spoil(l.batch.Params[i+1])
			}
			if i%2 == 0 {
				check("before an update", p)
			}
			require.ErrorIs(t, errOf(m.Update()), ErrNonFinite, name)
			check("after an update", p)
		}
		require.NoError(t, m.Close())
	}
}

// TestMemory checks that Memory includes all memory that a machine holds on the device.
func TestMemory(t *testing.T) {
	for name, opts := range map[string][]MachineOption{"plain": nil, "float8": {float8Products},
		"gathered": {WithAccumulation()}, "scaled": {scaledGradients}} {
		device, _ := openFake(t, fake.Config{})
		before, _, err := device.Memory()
		require.NoError(t, err)
		_, b := float8Model(t, llm.ForTraining, 3, 32)
		m := newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss},
			opts)
		check := func(what string) {
			t.Helper()
			free, _, err := device.Memory()
			require.NoError(t, err)
			require.Equal(t, int(before-free), m.Memory(), "%s, %s", name, what)
		}
		check("without an optimizer")
		for _, newOptimizer := range []func() (optim.Optimizer, error){newMuon, newAdamW} {
			o, err := newOptimizer()
			if err == nil {
				err = errors.Join(m.SetOptimizer(o, 1), m.RunAll())
			}
			if err == nil {
				_, err = m.Update()
			}
			require.NoError(t, err)
			check(reflect.TypeOf(o).String())
		}
	}
}

// TestStepLoss checks that a step with an infinite loss changes nothing, even if the gradients are
// finite, and that the following steps work.
func TestStepLoss(t *testing.T) {
	onEach(t, testStepLoss, exactly("fake", "scaled", "float32"))
}

func testStepLoss(t *testing.T, device *Device, _ float64, opts ...MachineOption) {
	g := gorgonia.NewGraph()
	w := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithName("w"), gorgonia.WithShape(3),
		gorgonia.WithValue(tensor.New(tensor.WithBacking([]float32{3e38, 1, 2}))))
	x := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithName("x"), gorgonia.WithShape(3))
	loss := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.HadamardProd(w, x))))
	vector := gorgonia.Must(gorgonia.Reshape(loss, tensor.Shape{1}))
	require.NoError(t, errOf(gorgonia.Grad(loss, w)))
	m := openMachine(t, device, g, append(opts, WithParams(w), WithOutputs(loss, vector))...)
	optimize(t, m, newAdamW, 0)
	// the first steps are enqueued, and the later ones replayed
	for i, first := range []float32{0, 2, 0, 2, float32(math.NaN()), 1e-3} {
		before := valueIn(t, m, w)
		require.NoError(t, errors.Join(gorgonia.Let(x,
			tensor.New(tensor.WithBacking([]float32{first, 1, 0.5}))), m.RunAll()))
		scale := m.LossScale().Scale
		value, norm, err := m.Step(gorgonia.Nodes{loss, vector}[i/2%2])
		after, fetched := m.Value(w)
		require.NoError(t, errors.Join(err, fetched))
		finite := first*3e38-first*3e38 == 0
		require.Equal(t, finite, !slices.Equal(flat(t, before), flat(t, after)))
		require.Equal(t, finite, value-value == 0)
		require.Equal(t, finite, norm-norm == 0)
		if !finite && scale > 1 {
			scale /= 2
		}
		require.Equal(t, scale, m.LossScale().Scale)
		v, err := m.Value(loss)
		if err != nil || math.Float32bits(flat(t, v)[0]) != math.Float32bits(float32(value)) &&
			value == value {
			t.Errorf("step %d: loss %v, want %v, %v", i, value, v, err)
		}
	}

	_, _, err := m.Step(w) // w is not a loss
	require.ErrorContains(t, err, "cudaops.Machine.Step: ")
}

// TestNewtonSchulz compares the iteration and its gradient with the tape machine, for wide, square and
// tall matrices.
func TestNewtonSchulz(t *testing.T) {
	onEach(t, testNewtonSchulz, map[string]float64{"fake": 1e-4, "scaled": 1e-4, "float32": 1e-4,
		"bfloat16": 5e-2, "float16": 1e-2})
}

func testNewtonSchulz(t *testing.T, device *Device, tolerance float64, opts ...MachineOption) {
	most := few(5, 2)
	if tolerance > 1e-4 { // the error grows with the steps
		most = 2
	}

	seed := randomSeed(t)
	r := rand.New(rand.NewPCG(seed, 1))
	for _, s := range []shape{{1, 9}, {7, 13}, {13, 7}, {11, 11}, {65, 33}} {
		for steps := 1; steps <= most; steps++ {
			t.Run(fmt.Sprint(s, " ", steps), func(t *testing.T) {
				g := gorgonia.NewGraph()
				x, w := randomNode(g, r, 1, "x", s...), randomNode(g, r, 1, "w", s...)
				y, err := op.NewtonSchulz(x, steps)
				require.NoError(t, err)
				loss := gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.HadamardProd(y, w))))
				require.NoError(t, errOf(gorgonia.Grad(loss, x)))
				m := openMachine(t, device, g,
					append(opts, WithParams(x), WithOutputs(y), WithStrict())...)
				tape := tapeMachine(t, g)
				require.NoError(t, errors.Join(m.RunAll(), m.RunAll(), tape.RunAll()))
				// The tape machine overwrites y.
				want := make([]float32, opbase.Size(s))
				optimizer.NewtonSchulz(want, flat(t, x.Value()), s[0], s[1], steps)
				for n, want := range map[*gorgonia.Node]gorgonia.Value{y: tensor.New(
					tensor.WithShape(s...), tensor.WithBacking(want)),
					x.Deriv(): x.Deriv().Value()} {
					require.Less(t, distance(t, valueIn(t, m, n), want), tolerance, n.Op())
				}
			})
		}
	}
}

// iterationVariants runs a test in every variant of the iteration, on the fake driver and in bfloat16 on
// a GPU. Only Hopper GPUs have all variants.
func iterationVariants(t *testing.T, test func(t *testing.T, device *Device, variant string,
	tolerance float64, opts ...MachineOption)) {
	clearChoiceVariables(t)
	for _, variant := range []string{"products", "symmetric", "gram"} {
		rule := WithVariants("NewtonSchulz=" + variant)
		t.Run("fake/"+variant, func(t *testing.T) {
			device, _ := openFake(t, fake.Config{})
			test(t, device, variant, 1e-3, rule)
		})
		t.Run("bfloat16/"+variant, func(t *testing.T) {
			device := openGPU(t)
			if device.info.Capability() != 90 && variant != "products" {
				t.Skip("needs a GPU of compute capability 9.0")
			}
			test(t, device, variant, 2e-2, rule, WithPrecision(BFloat16), WithTuning(TuneOff))
		})
	}
}

func TestNewtonSchulzVariants(t *testing.T) {
	iterationVariants(t, func(t *testing.T, device *Device, variant string, tolerance float64,
		opts ...MachineOption) {
		seed := randomSeed(t)
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
				require.NoError(t, err)
				m, err := NewMachine(device, g, append(opts, WithOutputs(y), WithStrict())...)
				require.NoError(t, err)
				err = m.RunAll()
				v, valueErr := m.Value(y)
				require.NoError(t, errors.Join(err, valueErr, m.Close()))
				want := make([]float32, opbase.Size(s))
				optimizer.NewtonSchulz(want, x, s[0], s[1], steps)
				d := distance(t, v, tensor.New(tensor.WithShape(s...), tensor.WithBacking(want)))
				require.Less(t, d, tolerance, "%v, %d steps", s, steps)
				require.Equal(t, variant, variantOf(m, "NewtonSchulz"))
			}
		}
	})
}

// TestNewtonSchulzTuned checks that an iteration is timed in all variants if and only if it is worth
// timing, also if a rule excludes some variants.
func TestNewtonSchulzTuned(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	for _, c := range []struct {
		shape  shape
		least  float64
		rule   string
		of     int
		source optime.Source
	}{
		{shape{16, 40}, 1, "", 3, Measured},
		{shape{16, 40}, 1e9, "", 3, ByRule},
		{shape{16, 40}, 1e9, "NewtonSchulz!=" + "products", 3, Forced},
		{shape{13, 40}, 1, "", 1, ByRule},
	} {
		t.Setenv("KASMINA_VARIANTS", c.rule)
		device, _ := openFake(t, fake.Config{Devices: smallCache("GPU")})
		g := gorgonia.NewGraph()
		x := tensor.New(tensor.WithShape(c.shape...),
			tensor.WithBacking(tensor.Random(tensor.Float32, opbase.Size(c.shape))))
		y, err := op.NewtonSchulz(gorgonia.NodeFromAny(g, x, gorgonia.WithName("x")), 5)
		require.NoError(t, err)
		var log bytes.Buffer
		m := openMachine(t, device, g, timedWithNewFile(t, c.least),
			WithTuning(TuneCached), WithOutputs(y), logTo(&log))
		i := slices.IndexFunc(m.Choices(), func(c optime.Choice) bool { return c.Op == "NewtonSchulz" })
		if got := m.Choices()[i]; got.Of != c.of || got.Source != c.source || log.Len() > 0 {
			t.Errorf("%v, least %g, rule %q: %+v; %s", c.shape, c.least, c.rule, got, log.String())
		}
	}
}

// TestMuonTogether updates matrices that share shapes, and compares the results with the optimizer on the
// CPU.
func TestMuonTogether(t *testing.T) {
	iterationVariants(t, func(t *testing.T, device *Device, variant string, tolerance float64,
		opts ...MachineOption) {
		seed := randomSeed(t)
		r := rand.New(rand.NewPCG(seed, 1))
		g := gorgonia.NewGraph()
		var params, terms gorgonia.Nodes
		var start [][]float32
		for i, s := range []shape{{16, 40}, {5, 7}, {16, 40}, {40, 16}, {24, 24},
			{16, 40}, {5, 7}, {40, 16}} {
			w := randomNode(g, r, 1, fmt.Sprint("w", i), s...)
			params = append(params, w)
			start = append(start, slices.Clone(flat(t, w.Value())))
			terms = append(terms,
				gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.HadamardProd(w,
					randomNode(g, r, 1, fmt.Sprint("c", i), s...))))))
		}
		loss := gorgonia.Must(gorgonia.ReduceAdd(terms))
		require.NoError(t, errOf(gorgonia.Grad(loss, params...)))
		newOptimizer := func() optim.Optimizer {
			o, err := optim.NewMuon(optim.WithLR(0.1))
			require.NoError(t, err)
			return o
		}
		m := openMachine(t, device, g, append(opts, WithParams(params...), WithOutputs(loss))...)
		require.NoError(t, m.SetOptimizer(newOptimizer(), 0))
		for range 2 {
			step(t, m)
		}
		require.NoError(t, m.Download())
		var got []gorgonia.Value
		for i, p := range params {
			v, err := gorgonia.CloneValue(p.Value())
			require.NoError(t, err)
			got = append(got, v)
			copy(flat(t, p.Value()), start[i])
		}
		tape, host := gorgonia.NewTapeMachine(g, gorgonia.BindDualValues(params...)), newOptimizer()
		defer tape.Close()
		for range 2 {
			tape.Reset()
			require.NoError(t, errors.Join(tape.RunAll(),
				host.Step(gorgonia.NodesToValueGrads(params))))
		}
		for i, p := range params {
			require.Less(t, distance(t, got[i], p.Value()), tolerance, p.Shape())
		}
		require.Equal(t, variant, variantOf(m, "NewtonSchulz"))
	})
}

// normChain returns a loss of several norms of rows with d elements, each applied to the result of the
// previous one, and the norms' weights.
func normChain(t *testing.T, seed uint64, norms, rows, d int, shared bool) (loss *gorgonia.Node,
	weights gorgonia.Nodes) {
	t.Helper()
	g, r := gorgonia.NewGraph(), rand.New(rand.NewPCG(seed, 3))
	y := randomNode(g, r, 1, "x", rows, d)
	for i := range norms {
		if i == 0 || !shared {
			weights = append(weights, randomNode(g, r, 1, fmt.Sprintf("w%d", i), d))
		}
		y = gorgonia.Must(op.RMSNorm(y, weights[len(weights)-1], 1e-5))
	}

	target := intNode(g, "target", make([]int, rows))
	loss = gorgonia.Must(op.CrossEntropy(y, target))
	require.NoError(t, errOf(gorgonia.Grad(loss, weights...)))
	return loss, weights
}

// TestNorms compares the gradients of norms' weights with the tape machine, also with accumulation over
// runs, and with weights shared by several norms.
func TestNorms(t *testing.T) {
	seed := randomSeed(t)
	for name, c := range map[string]struct {
		shared bool
		opts   []MachineOption
	}{
		"plain": {}, "shared": {shared: true},
		"gathered": {opts: []MachineOption{WithAccumulation()}},
	} {
		t.Run(name, func(t *testing.T) {
			onEach(t, func(t *testing.T, device *Device, tolerance float64, opts ...MachineOption) {
				loss, weights := normChain(t, seed, 5, 4, 6, c.shared)
				m := openMachine(t, device, loss.Graph(), append(append(opts, c.opts...),
					WithStrict(), WithParams(weights...), WithOutputs(loss))...)
				same, want := normChain(t, seed, 5, 4, 6, c.shared)
				tape := tapeMachine(t, same.Graph())
				require.NoError(t, errors.Join(m.RunAll(), tape.RunAll()))
				for i, w := range weights {
					require.Less(t, distance(t, gathered(t, m, w), want[i].Deriv().Value()),
						tolerance, i)
				}
			}, map[string]float64{"fake": 1e-4, "float32": 1e-4})
		})
	}
}

// gathered returns the gradient of a parameter, or the accumulated gradient with WithAccumulation.
func gathered(t *testing.T, m *Machine, p *gorgonia.Node) gorgonia.Value {
	t.Helper()
	var v gorgonia.Value
	var err error
	if sum := m.runner.Program.Sums[p]; sum != nil {
		v, err = m.runner.Fetch(sum, 1)
	} else {
		v, err = m.Value(p.Deriv())
	}
	require.NoError(t, err)
	return v
}

// TestKasminaGathered checks that the gradients of slots are complete before they are added to the
// accumulated gradients.
func TestKasminaGathered(t *testing.T) {
	randtest.Concurrent(t)
	device, _ := openFake(t, fake.Config{})
	telemetry, seeds := []state.Telemetry{{Mode: state.Production}, {Mode: state.Off}}, []int{8, 4}
	chain, same := newKasminaChain(t, 1, telemetry, seeds), newKasminaChain(t, 1, telemetry, seeds)
	m := openMachine(t, device, chain.loss.Graph(), WithStrict(), WithAccumulation(),
		WithParams(chain.params...))
	tape := tapeMachine(t, same.loss.Graph())
	require.NoError(t, errors.Join(m.RunAll(), tape.RunAll()))
	for i, p := range chain.params {
		require.Less(t, distance(t, gathered(t, m, p), same.params[i].Deriv().Value()), 1e-4,
			p.Name())
	}
}

// fakeMemory lets collectives over loopback replace NCCL on a fake driver's memory. A collective waits
// for the preceding work on its stream.
type fakeMemory struct{ ctx gpu.Context }

func (f fakeMemory) device() *fake.Context { return f.ctx.(*fake.Context) }

func (f fakeMemory) Alloc(bytes int) (comm.Ptr, error) {
	p, err := f.device().Alloc(bytes)
	return comm.Ptr(p), err
}
func (f fakeMemory) Free(p comm.Ptr) error { return f.device().Free(gpu.Ptr(p)) }
func (f fakeMemory) Bytes(p comm.Ptr, n int) ([]byte, error) {
	return f.device().Bytes(gpu.Ptr(p), n)
}
func (f fakeMemory) Enqueue(s comm.Stream, work func() error) error {
	return errors.Join(f.device().SyncStream(gpu.Stream(s)), work())
}

// FakeGroup returns the group of a rank with a fake device.
func FakeGroup(ctx context.Context, w *comm.World, device *Device) (comm.Group, error) {
	return loopback.New(ctx, w, fakeMemory{device.ctx})
}

// eachRank runs f concurrently on the given number of ranks, each with a fake device and a group of its
// own.
func eachRank(t *testing.T, size int, f func(rank int, d *Device, g comm.Group)) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := l.Addr().(*net.TCPAddr).Port
	require.NoError(t, l.Close())
	secret := comm.NewSecret()
	var wg sync.WaitGroup
	for r := range size {
		d, _ := openFake(t, fake.Config{})
		wg.Go(func() {
			w, err := comm.Join(t.Context(), comm.Place{Rank: r, Size: size,
				LocalRank: r, LocalSize: size,
				MasterAddr: "127.0.0.1", MasterPort: port, Run: fmt.Sprint(t.Name(), port), Secret: secret},
				comm.Options{Timeout: time.Minute})
			if err != nil {
				t.Error(err)
				return
			}
			g, err := loopback.New(t.Context(), w, fakeMemory{d.ctx})
			if err != nil {
				t.Error(err)
				return
			}
			passed := false
			defer func() {
				if !passed { // so that no other rank waits for this one
					g.Abort(errors.New("the test has failed at this rank"))
				}
			}()
			f(r, d, g)
			passed = true
			require.NoError(t, errors.Join(w.Barrier(t.Context(), "done"), g.Close(),
				w.Close()))
		})
	}

	wg.Wait()
}

// notCaptured disables capture, also for groups that wrap a loopback group, and splits gradients into several
// buckets.
func notCaptured(c *machineConfig) error {
	c.ranks.Uncaptured, c.ranks.Bucket = true, 1
	return nil
}

// ranked returns a graph with a parameter of several chunks, a vector and matrices.
func ranked(t *testing.T) (loss *gorgonia.Node, x *gorgonia.Node, targets *gorgonia.Node,
	params gorgonia.Nodes) {
	t.Helper()
	return rankedRows(t, 6)
}

// rankedRows is like ranked, for a given number of rows.
func rankedRows(t *testing.T, rows int) (loss *gorgonia.Node, x *gorgonia.Node,
	targets *gorgonia.Node, params gorgonia.Nodes) {
	t.Helper()
	r := rand.New(rand.NewPCG(3, 4))
	g := gorgonia.NewGraph()
	param := func(name string, shape ...int) *gorgonia.Node {
		params = append(params, randomNode(g, r, 1.0/8, name, shape...))
		return params[len(params)-1]
	}
	x = gorgonia.NewTensor(g, tensor.Float32, 2, gorgonia.WithShape(rows, 64), gorgonia.WithName("x"))
	targets = gorgonia.NewTensor(g, tensor.Int, 1, gorgonia.WithShape(rows),
		gorgonia.WithName("targets"))
	try := gorgonia.Must
	y := try(op.Linear(x, param("a", 48, 64)))
	y = attend(t, try(op.Linear(y, param("b", 64, 48))))
	y = try(op.SiLUMLP(y, param("gate", 32, 64), param("up", 32, 64), param("down", 64, 32)))
	y = try(op.RMSNorm(y, param("norm", 64), 1e-5))
	loss = try(op.LinearCrossEntropy(y, param("head", 600, 64), targets))
	require.NoError(t, errOf(gorgonia.Grad(loss, params...)))
	return loss, x, targets, params
}

// feed sets the inputs of ranked to a batch.
func feed(x, targets *gorgonia.Node) error {
	in := tensor.New(tensor.WithShape(6, 64), tensor.Of(tensor.Float32))
	for i := range in.Float32s() {
		in.Float32s()[i] = float32(i%7) - 3
	}
	return errors.Join(gorgonia.Let(x, in),
		gorgonia.Let(targets, tensor.New(tensor.WithShape(6), tensor.Of(tensor.Int))))
}

// rankedMachine returns the machine of one rank. The rank's goroutine must close it.
func rankedMachine(t *testing.T, d *Device, loss *gorgonia.Node, params gorgonia.Nodes,
	opts ...MachineOption) *Machine {
	t.Helper()
	m, err := NewMachine(d, loss.Graph(), append(opts, WithParams(params...), WithOutputs(loss))...)
	require.NoError(t, err)
	return m
}

// TestRanks checks that several GPUs have the same parameters and moments as a single GPU after updates
// with the same micro-batches, and that any number of GPUs can continue from the optimizer state.
// Gradients are sent during runs or after them.
func TestRanks(t *testing.T) {
	randtest.Concurrent(t)
	for name, newOptimizer := range randtest.Sample(t, 1, map[string]func() (optim.Optimizer, error){"AdamW": newAdamW,
		"Lion": newLion, "AdamW8bit": newAdamW8bit, "Muon": func() (optim.Optimizer, error) {
			return optim.NewMuon()
		}}) {
		t.Run(name, func(t *testing.T) {
			var want []string
			for _, c := range []struct {
				size, then int
				duringRuns bool
			}{{1, 1, false}, {2, 2, false}, {2, 2, true}, {3, 1, true}, {4, 3, true}, {1, 2, true}} {
				how := stepped{batches: 4, duringRuns: c.duringRuns}
				state, values := trainRanks(t, newOptimizer, c.size, how, nil, nil, 3)
				got := trainRanksText(trainRanks(t, newOptimizer, c.then, how, state, values, 2))
				if want == nil {
					want = got
				}
				requireSame(t, want, got, "%+v", c)
			}
			one := trainRanksText(trainRanks(t, newOptimizer, 1, stepped{batches: 8}, nil, nil, 2))
			how := stepped{batches: 8, duringRuns: true}
			requireSame(t, one, trainRanksText(trainRanks(t, newOptimizer, 8, how, nil, nil, 2)), "8 ranks")
		})
	}
}

// requireSame is like require.Equal, but its message does not contain all numbers.
func requireSame(t *testing.T, want, got []string, format string, args ...any) {
	t.Helper()
	require.Len(t, got, len(want))
	for i := range want {
		name, _, _ := strings.Cut(want[i], " ")
		require.True(t, want[i] == got[i], "%s: %s", name, fmt.Sprintf(format, args...))
	}
}

// TestRanksOneRound checks that two GPUs with one round per step are bit-identical to one GPU with two
// rounds, also if the update does not wait for the losses. With one round, AdamW's update reads the
// gradients of both GPUs.
func TestRanksOneRound(t *testing.T) {
	for name, newOptimizer := range randtest.Sample(t, 1, map[string]func() (optim.Optimizer, error){"AdamW": newAdamW,
		"Lion": newLion, "AdamW8bit": newAdamW8bit,
		"Muon": func() (optim.Optimizer, error) { return optim.NewMuon() }}) {
		t.Run(name, func(t *testing.T) {
			for _, how := range []stepped{{2, false, false, 6}, {2, true, false, 6},
				{2, false, true, 6}, {2, true, true, 6}, {2, true, true, 600}} {
				if how.rows == 600 && testing.Short() { // large enough to receive gradients in the arena
					continue
				}
				want := trainRanksText(trainRanks(t, newOptimizer, 1, stepped{batches: 2, rows: how.rows},
					nil, nil, 3))
				requireSame(t, want, trainRanksText(trainRanks(t, newOptimizer, 2, how, nil, nil, 3)),
					"%+v", how)
			}
		})
	}
}

// TestRanksNonFiniteLoss checks that no rank changes any parameter if the loss of one rank is not
// finite, and that the next step works.
func TestRanksNonFiniteLoss(t *testing.T) {
	eachRank(t, 2, func(rank int, d *Device, g comm.Group) {
		loss, x, targets, nodes := ranked(t)
		m := rankedMachine(t, d, loss, nodes, WithRanks(g, 1), notCaptured)
		defer m.Close()
		optimize(t, m, newAdamW, 0.1)
		before := fmt.Sprint(nodes[0].Value())
		for i := range 3 {
			require.NoError(t, errors.Join(m.Rank().Expect(2, true), feed(x, targets), m.RunAll(),
				m.Rank().Contribute(2, true)))
			spoil := i < 2 && i == rank
			if spoil {
				at := m.runner.Program.Values[loss].Ptr()
				b, err := d.ctx.(*fake.Context).Bytes(at, 4)
				require.NoError(t, err)
				binary.LittleEndian.PutUint32(b, math.Float32bits(float32(math.NaN())))
			}
			var losses []float64
			_, err := m.Rank().Step(loss, func(l float64) error {
				losses = append(losses, l)
				return nil
			})
			require.Len(t, losses, 1)
			require.Equal(t, spoil, math.IsNaN(losses[0]))
			if i < 2 && !spoil {
				require.ErrorIs(t, err, ErrNonFinite)
			} else {
				require.NoError(t, err)
			}
			require.NoError(t, errors.Join(m.Rank().GatherState(), m.Download()))
			require.Equal(t, i == 2, fmt.Sprint(nodes[0].Value()) != before, rank)
		}
		if rank == 0 {
			require.ErrorContains(t, errOf(m.Rank().Step(loss, nil)), "nil")
			for _, announce := range []func(int, bool) error{m.Rank().Expect, m.Rank().Contribute} {
				require.ErrorContains(t, announce(1, true), "one round of two ranks")
				require.ErrorContains(t, announce(3, true), "3 contributions by 2 ranks")
				require.ErrorContains(t, announce(-1, true), "-1 contributions")
			}
		}
		require.NoError(t, errors.Join(m.Rank().Expect(2, true), m.RunAll(),
			m.Rank().Contribute(2, true)))
		gone := errors.New("gone")
		require.ErrorIs(t, errOf(m.Rank().Step(loss, func(float64) error { return gone })), gone)
		for _, err := range []error{m.Rank().GatherState(), errOf(m.Update()),
			errOf(m.Rank().DownloadOwn())} {
			require.ErrorContains(t, err, "resume from a checkpoint")
		}
	})
}

// TestForgetBeforeAnUpdate checks that Download after Forget clears the state on the host even if there
// was no update in between.
func TestForgetBeforeAnUpdate(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	l := newLifetime(t, newAdamW)
	require.NoError(t, errors.Join(l.open(device), l.step(), l.machine.Download(),
		l.machine.Close(), l.open(device)))
	defer l.machine.Close()
	p := l.batch.Params[1]
	require.NoError(t, errors.Join(l.machine.Forget(p, 0, p.Shape().TotalSize()),
		l.machine.Download()))
	for _, s := range l.optimizer.State() {
		if s.Name == p.Name()+".exp_avg" {
			require.Equal(t, make([]float32, p.Shape().TotalSize()), s.Data)
			return
		}
	}

	t.Error("the optimizer has no state")
}

// TestRanksForget checks that all ranks gather the state after Forget.
func TestRanksForget(t *testing.T) {
	eachRank(t, 2, func(_ int, d *Device, g comm.Group) {
		loss, _, _, nodes := ranked(t)
		m := rankedMachine(t, d, loss, nodes, WithRanks(g, 0), notCaptured)
		defer m.Close()
		optimize(t, m, newAdamW, 0)
		require.NoError(t, m.Forget(nodes[0], 0, 1))
		require.True(t, m.optimizer.Newer(), "GatherState would wait for another rank forever")
		require.NoError(t, m.Rank().GatherState())
	})
}

// broken is a group with links that break.
type broken struct {
	comm.Group
	breaks bool
}

func (g *broken) Batch(f func(comm.Collectives) error) error {
	if g.breaks {
		return errors.New("the link broke")
	}
	return g.Group.Batch(f)
}

// TestRanksUpdateFails checks that the optimizer state is unavailable after an update that failed
// partway.
func TestRanksUpdateFails(t *testing.T) {
	eachRank(t, 2, func(_ int, d *Device, inner comm.Group) {
		loss, x, targets, nodes := ranked(t)
		g := &broken{Group: inner}
		m := rankedMachine(t, d, loss, nodes, WithRanks(g, 0), notCaptured)
		defer m.Close()
		optimize(t, m, newAdamW, 0)
		for i := range 2 {
			require.NoError(t, errors.Join(m.Rank().Expect(2, true), feed(x, targets), m.RunAll(),
				m.Rank().Contribute(2, true)))
			g.breaks = i == 1
			err := errOf(m.Rank().Step(loss, func(float64) error { return nil }))
			require.Equal(t, g.breaks, err != nil, err)
		}
		require.ErrorContains(t, errOf(m.Rank().DownloadOwn()), "resume from a checkpoint")
		require.ErrorContains(t, m.Forget(nodes[0], 0, 1), "resume from a checkpoint")
	})
}

// TestRanksNonFinite checks that before an update only the rank that updates the bad element of a
// gradient names the parameter, and that both ranks name it after the update.
func TestRanksNonFinite(t *testing.T) {
	for _, rounds := range []int{0, 1} {
		eachRank(t, 2, func(_ int, d *Device, g comm.Group) {
			loss, x, targets, nodes := ranked(t)
			m := rankedMachine(t, d, loss, nodes, WithRanks(g, rounds), notCaptured)
			defer m.Close()
			optimize(t, m, newAdamW, 0)
			require.NoError(t, feed(x, targets))
			names := func(want *gorgonia.Node, when string) {
				t.Helper()
				got, err := m.NonFinite()
				require.NoError(t, err)
				require.True(t, got == want, "%d rounds, %s: got %v, want %v", rounds, when, got,
					want)
			}
			bad := gpu.Bytes([]float32{float32(math.Inf(1))})
			mine := map[bool]int{}
			for i, p := range m.optimizer.Params {
				for _, at := range []int{0, p.Grad.Len() - 1} {
					require.NoError(t, m.RunAll())
					from, to := m.optimizer.Part(i)
					own := from <= at && at < to
					if mine[own]++; !own { // the other rank's element is spoiled here
						require.NoError(t, d.ctx.CopyToDevice(p.Grad.Ptr().Offset(4*at), bad,
							m.runner.Stream))
					}
					require.NoError(t, m.Rank().Contribute(2, true))
					if own {
						names(p.Input.Node, "before an update, on the owner")
					} else {
						names(nil, "before an update, on another rank")
					}
					require.ErrorIs(t, errOf(m.Update()), ErrNonFinite)
					names(p.Input.Node, "after an update")
				}
			}
			require.Len(t, mine, 2, "one rank owns all elements")
		})
	}
}

// normOf records the last launch of GradNorm.
type normOf struct {
	run.Launcher
	norm *tables.GradNorm
}

func (k normOf) Launch(s gpu.Stream, params any) error {
	if a, ok := params.(tables.GradNorm); ok {
		*k.norm = a
	}
	return k.Launcher.Launch(s, params)
}

// TestRanksSquares checks that each rank stores the sum of squares of every chunk in the same place as a
// single GPU does, also for a parameter that is divided among ranks. The norm depends on this order.
func TestRanksSquares(t *testing.T) {
	var want []float32 // from a single rank
	for size := 1; size <= 3; size++ {
		eachRank(t, size, func(_ int, d *Device, g comm.Group) {
			loss, x, targets, nodes := ranked(t)
			var norm tables.GradNorm
			m := rankedMachine(t, d, loss, nodes, WithRanks(g, 0), notCaptured,
				withKernels(func(k run.Launcher) run.Launcher { return normOf{k, &norm} }))
			defer m.Close()
			optimize(t, m, newAdamW, 0)
			head := len(nodes) - 1
			from, to := m.optimizer.Part(head)
			require.Less(t, from, to)
			require.Equal(t, size > 1, to-from < m.optimizer.Params[head].Grad.Len(), "the parameter is not divided")
			require.NoError(t, errors.Join(feed(x, targets), m.RunAll(),
				m.Rank().Contribute(1, true), errOf(m.Update())))
			b, err := d.ctx.(*fake.Context).Bytes(norm.Squares, 4*norm.Count)
			require.NoError(t, err)
			got := slices.Clone(gpu.View[float32](b))
			if size == 1 {
				want = got
				require.NotContains(t, got[:norm.Count-1], float32(0)) // the last one belongs to the loss
			}
			require.Equal(t, want, got, "%d ranks", size)
		})
	}
}

func trainRanksText(state []optim.Tensor, values []*tensor.Dense) (all []string) {
	for _, s := range state {
		all = append(all, fmt.Sprintf("%s %x", s.Name, s.Data))
	}
	for _, v := range values {
		all = append(all, fmt.Sprintf("%x", v.Data()))
	}
	return all
}

// stepped describes how steps are performed.
type stepped struct {
	batches     int
	duringRuns  bool // gradients are sent during runs
	withoutWait bool // the update does not wait for the losses
	rows        int  // rows of a batch; 0 means 6
}

// trainRanks performs updates on a number of ranks, and returns the final optimizer state and parameters
// of rank 0.
func trainRanks(t *testing.T, newOptimizer func() (optim.Optimizer, error), size int, how stepped,
	state []optim.Tensor, values []*tensor.Dense,
	steps int) (after []optim.Tensor, params []*tensor.Dense) {
	t.Helper()
	batches, rows := how.batches, cmp.Or(how.rows, 6)
	eachRank(t, size, func(rank int, d *Device, g comm.Group) {
		loss, x, targets, nodes := rankedRows(t, rows)
		for i, v := range values {
			copy(nodes[i].Value().Data().([]float32), v.Float32s())
		}
		o, err := newOptimizer()
		require.NoError(t, err)
		require.NoError(t, o.Declare(gorgonia.NodesToValueGrads(nodes)))
		require.NoError(t, o.SetState(state))
		rounds := 0
		if batches%size == 0 {
			rounds = batches / size
		}
		m := openMachine(t, d, loss.Graph(), WithParams(nodes...), WithOutputs(loss),
			WithRanks(g, rounds), notCaptured)
		require.NoError(t, m.SetOptimizer(o, 0.1))
		divided := 0
		for _, in := range m.runner.Program.Inputs {
			if in.Part != nil {
				divided++
			}
		}
		require.Equal(t, size > 1, divided > 0)
		r := rand.New(rand.NewPCG(uint64(len(state)), 9))
		for range steps {
			for b := range batches {
				in, ids := tensor.New(tensor.WithShape(rows, 64), tensor.Of(tensor.Float32)),
					tensor.New(tensor.WithShape(rows), tensor.Of(tensor.Int))
				for i := range in.Float32s() {
					in.Float32s()[i] = float32(r.NormFloat64())
				}
				for i := range ids.Ints() {
					ids.Ints()[i] = r.IntN(600)
				}
				if b%size == rank {
					if how.duringRuns {
						require.NoError(t, m.Rank().Expect(min(size, batches-b/size*size), b < size))
					}
					require.NoError(t, errors.Join(gorgonia.Let(x, in), gorgonia.Let(targets, ids),
						m.RunAll()))
				}
				if b%size == size-1 || b == batches-1 {
					require.NoError(t, m.Rank().Contribute(b%size+1, b < size))
				}
			}
			update := m.Update
			if how.withoutWait {
				update = func() (float64, error) {
					return m.Rank().Step(loss, func(l float64) error {
						require.Greater(t, l, 1.0)
						return nil
					})
				}
			}
			norm, err := update()
			require.NoError(t, err)
			require.Greater(t, norm, 0.1, "nothing is clipped")
		}
		parts, err := m.Rank().DownloadOwn()
		require.NoError(t, err)
		counts, own := o.(optim.Partial).StateParts(parts)
		require.NoError(t, m.Rank().GatherState())
		require.NoError(t, m.Download())
		countsNow, ownNow := o.(optim.Partial).StateParts(parts)
		require.Equal(t, counts, countsNow)
		require.Equal(t, own, ownNow)
		if rank == 0 {
			after = o.State()
			for _, n := range nodes {
				params = append(params, n.Value().(*tensor.Dense))
			}
		}
	})

	return after, params
}

// silent is a group of two ranks without a peer. Rank 0 calls its hooks when it should send or receive.
type silent struct {
	comm.Group
	onRequest func(s comm.Stream)
	onReceive func(p comm.Ptr, bytes int, s comm.Stream) // called when data is received outside of rounds; may be nil
}

func (s *silent) Rank() int                                  { return 0 }
func (s *silent) Size() int                                  { return 2 }
func (s *silent) Batch(f func(comm.Collectives) error) error { return f(s) }
func (s *silent) Send(_ comm.Ptr, _ int, _ comm.Type, _ int, on comm.Stream) error {
	s.onRequest(on)
	return nil
}
func (s *silent) Recv(p comm.Ptr, n int, t comm.Type, _ int, on comm.Stream) error {
	if s.onRequest(on); s.onReceive != nil {
		s.onReceive(p, n*t.Size(), on)
	}
	return nil
}
func (s *silent) AllReduce(_, _ comm.Ptr, _ int, _ comm.Type, _ comm.Op, _ comm.Stream) error {
	return nil
}

// TestRanksExchangeDuringRun checks that gradients are sent on a separate stream while the run that
// computes them is still being enqueued, also in the captured run, and that they are not sent again after
// the run.
func TestRanksExchangeDuringRun(t *testing.T) {
	randtest.Concurrent(t)
	d, _ := openFake(t, fake.Config{})
	loss, x, targets, nodes := ranked(t)
	var at []int64 // number of launches before each bucket
	launches := func() int64 { return int64(len(d.ctx.(*fake.Context).Trace)) }
	g := &silent{}
	small := func(c *machineConfig) error { c.ranks.Bucket = 1; return nil }
	m := rankedMachine(t, d, loss, nodes, WithRanks(g, 0), small)
	defer m.Close()
	optimize(t, m, newAdamW, 0.1)
	g.onRequest = func(s comm.Stream) {
		require.NotEqual(t, comm.Stream(m.Stream()), s)
		at = append(at, launches())
	}
	require.NoError(t, feed(x, targets))
	for i := range 3 { // enqueued, captured and replayed
		at = nil
		require.NoError(t, errors.Join(m.Rank().Expect(2, true), m.RunAll()))
		if i == 2 {
			require.Empty(t, at, "a replay sends gradients separately")
		} else {
			require.NotEmpty(t, at)
			require.Less(t, at[0], launches()-4, "no gradient was sent before the end of the run")
		}
		at = nil
		require.NoError(t, m.Rank().Contribute(2, true))
		require.Empty(t, at)
	}

	g.onRequest = func(s comm.Stream) { at = append(at, 0) }
	require.NoError(t, errors.Join(m.RunAll(), m.Rank().Contribute(2, true)))
	require.NotEmpty(t, at, "gradients of a run that was not announced were not sent")
}

// routed is a group with routes that report when they are closed.
type routed struct {
	*silent
	closing func()
}

func (g routed) Route(slot int, sends, receives []comm.Leg) (comm.Route, error) {
	r, err := comm.NewRoute(g.silent, slot, sends, receives)
	return closingRoute{r, g.closing}, err
}

type closingRoute struct {
	comm.Route
	closing func()
}

func (r closingRoute) Close() error {
	r.closing()
	return r.Route.Close()
}

// TestRanksCloseRoutesFirst checks that routes are closed before the optimizer's memory is freed, so that
// no other rank writes to freed memory.
func TestRanksCloseRoutesFirst(t *testing.T) {
	d, _ := openFake(t, fake.Config{})
	loss, _, _, nodes := ranked(t)
	var m *Machine
	closed := 0
	m = rankedMachine(t, d, loss, nodes, WithRanks(routed{&silent{}, func() {
		closed++
		require.Positive(t, m.optimizer.Held())
	}}, 0))
	optimize(t, m, newAdamW, 0)
	require.NoError(t, m.Close())
	require.Positive(t, closed)
}

// TestRanksPlaces checks that with two ranks and one round per step, gradients from the other rank are
// received in the arena of the run, where they overwrite neither gradients nor values that later calls
// need. They must not arrive before the run has reached that point. The weights that a run reads first
// are sent as part of the update.
func TestRanksPlaces(t *testing.T) {
	const rows = 600 // makes activations larger than gradients
	d, _ := openFake(t, fake.Config{})
	loss, x, targets, nodes := rankedRows(t, rows)
	g := &silent{onRequest: func(comm.Stream) {}}
	small := func(c *machineConfig) error { c.ranks.Bucket = 1; return nil }
	m, err := NewMachine(d, loss.Graph(), WithParams(nodes...), WithOutputs(loss),
		WithRanks(g, 1), small)
	require.NoError(t, err)
	defer m.Close()
	o, err := newAdamW()
	require.NoError(t, err)
	require.NoError(t, m.SetOptimizer(o, 0.1))
	require.NoError(t, errors.Join(gorgonia.Let(x, tensor.New(tensor.WithShape(rows, 64),
		tensor.Of(tensor.Float32))), gorgonia.Let(targets, tensor.New(tensor.WithShape(rows),
		tensor.Of(tensor.Int)))))
	p := m.runner.Program
	within, came := 0, 0
	calls := len(p.Calls) // values until here must be kept
	g.onReceive = func(at comm.Ptr, bytes int, _ comm.Stream) {
		came++
		from, to := int(at), int(at)+bytes
		for _, b := range p.Buffers {
			if b.Resident || b.First < 0 {
				continue
			}
			if arena := int(b.Base) - b.Offset; from >= arena && to <= arena+p.Arena {
				within++
				break
			}
		}
		for _, b := range p.Buffers {
			if !b.Resident && b.Last == calls && from < int(b.Base)+b.Bytes && int(b.Base) < to {
				t.Errorf("%d bytes were received in a buffer of %d bytes that must keep its contents", bytes, b.Bytes)
			}
		}
	}

	for i := range 3 { // enqueued, captured and replayed
		within, came = 0, 0
		require.NoError(t, errors.Join(m.Rank().Expect(2, true), m.RunAll(),
			m.Rank().Contribute(2, true)))
		require.Equal(t, i < 2, came > 0)
		require.Equal(t, i < 2, within > 0, "%d receives, none in the arena", came)
		_, err := m.Update()
		require.NoError(t, err)
	}
}

// TestRanksMoments checks that each rank holds only a part of the moments.
func TestRanksMoments(t *testing.T) {
	var mu sync.Mutex
	var held, all int
	eachRank(t, 3, func(_ int, d *Device, g comm.Group) {
		loss, _, _, nodes := ranked(t)
		o, err := newAdamW()
		require.NoError(t, err)
		m := rankedMachine(t, d, loss, nodes, WithRanks(g, 0), notCaptured)
		defer m.Close()
		require.ErrorContains(t, m.Rank().Contribute(1, true), "no optimizer")
		require.NoError(t, m.SetOptimizer(o, 0))
		if g.Rank() == 0 {
			require.ErrorContains(t, m.Rank().Contribute(1, true), "has not run")
		}
		mu.Lock()
		defer mu.Unlock()
		all = 0
		for _, p := range m.optimizer.Params {
			all += p.Grad.Len()
			held += p.Moments[0].Len()
		}
	})

	require.Equal(t, all, held)
}

// TestRanksChoices checks that the other ranks use the choices that rank 0 has timed, even if different
// variants would be faster there, and that updates, which differ between ranks, are not timed.
func TestRanksChoices(t *testing.T) {
	clearChoiceVariables(t)
	const size = 3
	chosen := make(chan []optime.Choice, size)
	all := make([][]optime.Choice, size)
	path := filepath.Join(t.TempDir(), "tune.json")
	eachRank(t, size, func(rank int, d *Device, g comm.Group) {
		loss, _, _, nodes := ranked(t)
		took := []fake.Variant{{Took: 1e6}, {Took: 9e6}, {Took: 9e6}}
		var tuned []MachineOption
		if rank == 0 {
			took = []fake.Variant{{Took: 9e6}, {Took: 1e6}, {Took: 9e6}}
			tuned = []MachineOption{WithTuning(TuneCached)}
		} else {
			tuned = []MachineOption{WithTuning(TuneFull), WithChoices(<-chosen)}
		}
		wrap := withKernels(func(k run.Launcher) run.Launcher {
			return &attentionVariants{Launcher: k, fake: fakeOf(k),
				names: []kernel.Variant{{Family: "wide", Size: 4}, {Family: "wide", Size: 1},
					{Family: "plain"}}, variants: took}
		})
		m, err := NewMachine(d, loss.Graph(), append(tuned, wrap, timedFrom(1, path),
			WithParams(nodes...), WithOutputs(loss), WithRanks(g, 0), notCaptured)...)
		require.NoError(t, err)
		defer m.Close()
		all[rank] = m.Choices()
		if rank == 0 {
			for range size - 1 {
				chosen <- all[0]
			}
		}
		o, err := optim.NewMuon()
		require.NoError(t, err)
		require.NoError(t, o.Declare(gorgonia.NodesToValueGrads(nodes)))
		require.NoError(t, m.SetOptimizer(o, 0.1))
		for _, c := range m.Choices()[len(all[rank]):] {
			require.Equal(t, ByRule, c.Source, "%s %s of the update", c.Op, c.Shape)
		}
	})

	require.NotEmpty(t, all[0])
	timed := 0
	for r, choices := range all {
		require.Len(t, choices, len(all[0]))
		for i, c := range choices {
			want := all[0][i]
			require.Equal(t, [3]string{want.Op, want.Shape, want.Variant},
				[3]string{c.Op, c.Shape, c.Variant}, "rank %d", r)
			if c.Source == Measured {
				timed++
				require.Zero(t, r)
			}
			if c.Op == "Attention" {
				require.Equal(t, "wide-1", c.Variant)
			}
		}
	}

	require.NotZero(t, timed)
}

// TestRanksDivided checks that float32 values divided among ranks are uploaded and downloaded completely,
// and that machines that share these parameters compute the same results.
func TestRanksDivided(t *testing.T) {
	var mu sync.Mutex
	var whole, held int // bytes of parameters on all ranks
	eachRank(t, 2, func(rank int, d *Device, g comm.Group) {
		loss, x, targets, nodes := ranked(t)
		m := rankedMachine(t, d, loss, nodes, WithRanks(g, 0), notCaptured)
		defer m.Close()
		before := m.runner.Memory.Held()
		o, err := newAdamW()
		require.NoError(t, err)
		require.NoError(t, o.Declare(gorgonia.NodesToValueGrads(nodes)))
		require.NoError(t, m.SetOptimizer(o, 0))
		mu.Lock()
		whole, held = whole+before, held+m.runner.Memory.Held()
		mu.Unlock()
		var want [][]float32
		for _, n := range nodes {
			v := n.Value().Data().([]float32)
			for i := range v {
				v[i] += 0.5
			}
			want = append(want, append([]float32{}, v...))
		}
		require.NoError(t, m.Upload(nodes...))
		require.NoError(t, m.SetOptimizer(o, 0)) // as when resuming a run
		for _, n := range nodes {
			clear(n.Value().Data().([]float32))
		}
		require.NoError(t, m.Download())
		divided := 0
		for i, n := range nodes {
			require.Equal(t, want[i], n.Value().Data().([]float32), n.Name())
			v := valueIn(t, m, n)
			require.Equal(t, want[i], v.Data().([]float32), n.Name())
			if _, _, err := m.Address(n); err != nil {
				require.ErrorContains(t, err, "divided among ranks")
				divided++
			}
		}
		require.NotZero(t, divided)

		other, otherX, otherTargets, _ := ranked(t)
		borrower := openMachine(t, d, other.Graph(), WithParamsOf(m), WithOutputs(other))
		require.NoError(t, errors.Join(feed(x, targets), feed(otherX, otherTargets), m.RunAll(),
			borrower.RunAll()))
		a := valueIn(t, m, loss)
		b := valueIn(t, borrower, other)
		require.Equal(t, a.Data(), b.Data())
	})

	require.Less(t, held, whole)
}

// TestRanksAwaitParameters checks that the next run waits for parameters that come back from other ranks,
// whether it is enqueued, captured or replayed, and that the update does not wait for them.
func TestRanksAwaitParameters(t *testing.T) {
	d, _ := openFake(t, fake.Config{})
	loss, x, targets, nodes := ranked(t)
	memory := d.ctx.(*fake.Context)
	var came []gpu.Ptr
	var with byte
	g := &silent{onRequest: func(comm.Stream) {}}
	g.onReceive = func(p comm.Ptr, bytes int, s comm.Stream) {
		came = append(came, gpu.Ptr(p))
		require.NoError(t, memory.Memset8(gpu.Ptr(p), with, bytes, gpu.Stream(s)))
	}
	m := rankedMachine(t, d, loss, nodes, WithRanks(g, 0))
	defer m.Close()
	optimize(t, m, newAdamW, 0.1)
	require.NoError(t, feed(x, targets))
	arrived := func() bool {
		require.NotEmpty(t, came)
		for _, p := range came {
			b, err := memory.Bytes(p, 1)
			require.NoError(t, err)
			if b[0] != with {
				return false
			}
		}
		return true
	}

	for i := range 4 {
		require.NoError(t, errors.Join(m.RunAll(), m.Rank().Contribute(2, true)))
		came, with = nil, byte(0x30+i)
		require.NoError(t, errOf(m.Update()))
		require.False(t, arrived(), "update %d waited", i)
		require.NoError(t, m.RunAll())
		require.NoError(t, errOf(m.Value(loss)))
		require.True(t, arrived(), "run %d did not wait", i)
	}

	came, with = nil, 1
	require.NoError(t, errOf(m.Update()))
	require.NoError(t, errOf(m.Value(nodes[0])))
	require.True(t, arrived(), "a parameter was fetched before it arrived")
}

// narrowGradients is WithGradientPrecision(BFloat16) without the storage of BFloat16, which fakeKernels
// does not support.
func narrowGradients(c *machineConfig) error {
	c.Gradient = gpu.BFloat16
	return nil
}

// roundToBFloat16 returns x rounded to bfloat16, with ties to even.
func roundToBFloat16(x float32) float32 {
	b := math.Float32bits(x)
	return math.Float32frombits((b + 0x7fff + b>>16&1) &^ 0xffff)
}

// tableTypes counts the types of gradients in launches of GradSquares.
type tableTypes struct {
	run.Launcher
	count map[gpu.DType]int
}

func (k tableTypes) Launch(s gpu.Stream, params any) error {
	if a, ok := params.(tables.GradSquares); ok {
		for _, t := range a.Table.Tensors {
			k.count[t.GradType]++
		}
	}
	return k.Launcher.Launch(s, params)
}

func countTypes(count map[gpu.DType]int) MachineOption {
	return withKernels(func(k run.Launcher) run.Launcher { return tableTypes{k, count} })
}

// ofLayer reports whether a parameter is a weight of a linear layer or a perceptron.
func ofLayer(name string) bool { return strings.HasSuffix(name, "_proj.weight") }

// narrowed returns the names of parameters with gradients stored in bfloat16.
func narrowed(m *Machine, params gorgonia.Nodes) (names []string) {
	for _, p := range params {
		if m.runner.Program.Values[p.Deriv()].Type == gpu.BFloat16 {
			names = append(names, p.Name())
		}
	}
	return names
}

// numbersOf returns the elements of the values of nodes.
func numbersOf(t *testing.T, m *Machine, nodes gorgonia.Nodes) (all [][]float32) {
	t.Helper()
	for _, n := range nodes {
		all = append(all, slices.Clone(flat(t, valueIn(t, m, n))))
	}
	return all
}

// TestGradientPrecision checks that only gradients of weights are rounded to bfloat16, that they are
// otherwise equal to the float32 gradients, and that an update uses the rounded gradients.
func TestGradientPrecision(t *testing.T) {
	for name, newOptimizer := range optimizers {
		t.Run(name+"/fake", func(t *testing.T) {
			for seed := range uint64(2) { // the odd seed makes weights unaligned
				device, _ := openFake(t, fake.Config{})
				testGradientPrecision(t, device, seed, newOptimizer, 0, narrowGradients)
			}
		})
		for _, p := range []Precision{BFloat16, Float8} {
			t.Run(fmt.Sprintf("%s/GPU %v", name, p), func(t *testing.T) {
				device := openGPU(t)
				if p == Float8 {
					device = openGPUFloat8(t)
				}
				// Products add up in a different order if their results have a different type.
				testGradientPrecision(t, device, randtest.Seed(t), newOptimizer, 1e-3,
					WithGradientPrecision(BFloat16), WithPrecision(p), WithTuning(TuneOff))
			})
		}
	}
}

func testGradientPrecision(t *testing.T, device *Device, seed uint64,
	newOptimizer func() (optim.Optimizer, error), tolerance float64,
	narrow MachineOption, opts ...MachineOption) {
	t.Logf("random seed %d", seed)
	_, wide := newBatch(t, llm.ForTraining, seed)
	_, b := newBatch(t, llm.ForTraining, seed)
	count := map[gpu.DType]int{}
	plain := newFuseMachine(t, device, wide.G, wide.Params, gorgonia.Nodes{wide.Loss}, opts)
	m := newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss},
		append(slices.Clone(opts), countTypes(count), narrow))
	require.Empty(t, narrowed(plain, wide.Params))
	require.Equal(t, Float32, plain.GradientPrecision())
	layers := 0
	for _, p := range b.Params {
		want := gpu.Float32
		if ofLayer(p.Name()) {
			want, layers = gpu.BFloat16, layers+1
		}
		require.Equal(t, want, m.runner.Program.Values[p.Deriv()].Type, p.Name())
	}

	require.Equal(t, BFloat16, m.GradientPrecision())
	o := optimize(t, m, newOptimizer, 0.01)
	for _, err := range []error{plain.RunAll(), m.RunAll()} {
		require.NoError(t, err)
	}

	got, want := numbersOf(t, m, derivatives(b.Params)),
		numbersOf(t, plain, derivatives(wide.Params))
	var squares float64
	for i, p := range b.Params {
		var largest float64
		for _, v := range want[i] {
			largest = max(largest, math.Abs(float64(v)))
		}
		for j, v := range got[i] {
			squares += float64(v) * float64(v)
			w := want[i][j]
			if ofLayer(p.Name()) {
				require.Equal(t, roundToBFloat16(v), v, "%s: element %d is %v, which bfloat16 does not have",
					p.Name(), j, v)
				if tolerance == 0 {
					w = roundToBFloat16(w)
				}
			}
			difference := math.Abs(float64(v) - float64(w))
			if ofLayer(p.Name()) && tolerance > 0 {
				difference -= math.Abs(float64(w)) / 256
			}
			require.LessOrEqual(t, difference, tolerance*largest, "%s: element %d is %v, want %v",
				p.Name(), j, v, w)
		}
	}

	norm, err := m.Update()
	require.NoError(t, err)
	require.Equal(t, map[gpu.DType]int{gpu.BFloat16: layers, gpu.Float32: len(b.Params) - layers},
		count)
	require.InEpsilon(t, math.Sqrt(squares), norm, 1e-5)
	require.NoError(t, m.Download())
	// After the first update, the mean of the gradients is a multiple of the clipped gradients. Eight-bit
	// means are compared elsewhere.
	gain := map[string]float64{}
	for _, p := range b.Params {
		r := o.(optim.Rules).Rule(p.Name(), p.Shape())
		mean := r.Kernel.Moments[0]
		switch {
		case mean.Codes != nil:
		case r.Kernel.Name == "Lion":
			gain[p.Name()+"."+mean.Name] = 1 - r.Beta2
		default:
			gain[p.Name()+"."+mean.Name] = 1 - r.Beta1
		}
	}

	seen := 0
	for _, s := range o.State() {
		i := slices.IndexFunc(b.Params, func(p *gorgonia.Node) bool {
			return strings.HasPrefix(s.Name, p.Name()+".")
		})
		times := gain[s.Name] * min(1, 0.01/(norm+1e-6))
		if times == 0 {
			continue
		}
		seen++
		for j, v := range s.Data.([]float32) {
			if w := times * float64(got[i][j]); !(math.Abs(float64(v)-w) <= 1e-5*math.Abs(w)+
				1e-12) {
				t.Fatalf("%s: element %d is %v, want %v", s.Name, j, v, w)
			}
		}
	}

	require.Equal(t, len(gain), seen)
	require.NotZero(t, seen)
}

// TestGradientPrecisionExceptions checks that a gradient stays float32 if anything but an update of one
// run reads it or if it is not the result of one product, and that all gradients computed by the same
// product do so, too.
func TestGradientPrecisionExceptions(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	_, b := newBatch(t, llm.ForTraining, 2)
	named := func(part string) *gorgonia.Node {
		i := slices.IndexFunc(b.Params, func(p *gorgonia.Node) bool {
			return strings.Contains(p.Name(), part)
		})
		return b.Params[i]
	}

	var all []string
	for _, p := range b.Params {
		if ofLayer(p.Name()) {
			all = append(all, p.Name())
		}
	}

	without := func(parts ...string) []string {
		return slices.DeleteFunc(slices.Clone(all), func(name string) bool {
			return slices.ContainsFunc(parts, func(part string) bool {
				return strings.Contains(name, part)
			})
		})
	}

	others := func(part string) gorgonia.Nodes {
		return slices.DeleteFunc(slices.Clone(b.Params), func(p *gorgonia.Node) bool {
			return p == named(part)
		})
	}
	for name, c := range map[string]struct {
		params gorgonia.Nodes
		opts   []MachineOption
		want   []string
	}{
		"as it is": {b.Params, nil, all},
		"gathered": {b.Params, []MachineOption{WithAccumulation()}, nil},
		"asked for k": {b.Params, []MachineOption{WithOutputs(named("0.self_attn.k").Deriv())},
			without("0.self_attn.q", "0.self_attn.k", "0.self_attn.v")},
		"asked for up": {b.Params, []MachineOption{WithOutputs(named("0.mlp.up").Deriv())},
			without("0.mlp.gate", "0.mlp.up")},
		"asked for down": {b.Params, []MachineOption{WithOutputs(named("0.mlp.down").Deriv())},
			without("0.mlp.down")},
		"no parameter o": {others("0.self_attn.o"), nil, without("0.self_attn.o")},
		"no parameter v": {others("0.self_attn.v"), nil,
			without("0.self_attn.q", "0.self_attn.k", "0.self_attn.v")},
		"without a choice": {b.Params, []MachineOption{func(c *machineConfig) error {
			c.Gradient = gpu.Float32
			return nil
		}}, nil},
	} {
		m := newFuseMachine(t, device, b.G, c.params, gorgonia.Nodes{b.Loss},
			append([]MachineOption{narrowGradients}, c.opts...))
		require.Equal(t, c.want, narrowed(m, b.Params), name)
		require.Equal(t, map[bool]Precision{false: Float32, true: BFloat16}[c.want != nil],
			m.GradientPrecision(), name)
	}

	g := gorgonia.NewGraph()
	matrix := func(name string) *gorgonia.Node {
		return gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(4, 4),
			gorgonia.WithName(name), gorgonia.WithInit(gorgonia.Gaussian(0, 1)))
	}
	x, once, twice, squared := matrix("x"), matrix("once"), matrix("twice"), matrix("squared")
	y := x
	for _, w := range []*gorgonia.Node{once, twice, squared, twice} {
		y = gorgonia.Must(op.Linear(y, w))
	}

	params := gorgonia.Nodes{once, twice, squared}
	require.NoError(t, errOf(gorgonia.Grad(gorgonia.Must(gorgonia.Sum(y)), params...)))
	gorgonia.Must(gorgonia.Square(squared.Deriv()))
	m := newFuseMachine(t, device, g, params, nil, []MachineOption{narrowGradients})
	require.Equal(t, []string{"once"}, narrowed(m, params))
	require.NoError(t, m.RunAll())
}

// TestGradientPrecisionRecomputed checks that recomputed blocks give the same gradients of the same
// types, including float32 for outputs.
func TestGradientPrecisionRecomputed(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	var values [2][][]float32
	for i, graph := range [][]llm.GraphOption{nil, {llm.WithRecompute()}} {
		b := deepGraph(t, 2, 32, 6, 3, graph...)
		b.draw(t, 5)
		k := slices.IndexFunc(b.Params, func(p *gorgonia.Node) bool {
			return strings.Contains(p.Name(), "1.self_attn.k_proj")
		})
		down := slices.IndexFunc(b.Params, func(p *gorgonia.Node) bool {
			return strings.Contains(p.Name(), "0.mlp.down_proj")
		})
		gorgonia.Must(gorgonia.Square(b.Params[down].Deriv())) // another reader of the gradient
		wide := []string{"1.self_attn.q", "1.self_attn.k", "1.self_attn.v", "0.mlp.down"}
		var want []string
		for _, p := range b.Params {
			if ofLayer(p.Name()) && !slices.ContainsFunc(wide, func(s string) bool {
				return strings.Contains(p.Name(), s)
			}) {
				want = append(want, p.Name())
			}
		}
		m := newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss, b.Params[k].Deriv()},
			[]MachineOption{narrowGradients})
		require.Equal(t, want, narrowed(m, b.Params))
		require.NotEmpty(t, want)
		require.NoError(t, m.RunAll())
		values[i] = numbersOf(t, m, append(gorgonia.Nodes{b.Loss}, derivatives(b.Params)...))
	}

	for i, v := range values[0] {
		require.Equal(t, values[1][i], v, relativeDistance(values[1][i], v))
	}
}

// TestGradientPrecisionMemory checks that bfloat16 gradients take half the memory, which is most of the
// memory for a model with few tokens.
func TestGradientPrecisionMemory(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	arena := func(opts ...MachineOption) int {
		b := deepGraph(t, 4, 96, 4, 1)
		return newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss},
			opts).runner.Program.Arena
	}
	wide, narrow := arena(), arena(narrowGradients)
	t.Logf("%d KiB for a run, %d KiB with gradients of bfloat16", wide>>10, narrow>>10)
	require.LessOrEqual(t, narrow, wide*5/8)
}

// TestGradientPrecisionRefused checks that the error names the precisions that bfloat16 gradients can be
// combined with.
func TestGradientPrecisionRefused(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	g := gorgonia.NewGraph()
	gorgonia.Must(gorgonia.Square(gorgonia.NewScalar(g, tensor.Float32, gorgonia.WithName("x"))))
	for _, c := range []struct {
		want string
		opts []MachineOption
	}{
		{"", []MachineOption{WithGradientPrecision(BFloat16), WithPrecision(BFloat16)}},
		{"", []MachineOption{WithPrecision(Float8), WithGradientPrecision(BFloat16)}},
		{"", []MachineOption{WithPrecision(Float16), WithGradientPrecision(Float32)}},
		{"WithGradientPrecision(bf16) requires the precision BFloat16 or Float8, but " +
			"the precision is f16", []MachineOption{WithGradientPrecision(BFloat16),
			WithPrecision(Float16)}},
		{"WithGradientPrecision(bf16) requires the precision BFloat16 or Float8, but " +
			"the precision is f32", []MachineOption{WithGradientPrecision(BFloat16)}},
		{"WithGradientPrecision: got f16, want Float32 or BFloat16",
			[]MachineOption{WithPrecision(Float16), WithGradientPrecision(Float16)}},
		{"WithGradientPrecision: got f8, want", []MachineOption{WithPrecision(Float8),
			WithGradientPrecision(Float8)}},
	} {
		m, err := NewMachine(device, g, c.opts...)
		if err == nil {
			err = m.Close()
		}
		if c.want == "" && err != nil || c.want != "" &&
			(err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("error %v, want %q", err, c.want)
		}
	}
}

// TestLossScale checks that gradients are returned without the scale, that a step that overflows changes
// only the scale, and that the scale follows its rule.
func TestLossScale(t *testing.T) {
	onEach(t, testLossScale, exactly("scaled", "float16"))
}

func testLossScale(t *testing.T, device *Device, _ float64, opts ...MachineOption) {
	model, b := newBatch(t, llm.ForTraining, 2)
	machine := openMachine(t, device, b.G, append(opts, WithParams(b.Params...),
		WithOutputs(b.Loss))...)
	adamw := optimize(t, machine, newAdamW, 1)
	run := func() {
		t.Helper()
		require.NoError(t, machine.RunAll())
	}
	scaleIs := func(want LossScale) {
		t.Helper()
		require.Equal(t, want, machine.LossScale())
	}
	steps := func() (n int64) {
		t.Helper()
		require.NoError(t, machine.Download())
		for _, s := range adamw.State() {
			if strings.HasSuffix(s.Name, ".step") {
				n = s.Data.([]int64)[0]
			}
		}
		return n
	}

	scaleIs(LossScale{Scale: 1 << 16})

	// This gradient looks like an overflow. Each repetition of the step halves the scale.
	last := len(b.Params) - 1
	weight := model.Params[last].Value.Float32s()
	old := slices.Clone(weight)
	weight[0] = float32(math.Inf(1))
	require.NoError(t, machine.Upload(b.Params[last]))
	before := slices.Clone(model.Params[0].Value.Float32s())
	for i := range 3 {
		run()
		norm, err := machine.Update() // the step overflows
		require.NoError(t, err)
		require.NotZero(t, norm-norm)
		scaleIs(LossScale{Scale: math.Ldexp(1, 15-i), Skipped: i + 1})
	}

	require.Zero(t, steps())
	require.Equal(t, model.Params[0].Value.Float32s(), before)
	// With a scale of 1, the scale cannot be the cause of the overflow.
	require.NoError(t, machine.SetLossScale(LossScale{Scale: 2, Good: 5, Skipped: 3}))
	require.ErrorContains(t, errOf(machine.Value(b.Params[0].Deriv())), "dropped")
	require.ErrorContains(t, errOf(machine.Update()), "run the machine again")
	run()
	require.NoError(t, errOf(machine.Update()))
	run()
	require.ErrorIs(t, errOf(machine.Update()), ErrNonFinite)
	scaleIs(LossScale{Scale: 1, Skipped: 5})

	copy(weight, old)
	require.NoError(t, errors.Join(machine.Upload(b.Params[last]),
		machine.SetLossScale(LossScale{Scale: 8, Good: 1998, Skipped: 5})))
	for i := range 3 {
		run()
		g := valueIn(t, machine, b.Params[1].Deriv())
		tape := gorgonia.NewTapeMachine(b.G)
		require.NoError(t, errors.Join(machine.Download(), tape.RunAll()))
		require.Less(t, distance(t, g, b.Params[1].Deriv().Value()), 1e-2)
		tape.Close()
		require.NoError(t, errOf(machine.Update()))
		scaleIs([]LossScale{{8, 1999, 5}, {16, 0, 5}, {16, 1, 5}}[i])
	}

	require.Equal(t, int64(3), steps())
}

// TestScaledOutputLayer checks losses that are only a part of the cost, so that their gradient is not
// equal to the scale, in variants that include recomputation for the gradient.
func TestScaledOutputLayer(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	for name, head := range map[string]func(x, w, targets *gorgonia.Node) (*gorgonia.Node, error){
		"fused": op.LinearCrossEntropy,
		"separate": func(x, w, targets *gorgonia.Node) (*gorgonia.Node, error) {
			logits, err := op.Linear(x, w)
			if err != nil {
				return nil, err
			}
			return op.CrossEntropy(logits, targets)
		},
		"recomputed": func(x, w, targets *gorgonia.Node) (*gorgonia.Node, error) {
			return autodiff.Recompute(gorgonia.Nodes{x, w, targets},
				func(in gorgonia.Nodes) (*gorgonia.Node, error) {
					return op.LinearCrossEntropy(in[0], in[1], in[2])
				})
		},
	} {
		g := gorgonia.NewGraph()
		r := rand.New(rand.NewPCG(randtest.Seed(t), 1))
		x, w := randomNode(g, r, 1, "x", 3, 4), randomNode(g, r, 1, "w", 5, 4)
		targets := intNode(g, "targets", []int{0, 4, 2})
		loss, err := head(x, w, targets)
		require.NoError(t, err)
		cost := gorgonia.Must(gorgonia.Add(gorgonia.Must(gorgonia.Mul(loss,
			gorgonia.NewConstant(float32(0.3)))), gorgonia.Must(gorgonia.Mean(x))))
		require.NoError(t, errOf(gorgonia.Grad(cost, x, w)))
		tape := tapeMachine(t, g)
		require.NoError(t, tape.RunAll())
		for _, variant := range []string{"separate", "fused"} {
			scaled := openMachine(t, device, g, WithParams(x, w), scaledGradients,
				WithVariants("LinearCrossEntropy="+variant))
			// Not a power of two, so that a missing or additional factor changes the result.
			require.NoError(t, scaled.SetLossScale(LossScale{Scale: 1000}))
			plain := openMachine(t, device, g, WithParams(x, w),
				WithVariants("LinearCrossEntropy="+variant))
			for _, m := range []*Machine{scaled, plain} {
				require.NoError(t, m.RunAll())
				for _, p := range []*gorgonia.Node{x, w} {
					require.Less(t, distance(t, valueIn(t, m, p.Deriv()), p.Deriv().Value()), 1e-5,
						"%v, %v, %v", name, variant, p.Name())
				}
			}
			if name == "fused" { // the factor is known in advance
				for _, c := range plain.runner.Program.Calls {
					require.NotEqual(t, "LinearCrossEntropyGrad", c.Op, "gradients are scaled")
				}
			}
		}
	}
}

// TestOverflowInKasmina checks that a layer made with StopOnNonFinite does not stop because of a gradient
// that the loss scale has made infinite, but counts it, both on the device and, for a blueprint without a
// kernel, on the host.
func TestOverflowInKasmina(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	own, err := ownKind()
	require.NoError(t, err)
	for i := range 4 {
		scale, kind := []float64{1, 0x1p127}[i%2], []blueprints.Kind{blueprints.Residual, own}[i/2]
		g := gorgonia.NewGraph()
		input := func(name string, values ...float32) *gorgonia.Node {
			shape := tensor.Shape{len(values) / 2, 2}
			return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(shape...),
				tensor.WithBacking(values)), gorgonia.WithName(name))
		}
		lattice, err := state.NewLattice(1, 2, state.WithoutGates())
		require.NoError(t, err)
		require.NoError(t, errors.Join(
			lattice.RequestGermination(0, state.GerminationRequest{Slot: 1,
				Kind: kind}), lattice.Transition(0, state.Training)))
		x, weights := input("x", 1, 2, 3, 4), input("weights", 0, 0, 0, 0)
		scales := gorgonia.NodeFromAny(g, tensor.New(tensor.WithBacking([]float32{1, 1})),
			gorgonia.WithName("scales"))
		targets := intNode(g, "targets", []int{0, 1})
		y, err := op.Kasmina(x, weights, scales, lattice, op.StopOnNonFinite())
		require.NoError(t, err)
		loss := gorgonia.Must(gorgonia.Mul(gorgonia.Must(op.CrossEntropy(y, targets)),
			gorgonia.NewConstant(float32(1e20))))
		require.NoError(t, errOf(gorgonia.Grad(loss, x)))
		m := openMachine(t, device, g, WithParams(x),
			WithOutputs(loss), scaledGradients)
		require.NoError(t, errors.Join(m.SetLossScale(LossScale{Scale: scale}), m.RunAll()))
		v, err := m.Value(x.Deriv())
		require.NoError(t, err, scale)
		require.Equal(t, scale == 1, flat(t, v)[0]-flat(t, v)[0] == 0, v)
		require.Equal(t, scale > 1, lattice.Report().Seeds[0].NonFiniteG > 0, kind)
	}
}

// TestLossScaleErrors checks the errors for graphs that cannot be scaled, and for invalid arguments.
func TestLossScaleErrors(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	// open returns a machine for Σ w² ⊙ x, derived by derive.
	open := func(derive func(loss, w *gorgonia.Node) error) (*Machine, error) {
		g := gorgonia.NewGraph()
		value := tensor.New(tensor.WithShape(3), tensor.WithBacking([]float32{1, 2, 3}))
		w := gorgonia.NodeFromAny(g, value, gorgonia.WithName("w"))
		x := gorgonia.NodeFromAny(g, value, gorgonia.WithName("x"))
		loss := gorgonia.Must(
			gorgonia.Sum(gorgonia.Must(gorgonia.HadamardProd(gorgonia.Must(gorgonia.Square(w)),
				x))))
		require.NoError(t, derive(loss, w))
		m, err := NewMachine(device, g, WithParams(w), scaledGradients)
		if err == nil {
			t.Cleanup(func() { m.Close() })
		}
		return m, err
	}

	grad := func(loss, w *gorgonia.Node) error { _, err := gorgonia.Grad(loss, w); return err }
	wants := func(err error, want string) {
		t.Helper()
		require.ErrorContains(t, err, want)
	}
	_, err := open(func(loss, w *gorgonia.Node) error {
		up := gorgonia.NewScalar(loss.Graph(), tensor.Float32, gorgonia.WithName("up"),
			gorgonia.WithValue(float32(2)))
		_, err := gorgonia.Backpropagate(gorgonia.Nodes{loss},
			gorgonia.Nodes{up}, gorgonia.Nodes{w})
		return err
	})

	wants(err, "derive the parameters with gorgonia.Grad")
	_, err = open(func(loss, w *gorgonia.Node) error {
		if err := grad(loss, w); err != nil {
			return err
		}
		_, err := gorgonia.Square(w.Deriv())
		return err
	})

	wants(err, "not linear in the gradient of the loss")
	m, err := open(grad)
	require.NoError(t, err)
	for want, s := range map[string]LossScale{"Scale is 0.5": {Scale: 0.5},
		"Scale is NaN": {Scale: math.NaN()}, "Scale is +Inf": {Scale: math.Inf(1)},
		"Good is -1": {Scale: 1, Good: -1}, "Skipped -2": {Scale: 1, Skipped: -2}} {
		wants(m.SetLossScale(s), want)
	}

	require.Equal(t, LossScale{Scale: firstLossScale}, m.LossScale())
	g, _, _ := stockGraph(t)
	plain := openMachine(t, device, g, scaledGradients)
	wants(plain.SetLossScale(LossScale{Scale: 2}), "does not scale")
	require.Equal(t, LossScale{Scale: 1}, plain.LossScale())
}
