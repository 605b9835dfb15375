package cudaops

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
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
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/op"
)

// normWays is kernels that have several ways to compute RMSNorm.
type normWays struct {
	run.Launcher
	fake  *fakeKernels
	names []kernel.Way
	ways  []fake.Way
	build string
	ran   []string
}

func (k *normWays) Ways(params any) []kernel.Way {
	if _, ok := params.(norm.RMSNorm); ok {
		return k.names
	}
	return k.Launcher.Ways(params)
}

func (k *normWays) Build(...string) string { return k.build }

func (k *normWays) Launch(s gpu.Stream, params any) error {
	a, ok := params.(norm.RMSNorm)
	if !ok {
		return k.Launcher.Launch(s, params)
	}
	k.ran = append(k.ran, a.Way.String())
	w := k.ways[slices.Index(k.names, a.Way)]
	if w.Fails {
		return errors.New("no such luck")
	}
	if err := k.Launcher.Launch(s, params); err != nil {
		return err
	}
	return k.fake.launch(s, func(l *fake.Launch) {
		l.Took = w.Took
		if w.Wrong {
			floatsAt(l, a.Y, a.Rows*a.D)[3] += 7
		}
	})
}

// normed is what a machine that normalises did.
type normed struct {
	Choice
	log  string
	last string // the way of its last launch
	runs int    // timings among them
}

// tuneNorm runs one thrice on a fake GPU whose ways plain, wide-1 and wide-4 differ as given.
func tuneNorm(t *testing.T, path string, ways [3]fake.Way, build string,
	opts ...MachineOption) normed {
	t.Helper()
	device, _, fakeOption := openFake(t, fake.Config{Devices: smallCache("GPU")})
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(6, 5), gorgonia.WithName("x"),
		gorgonia.WithValue(tensor.New(tensor.WithShape(6, 5),
			tensor.WithBacking(tensor.Range(tensor.Float32, 0, 30)))))
	w := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(5), gorgonia.WithName("w"),
		gorgonia.WithValue(tensor.New(tensor.WithShape(5),
			tensor.WithBacking([]float32{1, 2, 3, 4, 5}))))
	if _, err := op.RMSNorm(x, w, 1e-5); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	var k *normWays
	private := func(c *machineConfig) error { c.tuneLeast, c.tunePath = 1, path; return nil }
	wrap := withKernels(func(inner run.Launcher) run.Launcher {
		k = &normWays{Launcher: inner, fake: fakeOf(inner), ways: ways[:], build: build,
			names: []kernel.Way{{Family: "wide", Size: 4}, {Family: "wide", Size: 1},
				{Family: "plain"}}}
		return k
	})
	m, err := NewMachine(device, g,
		append([]MachineOption{fakeOption, private, wrap,
			WithLogger(slog.New(slog.NewTextHandler(&log, nil)))}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for range 3 {
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
	}
	r := normed{log: log.String(), last: k.ran[len(k.ran)-1], runs: len(k.ran)}
	if c := m.Choices(); len(c) > 0 {
		r.Choice = c[0]
	}
	return r
}

func TestTuningKernels(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	path := filepath.Join(t.TempDir(), "tune.json")
	cached := WithTuning(TuneCached)
	secondBest := [3]fake.Way{{Took: 9e6}, {Took: 2e6}, {Took: 5e6}}
	firstBest := [3]fake.Way{{Took: 1e6}, {Took: 2e6}, {Took: 5e6}}

	if r := tuneNorm(t, path, secondBest, "a"); r.Way != "wide-4" ||
		r.Source != ByRule || r.runs != 2 {
		t.Errorf("without tuning: %+v", r)
	}
	r := tuneNorm(t, path, secondBest, "a", cached)
	if r.Way != "wide-1" || r.last != r.Way || r.Source != Measured || r.runs < 2+3 ||
		r.Of != 3 || r.log != "" {
		t.Errorf("timed: %+v", r)
	}
	if r.Cold < 2*time.Millisecond || r.Cold > 3*time.Millisecond || r.Warm < 2*time.Millisecond {
		t.Errorf("it took %v cold and %v warm, want 2 ms", r.Cold, r.Warm)
	}
	again := tuneNorm(t, path, firstBest, "a", cached)
	if again.Way != "wide-1" || again.Source != Stored || again.runs != 2 || again.Cold != r.Cold {
		t.Errorf("a second start: %+v, want no timing", again)
	}
	if r := tuneNorm(t, path, firstBest, "b", cached); r.Way != "wide-4" || r.Source != Measured {
		t.Errorf("another build: %+v, want it timed", r)
	}
	for i, c := range []struct {
		ways    [3]fake.Way
		rules   []string
		env     string
		way     string
		source  Source
		warning string
	}{
		{[3]fake.Way{{Took: 1e6, Wrong: true}, {Took: 2e6}, {Took: 5e6}}, nil, "", "wide-1",
			Measured, "differs by"},
		{[3]fake.Way{{Fails: true}, {Took: 2e6}, {Took: 1e6}}, nil, "", "plain",
			Measured, "no such luck"},
		{[3]fake.Way{{Took: 1e6, Wrong: true}, {Took: 1e6, Wrong: true}, {Took: 50e6}}, nil, "",
			"plain", Measured, "differs by"},
		{[3]fake.Way{{Took: 2e6}, {Took: 1e6}, {Fails: true}}, nil, "", "wide-1",
			Measured, "no such luck"},
		{firstBest, []string{"RMSNorm=plain"}, "", "plain", Forced, ""},
		{firstBest, []string{"RMS*!=wide-4"}, "", "wide-1", Measured, ""},
		{secondBest, []string{"*!=wide-1"}, "", "plain", Measured, ""},
		{firstBest, []string{"RMSNorm=plain"}, "RMSNorm=wide-1", "wide-1", Forced, ""},
		{firstBest, []string{"RMSNorm=warp"}, "", "wide-4", Measured, "is ignored"},
		{firstBest, []string{"RMSNorm!=*"}, "", "wide-4", Measured, "is ignored"},
		{firstBest, []string{"Attention=plain"}, "", "wide-4", Measured, ""},
	} {
		t.Setenv("KASMINA_WAYS", c.env)
		r := tuneNorm(t, filepath.Join(t.TempDir(), "tune.json"), c.ways, "a",
			cached, WithWays(c.rules...))
		if r.Way != c.way || r.last != c.way || r.Source != c.source || !strings.Contains(r.log,
			c.warning) || (c.warning == "") != (r.log == "") {
			t.Errorf("case %d: %+v, want the way %s, %s, and a warning %q", i, r,
				c.way, c.source, c.warning)
		}
	}
}

// TestTuningOnFullCard wants a card that has no memory left to time in to be told of once, as the
// harmless thing that it is, and ops to be computed by the rule of thumb.
func TestTuningOnFullCard(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	device, _, fakeOption := openFake(t, fake.Config{Devices: smallCache("GPU")})
	g := gorgonia.NewGraph()
	matrix := randomMatrices(g, 1, 3, 1)
	for i := range 2 {
		w := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(5),
			gorgonia.WithName(fmt.Sprint("w", i)), gorgonia.WithInit(gorgonia.Ones()))
		if _, err := op.RMSNorm(matrix(fmt.Sprint("x", i), 6+i, 5), w, 1e-5); err != nil {
			t.Fatal(err)
		}
	}
	var log bytes.Buffer
	private := func(c *machineConfig) error {
		c.tunePath = filepath.Join(t.TempDir(), "tune.json")
		return nil
	}
	wrap := withKernels(func(k run.Launcher) run.Launcher {
		return &normWays{Launcher: k, fake: fakeOf(k),
			names: []kernel.Way{{Family: "wide", Size: 4}, {Family: "plain"}},
			ways:  []fake.Way{{Took: 2e6}, {Took: 1e6}}}
	})
	free, _, err := device.Memory()
	if err != nil {
		t.Fatal(err)
	}
	const little = 2 << 10 // less than the cache and the operands that are timed
	hog, err := device.ctx.Alloc(int(free) - little)
	if err != nil {
		t.Fatal(err)
	}
	m, err := NewMachine(device, g, fakeOption, private, wrap, WithTuning(TuneCached),
		WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := errors.Join(m.RunAll(), m.RunAll(), device.ctx.Free(hog)); err != nil {
		t.Fatal(err)
	}
	choices := m.Choices()
	for _, c := range choices {
		if c.Way != "wide-4" || c.Source != ByRule {
			t.Errorf("%+v", c)
		}
	}
	told := log.String()
	if len(choices) != 2 || strings.Count(told, "\n") != 1 || !strings.Contains(told, "harmless") ||
		!strings.Contains(told, "level=INFO") {
		t.Errorf("of %d choices is told:\n%s", len(choices), told)
	}
}

func TestWaysRefused(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	for _, rule := range []string{"", "RMSNorm", "=plain", "RMSNorm=", "RMSNorm=[", "[=plain"} {
		if _, err := NewMachine(device, gorgonia.NewGraph(), fakeOption,
			WithWays(rule)); err == nil || !strings.Contains(err.Error(), "want OP=WAY") {
			t.Errorf("WithWays(%q): error %v", rule, err)
		}
	}
	t.Setenv("KASMINA_WAYS", "RMSNorm")
	if _, err := NewMachine(device, gorgonia.NewGraph(), fakeOption); err == nil ||
		!strings.Contains(err.Error(), "KASMINA_WAYS") {
		t.Errorf("environment: error %v", err)
	}
}

// TestHostByRule wants an op that has a kernel to be computed on the host where a rule wants it
// there.
func TestHostByRule(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	g := gorgonia.NewGraph()
	x := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(3), gorgonia.WithName("x"),
		gorgonia.WithValue(tensor.New(tensor.WithShape(3), tensor.WithBacking([]float32{1, 2, 3}))))
	y := gorgonia.Must(gorgonia.Square(x))
	var log bytes.Buffer
	m, err := NewMachine(device, g, fakeOption, WithWays("square*=host"),
		WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	v, err := m.Value(y)
	if err != nil {
		t.Fatal(err)
	}
	if got := flat(t, v); !slices.Equal(got, []float32{1, 4, 9}) || !m.runner.OnHost() ||
		!strings.Contains(log.String(), "a rule wants it there") {
		t.Errorf("got %v, log %s", got, log.String())
	}
	if _, err := NewMachine(device, g, fakeOption, WithWays("square*=host"),
		WithStrict()); err == nil {
		t.Error("WithStrict allows it")
	}
}

// TestHostByRuleReads wants an op that a rule puts on the host to find its operands, also those
// that kernels would read from what they were made of: the transpose of a matrix, and a vector
// repeated for each row.
func TestHostByRuleReads(t *testing.T) {
	for _, rule := range []string{"A × B=host", "+ *=host"} {
		device, _, fakeOption := openFake(t, fake.Config{})
		g := gorgonia.NewGraph()
		a := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(2, 3), gorgonia.WithName("a"),
			gorgonia.WithValue(tensor.New(tensor.WithShape(2, 3),
				tensor.WithBacking([]float32{1, 2, 3, 4, 5, 6}))))
		b := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(3), gorgonia.WithName("b"),
			gorgonia.WithValue(tensor.New(tensor.WithShape(3),
				tensor.WithBacking([]float32{10, 20, 30}))))
		square := gorgonia.Must(gorgonia.Mul(gorgonia.Must(gorgonia.Transpose(a, 1, 0)), a))
		sum := gorgonia.Must(gorgonia.BroadcastAdd(square, b, nil, []byte{0}))
		m, err := NewMachine(device, g, fakeOption, WithWays(rule),
			WithLogger(slog.New(slog.DiscardHandler)))
		if err != nil {
			t.Fatal(err)
		}
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		v, err := m.Value(sum)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := flat(t, v), []float32{27, 42, 57, 32, 49, 66, 37, 56,
			75}; !slices.Equal(got, want) {
			t.Errorf("%s: got %v, want %v", rule, got, want)
		}
		if !m.runner.OnHost() {
			t.Errorf("%s: nothing is computed on the host", rule)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestTuningText(t *testing.T) {
	for _, want := range []Tuning{TuneDefault, TuneOff, TuneCached, TuneFull} {
		text, err := want.MarshalText()
		got := Tuning(99)
		if err = errors.Join(err, got.UnmarshalText(text)); err != nil || got != want {
			t.Errorf("%s became %d, %v, want %d", text, got, err, want)
		}
	}
	if err := new(Tuning).UnmarshalText([]byte("fast")); err == nil {
		t.Error("fast is taken for a tuning")
	}
}

// tuned is what a machine that tunes one product of 6×5×4 did.
type tuned struct {
	way, timings int
	log          string
	value        []float32
}

// smallCache is a GPU whose cache is quickly overwritten.
func smallCache(name string) []gpu.DeviceInfo {
	info := fake.New(fake.Config{}).Devices()
	info[0].Name, info[0].L2 = name, 1<<10
	return info
}

// tuneProduct makes and runs such a machine on a fake GPU whose ways differ as given.
func tuneProduct(t *testing.T, path string, ways [3]fake.Way, name string,
	opts ...MachineOption) tuned {
	t.Helper()
	device, _, fakeOption := openFake(t, fake.Config{Ways: ways, Devices: smallCache(name)})
	g := gorgonia.NewGraph()
	matrix := func(name string, rows, columns int) *gorgonia.Node {
		return gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(rows, columns),
			gorgonia.WithName(name),
			gorgonia.WithValue(tensor.New(tensor.WithShape(rows, columns),
				tensor.WithBacking(tensor.Range(tensor.Float32, 0, rows*columns)))))
	}
	y, err := op.Linear(matrix("x", 6, 4), matrix("w", 5, 4))
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	private := func(c *machineConfig) error { c.tuneLeast, c.tunePath = 1, path; return nil }
	m, err := NewMachine(device, g,
		append([]MachineOption{fakeOption, private,
			WithLogger(slog.New(slog.NewTextHandler(&log, nil)))}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	v, err := m.Value(y)
	if err != nil {
		t.Fatal(err)
	}
	r := tuned{log: log.String(), value: flat(t, v), timings: int(device.ctx.Stats().Matmuls) - 1}
	for _, c := range m.runner.Program.Calls {
		if p, ok := c.Params.(program.Matmul); ok {
			r.way = m.runner.Products.Find(p).Way
		}
	}
	return r
}

func TestTuning(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	const card = "Some GPU"
	path := filepath.Join(t.TempDir(), "tune.json")
	slowFirst := [3]fake.Way{{Took: 9 * time.Millisecond}, {Took: 2 * time.Millisecond},
		{Took: 5 * time.Millisecond}}
	fastFirst := [3]fake.Way{{Took: 1 * time.Millisecond}, {Took: 2 * time.Millisecond},
		{Took: 5 * time.Millisecond}}
	cached, full := WithTuning(TuneCached), WithTuning(TuneFull)

	if r := tuneProduct(t, path, slowFirst, card); r.way != 0 || r.timings != 0 {
		t.Errorf("Float32 without an option: way %d, %d timings, want no tuning", r.way, r.timings)
	}
	first := tuneProduct(t, path, slowFirst, card, cached)
	if first.way != 1 || first.timings < 3 || first.log != "" {
		t.Errorf("the first time: way %d, %d timings, want way 1 after at least 3\n%s", first.way,
			first.timings, first.log)
	}
	if b, err := os.ReadFile(path); err != nil || !strings.Contains(string(b), card) ||
		!strings.Contains(string(b), "cuBLASLt 130000") {
		t.Errorf("stored: %s, %v", b, err)
	}
	second := tuneProduct(t, path, fastFirst, card, cached)
	if second.way != 1 || second.timings != 0 {
		t.Errorf("the second time: way %d, %d timings, want what is stored and no more timings",
			second.way, second.timings)
	}
	for i, v := range second.value {
		if v != first.value[i] {
			t.Fatal("other bits with the same choice")
		}
	}
	third := tuneProduct(t, path, fastFirst, card, full)
	if third.way != 0 || third.timings < 3 {
		t.Errorf("TuneFull: way %d, %d timings, want way 0, timed anew", third.way, third.timings)
	}
	if r := tuneProduct(t, path, slowFirst, card, cached); r.way != 0 || r.timings != 0 {
		t.Errorf("after TuneFull: way %d, %d timings, want the new choice", r.way, r.timings)
	}
	if r := tuneProduct(t, path, slowFirst, "Another GPU", cached); r.way != 1 || r.timings < 3 {
		t.Errorf("on another card: way %d, %d timings, want a choice of its own", r.way, r.timings)
	}
	t.Setenv("KASMINA_TUNE", "off")
	if r := tuneProduct(t, path, slowFirst, "Another GPU", full); r.way != 0 || r.timings != 0 {
		t.Errorf("with KASMINA_TUNE=off: way %d, %d timings", r.way, r.timings)
	}
}

// TestChoiceWithdrawn wants another way where the one chosen before, for a call of the same shape,
// does not take the arguments.
func TestChoiceWithdrawn(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "off")
	t.Setenv("KASMINA_WAYS", "")
	device, _, fakeOption := openFake(t, fake.Config{})
	m, err := NewMachine(device, gorgonia.NewGraph(), fakeOption, WithWays("Some=b"))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for i, c := range []struct {
		ways []string
		want int
	}{{[]string{"a", "b"}, 1}, {[]string{"a"}, 0}, {[]string{"b", "a"}, 1}} {
		g := program.Group{Op: "Some", Shape: "one"}
		for _, name := range c.ways {
			g.Alternatives = append(g.Alternatives, program.Alternative{Name: name})
		}
		if way, _, err := m.chooser.Choose(g); err != nil || way != c.want {
			t.Errorf("call %d: way %d, error %v, want %d", i, way, err, c.want)
		}
	}
}

// TestTuningDrops wants ways that are wrong or fail never to be chosen, and a warning of each.
func TestTuningDrops(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	want := tuneProduct(t, "", [3]fake.Way{}, "GPU 0").value
	for i, c := range []struct {
		ways    [3]fake.Way
		way     int
		warning string
	}{
		{[3]fake.Way{{Took: 9e6}, {Took: 1e6, Wrong: true}, {Took: 5e6}}, 2, "differs by"},
		{[3]fake.Way{{Fails: true}, {Took: 2e6}, {Took: 1e6}}, 2, "a way that fails"},
		{[3]fake.Way{{Took: 1e6}, {Took: 995e3}, {Took: 996e3}}, 0, ""}, // no gain worth other bits
	} {
		r := tuneProduct(t, filepath.Join(t.TempDir(), "tune.json"), c.ways, "Some GPU",
			WithTuning(TuneCached))
		if r.way != c.way || !strings.Contains(r.log, c.warning) ||
			(c.warning == "") == strings.Contains(r.log, "WARN") {
			t.Errorf("case %d: way %d, want %d; log %q", i, r.way, c.way, r.log)
		}
		for j, v := range r.value {
			if v != want[j] {
				t.Fatalf("case %d: element %d is %v, want %v", i, j, v, want[j])
			}
		}
	}
}

// TestTuningIgnores wants stored choices that make no sense to be ignored.
func TestTuningIgnores(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	path := filepath.Join(t.TempDir(), "tune.json")
	ways := [3]fake.Way{{Took: 9e6}, {Took: 1e6}, {Took: 5e6}}
	tuneProduct(t, path, ways, "Some GPU", WithTuning(TuneCached))
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	from := bytes.LastIndex(b, []byte("{")) // of the choice
	for name, id := range map[string]string{"text": `"fast"`, "unknown": `{"way": "7"}`,
		"cut": "{"} {
		other := filepath.Join(t.TempDir(), "tune.json")
		damaged := string(b[:from]) + id + "}}"
		if err := os.WriteFile(other, []byte(damaged), 0o644); err != nil {
			t.Fatal(err)
		}
		r := tuneProduct(t, other, ways, "Some GPU", WithTuning(TuneCached))
		if r.way != 1 || r.timings < 3 {
			t.Errorf("%s: way %d, %d timings, want it timed", name, r.way, r.timings)
		}
		if warned := strings.Contains(r.log, "ignored"); warned != (name != "unknown") {
			t.Errorf("%s: log %q", name, r.log)
		}
	}
}

func TestTuningOptions(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	for name, f := range map[string]func(){"option": func() {}, "environment": func() { t.Setenv("KASMINA_TUNE", "sometimes") }} {
		f()
		opts := []MachineOption{fakeOption}
		if name == "option" {
			opts = append(opts, WithTuning(7))
		}
		if _, err := NewMachine(device, gorgonia.NewGraph(), opts...); err == nil ||
			!strings.Contains(err.Error(), "off") && !strings.Contains(err.Error(), "TuneOff") {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

// TestChoicesOfAnother wants what another machine has chosen to be taken over without timing, what
// it has not chosen to go by rule, and a way that is not there to be refused.
func TestChoicesOfAnother(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "full") // which is for machines that choose themselves
	t.Setenv("KASMINA_WAYS", "")
	ways := [3]fake.Way{{Took: 1e6}, {Took: 2e6}, {Took: 5e6}}
	path := filepath.Join(t.TempDir(), "tune.json")
	timed := tuneNorm(t, path, [3]fake.Way{{Took: 9e6}, {Took: 2e6}, {Took: 5e6}}, "a")
	if timed.Way != "wide-1" || timed.Source != Measured {
		t.Fatalf("timed: %+v", timed)
	}
	r := tuneNorm(t, path, ways, "a", WithChoices([]Choice{timed.Choice}))
	if r.Way != "wide-1" || r.last != r.Way || r.Source != Stored || r.runs != 2 || r.log != "" {
		t.Errorf("taken over: %+v", r)
	}
	r = tuneNorm(t, path, ways, "a", WithChoices(nil))
	if r.Way != "wide-4" || r.Source != ByRule || r.runs != 2 {
		t.Errorf("not chosen: %+v", r)
	}
	r = tuneNorm(t, path, ways, "a", WithChoices([]Choice{timed.Choice}),
		WithWays("RMSNorm=wide-1"))
	if r.Way != "wide-1" || r.Source != Forced {
		t.Errorf("the same by rule: %+v", r)
	}
	device, _, fakeOption := openFake(t, fake.Config{})
	g := gorgonia.NewGraph()
	x := randomMatrices(g, 1, 3, 1)("x", 6, 5)
	w := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(5), gorgonia.WithName("w"),
		gorgonia.WithInit(gorgonia.Ones()))
	if _, err := op.RMSNorm(x, w, 1e-5); err != nil {
		t.Fatal(err)
	}
	wrap := withKernels(func(k run.Launcher) run.Launcher {
		return &normWays{Launcher: k, fake: fakeOf(k),
			names: []kernel.Way{{Family: "wide", Size: 4}, {Family: "plain"}},
			ways:  []fake.Way{{Took: 2e6}, {Took: 1e6}}}
	})
	_, err := NewMachine(device, g, fakeOption, wrap, WithChoices([]Choice{timed.Choice}))
	if err == nil || !strings.Contains(err.Error(), "the same kind of GPU") ||
		!strings.Contains(err.Error(), timed.Shape) {
		t.Errorf("a way that is not there: %v", err)
	}
}
