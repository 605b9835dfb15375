package op_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/op"
)

// input is a tensor argument: float64 values in x, or ids.
type input struct {
	shape []int
	x     []float64
	ids   []int
}

func randomInput(r *rand.Rand, shape ...int) input {
	return input{shape: shape, x: normal(r, tensor.Shape(shape).TotalSize())}
}

func idInput(r *rand.Rand, n, low, high int) input {
	ids := make([]int, n)
	for i := range ids {
		ids[i] = low + r.IntN(high-low)
	}
	return input{shape: []int{n}, ids: ids}
}

// startsInput is where documents of random lengths start, in sequences of seq tokens. The first
// takes half a sequence at least: of documents of a token each, q and k have no gradients to
// compare.
func startsInput(r *rand.Rand, sequences, seq int) input {
	ids := make([]int, sequences*seq)
	longest := 1 + r.IntN(2*seq)
	for b := range sequences {
		for start := 0; start < seq; {
			end := min(seq, start+1+r.IntN(longest))
			if b == 0 && start == 0 {
				end = max(end, (seq+1)/2)
			}
			for i := start; i < end; i++ {
				ids[b*seq+i] = start
			}
			start = end
		}
	}
	return input{shape: []int{len(ids)}, ids: ids}
}

// opCase is an op with random inputs and what it should compute, as written on paper, in float64.
type opCase struct {
	name  string
	in    []input
	build func(in gorgonia.Nodes) (*gorgonia.Node, error)
	want  func() []float64
	// size is what rounding errors are relative to, nil for the result: where its terms may cancel,
	// they with absolute values.
	size func() []float64
}

// opCases returns every op but Kasmina at several shapes, odd ones included, with fresh inputs.
func opCases(r *rand.Rand) []opCase {
	var cases []opCase
	add := func(name string, build func(in gorgonia.Nodes) (*gorgonia.Node, error),
		want func(in []input) []float64, in ...input) {
		for i := range in {
			name += fmt.Sprint(in[i].shape)
		}
		cases = append(cases, opCase{name: name, in: in, build: build, want: func() []float64 {
			return want(in)
		}})
	}
	sized := func(size func(in []input) []float64) { // of the case that was added last
		c := &cases[len(cases)-1]
		var in []input
		for _, a := range c.in {
			in = append(in, input{a.shape, mapped(a.x, math.Abs), a.ids})
		}
		c.size = func() []float64 { return size(in) }
	}
	for _, s := range [][2]int{{1, 1}, {3, 7}, {5, 64}, {70, 33}} {
		rows, d := s[0], s[1]
		add("RMSNorm", func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.RMSNorm(in[0], in[1], 1e-5)
		},
			func(in []input) []float64 {
				return refRMSNorm(in[0].x, in[1].x, rows, d, 1e-5)
			}, randomInput(r, rows, d), randomInput(r, d))
		add("RMSNorm 1+weight", func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.RMSNorm(in[0], in[1], 1e-5, op.WeightPlusOne())
		}, func(in []input) []float64 {
			return refRMSNorm(in[0].x, plusOne(in[1].x), rows, d, 1e-5)
		},
			randomInput(r, rows, d), randomInput(r, d))
		heads := 1 + r.IntN(4)
		add("RMSNorm of heads", func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.RMSNorm(in[0], in[1], 1e-5, op.EachHead(), op.WeightPlusOne())
		}, func(in []input) []float64 {
			return refRMSNorm(in[0].x, plusOne(in[1].x), rows*heads, d, 1e-5)
		},
			randomInput(r, rows, heads*d), randomInput(r, d))
		add("Bias", func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.Bias(in[0], in[1])
		},
			func(in []input) []float64 {
				y := slices.Clone(in[0].x)
				for i := range y {
					y[i] += in[1].x[i%d]
				}
				return y
			}, randomInput(r, rows, d), randomInput(r, d))
		out, f := 1+r.IntN(9), 1+r.IntN(40)
		add("Linear", func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.Linear(in[0], in[1])
		},
			func(in []input) []float64 {
				return refLinear(in[0].x, in[1].x, rows, d, out)
			}, randomInput(r, rows, d), randomInput(r, out, d))
		sized(func(in []input) []float64 { return refLinear(in[0].x, in[1].x, rows, d, out) })
		add("SiLUMLP", func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.SiLUMLP(in[0], in[1], in[2], in[3])
		},
			func(in []input) []float64 {
				return refSiLUMLP(in[0].x, in[1].x, in[2].x, in[3].x, rows, d, f)
			},
			randomInput(r, rows, d), randomInput(r, f, d),
			randomInput(r, f, d), randomInput(r, d, f))
		sized(func(in []input) []float64 {
			return refSiLUMLP(in[0].x, in[1].x, in[2].x, in[3].x, rows, d, f)
		})
		add("GELUMLP", func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.GELUMLP(in[0], in[1], in[2], in[3])
		},
			func(in []input) []float64 {
				return refGELUMLP(in[0].x, in[1].x, in[2].x, in[3].x, rows, d, f)
			},
			randomInput(r, rows, d), randomInput(r, f, d),
			randomInput(r, f, d), randomInput(r, d, f))
		sized(func(in []input) []float64 {
			return refGELUMLP(in[0].x, in[1].x, in[2].x, in[3].x, rows, d, f)
		})
		add("Embedding", func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.Embedding(in[0], in[1])
		},
			func(in []input) []float64 {
				return refEmbedding(in[0].ids, in[1].x, d)
			}, idInput(r, rows, 0, 5), randomInput(r, 5, d))
		v := d + 1
		targets := idInput(r, rows, -1, v)
		targets.ids[0] = v - 1
		add("CrossEntropy", func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.CrossEntropy(in[0], in[1])
		},
			func(in []input) []float64 {
				return refCrossEntropy(in[0].x, in[1].ids, v)
			}, randomInput(r, rows, v), targets)
		// log Σ exp(logits − top), and logits
		sized(func(in []input) []float64 { return []float64{1 + slices.Max(in[0].x)} })
		add("LinearCrossEntropy", func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.LinearCrossEntropy(in[0], in[1], in[2])
		},
			func(in []input) []float64 {
				return refCrossEntropy(refLinear(in[0].x, in[1].x, rows, d, v), in[2].ids, v)
			}, randomInput(r, rows, d), randomInput(r, v, d), targets)
		sized(func(in []input) []float64 {
			return []float64{1 + slices.Max(refLinear(in[0].x, in[1].x, rows, d, v))}
		})
		add("NewtonSchulz", func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.NewtonSchulz(in[0], 5)
		},
			func(in []input) []float64 {
				return refNewtonSchulz(in[0].x, rows, d, 5)
			}, randomInput(r, rows, d))
	}
	for _, c := range []op.RoPEConfig{{Seq: 1, Heads: 1, HeadDim: 2},
		{Seq: 5, Heads: 3, HeadDim: 6, Base: 500},
		{Seq: 9, Heads: 2, HeadDim: 8, Scaling: &op.RoPEScaling{Factor: 4}},
		{Seq: 7, Heads: 1, HeadDim: 16, Scaling: &op.RoPEScaling{Factor: 8, LowFreq: 1,
			HighFreq: 4, Original: 64}},
		{Seq: 7, Heads: 1, HeadDim: 16, Scaling: &op.RoPEScaling{Factor: 4, BetaFast: 32,
			BetaSlow: 1, Original: 2048}},
		{Seq: 7, Heads: 2, HeadDim: 12, Base: 300, Scaling: &op.RoPEScaling{Factor: 3, BetaFast: 9,
			BetaSlow: 2, Original: 70,
			Unrounded: true, Magnitude: 1.5}},
		{Seq: 7, Heads: 2, HeadDim: 4, Scaling: &op.RoPEScaling{Factor: 3, BetaFast: 9,
			BetaSlow: 9, Original: 5}}} {
		add("RoPE", func(in gorgonia.Nodes) (*gorgonia.Node, error) { return op.RoPE(in[0], c) },
			func(in []input) []float64 {
				return refRoPE(in[0].x, c)
			}, randomInput(r, 3*c.Seq, c.Heads*c.HeadDim))
	}
	for _, c := range []op.AttentionConfig{
		{Seq: 1, Heads: 1, HeadDim: 1, Causal: true}, {Seq: 7, Heads: 2, HeadDim: 3, Causal: true},
		{Seq: 5, Heads: 4, KVHeads: 2, HeadDim: 5},
		{Seq: 65, Heads: 3, KVHeads: 1, HeadDim: 4, Causal: true, Scale: 0.3},
		{Seq: 130, Heads: 2, KVHeads: 1, HeadDim: 8, Causal: true},
		{Seq: 129, Heads: 1, HeadDim: 2},
		{Seq: 9, Heads: 2, HeadDim: 3, Causal: true, Window: 1},
		{Seq: 9, Heads: 2, HeadDim: 3, Causal: true, Window: 2 + r.IntN(7)},
		{Seq: 530, Heads: 2, KVHeads: 1, HeadDim: 2, Causal: true, Window: 2 + r.IntN(500)},
		{Seq: 300, Heads: 1, HeadDim: 2, Causal: true, Window: 1 + r.IntN(40)}} {
		kv := c.KVHeads
		if kv == 0 {
			kv = c.Heads
		}
		add(fmt.Sprintf("Attention%+v", c), func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.Attention(in[0], in[1], in[2], c)
		},
			func(in []input) []float64 {
				return refAttention(in[0].x, in[1].x, in[2].x, nil, 2, c)
			},
			randomInput(r, 2*c.Seq, c.Heads*c.HeadDim), randomInput(r, 2*c.Seq, kv*c.HeadDim),
			randomInput(r, 2*c.Seq, kv*c.HeadDim))
		if !c.Causal {
			continue
		}
		add(fmt.Sprintf("DocumentAttention%+v", c),
			func(in gorgonia.Nodes) (*gorgonia.Node, error) {
				return op.DocumentAttention(in[0], in[1], in[2], in[3], c)
			}, func(in []input) []float64 {
				return refAttention(in[0].x, in[1].x, in[2].x, in[3].ids, 2, c)
			},
			randomInput(r, 2*c.Seq, c.Heads*c.HeadDim), randomInput(r, 2*c.Seq, kv*c.HeadDim),
			randomInput(r, 2*c.Seq, kv*c.HeadDim),
			startsInput(r, 2, c.Seq))
	}
	return cases
}

// nodes puts the case's inputs into a new graph, and returns those that can be differentiated by.
func (c opCase) nodes(dt tensor.Dtype) (in, wrt gorgonia.Nodes) {
	g := gorgonia.NewGraph()
	for i, a := range c.in {
		value := ints(a.ids)
		if a.ids == nil {
			value = dense(dt, a.x, a.shape...)
		}
		n := gorgonia.NodeFromAny(g, value, gorgonia.WithName(fmt.Sprintf("in%d", i)))
		in = append(in, n)
		if a.ids == nil {
			wrt = append(wrt, n)
		}
	}
	return in, wrt
}

func TestForward(t *testing.T) {
	for _, c := range opCases(random(t)) {
		for dt, tolerance := range map[tensor.Dtype]float64{tensor.Float64: 1e-12,
			tensor.Float32: 1e-6} {
			t.Run(fmt.Sprint(c.name, dt), func(t *testing.T) {
				in, _ := c.nodes(dt)
				y := must(t)(c.build(in))
				run(t, in[0].Graph())
				if strings.HasPrefix(c.name, "NewtonSchulz") && dt == tensor.Float32 {
					// five steps, each of which multiplies errors in small singular values by up to
					// 3.4
					tolerance = 1e-5
				}
				want := c.want()
				d, size := distance(floats(t, y.Value()), want), norm(want)
				if c.size != nil && d > 0 {
					d *= size / norm(c.size())
				}
				if !(d <= tolerance) {
					t.Errorf("differs from the reference by %.2g, want at most %g", d, tolerance)
				}
				checkPrealloc(t, y, in)
			})
		}
	}
}

// norm returns ‖x‖.
func norm(x []float64) (n float64) {
	for _, v := range x {
		n = math.Hypot(n, v)
	}
	return n
}

// checkPrealloc runs the op of y once more, into memory full of NaN, and wants the same bits.
func checkPrealloc(t *testing.T, y *gorgonia.Node, in gorgonia.Nodes) {
	t.Helper()
	o, ok := y.Op().(gorgonia.UsePreallocDoer)
	if !ok {
		t.Fatalf("%T has no UsePreallocDo", y.Op())
	}
	if y.IsScalar() {
		return
	}
	values := make([]gorgonia.Value, len(in))
	for i, n := range in {
		values[i] = n.Value()
	}
	n := tensor.Shape(y.Shape()).TotalSize()
	got, err := o.UsePreallocDo(dense(y.Dtype(), slices.Repeat([]float64{math.NaN()}, n),
		y.Shape()...), values...)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(floats(t, got), floats(t, y.Value())) {
		t.Error("UsePreallocDo gives other values than Do")
	}
	if _, err := o.UsePreallocDo(dense(y.Dtype(), make([]float64, n+1), n+1),
		values...); err == nil {
		t.Error("UsePreallocDo takes memory of another shape")
	}
}

// TestGradients compares the symbolic gradients in float64 with central differences, and those in
// float32 with them. The first input is used twice, so that gradients of several uses add up, and
// stock ops stand around ours.
func TestGradients(t *testing.T) {
	r := random(t)
	for _, c := range opCases(r) {
		t.Run(c.name, func(t *testing.T) {
			var grads [2][]gorgonia.Value
			weights := normal(r, len(c.want()))
			// Elements to move one by one, beside a direction to which all elements contribute.
			samples := 60 // others in each run
			if testing.Short() {
				samples = 10
			}
			if rows := len(weights) / 4; rows > 100 {
				samples = min(samples, max(3, 4000/rows)) // a pass takes milliseconds
			}
			for i, dt := range []tensor.Dtype{tensor.Float64, tensor.Float32} {
				in, wrt := c.nodes(dt)
				cost := costOf(t, c, in, dt, weights)
				if dt == tensor.Float64 {
					report, err := autodiff.CheckGradients(cost, wrt, autodiff.WithSamples(samples),
						autodiff.WithSeed(r.Uint64()))
					if err != nil {
						t.Fatal(err)
					}
					if e := report.MaxRelError(); !(e < 1e-6) {
						t.Errorf("relative error %.2g\n%v", e, report)
					}
				}
				in, wrt = c.nodes(dt)
				cost = costOf(t, c, in, dt, weights)
				nodes, err := gorgonia.Grad(cost, wrt...)
				if err != nil {
					t.Fatal(err)
				}
				run(t, cost.Graph())
				for _, n := range nodes {
					grads[i] = append(grads[i], n.Value())
				}
			}
			var largest float64
			for _, g := range grads[0] {
				largest = max(largest, norm(floats(t, g)))
			}
			for i := range grads[0] {
				if len(floats(t, grads[0][i])) < 16 {
					continue // a single gradient may be the small difference of large terms
				}
				// A window of one key has no gradient of queries and keys: what float32 leaves is
				// held against the largest gradient then.
				d := distance(floats(t, grads[1][i]), floats(t, grads[0][i]))
				if norm(floats(t, grads[0][i])) < 1e-12*largest {
					d = norm(floats(t, grads[1][i])) / largest
				}
				if !(d <= 1e-5) {
					t.Errorf("gradient %d: float32 differs from float64 by %.2g, want at most 1e-5",
						i, d)
				}
			}
		})
	}
}

// costOf returns Σ weights ⊙ op(in) + Σ in[0]² for a matrix, and op(in) squared for a scalar.
func costOf(t *testing.T, c opCase, in gorgonia.Nodes, dt tensor.Dtype,
	weights []float64) *gorgonia.Node {
	t.Helper()
	y := must(t)(c.build(in))
	cost := must(t)(gorgonia.Square(y))
	if !y.IsScalar() {
		w := gorgonia.NodeFromAny(y.Graph(), dense(dt, weights, y.Shape()...),
			gorgonia.WithName("cost weights"))
		cost = must(t)(gorgonia.Sum(must(t)(gorgonia.HadamardProd(y, w))))
	}
	for _, n := range in {
		if n.Dtype() == dt {
			return must(t)(gorgonia.Add(cost, must(t)(gorgonia.Sum(must(t)(gorgonia.Square(n))))))
		}
	}
	return cost
}

// TestCores wants the same bits however many cores share the work.
func TestCores(t *testing.T) {
	for _, c := range opCases(random(t)) {
		var results [2][][]float64
		for i, cores := range []int{1, 4} {
			old := runtime.GOMAXPROCS(cores)
			in, wrt := c.nodes(tensor.Float32)
			y := must(t)(c.build(in))
			cost := y
			if !y.IsScalar() {
				cost = must(t)(gorgonia.Sum(must(t)(gorgonia.Square(y))))
			}
			nodes, err := gorgonia.Grad(cost, wrt...)
			if err != nil {
				t.Fatal(err)
			}
			run(t, y.Graph())
			runtime.GOMAXPROCS(old)
			for _, n := range append(nodes, y) {
				results[i] = append(results[i], floats(t, n.Value()))
			}
		}
		for k := range results[0] {
			if !slices.Equal(results[0][k], results[1][k]) {
				t.Errorf("%s: result %d depends on the number of cores", c.name, k)
			}
		}
	}
}

func refRMSNorm(x, w []float64, rows, d int, eps float64) []float64 {
	y := make([]float64, len(x))
	for r := range rows {
		var ms float64
		for i := range d {
			ms += x[r*d+i] * x[r*d+i] / float64(d)
		}
		for i := range d {
			y[r*d+i] = x[r*d+i] / math.Sqrt(ms+eps) * w[i]
		}
	}
	return y
}

func refLinear(x, w []float64, rows, in, out int) []float64 {
	y := make([]float64, rows*out)
	for r := range rows {
		for o := range out {
			for i := range in {
				y[r*out+o] += x[r*in+i] * w[o*in+i]
			}
		}
	}
	return y
}

func refSiLUMLP(x, gate, up, down []float64, rows, d, f int) []float64 {
	a, b := refLinear(x, gate, rows, d, f), refLinear(x, up, rows, d, f)
	for i, v := range a {
		a[i] = v / (1 + math.Exp(-v)) * b[i]
	}
	return refLinear(a, down, rows, f, d)
}

func refGELUMLP(x, gate, up, down []float64, rows, d, f int) []float64 {
	a, b := refLinear(x, gate, rows, d, f), refLinear(x, up, rows, d, f)
	for i, v := range a {
		a[i] = v / 2 * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(v+0.044715*v*v*v))) * b[i]
	}
	return refLinear(a, down, rows, f, d)
}

func plusOne(x []float64) []float64 { return mapped(x, func(v float64) float64 { return 1 + v }) }

func refEmbedding(ids []int, table []float64, d int) []float64 {
	var y []float64
	for _, id := range ids {
		y = append(y, table[id*d:(id+1)*d]...)
	}
	return y
}

func refCrossEntropy(logits []float64, targets []int, v int) []float64 {
	var sum, n float64
	for r, t := range targets {
		if t < 0 {
			continue
		}
		var z float64
		for _, l := range logits[r*v : (r+1)*v] {
			z += math.Exp(l)
		}
		sum += math.Log(z) - logits[r*v+t]
		n++
	}
	return []float64{sum / n}
}

func refRoPE(x []float64, c op.RoPEConfig) []float64 {
	base := c.Base
	if base == 0 {
		base = 10000
	}
	y, d, h := make([]float64, len(x)), c.Heads*c.HeadDim, c.HeadDim/2
	for i := range x {
		position, within := i/d%c.Seq, i%c.HeadDim
		f := math.Pow(base, -2*float64(within%h)/float64(c.HeadDim))
		magnitude := 1.0
		if s := c.Scaling; s != nil && s.BetaFast > 0 {
			var slowed float64
			slowed, magnitude = refYaRN(within%h, c.HeadDim, base, *s)
			f = f*(1-slowed) + f*slowed/s.Factor
		} else if s != nil {
			wavelength := 2 * math.Pi / f
			switch {
			case s.HighFreq == 0 || wavelength > float64(s.Original)/s.LowFreq:
				f /= s.Factor
			case wavelength > float64(s.Original)/s.HighFreq:
				smooth := (float64(s.Original)/wavelength - s.LowFreq) / (s.HighFreq - s.LowFreq)
				f = (1-smooth)*f/s.Factor + smooth*f
			}
		}
		sin, cos := math.Sincos(float64(position) * f)
		sin, cos = magnitude*sin, magnitude*cos
		if within < h {
			y[i] = x[i]*cos - x[i+h]*sin
		} else {
			y[i] = x[i]*cos + x[i-h]*sin
		}
	}
	return y
}

// refAttention is that of queries that see no key before starts, unless it is nil.
// refYaRN returns how much of a pair's frequency is divided by the factor, and what multiplies
// cosines and sines. The pairs between which that changes are those of the wavelengths
// Original/BetaFast and Original/BetaSlow.
func refYaRN(pair, headDim int, base float64, s op.RoPEScaling) (slowed, magnitude float64) {
	at := func(turns float64) float64 {
		return float64(headDim) / 2 * math.Log(float64(s.Original)/turns/2/math.Pi) / math.Log(base)
	}
	first, last := at(s.BetaFast), at(s.BetaSlow)
	if !s.Unrounded {
		first, last = math.Floor(first), math.Ceil(last)
	}
	if first < 0 {
		first = 0
	}
	if last > float64(headDim-1) {
		last = float64(headDim - 1)
	}
	if first == last {
		last += 0.001
	}
	if magnitude = s.Magnitude; magnitude == 0 {
		magnitude = 1 + math.Log(s.Factor)/10
	}
	return math.Min(1, math.Max(0, (float64(pair)-first)/(last-first))), magnitude
}

func refAttention(q, k, v []float64, starts []int, batch int, c op.AttentionConfig) []float64 {
	if c.KVHeads == 0 {
		c.KVHeads = c.Heads
	}
	if c.Scale == 0 {
		c.Scale = 1 / math.Sqrt(float64(c.HeadDim))
	}
	y := make([]float64, len(q))
	at := func(b, position, head, heads, i int) int {
		return ((b*c.Seq+position)*heads+head)*c.HeadDim + i
	}
	for b := range batch {
		for h := range c.Heads {
			kvh := h / (c.Heads / c.KVHeads)
			for i := range c.Seq {
				var z float64
				p := make([]float64, c.Seq)
				for j := range c.Seq {
					if c.Causal && j > i || starts != nil && j < starts[b*c.Seq+i] ||
						c.Window > 0 && i-j >= c.Window {
						continue
					}
					var s float64
					for e := range c.HeadDim {
						s += q[at(b, i, h, c.Heads, e)] * k[at(b, j, kvh, c.KVHeads, e)]
					}
					p[j] = math.Exp(c.Scale * s)
					z += p[j]
				}
				for j := range c.Seq {
					for e := range c.HeadDim {
						y[at(b, i, h, c.Heads, e)] += p[j] / z * v[at(b, j, kvh, c.KVHeads, e)]
					}
				}
			}
		}
	}
	return y
}

func refNewtonSchulz(x []float64, rows, columns, steps int) []float64 {
	var norm float64
	for _, v := range x {
		norm += v * v
	}
	y := slices.Clone(x)
	for i := range y {
		y[i] /= math.Sqrt(norm) + 1e-7
	}
	for range steps {
		gram := refLinear(y, y, rows, columns, rows)
		square := refLinear(gram, gram, rows, rows, rows) // the Gram matrix is symmetric
		next := make([]float64, len(y))
		for i := range rows {
			for j := range columns {
				next[i*columns+j] = 3.4445 * y[i*columns+j]
				for k := range rows {
					next[i*columns+j] += (-4.7750*gram[i*rows+k] +
						2.0315*square[i*rows+k]) * y[k*columns+j]
				}
			}
		}
		y = next
	}
	return y
}

// TestDocumentsAlone wants documents in one sequence to have the outputs and gradients that each
// has alone. RoPE still counts their positions from the first of them.
func TestDocumentsAlone(t *testing.T) {
	r := random(t)
	lengths := []int{1 + r.IntN(90), 1 + r.IntN(5), 64, 1 + r.IntN(130), 1}
	const heads, kvHeads, headDim = 4, 2, 6
	rows := 0
	for _, n := range lengths {
		rows += n
	}
	q, k, v := normal(r, rows*heads*headDim), normal(r, rows*kvHeads*headDim),
		normal(r, rows*kvHeads*headDim)
	g := normal(r, rows*heads*headDim)
	// attend returns the output and the gradients of some of the rows, which make a sequence.
	attend := func(dt tensor.Dtype, from, n int, starts []int) [][]float64 {
		graph := gorgonia.NewGraph()
		leaf := func(name string, x []float64, width int) *gorgonia.Node {
			return gorgonia.NodeFromAny(graph, dense(dt, x[from*width:][:n*width], n, width),
				gorgonia.WithName(name))
		}
		wrt := gorgonia.Nodes{leaf("q", q, heads*headDim), leaf("k", k, kvHeads*headDim),
			leaf("v", v, kvHeads*headDim)}
		turned := func(x *gorgonia.Node, heads int) *gorgonia.Node {
			return must(t)(op.RoPE(x, op.RoPEConfig{Seq: n, Heads: heads,
				HeadDim: headDim, Base: 100}))
		}
		c := op.AttentionConfig{Seq: n, Heads: heads, KVHeads: kvHeads,
			HeadDim: headDim, Causal: true}
		in := gorgonia.Nodes{turned(wrt[0], heads), turned(wrt[1], kvHeads), wrt[2]}
		var y *gorgonia.Node
		if starts == nil {
			y = must(t)(op.Attention(in[0], in[1], in[2], c))
		} else {
			y = must(t)(op.DocumentAttention(in[0], in[1], in[2],
				gorgonia.NodeFromAny(graph, ints(starts), gorgonia.WithName("starts")), c))
		}
		cost := must(t)(gorgonia.Sum(must(t)(gorgonia.HadamardProd(y,
			leaf("g", g, heads*headDim)))))
		grads, err := gorgonia.Grad(cost, wrt...)
		if err != nil {
			t.Fatal(err)
		}
		values := make([]gorgonia.Value, 4)
		for i, n := range append(gorgonia.Nodes{y}, grads...) {
			gorgonia.Read(n, &values[i])
		}
		run(t, graph)
		var out [][]float64
		for _, v := range values {
			out = append(out, floats(t, v))
		}
		return out
	}
	var starts []int
	for _, n := range lengths {
		start := len(starts)
		for range n {
			starts = append(starts, start)
		}
	}
	for dt, tolerance := range map[tensor.Dtype]float64{tensor.Float64: 1e-12,
		tensor.Float32: 2e-5} {
		together := attend(dt, 0, rows, starts)
		at := 0
		for _, n := range lengths {
			for i, want := range attend(dt, at, n, nil) {
				name := []string{"y", "dq", "dk", "dv"}[i]
				width := len(together[i]) / rows
				got := together[i][at*width:][:n*width]
				// what one key alone makes of a softmax is no gradient: rounding is left
				if n == 1 && (i == 1 || i == 2) {
					continue
				}
				if d := distance(got, want); !(d <= tolerance) {
					t.Errorf("%v: %s of the document of %d tokens at %d differs by %.3g, want at "+
						"most %g", dt, name, n, at, d, tolerance)
				}
			}
			at += n
		}
	}
}
