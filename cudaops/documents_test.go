package cudaops

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/lower"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/op"
)

// TestDocuments wants attention to documents to give what it gives on the CPU, with its projections fused, and no warning.
func TestDocuments(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	t.Run("fake", func(t *testing.T) { testDocuments(t, device, 1e-5, fakeOption) })
	t.Run("scaled", func(t *testing.T) { testDocuments(t, device, 1e-5, fakeOption, scaledGradients) })
	t.Run("GPU", func(t *testing.T) { testDocuments(t, openGPU(t), 1e-4) })
	t.Run("float16", func(t *testing.T) { testDocuments(t, openGPU(t), 2e-2, WithPrecision(Float16)) })
	t.Run("bfloat16", func(t *testing.T) { testDocuments(t, openGPU(t), 5e-2, WithPrecision(BFloat16)) })
}

func testDocuments(t *testing.T, device *Device, tolerance float64, opts ...MachineOption) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	f := fuseCase{starts: []int{0, 1, 1, 0, 0, 2}}
	g, params, keep := f.graph(t, seed)
	same, sameParams, sameKeep := f.graph(t, seed)
	m, err := NewMachine(device, g, append(opts, WithStrict(), WithParams(params...), WithOutputs(keep...))...)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	tape := gorgonia.NewTapeMachine(same, gorgonia.BindDualValues(sameParams...))
	defer tape.Close()
	if err := tape.RunAll(); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		want := append(sameKeep, derivatives(sameParams)...)
		for i, n := range append(keep, derivatives(params)...) {
			v, err := m.Value(n)
			if err != nil {
				t.Fatal(err)
			}
			if d := distance(t, v, want[i].Value()); !(d < tolerance) {
				t.Errorf("%s differs by %.2g", lower.Describe(n), d)
			}
		}
	}
	// The table of documents is a task of its own, under the name of the attention, once for both passes.
	if n := tasksOf(m); n["DocumentAttention"] != 2 || n["AttentionGrad"] != 1 || n["RoPE"] != 1 {
		t.Errorf("%d tasks of DocumentAttention, %d of its gradient and %d of RoPE", n["DocumentAttention"], n["AttentionGrad"], n["RoPE"])
	}
	starts := keep[0].Graph().ByName("starts")[0]
	for _, bad := range []struct {
		starts []int
		why    string
	}{{[]int{0, 0, 0, 0, 2, 2}, "starts[4] is 2"}, {[]int{0, 1, 0, 0, 0, 0}, "starts[2] is 0"}, {[]int{0, 0, 0, -1, 0, 0}, "starts[3] is -1"}} {
		value := tensor.New(tensor.WithBacking(bad.starts))
		if err := errors.Join(gorgonia.Let(starts, value), m.RunAll()); err == nil || !strings.Contains(err.Error(), bad.why) {
			t.Errorf("documents that start at %v: %v, want %q", bad.starts, err, bad.why)
		}
	}
}

// TestDocumentsOfTwoLengths wants attentions to sequences of different lengths, which share where their documents start, to have
// a table and a check each.
func TestDocumentsOfTwoLengths(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	const rows, d = 6, 4
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName("x"), gorgonia.WithShape(rows, d), gorgonia.WithInit(gorgonia.Gaussian(0, 1)))
	starts := gorgonia.NewTensor(g, tensor.Int, 1, gorgonia.WithName("starts"), gorgonia.WithShape(rows))
	for _, seq := range []int{rows, rows / 2} {
		if _, err := op.DocumentAttention(x, x, x, starts, op.AttentionConfig{Heads: 1, HeadDim: d, Seq: seq, Causal: true}); err != nil {
			t.Fatal(err)
		}
	}
	m, err := NewMachine(device, g, fakeOption, WithStrict())
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if n := tasksOf(m)["DocumentAttention"]; n != 4 {
		t.Errorf("%d tasks, want 4", n)
	}
	if err := m.Bind(starts, 1<<20, 8*rows); err == nil || !strings.Contains(err.Error(), "holds starts of DocumentAttention") {
		t.Errorf("bound to memory: %v", err)
	}
	run := func(at ...int) error {
		return errors.Join(gorgonia.Let(starts, tensor.New(tensor.WithBacking(at))), m.RunAll())
	}
	if err := run(0, 0, 0, 0, 0, 0); err != nil {
		t.Error(err)
	}
	if err := run(0, 0, 2, 2, 2, 2); err == nil || !strings.Contains(err.Error(), "starts[3] is 2, want 0") {
		t.Errorf("a start of the long sequence alone: %v", err)
	}
}

// TestLoneDocuments runs every op of such a graph alone.
func TestLoneDocuments(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	f := fuseCase{starts: []int{0, 1, 1, 0, 0, 2}}
	g, params, _ := f.graph(t, seed)
	same, sameParams, _ := f.graph(t, seed)
	r := newSingleRunner(t, device, fakeOption)
	tape := gorgonia.NewTapeMachine(same, gorgonia.BindDualValues(sameParams...))
	defer tape.Close()
	if err := errors.Join(r.run(g), tape.RunAll()); err != nil {
		t.Fatal(err)
	}
	for i, p := range params {
		got := tensor.New(tensor.WithBacking(r.value(p.Deriv())))
		if d := distance(t, got, sameParams[i].Deriv().Value()); !(d < 1e-5) {
			t.Errorf("the gradient of %s differs by %.2g", p.Name(), d)
		}
	}
}

// TestDocumentsModel wants the gradients of a model whose attention keeps documents apart to be those of Gorgonia's machine, also
// where blocks are computed again.
func TestDocumentsModel(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	c := llm.Config{Vocab: 19, Dim: 16, Layers: 2, Heads: 2, KVHeads: 1, Seq: 70, Documents: true}.Default()
	batch := data.Batch{Inputs: make([]int, 2*c.Seq), Targets: make([]int, 2*c.Seq), Starts: make([]int, 2*c.Seq)}
	r := rand.New(rand.NewPCG(seed, 1))
	for i := range batch.Inputs {
		batch.Inputs[i], batch.Targets[i], batch.Starts[i] = r.IntN(c.Vocab), r.IntN(c.Vocab), i%c.Seq/33*33
	}
	model, err := llm.NewModel(c, tensor.Float32, seed)
	if err != nil {
		t.Fatal(err)
	}
	graph := func(opts ...llm.GraphOption) *llm.Graph {
		g, err := model.Graph(llm.ForTraining, 2, opts...)
		if err == nil {
			err = g.Let(batch)
		}
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	want := graph()
	tape := gorgonia.NewTapeMachine(want.G, gorgonia.BindDualValues(want.Params...))
	defer tape.Close()
	if err := tape.RunAll(); err != nil {
		t.Fatal(err)
	}
	for name, opts := range map[string][]llm.GraphOption{"plain": nil, "recompute": {llm.WithRecompute()}} {
		g := graph(opts...)
		m, err := NewMachine(device, g.G, fakeOption, WithStrict(), WithParams(g.Params...), WithOutputs(g.Loss))
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		nodes := append(gorgonia.Nodes{want.Loss}, derivatives(want.Params)...)
		for i, n := range append(gorgonia.Nodes{g.Loss}, derivatives(g.Params)...) {
			v, err := m.Value(n)
			if err != nil {
				t.Fatal(err)
			}
			if d := distance(t, v, nodes[i].Value()); !(d < 1e-4) {
				t.Errorf("%s: result %d differs by %.2g", name, i, d)
			}
		}
	}
}
