package op_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// random returns a generator with a new seed and logs the seed.
func random(t testing.TB) *rand.Rand {
	return randtest.New(t)
}

// normal returns normally distributed numbers that float32 represents exactly, so that both precisions
// start from the same values.
func normal(r *rand.Rand, n int) []float64 {
	x := make([]float64, n)
	for i := range x {
		x[i] = float64(float32(r.NormFloat64()))
	}
	return x
}

// dense returns x as a tensor of type dt, float32 or float64.
func dense(dt tensor.Dtype, x []float64, shape ...int) *tensor.Dense {
	if dt == tensor.Float32 {
		y := make([]float32, len(x))
		for i, v := range x {
			y[i] = float32(v)
		}
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(y))
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(append([]float64(nil), x...)))
}

func ints(x []int) *tensor.Dense {
	return tensor.New(tensor.WithShape(len(x)), tensor.WithBacking(x))
}

// floats returns the elements of a value as float64.
func floats(t testing.TB, v gorgonia.Value) []float64 {
	t.Helper()
	switch d := v.Data().(type) {
	case []float64:
		return d
	case []float32:
		y := make([]float64, len(d))
		for i, v := range d {
			y[i] = float64(v)
		}
		return y
	case float64:
		return []float64{d}
	case float32:
		return []float64{float64(d)}
	}

	t.Fatalf("value of type %T", v)
	return nil
}

// distance returns ‖a − b‖ / ‖b‖, or infinity for a NaN or a different length.
func distance(a, b []float64) float64 {
	if len(a) != len(b) {
		return math.Inf(1)
	}

	var diff, norm float64
	for i, v := range b {
		diff += (a[i] - v) * (a[i] - v)
		norm += v * v
	}

	if diff == 0 {
		return 0
	}

	if math.IsNaN(diff) {
		return math.Inf(1)
	}

	return math.Sqrt(diff / norm)
}

// run computes the whole graph.
func run(t testing.TB, g *gorgonia.ExprGraph) {
	t.Helper()
	if err := tryRun(g); err != nil {
		t.Fatal(err)
	}
}

func tryRun(g *gorgonia.ExprGraph) error {
	m := gorgonia.NewTapeMachine(g)
	defer m.Close()
	return m.RunAll()
}

func must(t testing.TB) func(*gorgonia.Node, error) *gorgonia.Node {
	return func(n *gorgonia.Node, err error) *gorgonia.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
}

// kasminaLayer runs the forward op and the backward op of one layer separately, so that a test can act in
// between. The results overwrite memory that is filled with NaN.
type kasminaLayer struct {
	t                 testing.TB
	dt                tensor.Dtype
	forwardOp         *op.KasminaOp
	backwardOp        gorgonia.Op
	rows, dim         int
	slots, chunk      int
	width             int       // weights per slot
	x, weights, scale []float64 // inputs of the layer
	g                 []float64
	step              float64 // step for central differences
}

func newKasminaLayer(t testing.TB, r *rand.Rand, dt tensor.Dtype, rows, slots int, l *state.Lattice,
	opts ...op.KasminaOption) *kasminaLayer {
	t.Helper()
	return newWideLayer(t, r, dt, rows, slots, l.Hidden()/l.Seeds(), l, opts...)
}

// newWideLayer returns a layer with the given number of weights per slot.
func newWideLayer(t testing.TB, r *rand.Rand, dt tensor.Dtype, rows, slots, width int,
	l *state.Lattice, opts ...op.KasminaOption) *kasminaLayer {
	t.Helper()
	d, c := l.Hidden(), l.Hidden()/l.Seeds()
	g := gorgonia.NewGraph()
	node := func(name string, shape ...int) *gorgonia.Node {
		return gorgonia.NewTensor(g, dt, len(shape), gorgonia.WithShape(shape...),
			gorgonia.WithName(name))
	}
	x, w, s := node("x", rows, d), node("weights", slots, width), node("scales", slots)
	y := must(t)(op.Kasmina(x, w, s, l, opts...))
	cost := must(t)(gorgonia.Sum(must(t)(gorgonia.HadamardProd(y, node("g", rows, d)))))
	grads, err := gorgonia.Grad(cost, x, w, s)
	if err != nil {
		t.Fatal(err)
	}

	packed := g.From(grads[0].ID())
	packed.Next()
	k := &kasminaLayer{
		t: t, dt: dt, forwardOp: y.Op().(*op.KasminaOp),
		backwardOp: packed.Node().(*gorgonia.Node).Op(), rows: rows, dim: d, slots: slots,
		chunk: c, width: width,
		x: normal(r, rows*d), weights: normal(r, slots*width),
		scale: normal(r, slots), g: normal(r, rows*d),
		step: 1e-5,
	}

	if dt == tensor.Float32 { // so that a float64 layer can have the same inputs
		for _, v := range [][]float64{k.x, k.weights, k.scale, k.g} {
			for i := range v {
				v[i] = float64(float32(v[i]))
			}
		}
	}

	return k
}

func (k *kasminaLayer) params() []gorgonia.Value {
	return []gorgonia.Value{dense(k.dt, k.x, k.rows, k.dim), dense(k.dt, k.weights, k.slots,
		k.width), dense(k.dt, k.scale, k.slots)}
}

func (k *kasminaLayer) poisoned(shape ...int) *tensor.Dense {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return dense(k.dt, slices.Repeat([]float64{math.NaN()}, n), shape...)
}

func (k *kasminaLayer) tryForward(o *op.KasminaOp) ([]float64, error) {
	y, err := o.UsePreallocDo(k.poisoned(k.rows, k.dim), k.params()...)
	if err != nil {
		return nil, err
	}
	return floats(k.t, y), nil
}

func (k *kasminaLayer) forward() []float64 {
	k.t.Helper()
	y, err := k.tryForward(k.forwardOp)
	if err != nil {
		k.t.Fatal(err)
	}
	return y
}

// kasminaGrads holds the gradients of x, weights and scales.
type kasminaGrads struct{ x, weights, scales []float64 }

type prealloc interface {
	UsePreallocDo(gorgonia.Value, ...gorgonia.Value) (gorgonia.Value, error)
}

func (k *kasminaLayer) tryBackward() (kasminaGrads, error) {
	// The forward output only orders the ops. No result may depend on its contents.
	in := append(k.params(), k.poisoned(k.rows, k.dim), dense(k.dt, k.g, k.rows, k.dim))
	v, err := k.backwardOp.(prealloc).UsePreallocDo(k.poisoned(len(k.x)+
		len(k.weights)+len(k.scale)), in...)
	if err != nil {
		return kasminaGrads{}, err
	}
	all := floats(k.t, v)
	x, rest := all[:len(k.x)], all[len(k.x):]
	return kasminaGrads{x, rest[:len(k.weights)], rest[len(k.weights):]}, nil
}

func (k *kasminaLayer) backward() kasminaGrads {
	k.t.Helper()
	d, err := k.tryBackward()
	if err != nil {
		k.t.Fatal(err)
	}
	return d
}

// cost returns Σ g ⊙ y.
func (k *kasminaLayer) cost() (sum float64) {
	for i, v := range k.forward() {
		sum += k.g[i] * v
	}
	return sum
}

// difference returns the central difference of the cost with respect to *v.
func (k *kasminaLayer) difference(v *float64) float64 {
	h, kept := k.step*max(1, math.Abs(*v)), *v
	*v = kept + h
	up := k.cost()
	*v = kept - h
	down := k.cost()
	*v = kept
	return (up - down) / (2 * h)
}

// checkDifferences compares gradients with central differences. If they disagree, it also tries shorter
// steps, in case a kink lies within a step of the random number, and longer steps, in case the sum is so
// large that rounding dominates short ones.
func (k *kasminaLayer) checkDifferences(what string, got, of []float64) {
	k.t.Helper()
	scale := 1e-2
	for _, v := range got {
		scale = max(scale, math.Abs(v))
	}

	step := k.step
	defer func() { k.step = step }()
	for i := range of {
		var tried []float64
		for _, factor := range []float64{1, 1. / 16, 1. / 256, 16, 256, 4096} {
			k.step = factor * step
			want := k.difference(&of[i])
			if tried = append(tried, want); math.Abs(got[i]-want) <= 1e-7*scale {
				tried = nil
				break
			}
		}
		if tried != nil {
			k.t.Errorf("%s[%d] is %v, central differences give %v", what, i, got[i], tried)
		}
	}
}

// sameBits compares float slices bit by bit.
func sameBits(a, b []float64) bool {
	return slices.EqualFunc(a, b, func(v, w float64) bool {
		return math.Float64bits(v) == math.Float64bits(w)
	})
}

// The kinds with one weight per feature, and the kinds that need wide slots.
var (
	kasminaKinds  = []string{"Residual", "AttentionGate", "MLPExpansion", "ConvFilter"}
	capacityKinds = []string{"LowRank", "ChunkMLP"}
)

// awayFromZero moves a number away from zero, where relu has no derivative and the strict mode clamps.
func awayFromZero(v float64) float64 { return v + math.Copysign(0.2, v) }

func mapped(v []float64, f func(float64) float64) []float64 {
	out := make([]float64, len(v))
	for i := range v {
		out[i] = f(v[i])
	}
	return out
}
