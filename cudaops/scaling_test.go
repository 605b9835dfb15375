package cudaops

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// TestLossScale wants gradients without the scale, a step that overflows to change nothing but the scale, and the scale to
// move by its rule.
func TestLossScale(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testLossScale(t, device, fakeOption, scaledGradients)
	})
	t.Run("GPU", func(t *testing.T) { testLossScale(t, openGPU(t), WithPrecision(Float16)) })
}

func testLossScale(t *testing.T, device *Device, opts ...MachineOption) {
	model, b := newBatch(t, llm.ForTraining, 2)
	machine, err := NewMachine(device, b.G, append(opts, WithParams(b.Params...), WithOutputs(b.Loss))...)
	if err != nil {
		t.Fatal(err)
	}
	defer machine.Close()
	adamw, err := newAdamW()
	if err == nil {
		err = machine.SetOptimizer(adamw, 1)
	}
	if err != nil {
		t.Fatal(err)
	}
	run := func() {
		t.Helper()
		if err := machine.RunAll(); err != nil {
			t.Fatal(err)
		}
	}
	scaleIs := func(want LossScale) {
		t.Helper()
		if got := machine.LossScale(); got != want {
			t.Errorf("the loss scale is %+v, want %+v", got, want)
		}
	}
	steps := func() (n int64) {
		t.Helper()
		if err := machine.Download(); err != nil {
			t.Fatal(err)
		}
		for _, s := range adamw.State() {
			if strings.HasSuffix(s.Name, ".step") {
				n = s.Data.([]int64)[0]
			}
		}
		return n
	}
	scaleIs(LossScale{Scale: 1 << 16})

	// A gradient that cannot be told from infinity. The scale is halved as often as the step is repeated.
	last := len(b.Params) - 1
	weight := model.Params[last].Value.Float32s()
	old := slices.Clone(weight)
	weight[0] = float32(math.Inf(1))
	if err := machine.Upload(b.Params[last]); err != nil {
		t.Fatal(err)
	}
	before := slices.Clone(model.Params[0].Value.Float32s())
	for i := range 3 {
		run()
		if norm, err := machine.Update(); err != nil || norm-norm == 0 {
			t.Errorf("a step that overflows: norm %v, %v", norm, err)
		}
		scaleIs(LossScale{Scale: math.Ldexp(1, 15-i), Skipped: i + 1})
	}
	if n := steps(); n != 0 || !slices.Equal(before, model.Params[0].Value.Float32s()) {
		t.Errorf("after steps that were skipped the optimiser has made %d, or a parameter has changed", n)
	}
	// At 1 there is nothing left that the scale could be to blame for.
	if err := machine.SetLossScale(LossScale{Scale: 2, Good: 5, Skipped: 3}); err != nil {
		t.Fatal(err)
	}
	if _, err := machine.Value(b.Params[0].Deriv()); err == nil || !strings.Contains(err.Error(), "dropped") {
		t.Errorf("a gradient that carries the scale of before: %v", err)
	}
	if _, err := machine.Update(); err == nil || !strings.Contains(err.Error(), "run the machine again") {
		t.Errorf("an update with gradients that carry the scale of before: %v", err)
	}
	run()
	if _, err := machine.Update(); err != nil {
		t.Error(err)
	}
	run()
	if _, err := machine.Update(); !errors.Is(err, ErrNonFinite) {
		t.Errorf("at a scale of 1: %v, want ErrNonFinite", err)
	}
	scaleIs(LossScale{Scale: 1, Skipped: 5})

	copy(weight, old)
	if err := errors.Join(machine.Upload(b.Params[last]), machine.SetLossScale(LossScale{Scale: 8, Good: 1998, Skipped: 5})); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		run()
		g, err := machine.Value(b.Params[1].Deriv())
		if err != nil {
			t.Fatal(err)
		}
		tape := gorgonia.NewTapeMachine(b.G)
		if err := errors.Join(machine.Download(), tape.RunAll()); err != nil {
			t.Fatal(err)
		}
		if d := distance(t, g, b.Params[1].Deriv().Value()); !(d < 1e-2) {
			t.Errorf("a gradient differs by %.2g from that of Gorgonia's machine", d)
		}
		tape.Close()
		if _, err := machine.Update(); err != nil {
			t.Fatal(err)
		}
		scaleIs([]LossScale{{8, 1999, 5}, {16, 0, 5}, {16, 1, 5}}[i])
	}
	if n := steps(); n != 3 {
		t.Errorf("the optimiser has made %d steps, want 3", n)
	}
}

// TestScaledOutputLayer has losses that are but a share of the cost, whose gradient therefore is not the scale itself, and such
// as are computed again for their gradient.
func TestScaledOutputLayer(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
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
			return autodiff.Recompute(gorgonia.Nodes{x, w, targets}, func(in gorgonia.Nodes) (*gorgonia.Node, error) {
				return op.LinearCrossEntropy(in[0], in[1], in[2])
			})
		},
	} {
		g := gorgonia.NewGraph()
		input := func(name string, s shape) *gorgonia.Node {
			values := make([]float32, program.Size(s))
			for i := range values {
				values[i] = float32(rand.NormFloat64())
			}
			return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(s...), tensor.WithBacking(values)), gorgonia.WithName(name))
		}
		x, w := input("x", shape{3, 4}), input("w", shape{5, 4})
		targets := gorgonia.NodeFromAny(g, tensor.New(tensor.WithBacking([]int{0, 4, 2})), gorgonia.WithName("targets"))
		loss, err := head(x, w, targets)
		if err != nil {
			t.Fatal(err)
		}
		cost := gorgonia.Must(gorgonia.Add(gorgonia.Must(gorgonia.Mul(loss, gorgonia.NewConstant(float32(0.3)))), gorgonia.Must(gorgonia.Mean(x))))
		if _, err := gorgonia.Grad(cost, x, w); err != nil {
			t.Fatal(err)
		}
		tape := gorgonia.NewTapeMachine(g)
		defer tape.Close()
		if err := tape.RunAll(); err != nil {
			t.Fatal(err)
		}
		for _, way := range []string{"separate", "fused"} {
			m, err := NewMachine(device, g, fakeOption, WithParams(x, w), scaledGradients, WithWays("LinearCrossEntropy="+way))
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			// No power of two, so that one factor too many or too few shows.
			if err := errors.Join(m.SetLossScale(LossScale{Scale: 1000}), m.RunAll()); err != nil {
				t.Fatal(err)
			}
			for _, p := range []*gorgonia.Node{x, w} {
				v, err := m.Value(p.Deriv())
				if err != nil {
					t.Fatal(err)
				}
				if d := distance(t, v, p.Deriv().Value()); !(d < 1e-5) {
					t.Errorf("%s, %s: the gradient of %s differs by %.2g", name, way, p.Name(), d)
				}
			}
		}
	}
}

// TestOverflowInKasmina wants a layer that shall stop at NaN not to do so for a gradient that its scale has made infinite, but to
// count it all the same: on the device and, with a blueprint that has no kernel, on the host.
func TestOverflowInKasmina(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	own, err := ownKind()
	if err != nil {
		t.Fatal(err)
	}
	for i := range 4 {
		scale, kind := []float64{1, 0x1p127}[i%2], []blueprints.Kind{blueprints.Residual, own}[i/2]
		g := gorgonia.NewGraph()
		input := func(name string, values ...float32) *gorgonia.Node {
			shape := tensor.Shape{len(values) / 2, 2}
			return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(shape...), tensor.WithBacking(values)), gorgonia.WithName(name))
		}
		lattice, err := state.NewLattice(1, 2, state.WithoutGates())
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(lattice.RequestGermination(0, state.GerminationRequest{Slot: 1, Kind: kind}), lattice.Transition(0, state.Training)); err != nil {
			t.Fatal(err)
		}
		x, weights := input("x", 1, 2, 3, 4), input("weights", 0, 0, 0, 0)
		scales := gorgonia.NodeFromAny(g, tensor.New(tensor.WithBacking([]float32{1, 1})), gorgonia.WithName("scales"))
		targets := gorgonia.NodeFromAny(g, tensor.New(tensor.WithBacking([]int{0, 1})), gorgonia.WithName("targets"))
		y, err := op.Kasmina(x, weights, scales, lattice, op.StopOnNonFinite())
		if err != nil {
			t.Fatal(err)
		}
		loss := gorgonia.Must(gorgonia.Mul(gorgonia.Must(op.CrossEntropy(y, targets)), gorgonia.NewConstant(float32(1e20))))
		if _, err := gorgonia.Grad(loss, x); err != nil {
			t.Fatal(err)
		}
		m, err := NewMachine(device, g, fakeOption, WithParams(x), WithOutputs(loss), scaledGradients)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		if err := errors.Join(m.SetLossScale(LossScale{Scale: scale}), m.RunAll()); err != nil {
			t.Fatal(err)
		}
		v, err := m.Value(x.Deriv())
		if err != nil {
			t.Errorf("scale %v: %v", scale, err)
			continue
		}
		if finite := flat(t, v)[0]-flat(t, v)[0] == 0; finite != (scale == 1) {
			t.Errorf("scale %v: the gradient is %v", scale, v)
		}
		if counted := lattice.Report().Seeds[0].NonFiniteG; (counted > 0) != (scale > 1) {
			t.Errorf("scale %v, %v: %d elements of g are counted as not finite", scale, kind, counted)
		}
	}
}

// TestLossScaleErrors wants graphs in which the scale has no place to be refused, and arguments that are none.
func TestLossScaleErrors(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	// open returns a machine for Σ w² ⊙ x, derived by derive.
	open := func(derive func(loss, w *gorgonia.Node) error) (*Machine, error) {
		g := gorgonia.NewGraph()
		value := tensor.New(tensor.WithShape(3), tensor.WithBacking([]float32{1, 2, 3}))
		w := gorgonia.NodeFromAny(g, value, gorgonia.WithName("w"))
		x := gorgonia.NodeFromAny(g, value, gorgonia.WithName("x"))
		loss := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.HadamardProd(gorgonia.Must(gorgonia.Square(w)), x))))
		if err := derive(loss, w); err != nil {
			t.Fatal(err)
		}
		m, err := NewMachine(device, g, fakeOption, WithParams(w), scaledGradients)
		if err == nil {
			t.Cleanup(func() { m.Close() })
		}
		return m, err
	}
	grad := func(loss, w *gorgonia.Node) error { _, err := gorgonia.Grad(loss, w); return err }
	wants := func(err error, want string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error that says %q", err, want)
		}
	}
	_, err := open(func(loss, w *gorgonia.Node) error {
		up := gorgonia.NewScalar(loss.Graph(), tensor.Float32, gorgonia.WithName("up"), gorgonia.WithValue(float32(2)))
		_, err := gorgonia.Backpropagate(gorgonia.Nodes{loss}, gorgonia.Nodes{up}, gorgonia.Nodes{w})
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
	if err != nil {
		t.Fatal(err)
	}
	for want, s := range map[string]LossScale{"Scale is 0.5": {Scale: 0.5}, "Scale is NaN": {Scale: math.NaN()}, "Scale is +Inf": {Scale: math.Inf(1)},
		"Good is -1": {Scale: 1, Good: -1}, "Skipped -2": {Scale: 1, Skipped: -2}} {
		wants(m.SetLossScale(s), want)
	}
	if got := m.LossScale(); got != (LossScale{Scale: firstLossScale}) {
		t.Errorf("after arguments that were refused the scale is %+v", got)
	}
	g, _, _ := stockGraph(t)
	plain, err := NewMachine(device, g, fakeOption, scaledGradients)
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	wants(plain.SetLossScale(LossScale{Scale: 2}), "does not scale")
	if got := plain.LossScale(); got != (LossScale{Scale: 1}) {
		t.Errorf("a machine without gradients has the scale %+v", got)
	}
}
