package cudaops

import (
	"bytes"
	"errors"
	"fmt"
	"hash"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/chewxy/hm"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
)

// stockRun is a case's graph of one type, and with gradients those of Σ out ⊙ weights.
type stockRun struct {
	g            *gorgonia.ExprGraph
	in           gorgonia.Nodes
	out, weights *gorgonia.Node
}

func (c stockCase) graph(dt tensor.Dtype, gradients bool) (*stockRun, error) {
	r := &stockRun{g: gorgonia.NewGraph()}
	input := func(name string, dt tensor.Dtype, s shape) *node {
		if len(s) == 0 {
			return gorgonia.NewScalar(r.g, dt, gorgonia.WithName(name))
		}
		return gorgonia.NewTensor(r.g, dt, len(s), gorgonia.WithShape(s...),
			gorgonia.WithName(name))
	}
	for i, s := range c.shapes {
		r.in = append(r.in, input(fmt.Sprint("x", i), dt, s))
	}
	operands := slices.Clone(r.in)
	if c.ids != nil {
		ids := input("ids", tensor.Int, shape{len(c.ids)})
		if err := gorgonia.Let(ids,
			tensor.New(tensor.WithBacking(slices.Clone(c.ids)))); err != nil {
			return nil, err
		}
		operands = append(operands, ids)
	}
	var err error
	if r.out, err = c.build(operands); err != nil || !gradients {
		return r, err
	}
	r.weights = input("weights", dt, r.out.Shape())
	loss, err := gorgonia.HadamardProd(r.out, r.weights)
	if err != nil {
		return nil, err
	}
	if loss, err = gorgonia.Sum(loss); err != nil {
		return nil, err
	}
	_, err = gorgonia.Grad(loss, r.in...)
	return r, err
}

func (r *stockRun) let(values [][]float64, weights []float64) error {
	var errs []error
	for i, n := range append(slices.Clone(r.in), r.weights) {
		if n == nil {
			continue
		}
		v := weights
		if i < len(values) {
			v = values[i]
		}
		narrow := make([]float32, len(v))
		for i, x := range v {
			narrow[i] = float32(x)
		}
		var value any
		switch wide := slices.Clone(v); {
		case n.IsScalar() && n.Dtype() == tensor.Float32:
			value = narrow[0]
		case n.IsScalar():
			value = wide[0]
		case n.Dtype() == tensor.Float32:
			value = tensor.New(tensor.WithShape(n.Shape()...), tensor.WithBacking(narrow))
		default:
			value = tensor.New(tensor.WithShape(n.Shape()...), tensor.WithBacking(wide))
		}
		errs = append(errs, gorgonia.Let(n, value))
	}
	return errors.Join(errs...)
}

// random draws different numbers that bfloat16 holds, clear of zero, where some ops have kinks.
func (c stockCase) random(r *rand.Rand, s shape, seen map[float64]bool) []float64 {
	x := make([]float64, 0, opbase.Size(s))
	for len(x) < cap(x) {
		v := r.NormFloat64()
		if c.positive {
			v = 0.5 + math.Abs(v)
		}
		v = float64(brain(float32(v)))
		if !seen[v] && math.Abs(v) > 1e-3 {
			x = append(x, v)
		}
		seen[v] = !c.constant // equal numbers are for comparisons
	}
	return x
}

func wide(t testing.TB, v gorgonia.Value) []float64 {
	t.Helper()
	if v == nil {
		t.Fatal("no value")
	}
	switch x := v.Data().(type) {
	case []float64:
		return slices.Clone(x)
	case float64:
		return []float64{x}
	}
	var w []float64
	for _, x := range flat(t, v) {
		w = append(w, float64(x))
	}
	return w
}

// apart is ‖got − want‖/‖want‖, or relative to a tenth for each number where they are smaller: sums
// of numbers of about 1 may nearly cancel.
func apart(got, want []float64) float64 {
	if len(got) != len(want) {
		return math.Inf(1)
	}
	var diff, norm float64
	for i := range got {
		diff += (got[i] - want[i]) * (got[i] - want[i])
		norm += want[i] * want[i]
	}
	return math.Sqrt(diff / max(norm, 0.01*float64(len(want))))
}

// TestStock runs every case on both machines, and holds results to those of Gorgonia's machine in
// float64 and gradients to central differences of these.
func TestStock(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testStock(t, device, seed, 1, 1e-5, fakeOption)
	})
	// by a number that is no power of two, so that one factor too many or too few shows
	t.Run("scaled", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testStock(t, device, seed, 1, 1e-5, fakeOption, scaledGradients)
	})
	t.Run("float32", func(t *testing.T) { testStock(t, openGPU(t), seed, few(1, 3), 1e-5) })
	t.Run("bfloat16", func(t *testing.T) {
		testStock(t, openGPU(t), seed, few(1, 3), 3e-2, WithPrecision(BFloat16))
	})
	t.Run("float16", func(t *testing.T) {
		testStock(t, openGPU(t), seed, few(1, 3), 5e-3, WithPrecision(Float16))
	})
}

// scaledGradients is the loss scaling of Float16 without its storage.
func scaledGradients(c *machineConfig) error {
	c.scaled = true
	return nil
}

// testStock takes one of so many cases.
func testStock(t *testing.T, device *Device, seed uint64, share int, tolerance float64,
	opts ...MachineOption) {
	r := rand.New(rand.NewPCG(seed, 1))
	cases := stockCases(r)
	if share > 1 {
		r.Shuffle(len(cases), func(i, j int) { cases[i], cases[j] = cases[j], cases[i] })
	}
	for _, c := range cases[:len(cases)/share] {
		t.Run(fmt.Sprint(c.name, " ", c.shapes), func(t *testing.T) {
			c.test(t, device, r, tolerance, opts)
		})
	}
}

func (c stockCase) test(t *testing.T, device *Device, r *rand.Rand, tolerance float64,
	opts []MachineOption) {
	run, err := c.graph(tensor.Float32, !c.constant)
	if err != nil {
		t.Fatal(err)
	}
	var values [][]float64
	seen := map[float64]bool{}
	for _, s := range c.shapes {
		values = append(values, c.random(r, s, seen))
	}
	weights := c.random(r, run.out.Shape(), map[float64]bool{})
	if err := run.let(values, weights); err != nil {
		t.Fatal(err)
	}
	results, names := gorgonia.Nodes{run.out}, []string{"the result"}
	if !c.constant {
		for i, n := range run.in {
			results, names = append(results, n.Deriv()), append(names, fmt.Sprint("gradient ", i))
		}
	}
	opts = append(slices.Clone(opts), WithStrict(), WithOutputs(results...))
	if strings.HasPrefix(t.Name(), "TestStock/scaled") && !c.constant {
		opts = append(opts, WithParams(run.in...))
	}
	machine, err := NewMachine(device, run.g, opts...)
	if err != nil {
		t.Fatal(err)
	}
	defer machine.Close()
	if machine.runner.Program.Scale != nil {
		if err := machine.SetLossScale(LossScale{Scale: 1000}); err != nil {
			t.Fatal(err)
		}
	}
	var got [][]float64
	for range few(3, 1) { // as it is, recorded, replayed
		if err := machine.RunAll(); err != nil {
			t.Fatal(err)
		}
	}
	for _, n := range results {
		v, err := machine.Value(n)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, wide(t, v))
	}
	want := c.reference(t, values, weights)
	for i, name := range names {
		if i > 0 && c.badDiff {
			break
		}
		if d := apart(got[i], want[i]); !(d < tolerance*5) {
			t.Errorf("%s differs by %.2g from that in float64\n%v\n%v", name, d, got[i], want[i])
		}
	}
	if c.instead != nil {
		return
	}
	for i, v := range c.onTape(t, run, values, weights) {
		if d := apart(got[i], v); !(d < tolerance) {
			t.Errorf("%s differs by %.2g from that of Gorgonia's machine", names[i], d)
		}
	}
}

// onTape returns the result and the gradients that Gorgonia's machine has for the same nodes. It
// computes the result in another graph, since it writes other results over one that is used.
func (c stockCase) onTape(t *testing.T, run *stockRun, values [][]float64,
	weights []float64) (all [][]float64) {
	t.Helper()
	forward, err := c.graph(tensor.Float32, false)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range []*stockRun{forward, run} {
		if r == run && c.constant {
			break
		}
		tape := gorgonia.NewTapeMachine(r.g)
		if err := errors.Join(r.let(values, weights), tape.RunAll()); err != nil {
			t.Fatal(err)
		}
		if r == forward {
			all = append(all, wide(t, r.out.Value()))
			continue
		}
		for _, n := range r.in {
			all = append(all, wide(t, n.Deriv().Value()))
		}
	}
	return all
}

// reference returns the result in float64 and the loss's central differences by the inputs.
func (c stockCase) reference(t *testing.T, values [][]float64, weights []float64) [][]float64 {
	t.Helper()
	if c.instead != nil {
		c.build = c.instead
	}
	run, err := c.graph(tensor.Float64, false)
	if err != nil {
		t.Fatal(err)
	}
	tape := gorgonia.NewTapeMachine(run.g)
	defer tape.Close()
	evaluate := func() (out []float64, loss float64) {
		tape.Reset()
		if err := errors.Join(run.let(values, weights), tape.RunAll()); err != nil {
			t.Fatal(err)
		}
		out = wide(t, run.out.Value())
		for i, v := range out {
			loss += v * weights[i]
		}
		return out, loss
	}
	out, _ := evaluate()
	all := [][]float64{out}
	for _, x := range values {
		grad := make([]float64, len(x))
		for i, v := range x {
			const h = 1e-5
			x[i] = v + h
			_, up := evaluate()
			x[i] = v - h
			_, down := evaluate()
			x[i] = v
			grad[i] = (up - down) / (2 * h)
		}
		all = append(all, grad)
	}
	return all
}

// TestStockWithoutCopies wants transposed operands of products and repeated operands of elementwise
// ops to be read where they are, and to be there for somebody who asks for them.
func TestStockWithoutCopies(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	g := gorgonia.NewGraph()
	value := func(s ...int) *node {
		x := make([]float32, opbase.Size(s))
		for i := range x {
			x[i] = float32(rand.NormFloat64())
		}
		return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(s...), tensor.WithBacking(x)),
			gorgonia.WithName(fmt.Sprint(s)))
	}
	x, w, bias := value(3, 5), value(7, 5), value(7)
	transposed := gorgonia.Must(gorgonia.Transpose(w))
	if _, err := gorgonia.BroadcastAdd(gorgonia.Must(gorgonia.Mul(x, transposed)), bias, nil,
		[]byte{0}); err != nil {
		t.Fatal(err)
	}
	var repeated *node
	for _, n := range g.AllNodes() {
		if fmt.Sprintf("%T", n.Op()) == "*gorgonia.repeatOp" {
			repeated = n
		}
	}
	for _, c := range []struct {
		outputs gorgonia.Nodes
		tasks   int
	}{{nil, 2}, {gorgonia.Nodes{transposed, repeated}, 4}} {
		machine, err := NewMachine(device, g, fakeOption, WithStrict(), WithOutputs(c.outputs...))
		if err != nil {
			t.Fatal(err)
		}
		defer machine.Close()
		if n := len(machine.runner.Program.Calls); n != c.tasks {
			t.Errorf("%d tasks, want %d", n, c.tasks)
		}
		tape := gorgonia.NewTapeMachine(g)
		defer tape.Close()
		if err := errors.Join(machine.RunAll(), tape.RunAll()); err != nil {
			t.Fatal(err)
		}
		for _, n := range c.outputs {
			v, err := machine.Value(n)
			if err != nil {
				t.Fatal(err)
			}
			if want := n.Value().Data(); n == transposed &&
				!slices.Equal(flat(t, v), want.([]float32)) {
				t.Errorf("transposed: %v, want %v", v, want)
			}
			if row := flat(t, v)[7:14]; n == repeated && !slices.Equal(row, flat(t, bias.Value())) {
				t.Errorf("repeated: %v, want rows of %v", v, bias.Value())
			}
		}
	}
}

// TestStatements wants an error for what Gorgonia calls statements.
func TestStatements(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	g, _, y := stockGraph(t)
	var v gorgonia.Value
	gorgonia.Read(y, &v)
	if _, err := NewMachine(device, g, fakeOption); err == nil ||
		!strings.Contains(err.Error(), "WithOutputs") {
		t.Errorf("got %v, want an error that says what to do instead", err)
	}
}

// TestStockOnHost wants ops without a kernel to be computed on the host, between nodes that are on
// the device.
func TestStockOnHost(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	r := rand.New(rand.NewPCG(rand.Uint64(), 1))
	for _, c := range []stockCase{
		{name: "Tensordot", shapes: []shape{{2, 3, 5}, {5, 3, 4}}, constant: true,
			build: func(in nodes) (*node, error) {
				return gorgonia.Tensordot([]int{2, 1}, []int{0, 1}, in[0], in[1])
			}},
		{name: "ConvType", shapes: []shape{{4}}, ids: []int{3, 0, 2, 7}, constant: true,
			build: func(in nodes) (*node, error) {
				x, err := gorgonia.ConvType(in[1], tensor.Int, in[0].Dtype())
				if err != nil {
					return nil, err
				}
				return gorgonia.Add(in[0], x)
			}},
	} {
		t.Run(c.name, func(t *testing.T) {
			run, err := c.graph(tensor.Float32, false)
			if err != nil {
				t.Fatal(err)
			}
			var values [][]float64
			for _, s := range c.shapes {
				values = append(values, c.random(r, s, map[float64]bool{}))
			}
			var log bytes.Buffer
			machine, err := NewMachine(device, run.g, fakeOption,
				WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
			if err != nil {
				t.Fatal(err)
			}
			defer machine.Close()
			if err := errors.Join(run.let(values, nil), machine.RunAll(),
				machine.RunAll()); err != nil {
				t.Fatal(err)
			}
			v, err := machine.Value(run.out)
			if err != nil {
				t.Fatal(err)
			}
			if d := apart(wide(t, v), c.onTape(t, run, values, nil)[0]); !(d < 1e-6) {
				t.Errorf("differs by %.2g from that of Gorgonia's machine", d)
			}
			if strings.Count(log.String(), "no kernel") != 1 {
				t.Errorf("want one warning, got %q", log.String())
			}
		})
	}
}

// TestBatchedFLOPs wants a batch of products to count as such in profiles.
func TestBatchedFLOPs(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	g := gorgonia.NewGraph()
	a := gorgonia.NewTensor(g, tensor.Float32, 3, gorgonia.WithShape(3, 4, 5),
		gorgonia.WithName("a"))
	b := gorgonia.NewTensor(g, tensor.Float32, 3, gorgonia.WithShape(3, 5, 2),
		gorgonia.WithName("b"))
	gorgonia.Must(gorgonia.BatchedMatMul(a, b))
	m, err := NewMachine(device, g, fakeOption)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if task := m.runner.Program.Calls[0]; len(m.runner.Program.Calls) != 1 ||
		task.FLOPs != 2*3*4*5*2 || task.Bytes() != 4*3*(4*5+5*2+4*2) {
		t.Errorf("%d tasks, the first of %v operations and %v bytes", len(m.runner.Program.Calls),
			task.FLOPs, task.Bytes())
	}
}

// stockCase is a graph made of Gorgonia's own ops.
type stockCase struct {
	name     string
	shapes   []tensor.Shape // of the inputs; one without dimensions is a scalar
	ids      []int          // the value of one more input, of integers
	positive bool           // the inputs are
	build    func(in gorgonia.Nodes) (*gorgonia.Node, error)
	constant bool // it has no derivative
	badDiff  bool // Gorgonia makes a wrong gradient of it: a graph of what is no derivative
	// instead is the same function made of other ops, where Gorgonia's machine computes the op or
	// its gradient wrongly.
	instead func(in gorgonia.Nodes) (*gorgonia.Node, error)
}

type (
	shape = tensor.Shape
	nodes = gorgonia.Nodes
	node  = gorgonia.Node
)

// stockCases are fresh graphs of odd sizes.
func stockCases(r *rand.Rand) []stockCase {
	return slices.Concat(elementwiseCases(), productCases(), reductionCases(), layoutCases(r))
}

func elementwiseCases() []stockCase {
	m, v, s := shape{3, 7}, shape{5}, shape{}
	var cases []stockCase
	for name, f := range map[string]func(*node) (*node, error){
		"Abs": gorgonia.Abs, "Sign": gorgonia.Sign, "Ceil": gorgonia.Ceil, "Floor": gorgonia.Floor,
		"Sin": gorgonia.Sin, "Cos": gorgonia.Cos,
		"Exp": gorgonia.Exp, "Log": gorgonia.Log, "Log2": gorgonia.Log2, "Neg": gorgonia.Neg,
		"Square": gorgonia.Square, "Sqrt": gorgonia.Sqrt,
		"Inverse": gorgonia.Inverse, "InverseSqrt": gorgonia.InverseSqrt, "Cube": gorgonia.Cube,
		"Tanh":    gorgonia.Tanh,
		"Sigmoid": gorgonia.Sigmoid, "Log1p": gorgonia.Log1p, "Expm1": gorgonia.Expm1,
		"Softplus": gorgonia.Softplus,
		"Rectify":  gorgonia.Rectify, "Mish": gorgonia.Mish,
		"LeakyRelu": func(x *node) (*node, error) { return gorgonia.LeakyRelu(x, 0.125) },
	} {
		c := stockCase{name: name, positive: slices.Contains([]string{"Log", "Log2", "Sqrt",
			"Inverse", "InverseSqrt", "Log1p"}, name),
			constant: slices.Contains([]string{"Sign", "Ceil", "Floor"}, name),
			build:    func(in nodes) (*node, error) { return f(in[0]) }}
		c.badDiff = name == "InverseSqrt" || name == "Log2"
		for _, x := range []shape{m, s} {
			c.shapes = []shape{x}
			cases = append(cases, c)
		}
	}
	for name, f := range map[string]func(a, b *node) (*node, error){
		"Add": gorgonia.Add, "Sub": gorgonia.Sub, "Mul": gorgonia.HadamardProd,
		"Div": gorgonia.HadamardDiv, "Pow": gorgonia.Pow,
		"MinBetween": gorgonia.MinBetween, "MaxBetween": gorgonia.MaxBetween,
	} {
		between := name == "MinBetween" || name == "MaxBetween"
		for _, operands := range [][]shape{{m, m}, {v, v}, {m, s}, {s, m}, {s, s}} {
			if between && len(operands[0])*len(operands[1]) == 0 {
				continue
			}
			cases = append(cases, stockCase{name: name, shapes: operands, positive: true,
				build: func(in nodes) (*node, error) { return f(in[0], in[1]) }})
		}
		for side := range 2 {
			if between {
				continue
			}
			cases = append(cases, stockCase{name: fmt.Sprintf("%s with a constant %d", name, side),
				shapes: []shape{m}, positive: true,
				build: func(in nodes) (*node, error) {
					operands := nodes{in[0], number1(in[0], 1.75)}
					return f(operands[side], operands[1-side])
				}})
		}
	}
	for name, f := range map[string]func(a, b *node, same bool) (*node, error){
		"Lt": gorgonia.Lt, "Gt": gorgonia.Gt, "Lte": gorgonia.Lte, "Gte": gorgonia.Gte,
		"Eq": gorgonia.Eq, "Ne": gorgonia.Ne,
	} {
		for _, operands := range [][]shape{{m, m}, {m, s}, {s, m}, {s, s}} {
			cases = append(cases, stockCase{name: name, shapes: operands, constant: true,
				build: func(in nodes) (*node, error) { return f(in[0], in[1], true) }})
		}
	}
	// From the logarithm of a sigmoid Gorgonia makes a softplus, and removes nodes from the graph.
	return append(cases, stockCase{name: "BinaryXent", shapes: []shape{m, m}, positive: true,
		build: func(in nodes) (*node, error) {
			p, err := gorgonia.Sigmoid(in[0])
			if err != nil {
				return nil, err
			}
			return gorgonia.BinaryXent(p, in[1])
		}})
}

// number1 is a constant of x's type.
func number1(x *node, v float64) *node {
	if x.Dtype() == tensor.Float32 {
		return gorgonia.NewConstant(float32(v))
	}
	return gorgonia.NewConstant(v)
}

func productCases() []stockCase {
	cases := []stockCase{
		{name: "matrices", shapes: []shape{{3, 5}, {5, 7}}, build: func(in nodes) (*node, error) {
			return gorgonia.Mul(in[0], in[1])
		}},
		{name: "matrix and vector", shapes: []shape{{3, 5}, {5}},
			build: func(in nodes) (*node, error) {
				return gorgonia.Mul(in[0], in[1])
			}},
		{name: "vector and matrix", shapes: []shape{{3}, {3, 5}},
			build: func(in nodes) (*node, error) {
				return gorgonia.Mul(in[0], in[1])
			}},
		{name: "vectors", shapes: []shape{{7}, {7}}, build: func(in nodes) (*node, error) {
			return gorgonia.Mul(in[0], in[1])
		}},
		{name: "outer", shapes: []shape{{3}, {5}}, build: func(in nodes) (*node, error) {
			return gorgonia.OuterProd(in[0], in[1])
		},
			constant: true}, // its gradient multiplies shapes that do not fit
		{name: "transposed used twice", shapes: []shape{{3, 5}, {3, 7}},
			build: func(in nodes) (*node, error) {
				t, err := gorgonia.Transpose(in[0])
				if err != nil {
					return nil, err
				}
				y, err := gorgonia.Mul(t, in[1])
				if err != nil {
					return nil, err
				}
				sum, err := gorgonia.Sum(t, 1)
				if err != nil {
					return nil, err
				}
				return gorgonia.BroadcastAdd(y, sum, nil, []byte{1})
			}},
	}
	for i := range 4 {
		ta, tb := i&1 != 0, i&2 != 0
		a, b := shape{3, 5}, shape{5, 7}
		if ta {
			a = shape{5, 3}
		}
		if tb {
			b = shape{7, 5}
		}
		cases = append(cases,
			stockCase{name: fmt.Sprintf("transposed matrices %v %v", ta, tb), shapes: []shape{a, b},
				build: func(in nodes) (_ *node, err error) {
					x, y := in[0], in[1]
					if ta {
						if x, err = gorgonia.Transpose(x); err != nil {
							return nil, err
						}
					}
					if tb {
						if y, err = gorgonia.Transpose(y); err != nil {
							return nil, err
						}
					}
					return gorgonia.Mul(x, y)
				}},
			stockCase{name: fmt.Sprintf("batched %v %v", ta, tb),
				shapes: []shape{append(shape{2}, a...), append(shape{2}, b...)},
				build: func(in nodes) (*node, error) {
					return gorgonia.BatchedMatMul(in[0], in[1], ta, tb)
				}},
			stockCase{name: fmt.Sprintf("batched twice %v %v", ta, tb),
				shapes: []shape{append(shape{2, 3}, a...), append(shape{2, 3}, b...)},
				build: func(in nodes) (*node, error) {
					return gorgonia.BatchedMatMul(in[0], in[1], ta, tb)
				}})
	}
	return cases
}

func reductionCases() []stockCase {
	var cases []stockCase
	for name, f := range map[string]func(*node, ...int) (*node, error){"Sum": gorgonia.Sum, "Max": gorgonia.Max, "Mean": gorgonia.Mean} {
		for _, c := range []struct {
			x    shape
			axes []int
		}{
			{shape{7}, nil}, {shape{3, 5}, nil}, {shape{3, 5}, []int{0}}, {shape{3, 5}, []int{1}},
			{shape{2, 3, 5}, nil},
			{shape{2, 3, 5}, []int{0}}, {shape{2, 3, 5}, []int{1}}, {shape{2, 3, 5}, []int{2}},
			{shape{2, 3, 5}, []int{0, 1}},
			{shape{2, 3, 5}, []int{1, 2}}, {shape{2, 3, 5}, []int{0, 2}},
		} {
			cases = append(cases, stockCase{name: fmt.Sprintf("%s along %v of", name, c.axes),
				shapes: []shape{c.x},
				build:  func(in nodes) (*node, error) { return f(in[0], c.axes...) }})
		}
	}
	for name, f := range map[string]func(*node, ...int) (*node, error){"SoftMax": gorgonia.SoftMax, "LogSoftMax": gorgonia.LogSoftMax} {
		for _, c := range []struct {
			x    shape
			axes []int
		}{
			{shape{7}, nil}, {shape{3, 5}, nil}, {shape{3, 5}, []int{0}}, {shape{3, 5}, []int{1}},
			{shape{2, 3, 5}, []int{2}},
			{shape{2, 3, 5}, []int{1}}, {shape{2, 3, 5}, []int{0}},
		} {
			cases = append(cases, stockCase{name: fmt.Sprintf("%s along %v of", name, c.axes),
				shapes: []shape{c.x},
				build:  func(in nodes) (*node, error) { return f(in[0], c.axes...) }})
		}
	}
	return append(cases, stockCase{name: "SoftMax of a column", shapes: []shape{{5, 1}},
		build:   func(in nodes) (*node, error) { return gorgonia.SoftMax(in[0]) },
		instead: func(in nodes) (*node, error) { return gorgonia.SoftMax(in[0], 0) }})
}

func layoutCases(r *rand.Rand) []stockCase {
	var cases []stockCase
	one := func(name string, x shape, build func(x *node) (*node, error)) {
		cases = append(cases, stockCase{name: name, shapes: []shape{x},
			build: func(in nodes) (*node, error) {
				h, err := gorgonia.Tanh(in[0]) // so that it is of an activation's type
				if err != nil {
					return nil, err
				}
				return build(h)
			}})
	}
	for _, to := range []shape{{15}, {5, 3}, {3, 5, 1}, {1, 15}} {
		one(fmt.Sprintf("Reshape %v", to), shape{3, 5}, func(x *node) (*node, error) {
			return gorgonia.Reshape(x, to.Clone())
		})
	}
	for _, axes := range [][]int{{1, 0, 2}, {2, 1, 0}, {0, 2, 1}, {1, 2, 0}, {2, 0, 1}} {
		one(fmt.Sprintf("Transpose %v", axes), shape{2, 3, 5}, func(x *node) (*node, error) {
			return gorgonia.Transpose(x, slices.Clone(axes)...)
		})
	}
	one("Transpose of four", shape{2, 3, 5, 4}, func(x *node) (*node, error) {
		return gorgonia.Transpose(x, 0, 2, 1, 3)
	})
	for _, c := range []struct {
		name  string
		x     shape
		parts []tensor.Slice
	}{
		{"rows", shape{5, 3}, []tensor.Slice{gorgonia.S(1, 4)}},
		{"a row", shape{5, 3}, []tensor.Slice{gorgonia.S(2)}},
		{"columns", shape{5, 7}, []tensor.Slice{nil, gorgonia.S(2, 5)}},
		{"a column", shape{5, 7}, []tensor.Slice{nil, gorgonia.S(3)}},
		{"a block", shape{5, 7}, []tensor.Slice{gorgonia.S(1, 3), gorgonia.S(2, 6)}},
		{"an element", shape{5}, []tensor.Slice{gorgonia.S(2)}},
		{"a part", shape{9}, []tensor.Slice{gorgonia.S(2, 7)}},
		{"everything", shape{5, 3}, []tensor.Slice{gorgonia.S(0, 5)}},
		{"the middle", shape{2, 5, 3}, []tensor.Slice{nil, gorgonia.S(1, 4)}},
		{"a row, then columns", shape{5, 7}, []tensor.Slice{gorgonia.S(1), gorgonia.S(2, 6)}},
		{"every other row", shape{6, 3}, []tensor.Slice{gorgonia.S(0, 6, 2)}},
	} {
		one("Slice: "+c.name, c.x, func(x *node) (*node, error) {
			return gorgonia.Slice(x, c.parts...)
		})
	}
	cases = append(cases, stockCase{name: "At", shapes: []shape{{3, 5}}, constant: true,
		build: func(in nodes) (*node, error) { return gorgonia.At(in[0], 1, 3) },
		instead: func(in nodes) (*node, error) {
			return gorgonia.Slice(in[0], gorgonia.S(1), gorgonia.S(3))
		}})
	for _, c := range []struct {
		axis   int
		shapes []shape
	}{
		{0, []shape{{2, 5}, {3, 5}}}, {1, []shape{{3, 5}, {3, 2}, {3, 4}}},
		{1, []shape{{2, 3, 5}, {2, 4, 5}}}, {0, []shape{{2}, {5}}},
		{1, []shape{{3, 1}, {3, 4}}}, {2, []shape{{2, 3, 5}, {2, 3, 2}}},
	} {
		cases = append(cases,
			stockCase{name: fmt.Sprintf("Concat along %d", c.axis), shapes: c.shapes,
				build: func(in nodes) (*node, error) { return gorgonia.Concat(c.axis, in...) }})
	}
	for _, c := range []struct {
		x    shape
		axis int
	}{{shape{5, 3}, 0}, {shape{5, 3}, 1}, {shape{7}, 0}, {shape{4, 3, 2}, 0}, {shape{4, 3, 2}, 1},
		{shape{4, 3, 2}, 2}} {
		ids := make([]int, 6)
		for i := range ids {
			ids[i] = r.IntN(c.x[c.axis])
		}
		pick := stockCase{name: fmt.Sprintf("ByIndices along %d of", c.axis),
			shapes: []shape{c.x}, ids: ids,
			build: func(in nodes) (*node, error) {
				return gorgonia.ByIndices(in[0], in[1], c.axis)
			}}
		if len(c.x) == 1 || c.axis > 0 {
			pick.instead = func(in nodes) (*node, error) { return pickFirst(in[0], in[1], c.axis) }
		}
		cases = append(cases, pick)
	}
	cases = append(cases, stockCase{name: "ByIndices of a part", shapes: []shape{{5, 3}},
		ids: []int{0, 4, 2, 4, 1},
		build: func(in nodes) (*node, error) {
			ids, err := gorgonia.Slice(in[1], gorgonia.S(1, 4))
			if err != nil {
				return nil, err
			}
			return gorgonia.ByIndices(in[0], ids, 0)
		}})
	cases = append(cases, stockCase{name: "Repeat of rows",
		shapes: []shape{{4, 3}, {8, 3}, {2, 3}, {1, 3}},
		build: func(in nodes) (*node, error) {
			one, _, err := gorgonia.Broadcast(in[3], in[2],
				gorgonia.NewBroadcastPattern([]byte{0}, nil))
			if err != nil {
				return nil, err
			}
			x, err := gorgonia.ApplyOp(one.Op(), in[0], gorgonia.Must(gorgonia.SizeOf(0, in[2])))
			if err != nil {
				return nil, err
			}
			return gorgonia.HadamardProd(x, in[1])
		}, constant: true})
	cases = append(cases, stockCase{name: "Repeat, times a number", shapes: []shape{{1, 3}, {2, 3}},
		build: func(in nodes) (*node, error) {
			x, y, err := gorgonia.Broadcast(in[0], in[1],
				gorgonia.NewBroadcastPattern([]byte{0}, nil))
			if err != nil {
				return nil, err
			}
			return gorgonia.Add(y, gorgonia.Must(gorgonia.HadamardProd(x, number1(x, 3))))
		}})
	for name, f := range map[string]func(a, b *node, left, right []byte) (*node, error){
		"Add": gorgonia.BroadcastAdd, "Sub": gorgonia.BroadcastSub,
		"Mul": gorgonia.BroadcastHadamardProd, "Div": gorgonia.BroadcastHadamardDiv,
	} {
		for _, c := range []struct {
			a, b        shape
			left, right []byte
		}{
			{shape{3, 5}, shape{5}, nil, []byte{0}}, {shape{3, 5}, shape{3}, nil, []byte{1}},
			{shape{3, 5}, shape{1, 5}, nil, []byte{0}},
			{shape{3, 1}, shape{3, 5}, []byte{1}, nil}, {shape{2, 3, 5}, shape{2, 1, 5}, nil,
				[]byte{1}}, {shape{3, 5}, shape{1, 1}, nil, []byte{0, 1}},
			{shape{3, 1}, shape{1, 5}, []byte{1}, []byte{0}},
		} {
			cases = append(cases, stockCase{name: "Broadcast" + name, shapes: []shape{c.a, c.b},
				positive: true,
				build: func(in nodes) (*node, error) {
					return f(in[0], in[1], c.left, c.right)
				}})
		}
	}
	return cases
}

// pickFirst is ByIndices with the axis brought to the front of a matrix, which Gorgonia does right.
func pickFirst(x, ids *node, axis int) (*node, error) {
	swap := make([]int, x.Dims())
	for i := range swap {
		swap[i] = i
	}
	swap[0], swap[axis] = axis, 0
	first, err := gorgonia.Transpose(x, swap...)
	if err != nil {
		return nil, err
	}
	s := first.Shape()
	if first, err = gorgonia.Reshape(first, shape{s[0], opbase.Size(s[1:])}); err != nil {
		return nil, err
	}
	if first, err = gorgonia.ByIndices(first, ids, 0); err != nil {
		return nil, err
	}
	s[0] = ids.Shape()[0]
	if first, err = gorgonia.Reshape(first, s); err != nil {
		return nil, err
	}
	return gorgonia.Transpose(first, slices.Clone(swap)...)
}

// passOn is the identity of scalars, without a kernel, whose result is a tensor of no dimensions
// where others have a number.
type passOn struct{}

func (passOn) Arity() int    { return 1 }
func (passOn) Type() hm.Type { return hm.NewFnType(tensor.Float32, tensor.Float32) }
func (passOn) InferShape(...gorgonia.DimSizer) (tensor.Shape, error) {
	return tensor.ScalarShape(), nil
}
func (passOn) ReturnsPtr() bool      { return false }
func (passOn) CallsExtern() bool     { return false }
func (passOn) OverwritesInput() int  { return -1 }
func (passOn) WriteHash(h hash.Hash) { h.Write([]byte("passOn")) }
func (passOn) Hashcode() uint32      { return 0x9a550 }
func (passOn) String() string        { return "passOn" }
func (passOn) DiffWRT(int) []bool    { return []bool{true} }
func (passOn) SymDiff(_ gorgonia.Nodes, _, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	n, err := gorgonia.ApplyOp(passOn{}, grad)
	return gorgonia.Nodes{n}, err
}

func (passOn) Do(in ...gorgonia.Value) (gorgonia.Value, error) {
	x, ok := in[0].Data().(float32)
	if !ok {
		return nil, errors.New("want a scalar")
	}
	return tensor.New(tensor.FromScalar(x)), nil
}

// TestScaledScalar wants the loss scale to leave and come back where an op on the host answers with
// such a tensor.
func TestScaledScalar(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	var grads [2]gorgonia.Value
	for i, opts := range [][]MachineOption{{fakeOption}, {fakeOption, scaledGradients}} {
		g := gorgonia.NewGraph()
		w := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(2, 2),
			tensor.WithBacking([]float32{1, 2, 3, 4})), gorgonia.WithName("w"))
		s := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.Square(w))))
		cost := gorgonia.Must(gorgonia.Square(gorgonia.Must(gorgonia.ApplyOp(passOn{}, s))))
		if _, err := gorgonia.Grad(cost, w); err != nil {
			t.Fatal(err)
		}
		m, err := NewMachine(device, g, append(opts, WithParams(w))...)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		if grads[i], err = m.Value(w.Deriv()); err != nil {
			t.Fatal(err)
		}
	}
	if d := distance(t, grads[1], grads[0]); !(d < 1e-6) {
		t.Errorf("the gradient is %v scaled and %v plain", grads[1], grads[0])
	}
}

// TestFoldedGradient wants no value of the output layer's gradient where the table's has been added
// into its memory.
func TestFoldedGradient(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	_, b := newBatch(t, llm.ForTraining, 2)
	var head *gorgonia.Node
	for _, n := range b.G.AllNodes() {
		if p, ok := n.Op().(*opbase.PartOp); ok && p.Offset > 0 &&
			isOp[*op.LinearCrossEntropyGradOp](graph.Children(n)[0]) {
			head = n
		}
	}
	if head == nil {
		t.Fatal("the graph has no gradient of the output layer")
	}
	m, err := NewMachine(device, b.G, fakeOption, WithParams(b.Params...), WithOutputs(b.Loss))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	if v, err := m.Value(head); err == nil || !strings.Contains(err.Error(), "WithOutputs") {
		t.Errorf("got %v, %v, want an error that names WithOutputs", v != nil, err)
	}
}
