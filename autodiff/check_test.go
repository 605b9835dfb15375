package autodiff_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

func freshRand(t *testing.T) *rand.Rand {
	t.Helper()
	return randtest.New(t)
}

func normals(r *rand.Rand, n int) []float64 {
	x := make([]float64, n)
	for i := range x {
		x[i] = r.NormFloat64()
	}
	return x
}

// variable adds a float64 input with normally distributed values to g.
func variable(g *gorgonia.ExprGraph, r *rand.Rand, name string, shape ...int) *gorgonia.Node {
	return holding(g, name, normals(r, opbase.Size(shape)), shape...)
}

func holding(g *gorgonia.ExprGraph, name string, data []float64, shape ...int) *gorgonia.Node {
	v := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
	return gorgonia.NewTensor(g, tensor.Float64, len(shape), gorgonia.WithShape(shape...),
		gorgonia.WithName(name), gorgonia.WithValue(v))
}

func must(n *gorgonia.Node, err error) *gorgonia.Node {
	if err != nil {
		panic(err)
	}
	return n
}

// weighted returns Σ w ⊙ n for random w, a cost with a different gradient for each element.
func weighted(n *gorgonia.Node, r *rand.Rand) *gorgonia.Node {
	w := variable(n.Graph(), r, fmt.Sprintf("weighting of %d", n.ID()), n.Shape()...)
	return must(gorgonia.Sum(must(gorgonia.HadamardProd(w, n))))
}

// squareOp computes x² with a gradient supplied by the test.
type squareOp struct {
	opbase.Base
	gradient func(i int, x, g float64) float64
	flat     bool // the gradient is a vector, whatever the shape of x
}

func square(x *gorgonia.Node, gradient func(i int, x, g float64) float64) *gorgonia.Node {
	o := &squareOp{gradient: gradient}
	opbase.Init(&o.Base, o, "square", fmt.Sprintf("%p", o), gorgonia.Nodes{x},
		x.Dtype(), x.Shape(), nil,
		func(_ *squareOp, out []float64, in opbase.Args) error {
			for i, v := range opbase.Slice[float64](in, 0) {
				out[i] = v * v
			}
			return nil
		})
	return must(gorgonia.ApplyOp(o, x))
}

func (o *squareOp) DiffWRT(int) []bool { return []bool{true} }

func (o *squareOp) SymDiff(in gorgonia.Nodes, _, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	b := &struct{ opbase.Base }{}
	shape := in[0].Shape()
	if o.flat {
		shape = tensor.Shape{opbase.Size(shape)}
	}

	opbase.Init(&b.Base, o, "squareGrad", o.String(), gorgonia.Nodes{in[0], grad},
		in[0].Dtype(), shape, nil,
		func(o *squareOp, out []float64, in opbase.Args) error {
			x, g := opbase.Slice[float64](in, 0), opbase.Slice[float64](in, 1)
			for i := range out {
				out[i] = o.gradient(i, x[i], g[i])
			}
			return nil
		})

	n, err := gorgonia.ApplyOp(b, in[0], grad)
	return gorgonia.Nodes{n}, err
}

func right(_ int, x, g float64) float64 { return 2 * x * g }

func TestCheckGradientsPassesCorrectOps(t *testing.T) {
	positive := func(g *gorgonia.ExprGraph, r *rand.Rand, name string,
		shape ...int) *gorgonia.Node {
		x := normals(r, opbase.Size(shape))
		for i := range x {
			x[i] = 0.05 + math.Abs(x[i])
		}
		return holding(g, name, x, shape...)
	}

	cases := map[string]func(g *gorgonia.ExprGraph, r *rand.Rand) *gorgonia.Node{
		"tanh": func(g *gorgonia.ExprGraph, r *rand.Rand) *gorgonia.Node {
			return must(gorgonia.Tanh(variable(g, r, "x", 3, 5)))
		},
		"sigmoid": func(g *gorgonia.ExprGraph, r *rand.Rand) *gorgonia.Node {
			return must(gorgonia.Sigmoid(variable(g, r, "x", 7)))
		},
		"log": func(g *gorgonia.ExprGraph, r *rand.Rand) *gorgonia.Node {
			return must(gorgonia.Log(positive(g, r, "x", 4, 2)))
		},
		"sqrt": func(g *gorgonia.ExprGraph, r *rand.Rand) *gorgonia.Node {
			return must(gorgonia.Sqrt(positive(g, r, "x", 9)))
		},
		"matmul": func(g *gorgonia.ExprGraph, r *rand.Rand) *gorgonia.Node {
			return must(gorgonia.Mul(variable(g, r, "a", 3, 4), variable(g, r, "b", 4, 5)))
		},
		"division": func(g *gorgonia.ExprGraph, r *rand.Rand) *gorgonia.Node {
			return must(gorgonia.HadamardDiv(variable(g, r, "a", 6), positive(g, r, "b", 6)))
		},
		"softmax": func(g *gorgonia.ExprGraph, r *rand.Rand) *gorgonia.Node {
			return must(gorgonia.SoftMax(variable(g, r, "x", 2, 5)))
		},
		"reshape, transpose and slice": func(g *gorgonia.ExprGraph, r *rand.Rand) *gorgonia.Node {
			x := must(gorgonia.Reshape(variable(g, r, "x", 6, 2), tensor.Shape{3, 4}))
			x = must(gorgonia.Transpose(must(gorgonia.Square(x)), 1, 0))
			return must(gorgonia.Slice(x, gorgonia.S(1, 3)))
		},
		"one node in several places": func(g *gorgonia.ExprGraph, r *rand.Rand) *gorgonia.Node {
			x := variable(g, r, "x", 3, 3)
			y := must(gorgonia.Add(must(gorgonia.Mul(x, x)), must(gorgonia.Tanh(x))))
			return must(gorgonia.HadamardProd(y, x))
		},
		"constants of both kinds": func(g *gorgonia.ExprGraph, r *rand.Rand) *gorgonia.Node {
			x := variable(g, r, "x", 3)
			two := gorgonia.NewConstant(2.0)
			row := gorgonia.NewConstant(tensor.New(tensor.WithBacking([]float64{1, -2, 3})))
			return must(gorgonia.Add(must(gorgonia.Mul(two, x)),
				must(gorgonia.HadamardProd(row, must(gorgonia.Square(x))))))
		},
		"an op of ours": func(g *gorgonia.ExprGraph, r *rand.Rand) *gorgonia.Node {
			return square(variable(g, r, "x", 5, 3), right)
		},
		"steep and flat together": func(g *gorgonia.ExprGraph, r *rand.Rand) *gorgonia.Node {
			return must(gorgonia.Exp(holding(g, "x", []float64{-20, -3, 0, 4, 9}, 5)))
		},
		"a function much faster than its argument": func(g *gorgonia.ExprGraph,
			r *rand.Rand) *gorgonia.Node {
			return must(gorgonia.Sin(must(gorgonia.Mul(gorgonia.NewConstant(300.0),
				variable(g, r, "x", 4)))))
		},
	}

	for name, build := range cases {
		t.Run(name, func(t *testing.T) {
			r := freshRand(t)
			g := gorgonia.NewGraph()
			out := build(g, r)
			wrt := g.Inputs()
			report, err := autodiff.CheckGradients(weighted(out, r), wrt)
			if err != nil {
				t.Fatal(err)
			}
			if !report.OK(1e-6) {
				t.Errorf("a correct gradient is called wrong:\n%v", report)
			}
			if len(report.Inputs) != len(wrt) || report.Checked() == 0 {
				t.Errorf("%d inputs and %d elements checked, want %d inputs", len(report.Inputs),
					report.Checked(), len(wrt))
			}
		})
	}
}

func TestCheckGradientsFindsWrongOps(t *testing.T) {
	for name, gradient := range map[string]func(i int, x, g float64) float64{
		"half":                   func(_ int, x, g float64) float64 { return x * g },
		"sign":                   func(_ int, x, g float64) float64 { return -2 * x * g },
		"zero":                   func(_ int, x, g float64) float64 { return 0 },
		"incoming gradient lost": func(_ int, x, g float64) float64 { return 2 * x },
		"off by 1e-5": func(_ int, x, g float64) float64 {
			return 2 * x * g * (1 + 1e-5)
		},
		"NaN":      func(_ int, x, g float64) float64 { return math.NaN() },
		"infinite": func(_ int, x, g float64) float64 { return math.Inf(1) },
		"one element of fifteen": func(i int, x, g float64) float64 {
			if i == 7 {
				return 1.99 * x * g
			}
			return 2 * x * g
		},
		"one element NaN": func(i int, x, g float64) float64 {
			if i == 7 {
				return math.NaN()
			}
			return 2 * x * g
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := freshRand(t)
			g := gorgonia.NewGraph()
			data := normals(r, 15)

			// Values stay away from zero, where a gradient of 2x is too small for its error to
			// count.
			for i, v := range data {
				data[i] = math.Copysign(0.5+math.Abs(v), v)
			}

			x := holding(g, "x", data, 5, 3)
			report, err := autodiff.CheckGradients(weighted(square(x, gradient), r),
				gorgonia.Nodes{x})
			if err != nil {
				t.Fatal(err)
			}
			if report.OK(1e-6) {
				t.Errorf("a wrong gradient passes:\n%v", report)
			}

			in, worst := report.Worst()
			if strings.HasPrefix(name, "one element") &&
				(fmt.Sprint(worst.Index) != "[2 1]" || in.Name != "x") {
				t.Errorf("the worst element is %s of %s, want [2 1] of x", worst.At(), in.Name)
			}
		})
	}
}

// TestCheckGradientsNearAPlateau checks elements that saturate at a tenth of the first step. Their
// contribution to the cost is so small that rounding hides it at narrow steps, and wide steps see
// nothing. A correct derivative must still pass, and a wrong zero must not.
func TestCheckGradientsNearAPlateau(t *testing.T) {
	for name, gradient := range map[string]func(i int, x, g float64) float64{
		"right": right,
		"zero":  func(int, float64, float64) float64 { return 0 },
	} {
		t.Run(name, func(t *testing.T) {
			g := gorgonia.NewGraph()
			x := holding(g, "x", []float64{1e-3, -2e-3}, 2)
			y := square(x, gradient) // x² / (x² + 10⁻⁶)
			y = must(gorgonia.HadamardDiv(y, must(gorgonia.Add(y,
				gorgonia.NewConstant(1e-6)))))
			y = must(gorgonia.Mul(gorgonia.NewConstant(1e-7), must(gorgonia.Sum(y))))
			report, err := autodiff.CheckGradients(
				must(gorgonia.Add(y, gorgonia.NewConstant(3.0))), gorgonia.Nodes{x})
			require.NoError(t, err)
			require.Equal(t, name == "right", report.OK(1e-6), "%v", report)
		})
	}
}

func TestCheckGradientsFindsAnotherShape(t *testing.T) {
	g := gorgonia.NewGraph()
	x := variable(g, freshRand(t), "x", 5, 3)
	y := square(x, right)
	y.Op().(*squareOp).flat = true
	if _, err := autodiff.CheckGradients(must(gorgonia.Sum(y)), gorgonia.Nodes{x}); err == nil ||
		!strings.Contains(err.Error(), `gradient of "x" has shape (15), the input has (5, 3)`) {
		t.Errorf("got %v", err)
	}
}

func TestCheckGradientsFindsGorgoniasInverseSqrt(t *testing.T) {
	g := gorgonia.NewGraph()
	x := holding(g, "x", []float64{0.5, 1.5, 2.5}, 3)
	report, err := autodiff.CheckGradients(must(gorgonia.Sum(must(gorgonia.InverseSqrt(x)))),
		gorgonia.Nodes{x})
	if err != nil {
		t.Fatal(err)
	}
	if report.OK(1e-3) {
		t.Errorf("gorgonia.InverseSqrt, whose gradient is wrong, passes:\n%v", report)
	}
}

// TestCheckGradientsSamplesLargeInputs checks that one wrong element of a large input shows in the
// random direction, although only a sample is checked.
func TestCheckGradientsSamplesLargeInputs(t *testing.T) {
	r := freshRand(t)
	g := gorgonia.NewGraph()
	x := variable(g, r, "x", 60, 50)
	wrong := func(i int, x, g float64) float64 {
		if i == 1234 {
			return 2*x*g + 1
		}
		return 2 * x * g
	}

	check := func(gradient func(int, float64, float64) float64,
		opts ...autodiff.CheckOption) autodiff.CheckReport {
		t.Helper()
		report, err := autodiff.CheckGradients(weighted(square(x, gradient), r),
			gorgonia.Nodes{x}, opts...)
		if err != nil {
			t.Fatal(err)
		}
		return report
	}

	good := check(right, autodiff.WithSamples(10), autodiff.WithSeed(3))
	if !good.OK(1e-6) || good.Checked() != 11 {
		t.Errorf("%d elements checked, want 10 and a direction, all right:\n%v", good.Checked(),
			good)
	}

	again, other := check(right, autodiff.WithSamples(10), autodiff.WithSeed(3)),
		check(right, autodiff.WithSamples(10), autodiff.WithSeed(4))
	indices := func(r autodiff.CheckReport) (s string) {
		for _, e := range r.Inputs[0].Elements {
			s += e.At() + " "
		}
		return s
	}

	if indices(good) != indices(again) || indices(good) == indices(other) {
		t.Errorf("seed 3 twice chose\n%s\n%s\nand seed 4\n%s", indices(good),
			indices(again), indices(other))
	}

	bad := check(wrong, autodiff.WithSamples(10), autodiff.WithSeed(3))
	if _, worst := bad.Worst(); bad.OK(1e-6) || !worst.Direction {
		t.Errorf("one wrong element of 3000 is not found along a random direction:\n%v", bad)
	}
}

func TestCheckGradientsChangesNothing(t *testing.T) {
	r := freshRand(t)
	g := gorgonia.NewGraph()
	x, y := variable(g, r, "x", 4, 3), gorgonia.NewScalar(g, tensor.Float64, gorgonia.WithName("y"),
		gorgonia.WithValue(1.5))
	cost := must(gorgonia.Sum(must(gorgonia.Mul(y,
		must(gorgonia.Reshape(must(gorgonia.Tanh(x)), tensor.Shape{12}))))))
	before, nodes := fmt.Sprint(x.Value().Data(), x.Value().Shape(), y.Value()), len(g.AllNodes())
	memory := x.Value().Uintptr()
	if _, err := autodiff.CheckGradients(cost, gorgonia.Nodes{x, y}); err != nil {
		t.Fatal(err)
	}

	if _, err := autodiff.CheckGradients(
		must(gorgonia.Log(must(gorgonia.Neg(must(gorgonia.Square(y)))))),
		gorgonia.Nodes{y}); err == nil {
		t.Error("a cost of NaN is accepted")
	}

	if after := fmt.Sprint(x.Value().Data(), x.Value().Shape(), y.Value()); after != before ||
		x.Value().Uintptr() != memory {
		t.Errorf("values were\n%s and are\n%s", before, after)
	}

	if got := len(g.AllNodes()); got != nodes+3 { // Square, Neg and Log are added by the test
		t.Errorf("the graph had %d nodes and has %d", nodes, got)
	}

	if cost.Value() != nil || cost.Deriv() != nil {
		t.Error("the cost node was given a value or a derivative")
	}
}

// TestCheckGradientsAfterOtherGradients first takes the gradients of another cost over the same
// nodes. This marks the graph, which misleads a second gorgonia.Grad.
func TestCheckGradientsAfterOtherGradients(t *testing.T) {
	r := freshRand(t)
	g := gorgonia.NewGraph()
	x, z := variable(g, r, "x", 4), variable(g, r, "z", 4)
	h := must(gorgonia.HadamardProd(must(gorgonia.Tanh(x)), z))
	if _, err := gorgonia.Grad(weighted(h, r), x); err != nil {
		t.Fatal(err)
	}

	report, err := autodiff.CheckGradients(weighted(must(gorgonia.Square(h)), r),
		gorgonia.Nodes{x, z})
	if err != nil {
		t.Fatal(err)
	}

	if !report.OK(1e-6) {
		t.Errorf("a correct gradient is called wrong:\n%v", report)
	}
}

// TestCheckGradientsOfTransposedValues checks views and lazy transposes, whose elements are stored in
// a different order than they appear.
func TestCheckGradientsOfTransposedValues(t *testing.T) {
	r := freshRand(t)
	v := tensor.New(tensor.WithShape(3, 4), tensor.WithBacking(normals(r, 12)))
	if err := v.T(); err != nil {
		t.Fatal(err)
	}

	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithShape(4, 3), gorgonia.WithName("x"),
		gorgonia.WithValue(v))
	report, err := autodiff.CheckGradients(weighted(square(x, right), r), gorgonia.Nodes{x})
	if err != nil {
		t.Fatal(err)
	}

	at, err := v.At(2, 1)
	if err != nil {
		t.Fatal(err)
	}

	if !report.OK(1e-6) {
		t.Errorf("a correct gradient is called wrong:\n%v", report)
	}

	w, err := gorgonia.CloneValue(g.Inputs()[1].Value())
	if err != nil {
		t.Fatal(err)
	}

	want := 2 * at.(float64) * w.Data().([]float64)[2*3+1]
	if e := report.Inputs[0].Elements[2*3+1]; math.Abs(e.Analytic-want) > 1e-12 {
		t.Errorf("gradient at [2 1] is %v, want %v", e.Analytic, want)
	}
}

func TestCheckGradientsHoldsRandomInputs(t *testing.T) {
	r := freshRand(t)
	g := gorgonia.NewGraph()
	x := variable(g, r, "x", 5)
	noise := gorgonia.GaussianRandomNode(g, tensor.Float64, 0, 1, 5)
	cost := must(gorgonia.Sum(must(gorgonia.HadamardProd(must(gorgonia.Square(x)), noise))))
	report, err := autodiff.CheckGradients(cost, gorgonia.Nodes{x})
	if err != nil {
		t.Fatal(err)
	}

	if !report.OK(1e-6) {
		t.Errorf("a correct gradient is called wrong:\n%v", report)
	}
}

func TestCheckGradientsRefuses(t *testing.T) {
	r := freshRand(t)
	g := gorgonia.NewGraph()
	x := variable(g, r, "x", 4)
	cost := must(gorgonia.Sum(must(gorgonia.Tanh(x))))
	empty := gorgonia.NewVector(g, tensor.Float64, gorgonia.WithShape(4),
		gorgonia.WithName("empty"))
	x32 := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(2), gorgonia.WithName("x32"),
		gorgonia.WithValue(tensor.New(tensor.WithBacking([]float32{1, 2}))))
	drop := must(gorgonia.Dropout(must(gorgonia.Square(variable(g, r, "d", 50))), 0.5))
	ids := gorgonia.NewVector(g, tensor.Int, gorgonia.WithShape(2), gorgonia.WithName("ids"))
	other := variable(gorgonia.NewGraph(), r, "other", 4)
	for _, c := range []struct {
		name string
		cost *gorgonia.Node
		wrt  gorgonia.Nodes
		opts []autodiff.CheckOption
		want string
	}{
		{"no cost", nil, gorgonia.Nodes{x}, nil, "cost is nil"},
		{"vector cost", x, gorgonia.Nodes{x}, nil, "want a scalar"},
		{"float32", must(gorgonia.Sum(x32)), gorgonia.Nodes{x32}, nil, "want float64"},
		{"nothing to check", cost, nil, nil, "wrt is empty"},
		{"nil input", cost, gorgonia.Nodes{nil}, nil, "wrt[0] is nil"},
		{"result of an op", cost, gorgonia.Nodes{cost}, nil, "the result of an op"},
		{"twice", cost, gorgonia.Nodes{x, x}, nil, "listed twice"},
		{"int input", cost, gorgonia.Nodes{ids}, nil, "\"ids\" is int, want float64"},
		{"not part of the cost", cost, gorgonia.Nodes{variable(g, r, "far", 2)}, nil,
			"does not depend on wrt input \"far\""},
		{"another graph", cost, gorgonia.Nodes{other}, nil, "different graphs"},
		{"no value", must(gorgonia.Sum(must(gorgonia.Add(x, empty)))), gorgonia.Nodes{empty}, nil,
			"\"empty\" has no value"},
		{"no value elsewhere", must(gorgonia.Sum(must(gorgonia.Add(x, empty)))), gorgonia.Nodes{x},
			nil, "\"empty\" has no value"},
		{"noise", must(gorgonia.Sum(drop)), gorgonia.Nodes{g.ByName("d")[0]}, nil,
			"its differences are meaningless"},
		{"no derivative", must(gorgonia.Sum(must(gorgonia.Gt(x, x, true)))), gorgonia.Nodes{x}, nil,
			"deriving the gradient"},
		{"step", cost, gorgonia.Nodes{x}, []autodiff.CheckOption{autodiff.WithStep(0)},
			"WithStep: got 0"},
		{"tolerance", cost, gorgonia.Nodes{x},
			[]autodiff.CheckOption{autodiff.WithTolerance(math.NaN())}, "WithTolerance: got NaN"},
		{"samples", cost, gorgonia.Nodes{x}, []autodiff.CheckOption{autodiff.WithSamples(-1)},
			"WithSamples: got -1"},
	} {
		report, err := autodiff.CheckGradients(c.cost, c.wrt, c.opts...)
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(err.Error(),
			"autodiff.CheckGradients: ") {
			t.Errorf("%s: error %v, want one with %q\n%v", c.name, err, c.want, report)
		}
	}
}

func TestCheckReportPrintsATable(t *testing.T) {
	report := autodiff.CheckReport{Inputs: []autodiff.InputReport{
		{Name: "weight", Shape: tensor.Shape{2, 3}, Elements: []autodiff.Element{
			{Index: []int{0, 1}, Analytic: 1, Numeric: 1, RelError: 0},
			{Index: []int{1, 2}, Analytic: 2, Numeric: 1, RelError: 0.5}}},
		{Name: "b", Elements: []autodiff.Element{{Analytic: 1, Numeric: 1, RelError: 1e-9}}},
	}}

	want := "input   shape   checked  max rel. error  at      analytic  numeric\n" +
		"weight  (2, 3)  2        5.00e-01        [1 2]   2         1\n" +
		"b       ()      1        1.00e-09        scalar  1         1\n"
	if got := report.String(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}

	if (autodiff.CheckReport{}).OK(1) {
		t.Error("a report of nothing is called good")
	}
}

// TestCheckGradientsAfterRemovedNodes checks a graph after Gorgonia has removed nodes, as it does
// in Log(1 − x). Gorgonia's own lookup of a node's inputs then finds the inputs of another node.
func TestCheckGradientsAfterRemovedNodes(t *testing.T) {
	g := gorgonia.NewGraph()
	x := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(5),
		tensor.WithBacking([]float64{-2, -0.5, 0.1, 1, 3})), gorgonia.WithName("x"))
	target := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(5),
		tensor.WithBacking([]float64{0, 1, 0.5, 0, 1})), gorgonia.WithName("target"))
	p, err := gorgonia.Sigmoid(x)
	if err == nil {
		p, err = gorgonia.BinaryXent(p, target)
	}

	var cost *gorgonia.Node
	if err == nil {
		cost, err = gorgonia.Sum(p)
	}

	if err != nil {
		t.Fatal(err)
	}

	report, err := autodiff.CheckGradients(cost, gorgonia.Nodes{x})
	if err != nil {
		t.Fatal(err)
	}

	if !report.OK(1e-6) || report.Checked() != 5 {
		t.Errorf("%v", report)
	}
}
