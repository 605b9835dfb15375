package cudaops

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/op"
)

// normChain is a loss behind norms of rows of d elements, each of the result of the one before, and their weights.
func normChain(t *testing.T, seed uint64, norms, rows, d int, shared bool) (loss *gorgonia.Node, weights gorgonia.Nodes) {
	t.Helper()
	g, r := gorgonia.NewGraph(), rand.New(rand.NewPCG(seed, 3))
	values := func(shape ...int) gorgonia.NodeConsOpt {
		x := make([]float32, tensor.Shape(shape).TotalSize())
		for i := range x {
			x[i] = float32(r.NormFloat64())
		}
		return gorgonia.WithValue(tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x)))
	}
	y := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(rows, d), gorgonia.WithName("x"), values(rows, d))
	for i := range norms {
		if i == 0 || !shared {
			weights = append(weights, gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(d), gorgonia.WithName(fmt.Sprintf("w%d", i)),
				values(d)))
		}
		var err error
		if y, err = op.RMSNorm(y, weights[len(weights)-1], 1e-5); err != nil {
			t.Fatal(err)
		}
	}
	target := gorgonia.NewVector(g, tensor.Int, gorgonia.WithShape(rows), gorgonia.WithName("target"),
		gorgonia.WithValue(tensor.New(tensor.WithShape(rows), tensor.WithBacking(make([]int, rows)))))
	loss, err := op.CrossEntropy(y, target)
	if err == nil {
		_, err = gorgonia.Grad(loss, weights...)
	}
	if err != nil {
		t.Fatal(err)
	}
	return loss, weights
}

// TestEnds wants the ends of passes to be made together, but before a result is needed and without keeping too much, and the
// gradients of a tape machine.
func TestEnds(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	for _, c := range []struct {
		name           string
		norms, rows, d int
		shared         bool // all norms have the same weights, whose gradients are added up
		opts           []MachineOption
		launches       int
		compiled       bool // and not run
	}{
		{name: "all at once", norms: 5, rows: 4, d: 6, launches: 1},
		{name: "gathered", norms: 5, rows: 4, d: 6, launches: 1, opts: []MachineOption{WithAccumulation()}},
		{name: "added up", norms: 4, rows: 4, d: 6, shared: true, launches: 1},
		{name: "much memory", norms: 3, rows: 1, d: endsMemory/4/2 - 64, launches: 2, compiled: true},
	} {
		check := func(t *testing.T, device *Device, opts ...MachineOption) {
			loss, weights := normChain(t, seed, c.norms, c.rows, c.d, c.shared)
			m, err := NewMachine(device, loss.Graph(), append(append(opts, c.opts...), WithParams(weights...), WithOutputs(loss))...)
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
				v, err := m.Value(w.Deriv())
				if err != nil {
					t.Fatal(err)
				}
				if d := distance(t, v, want[i].Deriv().Value()); !(d < 1e-4) {
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
