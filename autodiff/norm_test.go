package autodiff_test

import (
	"math"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
)

// parameter is a gorgonia.ValueGrad with a name.
type parameter struct {
	name        string
	value, grad gorgonia.Value
}

func (p parameter) Name() string                  { return p.name }
func (p parameter) Value() gorgonia.Value         { return p.value }
func (p parameter) Grad() (gorgonia.Value, error) { return p.grad, nil }

func dense[T float32 | float64](x ...T) *tensor.Dense {
	return tensor.New(tensor.WithShape(len(x)), tensor.WithBacking(slices.Clone(x)))
}

func TestClipGlobalNorm(t *testing.T) {
	a := parameter{"a", dense(1.0, 1), dense(3.0, 0)}
	b := parameter{"b", dense[float32](1, 1, 1), dense[float32](0, -4, 0)}
	c := parameter{"c", gorgonia.NewF64(7), gorgonia.NewF64(12)}
	model := []gorgonia.ValueGrad{a, b, c}
	for _, limit := range []float64{13.1, math.Inf(1)} {
		if norm, err := autodiff.ClipGlobalNorm(model, limit); err != nil ||
			math.Abs(norm-13) > 1e-12 {
			t.Fatalf("norm %v, error %v, want 13", norm, err)
		}
		if g := *c.grad.(*gorgonia.F64); g != 12 {
			t.Errorf("limit %v above the norm changed a gradient to %v", limit, g)
		}
	}

	if norm, err := autodiff.ClipGlobalNorm(model, 6.5); err != nil || math.Abs(norm-13) > 1e-12 {
		t.Fatalf("norm %v, error %v, want 13", norm, err)
	}

	norm, limit := 13.0, 6.5
	s := limit / (norm + 1e-6)
	if got := a.grad.Data().([]float64); got[0] != 3*s || got[1] != 0 {
		t.Errorf("float64 gradient is %v, want [%v 0]", got, 3*s)
	}

	if got := b.grad.Data().([]float32); got[1] != -4*float32(s) {
		t.Errorf("float32 gradient is %v, want [0 %v 0]", got, -4*float32(s))
	}

	if got := float64(*c.grad.(*gorgonia.F64)); got != 12*s {
		t.Errorf("scalar gradient is %v, want %v", got, 12*s)
	}

	if norm, err := autodiff.GlobalNorm(model); err != nil || math.Abs(norm-6.5) > 1e-5 {
		t.Errorf("norm after clipping is %v, error %v, want 6.5", norm, err)
	}
}

func TestClipGlobalNormRefuses(t *testing.T) {
	fine := parameter{"fine", dense(1.0), dense(2.0)}
	for _, c := range []struct {
		name  string
		model []gorgonia.ValueGrad
		limit float64
		want  string
	}{
		{"NaN", []gorgonia.ValueGrad{fine, parameter{"w", dense(1.0, 1), dense(0, math.NaN())}}, 1,
			`the gradient of parameter "w" is NaN at [1]`},
		{"infinity", []gorgonia.ValueGrad{fine, parameter{"", dense(1.0), dense(math.Inf(-1))}}, 1,
			"parameter #1 (unnamed) is -Inf"},
		{"overflow", []gorgonia.ValueGrad{fine, parameter{"w", dense(1.0), dense(1e200)}}, 1,
			`overflows at parameter "w"`},
		{"limit", []gorgonia.ValueGrad{fine}, 0, "limit is 0"},
		{"limit NaN", []gorgonia.ValueGrad{fine}, math.NaN(), "limit is NaN"},
		{"no gradient", []gorgonia.ValueGrad{fine, parameter{"w", dense(1.0), nil}}, 1,
			`parameter "w": has no gradient`},
		{"no value", []gorgonia.ValueGrad{fine, parameter{"w", nil, dense(1.0)}}, 1,
			`parameter "w": has no value`},
		{"types", []gorgonia.ValueGrad{fine, parameter{"w", dense(1.0), dense[float32](1)}}, 1,
			"gradient is float32"},
		{"nil", []gorgonia.ValueGrad{fine, nil}, 1, "is nil"},
		{"twice", []gorgonia.ValueGrad{fine, fine}, 1, `same name "fine"`},
	} {
		_, err := autodiff.ClipGlobalNorm(c.model, c.limit)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want one with %q", c.name, err, c.want)
		}
		if g := fine.grad.Data().([]float64)[0]; g != 2 {
			t.Fatalf("%s: a refused clipping changed a gradient to %v", c.name, g)
		}
	}
}

func TestFirstNonFinite(t *testing.T) {
	nan := math.NaN()
	fine := parameter{"fine", dense(1.0), dense(2.0)}
	missing := parameter{"missing", nil, nil}
	grad := parameter{"grad", dense(1.0, 2), dense(0, nan)}
	value := parameter{"value", tensor.New(tensor.WithShape(2, 2),
		tensor.WithBacking([]float64{1, 2, math.Inf(1), 4})), nil}
	if name, kind, found := autodiff.FirstNonFinite([]gorgonia.ValueGrad{fine,
		missing, nil}); found {
		t.Errorf("finite parameters give %s, %s", name, kind)
	}

	for _, c := range []struct {
		model      []gorgonia.ValueGrad
		name, kind string
	}{
		{[]gorgonia.ValueGrad{fine, grad}, `"grad"`, "gradient"},
		{[]gorgonia.ValueGrad{grad, fine, value}, `"value"`, "value"},
		{[]gorgonia.ValueGrad{fine, parameter{"", gorgonia.NewF32(float32(nan)), nil}},
			"#1 (unnamed)", "value"},
	} {
		if name, kind, found := autodiff.FirstNonFinite(c.model); name != c.name ||
			kind != c.kind || !found {
			t.Errorf("got %s, %s, %v, want %s, %s", name, kind, found, c.name, c.kind)
		}
	}
}
