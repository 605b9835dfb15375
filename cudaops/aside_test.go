package cudaops

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// tailsGraph is a loss of Kasmina layers one behind the other, of which the second and the last share their weights and another one
// is recomputed, with nodes that need the gradients of weights.
func tailsGraph(t *testing.T, r *rand.Rand, rows, seeds, chunk int) (g *gorgonia.ExprGraph, params, outputs gorgonia.Nodes) {
	t.Helper()
	const slots = 5
	d := seeds * chunk
	g = gorgonia.NewGraph()
	input := func(name string, s ...int) *gorgonia.Node {
		x := make([]float32, size(s))
		for i := range x {
			x[i] = float32(r.NormFloat64())
		}
		n := gorgonia.NewTensor(g, tensor.Float32, len(s), gorgonia.WithName(name), gorgonia.WithShape(s...),
			gorgonia.WithValue(tensor.New(tensor.WithShape(s...), tensor.WithBacking(x))))
		params = append(params, n)
		return n
	}
	var s steps
	h := input("x", rows, d)
	var weights gorgonia.Nodes
	for i := range 4 {
		l, err := state.NewLattice(seeds, d, state.WithoutGates())
		if err != nil {
			t.Fatal(err)
		}
		for seed := range seeds - 1 {
			if err := errors.Join(l.RequestGermination(seed, state.GerminationRequest{Slot: 1 + seed%4, Kind: blueprints.Kind(seed % 4)}),
				l.Transition(seed, state.Training), l.Transition(seed, state.Grafting), l.SetAlpha(seed, 0.25)); err != nil {
				t.Fatal(err)
			}
		}
		w, a := input(fmt.Sprint("weights", i), slots, chunk), input(fmt.Sprint("scales", i), slots)
		if weights = append(weights, w); i == 3 {
			w = weights[1]
		}
		block := func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			var s steps
			y := s.do(func() (*gorgonia.Node, error) { return op.Kasmina(in[0], in[1], in[2], l) })
			return s.do(func() (*gorgonia.Node, error) { return gorgonia.Tanh(y) }), s.err
		}
		in := gorgonia.Nodes{h, w, a}
		h = s.do(func() (*gorgonia.Node, error) {
			if i == 2 {
				return autodiff.Recompute(in, block)
			}
			return block(in)
		})
	}
	loss := s.do(func() (*gorgonia.Node, error) { return gorgonia.Mean(h) })
	if s.err != nil {
		t.Fatal(s.err)
	}
	params = slices.DeleteFunc(params, func(n *gorgonia.Node) bool { return n == weights[3] })
	if _, err := gorgonia.Grad(loss, params...); err != nil {
		t.Fatal(err)
	}
	outputs = append(gorgonia.Nodes{loss}, derivatives(params)...)
	outputs = append(outputs,
		s.do(func() (*gorgonia.Node, error) { return gorgonia.Sum(weights[0].Deriv(), 0) }),
		s.do(func() (*gorgonia.Node, error) { return gorgonia.Neg(weights[2].Deriv()) }))
	if s.err != nil {
		t.Fatal(s.err)
	}
	return g, params, outputs
}

// TestTails wants runs whose tails are a branch of a graph to give the bits of the first run, where each comes with its task: values
// and figures, with memory that is poisoned ahead of each run.
func TestTails(t *testing.T) {
	for name, opts := range map[string][]MachineOption{
		"plain":       nil,
		"accumulated": {WithAccumulation()},
		"monitored":   {WithMonitor(2)},
		"scaled":      {scaledGradients},
	} {
		t.Run(name+"/fake", func(t *testing.T) {
			device, _, fakeOption := openFake(t, fake.Config{})
			testTails(t, device, 6, 4, 3, append(opts, fakeOption)...)
		})
		t.Run(name+"/GPU", func(t *testing.T) { testTails(t, openGPU(t), 2500, 16, 24, opts...) })
	}
	t.Run("tiles/GPU", func(t *testing.T) { testTails(t, openGPU(t), 33, 16, 24) })
	t.Run("bfloat16/GPU", func(t *testing.T) {
		testTails(t, openGPU(t), 2500, 16, 48, WithPrecision(BFloat16), WithTuning(TuneOff))
	})
}

func testTails(t *testing.T, device *Device, rows, seeds, chunk int, opts ...MachineOption) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	g, params, outputs := tailsGraph(t, rand.New(rand.NewPCG(seed, 9)), rows, seeds, chunk)
	m, err := NewMachine(device, g, append(slices.Clone(opts), WithParams(params...), WithOutputs(outputs...), WithStrict())...)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}()
	var first []string
	for run := range 6 {
		poison(t, m)
		if err := errors.Join(m.DropGradients(), m.RunAll()); err != nil {
			t.Fatal(err)
		}
		var seen []string
		for _, n := range outputs {
			v, err := m.Value(n)
			if err != nil {
				t.Fatal(err)
			}
			seen = append(seen, fmt.Sprintf("%s: %x", describe(n), flat(t, v)))
		}
		for _, a := range m.attendants {
			l := a.(*kasminaLayer)
			raw := make([]byte, 4*(kasminaBins-kasminaHealth)*l.seeds())
			if err := device.ctx.CopyToHost(raw, l.at(kasminaHealth), m.stream); err != nil {
				t.Fatal(err)
			}
			seen = append(seen, fmt.Sprintf("figures of %v: %v", l.op, driver.View[float32](raw)))
		}
		if first == nil {
			first = seen
		}
		for i := range seen {
			if strings.Contains(first[i], "NaN") {
				t.Fatalf("the first run gives no numbers: %.999s", first[i])
			}
			if seen[i] != first[i] {
				t.Fatalf("run %d differs from the first:\n%.999s\n%.999s", run, seen[i], first[i])
			}
		}
	}
}

// poison fills what a run does not find of the one before with NaN.
func poison(t *testing.T, m *Machine) {
	t.Helper()
	ctx := m.device.ctx
	err := ctx.Memset8(m.arena, 0xff, m.program.arena, m.stream)
	for _, a := range m.attendants {
		if l := a.(*kasminaLayer); l.opened {
			err = errors.Join(err, ctx.Memset8(l.at(kasminaHealth), 0xff, 4*(kasminaBins-kasminaHealth)*l.seeds(), m.stream))
		}
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestTailsLast wants the memory that a tail works on to last until it is joined: by the first task that needs what it writes, or at
// the end.
func TestTailsLast(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	g, params, outputs := tailsGraph(t, rand.New(rand.NewPCG(1, 1)), 6, 4, 3)
	m, err := NewMachine(device, g, fakeOption, WithParams(params...), WithOutputs(outputs...))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	joins, tails := 0, 0
	for _, task := range m.program.tasks {
		joins += int(truth(task.joins))
		tails += int(truth(task.begin != nil))
	}
	// The sum of the gradients of weights that two layers share, and both nodes that need others.
	if tails != 8 || joins < 1 || joins > 3 {
		t.Errorf("%d tasks that may leave tails, and %d that join some, want 8 and up to 3", tails, joins)
	}
}
