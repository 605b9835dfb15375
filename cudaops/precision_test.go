package cudaops

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/cudaops/internal/update"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// layers is a graph in which everything comes that [Float8] computes otherwise: a projection for
// each of queries, keys and values, a linear layer, and a perceptron, with norms and sums between
// them as in a model's block.
type layers struct {
	g      *gorgonia.ExprGraph
	params gorgonia.Nodes
	keep   gorgonia.Nodes // the cost, the result, and the gradients of parameters
	named  map[string]*gorgonia.Node
}

// newLayers has batch sequences of seq tokens, d features of 2 heads or of as many as have 128, and
// a perceptron of f.
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

// TestFloat8 wants what float8 makes of a block to be near to what float32 does, and its tasks
// those that the sizes allow.
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
		want             map[string]int // of the tasks that quantise
	}{
		// attention's result, and its gradients side by side
		{"a block", 3, 45, 32, 48, map[string]int{"Quantize": 2}},
		{"the fewest rows", 4, 32, 16, 16, map[string]int{"Quantize": 2}},
		{"a row too few", 1, 127, 32, 48, nil},
		{"features no multiple", 3, 45, 36, 48, nil},
		// and the gradients of gate and up
		{"a perceptron of 24", 3, 45, 32, 24, map[string]int{"Quantize": 3}},
		{"a perceptron of 20", 3, 45, 32, 20, map[string]int{"Quantize": 2}},
	} {
		t.Run(c.name, func(t *testing.T) {
			device, _, fakeOption := openFake(t, fake.Config{})
			l := newLayers(t, seed, c.batch, c.seq, c.d, c.f)
			plain := newFuseMachine(t, device, l.g, l.params, l.keep, []MachineOption{fakeOption})
			narrow := newFuseMachine(t, device, l.g, l.params, l.keep,
				[]MachineOption{fakeOption, float8Products})
			near(t, l, narrow, plain, 0.2, c.want != nil)
			tasks, more := tasksOf(plain), tasksOf(narrow)
			maps.DeleteFunc(more, func(op string, n int) bool { return tasks[op] == n })
			require.True(t, maps.Equal(c.want, more), more)
			if c.want == nil {
				return
			}
			t.Setenv("KASMINA_WAYS", "")
			var alone, adding int
			own := newFuseMachine(t, device, l.g, l.params, l.keep,
				[]MachineOption{fakeOption, float8Products, withOwnProducts(&alone, &adding),
					WithWays("Matmul"+"=hopper-*", "RoPEProduct=fused")})
			near(t, l, own, plain, 0.2, true)
			require.True(t, tasksOf(own)["RoPE"] == 0)
			require.NotZero(t, alone)
			require.NotZero(t, adding)
			if got, want := flopsOfFloat8(own), flopsOfFloat8(narrow); got != want || want == 0 {
				t.Errorf("%v operations of float8 by this module's own kernels, want %v as by "+
					"others", got, want)
			}
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
					WithWays("Matmul"+"=hopper-*", "RoPEProduct=fused")})
			near(t, l, own, plain, 0.2, true)
			fused := tasksOf(own)["RoPE"] == 0
			// what the kernels take
			require.Equal(t, size[2] > 384 && device.info.Capability() == 90, fused, size)
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

// TestFloat8Exactly wants products to be those of their operands as they are rounded, with the
// factors of rows.
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
	device, _, fakeOption := openFake(t, fake.Config{})
	for name, params := range map[string]gorgonia.Nodes{"a parameter": {w}, "any weight": nil} {
		m := newFuseMachine(t, device, g, params, append(gorgonia.Nodes{y}, grads...),
			[]MachineOption{fakeOption, float8Products})
		require.NoError(t, m.RunAll())
		turned := make([]float32, in*out)
		for i, v := range ws {
			turned[i%in*out+i/in] = v
		}
		for i, want := range [][]float32{roundedProduct(xs, ws, in),
			roundedProduct(gs, turned, out)} {
			got := valueIn(t, m, []*gorgonia.Node{y, grads[0]}[i])
			require.Less(t, apartBy(flat(t, got), want), 1e-6, "%v, %v", name, i)
		}
		want := map[bool]map[string]int{true: {"Quantize": 2},
			false: {"Quantize": 3, "QuantizeColumns": 1}}[params != nil]
		for op, n := range want {
			require.Equal(t, n, tasksOf(m)[op], "%v, %v", name, op)
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

// TestFloat8Weights wants a machine that has updated its parameters, or got others, to compute what
// one does that begins with these, and one that shares them too, without weights of its own.
func TestFloat8Weights(t *testing.T) {
	for name, newOptimizer := range optimizers {
		t.Run(name, func(t *testing.T) {
			if name == "Muon" && testing.Short() {
				t.Skip("takes long under the race detector, and differs from AdamW in what " +
					"updates the parameters alone")
			}
			device, _, fakeOption := openFake(t, fake.Config{})
			testFloat8Weights(t, device, 32, newOptimizer, []MachineOption{fakeOption},
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
	for range 4 { // the later ones are replayed
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
	anew := open(score)
	if got, want := loss(borrower, score), loss(anew, score); got != want || got != last {
		t.Errorf("with the other's parameters the loss is %v, a machine that begins with them "+
			"has %v, and the other %v", got, want, last)
	}
	fresh, _ := float8Model(t, llm.ForLoss, seed, dim)
	for _, p := range b.Params { // back to the first ones
		i := slices.IndexFunc(fresh.Params, func(q llm.Param) bool { return q.Name == p.Name() })
		copy(p.Value().Data().([]float32), fresh.Params[i].Value.Float32s())
	}
	require.NoError(t, m.Upload(b.Params...))
	require.Equal(t, first, loss(m, b))
	owner := newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss}, plain)
	if got, want := loss(open(score, WithParamsOf(owner)), score),
		loss(borrower, score); got != want {
		t.Errorf("with the parameters of a machine without float8 the loss is %v, want %v", got,
			want)
	}
}

// TestFloat8Bound wants a parameter that lies in memory of the program's to be read as it is when a
// run begins.
func TestFloat8Bound(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	l := newLayers(t, 1, 3, 45, 32, 48)
	open := func() *Machine {
		return newFuseMachine(t, device, l.g, l.params, l.keep,
			[]MachineOption{fakeOption, float8Products})
	}
	m, gate := open(), l.named["gate"]
	h, numbers := host{t, device.ctx}, gate.Value().Data().([]float32)
	memory := h.place(numbers)
	require.NoError(t, m.Bind(gate, memory, 4*len(numbers)))
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

// TestFloat8UploadFails wants an upload that the device refuses behind the parameters to leave
// their float8 as new as they are.
func TestFloat8UploadFails(t *testing.T) {
	device, cuda, fakeOption := openFake(t, fake.Config{})
	_, b := float8Model(t, llm.ForLoss, 4, 32)
	open := func() *Machine {
		return newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss},
			[]MachineOption{fakeOption, float8Products})
	}
	m := open()
	for _, p := range b.Params {
		for i, v := range p.Value().Data().([]float32) {
			p.Value().Data().([]float32)[i] = -1.5 * v
		}
	}
	cuda.Fail("cuMemcpyHtoDAsync", len(b.Params)+1, gpu.OutOfMemory)
	require.ErrorIs(t, m.Upload(append(slices.Clone(b.Params), b.IDs)...), gpu.OutOfMemory)
	fresh := open()
	require.NoError(t, errors.Join(m.RunAll(), fresh.RunAll()))
	got, err := m.Value(b.Loss)
	want, wantErr := fresh.Value(b.Loss)
	require.NoError(t, errors.Join(err, wantErr))
	if got.Data() != want.Data() {
		t.Errorf("the loss is %v, that of a machine that was given the values is %v", got, want)
	}
}

// TestFloat8Recomputed wants blocks that are recomputed to leave the same bits of loss and
// gradients.
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
		require.Equal(t, results[1], results[0], apartBy(results[1], results[0]))
	}
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		test(t, device, 32, fakeOption, float8Products)
	})
	t.Run("GPU", func(t *testing.T) {
		// Tuned, a norm's gradient that stores float8 too, which only one of the graphs has, may
		// add up in another order than one that does not.
		test(t, openGPUFloat8(t), few(256, 128), WithPrecision(Float8), WithTuning(TuneOff))
	})
}

// TestFloat8Trains trains twice with float8 and once with bfloat16: the same bits, and nearly the
// same loss.
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

// narrowTrains wants losses in fewer digits to end near those in more, not to be them, and to be
// the same in two runs.
func narrowTrains(t *testing.T, wide, narrow, again []float32) {
	t.Helper()
	require.Equal(t, again, narrow)
	last := len(wide) - 1
	t.Logf("losses %v and %v", narrow[last], wide[last])
	if d := narrow[last]/wide[last] - 1; !(math.Abs(float64(d)) < 0.02) ||
		slices.Equal(narrow, wide) {
		t.Errorf("the loss is %v, and %v with more digits", narrow[last], wide[last])
	}
}

// TestFloat8Tuned wants the ways of products of float8 timed on operands that are numbers, also
// with a matrix added, and those of norms with their float8; and RoPE's product to be another than
// that of the type in which its result is stored.
func TestFloat8Tuned(t *testing.T) {
	ownChoices(t)
	device, _, fakeOption := openFake(t, fake.Config{Devices: smallCache("GPU")})
	l := newLayers(t, 1, 3, 45, 32, 48)
	var log bytes.Buffer
	adding := 0
	private := timedFrom(1, filepath.Join(t.TempDir(), "tune.json"))
	m := newFuseMachine(t, device, l.g, l.params, l.keep, []MachineOption{fakeOption,
		float8Products, withOwnProducts(new(int), &adding), private, WithTuning(TuneCached),
		logTo(&log)})
	require.NoError(t, m.RunAll())
	timed, turned := 0, 0
	for _, c := range m.Choices() {
		if c.Op == "Matmul" && strings.Contains(c.Shape, "Scaling:rows") &&
			c.Source == Measured && c.Of == 4 {
			timed++
		}
		if c.Op == "RoPEProduct" && strings.HasSuffix(c.Shape, "of float8") &&
			c.Source == Measured {
			turned++
		}
	}
	// Forward: [q k v] 96, attention's 32, which x is added to, gate and up 96 with sums of 32,
	// down 32 of 48. Back: 32 of 96, twice, and of 32, to which nothing is added, and 48 of 32.
	if timed != 6 || turned != 1 || adding == 0 || log.Len() > 0 {
		t.Errorf("%d shapes of products are timed, want 6, and %d with RoPE, want 1; %d run with "+
			"a matrix added; %s", timed, turned, adding,
			log.String())
	}
}

// TestFloat8Refused wants an error that names the precision, what it needs and what there is.
func TestFloat8Refused(t *testing.T) {
	gpu := func(major, minor int) []gpu.DeviceInfo {
		return []gpu.DeviceInfo{{Name: "Some GPU", Major: major, Minor: minor,
			Memory: 1 << 30, SMs: 2, L2: 1 << 20}}
	}
	for want, config := range map[string]fake.Config{
		"this is Some GPU, of 8.9, with cuBLASLt 13.0":  {Devices: gpu(8, 9)},
		"this is Some GPU, of 9.0, with cuBLASLt 12.8":  {Devices: gpu(9, 0), BlasVersion: 120801},
		"this is Some GPU, of 10.0, with cuBLASLt 13.0": {Devices: gpu(10, 0)},
		"the fake cuBLASLt":                             {NoBlas: true},
	} {
		device, _, fakeOption := openFake(t, config)
		g := gorgonia.NewGraph()
		gorgonia.Must(gorgonia.Square(gorgonia.NewScalar(g, tensor.Float32,
			gorgonia.WithName("x"))))
		m, err := NewMachine(device, g, fakeOption, WithPrecision(Float8))
		if m != nil || err == nil || !strings.Contains(err.Error(), want) ||
			!config.NoBlas && !strings.Contains(err.Error(), "WithPrecision(Float8)") ||
			!strings.HasPrefix(err.Error(), "cudaops.NewMachine: ") {
			t.Errorf("error %v, want one with %q", err, want)
		}
		require.NotEqual(t, errors.Is(err, ErrUnsupportedPrecision), config.NoBlas, !config.NoBlas)
	}
}

// narrowGradients is WithGradientPrecision(BFloat16) without the storage of BFloat16, which
// fakeKernels do not know.
func narrowGradients(c *machineConfig) error {
	c.narrow = gpu.BFloat16
	return nil
}

// brain is x rounded to bfloat16, to even.
func brain(x float32) float32 {
	b := math.Float32bits(x)
	return math.Float32frombits((b + 0x7fff + b>>16&1) &^ 0xffff)
}

// tableTypes counts the types of gradients in optimisers' tables.
type tableTypes struct {
	run.Launcher
	count map[gpu.DType]int
}

func (k tableTypes) NewTable(tensors []optimizer.Tensor) (*optimizer.Table, error) {
	for _, t := range tensors {
		k.count[t.GradType]++
	}
	return k.Launcher.NewTable(tensors)
}

func countTypes(count map[gpu.DType]int) MachineOption {
	return withKernels(func(k run.Launcher) run.Launcher { return tableTypes{k, count} })
}

// ofLayer reports whether a model's parameter is the weights of a linear layer or of a perceptron.
func ofLayer(name string) bool { return strings.HasSuffix(name, "_proj.weight") }

// narrowed is the names of parameters whose gradients a machine keeps in bfloat16.
func narrowed(m *Machine, params gorgonia.Nodes) (names []string) {
	for _, p := range params {
		if m.runner.Program.Values[p.Deriv()].Type == gpu.BFloat16 {
			names = append(names, p.Name())
		}
	}
	return names
}

// numbersOf is the values of nodes, one behind the other in each.
func numbersOf(t *testing.T, m *Machine, nodes gorgonia.Nodes) (all [][]float32) {
	t.Helper()
	for _, n := range nodes {
		all = append(all, slices.Clone(flat(t, valueIn(t, m, n))))
	}
	return all
}

// TestGradientPrecision wants the gradients of weights, and of nothing else, to be those of float32
// rounded to bfloat16, and an update to read them so.
func TestGradientPrecision(t *testing.T) {
	for name, newOptimizer := range optimizers {
		t.Run(name+"/fake", func(t *testing.T) {
			for seed := range uint64(2) { // one of them with weights that begin within 16 bytes
				device, _, fakeOption := openFake(t, fake.Config{})
				testGradientPrecision(t, device, seed, newOptimizer, 0, narrowGradients, fakeOption)
			}
		})
		for _, p := range []Precision{BFloat16, Float8} {
			t.Run(fmt.Sprintf("%s/GPU %v", name, p), func(t *testing.T) {
				device := openGPU(t)
				if p == Float8 {
					device = openGPUFloat8(t)
				}
				// Products add up in another order where their results are of another type.
				testGradientPrecision(t, device, rand.Uint64(), newOptimizer, 1e-3,
					WithGradientPrecision(BFloat16), WithPrecision(p), WithTuning(TuneOff))
			})
		}
	}
}

func testGradientPrecision(t *testing.T, device *Device, seed uint64,
	newOptimizer func() (optim.Optimizer, error), tolerance float64,
	narrow MachineOption, opts ...MachineOption) {
	t.Logf("random seed %d", seed)
	_, wide := newBatch(t, llm.ForTraining, seed)
	_, b := newBatch(t, llm.ForTraining, seed)
	count := map[gpu.DType]int{}
	plain := newFuseMachine(t, device, wide.G, wide.Params, gorgonia.Nodes{wide.Loss}, opts)
	m := newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss},
		append(slices.Clone(opts), countTypes(count), narrow))
	require.Empty(t, narrowed(plain, wide.Params))
	require.Equal(t, Float32, plain.GradientPrecision())
	layers := 0
	for _, p := range b.Params {
		want := gpu.Float32
		if ofLayer(p.Name()) {
			want, layers = gpu.BFloat16, layers+1
		}
		require.Equal(t, want, m.runner.Program.Values[p.Deriv()].Type, p.Name())
	}
	require.Equal(t, BFloat16, m.GradientPrecision())
	o := optimize(t, m, newOptimizer, 0.01)
	require.Equal(t, layers, count[gpu.BFloat16])
	require.Equal(t, len(b.Params)-layers, count[gpu.Float32])
	for _, err := range []error{plain.RunAll(), m.RunAll()} {
		require.NoError(t, err)
	}
	got, want := numbersOf(t, m, derivatives(b.Params)),
		numbersOf(t, plain, derivatives(wide.Params))
	var squares float64
	for i, p := range b.Params {
		var largest float64
		for _, v := range want[i] {
			largest = max(largest, math.Abs(float64(v)))
		}
		for j, v := range got[i] {
			squares += float64(v) * float64(v)
			w := want[i][j]
			if ofLayer(p.Name()) {
				require.Equal(t, brain(v), v, "%s: element %d is %v, which bfloat16 does not have",
					p.Name(), j, v)
				if tolerance == 0 {
					w = brain(w)
				}
			}
			apart := math.Abs(float64(v) - float64(w))
			if ofLayer(p.Name()) && tolerance > 0 {
				apart -= math.Abs(float64(w)) / 256
			}
			require.LessOrEqual(t, apart, tolerance*largest, "%s: element %d is %v, want %v",
				p.Name(), j, v, w)
		}
	}
	norm, err := m.Update()
	require.NoError(t, err)
	if want := math.Sqrt(squares); !(math.Abs(norm-want) < 1e-5*want) {
		t.Errorf("the norm is %v, want %v", norm, want)
	}
	require.NoError(t, m.Download())
	gain := map[string]float64{}
	for _, p := range b.Params {
		r := o.(update.Rules).Rule(p.Name(), p.Shape())
		gain[p.Name()+".exp_avg"], gain[p.Name()+".momentum_buffer"] = 1-r.Beta1, 1-r.Beta1
	}
	seen := 0
	for _, s := range o.State() {
		i := slices.IndexFunc(b.Params, func(p *gorgonia.Node) bool {
			return strings.HasPrefix(s.Name, p.Name()+".")
		})
		times := gain[s.Name] * min(1, 0.01/(norm+1e-6))
		if times == 0 {
			continue
		}
		seen++
		for j, v := range s.Data.([]float32) {
			if w := times * float64(got[i][j]); !(math.Abs(float64(v)-w) <= 1e-5*math.Abs(w)+
				1e-12) {
				t.Fatalf("%s: element %d is %v, want %v", s.Name, j, v, w)
			}
		}
	}
	require.Equal(t, len(b.Params), seen)
}

// TestGradientPrecisionElsewhere wants gradients that others read than an update of one run, or
// that no one product forms, to stay float32, and those of all in one product if one of them does.
func TestGradientPrecisionElsewhere(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	_, b := newBatch(t, llm.ForTraining, 2)
	named := func(part string) *gorgonia.Node {
		i := slices.IndexFunc(b.Params, func(p *gorgonia.Node) bool {
			return strings.Contains(p.Name(), part)
		})
		return b.Params[i]
	}
	var all []string
	for _, p := range b.Params {
		if ofLayer(p.Name()) {
			all = append(all, p.Name())
		}
	}
	without := func(parts ...string) []string {
		return slices.DeleteFunc(slices.Clone(all), func(name string) bool {
			return slices.ContainsFunc(parts, func(part string) bool {
				return strings.Contains(name, part)
			})
		})
	}
	others := func(part string) gorgonia.Nodes {
		return slices.DeleteFunc(slices.Clone(b.Params), func(p *gorgonia.Node) bool {
			return p == named(part)
		})
	}
	for name, c := range map[string]struct {
		params gorgonia.Nodes
		opts   []MachineOption
		want   []string
	}{
		"as it is": {b.Params, nil, all},
		"gathered": {b.Params, []MachineOption{WithAccumulation()}, nil},
		"asked for k": {b.Params, []MachineOption{WithOutputs(named("0.self_attn.k").Deriv())},
			without("0.self_attn.q", "0.self_attn.k", "0.self_attn.v")},
		"asked for up": {b.Params, []MachineOption{WithOutputs(named("0.mlp.up").Deriv())},
			without("0.mlp.gate", "0.mlp.up")},
		"asked for down": {b.Params, []MachineOption{WithOutputs(named("0.mlp.down").Deriv())},
			without("0.mlp.down")},
		"no parameter o": {others("0.self_attn.o"), nil, without("0.self_attn.o")},
		"no parameter v": {others("0.self_attn.v"), nil,
			without("0.self_attn.q", "0.self_attn.k", "0.self_attn.v")},
		"without a choice": {b.Params, []MachineOption{func(c *machineConfig) error {
			c.narrow = gpu.Float32
			return nil
		}}, nil},
	} {
		m := newFuseMachine(t, device, b.G, c.params, gorgonia.Nodes{b.Loss},
			append([]MachineOption{fakeOption, narrowGradients}, c.opts...))
		require.Equal(t, c.want, narrowed(m, b.Params), name)
		require.Equal(t, map[bool]Precision{false: Float32, true: BFloat16}[c.want != nil],
			m.GradientPrecision(), name)
	}

	g := gorgonia.NewGraph()
	matrix := func(name string) *gorgonia.Node {
		return gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(4, 4),
			gorgonia.WithName(name), gorgonia.WithInit(gorgonia.Gaussian(0, 1)))
	}
	x, once, twice, squared := matrix("x"), matrix("once"), matrix("twice"), matrix("squared")
	y := x
	for _, w := range []*gorgonia.Node{once, twice, squared, twice} {
		y = gorgonia.Must(op.Linear(y, w))
	}
	params := gorgonia.Nodes{once, twice, squared}
	require.NoError(t, errOf(gorgonia.Grad(gorgonia.Must(gorgonia.Sum(y)), params...)))
	gorgonia.Must(gorgonia.Square(squared.Deriv()))
	m := newFuseMachine(t, device, g, params, nil, []MachineOption{fakeOption, narrowGradients})
	require.Equal(t, []string{"once"}, narrowed(m, params))
	require.NoError(t, m.RunAll())
}

// TestGradientPrecisionRecomputed wants blocks that are recomputed to leave the same gradients, of
// the same types, and within them too float32 where it is asked for.
func TestGradientPrecisionRecomputed(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	var values [2][][]float32
	for i, graph := range [][]llm.GraphOption{nil, {llm.WithRecompute()}} {
		b := deepGraph(t, 2, 32, 6, 3, graph...)
		b.draw(t, 5)
		k := slices.IndexFunc(b.Params, func(p *gorgonia.Node) bool {
			return strings.Contains(p.Name(), "1.self_attn.k_proj")
		})
		down := slices.IndexFunc(b.Params, func(p *gorgonia.Node) bool {
			return strings.Contains(p.Name(), "0.mlp.down_proj")
		})
		gorgonia.Must(gorgonia.Square(b.Params[down].Deriv())) // read by another node
		wide := []string{"1.self_attn.q", "1.self_attn.k", "1.self_attn.v", "0.mlp.down"}
		var want []string
		for _, p := range b.Params {
			if ofLayer(p.Name()) && !slices.ContainsFunc(wide, func(s string) bool {
				return strings.Contains(p.Name(), s)
			}) {
				want = append(want, p.Name())
			}
		}
		m := newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss, b.Params[k].Deriv()},
			[]MachineOption{fakeOption, narrowGradients})
		require.Equal(t, want, narrowed(m, b.Params))
		require.NotEmpty(t, want)
		require.NoError(t, m.RunAll())
		values[i] = numbersOf(t, m, append(gorgonia.Nodes{b.Loss}, derivatives(b.Params)...))
	}
	for i, v := range values[0] {
		require.Equal(t, values[1][i], v, apartBy(values[1][i], v))
	}
}

// TestGradientPrecisionMemory wants them to take half the memory: most of that of a model with few
// tokens.
func TestGradientPrecisionMemory(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	arena := func(opts ...MachineOption) int {
		b := deepGraph(t, 4, 96, 4, 1)
		return newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss},
			append(opts, fakeOption)).runner.Program.Arena
	}
	wide, narrow := arena(), arena(narrowGradients)
	t.Logf("%d KiB for a run, %d KiB with gradients of bfloat16", wide>>10, narrow>>10)
	require.LessOrEqual(t, narrow, wide*5/8)
}

// TestGradientPrecisionRefused wants an error that says with what it goes.
func TestGradientPrecisionRefused(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	g := gorgonia.NewGraph()
	gorgonia.Must(gorgonia.Square(gorgonia.NewScalar(g, tensor.Float32, gorgonia.WithName("x"))))
	for _, c := range []struct {
		want string
		opts []MachineOption
	}{
		{"", []MachineOption{WithGradientPrecision(BFloat16), WithPrecision(BFloat16)}},
		{"", []MachineOption{WithPrecision(Float8), WithGradientPrecision(BFloat16)}},
		{"", []MachineOption{WithPrecision(Float16), WithGradientPrecision(Float32)}},
		{"WithGradientPrecision(bf16) goes with the precisions BFloat16 and Float8, and " +
			"WithPrecision has f16", []MachineOption{WithGradientPrecision(BFloat16),
			WithPrecision(Float16)}},
		{"WithGradientPrecision(bf16) goes with the precisions BFloat16 and Float8, and " +
			"WithPrecision has f32", []MachineOption{WithGradientPrecision(BFloat16)}},
		{"WithGradientPrecision: got f16, want Float32 or BFloat16",
			[]MachineOption{WithPrecision(Float16), WithGradientPrecision(Float16)}},
		{"WithGradientPrecision: got f8, want", []MachineOption{WithPrecision(Float8),
			WithGradientPrecision(Float8)}},
	} {
		m, err := NewMachine(device, g, append(c.opts, fakeOption)...)
		if err == nil {
			err = m.Close()
		}
		if c.want == "" && err != nil || c.want != "" &&
			(err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("error %v, want %q", err, c.want)
		}
	}
}

// TestGradientPrecisionTrains trains twice with gradients of bfloat16 and once with those of
// float32: the same bits, and nearly the same loss.
func TestGradientPrecisionTrains(t *testing.T) {
	device := openGPU(t)
	train := func(p Precision) []float32 {
		return lossesOf(t, device, WithPrecision(BFloat16), WithGradientPrecision(p))
	}
	narrowTrains(t, train(Float32), train(BFloat16), train(BFloat16))
}

// TestLossScale wants gradients without the scale, a step that overflows to change nothing but the
// scale, and the scale to move by its rule.
func TestLossScale(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testLossScale(t, device, fakeOption, scaledGradients)
	})
	t.Run("GPU", func(t *testing.T) { testLossScale(t, openGPU(t), WithPrecision(Float16)) })
}

func testLossScale(t *testing.T, device *Device, opts ...MachineOption) {
	model, b := newBatch(t, llm.ForTraining, 2)
	machine := openMachine(t, device, b.G, append(opts, WithParams(b.Params...),
		WithOutputs(b.Loss))...)
	adamw := optimize(t, machine, newAdamW, 1)
	run := func() {
		t.Helper()
		require.NoError(t, machine.RunAll())
	}
	scaleIs := func(want LossScale) {
		t.Helper()
		require.Equal(t, want, machine.LossScale())
	}
	steps := func() (n int64) {
		t.Helper()
		require.NoError(t, machine.Download())
		for _, s := range adamw.State() {
			if strings.HasSuffix(s.Name, ".step") {
				n = s.Data.([]int64)[0]
			}
		}
		return n
	}
	scaleIs(LossScale{Scale: 1 << 16})

	// A gradient that cannot be told from infinity. The scale is halved as often as the step is
	// repeated.
	last := len(b.Params) - 1
	weight := model.Params[last].Value.Float32s()
	old := slices.Clone(weight)
	weight[0] = float32(math.Inf(1))
	require.NoError(t, machine.Upload(b.Params[last]))
	before := slices.Clone(model.Params[0].Value.Float32s())
	for i := range 3 {
		run()
		if norm, err := machine.Update(); err != nil || norm-norm == 0 {
			t.Errorf("a step that overflows: norm %v, %v", norm, err)
		}
		scaleIs(LossScale{Scale: math.Ldexp(1, 15-i), Skipped: i + 1})
	}
	require.Zero(t, steps())
	require.Equal(t, model.Params[0].Value.Float32s(), before)
	// At 1 there is nothing left that the scale could be to blame for.
	require.NoError(t, machine.SetLossScale(LossScale{Scale: 2, Good: 5, Skipped: 3}))
	require.ErrorContains(t, errOf(machine.Value(b.Params[0].Deriv())), "dropped")
	require.ErrorContains(t, errOf(machine.Update()), "run the machine again")
	run()
	require.NoError(t, errOf(machine.Update()))
	run()
	require.ErrorIs(t, errOf(machine.Update()), ErrNonFinite)
	scaleIs(LossScale{Scale: 1, Skipped: 5})

	copy(weight, old)
	require.NoError(t, errors.Join(machine.Upload(b.Params[last]),
		machine.SetLossScale(LossScale{Scale: 8, Good: 1998, Skipped: 5})))
	for i := range 3 {
		run()
		g := valueIn(t, machine, b.Params[1].Deriv())
		tape := gorgonia.NewTapeMachine(b.G)
		require.NoError(t, errors.Join(machine.Download(), tape.RunAll()))
		require.Less(t, distance(t, g, b.Params[1].Deriv().Value()), 1e-2)
		tape.Close()
		require.NoError(t, errOf(machine.Update()))
		scaleIs([]LossScale{{8, 1999, 5}, {16, 0, 5}, {16, 1, 5}}[i])
	}
	require.Equal(t, int64(3), steps())
}

// TestScaledOutputLayer has losses that are but a share of the cost, whose gradient therefore is
// not the scale itself, and such as are computed again for their gradient.
func TestScaledOutputLayer(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	for name, head := range map[string]func(x, w, targets *gorgonia.Node) (*gorgonia.Node, error){
		"fused": op.LinearCrossEntropy,
		"separate": func(x, w, targets *gorgonia.Node) (*gorgonia.Node, error) {
			logits, err := op.Linear(x, w)
			if err != nil {
				return nil, err
			}
			return op.CrossEntropy(logits, targets)
		},
		"recomputed": func(x, w, targets *gorgonia.Node) (*gorgonia.Node, error) {
			return autodiff.Recompute(gorgonia.Nodes{x, w, targets},
				func(in gorgonia.Nodes) (*gorgonia.Node, error) {
					return op.LinearCrossEntropy(in[0], in[1], in[2])
				})
		},
	} {
		g := gorgonia.NewGraph()
		r := rand.New(rand.NewPCG(rand.Uint64(), 1))
		x, w := randomNode(g, r, 1, "x", 3, 4), randomNode(g, r, 1, "w", 5, 4)
		targets := intNode(g, "targets", []int{0, 4, 2})
		loss, err := head(x, w, targets)
		require.NoError(t, err)
		cost := gorgonia.Must(gorgonia.Add(gorgonia.Must(gorgonia.Mul(loss,
			gorgonia.NewConstant(float32(0.3)))), gorgonia.Must(gorgonia.Mean(x))))
		require.NoError(t, errOf(gorgonia.Grad(cost, x, w)))
		tape := tapeMachine(t, g)
		require.NoError(t, tape.RunAll())
		for _, way := range []string{"separate", "fused"} {
			m := openMachine(t, device, g, fakeOption, WithParams(x, w), scaledGradients,
				WithWays("LinearCrossEntropy="+way))
			// No power of two, so that one factor too many or too few shows.
			require.NoError(t, errors.Join(m.SetLossScale(LossScale{Scale: 1000}), m.RunAll()))
			for _, p := range []*gorgonia.Node{x, w} {
				v := valueIn(t, m, p.Deriv())
				require.Less(t, distance(t, v, p.Deriv().Value()), 1e-5, "%v, %v, %v", name, way,
					p.Name())
			}
		}
	}
}

// TestOverflowInKasmina wants a layer that shall stop at NaN not to do so for a gradient that its
// scale has made infinite, but to count it all the same: on the device and, with a blueprint that
// has no kernel, on the host.
func TestOverflowInKasmina(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	own, err := ownKind()
	require.NoError(t, err)
	for i := range 4 {
		scale, kind := []float64{1, 0x1p127}[i%2], []blueprints.Kind{blueprints.Residual, own}[i/2]
		g := gorgonia.NewGraph()
		input := func(name string, values ...float32) *gorgonia.Node {
			shape := tensor.Shape{len(values) / 2, 2}
			return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(shape...),
				tensor.WithBacking(values)), gorgonia.WithName(name))
		}
		lattice, err := state.NewLattice(1, 2, state.WithoutGates())
		require.NoError(t, err)
		require.NoError(t, errors.Join(
			lattice.RequestGermination(0, state.GerminationRequest{Slot: 1,
				Kind: kind}), lattice.Transition(0, state.Training)))
		x, weights := input("x", 1, 2, 3, 4), input("weights", 0, 0, 0, 0)
		scales := gorgonia.NodeFromAny(g, tensor.New(tensor.WithBacking([]float32{1, 1})),
			gorgonia.WithName("scales"))
		targets := intNode(g, "targets", []int{0, 1})
		y, err := op.Kasmina(x, weights, scales, lattice, op.StopOnNonFinite())
		require.NoError(t, err)
		loss := gorgonia.Must(gorgonia.Mul(gorgonia.Must(op.CrossEntropy(y, targets)),
			gorgonia.NewConstant(float32(1e20))))
		require.NoError(t, errOf(gorgonia.Grad(loss, x)))
		m := openMachine(t, device, g, fakeOption, WithParams(x),
			WithOutputs(loss), scaledGradients)
		require.NoError(t, errors.Join(m.SetLossScale(LossScale{Scale: scale}), m.RunAll()))
		v, err := m.Value(x.Deriv())
		if err != nil {
			t.Errorf("scale %v: %v", scale, err)
			continue
		}
		require.Equal(t, scale == 1, flat(t, v)[0]-flat(t, v)[0] == 0, v)
		require.Equal(t, scale > 1, lattice.Report().Seeds[0].NonFiniteG > 0, kind)
	}
}

// TestLossScaleErrors wants graphs in which the scale has no place to be refused, and arguments
// that are none.
func TestLossScaleErrors(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	// open returns a machine for Σ w² ⊙ x, derived by derive.
	open := func(derive func(loss, w *gorgonia.Node) error) (*Machine, error) {
		g := gorgonia.NewGraph()
		value := tensor.New(tensor.WithShape(3), tensor.WithBacking([]float32{1, 2, 3}))
		w := gorgonia.NodeFromAny(g, value, gorgonia.WithName("w"))
		x := gorgonia.NodeFromAny(g, value, gorgonia.WithName("x"))
		loss := gorgonia.Must(
			gorgonia.Sum(gorgonia.Must(gorgonia.HadamardProd(gorgonia.Must(gorgonia.Square(w)),
				x))))
		require.NoError(t, derive(loss, w))
		m, err := NewMachine(device, g, fakeOption, WithParams(w), scaledGradients)
		if err == nil {
			t.Cleanup(func() { m.Close() })
		}
		return m, err
	}
	grad := func(loss, w *gorgonia.Node) error { _, err := gorgonia.Grad(loss, w); return err }
	wants := func(err error, want string) {
		t.Helper()
		require.ErrorContains(t, err, want)
	}
	_, err := open(func(loss, w *gorgonia.Node) error {
		up := gorgonia.NewScalar(loss.Graph(), tensor.Float32, gorgonia.WithName("up"),
			gorgonia.WithValue(float32(2)))
		_, err := gorgonia.Backpropagate(gorgonia.Nodes{loss},
			gorgonia.Nodes{up}, gorgonia.Nodes{w})
		return err
	})
	wants(err, "derive the parameters with gorgonia.Grad")
	_, err = open(func(loss, w *gorgonia.Node) error {
		if err := grad(loss, w); err != nil {
			return err
		}
		_, err := gorgonia.Square(w.Deriv())
		return err
	})
	wants(err, "not linear in the gradient of the loss")
	m, err := open(grad)
	require.NoError(t, err)
	for want, s := range map[string]LossScale{"Scale is 0.5": {Scale: 0.5},
		"Scale is NaN": {Scale: math.NaN()}, "Scale is +Inf": {Scale: math.Inf(1)},
		"Good is -1": {Scale: 1, Good: -1}, "Skipped -2": {Scale: 1, Skipped: -2}} {
		wants(m.SetLossScale(s), want)
	}
	require.Equal(t, LossScale{Scale: firstLossScale}, m.LossScale())
	g, _, _ := stockGraph(t)
	plain := openMachine(t, device, g, fakeOption, scaledGradients)
	wants(plain.SetLossScale(LossScale{Scale: 2}), "does not scale")
	require.Equal(t, LossScale{Scale: 1}, plain.LossScale())
}
