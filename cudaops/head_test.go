package cudaops

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/crossentropy"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/op"
)

func (k *fakeKernels) LinearCrossEntropyWays(gemm.LinearCrossEntropyShape, gpu.DType) []kernel.Way {
	return []kernel.Way{{Family: "fused"}}
}

func (k *fakeKernels) LinearCrossEntropyWorkspace(a gemm.LinearCrossEntropyShape) int {
	return 4 * a.Rows
}

func (k *fakeKernels) LinearCrossEntropy(s gpu.Stream, a gemm.LinearCrossEntropy) error {
	return k.launch(s, func(l *fake.Launch) {
		fake.Slice[byte](l, a.Workspace, 4*a.Rows)
		x, scale := floatsAt(l, a.X, a.Rows*a.D), floatsAt(l, a.Scale, 1)[0]*upstream(l, crossentropy.Forward{Grad: a.Grad})
		terms, scaled := floatsAt(l, a.Terms, a.Rows*a.V), floatsAt(l, a.Scaled, a.Rows*a.D)
		losses, factors := floatsAt(l, a.Losses, a.Rows), floatsAt(l, a.Factors, a.Rows)
		cpu.Gemm(false, true, a.Rows, a.V, a.D, 1, x, a.D, floatsAt(l, a.W, a.V*a.D), a.D, 0, terms, a.V)
		for r, target := range intsAt(l, a.Targets, a.Rows) {
			row := terms[r*a.V:][:a.V]
			losses[r], factors[r] = 0, 0
			if target < 0 {
				clear(row)
			} else {
				z := cpu.ExpSub(row, row, row[target])
				losses[r], factors[r] = float32(math.Log(float64(z))), scale/z
				row[target] -= z
			}
			for i := range a.D {
				scaled[r*a.D+i] = factors[r] * x[r*a.D+i]
			}
		}
	})
}

func (k *fakeKernels) ScaleRows(s gpu.Stream, x, factors gpu.Ptr, rows, d int) error {
	return k.launch(s, func(l *fake.Launch) {
		f := floatsAt(l, factors, rows)
		for i := range floatsAt(l, x, rows*d) {
			floatsAt(l, x, rows*d)[i] *= f[i/d]
		}
	})
}

// outputLayer is a graph of an output layer with its loss: x [rows, d], w [v, d] and targets, of which an eighth do not count. The
// loss is multiplied by 0.3.
func outputLayer(t *testing.T, seed uint64, rows, v, d int) (g *gorgonia.ExprGraph, params, keep gorgonia.Nodes) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 0))
	g = gorgonia.NewGraph()
	matrix := func(name string, rows int, deviation float32) *gorgonia.Node {
		values := make([]float32, rows*d)
		for i := range values {
			values[i] = deviation * float32(r.NormFloat64())
		}
		return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(rows, d), tensor.WithBacking(values)), gorgonia.WithName(name))
	}
	ids := make([]int, rows)
	for i := range ids {
		if ids[i] = r.IntN(v); r.IntN(8) == 0 {
			ids[i] = -1 - r.IntN(9)
		}
	}
	ids[0] = v - 1
	x, w := matrix("x", rows, 0.1), matrix("w", v, 1)
	targets := gorgonia.NodeFromAny(g, tensor.New(tensor.WithBacking(ids)), gorgonia.WithName("targets"))
	loss, err := op.LinearCrossEntropy(x, w, targets)
	if err != nil {
		t.Fatal(err)
	}
	cost := gorgonia.Must(gorgonia.Mul(loss, gorgonia.NewConstant(float32(0.3))))
	grads, err := gorgonia.Grad(cost, x, w)
	if err != nil {
		t.Fatal(err)
	}
	return g, gorgonia.Nodes{w}, append(gorgonia.Nodes{loss}, grads...)
}

// headWay is the way in which a machine has chosen to compute the output layer, "" if there was no choice.
func headWay(m *Machine) string {
	for _, c := range m.Choices() {
		if c.Op == "LinearCrossEntropy" {
			return c.Way
		}
	}
	return ""
}

// TestOutputLayerWays wants the loss and the gradients of Gorgonia's machine, whether a pass over logits forms the gradient or the
// exponentials come with the product; of a batch that is too large for that machine, those of the first way.
func TestOutputLayerWays(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	check := func(t *testing.T, device *Device, rows, v, d int, tolerance float64, reference, fuses bool, opts ...MachineOption) {
		t.Helper()
		var want []gorgonia.Value
		if reference {
			g, _, keep := outputLayer(t, seed, rows, v, d)
			tape := gorgonia.NewTapeMachine(g)
			defer tape.Close()
			if err := tape.RunAll(); err != nil {
				t.Fatal(err)
			}
			for _, n := range keep {
				want = append(want, n.Value())
			}
		}
		for _, way := range []string{"separate", "fused"} {
			g, params, keep := outputLayer(t, seed, rows, v, d)
			m := newFuseMachine(t, device, g, params, keep, append(opts, WithWays("LinearCrossEntropy="+way)))
			if err := m.RunAll(); err != nil {
				t.Fatal(err)
			}
			for i, n := range keep {
				value, err := m.Value(n)
				if err != nil {
					t.Fatal(err)
				}
				if len(want) <= i {
					want = append(want, value)
				} else if diff := distance(t, value, want[i]); !(diff < tolerance) {
					t.Errorf("%s: value %d differs by %.2g", way, i, diff)
				}
			}
			if got := headWay(m); fuses && got != way || !fuses && got != "" {
				t.Errorf("%s: the way is %q", way, got)
			}
		}
	}
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		check(t, device, 7, 5, 4, 1e-5, true, true, fakeOption)
	})
	for _, s := range []struct {
		rows, v, d int
		large      bool
	}{{300, 1000, 520, false}, {129, 264, 768, false}, {70, 1004, 512, false}, {6000, 50304, 1032, true}} {
		t.Run(fmt.Sprintf("bfloat16/%dx%dx%d", s.rows, s.v, s.d), func(t *testing.T) {
			if s.large && testing.Short() {
				t.Skip("takes seconds")
			}
			device := openGPU(t)
			fuses := device.info.Capability() == 90 && s.v%8 == 0
			check(t, device, s.rows, s.v, s.d, 1.5e-2, !s.large, fuses, WithPrecision(BFloat16), WithTuning(TuneOff))
		})
	}
}
