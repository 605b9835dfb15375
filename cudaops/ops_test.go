package cudaops

import (
	"bytes"
	"errors"
	"fmt"
	"hash"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/chewxy/hm"
	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/half"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/opcase/optest"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// TestOps runs the suite of op cases, with a kernel for every op and its gradient.
func TestOps(t *testing.T) {
	// GPUs round the operands of products and the values stored between kernels; bfloat16 has a relative
	// error of up to 1/256.
	onEach(t, testOps, map[string]float64{"fake": 1e-6, "float32": 1e-5, "float16": 1e-2,
		"bfloat16": 5e-2})
}

func testOps(t *testing.T, device *Device, tolerance float64, opts ...MachineOption) {
	optest.Run(t, optest.Setup{Dtype: tensor.Float32, Forward: tolerance,
		Backward: 10 * tolerance, Share: few(1, 4),
		Open: func(g *gorgonia.ExprGraph, params, outputs gorgonia.Nodes) (optest.Machine, error) {
			m, err := NewMachine(device, g, append(slices.Clone(opts), WithStrict(),
				WithParams(params...), WithOutputs(outputs...))...)
			if err != nil {
				return nil, err
			}

			return m, shrinkLossScale(m)
		}})
}

// shrinkLossScale reduces the loss scale of a machine in float16. Gradients can overflow at the initial
// scale, and only updates would reduce it.
func shrinkLossScale(m *Machine) error {
	if m.LossScale().Scale <= 1 {
		return nil
	}
	return m.SetLossScale(LossScale{Scale: 1 << 10})
}

// tasksOf counts a machine's tasks by op.
func tasksOf(m *Machine) map[string]int {
	count := map[string]int{}
	for _, t := range m.runner.Program.Calls {
		name, _, _ := strings.Cut(t.Op, "{")
		count[name]++
	}
	return count
}

// TestModelIsFused counts the tasks of a model of twelve blocks. No separate sum remains, and queries,
// keys and values are one product. A graph that uses the parameters of another machine does not copy
// them.
func TestModelIsFused(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	c := llm.Config{Vocab: 19, Dim: 16, Layers: 12, Heads: 2, KVHeads: 1, Seq: 6}.Default()
	m, err := llm.NewModel(c, tensor.Float32, 1)
	require.NoError(t, err)
	forward := map[string]int{"Embedding": 1, "RMSNorm": 25, "Linear": 24, "RoPE": 12,
		"Attention": 12, "SiLUMLP": 36, "LinearCrossEntropy": 4}
	both := maps.Clone(forward)
	both["LinearCrossEntropy"] += 2
	for name, n := range map[string]int{"Embedding": 1, "RMSNorm": 25, "Linear": 48,
		"Attention": 12, "SiLUMLP": 60} {
		both[name+"Grad"] = n
	}

	check := func(kind llm.GraphKind, want map[string]int, opts ...MachineOption) *Machine {
		t.Helper()
		g, err := m.Graph(kind, 2)
		require.NoError(t, err)
		machine, err := NewMachine(device, g.G, append(opts, WithOutputs(g.Loss),
			WithStrict(), WithParams(g.Params...))...)
		require.NoError(t, err)
		t.Cleanup(func() {
			require.NoError(t, machine.Close())
		})
		require.Equal(t, want, tasksOf(machine), kind)
		return machine
	}

	training := check(llm.ForTraining, both)
	check(llm.ForLoss, forward)
	check(llm.ForLoss, forward, WithParamsOf(training))
}

// fuseCase is a small graph of ops that can be fused, with an optional obstacle.
type fuseCase struct {
	name string
	// keep names the values to keep: a node, or with the prefix "d:" a part of the gradients computed for
	// a node.
	keep     []string
	keyBase  float64  // base of the keys' rotation; 0 for the same base as the queries
	alsoUsed []string // nodes that the loss also reads
	starts   []int    // starts of documents, for attention within documents; nil for plain attention
	window   int      // window of attention; 0 for none
	gelu     bool     // gelu selects GELU for the perceptron's gate
	biases   bool     // biases of queries, keys and values
	traits   bool     // biases, norms of heads, norms with weight 1 + w, and a norm after attention
	want     map[string]int
}

// fuseCases lists the cases. Its counts in want replace the counts of the first case.
var fuseCases = []fuseCase{
	{name: "all", want: map[string]int{"Embedding": 1, "RMSNorm": 3, "Linear": 2, "RoPE": 1,
		"Attention": 1, "AttentionGrad": 1,
		"LinearGrad": 4, "RMSNormGrad": 3, "SiLUMLP": 3, "EmbeddingGrad": 1,
		"LinearCrossEntropy": 6, "+ false": 0}},
	{name: "sum kept", keep: []string{"s"}},
	{name: "norm kept", keep: []string{"y"}},
	{name: "linear layer kept", keep: []string{"o"}},
	{name: "perceptron kept", keep: []string{"m"}},
	{name: "perceptron read", alsoUsed: []string{"m"}, want: map[string]int{"+ false": 2}},
	// the sum of three gradients; their order prevents folding
	{name: "sum read", alsoUsed: []string{"s"}, want: map[string]int{"+ false": 3}},
	{name: "queries kept", keep: []string{"q"}, want: map[string]int{"Linear": 4,
		"RoPE": 4, "LinearGrad": 8}},
	{name: "values read", alsoUsed: []string{"v"}, want: map[string]int{"Linear": 4, "RoPE": 4,
		"LinearGrad": 8, "+ false": 2}},
	{name: "queries before they are turned, kept", keep: []string{"q0"},
		want: map[string]int{"Linear": 4, "RoPE": 4, "LinearGrad": 8}},
	{name: "keys turned otherwise", keyBase: 500, want: map[string]int{"Linear": 4,
		"RoPE": 4, "LinearGrad": 8}},
	{name: "biases", biases: true, want: map[string]int{"Linear": 3, "BiasGrad": 1}},
	{name: "biases, keys turned otherwise", biases: true, keyBase: 500,
		want: map[string]int{"Linear": 4, "RoPE": 4, "LinearGrad": 8,
			"Bias": 3, "BiasGrad": 3}},
	{name: "gradient of values kept", keep: []string{"d:v"},
		want: map[string]int{"RoPE": 3, "LinearGrad": 8}},
	{name: "gradient of the norm's input kept", keep: []string{"d:h"},
		want: map[string]int{"+ false": 1}},
	{name: "gradient of the head kept", keep: []string{"d:loss"},
		want: map[string]int{"+ false": 1}},
}

const fuseDim, fuseSeq, fuseRows, fuseVocab = 16, 3, 6, 11

// graph returns the graph, its parameters, and the nodes to keep, including the loss.
func (f fuseCase) graph(t *testing.T, seed uint64) (*gorgonia.ExprGraph,
	gorgonia.Nodes, gorgonia.Nodes) {
	t.Helper()
	r, g := rand.New(rand.NewPCG(seed, 8)), gorgonia.NewGraph()
	var params gorgonia.Nodes
	param := func(name string, s ...int) *gorgonia.Node {
		params = append(params, randomNode(g, r, 0.3, name, s...))
		return params[len(params)-1]
	}
	ints := func(name string) *gorgonia.Node {
		x := make([]int, fuseRows)
		x[0] = r.IntN(fuseVocab)
		// No two adjacent ids are the same: if a query sees only keys of the same token, queries and keys
		// have no gradient.
		for i := range x[1:] {
			x[i+1] = (x[i] + 1 + r.IntN(fuseVocab-1)) % fuseVocab
		}
		return intNode(g, name, x)
	}

	must := gorgonia.Must
	named := map[string]*gorgonia.Node{}
	table := param("table", fuseVocab, fuseDim)
	x := must(op.Embedding(ints("ids"), table))
	norm := func(x *gorgonia.Node, name string, d int, opts ...op.RMSNormOption) *gorgonia.Node {
		if f.traits {
			opts = append(opts, op.WeightPlusOne())
		}
		return must(op.RMSNorm(x, param(name, d), 1e-5, opts...))
	}

	project := func(h *gorgonia.Node, name string, heads int) *gorgonia.Node {
		y := must(op.Linear(h, param("w"+name, 4*heads, fuseDim)))
		if f.traits || f.biases {
			y = must(op.Bias(y, param("b"+name, 4*heads)))
		}
		if f.traits && name != "v" {
			y = norm(y, "norm of "+name, 4, op.EachHead())
		}
		return y
	}

	h := norm(x, "norm1", fuseDim)
	rope := op.RoPEConfig{Seq: fuseSeq, Heads: 4, HeadDim: 4, Base: 100}
	named["q0"] = project(h, "q", 4)
	named["q"] = must(op.RoPE(named["q0"], rope))
	rope.Heads = 2
	if f.keyBase != 0 {
		rope.Base = f.keyBase
	}

	named["k"] = must(op.RoPE(project(h, "k", 2), rope))
	named["v"] = project(h, "v", 2)
	c := op.AttentionConfig{Seq: fuseSeq, Heads: 4, KVHeads: 2, HeadDim: 4,
		Causal: true, Window: f.window}
	attend := func() (*gorgonia.Node, error) {
		return op.Attention(named["q"], named["k"], named["v"], c)
	}
	if f.starts != nil {
		starts := intNode(g, "starts", f.starts)
		attend = func() (*gorgonia.Node, error) {
			return op.DocumentAttention(named["q"], named["k"], named["v"], starts, c)
		}
	}

	a := must(attend())
	named["o"] = must(op.Linear(a, param("wo", fuseDim, 16)))
	if f.traits {
		named["o"] = norm(named["o"], "norm4", fuseDim)
	}

	named["s"] = must(gorgonia.Add(x, named["o"]))
	mlp := op.SiLUMLP
	if f.gelu {
		mlp = op.GELUMLP
	}

	m := must(mlp(norm(named["s"], "norm3", fuseDim), param("gate", 7, fuseDim),
		param("up", 7, fuseDim),
		param("down", fuseDim, 7)))
	named["m"], named["s2"] = m, must(gorgonia.Add(named["s"], m))
	named["y"] = norm(named["s2"], "norm2", fuseDim)
	named["loss"] = must(op.LinearCrossEntropy(named["y"], table, ints("targets")))
	cost := named["loss"]
	for _, name := range f.alsoUsed {
		n := named[name]
		cost = must(gorgonia.Add(cost,
			must(gorgonia.Sum(must(gorgonia.HadamardProd(n, param("with "+name, n.Shape()...)))))))
	}

	require.NoError(t, errOf(gorgonia.Grad(cost, params...)))
	keep := gorgonia.Nodes{cost}
	for _, name := range f.keep {
		gradientOf, isGradient := strings.CutPrefix(name, "d:")
		if !isGradient {
			keep = append(keep, named[name])
			continue
		}
		keep = append(keep, gradientPart(t, g, gradientOf))
	}

	return g, params, keep
}

// gradientPart returns the gradient of attention's values (v), of the first norm's input (h), or of the
// output layer's table (loss).
func gradientPart(t *testing.T, g *gorgonia.ExprGraph, of string) *gorgonia.Node {
	t.Helper()
	for _, n := range g.AllNodes() {
		part, ok := n.Op().(*opbase.PartOp)
		if !ok {
			continue
		}
		packed := graph.Children(n)[0]
		switch packed.Op().(type) {
		case *op.AttentionGradOp:
			ok = of == "v" && part.Offset == fuseRows*(16+8)
		case *op.RMSNormGradOp:
			ok = of == "h" && part.Offset == 0 && graph.Children(packed)[1].Name() == "norm1"
		case *op.LinearCrossEntropyGradOp:
			ok = of == "loss" && part.Offset > 0
		default:
			ok = false
		}
		if ok {
			return n
		}
	}

	t.Fatalf("the graph has no gradient of %s", of)
	return nil
}

// TestFuse counts the tasks of small graphs and compares the values with a machine that keeps all values
// and therefore cannot fuse ops.
func TestFuse(t *testing.T) {
	onEach(t, testFuse, map[string]float64{"fake": 1e-5, "float32": 1e-4, "bfloat16": 5e-2})
}

func testFuse(t *testing.T, device *Device, tolerance float64, opts ...MachineOption) {
	seed := randomSeed(t)
	cases := fuseCases
	if tolerance > 1e-5 { // on a GPU
		cases = cases[:few(len(cases), len(cases)/4)]
	}

	for _, f := range cases {
		t.Run(f.name, func(t *testing.T) {
			g, params, keep := f.graph(t, seed)
			machine := newFuseMachine(t, device, g, params, keep, opts)
			got := tasksOf(machine)
			for op, n := range fuseCases[0].want {
				if len(f.alsoUsed) > 0 && machine.config.Activation != gpu.Float32 {
					break // products with float32 parameters are float32, and need casts
				}
				if other, ok := f.want[op]; ok {
					n = other
				}
				require.Equal(t, n, got[op])
			}
			same, sameParams, sameKeep := f.graph(t, seed)
			unfused := newFuseMachine(t, device, same, sameParams, results(same), opts)
			require.NoError(t, unfused.RunAll())
			nodes, want := append(keep, derivatives(params)...),
				append(sameKeep, derivatives(sameParams)...)
			for range few(2, 1) {
				require.NoError(t, machine.RunAll())
				for i, n := range nodes {
					v := valueIn(t, machine, n)
					w := valueIn(t, unfused, want[i])
					d := distance(t, v, w)
					if n.IsScalar() { // a sum may be near zero while its terms are not
						d = min(d, math.Abs(float64(flat(t, v)[0]-flat(t, w)[0])))
					}
					require.Less(t, d, tolerance, graph.Describe(n))
				}
			}
		})
	}
}

// valuesOf runs a machine and compares the values of nodes with want, the values from another machine. It
// returns want. If want is nil, valuesOf compares nothing and returns the machine's values.
func valuesOf(t *testing.T, m *Machine, nodes gorgonia.Nodes, want []gorgonia.Value,
	tolerance float64) (values []gorgonia.Value) {
	t.Helper()
	require.NoError(t, m.RunAll())
	for i, n := range nodes {
		v := valueIn(t, m, n)
		if values = append(values, v); want == nil {
			continue
		}
		require.Less(t, distance(t, v, want[i]), tolerance)
	}

	if want != nil {
		return want
	}

	return values
}

// randomMatrices returns a function that adds matrices of normally distributed numbers to a graph.
func randomMatrices(g *gorgonia.ExprGraph, seed, stream uint64, deviation float64) func(name string,
	rows, columns int) *gorgonia.Node {
	r := rand.New(rand.NewPCG(seed, stream))
	return func(name string, rows, columns int) *gorgonia.Node {
		return randomNode(g, r, deviation, name, rows, columns)
	}
}

// withGradients returns y and the gradients of the sum of y ⊙ with.
func withGradients(t *testing.T, y, with *gorgonia.Node, in gorgonia.Nodes) gorgonia.Nodes {
	t.Helper()
	grads, err := gorgonia.Grad(gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.HadamardProd(y,
		with)))), in...)
	require.NoError(t, err)
	return append(gorgonia.Nodes{y}, grads...)
}

func newFuseMachine(t *testing.T, device *Device, g *gorgonia.ExprGraph, params,
	keep gorgonia.Nodes, opts []MachineOption) *Machine {
	t.Helper()
	m, err := NewMachine(device, g,
		append([]MachineOption{WithParams(params...), WithOutputs(keep...), WithStrict()},
			opts...)...)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, m.Close())
	})
	return m
}

// results returns all nodes of a graph that are computed.
func results(g *gorgonia.ExprGraph) (all gorgonia.Nodes) {
	for _, n := range g.AllNodes() {
		if n.Op() != nil {
			all = append(all, n)
		}
	}
	return all
}

// blockFunc is a part of a model, as a function of nodes.
type blockFunc = func(in gorgonia.Nodes) (*gorgonia.Node, error)

// variants lists ways to add a block to a graph. The first two compute the same function, and so do the
// last two.
var variants = []struct {
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

// mixedBlock returns the block x + Kasmina(tanh(norm(x)·wᵀ)) + bias. Its inputs are x [rows, d], norm
// [d], w [d, d], bias [d], and the slots' weights and scales.
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

// TestRecompute checks that recomputed blocks, also nested ones, change no bit of loss, gradients
// and telemetry.
func TestRecompute(t *testing.T) {
	onEach(t, testRecompute, exactly("fake", "float32", "bfloat16", "scaled"))
}

func testRecompute(t *testing.T, device *Device, _ float64, opts ...MachineOption) {
	seed := randomSeed(t)
	results := map[string][]string{}
	for _, variant := range variants {
		results[variant.name] = runBlocks(t, device, seed, variant.apply, opts)
	}

	for i := 0; i < len(variants); i += 2 {
		want, got := results[variants[i].name], results[variants[i+1].name]
		for j := range want {
			if want[j] != got[j] {
				t.Errorf("%s: result %d of %d differs from that of %s\n%.999q\n%.999q",
					variants[i+1].name, j, len(want), variants[i].name, got[j], want[j])
				break
			}
		}
	}
}

// runBlocks runs a model of two blocks three times, and returns losses, gradients and the lattices'
// states as text.
func runBlocks(t *testing.T, device *Device, seed uint64,
	apply func(gorgonia.Nodes, blockFunc) (*gorgonia.Node, error),
	opts []MachineOption) (seen []string) {
	t.Helper()
	const rows, d, seeds, slots = 7, 12, 4, 5
	r := rand.New(rand.NewPCG(seed, 2))
	g := gorgonia.NewGraph()
	var params gorgonia.Nodes
	add := func(name string, s ...int) *gorgonia.Node {
		params = append(params, randomNode(g, r, 1, name, s...))
		return params[len(params)-1]
	}
	x := add("x", rows, d)
	var lattices []*state.Lattice
	for i := range 2 {
		l, err := state.NewLattice(seeds, d, state.WithoutGates())
		require.NoError(t, err)
		for s := range seeds - 1 {
			require.NoError(t, errors.Join(
				l.RequestGermination(s, state.GerminationRequest{Slot: 1 + s,
					Kind: blueprints.Kind(s)}),
				l.Transition(s, state.Training), l.Transition(s, state.Grafting),
				l.SetAlpha(s, 0.25)))
		}
		lattices = append(lattices, l)
		name := func(s string) string { return fmt.Sprint(s, i) }
		in := gorgonia.Nodes{x, add(name("norm"), d), add(name("w"), d, d), add(name("bias"), d),
			add(name("weights"), slots, d/seeds), add(name("scales"), slots)}
		x, err = apply(in, mixedBlock(l))
		require.NoError(t, err)
	}

	loss, err := gorgonia.Sum(gorgonia.Must(gorgonia.HadamardProd(x, add("weighting", rows, d))))
	require.NoError(t, err)
	require.NoError(t, errOf(gorgonia.Grad(loss, params...)))
	machine := openMachine(t, device, g, append(slices.Clone(opts), WithParams(params...),
		WithOutputs(loss), WithStrict())...)
	for range few(3, 2) {
		require.NoError(t, machine.RunAll())
		for _, n := range append(gorgonia.Nodes{loss}, derivatives(params)...) {
			seen = append(seen, fmt.Sprintf("%x", flat(t, valueIn(t, machine, n))))
		}
		for _, l := range lattices {
			b, err := l.MarshalBinary()
			require.NoError(t, err)
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

// deepGraph returns the training graph of a model without Kasmina layers.
func deepGraph(t *testing.T, layers, dim, seq, sequences int, opts ...llm.GraphOption) *batch {
	t.Helper()
	c := llm.Config{Vocab: 19, Dim: dim, Layers: layers, Heads: 2, KVHeads: 1, Seq: seq}.Default()
	m, err := llm.NewModel(c, tensor.Float32, 1)
	require.NoError(t, err)
	g, err := m.Graph(llm.ForTraining, sequences, opts...)
	require.NoError(t, err)
	return &batch{Graph: g}
}

// TestRecomputeMemory checks that a run of a model of twelve blocks needs less than a quarter of the
// memory if blocks are recomputed.
func TestRecomputeMemory(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	arena := func(opts ...llm.GraphOption) int {
		b := deepGraph(t, 12, 32, 64, 8, opts...)
		machine := openMachine(t, device, b.G, WithParams(b.Params...),
			WithOutputs(b.Loss), WithStrict())
		return machine.runner.Program.Arena
	}
	all, recomputed := arena(), arena(llm.WithRecompute())
	t.Logf("%d KiB for a run, %d KiB with recomputed blocks", all>>10, recomputed>>10)
	require.LessOrEqual(t, 4*recomputed, all)
}

// TestKeptForBackward checks that a block keeps only what its backward pass needs. For each token these
// are the following numbers: gate and up (2F), q, k and v ((H + 2·KV)·Dh), the attention's result (H·Dh),
// two sums and two norms of the residual stream (4D), and the norms' 1/rms and the attention's logarithms
// (2 + H).
func TestKeptForBackward(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	const dim, heads, kv, seq = 64, 2, 1, 32
	ff := llm.Config{Vocab: 19, Dim: dim, Layers: 1, Heads: heads, KVHeads: kv,
		Seq: seq}.Default().FF
	arena := func(layers, sequences int) int {
		b := deepGraph(t, layers, dim, seq, sequences)
		machine := openMachine(t, device, b.G, WithParams(b.Params...),
			WithOutputs(b.Loss), WithStrict())
		return machine.runner.Program.Arena
	}

	const few, many, short, long = 3, 9, 16, 48 // layers, sequences
	more := arena(many, long) - arena(few, long) - arena(many, short) + arena(few, short)
	got := float64(more) / float64((many-few)*(long-short)*seq)
	want := float64(4 * (2*ff + (heads+2*kv)*dim/heads + dim + 4*dim + 2 + heads))
	require.Less(t, got, 1.01*want)
}

// TestRecomputeModel checks that a model with recomputed blocks is bit-identical to one without.
func TestRecomputeModel(t *testing.T) {
	onEach(t, testRecomputeModel, exactly("fake", "float32", "bfloat16", "scaled"))
}

func testRecomputeModel(t *testing.T, device *Device, _ float64, opts ...MachineOption) {
	values := func(graph ...llm.GraphOption) (all [][]byte) {
		b := deepGraph(t, few(12, 1), 8, 6, 2, graph...)
		b.draw(t, 5)
		machine := openMachine(t, device, b.G, append(slices.Clone(opts), WithParams(b.Params...),
			WithOutputs(b.Loss), WithStrict())...)
		for range few(3, 1) {
			require.NoError(t, machine.RunAll())
		}
		for _, n := range append(gorgonia.Nodes{b.Loss}, derivatives(b.Params)...) {
			all = append(all, fmt.Appendf(nil, "%x", flat(t, valueIn(t, machine, n))))
		}
		return all
	}

	want, got := values(), values(llm.WithRecompute())
	for i := range want {
		require.Equal(t, got[i], want[i])
	}
}

// TestRecomputeTwice checks that an op shared by two nodes is computed for each node.
func TestRecomputeTwice(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	g := gorgonia.NewGraph()
	var outputs gorgonia.Nodes
	for i, x := range [][]float32{{1, 2}, {3, 4}} {
		n := gorgonia.NodeFromAny(g, tensor.New(tensor.WithBacking(x)),
			gorgonia.WithName(fmt.Sprint("x", i)))
		y, err := autodiff.Recompute(gorgonia.Nodes{n},
			func(in gorgonia.Nodes) (*gorgonia.Node, error) {
				return gorgonia.Square(in[0])
			})
		if i > 0 {
			y, err = gorgonia.ApplyOp(outputs[0].Op(), n)
		}
		require.NoError(t, err)
		outputs = append(outputs, y)
	}

	machine := openMachine(t, device, g, WithStrict(), WithOutputs(outputs...))
	require.NoError(t, machine.RunAll())
	for i, want := range [][]float32{{1, 4}, {9, 16}} {
		require.Equal(t, want, flat(t, valueIn(t, machine, outputs[i])))
	}
}

// TestDocuments compares attention within documents with the CPU, with fused projections. It also checks
// the errors for invalid starts.
func TestDocuments(t *testing.T) {
	onEach(t, testDocuments, map[string]float64{
		"fake": 1e-5, "scaled": 1e-5, "float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2})
}

func testDocuments(t *testing.T, device *Device, tolerance float64, opts ...MachineOption) {
	seed := randomSeed(t)
	f := fuseCase{starts: []int{0, 1, 1, 0, 0, 2}}
	m, keep := compareWithCPU(t, device, f, seed, tolerance, opts...)
	// The table of documents is a separate task with the name of the attention. Both passes use it.
	n := tasksOf(m)
	require.Equal(t, []int{2, 1, 1}, []int{n["DocumentAttention"], n["AttentionGrad"], n["RoPE"]})
	starts := keep[0].Graph().ByName("starts")[0]
	for _, bad := range []struct {
		starts []int
		why    string
	}{{[]int{0, 0, 0, 0, 2, 2}, "starts[4] is 2"}, {[]int{0, 1, 0, 0, 0, 0}, "starts[2] is 0"},
		{[]int{0, 0, 0, -1, 0, 0}, "starts[3] is -1"}} {
		value := tensor.New(tensor.WithBacking(bad.starts))
		require.ErrorContains(t, errors.Join(gorgonia.Let(starts, value), m.RunAll()), bad.why,
			bad.starts)
	}
}

// TestTraits compares windows, biases, norms of heads, norms with weight 1 + w and GELU gates with the
// CPU, separately and combined.
func TestTraits(t *testing.T) {
	// Norms of heads with four elements can be small, and then they amplify the rounding of bfloat16.
	onEach(t, testTraits, map[string]float64{
		"fake": 1e-5, "scaled": 1e-5, "float32": 1e-4, "float16": 2e-2, "bfloat16": 0.15})
}

func testTraits(t *testing.T, device *Device, tolerance float64, opts ...MachineOption) {
	seed := randomSeed(t)
	for name, f := range map[string]fuseCase{"window": {window: 2},
		"window of documents": {window: 2, starts: []int{0, 0, 1, 0, 0, 0}},
		"GELU":                {gelu: true}, "biases": {biases: true},
		"biases and norms": {traits: true}, "all": {window: 2, gelu: true, traits: true}} {
		t.Run(name, func(t *testing.T) {
			m, _ := compareWithCPU(t, device, f, seed, tolerance, opts...)
			// Projections are one product if attention reads their result directly.
			n := tasksOf(m)
			require.Equal(t, 1, n["AttentionGrad"])
			require.Equal(t, f.traits, n["RoPE"] > 1)
		})
	}
}

// compareWithCPU runs a graph several times and compares the kept values and all gradients with the tape
// machine.
func compareWithCPU(t *testing.T, device *Device, f fuseCase, seed uint64, tolerance float64,
	opts ...MachineOption) (*Machine, gorgonia.Nodes) {
	t.Helper()
	g, params, keep := f.graph(t, seed)
	same, sameParams, sameKeep := f.graph(t, seed)
	m, err := NewMachine(device, g, append(opts, WithStrict(), WithParams(params...),
		WithOutputs(keep...))...)
	require.NoError(t, err)
	t.Cleanup(func() { m.Close() })
	require.NoError(t, shrinkLossScale(m))

	tape := tapeMachine(t, same, gorgonia.BindDualValues(sameParams...))
	require.NoError(t, tape.RunAll())
	for range 3 {
		require.NoError(t, m.RunAll())
		want := append(sameKeep, derivatives(sameParams)...)
		for i, n := range append(keep, derivatives(params)...) {
			require.Less(t, distance(t, valueIn(t, m, n), want[i].Value()), tolerance,
				graph.Describe(n))
		}
	}

	return m, keep
}

// TestDocumentsOfTwoLengths checks that attentions with sequences of different lengths but the same
// starts of documents have separate tables, and that starts are checked for both.
func TestDocumentsOfTwoLengths(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	const rows, d = 6, 4
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName("x"), gorgonia.WithShape(rows, d),
		gorgonia.WithInit(gorgonia.Gaussian(0, 1)))
	starts := gorgonia.NewTensor(g, tensor.Int, 1, gorgonia.WithName("starts"),
		gorgonia.WithShape(rows))
	for _, seq := range []int{rows, rows / 2} {
		require.NoError(t, errOf(op.DocumentAttention(x, x, x, starts, op.AttentionConfig{
			Heads: 1, HeadDim: d,
			Seq: seq, Causal: true})))
	}

	m := openMachine(t, device, g, WithStrict())
	require.Equal(t, 4, tasksOf(m)["DocumentAttention"])
	require.ErrorContains(t, m.Bind(starts, 1<<20, 8*rows), "holds starts of DocumentAttention")
	run := func(at ...int) error {
		return errors.Join(gorgonia.Let(starts, tensor.New(tensor.WithBacking(at))), m.RunAll())
	}
	require.NoError(t, run(0, 0, 0, 0, 0, 0))
	require.ErrorContains(t, run(0, 0, 2, 2, 2, 2), "starts[3] is 2, want 0")
}

// TestSingleOpsDocuments runs every op of a graph with documents as a singleOp.
func TestSingleOpsDocuments(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	seed := randomSeed(t)
	f := fuseCase{starts: []int{0, 1, 1, 0, 0, 2}}
	g, params, _ := f.graph(t, seed)
	same, sameParams, _ := f.graph(t, seed)
	r := newSingleRunner(t, device)
	tape := tapeMachine(t, same, gorgonia.BindDualValues(sameParams...))
	require.NoError(t, errors.Join(r.run(g), tape.RunAll()))
	for i, p := range params {
		got := tensor.New(tensor.WithBacking(r.value(p.Deriv())))
		require.Less(t, distance(t, got, sameParams[i].Deriv().Value()), 1e-5, p.Name())
	}
}

// stockRun is the graph of a case in one type, with the gradients of Σ out ⊙ weights if they are needed.
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

// random returns distinct numbers that bfloat16 can represent. They are not close to zero, where some ops
// have kinks.
func (c stockCase) random(r *rand.Rand, s shape, seen map[float64]bool) []float64 {
	x := make([]float64, 0, opbase.Size(s))
	for len(x) < cap(x) {
		v := r.NormFloat64()
		if c.positive {
			v = 0.5 + math.Abs(v)
		}
		v = float64(roundToBFloat16(float32(v)))
		if !seen[v] && math.Abs(v) > 1e-3 {
			x = append(x, v)
		}
		seen[v] = !c.constant // comparisons need equal numbers
	}

	return x
}

func wide(t testing.TB, v gorgonia.Value) []float64 {
	t.Helper()
	require.NotNil(t, v, "no value")
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

// relativeError returns ‖got − want‖/‖want‖. If the norm of want is less than a tenth per element, apart
// divides by that instead, since sums of numbers of about 1 may nearly cancel.
func relativeError(got, want []float64) float64 {
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

// TestStock compares every case with Gorgonia's tape machine: the result in float64, and the gradients
// also with central differences.
func TestStock(t *testing.T) {
	onEach(t, testStock, map[string]float64{"fake": 1e-5, "scaled": 1e-5, "float32": 1e-5,
		"bfloat16": 3e-2, "float16": 5e-3})
}

// scaledGradients enables the loss scaling of Float16 without its storage.
func scaledGradients(c *machineConfig) error {
	c.Scaled = true
	return nil
}

// testStock runs all cases, or a random third in short mode.
func testStock(t *testing.T, device *Device, tolerance float64, opts ...MachineOption) {
	r := rand.New(rand.NewPCG(randomSeed(t), 1))
	cases, share := stockCases(), 1
	if !randtest.Long() {
		share = 3
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
	require.NoError(t, err)
	var values [][]float64
	seen := map[float64]bool{}
	for _, s := range c.shapes {
		values = append(values, c.random(r, s, seen))
	}

	weights := c.random(r, run.out.Shape(), map[float64]bool{})
	require.NoError(t, run.let(values, weights))
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

	machine := openMachine(t, device, run.g, opts...)
	if machine.runner.Program.Scale != nil {
		// not a power of two, so that a missing or additional factor changes the result
		require.NoError(t, machine.SetLossScale(LossScale{Scale: 1000}))
	}

	var got [][]float64
	for range few(3, 1) { // enqueued, captured and replayed
		require.NoError(t, machine.RunAll())
	}

	for _, n := range results {
		v := valueIn(t, machine, n)
		got = append(got, wide(t, v))
	}

	want := c.reference(t, values, weights)
	for i, name := range names {
		if i > 0 && c.badDiff {
			break
		}
		require.Less(t, relativeError(got[i], want[i]), tolerance*5, "%v, %v, %v", name, got[i], want[i])
	}

	if c.instead != nil {
		return
	}

	for i, v := range c.onTape(t, run, values, weights) {
		require.Less(t, relativeError(got[i], v), tolerance, names[i])
	}
}

// onTape returns the result and the gradients computed by Gorgonia's tape machine. It computes the result
// in a separate graph, because the machine overwrites results that other nodes read.
func (c stockCase) onTape(t *testing.T, run *stockRun, values [][]float64,
	weights []float64) (all [][]float64) {
	t.Helper()
	forward, err := c.graph(tensor.Float32, false)
	require.NoError(t, err)
	for _, r := range []*stockRun{forward, run} {
		if r == run && c.constant {
			break
		}
		tape := gorgonia.NewTapeMachine(r.g)
		require.NoError(t, errors.Join(r.let(values, weights), tape.RunAll()))
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

// reference returns the result in float64, and the central differences of the loss for each input.
func (c stockCase) reference(t *testing.T, values [][]float64, weights []float64) [][]float64 {
	t.Helper()
	if c.instead != nil {
		c.build = c.instead
	}

	run, err := c.graph(tensor.Float64, false)
	require.NoError(t, err)
	tape := tapeMachine(t, run.g)
	evaluate := func() (out []float64, loss float64) {
		tape.Reset()
		require.NoError(t, errors.Join(run.let(values, weights), tape.RunAll()))
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

// TestStockWithoutCopies checks that transposed operands of products and repeated operands of elementwise
// ops are not copied, unless they are outputs.
func TestStockWithoutCopies(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	g := gorgonia.NewGraph()
	r := rand.New(rand.NewPCG(randtest.Seed(t), 1))
	value := func(s ...int) *node { return randomNode(g, r, 1, fmt.Sprint(s), s...) }
	x, w, bias := value(3, 5), value(7, 5), value(7)
	transposed := gorgonia.Must(gorgonia.Transpose(w))
	gorgonia.Must(gorgonia.BroadcastAdd(gorgonia.Must(gorgonia.Mul(x, transposed)), bias, nil,
		[]byte{0}))
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
		machine := openMachine(t, device, g, WithStrict(), WithOutputs(c.outputs...))
		require.Equal(t, c.tasks, len(machine.runner.Program.Calls))
		tape := tapeMachine(t, g)
		require.NoError(t, errors.Join(machine.RunAll(), tape.RunAll()))
		for _, n := range c.outputs {
			v := valueIn(t, machine, n)
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

// TestStatements checks the error for what Gorgonia calls statements.
func TestStatements(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	g, _, y := stockGraph(t)
	var v gorgonia.Value
	gorgonia.Read(y, &v)
	require.ErrorContains(t, errOf(NewMachine(device, g)), "WithOutputs")
}

// TestStockOnHost checks that ops without a kernel are computed on the host, between nodes on the device.
func TestStockOnHost(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	r := rand.New(rand.NewPCG(randtest.Seed(t), 1))
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
		{name: "LogSoftMax", shapes: []shape{{3, 5}}, constant: true,
			build: func(in nodes) (*node, error) { return gorgonia.LogSoftMax(in[0]) }},
		{name: "ByIndices", shapes: []shape{{5, 3}}, ids: []int{0, 4, 2, 4}, constant: true,
			build: func(in nodes) (*node, error) { return gorgonia.ByIndices(in[0], in[1], 0) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			run, err := c.graph(tensor.Float32, false)
			require.NoError(t, err)
			var values [][]float64
			for _, s := range c.shapes {
				values = append(values, c.random(r, s, map[float64]bool{}))
			}
			var log bytes.Buffer
			machine := openMachine(t, device, run.g,
				logTo(&log))
			require.NoError(t, errors.Join(run.let(values, nil), machine.RunAll(),
				machine.RunAll()))
			v := valueIn(t, machine, run.out)
			require.Less(t, relativeError(wide(t, v), c.onTape(t, run, values, nil)[0]), 1e-6)
			require.Equal(t, 1, strings.Count(log.String(), "no kernel"))
		})
	}
}

// TestBatchedFLOPs checks the operations and bytes of a batched product.
func TestBatchedFLOPs(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	g := gorgonia.NewGraph()
	a := gorgonia.NewTensor(g, tensor.Float32, 3, gorgonia.WithShape(3, 4, 5),
		gorgonia.WithName("a"))
	b := gorgonia.NewTensor(g, tensor.Float32, 3, gorgonia.WithShape(3, 5, 2),
		gorgonia.WithName("b"))
	gorgonia.Must(gorgonia.BatchedMatMul(a, b))
	m := openMachine(t, device, g)
	if task := m.runner.Program.Calls[0]; len(m.runner.Program.Calls) != 1 ||
		task.FLOPs != 2*3*4*5*2 || task.Bytes() != 4*3*(4*5+5*2+4*2) {
		t.Errorf("%d tasks, the first of %v operations and %v bytes", len(m.runner.Program.Calls),
			task.FLOPs, task.Bytes())
	}
}

// stockCase is a graph of Gorgonia's own ops.
type stockCase struct {
	name     string
	shapes   []tensor.Shape // shapes of the inputs; no dimensions means a scalar
	ids      []int          // value of an additional integer input
	positive bool           // all inputs are positive
	build    func(in gorgonia.Nodes) (*gorgonia.Node, error)
	constant bool // the function has no derivative
	badDiff  bool // the graph that Gorgonia derives is not the gradient
	// instead computes the same function with different ops, if Gorgonia's machine computes the op or its
	// gradient incorrectly.
	instead func(in gorgonia.Nodes) (*gorgonia.Node, error)
}

type (
	shape = tensor.Shape
	nodes = gorgonia.Nodes
	node  = gorgonia.Node
)

// stockCases returns new graphs of odd sizes.
func stockCases() []stockCase {
	return slices.Concat(elementwiseCases(), productCases(), reductionCases(), layoutCases())
}

// byName sorts cases by name and keeps the order of cases with the same name.
func byName(cases []stockCase) []stockCase {
	slices.SortStableFunc(cases, func(a, b stockCase) int { return strings.Compare(a.name, b.name) })
	return cases
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

	// Gorgonia replaces the logarithm of a sigmoid by a softplus, and removes nodes from the graph.
	cases = append(cases, stockCase{name: "BinaryXent", shapes: []shape{m, m}, positive: true,
		build: func(in nodes) (*node, error) {
			p, err := gorgonia.Sigmoid(in[0])
			if err != nil {
				return nil, err
			}
			return gorgonia.BinaryXent(p, in[1])
		}})

	return byName(cases)
}

// number1 returns a constant of x's type.
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
			constant: true}, // Gorgonia's gradient multiplies matrices with shapes that do not match
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
	for name, f := range map[string]func(*node, ...int) (*node, error){
		"Sum": gorgonia.Sum, "Max": gorgonia.Max, "Mean": gorgonia.Mean} {
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

	for _, c := range []struct {
		x    shape
		axes []int
	}{{shape{7}, nil}, {shape{3, 5}, nil}, {shape{3, 5}, []int{1}}, {shape{2, 3, 5}, []int{2}}} {
		cases = append(cases, stockCase{name: fmt.Sprintf("SoftMax along %v of", c.axes),
			shapes: []shape{c.x},
			build:  func(in nodes) (*node, error) { return gorgonia.SoftMax(in[0], c.axes...) }})
	}

	return byName(cases)
}

func layoutCases() []stockCase {
	var cases []stockCase
	one := func(name string, x shape, build func(x *node) (*node, error)) {
		cases = append(cases, stockCase{name: name, shapes: []shape{x},
			build: func(in nodes) (*node, error) {
				h, err := gorgonia.Tanh(in[0]) // gives it an activation's type
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

	return byName(cases)
}

// passOn is the identity of scalars, without a kernel. Its result is a tensor without dimensions instead
// of a number.
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

// TestScaledScalar checks that the loss scale is removed before and restored after an op on the host that
// returns a tensor without dimensions.
func TestScaledScalar(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	var grads [2]gorgonia.Value
	for i, opts := range [][]MachineOption{nil, {scaledGradients}} {
		g := gorgonia.NewGraph()
		w := floatNode(g, "w", []float32{1, 2, 3, 4}, 2, 2)
		s := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.Square(w))))
		cost := gorgonia.Must(gorgonia.Square(gorgonia.Must(gorgonia.ApplyOp(passOn{}, s))))
		require.NoError(t, errOf(gorgonia.Grad(cost, w)))
		m := openMachine(t, device, g, append(opts, WithParams(w))...)
		require.NoError(t, m.RunAll())
		grads[i] = valueIn(t, m, w.Deriv())
	}

	require.Less(t, distance(t, grads[1], grads[0]), 1e-6, "the gradient is %v scaled and %v plain",
		grads[1], grads[0])
}

// TestLastProducts checks that two products of gradients come after the gradient of the table if
// gradients are sent to other GPUs.
func TestLastProducts(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	_, b := newBatch(t, llm.ForTraining, 2)
	for want, opts := range map[int][]MachineOption{0: nil, 2: {WithRanks(&silent{}, 0)}} {
		m := openMachine(t, device, b.G, append(opts, WithParams(b.Params...))...)
		got, table := 0, false
		for _, c := range m.runner.Program.Calls {
			table = table || c.Op == "EmbeddingGrad"
			if _, product := c.Params.(*program.Matmul); product && table {
				got++
			}
		}
		require.True(t, table)
		require.Equal(t, want, got)
	}
}

// TestFoldedGradient checks that the output layer's gradient has no value if the table's gradient has
// been added to its memory.
func TestFoldedGradient(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	_, b := newBatch(t, llm.ForTraining, 2)
	var head *gorgonia.Node
	for _, n := range b.G.AllNodes() {
		if p, ok := n.Op().(*opbase.PartOp); ok && p.Offset > 0 &&
			isOp[*op.LinearCrossEntropyGradOp](graph.Children(n)[0]) {
			head = n
		}
	}

	require.NotNil(t, head, "the graph has no gradient of the output layer")
	m := openMachine(t, device, b.G, WithParams(b.Params...), WithOutputs(b.Loss))
	require.NoError(t, m.RunAll())
	require.ErrorContains(t, errOf(m.Value(head)), "WithOutputs")
}

// layers is a graph with everything that [Float8] computes differently: projections of queries, keys and
// values, a linear layer and a perceptron, with norms and sums between them as in a block of a model.
type layers struct {
	g      *gorgonia.ExprGraph
	params gorgonia.Nodes
	keep   gorgonia.Nodes // the cost, the result and the gradients of parameters
	named  map[string]*gorgonia.Node
}

// newLayers returns a graph with batch sequences of seq tokens, d features, a perceptron of f features,
// and heads of 128 features, but at least 2 heads.
func newLayers(t testing.TB, seed uint64, batch, seq, d, f int) *layers {
	t.Helper()
	l := &layers{g: gorgonia.NewGraph(), named: map[string]*gorgonia.Node{}}
	r := rand.New(rand.NewPCG(seed, 9))
	input := func(name string, scale float64, s ...int) *gorgonia.Node {
		l.named[name] = randomNode(l.g, r, scale, name, s...)
		return l.named[name]
	}
	param := func(name string, s ...int) *gorgonia.Node {
		n := input(name, 0.7/math.Sqrt(float64(s[len(s)-1])), s...)
		l.params = append(l.params, n)
		return n
	}
	must := gorgonia.Must
	rows := batch * seq
	x := input("x", 1, rows, d)
	h := must(op.RMSNorm(x, param("norm1", d), 1e-5))
	heads := max(2, d/128)
	rope := op.RoPEConfig{Seq: seq, Heads: heads, HeadDim: d / heads, Base: 100}
	q := must(op.RoPE(must(op.Linear(h, param("wq", d, d))), rope))
	k := must(op.RoPE(must(op.Linear(h, param("wk", d, d))), rope))
	v := must(op.Linear(h, param("wv", d, d)))
	a := must(op.Attention(q, k, v, op.AttentionConfig{Seq: seq, Heads: heads, KVHeads: heads,
		HeadDim: d / heads, Causal: true}))
	s := must(gorgonia.Add(x, must(op.Linear(a, param("wo", d, d)))))
	h = must(op.RMSNorm(s, param("norm2", d), 1e-5))
	y := must(gorgonia.Add(s,
		must(op.SiLUMLP(h, param("gate", f, d), param("up", f, d), param("down", d, f)))))
	y = must(op.RMSNorm(y, param("norm3", d), 1e-5))
	cost := must(gorgonia.Sum(must(gorgonia.HadamardProd(y, input("with", 0.1, rows, d)))))
	require.NoError(t, errOf(gorgonia.Grad(cost, l.params...)))
	l.named["y"] = y
	l.keep = append(gorgonia.Nodes{cost, y}, derivatives(l.params)...)
	return l
}

func (l *layers) values(t testing.TB, m *Machine) (values []gorgonia.Value) {
	t.Helper()
	for _, n := range l.keep {
		v := valueIn(t, m, n)
		values = append(values, v)
	}
	return values
}

// TestFloat8 checks that the results of a block with float8 products are close to those in float32, and
// that float8 is used exactly for the sizes that allow it.
func TestFloat8(t *testing.T) {
	seed := randomSeed(t)
	near := func(t *testing.T, l *layers, narrow, plain *Machine, tolerance float64, differs bool) {
		t.Helper()
		for _, m := range []*Machine{plain, narrow, narrow} {
			require.NoError(t, m.RunAll())
		}
		got, want := l.values(t, narrow), l.values(t, plain)
		for i, n := range l.keep[1:] {
			if d := distance(t, got[i+1], want[i+1]); !(d < tolerance) || (d == 0) == differs {
				t.Errorf("%s differs by %.2g", graph.Describe(n), d)
			}
		}
	}

	for _, c := range []struct {
		name             string
		batch, seq, d, f int
		want             map[string]int // of the tasks that quantize
	}{
		// for the attention's result, and for its three gradients together
		{"a block", 3, 45, 32, 48, map[string]int{"Quantize": 2}},
		{"the fewest rows", 4, 32, 16, 16, map[string]int{"Quantize": 2}},
		{"a row too few", 1, 127, 32, 48, nil},
		{"features no multiple", 3, 45, 36, 48, nil},
		// and for the gradients of gate and up
		{"a perceptron of 24", 3, 45, 32, 24, map[string]int{"Quantize": 3}},
		{"a perceptron of 20", 3, 45, 32, 20, map[string]int{"Quantize": 2}},
	} {
		t.Run(c.name, func(t *testing.T) {
			device, _ := openFake(t, fake.Config{})
			l := newLayers(t, seed, c.batch, c.seq, c.d, c.f)
			plain := newFuseMachine(t, device, l.g, l.params, l.keep, nil)
			narrow := newFuseMachine(t, device, l.g, l.params, l.keep,
				[]MachineOption{float8Products})
			near(t, l, narrow, plain, 0.2, c.want != nil)
			tasks, more := tasksOf(plain), tasksOf(narrow)
			maps.DeleteFunc(more, func(op string, n int) bool { return tasks[op] == n })
			require.True(t, maps.Equal(c.want, more), more)
			if c.want == nil {
				return
			}
			t.Setenv("KASMINA_VARIANTS", "")
			var alone, adding int
			own := newFuseMachine(t, device, l.g, l.params, l.keep,
				[]MachineOption{float8Products, withOwnProducts(&alone, &adding),
					WithVariants("Matmul"+"=hopper-*", "RoPEProduct=fused")})
			near(t, l, own, plain, 0.2, true)
			require.True(t, tasksOf(own)["RoPE"] == 0)
			require.NotZero(t, alone)
			require.NotZero(t, adding)
			require.NotZero(t, flopsOfFloat8(narrow))
			require.Equal(t, flopsOfFloat8(narrow), flopsOfFloat8(own), "by this module's own kernels")
		})
	}

	t.Run("GPU", func(t *testing.T) {
		device := openGPUFloat8(t)
		for _, size := range [][4]int{{3, 67, 256, 336}, {2, 65, 256, 264}, {5, 128, 1024, 2048}} {
			l := newLayers(t, seed, size[0], size[1], size[2], size[3])
			plain := newFuseMachine(t, device, l.g, l.params, l.keep, nil)
			near(t, l, newFuseMachine(t, device, l.g, l.params, l.keep,
				[]MachineOption{WithPrecision(Float8)}), plain, 0.2, true)
			own := newFuseMachine(t, device, l.g, l.params, l.keep,
				[]MachineOption{WithPrecision(Float8),
					WithVariants("Matmul"+"=hopper-*", "RoPEProduct=fused")})
			near(t, l, own, plain, 0.2, true)
			fused := tasksOf(own)["RoPE"] == 0
			// the sizes that the kernels support
			require.Equal(t, size[2] > 384 && device.info.Capability() == 90, fused, size)
		}
	})
}

// flopsOfFloat8 returns the operations that a profile compares with the ceiling of float8.
func flopsOfFloat8(m *Machine) (flops float64) {
	for _, t := range m.runner.Program.Calls {
		if t.Float8 {
			flops += t.FLOPs
		}
	}
	return flops
}

// openGPUFloat8 returns the GPU, or skips the test if the GPU does not support float8 products.
func openGPUFloat8(t *testing.T) *Device {
	t.Helper()
	device := openGPU(t)
	if got := device.info.Capability(); got != float8Capability {
		t.Skipf("needs compute capability 9.0, this is %d", got)
	}
	return device
}

// TestFloat8Exactly compares products with products of operands rounded to float8, with one scale per
// row.
func TestFloat8Exactly(t *testing.T) {
	const rows, in, out = 131, 48, 32
	seed := randomSeed(t)
	r, g := rand.New(rand.NewPCG(seed, 1)), gorgonia.NewGraph()
	matrix := func(name string, rows, columns int) (*gorgonia.Node, []float32) {
		x := make([]float32, rows*columns)
		for i := range x {
			x[i] = float32(r.NormFloat64() * math.Exp(2*r.NormFloat64()))
		}
		clear(x[columns : 2*columns])
		return gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName(name),
				gorgonia.WithShape(rows, columns),
				gorgonia.WithValue(tensor.New(tensor.WithShape(rows, columns),
					tensor.WithBacking(x)))),
			x
	}

	x, xs := matrix("x", rows, in)
	w, ws := matrix("w", out, in)
	with, gs := matrix("with", rows, out)
	y, err := op.Linear(x, w)
	require.NoError(t, err)
	cost := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.HadamardProd(y, with))))
	grads, err := gorgonia.Grad(cost, x, w)
	require.NoError(t, err)
	device, _ := openFake(t, fake.Config{})
	for name, params := range map[string]gorgonia.Nodes{"a parameter": {w}, "any weight": nil} {
		m := newFuseMachine(t, device, g, params, append(gorgonia.Nodes{y}, grads...),
			[]MachineOption{float8Products})
		require.NoError(t, m.RunAll())
		turned := make([]float32, in*out)
		for i, v := range ws {
			turned[i%in*out+i/in] = v
		}
		for i, want := range [][]float32{roundedProduct(xs, ws, in),
			roundedProduct(gs, turned, out)} {
			got := valueIn(t, m, []*gorgonia.Node{y, grads[0]}[i])
			require.Less(t, relativeDistance(flat(t, got), want), 1e-6, "%v, %v", name, i)
		}
		want := map[bool]map[string]int{true: {"Quantize": 2},
			false: {"Quantize": 3, "QuantizeColumns": 1}}[params != nil]
		for op, n := range want {
			require.Equal(t, n, tasksOf(m)[op], "%v, %v", name, op)
		}
	}
}

// roundedProduct returns a·bᵀ for rows of k numbers, with each row rounded to float8.
func roundedProduct(a, b []float32, k int) []float32 {
	round := func(x []float32) []float64 {
		var all []float64
		for row := range slices.Chunk(x, k) {
			bytes := make([]byte, k)
			scale := float64(quantizedRow(bytes, row))
			for _, v := range bytes {
				all = append(all, scale*float64(half.FromE4M3(v)))
			}
		}
		return all
	}

	var d []float32
	for x := range slices.Chunk(round(a), k) {
		for y := range slices.Chunk(round(b), k) {
			sum := 0.0
			for i, v := range x {
				sum += v * y[i]
			}
			d = append(d, float32(sum))
		}
	}

	return d
}

// float8Model returns a model with products of float8 and a Kasmina layer, and its graph.
func float8Model(t testing.TB, kind llm.GraphKind, seed uint64, dim int,
	opts ...llm.GraphOption) (*llm.Model, *batch) {
	t.Helper()
	c := llm.Config{Vocab: 19, Dim: dim, Layers: 2, Heads: 2, KVHeads: 1, Seq: 65, FF: 3 * dim / 2,
		Kasmina: []int{0}, Seeds: 4}.Default()
	m, err := llm.NewModel(c, tensor.Float32, seed, state.WithoutGates())
	require.NoError(t, err)
	g, err := m.Graph(kind, 2, opts...)
	require.NoError(t, err)
	b := &batch{Graph: g}
	b.draw(t, seed)
	return m, b
}

// TestFloat8Weights checks that a machine after updates, or after an upload, computes the same as a new
// machine with these parameters, and the same as a machine that shares them and has no float8 weights.
func TestFloat8Weights(t *testing.T) {
	for name, newOptimizer := range optimizers {
		t.Run(name, func(t *testing.T) {
			if name == "Muon" && testing.Short() {
				t.Skip("takes long under the race detector, and differs from AdamW only in " +
					"the update of parameters")
			}
			device, _ := openFake(t, fake.Config{})
			testFloat8Weights(t, device, 32, newOptimizer, nil,
				float8Products)
		})
	}

	t.Run("GPU", func(t *testing.T) {
		testFloat8Weights(t, openGPUFloat8(t), few(256, 128), newAdamW,
			[]MachineOption{WithPrecision(BFloat16)}, WithPrecision(Float8))
	})
}

func testFloat8Weights(t *testing.T, device *Device, dim int, newOptimizer func() (optim.Optimizer,
	error), plain []MachineOption,
	narrow MachineOption) {
	const seed = 5
	open := func(b *batch, more ...MachineOption) *Machine {
		t.Helper()
		return newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss},
			append(append(slices.Clone(plain), narrow), more...))
	}
	loss := func(m *Machine, b *batch) float32 {
		t.Helper()
		require.NoError(t, m.RunAll())
		v := valueIn(t, m, b.Loss)
		return v.Data().(float32)
	}

	model, b := float8Model(t, llm.ForTraining, seed, dim)
	m := open(b, WithAccumulation())
	optimize(t, m, newOptimizer, 1)
	first := loss(m, b)
	for range 4 { // the later runs are replays
		loss(m, b)
		require.NoError(t, errOf(m.Update()))
	}

	last := loss(m, b)
	require.NoError(t, m.Download())
	require.Less(t, last, first)
	scoring, err := model.Graph(llm.ForLoss, 2)
	require.NoError(t, err)
	score := &batch{Graph: scoring}
	score.draw(t, seed)
	borrower := open(score, WithParamsOf(m))
	require.Zero(t, len(borrower.runner.Program.Weights))
	require.NotEmpty(t, m.runner.Program.Weights)
	require.Equal(t, 2, tasksOf(borrower)["Quantize"])
	restarted := open(score)
	require.Equal(t, last, loss(borrower, score), "a machine that shares the parameters")
	require.Equal(t, last, loss(restarted, score), "a new machine with the parameters")
	fresh, _ := float8Model(t, llm.ForLoss, seed, dim)
	for _, p := range b.Params { // restore the initial values
		i := slices.IndexFunc(fresh.Params, func(q llm.Param) bool { return q.Name == p.Name() })
		copy(p.Value().Data().([]float32), fresh.Params[i].Value.Float32s())
	}

	require.NoError(t, m.Upload(b.Params...))
	require.Equal(t, first, loss(m, b))
	owner := newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss}, plain)
	require.Equal(t, loss(borrower, score), loss(open(score, WithParamsOf(owner)), score),
		"with the parameters of a machine without float8")
}

// TestFloat8Bound checks that each run reads the present contents of the program's memory when a
// parameter is bound to it.
func TestFloat8Bound(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	l := newLayers(t, 1, 3, 45, 32, 48)
	open := func() *Machine {
		return newFuseMachine(t, device, l.g, l.params, l.keep,
			[]MachineOption{float8Products})
	}
	for _, name := range []string{"gate", "wo"} { // with and without being packed into a larger matrix
		m, weight := open(), l.named[name]
		h, numbers := host{t, device.ctx}, weight.Value().Data().([]float32)
		memory := h.place(numbers)
		require.NoError(t, m.Bind(weight, memory, 4*len(numbers)))
		for range 3 {
			for i := range numbers {
				numbers[i] *= -1.5
			}
			h.write(memory, numbers)
			fresh := open()
			require.NoError(t, errors.Join(m.RunAll(), fresh.RunAll()))
			got, want := l.values(t, m), l.values(t, fresh)
			for i, n := range l.keep {
				require.Equal(t, flat(t, want[i]), flat(t, got[i]), graph.Describe(n))
			}
		}
	}
}

// TestFloat8UploadFails checks that the float8 copies of parameters match the parameters after an upload
// that fails partway.
func TestFloat8UploadFails(t *testing.T) {
	device, cuda := openFake(t, fake.Config{})
	_, b := float8Model(t, llm.ForLoss, 4, 32)
	open := func() *Machine {
		return newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss},
			[]MachineOption{float8Products})
	}
	m := open()
	for _, p := range b.Params {
		for i, v := range p.Value().Data().([]float32) {
			p.Value().Data().([]float32)[i] = -1.5 * v
		}
	}

	cuda.Fail("cuMemcpyHtoDAsync", len(b.Params)/2, gpu.OutOfMemory)
	require.ErrorIs(t, m.Upload(b.Params...), gpu.OutOfMemory)
	changed := 0
	for _, p := range b.Params {
		v, err := m.Value(p)
		require.NoError(t, err)
		if slices.Equal(flat(t, v), flat(t, p.Value())) {
			changed++
		}
		require.NoError(t, gorgonia.Let(p, v))
	}

	require.NotZero(t, changed)
	require.Less(t, changed, len(b.Params))
	fresh := open()
	require.NoError(t, errors.Join(m.RunAll(), fresh.RunAll()))
	got, err := m.Value(b.Loss)
	want, wantErr := fresh.Value(b.Loss)
	require.NoError(t, errors.Join(err, wantErr))
	require.Equal(t, want.Data(), got.Data())
}

// TestFloat8Recomputed checks that recomputed blocks change no bit of loss and gradients.
func TestFloat8Recomputed(t *testing.T) {
	test := func(t *testing.T, device *Device, dim int, opts ...MachineOption) {
		var results [2][]float32
		for i, graph := range [][]llm.GraphOption{nil, {llm.WithRecompute()}} {
			_, b := float8Model(t, llm.ForTraining, 3, dim, graph...)
			m := newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss}, opts)
			for range 3 {
				require.NoError(t, m.RunAll())
			}
			for _, n := range append(gorgonia.Nodes{b.Loss}, derivatives(b.Params)...) {
				results[i] = append(results[i], flat(t, valueIn(t, m, n))...)
			}
		}
		require.Equal(t, results[1], results[0], relativeDistance(results[1], results[0]))
	}

	t.Run("fake", func(t *testing.T) {
		device, _ := openFake(t, fake.Config{})
		test(t, device, 32, float8Products)
	})
	t.Run("GPU", func(t *testing.T) {
		// Only one of the graphs has a norm gradient that also stores float8. With tuning, it may add up
		// in a different order.
		test(t, openGPUFloat8(t), few(256, 128), WithPrecision(Float8), WithTuning(TuneOff))
	})
}

// TestFloat8Trains checks that training with float8 products or bfloat16 gradients is reproducible, and
// that the loss is close to the loss of training with more digits.
func TestFloat8Trains(t *testing.T) {
	t.Run("products", func(t *testing.T) {
		narrowTrains(t, openGPUFloat8(t), []MachineOption{WithPrecision(BFloat16)},
			[]MachineOption{WithPrecision(Float8)})
	})
	t.Run("gradients", func(t *testing.T) {
		narrowTrains(t, openGPU(t), []MachineOption{WithPrecision(BFloat16)},
			[]MachineOption{WithPrecision(BFloat16), WithGradientPrecision(BFloat16)})
	})
}

// lossesOf trains a model for several steps and returns the losses.
func lossesOf(t *testing.T, device *Device, opts ...MachineOption) (losses []float32) {
	t.Helper()
	_, b := float8Model(t, llm.ForTraining, 8, few(256, 128))
	m := newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss}, opts)
	optimize(t, m, newAdamW, 1)
	for i := range few(20, 3) {
		b.draw(t, uint64(i%4))
		require.NoError(t, m.RunAll())
		loss, _, err := m.Step(b.Loss)
		require.NoError(t, err)
		losses = append(losses, float32(loss))
	}

	return losses
}

// narrowTrains compares training with fewer and with more digits: the last losses must be close but not
// equal, and two runs with fewer digits must have the same losses.
func narrowTrains(t *testing.T, device *Device, more, fewer []MachineOption) {
	t.Helper()
	wide, narrow := lossesOf(t, device, more...), lossesOf(t, device, fewer...)
	require.Equal(t, lossesOf(t, device, fewer...), narrow)
	last := len(wide) - 1
	t.Logf("losses %v and %v", narrow[last], wide[last])
	if d := narrow[last]/wide[last] - 1; !(math.Abs(float64(d)) < 0.02) ||
		slices.Equal(narrow, wide) {
		t.Errorf("the loss is %v, and %v with more digits", narrow[last], wide[last])
	}
}

// TestFloat8Tuned checks that tuning times the variants of float8 products, also with a matrix added, on
// operands that are valid numbers, and that a RoPE product of float8 is tuned separately from one of the
// type of its result.
func TestFloat8Tuned(t *testing.T) {
	clearChoiceVariables(t)
	device, _ := openFake(t, fake.Config{Devices: smallCache("GPU")})
	l := newLayers(t, 1, 3, 45, 32, 48)
	var log bytes.Buffer
	adding := 0
	m := newFuseMachine(t, device, l.g, l.params, l.keep, []MachineOption{
		float8Products, withOwnProducts(new(int), &adding), timedWithNewFile(t, 1),
		WithTuning(TuneCached), logTo(&log)})
	require.NoError(t, m.RunAll())
	timed, turned := 0, 0
	for _, c := range m.Choices() {
		if c.Op == "Matmul" && strings.Contains(c.Shape, "A:float8e4m3") &&
			c.Source == Measured && c.Of == 4 {
			timed++
		}
		if c.Op == "RoPEProduct" && strings.HasSuffix(c.Shape, "of float8") &&
			c.Source == Measured {
			turned++
		}
	}

	// Forward: q, k and v with 96 columns, the attention's projection with 32 and x added, gate and up
	// with 96 columns and sums of 32, down with 32 columns and sums of 48. Backward: 32 columns with sums
	// of 96, twice, and of 32, all without addition, and 48 columns with sums of 32.
	if timed != 6 || turned != 1 || adding == 0 || log.Len() > 0 {
		t.Errorf("%d shapes of products are timed, want 6, and %d with RoPE, want 1; %d run with "+
			"a matrix added; %s", timed, turned, adding, log.String())
	}
}

// TestProductVariants checks that h = x·vᵀ and y = h + (h·uᵀ)·wᵀ have the same values and gradients in
// all variants of the products, which include products with a matrix added.
func TestProductVariants(t *testing.T) {
	clearChoiceVariables(t)
	seed := randomSeed(t)
	check := func(t *testing.T, device *Device, rows, f, d int, tolerance float64, own bool,
		opts ...MachineOption) {
		var values []gorgonia.Value
		for i, rule := range []string{"Matmul!=hopper-*", "Matmul=hopper-*"} {
			g := gorgonia.NewGraph()
			matrix := randomMatrices(g, seed, 3, 1.0/8)
			in := gorgonia.Nodes{matrix("x", rows, d), matrix("v", d, d), matrix("u", f, d),
				matrix("w", d, f)}
			h := gorgonia.Must(op.Linear(in[0], in[1]))
			y := gorgonia.Must(gorgonia.Add(h,
				gorgonia.Must(op.Linear(gorgonia.Must(op.Linear(h, in[2])), in[3]))))
			keep := withGradients(t, y, matrix("with", rows, d), in)
			m := newFuseMachine(t, device, g, in[1:], keep, append(opts, WithVariants(rule)))
			if tolerance > 0 {
				values = valuesOf(t, m, keep, values, tolerance)
			} else {
				launch(t, m)
			}
			ours := map[bool]int{} // by whether a matrix is added
			for _, c := range m.Choices() {
				if c.Op == "Matmul" && strings.HasPrefix(c.Variant, "hopper") {
					ours[strings.HasSuffix(c.Shape, "with a matrix added")]++
				}
			}
			require.Equal(t, i == 1 && own, ours[false] > 1, "%s: %v", rule, ours)
			require.Equal(t, i == 1 && own, ours[true] > 0, "%s: %v", rule, ours)
		}
	}

	t.Run("fake", func(t *testing.T) {
		device, _ := openFake(t, fake.Config{})
		var plain, adding int
		check(t, device, 6, 7, 5, 1e-5, true, withOwnProducts(&plain, &adding))
		require.NotZero(t, plain)
		require.NotZero(t, adding)
	})

	t.Run("launched", func(t *testing.T) {
		check(t, openBinaries(t, cards[hopper]), 300, 776, 648, 0, true,
			WithPrecision(BFloat16), WithTuning(TuneOff))
	})
	t.Run("bfloat16", func(t *testing.T) {
		device := openGPU(t)
		check(t, device, 300, 776, 648, 2e-2, device.info.Capability() == 90,
			WithPrecision(BFloat16), WithTuning(TuneOff))
	})
}

// TestProductScaled checks that products with scalar factors, as in Newton-Schulz iterations, are
// computed by cuBLASLt even if a product of the same shape without factors uses this module's kernel.
func TestProductScaled(t *testing.T) {
	clearChoiceVariables(t)
	device, _ := openFake(t, fake.Config{})
	var plain int
	var values []gorgonia.Value
	for _, rule := range []string{"Matmul!=hopper-*", "Matmul=hopper-*"} {
		g := gorgonia.NewGraph()
		matrix := randomMatrices(g, 1, 3, 1)
		x, w := matrix("x", 6, 6), matrix("w", 6, 6)
		y := gorgonia.Must(op.NewtonSchulz(gorgonia.Must(gorgonia.Mul(x, w)), 2))
		m := newFuseMachine(t, device, g, gorgonia.Nodes{x, w}, gorgonia.Nodes{y},
			[]MachineOption{withOwnProducts(&plain, new(int)),
				WithVariants(rule, "NewtonSchulz=products")})
		values = valuesOf(t, m, gorgonia.Nodes{y}, values, 1e-5)
	}

	require.NotZero(t, plain)
}

// TestFloat8Refused checks that the error names the precision, its requirements, and the GPU and library
// found.
func TestFloat8Refused(t *testing.T) {
	gpu := func(major, minor int) []gpu.DeviceInfo {
		return []gpu.DeviceInfo{{Name: "Some GPU", Major: major, Minor: minor,
			Memory: 1 << 30, SMs: 2, L2: 1 << 20}}
	}
	for want, config := range map[string]fake.Config{
		"this is Some GPU with compute capability 8.9 and cuBLASLt 13.0":  {Devices: gpu(8, 9)},
		"this is Some GPU with compute capability 9.0 and cuBLASLt 12.8":  {Devices: gpu(9, 0), BlasVersion: 120801},
		"this is Some GPU with compute capability 10.0 and cuBLASLt 13.0": {Devices: gpu(10, 0)},
		"the fake cuBLASLt": {NoBlas: true},
	} {
		device, _ := openFake(t, config)
		g := gorgonia.NewGraph()
		gorgonia.Must(gorgonia.Square(gorgonia.NewScalar(g, tensor.Float32,
			gorgonia.WithName("x"))))
		m, err := NewMachine(device, g, WithPrecision(Float8))
		if m != nil || err == nil || !strings.Contains(err.Error(), want) ||
			!config.NoBlas && !strings.Contains(err.Error(), "WithPrecision(Float8)") ||
			!strings.HasPrefix(err.Error(), "cudaops.NewMachine: ") {
			t.Errorf("error %v, want one with %q", err, want)
		}
		require.NotEqual(t, errors.Is(err, ErrUnsupportedPrecision), config.NoBlas, !config.NoBlas)
	}
}
