package cudaops

import (
	"maps"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/lower"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
)

// tasksOf counts a machine's tasks by their node's op.
func tasksOf(m *Machine) map[string]int {
	count := map[string]int{}
	for _, t := range m.runner.Program.Calls {
		name, _, _ := strings.Cut(t.Op, "{")
		count[name]++
	}
	return count
}

// TestModelIsFused counts what is left of a model of twelve blocks: no sum at all, one product for queries, keys and values,
// and in a graph that uses the parameters of another machine no copies of these.
func TestModelIsFused(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	c := llm.Config{Vocab: 19, Dim: 16, Layers: 12, Heads: 2, KVHeads: 1, Seq: 6}.Default()
	m, err := llm.NewModel(c, tensor.Float32, 1)
	if err != nil {
		t.Fatal(err)
	}
	forward := map[string]int{"Embedding": 1, "RMSNorm": 25, "Linear": 24, "RoPE": 12, "Attention": 12, "SiLUMLP": 36, "LinearCrossEntropy": 4}
	both := maps.Clone(forward)
	both["LinearCrossEntropy"] += 2
	for name, n := range map[string]int{"Embedding": 1, "RMSNorm": 25, "Linear": 48, "Attention": 12, "SiLUMLP": 60} {
		both[name+"Grad"] = n
	}
	both["RMSNormWeightGrad"] = 1
	check := func(kind llm.GraphKind, want map[string]int, opts ...MachineOption) *Machine {
		t.Helper()
		g, err := m.Graph(kind, 2)
		if err != nil {
			t.Fatal(err)
		}
		machine, err := NewMachine(device, g.G, append(opts, fakeOption, WithOutputs(g.Loss), WithStrict(), WithParams(g.Params...))...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := machine.Close(); err != nil {
				t.Error(err)
			}
		})
		if got := tasksOf(machine); !maps.Equal(got, want) {
			t.Errorf("kind %v: tasks\n%v, want\n%v", kind, got, want)
		}
		return machine
	}
	training := check(llm.ForTraining, both)
	check(llm.ForLoss, forward)
	check(llm.ForLoss, forward, WithParamsOf(training))
}

// fuseCase is a small graph with everything that could be fused, and a reason not to.
type fuseCase struct {
	name string
	// keep names values that shall outlive the run: a node, or with d: a part of the gradients that the op of a node has.
	keep     []string
	keyBase  float64  // of the keys' rotation; 0 for that of the queries
	alsoUsed []string // nodes that the loss also reads
	starts   []int    // of documents, if attention is to keep them apart
	want     map[string]int
}

// fuseCases say how many tasks there are, where it is not as in the first.
var fuseCases = []fuseCase{
	{name: "all", want: map[string]int{"Embedding": 1, "RMSNorm": 3, "Linear": 2, "RoPE": 1, "Attention": 1, "AttentionGrad": 1,
		"LinearGrad": 4, "RMSNormGrad": 3, "SiLUMLP": 3, "EmbeddingGrad": 1, "LinearCrossEntropy": 6, "+ false": 0}},
	{name: "sum kept", keep: []string{"s"}},
	{name: "norm kept", keep: []string{"y"}},
	{name: "linear layer kept", keep: []string{"o"}},
	{name: "perceptron kept", keep: []string{"m"}},
	{name: "perceptron read", alsoUsed: []string{"m"}, want: map[string]int{"+ false": 2}},
	{name: "sum read", alsoUsed: []string{"s"}, want: map[string]int{"+ false": 3}}, // of three gradients, in an order that folds none
	{name: "queries kept", keep: []string{"q"}, want: map[string]int{"Linear": 4, "RoPE": 4, "LinearGrad": 8, "+ false": 2}},
	{name: "values read", alsoUsed: []string{"v"}, want: map[string]int{"Linear": 4, "RoPE": 4, "LinearGrad": 8, "+ false": 4}},
	{name: "queries before they are turned, kept", keep: []string{"q0"}, want: map[string]int{"Linear": 4, "RoPE": 4, "LinearGrad": 8, "+ false": 2}},
	{name: "keys turned otherwise", keyBase: 500, want: map[string]int{"Linear": 4, "RoPE": 4, "LinearGrad": 8, "+ false": 2}},
	{name: "gradient of values kept", keep: []string{"d:v"}, want: map[string]int{"RoPE": 3, "LinearGrad": 8, "+ false": 2}},
	{name: "gradient of the norm's input kept", keep: []string{"d:h"}, want: map[string]int{"+ false": 1}},
	{name: "gradient of the head kept", keep: []string{"d:loss"}, want: map[string]int{"+ false": 1}},
}

const fuseDim, fuseSeq, fuseRows, fuseVocab = 16, 3, 6, 11

// graph returns the graph, its parameters, and what to keep: the loss among it.
func (f fuseCase) graph(t *testing.T, seed uint64) (*gorgonia.ExprGraph, gorgonia.Nodes, gorgonia.Nodes) {
	t.Helper()
	r, g := rand.New(rand.NewPCG(seed, 8)), gorgonia.NewGraph()
	var params gorgonia.Nodes
	param := func(name string, s ...int) *gorgonia.Node {
		x := make([]float32, program.Size(s))
		for i := range x {
			x[i] = float32(0.3 * r.NormFloat64())
		}
		n := gorgonia.NewTensor(g, tensor.Float32, len(s), gorgonia.WithName(name), gorgonia.WithShape(s...),
			gorgonia.WithValue(tensor.New(tensor.WithShape(s...), tensor.WithBacking(x))))
		params = append(params, n)
		return n
	}
	ints := func(name string) *gorgonia.Node {
		x := make([]int, fuseRows)
		x[0] = r.IntN(fuseVocab)
		for i := range x[1:] { // not twice the same: queries and keys of such tokens have no gradient where no others are seen
			x[i+1] = (x[i] + 1 + r.IntN(fuseVocab-1)) % fuseVocab
		}
		return gorgonia.NewTensor(g, tensor.Int, 1, gorgonia.WithName(name), gorgonia.WithShape(fuseRows),
			gorgonia.WithValue(tensor.New(tensor.WithShape(fuseRows), tensor.WithBacking(x))))
	}
	must := func(n *gorgonia.Node, err error) *gorgonia.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	named := map[string]*gorgonia.Node{}
	table := param("table", fuseVocab, fuseDim)
	x := must(op.Embedding(ints("ids"), table))
	h := must(op.RMSNorm(x, param("norm1", fuseDim), 1e-5))
	rope := op.RoPEConfig{Seq: fuseSeq, Heads: 4, HeadDim: 4, Base: 100}
	named["q0"] = must(op.Linear(h, param("wq", 16, fuseDim)))
	named["q"] = must(op.RoPE(named["q0"], rope))
	rope.Heads = 2
	if f.keyBase != 0 {
		rope.Base = f.keyBase
	}
	named["k"] = must(op.RoPE(must(op.Linear(h, param("wk", 8, fuseDim))), rope))
	named["v"] = must(op.Linear(h, param("wv", 8, fuseDim)))
	c := op.AttentionConfig{Seq: fuseSeq, Heads: 4, KVHeads: 2, HeadDim: 4, Causal: true}
	attend := func() (*gorgonia.Node, error) { return op.Attention(named["q"], named["k"], named["v"], c) }
	if f.starts != nil {
		starts := gorgonia.NewTensor(g, tensor.Int, 1, gorgonia.WithName("starts"), gorgonia.WithShape(fuseRows),
			gorgonia.WithValue(tensor.New(tensor.WithBacking(f.starts))))
		attend = func() (*gorgonia.Node, error) {
			return op.DocumentAttention(named["q"], named["k"], named["v"], starts, c)
		}
	}
	a := must(attend())
	named["o"] = must(op.Linear(a, param("wo", fuseDim, 16)))
	named["s"] = must(gorgonia.Add(x, named["o"]))
	m := must(op.SiLUMLP(must(op.RMSNorm(named["s"], param("norm3", fuseDim), 1e-5)), param("gate", 7, fuseDim), param("up", 7, fuseDim),
		param("down", fuseDim, 7)))
	named["m"], named["s2"] = m, must(gorgonia.Add(named["s"], m))
	named["y"] = must(op.RMSNorm(named["s2"], param("norm2", fuseDim), 1e-5))
	named["loss"] = must(op.LinearCrossEntropy(named["y"], table, ints("targets")))
	cost := named["loss"]
	for _, name := range f.alsoUsed {
		n := named[name]
		cost = must(gorgonia.Add(cost, must(gorgonia.Sum(must(gorgonia.HadamardProd(n, param("with "+name, n.Shape()...)))))))
	}
	if _, err := gorgonia.Grad(cost, params...); err != nil {
		t.Fatal(err)
	}
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

// gradientPart finds the gradient of attention's values (v), of the first norm's input (h), or of the output layer's table.
func gradientPart(t *testing.T, g *gorgonia.ExprGraph, of string) *gorgonia.Node {
	t.Helper()
	for _, n := range g.AllNodes() {
		part, ok := n.Op().(*opbase.PartOp)
		if !ok {
			continue
		}
		packed := opbase.Children(n)[0]
		switch packed.Op().(type) {
		case *op.AttentionGradOp:
			ok = of == "v" && part.Offset == fuseRows*(16+8)
		case *op.RMSNormGradOp:
			ok = of == "h" && part.Offset == 0 && opbase.Children(packed)[1].Name() == "norm1"
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

// TestFuse counts the tasks of small graphs, and wants the values of a machine that is asked for all values and so can leave
// none out.
func TestFuse(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testFuse(t, device, len(fuseCases), 1e-5, fakeOption)
	})
	t.Run("float32", func(t *testing.T) { testFuse(t, openGPU(t), 1, 1e-4) })
	t.Run("bfloat16", func(t *testing.T) { testFuse(t, openGPU(t), 1, 5e-2, WithPrecision(BFloat16)) })
}

// testFuse has so many cases at most in short mode.
func testFuse(t *testing.T, device *Device, most int, tolerance float64, opts ...MachineOption) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	for _, f := range fuseCases[:few(len(fuseCases), most)] {
		t.Run(f.name, func(t *testing.T) {
			g, params, keep := f.graph(t, seed)
			machine := newFuseMachine(t, device, g, params, keep, opts)
			got := tasksOf(machine)
			for op, n := range fuseCases[0].want {
				if len(f.alsoUsed) > 0 && machine.config.act != gpu.Float32 {
					break // products with float32 parameters are float32, and take casts
				}
				if other, ok := f.want[op]; ok {
					n = other
				}
				if got[op] != n {
					t.Errorf("%d tasks of %s, want %d", got[op], op, n)
				}
			}
			same, sameParams, sameKeep := f.graph(t, seed)
			unfused := newFuseMachine(t, device, same, sameParams, results(same), opts)
			if err := unfused.RunAll(); err != nil {
				t.Fatal(err)
			}
			nodes, want := append(keep, derivatives(params)...), append(sameKeep, derivatives(sameParams)...)
			for range few(2, 1) {
				if err := machine.RunAll(); err != nil {
					t.Fatal(err)
				}
				for i, n := range nodes {
					v, err := machine.Value(n)
					if err != nil {
						t.Fatal(err)
					}
					w, err := unfused.Value(want[i])
					if err != nil {
						t.Fatal(err)
					}
					d := distance(t, v, w)
					if n.IsScalar() { // a sum may be near zero, and what it is made of is not
						d = min(d, math.Abs(float64(flat(t, v)[0]-flat(t, w)[0])))
					}
					if !(d < tolerance) {
						t.Errorf("%s differs by %.2g", lower.Describe(n), d)
					}
				}
			}
		})
	}
}

// valuesOf runs a machine and returns the values of nodes. If another machine's are given, which computes the same in another way, it
// returns those, and an error tells of which value is too far from them.
func valuesOf(t *testing.T, m *Machine, nodes gorgonia.Nodes, others []gorgonia.Value, tolerance float64) (values []gorgonia.Value) {
	t.Helper()
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	for i, n := range nodes {
		v, err := m.Value(n)
		if err != nil {
			t.Fatal(err)
		}
		if values = append(values, v); others == nil {
			continue
		}
		if diff := distance(t, v, others[i]); !(diff < tolerance) {
			t.Errorf("value %d differs by %.2g", i, diff)
		}
	}
	if others != nil {
		return others
	}
	return values
}

// randomMatrices returns what makes a graph's matrices, of normal numbers of a standard deviation.
func randomMatrices(g *gorgonia.ExprGraph, seed, stream uint64, deviation float64) func(name string, rows, columns int) *gorgonia.Node {
	r := rand.New(rand.NewPCG(seed, stream))
	return func(name string, rows, columns int) *gorgonia.Node {
		x := make([]float32, rows*columns)
		for i := range x {
			x[i] = float32(deviation * r.NormFloat64())
		}
		return gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName(name), gorgonia.WithShape(rows, columns),
			gorgonia.WithValue(tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(x))))
	}
}

// withGradients returns y and the gradients of the sum of y ⊙ with.
func withGradients(t *testing.T, y, with *gorgonia.Node, in gorgonia.Nodes) gorgonia.Nodes {
	t.Helper()
	grads, err := gorgonia.Grad(gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.HadamardProd(y, with)))), in...)
	if err != nil {
		t.Fatal(err)
	}
	return append(gorgonia.Nodes{y}, grads...)
}

func newFuseMachine(t *testing.T, device *Device, g *gorgonia.ExprGraph, params, keep gorgonia.Nodes, opts []MachineOption) *Machine {
	t.Helper()
	m, err := NewMachine(device, g, append([]MachineOption{WithParams(params...), WithOutputs(keep...), WithStrict()}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// results is all nodes of a graph that are computed.
func results(g *gorgonia.ExprGraph) (all gorgonia.Nodes) {
	for _, n := range g.AllNodes() {
		if n.Op() != nil {
			all = append(all, n)
		}
	}
	return all
}
