package blueprints_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

var builtin = []blueprints.Kind{blueprints.Residual, blueprints.AttentionGate,
	blueprints.MLPExpansion, blueprints.ConvFilter,
	blueprints.LowRank, blueprints.ChunkMLP}

// sizes returns the numbers of weights that a kind uses for chunks of c features, for all slot widths
// that make a difference.
func sizes(t *testing.T, k blueprints.Kind, c int) (sizes []int) {
	for m := 1; m <= 3; m++ {
		n, err := blueprints.Size(k, c, 2*m*c+c-1)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Contains(sizes, n) {
			sizes = append(sizes, n)
		}
	}
	return sizes
}

func newRand(t *testing.T) *rand.Rand {
	return randtest.New(t)
}

func normals(r *rand.Rand, n int) []float64 {
	v := make([]float64, n)
	for i := range v {
		v[i] = r.NormFloat64()
	}
	return v
}

// Second implementations of the formulas of the specification.
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

	if k == blueprints.LowRank || k == blueprints.ChunkMLP {
		c, m := len(x), len(w)/(2*len(x))
		copy(y, x)
		for h := range m {
			var z float64
			for i, v := range x {
				z += w[h*c+i] * v
			}
			if k == blueprints.ChunkMLP {
				z /= 1 + math.Exp(-z)
			}
			for i := range y {
				y[i] += a * w[m*c+i*m+h] * z
			}
		}
		return y
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
			for _, n := range sizes(t, k, c) {
				x, w, a := normals(r, c), normals(r, n), r.NormFloat64()
				want := reference(k, x, w, a)
				got := make([]float64, c)
				if err := blueprints.Apply(k, got, x, w, a); err != nil {
					t.Fatal(err)
				}

				single := make([]float32, c)
				if err := blueprints.Apply(k, single, narrow(x), narrow(w),
					float32(a)); err != nil {
					t.Fatal(err)
				}

				// sum of the magnitudes of the terms, which may cancel
				size := reference(k, absolute(x), absolute(w), math.Abs(a))
				for i := range want {
					unit := 10 + math.Abs(want[i]) + size[i]
					if math.Abs(got[i]-want[i]) > 1e-13*unit ||
						math.Abs(float64(single[i])-want[i]) > 1e-6*unit {
						t.Errorf("%v C=%d: t[%d] is %v, in float32 %v, want %v", k, c, i,
							got[i], single[i], want[i])
					}
				}
			}
		}
	}
}

func absolute(v []float64) []float64 {
	a := make([]float64, len(v))
	for i, e := range v {
		a[i] = math.Abs(e)
	}
	return a
}

func narrow(v []float64) []float32 {
	s := make([]float32, len(v))
	for i := range v {
		s[i] = float32(v[i])
	}
	return s
}

// loss returns Σ over rows of g·t(x). Backward and Finish must compute its gradient.
func loss(k blueprints.Kind, xs, gs [][]float64, w []float64, a float64) (sum float64) {
	for r, x := range xs {
		for i, v := range reference(k, x, w, a) {
			sum += gs[r][i] * v
		}
	}
	return sum
}

// awayFromZero moves numbers away from zero, where relu has a kink.
func awayFromZero(v []float64) []float64 {
	for i, e := range v {
		v[i] = e + math.Copysign(0.1, e)
	}
	return v
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

			n := sizes(t, k, c)
			f, w, a := b.F64, awayFromZero(normals(r, n[len(n)-1])), r.NormFloat64()
			var xs, gs, dxs [][]float64
			p := w
			if f.Prepare != nil {
				p = make([]float64, len(w))
				f.Prepare(p, w)
			}

			dw, da := make([]float64, len(w)), 0.0
			for range rows {
				x, g, dx := awayFromZero(normals(r, c)), normals(r, c), make([]float64, c)
				for i := range dx {
					dx[i] = math.NaN() // Backward must overwrite every element
				}
				da += f.Backward(dx, dw, g, x, p, a)
				xs, gs, dxs = append(xs, x), append(gs, g), append(dxs, dx)
			}

			if f.Finish != nil {
				f.Finish(dw, p)
			}
			var size float64 // sum of the magnitudes of the loss's terms, which determines the rounding error of a difference
			for row := range xs {
				size += loss(k, [][]float64{absolute(xs[row])}, [][]float64{absolute(gs[row])},
					absolute(w), math.Abs(a))
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
				if !(math.Abs(got-want) <= 1e-7*(1+math.Abs(want))+1e-15/h*size) {
					t.Errorf("%v C=%d: %s is %v, central differences give %v",
						k, c, what, got, want)
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
			width := 5 * c
			weights, scales := normals(r, slots*width), normals(r, slots)
			before := append([]float64(nil), weights...)
			if err := blueprints.Identity(k, 2, c, 7, weights, scales); err != nil {
				t.Fatal(err)
			}

			x, y := normals(r, c), make([]float64, c)
			if k == blueprints.MLPExpansion {
				for i := range x {
					x[i] = math.Abs(x[i])
				}
			}

			if err := blueprints.Apply(k, y, x, weights[2*width:3*width], scales[2]); err != nil {
				t.Fatal(err)
			}

			for i := range x {
				if math.Abs(y[i]-x[i]) > 1e-15*math.Abs(x[i]) {
					t.Errorf("%v C=%d: identity start gives t(%v) = %v", k, c, x[i], y[i])
				}
			}

			for i, v := range weights {
				if i/width != 2 && v != before[i] {
					t.Errorf("%v: Identity changed slot %d", k, i/width)
				}
			}
		}
	}
}

// TestRandomStart checks that the random weights of a start depend on the seed and the kind, and that
// hidden features can learn, since every part of the gradient that a zero start would block is
// present.
func TestRandomStart(t *testing.T) {
	r := newRand(t)
	const c, width = 5, 43
	seed := r.Uint64()
	start := func(k blueprints.Kind, seed uint64) []float64 {
		weights, scales := normals(r, 2*width), normals(r, 2)
		if err := blueprints.Identity(k, 1, c, seed, weights, scales); err != nil {
			t.Fatal(err)
		}
		return append(weights[width:], scales[1])
	}

	for _, k := range []blueprints.Kind{blueprints.LowRank, blueprints.ChunkMLP} {
		w := start(k, seed)
		if !slices.Equal(w, start(k, seed)) {
			t.Errorf("%v: seed %d gives other weights the second time", k, seed)
		}
		if slices.Equal(w, start(k, seed+1)) {
			t.Errorf("%v: seeds %d and %d give the same weights", k, seed, seed+1)
		}

		n, _ := blueprints.Size(k, c, width)
		if n != 40 || blueprints.Mixing(c, width) != 4 {
			t.Errorf("%v uses %d of %d weights, want 40", k, n, width)
		}

		for i, v := range w[:width] {
			if (v != 0) != (i < n/2) {
				t.Errorf("%v: weight %d starts at %v", k, i, v)
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

		x, w, a := normals(r, c), normals(r, 4*c), r.NormFloat64()
		if b.Homogeneity == blueprints.NotHomogeneous {
			continue
		}

		scaled := make([]float64, c)
		for i := range x {
			scaled[i] = lambda * x[i]
		}
		as := a
		if b.Homogeneity == blueprints.InXAndScale {
			as = lambda * a
		}
		y, ys := make([]float64, c), make([]float64, c)
		if err := errors.Join(blueprints.Apply(k, y, x, w, a),
			blueprints.Apply(k, ys, scaled, w, as)); err != nil {
			t.Fatal(err)
		}

		for i := range y {
			if ys[i] != lambda*y[i] {
				t.Errorf("%v declares homogeneity %d, but t(λx) = %v and λ·t(x) = %v", k,
					b.Homogeneity, ys[i], lambda*y[i])
			}
		}
	}
}

func TestSoftmaxOfExtremeWeights(t *testing.T) {
	x, y := []float32{1, 1, 1}, make([]float32, 3)
	if err := blueprints.Apply(blueprints.AttentionGate, y, x, []float32{3e38, -3e38, 3e38},
		2); err != nil {
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
	_, unknownParts := blueprints.Parts(99, 2, 2)
	_, oddParts := blueprints.Parts(blueprints.LowRank, 2, 5)
	if err := without(func(b *blueprints.Blueprint) {
		b.Name = fmt.Sprintf("Negative%d", blueprints.Kinds())
		b.Size = func(int, int) int { return -1 }
	}); err != nil {
		t.Fatal(err)
	}

	_, negative := blueprints.Size(blueprints.Kind(blueprints.Kinds()-1), 3, 5)
	for _, c := range []struct {
		err  error
		is   error
		text string
	}{
		{without(func(b *blueprints.Blueprint) {
			b.Name = ""
		}), blueprints.ErrInvalid, "Name is missing"},
		{without(func(b *blueprints.Blueprint) {
			b.Name = "ConvFilter"
		}), blueprints.ErrInvalid, `"ConvFilter" is taken by kind 3`},
		{without(func(b *blueprints.Blueprint) {
			b.Identity = nil
		}), blueprints.ErrInvalid, "Identity is missing"},
		{without(func(b *blueprints.Blueprint) {
			b.F32.Forward = nil
		}), blueprints.ErrInvalid, "F32"},
		{without(func(b *blueprints.Blueprint) {
			b.F64.Backward = nil
		}), blueprints.ErrInvalid, "F64"},
		{without(func(b *blueprints.Blueprint) {
			b.F64.Finish = func(_, _ []float64) {}
		}), blueprints.ErrInvalid, "Prepare and Finish"},
		{without(func(b *blueprints.Blueprint) {
			b.F32.Finish = func(_, _ []float32) {}
		}), blueprints.ErrInvalid, "Prepare and Finish"},
		{without(func(b *blueprints.Blueprint) {
			b.Homogeneity = 9
		}), blueprints.ErrInvalid, "Homogeneity is 9"},
		{unknown, blueprints.ErrUnknownKind, "kind 250: kinds 0 to"},
		{blueprints.Identity(99, 1, 2, 0, w, s), blueprints.ErrUnknownKind, "99"},
		{blueprints.Identity(blueprints.Residual, 0, 2, 0, w, s), blueprints.ErrSlot,
			"slot is 0, want 1 to 2"},
		{blueprints.Identity(blueprints.Residual, 3, 2, 0, w, s), blueprints.ErrSlot,
			"slot is 3, want 1 to 2"},
		{blueprints.Identity(blueprints.Residual, 1, 2, 0, w[:5], s), nil,
			"weights has 5 elements and scales 3"},
		{blueprints.Identity(blueprints.ConvFilter, 1, 2, 0, w[:0], s), nil,
			"weights has 0 elements"},
		{blueprints.Identity(blueprints.Residual, 1, 0, 0, w, s), nil, "chunks of 0 features"},
		{blueprints.Identity(blueprints.LowRank, 1, 2, 0, w, s), blueprints.ErrWidth,
			"LowRank needs 4 weights per slot for chunks of 2 features, but the slots have 2"},
		{unknownParts, blueprints.ErrUnknownKind, "99"},
		{oddParts, blueprints.ErrInvalid, `"LowRank": Parts(2, 5): the parts have 4 elements`},
		{blueprints.Apply(99, w, w, w, 1), blueprints.ErrUnknownKind, "99"},
		{blueprints.Apply(blueprints.Residual, w, w, w[:2], 1), blueprints.ErrWidth,
			"Residual needs 6 weights per slot for chunks of 6 features, but the slots have 2"},
		{blueprints.Apply(blueprints.Residual, w[:5], w, w, 1), nil, "x has 6 elements and y 5"},
		{negative, blueprints.ErrInvalid, "Size(3, 5) is -1"},
	} {
		if c.err == nil || !strings.Contains(c.err.Error(), c.text) ||
			(c.is != nil && !errors.Is(c.err, c.is)) {
			t.Errorf("got error %v, want one with %q that is %v", c.err, c.text, c.is)
		}
	}
}

// square returns the arithmetic of t(x) = a·x² + w in one element type.
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
			name := fmt.Sprintf("Square%d of %d", i, before) // a new name even under -count
			k, err := blueprints.Register(blueprints.Blueprint{
				Name: name, Identity: func([]float64, int, *rand.Rand) float64 {
					return 0
				}, F32: square[float32](), F64: square[float64](),
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
	if err := blueprints.Identity(blueprints.AttentionGate, 1, c, 0, weights, scales); err != nil {
		fmt.Println(err)
		return
	}

	x, y := []float64{1, -2, 3, -4}, make([]float64, c)
	if err := blueprints.Apply(blueprints.AttentionGate, y, x, weights[c:2*c],
		scales[1]); err != nil {
		fmt.Println(err)
		return
	}

	fmt.Println(y)
	// Output: [1 -2 3 -4]
}

// This example registers a kind, which a program does once, before it uses it.
var squareKind, errSquare = blueprints.Register(blueprints.Blueprint{
	Name:     "Square",
	Layout:   "a·x² + w",
	Identity: func(w []float64, _ int, _ *rand.Rand) float64 { clear(w); return 0 },
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
