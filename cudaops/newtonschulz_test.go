package cudaops

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/op"
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
					values := make([]float32, size(s))
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
				want := make([]float32, size(s))
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
