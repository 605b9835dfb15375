package cpuops_test

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

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/allocs"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

func random(t *testing.T) *rand.Rand {
	return randtest.New(t)
}

func normal(r *rand.Rand, dt tensor.Dtype, shape ...int) *tensor.Dense {
	n := opbase.Size(shape)
	if dt == tensor.Float32 {
		x := make([]float32, n)
		for i := range x {
			x[i] = float32(r.NormFloat64())
		}
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
	}

	x := make([]float64, n)
	for i := range x {
		x[i] = r.NormFloat64()
	}

	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
}

func flat(t *testing.T, v gorgonia.Value) any {
	t.Helper()
	f, err := opbase.Flat(v)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func check[T any](t *testing.T) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// TestModel checks that a model's losses and gradients are bit-identical to those of Gorgonia's tape
// machine, with gradients accumulated over several runs.
func TestModel(t *testing.T) {
	for _, recompute := range []bool{false, true} {
		for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
			t.Run(fmt.Sprintf("%v_recompute=%v", dt, recompute), func(t *testing.T) {
				r := random(t)
				config := llm.Config{Vocab: 50, Dim: 24, Layers: 3, Heads: 2, KVHeads: 1, Seq: 16,
					Kasmina: []int{0, 1}, Seeds: 6}.Default()
				opts := []llm.GraphOption{}
				if recompute {
					opts = append(opts, llm.WithRecompute())
				}
				var graphs [2]*llm.Graph
				for i := range graphs {
					m := check[*llm.Model](t)(llm.NewModel(config, dt, 7, state.WithoutGates()))
					for seed, slot := range []int{1, 2, 1} {
						if err := m.Germinate(1, seed,
							state.GerminationRequest{Slot: slot}); err != nil {
							t.Fatal(err)
						}
						for _, to := range []state.Stage{state.Training, state.Grafting} {
							if err := m.Kasmina.Lattice(1).Transition(seed, to); err != nil {
								t.Fatal(err)
							}
						}
						if err := m.Kasmina.Lattice(1).SetAlpha(seed, 0.4); err != nil {
							t.Fatal(err)
						}
					}
					graphs[i] = check[*llm.Graph](t)(m.Graph(llm.ForTraining, 3, opts...))
				}
				tape := gorgonia.NewTapeMachine(graphs[0].G,
					gorgonia.BindDualValues(graphs[0].Params...))
				defer tape.Close()
				ours := check[*cpuops.Machine](t)(cpuops.NewMachine(graphs[1].G,
					cpuops.WithParams(graphs[1].Params...), cpuops.WithOutputs(graphs[1].Loss)))
				defer ours.Close()
				want, got := gorgonia.NodesToValueGrads(graphs[0].Params), ours.ValueGrads()
				for run := range 4 {
					ids := make([]int, 3*config.Seq)
					for i := range ids {
						ids[i] = r.IntN(config.Vocab)
					}
					for i, m := range []gorgonia.VM{tape, ours} {
						m.Reset()
						if err := graphs[i].Let(data.Batch{Inputs: ids,
							Targets: slices.Clone(ids)}); err != nil {
							t.Fatal(err)
						}
						if err := m.RunAll(); err != nil {
							t.Fatal(err)
						}
					}
					if a, b := graphs[0].Loss.Value(),
						graphs[1].Loss.Value(); a.Data() != b.Data() {
						t.Errorf("run %d: loss %v, want %v", run, b, a)
					}
					for i := range want {
						a, b := check[gorgonia.Value](t)(want[i].Grad()),
							check[gorgonia.Value](t)(got[i].Grad())
						if !equal(flat(t, a), flat(t, b)) {
							t.Errorf("run %d: the gradient of %s differs", run,
								graphs[0].Params[i].Name())
						}
					}
				}
			})
		}
	}
}

func equal(a, b any) bool {
	switch a := a.(type) {
	case []float32:
		b, ok := b.([]float32)
		return ok && slices.Equal(a, b)
	case []float64:
		b, ok := b.([]float64)
		return ok && slices.Equal(a, b)
	}
	return false
}

// TestStock checks graphs of Gorgonia's own ops, and graphs that mix them with this module's, against the
// tape machine.
func TestStock(t *testing.T) {
	type build = func(g *gorgonia.ExprGraph, in gorgonia.Nodes) *gorgonia.Node
	must := gorgonia.Must
	for name, b := range map[string]build{
		"chain in place": func(g *gorgonia.ExprGraph, in gorgonia.Nodes) *gorgonia.Node {
			x := must(gorgonia.Add(in[0], in[1]))
			x = must(gorgonia.HadamardProd(x, in[0]))
			x = must(gorgonia.Sub(x, in[1]))
			return must(gorgonia.Sum(must(gorgonia.HadamardDiv(x, must(gorgonia.Exp(in[0]))))))
		},
		"an operand read again": func(g *gorgonia.ExprGraph, in gorgonia.Nodes) *gorgonia.Node {
			x := must(gorgonia.Add(in[0], in[1]))
			y := must(gorgonia.HadamardProd(x, in[0]))
			return must(gorgonia.Sum(must(gorgonia.Add(must(gorgonia.Square(y)), x))))
		},
		"scalars": func(g *gorgonia.ExprGraph, in gorgonia.Nodes) *gorgonia.Node {
			half := gorgonia.NewConstant(0.5)
			if in[0].Dtype() == tensor.Float32 {
				half = gorgonia.NewConstant(float32(0.5))
			}
			s := must(gorgonia.Mean(in[0]))
			x := must(gorgonia.Mul(half, in[0]))
			x = must(gorgonia.Div(must(gorgonia.Sub(s, x)), half))
			x = must(gorgonia.HadamardProd(x, in[1]))
			return must(gorgonia.Mul(must(gorgonia.Sum(x)), must(gorgonia.Add(s, half))))
		},
		"products": func(g *gorgonia.ExprGraph, in gorgonia.Nodes) *gorgonia.Node {
			p := must(gorgonia.Mul(in[0], must(gorgonia.Transpose(in[1]))))
			return must(gorgonia.Sum(must(gorgonia.Tanh(p))))
		},
		"softmax, slices and a norm": func(g *gorgonia.ExprGraph,
			in gorgonia.Nodes) *gorgonia.Node {
			s := must(gorgonia.SoftMax(in[0]))
			top := must(gorgonia.Slice(in[1], gorgonia.S(0, 2)))
			return must(gorgonia.Add(must(gorgonia.Sum(must(gorgonia.HadamardProd(s, in[1])))),
				must(gorgonia.Sum(must(gorgonia.Square(top))))))
		},
		"ops of both": func(g *gorgonia.ExprGraph, in gorgonia.Nodes) *gorgonia.Node {
			w := must(gorgonia.Slice(in[1], gorgonia.S(0)))
			y := must(op.RMSNorm(in[0], w, 1e-5))
			z := must(gorgonia.Add(must(gorgonia.Sigmoid(y)), in[1]))
			return must(gorgonia.Sum(must(op.Linear(z, y))))
		},
	} {
		for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
			t.Run(fmt.Sprintf("%s_%v", name, dt), func(t *testing.T) {
				r := random(t)
				shape := []int{3 + r.IntN(5), 2 + r.IntN(9)}
				values := []*tensor.Dense{normal(r, dt, shape...), normal(r, dt, shape...)}
				var results [2][]any
				for i := range results {
					g := gorgonia.NewGraph()
					in := gorgonia.Nodes{gorgonia.NewMatrix(g, dt, gorgonia.WithShape(shape...),
						gorgonia.WithName("a")),
						gorgonia.NewMatrix(g, dt, gorgonia.WithShape(shape...),
							gorgonia.WithName("b"))}
					cost := b(g, in)
					grads := check[gorgonia.Nodes](t)(gorgonia.Grad(cost, in...))
					var m gorgonia.VM = gorgonia.NewTapeMachine(g)
					if i == 1 {
						m = check[*cpuops.Machine](t)(cpuops.NewMachine(g,
							cpuops.WithOutputs(append(grads, cost)...)))
					}
					defer m.Close()
					for range 3 {
						m.Reset()
						for j := range in {
							if err := gorgonia.Let(in[j],
								values[j].Clone().(*tensor.Dense)); err != nil {
								t.Fatal(err)
							}
						}
						if err := m.RunAll(); err != nil {
							t.Fatal(err)
						}
					}
					for _, n := range append(grads, cost) {
						results[i] = append(results[i], flat(t, n.Value()))
					}
				}
				for i := range results[0] {
					if !equal(results[0][i], results[1][i]) {
						t.Errorf("result %d is %v, want %v", i, results[1][i], results[0][i])
					}
				}
			})
		}
	}
}

// TestViews checks that a result does not overwrite an operand that is read later in a different
// shape. The test computes its own reference, because the Reshape of Gorgonia's tape machine changes
// the shape of its operand.
func TestViews(t *testing.T) {
	r := random(t)
	a, b := normal(r, tensor.Float64, 3, 4), normal(r, tensor.Float64, 3, 4)
	g := gorgonia.NewGraph()
	na, nb := gorgonia.NodeFromAny(g, a, gorgonia.WithName("a")),
		gorgonia.NodeFromAny(g, b, gorgonia.WithName("b"))
	must := gorgonia.Must
	x := must(gorgonia.Add(na, nb))
	row := must(gorgonia.Reshape(x, tensor.Shape{12}))
	y := must(gorgonia.Add(row, must(gorgonia.Reshape(nb, tensor.Shape{12}))))
	z := must(gorgonia.Sub(x, na))
	u := must(gorgonia.HadamardProd(must(gorgonia.Reshape(y, tensor.Shape{3, 4})), z))
	cost := must(gorgonia.Add(must(gorgonia.Sum(u)),
		must(gorgonia.Sum(must(gorgonia.HadamardProd(row, row))))))
	grads := check[gorgonia.Nodes](t)(gorgonia.Grad(cost, na, nb))
	m := check[*cpuops.Machine](t)(cpuops.NewMachine(g, cpuops.WithOutputs(append(grads, cost)...)))
	for range 2 {
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		want := 0.0 // Σ (a+2b)b + (a+b)²
		for i, a := range a.Float64s() {
			b := b.Float64s()[i]
			want += (a+2*b)*b + (a+b)*(a+b)
			for j, d := range []float64{b + 2*(a+b), a + 4*b + 2*(a+b)} {
				if got := grads[j].Value().Data().([]float64)[i]; math.Abs(got-d) > 1e-12*(1+
					math.Abs(d)) {
					t.Errorf("gradient %d at %d is %v, want %v", j, i, got, d)
				}
			}
		}
		if got := cost.Value().Data().(float64); math.Abs(got-want) > 1e-12*(1+math.Abs(want)) {
			t.Errorf("the sum is %v, want %v", got, want)
		}
	}
}

// TestMemory checks that the activations of a deep chain share memory.
func TestMemory(t *testing.T) {
	const rows, features, depth = 32, 64, 50
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(rows, features),
		gorgonia.WithName("x"))
	w := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(features, features),
		gorgonia.WithName("w"))
	y := x
	for range depth {
		y = check[*gorgonia.Node](t)(op.Linear(y, w))
	}

	m := check[*cpuops.Machine](t)(cpuops.NewMachine(g))
	if got, most := m.Memory(), 2*4*rows*features; got > most {
		t.Errorf("%d products take %d bytes, want at most two results' %d", depth, got, most)
	}
}

// TestMemoryTotal checks that Memory includes the sums of gradients and, after the first run, the memory
// that ops keep for their gradients.
func TestMemoryTotal(t *testing.T) {
	const rows, features = 64, 16
	g := gorgonia.NewGraph()
	x := gorgonia.NodeFromAny(g, normal(random(t), tensor.Float32, rows, features),
		gorgonia.WithName("x"))
	w := gorgonia.NodeFromAny(g, normal(random(t), tensor.Float32, features),
		gorgonia.WithName("w"))
	check[gorgonia.Nodes](
		t)(gorgonia.Grad(gorgonia.Must(gorgonia.Sum(check[*gorgonia.Node](t)(op.RMSNorm(x, w,
		1e-5)))), x, w))
	m := check[*cpuops.Machine](t)(cpuops.NewMachine(g, cpuops.WithParams(x)))
	before := m.Memory()
	if sums := 4 * rows * features; before < sums {
		t.Errorf("the machine takes %d bytes, and the sums of gradients alone %d", before, sums)
	}

	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}

	if kept := m.Memory() - before; kept != 4*rows {
		t.Errorf("the norm keeps %d bytes, want %d", kept, 4*rows)
	}
}

// TestRelease checks that a machine computes the same results after Release, whether its next memory
// comes from the pool or is new.
func TestRelease(t *testing.T) {
	r := random(t)
	g := gorgonia.NewGraph()
	x := gorgonia.NodeFromAny(g, normal(r, tensor.Float64, 4, 6), gorgonia.WithName("x"))
	w := gorgonia.NodeFromAny(g, normal(r, tensor.Float64, 6), gorgonia.WithName("w"))
	y := check[*gorgonia.Node](t)(op.RMSNorm(x, w, 1e-5))
	grads := check[gorgonia.Nodes](
		t)(gorgonia.Grad(gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.Square(y)))), x, w))
	m := check[*cpuops.Machine](t)(cpuops.NewMachine(g, cpuops.WithOutputs(append(grads, y)...)))
	var want []any
	for run := range 4 {
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		for i, n := range append(grads, y) {
			v := flat(t, check[gorgonia.Value](t)(m.Value(n)))
			if run == 0 {
				want = append(want, v)
			} else if !equal(v, want[i]) {
				t.Errorf("run %d: result %d is %v, want %v", run, i, v, want[i])
			}
		}
		m.Release()
		if _, err := m.Value(y); err == nil || !strings.Contains(err.Error(), "has not run") {
			t.Errorf("Value after Release: got error %v", err)
		}
		if run%2 == 1 {
			runtime.GC()
			runtime.GC() // empties the pool
		}
	}
}

// TestClosed checks that values bound to nodes stay valid after Close, even if other machines run.
func TestClosed(t *testing.T) {
	r := random(t)
	run := func() (*cpuops.Machine, *gorgonia.Node) {
		g := gorgonia.NewGraph()
		y := gorgonia.Must(gorgonia.Tanh(gorgonia.NodeFromAny(g, normal(r, tensor.Float32, 8, 8),
			gorgonia.WithName("x"))))
		m := check[*cpuops.Machine](t)(cpuops.NewMachine(g))
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		return m, y
	}

	m, y := run()
	want := flat(t, check[gorgonia.Value](t)(m.Value(y)))
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}

	for range 4 { // one of these would find the memory if Close had put it into the pool
		run()
	}

	if got := flat(t, y.Value()); !equal(got, want) {
		t.Errorf("after another machine's run the value is %v, want %v", got, want)
	}
}

// TestFailedRun checks that Value returns an error after a failed run, when some values are left from the
// run before.
func TestFailedRun(t *testing.T) {
	g := gorgonia.NewGraph()
	ids := gorgonia.NewTensor(g, tensor.Int, 1, gorgonia.WithShape(2), gorgonia.WithName("ids"))
	y := check[*gorgonia.Node](t)(op.Embedding(ids, gorgonia.NodeFromAny(g,
		normal(random(t), tensor.Float64, 3, 4), gorgonia.WithName("table"))))
	m := check[*cpuops.Machine](t)(cpuops.NewMachine(g))
	for _, second := range []int{2, 3, 1} { // 3 is out of range
		if err := gorgonia.Let(ids, tensor.New(tensor.WithBacking([]int{0, second}))); err != nil {
			t.Fatal(err)
		}
		failed := m.RunAll() != nil
		if _, err := m.Value(y); failed != (second == 3) || failed != (err != nil) {
			t.Errorf("id %d: run failed: %v, value: %v", second, failed, err)
		}
	}
}

// TestAllocations checks that the number of allocations in a steady training step does not grow with the
// model.
func TestAllocations(t *testing.T) {
	if testing.Short() {
		t.Skip("counting allocations needs a process without the race detector")
	}

	for _, layers := range []int{1, 6} {
		config := llm.Config{Vocab: 64, Dim: 32, Layers: layers, Heads: 2, Seq: 32,
			Kasmina: []int{0}, Seeds: 4}.Default()
		m := check[*llm.Model](t)(llm.NewModel(config, tensor.Float32, 1))
		g := check[*llm.Graph](t)(m.Graph(llm.ForTraining, 2))
		machine := check[*cpuops.Machine](t)(cpuops.NewMachine(g.G, cpuops.WithParams(g.Params...)))
		ids := make([]int, 2*config.Seq)
		batch := data.Batch{Inputs: ids, Targets: ids}
		n := allocs.PerRun(20, func() {
			if err := g.Let(batch); err != nil {
				t.Fatal(err)
			}
			if err := machine.RunAll(); err != nil {
				t.Fatal(err)
			}
		})
		t.Logf("%d layers: %v allocations", layers, n)
		if n > 100 {
			t.Errorf("a step of a model of %d layers makes %v allocations, want at most 100",
				layers, n)
		}
	}
}

func TestErrors(t *testing.T) {
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(2, 3), gorgonia.WithName("x"))
	y := gorgonia.Must(gorgonia.Add(x, x))
	z := gorgonia.Must(gorgonia.Exp(y))
	fails := func(err error, want string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}

	_, err := cpuops.NewMachine(g, cpuops.WithParams(y))
	fails(err, "node 0 is not an input")
	_, err = cpuops.NewMachine(g, cpuops.WithOutputs(nil))
	fails(err, "a node is nil")
	other := gorgonia.NewMatrix(gorgonia.NewGraph(), tensor.Float32, gorgonia.WithShape(2, 3),
		gorgonia.WithName("x"))
	for _, option := range []cpuops.Option{cpuops.WithParams(other), cpuops.WithOutputs(other)} {
		_, err = cpuops.NewMachine(g, option)
		fails(err, "x (2, 3) is not in the graph")
	}

	empty := gorgonia.NewMatrix(gorgonia.NewGraph(), tensor.Float32, gorgonia.WithShape(0, 3),
		gorgonia.WithName("empty"))
	_, err = cpuops.NewMachine(gorgonia.Must(gorgonia.Exp(empty)).Graph())
	fails(err, "empty (0, 3): it has no elements")
	_, err = cpuops.NewMachine(gorgonia.NewGraph())
	fails(err, "computes nothing")
	m := check[*cpuops.Machine](t)(cpuops.NewMachine(g))
	_, err = m.Value(z)
	fails(err, "has not run")
	fails(m.RunAll(), "input x (2, 3) has no value")
	if err := gorgonia.Let(x, tensor.New(tensor.WithShape(2, 3),
		tensor.WithBacking(make([]float32, 6)))); err != nil {
		t.Fatal(err)
	}

	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}

	_, err = m.Value(y)
	fails(err, "is not kept")
	_, err = m.Value(nil)
	fails(err, "not part of the graph")
	if v := check[gorgonia.Value](t)(m.Value(z)); v.Data().([]float32)[5] != 1 {
		t.Errorf("exp(0+0) = %v", v)
	}

	if err := m.Close(); err != nil {
		t.Fatal(err)
	}

	if err := m.Close(); err != nil {
		t.Fatal(err)
	}

	fails(m.RunAll(), "is closed")
}

// TestPlanExceedsMemory checks that a plan of 64 TiB is an error, instead of terminating the program.
func TestPlanExceedsMemory(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("the size of the memory is known only on Linux")
	}

	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(1<<22, 1), gorgonia.WithName("x"))
	w := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(1, 1<<22), gorgonia.WithName("w"))
	check[*gorgonia.Node](t)(gorgonia.Sum(check[*gorgonia.Node](t)(gorgonia.Mul(x, w))))
	if _, err := cpuops.NewMachine(g); err == nil || !strings.Contains(err.Error(),
		"take 65536.0 GiB, but this computer has") {
		t.Errorf("got %v", err)
	}
}

// TestErrorNamesLayer checks that the error of a failed run names the layer of the model.
func TestErrorNamesLayer(t *testing.T) {
	g := gorgonia.NewGraph()
	ids := gorgonia.NewVector(g, tensor.Int, gorgonia.WithShape(2), gorgonia.WithName("ids"),
		gorgonia.WithValue(tensor.New(tensor.WithShape(2), tensor.WithBacking([]int{1, 9}))))
	table := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(5, 3),
		gorgonia.WithName("model.layers.2.table.weight"),
		gorgonia.WithInit(gorgonia.Zeroes()))
	if _, err := op.Embedding(ids, table); err != nil {
		t.Fatal(err)
	}

	m, err := cpuops.NewMachine(g, cpuops.WithParams(table))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()

	if err := m.RunAll(); err == nil || !strings.Contains(err.Error(), " of model.layers.2: ") {
		t.Errorf("got %v, want an error that names model.layers.2", err)
	}
}
