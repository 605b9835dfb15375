package cudaops

import (
	"bytes"
	"errors"
	"log/slog"
	"maps"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/lower"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// layers is a graph in which everything comes that [Float8] computes otherwise: a projection for each of queries, keys and values,
// a linear layer, and a perceptron, with norms and sums between them as in a model's block.
type layers struct {
	g      *gorgonia.ExprGraph
	params gorgonia.Nodes
	keep   gorgonia.Nodes // the cost, the result, and the gradients of parameters
	named  map[string]*gorgonia.Node
}

// newLayers has batch sequences of seq tokens, d features of 2 heads or of as many as have 128, and a perceptron of f.
func newLayers(t testing.TB, seed uint64, batch, seq, d, f int) *layers {
	t.Helper()
	l := &layers{g: gorgonia.NewGraph(), named: map[string]*gorgonia.Node{}}
	r := rand.New(rand.NewPCG(seed, 9))
	input := func(name string, scale float64, s ...int) *gorgonia.Node {
		x := make([]float32, program.Size(s))
		for i := range x {
			x[i] = float32(scale * r.NormFloat64())
		}
		n := gorgonia.NewTensor(l.g, tensor.Float32, len(s), gorgonia.WithName(name), gorgonia.WithShape(s...),
			gorgonia.WithValue(tensor.New(tensor.WithShape(s...), tensor.WithBacking(x))))
		l.named[name] = n
		return n
	}
	param := func(name string, s ...int) *gorgonia.Node {
		n := input(name, 0.7/math.Sqrt(float64(s[len(s)-1])), s...)
		l.params = append(l.params, n)
		return n
	}
	must := func(n *gorgonia.Node, err error) *gorgonia.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	rows := batch * seq
	x := input("x", 1, rows, d)
	h := must(op.RMSNorm(x, param("norm1", d), 1e-5))
	heads := max(2, d/128)
	rope := op.RoPEConfig{Seq: seq, Heads: heads, HeadDim: d / heads, Base: 100}
	q := must(op.RoPE(must(op.Linear(h, param("wq", d, d))), rope))
	k := must(op.RoPE(must(op.Linear(h, param("wk", d, d))), rope))
	v := must(op.Linear(h, param("wv", d, d)))
	a := must(op.Attention(q, k, v, op.AttentionConfig{Seq: seq, Heads: heads, KVHeads: heads, HeadDim: d / heads, Causal: true}))
	s := must(gorgonia.Add(x, must(op.Linear(a, param("wo", d, d)))))
	h = must(op.RMSNorm(s, param("norm2", d), 1e-5))
	y := must(gorgonia.Add(s, must(op.SiLUMLP(h, param("gate", f, d), param("up", f, d), param("down", d, f)))))
	y = must(op.RMSNorm(y, param("norm3", d), 1e-5))
	cost := must(gorgonia.Sum(must(gorgonia.HadamardProd(y, input("with", 0.1, rows, d)))))
	if _, err := gorgonia.Grad(cost, l.params...); err != nil {
		t.Fatal(err)
	}
	l.named["y"] = y
	l.keep = append(gorgonia.Nodes{cost, y}, derivatives(l.params)...)
	return l
}

func (l *layers) values(t testing.TB, m *Machine) (values []gorgonia.Value) {
	t.Helper()
	for _, n := range l.keep {
		v, err := m.Value(n)
		if err != nil {
			t.Fatal(err)
		}
		values = append(values, v)
	}
	return values
}

// TestFloat8 wants what float8 makes of a block to be near to what float32 does, and its tasks those that the sizes allow.
func TestFloat8(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	near := func(t *testing.T, l *layers, narrow, plain *Machine, tolerance float64, differs bool) {
		t.Helper()
		for _, m := range []*Machine{plain, narrow, narrow} {
			if err := m.RunAll(); err != nil {
				t.Fatal(err)
			}
		}
		got, want := l.values(t, narrow), l.values(t, plain)
		for i, n := range l.keep[1:] {
			if d := distance(t, got[i+1], want[i+1]); !(d < tolerance) || (d == 0) == differs {
				t.Errorf("%s differs by %.2g", lower.Describe(n), d)
			}
		}
	}
	for _, c := range []struct {
		name             string
		batch, seq, d, f int
		want             map[string]int // of the tasks that quantise
	}{
		{"a block", 3, 45, 32, 48, map[string]int{"Quantize": 2}}, // attention's result, and its gradients side by side
		{"the fewest rows", 4, 32, 16, 16, map[string]int{"Quantize": 2}},
		{"a row too few", 1, 127, 32, 48, nil},
		{"features no multiple", 3, 45, 36, 48, nil},
		{"a perceptron of 24", 3, 45, 32, 24, map[string]int{"Quantize": 3}}, // and the gradients of gate and up
		{"a perceptron of 20", 3, 45, 32, 20, map[string]int{"Quantize": 2}},
	} {
		t.Run(c.name, func(t *testing.T) {
			device, _, fakeOption := openFake(t, fake.Config{})
			l := newLayers(t, seed, c.batch, c.seq, c.d, c.f)
			plain := newFuseMachine(t, device, l.g, l.params, l.keep, []MachineOption{fakeOption})
			narrow := newFuseMachine(t, device, l.g, l.params, l.keep, []MachineOption{fakeOption, float8Products})
			near(t, l, narrow, plain, 0.2, c.want != nil)
			tasks, more := tasksOf(plain), tasksOf(narrow)
			maps.DeleteFunc(more, func(op string, n int) bool { return tasks[op] == n })
			if len(more) != len(c.want) || !maps.Equal(more, c.want) {
				t.Errorf("tasks beside those of float32: %v, want %v", more, c.want)
			}
			if c.want == nil {
				return
			}
			t.Setenv("KASMINA_WAYS", "")
			var alone, adding int
			own := newFuseMachine(t, device, l.g, l.params, l.keep, []MachineOption{fakeOption, float8Products, withOwnProducts(&alone, &adding),
				WithWays("Matmul"+"=hopper-*", "RoPEProduct=fused")})
			near(t, l, own, plain, 0.2, true)
			if fused := tasksOf(own)["RoPE"] == 0; !fused || alone == 0 || adding == 0 {
				t.Errorf("RoPE is in the product: %v; %d products of this module's own, %d with a matrix added", fused, alone, adding)
			}
			if got, want := flopsOfFloat8(own), flopsOfFloat8(narrow); got != want || want == 0 {
				t.Errorf("%v operations of float8 by this module's own kernels, want %v as by others", got, want)
			}
		})
	}
	t.Run("GPU", func(t *testing.T) {
		device := openGPUFloat8(t)
		for _, size := range [][4]int{{3, 67, 256, 336}, {2, 65, 256, 264}, {5, 128, 1024, 2048}} {
			l := newLayers(t, seed, size[0], size[1], size[2], size[3])
			plain := newFuseMachine(t, device, l.g, l.params, l.keep, nil)
			near(t, l, newFuseMachine(t, device, l.g, l.params, l.keep, []MachineOption{WithPrecision(Float8)}), plain, 0.2, true)
			own := newFuseMachine(t, device, l.g, l.params, l.keep, []MachineOption{WithPrecision(Float8),
				WithWays("Matmul"+"=hopper-*", "RoPEProduct=fused")})
			near(t, l, own, plain, 0.2, true)
			fused := tasksOf(own)["RoPE"] == 0
			if want := size[2] > 384 && device.info.Capability() == 90; fused != want { // what the kernels take
				t.Errorf("%v: RoPE is in the product: %v", size, fused)
			}
		}
	})
}

// flopsOfFloat8 is the operations that a profile measures by the ceiling of float8.
func flopsOfFloat8(m *Machine) (flops float64) {
	for _, t := range m.runner.Program.Calls {
		if t.Float8 {
			flops += t.FLOPs
		}
	}
	return flops
}

// openGPUFloat8 returns the GPU, and skips the test where it does not multiply float8.
func openGPUFloat8(t *testing.T) *Device {
	t.Helper()
	device := openGPU(t)
	if got := device.info.Capability(); got != float8Capability {
		t.Skipf("needs compute capability 9.0, this is %d", got)
	}
	return device
}

// TestFloat8Exactly wants products to be those of their operands as they are rounded, with the factors of rows.
func TestFloat8Exactly(t *testing.T) {
	const rows, in, out = 131, 48, 32
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	r, g := rand.New(rand.NewPCG(seed, 1)), gorgonia.NewGraph()
	matrix := func(name string, rows, columns int) (*gorgonia.Node, []float32) {
		x := make([]float32, rows*columns)
		for i := range x {
			x[i] = float32(r.NormFloat64() * math.Exp(2*r.NormFloat64()))
		}
		clear(x[columns : 2*columns])
		return gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName(name), gorgonia.WithShape(rows, columns),
			gorgonia.WithValue(tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(x)))), x
	}
	x, xs := matrix("x", rows, in)
	w, ws := matrix("w", out, in)
	with, gs := matrix("with", rows, out)
	y, err := op.Linear(x, w)
	if err != nil {
		t.Fatal(err)
	}
	cost := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.HadamardProd(y, with))))
	grads, err := gorgonia.Grad(cost, x, w)
	if err != nil {
		t.Fatal(err)
	}
	device, _, fakeOption := openFake(t, fake.Config{})
	for name, params := range map[string]gorgonia.Nodes{"a parameter": {w}, "any weight": nil} {
		m := newFuseMachine(t, device, g, params, append(gorgonia.Nodes{y}, grads...), []MachineOption{fakeOption, float8Products})
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		turned := make([]float32, in*out)
		for i, v := range ws {
			turned[i%in*out+i/in] = v
		}
		for i, want := range [][]float32{roundedProduct(xs, ws, in), roundedProduct(gs, turned, out)} {
			got, err := m.Value([]*gorgonia.Node{y, grads[0]}[i])
			if err != nil {
				t.Fatal(err)
			}
			if d := apartBy(flat(t, got), want); !(d < 1e-6) {
				t.Errorf("%s: product %d differs by %.2g", name, i, d)
			}
		}
		want := map[bool]map[string]int{true: {"Quantize": 2}, false: {"Quantize": 3, "QuantizeColumns": 1}}[params != nil]
		for op, n := range want {
			if got := tasksOf(m)[op]; got != n {
				t.Errorf("%s: %d tasks of %s, want %d", name, got, op, n)
			}
		}
	}
}

// roundedProduct is a·bᵀ of rows of k numbers, each row rounded to float8.
func roundedProduct(a, b []float32, k int) []float32 {
	round := func(x []float32) []float64 {
		var all []float64
		for row := range slices.Chunk(x, k) {
			bytes := make([]byte, k)
			scale := float64(quantizedRow(bytes, row))
			for _, v := range bytes {
				all = append(all, scale*float64(gpu.FromE4M3(v)))
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

// float8Model is the graph of a model whose products are of float8, with a Kasmina layer in it.
func float8Model(t testing.TB, kind llm.GraphKind, seed uint64, dim int, opts ...llm.GraphOption) (*llm.Model, *batch) {
	t.Helper()
	c := llm.Config{Vocab: 19, Dim: dim, Layers: 2, Heads: 2, KVHeads: 1, Seq: 65, FF: 3 * dim / 2, Kasmina: []int{0}, Seeds: 4}.Default()
	m, err := llm.NewModel(c, tensor.Float32, seed, state.WithoutGates())
	if err != nil {
		t.Fatal(err)
	}
	g, err := m.Graph(kind, 2, opts...)
	if err != nil {
		t.Fatal(err)
	}
	b := &batch{Graph: g}
	b.draw(t, seed)
	return m, b
}

// TestFloat8Weights wants a machine that has updated its parameters, or got others, to compute what one does that begins with
// these, and one that shares them too, without weights of its own.
func TestFloat8Weights(t *testing.T) {
	for name, newOptimizer := range map[string]func() (optim.Optimizer, error){"AdamW": newAdamW, "Muon": newMuon} {
		t.Run(name, func(t *testing.T) {
			if name == "Muon" && testing.Short() {
				t.Skip("takes long under the race detector, and differs from AdamW in what updates the parameters alone")
			}
			device, _, fakeOption := openFake(t, fake.Config{})
			testFloat8Weights(t, device, 32, newOptimizer, []MachineOption{fakeOption}, float8Products)
		})
	}
	t.Run("GPU", func(t *testing.T) {
		testFloat8Weights(t, openGPUFloat8(t), few(256, 128), newAdamW, []MachineOption{WithPrecision(BFloat16)}, WithPrecision(Float8))
	})
}

func testFloat8Weights(t *testing.T, device *Device, dim int, newOptimizer func() (optim.Optimizer, error), plain []MachineOption,
	narrow MachineOption) {
	const seed = 5
	open := func(b *batch, more ...MachineOption) *Machine {
		t.Helper()
		return newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss}, append(append(slices.Clone(plain), narrow), more...))
	}
	loss := func(m *Machine, b *batch) float32 {
		t.Helper()
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		v, err := m.Value(b.Loss)
		if err != nil {
			t.Fatal(err)
		}
		return v.Data().(float32)
	}
	model, b := float8Model(t, llm.ForTraining, seed, dim)
	m := open(b, WithAccumulation())
	o, err := newOptimizer()
	if err != nil {
		t.Fatal(err)
	}
	if err := m.SetOptimizer(o, 1); err != nil {
		t.Fatal(err)
	}
	first := loss(m, b)
	for range 4 { // the later ones are replayed
		loss(m, b)
		if _, err := m.Update(); err != nil {
			t.Fatal(err)
		}
	}
	last := loss(m, b)
	if err := m.Download(); err != nil {
		t.Fatal(err)
	}
	if !(last < first) {
		t.Errorf("the loss is %v, was %v", last, first)
	}
	scoring, err := model.Graph(llm.ForLoss, 2)
	if err != nil {
		t.Fatal(err)
	}
	score := &batch{Graph: scoring}
	score.draw(t, seed)
	borrower := open(score, WithParamsOf(m))
	if n := len(borrower.runner.Program.Weights); n != 0 || len(m.runner.Program.Weights) == 0 {
		t.Errorf("%d weights are made by the machine that owns them, and %d by the one that does not", len(m.runner.Program.Weights), n)
	}
	if got := tasksOf(borrower)["Quantize"]; got != 2 {
		t.Errorf("the borrower has %d tasks of Quantize, want those of attentions", got)
	}
	anew := open(score)
	if got, want := loss(borrower, score), loss(anew, score); got != want || got != last {
		t.Errorf("with the other's parameters the loss is %v, a machine that begins with them has %v, and the other %v", got, want, last)
	}
	fresh, _ := float8Model(t, llm.ForLoss, seed, dim)
	for _, p := range b.Params { // back to the first ones
		i := slices.IndexFunc(fresh.Params, func(q llm.Param) bool { return q.Name == p.Name() })
		copy(p.Value().Data().([]float32), fresh.Params[i].Value.Float32s())
	}
	if err := m.Upload(b.Params...); err != nil {
		t.Fatal(err)
	}
	if got := loss(m, b); got != first {
		t.Errorf("with the first parameters the loss is %v, was %v", got, first)
	}
	owner := newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss}, plain)
	if got, want := loss(open(score, WithParamsOf(owner)), score), loss(borrower, score); got != want {
		t.Errorf("with the parameters of a machine without float8 the loss is %v, want %v", got, want)
	}
}

// TestFloat8Bound wants a parameter that lies in memory of the program's to be read as it is when a run begins.
func TestFloat8Bound(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	l := newLayers(t, 1, 3, 45, 32, 48)
	open := func() *Machine {
		return newFuseMachine(t, device, l.g, l.params, l.keep, []MachineOption{fakeOption, float8Products})
	}
	m, gate := open(), l.named["gate"]
	h, numbers := host{t, device.ctx}, gate.Value().Data().([]float32)
	memory := h.place(numbers)
	if err := m.Bind(gate, memory, 4*len(numbers)); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		for i := range numbers {
			numbers[i] *= -1.5
		}
		h.write(memory, numbers)
		fresh := open()
		if err := errors.Join(m.RunAll(), fresh.RunAll()); err != nil {
			t.Fatal(err)
		}
		got, want := l.values(t, m), l.values(t, fresh)
		for i, n := range l.keep {
			if !slices.Equal(flat(t, got[i]), flat(t, want[i])) {
				t.Errorf("%s differs from that of a machine that was given the value", lower.Describe(n))
			}
		}
	}
}

// TestFloat8UploadFails wants an upload that the device refuses behind the parameters to leave their float8 as new as they are.
func TestFloat8UploadFails(t *testing.T) {
	device, cuda, fakeOption := openFake(t, fake.Config{})
	_, b := float8Model(t, llm.ForLoss, 4, 32)
	open := func() *Machine {
		return newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss}, []MachineOption{fakeOption, float8Products})
	}
	m := open()
	for _, p := range b.Params {
		for i, v := range p.Value().Data().([]float32) {
			p.Value().Data().([]float32)[i] = -1.5 * v
		}
	}
	cuda.Fail("cuMemcpyHtoDAsync", len(b.Params)+1, gpu.OutOfMemory)
	if err := m.Upload(append(slices.Clone(b.Params), b.IDs)...); !errors.Is(err, gpu.OutOfMemory) {
		t.Errorf("an upload whose last copy fails: %v", err)
	}
	fresh := open()
	if err := errors.Join(m.RunAll(), fresh.RunAll()); err != nil {
		t.Fatal(err)
	}
	got, err := m.Value(b.Loss)
	want, wantErr := fresh.Value(b.Loss)
	if err := errors.Join(err, wantErr); err != nil {
		t.Fatal(err)
	}
	if got.Data() != want.Data() {
		t.Errorf("the loss is %v, that of a machine that was given the values is %v", got, want)
	}
}

// TestFloat8Recomputed wants blocks that are recomputed to leave the same bits of loss and gradients.
func TestFloat8Recomputed(t *testing.T) {
	test := func(t *testing.T, device *Device, dim int, opts ...MachineOption) {
		var results [2][]float32
		for i, graph := range [][]llm.GraphOption{nil, {llm.WithRecompute()}} {
			_, b := float8Model(t, llm.ForTraining, 3, dim, graph...)
			m := newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss}, opts)
			for range 3 {
				if err := m.RunAll(); err != nil {
					t.Fatal(err)
				}
			}
			for _, n := range append(gorgonia.Nodes{b.Loss}, derivatives(b.Params)...) {
				v, err := m.Value(n)
				if err != nil {
					t.Fatal(err)
				}
				results[i] = append(results[i], flat(t, v)...)
			}
		}
		if !slices.Equal(results[0], results[1]) {
			t.Errorf("results differ by %.2g", apartBy(results[1], results[0]))
		}
	}
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		test(t, device, 32, fakeOption, float8Products)
	})
	t.Run("GPU", func(t *testing.T) {
		// Tuned, a norm's gradient that stores float8 too, which only one of the graphs has, may add up in another order than one that does not.
		test(t, openGPUFloat8(t), few(256, 128), WithPrecision(Float8), WithTuning(TuneOff))
	})
}

// TestFloat8Trains trains twice with float8 and once with bfloat16: the same bits, and nearly the same loss.
func TestFloat8Trains(t *testing.T) {
	device := openGPUFloat8(t)
	train := func(p Precision) []float32 { return lossesOf(t, device, WithPrecision(p)) }
	narrowTrains(t, train(BFloat16), train(Float8), train(Float8))
}

// lossesOf trains a model of bfloat16 or float8 for some steps.
func lossesOf(t *testing.T, device *Device, opts ...MachineOption) (losses []float32) {
	t.Helper()
	_, b := float8Model(t, llm.ForTraining, 8, few(256, 128))
	m := newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss}, opts)
	o, err := newAdamW()
	if err == nil {
		err = m.SetOptimizer(o, 1)
	}
	if err != nil {
		t.Fatal(err)
	}
	for i := range few(20, 3) {
		b.draw(t, uint64(i%4))
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		loss, _, err := m.Step(b.Loss)
		if err != nil {
			t.Fatal(err)
		}
		losses = append(losses, float32(loss))
	}
	return losses
}

// narrowTrains wants losses in fewer digits to end near those in more, not to be them, and to be the same in two runs.
func narrowTrains(t *testing.T, wide, narrow, again []float32) {
	t.Helper()
	if !slices.Equal(narrow, again) {
		t.Errorf("losses of two runs differ: %v and %v", narrow, again)
	}
	last := len(wide) - 1
	t.Logf("losses %v and %v", narrow[last], wide[last])
	if d := narrow[last]/wide[last] - 1; !(math.Abs(float64(d)) < 0.02) || slices.Equal(narrow, wide) {
		t.Errorf("the loss is %v, and %v with more digits", narrow[last], wide[last])
	}
}

// TestFloat8Tuned wants the ways of products of float8 timed on operands that are numbers, also with a matrix added, and those of norms
// with their float8; and RoPE's product to be another than that of the type in which its result is stored.
func TestFloat8Tuned(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	device, _, fakeOption := openFake(t, fake.Config{Devices: smallCache("GPU")})
	l := newLayers(t, 1, 3, 45, 32, 48)
	var log bytes.Buffer
	adding := 0
	private := func(c *machineConfig) error {
		c.tuneLeast, c.tunePath = 1, filepath.Join(t.TempDir(), "tune.json")
		return nil
	}
	m := newFuseMachine(t, device, l.g, l.params, l.keep, []MachineOption{fakeOption, float8Products, withOwnProducts(new(int), &adding), private, WithTuning(TuneCached),
		WithLogger(slog.New(slog.NewTextHandler(&log, nil)))})
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	timed, turned := 0, 0
	for _, c := range m.Choices() {
		if c.Op == "Matmul" && strings.Contains(c.Shape, "Scaling:rows") && c.Source == Measured && c.Of == 4 {
			timed++
		}
		if c.Op == "RoPEProduct" && strings.HasSuffix(c.Shape, "of float8") && c.Source == Measured {
			turned++
		}
	}
	// Forward: [q k v] 96, attention's 32, which x is added to, gate and up 96 with sums of 32, down 32 of 48. Back: 32 of 96, twice, and of
	// 32, to which nothing is added, and 48 of 32.
	if timed != 6 || turned != 1 || adding == 0 || log.Len() > 0 {
		t.Errorf("%d shapes of products are timed, want 6, and %d with RoPE, want 1; %d run with a matrix added; %s", timed, turned, adding,
			log.String())
	}
}

// TestFloat8Refused wants an error that names the precision, what it needs and what there is.
func TestFloat8Refused(t *testing.T) {
	gpu := func(major, minor int) []gpu.DeviceInfo {
		return []gpu.DeviceInfo{{Name: "Some GPU", Major: major, Minor: minor, Memory: 1 << 30, SMs: 2, L2: 1 << 20}}
	}
	for want, config := range map[string]fake.Config{
		"this is Some GPU, of 8.9, with cuBLASLt 13.0":  {Devices: gpu(8, 9)},
		"this is Some GPU, of 9.0, with cuBLASLt 12.8":  {Devices: gpu(9, 0), BlasVersion: 120801},
		"this is Some GPU, of 10.0, with cuBLASLt 13.0": {Devices: gpu(10, 0)},
		"the fake cuBLASLt":                             {NoBlas: true},
	} {
		device, _, fakeOption := openFake(t, config)
		g := gorgonia.NewGraph()
		gorgonia.Must(gorgonia.Square(gorgonia.NewScalar(g, tensor.Float32, gorgonia.WithName("x"))))
		m, err := NewMachine(device, g, fakeOption, WithPrecision(Float8))
		if m != nil || err == nil || !strings.Contains(err.Error(), want) ||
			!config.NoBlas && !strings.Contains(err.Error(), "WithPrecision(Float8)") || !strings.HasPrefix(err.Error(), "cudaops.NewMachine: ") {
			t.Errorf("error %v, want one with %q", err, want)
		}
		if config.NoBlas == errors.Is(err, ErrUnsupportedPrecision) {
			t.Errorf("error %v, is it ErrUnsupportedPrecision: want %v", err, !config.NoBlas)
		}
	}
}
