package cudaops

import (
	"errors"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/lower"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// randomGraph is a graph of random ops over matrices [8, 8], which are also two sequences of four tokens with two heads of four.
type randomGraph struct {
	g        *gorgonia.ExprGraph
	r        *rand.Rand
	matrices gorgonia.Nodes
	weights  gorgonia.Nodes // parameters [8, 8]
	norm     *gorgonia.Node
	bias     *gorgonia.Node
	slots    *gorgonia.Node // of all Kasmina layers
	scales   *gorgonia.Node
}

const randomSide = 8

// steps makes nodes until one cannot be made.
type steps struct{ err error }

func (s *steps) do(f func() (*gorgonia.Node, error)) (n *gorgonia.Node) {
	if s.err == nil {
		n, s.err = f()
	}
	return n
}

func (s *steps) apply(f func(a, b *gorgonia.Node) (*gorgonia.Node, error), a, b *gorgonia.Node) *gorgonia.Node {
	return s.do(func() (*gorgonia.Node, error) { return f(a, b) })
}

// some is a matrix, more often one of the latest.
func (b *randomGraph) some() *gorgonia.Node {
	return b.matrices[max(b.r.IntN(len(b.matrices)), b.r.IntN(len(b.matrices)))]
}

func (b *randomGraph) weight() *gorgonia.Node { return b.weights[b.r.IntN(len(b.weights))] }

func (b *randomGraph) turned(x *gorgonia.Node) (*gorgonia.Node, error) {
	return op.RoPE(x, op.RoPEConfig{Seq: 4, Heads: 2, HeadDim: 4, Base: 100})
}

// attention is of projections of x, and added to it, or of any matrices.
func (b *randomGraph) attention() (*gorgonia.Node, error) {
	var s steps
	x := b.some()
	q, k, v := b.some(), b.some(), b.some()
	projected := b.r.IntN(3) > 0
	if projected {
		q, k, v = s.apply(op.Linear, x, b.weight()), s.apply(op.Linear, x, b.weight()), s.apply(op.Linear, x, b.weight())
	}
	if b.r.IntN(3) > 0 {
		q, k = s.do(func() (*gorgonia.Node, error) { return b.turned(q) }), s.do(func() (*gorgonia.Node, error) { return b.turned(k) })
	}
	y := s.do(func() (*gorgonia.Node, error) {
		return op.Attention(q, k, v, op.AttentionConfig{Seq: 4, Heads: 2, KVHeads: 2, HeadDim: 4, Causal: b.r.IntN(2) == 0})
	})
	if projected {
		y = s.apply(gorgonia.Add, s.apply(op.Linear, y, b.weight()), x)
	}
	return y, s.err
}

// halves exchanges the halves of a matrix.
func (b *randomGraph) halves() (*gorgonia.Node, error) {
	var s steps
	x := b.some()
	low := s.do(func() (*gorgonia.Node, error) { return gorgonia.Slice(x, gorgonia.S(0, 4)) })
	high := s.do(func() (*gorgonia.Node, error) { return gorgonia.Slice(x, gorgonia.S(4, 8)) })
	return s.do(func() (*gorgonia.Node, error) { return gorgonia.Concat(0, high, low) }), s.err
}

func (b *randomGraph) perceptron() (*gorgonia.Node, error) {
	y, err := op.SiLUMLP(b.some(), b.weight(), b.weight(), b.weight())
	if err == nil && b.r.IntN(2) == 0 {
		return gorgonia.Add(b.some(), y)
	}
	return y, err
}

// recomputed is a block whose results are not kept for the backward pass.
func (b *randomGraph) recomputed() (*gorgonia.Node, error) {
	return autodiff.Recompute(gorgonia.Nodes{b.some(), b.weight(), b.norm}, func(in gorgonia.Nodes) (*gorgonia.Node, error) {
		var s steps
		h := s.do(func() (*gorgonia.Node, error) { return op.RMSNorm(in[0], in[2], 0.1) })
		h = s.apply(op.Linear, h, in[1])
		return s.apply(gorgonia.Add, s.do(func() (*gorgonia.Node, error) { return gorgonia.Tanh(h) }), in[0]), s.err
	})
}

// kasmina is a layer of seeds that watch, learn and blend.
func (b *randomGraph) kasmina() (*gorgonia.Node, error) {
	l, err := state.NewLattice(4, randomSide, state.WithoutGates())
	if err != nil {
		return nil, err
	}
	for seed, path := range [][]state.Stage{{}, {state.Training}, {state.Training, state.Grafting}} {
		err = errors.Join(err, l.RequestGermination(seed, state.GerminationRequest{Slot: 1 + b.r.IntN(3), Kind: blueprints.Kind(b.r.IntN(4))}))
		for _, stage := range path {
			err = errors.Join(err, l.Transition(seed, stage))
		}
	}
	if err = errors.Join(err, l.SetAlpha(2, 0.5)); err != nil {
		return nil, err
	}
	return op.Kasmina(b.some(), b.slots, b.scales, l)
}

// grow adds a random op.
func (b *randomGraph) grow() (*gorgonia.Node, error) {
	var s steps
	x, y := b.some(), b.some()
	switch b.r.IntN(15) {
	case 0:
		return gorgonia.Add(x, y)
	case 1:
		return gorgonia.Sub(x, y)
	case 2:
		return gorgonia.HadamardProd(s.do(func() (*gorgonia.Node, error) { return gorgonia.Tanh(x) }), y)
	case 3:
		return gorgonia.Tanh(x)
	case 4:
		return op.Linear(x, b.weight())
	case 5:
		return gorgonia.Add(s.apply(op.Linear, x, b.weight()), y)
	case 6:
		return op.RMSNorm(s.apply(gorgonia.Add, x, y), b.norm, 0.1)
	case 7:
		return b.perceptron()
	case 8:
		return b.attention()
	case 9:
		turned := s.do(func() (*gorgonia.Node, error) { return gorgonia.Transpose(x, 1, 0) })
		return s.apply(gorgonia.Mul, turned, s.do(func() (*gorgonia.Node, error) { return gorgonia.SoftMax(y) })), s.err
	case 10:
		long := s.do(func() (*gorgonia.Node, error) { return gorgonia.Reshape(x, tensor.Shape{4, 16}) })
		return gorgonia.Reshape(s.apply(gorgonia.Add, long, long), tensor.Shape{randomSide, randomSide})
	case 11:
		return b.halves()
	case 12:
		return gorgonia.BroadcastAdd(x, b.bias, nil, []byte{0})
	case 13:
		return b.kasmina()
	}
	return b.recomputed()
}

// newRandomGraph returns a graph, its inputs that hold numbers, its parameters, and some of its nodes.
func newRandomGraph(r *rand.Rand) (b *randomGraph, inputs, params, outputs gorgonia.Nodes, err error) {
	const d, vocab = randomSide, 19
	b = &randomGraph{g: gorgonia.NewGraph(), r: r}
	input := func(name string, shape ...int) *gorgonia.Node {
		return gorgonia.NewTensor(b.g, tensor.Float32, len(shape), gorgonia.WithShape(shape...), gorgonia.WithName(name))
	}
	ids := make([]*gorgonia.Node, 2)
	for i, name := range []string{"ids", "targets"} {
		values := make([]int, d)
		for j := range values {
			values[j] = r.IntN(vocab)
		}
		ids[i] = gorgonia.NewVector(b.g, tensor.Int, gorgonia.WithShape(d), gorgonia.WithName(name),
			gorgonia.WithValue(tensor.New(tensor.WithShape(d), tensor.WithBacking(values))))
	}
	table, x := input("table", vocab, d), input("x", d, d)
	b.norm, b.bias = input("norm", d), input("bias", d)
	b.slots, b.scales = input("slots", 4, 2), input("scales", 4)
	b.weights = gorgonia.Nodes{input("a", d, d), input("b", d, d), input("c", d, d)}
	params = append(gorgonia.Nodes{table, b.norm, b.bias, b.slots, b.scales}, b.weights...)
	var s steps
	b.matrices = gorgonia.Nodes{x, s.apply(op.Embedding, ids[0], table)}
	for range 3 + r.IntN(20) {
		b.matrices = append(b.matrices, s.do(b.grow))
		if s.err != nil {
			return nil, nil, nil, nil, s.err
		}
	}
	last := s.do(func() (*gorgonia.Node, error) { return op.RMSNorm(b.matrices[len(b.matrices)-1], b.norm, 0.1) })
	cost := s.do(func() (*gorgonia.Node, error) { return op.LinearCrossEntropy(last, table, ids[1]) })
	if s.err != nil {
		return nil, nil, nil, nil, s.err
	}
	needed := map[*gorgonia.Node]bool{}
	var need func(n *gorgonia.Node)
	need = func(n *gorgonia.Node) {
		if !needed[n] {
			needed[n] = true
			for _, child := range opbase.Children(n) {
				need(child)
			}
		}
	}
	need(cost)
	params = slices.DeleteFunc(params, func(p *gorgonia.Node) bool { return !needed[p] })
	if _, err := gorgonia.Grad(cost, params...); err != nil {
		return nil, nil, nil, nil, err
	}
	outputs = gorgonia.Nodes{cost}
	for _, n := range b.matrices[2:] {
		if r.IntN(4) == 0 && !slices.Contains(outputs, n) {
			outputs = append(outputs, n)
		}
	}
	return b, append(gorgonia.Nodes{x, b.norm, b.bias, b.slots, b.scales, table}, b.weights...), params, append(outputs, derivatives(params)...), nil
}

// TestRandomGraphs compares random graphs, whose nodes share memory and are computed together, with the same ones of which every
// node is asked for, so that each is computed by itself and keeps its memory.
func TestRandomGraphs(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 8))
	for round := range few(100, 8) {
		device, _, fakeOption := openFake(t, fake.Config{})
		b, inputs, params, outputs, err := newRandomGraph(r)
		if err != nil {
			t.Fatal(err)
		}
		fill := func() {
			t.Helper()
			for _, n := range inputs {
				x := make([]float32, program.Size(n.Shape()))
				for i := range x {
					x[i] = 0.25 * float32(r.NormFloat64())
				}
				if err := gorgonia.Let(n, tensor.New(tensor.WithShape(n.Shape()...), tensor.WithBacking(x))); err != nil {
					t.Fatal(err)
				}
			}
		}
		fill()
		opts := []MachineOption{fakeOption, WithParams(params...)}
		if r.IntN(3) == 0 {
			opts = append(opts, scaledGradients)
		}
		// Also where the host computes some.
		rules := []string{"+ *=host", "A × B=host", "tanh*=host", "*Reshape*=host", "Repeat*=host", "T[[]*=host", "Concat*=host", "Softmax*=host"}
		host := WithWays(rules[r.IntN(len(rules)):][:r.IntN(2)]...)
		m, err := NewMachine(device, b.g, append(opts, WithOutputs(outputs...), host, WithLogger(slog.New(slog.DiscardHandler)))...)
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		every, err := NewMachine(device, b.g, append(opts, WithOutputs(results(b.g)...))...)
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		for run := range 3 { // the second is captured, the third replayed
			fill()
			if err := errors.Join(m.Upload(params...), every.Upload(params...), m.RunAll(), every.RunAll()); err != nil {
				t.Fatalf("round %d, run %d: %v", round, run, err)
			}
			for _, n := range outputs {
				got, err := m.Value(n)
				want, wantErr := every.Value(n)
				if err := errors.Join(err, wantErr); err != nil {
					t.Fatalf("round %d, run %d: %v", round, run, err)
				}
				x, y := flat(t, got), flat(t, want)
				largest := max(slices.Max(y), -slices.Min(y))
				for i := range x { // long chains make much of rounding, and some gradients are nothing but what it leaves of zero
					if math.Abs(float64(x[i]-y[i])) > 0.05*float64(largest)+1e-3 || (x[i] != x[i]) != (y[i] != y[i]) {
						t.Fatalf("round %d, run %d: element %d of %s is %v, want %v", round, run, i, lower.Describe(n), x[i], y[i])
					}
				}
			}
		}
		if err := errors.Join(m.Close(), every.Close()); err != nil {
			t.Fatal(err)
		}
	}
}
