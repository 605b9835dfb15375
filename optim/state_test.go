package optim_test

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/optim"
)

// both returns a new AdamW and a new Muon, by name.
func both(t *testing.T) map[string]optim.Optimizer {
	t.Helper()
	a, err := optim.NewAdamW()
	if err != nil {
		t.Fatal(err)
	}
	m, err := optim.NewMuon()
	if err != nil {
		t.Fatal(err)
	}
	return map[string]optim.Optimizer{"AdamW": a, "Muon": m}
}

func equalStates(a, b []optim.Tensor) bool { return reflect.DeepEqual(a, b) }

// small returns the parameters of a model small enough to compare element by element.
func small() []*param {
	return []*param{
		newParam("embed.weight", make([]float64, 6), 3, 2),
		newParam("w", make([]float32, 12), 4, 3),
		newParam("norm", make([]float64, 2), 2),
	}
}

// TestStateRoundTrip checks that 40 steps are bit-identical to 20 steps, a state restored in a new
// optimizer, and 20 more steps.
func TestStateRoundTrip(t *testing.T) {
	r := freshRand(t)
	var grads [40][3][]float64
	for i := range grads {
		grads[i] = [3][]float64{normals(r, 6), normals(r, 12), normals(r, 2)}
	}

	run := func(o optim.Optimizer, ps []*param, from, to int) {
		for step := from; step < to; step++ {
			copy(ps[0].gradient(), grads[step][0])
			copy(ps[1].grad.(*tensor.Dense).Float32s(), narrow(grads[step][1]))
			copy(ps[2].gradient(), grads[step][2])
			which := ps
			if step < 3 {
				which = ps[:2] // the last parameter joins later
			}
			if err := o.Step(model(which...)); err != nil {
				t.Fatal(err)
			}
		}
	}

	straight, first, second := both(t), both(t), both(t)
	for name := range straight {
		want, got := small(), small()
		run(straight[name], want, 0, 40)
		run(first[name], got, 0, 20)
		saved := first[name].State()
		// Further steps of the optimizer must not affect the saved state.
		run(first[name], small(), 20, 25)
		if err := second[name].Declare(model(got...)); err != nil {
			t.Fatal(err)
		}
		if err := second[name].SetState(saved); err != nil {
			t.Fatal(err)
		}
		before := fmt.Sprint(saved)
		run(second[name], got, 20, 40)
		if fmt.Sprint(saved) != before {
			t.Errorf("%s: steps change the state that was set", name)
		}
		for i := range want {
			if !reflect.DeepEqual(want[i].value.Data(), got[i].value.Data()) {
				t.Errorf("%s: %s differs after a restored state", name, want[i].name)
			}
		}
		if !equalStates(straight[name].State(), second[name].State()) {
			t.Errorf("%s: the states differ", name)
		}
		if !slices.IsSortedFunc(saved, func(a, b optim.Tensor) int {
			return strings.Compare(a.Name, b.Name)
		}) || len(saved) == 0 {
			t.Errorf("%s: the state's tensors are not in order", name)
		}
		if err := second[name].SetState(nil); err != nil || len(second[name].State()) != 0 {
			t.Errorf("%s: setting an empty state: %v, which leaves %d tensors", name, err,
				len(second[name].State()))
		}
	}
}

// TestSetStateRefuses checks that SetState rejects states that no sequence of steps produces, names the first problem, and
// changes nothing.
func TestSetStateRefuses(t *testing.T) {
	edit := func(name string, f func(*optim.Tensor)) func([]optim.Tensor) []optim.Tensor {
		return func(s []optim.Tensor) []optim.Tensor {
			for i := range s {
				if s[i].Name == name {
					f(&s[i])
				}
			}
			return s
		}
	}

	without := func(name string) func([]optim.Tensor) []optim.Tensor {
		return func(s []optim.Tensor) []optim.Tensor {
			return slices.DeleteFunc(s, func(t optim.Tensor) bool { return t.Name == name })
		}
	}
	for _, c := range []struct {
		name  string
		alter func([]optim.Tensor) []optim.Tensor
		want  string
	}{
		{"moment missing", without("norm.exp_avg_sq"), `parameter "norm": there is no exp_avg_sq`},
		{"count missing", without("w.step"), `parameter "w": step is`},
		{"count of zero", edit("w.step", func(t *optim.Tensor) {
			t.Data = []int64{0}
		}), `parameter "w": step is`},
		{"two counts", edit("w.step", func(t *optim.Tensor) {
			t.Data = []int64{3, 4}
		}), `parameter "w": step is`},
		{"count of floats", edit("w.step", func(t *optim.Tensor) {
			t.Data = []float64{3}
		}), `parameter "w": step is`},
		{"count beyond whole numbers", edit("w.step",
			func(t *optim.Tensor) {
				t.Data = []int64{math.MaxInt64}
			}), "step is [9223372036854775807]"},
		{"many counts", edit("w.step", func(t *optim.Tensor) { t.Data = make([]int64, 99) }),
			"step is a []int64 of 99 elements"},
		{"NaN", edit("norm.exp_avg", func(t *optim.Tensor) { t.Data.([]float64)[1] = math.NaN() }),
			`"norm": exp_avg is NaN at element 1`},
		{"infinity", edit("norm.exp_avg_sq",
			func(t *optim.Tensor) {
				t.Data.([]float64)[0] = math.Inf(1)
			}), "exp_avg_sq is +Inf at element 0"},
		{"negative square", edit("norm.exp_avg_sq",
			func(t *optim.Tensor) {
				t.Data.([]float64)[1] = -1e-9
			}), "exp_avg_sq is -1e-09 at element 1"},
		{"NaN of a matrix", func(s []optim.Tensor) []optim.Tensor {
			for _, t := range s {
				if x, ok := t.Data.([]float32); ok && strings.HasPrefix(t.Name, "w.") {
					x[7] = float32(math.NaN())
				}
			}
			return s
		}, `is NaN at element 7, want a finite number`},
		{"negative shape", edit("norm.exp_avg", func(t *optim.Tensor) { t.Shape = []int{-1, -2} }),
			`parameter "norm"`},
		{"shape", edit("norm.exp_avg", func(t *optim.Tensor) {
			t.Shape = []int{2, 1}
		}), `parameter "norm"`},
		{"length", edit("norm.exp_avg", func(t *optim.Tensor) {
			t.Data = []float64{1}
		}), "exp_avg has 1 elements, want 2"},
		{"type", edit("norm.exp_avg", func(t *optim.Tensor) {
			t.Data = []float32{1, 2}
		}), `parameter "norm"`},
		{"no floats", edit("norm.exp_avg", func(t *optim.Tensor) {
			t.Data = []int{1, 2}
		}), "holds a []int"},
		{"unknown parameter", edit("norm.exp_avg", func(t *optim.Tensor) {
			t.Name = "other.exp_avg"
		}), `parameter "norm"`},
		{"unknown field", func(s []optim.Tensor) []optim.Tensor {
			return append(s, optim.Tensor{Name: "norm.velocity", Shape: []int{2},
				Data: []float64{1, 2}})
		}, "it has velocity, but AdamW keeps exp_avg and exp_avg_sq"},
		{"name", func(s []optim.Tensor) []optim.Tensor {
			return append(s, optim.Tensor{Name: "step"})
		}, `tensor "step"`},
		{"twice", func(s []optim.Tensor) []optim.Tensor { return append(s, s[0]) }, "two tensors"},
		{"whole unknown parameter", func(s []optim.Tensor) []optim.Tensor {
			for _, t := range s {
				if field, ok := strings.CutPrefix(t.Name, "norm"); ok {
					t.Name = "other" + field
					s = append(s, t)
				}
			}
			return s
		}, `there is no parameter "other"`},
	} {
		for name, o := range both(t) {
			ps := small()
			if err := o.Step(model(ps...)); err != nil {
				t.Fatal(err)
			}
			before := o.State()
			err := o.SetState(c.alter(o.State()))
			if err == nil || !strings.Contains(err.Error(), c.want) ||
				!strings.HasPrefix(err.Error(), "optim."+name+": SetState: ") {
				t.Errorf("%s, %s: error %v, want one with %q", c.name, name, err, c.want)
			}
			if !equalStates(before, o.State()) {
				t.Errorf("%s, %s: a refused state changed something", c.name, name)
			}
		}
	}

	os := both(t)
	for _, o := range os {
		if err := o.Step(model(small()...)); err != nil {
			t.Fatal(err)
		}
	}

	for from, to := range map[string]string{"AdamW": "Muon", "Muon": "AdamW"} {
		for range 10 { // for various iteration orders of the map of fields
			err := os[to].SetState(os[from].State())
			want := fmt.Sprintf("but %s keeps %s: the state belongs to another optimizer", to,
				map[string]string{"AdamW": "exp_avg and exp_avg_sq", "Muon": "momentum_buffer"}[to])
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Fatalf("%s is given the state of %s: error %v, want one with %q", to, from, err,
					want)
			}
		}
	}
}

// TestSetStateOfImpossibleShapes checks that impossible shapes are rejected even if no parameter has
// been declared.
func TestSetStateOfImpossibleShapes(t *testing.T) {
	for name, o := range both(t) {
		for _, shape := range [][]int{{-1, -2}, {math.MaxInt, 2}, {1 << 32, 1 << 32, 0}} {
			state := []optim.Tensor{{"norm.step", []int{1}, []int64{1}}, {"norm.exp_avg", shape,
				[]float64{}},
				{"norm.exp_avg_sq", shape, []float64{}}}
			if len(shape) == 2 && name == "Muon" {
				state = []optim.Tensor{{"norm.step", []int{1}, []int64{1}},
					{"norm.momentum_buffer", shape,
						[]float64{}}}
			}
			err := o.SetState(state)
			require.ErrorContains(t, err, "which no tensor can have", "%s: %v", name, shape)
			require.Empty(t, o.State())
		}
	}
}

// TestStepOverflows checks that a step that makes a parameter infinite reports it.
func TestStepOverflows(t *testing.T) {
	for name, o := range both(t) {
		require.NoError(t, o.SetState([]optim.Tensor{{"norm.step", []int{1}, []int64{1}},
			{"norm.exp_avg", []int{2}, []float32{0, 1e3}},
			{"norm.exp_avg_sq", []int{2}, []float32{1, 1}}}))
		require.NoError(t, o.SetLR(1e37))
		p := newParam("norm", make([]float32, 2), 2)
		err := o.Step(model(p))
		require.ErrorIs(t, err, optim.ErrOverflow, name)
		require.ErrorContains(t, err, `parameter "norm" is not finite at element 1`, name)
	}
}

// TestDeclareRefuses checks that Declare rejects invalid parameters and changes of shape.
func TestDeclareRefuses(t *testing.T) {
	for name, o := range both(t) {
		if err := o.Declare(model(newParam("w", []float64{1, 2}, 1, 2))); err != nil {
			t.Fatal(err)
		}
		for want, m := range map[string][]*param{
			`two parameters have the name "a"`: {newParam("a", []float64{1}, 1),
				newParam("a", []float64{1}, 1)},
			"parameter #0 has no name": {newParam("", []float64{1}, 1)},
			`"a" has no value`:         {{name: "a"}},
			"want float32 or float64":  {{"a", tensor.New(tensor.WithBacking([]int{1, 2})), nil}},
			"is known under this name": {newParam("w", []float64{1, 2}, 2, 1)},
		} {
			if err := o.Declare(model(m...)); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: error %v, want one with %q", name, err, want)
			}
		}
		if err := o.Step(model(newParam("w", []float64{1, 2}, 2, 1))); err == nil {
			t.Errorf("%s: a parameter of another shape than declared is accepted", name)
		}
	}
}

// TestForget checks that Forget clears the moments of the given elements and nothing else.
func TestForget(t *testing.T) {
	r, optimizers := freshRand(t), both(t)
	for _, name := range []string{"AdamW", "Muon"} {
		o := optimizers[name]
		ps := small()
		for range 3 {
			copy(ps[0].gradient(), normals(r, 6))
			copy(ps[1].grad.(*tensor.Dense).Float32s(), narrow(normals(r, 12)))
			copy(ps[2].gradient(), normals(r, 2))
			if err := o.Step(model(ps...)); err != nil {
				t.Fatal(err)
			}
		}
		want := o.State()
		for _, s := range want {
			if x, ok := s.Data.([]float32); ok && strings.HasPrefix(s.Name, "w.") {
				clear(x[4:9])
			}
			if x, ok := s.Data.([]float64); ok && strings.HasPrefix(s.Name, "norm.") {
				clear(x[1:])
			}
		}
		for _, err := range []error{o.Forget("w", 4, 9), o.Forget("norm", 1, 2),
			o.Forget("embed.weight", 3, 3), o.Forget("unknown", 0, 9)} {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		for _, span := range [][2]int{{-1, 2}, {2, 1}, {0, 13}} {
			if err := o.Forget("w", span[0], span[1]); err == nil ||
				!strings.Contains(err.Error(), "which has 12") {
				t.Errorf("%s: elements %v: %v", name, span, err)
			}
		}
		if !equalStates(o.State(), want) {
			t.Errorf("%s: the state is %v, want %v", name, o.State(), want)
		}
	}
}

// TestNilNodes checks that nil parameters are rejected.
func TestNilNodes(t *testing.T) {
	adamw, err := optim.NewAdamW()
	require.NoError(t, err)
	muon, err := optim.NewMuon()
	require.NoError(t, err)
	for _, o := range []optim.Optimizer{adamw, muon} { // given a nil node
		var missing *gorgonia.Node
		require.ErrorContains(t, o.Step([]gorgonia.ValueGrad{missing}), "nil", "%T", o)
		require.ErrorContains(t, o.Declare([]gorgonia.ValueGrad{missing}), "nil", "%T", o)
	}
}
