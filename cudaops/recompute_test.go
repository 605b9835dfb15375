package cudaops

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// blockFunc is a part of a model: a function of nodes.
type blockFunc = func(in gorgonia.Nodes) (*gorgonia.Node, error)

// ways are ways to put a block into a graph. The last two compute another function than the first two.
var ways = []struct {
	name  string
	apply func(in gorgonia.Nodes, b blockFunc) (*gorgonia.Node, error)
}{
	{"plain", func(in gorgonia.Nodes, b blockFunc) (*gorgonia.Node, error) { return b(in) }},
	{"recomputed", autodiff.Recompute},
	{"plain, then Tanh", thenTanh},
	{"nested", func(in gorgonia.Nodes, b blockFunc) (*gorgonia.Node, error) {
		return autodiff.Recompute(in, func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			h, err := autodiff.Recompute(in, b)
			if err != nil {
				return nil, err
			}
			return gorgonia.Tanh(h)
		})
	}},
}

func thenTanh(in gorgonia.Nodes, b blockFunc) (*gorgonia.Node, error) {
	h, err := b(in)
	if err != nil {
		return nil, err
	}
	return gorgonia.Tanh(h)
}

// mixedBlock is x + Kasmina(tanh(norm(x)·w)) + bias, with a product whose operand is transposed, of x [rows, d], norm [d],
// w [d, d], bias [d], the slots' weights and scales.
func mixedBlock(l *state.Lattice) blockFunc {
	return func(in gorgonia.Nodes) (*gorgonia.Node, error) {
		x, norm, w, bias, weights, scales := in[0], in[1], in[2], in[3], in[4], in[5]
		h, err := op.RMSNorm(x, norm, 1e-6)
		if err != nil {
			return nil, err
		}
		t, err := gorgonia.Transpose(w)
		if err != nil {
			return nil, err
		}
		if h, err = gorgonia.Mul(h, t); err != nil {
			return nil, err
		}
		if h, err = gorgonia.Tanh(h); err != nil {
			return nil, err
		}
		if h, err = op.Kasmina(h, weights, scales, l); err != nil {
			return nil, err
		}
		if h, err = gorgonia.BroadcastAdd(h, bias, nil, []byte{0}); err != nil {
			return nil, err
		}
		return gorgonia.Add(h, x)
	}
}

// TestRecompute wants the same bits of loss, gradients and telemetry with blocks that are recomputed, and with such in such.
func TestRecompute(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testRecompute(t, device, fakeOption)
	})
	t.Run("float32", func(t *testing.T) { testRecompute(t, openGPU(t)) })
	t.Run("bfloat16", func(t *testing.T) { testRecompute(t, openGPU(t), WithPrecision(BFloat16)) })
	t.Run("scaled", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testRecompute(t, device, fakeOption, scaledGradients)
	})
}

func testRecompute(t *testing.T, device *Device, opts ...MachineOption) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	results := map[string][]string{}
	for _, way := range ways {
		results[way.name] = runBlocks(t, device, seed, way.apply, opts)
	}
	for i := 0; i < len(ways); i += 2 {
		want, got := results[ways[i].name], results[ways[i+1].name]
		for j := range want {
			if want[j] != got[j] {
				t.Errorf("%s: result %d of %d differs from that of %s\n%.999q\n%.999q", ways[i+1].name, j, len(want), ways[i].name, got[j], want[j])
				break
			}
		}
	}
}

// runBlocks takes three steps on a model of two blocks, and returns losses, gradients and the lattices' states as text.
func runBlocks(t *testing.T, device *Device, seed uint64, apply func(gorgonia.Nodes, blockFunc) (*gorgonia.Node, error),
	opts []MachineOption) (seen []string) {
	t.Helper()
	const rows, d, seeds, slots = 7, 12, 4, 5
	r := rand.New(rand.NewPCG(seed, 2))
	g := gorgonia.NewGraph()
	var params gorgonia.Nodes
	add := func(name string, s ...int) *gorgonia.Node {
		x := make([]float32, program.Size(s))
		for i := range x {
			x[i] = float32(r.NormFloat64())
		}
		n := gorgonia.NewTensor(g, tensor.Float32, len(s), gorgonia.WithName(name), gorgonia.WithShape(s...),
			gorgonia.WithValue(tensor.New(tensor.WithShape(s...), tensor.WithBacking(x))))
		params = append(params, n)
		return n
	}
	x := add("x", rows, d)
	var lattices []*state.Lattice
	for i := range 2 {
		l, err := state.NewLattice(seeds, d, state.WithoutGates())
		if err != nil {
			t.Fatal(err)
		}
		for s := range seeds - 1 {
			if err := errors.Join(l.RequestGermination(s, state.GerminationRequest{Slot: 1 + s, Kind: blueprints.Kind(s)}),
				l.Transition(s, state.Training), l.Transition(s, state.Grafting), l.SetAlpha(s, 0.25)); err != nil {
				t.Fatal(err)
			}
		}
		lattices = append(lattices, l)
		name := func(s string) string { return fmt.Sprint(s, i) }
		in := gorgonia.Nodes{x, add(name("norm"), d), add(name("w"), d, d), add(name("bias"), d),
			add(name("weights"), slots, d/seeds), add(name("scales"), slots)}
		if x, err = apply(in, mixedBlock(l)); err != nil {
			t.Fatal(err)
		}
	}
	loss, err := gorgonia.Sum(gorgonia.Must(gorgonia.HadamardProd(x, add("weighting", rows, d))))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := gorgonia.Grad(loss, params...); err != nil {
		t.Fatal(err)
	}
	machine, err := NewMachine(device, g, append(slices.Clone(opts), WithParams(params...), WithOutputs(loss), WithStrict())...)
	if err != nil {
		t.Fatal(err)
	}
	defer machine.Close()
	for range few(3, 2) {
		if err := machine.RunAll(); err != nil {
			t.Fatal(err)
		}
		for _, n := range append(gorgonia.Nodes{loss}, derivatives(params)...) {
			v, err := machine.Value(n)
			if err != nil {
				t.Fatal(err)
			}
			seen = append(seen, fmt.Sprintf("%x", flat(t, v)))
		}
		for _, l := range lattices {
			b, err := l.MarshalBinary()
			if err != nil {
				t.Fatal(err)
			}
			seen = append(seen, string(b))
		}
	}
	return seen
}

func derivatives(params gorgonia.Nodes) (all gorgonia.Nodes) {
	for _, p := range params {
		all = append(all, p.Deriv())
	}
	return all
}

// deepGraph is the training graph of a model without Kasmina layers.
func deepGraph(t *testing.T, layers, dim, seq, sequences int, opts ...llm.GraphOption) *batch {
	t.Helper()
	c := llm.Config{Vocab: 19, Dim: dim, Layers: layers, Heads: 2, KVHeads: 1, Seq: seq}.Default()
	m, err := llm.NewModel(c, tensor.Float32, 1)
	if err != nil {
		t.Fatal(err)
	}
	g, err := m.Graph(llm.ForTraining, sequences, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return &batch{Graph: g}
}

// TestRecomputeMemory wants a run of twelve recomputed blocks to need less than a quarter of the memory.
func TestRecomputeMemory(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	arena := func(opts ...llm.GraphOption) int {
		b := deepGraph(t, 12, 32, 64, 8, opts...)
		machine, err := NewMachine(device, b.G, fakeOption, WithParams(b.Params...), WithOutputs(b.Loss), WithStrict())
		if err != nil {
			t.Fatal(err)
		}
		defer machine.Close()
		return machine.runner.Program.Arena
	}
	all, recomputed := arena(), arena(llm.WithRecompute())
	t.Logf("%d KiB for a run, %d KiB with recomputed blocks", all>>10, recomputed>>10)
	if 4*recomputed > all {
		t.Errorf("recomputed blocks need %d bytes for a run, more than a quarter of %d", recomputed, all)
	}
}

// TestKeptForBackward wants a block to keep no more for its backward pass than that needs, in numbers of a token: gate and up (2F),
// q, k and v ((H + 2·KV)·Dh), the attention's result (H·Dh), both sums of the residual stream and both normalised ones (4D),
// the norms' 1/rms and the attention's logarithms (2 + H).
func TestKeptForBackward(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	const dim, heads, kv, seq = 64, 2, 1, 32
	ff := llm.Config{Vocab: 19, Dim: dim, Layers: 1, Heads: heads, KVHeads: kv, Seq: seq}.Default().FF
	arena := func(layers, sequences int) int {
		b := deepGraph(t, layers, dim, seq, sequences)
		machine, err := NewMachine(device, b.G, fakeOption, WithParams(b.Params...), WithOutputs(b.Loss), WithStrict())
		if err != nil {
			t.Fatal(err)
		}
		defer machine.Close()
		return machine.runner.Program.Arena
	}
	const few, many, short, long = 3, 9, 16, 48 // layers, sequences
	more := arena(many, long) - arena(few, long) - arena(many, short) + arena(few, short)
	got := float64(more) / float64((many-few)*(long-short)*seq)
	want := float64(4 * (2*ff + (heads+2*kv)*dim/heads + dim + 4*dim + 2 + heads))
	if !(got < 1.01*want) {
		t.Errorf("a block keeps %.1f bytes of a token, want %.1f", got, want)
	}
}

// TestRecomputeModel trains on a graph with recomputed blocks and on one without: the same bits.
func TestRecomputeModel(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testRecomputeModel(t, device, fakeOption)
	})
	t.Run("float32", func(t *testing.T) { testRecomputeModel(t, openGPU(t)) })
	t.Run("bfloat16", func(t *testing.T) { testRecomputeModel(t, openGPU(t), WithPrecision(BFloat16)) })
	t.Run("scaled", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testRecomputeModel(t, device, fakeOption, scaledGradients)
	})
}

func testRecomputeModel(t *testing.T, device *Device, opts ...MachineOption) {
	values := func(graph ...llm.GraphOption) (all [][]byte) {
		b := deepGraph(t, few(12, 1), 8, 6, 2, graph...)
		b.draw(t, 5)
		machine, err := NewMachine(device, b.G, append(slices.Clone(opts), WithParams(b.Params...), WithOutputs(b.Loss), WithStrict())...)
		if err != nil {
			t.Fatal(err)
		}
		defer machine.Close()
		for range few(3, 1) {
			if err := machine.RunAll(); err != nil {
				t.Fatal(err)
			}
		}
		for _, n := range append(gorgonia.Nodes{b.Loss}, derivatives(b.Params)...) {
			v, err := machine.Value(n)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, fmt.Appendf(nil, "%x", flat(t, v)))
		}
		return all
	}
	want, got := values(), values(llm.WithRecompute())
	for i := range want {
		if !bytes.Equal(want[i], got[i]) {
			t.Errorf("result %d of %d differs", i, len(want))
		}
	}
}

// TestRecomputeTwice wants an op that two nodes share to be computed for each.
func TestRecomputeTwice(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	g := gorgonia.NewGraph()
	var outputs gorgonia.Nodes
	for i, x := range [][]float32{{1, 2}, {3, 4}} {
		n := gorgonia.NodeFromAny(g, tensor.New(tensor.WithBacking(x)), gorgonia.WithName(fmt.Sprint("x", i)))
		y, err := autodiff.Recompute(gorgonia.Nodes{n}, func(in gorgonia.Nodes) (*gorgonia.Node, error) { return gorgonia.Square(in[0]) })
		if i > 0 {
			y, err = gorgonia.ApplyOp(outputs[0].Op(), n)
		}
		if err != nil {
			t.Fatal(err)
		}
		outputs = append(outputs, y)
	}
	machine, err := NewMachine(device, g, fakeOption, WithStrict(), WithOutputs(outputs...))
	if err != nil {
		t.Fatal(err)
	}
	defer machine.Close()
	if err := machine.RunAll(); err != nil {
		t.Fatal(err)
	}
	for i, want := range [][]float32{{1, 4}, {9, 16}} {
		v, err := machine.Value(outputs[i])
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(flat(t, v), want) {
			t.Errorf("node %d is %v, want %v", i, v, want)
		}
	}
}
