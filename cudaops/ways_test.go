package cudaops

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
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
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/op"
)

// normWays is kernels that have several ways to compute RMSNorm.
type normWays struct {
	kernels.Launcher
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
	timings int
	log     string
	last    string // the way of its last launch
	runs    int
}

// tuneNorm runs one thrice on a fake GPU whose ways plain, wide-1 and wide-4 differ as given.
func tuneNorm(t *testing.T, path string, ways [3]fake.Way, build string, opts ...MachineOption) normed {
	t.Helper()
	device, _, fakeOption := openFake(t, fake.Config{Devices: smallCache("GPU")})
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(6, 5), gorgonia.WithName("x"),
		gorgonia.WithValue(tensor.New(tensor.WithShape(6, 5), tensor.WithBacking(tensor.Range(tensor.Float32, 0, 30)))))
	w := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(5), gorgonia.WithName("w"),
		gorgonia.WithValue(tensor.New(tensor.WithShape(5), tensor.WithBacking([]float32{1, 2, 3, 4, 5}))))
	if _, err := op.RMSNorm(x, w, 1e-5); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	var k *normWays
	private := func(c *machineConfig) error { c.tuneLeast, c.tunePath = 1, path; return nil }
	wrap := withKernels(func(inner kernels.Launcher) kernels.Launcher {
		k = &normWays{Launcher: inner, fake: fakeOf(inner), ways: ways[:], build: build,
			names: []kernel.Way{{Family: "wide", Size: 4}, {Family: "wide", Size: 1}, {Family: "plain"}}}
		return k
	})
	m, err := NewMachine(device, g, append([]MachineOption{fakeOption, private, wrap, WithLogger(slog.New(slog.NewTextHandler(&log, nil)))}, opts...)...)
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
	r.timings = m.chooser.Timings()
	return r
}

func TestTuningKernels(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	path := filepath.Join(t.TempDir(), "tune.json")
	cached := WithTuning(TuneCached)
	secondBest := [3]fake.Way{{Took: 9e6}, {Took: 2e6}, {Took: 5e6}}
	firstBest := [3]fake.Way{{Took: 1e6}, {Took: 2e6}, {Took: 5e6}}

	if r := tuneNorm(t, path, secondBest, "a"); r.Way != "wide-4" || r.Source != ByRule || r.timings != 0 || r.runs != 2 {
		t.Errorf("without tuning: %+v", r)
	}
	r := tuneNorm(t, path, secondBest, "a", cached)
	if r.Way != "wide-1" || r.last != r.Way || r.Source != Measured || r.timings < 3 || r.Of != 3 || r.log != "" {
		t.Errorf("timed: %+v", r)
	}
	if r.Cold < 2*time.Millisecond || r.Cold > 3*time.Millisecond || r.Warm < 2*time.Millisecond {
		t.Errorf("it took %v cold and %v warm, want 2 ms", r.Cold, r.Warm)
	}
	again := tuneNorm(t, path, firstBest, "a", cached)
	if again.Way != "wide-1" || again.Source != Stored || again.timings != r.timings || again.runs != 2 || again.Cold != r.Cold {
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
		{[3]fake.Way{{Took: 1e6, Wrong: true}, {Took: 2e6}, {Took: 5e6}}, nil, "", "wide-1", Measured, "differs by"},
		{[3]fake.Way{{Fails: true}, {Took: 2e6}, {Took: 1e6}}, nil, "", "plain", Measured, "no such luck"},
		{[3]fake.Way{{Took: 1e6, Wrong: true}, {Took: 1e6, Wrong: true}, {Took: 50e6}}, nil, "", "plain", Measured, "differs by"},
		{[3]fake.Way{{Took: 2e6}, {Took: 1e6}, {Fails: true}}, nil, "", "wide-1", Measured, "no such luck"},
		{firstBest, []string{"RMSNorm=plain"}, "", "plain", Forced, ""},
		{firstBest, []string{"RMS*!=wide-4"}, "", "wide-1", Measured, ""},
		{secondBest, []string{"*!=wide-1"}, "", "plain", Measured, ""},
		{firstBest, []string{"RMSNorm=plain"}, "RMSNorm=wide-1", "wide-1", Forced, ""},
		{firstBest, []string{"RMSNorm=warp"}, "", "wide-4", Measured, "is ignored"},
		{firstBest, []string{"RMSNorm!=*"}, "", "wide-4", Measured, "is ignored"},
		{firstBest, []string{"Attention=plain"}, "", "wide-4", Measured, ""},
	} {
		t.Setenv("KASMINA_WAYS", c.env)
		r := tuneNorm(t, filepath.Join(t.TempDir(), "tune.json"), c.ways, "a", cached, WithWays(c.rules...))
		if r.Way != c.way || r.last != c.way || r.Source != c.source || !strings.Contains(r.log, c.warning) || (c.warning == "") != (r.log == "") {
			t.Errorf("case %d: %+v, want the way %s, %s, and a warning %q", i, r, c.way, c.source, c.warning)
		}
	}
}

// TestTuningOnFullCard wants a card that has no memory left to time in to be told of once, as the harmless thing that it is, and ops to
// be computed by the rule of thumb.
func TestTuningOnFullCard(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	device, _, fakeOption := openFake(t, fake.Config{Devices: smallCache("GPU")})
	g := gorgonia.NewGraph()
	matrix := randomMatrices(g, 1, 3, 1)
	for i := range 2 {
		w := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(5), gorgonia.WithName(fmt.Sprint("w", i)), gorgonia.WithInit(gorgonia.Ones()))
		if _, err := op.RMSNorm(matrix(fmt.Sprint("x", i), 6+i, 5), w, 1e-5); err != nil {
			t.Fatal(err)
		}
	}
	var log bytes.Buffer
	private := func(c *machineConfig) error { c.tunePath = filepath.Join(t.TempDir(), "tune.json"); return nil }
	wrap := withKernels(func(k kernels.Launcher) kernels.Launcher {
		return &normWays{Launcher: k, fake: fakeOf(k), names: []kernel.Way{{Family: "wide", Size: 4}, {Family: "plain"}},
			ways: []fake.Way{{Took: 2e6}, {Took: 1e6}}}
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
	m, err := NewMachine(device, g, fakeOption, private, wrap, WithTuning(TuneCached), WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
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
	if len(choices) != 2 || strings.Count(told, "\n") != 1 || !strings.Contains(told, "harmless") || !strings.Contains(told, "level=INFO") {
		t.Errorf("of %d choices is told:\n%s", len(choices), told)
	}
}

func TestWaysRefused(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	for _, rule := range []string{"", "RMSNorm", "=plain", "RMSNorm=", "RMSNorm=[", "[=plain"} {
		if _, err := NewMachine(device, gorgonia.NewGraph(), fakeOption, WithWays(rule)); err == nil || !strings.Contains(err.Error(), "want OP=WAY") {
			t.Errorf("WithWays(%q): error %v", rule, err)
		}
	}
	t.Setenv("KASMINA_WAYS", "RMSNorm")
	if _, err := NewMachine(device, gorgonia.NewGraph(), fakeOption); err == nil || !strings.Contains(err.Error(), "KASMINA_WAYS") {
		t.Errorf("environment: error %v", err)
	}
}

// TestHostByRule wants an op that has a kernel to be computed on the host where a rule wants it there.
func TestHostByRule(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	g := gorgonia.NewGraph()
	x := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(3), gorgonia.WithName("x"),
		gorgonia.WithValue(tensor.New(tensor.WithShape(3), tensor.WithBacking([]float32{1, 2, 3}))))
	y := gorgonia.Must(gorgonia.Square(x))
	var log bytes.Buffer
	m, err := NewMachine(device, g, fakeOption, WithWays("square*=host"), WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
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
	if got := flat(t, v); !slices.Equal(got, []float32{1, 4, 9}) || !m.runner.OnHost() || !strings.Contains(log.String(), "a rule wants it there") {
		t.Errorf("got %v, log %s", got, log.String())
	}
	if _, err := NewMachine(device, g, fakeOption, WithWays("square*=host"), WithStrict()); err == nil {
		t.Error("WithStrict allows it")
	}
}

// TestHostByRuleReads wants an op that a rule puts on the host to find its operands, also those that kernels would read from what
// they were made of: the transpose of a matrix, and a vector repeated for each row.
func TestHostByRuleReads(t *testing.T) {
	for _, rule := range []string{"A × B=host", "+ *=host"} {
		device, _, fakeOption := openFake(t, fake.Config{})
		g := gorgonia.NewGraph()
		a := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(2, 3), gorgonia.WithName("a"),
			gorgonia.WithValue(tensor.New(tensor.WithShape(2, 3), tensor.WithBacking([]float32{1, 2, 3, 4, 5, 6}))))
		b := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(3), gorgonia.WithName("b"),
			gorgonia.WithValue(tensor.New(tensor.WithShape(3), tensor.WithBacking([]float32{10, 20, 30}))))
		square := gorgonia.Must(gorgonia.Mul(gorgonia.Must(gorgonia.Transpose(a, 1, 0)), a))
		sum := gorgonia.Must(gorgonia.BroadcastAdd(square, b, nil, []byte{0}))
		m, err := NewMachine(device, g, fakeOption, WithWays(rule), WithLogger(slog.New(slog.DiscardHandler)))
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
		if got, want := flat(t, v), []float32{27, 42, 57, 32, 49, 66, 37, 56, 75}; !slices.Equal(got, want) {
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
