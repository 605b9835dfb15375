package optim_test

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/optim"
)

// TestMuonRules checks the rules that Muon declares to machines for tall and wide matrices and for all
// other parameters.
func TestMuonRules(t *testing.T) {
	m, err := optim.NewMuon(optim.WithLR(0.25), optim.WithWeightDecay(0.2), optim.WithMomentum(0.9),
		optim.WithIterations(4), optim.WithNesterov(false),
		optim.WithGroup(optim.NameContains("slow"), optim.LRScale(0.5)),
		optim.WithAdamW(optim.WithLR(0.0625), optim.WithBetas(0.7, 0.8), optim.WithEps(1e-6)))
	if err != nil {
		t.Fatal(err)
	}

	kernels := map[string]*optim.Kernel{"w": m.Rule("w", []int{3, 12}).Kernel,
		"embed": m.Rule("embed", []int{3, 12}).Kernel}
	for name, want := range map[string]optim.Kernel{
		"w": {Name: "Muon", Whole: true,
			Moments: []optim.Moment{{Name: "momentum_buffer", Mean: optim.OfGradients}}},
		"embed": {Name: "AdamW", Moments: []optim.Moment{{Name: "exp_avg", Mean: optim.OfGradients},
			{Name: "exp_avg_sq", Mean: optim.OfSquares}}},
	} {
		k := kernels[name]
		if k.Name != want.Name || k.Whole != want.Whole || !slices.Equal(k.Moments, want.Moments) {
			t.Errorf("%s: %+v, want %+v", name, k, want)
		}
	}

	matrix := optim.Rule{Kernel: kernels["w"], LRScale: 1, Decay: 0.2, Beta1: 0.9,
		ShapeScale: 1, Iterations: 4}
	tall, slow := matrix, matrix
	tall.ShapeScale, slow.LRScale = 2, 0.5
	rest := optim.Rule{Kernel: kernels["embed"], LRScale: 0.25, Beta1: 0.7, Beta2: 0.8, Eps: 1e-6}
	for _, c := range []struct {
		name  string
		shape []int
		want  optim.Rule
	}{
		{"w", []int{3, 12}, matrix}, {"w", []int{12, 3}, tall}, {"slow.w", []int{3, 3}, slow},
		{"embed", []int{3, 12}, rest}, {"norm", []int{12}, rest},
	} {
		if got := m.Rule(c.name, c.shape); got != c.want {
			t.Errorf("%s %v: %+v, want %+v", c.name, c.shape, got, c.want)
		}
	}
}

// TestRulesInJSON checks that a rule read from JSON gets the name of its kernel, even if the file
// dates from when there were only two kernels, and that names with terminal control characters are
// rejected.
func TestRulesInJSON(t *testing.T) {
	m, err := optim.NewMuon()
	if err != nil {
		t.Fatal(err)
	}

	text, err := json.Marshal(m.Rule("w", []int{3, 12}))
	if err != nil {
		t.Fatal(err)
	}

	for text, want := range map[string]string{
		string(text):                   "Muon 0.95",
		`{"Muon":true,"Beta1":0.95}`:   "Muon 0.95",
		`{"Muon":false,"Beta1":0.5}`:   "AdamW 0.5",
		`{"Kernel":"New","Beta1":0.5}`: "New 0.5",
		`{"Beta1":0.5}`:                "none 0.5",
	} {
		var r optim.Rule
		if err := json.Unmarshal([]byte(text), &r); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(r.Kernel, " ", r.Beta1); got != want {
			t.Errorf("%s is %s, want %s", text, got, want)
		}
	}

	var r optim.Rule
	if err := json.Unmarshal([]byte(`{"Kernel":"\u001b[2J"}`), &r); err == nil {
		t.Errorf("the kernel %q is accepted", r.Kernel)
	}
}

// TestMuonAgreesWithPyTorch compares three steps with gradients sin(t·p) with Keller Jordan's muon_update
// in PyTorch 2, in float64 instead of bfloat16.
func TestMuonAgreesWithPyTorch(t *testing.T) {
	start := []float64{0.5, -1.25, 2, 0.125, 3, -0.75}
	tall := []float64{0.5, 0.125, -1.25, 3, 2, -0.75} // its transpose
	for _, c := range []struct {
		name  string
		start []float64
		shape []int
		opts  []optim.MuonOption
		want  []float64
	}{
		{"wide", start, []int{2, 3}, nil,
			[]float64{0.45870391564423146, -1.215440154466495, 1.988446364546408,
				0.10510670754867979, 2.9856334304023022, -0.6952448703901254}},
		{"tall", tall, []int{3, 2}, nil,
			[]float64{0.4500694566770218, 0.10068450758579194, -1.2090376101838396,
				2.9866205811124615, 1.9889127920969845, -0.6837240305253235}},
		{"plain momentum", start, []int{2, 3}, []optim.MuonOption{optim.WithNesterov(false)},
			[]float64{0.45791282204707956,
				-1.20694235389834, 1.9843975270474232, 0.10349405509249408, 2.9878757224329333,
				-0.6932101558302197}},
		{"scaled to AdamW's size", tall, []int{3, 2},
			[]optim.MuonOption{optim.WithScale(optim.RMSScale)}, []float64{
				0.48379152690293636, 0.11777120251425151, -1.2333795079536964, 2.983130540323216,
				1.9878119320020828, -0.7282930571739948}},
	} {
		m, err := optim.NewMuon(append(c.opts, optim.WithWeightDecay(0.1))...)
		if err != nil {
			t.Fatal(err)
		}
		p := newParam("w", c.start, c.shape...)
		for step := range 3 {
			for i, x := range p.data() {
				p.gradient()[i] = math.Sin(x * float64(step+1))
			}
			if err := m.Step(model(p)); err != nil {
				t.Fatal(err)
			}
		}
		closeTo(t, c.name, p.data(), c.want, 1e-12)
		for _, g := range p.gradient() {
			if g != 0 {
				t.Fatalf("%s: a gradient is not zero after the step", c.name)
			}
		}
	}
}

// TestMuonLeavesTheRestToAdamW checks that parameters that aren't matrices, or that the match function
// selects, move exactly as under AdamW.
func TestMuonLeavesTheRestToAdamW(t *testing.T) {
	r := freshRand(t)
	m, err := optim.NewMuon(optim.WithAdamWFor(optim.NameContains("table")),
		optim.WithAdamW(optim.WithLR(0.001), optim.WithWeightDecay(0.3)))
	if err != nil {
		t.Fatal(err)
	}

	a, err := optim.NewAdamW(optim.WithLR(0.001), optim.WithBetas(0.9, 0.95), optim.WithEps(1e-10),
		optim.WithWeightDecay(0.3))
	if err != nil {
		t.Fatal(err)
	}

	if err := m.SetLR(0.04); err != nil {
		t.Fatal(err)
	}

	if err := a.SetLR(0.04 * (0.001 / 0.02)); err != nil {
		t.Fatal(err)
	}

	for _, c := range []struct {
		name  string
		shape []int
		same  bool
	}{{"w", []int{3, 4}, false}, {"table", []int{3, 4}, true}, {"norm", []int{12}, true},
		{"cube", []int{3, 2, 2}, true}} {
		data, grad := normals(r, 12), normals(r, 12)
		byMuon, byAdamW := newParam(c.name, data, c.shape...), newParam(c.name, data, c.shape...)
		for range 2 {
			copy(byMuon.gradient(), grad)
			copy(byAdamW.gradient(), grad)
			if err := m.Step(model(byMuon)); err != nil {
				t.Fatal(err)
			}
			if err := a.Step(model(byAdamW)); err != nil {
				t.Fatal(err)
			}
		}
		var d float64
		for i, v := range byMuon.data() {
			d = math.Max(d, math.Abs(v-byAdamW.data()[i]))
		}
		if same := d < 1e-12; same != c.same {
			t.Errorf("%s %v: moves as under AdamW: %v, want %v", c.name, c.shape, same, c.same)
		}
	}
}

// TestMuonGroups checks that a group given to Muon also applies to the parameters that AdamW updates, and
// precedes the groups given to AdamW.
func TestMuonGroups(t *testing.T) {
	m, err := optim.NewMuon(optim.WithLR(0.5), optim.WithWeightDecay(0.1),
		optim.WithGroup(optim.NameContains("frozen"), optim.LRScale(0)),
		optim.WithGroup(optim.NameContains("half"), optim.LRScale(0.5), optim.Decay(0.2)),
		optim.WithAdamW(optim.WithLR(0.1), optim.WithWeightDecay(0.3),
			optim.WithGroup(optim.NameContains("frozen", "quarter"), optim.LRScale(0.25))))
	if err != nil {
		t.Fatal(err)
	}

	for _, c := range []struct {
		name  string
		shape []int
		want  float64 // value of a 2 after decay: the gradient is zero
	}{
		{"w", []int{1, 2}, 2 * (1 - 0.5*0.1)},
		{"w.frozen", []int{1, 2}, 2},
		{"w.half", []int{1, 2}, 2 * (1 - 0.25*0.2)},
		{"embed", []int{1, 2}, 2 * (1 - 0.1*0.3)},
		{"embed.frozen", []int{1, 2}, 2},
		{"embed.half", []int{1, 2}, 2 * (1 - 0.05*0.2)},
		{"norm.half", []int{2}, 2 * (1 - 0.05*0.2)},
		{"embed.quarter", []int{1, 2}, 2 * (1 - 0.025*0.3)},
	} {
		p := newParam(c.name, []float64{2, 2}, c.shape...)
		if err := m.Step(model(p)); err != nil {
			t.Fatal(err)
		}
		if got := p.data()[0]; math.Abs(got-c.want) > 1e-12 {
			t.Errorf("%s %v: 2 becomes %v, want %v", c.name, c.shape, got, c.want)
		}
	}
}

func TestMuonFloat32AgreesWithFloat64(t *testing.T) {
	r := freshRand(t)
	m, err := optim.NewMuon()
	if err != nil {
		t.Fatal(err)
	}

	data := normals(r, 9, 20)
	wide, thin := newParam("wide", data, 9, 20), newParam("thin", narrow(data), 9, 20)
	for range 5 {
		g := normals(r, 9, 20)
		copy(wide.gradient(), g)
		copy(thin.grad.(*tensor.Dense).Float32s(), narrow(g))
		if err := m.Step(model(wide, thin)); err != nil {
			t.Fatal(err)
		}
	}

	var got []float64
	for _, v := range thin.value.(*tensor.Dense).Float32s() {
		got = append(got, float64(v))
	}

	closeTo(t, "float32", got, wide.data(), 1e-5)
}

// TestMuonConverges minimizes ‖p − goal‖² from zero with decaying rates.
func TestMuonConverges(t *testing.T) {
	r := freshRand(t)
	m, err := optim.NewMuon()
	if err != nil {
		t.Fatal(err)
	}

	rate, err := optim.WarmupCosine(0.1, 0, 0, 200)
	if err != nil {
		t.Fatal(err)
	}

	goal := normals(r, 6, 4)
	p := newParam("w", make([]float64, 24), 6, 4)
	for step := range 200 {
		for i, x := range p.data() {
			p.gradient()[i] = 2 * (x - goal[i])
		}
		if err := m.SetLR(rate(step)); err != nil {
			t.Fatal(err)
		}
		if err := m.Step(model(p)); err != nil {
			t.Fatal(err)
		}
	}

	closeTo(t, "p", p.data(), goal, 0.02)
}

// TestMomentumBeyondGradients checks that a momentum is rejected if no finite gradients can produce
// it, and that the largest possible momentum is accepted.
func TestMomentumBeyondGradients(t *testing.T) {
	newMuon := func() *optim.Muon {
		m, err := optim.NewMuon(optim.WithMomentum(0.9))
		require.NoError(t, err)
		return m
	}
	state := func(data any, steps int64) []optim.Tensor {
		return []optim.Tensor{{"w.momentum_buffer", []int{1, 2}, data},
			{"w.step", []int{1}, []int64{steps}}}
	}
	require.NoError(t, newMuon().SetState(state([]float32{0, -3.39e37}, 1)))
	err := newMuon().SetState(state([]float32{0, -3.42e37}, 1))
	require.ErrorContains(t, err,
		`parameter "w": momentum_buffer is -3.42e+37 at element 1, want at most 3.4e+37`)
	require.NoError(t, newMuon().SetState(state([]float32{0, 6.4e37}, 2)))
	require.Error(t, newMuon().SetState(state([]float32{0, 6.5e37}, 2)))
	require.NoError(t, newMuon().SetState(state([]float32{math.MaxFloat32, 0}, 1000)))
	require.NoError(t, newMuon().SetState(state([]float64{1.7e307, 0}, 1)))
	require.Error(t, newMuon().SetState(state([]float64{1.81e307, 0}, 1)))
	require.NoError(t, newMuon().SetState(state([]float64{math.MaxFloat64, 0}, 1<<40)))

	m := newMuon() // the state after steps with the largest possible gradients
	for range 3 {
		p := newParam("w", make([]float32, 6), 2, 3)
		for i := range p.grad.(*tensor.Dense).Float32s() {
			p.grad.(*tensor.Dense).Float32s()[i] = math.MaxFloat32
		}
		_ = m.Step(model(p)) // the update may overflow
		require.NoError(t, newMuon().SetState(m.State()))
	}
}
