package cudaops

import (
	"bytes"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/op"
)

// perceptronGraph is a gated perceptron of random numbers with its gradients; the first node is its result.
func perceptronGraph(t *testing.T, seed uint64, rows, f, d int) (*gorgonia.ExprGraph, gorgonia.Nodes, gorgonia.Nodes) {
	t.Helper()
	g := gorgonia.NewGraph()
	matrix := randomMatrices(g, seed, 1, 1.0/4)
	in := gorgonia.Nodes{matrix("x", rows, d), matrix("gate", f, d), matrix("up", f, d), matrix("down", d, f)}
	y, err := op.SiLUMLP(in[0], in[1], in[2], in[3])
	if err != nil {
		t.Fatal(err)
	}
	return g, in[1:], withGradients(t, y, matrix("with", rows, d), in)
}

// TestPerceptronWays wants the same values of a product and a gate, whether one kernel computes both or not.
func TestPerceptronWays(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	check := func(t *testing.T, device *Device, rows, f, d int, tolerance float64, fuses bool, opts ...MachineOption) {
		var values []gorgonia.Value
		for i, rule := range []string{"SiLUProduct*=separate", "SiLUProduct*=fused"} {
			g, params, keep := perceptronGraph(t, seed, rows, f, d)
			m := newFuseMachine(t, device, g, params, keep, append(opts, WithWays(rule)))
			values = valuesOf(t, m, keep, values, tolerance)
			fused := map[string]bool{}
			for _, c := range m.Choices() {
				if strings.HasPrefix(c.Op, "SiLUProduct") {
					fused[c.Op] = strings.HasPrefix(c.Way, "fused")
				}
			}
			if want := i == 1 && fuses; fused["SiLUProduct"] != want || fused["SiLUProductBackward"] != want {
				t.Errorf("%s: fused %v, want %v", rule, fused, want)
			}
		}
	}
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		check(t, device, 6, 7, 5, 1e-5, true, fakeOption)
	})
	t.Run("bfloat16", func(t *testing.T) {
		device := openGPU(t)
		check(t, device, 200, 136, 72, 2e-2, device.info.Capability() == 90, WithPrecision(BFloat16), WithTuning(TuneOff))
	})
}

// TestPerceptronTuned wants products that are worth timing timed with their gates, and no others.
func TestPerceptronTuned(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	for _, least := range []float64{1, 1e9} {
		device, _, fakeOption := openFake(t, fake.Config{Devices: smallCache("GPU")})
		g, params, keep := perceptronGraph(t, 1, 6, 7, 5)
		var log bytes.Buffer
		private := func(c *machineConfig) error {
			c.tuneLeast, c.tunePath = least, filepath.Join(t.TempDir(), "tune.json")
			return nil
		}
		m := newFuseMachine(t, device, g, params, keep, []MachineOption{fakeOption, private, WithTuning(TuneCached),
			WithLogger(slog.New(slog.NewTextHandler(&log, nil)))})
		timed := 0
		for _, c := range m.Choices() {
			if c.Op == "SiLUProduct" || c.Op == "SiLUProductBackward" {
				if timed++; c.Source != Measured || c.Of != 2 {
					t.Errorf("%+v", c)
				}
			}
		}
		if want := map[float64]int{1: 2, 1e9: 0}[least]; timed != want {
			t.Errorf("least %g: %d pairs timed, want %d; %s", least, timed, want, log.String())
		}
	}
}
