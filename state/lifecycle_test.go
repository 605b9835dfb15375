package state_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/internal/half"
	has "github.com/kasmina-go/kasmina/internal/memory"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/graft"
)

const stages = 11

// table is the table of transitions from the specification.
var table = map[state.Stage][]state.Stage{0: {1}, 1: {2, 9}, 2: {3, 8, 9}, 3: {4, 10}, 4: {5, 10},
	5: {6, 8, 10}, 6: {7, 8, 10}}

// route lists the stages that lead a dormant seed to each stage.
var route = [stages][]state.Stage{{}, {1}, {1, 2}, {1, 2, 3}, {1, 2, 3, 4}, {1, 2, 3, 4, 5},
	{1, 2, 3, 4, 5, 6}, {1, 2, 3, 4, 5, 6, 7},
	{1, 2, 8}, {1, 9}, {1, 2, 3, 10}}

func lattice(t testing.TB, seeds, hidden int, opts ...state.Option) *state.Lattice {
	t.Helper()
	l, err := state.NewLattice(seeds, hidden, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func send(t testing.TB, l *state.Lattice, seed int, to state.Stage) {
	t.Helper()
	for _, s := range route[to] {
		if err := l.Transition(seed, s); err != nil {
			t.Fatal(err)
		}
	}
}

func epochs(t testing.TB, l *state.Lattice, n int) (all []state.Event) {
	t.Helper()
	for range n {
		e, err := l.StepEpoch(state.Metrics{})
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, e...)
	}
	return all
}

func bytesOf(t testing.TB, l *state.Lattice) string {
	t.Helper()
	b, err := l.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestAllTransitions tries every transition and checks that only the table's transitions are
// allowed.
func TestAllTransitions(t *testing.T) {
	for from := state.Stage(0); from < stages; from++ {
		for to := state.Stage(0); to < stages; to++ {
			l := lattice(t, 3, 6, state.WithoutGates())
			send(t, l, 1, from)
			before := bytesOf(t, l)
			err := l.Transition(1, to)
			allowed := slices.Contains(table[from], to)
			if got := from.CanBecome(to); got != allowed {
				t.Errorf("%v.CanBecome(%v) is %v", from, to, got)
			}

			if allowed {
				if got, _ := l.Stage(1); err != nil || got != to {
					t.Errorf("%v to %v: error %v, stage %v", from, to, err, got)
				}
			} else if want := fmt.Sprintf("seed 1 cannot go from %v to %v", from,
				to); !errors.Is(err, state.ErrTransition) || !strings.Contains(err.Error(), want) {
				t.Errorf("%v to %v: error %v, want one with %q", from, to, err, want)
			} else if bytesOf(t, l) != before {
				t.Errorf("%v to %v: the refused transition changed the lattice", from, to)
			}

			if err := l.Verify(); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestRefusedTransitionSaysTheWay checks that the error of a rejected transition lists the possible
// ones.
func TestRefusedTransitionSaysTheWay(t *testing.T) {
	for from, want := range map[state.Stage]string{
		state.Dormant:    "RequestGermination",
		state.Germinated: "want Training or Cancelled",
		state.Training:   "want Grafting, Culled or Cancelled",
		state.FineTuning: "want Fossilized, Culled or RolledBack",
		state.Fossilized: "it is permanent",
		state.RolledBack: "Recycle makes it dormant",
	} {
		l := lattice(t, 3, 6, state.WithoutGates())
		send(t, l, 1, from)
		require.ErrorContains(t, l.Transition(1, state.Dormant), want)
	}
}

func TestTransitionOutOfRange(t *testing.T) {
	l := lattice(t, 2, 2)
	for _, seed := range []int{-1, 2, 1 << 40} {
		for _, err := range []error{
			l.Transition(seed, state.Germinated), l.SetAlpha(seed, 0), l.Recycle(seed),
			l.RequestGermination(seed, state.GerminationRequest{Slot: 1}),
		} {
			if !errors.Is(err, state.ErrSeed) || !strings.Contains(err.Error(), fmt.Sprint(seed)) {
				t.Errorf("seed %d: error %v", seed, err)
			}
		}
	}

	if err := l.Transition(0, 200); !errors.Is(err, state.ErrTransition) ||
		!strings.Contains(err.Error(), "Stage(200)") {
		t.Errorf("stage 200: error %v", err)
	}
}

func TestRequestGermination(t *testing.T) {
	l := lattice(t, 4, 8, state.WithSlots(3))
	for _, c := range []struct {
		r    state.GerminationRequest
		is   error
		text string
	}{
		{state.GerminationRequest{Slot: 0}, state.ErrArgument, "seed 2: Slot is 0, want 1 to 2"},
		{state.GerminationRequest{Slot: 3}, state.ErrArgument, "seed 2: Slot is 3, want 1 to 2"},
		{state.GerminationRequest{Slot: 1, Kind: 200}, blueprints.ErrUnknownKind, "seed 2"},
		{state.GerminationRequest{Slot: 1, Strategy: graft.FixedRamp{Epochs: 0, Target: 1}},
			state.ErrArgument, "Epochs is 0"},
		{state.GerminationRequest{Slot: 1, Strategy: graft.FixedRamp{Epochs: 1,
			Target: math.NaN()}}, state.ErrArgument, "Target is NaN"},
		{state.GerminationRequest{Slot: 1, Strategy: graft.FixedRamp{Ramp: 7, Epochs: 1,
			Target: 1}}, state.ErrArgument, "Ramp is 7"},
		{state.GerminationRequest{Slot: 1, Strategy: unknown{}}, state.ErrArgument,
			`strategy "unknown"`},
	} {
		before := bytesOf(t, l)
		if err := l.RequestGermination(2, c.r); !errors.Is(err, c.is) ||
			!strings.Contains(err.Error(), c.text) {
			t.Errorf("%+v: error %v, want %q", c.r, err, c.text)
		}
		if bytesOf(t, l) != before {
			t.Errorf("%+v: the refused request changed the lattice", c.r)
		}
	}

	if err := l.RequestGermination(2, state.GerminationRequest{Slot: 2,
		Kind: blueprints.ConvFilter}); err != nil {
		t.Fatal(err)
	}

	if s := l.Report().Seeds[2]; s.Stage != state.Germinated || s.Slot != 2 ||
		s.Kind != blueprints.ConvFilter || s.Alpha != 0 {
		t.Errorf("the germinated seed reports %+v", s)
	}

	if err := l.RequestGermination(2, state.GerminationRequest{Slot: 1}); !errors.Is(err,
		state.ErrTransition) || !strings.Contains(err.Error(), "seed 2") {
		t.Errorf("a second request: error %v", err)
	}

	if err := lattice(t, 1, 1).RequestGermination(0,
		state.GerminationRequest{Slot: 1 << 16}); err == nil {
		t.Error("slot 65536 does not fit the state but is accepted")
	}
}

// unknown is a strategy that is not registered.
type unknown struct{}

func (unknown) Name() string { return "unknown" }
func (unknown) Check() error { return nil }
func (unknown) Advance(g graft.Progress) (float64, [2]float32, bool) {
	return 1, g.Memory, true
}

func TestAlphaByStage(t *testing.T) {
	for stage, want := range map[state.Stage]float64{
		state.Dormant: 0, state.Germinated: 0, state.Training: 1, state.Grafting: 0.375,
		state.Stabilization: 0.375, state.Evaluating: 0.375,
		state.FineTuning: 1, state.Fossilized: 1, state.Culled: 0,
		state.Cancelled: 0, state.RolledBack: 0,
	} {
		l := lattice(t, 1, 4, state.WithoutGates())
		send(t, l, 0, stage)
		if err := l.SetAlpha(0, 0.375); err != nil {
			t.Fatal(err)
		}

		var p state.Pass
		l.Begin(&p, true)
		if float64(p.Alpha[0]) != want {
			t.Errorf("a pass in %v goes by α = %v, want %v", stage, p.Alpha[0], want)
		}

		if stage == state.Training { // the parameters learn as if blended in, but the output is x
			want = 0
		}
		if got := l.Report().Seeds[0].Alpha; got != want {
			t.Errorf("%v reports α = %v, want %v", stage, got, want)
		}
	}

	l := lattice(t, 1, 4)
	for _, alpha := range []float64{-0.001, 1.001, math.NaN(), math.Inf(1)} {
		if err := l.SetAlpha(0, alpha); !errors.Is(err, state.ErrArgument) ||
			!strings.Contains(err.Error(), fmt.Sprint(alpha)) {
			t.Errorf("SetAlpha(%v): error %v", alpha, err)
		}
	}
}

func TestFixedRamps(t *testing.T) {
	const n, target = 8, 0.75
	for ramp, height := range map[graft.Ramp]func(float64) float64{
		graft.Linear: func(f float64) float64 { return f },
		graft.Cosine: func(f float64) float64 { return 0.5 - 0.5*math.Cos(math.Pi*f) },
		graft.Sigmoid: func(f float64) float64 {
			g := func(z float64) float64 { return 1 / (1 + math.Exp(-z)) }
			return (g(12*f-6) - g(-6)) / (g(6) - g(-6))
		},
	} {
		l := lattice(t, 2, 2, state.WithoutGates())
		r := state.GerminationRequest{Slot: 1, Strategy: graft.FixedRamp{Ramp: ramp,
			Epochs: n, Target: target}}
		if err := l.RequestGermination(1, r); err != nil {
			t.Fatal(err)
		}

		for _, to := range []state.Stage{state.Training, state.Grafting} {
			epochs(t, l, 3)
			if got := l.Report().Seeds[1].Alpha; got != 0 {
				t.Errorf("α before grafting is %v, want 0", got)
			}
			if err := l.Transition(1, to); err != nil {
				t.Fatal(err)
			}
		}

		for e := 0; e <= n+3; e++ {
			want := target * height(min(1, float64(e)/n))
			if got := l.Report().Seeds[1].Alpha; math.Abs(got-want) > 1e-7 {
				t.Errorf("ramp %d: α after %d epochs is %v, want %v", ramp, e, got, want)
			}
			events := epochs(t, l, 1)
			if finished := len(events) == 1 && events[0].Kind == state.RampFinished &&
				events[0].Seed == 1 && events[0].Value == target; finished != (e == n-1) {
				t.Errorf("ramp %d: epoch %d gives the events %v", ramp, e+1, events)
			}
		}

		if err := errors.Join(l.Transition(1, state.Stabilization), l.Verify()); err != nil {
			t.Fatal(err)
		}

		epochs(t, l, 5)
		if got := l.Report().Seeds[1].Alpha; got != target {
			t.Errorf("α in Stabilization is %v, want %v as it was held", got, target)
		}
		if err := l.Transition(1, state.RolledBack); err != nil {
			t.Fatal(err)
		}
		if got := l.Report().Seeds[1].Alpha; got != 0 {
			t.Errorf("α after a rollback is %v, want 0", got)
		}
	}
}

// erratic is a strategy with answers that a lattice has to correct: it returns the values of its
// fields in turn.
type erratic struct{ Answers []float64 }

func (erratic) Name() string { return "erratic" }
func (erratic) Check() error { return nil }
func (e erratic) Advance(g graft.Progress) (float64, [2]float32, bool) {
	return e.Answers[g.Epochs-1], [2]float32{g.Memory[0] + 1, float32(g.Epochs)}, false
}

var errErratic = graft.Register[erratic]()

func TestStrategiesAreKeptInBounds(t *testing.T) {
	if errErratic != nil {
		t.Fatal(errErratic)
	}

	l := lattice(t, 1, 1, state.WithoutGates())

	// Strategies are saved as JSON, which has no NaN. Here −99 represents a falling α; the strategy
	// broken below returns NaN.
	answers := []float64{0.25, 0.125, -99, 0.5, 7, 0.5}
	if err := l.RequestGermination(0, state.GerminationRequest{Slot: 1,
		Strategy: erratic{answers}}); err != nil {
		t.Fatal(err)
	}

	if err := errors.Join(l.Transition(0, state.Training),
		l.Transition(0, state.Grafting)); err != nil {
		t.Fatal(err)
	}

	for i, want := range []float64{0.25, 0.25, 0.25, 0.5, 1, 1} {
		epochs(t, l, 1)
		if got := l.Report().Seeds[0].Alpha; got != want {
			t.Errorf("after the answers %v α is %v, want %v", answers[:i+1], got, want)
		}
	}
}

// broken is a strategy that returns NaN.
type broken struct{}

func (broken) Name() string { return "broken" }
func (broken) Check() error { return nil }
func (broken) Advance(g graft.Progress) (float64, [2]float32, bool) {
	return math.NaN(), g.Memory, false
}

var errBroken = graft.Register[broken]()

func TestStrategyWithoutAnswer(t *testing.T) {
	if errBroken != nil {
		t.Fatal(errBroken)
	}

	l := lattice(t, 1, 1, state.WithoutGates())
	err := errors.Join(l.RequestGermination(0,
		state.GerminationRequest{Slot: 1, Strategy: broken{}}),
		l.Transition(0, state.Training), l.Transition(0, state.Grafting), l.SetAlpha(0, 0.5))
	if err != nil {
		t.Fatal(err)
	}

	if e := epochs(t, l, 1); len(e) != 1 || e[0].Kind != state.StrategyFailed || e[0].Seed != 0 ||
		e[0].Reason != "α is NaN" {
		t.Errorf("events %v, want StrategyFailed", e)
	}

	if got := l.Report().Seeds[0].Alpha; got != 0.5 {
		t.Errorf("α is %v, want 0.5 as before", got)
	}
}

func TestManyStrategies(t *testing.T) {
	l := lattice(t, 300, 300, state.WithoutGates(), state.WithEmbargo(0))
	request := func(seed, n int) error {
		return l.RequestGermination(seed, state.GerminationRequest{Slot: 1,
			Strategy: graft.FixedRamp{Epochs: n, Target: 1}})
	}
	full := -1
	for seed := range 300 {
		if err := request(seed, 1000+seed); err != nil {
			full = seed
			break
		}
	}

	if full < 250 {
		t.Fatalf("the table is full at seed %d", full)
	}

	if err := request(full, 1000); err != nil { // a known strategy still fits
		t.Error(err)
	}

	// This frees the place of strategy 1007.
	if err := errors.Join(l.Transition(7, state.Cancelled), l.Recycle(7),
		request(7, 5000)); err != nil {
		t.Error(err)
	}
}

func TestEmbargo(t *testing.T) {
	l := lattice(t, 2, 4, state.WithoutGates(), state.WithEmbargo(3))
	epochs(t, l, 5)
	if err := l.Recycle(0); !errors.Is(err, state.ErrTransition) {
		t.Errorf("recycling a dormant seed: error %v", err)
	}

	if err := errors.Join(l.RequestGermination(0, state.GerminationRequest{Slot: 1}),
		l.Transition(0, state.Cancelled)); err != nil {
		t.Fatal(err)
	}

	for e := range 3 {
		if err := l.Recycle(0); !errors.Is(err, state.ErrEmbargo) || !strings.Contains(err.Error(),
			"seed 0 is Cancelled until epoch 8") {
			t.Errorf("recycling after %d of 3 epochs: error %v", e, err)
		}
		events := epochs(t, l, 1)
		if over := len(events) == 1 && events[0].Kind == state.EmbargoOver && events[0].Seed == 0 &&
			events[0].Epoch == 8; over != (e == 2) {
			t.Errorf("epoch %d of the embargo gives the events %v", e+1, events)
		}
	}

	if err := l.Recycle(0); err != nil {
		t.Fatal(err)
	}

	if s := l.Report().Seeds[0]; s.Stage != state.Dormant || s.Slot != 0 || s.Alpha != 0 {
		t.Errorf("the recycled seed reports %+v", s)
	}

	if err := l.RequestGermination(0, state.GerminationRequest{Slot: 2}); err != nil {
		t.Error(err)
	}
}

// TestNoEmbargo checks that listeners are told once that a seed may be recycled, even without an
// embargo.
func TestNoEmbargo(t *testing.T) {
	l := lattice(t, 2, 4, state.WithoutGates(), state.WithEmbargo(0))
	if err := errors.Join(l.RequestGermination(1, state.GerminationRequest{Slot: 1}),
		l.Transition(1, state.Cancelled)); err != nil {
		t.Fatal(err)
	}
	if events := epochs(t, l, 3); len(events) != 1 || events[0].Kind != state.EmbargoOver ||
		events[0].Seed != 1 || events[0].Epoch != 1 {
		t.Errorf("events %v", events)
	}
}

// TestRecycledSeedStartsFresh checks that nothing reported of a seed's previous blueprint counts
// for the next one.
func TestRecycledSeedStartsFresh(t *testing.T) {
	thresholds := state.DefaultThresholds()
	thresholds.MinEpochs = [stages]int{}
	l := lattice(t, 1, 1, state.WithThresholds(thresholds), state.WithEmbargo(0))
	report := func(m state.SeedMetrics) {
		t.Helper()
		if _, err := l.StepEpoch(state.Metrics{Seeds: []state.SeedMetrics{m}}); err != nil {
			t.Fatal(err)
		}
	}

	request := func() error {
		return l.RequestGermination(0, state.GerminationRequest{Slot: 1,
			Strategy: erratic{slices.Repeat([]float64{0.5}, 9)}})
	}
	to := func(s state.Stage) error { return l.Transition(0, s) }
	if err := errors.Join(request(), to(state.Training)); err != nil {
		t.Fatal(err)
	}

	report(state.SeedMetrics{TrainingError: 0.001, Performance: 50, Errors: 9, Trials: 9})
	if err := errors.Join(to(state.Grafting), to(state.Stabilization),
		to(state.Evaluating)); err != nil {
		t.Fatal(err)
	}

	if err := to(state.Culled); !errors.Is(err, state.ErrGate) {
		t.Errorf("errors made in training cull a seed in evaluation: %v", err)
	}

	report(state.SeedMetrics{Performance: 1, Errors: 6, Trials: 6})
	if err := errors.Join(to(state.Culled), l.Recycle(0), request(),
		to(state.Training)); err != nil {
		t.Fatal(err)
	}

	if err := to(state.Grafting); !errors.Is(err, state.ErrGate) {
		t.Errorf("the training error of the last blueprint opens the gate of the next one: %v", err)
	}

	if s := l.Report().Seeds[0]; s.Performance != 0 || s.Stability != 0 || s.Alpha != 0 {
		t.Errorf("the new blueprint reports %+v", s)
	}

	report(state.SeedMetrics{TrainingError: 0.001, Performance: 2, Stability: 1})
	if err := to(state.Grafting); err != nil {
		t.Fatal(err)
	}

	memory := func() any {
		for _, a := range l.Arrays() {
			if a.Name == "memory_0" {
				return a.Data.([]float32)[0]
			}
		}
		return nil
	}

	epochs(t, l, 1)
	if got := memory(); got != float32(1) { // erratic adds 1 in every epoch of grafting
		t.Errorf("the strategy's memory is %v after one epoch, want 1", got)
	}

	if err := errors.Join(to(state.RolledBack), l.Recycle(0), request()); err != nil {
		t.Fatal(err)
	}

	if got := memory(); got != float32(0) {
		t.Errorf("the memory of the last blueprint's strategy, %v, is there for the next one", got)
	}

	if err := errors.Join(to(state.Training)); err != nil {
		t.Fatal(err)
	}

	report(state.SeedMetrics{TrainingError: 0.001, Performance: 3, Stability: 1})
	if err := errors.Join(to(state.Grafting), to(state.Stabilization),
		to(state.Evaluating)); err != nil {
		t.Fatal(err)
	}

	report(state.SeedMetrics{Performance: 3, Stability: 1})
	report(state.SeedMetrics{Performance: 3.02, Stability: 1})
	if err := to(state.FineTuning); err != nil {
		t.Fatal(err)
	}

	// 3.02 is less than 1% better than 3, the first score of this blueprint, though it is more than
	// 1% better than 2, the first score of the previous one.
	if err := to(state.Fossilized); !errors.Is(err, state.ErrGate) {
		t.Errorf("the improvement counts from the last blueprint's performance: %v", err)
	}
}

func TestOptionErrors(t *testing.T) {
	thresholds := state.DefaultThresholds()
	thresholds.CullDelta = math.NaN()
	for text, opt := range map[string]state.Option{
		"WithEmbargo":    state.WithEmbargo(-1),
		"Renormali":      state.WithRenormalization(0),
		"slots is 0":     state.WithSlots(0),
		"slots is 70000": state.WithSlots(70000),
		"reports is -1":  state.WithHistory(-1),
		"Share is 1.5":   state.WithTelemetry(state.Telemetry{Share: 1.5}),
		"Mode is 9":      state.WithTelemetry(state.Telemetry{Mode: 9}),
		"Reduction":      state.WithTelemetry(state.Telemetry{Reduction: 9}),
		"Every":          state.WithTelemetry(state.Telemetry{Every: -2}),
		"CullDelta":      state.WithThresholds(thresholds),
	} {
		if l, err := state.NewLattice(2, 4, opt); l != nil || !errors.Is(err, state.ErrArgument) ||
			!strings.Contains(err.Error(), text) {
			t.Errorf("error %v, want one with %q", err, text)
		}
	}

	for _, c := range [][2]int{{0, 4}, {4, 0}, {3, 4}, {-1, 4}, {4, -8}, {8, 4}} {
		if l, err := state.NewLattice(c[0], c[1]); l != nil || err == nil ||
			!strings.Contains(err.Error(),
				fmt.Sprintf("hidden is %d and seeds is %d", c[1], c[0])) {
			t.Errorf("NewLattice(%d, %d): error %v", c[0], c[1], err)
		}
	}
}

// TestSeedsBeyondTheMemory checks that a lattice that does not fit into memory is rejected before
// anything is allocated.
func TestSeedsBeyondTheMemory(t *testing.T) {
	const most = math.MaxUint32
	if has.Check("the seeds take", 100*most) == nil {
		t.Skip("it is not known how much memory this computer has, or it is enough")
	}
	bounded.Run(t, 1<<20, func() {
		_, err := state.NewLattice(most, most)
		require.ErrorIs(t, err, state.ErrArgument)
		require.ErrorContains(t, err, "4294967295 seeds take")
	})
}

func TestZeroLattice(t *testing.T) {
	var l state.Lattice
	if _, err := l.StepEpoch(state.Metrics{}); err != nil {
		t.Error(err)
	}

	if err := l.Transition(0, state.Germinated); !errors.Is(err, state.ErrSeed) {
		t.Errorf("error %v", err)
	}

	if _, err := l.MarshalBinary(); err == nil {
		t.Error("a lattice without seeds is marshalled")
	}

	var p state.Pass
	l.Begin(&p, true)
	if err := l.RecordHealth(&p, nil); err == nil {
		t.Error("a pass over no seeds is recorded")
	}

	if l.Seeds() != 0 || l.Hidden() != 0 || len(l.Report().Seeds) != 0 || len(l.History()) != 0 ||
		l.Arrays() != nil || l.Verify() != nil || len(l.LearningSlots()) != 0 {
		t.Error("the zero lattice has something in it")
	}
}

// TestConcurrentUse runs commands, passes, reports and epochs on several goroutines at once. The
// race detector and the checksums detect interference.
func TestConcurrentUse(t *testing.T) {
	l := lattice(t, 64, 256, state.WithoutGates(), state.WithEmbargo(0),
		state.WithTelemetry(state.Telemetry{Mode: state.Debug}))
	var wg sync.WaitGroup
	loop := func(f func(i int)) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range 60 {
				f(i)
			}
		}()
	}

	for worker := range 3 {
		loop(func(i int) { // each worker owns every third seed, so its commands succeed
			seed := (3*i + worker) % 63
			if err := l.RequestGermination(seed,
				state.GerminationRequest{Slot: 1 + i}); err != nil {
				t.Error(err)
			}

			for _, to := range []state.Stage{state.Training, state.Grafting, state.RolledBack} {
				if err := errors.Join(l.Transition(seed, to), l.SetAlpha(seed, 0.5)); err != nil {
					t.Error(err)
				}
			}

			if err := l.Recycle(seed); err != nil {
				t.Error(err)
			}
		})
	}

	loop(func(int) {
		var p state.Pass
		l.Begin(&p, true)
		health := func(int) state.HealthSample {
			return state.HealthSample{Health: state.Health{Mean: 1},
				Moments: state.Moments{Count: 4, Mean: 1, Variance: 2}, NonFinite: 1}
		}
		gradient := func(int) state.GradientSample {
			return state.GradientSample{Gradient: state.Gradient{Norm: 1},
				Norms: state.Moments{Count: 1, Mean: 1}, Clipped: 1}
		}
		if err := errors.Join(l.RecordHealth(&p, health),
			l.RecordGradient(&p, gradient)); err != nil {
			t.Error(err)
		}
	})

	loop(func(int) {
		if err := l.Verify(); err != nil {
			t.Error(err)
		}
		l.Report()
		l.History()
		if _, err := l.MarshalBinary(); err != nil {
			t.Error(err)
		}
	})

	loop(func(i int) {
		if _, err := l.StepEpoch(state.Metrics{Loss: 1,
			Seeds: []state.SeedMetrics{{Seed: i}}}); err != nil {
			t.Error(err)
		}
		if err := l.SetTelemetry(state.Telemetry{Mode: state.TelemetryMode(i % 4), Every: 2,
			Share: 0.5}); err != nil {
			t.Error(err)
		}
	})

	wg.Wait()
	if err := l.Verify(); err != nil {
		t.Error(err)
	}

	if s := l.Report().Seeds[63]; s.NonFiniteX != 60 || s.Clips != 60 {
		t.Errorf("60 passes with one NaN and one clip each are counted as %d and %d",
			s.NonFiniteX, s.Clips)
	}
}

// TestLearningSlots checks that LearningSlots follows the stages of all seeds of a slot.
func TestLearningSlots(t *testing.T) {
	l, err := state.NewLattice(6, 12, state.WithoutGates(), state.WithSlots(4))
	if err != nil {
		t.Fatal(err)
	}

	want := func(learning ...bool) {
		t.Helper()
		if got := l.LearningSlots(); !slices.Equal(got, learning) {
			t.Errorf("slots that learn: %v, want %v", got, learning)
		}
	}

	do := func(errs ...error) {
		t.Helper()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}

	want(false, false, false, false)
	do(l.RequestGermination(0, state.GerminationRequest{Slot: 2}),
		l.RequestGermination(5, state.GerminationRequest{Slot: 2}),
		l.RequestGermination(3, state.GerminationRequest{Slot: 3}))
	want(false, false, false, false)
	do(l.Transition(0, state.Training), l.Transition(5, state.Training),
		l.Transition(3, state.Training))
	want(false, false, true, true)
	do(l.Transition(0, state.Culled), l.Transition(3, state.Grafting),
		l.Transition(3, state.Stabilization), l.Transition(3, state.Evaluating))
	want(false, false, true, false)
	do(l.Transition(5, state.Cancelled), l.Transition(3, state.FineTuning))
	want(false, false, false, true)
}

// TestGatesOfALattice takes a seed through its whole life with gates, on evidence from metrics
// alone.
func TestGatesOfALattice(t *testing.T) {
	l := lattice(t, 2, 4)
	report := func(loss float64, m state.SeedMetrics) []state.Event {
		t.Helper()
		m.Seed = 1
		e, err := l.StepEpoch(state.Metrics{Loss: loss, Seeds: []state.SeedMetrics{m}})
		if err != nil {
			t.Fatal(err)
		}
		return e
	}

	shut := func(to state.Stage, why string) {
		t.Helper()
		if err := l.Transition(1, to); !errors.Is(err, state.ErrGate) ||
			!strings.Contains(err.Error(), why) ||
			!strings.Contains(err.Error(), "seed 1 from") ||
			!strings.Contains(err.Error(), to.String()) {
			t.Errorf("to %v: error %v, want %q", to, err, why)
		}
	}

	open := func(to state.Stage) {
		t.Helper()
		if err := l.Transition(1, to); err != nil {
			t.Error(err)
		}
	}

	if err := l.RequestGermination(1, state.GerminationRequest{Slot: 1}); err != nil {
		t.Fatal(err)
	}

	open(state.Training)
	shut(state.Grafting, "more epochs in the stage (it has 0, the threshold is 100)")
	for range 100 {
		report(2, state.SeedMetrics{TrainingError: math.NaN(), Performance: 10})
	}

	shut(state.Grafting, "(it has none measured, the threshold is 0.01)")
	if e := report(1.9, state.SeedMetrics{TrainingError: 0.01, Performance: 10}); len(e) != 1 ||
		e[0].Kind != state.GateOpened || e[0].To != state.Grafting || e[0].Seed != 1 {
		t.Errorf("events %v, want that the gate to Grafting opened", e)
	}

	open(state.Grafting)
	epochs(t, l, 50)
	open(state.Stabilization)
	epochs(t, l, 20)
	open(state.Evaluating)
	for range 30 {
		report(1.8, state.SeedMetrics{Performance: 10, Stability: 0.8})
	}

	shut(state.FineTuning, "delta (it has 0, the threshold is 0)")
	shut(state.Culled, "failed evaluation")
	report(1.8, state.SeedMetrics{Performance: 9.94, Stability: 0.8})
	var p state.Pass
	if l.Begin(&p, true); p.Stage[1] != state.Evaluating {
		t.Fatal(p.Stage)
	}

	report(1.8, state.SeedMetrics{Performance: 10.1, Stability: 0.8})
	open(state.FineTuning)
	epochs(t, l, 50)
	report(1.8, state.SeedMetrics{Performance: 10.09, Stability: 1})
	shut(state.Fossilized, "improvement")
	report(1.8, state.SeedMetrics{Performance: 10.2, Stability: 0.5})
	shut(state.Fossilized, "stability")
	report(1.8, state.SeedMetrics{Performance: 10.2, Stability: 0.95})
	open(state.Fossilized)
	if s := l.Report().Seeds[1]; s.Performance != 10.203125 ||
		s.Stability != float64(half.NewFloat16(0.95).Float64()) {
		t.Errorf("performance %v and stability %v are reported, want 10.2 and 0.95 as Float16",
			s.Performance, s.Stability)
	}
}

// TestStraightThroughGate checks that a falling loss and live gradients open the gate of
// straight-through training, which has no training error.
func TestStraightThroughGate(t *testing.T) {
	for _, c := range []struct {
		last, norm float64
		open       bool
	}{{1.5, 0.25, true}, {1.5, 0, false}, {2.5, 0.25, false}, {2, 0.25, false}} {
		l := lattice(t, 1, 4)
		if err := errors.Join(l.RequestGermination(0, state.GerminationRequest{Slot: 1}),
			l.Transition(0, state.Training)); err != nil {
			t.Fatal(err)
		}

		var p state.Pass
		l.Begin(&p, true)
		sample := func(int) state.GradientSample {
			return state.GradientSample{Gradient: state.Gradient{Norm: c.norm},
				Norms: state.Moments{Count: 1, Mean: c.norm}}
		}
		if err := l.RecordGradient(&p, sample); err != nil {
			t.Fatal(err)
		}

		for e := range 101 {
			loss := 2.0
			if e > 0 {
				loss = c.last
			}
			if _, err := l.StepEpoch(state.Metrics{Loss: loss}); err != nil {
				t.Fatal(err)
			}
		}

		if err := l.Transition(0, state.Grafting); (err == nil) != c.open {
			t.Errorf("loss 2 then %v, gradient norm %v: error %v", c.last, c.norm, err)
		}
	}
}

func TestMetricsErrors(t *testing.T) {
	l := lattice(t, 2, 4)
	ok := state.SeedMetrics{Seed: 0, Performance: 3}
	for _, m := range []state.Metrics{
		{Loss: math.NaN()},
		{Loss: math.Inf(1)},
		{Seeds: []state.SeedMetrics{ok, {Seed: 2}}},
		{Seeds: []state.SeedMetrics{ok, {Seed: -1}}},
		{Seeds: []state.SeedMetrics{ok, {Seed: 1, TrainingError: math.Inf(1)}}},
		{Seeds: []state.SeedMetrics{ok, {Seed: 1, Performance: math.NaN()}}},
		{Seeds: []state.SeedMetrics{ok, {Seed: 1, Performance: 1e6}}},
		{Seeds: []state.SeedMetrics{ok, {Seed: 1, Stability: 1.5}}},
		{Seeds: []state.SeedMetrics{ok, {Seed: 1, Errors: -1}}},
	} {
		before := bytesOf(t, l)
		if _, err := l.StepEpoch(m); err == nil || bytesOf(t, l) != before {
			t.Errorf("%+v: error %v, lattice changed: %v", m, err, bytesOf(t, l) != before)
		}
	}
}

// TestHugeMetrics reports finite figures beyond the range of float32, as a run that diverges in
// float64 does, and checks that the saved lattice can be loaded.
func TestHugeMetrics(t *testing.T) {
	l := lattice(t, 2, 4)
	_, err := l.StepEpoch(state.Metrics{Loss: 1e300,
		Seeds: []state.SeedMetrics{{TrainingError: 1e300}, {Seed: 1, TrainingError: -1e300}}})
	require.NoError(t, err)
	saved, err := l.MarshalBinary()
	require.NoError(t, err)
	require.NoError(t, lattice(t, 2, 4).UnmarshalBinary(saved))
}

// TestThresholds checks that a lattice returns its thresholds and whether it has gates.
func TestThresholds(t *testing.T) {
	given := state.DefaultThresholds().Within(100)
	have, gated := lattice(t, 2, 4, state.WithThresholds(given)).Thresholds()
	require.Equal(t, given, have)
	require.True(t, gated)
	_, gated = lattice(t, 2, 4, state.WithoutGates()).Thresholds()
	require.False(t, gated)
}

// TestGateLooksAtTheBlueprint checks that a seed is kept out of grafting while its parameters do
// not learn, whatever the host's loss and its chunk's gradient, and that it passes if they do and
// its training error is low or falling.
func TestGateLooksAtTheBlueprint(t *testing.T) {
	thresholds := state.DefaultThresholds()
	thresholds.MinEpochs[state.Training] = 3
	for name, c := range map[string]struct {
		parameters func(epoch int) []float64
		errors     []float64 // training errors by epoch
		open       bool
	}{
		"all are 0": {func(int) []float64 {
			return []float64{0, 0, 0}
		}, []float64{0, 0, 0, 0}, false},
		"they stay": {func(int) []float64 {
			return []float64{1, 2, 1}
		}, []float64{0, 0, 0, 0}, false},
		"one is not finite": {func(e int) []float64 {
			return []float64{float64(e), math.NaN(), 1}
		}, []float64{0, 0, 0, 0}, false},
		"they learn": {func(e int) []float64 {
			return []float64{float64(e), 0, 1}
		}, []float64{0, 0, 0, 0.005}, true},
		"they learn to help": {func(e int) []float64 {
			return []float64{float64(e), 0, 1}
		}, []float64{3, 2, 1, -0.5}, true},
		"they harm ever less": {func(e int) []float64 {
			return []float64{float64(e), 0, 1}
		}, []float64{3, 2, 1, 0.9}, true},
		"they harm": {func(e int) []float64 {
			return []float64{float64(e), 0, 1}
		}, []float64{1, 1, 1, 1.1}, false},
		"unknown": {func(int) []float64 {
			return nil
		}, []float64{math.NaN(), math.NaN(), math.NaN(), math.NaN()}, true},
	} {
		t.Run(name, func(t *testing.T) {
			l := lattice(t, 2, 4, state.WithThresholds(thresholds))
			require.NoError(t, l.RequestGermination(1, state.GerminationRequest{Slot: 1,
				Kind: blueprints.Residual}))
			require.NoError(t, l.Transition(1, state.Training))
			for epoch, e := range c.errors {
				m := state.Moments{Count: 4, Mean: 1, Variance: 1}
				pass(t, l, true, state.HealthSample{Moments: m},
					state.GradientSample{Gradient: state.Gradient{Norm: 2}, Norms: m})
				_, err := l.StepEpoch(state.Metrics{Loss: 5 - float64(epoch),
					Seeds: []state.SeedMetrics{{Seed: 1, TrainingError: e,
						Unscored: true, Parameters: c.parameters(epoch)}}})
				require.NoError(t, err)
			}

			require.Equal(t, c.open, l.Report().Seeds[1].CanAdvance)
			missing, err := l.Shortfall(1)
			require.NoError(t, err)
			require.Equal(t, c.open, missing == state.Shortfall{}, "%v", missing)
			if err := l.Transition(1, state.Grafting); c.open {
				require.NoError(t, err)
			} else {
				require.ErrorIs(t, err, state.ErrGate)
				require.ErrorContains(t, err, missing.String())
			}
		})
	}
}

// TestShortfall checks that a lattice names the condition that a seed does not meet, and nothing if
// no gate is shut.
func TestShortfall(t *testing.T) {
	l := lattice(t, 2, 4)
	request := state.GerminationRequest{Slot: 1, Kind: blueprints.Residual}
	require.NoError(t, l.RequestGermination(1, request))
	require.NoError(t, l.Transition(1, state.Training))
	missing, err := l.Shortfall(1)
	require.NoError(t, err)
	require.Equal(t, "more epochs in the stage (it has 0, the threshold is 100)", missing.String())
	missing, err = l.Shortfall(0) // the seed is dormant
	require.NoError(t, err)
	require.Equal(t, "nothing", missing.String())
	_, err = l.Shortfall(2)
	require.ErrorIs(t, err, state.ErrSeed)
	free := lattice(t, 2, 4, state.WithoutGates())
	send(t, free, 1, state.Evaluating)
	missing, err = free.Shortfall(1)
	require.NoError(t, err)
	require.Equal(t, state.Shortfall{}, missing)
}

// TestDormantSeedCannotAdvance checks that no seed advances without a blueprint.
func TestDormantSeedCannotAdvance(t *testing.T) {
	thresholds := state.DefaultThresholds()
	clear(thresholds.MinEpochs[:])
	for _, opts := range [][]state.Option{{state.WithThresholds(thresholds)},
		{state.WithoutGates()}} {
		l := lattice(t, 2, 4, opts...)
		for range 10 {
			for _, s := range l.Report().Seeds {
				if s.CanAdvance {
					require.NoError(t, l.Transition(s.Seed, s.Stage.Next()))
				}
			}
			_, err := l.StepEpoch(state.Metrics{Loss: 1})
			require.NoError(t, err)
		}
		require.Equal(t, state.Dormant, l.Report().Seeds[0].Stage)
	}

	l := lattice(t, 2, 4, state.WithThresholds(thresholds))
	require.ErrorContains(t, l.Transition(0, state.Germinated), "RequestGermination")
}

// TestMetricsRefused checks that invalid metrics change nothing.
func TestMetricsRefused(t *testing.T) {
	l := lattice(t, 2, 4)
	for want, seeds := range map[string][]state.SeedMetrics{
		"seed 1 has two entries": {{Seed: 1}, {Seed: 0}, {Seed: 1}},
		"3 errors in 2 trials":   {{Seed: 1, Trials: 2, Errors: 3}},
	} {
		_, err := l.StepEpoch(state.Metrics{Seeds: seeds})
		require.ErrorIs(t, err, state.ErrArgument)
		require.ErrorContains(t, err, want)
		require.Zero(t, l.Epoch())
	}
}
