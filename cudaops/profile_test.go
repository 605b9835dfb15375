package cudaops

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	normkernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/internal/optime"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// withCeilingBytes measures ceilings on less memory, since the fake driver multiplies on the CPU.
func withCeilingBytes(n int) MachineOption {
	return func(c *machineConfig) error {
		c.ceilingBytes = n
		return nil
	}
}

// TestProfile profiles a machine whose norm takes 3 ms, and one that does not profile beside it.
func TestProfile(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	norm := &fake.Way{Took: 3 * time.Millisecond}
	m, device := monitored(t, norm, &bytes.Buffer{}, withCeilingBytes(1<<14),
		WithTuning(TuneCached), WithMonitor(3))
	plain, _ := monitored(t, norm, &bytes.Buffer{}, WithTuning(TuneCached))
	step := func(m *Machine) {
		t.Helper()
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Update(); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.StartProfile(); err == nil || !strings.Contains(err.Error(), "has not run") {
		t.Errorf("before the first run: %v", err)
	}
	step(m)
	step(plain)
	if _, err := m.Profile(); err == nil || !strings.Contains(err.Error(), "StartProfile") {
		t.Errorf("without StartProfile: %v", err)
	}
	if err := m.StartProfile(); err != nil {
		t.Fatal(err)
	}
	for i := range ProfileSteps {
		if p, err := m.Profile(); p != nil || err != nil {
			t.Fatalf("before the last step: %v, %v", p, err)
		}
		// amid those with marks, which must not go on with what is captured of the old one
		if i == ProfileSteps-2 {
			for _, m := range []*Machine{m, plain} {
				o, err := optim.NewAdamW(optim.WithLR(0.02))
				if err != nil {
					t.Fatal(err)
				}
				if err := m.SetOptimizer(o, 1); err != nil {
					t.Fatal(err)
				}
			}
		}
		step(m)
		step(plain)
	}
	launches := device.ctx.Stats().Launches
	p, err := m.Profile()
	if err != nil {
		t.Fatal(err)
	}
	if again := device.ctx.Stats().Launches; again != launches {
		t.Errorf("%d launches for the profile itself", again-launches)
	}
	checkProfile(t, m, p, 1)
	first := p.Ops()[0]
	if first.Op != "RMSNorm" || first.Time < 3*time.Millisecond ||
		first.Time > 4*time.Millisecond || !slices.Equal(first.Ways, []string{"fast"}) {
		t.Errorf("the norm: %+v", first)
	}
	var layers []string
	for _, s := range p.Spans {
		if s.Op == "Linear" {
			layers = append(layers, s.Layer)
			if s.FLOPs != 2*6*5*4 || !strings.HasPrefix(s.Kernel, "cublasLt 6x5x4 nt float32") {
				t.Errorf("the product: %+v", s)
			}
		}
	}
	if !slices.Equal(layers, []string{"w"}) {
		t.Errorf("layers of linear layers: %q", layers)
	}
	if kernels, graphs := p.Busy(); !(kernels > 0.5 && kernels <= graphs*(1+1e-9) && graphs <= 1) {
		t.Errorf("busy %v, %v", kernels, graphs)
	}
	for range 4 { // and the monitor goes on
		step(m)
		step(plain)
	}
	if times, err := m.Monitor(); err != nil || len(times) == 0 {
		t.Errorf("the monitor after the profile: %v, %v", times, err)
	}
	a, errA := m.Value(m.config.Params[0])
	b, errB := plain.Value(plain.config.Params[0])
	if errA != nil || errB != nil {
		t.Fatal(errA, errB)
	}
	if !slices.Equal(flat(t, a), flat(t, b)) {
		t.Errorf("weights %v, without a profile %v", flat(t, a), flat(t, b))
	}
}

// TestProfileFloat8 wants products of float8, and no others, to be measured by a product of float8.
func TestProfileFloat8(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	_, b := float8Model(t, llm.ForLoss, 3, 32)
	m := newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss},
		[]MachineOption{fakeOption, float8Products, withCeilingBytes(1 << 14)})
	if err := errors.Join(m.RunAll(), m.StartProfile()); err != nil {
		t.Fatal(err)
	}
	for range ProfileSteps {
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
	}
	p, err := m.Profile()
	if err != nil {
		t.Fatal(err)
	}
	checkProfile(t, m, p, 1)
	if p.ProductFloat8 <= 0 {
		t.Fatalf("%v operations a second in float8", p.ProductFloat8)
	}
	p.ProductFloat8 *= 3 // the fake driver's products take the same time in all types
	p.SetShares()
	narrow, wide := 0, 0
	for _, s := range p.Spans {
		if s.FLOPs == 0 || !strings.HasPrefix(s.Kernel, "cublasLt") {
			continue
		}
		product := p.Product
		if s.Float8 {
			product = p.ProductFloat8
			narrow++
		} else {
			wide++
		}
		if want := max(s.Bytes/p.Copy,
			s.FLOPs/product) / s.Time.Seconds(); math.Abs(s.Share-want) > 0.01*want+1e-3 {
			t.Errorf("%s: the share is %v, want %v", s.Kernel, s.Share, want)
		}
	}
	if narrow == 0 || wide == 0 {
		t.Errorf("%d products of float8 and %d others", narrow, wide)
	}
	if !strings.Contains(p.Table(), "in float8, measured now") {
		t.Errorf("the table: %s", p.Table())
	}
}

// TestCeiling wants what a card reaches measured before the first run and between runs, whose
// results stay as they are, and a closed machine to refuse.
func TestCeiling(t *testing.T) {
	m, _ := monitored(t, &fake.Way{Took: time.Millisecond}, &bytes.Buffer{},
		withCeilingBytes(1<<14), WithTuning(TuneCached))
	for range 2 {
		c, err := m.Ceiling()
		require.NoError(t, err)
		require.Greater(t, c.Copy, 0.0)
		require.Greater(t, c.Product, 0.0)
		require.NotEmpty(t, c.Type)
		require.NoError(t, m.RunAll())
		_, err = m.Update()
		require.NoError(t, err)
	}
	require.NoError(t, m.Close())
	_, err := m.Ceiling()
	require.Error(t, err)
}

// checkProfile checks what is so of every profile, and its trace.
func checkProfile(t *testing.T, m *Machine, p *Profile, runs int) {
	t.Helper()
	var end time.Duration
	tasks := map[int]bool{}
	for i, s := range p.Spans {
		if s.Start < end || s.Time < 0 || s.Kernel == "" || s.Op == "" || s.Share < 0 ||
			math.IsNaN(s.Share) || math.IsInf(s.Share, 0) {
			t.Errorf("span %d, after %v: %+v", i, end, s)
		}
		end = s.Start + s.Time
		if s.Op != "Copies" && s.Op != "Update" {
			tasks[s.Task] = true
		}
	}
	if len(tasks) != runs*len(m.runner.Program.Calls) {
		t.Errorf("%d tasks in %d runs, the program has %d", len(tasks), runs,
			len(m.runner.Program.Calls))
	}
	if p.Period <= 0 || p.Graphs <= 0 || p.Copy <= 0 || p.Product <= 0 || p.Device == "" {
		t.Errorf("the profile: period %v, graphs %v, ceilings %v and %v, device %q", p.Period,
			p.Graphs, p.Copy, p.Product, p.Device)
	}
	var calls []string
	for _, h := range p.Host {
		calls = append(calls, h.Name)
	}
	if !slices.Contains(calls, "RunAll") {
		t.Errorf("calls %q", calls)
	}
	var text bytes.Buffer
	if err := p.WriteTrace(&text); err != nil {
		t.Fatal(err)
	}
	var trace struct {
		TraceEvents []struct {
			Name, Ph string
			Ts, Dur  float64
			Pid, Tid int
			Args     map[string]any
		}
	}
	if err := json.Unmarshal(text.Bytes(), &trace); err != nil {
		t.Fatal(err)
	}
	kernels := 0
	for _, e := range trace.TraceEvents {
		if e.Ph != "X" && e.Ph != "M" || e.Ph == "X" && (e.Ts < 0 || e.Dur < 0 || e.Name == "") {
			t.Errorf("event %+v", e)
		}
		if e.Ph == "X" && e.Pid == 1 && e.Tid == 1 {
			s := p.Spans[kernels]
			kernels++
			if e.Name != s.Kernel || e.Args["op"] != s.Op || e.Args["layer"] != s.Layer ||
				math.Abs(e.Dur-float64(s.Time)/1e3) > 1e-9 {
				t.Errorf("event %+v of span %+v", e, s)
			}
		}
	}
	if kernels != len(p.Spans) {
		t.Errorf("%d events of %d spans", kernels, len(p.Spans))
	}
	table := p.Table()
	for _, o := range p.Ops() {
		if !strings.Contains(table, o.Op) {
			t.Errorf("no %s in the table:\n%s", o.Op, table)
		}
	}
}

// TestProfileLayers wants every node of a model, backward too and with recomputation, in its block.
func TestProfileLayers(t *testing.T) {
	for _, recompute := range []bool{false, true} {
		device, _, fakeOption := openFake(t, fake.Config{})
		p := profiled(t, device, recompute, 1, fakeOption, withCeilingBytes(1<<14))
		count := map[string]map[string]int{}
		for _, s := range p.Spans {
			if count[s.Op] == nil {
				count[s.Op] = map[string]int{}
			}
			count[s.Op][s.Layer]++
		}
		for _, op := range []string{"Attention", "AttentionGrad", "RoPE", "SiLUMLP", "SiLUMLPGrad",
			"LinearGrad", "RMSNormGrad"} {
			for _, layer := range []string{"model.layers.0", "model.layers.1"} {
				if count[op][layer] == 0 {
					t.Errorf("recompute %v: no %s in %s: %v", recompute, op, layer, count[op])
				}
			}
			if n := count[op]["model.layers.0"]; n != count[op]["model.layers.1"] {
				t.Errorf("recompute %v: %s: %v", recompute, op, count[op])
			}
		}
		if count["LinearCrossEntropy"]["model.embed_tokens"] == 0 || count["Update"][""] == 0 ||
			count["Copies"][""] == 0 {
			t.Errorf("recompute %v: %v", recompute, count)
		}
	}
}

// TestProfileAccumulation wants all runs of a step in its profile.
func TestProfileAccumulation(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	profiled(t, device, false, 3, fakeOption, withCeilingBytes(1<<14), WithAccumulation())
}

// TestProfileOnGPU profiles a model's step on a GPU, where times are real.
func TestProfileOnGPU(t *testing.T) {
	p := profiled(t, openGPU(t), false, 1, WithPrecision(BFloat16))
	t.Logf("%s", p.Table())
	copied, multiplied := 1e11, 1e13
	if testing.Short() { // perhaps under a tool that makes kernels slow, by whatever factor
		copied, multiplied = 1, 1
	}
	kernels, graphs := p.Busy()
	if !(kernels > 0 && kernels <= graphs*(1+1e-9) && graphs < 1) || p.Copy < copied ||
		p.Product < multiplied {
		t.Errorf("busy %v and %v, ceilings %v and %v", kernels, graphs, p.Copy, p.Product)
	}
}

// profiled is the profile of a step of a small model, of so many runs and an update.
func profiled(t *testing.T, device *Device, recompute bool, runs int,
	opts ...MachineOption) *Profile {
	t.Helper()
	config := llm.Config{Vocab: 24, Dim: 16, Layers: 2, Heads: 2, FF: 24, Seq: 8}.Default()
	model, err := llm.NewModel(config, tensor.Float32, 1)
	if err != nil {
		t.Fatal(err)
	}
	var how []llm.GraphOption
	if recompute {
		how = append(how, llm.WithRecompute())
	}
	g, err := model.Graph(llm.ForTraining, 2, how...)
	if err != nil {
		t.Fatal(err)
	}
	m, err := NewMachine(device, g.G, append(opts, WithParams(g.Params...),
		WithOutputs(g.Loss), WithStrict())...)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	o, err := optim.NewMuon(optim.WithLR(0.01))
	if err != nil {
		t.Fatal(err)
	}
	if err := m.SetOptimizer(o, 1); err != nil {
		t.Fatal(err)
	}
	ids := make([]int, 2*8)
	for i := range ids {
		ids[i] = (7*i + 3) % 24
	}
	for i := range 2 + ProfileSteps {
		if i == 2 {
			if err := m.StartProfile(); err != nil {
				t.Fatal(err)
			}
		}
		for _, n := range []*gorgonia.Node{g.IDs, g.Targets} {
			if err := gorgonia.Let(n, tensor.New(tensor.WithShape(len(ids)),
				tensor.WithBacking(ids))); err != nil {
				t.Fatal(err)
			}
		}
		for range runs {
			if err := m.RunAll(); err != nil {
				t.Fatal(err)
			}
			if _, err := m.Value(g.Loss); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := m.Update(); err != nil {
			t.Fatal(err)
		}
	}
	p, err := m.Profile()
	if err != nil {
		t.Fatal(err)
	}
	checkProfile(t, m, p, runs)
	if i := slices.IndexFunc(p.Spans, func(s optime.Span) bool {
		return s.Op == "Update" && s.FLOPs == 0
	}); i >= 0 {
		t.Errorf("the products of the update are not counted: %+v", p.Spans[i])
	}
	return p
}

// monitored makes a machine that learns one weight matrix behind a norm, which takes as long as
// norm says.
func monitored(t *testing.T, norm *fake.Way, log *bytes.Buffer, opts ...MachineOption) (*Machine,
	*Device) {
	t.Helper()
	device, _, fakeOption := openFake(t, fake.Config{Devices: smallCache("GPU")})
	g := gorgonia.NewGraph()
	matrix := func(name string, rows, columns int) *gorgonia.Node {
		return gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(rows, columns),
			gorgonia.WithName(name),
			gorgonia.WithValue(tensor.New(tensor.WithShape(rows, columns),
				tensor.WithBacking(tensor.Range(tensor.Float32, 0, rows*columns)))))
	}
	x, w := matrix("x", 6, 4), matrix("w", 5, 4)
	scale := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(4),
		gorgonia.WithName("scale"),
		gorgonia.WithValue(tensor.New(tensor.WithShape(4),
			tensor.WithBacking([]float32{1, 2, 3, 4}))))
	n, err := op.RMSNorm(x, scale, 1e-5)
	if err != nil {
		t.Fatal(err)
	}
	y, err := op.Linear(n, w)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := gorgonia.Grad(gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.Square(y)))),
		w); err != nil {
		t.Fatal(err)
	}
	private := func(c *machineConfig) error {
		c.tuneLeast, c.tunePath = 1, filepath.Join(t.TempDir(), "tune.json")
		return nil
	}
	wrap := withKernels(func(k run.Launcher) run.Launcher {
		slow := fake.Way{Took: 40 * time.Millisecond}
		return &slowNorm{normWays{Launcher: k, fake: fakeOf(k),
			names: []kernel.Way{{Family: "fast"}, {Family: "plain"}},
			ways:  []fake.Way{{}, slow}}, norm}
	})
	all := append([]MachineOption{fakeOption, private, wrap, WithParams(w),
		WithLogger(slog.New(slog.NewTextHandler(log, nil)))}, opts...)
	m, err := NewMachine(device, g, all...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	o, err := optim.NewAdamW(optim.WithLR(0.01))
	if err != nil {
		t.Fatal(err)
	}
	if err := m.SetOptimizer(o, 1); err != nil {
		t.Fatal(err)
	}
	return m, device
}

// slowNorm is normWays whose first way takes as long as it is told, run by run.
type slowNorm struct {
	normWays
	norm *fake.Way
}

func (k *slowNorm) Launch(s gpu.Stream, params any) error {
	if a, ok := params.(normkernel.RMSNorm); !ok || a.Way.Family != "fast" {
		return k.normWays.Launch(s, params)
	}
	if err := k.Launcher.Launch(s, params); err != nil {
		return err
	}
	return k.fake.launch(s, func(l *fake.Launch) { l.Took = k.norm.Took })
}

func TestMonitor(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	norm := &fake.Way{Took: 3 * time.Millisecond}
	var log bytes.Buffer
	m, _ := monitored(t, norm, &log, WithTuning(TuneCached), WithMonitor(4))
	plain, _ := monitored(t, norm, &bytes.Buffer{}, WithTuning(TuneCached))
	step := func(m *Machine) {
		t.Helper()
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Update(); err != nil {
			t.Fatal(err)
		}
	}
	if times, err := m.Monitor(); err != nil || len(times) != 0 {
		t.Errorf("before any run: %v, %v", times, err)
	}
	for range 14 {
		step(m)
		step(plain)
	}
	times, err := m.Monitor()
	if err != nil || len(times) == 0 {
		t.Fatalf("%v, %v", times, err)
	}
	if m.monitor.Samples() < 3 || m.monitor.Samples() > 5 {
		t.Errorf("%d samples in 14 runs, want one in 4", m.monitor.Samples())
	}
	first := times[0]
	if first.Op != "RMSNorm" || first.Time < 3*time.Millisecond ||
		first.Time > 4*time.Millisecond || first.Bytes != 4*(2*24+4+6) ||
		strings.Join(first.Ways, " ") != "fast" || first.Tuned < 3*time.Millisecond {
		t.Errorf("the norm: %+v", first)
	}
	table := Table(times)
	for _, want := range []string{"Linear", "Update", "RMSNorm", "fast", "GB/s"} {
		if !strings.Contains(table, want) {
			t.Errorf("no %s in the table:\n%s", want, table)
		}
	}
	for _, o := range times {
		if o.Op == "Linear" && o.FLOPs != 2*6*5*4 {
			t.Errorf("the product: %+v", o)
		}
		if o.Op == "Update" && o.Bytes != 4*20*8 { // gradients twice
			t.Errorf("the update: %+v", o)
		}
	}
	if log.Len() > 0 {
		t.Errorf("warnings: %s", log.String())
	}
	w := m.config.Params[0]
	a, errA := m.Value(w)
	b, errB := plain.Value(plain.config.Params[0])
	if errA != nil || errB != nil {
		t.Fatal(errA, errB)
	}
	for i, v := range flat(t, a) {
		if v != flat(t, b)[i] {
			t.Fatalf("element %d of the weights is %v, without the monitor %v", i, v, flat(t, b)[i])
		}
	}
	norm.Took = 9 * time.Millisecond
	for range 16 {
		step(m)
	}
	if text := log.String(); strings.Count(text, "when it was tuned") != 1 ||
		!strings.Contains(text, "RMSNorm") {
		t.Errorf("the norm takes thrice as long: log %q", text)
	}
}

// TestMonitorWithoutOptimizer wants the times of ops, and of updates, after an optimiser that did
// not fit has left the machine without.
func TestMonitorWithoutOptimizer(t *testing.T) {
	m, device := monitored(t, &fake.Way{}, &bytes.Buffer{}, WithMonitor(2))
	for range 6 {
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Update(); err != nil {
			t.Fatal(err)
		}
	}
	context := device.ctx.Context
	Wrap(device, func(gpu.Context) gpu.Context { return full{context} })
	if err := m.SetOptimizer(m.optimizer.Rules, 1); !errors.Is(err, gpu.OutOfMemory) {
		t.Errorf("an optimiser without room: %v", err)
	}
	Wrap(device, func(gpu.Context) gpu.Context { return context })
	times, err := m.Monitor()
	if i := slices.IndexFunc(times, func(o OpTime) bool {
		return o.Op == "Update"
	}); err != nil || i < 0 || times[i].Time == 0 {
		t.Errorf("got %v, %v, want what updates took too", times, err)
	}
}

// full is a context without room.
type full struct{ gpu.Context }

func (full) Alloc(bytes int) (gpu.Ptr, error) { return 0, gpu.NewOutOfMemory(bytes, 0, 0) }

// TestMonitorSampleFails wants a sample whose times cannot all be read to leave no trace in those
// that follow.
func TestMonitorSampleFails(t *testing.T) {
	m, device := monitored(t, &fake.Way{}, &bytes.Buffer{}, WithMonitor(2))
	o := m.monitor
	for !o.Sampling() {
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
	}
	if err := device.ctx.SyncStream(m.runner.Stream); err != nil {
		t.Fatal(err)
	}
	context := device.ctx.Context
	Wrap(device, func(gpu.Context) gpu.Context {
		return &unread{context, len(m.runner.Program.Calls)}
	})
	if _, err := m.Monitor(); !errors.Is(err, gpu.LaunchFailed) {
		t.Fatalf("a time that cannot be read: %v", err)
	}
	Wrap(device, func(gpu.Context) gpu.Context { return context })
	if times, err := m.Monitor(); len(times) != 0 || err != nil || o.Samples() != 0 {
		t.Errorf("%d samples, %v, %v", o.Samples(), times, err)
	}
	for range 6 {
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
	}
	if times, err := m.Monitor(); err != nil || len(times) == 0 || o.Samples() == 0 {
		t.Errorf("%d samples later: %v, %v", o.Samples(), times, err)
	}
}

// unread is a context that tells so many times.
type unread struct {
	gpu.Context
	left int
}

func (c *unread) Elapsed(from, to gpu.Event) (time.Duration, error) {
	if c.left--; c.left < 0 {
		return 0, gpu.NewError("cuEventElapsedTime", gpu.LaunchFailed, "", "")
	}
	return c.Context.Elapsed(from, to)
}

// TestMonitorCost wants fewer samples where they cost much.
func TestMonitorCost(t *testing.T) {
	norm := &fake.Way{}
	m, _ := monitored(t, norm, &bytes.Buffer{}, WithMonitor(2))
	for range 30 {
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		norm.Took = 5 * time.Millisecond
		if m.monitor.Sampling() { // as if the stamps took so much
			norm.Took = 10 * time.Millisecond
		}
		if _, err := m.Value(m.config.Params[0]); err != nil { // computes it
			t.Fatal(err)
		}
	}
	if m.monitor.Samples() == 0 || m.monitor.Every() < 100 {
		t.Errorf("%d samples, one in %d", m.monitor.Samples(), m.monitor.Every())
	}
	device, _, fakeOption := openFake(t, fake.Config{})
	if _, err := NewMachine(device, gorgonia.NewGraph(), fakeOption, WithMonitor(1)); err == nil ||
		!strings.Contains(err.Error(), "at least 2") {
		t.Errorf("WithMonitor(1): %v", err)
	}
}
