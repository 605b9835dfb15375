package cudaops

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/cudaops/internal/update"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// narrowGradients is WithGradientPrecision(BFloat16) without the storage of BFloat16, which fakeKernels do not know.
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
	kernels.Launcher
	count map[gpu.DType]int
}

func (k tableTypes) NewTable(tensors []optimizer.Tensor) (*optimizer.Table, error) {
	for _, t := range tensors {
		k.count[t.GradType]++
	}
	return k.Launcher.NewTable(tensors)
}

func countTypes(count map[gpu.DType]int) MachineOption {
	return withKernels(func(k kernels.Launcher) kernels.Launcher { return tableTypes{k, count} })
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
		v, err := m.Value(n)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, slices.Clone(flat(t, v)))
	}
	return all
}

// TestGradientPrecision wants the gradients of weights, and of nothing else, to be those of float32 rounded to bfloat16, and an update to
// read them so.
func TestGradientPrecision(t *testing.T) {
	for name, newOptimizer := range map[string]func() (optim.Optimizer, error){"AdamW": newAdamW, "Muon": newMuon} {
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
				testGradientPrecision(t, device, rand.Uint64(), newOptimizer, 1e-3, WithGradientPrecision(BFloat16), WithPrecision(p), WithTuning(TuneOff))
			})
		}
	}
}

func testGradientPrecision(t *testing.T, device *Device, seed uint64, newOptimizer func() (optim.Optimizer, error), tolerance float64,
	narrow MachineOption, opts ...MachineOption) {
	t.Logf("random seed %d", seed)
	_, wide := newBatch(t, llm.ForTraining, seed)
	_, b := newBatch(t, llm.ForTraining, seed)
	count := map[gpu.DType]int{}
	plain := newFuseMachine(t, device, wide.G, wide.Params, gorgonia.Nodes{wide.Loss}, opts)
	m := newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss}, append(slices.Clone(opts), countTypes(count), narrow))
	if got := narrowed(plain, wide.Params); len(got) > 0 || plain.GradientPrecision() != Float32 {
		t.Errorf("without the option these are bfloat16: %q, and the machine's are %v", got, plain.GradientPrecision())
	}
	layers := 0
	for _, p := range b.Params {
		want := gpu.Float32
		if ofLayer(p.Name()) {
			want, layers = gpu.BFloat16, layers+1
		}
		if got := m.runner.Program.Values[p.Deriv()].Type; got != want {
			t.Errorf("the gradient of %s is %v, want %v", p.Name(), got, want)
		}
	}
	if got := m.GradientPrecision(); got != BFloat16 {
		t.Errorf("the machine's gradients are %v", got)
	}
	o, err := newOptimizer()
	if err == nil {
		err = m.SetOptimizer(o, 0.01)
	}
	if err != nil {
		t.Fatal(err)
	}
	if count[gpu.BFloat16] != layers || count[gpu.Float32] != len(b.Params)-layers {
		t.Errorf("the optimiser's gradients are of %v, want %d of bfloat16 and %d of float32", count, layers, len(b.Params)-layers)
	}
	for _, err := range []error{plain.RunAll(), m.RunAll()} {
		if err != nil {
			t.Fatal(err)
		}
	}
	got, want := numbersOf(t, m, derivatives(b.Params)), numbersOf(t, plain, derivatives(wide.Params))
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
				if v != brain(v) {
					t.Fatalf("%s: element %d is %v, which bfloat16 does not have", p.Name(), j, v)
				}
				if tolerance == 0 {
					w = brain(w)
				}
			}
			apart := math.Abs(float64(v) - float64(w))
			if ofLayer(p.Name()) && tolerance > 0 {
				apart -= math.Abs(float64(w)) / 256
			}
			if !(apart <= tolerance*largest) {
				t.Fatalf("%s: element %d is %v, want %v", p.Name(), j, v, w)
			}
		}
	}
	norm, err := m.Update()
	if err != nil {
		t.Fatal(err)
	}
	if want := math.Sqrt(squares); !(math.Abs(norm-want) < 1e-5*want) {
		t.Errorf("the norm is %v, want %v", norm, want)
	}
	if err := m.Download(); err != nil {
		t.Fatal(err)
	}
	gain := map[string]float64{}
	for _, p := range b.Params {
		r := o.(update.Rules).Rule(p.Name(), p.Shape())
		gain[p.Name()+".exp_avg"], gain[p.Name()+".momentum_buffer"] = 1-r.Beta1, 1-r.Beta1
	}
	seen := 0
	for _, s := range o.State() {
		i := slices.IndexFunc(b.Params, func(p *gorgonia.Node) bool { return strings.HasPrefix(s.Name, p.Name()+".") })
		times := gain[s.Name] * min(1, 0.01/(norm+1e-6))
		if times == 0 {
			continue
		}
		seen++
		for j, v := range s.Data.([]float32) {
			if w := times * float64(got[i][j]); !(math.Abs(float64(v)-w) <= 1e-5*math.Abs(w)+1e-12) {
				t.Fatalf("%s: element %d is %v, want %v", s.Name, j, v, w)
			}
		}
	}
	if seen != len(b.Params) {
		t.Errorf("of %d parameters the optimiser remembers %d gradients", len(b.Params), seen)
	}
}

// TestGradientPrecisionElsewhere wants gradients that others read than an update of one run, or that no one product forms, to stay
// float32, and those of all in one product if one of them does.
func TestGradientPrecisionElsewhere(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	_, b := newBatch(t, llm.ForTraining, 2)
	named := func(part string) *gorgonia.Node {
		i := slices.IndexFunc(b.Params, func(p *gorgonia.Node) bool { return strings.Contains(p.Name(), part) })
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
			return slices.ContainsFunc(parts, func(part string) bool { return strings.Contains(name, part) })
		})
	}
	others := func(part string) gorgonia.Nodes {
		return slices.DeleteFunc(slices.Clone(b.Params), func(p *gorgonia.Node) bool { return p == named(part) })
	}
	for name, c := range map[string]struct {
		params gorgonia.Nodes
		opts   []MachineOption
		want   []string
	}{
		"as it is":         {b.Params, nil, all},
		"gathered":         {b.Params, []MachineOption{WithAccumulation()}, nil},
		"asked for k":      {b.Params, []MachineOption{WithOutputs(named("0.self_attn.k").Deriv())}, without("0.self_attn.q", "0.self_attn.k", "0.self_attn.v")},
		"asked for up":     {b.Params, []MachineOption{WithOutputs(named("0.mlp.up").Deriv())}, without("0.mlp.gate", "0.mlp.up")},
		"asked for down":   {b.Params, []MachineOption{WithOutputs(named("0.mlp.down").Deriv())}, without("0.mlp.down")},
		"no parameter o":   {others("0.self_attn.o"), nil, without("0.self_attn.o")},
		"no parameter v":   {others("0.self_attn.v"), nil, without("0.self_attn.q", "0.self_attn.k", "0.self_attn.v")},
		"without a choice": {b.Params, []MachineOption{func(c *machineConfig) error { c.narrow = gpu.Float32; return nil }}, nil},
	} {
		m := newFuseMachine(t, device, b.G, c.params, gorgonia.Nodes{b.Loss}, append([]MachineOption{fakeOption, narrowGradients}, c.opts...))
		if got := narrowed(m, b.Params); !slices.Equal(got, c.want) {
			t.Errorf("%s: bfloat16 are %q, want %q", name, got, c.want)
		}
		if want := map[bool]Precision{false: Float32, true: BFloat16}[c.want != nil]; m.GradientPrecision() != want {
			t.Errorf("%s: the machine's gradients are %v, want %v", name, m.GradientPrecision(), want)
		}
	}

	g := gorgonia.NewGraph()
	matrix := func(name string) *gorgonia.Node {
		return gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(4, 4), gorgonia.WithName(name), gorgonia.WithInit(gorgonia.Gaussian(0, 1)))
	}
	x, once, twice, squared := matrix("x"), matrix("once"), matrix("twice"), matrix("squared")
	y := x
	for _, w := range []*gorgonia.Node{once, twice, squared, twice} {
		y = gorgonia.Must(op.Linear(y, w))
	}
	params := gorgonia.Nodes{once, twice, squared}
	if _, err := gorgonia.Grad(gorgonia.Must(gorgonia.Sum(y)), params...); err != nil {
		t.Fatal(err)
	}
	gorgonia.Must(gorgonia.Square(squared.Deriv()))
	m := newFuseMachine(t, device, g, params, nil, []MachineOption{fakeOption, narrowGradients})
	if got := narrowed(m, params); !slices.Equal(got, []string{"once"}) {
		t.Errorf("bfloat16 are %q, want that of a weight which is used once, and whose gradient nobody else reads", got)
	}
	if err := m.RunAll(); err != nil {
		t.Error(err)
	}
}

// TestGradientPrecisionRecomputed wants blocks that are recomputed to leave the same gradients, of the same types, and within them too
// float32 where it is asked for.
func TestGradientPrecisionRecomputed(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	var values [2][][]float32
	for i, graph := range [][]llm.GraphOption{nil, {llm.WithRecompute()}} {
		b := deepGraph(t, 2, 32, 6, 3, graph...)
		b.draw(t, 5)
		k := slices.IndexFunc(b.Params, func(p *gorgonia.Node) bool { return strings.Contains(p.Name(), "1.self_attn.k_proj") })
		down := slices.IndexFunc(b.Params, func(p *gorgonia.Node) bool { return strings.Contains(p.Name(), "0.mlp.down_proj") })
		gorgonia.Must(gorgonia.Square(b.Params[down].Deriv())) // read by another node
		wide := []string{"1.self_attn.q", "1.self_attn.k", "1.self_attn.v", "0.mlp.down"}
		var want []string
		for _, p := range b.Params {
			if ofLayer(p.Name()) && !slices.ContainsFunc(wide, func(s string) bool { return strings.Contains(p.Name(), s) }) {
				want = append(want, p.Name())
			}
		}
		m := newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss, b.Params[k].Deriv()}, []MachineOption{fakeOption, narrowGradients})
		if got := narrowed(m, b.Params); !slices.Equal(got, want) || len(want) == 0 {
			t.Errorf("%d: bfloat16 are %q, want %q", i, got, want)
		}
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		values[i] = numbersOf(t, m, append(gorgonia.Nodes{b.Loss}, derivatives(b.Params)...))
	}
	for i, v := range values[0] {
		if !slices.Equal(v, values[1][i]) {
			t.Errorf("value %d differs by %.2g where blocks are recomputed", i, apartBy(values[1][i], v))
		}
	}
}

// TestGradientPrecisionMemory wants them to take half the memory: most of that of a model with few tokens.
func TestGradientPrecisionMemory(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	arena := func(opts ...MachineOption) int {
		b := deepGraph(t, 4, 96, 4, 1)
		return newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss}, append(opts, fakeOption)).runner.Program.Arena
	}
	wide, narrow := arena(), arena(narrowGradients)
	t.Logf("%d KiB for a run, %d KiB with gradients of bfloat16", wide>>10, narrow>>10)
	if narrow > wide*5/8 {
		t.Errorf("a run takes %d bytes, and with gradients of float32 %d", narrow, wide)
	}
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
		{"WithGradientPrecision(bf16) goes with the precisions BFloat16 and Float8, and WithPrecision has f16", []MachineOption{WithGradientPrecision(BFloat16), WithPrecision(Float16)}},
		{"WithGradientPrecision(bf16) goes with the precisions BFloat16 and Float8, and WithPrecision has f32", []MachineOption{WithGradientPrecision(BFloat16)}},
		{"WithGradientPrecision: got f16, want Float32 or BFloat16", []MachineOption{WithPrecision(Float16), WithGradientPrecision(Float16)}},
		{"WithGradientPrecision: got f8, want", []MachineOption{WithPrecision(Float8), WithGradientPrecision(Float8)}},
	} {
		m, err := NewMachine(device, g, append(c.opts, fakeOption)...)
		if err == nil {
			err = m.Close()
		}
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("error %v, want %q", err, c.want)
		}
	}
}

// TestGradientPrecisionTrains trains twice with gradients of bfloat16 and once with those of float32: the same bits, and nearly the
// same loss.
func TestGradientPrecisionTrains(t *testing.T) {
	device := openGPU(t)
	train := func(p Precision) []float32 {
		return lossesOf(t, device, WithPrecision(BFloat16), WithGradientPrecision(p))
	}
	narrowTrains(t, train(Float32), train(BFloat16), train(BFloat16))
}
