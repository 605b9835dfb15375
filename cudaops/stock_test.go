package cudaops

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
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
		return gorgonia.NewTensor(r.g, dt, len(s), gorgonia.WithShape(s...), gorgonia.WithName(name))
	}
	for i, s := range c.shapes {
		r.in = append(r.in, input(fmt.Sprint("x", i), dt, s))
	}
	operands := slices.Clone(r.in)
	if c.ids != nil {
		ids := input("ids", tensor.Int, shape{len(c.ids)})
		if err := gorgonia.Let(ids, tensor.New(tensor.WithBacking(slices.Clone(c.ids)))); err != nil {
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
	x := make([]float64, 0, program.Size(s))
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

// apart is ‖got − want‖/‖want‖, or relative to a tenth for each number where they are smaller: sums of numbers of about 1 may
// nearly cancel.
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

// TestStock runs every case on both machines, and holds results to those of Gorgonia's machine in float64 and gradients to
// central differences of these.
func TestStock(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testStock(t, device, seed, 1, 1e-5, fakeOption)
	})
	t.Run("scaled", func(t *testing.T) { // by a number that is no power of two, so that one factor too many or too few shows
		device, _, fakeOption := openFake(t, fake.Config{})
		testStock(t, device, seed, 1, 1e-5, fakeOption, scaledGradients)
	})
	t.Run("float32", func(t *testing.T) { testStock(t, openGPU(t), seed, few(1, 3), 1e-5) })
	t.Run("bfloat16", func(t *testing.T) { testStock(t, openGPU(t), seed, few(1, 3), 3e-2, WithPrecision(BFloat16)) })
	t.Run("float16", func(t *testing.T) { testStock(t, openGPU(t), seed, few(1, 3), 5e-3, WithPrecision(Float16)) })
}

// scaledGradients is the loss scaling of Float16 without its storage.
func scaledGradients(c *machineConfig) error {
	c.scaled = true
	return nil
}

// testStock takes one of so many cases.
func testStock(t *testing.T, device *Device, seed uint64, share int, tolerance float64, opts ...MachineOption) {
	r := rand.New(rand.NewPCG(seed, 1))
	cases := stockCases(r)
	if share > 1 {
		r.Shuffle(len(cases), func(i, j int) { cases[i], cases[j] = cases[j], cases[i] })
	}
	for _, c := range cases[:len(cases)/share] {
		t.Run(fmt.Sprint(c.name, " ", c.shapes), func(t *testing.T) { c.test(t, device, r, tolerance, opts) })
	}
}

func (c stockCase) test(t *testing.T, device *Device, r *rand.Rand, tolerance float64, opts []MachineOption) {
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

// onTape returns the result and the gradients that Gorgonia's machine has for the same nodes. It computes the result in
// another graph, since it writes other results over one that is used.
func (c stockCase) onTape(t *testing.T, run *stockRun, values [][]float64, weights []float64) (all [][]float64) {
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

// TestStockWithoutCopies wants transposed operands of products and repeated operands of elementwise ops to be read where
// they are, and to be there for somebody who asks for them.
func TestStockWithoutCopies(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	g := gorgonia.NewGraph()
	value := func(s ...int) *node {
		x := make([]float32, program.Size(s))
		for i := range x {
			x[i] = float32(rand.NormFloat64())
		}
		return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(s...), tensor.WithBacking(x)), gorgonia.WithName(fmt.Sprint(s)))
	}
	x, w, bias := value(3, 5), value(7, 5), value(7)
	transposed := gorgonia.Must(gorgonia.Transpose(w))
	if _, err := gorgonia.BroadcastAdd(gorgonia.Must(gorgonia.Mul(x, transposed)), bias, nil, []byte{0}); err != nil {
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
			if want := n.Value().Data(); n == transposed && !slices.Equal(flat(t, v), want.([]float32)) {
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
	if _, err := NewMachine(device, g, fakeOption); err == nil || !strings.Contains(err.Error(), "WithOutputs") {
		t.Errorf("got %v, want an error that says what to do instead", err)
	}
}

// TestStockOnHost wants ops without a kernel to be computed on the host, between nodes that are on the device.
func TestStockOnHost(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	r := rand.New(rand.NewPCG(rand.Uint64(), 1))
	for _, c := range []stockCase{
		{name: "Tensordot", shapes: []shape{{2, 3, 5}, {5, 3, 4}}, constant: true,
			build: func(in nodes) (*node, error) { return gorgonia.Tensordot([]int{2, 1}, []int{0, 1}, in[0], in[1]) }},
		{name: "ConvType", shapes: []shape{{4}}, ids: []int{3, 0, 2, 7}, constant: true, build: func(in nodes) (*node, error) {
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
			machine, err := NewMachine(device, run.g, fakeOption, WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
			if err != nil {
				t.Fatal(err)
			}
			defer machine.Close()
			if err := errors.Join(run.let(values, nil), machine.RunAll(), machine.RunAll()); err != nil {
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
	a := gorgonia.NewTensor(g, tensor.Float32, 3, gorgonia.WithShape(3, 4, 5), gorgonia.WithName("a"))
	b := gorgonia.NewTensor(g, tensor.Float32, 3, gorgonia.WithShape(3, 5, 2), gorgonia.WithName("b"))
	gorgonia.Must(gorgonia.BatchedMatMul(a, b))
	m, err := NewMachine(device, g, fakeOption)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if task := m.runner.Program.Calls[0]; len(m.runner.Program.Calls) != 1 || task.FLOPs != 2*3*4*5*2 || task.Bytes() != 4*3*(4*5+5*2+4*2) {
		t.Errorf("%d tasks, the first of %v operations and %v bytes", len(m.runner.Program.Calls), task.FLOPs, task.Bytes())
	}
}
