package cudaops

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// TestNewtonSchulz compares the iteration and its gradient with Gorgonia's machine, on wide, square and tall matrices.
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
	t.Run("bfloat16", func(t *testing.T) { testNewtonSchulz(t, openGPU(t), few(2, 1), 5e-2, WithPrecision(BFloat16)) })
	t.Run("float16", func(t *testing.T) { testNewtonSchulz(t, openGPU(t), few(2, 1), 1e-2, WithPrecision(Float16)) })
}

func testNewtonSchulz(t *testing.T, device *Device, most int, tolerance float64, opts ...MachineOption) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	for _, s := range []shape{{1, 9}, {7, 13}, {13, 7}, {11, 11}, {65, 33}} {
		for steps := 1; steps <= most; steps++ {
			t.Run(fmt.Sprint(s, " ", steps), func(t *testing.T) {
				g := gorgonia.NewGraph()
				input := func(name string) *gorgonia.Node {
					values := make([]float32, program.Size(s))
					for i := range values {
						values[i] = float32(r.NormFloat64())
					}
					return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(s...), tensor.WithBacking(values)), gorgonia.WithName(name))
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
				m, err := NewMachine(device, g, append(opts, WithParams(x), WithOutputs(y), WithStrict())...)
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
				want := make([]float32, program.Size(s))
				cpu.NewtonSchulz(want, flat(t, x.Value()), s[0], s[1], steps)
				for n, want := range map[*gorgonia.Node]gorgonia.Value{y: tensor.New(tensor.WithShape(s...), tensor.WithBacking(want)),
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

// iterationWays runs a test in every way of the iteration: on the fake, and on a GPU in bfloat16, where only Hopper has them all.
func iterationWays(t *testing.T, test func(t *testing.T, device *Device, way string, tolerance float64, opts ...MachineOption)) {
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
	return slices.ContainsFunc(m.Choices(), func(c Choice) bool { return c.Op == "NewtonSchulz" && c.Way == way })
}

func TestNewtonSchulzWays(t *testing.T) {
	iterationWays(t, func(t *testing.T, device *Device, way string, tolerance float64, opts ...MachineOption) {
		seed := rand.Uint64()
		t.Logf("random seed %d", seed)
		r := rand.New(rand.NewPCG(seed, 1))
		for _, s := range []shape{{8, 24}, {16, 72}, {72, 16}, {136, 136}, {24, 1000}} {
			for steps := 1; steps <= few(7, 5); steps++ {
				x := make([]float32, program.Size(s))
				for i := range x {
					x[i] = float32(r.NormFloat64())
				}
				g := gorgonia.NewGraph()
				y, err := op.NewtonSchulz(gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(s...), tensor.WithBacking(x)), gorgonia.WithName("x")), steps)
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
				want := make([]float32, program.Size(s))
				cpu.NewtonSchulz(want, x, s[0], s[1], steps)
				d := distance(t, v, tensor.New(tensor.WithShape(s...), tensor.WithBacking(want)))
				if !(d < tolerance) || !chose(m, way) {
					t.Errorf("%v, %d steps: differs by %.2g; choices %+v", s, steps, d, m.Choices())
				}
			}
		}
	})
}

// TestNewtonSchulzTuned wants iterations that are worth timing timed in every way, and no others, whatever a rule leaves of the ways.
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
		x := tensor.New(tensor.WithShape(c.shape...), tensor.WithBacking(tensor.Random(tensor.Float32, program.Size(c.shape))))
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

// TestMuonTogether updates matrices of which some have the same shape, and wants what the optimiser makes of them on the CPU.
func TestMuonTogether(t *testing.T) {
	iterationWays(t, func(t *testing.T, device *Device, way string, tolerance float64, opts ...MachineOption) {
		seed := rand.Uint64()
		t.Logf("random seed %d", seed)
		r := rand.New(rand.NewPCG(seed, 1))
		g := gorgonia.NewGraph()
		var params, terms gorgonia.Nodes
		var start [][]float32
		for i, s := range []shape{{16, 40}, {5, 7}, {16, 40}, {40, 16}, {24, 24}, {16, 40}, {5, 7}, {40, 16}} {
			input := func(name string) *gorgonia.Node {
				x := make([]float32, program.Size(s))
				for i := range x {
					x[i] = float32(r.NormFloat64())
				}
				return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(s...), tensor.WithBacking(x)), gorgonia.WithName(name))
			}
			w := input(fmt.Sprint("w", i))
			params = append(params, w)
			start = append(start, slices.Clone(flat(t, w.Value())))
			terms = append(terms, gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.HadamardProd(w, input(fmt.Sprint("c", i)))))))
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
			if err := errors.Join(tape.RunAll(), host.Step(gorgonia.NodesToValueGrads(params))); err != nil {
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
