package choose

import (
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/attention"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/variantrule"
	"github.com/kasmina-go/kasmina/optime"
)

// built is a Launcher with a fixed build and no kernels.
type built struct{ run.Launcher }

func (built) Build() string { return "build" }

// newTestChooser returns a chooser without kernels, and a pointer to the warnings that it emits.
func newTestChooser(t *testing.T, c Config, rules ...string) (*Chooser, *[]string) {
	t.Helper()
	var warnings []string
	var err error
	c.Rules, err = variantrule.Parse(rules)
	require.NoError(t, err)
	c.Warn = func(message string) { warnings = append(warnings, message) }
	ctx, err := fake.New(fake.Config{}).Retain(0)
	require.NoError(t, err)
	return New(&run.Executor{Ctx: ctx, Kernels: built{}}, c), &warnings
}

// norm returns a group with three variants.
func norm(shape string) program.Group {
	return program.Group{Op: "Norm", Shape: shape, Plain: 2,
		Alternatives: []program.Alternative{{Name: "wide"}, {Name: "narrow"}, {Name: "plain"}}}
}

// TestChooseByRules checks that the chooser picks the first variant that the rules allow.
func TestChooseByRules(t *testing.T) {
	for _, c := range []struct {
		rules  []string
		want   int
		source optime.Source
	}{
		{nil, 0, optime.ByRule},
		{[]string{"Norm=plain"}, 2, optime.Forced},
		{[]string{"Norm!=wide"}, 1, optime.Forced},
		{[]string{"N*!=w*", "Norm!=narrow"}, 2, optime.Forced},
		{[]string{"Softmax=plain"}, 0, optime.ByRule},
	} {
		chooser, warnings := newTestChooser(t, Config{Mode: Off}, c.rules...)
		variant, made, err := chooser.choose(norm("[3, 5]"))
		require.NoError(t, err)
		require.Equal(t, c.want, variant, "rules %q", c.rules)
		require.Equal(t, norm("").Alternatives[c.want].Name, made.Variant)
		require.Equal(t, c.source, made.Source, "rules %q", c.rules)
		require.Empty(t, *warnings)
	}
}

// TestRuleWithoutVariants checks that a rule which excludes every variant is ignored with a warning.
func TestRuleWithoutVariants(t *testing.T) {
	chooser, warnings := newTestChooser(t, Config{Mode: Off}, "Norm!=*")
	variant, _, err := chooser.choose(norm("[3, 5]"))
	require.NoError(t, err)
	require.Zero(t, variant)
	require.Len(t, *warnings, 1)
}

// TestSameJobOnce checks that calls with equal shapes share one choice, and different shapes don't.
func TestSameJobOnce(t *testing.T) {
	chooser, _ := newTestChooser(t, Config{Mode: Off})
	var choices []*optime.Choice
	for _, shape := range []string{"[3, 5]", "[3, 7]", "[3, 5]"} {
		_, choice, err := chooser.choose(norm(shape))
		require.NoError(t, err)
		choices = append(choices, choice)
	}
	require.Same(t, choices[0], choices[2])
	require.Equal(t, []optime.Choice{*choices[0], *choices[1]}, chooser.Choices())
}

// TestReset checks that the next program of a graph keeps the choices of the previous one, even if the
// rules have changed.
func TestReset(t *testing.T) {
	chooser, _ := newTestChooser(t, Config{Mode: Off}, "Norm=narrow")
	_, _, err := chooser.choose(norm("[3, 5]"))
	require.NoError(t, err)
	chooser.Rules = nil
	chooser.Reset()
	require.Empty(t, chooser.Choices())
	variant, _, err := chooser.choose(norm("[3, 5]"))
	require.NoError(t, err)
	require.Equal(t, 1, variant)
	variant, _, err = chooser.choose(norm("[4, 5]"))
	require.NoError(t, err)
	require.Zero(t, variant, "a shape that the earlier program did not have")
}

// TestStoredChoice checks that a stored choice is used without timing if the card, driver and build
// match. A choice among fewer variants is stored separately.
func TestStoredChoice(t *testing.T) {
	c := Config{Mode: Cached, Path: filepath.Join(t.TempDir(), "choices.json"),
		Device: gpu.DeviceInfo{Name: "card"}, Version: 13000}
	store := open(c.Path, func(message string) { t.Error(message) })
	const key = "card, CUDA 13000, build, cuBLASLt 130000, Norm [3, 5], under load there and back"
	for added, choice := range map[string]storedChoice{
		"":           {Variant: "narrow", Cold: 3 * time.Microsecond},
		", of [0 2]": {Variant: "plain"},
		", of [0 1]": {Variant: "wide"},
	} {
		require.NoError(t, store.put(key+added, choice))
	}

	chooser, _ := newTestChooser(t, c)
	variant, made, err := chooser.choose(norm("[3, 5]"))
	require.NoError(t, err)
	require.Equal(t, 1, variant)
	require.Equal(t, optime.Stored, made.Source)
	require.Equal(t, 3*time.Microsecond, made.Cold)

	chooser, _ = newTestChooser(t, c, "Norm!=narrow")
	variant, made, err = chooser.choose(norm("[3, 5]"))
	require.NoError(t, err)
	require.Equal(t, 2, variant)
	require.Equal(t, optime.Stored, made.Source)
}

// TestTinyJob checks that small groups are neither timed nor stored.
func TestTinyJob(t *testing.T) {
	chooser, _ := newTestChooser(t, Config{Mode: Full})
	tiny := norm("[1, 1]")
	tiny.FLOPs = defaultMinFLOPs - 1
	variant, made, err := chooser.choose(tiny)
	require.NoError(t, err)
	require.Zero(t, variant)
	require.Equal(t, optime.ByRule, made.Source)
	require.False(t, chooser.worthTiming(defaultMinFLOPs-1))
	require.True(t, chooser.worthTiming(defaultMinFLOPs))
}

// TestFirstVariantAdvance checks that another variant replaces the first only if it saves more than
// minGain.
func TestFirstVariantAdvance(t *testing.T) {
	x := &timer{Chooser: &Chooser{}}
	for _, c := range []struct {
		other time.Duration
		wins  bool
	}{{995, false}, {991, false}, {989, true}, {1000, false}} {
		x.times = []time.Duration{1000, c.other}
		require.Equal(t, c.wins, x.rankingTime(1, 0) < x.rankingTime(0, 0), "%v compared with 1000", c.other)
	}
}

// TestContenders checks the selection of variants for timing under load. Long groups select more
// variants.
func TestContenders(t *testing.T) {
	for _, c := range []struct {
		unit time.Duration
		took [8]time.Duration
		want []int
		long bool
	}{
		{time.Microsecond, [8]time.Duration{107, 104, 100, 103, 200, 102, 101, 105},
			[]int{2, 6, 5}, false},
		{4 * time.Microsecond, [8]time.Duration{107, 104, 100, 103, 200, 102, 101, 105},
			[]int{2, 6, 5, 3, 1, 7}, true},
		{4 * time.Microsecond, [8]time.Duration{109, 110, 100, 200, 108, 104, 200, 200},
			[]int{2, 5, 4}, true},
		{4*time.Microsecond - 1, [8]time.Duration{107, 110, 100, 200, 200, 200, 200, 200},
			[]int{2}, false},
	} {
		x := &timer{}
		for _, took := range c.took {
			x.times = append(x.times, took*c.unit)
		}
		near, long := x.contenders([]int{0, 1, 2, 3, 4, 5, 6, 7})
		require.Equal(t, []any{c.want, c.long}, []any{near, long})
	}
}

// TestGather checks that each buffer is replaced by one piece spanning its operands, and that exactly the
// pieces read before they are written are random.
func TestGather(t *testing.T) {
	buffer := func(at, rows, columns, stride int) *program.Array {
		return &program.Array{Buffer: &program.Buffer{}, At: at, Type: gpu.Float32,
			Shape: []int{rows, columns}, Stride: stride}
	}
	in, between, out, documents := buffer(1000, 3, 5, 8), buffer(0, 7, 9, 0),
		buffer(0, 1, 1, 0), buffer(0, 1, 1, 0)
	later := *in
	later.At = 4096
	var fields [7]gpu.Ptr
	scaled := program.Reads(&fields[0], &later)
	scaled.Deviation = 0.02
	untimed := program.Reads(&fields[5], documents)
	untimed.Role = program.Untimed
	x := &timer{pieces: map[*program.Buffer]*piece{}}
	x.gatherOperands([]*program.Call{
		{Args: []program.Arg{program.Reads(&fields[1], in), program.Writes(&fields[2], between),
			untimed}},
		{Args: []program.Arg{scaled, program.Reads(&fields[3], between),
			program.Updates(&fields[4], out)}},
	})

	require.Equal(t, []*program.Buffer{in.Buffer, between.Buffer, out.Buffer}, x.order)
	p := x.pieces[in.Buffer]
	require.Equal(t, 768, p.from, "the alignment below byte 1000")
	require.Equal(t, 4096+4*(2*8+5), p.to, "there is no gap after the last row")
	require.True(t, p.random)
	require.Equal(t, 0.02, p.deviation)
	require.False(t, x.pieces[between.Buffer].random, "the first call writes it")
	require.True(t, x.pieces[out.Buffer].random, "an update reads")

	p.at = 1 << 20
	require.Equal(t, gpu.Ptr(1<<20+1000-768), x.address(in))
	require.Zero(t, x.address(documents))
}

// TestDistance checks distance against its definition, including results with gaps between rows.
func TestDistance(t *testing.T) {
	r := rand.New(rand.NewPCG(randtest.Seed(t), rand.Uint64()))
	x, y := make([]float32, 101), make([]float32, 101)
	var diff, norm float64
	for i := range x {
		y[i] = float32(r.NormFloat64())
		x[i] = y[i] + 0.01*float32(r.NormFloat64())
		diff += math.Pow(float64(x[i])-float64(y[i]), 2)
		norm += math.Pow(float64(y[i]), 2)
	}

	nan := float32(math.NaN())
	require.InDelta(t, math.Sqrt(diff/norm), distance(x, y), 1e-12)
	require.InDelta(t, math.Sqrt(diff/norm), distance(append(x, nan), append(y, nan)), 1e-12,
		"a gap")
	require.True(t, math.IsNaN(distance(append(x, nan), append(y, 1))), "a number is missing")
	require.True(t, math.IsNaN(distance([]float32{nan}, []float32{nan})), "nothing is written")
	require.Zero(t, distance([]float32{0, 0}, []float32{0, 0}))
	require.True(t, math.IsInf(distance([]float32{1}, []float32{0}), 1))
}

// TestTunedNames checks that every op with variants appears by name in docs/variants.md, since users
// refer to these names in rules.
func TestTunedNames(t *testing.T) {
	page, err := os.ReadFile("../../../docs/variants.md")
	require.NoError(t, err)
	seen := map[string]bool{}
	for _, launch := range []kernel.Tuned{attention.Forward{}, attention.Backward{},
		gemm.SiLUProduct{}, gemm.SiLUProductBackward{}, gemm.RoPEProduct{},
		gemm.StatisticsProduct{}, gemm.LinearCrossEntropy{}} {
		name, _ := launch.Tuning()
		require.Contains(t, string(page), "`"+name+"`")
		require.False(t, seen[name], name)
		seen[name] = true
	}
}
