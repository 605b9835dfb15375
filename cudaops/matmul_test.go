package cudaops

import (
	"bytes"
	"errors"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/op"
)

// ownProducts is kernels that have a way of their own to multiply, and how often each is launched.
type ownProducts struct {
	kernels.Launcher
	plain  *int
	adding *int
}

func (o ownProducts) Ways(params any) []kernel.Way {
	if _, ok := params.(gemm.Product); ok {
		return []kernel.Way{{Family: "hopper", Size: 256}}
	}
	return o.Launcher.Ways(params)
}

func (o ownProducts) Launch(s gpu.Stream, params any) error {
	if a, ok := params.(gemm.Product); ok {
		if a.C != 0 && (a.C == a.ScaleX || a.C == a.ScaleW) {
			return errors.New("the matrix that is added lies where factors are")
		}
		if a.C != 0 {
			*o.adding++
		} else {
			*o.plain++
		}
	}
	return o.Launcher.Launch(s, params)
}

// residualGraph is h = x·vᵀ, y = h + (h·uᵀ)·wᵀ of random numbers with its gradients.
func residualGraph(t *testing.T, seed uint64, rows, f, d int) (*gorgonia.ExprGraph, gorgonia.Nodes, gorgonia.Nodes) {
	t.Helper()
	g := gorgonia.NewGraph()
	matrix := randomMatrices(g, seed, 3, 1.0/8)
	in := gorgonia.Nodes{matrix("x", rows, d), matrix("v", d, d), matrix("u", f, d), matrix("w", d, f)}
	h := gorgonia.Must(op.Linear(in[0], in[1]))
	y := gorgonia.Must(gorgonia.Add(h, gorgonia.Must(op.Linear(gorgonia.Must(op.Linear(h, in[2])), in[3]))))
	return g, in[1:], withGradients(t, y, matrix("with", rows, d), in)
}

// TestProductWays wants the same values of products, of which some have another matrix added, in whatever way.
func TestProductWays(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	check := func(t *testing.T, device *Device, rows, f, d int, tolerance float64, own bool, opts ...MachineOption) {
		var values []gorgonia.Value
		for i, rule := range []string{"Matmul!=hopper-*", "Matmul=hopper-*"} {
			g, params, keep := residualGraph(t, seed, rows, f, d)
			m := newFuseMachine(t, device, g, params, keep, append(opts, WithWays(rule)))
			values = valuesOf(t, m, keep, values, tolerance)
			ours, plus := 0, 0
			for _, c := range m.Choices() {
				if c.Op == "Matmul" && strings.HasPrefix(c.Way, "hopper") {
					ours++
					if strings.HasSuffix(c.Shape, "with a matrix added") {
						plus++
					}
				}
			}
			if want := i == 1 && own; (ours > 1) != want || (plus > 0) != want {
				t.Errorf("%s: %d products are of this module's own, %d with a matrix added; want some: %v", rule, ours, plus, want)
			}
		}
	}
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		var plain, adding int
		check(t, device, 6, 7, 5, 1e-5, true, fakeOption, withOwnProducts(&plain, &adding))
		if plain == 0 || adding == 0 {
			t.Errorf("launched %d times, and %d times with a matrix added", plain, adding)
		}
	})
	t.Run("bfloat16", func(t *testing.T) {
		device := openGPU(t)
		check(t, device, 300, 776, 648, 2e-2, device.info.Capability() == 90, WithPrecision(BFloat16), WithTuning(TuneOff))
	})
}

// withOwnProducts has the machine's kernels be [ownProducts].
func withOwnProducts(plain, adding *int) MachineOption {
	return withKernels(func(k kernels.Launcher) kernels.Launcher { return ownProducts{k, plain, adding} })
}

// TestProductTuned wants the kernels timed beside cuBLASLt's ways where products are worth it, and what is left of them used.
func TestProductTuned(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	for _, c := range []struct {
		least float64
		blas  time.Duration // of each of three ways
		own   bool
	}{{1, time.Second, true}, {1, 0, false}, {1e9, time.Second, false}} {
		way := fake.Way{Took: c.blas}
		device, _, fakeOption := openFake(t, fake.Config{Ways: [3]fake.Way{way, way, way}, Devices: smallCache("GPU")})
		g, params, keep := residualGraph(t, 1, 6, 7, 5)
		var log bytes.Buffer
		var plain, adding int
		private := func(m *machineConfig) error {
			m.tuneLeast, m.tunePath = c.least, filepath.Join(t.TempDir(), "tune.json")
			return nil
		}
		m := newFuseMachine(t, device, g, params, keep, []MachineOption{fakeOption, withOwnProducts(&plain, &adding), private,
			WithTuning(TuneCached), WithLogger(slog.New(slog.NewTextHandler(&log, nil)))})
		own, all := map[bool]bool{}, 0 // whether x·wᵀ, and others, have a way of this module's own
		for _, choice := range m.Choices() {
			if choice.Op == "Matmul" {
				forward := strings.Contains(choice.Shape, "TransB:true")
				own[forward] = own[forward] || choice.Way == "hopper-256"
				all++
			}
		}
		if own[false] != c.own || own[true] != c.own || all < 3 {
			t.Errorf("%+v: of %d products of this module's own are: %v; %s", c, all, own, log.String())
		}
		if plain, adding = 0, 0; m.RunAll() != nil || (plain > 0) != c.own || (adding > 0) != c.own {
			t.Errorf("%+v: run in this way %d times, and %d times with a matrix added", c, plain, adding)
		}
	}
}

// TestProductTiny wants products that are too small to be timed left alone by a rule that leaves several ways, and another to have its way
// with them.
func TestProductTiny(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	for rule, want := range map[string]Choice{
		"Matmul=*":        {Way: "0", Source: ByRule},
		"Matmul=hopper-*": {Way: "hopper-256", Source: Forced},
	} {
		t.Setenv("KASMINA_WAYS", rule)
		device, _, fakeOption := openFake(t, fake.Config{Devices: smallCache("GPU")})
		g, params, keep := residualGraph(t, 1, 6, 7, 5)
		private := func(c *machineConfig) error { c.tunePath = filepath.Join(t.TempDir(), "tune.json"); return nil }
		m := newFuseMachine(t, device, g, params, keep, []MachineOption{fakeOption, withOwnProducts(new(int), new(int)), private,
			WithTuning(TuneCached)})
		products := 0
		for _, c := range m.Choices() {
			if c.Op != "Matmul" || c.Of < 2 {
				continue
			}
			if products++; c.Source != want.Source || !strings.HasPrefix(c.Way, want.Way) {
				t.Errorf("%s: %+v", rule, c)
			}
		}
		if timings := m.chooser.Timings(); products == 0 || timings > 0 {
			t.Errorf("%s: %d products, %d timings", rule, products, timings)
		}
	}
}

// TestProductCounters wants captured runs to compute, bit by bit, what one that is not captured does, where products find their workspaces
// zero instead of setting them to zero, and each to have workspace for itself.
func TestProductCounters(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	check := func(t *testing.T, device *Device, rows, f, d int, opts ...MachineOption) *Machine {
		g, params, keep := residualGraph(t, rand.Uint64(), rows, f, d)
		m := newFuseMachine(t, device, g, params, keep, opts)
		first := valuesOf(t, m, keep, nil, 0)
		for i := range 3 + ProfileSteps { // one is captured, and then replayed
			if i == 3 { // the last ones of a profile are captured with marks, and replayed
				if err := m.StartProfile(); err != nil {
					t.Fatal(err)
				}
			}
			for i, v := range valuesOf(t, m, keep, nil, 0) {
				if got := distance(t, v, first[i]); got != 0 {
					t.Errorf("value %d differs by %.2g", i, got)
				}
			}
		}
		return m
	}
	t.Run("fake", func(t *testing.T) {
		slow := fake.Way{Took: time.Second}
		device, _, fakeOption := openFake(t, fake.Config{Ways: [3]fake.Way{slow, {}, slow}, Devices: smallCache("GPU")})
		private := func(c *machineConfig) error {
			c.tuneLeast, c.tunePath = 1, filepath.Join(t.TempDir(), "tune.json")
			return nil
		}
		for _, opt := range []MachineOption{func(*machineConfig) error { return nil }, WithMonitor(2)} {
			m := check(t, device, 6, 7, 5, fakeOption, private, WithTuning(TuneCached), opt)
			products := 0
			for _, task := range m.runner.Program.Calls {
				if task.FLOPs > 0 {
					products++
				}
			}
			if z := m.runner.Program.Zeros; z == nil || z.Extent() != products*1024 || products < 7 {
				t.Errorf("%d products, and %+v to be set to zero, want 1024 bytes for each", products, z)
			}
		}
	})
	t.Run("bfloat16", func(t *testing.T) {
		m := check(t, openGPU(t), 16384, 2816, 1024, WithPrecision(BFloat16), WithTuning(TuneOff), WithWays("Matmul!=hopper-*"))
		if z := m.runner.Program.Zeros; z != nil {
			t.Logf("%d bytes are set to zero", z.Extent())
		}
	})
}

// TestProductScaled wants products with factors left to cuBLASLt, whatever was planned for others of their shape before.
func TestProductScaled(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	device, _, fakeOption := openFake(t, fake.Config{})
	var plain, adding int
	var want []gorgonia.Value
	for i, rule := range []string{"Matmul!=hopper-*", "Matmul=hopper-*"} {
		g, r := gorgonia.NewGraph(), rand.New(rand.NewPCG(1, 2))
		square := func(name string) *gorgonia.Node {
			x := make([]float32, 36)
			for i := range x {
				x[i] = float32(r.NormFloat64())
			}
			return gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName(name), gorgonia.WithShape(6, 6),
				gorgonia.WithValue(tensor.New(tensor.WithShape(6, 6), tensor.WithBacking(x))))
		}
		x, w := square("x"), square("w")
		y := gorgonia.Must(op.NewtonSchulz(gorgonia.Must(gorgonia.Mul(x, w)), 2)) // whose squares have factors, behind a product that has none
		m := newFuseMachine(t, device, g, gorgonia.Nodes{x, w}, gorgonia.Nodes{y}, []MachineOption{fakeOption,
			withOwnProducts(&plain, &adding), WithWays(rule, "NewtonSchulz=products")})
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		v, err := m.Value(y)
		if err != nil {
			t.Fatal(err)
		}
		if want = append(want, v); i > 0 && !(distance(t, v, want[0]) < 1e-5) {
			t.Errorf("%s: the result differs by %.2g", rule, distance(t, v, want[0]))
		}
	}
	if plain == 0 {
		t.Error("no product is computed in a way of this module's own")
	}

	for _, order := range [][][2]float32{{{1, 0}, {1, 1}, {2, 1}}, {{2, 1}, {1, 1}, {1, 0}}} { // Alpha and Beta
		g, params, keep := residualGraph(t, 1, 6, 7, 5)
		m := newFuseMachine(t, device, g, params, keep, []MachineOption{fakeOption, withOwnProducts(&plain, &adding), WithWays("Matmul=hopper-*")})
		for _, factors := range order {
			c := &program.Call{Params: program.Matmul{Spec: gpu.MatmulSpec{M: 16, N: 16, K: 16}, Alpha: factors[0], Beta: factors[1]}}
			if err := m.chooser.Program(&program.Program{Calls: []*program.Call{c}}); err != nil {
				t.Fatal(err)
			}
			p := m.runner.Products.Find(c.Params.(program.Matmul))
			if own := p.Way >= len(p.BLAS); own != (factors[0] == 1) {
				t.Errorf("in the order %v, %v: in a way of this module's own: %v", order, factors, own)
			}
		}
	}
}
