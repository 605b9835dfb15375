package cudaops

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/crossentropy"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	cpugemm "github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
	"github.com/kasmina-go/kasmina/op"
)

// ownProducts is kernels that have a way of their own to multiply, and how often each is launched.
type ownProducts struct {
	run.Launcher
	plain  *int
	adding *int
}

func (o ownProducts) Ways(params any) []kernel.Way {
	if _, ok := params.(gemm.Product); ok {
		return []kernel.Way{{Family: "hopper", Size: 256}}
	}
	return o.Launcher.Ways(params)
}

func (o ownProducts) Launch(s gpu.Stream, params any) error {
	if a, ok := params.(gemm.Product); ok {
		if a.C != 0 && (a.C == a.ScaleX || a.C == a.ScaleW) {
			return errors.New("the matrix that is added lies where factors are")
		}
		if a.C != 0 {
			*o.adding++
		} else {
			*o.plain++
		}
	}
	return o.Launcher.Launch(s, params)
}

// residualGraph is h = x·vᵀ, y = h + (h·uᵀ)·wᵀ of random numbers with its gradients.
func residualGraph(t *testing.T, seed uint64, rows, f, d int) (*gorgonia.ExprGraph,
	gorgonia.Nodes, gorgonia.Nodes) {
	t.Helper()
	g := gorgonia.NewGraph()
	matrix := randomMatrices(g, seed, 3, 1.0/8)
	in := gorgonia.Nodes{matrix("x", rows, d), matrix("v", d, d),
		matrix("u", f, d), matrix("w", d, f)}
	h := gorgonia.Must(op.Linear(in[0], in[1]))
	y := gorgonia.Must(gorgonia.Add(h,
		gorgonia.Must(op.Linear(gorgonia.Must(op.Linear(h, in[2])), in[3]))))
	return g, in[1:], withGradients(t, y, matrix("with", rows, d), in)
}

// withOwnProducts has the machine's kernels be [ownProducts].
func withOwnProducts(plain, adding *int) MachineOption {
	return withKernels(func(k run.Launcher) run.Launcher { return ownProducts{k, plain, adding} })
}

// TestProductCounters wants captured runs to compute, bit by bit, what one that is not captured
// does, where products find their workspaces zero instead of setting them to zero, and each to have
// workspace for itself.
func TestProductCounters(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	check := func(t *testing.T, device *Device, rows, f, d int, opts ...MachineOption) *Machine {
		g, params, keep := residualGraph(t, rand.Uint64(), rows, f, d)
		m := newFuseMachine(t, device, g, params, keep, opts)
		first := valuesOf(t, m, keep, nil, 0)
		for i := range 3 + ProfileSteps { // one is captured, and then replayed
			if i == 3 { // the last ones of a profile are captured with marks, and replayed
				if err := m.StartProfile(); err != nil {
					t.Fatal(err)
				}
			}
			for i, v := range valuesOf(t, m, keep, nil, 0) {
				if got := distance(t, v, first[i]); got != 0 {
					t.Errorf("value %d differs by %.2g", i, got)
				}
			}
		}
		return m
	}
	t.Run("fake", func(t *testing.T) {
		slow := fake.Way{Took: time.Second}
		device, _, fakeOption := openFake(t, fake.Config{Ways: [3]fake.Way{slow, {}, slow},
			Devices: smallCache("GPU")})
		private := func(c *machineConfig) error {
			c.tuneLeast, c.tunePath = 1, filepath.Join(t.TempDir(), "tune.json")
			return nil
		}
		for _, opt := range []MachineOption{func(*machineConfig) error {
			return nil
		}, WithMonitor(2)} {
			m := check(t, device, 6, 7, 5, fakeOption, private, WithTuning(TuneCached), opt)
			products := 0
			for _, task := range m.runner.Program.Calls {
				if task.FLOPs > 0 {
					products++
				}
			}
			if z := m.runner.Program.Zeros; z == nil || z.Extent() != products*1024 ||
				products < 7 {
				t.Errorf("%d products, and %+v to be set to zero, want 1024 bytes for each",
					products, z)
			}
		}
	})
	t.Run("bfloat16", func(t *testing.T) {
		m := check(t, openGPU(t), 16384, 2816, 1024, WithPrecision(BFloat16), WithTuning(TuneOff),
			WithWays("Matmul!=hopper-*"))
		if z := m.runner.Program.Zeros; z != nil {
			t.Logf("%d bytes are set to zero", z.Extent())
		}
	})
}

// projected is an attention whose queries, keys and values are linear functions of one input.
type projected struct {
	batch, d int
	op.AttentionConfig
}

// graph returns such an attention of random numbers, with queries and keys turned, and its
// gradients. The attention comes first of the nodes to keep, the queries before they are turned
// last, if these are asked for.
func (p projected) graph(t *testing.T, seed uint64, keepQueries bool) (*gorgonia.ExprGraph,
	gorgonia.Nodes, gorgonia.Nodes) {
	t.Helper()
	g := gorgonia.NewGraph()
	matrix := randomMatrices(g, seed, 2, 1.0/4)
	must := func(n *gorgonia.Node, err error) *gorgonia.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	rows, wide, narrow := p.batch*p.Seq, p.Heads*p.HeadDim, p.KVHeads*p.HeadDim
	in := gorgonia.Nodes{matrix("x", rows, p.d), matrix("q", wide, p.d), matrix("k", narrow, p.d),
		matrix("v", narrow, p.d)}
	queries := must(op.Linear(in[0], in[1]))
	q := must(op.RoPE(queries, op.RoPEConfig{Seq: p.Seq, Heads: p.Heads, HeadDim: p.HeadDim}))
	k := must(op.RoPE(must(op.Linear(in[0], in[2])),
		op.RoPEConfig{Seq: p.Seq, Heads: p.KVHeads, HeadDim: p.HeadDim}))
	y := must(op.Attention(q, k, must(op.Linear(in[0], in[3])), p.AttentionConfig))
	keep := withGradients(t, y, matrix("with", rows, wide), in)
	if keepQueries {
		keep = append(keep, queries)
	}
	return g, in[1:], keep
}

// ropeWay is the way in which a machine has chosen to compute products whose results are turned, ""
// if it has none.
func ropeWay(m *Machine) string {
	for _, c := range m.Choices() {
		if c.Op == "RoPEProduct" {
			return c.Way
		}
	}
	return ""
}

// TestProjectionWays wants the same attention and gradients, whether one kernel multiplies and
// turns or not.
func TestProjectionWays(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	check := func(t *testing.T, device *Device, p projected, tolerance float64, fuses bool,
		opts ...MachineOption) {
		t.Helper()
		var values []gorgonia.Value
		for i, way := range []string{"separate", "fused"} {
			g, params, keep := p.graph(t, seed, false)
			m := newFuseMachine(t, device, g, params, keep,
				append(opts, WithWays("RoPEProduct="+way)))
			values = valuesOf(t, m, keep, values, tolerance)
			fused := i > 0 && fuses
			if got := ropeWay(m); fused && got != way {
				t.Errorf("%s: the way is %q", way, got)
			}
			want := map[bool]int{false: 1}[fused]
			if got := tasksOf(m)["RoPE"]; got != want {
				t.Errorf("%s: %d tasks of RoPE, want %d", way, got, want)
			}
		}
	}
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		check(t, device, projected{2, 5, op.AttentionConfig{Seq: 3, Heads: 4, KVHeads: 2,
			HeadDim: 4, Causal: true}}, 1e-5, true, fakeOption)
	})
	for _, headDim := range []int{64, 96, 128} {
		t.Run(fmt.Sprint("bfloat16/", headDim), func(t *testing.T) {
			p := projected{3, 520, op.AttentionConfig{Seq: 67, Heads: 4, KVHeads: 2,
				HeadDim: headDim, Causal: true}}
			device := openGPU(t)
			check(t, device, p, 2e-2, device.info.Capability() == 90,
				WithPrecision(BFloat16), WithTuning(TuneOff))
		})
	}
}

// TestProjectionNeedsQueries wants no kernel that turns at once where the queries are asked for as
// they were before.
func TestProjectionNeedsQueries(t *testing.T) {
	t.Setenv("KASMINA_WAYS", "")
	p := projected{2, 5, op.AttentionConfig{Seq: 3, Heads: 4, KVHeads: 2, HeadDim: 4}}
	for _, keepQueries := range []bool{false, true} {
		device, _, fakeOption := openFake(t, fake.Config{})
		g, params, keep := p.graph(t, 1, keepQueries)
		m := newFuseMachine(t, device, g, params, keep,
			[]MachineOption{fakeOption, WithWays("RoPEProduct=fused")})
		if way := ropeWay(m); (way == "") != keepQueries {
			t.Errorf("queries kept %v: the way is %q", keepQueries, way)
		}
	}
}

// TestProjectionTuned wants products that are worth timing timed with what turns their results, and
// no others, and all ways to give the same in the timer's memory as well.
func TestProjectionTuned(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	check := func(t *testing.T, device *Device, p projected, least float64, want int,
		opts ...MachineOption) {
		t.Helper()
		var log strings.Builder
		g, params, keep := p.graph(t, 1, false)
		private := func(c *machineConfig) error {
			c.tuneLeast, c.tunePath = least, filepath.Join(t.TempDir(), "tune.json")
			return nil
		}
		m := newFuseMachine(t, device, g, params, keep,
			append(opts, private, WithTuning(TuneCached),
				WithLogger(slog.New(slog.NewTextHandler(&log, nil)))))
		timed := 0
		for _, c := range m.Choices() {
			if c.Op == "RoPEProduct" {
				if timed++; c.Source != Measured || c.Of != 2 {
					t.Errorf("%+v", c)
				}
			}
		}
		if timed != want || strings.Contains(log.String(), "RoPEProduct") {
			t.Errorf("least %g: %d timed, want %d; log %q", least, timed, want, log.String())
		}
	}
	for least, want := range map[float64]int{1: 1, 1e9: 0} {
		device, _, fakeOption := openFake(t, fake.Config{Devices: smallCache("GPU")})
		check(t, device, projected{2, 5, op.AttentionConfig{Seq: 3, Heads: 4, KVHeads: 2,
			HeadDim: 4}}, least, want, fakeOption)
	}
	for _, headDim := range []int{64, 96, 128} {
		t.Run(fmt.Sprint("bfloat16/", headDim), func(t *testing.T) {
			p := projected{3, 520, op.AttentionConfig{Seq: 67, Heads: 4, KVHeads: 2,
				HeadDim: headDim, Causal: true}}
			device, want := openGPU(t), 0
			if device.info.Capability() == 90 {
				want = 1
			}
			check(t, device, p, 1, want, WithPrecision(BFloat16))
		})
	}
}

// perceptronGraph is a gated perceptron of random numbers with its gradients; the first node is its
// result.
func perceptronGraph(t *testing.T, seed uint64, rows, f, d int) (*gorgonia.ExprGraph,
	gorgonia.Nodes, gorgonia.Nodes) {
	t.Helper()
	g := gorgonia.NewGraph()
	matrix := randomMatrices(g, seed, 1, 1.0/4)
	in := gorgonia.Nodes{matrix("x", rows, d), matrix("gate", f, d),
		matrix("up", f, d), matrix("down", d, f)}
	y, err := op.SiLUMLP(in[0], in[1], in[2], in[3])
	if err != nil {
		t.Fatal(err)
	}
	return g, in[1:], withGradients(t, y, matrix("with", rows, d), in)
}

// TestPerceptronWays wants the same values of a product and a gate, whether one kernel computes
// both or not.
func TestPerceptronWays(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	check := func(t *testing.T, device *Device, rows, f, d int, tolerance float64, fuses bool,
		opts ...MachineOption) {
		var values []gorgonia.Value
		for i, rule := range []string{"SiLUProduct*=separate", "SiLUProduct*=fused"} {
			g, params, keep := perceptronGraph(t, seed, rows, f, d)
			m := newFuseMachine(t, device, g, params, keep, append(opts, WithWays(rule)))
			values = valuesOf(t, m, keep, values, tolerance)
			fused := map[string]bool{}
			for _, c := range m.Choices() {
				if strings.HasPrefix(c.Op, "SiLUProduct") {
					fused[c.Op] = strings.HasPrefix(c.Way, "fused")
				}
			}
			if want := i == 1 && fuses; fused["SiLUProduct"] != want ||
				fused["SiLUProductBackward"] != want {
				t.Errorf("%s: fused %v, want %v", rule, fused, want)
			}
		}
	}
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		check(t, device, 6, 7, 5, 1e-5, true, fakeOption)
	})
	t.Run("bfloat16", func(t *testing.T) {
		device := openGPU(t)
		check(t, device, 200, 136, 72, 2e-2, device.info.Capability() == 90,
			WithPrecision(BFloat16), WithTuning(TuneOff))
	})
}

// TestPerceptronTuned wants products that are worth timing timed with their gates, and no others.
func TestPerceptronTuned(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	for _, least := range []float64{1, 1e9} {
		device, _, fakeOption := openFake(t, fake.Config{Devices: smallCache("GPU")})
		g, params, keep := perceptronGraph(t, 1, 6, 7, 5)
		var log bytes.Buffer
		private := func(c *machineConfig) error {
			c.tuneLeast, c.tunePath = least, filepath.Join(t.TempDir(), "tune.json")
			return nil
		}
		m := newFuseMachine(t, device, g, params, keep, []MachineOption{fakeOption, private,
			WithTuning(TuneCached),
			WithLogger(slog.New(slog.NewTextHandler(&log, nil)))})
		timed := 0
		for _, c := range m.Choices() {
			if c.Op == "SiLUProduct" || c.Op == "SiLUProductBackward" {
				if timed++; c.Source != Measured || c.Of != 2 {
					t.Errorf("%+v", c)
				}
			}
		}
		if want := map[float64]int{1: 2, 1e9: 0}[least]; timed != want {
			t.Errorf("least %g: %d pairs timed, want %d; %s", least, timed, want, log.String())
		}
	}
}

func (k *fakeKernels) LinearCrossEntropyWays(gemm.LinearCrossEntropyShape, gpu.DType) []kernel.Way {
	return []kernel.Way{{Family: "fused"}}
}

func (k *fakeKernels) LinearCrossEntropyWorkspace(a gemm.LinearCrossEntropyShape) int {
	return 4 * a.Rows
}

func (k *fakeKernels) LinearCrossEntropy(s gpu.Stream, a gemm.LinearCrossEntropy) error {
	return k.launch(s, func(l *fake.Launch) {
		fake.Slice[byte](l, a.Workspace, 4*a.Rows)
		x, scale := floatsAt(l, a.X, a.Rows*a.D), floatsAt(l, a.Scale, 1)[0]*upstream(l,
			crossentropy.Forward{Grad: a.Grad})
		terms, scaled := floatsAt(l, a.Terms, a.Rows*a.V), floatsAt(l, a.Scaled, a.Rows*a.D)
		losses, factors := floatsAt(l, a.Losses, a.Rows), floatsAt(l, a.Factors, a.Rows)
		cpugemm.Mul(false, true, a.Rows, a.V, a.D, 1, x, a.D, floatsAt(l, a.W, a.V*a.D), a.D, 0,
			terms, a.V)
		for r, target := range intsAt(l, a.Targets, a.Rows) {
			row := terms[r*a.V:][:a.V]
			losses[r], factors[r] = 0, 0
			if target < 0 {
				clear(row)
			} else {
				z := vec.ExpSub(row, row, row[target])
				losses[r], factors[r] = float32(math.Log(float64(z))), scale/z
				row[target] -= z
			}
			for i := range a.D {
				scaled[r*a.D+i] = factors[r] * x[r*a.D+i]
			}
		}
	})
}

func (k *fakeKernels) ScaleRows(s gpu.Stream, x, factors gpu.Ptr, rows, d int) error {
	return k.launch(s, func(l *fake.Launch) {
		f := floatsAt(l, factors, rows)
		for i := range floatsAt(l, x, rows*d) {
			floatsAt(l, x, rows*d)[i] *= f[i/d]
		}
	})
}

// outputLayer is a graph of an output layer with its loss: x [rows, d], w [v, d] and targets, of
// which an eighth do not count. The loss is multiplied by 0.3.
func outputLayer(t *testing.T, seed uint64, rows, v, d int) (g *gorgonia.ExprGraph, params,
	keep gorgonia.Nodes) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 0))
	g = gorgonia.NewGraph()
	matrix := func(name string, rows int, deviation float32) *gorgonia.Node {
		values := make([]float32, rows*d)
		for i := range values {
			values[i] = deviation * float32(r.NormFloat64())
		}
		return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(rows, d),
			tensor.WithBacking(values)), gorgonia.WithName(name))
	}
	ids := make([]int, rows)
	for i := range ids {
		if ids[i] = r.IntN(v); r.IntN(8) == 0 {
			ids[i] = -1 - r.IntN(9)
		}
	}
	ids[0] = v - 1
	x, w := matrix("x", rows, 0.1), matrix("w", v, 1)
	targets := gorgonia.NodeFromAny(g, tensor.New(tensor.WithBacking(ids)),
		gorgonia.WithName("targets"))
	loss, err := op.LinearCrossEntropy(x, w, targets)
	if err != nil {
		t.Fatal(err)
	}
	cost := gorgonia.Must(gorgonia.Mul(loss, gorgonia.NewConstant(float32(0.3))))
	grads, err := gorgonia.Grad(cost, x, w)
	if err != nil {
		t.Fatal(err)
	}
	return g, gorgonia.Nodes{w}, append(gorgonia.Nodes{loss}, grads...)
}

// headWay is the way in which a machine has chosen to compute the output layer, "" if there was no
// choice.
func headWay(m *Machine) string {
	for _, c := range m.Choices() {
		if c.Op == "LinearCrossEntropy" {
			return c.Way
		}
	}
	return ""
}

// TestOutputLayerWays wants the loss and the gradients of Gorgonia's machine, whether a pass over
// logits forms the gradient or the exponentials come with the product; of a batch that is too large
// for that machine, those of the first way.
func TestOutputLayerWays(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	check := func(t *testing.T, device *Device, rows, v, d int, tolerance float64, reference,
		fuses bool, opts ...MachineOption) {
		t.Helper()
		var want []gorgonia.Value
		if reference {
			g, _, keep := outputLayer(t, seed, rows, v, d)
			tape := gorgonia.NewTapeMachine(g)
			defer tape.Close()
			if err := tape.RunAll(); err != nil {
				t.Fatal(err)
			}
			for _, n := range keep {
				want = append(want, n.Value())
			}
		}
		for _, way := range []string{"separate", "fused"} {
			g, params, keep := outputLayer(t, seed, rows, v, d)
			m := newFuseMachine(t, device, g, params, keep,
				append(opts, WithWays("LinearCrossEntropy="+way)))
			if err := m.RunAll(); err != nil {
				t.Fatal(err)
			}
			for i, n := range keep {
				value, err := m.Value(n)
				if err != nil {
					t.Fatal(err)
				}
				if len(want) <= i {
					want = append(want, value)
				} else if diff := distance(t, value, want[i]); !(diff < tolerance) {
					t.Errorf("%s: value %d differs by %.2g", way, i, diff)
				}
			}
			if got := headWay(m); fuses && got != way || !fuses && got != "" {
				t.Errorf("%s: the way is %q", way, got)
			}
		}
	}
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		check(t, device, 7, 5, 4, 1e-5, true, true, fakeOption)
	})
	for _, s := range []struct {
		rows, v, d int
		large      bool
	}{{300, 1000, 520, false}, {129, 264, 768, false}, {70, 1004, 512, false},
		{6000, 50304, 1032, true}} {
		t.Run(fmt.Sprintf("bfloat16/%dx%dx%d", s.rows, s.v, s.d), func(t *testing.T) {
			if s.large && testing.Short() {
				t.Skip("takes seconds")
			}
			device := openGPU(t)
			fuses := device.info.Capability() == 90 && s.v%8 == 0
			check(t, device, s.rows, s.v, s.d, 1.5e-2, !s.large, fuses,
				WithPrecision(BFloat16), WithTuning(TuneOff))
		})
	}
}
