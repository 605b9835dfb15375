package autodiff_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// builder builds a part of a model from nodes.
type builder func(in gorgonia.Nodes) (*gorgonia.Node, error)

// plain builds b in the graph of its inputs.
func plain(in gorgonia.Nodes, b builder) (*gorgonia.Node, error) { return b(in) }

func recomputed(in gorgonia.Nodes, b builder) (*gorgonia.Node, error) {
	return autodiff.Recompute(in, b)
}

// nested uses Recompute within Recompute.
func nested(in gorgonia.Nodes, b builder) (*gorgonia.Node, error) {
	return autodiff.Recompute(in, func(in gorgonia.Nodes) (*gorgonia.Node, error) {
		h, err := autodiff.Recompute(in, b)
		if err != nil {
			return nil, err
		}
		return gorgonia.Tanh(h)
	})
}

// thenTanh is the model of nested without recomputation.
func thenTanh(in gorgonia.Nodes, b builder) (*gorgonia.Node, error) {
	h, err := b(in)
	if err != nil {
		return nil, err
	}
	return gorgonia.Tanh(h)
}

// block uses each of x, norm, gate, up, down, table and ids, some repeatedly, through ops of this
// module and stock ops.
func block(in gorgonia.Nodes) (*gorgonia.Node, error) {
	x, norm, gate, up, down, table, ids := in[0], in[1], in[2], in[3], in[4], in[5], in[6]
	e, err := op.Embedding(ids, table)
	if err != nil {
		return nil, err
	}

	h, err := op.RMSNorm(x, norm, 1e-6)
	if err != nil {
		return nil, err
	}
	if h, err = op.SiLUMLP(h, gate, up, down); err != nil {
		return nil, err
	}
	if h, err = gorgonia.Add(h, x); err != nil {
		return nil, err
	}

	// Three gradients of one node are added here, and the sum depends on their order.
	a, b, c := must(gorgonia.Tanh(h)), must(gorgonia.Sigmoid(h)), must(gorgonia.HadamardProd(h, x))
	if h, err = gorgonia.Add(must(gorgonia.Add(a, c)), b); err != nil {
		return nil, err
	}
	return gorgonia.HadamardProd(h, e)
}

// run builds the model with apply building each block, takes two steps, and returns all losses and
// gradients.
func run(t *testing.T, seed uint64, dt tensor.Dtype,
	apply func(gorgonia.Nodes, builder) (*gorgonia.Node, error)) []named {
	t.Helper()
	const rows, d, f, v = 5, 6, 9, 4
	r := rand.New(rand.NewPCG(seed, 1))
	g := gorgonia.NewGraph()
	var params gorgonia.Nodes
	add := func(name string, shape ...int) *gorgonia.Node {
		wide := normals(r, opbase.Size(shape))
		for i := range wide {
			wide[i] *= 0.5
		}

		var value any = wide
		if dt == tensor.Float32 {
			narrow := make([]float32, len(wide))
			for i := range narrow {
				narrow[i] = float32(wide[i])
			}
			value = narrow
		}

		n := gorgonia.NewTensor(g, dt, len(shape), gorgonia.WithName(name),
			gorgonia.WithShape(shape...),
			gorgonia.WithValue(tensor.New(tensor.WithShape(shape...), tensor.WithBacking(value))))
		params = append(params, n)
		return n
	}

	ids := gorgonia.NewVector(g, tensor.Int, gorgonia.WithName("ids"), gorgonia.WithShape(rows),
		gorgonia.WithValue(tensor.New(tensor.WithBacking([]int{3, 0, 1, 3, 2}))))
	x := add("x", rows, d)
	for i := range 3 {
		name := func(s string) string { return fmt.Sprintf("%s%d", s, i) }
		in := gorgonia.Nodes{x, add(name("norm"), d), add(name("gate"), f, d),
			add(name("up"), f, d), add(name("down"), d, f), add(name("table"), v, d), ids}
		x = must(apply(in, block))
	}

	loss := must(gorgonia.Sum(must(gorgonia.HadamardProd(x, add("weighting", rows, d)))))
	if _, err := gorgonia.Grad(loss, params...); err != nil {
		t.Fatal(err)
	}

	vm := gorgonia.NewTapeMachine(g, gorgonia.BindDualValues(params...))
	defer vm.Close()
	solver := gorgonia.NewVanillaSolver(gorgonia.WithLearnRate(0.01))
	var seen []named
	for range 2 {
		vm.Reset()
		if err := vm.RunAll(); err != nil {
			t.Fatal(err)
		}

		seen = append(seen, named{"loss", loss.Value().Data()})
		for _, p := range params {
			grad, err := p.Grad()
			if err != nil {
				t.Fatal(err)
			}
			copied, err := gorgonia.CloneValue(grad)
			if err != nil {
				t.Fatal(err)
			}
			seen = append(seen, named{p.Name(), copied.Data()})
		}

		if err := solver.Step(gorgonia.NodesToValueGrads(params)); err != nil {
			t.Fatal(err)
		}
	}

	return seen
}

// TestRecomputeOnTheLispMachine checks that Gorgonia's LispMachine, which differentiates through
// recomputed graphs, yields the gradients of the tape machine.
func TestRecomputeOnTheLispMachine(t *testing.T) {
	seed := freshRand(t).Uint64()
	var grads [2][][]float64
	for i, lisp := range []bool{false, true} {
		r := rand.New(rand.NewPCG(seed, 1))
		g := gorgonia.NewGraph()
		input := func(name string, shape ...int) *gorgonia.Node {
			value := tensor.New(tensor.WithShape(shape...),
				tensor.WithBacking(normals(r, opbase.Size(shape))))
			return gorgonia.NodeFromAny(g, value, gorgonia.WithName(name))
		}
		ids := gorgonia.NodeFromAny(g, tensor.New(tensor.WithBacking([]int{1, 0, 1})),
			gorgonia.WithName("ids"))
		params := gorgonia.Nodes{input("x", 3, 4), input("norm", 4), input("gate", 5, 4),
			input("up", 5, 4), input("down", 4, 5), input("table", 2, 4)}
		y := must(autodiff.Recompute(append(slices.Clone(params), ids), block))
		loss := must(gorgonia.Sum(must(gorgonia.HadamardProd(y, input("weighting", 3, 4)))))
		var vm gorgonia.VM
		if lisp {
			vm = gorgonia.NewLispMachine(g)
		} else {
			_, err := gorgonia.Grad(loss, params...)
			require.NoError(t, err)
			vm = gorgonia.NewTapeMachine(g, gorgonia.BindDualValues(params...))
		}

		require.NoError(t, vm.RunAll())
		require.NoError(t, vm.Close())
		for _, p := range params {
			grad, err := p.Grad()
			require.NoError(t, err)
			grads[i] = append(grads[i], slices.Clone(grad.Data().([]float64)))
		}
	}

	require.Equal(t, grads[0], grads[1])
}

type named struct {
	name string
	data any
}

func TestRecomputeGivesTheSameBits(t *testing.T) {
	seed := freshRand(t).Uint64()
	for _, dt := range []tensor.Dtype{tensor.Float64, tensor.Float32} {
		compare := func(how string, want, got []named) {
			for i, w := range want {
				if !reflect.DeepEqual(w, got[i]) {
					t.Errorf("%v, %s, model seed %d: %s (%d of %d) differs\n%v\n%v", dt, how, seed,
						w.name, i, len(want), w.data, got[i].data)
					return
				}
			}
		}
		compare("recomputed", run(t, seed, dt, plain), run(t, seed, dt, recomputed))
		compare("recomputed within the recomputed", run(t, seed, dt, thenTanh),
			run(t, seed, dt, nested))
	}
}

// probeOp returns its input unchanged, and its gradient too, and measures the heap when it runs.
type probeOp struct {
	opbase.Base
	heap uint64
}

func probe(x *gorgonia.Node) (*gorgonia.Node, *probeOp) {
	o := &probeOp{}
	opbase.Init(&o.Base, o, "probe", fmt.Sprintf("%p", o), gorgonia.Nodes{x},
		x.Dtype(), x.Shape(), nil,
		func(o *probeOp, out []float64, in opbase.Args) error {
			copy(out, opbase.Slice[float64](in, 0))
			var m runtime.MemStats
			runtime.GC()
			runtime.GC() // pools free their memory in the second collection
			runtime.ReadMemStats(&m)
			o.heap = m.HeapAlloc
			return nil
		})
	return must(gorgonia.ApplyOp(o, x)), o
}

func (o *probeOp) DiffWRT(int) []bool { return []bool{true} }

func (o *probeOp) SymDiff(_ gorgonia.Nodes, _, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	return gorgonia.Nodes{grad}, nil
}

// TestRecomputeSavesMemory checks that a block of four wide layers retains only its result between
// the forward and the backward pass.
func TestRecomputeSavesMemory(t *testing.T) {
	const rows, d, wide, blocks = 64, 8, 1024, 4
	held := func(apply func(gorgonia.Nodes, builder) (*gorgonia.Node, error)) uint64 {
		r := freshRand(t)
		g := gorgonia.NewGraph()
		x := variable(g, r, "x", rows, d)
		up, down := variable(g, r, "up", d, wide), variable(g, r, "down", wide, d)
		h := x
		for range blocks {
			h = must(apply(gorgonia.Nodes{h, up, down},
				func(in gorgonia.Nodes) (*gorgonia.Node, error) {
					h, err := gorgonia.Mul(in[0], in[1])
					for range 3 {
						if err == nil {
							h, err = gorgonia.Tanh(h)
						}
					}
					if err != nil {
						return nil, err
					}
					return gorgonia.Mul(h, in[2])
				}))
		}

		h, p := probe(h)
		if _, err := gorgonia.Grad(must(gorgonia.Sum(h)), x, up, down); err != nil {
			t.Fatal(err)
		}

		vm := gorgonia.NewTapeMachine(g)
		defer vm.Close()
		var before runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&before)
		if err := vm.RunAll(); err != nil {
			t.Fatal(err)
		}
		return p.heap - min(p.heap, before.HeapAlloc)
	}

	const layer = rows * wide * 8
	without, with := held(plain), held(recomputed)
	t.Logf("held between forward and backward pass: %d KiB without recomputation, %d KiB with",
		without>>10, with>>10)
	if without < blocks*3*layer || with > layer {
		t.Errorf("a layer is %d KiB: want at least %d KiB without and at most %d KiB with",
			layer>>10, blocks*3*layer>>10, layer>>10)
	}
}

// tallyOp doubles its input and counts the runs of the op and of its gradient. Its replay counts
// gradients only.
type tallyOp struct {
	opbase.Base
	forward, backward *int
	replay            bool
}

func newTally(x *gorgonia.Node, like *tallyOp, replay bool) *tallyOp {
	o := &tallyOp{forward: like.forward, backward: like.backward, replay: replay}
	opbase.Init(&o.Base, o, "tally", fmt.Sprintf("%p", o.forward), gorgonia.Nodes{x},
		x.Dtype(), x.Shape(), nil,
		func(o *tallyOp, out []float64, in opbase.Args) error {
			for i, v := range opbase.Slice[float64](in, 0) {
				out[i] = 2 * v
			}
			if !o.replay {
				*o.forward++
			}
			return nil
		})
	return o
}

func (o *tallyOp) Replay() gorgonia.Op {
	r := *o
	r.replay = true
	x := gorgonia.NewVector(gorgonia.NewGraph(), tensor.Float64,
		gorgonia.WithShape(o.InputShape(0)...))
	return newTally(x, &r, true)
}

func (o *tallyOp) DiffWRT(int) []bool { return []bool{true} }

func (o *tallyOp) SymDiff(_ gorgonia.Nodes, _, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	n, err := gorgonia.ApplyOp(newTally(grad, &tallyOp{forward: o.backward}, false), grad)
	return gorgonia.Nodes{n}, err
}

func TestRecomputeCountsOnce(t *testing.T) {
	for name, apply := range map[string]func(gorgonia.Nodes, builder) (*gorgonia.Node, error){"once": recomputed, "nested": nested} {
		var forward, backward int
		r := freshRand(t)
		g := gorgonia.NewGraph()
		x := variable(g, r, "x", 4)
		y := must(apply(gorgonia.Nodes{x}, func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return gorgonia.ApplyOp(newTally(in[0],
				&tallyOp{forward: &forward, backward: &backward}, false), in[0])
		}))
		if _, err := gorgonia.Grad(must(gorgonia.Sum(y)), x); err != nil {
			t.Fatal(err)
		}

		vm := gorgonia.NewTapeMachine(g)
		defer vm.Close()
		for run := 1; run <= 3; run++ {
			vm.Reset()
			if err := vm.RunAll(); err != nil {
				t.Fatal(err)
			}
			if forward != run || backward != run {
				t.Errorf("%s: after %d runs, forward counted %d and backward %d", name,
					run, forward, backward)
			}
		}
	}
}

func TestRecomputePassesTheGradientCheck(t *testing.T) {
	r := freshRand(t)
	g := gorgonia.NewGraph()
	x, w, unused := variable(g, r, "x", 3, 4), variable(g, r, "w", 4, 2),
		variable(g, r, "unused", 7)
	s := gorgonia.NewScalar(g, tensor.Float64, gorgonia.WithName("s"), gorgonia.WithValue(0.7))
	cost := must(autodiff.Recompute(gorgonia.Nodes{unused, x, w, s},
		func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			h := must(gorgonia.Mul(in[1], in[2]))
			h = must(gorgonia.Add(must(gorgonia.Tanh(h)), must(gorgonia.Mul(h, in[3]))))
			return gorgonia.Sum(must(gorgonia.Mul(must(gorgonia.Square(h)),
				gorgonia.NewConstant(0.5))))
		}))

	report, err := autodiff.CheckGradients(cost, gorgonia.Nodes{x, w, s})
	if err != nil {
		t.Fatal(err)
	}
	if !report.OK(1e-6) {
		t.Errorf("gradients of a recomputed scalar are wrong:\n%v", report)
	}
	if _, err := autodiff.CheckGradients(cost, gorgonia.Nodes{unused}); err == nil {
		t.Error("an input on which the result does not depend has a gradient")
	}
}

func TestRecomputeRefuses(t *testing.T) {
	r := freshRand(t)
	g := gorgonia.NewGraph()
	x, other := variable(g, r, "x", 4), variable(gorgonia.NewGraph(), r, "other", 4)
	x32 := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(4), gorgonia.WithName("x32"))
	tanh := func(in gorgonia.Nodes) (*gorgonia.Node, error) { return gorgonia.Tanh(in[0]) }
	failure := errors.New("no such block")
	for _, c := range []struct {
		name   string
		inputs gorgonia.Nodes
		build  builder
		want   string
	}{
		{"no inputs", nil, tanh, "got 0 inputs"},
		{"no function", gorgonia.Nodes{x}, nil, "build function: false"},
		{"nil input", gorgonia.Nodes{x, nil}, tanh, "input 1 is nil or in another graph"},
		{"two graphs", gorgonia.Nodes{x, other}, tanh, "input 1 is nil or in another graph"},
		{"build's own error", gorgonia.Nodes{x}, func(gorgonia.Nodes) (*gorgonia.Node, error) {
			return nil, failure
		}, failure.Error()},
		{"no result", gorgonia.Nodes{x}, func(gorgonia.Nodes) (*gorgonia.Node, error) {
			return nil, nil
		}, "result is nil"},
		{"outer node", gorgonia.Nodes{x}, func(gorgonia.Nodes) (*gorgonia.Node, error) {
			return gorgonia.Tanh(x)
		}, "another graph"},
		{"nothing built", gorgonia.Nodes{x}, func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return in[0], nil
		}, "nothing to compute"},
		{"input of its own", gorgonia.Nodes{x}, func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return gorgonia.Add(in[0], gorgonia.NewVector(in[0].Graph(), tensor.Float64,
				gorgonia.WithShape(4), gorgonia.WithName("own")))
		}, `"own"`},
		{"random", gorgonia.Nodes{x}, func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return gorgonia.Dropout(in[0], 0.5)
		}, "random"},
		{"noise", gorgonia.Nodes{x}, func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return gorgonia.Add(in[0], gorgonia.GaussianRandomNode(in[0].Graph(),
				tensor.Float64, 0, 1, 4))
		}, "random"},
		{"result of bools", gorgonia.Nodes{x}, func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return gorgonia.Gt(in[0], in[0], false)
		}, "want float32 or float64"},
	} {
		_, err := autodiff.Recompute(c.inputs, c.build)
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(err.Error(),
			"autodiff.Recompute: ") {
			t.Errorf("%s: error %v, want one with %q", c.name, err, c.want)
		}
	}

	if _, err := autodiff.Recompute(gorgonia.Nodes{x, x32}, tanh); err != nil {
		t.Errorf("an unused input of another type: %v", err)
	}

	// An error of a run of the inner graph must be the outer machine's error.
	empty := must(autodiff.Recompute(gorgonia.Nodes{x32}, tanh))
	vm := gorgonia.NewTapeMachine(empty.Graph())
	defer vm.Close()
	if err := vm.RunAll(); err == nil {
		t.Error("running without a value succeeds")
	}
}

// TestRecomputeKasmina checks that a Kasmina layer in a recomputed block records the same figures in
// its lattice as a layer that is computed once, and uses the same limits. Its telemetry determines
// how the strict mode and adaptive clipping act in the next step.
func TestRecomputeKasmina(t *testing.T) {
	seed := freshRand(t).Uint64()
	train := func(apply func(gorgonia.Nodes, builder) (*gorgonia.Node, error)) (grads []named,
		lattice []byte) {
		const rows, seeds, chunk, slots = 6, 3, 4, 3
		r := rand.New(rand.NewPCG(seed, 2))
		l, err := state.NewLattice(seeds, seeds*chunk, state.WithoutGates())
		if err != nil {
			t.Fatal(err)
		}

		for s := range seeds {
			request := state.GerminationRequest{Slot: 1 + s%2, Kind: blueprints.Kind(s)}
			if err := errors.Join(l.RequestGermination(s, request), l.Transition(s, state.Training),
				l.Transition(s, state.Grafting),
				l.SetAlpha(s, 0.25)); err != nil {
				t.Fatal(err)
			}
		}

		g := gorgonia.NewGraph()
		params := gorgonia.Nodes{variable(g, r, "x", rows, seeds*chunk),
			variable(g, r, "weights", slots, chunk), variable(g, r, "scales", slots)}
		y := must(apply(params, func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			x := must(gorgonia.Tanh(in[0]))
			return op.Kasmina(x, in[1], in[2], l, op.WithStability(op.Strict),
				op.WithAdaptiveGradClip(0.5))
		}))
		if _, err := gorgonia.Grad(weighted(must(gorgonia.Square(y)), r), params...); err != nil {
			t.Fatal(err)
		}

		vm := gorgonia.NewTapeMachine(g, gorgonia.BindDualValues(params...))
		defer vm.Close()
		solver := gorgonia.NewVanillaSolver(gorgonia.WithLearnRate(0.1))
		for range 4 {
			vm.Reset()
			if err := vm.RunAll(); err != nil {
				t.Fatal(err)
			}

			for _, p := range params {
				grad, err := p.Grad()
				if err != nil {
					t.Fatal(err)
				}
				copied, err := gorgonia.CloneValue(grad)
				if err != nil {
					t.Fatal(err)
				}
				grads = append(grads, named{p.Name(), copied.Data()})
			}

			if err := solver.Step(gorgonia.NodesToValueGrads(params)); err != nil {
				t.Fatal(err)
			}
			if _, err := l.StepEpoch(state.Metrics{Loss: 1}); err != nil {
				t.Fatal(err)
			}
		}

		lattice, err = l.MarshalBinary()
		if err != nil {
			t.Fatal(err)
		}
		return grads, lattice
	}

	wantGrads, wantLattice := train(plain)
	for name, apply := range map[string]func(gorgonia.Nodes, builder) (*gorgonia.Node, error){"once": recomputed, "nested": nestedOnce} {
		grads, lattice := train(apply)
		if !reflect.DeepEqual(wantGrads, grads) {
			t.Errorf("%s, model seed %d: recomputed gradients differ", name, seed)
		}
		if !bytes.Equal(wantLattice, lattice) {
			t.Errorf("%s, model seed %d: the lattice differs", name, seed)
		}
	}
}

// nestedOnce recomputes a recomputed graph.
func nestedOnce(in gorgonia.Nodes, b builder) (*gorgonia.Node, error) {
	return autodiff.Recompute(in, func(in gorgonia.Nodes) (*gorgonia.Node, error) {
		return autodiff.Recompute(in, b)
	})
}
