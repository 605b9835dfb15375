package state_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/graft"
)

func arithmetic[T blueprints.Float]() blueprints.Arithmetic[T] {
	return blueprints.Arithmetic[T]{
		Forward:  func(t, x, p []T, a T) { copy(t, x) },
		Backward: func(dx, dp, g, x, p []T, a T) float64 { copy(dx, g); return 0 },
	}
}

// register adds a blueprint kind with an optional Identity. Under -count, it finds the kind that an
// earlier iteration registered.
func register(t *testing.T, b blueprints.Blueprint) blueprints.Kind {
	t.Helper()
	if k, ok := blueprints.ByName(b.Name); ok {
		return k
	}

	if b.Identity == nil {
		b.Identity = func([]float64, int, *rand.Rand) float64 { return 1 }
	}

	b.F32, b.F64 = arithmetic[float32](), arithmetic[float64]()
	k, err := blueprints.Register(b)
	require.NoError(t, err)
	return k
}

// otherProgram is the environment variable with the kinds that this test's own program is to
// register, in order, and the lattice that it is to load.
const otherProgram = "KASMINA_TEST_OTHER_PROGRAM"

// TestKindsAcrossPrograms loads a lattice in programs that register their kinds in another order,
// or more or fewer kinds.
func TestKindsAcrossPrograms(t *testing.T) {
	if kinds, path, ok := strings.Cut(os.Getenv(otherProgram), "|"); ok {
		loadInOtherProgram(t, strings.Fields(kinds), path)
		return
	}

	l := lattice(t, 4, 8, state.WithoutGates())
	for seed, kind := range []blueprints.Kind{register(t, blueprints.Blueprint{Name: "Rose"}),
		register(t, blueprints.Blueprint{Name: "Tulip"}), blueprints.ConvFilter} {
		require.NoError(t, l.RequestGermination(seed,
			state.GerminationRequest{Slot: 1 + seed, Kind: kind}))
	}

	data, err := l.MarshalBinary()
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "saved.lattice")
	require.NoError(t, os.WriteFile(path, data, 0o600))
	for kinds, want := range map[string]string{
		"Rose Tulip":       "loaded as Rose Tulip ConvFilter Residual",
		"Tulip Daisy Rose": "loaded as Rose Tulip ConvFilter Residual",
		"Tulip Daisy":      `seed 0: unknown blueprint kind "Rose"`,
	} {
		command := exec.CommandContext(t.Context(), os.Args[0],
			"-test.run=^TestKindsAcrossPrograms$",
			"-test.v")
		command.Env = append(os.Environ(), otherProgram+"="+kinds+"|"+path)
		out, err := command.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), want, "a program with the kinds %s", kinds)
	}
}

func loadInOtherProgram(t *testing.T, kinds []string, path string) {
	for _, name := range kinds {
		register(t, blueprints.Blueprint{Name: name})
	}

	data, err := os.ReadFile(path)
	require.NoError(t, err)
	var l state.Lattice
	if err := l.UnmarshalBinary(data); err != nil {
		require.ErrorIs(t, err, blueprints.ErrUnknownKind)
		require.ErrorIs(t, err, state.ErrArgument)
		require.Zero(t, l.Seeds())
		t.Log(err)
		return
	}

	require.NoError(t, l.Verify())
	var names []string
	for _, s := range l.Report().Seeds {
		names = append(names, s.Kind.String())
	}

	t.Log("loaded as", strings.Join(names, " "))
	again, err := l.MarshalBinary() // as a program with other numbers for the kinds writes it
	require.NoError(t, err)
	require.NoError(t, new(state.Lattice).UnmarshalBinary(again))
}

// faulty is a strategy with a panicking Check.
type faulty struct{ Boom bool }

func (faulty) Name() string { return "faulty" }
func (f faulty) Check() error {
	if f.Boom {
		panic("boom")
	}
	return nil
}
func (faulty) Advance(g graft.Progress) (float64, [2]float32, bool) { return 1, g.Memory, true }

var errRegisterFaulty = graft.Register[faulty]()

// nameless is a strategy with a panicking Name.
type nameless struct{ faulty }

func (nameless) Name() string { panic("boom") }

// brittle are slots with one method that panics.
type brittle struct {
	*memory
	method string
}

func (p brittle) Start(g state.Germination) (state.SlotParams, error) {
	if p.method == "Start" {
		panic("boom")
	}
	return p.memory.Start(g)
}

func (p brittle) Write(w []state.SlotWrite) error {
	if p.method == "Write" {
		panic("boom")
	}
	return p.memory.Write(w)
}

// TestPanicsDoNotGerminate checks that a panic of user code during germination rejects all commands
// of the call without leaving a trace.
func TestPanicsDoNotGerminate(t *testing.T) {
	require.NoError(t, errRegisterFaulty)
	size := register(t, blueprints.Blueprint{Name: "PanicInSize",
		Size: func(c, width int) int { panic("boom") }})
	parts := register(t, blueprints.Blueprint{Name: "PanicInParts",
		Parts: func(c, n int) []blueprints.Part { panic("boom") }})
	clash := register(t, blueprints.Blueprint{Name: "ClashingParts",
		Parts: func(c, n int) []blueprints.Part {
			return []blueprints.Part{{Name: "w", Shape: []int{1}}, {Name: "w", Shape: []int{n - 1}}}
		}})
	for what, c := range map[string]struct {
		method  string
		request state.GerminationRequest
		is      error
	}{
		"Size":  {"", state.GerminationRequest{Slot: 2, Kind: size}, blueprints.ErrPanic},
		"Parts": {"", state.GerminationRequest{Slot: 2, Kind: parts}, blueprints.ErrPanic},
		"clashing parts": {"", state.GerminationRequest{Slot: 2, Kind: clash},
			blueprints.ErrInvalid},
		"Check": {"", state.GerminationRequest{Slot: 2, Strategy: faulty{true}},
			blueprints.ErrPanic},
		"Start": {"Start", state.GerminationRequest{Slot: 2}, blueprints.ErrPanic},
		"Write": {"Write", state.GerminationRequest{Slot: 2}, blueprints.ErrPanic},
	} {
		m := &memory{slots: map[[2]int]state.SlotParams{}}
		n, err := state.NewNetwork(brittle{m, c.method},
			state.Layer{Name: "a",
				Lattice: lattice(t, 4, 8, state.WithoutGates(), state.WithWidth(2))})
		require.NoError(t, err)
		before := fmt.Sprint(n.Arrays())
		events := 0
		_, err = n.Listen(func(state.Event) { events++ })
		require.NoError(t, err)
		err = n.Do(state.Command{Action: state.SetAlpha, Seed: 3, Alpha: 0.5}, germinate(0, 0, 1),
			state.Command{Action: state.Germinate, Seed: 1, Request: c.request})
		require.ErrorIs(t, err, c.is, what)
		require.Equal(t, before, fmt.Sprint(n.Arrays()), what)
		require.Zero(t, events, what)
		require.Empty(t, m.slots, what)
		require.NoError(t, n.Verify(), what)
		require.NoError(t, n.Lattice(0).SetAlpha(0, 0.25), what) // no lock is left held
	}

	l := lattice(t, 4, 8, state.WithoutGates(), state.WithWidth(2))
	require.ErrorIs(t, l.RequestGermination(0, state.GerminationRequest{Slot: 1, Kind: clash}),
		blueprints.ErrInvalid)
	require.ErrorIs(t, l.RequestGermination(0,
		state.GerminationRequest{Slot: 1, Strategy: nameless{}}), blueprints.ErrPanic)
	require.ErrorIs(t, graft.Register[nameless](), blueprints.ErrPanic)
	require.NoError(t,
		l.RequestGermination(0, state.GerminationRequest{Slot: 1, Strategy: &faulty{}}))
	require.NoError(t, l.Verify())
}

// beginGrafting gives a dormant seed a strategy and takes it to stage Grafting.
func beginGrafting(t testing.TB, l *state.Lattice, seed int, s graft.Strategy) {
	t.Helper()
	err := errors.Join(l.RequestGermination(seed, state.GerminationRequest{Slot: 1, Strategy: s}),
		l.Transition(seed, state.Training), l.Transition(seed, state.Grafting))
	if err != nil {
		t.Fatal(err)
	}
}

// reloaded returns the lattice after a round trip through its binary form.
func reloaded(t testing.TB, l *state.Lattice) *state.Lattice {
	t.Helper()
	var copied state.Lattice
	if err := copied.UnmarshalBinary([]byte(bytesOf(t, l))); err != nil {
		t.Fatal(err)
	}
	return &copied
}

// TestRampFinishedIsReportedOnce checks that the end of a ramp is reported once, in its own epoch.
// This includes ramps with last steps too small to change a float32, an α set by hand, and lattices
// that are saved and loaded in between.
func TestRampFinishedIsReportedOnce(t *testing.T) {
	for _, c := range []struct {
		ramp  graft.FixedRamp
		set   float64 // α set by hand at first, unless 0
		alpha float64 // final α
	}{
		{graft.FixedRamp{Ramp: graft.Linear, Epochs: 1, Target: 1}, 0, 1},
		{graft.FixedRamp{Ramp: graft.Cosine, Epochs: 12000, Target: 1}, 0, 1},
		{graft.FixedRamp{Ramp: graft.Sigmoid, Epochs: math.MaxUint16, Target: 0.75}, 0, 0.75},
		{graft.FixedRamp{Ramp: graft.Linear, Epochs: 10, Target: 0.5}, 0.5, 0.5},
		{graft.FixedRamp{Ramp: graft.Linear, Epochs: 10, Target: 0.5}, 0.625, 0.625},
	} {
		l := lattice(t, 1, 1, state.WithoutGates(), state.WithEmbargo(0))
		for life := range 2 { // one blueprint's report must not suppress the next one's
			beginGrafting(t, l, 0, c.ramp)
			if c.set > 0 {
				if err := l.SetAlpha(0, c.set); err != nil {
					t.Fatal(err)
				}
			}

			if e := epochs(t, l, c.ramp.Epochs-1); len(e) != 0 {
				t.Errorf("%+v: the events %v come before its end", c.ramp, e)
			}

			l = reloaded(t, l)
			e := epochs(t, l, 1)
			if len(e) != 1 || e[0].Kind != state.RampFinished || e[0].Value != c.alpha {
				t.Errorf("%+v set to %v, life %d: its end gives the events %v",
					c.ramp, c.set, life, e)
			}

			l = reloaded(t, l)
			if e := epochs(t, l, 3); len(e) != 0 || l.Report().Seeds[0].Alpha != c.alpha {
				t.Errorf("%+v: the events %v come after its end, and α is %v", c.ramp, e,
					l.Report().Seeds[0].Alpha)
			}
			if err := errors.Join(l.SetAlpha(0, 0.25), l.Verify()); err != nil {
				t.Fatal(err)
			}
			if epochs(t, l, 1); l.Report().Seeds[0].Alpha != 0.25 {
				t.Errorf("%+v: a strategy that has finished moves α to %v", c.ramp,
					l.Report().Seeds[0].Alpha)
			}
			if err := errors.Join(l.Transition(0, state.RolledBack), l.Recycle(0)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestSetAlphaBeforeGrafting checks that grafting starts from an α set in Training.
func TestSetAlphaBeforeGrafting(t *testing.T) {
	l := lattice(t, 1, 1, state.WithoutGates())
	err := errors.Join(l.RequestGermination(0, state.GerminationRequest{Slot: 1,
		Strategy: graft.FixedRamp{Epochs: 8, Target: 1}}),
		l.Transition(0, state.Training), l.SetAlpha(0, 0.1875), l.Transition(0, state.Grafting))
	if err != nil {
		t.Fatal(err)
	}

	for e, want := range []float64{0.1875, 0.1875, 0.25} {
		if got := l.Report().Seeds[0].Alpha; got != want {
			t.Errorf("α is %v after %d epochs, want %v", got, e, want)
		}
		epochs(t, l, 1)
	}
}

// TestStrategyThatCannotBeStored checks that a lattice rejects strategies that a file could not
// restore.
func TestStrategyThatCannotBeStored(t *testing.T) {
	if errHidden != nil || errNarrow != nil {
		t.Fatal(errHidden, errNarrow)
	}

	l := lattice(t, 1, 1)
	before := bytesOf(t, l)
	for name, c := range map[string]struct {
		strategy graft.Strategy
		text     string
	}{
		"an unexported parameter":           {hidden{0.25}, `is stored as {}`},
		"a nil pointer":                     {(*graft.FixedRamp)(nil), "nil *graft.FixedRamp"},
		"another type of a known name":      {impostor{9, 1}, "loaded as the graft.FixedRamp"},
		"a parameter that JSON lacks":       {erratic{[]float64{math.NaN()}}, "NaN"},
		"a parameter that JSON abbreviates": {narrow{0.1}, "is stored as"},
		"an endless ramp": {graft.FixedRamp{Epochs: math.MaxUint16 + 1,
			Target: 1}, "Epochs is 65536, want 1 to 65535"},
	} {
		err := l.RequestGermination(0, state.GerminationRequest{Slot: 1, Strategy: c.strategy})
		if !errors.Is(err, state.ErrArgument) || !strings.Contains(err.Error(),
			"seed 0: Strategy: ") || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: error %v, want one with %q", name, err, c.text)
		}
		if bytesOf(t, l) != before {
			t.Errorf("%s: the refused request changed the lattice", name)
		}
	}
}

// hidden is a strategy that loses its parameter in JSON.
type hidden struct{ rate float64 }

func (hidden) Name() string { return "hidden" }
func (hidden) Check() error { return nil }
func (h hidden) Advance(g graft.Progress) (float64, [2]float32, bool) {
	return g.Alpha + h.rate, g.Memory, false
}

// narrow is a strategy that loses digits in JSON.
type narrow struct{ Rate float64 }

func (narrow) Name() string                                         { return "narrow" }
func (narrow) Check() error                                         { return nil }
func (narrow) Advance(g graft.Progress) (float64, [2]float32, bool) { return 1, g.Memory, true }
func (n narrow) MarshalJSON() ([]byte, error) {
	return []byte(`{"Rate":0}`), nil
}

// impostor is a strategy with the name of another one.
type impostor struct {
	Epochs int
	Target float64
}

func (impostor) Name() string                                         { return "FixedRamp" }
func (impostor) Check() error                                         { return nil }
func (impostor) Advance(g graft.Progress) (float64, [2]float32, bool) { return 1, g.Memory, true }

var (
	errHidden = graft.Register[hidden]()
	errNarrow = graft.Register[narrow]()
)

// TestStrategyByPointer checks that a strategy given by pointer is copied, so that later changes by
// its owner have no effect.
func TestStrategyByPointer(t *testing.T) {
	ramp := &graft.FixedRamp{Epochs: 4, Target: 1}
	l := lattice(t, 1, 1, state.WithoutGates())
	beginGrafting(t, l, 0, ramp)
	ramp.Epochs, ramp.Target = 2, 0.5
	loaded := reloaded(t, l)
	epochs(t, l, 1)
	epochs(t, loaded, 1)
	if a, b := l.Report().Seeds[0].Alpha, loaded.Report().Seeds[0].Alpha; a != 0.25 || b != 0.25 {
		t.Errorf("α is %v here and %v in the loaded lattice, want 0.25 in both", a, b)
	}
}

// panicking is a strategy that panics for one seed.
type panicking struct{ Seed int }

func (panicking) Name() string { return "panicking" }
func (panicking) Check() error { return nil }
func (p panicking) Advance(g graft.Progress) (float64, [2]float32, bool) {
	if g.Seed == p.Seed {
		panic("no idea")
	}
	return 1, g.Memory, true
}

var errPanicking = graft.Register[panicking]()

// TestPanickingStrategy checks that a panicking strategy fails for its own seed alone and the epoch
// ends for all.
func TestPanickingStrategy(t *testing.T) {
	if errPanicking != nil {
		t.Fatal(errPanicking)
	}

	const n, bad = 5000, 4321 // enough seeds for every core
	l := lattice(t, n, n, state.WithoutGates())
	for seed := range n {
		beginGrafting(t, l, seed, panicking{bad})
	}

	e := epochs(t, l, 1)
	if len(e) != n || e[bad].Kind != state.StrategyFailed || e[bad].Reason != "panic: no idea" ||
		e[bad-1].Kind != state.RampFinished {
		t.Errorf("%d events, of seed %d: %+v", len(e), bad, e[bad])
	}

	if r := l.Report(); r.Epoch != 1 || r.Seeds[bad].Alpha != 0 || r.Seeds[bad+1].Alpha != 1 ||
		r.Seeds[bad].EpochsInStage != 1 {
		t.Errorf("epoch %d leaves %+v", r.Epoch, r.Seeds[bad])
	}

	if err := l.Verify(); err != nil {
		t.Error(err)
	}
}

// TestScoresInIntervals checks that a ramp that accelerates with the score takes about as long with
// a score every few epochs as with one in every epoch, and that a stale score does not count as one
// without improvement.
func TestScoresInIntervals(t *testing.T) {
	epochsOf := func(every int, improves bool) (epochs int) {
		l := lattice(t, 2, 4, state.WithoutGates())
		require.NoError(t, l.RequestGermination(1, state.GerminationRequest{Slot: 1,
			Strategy: graft.PerformanceLinked{Epochs: 200, Target: 1, Gain: 0.05, MaxSpeed: 5}}))
		require.NoError(t, l.Transition(1, state.Training))
		require.NoError(t, l.Transition(1, state.Grafting))
		for epochs = 1; ; epochs++ {
			var m state.Metrics
			if epochs%every == 0 {
				score := state.SeedMetrics{Seed: 1, TrainingError: math.NaN(),
					Performance: -10, Trials: 1}
				if improves {
					score.Performance += float64(epochs) / 1000
				}
				m.Seeds = []state.SeedMetrics{score}
			}
			_, err := l.StepEpoch(m)
			require.NoError(t, err)
			if l.Report().Seeds[1].RampFinished {
				return epochs
			}
		}
	}

	often := epochsOf(1, true)
	require.Less(t, often, 100)
	for _, every := range []int{2, 5, 10} {
		require.InDelta(t, often, epochsOf(every, true), float64(every)+1, "a score every %d epochs",
			every)
		require.Equal(t, 200, epochsOf(every, false), "a score every %d epochs that stays the same",
			every)
	}
}

// TestAlphaNoise checks that passes with telemetry draw α around its scheduled value while a seed
// is grafted, identically in a reloaded lattice, and that all other passes use the scheduled value.
func TestAlphaNoise(t *testing.T) {
	l, err := state.NewLattice(3, 6, state.WithoutGates(), state.WithAlphaNoise(0.5))
	require.NoError(t, err)
	for seed, stages := range [][]state.Stage{{state.Training, state.Grafting},
		{state.Training, state.Grafting, state.Stabilization}} {
		require.NoError(t, l.RequestGermination(seed, state.GerminationRequest{Slot: 1}))
		for _, s := range stages {
			require.NoError(t, l.Transition(seed, s))
		}
		require.NoError(t, l.SetAlpha(seed, 0.4))
	}

	saved, err := l.MarshalBinary()
	require.NoError(t, err)
	var loaded state.Lattice
	require.NoError(t, loaded.UnmarshalBinary(saved))
	var lowest, highest float32 = 1, 0
	for range 200 {
		var p, same, score state.Pass
		l.Begin(&p, true)
		loaded.Begin(&same, true)
		l.Begin(&score, false)
		require.Equal(t, p.Alpha, same.Alpha)
		require.Equal(t, []float32{0.4, 0.4, 0}, score.Alpha)
		require.Equal(t, float32(0.4), p.Alpha[1])
		l.BeginStep(7)
		loaded.BeginStep(7)
		l.Begin(&same, false)
		l.Draw(&same)
		loaded.Begin(&score, false)
		loaded.Draw(&score)
		require.Equal(t, same.Alpha, score.Alpha)
		require.NotEqual(t, float32(0.4), same.Alpha[0])
		require.Equal(t, float32(0.4), same.Alpha[1])
		lowest, highest = min(lowest, p.Alpha[0]), max(highest, p.Alpha[0])
		for _, lattice := range []*state.Lattice{l, &loaded} {
			_, err := lattice.StepEpoch(state.Metrics{})
			require.NoError(t, err)
			require.NoError(t, lattice.SetAlpha(0, 0.4))
		}
	}

	require.InDelta(t, 0.2, lowest, 0.02)
	require.InDelta(t, 0.6, highest, 0.02)
	_, err = state.NewLattice(1, 1, state.WithAlphaNoise(2))
	require.ErrorContains(t, err, "width is 2, want 0 to 1")
}
