package optim_test

import (
	"math"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/optim"
)

// TestAdamWAgreesWithPyTorch compares three steps with gradients sin(t·p) and cos(t·p) with
// torch.optim.AdamW in float64 (PyTorch 2).
func TestAdamWAgreesWithPyTorch(t *testing.T) {
	a, err := optim.NewAdamW(optim.WithLR(0.05), optim.WithBetas(0.9, 0.95),
		optim.WithWeightDecay(0.1))
	if err != nil {
		t.Fatal(err)
	}

	w := newParam("w", []float64{0.5, -1.25, 2, 0.125, 3, -0.75}, 2, 3)
	b := newParam("b", []float64{1, -2}, 2)
	for step := range 3 {
		for i, x := range w.data() {
			w.gradient()[i] = math.Sin(x * float64(step+1))
		}
		for i, x := range b.data() {
			b.gradient()[i] = math.Cos(x * float64(step+1))
		}
		if err := a.Step(model(w, b)); err != nil {
			t.Fatal(err)
		}
		for _, g := range append(slices.Clone(w.gradient()), b.gradient()...) {
			if g != 0 {
				t.Fatal("a gradient is not zero after the step")
			}
		}
	}

	closeTo(t, "w", w.data(),
		[]float64{0.34530665010892153, -1.1028691463116207, 1.9251731538571808,
			-0.02374711355265443, 2.9154118094846537, -0.5904121355915524}, 1e-14)
	closeTo(t, "b, a vector without decay", b.data(),
		[]float64{0.9625510348583964, -1.897264698007797}, 1e-14)
}

func TestAdamWFloat32AgreesWithFloat64(t *testing.T) {
	r := freshRand(t)
	a, err := optim.NewAdamW(optim.WithLR(0.01))
	if err != nil {
		t.Fatal(err)
	}

	data := normals(r, 7, 5)
	wide, thin := newParam("wide", data, 7, 5), newParam("thin", narrow(data), 7, 5)
	for range 20 {
		g := normals(r, 7, 5)
		copy(wide.gradient(), g)
		copy(thin.grad.(*tensor.Dense).Float32s(), narrow(g))
		if err := a.Step(model(wide, thin)); err != nil {
			t.Fatal(err)
		}
	}

	var got []float64
	for _, v := range thin.value.(*tensor.Dense).Float32s() {
		got = append(got, float64(v))
	}

	closeTo(t, "float32", got, wide.data(), 1e-5)
}

func TestAdamWGroups(t *testing.T) {
	a, err := optim.NewAdamW(optim.WithLR(0.1), optim.WithWeightDecay(0.5),
		optim.WithGroup(optim.NameContains("frozen"), optim.LRScale(0)),
		optim.WithGroup(func(_ string, shape []int) bool {
			return len(shape) == 2 && shape[1] == 1
		}, optim.Decay(0), optim.LRScale(0.5)),
		optim.WithGroup(optim.NameContains("vec.decays"), optim.Decay(1)),
		optim.WithGroup(optim.NameContains("vec"), optim.Decay(0.25), optim.Betas(0, 0)))
	if err != nil {
		t.Fatal(err)
	}

	// A zero gradient moves nothing, so any change is due to decay.
	for _, c := range []struct {
		name  string
		shape []int
		grad  float64
		want  float64
	}{
		{"w", []int{1, 2}, 0, 2 * (1 - 0.1*0.5)},
		{"norm", []int{2}, 0, 2},
		{"frozen.w", []int{1, 2}, 1, 2},
		{"column", []int{2, 1}, 0, 2},
		{"column2", []int{2, 1}, 3, 2 - 0.05},
		{"vec.decays", []int{2}, 0, 2 * (1 - 0.1)}, // the first matching group wins
		{"vec", []int{2}, 0, 2 * (1 - 0.1*0.25)},
	} {
		p := newParam(c.name, []float64{2, 2}, c.shape...)
		p.gradient()[0], p.gradient()[1] = c.grad, c.grad
		if err := a.Step(model(p)); err != nil {
			t.Fatal(err)
		}
		if got := p.data()[0]; math.Abs(got-c.want) > 1e-8 {
			t.Errorf("%s %v: 2 becomes %v, want %v", c.name, c.shape, got, c.want)
		}
	}
}

func TestAdamWScalars(t *testing.T) {
	a, err := optim.NewAdamW(optim.WithLR(0.1))
	if err != nil {
		t.Fatal(err)
	}

	native := &param{"native", gorgonia.NewF32(2), gorgonia.NewF32(3)}
	dense := &param{"dense", tensor.New(tensor.FromScalar(2.0)), tensor.New(tensor.FromScalar(3.0))}
	if err := a.Step(model(native, dense)); err != nil {
		t.Fatal(err)
	}

	if v, g := *native.value.(*gorgonia.F32),
		*native.grad.(*gorgonia.F32); math.Abs(float64(v)-1.9) > 1e-6 || g != 0 {
		t.Errorf("a scalar of 2 becomes %v with gradient %v, want 1.9 and 0", v, g)
	}

	if v := dense.data()[0]; math.Abs(v-1.9) > 1e-8 {
		t.Errorf("a scalar tensor of 2 becomes %v, want 1.9", v)
	}
}

// TestAdamWLearnsARegression fits a linear regression on a Gorgonia graph.
func TestAdamWLearnsARegression(t *testing.T) {
	r := freshRand(t)
	g := gorgonia.NewGraph()
	truth := normals(r, 4, 2)
	x := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithName("x"),
		gorgonia.WithValue(matrix(normals(r, 50, 4), 50, 4)))
	goal := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithName("goal"),
		gorgonia.WithValue(matrix(truth, 4, 2)))
	w := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithName("w"),
		gorgonia.WithValue(matrix(make([]float64, 8), 4, 2)))
	diff := gorgonia.Must(gorgonia.Sub(gorgonia.Must(gorgonia.Mul(x, w)),
		gorgonia.Must(gorgonia.Mul(x, goal))))
	loss := gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(diff))))
	if _, err := gorgonia.Grad(loss, w); err != nil {
		t.Fatal(err)
	}

	vm := gorgonia.NewTapeMachine(g, gorgonia.BindDualValues(w))
	defer vm.Close()
	a, err := optim.NewAdamW(optim.WithLR(0.1), optim.WithWeightDecay(0))
	if err != nil {
		t.Fatal(err)
	}

	decay, err := optim.WarmupCosine(0.1, 1e-4, 10, 300)
	if err != nil {
		t.Fatal(err)
	}

	for step := range 300 {
		vm.Reset()
		if err := vm.RunAll(); err != nil {
			t.Fatal(err)
		}
		if err := a.SetLR(decay(step)); err != nil {
			t.Fatal(err)
		}
		if err := a.Step(gorgonia.NodesToValueGrads(gorgonia.Nodes{w})); err != nil {
			t.Fatal(err)
		}
	}

	closeTo(t, "w", w.Value().Data().([]float64), truth, 1e-3)
}

func TestStepRefuses(t *testing.T) {
	fine := newParam("fine", []float64{1, 2}, 2)
	transposed := newParam("w", []float64{1, 2, 3, 4, 5, 6}, 2, 3)
	if err := transposed.value.(*tensor.Dense).T(); err != nil {
		t.Fatal(err)
	}

	if err := transposed.grad.(*tensor.Dense).T(); err != nil {
		t.Fatal(err)
	}

	bad := newParam("w", []float64{1, 2}, 2)
	bad.gradient()[1] = math.NaN()
	inf32 := newParam("w", []float32{1, 2}, 2)
	inf32.grad.(*tensor.Dense).Float32s()[0] = float32(math.Inf(1))
	nameless := gorgonia.NewVector(gorgonia.NewGraph(), tensor.Float64,
		gorgonia.WithValue(matrix([]float64{1}, 1)),
		gorgonia.WithGrad(matrix([]float64{1}, 1)))
	alone := gorgonia.NewVector(gorgonia.NewGraph(), tensor.Float64, gorgonia.WithName("w"),
		gorgonia.WithValue(matrix([]float64{1}, 1)))
	ints := &param{"w", tensor.New(tensor.WithBacking([]int{1, 2})),
		tensor.New(tensor.WithBacking([]int{1, 2}))}
	for _, c := range []struct {
		name  string
		model []gorgonia.ValueGrad
		want  string
	}{
		{"NaN", model(fine, bad), `parameter "w": the gradient is not finite at element 1`},
		{"infinity", model(fine, inf32), `parameter "w": the gradient is not finite at element 0`},
		{"twice", model(fine, fine), `same name "fine"`},
		{"no name", model(fine, newParam("", []float64{1}, 1)), "parameter #1 has no name"},
		{"node without name", []gorgonia.ValueGrad{fine, nameless}, "parameter #1 has no name"},
		{"no gradient", model(fine, &param{"w", matrix([]float64{1}, 1), nil}),
			`"w": has no gradient`},
		{"node without gradient", []gorgonia.ValueGrad{fine, alone},
			`"w": has no gradient: run a machine created with gorgonia.BindDualValues`},
		{"no value", model(fine, &param{"w", nil, matrix([]float64{1}, 1)}), `"w": has no value`},
		{"nil", append(model(fine), nil), "is nil"},
		{"types", model(fine, &param{"w", matrix([]float64{1}, 1), matrix([]float32{1}, 1)}),
			"gradient is float32"},
		{"shapes", model(fine, &param{"w", matrix([]float64{1}, 1), matrix([]float64{1}, 1, 1)}),
			"of shape (1, 1)"},
		{"layout", model(fine, transposed), "contiguous"},
		{"ints", model(fine, ints), "want a dense tensor or a scalar of float32 or float64"},
		{"new shape", model(fine, newParam("known", []float64{1, 2}, 1, 2)),
			`float64 of shape (2) is known under this name`},
		{"new type", model(fine, newParam("known", []float32{1, 2}, 2)),
			`parameter "known" is float32`},
	} {
		for name, o := range both(t) {
			if err := o.Step(model(newParam("known", []float64{1, 2}, 2))); err != nil {
				t.Fatal(err)
			}
			before := o.State()
			fine.gradient()[0] = 1
			err := o.Step(c.model)
			if err == nil || !strings.Contains(err.Error(), c.want) ||
				!strings.HasPrefix(err.Error(), "optim."+name+": Step: ") {
				t.Errorf("%s, %s: error %v, want one with %q", c.name, name, err, c.want)
			}
			if fine.data()[0] != 1 || fine.gradient()[0] != 1 || !equalStates(before, o.State()) {
				t.Errorf("%s, %s: a refused step changed something", c.name, name)
			}
		}
	}
}

func TestConstructorsRefuse(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for want, opts := range map[string][]optim.AdamWOption{
		"WithLR: got 0":              {optim.WithLR(0)},
		"WithLR: got +Inf":           {optim.WithLR(inf)},
		"WithBetas: got 1":           {optim.WithBetas(1, 0.9)},
		"WithBetas: got -0.1":        {optim.WithBetas(0.9, -0.1)},
		"WithEps: got 0":             {optim.WithEps(0)},
		"WithWeightDecay: got NaN":   {optim.WithWeightDecay(nan)},
		"WithGroup: LRScale: got -1": {optim.WithGroup(optim.Vectors, optim.LRScale(-1))},
		"WithGroup: Decay: got -1":   {optim.WithGroup(optim.Vectors, optim.Decay(-1))},
		"WithGroup: Betas: got 2":    {optim.WithGroup(optim.Vectors, optim.Betas(0, 2))},
	} {
		if _, err := optim.NewAdamW(opts...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("NewAdamW: error %v, want one with %q", err, want)
		}
	}

	for want, opts := range map[string][]optim.MuonOption{
		"WithLR: got -1":             {optim.WithLR(-1)},
		"WithMomentum: got 1":        {optim.WithMomentum(1)},
		"WithIterations: got 0":      {optim.WithIterations(0)},
		"WithScale: got 7":           {optim.WithScale(7)},
		"WithAdamW: WithEps: got -1": {optim.WithAdamW(optim.WithEps(-1))},
		"Betas has no effect":        {optim.WithGroup(optim.Vectors, optim.Betas(0, 0))},
	} {
		if _, err := optim.NewMuon(opts...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("NewMuon: error %v, want one with %q", err, want)
		}
	}

	for name, o := range both(t) {
		if err := o.SetLR(-1); err == nil || !strings.Contains(err.Error(),
			"optim."+name+": SetLR: got -1") {
			t.Errorf("%s: SetLR(-1): %v", name, err)
		}
		if err := o.SetLR(0.5); err != nil || o.LR() != 0.5 {
			t.Errorf("%s: SetLR(0.5): %v, LR %v", name, err, o.LR())
		}
	}
}
