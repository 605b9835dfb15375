package op_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/opcase"
	"github.com/kasmina-go/kasmina/internal/opcase/optest"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/op"
)

// TestReference runs the suite of op cases on Gorgonia's tape machine.
func TestReference(t *testing.T) {
	for _, s := range []optest.Setup{
		{Dtype: tensor.Float64, Open: optest.Tape, Forward: 1e-12, Backward: 0},
		{Dtype: tensor.Float32, Open: optest.Tape, Forward: 1e-6, Backward: 1e-5},
	} {
		t.Run(s.Dtype.String(), func(t *testing.T) { optest.Run(t, s) })
	}
}

// opCase is a case with the name of its op.
type opCase struct {
	opcase.Case
	name string
}

// opCases returns the cases of all ops of this package except Kasmina.
func opCases(r *rand.Rand) (cases []opCase) {
	for _, o := range opcase.All {
		if o.Cases == nil {
			continue
		}
		for _, c := range o.Cases(r) {
			cases = append(cases, opCase{c, o.Name + " " + c.String()})
		}
	}
	return cases
}

// TestPrealloc checks that ops compute the same results in memory that the caller provides.
func TestPrealloc(t *testing.T) {
	for _, c := range opCases(random(t)) {
		for _, dt := range []tensor.Dtype{tensor.Float64, tensor.Float32} {
			t.Run(fmt.Sprint(c.name, dt), func(t *testing.T) {
				in, _ := c.Nodes(dt)
				y := must(t)(c.Build(in))
				if _, own := y.Op().(interface{ Shared() *opbase.Base }); !own ||
					!slices.Equal(graph.Children(y), in) {
					t.Skip("the result is not that of a single op of this package")
				}
				run(t, in[0].Graph())
				checkPrealloc(t, y, in)
			})
		}
	}
}

// checkPrealloc runs the op of y once more, into memory full of NaN, and compares the bits.
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

// TestGradients compares the symbolic gradients in float64 with central differences. The first input is
// used twice, so that the gradients of several uses add up, and Gorgonia's own ops surround the op under
// test.
func TestGradients(t *testing.T) {
	seed := randtest.Seed(t)
	cases := opCases(rand.New(rand.NewPCG(seed, 0)))
	for _, i := range randtest.Ints(t, len(cases)/2, 0, len(cases)-1) {
		c := cases[i]
		t.Run(c.name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, uint64(i)+1))
			weights := normal(r, len(c.Want(c.In)))
			samples := 6 // elements to vary one at a time, in addition to a direction that varies all of them
			if randtest.Long() {
				samples = 60
			}
			if rows := len(weights) / 4; rows > 100 {
				samples = min(samples, max(3, 4000/rows)) // a pass takes milliseconds
			}

			in, wrt := c.Nodes(tensor.Float64)
			cost := must(t)(optest.Cost(must(t)(c.Build(in)), wrt[0], weights))
			report, err := autodiff.CheckGradients(cost, wrt, autodiff.WithSamples(samples),
				autodiff.WithSeed(r.Uint64()))
			if err != nil {
				t.Fatal(err)
			}
			if e := report.MaxRelError(); !(e < 1e-6) {
				t.Errorf("relative error %.2g\n%v", e, report)
			}
		})
	}
}

// TestCores checks that the bits of the results don't depend on the number of cores.
func TestCores(t *testing.T) {
	for _, c := range opCases(random(t)) {
		var results [2][][]float64
		for i, cores := range []int{1, 4} {
			old := runtime.GOMAXPROCS(cores)
			in, wrt := c.Nodes(tensor.Float32)
			y := must(t)(c.Build(in))
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

// TestDocumentsAlone checks that documents in one sequence have the same outputs and gradients as each
// document alone, although RoPE counts their positions from the start of the sequence.
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
	// attend returns the output and the gradients of n rows, treated as one sequence.
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
				// The softmax over a single key is constant, so the computed gradient is only rounding
				// error.
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
