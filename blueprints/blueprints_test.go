package blueprints_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kasmina-go/kasmina/blueprints"
)

var builtin = []blueprints.Kind{blueprints.Residual, blueprints.AttentionGate, blueprints.MLPExpansion, blueprints.ConvFilter}

func newRand(t *testing.T) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	t.Logf("random seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

func normals(r *rand.Rand, n int) []float64 {
	v := make([]float64, n)
	for i := range v {
		v[i] = r.NormFloat64()
	}
	return v
}

// The formulas of the specification, written out a second time.
func reference(k blueprints.Kind, x, w []float64, a float64) []float64 {
	y := make([]float64, len(x))
	at := func(v []float64, i int) float64 {
		if i < 0 || i >= len(v) {
			return 0
		}
		return v[i]
	}
	var sum float64
	for _, v := range w {
		sum += math.Exp(v)
	}
	for i := range x {
		switch k {
		case blueprints.Residual:
			y[i] = x[i] + a*w[i]
		case blueprints.AttentionGate:
			y[i] = a * x[i] * math.Exp(w[i]) / sum
		case blueprints.MLPExpansion:
			y[i] = a * math.Max(0, x[i]*w[i])
		case blueprints.ConvFilter:
			y[i] = a * (at(w, 0)*at(x, i) + at(w, 1)*at(x, i-1) + at(w, 2)*at(x, i-2))
		}
	}
	return y
}

func TestForwardIsTheFormula(t *testing.T) {
	r := newRand(t)
	for _, k := range builtin {
		for _, c := range []int{1, 2, 3, 4, 5, 17} {
			x, w, a := normals(r, c), normals(r, c), r.NormFloat64()
			want := reference(k, x, w, a)
			got := make([]float64, c)
			if err := blueprints.Apply(k, got, x, w, a); err != nil {
				t.Fatal(err)
			}
			single := make([]float32, c)
			if err := blueprints.Apply(k, single, narrow(x), narrow(w), float32(a)); err != nil {
				t.Fatal(err)
			}
			for i := range want {
				if math.Abs(got[i]-want[i]) > 1e-13*(1+math.Abs(want[i])) || math.Abs(float64(single[i])-want[i]) > 2e-6*(1+math.Abs(want[i])) {
					t.Errorf("%v C=%d: t[%d] is %v, in float32 %v, want %v", k, c, i, got[i], single[i], want[i])
				}
			}
		}
	}
}

func narrow(v []float64) []float32 {
	s := make([]float32, len(v))
	for i := range v {
		s[i] = float32(v[i])
	}
	return s
}

// loss is Σ over rows of g·t(x): its gradient is what Backward and Finish must add up to.
func loss(k blueprints.Kind, xs, gs [][]float64, w []float64, a float64) (sum float64) {
	for r, x := range xs {
		for i, v := range reference(k, x, w, a) {
			sum += gs[r][i] * v
		}
	}
	return sum
}

func TestBackwardMatchesCentralDifferences(t *testing.T) {
	r := newRand(t)
	const rows, h = 3, 1e-6
	for _, k := range builtin {
		for _, c := range []int{1, 2, 3, 5, 8} {
			b, err := blueprints.Lookup(k)
			if err != nil {
				t.Fatal(err)
			}
			f, w, a := b.F64, normals(r, c), r.NormFloat64()
			var xs, gs, dxs [][]float64
			p := w
			if f.Prepare != nil {
				p = make([]float64, c)
				f.Prepare(p, w)
			}
			dw, da := make([]float64, c), 0.0
			for range rows {
				x, g, dx := normals(r, c), normals(r, c), make([]float64, c)
				for i := range dx {
					dx[i] = math.NaN() // Backward must write all of it
				}
				da += f.Backward(dx, dw, g, x, p, a)
				xs, gs, dxs = append(xs, x), append(gs, g), append(dxs, dx)
			}
			if f.Finish != nil {
				f.Finish(dw, p)
			}
			compare := func(what string, got float64, v *float64) {
				t.Helper()
				kept := *v
				*v = kept + h
				up := loss(k, xs, gs, w, a)
				*v = kept - h
				down := loss(k, xs, gs, w, a)
				*v = kept
				want := (up - down) / (2 * h)
				if !(math.Abs(got-want) <= 1e-7*(1+math.Abs(want))) {
					t.Errorf("%v C=%d: %s is %v, central differences give %v", k, c, what, got, want)
				}
			}
			for i := range w {
				compare(fmt.Sprintf("dw[%d]", i), dw[i], &w[i])
			}
			compare("da", da, &a)
			for row := range xs {
				for i := range xs[row] {
					compare(fmt.Sprintf("dx[%d][%d]", row, i), dxs[row][i], &xs[row][i])
				}
			}
		}
	}
}

func TestIdentityStart(t *testing.T) {
	r := newRand(t)
	const slots = 4
	for _, k := range builtin {
		for _, c := range []int{1, 2, 3, 6} {
			weights, scales := normals(r, slots*c), normals(r, slots)
			before := append([]float64(nil), weights...)
			if err := blueprints.Identity(k, 2, weights, scales); err != nil {
				t.Fatal(err)
			}
			x, y := normals(r, c), make([]float64, c)
			if k == blueprints.MLPExpansion {
				for i := range x {
					x[i] = math.Abs(x[i])
				}
			}
			if err := blueprints.Apply(k, y, x, weights[2*c:3*c], scales[2]); err != nil {
				t.Fatal(err)
			}
			for i := range x {
				if math.Abs(y[i]-x[i]) > 1e-15*math.Abs(x[i]) {
					t.Errorf("%v C=%d: identity start gives t(%v) = %v", k, c, x[i], y[i])
				}
			}
			for i, v := range weights {
				if i/c != 2 && v != before[i] {
					t.Errorf("%v: Identity changed slot %d", k, i/c)
				}
			}
		}
	}
}

func TestHomogeneity(t *testing.T) {
	r := newRand(t)
	const c, lambda = 7, 0x1p-9
	for _, k := range builtin {
		b, err := blueprints.Lookup(k)
		if err != nil {
			t.Fatal(err)
		}
		x, w, a := normals(r, c), normals(r, c), r.NormFloat64()
		scaled := make([]float64, c)
		for i := range x {
			scaled[i] = lambda * x[i]
		}
		as := a
		if b.Homogeneity == blueprints.InXAndScale {
			as = lambda * a
		}
		y, ys := make([]float64, c), make([]float64, c)
		if err := errors.Join(blueprints.Apply(k, y, x, w, a), blueprints.Apply(k, ys, scaled, w, as)); err != nil {
			t.Fatal(err)
		}
		for i := range y {
			if ys[i] != lambda*y[i] {
				t.Errorf("%v declares homogeneity %d, but t(λx) = %v and λ·t(x) = %v", k, b.Homogeneity, ys[i], lambda*y[i])
			}
		}
	}
}

func TestSoftmaxOfExtremeWeights(t *testing.T) {
	x, y := []float32{1, 1, 1}, make([]float32, 3)
	if err := blueprints.Apply(blueprints.AttentionGate, y, x, []float32{3e38, -3e38, 3e38}, 2); err != nil {
		t.Fatal(err)
	}
	if y[0] != 1 || y[1] != 0 || y[2] != 1 {
		t.Errorf("softmax of ±3e38 gives gates %v, want [1 0 1]", y)
	}
}

func TestErrors(t *testing.T) {
	valid, err := blueprints.Lookup(blueprints.Residual)
	if err != nil {
		t.Fatal(err)
	}
	without := func(change func(*blueprints.Blueprint)) error {
		b := *valid
		b.Name = "Incomplete"
		change(&b)
		_, err := blueprints.Register(b)
		return err
	}
	w, s := make([]float64, 6), make([]float64, 3)
	_, unknown := blueprints.Lookup(250)
	for _, c := range []struct {
		err  error
		is   error
		text string
	}{
		{without(func(b *blueprints.Blueprint) { b.Name = "" }), blueprints.ErrInvalid, "Name is missing"},
		{without(func(b *blueprints.Blueprint) { b.Name = "ConvFilter" }), blueprints.ErrInvalid, `"ConvFilter" is taken by kind 3`},
		{without(func(b *blueprints.Blueprint) { b.Identity = nil }), blueprints.ErrInvalid, "Identity is missing"},
		{without(func(b *blueprints.Blueprint) { b.F32.Forward = nil }), blueprints.ErrInvalid, "F32"},
		{without(func(b *blueprints.Blueprint) { b.F64.Backward = nil }), blueprints.ErrInvalid, "F64"},
		{without(func(b *blueprints.Blueprint) { b.F64.Finish = func(_, _ []float64) {} }), blueprints.ErrInvalid, "Prepare and Finish"},
		{without(func(b *blueprints.Blueprint) { b.F32.Finish = func(_, _ []float32) {} }), blueprints.ErrInvalid, "Prepare and Finish"},
		{without(func(b *blueprints.Blueprint) { b.Homogeneity = 9 }), blueprints.ErrInvalid, "Homogeneity is 9"},
		{unknown, blueprints.ErrUnknownKind, "kind 250: kinds 0 to"},
		{blueprints.Identity(99, 1, w, s), blueprints.ErrUnknownKind, "99"},
		{blueprints.Identity(blueprints.Residual, 0, w, s), blueprints.ErrSlot, "slot is 0, want 1 to 2"},
		{blueprints.Identity(blueprints.Residual, 3, w, s), blueprints.ErrSlot, "slot is 3, want 1 to 2"},
		{blueprints.Identity(blueprints.Residual, 1, w[:5], s), nil, "weights has 5 elements and scales 3"},
		{blueprints.Identity(blueprints.ConvFilter, 1, w[:0], s), nil, "weights has 0 elements"},
		{blueprints.Apply(99, w, w, w, 1), blueprints.ErrUnknownKind, "99"},
		{blueprints.Apply(blueprints.Residual, w, w, w[:2], 1), nil, "x has 6 elements, w 2 and y 6"},
	} {
		if c.err == nil || !strings.Contains(c.err.Error(), c.text) || (c.is != nil && !errors.Is(c.err, c.is)) {
			t.Errorf("got error %v, want one with %q that is %v", c.err, c.text, c.is)
		}
	}
}

// square returns t(x) = a·x² + w in one element type.
func square[T blueprints.Float]() blueprints.Arithmetic[T] {
	return blueprints.Arithmetic[T]{
		Forward: func(t, x, w []T, a T) {
			for i := range t {
				t[i] = a*x[i]*x[i] + w[i]
			}
		},
		Backward: func(dx, dp, g, x, w []T, a T) (da float64) {
			for i := range g {
				dx[i] = 2 * a * x[i] * g[i]
				dp[i] += g[i]
				da += float64(g[i] * x[i] * x[i])
			}
			return da
		},
	}
}

func TestRegisterFromManyGoroutines(t *testing.T) {
	before := blueprints.Kinds()
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			name := fmt.Sprintf("Square%d of %d", i, before) // a name of its own under -count too
			k, err := blueprints.Register(blueprints.Blueprint{
				Name: name, Identity: func([]float64) float64 { return 0 }, F32: square[float32](), F64: square[float64](),
			})
			if err != nil {
				t.Error(err)
			}
			if found, ok := blueprints.ByName(name); !ok || found != k || k.String() != name {
				t.Errorf("%s is kind %d by its name, registered as %d (%v)", name, found, k, k)
			}
		}()
	}
	wg.Wait()
	if got := blueprints.Kinds() - before; got != 8 {
		t.Errorf("%d kinds were added, want 8", got)
	}
	if s := blueprints.Kind(255).String(); s != "Kind(255)" {
		t.Errorf("an unknown kind prints as %q", s)
	}
}

func ExampleApply() {
	x, y := []float64{1, 2, 3}, make([]float64, 3)
	if err := blueprints.Apply(blueprints.ConvFilter, y, x, []float64{1, 0.5, 0}, 2); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(y)
	// Output: [2 5 8]
}

func ExampleIdentity() {
	const slots, c = 3, 4
	weights, scales := make([]float64, slots*c), make([]float64, slots)
	if err := blueprints.Identity(blueprints.AttentionGate, 1, weights, scales); err != nil {
		fmt.Println(err)
		return
	}
	x, y := []float64{1, -2, 3, -4}, make([]float64, c)
	if err := blueprints.Apply(blueprints.AttentionGate, y, x, weights[c:2*c], scales[1]); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(y)
	// Output: [1 -2 3 -4]
}

// A program registers its kinds once, before it uses them.
var squareKind, errSquare = blueprints.Register(blueprints.Blueprint{
	Name:     "Square",
	Layout:   "a·x² + w",
	Identity: func(w []float64) float64 { clear(w); return 0 },
	F32:      square[float32](),
	F64:      square[float64](),
})

func ExampleRegister() {
	if errSquare != nil {
		fmt.Println(errSquare)
		return
	}
	y := make([]float64, 2)
	if err := blueprints.Apply(squareKind, y, []float64{2, 3}, []float64{0, 1}, 0.5); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(squareKind, y)
	// Output: Square [2 5.5]
}
