package cudaops

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/attention"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/crossentropy"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	cpugemm "github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/optime"
)

// attentionVariants is a launcher with several variants of attention.
type attentionVariants struct {
	run.Launcher
	fake     *fakeKernels
	names    []kernel.Variant
	variants []fake.Variant
	build    string
	ran      []string
	held     int // number of the launch, from 1, that takes 100 ms longer; 0 for none
}

// Special values of Took, for variants that compute only NaN, or a single NaN.
const nan, oneNaN = -time.Nanosecond, -2 * time.Nanosecond

func (k *attentionVariants) Variants(params any) []kernel.Variant {
	if _, ok := params.(attention.Forward); ok {
		return k.names
	}
	return k.Launcher.Variants(params)
}

func (k *attentionVariants) Build() string { return k.build }

func (k *attentionVariants) Launch(s gpu.Stream, params any) error {
	a, ok := params.(attention.Forward)
	if !ok {
		return k.Launcher.Launch(s, params)
	}

	k.ran = append(k.ran, a.Variant.String())
	w := k.variants[slices.Index(k.names, a.Variant)]
	if w.Fails {
		return errors.New("no such luck")
	}

	if err := k.Launcher.Launch(s, params); err != nil {
		return err
	}

	held := len(k.ran) == k.held
	return k.fake.launch(s, func(l *fake.Launch) {
		l.Took = w.Took
		if held {
			l.Took += 100 * time.Millisecond
		}
		if w.Wrong {
			floatsAt(l, a.Y.Ptr, 4)[3] += 7
		}
		for i := range map[time.Duration]int{nan: 6 * 5, oneNaN: 1}[w.Took] {
			floatsAt(l, a.Y.Ptr, 6*5)[i] = float32(math.NaN())
		}
	})
}

// attentionRun describes the run of a machine that computes attention.
type attentionRun struct {
	optime.Choice
	log  string
	last string // variant of the last launch
	runs int    // number of launches, including timings
}

// is checks the variant, the reason for choosing it, and the number of launches.
func (n attentionRun) is(t *testing.T, variant string, source optime.Source, runs int, what string) {
	t.Helper()
	require.Equal(t, []any{variant, variant, source, runs}, []any{n.Variant, n.last, n.Source, n.runs}, what)
}

// attend returns self-attention of a matrix.
func attend(t *testing.T, x *gorgonia.Node) *gorgonia.Node {
	t.Helper()
	y, err := op.Attention(x, x, x, op.AttentionConfig{Seq: x.Shape()[0], Heads: 1,
		HeadDim: x.Shape()[1]})
	require.NoError(t, err)
	return y
}

// tuneAttention computes attention three times on a fake GPU. The variants wide-4, wide-1 and plain take
// the given times.
func tuneAttention(t *testing.T, path string, variants [3]fake.Variant, build string,
	opts ...MachineOption) attentionRun {
	t.Helper()
	device, _ := openFake(t, fake.Config{Devices: smallCache("GPU")})
	g := gorgonia.NewGraph()
	attend(t, rangeNode(g, "x", 6, 5))
	var log bytes.Buffer
	var k *attentionVariants
	wrap := withKernels(func(inner run.Launcher) run.Launcher {
		k = &attentionVariants{Launcher: inner, fake: fakeOf(inner), variants: variants[:], build: build,
			names: []kernel.Variant{{Family: "wide", Size: 4}, {Family: "wide", Size: 1},
				{Family: "plain"}}}
		return k
	})

	m := openMachine(t, device, g,
		append([]MachineOption{timedFrom(1, path), wrap,
			logTo(&log)}, opts...)...)
	for range 3 {
		require.NoError(t, m.RunAll())
	}

	r := attentionRun{log: log.String(), last: k.ran[len(k.ran)-1], runs: len(k.ran)}
	if c := m.Choices(); len(c) > 0 {
		r.Choice = c[0]
	}

	return r
}

const (
	ByRule, Stored   = optime.ByRule, optime.Stored
	Measured, Forced = optime.Measured, optime.Forced
)

// clearChoiceVariables clears the environment variables that affect how machines choose variants.
func clearChoiceVariables(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_VARIANTS", "")
}

// timedFrom sets the least number of operations of ops worth timing, and the file of stored choices.
func timedFrom(least float64, path string) MachineOption {
	return func(c *machineConfig) error {
		c.variants.MinFLOPs, c.variants.Path = least, path
		return nil
	}
}

// timedWithNewFile is timedFrom with a new file.
func timedWithNewFile(t *testing.T, least float64) MachineOption {
	return timedFrom(least, filepath.Join(t.TempDir(), "tune.json"))
}

func TestTuningKernels(t *testing.T) {
	clearChoiceVariables(t)
	path := filepath.Join(t.TempDir(), "tune.json")
	cached := WithTuning(TuneCached)
	secondBest := [3]fake.Variant{{Took: 9e6}, {Took: 2e6}, {Took: 5e6}}
	firstBest := [3]fake.Variant{{Took: 1e6}, {Took: 2e6}, {Took: 5e6}}

	tuneAttention(t, path, secondBest, "a").is(t, "wide-4", ByRule, 2, "without tuning")
	r := tuneAttention(t, path, secondBest, "a", cached)
	r.is(t, "wide-1", Measured, r.runs, "timed")
	require.GreaterOrEqual(t, r.runs, 2+3)
	require.Equal(t, 3, r.Of)
	require.Empty(t, r.log)
	require.GreaterOrEqual(t, r.Cold, 2*time.Millisecond)
	require.LessOrEqual(t, r.Cold, 3*time.Millisecond)
	again := tuneAttention(t, path, firstBest, "a", cached)
	again.is(t, "wide-1", Stored, 2, "a second start")
	require.Equal(t, r.Cold, again.Cold)
	r = tuneAttention(t, path, firstBest, "b", cached)
	r.is(t, "wide-4", Measured, r.runs, "another build")
	for i, c := range []struct {
		variants [3]fake.Variant
		rules    []string
		env      string
		variant  string
		source   optime.Source
		warning  string
	}{
		{[3]fake.Variant{{Took: 1e6, Wrong: true}, {Took: 2e6}, {Took: 5e6}}, nil, "", "wide-1",
			Measured, "differs by"},
		{[3]fake.Variant{{Fails: true}, {Took: 2e6}, {Took: 1e6}}, nil, "", "wide-1",
			Measured, "no such luck"},
		{[3]fake.Variant{{Took: 1e6, Wrong: true}, {Took: 1e6, Wrong: true}, {Took: 50e6}}, nil, "",
			"plain", Measured, "differs by"},
		{[3]fake.Variant{{Took: 2e6}, {Took: 1e6}, {Fails: true}}, nil, "", "wide-1",
			Measured, "no such luck"},
		{[3]fake.Variant{{Took: 2e6}, {Took: 1e6}, {Took: nan}}, nil, "", "wide-1",
			Measured, "the variant plain: its result holds NaN"},
		{[3]fake.Variant{{Took: 2e6}, {Took: 1e6}, {Took: oneNaN}}, nil, "", "wide-1",
			Measured, "the variant plain: its result holds NaN"},
		{firstBest, []string{"Attention=plain"}, "", "plain", Forced, ""},
		{firstBest, []string{"Att*!=wide-4"}, "", "wide-1", Measured, ""},
		{secondBest, []string{"*!=wide-1"}, "", "wide-4", Measured, ""},
		{firstBest, []string{"Attention=plain"}, "Attention=wide-1", "wide-1", Forced, ""},
		{firstBest, []string{"Attention=warp"}, "", "wide-4", Measured, "is ignored"},
		{firstBest, []string{"Attention!=*"}, "", "wide-4", Measured, "is ignored"},
		{firstBest, []string{"RoPEProduct=plain"}, "", "wide-4", Measured, ""},
	} {
		t.Setenv("KASMINA_VARIANTS", c.env)
		r := tuneAttention(t, filepath.Join(t.TempDir(), "tune.json"), c.variants, "a",
			cached, WithVariants(c.rules...))
		r.is(t, c.variant, c.source, r.runs, fmt.Sprint("case ", i))
		require.Contains(t, r.log, c.warning, i)
		require.Equal(t, c.warning == "", r.log == "", i)
	}
}

// TestTuningOnFullCard checks that one harmless message is logged if there is not enough free memory for
// timing, and that ops then use the rule of thumb.
func TestTuningOnFullCard(t *testing.T) {
	clearChoiceVariables(t)
	device, _ := openFake(t, fake.Config{Devices: smallCache("GPU")})
	g := gorgonia.NewGraph()
	matrix := randomMatrices(g, 1, 3, 1)
	for i := range 2 {
		attend(t, matrix(fmt.Sprint("x", i), 6+i, 5))
	}

	var log bytes.Buffer
	private := func(c *machineConfig) error {
		c.variants.Path = filepath.Join(t.TempDir(), "tune.json")
		return nil
	}
	wrap := withKernels(func(k run.Launcher) run.Launcher {
		return &attentionVariants{Launcher: k, fake: fakeOf(k),
			names:    []kernel.Variant{{Family: "wide", Size: 4}, {Family: "plain"}},
			variants: []fake.Variant{{Took: 2e6}, {Took: 1e6}}}
	})
	free, _, err := device.Memory()
	require.NoError(t, err)
	const little = 2 << 10 // less than timing needs for the cache and the operands
	hog, err := device.ctx.Alloc(int(free) - little)
	require.NoError(t, err)
	m := openMachine(t, device, g, private, wrap, WithTuning(TuneCached),
		logTo(&log))
	require.NoError(t, errors.Join(m.RunAll(), m.RunAll(), device.ctx.Free(hog)))
	choices := m.Choices()
	for _, c := range choices {
		require.Equal(t, "wide-4", c.Variant)
		require.Equal(t, ByRule, c.Source)
	}

	text := log.String()
	require.Len(t, choices, 2)
	require.Regexp(t, "^[^\n]*level=INFO[^\n]*harmless[^\n]*\n$", text)
}

// TestTuningHeldUp checks that the fastest variant is chosen whichever launch a busy computer delays.
func TestTuningHeldUp(t *testing.T) {
	clearChoiceVariables(t)
	for held := 1; ; held++ {
		device, _ := openFake(t, fake.Config{Devices: smallCache("GPU")})
		g := gorgonia.NewGraph()
		attend(t, rangeNode(g, "x", 6, 5))
		var k *attentionVariants
		m := openMachine(t, device, g, timedWithNewFile(t, 1), WithTuning(TuneCached),
			withKernels(func(inner run.Launcher) run.Launcher {
				k = &attentionVariants{Launcher: inner, fake: fakeOf(inner), held: held,
					names:    []kernel.Variant{{Family: "slow"}, {Family: "fast"}, {Family: "plain"}},
					variants: []fake.Variant{{Took: 4e6}, {Took: 1e6}, {}}}
				return k
			}))
		require.NoError(t, m.RunAll())
		if len(k.ran) < held {
			require.Greater(t, held, 2*3)
			break
		}
		require.Equal(t, "fast", variantOf(m, "Attention"), held)
	}
}

// TestChoicesRefused checks the errors for invalid rules and tunings in options and in the environment.
func TestChoicesRefused(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	refused := func(want string, opts ...MachineOption) {
		t.Helper()
		require.ErrorContains(t, errOf(NewMachine(device, gorgonia.NewGraph(),
			opts...)), want)
	}
	for _, rule := range []string{"", "RoPE", "=plain", "RoPE=", "RoPE=[", "[=plain"} {
		refused("want OP=VARIANT", WithVariants(rule))
	}

	refused("TuneOff", WithTuning(7))
	t.Setenv("KASMINA_VARIANTS", "RoPE")
	refused("KASMINA_VARIANTS")
	t.Setenv("KASMINA_VARIANTS", "")
	t.Setenv("KASMINA_TUNE", "sometimes")
	refused("off")
}

// TestHostByRule checks that an op assigned to the host by a rule is computed there, with the right
// operands. They include two that kernels would read without a copy: the transpose of a matrix, and a
// vector repeated for each row.
func TestHostByRule(t *testing.T) {
	for _, rule := range []string{"A × B=host", "+ *=host"} {
		device, _ := openFake(t, fake.Config{})
		g := gorgonia.NewGraph()
		a := floatNode(g, "a", []float32{1, 2, 3, 4, 5, 6}, 2, 3)
		b := floatNode(g, "b", []float32{10, 20, 30}, 3)
		square := gorgonia.Must(gorgonia.Mul(gorgonia.Must(gorgonia.Transpose(a, 1, 0)), a))
		sum := gorgonia.Must(gorgonia.BroadcastAdd(square, b, nil, []byte{0}))
		var log bytes.Buffer
		m := openMachine(t, device, g, WithVariants(rule), logTo(&log))
		require.NoError(t, m.RunAll())
		require.Equal(t, []float32{27, 42, 57, 32, 49, 66, 37, 56, 75}, flat(t, valueIn(t, m, sum)))
		require.True(t, m.runner.OnHost(), rule)
		require.Contains(t, log.String(), "a rule requires this")
		require.Error(t, errOf(NewMachine(device, g, WithVariants(rule), WithStrict())))
	}
}

func TestTuningText(t *testing.T) {
	for _, want := range []Tuning{TuneDefault, TuneOff, TuneCached, TuneFull} {
		text, err := want.MarshalText()
		got := Tuning(99)
		require.NoError(t, errors.Join(err, got.UnmarshalText(text)))
		require.Equal(t, want, got, string(text))
	}
	require.Error(t, new(Tuning).UnmarshalText([]byte("fast")), "UnmarshalText accepted an unknown mode")
}

// tuned describes a machine that tunes one product of 6×5×4.
type tuned struct {
	variant, timings int
	log              string
	value            []float32
}

// smallCache returns a GPU with a small cache, which is overwritten quickly.
func smallCache(name string) []gpu.DeviceInfo {
	info := fake.New(fake.Config{}).Devices()
	info[0].Name, info[0].L2 = name, 1<<10
	return info
}

// calls returns the number of times that a driver function was called on a fake device.
func calls(d *Device, call string) (n int) {
	ctx := d.ctx
	if s, ok := ctx.(*replaceableContext); ok {
		ctx = s.Context
	}
	for _, o := range ctx.(*fake.Context).Trace {
		if o.Call == call {
			n++
		}
	}
	return n
}

// is checks the variant and the number of timings.
func (r tuned) is(t *testing.T, variant, timings int, what string) {
	t.Helper()
	require.Equal(t, []int{variant, timings}, []int{r.variant, r.timings}, what)
}

// tuneProduct makes and runs such a machine on a fake GPU with the given variants.
func tuneProduct(t *testing.T, path string, variants [3]fake.Variant, name string,
	opts ...MachineOption) tuned {
	t.Helper()
	device, _ := openFake(t, fake.Config{Variants: variants, Devices: smallCache(name)})
	g := gorgonia.NewGraph()
	y, err := op.Linear(rangeNode(g, "x", 6, 4), rangeNode(g, "w", 5, 4))
	require.NoError(t, err)
	var log bytes.Buffer
	m := openMachine(t, device, g,
		append([]MachineOption{timedFrom(1, path),
			logTo(&log)}, opts...)...)
	require.NoError(t, m.RunAll())
	r := tuned{log: log.String(), value: flat(t, valueIn(t, m, y)),
		timings: calls(device, "cublasLtMatmul") - 1}
	for _, c := range m.runner.Program.Calls {
		if p, ok := c.Params.(*program.Matmul); ok {
			r.variant = p.Variant
		}
	}

	return r
}

func TestTuning(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	const card = "Some GPU"
	path := filepath.Join(t.TempDir(), "tune.json")
	slowFirst := [3]fake.Variant{{Took: 9 * time.Millisecond}, {Took: 2 * time.Millisecond},
		{Took: 5 * time.Millisecond}}
	fastFirst := [3]fake.Variant{{Took: 1 * time.Millisecond}, {Took: 2 * time.Millisecond},
		{Took: 5 * time.Millisecond}}
	cached, full := WithTuning(TuneCached), WithTuning(TuneFull)

	tuneProduct(t, path, slowFirst, card).is(t, 0, 0, "Float32 without an option")
	first := tuneProduct(t, path, slowFirst, card, cached)
	require.Equal(t, 1, first.variant)
	require.GreaterOrEqual(t, first.timings, 3)
	require.Empty(t, first.log)
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Contains(t, string(b), card)
	require.Contains(t, string(b), "cuBLASLt 130000")
	second := tuneProduct(t, path, fastFirst, card, cached)
	require.Equal(t, 1, second.variant)
	require.Zero(t, second.timings)
	require.Equal(t, first.value, second.value, "the same choice is not bit-identical")
	third := tuneProduct(t, path, fastFirst, card, full)
	require.Zero(t, third.variant)
	require.GreaterOrEqual(t, third.timings, 3)
	tuneProduct(t, path, slowFirst, card, cached).is(t, 0, 0, "after TuneFull")
	other := tuneProduct(t, path, slowFirst, "Another GPU", cached)
	other.is(t, 1, other.timings, "on another card")
	require.GreaterOrEqual(t, other.timings, 3)
	t.Setenv("KASMINA_TUNE", "off")
	tuneProduct(t, path, slowFirst, "Another GPU", full).is(t, 0, 0, "with KASMINA_TUNE=off")
}

// TestTuningUnderLoad checks the choice among the variants that are nearly the fastest in a short
// computation. For a short job it is the variant with the smallest geometric mean of its times in a short
// and in a long computation. For a long job it is the variant with the smallest time in a long
// computation, timed once in forward and once in reverse order.
func TestTuningUnderLoad(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "cached")
	type variants [3]fake.Variant // in units of 2 µs for a short job, and 10 µs for a long one
	for i, c := range []struct {
		variants
		short, long int
	}{
		{variants{{Took: 100, Loaded: 130}, {Took: 104, Loaded: 120}, {Took: 200, Loaded: 90}}, 1, 1},
		{variants{{Took: 100, Loaded: 110}, {Took: 104, Loaded: 120}, {Took: 105, Loaded: 130}}, 0, 0},
		{variants{{Took: 100, Loaded: 120}, {Took: 104, Loaded: 117}, {Took: 500, Loaded: 500}}, 0, 1},
		{variants{{Took: 100, Loaded: 120}, {Took: 104, Loaded: 113}, {Took: 500, Loaded: 500}}, 1, 1},
		{variants{{Took: 100, Loaded: 120}, {Took: 107, Loaded: 110}, {Took: 500, Loaded: 500}}, 0, 1},
		{variants{{Took: 100, Loaded: 120, Warms: 1}, {Took: 104, Loaded: 117, Warms: 1},
			{Took: 500, Loaded: 500}}, 0, 1},
	} {
		for unit, want := range map[time.Duration]int{2: c.short, 10: c.long} {
			unit *= time.Microsecond
			scaled := c.variants
			for w := range scaled {
				scaled[w].Took, scaled[w].Loaded = scaled[w].Took*unit, scaled[w].Loaded*unit
				scaled[w].Warms *= unit / 10
			}
			path := filepath.Join(t.TempDir(), "tune.json")
			require.Equal(t, want, tuneProduct(t, path, scaled, "Some GPU").variant, "%d, %v", i, unit)
			require.Zero(t, tuneProduct(t, path, scaled, "Some GPU").timings, i)
		}
	}
}

// TestChoiceWithdrawn checks that another variant is chosen if the one chosen before, for a call of the
// same shape, does not support the arguments.
func TestChoiceWithdrawn(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "off")
	t.Setenv("KASMINA_VARIANTS", "")
	device, _ := openFake(t, fake.Config{})
	m := openMachine(t, device, gorgonia.NewGraph(), WithVariants("Some=b"))
	for i, c := range []struct {
		variants []string
		want     int
	}{{[]string{"a", "b"}, 1}, {[]string{"a"}, 0}, {[]string{"b", "a"}, 1}} {
		g := program.Group{Op: "Some", Shape: "one"}
		for _, name := range c.variants {
			g.Alternatives = append(g.Alternatives, program.Alternative{Name: name})
		}
		variant, _, err := m.chooser.Choose(g)
		require.NoError(t, err, i)
		require.Equal(t, c.want, variant, i)
	}
}

// TestTuningDrops checks that variants that fail or compute wrong results are never chosen, with a
// warning for each.
func TestTuningDrops(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	want := tuneProduct(t, "", [3]fake.Variant{}, "GPU 0").value
	for i, c := range []struct {
		variants [3]fake.Variant
		variant  int
		warning  string
	}{
		{[3]fake.Variant{{Took: 9e6}, {Took: 1e6, Wrong: true}, {Took: 5e6}}, 2, "differs by"},
		{[3]fake.Variant{{Fails: true}, {Took: 2e6}, {Took: 1e6}}, 2, "a variant that fails"},
		{[3]fake.Variant{{Took: 1e6}, {Took: 995e3}, {Took: 996e3}}, 0, ""}, // the gain does not justify results that are not bit-identical
	} {
		r := tuneProduct(t, filepath.Join(t.TempDir(), "tune.json"), c.variants, "Some GPU",
			WithTuning(TuneCached))
		require.Equal(t, c.variant, r.variant)
		require.Contains(t, r.log, c.warning)
		require.NotEqual(t, strings.Contains(r.log, "WARN"), (c.warning == ""))
		require.Equal(t, want, r.value, i)
	}
}

// TestTuningIgnores checks that invalid stored choices are ignored.
func TestTuningIgnores(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	path := filepath.Join(t.TempDir(), "tune.json")
	variants := [3]fake.Variant{{Took: 9e6}, {Took: 1e6}, {Took: 5e6}}
	tuneProduct(t, path, variants, "Some GPU", WithTuning(TuneCached))
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	from := bytes.LastIndex(b, []byte("{")) // the start of the choice
	for name, id := range map[string]string{"text": `"fast"`, "unknown": `{"variant": "7"}`,
		"cut": "{"} {
		other := filepath.Join(t.TempDir(), "tune.json")
		damaged := string(b[:from]) + id + "}}"
		require.NoError(t, os.WriteFile(other, []byte(damaged), 0o644))
		r := tuneProduct(t, other, variants, "Some GPU", WithTuning(TuneCached))
		require.Equal(t, 1, r.variant, name)
		require.GreaterOrEqual(t, r.timings, 3, name)
		require.Equal(t, name != "unknown", strings.Contains(r.log, "ignored"), r.log)
	}
}

// TestChoicesOfAnother checks that the choices of another machine are used without timing, that
// everything else is chosen by rule, and that a missing variant is an error.
func TestChoicesOfAnother(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "full") // applies only to machines that choose by themselves
	t.Setenv("KASMINA_VARIANTS", "")
	variants := [3]fake.Variant{{Took: 1e6}, {Took: 2e6}, {Took: 5e6}}
	path := filepath.Join(t.TempDir(), "tune.json")
	timed := tuneAttention(t, path, [3]fake.Variant{{Took: 9e6}, {Took: 2e6}, {Took: 5e6}}, "a")
	require.Equal(t, "wide-1", timed.Variant)
	require.Equal(t, Measured, timed.Source)
	r := tuneAttention(t, path, variants, "a", WithChoices([]optime.Choice{timed.Choice}))
	r.is(t, "wide-1", Stored, 2, "taken over")
	require.Empty(t, r.log)
	tuneAttention(t, path, variants, "a", WithChoices(nil)).is(t, "wide-4", ByRule, 2, "not chosen")
	r = tuneAttention(t, path, variants, "a", WithChoices([]optime.Choice{timed.Choice}),
		WithVariants("Attention=wide-1"))
	require.Equal(t, "wide-1", r.Variant)
	require.Equal(t, Forced, r.Source)
	device, _ := openFake(t, fake.Config{})
	g := gorgonia.NewGraph()
	attend(t, randomMatrices(g, 1, 3, 1)("x", 6, 5))
	wrap := withKernels(func(k run.Launcher) run.Launcher {
		return &attentionVariants{Launcher: k, fake: fakeOf(k),
			names:    []kernel.Variant{{Family: "wide", Size: 4}, {Family: "plain"}},
			variants: []fake.Variant{{Took: 2e6}, {Took: 1e6}}}
	})
	_, err := NewMachine(device, g, wrap, WithChoices([]optime.Choice{timed.Choice}))
	require.ErrorContains(t, err, "the same kind of GPU")
	require.ErrorContains(t, err, timed.Shape)
}

// ownProducts is a launcher with its own variant of matrix products. It counts launches without and with
// a matrix added.
type ownProducts struct {
	run.Launcher
	plain  *int
	adding *int
}

func (o ownProducts) Variants(params any) []kernel.Variant {
	if _, ok := params.(gemm.Product); ok {
		return []kernel.Variant{{Family: "hopper", Size: 256}}
	}
	return o.Launcher.Variants(params)
}

func (o ownProducts) Launch(s gpu.Stream, params any) error {
	if a, ok := params.(gemm.Product); ok {
		if a.C != 0 && (a.C == a.ScaleX || a.C == a.ScaleW) {
			return errors.New("the added matrix overlaps the scales")
		}
		if a.C != 0 {
			*o.adding++
		} else {
			*o.plain++
		}
	}

	return o.Launcher.Launch(s, params)
}

// withOwnProducts makes the machine use [ownProducts].
func withOwnProducts(plain, adding *int) MachineOption {
	return withKernels(func(k run.Launcher) run.Launcher { return ownProducts{k, plain, adding} })
}

// projected describes attention on queries, keys and values that are linear functions of one input.
type projected struct {
	batch, d int
	op.AttentionConfig
}

// graph returns such an attention on random numbers, with RoPE on queries and keys, its parameters, and
// the nodes to keep. The attention is first, followed by the gradients and, if keepQueries is true, the
// queries before RoPE.
func (p projected) graph(t *testing.T, seed uint64, keepQueries bool) (*gorgonia.ExprGraph,
	gorgonia.Nodes, gorgonia.Nodes) {
	t.Helper()
	g := gorgonia.NewGraph()
	matrix := randomMatrices(g, seed, 2, 1.0/4)
	must := gorgonia.Must
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

// variantOf returns the variant that a machine has chosen for an op, or "" if it has not chosen any.
func variantOf(m *Machine, op string) string {
	for _, c := range m.Choices() {
		if c.Op == op {
			return c.Variant
		}
	}
	return ""
}

// timedPairs returns how many of the given ops, which have two variants, a machine has timed.
func timedPairs(t *testing.T, m *Machine, ops ...string) (n int) {
	t.Helper()
	for _, c := range m.Choices() {
		if slices.Contains(ops, c.Op) {
			require.Equal(t, 2, c.Of, c)
			if c.Source != ByRule {
				require.Equal(t, Measured, c.Source, c)
				n++
			}
		}
	}

	return n
}

// requireTimed checks that a machine that times products of at least the given number of operations times
// the given number of the named ops, and logs nothing about them.
func requireTimed(t *testing.T, device *Device, g *gorgonia.ExprGraph, params, keep gorgonia.Nodes,
	least float64, want int, ops []string, opts ...MachineOption) {
	t.Helper()
	var log strings.Builder
	m := newFuseMachine(t, device, g, params, keep, append(opts, timedWithNewFile(t, least),
		WithTuning(TuneCached), logTo(&log)))
	require.Equal(t, want, timedPairs(t, m, ops...), "%g: %v", least, log.String())
	for _, op := range ops {
		require.NotContains(t, log.String(), op, least)
	}
	require.NoError(t, m.RunAll())
}

// TestProjectionVariants checks that attention and gradients are the same whether or not one kernel
// computes both the product and RoPE.
func TestProjectionVariants(t *testing.T) {
	clearChoiceVariables(t)
	seed := randomSeed(t)
	check := func(t *testing.T, device *Device, p projected, tolerance float64, fuses bool,
		opts ...MachineOption) {
		t.Helper()
		var values []gorgonia.Value
		for i, variant := range []string{"separate", "fused"} {
			g, params, keep := p.graph(t, seed, false)
			m := newFuseMachine(t, device, g, params, keep,
				append(opts, WithVariants("RoPEProduct="+variant)))
			values = valuesOf(t, m, keep, values, tolerance)
			fused := i > 0 && fuses
			if fused {
				require.Equal(t, variant, variantOf(m, "RoPEProduct"))
			}
			want := map[bool]int{false: 1}[fused]
			require.Equal(t, want, tasksOf(m)["RoPE"], variant)
		}
	}

	t.Run("fake", func(t *testing.T) {
		device, _ := openFake(t, fake.Config{})
		check(t, device, projected{2, 5, op.AttentionConfig{Seq: 3, Heads: 4, KVHeads: 2,
			HeadDim: 4, Causal: true}}, 1e-5, true)
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

// TestProjectionNeedsQueries checks that product and RoPE are not fused if the queries before RoPE are
// outputs.
func TestProjectionNeedsQueries(t *testing.T) {
	t.Setenv("KASMINA_VARIANTS", "")
	p := projected{2, 5, op.AttentionConfig{Seq: 3, Heads: 4, KVHeads: 2, HeadDim: 4}}
	for _, keepQueries := range []bool{false, true} {
		device, _ := openFake(t, fake.Config{})
		g, params, keep := p.graph(t, 1, keepQueries)
		m := newFuseMachine(t, device, g, params, keep,
			[]MachineOption{WithVariants("RoPEProduct=fused")})
		require.Equal(t, keepQueries, variantOf(m, "RoPEProduct") == "")
	}
}

// TestProjectionTuned checks that products are timed together with RoPE if and only if they are worth
// timing, and that all variants give the same results in the timer's memory.
func TestProjectionTuned(t *testing.T) {
	clearChoiceVariables(t)
	check := func(t *testing.T, device *Device, p projected, least float64, want int,
		opts ...MachineOption) {
		t.Helper()
		g, params, keep := p.graph(t, 1, false)
		requireTimed(t, device, g, params, keep, least, want, []string{"RoPEProduct"}, opts...)
	}

	for least, want := range map[float64]int{1: 1, 1e9: 0} {
		device, _ := openFake(t, fake.Config{Devices: smallCache("GPU")})
		check(t, device, projected{2, 5, op.AttentionConfig{Seq: 3, Heads: 4, KVHeads: 2,
			HeadDim: 4}}, least, want)
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

// perceptronGraph returns the graph of a gated perceptron on random numbers, its parameters, and its
// result followed by the gradients.
func perceptronGraph(t *testing.T, seed uint64, rows, f, d int) (*gorgonia.ExprGraph,
	gorgonia.Nodes, gorgonia.Nodes) {
	t.Helper()
	g := gorgonia.NewGraph()
	matrix := randomMatrices(g, seed, 1, 1.0/4)
	in := gorgonia.Nodes{matrix("x", rows, d), matrix("gate", f, d),
		matrix("up", f, d), matrix("down", d, f)}
	y, err := op.SiLUMLP(in[0], in[1], in[2], in[3])
	require.NoError(t, err)
	return g, in[1:], withGradients(t, y, matrix("with", rows, d), in)
}

// TestPerceptronVariants checks that the values are the same whether or not one kernel computes both a
// product and the gate.
func TestPerceptronVariants(t *testing.T) {
	clearChoiceVariables(t)
	seed := randomSeed(t)
	check := func(t *testing.T, device *Device, rows, f, d int, tolerance float64, fuses bool,
		opts ...MachineOption) {
		var values []gorgonia.Value
		for i, rule := range []string{"SiLUProduct*=separate", "SiLUProduct*=fused"} {
			g, params, keep := perceptronGraph(t, seed, rows, f, d)
			m := newFuseMachine(t, device, g, params, keep, append(opts, WithVariants(rule)))
			values = valuesOf(t, m, keep, values, tolerance)
			fused := map[string]bool{}
			for _, c := range m.Choices() {
				if strings.HasPrefix(c.Op, "SiLUProduct") {
					fused[c.Op] = strings.HasPrefix(c.Variant, "fused")
				}
			}
			want := i == 1 && fuses
			require.Equal(t, want, fused["SiLUProduct"], rule)
			require.Equal(t, want, fused["SiLUProductBackward"], rule)
		}
	}

	t.Run("fake", func(t *testing.T) {
		device, _ := openFake(t, fake.Config{})
		check(t, device, 6, 7, 5, 1e-5, true)
	})
	t.Run("bfloat16", func(t *testing.T) {
		device := openGPU(t)
		check(t, device, 200, 136, 72, 2e-2, device.info.Capability() == 90,
			WithPrecision(BFloat16), WithTuning(TuneOff))
	})
}

// TestPerceptronTuned checks that products are timed together with their gates if and only if they are
// worth timing.
func TestPerceptronTuned(t *testing.T) {
	clearChoiceVariables(t)
	for _, least := range []float64{1, 1e9} {
		device, _ := openFake(t, fake.Config{Devices: smallCache("GPU")})
		g, params, keep := perceptronGraph(t, 1, 6, 7, 5)
		requireTimed(t, device, g, params, keep, least, map[float64]int{1: 2, 1e9: 0}[least],
			[]string{"SiLUProduct", "SiLUProductBackward"})
	}
}

func (k *fakeKernels) LinearCrossEntropy(l *fake.Launch, a gemm.LinearCrossEntropy) {
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
}

func (k *fakeKernels) ScaleRows(l *fake.Launch, a gemm.ScaleRows) {
	f := floatsAt(l, a.Factors, a.Rows)
	for i := range floatsAt(l, a.X, a.Rows*a.D) {
		floatsAt(l, a.X, a.Rows*a.D)[i] *= f[i/a.D]
	}
}

// outputLayer returns the graph of an output layer with its loss, for x [rows, d], w [v, d] and targets.
// An eighth of the targets do not count. The loss is multiplied by 0.3.
func outputLayer(t *testing.T, seed uint64, rows, v, d int) (g *gorgonia.ExprGraph, params,
	keep gorgonia.Nodes) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 0))
	g = gorgonia.NewGraph()
	ids := make([]int, rows)
	for i := range ids {
		if ids[i] = r.IntN(v); r.IntN(8) == 0 {
			ids[i] = -1 - r.IntN(9)
		}
	}

	ids[0] = v - 1
	x, w := randomNode(g, r, 0.1, "x", rows, d), randomNode(g, r, 1, "w", v, d)
	targets := intNode(g, "targets", ids)
	loss, err := op.LinearCrossEntropy(x, w, targets)
	require.NoError(t, err)
	cost := gorgonia.Must(gorgonia.Mul(loss, gorgonia.NewConstant(float32(0.3))))
	grads, err := gorgonia.Grad(cost, x, w)
	require.NoError(t, err)
	return g, gorgonia.Nodes{w}, append(gorgonia.Nodes{loss}, grads...)
}

// TestOutputLayerVariants compares the loss and the gradients with the tape machine, whether the gradient
// is computed by a pass over the logits or the exponentials are computed together with the product. If a
// batch is too large for the tape machine, it compares the variants with each other.
func TestOutputLayerVariants(t *testing.T) {
	clearChoiceVariables(t)
	seed := randomSeed(t)
	check := func(t *testing.T, device *Device, rows, v, d int, tolerance float64, reference,
		fuses bool, opts ...MachineOption) {
		t.Helper()
		var want []gorgonia.Value
		if reference {
			g, _, keep := outputLayer(t, seed, rows, v, d)
			tape := tapeMachine(t, g)
			require.NoError(t, tape.RunAll())
			for _, n := range keep {
				want = append(want, n.Value())
			}
		}
		for _, variant := range []string{"separate", "fused"} {
			g, params, keep := outputLayer(t, seed, rows, v, d)
			m := newFuseMachine(t, device, g, params, keep,
				append(opts, WithVariants("LinearCrossEntropy="+variant)))
			require.NoError(t, m.RunAll())
			for i, n := range keep {
				value := valueIn(t, m, n)
				if len(want) <= i {
					want = append(want, value)
				}
				require.Less(t, distance(t, value, want[i]), tolerance, "%s: value %d", variant, i)
			}
			require.Equal(t, map[bool]string{true: variant}[fuses], variantOf(m, "LinearCrossEntropy"), variant)
		}
	}

	t.Run("fake", func(t *testing.T) {
		device, _ := openFake(t, fake.Config{})
		check(t, device, 7, 5, 4, 1e-5, true, true)
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

// withCeilingBytes reduces the memory on which ceilings are measured, because the fake driver multiplies
// on the CPU.
func withCeilingBytes(n int) MachineOption {
	return func(c *machineConfig) error {
		c.ceilingBytes = n
		return nil
	}
}

// requireSlowAttention checks the times of an attention that takes between three and four milliseconds.
func requireSlowAttention(t *testing.T, o optime.OpTime) {
	t.Helper()
	require.Equal(t, "Attention", o.Op)
	require.GreaterOrEqual(t, o.Time, 3*time.Millisecond)
	require.LessOrEqual(t, o.Time, 4*time.Millisecond)
	require.Equal(t, []string{"fast"}, o.Variants)
}

// TestProfile profiles a machine with an attention that takes 3 ms, and compares it with a machine that
// does not profile.
func TestProfile(t *testing.T) {
	clearChoiceVariables(t)
	took := &fake.Variant{Took: 3 * time.Millisecond}
	m, device := monitored(t, took, &bytes.Buffer{}, withCeilingBytes(1<<14),
		WithTuning(TuneCached), WithMonitor(3))
	plain, _ := monitored(t, took, &bytes.Buffer{}, WithTuning(TuneCached))
	require.ErrorContains(t, m.StartProfile(), "has not run")
	step(t, m)
	step(t, plain)
	require.ErrorContains(t, errOf(m.Profile()), "StartProfile")
	require.NoError(t, m.StartProfile())
	for i := range ProfileSteps {
		p, err := m.Profile() // before the last step
		require.NoError(t, err)
		require.Nil(t, p)
		// A new optimizer, while steps have marks, must not use the captured work of the old one.
		if i == ProfileSteps-2 {
			for _, m := range []*Machine{m, plain} {
				optimize(t, m, newAdamW, 1)
			}
		}
		step(t, m)
		step(t, plain)
	}

	launches := calls(device, "cuLaunchKernel")
	p, err := m.Profile()
	require.NoError(t, err)
	require.Equal(t, launches, calls(device, "cuLaunchKernel"))
	checkProfile(t, m, p, 1)
	first := p.Ops()[0]
	requireSlowAttention(t, first)
	var layers []string
	for _, s := range p.Spans {
		if s.Op == "Linear" {
			layers = append(layers, s.Layer)
			require.Equal(t, 2*6*5*4.0, s.FLOPs)
			require.True(t, strings.HasPrefix(s.Kernel, "cublasLt 6x5x4 nt float32"))
		}
	}

	require.Equal(t, []string{"w"}, layers)
	kernels, graphs := p.Busy()
	require.Greater(t, kernels, 0.5)
	require.LessOrEqual(t, kernels, graphs*(1+1e-9))
	require.LessOrEqual(t, graphs, 1.0)
	for range 4 { // the monitor continues
		step(t, m)
		step(t, plain)
	}

	times, err := m.Monitor()
	require.NoError(t, err)
	require.NotEmpty(t, times)
	require.Equal(t, flat(t, valueIn(t, plain, plain.config.Params[0])),
		flat(t, valueIn(t, m, m.config.Params[0])))
}

// TestProfileFloat8 checks that only float8 products are compared with the peak performance of float8
// products.
func TestProfileFloat8(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	_, b := float8Model(t, llm.ForLoss, 3, 32)
	m := newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss},
		[]MachineOption{float8Products, withCeilingBytes(1 << 14)})
	require.NoError(t, errors.Join(m.RunAll(), m.StartProfile()))
	for range ProfileSteps {
		require.NoError(t, m.RunAll())
	}

	p, err := m.Profile()
	require.NoError(t, err)
	checkProfile(t, m, p, 1)
	require.Greater(t, p.ProductFloat8, 0.0)
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
		want := max(s.Bytes/p.Copy, s.FLOPs/product) / s.Time.Seconds()
		require.InDelta(t, want, s.Share, 0.01*want+1e-3, s.Kernel)
	}

	require.NotZero(t, narrow)
	require.NotZero(t, wide)
	require.Contains(t, p.Table(), "in float8, measured now")
}

// TestCeiling checks that ceilings can be measured before the first run and between runs, but not on a
// closed machine.
func TestCeiling(t *testing.T) {
	m, _ := monitored(t, &fake.Variant{Took: time.Millisecond}, &bytes.Buffer{},
		withCeilingBytes(1<<14), WithTuning(TuneCached))
	for range 2 {
		c, err := m.Ceiling()
		require.NoError(t, err)
		require.Greater(t, c.Copy, 0.0)
		require.Greater(t, c.Product, 0.0)
		require.NotEmpty(t, c.Type)
		step(t, m)
	}

	require.NoError(t, m.Close())
	_, err := m.Ceiling()
	require.Error(t, err)
}

// checkProfile checks a profile and its trace.
func checkProfile(t *testing.T, m *Machine, p *optime.Profile, runs int) {
	t.Helper()
	var end time.Duration
	tasks := map[int]bool{}
	for i, s := range p.Spans {
		require.True(t, s.Start >= end && s.Time >= 0 && s.Kernel != "" && s.Op != "" &&
			s.Share >= 0 && !math.IsInf(s.Share, 0), "span %d, after %v: %+v", i, end, s)
		end = s.Start + s.Time
		if s.Op != "Copies" && s.Op != "Update" {
			tasks[s.Task] = true
		}
	}

	require.Len(t, tasks, runs*len(m.runner.Program.Calls))
	require.Positive(t, min(float64(p.Period), float64(p.Graphs), p.Copy, p.Product))
	require.NotEmpty(t, p.Device)
	var calls []string
	for _, h := range p.Host {
		calls = append(calls, h.Name)
	}

	require.True(t, slices.Contains(calls, "Run"))
	var text bytes.Buffer
	require.NoError(t, p.WriteTrace(&text))
	var trace struct {
		TraceEvents []struct {
			Name, Ph string
			Ts, Dur  float64
			Pid, Tid int
			Args     map[string]any
		}
	}

	require.NoError(t, json.Unmarshal(text.Bytes(), &trace))
	kernels := 0
	for _, e := range trace.TraceEvents {
		require.Contains(t, []string{"X", "M"}, e.Ph)
		require.True(t, e.Ph == "M" || e.Ts >= 0 && e.Dur >= 0 && e.Name != "", "event %+v", e)
		if e.Ph == "X" && e.Pid == 1 && e.Tid == 1 {
			s := p.Spans[kernels]
			kernels++
			require.Equal(t, []any{s.Kernel, s.Op, s.Layer},
				[]any{e.Name, e.Args["op"], e.Args["layer"]})
			require.InDelta(t, float64(s.Time)/1e3, e.Dur, 1e-9, s.Kernel)
		}
	}

	require.Equal(t, len(p.Spans), kernels)
	table := p.Table()
	for i, o := range p.Ops() { // sorted from longest to shortest
		require.LessOrEqual(t, o.Time, p.Ops()[max(0, i-1)].Time)
		require.Contains(t, table, o.Op)
	}
}

// TestProfileLayers checks that every node of a model is attributed to its block, in the backward pass
// and with recomputation as well.
func TestProfileLayers(t *testing.T) {
	for _, recompute := range []bool{false, true} {
		device, _ := openFake(t, fake.Config{})
		p := profiled(t, device, recompute, 1, withCeilingBytes(1<<14))
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
				require.NotZero(t, count[op][layer], recompute)
			}
			require.Equal(t, count[op]["model.layers.1"], count[op]["model.layers.0"], recompute)
		}
		require.NotZero(t, count["LinearCrossEntropy"]["model.embed_tokens"], recompute)
		require.NotZero(t, count["Update"][""], recompute)
		require.NotZero(t, count["Copies"][""], recompute)
	}
}

// TestProfileAccumulation checks that a profile includes all runs of a step.
func TestProfileAccumulation(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	profiled(t, device, false, 3, withCeilingBytes(1<<14), WithAccumulation())
}

// TestProfileOnGPU profiles a model's step on a GPU, with real times.
func TestProfileOnGPU(t *testing.T) {
	p := profiled(t, openGPU(t), false, 1, WithPrecision(BFloat16))
	t.Logf("%s", p.Table())
	copied, multiplied := 1e11, 1e13
	if testing.Short() { // perhaps under a tool that slows kernels down by an unknown factor
		copied, multiplied = 1, 1
	}

	kernels, graphs := p.Busy()
	require.Positive(t, kernels)
	require.LessOrEqual(t, kernels, graphs*(1+1e-9))
	require.Less(t, graphs, 1.0)
	require.GreaterOrEqual(t, p.Copy, copied)
	require.GreaterOrEqual(t, p.Product, multiplied)
}

// profiled returns the profile of a step of a small model, which consists of the given number of runs and
// an update.
func profiled(t *testing.T, device *Device, recompute bool, runs int,
	opts ...MachineOption) *optime.Profile {
	t.Helper()
	config := llm.Config{Vocab: 24, Dim: 16, Layers: 2, Heads: 2, FF: 24, Seq: 8}.Default()
	model, err := llm.NewModel(config, tensor.Float32, 1)
	require.NoError(t, err)
	var how []llm.GraphOption
	if recompute {
		how = append(how, llm.WithRecompute())
	}

	g, err := model.Graph(llm.ForTraining, 2, how...)
	require.NoError(t, err)
	m := openMachine(t, device, g.G, append(opts, WithParams(g.Params...),
		WithOutputs(g.Loss), WithStrict())...)
	o, err := optim.NewMuon(optim.WithLR(0.01))
	require.NoError(t, err)
	require.NoError(t, m.SetOptimizer(o, 1))
	ids := make([]int, 2*8)
	for i := range ids {
		ids[i] = (7*i + 3) % 24
	}

	for i := range 2 + ProfileSteps {
		if i == 2 {
			require.NoError(t, m.StartProfile())
		}
		for _, n := range []*gorgonia.Node{g.IDs, g.Targets} {
			require.NoError(t, gorgonia.Let(n, tensor.New(tensor.WithShape(len(ids)),
				tensor.WithBacking(ids))))
		}
		for range runs {
			require.NoError(t, m.RunAll())
			require.NoError(t, errOf(m.Value(g.Loss)))
		}
		require.NoError(t, errOf(m.Update()))
	}

	p, err := m.Profile()
	require.NoError(t, err)
	checkProfile(t, m, p, runs)
	products := 0
	for _, s := range p.Spans {
		if s.Op == "Update" && strings.HasPrefix(s.Kernel, "cublasLt") {
			products++
			require.Positive(t, s.FLOPs, "the operations of a product of the update are missing")
		}
	}

	require.NotZero(t, products)
	return p
}

// monitored returns a machine that trains one weight matrix applied to the result of an attention, which
// takes the given time.
func monitored(t *testing.T, took *fake.Variant, log *bytes.Buffer, opts ...MachineOption) (*Machine,
	*Device) {
	t.Helper()
	device, _ := openFake(t, fake.Config{Devices: smallCache("GPU")})
	device.ctx = &replaceableContext{device.ctx}
	g := gorgonia.NewGraph()
	x, w := rangeNode(g, "x", 6, 4), rangeNode(g, "w", 5, 4)
	y, err := op.Linear(attend(t, x), w)
	require.NoError(t, err)
	sum := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.Square(y))))
	require.NoError(t, errOf(gorgonia.Grad(sum, w)))
	wrap := withKernels(func(k run.Launcher) run.Launcher {
		slow := fake.Variant{Took: 40 * time.Millisecond}
		return &slowAttention{attentionVariants{Launcher: k, fake: fakeOf(k),
			names:    []kernel.Variant{{Family: "fast"}, {Family: "plain"}},
			variants: []fake.Variant{{}, slow}}, took}
	})

	all := append([]MachineOption{timedWithNewFile(t, 1), wrap, WithParams(w),
		logTo(log)}, opts...)
	m, err := NewMachine(device, g, all...)
	require.NoError(t, err)
	t.Cleanup(func() { m.Close() })
	optimize(t, m, newAdamW, 1)
	return m, device
}

// slowAttention is an attentionVariants with a first variant that takes the current value of took.
type slowAttention struct {
	attentionVariants
	took *fake.Variant
}

func (k *slowAttention) Launch(s gpu.Stream, params any) error {
	if a, ok := params.(attention.Forward); !ok || a.Variant.Family != "fast" {
		return k.attentionVariants.Launch(s, params)
	}
	if err := k.Launcher.Launch(s, params); err != nil {
		return err
	}
	return k.fake.launch(s, func(l *fake.Launch) { l.Took = k.took.Took })
}

func TestMonitor(t *testing.T) {
	clearChoiceVariables(t)
	took := &fake.Variant{Took: 3 * time.Millisecond}
	var log bytes.Buffer
	m, _ := monitored(t, took, &log, WithTuning(TuneCached), WithMonitor(4))
	plain, _ := monitored(t, took, &bytes.Buffer{}, WithTuning(TuneCached))
	times, err := m.Monitor() // before the first run
	require.NoError(t, err)
	require.Empty(t, times)
	for range 14 {
		step(t, m)
		step(t, plain)
	}

	times, err = m.Monitor()
	require.NoError(t, err)
	require.NotEmpty(t, times)
	require.GreaterOrEqual(t, m.monitor.Samples, 3)
	require.LessOrEqual(t, m.monitor.Samples, 5)
	first := times[0]
	requireSlowAttention(t, first)
	require.EqualValues(t, 4*(2*24+2*6), first.Bytes)
	require.GreaterOrEqual(t, first.Tuned, 3*time.Millisecond)
	table := optime.Table(times)
	for _, want := range []string{"Linear", "Update", "Attention", "fast", "GB/s"} {
		require.Contains(t, table, want)
	}

	for _, o := range times {
		require.True(t, o.Op != "Linear" || o.FLOPs == 2*6*5*4, "the product: %+v", o)
		// the gradient is read twice
		require.True(t, o.Op != "Update" || o.Bytes == 4*20*8, "the update: %+v", o)
	}

	require.Zero(t, log.Len(), log.String())
	w := m.config.Params[0]
	a, b := valueIn(t, m, w), valueIn(t, plain, plain.config.Params[0])
	for i, v := range flat(t, a) {
		require.Equal(t, flat(t, b)[i], v)
	}

	took.Took = 9 * time.Millisecond
	for range 16 {
		step(t, m)
	}

	require.Equal(t, 1, strings.Count(log.String(), "when it was tuned"))
	require.Contains(t, log.String(), "Attention")
}

// TestMonitorWithoutOptimizer checks that Monitor still returns the times of ops and of earlier updates
// after SetOptimizer has run out of memory and left the machine without an optimizer.
func TestMonitorWithoutOptimizer(t *testing.T) {
	m, device := monitored(t, &fake.Variant{}, &bytes.Buffer{}, WithMonitor(2))
	for range 6 {
		step(t, m)
	}

	context := device.ctx.(*replaceableContext)
	original := context.Context
	context.Context = fullContext{original}
	require.ErrorIs(t, m.SetOptimizer(m.optimizer.Rules, 1), gpu.OutOfMemory)
	context.Context = original
	times, err := m.Monitor()
	require.NoError(t, err)
	require.True(t, slices.ContainsFunc(times, func(o optime.OpTime) bool {
		return o.Op == "Update" && o.Time > 0
	}), "got %v, want the time of updates, too", times)
}

// replaceableContext is a context that tests can replace while machines run.
type replaceableContext struct{ gpu.Context }

// fullContext is a context without free memory.
type fullContext struct{ gpu.Context }

func (fullContext) Alloc(bytes int) (gpu.Ptr, error) { return 0, gpu.NewOutOfMemory(bytes, 0, 0) }

// TestMonitorSampleFails checks that a timed run is dropped completely if one of the times cannot be
// read.
func TestMonitorSampleFails(t *testing.T) {
	m, device := monitored(t, &fake.Variant{}, &bytes.Buffer{}, WithMonitor(2))
	o := m.monitor
	for !o.Sampling() {
		require.NoError(t, m.RunAll())
	}

	require.NoError(t, device.ctx.SyncStream(m.runner.Stream))
	context := device.ctx.(*replaceableContext)
	original := context.Context
	context.Context = &limitedTimes{original, len(m.runner.Program.Calls)}
	require.ErrorIs(t, errOf(m.Monitor()), gpu.LaunchFailed)
	context.Context = original
	times, err := m.Monitor()
	require.NoError(t, err)
	require.Empty(t, times)
	require.Zero(t, o.Samples)
	for range 6 {
		require.NoError(t, m.RunAll())
	}

	times, err = m.Monitor()
	require.NoError(t, err)
	require.NotEmpty(t, times)
	require.NotZero(t, o.Samples)
}

// limitedTimes is a context that returns only the given number of elapsed times.
type limitedTimes struct {
	gpu.Context
	left int
}

func (c *limitedTimes) Elapsed(from, to gpu.Event) (time.Duration, error) {
	if c.left--; c.left < 0 {
		return 0, gpu.NewError("cuEventElapsedTime", gpu.LaunchFailed, "", "")
	}
	return c.Context.Elapsed(from, to)
}

// TestMonitorCost checks that fewer runs are timed if timing is expensive.
func TestMonitorCost(t *testing.T) {
	took := &fake.Variant{}
	m, _ := monitored(t, took, &bytes.Buffer{}, WithMonitor(2))
	for range 30 {
		require.NoError(t, m.RunAll())
		took.Took = 5 * time.Millisecond
		if m.monitor.Sampling() { // as if the time stamps took that long
			took.Took = 10 * time.Millisecond
		}
		require.NoError(t, errOf(m.Value(m.config.Params[0]))) // waits for the run
	}

	require.NotZero(t, m.monitor.Samples)
	require.GreaterOrEqual(t, m.monitor.Every, 100)
	device, _ := openFake(t, fake.Config{})
	require.ErrorContains(t,
		errOf(NewMachine(device, gorgonia.NewGraph(), WithMonitor(1))), "at least 2")
}

// TestProfileRestart checks that a failed StartProfile ends the previous profile, and that the next
// profile is complete.
func TestProfileRestart(t *testing.T) {
	device, cuda := openFake(t, fake.Config{})
	_, b := float8Model(t, llm.ForLoss, 3, 32)
	m := newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss},
		[]MachineOption{withCeilingBytes(1 << 14)})
	require.NoError(t, errors.Join(m.RunAll(), m.StartProfile(), m.RunAll()))
	cuda.Fail("cuStreamSynchronize", 1, gpu.OutOfMemory)
	require.Error(t, m.StartProfile())
	for range ProfileSteps {
		require.NoError(t, m.RunAll())
	}

	require.ErrorContains(t, errOf(m.Profile()), "StartProfile")
	require.NoError(t, m.StartProfile())
	for range ProfileSteps {
		require.NoError(t, m.RunAll())
	}

	p, err := m.Profile()
	require.NoError(t, err)
	require.NotEmpty(t, p.Spans)
}
