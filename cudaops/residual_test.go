package cudaops

import (
	"math/rand/v2"
	"path/filepath"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/op"
)

// normedGraph is s = x + (x·uᵀ)·wᵀ, y = norm(s), r = s + perceptron(y) and norm(r) of random numbers, with the gradients of all parameters;
// of the nodes that are kept the first four are these.
func normedGraph(t *testing.T, seed uint64, rows, f, d int) (*gorgonia.ExprGraph, gorgonia.Nodes, gorgonia.Nodes) {
	t.Helper()
	g := gorgonia.NewGraph()
	matrix := randomMatrices(g, seed, 5, 1.0/8)
	weight := func(name string) *gorgonia.Node {
		w := make([]float32, d)
		for i := range w {
			w[i] = 1 + float32(i%7)/8
		}
		return gorgonia.NewVector(g, tensor.Float32, gorgonia.WithName(name), gorgonia.WithShape(d), gorgonia.WithValue(tensor.New(tensor.WithBacking(w))))
	}
	must := func(n *gorgonia.Node, err error) *gorgonia.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	in := gorgonia.Nodes{matrix("x", rows, d), matrix("v", d, d), matrix("u", f, d), matrix("w", d, f), weight("a"), matrix("gate", f, d), matrix("up", f, d),
		matrix("down", d, f), weight("b")}
	x := must(op.Linear(in[0], in[1]))
	s := must(gorgonia.Add(x, must(op.Linear(must(op.Linear(x, in[2])), in[3]))))
	y := must(op.RMSNorm(s, in[4], 1e-5))
	r := must(gorgonia.Add(must(op.SiLUMLP(y, in[5], in[6], in[7])), s))
	z := must(op.RMSNorm(r, in[8], 1e-3))
	return g, in[1:], append(gorgonia.Nodes{s, y, r}, withGradients(t, z, matrix("with", rows, d), in)...)
}

// TestProductNormWays wants the same values of sums and norms whether the product before them computes them or not, run after run.
func TestProductNormWays(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	check := func(t *testing.T, device *Device, rows, f, d int, tolerance float64, norms int, opts ...MachineOption) {
		var values []gorgonia.Value
		for i, rule := range []string{"ProductNorm=separate", "ProductNorm=fused"} {
			g, params, keep := normedGraph(t, seed, rows, f, d)
			m := newFuseMachine(t, device, g, params, keep, append(opts, WithWays(rule)))
			for range 3 {
				values = valuesOf(t, m, keep, values, tolerance)
			}
			fused := 0
			for _, task := range m.program.tasks {
				if task.node == keep[1] || task.node == keep[3] {
					fused--
				}
			}
			if want := -2 + i*norms; fused != want {
				t.Errorf("%s: %d norms have tasks of their own, want %d", rule, -fused, -want)
			}
		}
	}
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		check(t, device, 6, 7, 5, 1e-5, 2, fakeOption)
	})
	t.Run("bfloat16", func(t *testing.T) {
		device := openGPU(t)
		norms := 0
		if device.info.Capability() == 90 {
			norms = 2
		}
		check(t, device, 700, 264, 776, 3e-2, norms, WithPrecision(BFloat16), WithTuning(TuneOff))
	})
	t.Run("float8", func(t *testing.T) {
		device := openGPU(t)
		check(t, device, 700, 272, 784, 0.3, 0, WithPrecision(Float8), WithTuning(TuneOff))
	})
}

// TestProductNormTuned wants products that are worth timing timed with their norms, of one shape once, and no others.
func TestProductNormTuned(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	for _, least := range []float64{1, 1e9} {
		device, _, fakeOption := openFake(t, fake.Config{Devices: smallCache("GPU")})
		g, params, keep := normedGraph(t, 1, 6, 7, 5)
		private := func(c *machineConfig) error {
			c.tuneLeast, c.tunePath = least, filepath.Join(t.TempDir(), "tune.json")
			return nil
		}
		m := newFuseMachine(t, device, g, params, keep, []MachineOption{fakeOption, private, WithTuning(TuneCached)})
		timed := 0
		for _, c := range m.Choices() {
			if c.Op == "ProductNorm" {
				if timed++; c.Source != Measured || c.Of != 2 {
					t.Errorf("%+v", c)
				}
			}
		}
		if want := map[float64]int{1: 1, 1e9: 0}[least]; timed != want {
			t.Errorf("least %g: %d timed, want %d", least, timed, want)
		}
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
	}
}
