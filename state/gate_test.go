package state_test

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/half"
	"github.com/kasmina-go/kasmina/state"
)

// TestGates goes through every condition of KASMINA.md's gates, on both sides of its threshold.
func TestGates(t *testing.T) {
	nan := math.NaN()
	with := func(change func(*state.Evidence)) state.Evidence {
		e := state.Evidence{Epochs: 1000, TrainingError: nan, Delta: nan, Improvement: nan}
		change(&e)
		return e
	}
	none := func(*state.Evidence) {}
	above := func(v float64) float64 { return math.Nextafter(v, math.Inf(1)) }
	below := func(v float64) float64 { return math.Nextafter(v, math.Inf(-1)) }
	for _, c := range []struct {
		name     string
		from, to state.Stage
		e        state.Evidence
		open     bool
	}{
		{"germination needs nothing", 0, 1, state.Evidence{}, true},
		{"training needs nothing", 1, 2, state.Evidence{}, true},
		{"cancelling what has not begun", 1, 9, state.Evidence{}, true},
		{"99 epochs of training", 2, 3, with(func(e *state.Evidence) { e.Epochs, e.TrainingError = 99, 0 }), false},
		{"100 epochs of training", 2, 3, with(func(e *state.Evidence) { e.Epochs, e.TrainingError = 100, 0 }), true},
		{"training error at the threshold", 2, 3, with(func(e *state.Evidence) { e.TrainingError = 0.01 }), true},
		{"training error above", 2, 3, with(func(e *state.Evidence) { e.TrainingError = above(0.01) }), false},
		{"training error unknown", 2, 3, with(none), false},
		{"loss falls, gradients live", 2, 3, with(func(e *state.Evidence) { e.LossFalling, e.Learning = true, true }), true},
		{"loss falls, gradients dead", 2, 3, with(func(e *state.Evidence) { e.LossFalling = true }), false},
		{"gradients live, loss does not fall", 2, 3, with(func(e *state.Evidence) { e.Learning = true }), false},
		{"99 epochs before culling", 2, 8, with(func(e *state.Evidence) { e.Epochs = 99 }), false},
		{"100 epochs before culling", 2, 8, with(func(e *state.Evidence) { e.Epochs = 100 }), true},
		{"49 epochs of grafting", 3, 4, with(func(e *state.Evidence) { e.Epochs = 49 }), false},
		{"50 epochs of grafting", 3, 4, with(func(e *state.Evidence) { e.Epochs = 50 }), true},
		{"a rollback at once", 3, 10, state.Evidence{}, true},
		{"19 epochs of stabilization", 4, 5, with(func(e *state.Evidence) { e.Epochs = 19 }), false},
		{"20 epochs of stabilization", 4, 5, with(func(e *state.Evidence) { e.Epochs = 20 }), true},
		{"a rollback at once", 4, 10, state.Evidence{}, true},
		{"29 epochs of evaluation", 5, 6, with(func(e *state.Evidence) { e.Epochs, e.Delta, e.Stability = 29, 1, 1 }), false},
		{"30 epochs of evaluation", 5, 6, with(func(e *state.Evidence) { e.Epochs, e.Delta, e.Stability = 30, 1, 1 }), true},
		{"no delta", 5, 6, with(func(e *state.Evidence) { e.Delta, e.Stability = 0, 1 }), false},
		{"a positive delta", 5, 6, with(func(e *state.Evidence) { e.Delta, e.Stability = above(0), 1 }), true},
		{"delta unknown", 5, 6, with(func(e *state.Evidence) { e.Stability = 1 }), false},
		{"stable enough", 5, 6, with(func(e *state.Evidence) { e.Delta, e.Stability = 1, 0.8 }), true},
		{"not stable enough", 5, 6, with(func(e *state.Evidence) { e.Delta, e.Stability = 1, 0.799 }), false},
		{"culled with nothing wrong", 5, 8, with(none), false},
		{"culled at the delta threshold", 5, 8, with(func(e *state.Evidence) { e.Delta = -0.05 }), false},
		{"culled below it", 5, 8, with(func(e *state.Evidence) { e.Delta = below(-0.05) }), true},
		{"culled at the error rate", 5, 8, with(func(e *state.Evidence) { e.ErrorRate = 0.1 }), false},
		{"culled above it", 5, 8, with(func(e *state.Evidence) { e.ErrorRate = above(0.1) }), true},
		{"culled at 5 errors", 5, 8, with(func(e *state.Evidence) { e.Errors = 5 }), false},
		{"culled at 6 errors", 5, 8, with(func(e *state.Evidence) { e.Errors = 6 }), true},
		{"a rollback at once", 5, 10, state.Evidence{}, true},
		{"49 epochs of fine-tuning", 6, 7, with(func(e *state.Evidence) { e.Epochs, e.Improvement, e.Stability = 49, 1, 1 }), false},
		{"50 epochs of fine-tuning", 6, 7, with(func(e *state.Evidence) { e.Epochs, e.Improvement, e.Stability = 50, 1, 1 }), true},
		{"improved by 1 %", 6, 7, with(func(e *state.Evidence) { e.Improvement, e.Stability = 0.01, 0.95 }), true},
		{"improved by less", 6, 7, with(func(e *state.Evidence) { e.Improvement, e.Stability = below(0.01), 1 }), false},
		{"improvement unknown", 6, 7, with(func(e *state.Evidence) { e.Stability = 1 }), false},
		{"not stable enough for good", 6, 7, with(func(e *state.Evidence) { e.Improvement, e.Stability = 1, 0.949 }), false},
		{"a rollback at once", 6, 10, state.Evidence{}, true},
	} {
		s, open := state.DefaultThresholds().Gate(c.from, c.to, c.e)
		if open != c.open || (s.Condition == "") != open {
			t.Errorf("%s: %v to %v is open: %v (%+v), want %v", c.name, c.from, c.to, open, s, c.open)
		}
	}
}

// TestGatesOfALattice takes a seed through its life with evidence from metrics alone.
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
		if err := l.Transition(1, to); !errors.Is(err, state.ErrGate) || !strings.Contains(err.Error(), why) ||
			!strings.Contains(err.Error(), "seed 1 from") || !strings.Contains(err.Error(), to.String()) {
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
	if e := report(1.9, state.SeedMetrics{TrainingError: 0.01, Performance: 10}); len(e) != 1 || e[0].Kind != state.GateOpened || e[0].To != state.Grafting || e[0].Seed != 1 {
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
	if s := l.Report().Seeds[1]; s.Performance != 10.203125 || s.Stability != float64(half.NewFloat16(0.95).Float64()) {
		t.Errorf("performance %v and stability %v are reported, want 10.2 and 0.95 as Float16", s.Performance, s.Stability)
	}
}

// Straight-through training has no error of its own: a falling loss and live gradients open its gate.
func TestStraightThroughGate(t *testing.T) {
	for _, c := range []struct {
		last, norm float64
		open       bool
	}{{1.5, 0.25, true}, {1.5, 0, false}, {2.5, 0.25, false}, {2, 0.25, false}} {
		l := lattice(t, 1, 4)
		if err := errors.Join(l.RequestGermination(0, state.GerminationRequest{Slot: 1}), l.Transition(0, state.Training)); err != nil {
			t.Fatal(err)
		}
		var p state.Pass
		l.Begin(&p, true)
		sample := func(int) state.GradientSample {
			return state.GradientSample{Gradient: state.Gradient{Norm: c.norm}, Norms: state.Moments{Count: 1, Mean: c.norm}}
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

// TestWithin wants the whole life of a blueprint to fit into half of a run, and what fits already to stay.
func TestWithin(t *testing.T) {
	all := func(t state.Thresholds) (n int) {
		for _, e := range t.MinEpochs {
			n += e
		}
		return n
	}
	for _, epochs := range []int{-1, 0, 1, 10, 100, 499} {
		require.LessOrEqual(t, all(state.DefaultThresholds().Within(epochs)), max(0, epochs)/2)
	}
	require.Equal(t, state.DefaultThresholds(), state.DefaultThresholds().Within(500))
}

// TestThresholds wants a lattice to tell its thresholds, and whether it goes by them.
func TestThresholds(t *testing.T) {
	given := state.DefaultThresholds().Within(100)
	have, gated := lattice(t, 2, 4, state.WithThresholds(given)).Thresholds()
	require.Equal(t, given, have)
	require.True(t, gated)
	_, gated = lattice(t, 2, 4, state.WithoutGates()).Thresholds()
	require.False(t, gated)
}

// TestGateLooksAtTheBlueprint wants seeds whose own parameters do not learn to stay out of grafting, whatever the host's loss and
// their chunk's gradient, and those that learn and do no harm, or ever less, to pass.
func TestGateLooksAtTheBlueprint(t *testing.T) {
	thresholds := state.DefaultThresholds()
	thresholds.MinEpochs[state.Training] = 3
	for name, c := range map[string]struct {
		parameters func(epoch int) []float64
		errors     []float64 // of the epochs
		open       bool
	}{
		"all are 0":           {func(int) []float64 { return []float64{0, 0, 0} }, []float64{0, 0, 0, 0}, false},
		"they stay":           {func(int) []float64 { return []float64{1, 2, 1} }, []float64{0, 0, 0, 0}, false},
		"one is not finite":   {func(e int) []float64 { return []float64{float64(e), math.NaN(), 1} }, []float64{0, 0, 0, 0}, false},
		"they learn":          {func(e int) []float64 { return []float64{float64(e), 0, 1} }, []float64{0, 0, 0, 0.005}, true},
		"they learn to help":  {func(e int) []float64 { return []float64{float64(e), 0, 1} }, []float64{3, 2, 1, -0.5}, true},
		"they harm ever less": {func(e int) []float64 { return []float64{float64(e), 0, 1} }, []float64{3, 2, 1, 0.9}, true},
		"they harm":           {func(e int) []float64 { return []float64{float64(e), 0, 1} }, []float64{1, 1, 1, 1.1}, false},
		"unknown":             {func(int) []float64 { return nil }, []float64{math.NaN(), math.NaN(), math.NaN(), math.NaN()}, true},
	} {
		t.Run(name, func(t *testing.T) {
			l := lattice(t, 2, 4, state.WithThresholds(thresholds))
			require.NoError(t, l.RequestGermination(1, state.GerminationRequest{Slot: 1, Kind: blueprints.Residual}))
			require.NoError(t, l.Transition(1, state.Training))
			for epoch, e := range c.errors {
				m := state.Moments{Count: 4, Mean: 1, Variance: 1}
				pass(t, l, true, state.HealthSample{Moments: m}, state.GradientSample{Gradient: state.Gradient{Norm: 2}, Norms: m})
				_, err := l.StepEpoch(state.Metrics{Loss: 5 - float64(epoch), Seeds: []state.SeedMetrics{{Seed: 1, TrainingError: e,
					Unscored: true, Parameters: c.parameters(epoch)}}})
				require.NoError(t, err)
			}
			require.Equal(t, c.open, l.Report().Seeds[1].CanAdvance)
			if err := l.Transition(1, state.Grafting); c.open {
				require.NoError(t, err)
			} else {
				require.ErrorIs(t, err, state.ErrGate)
			}
		})
	}
}

// TestNothingWalksOn wants no seed to advance that nobody has given a blueprint.
func TestNothingWalksOn(t *testing.T) {
	thresholds := state.DefaultThresholds()
	clear(thresholds.MinEpochs[:])
	for _, opts := range [][]state.Option{{state.WithThresholds(thresholds)}, {state.WithoutGates()}} {
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

// TestMetricsRefused wants metrics that cannot be to change nothing.
func TestMetricsRefused(t *testing.T) {
	l := lattice(t, 2, 4)
	for want, seeds := range map[string][]state.SeedMetrics{
		"two metrics of seed 1": {{Seed: 1}, {Seed: 0}, {Seed: 1}},
		"3 errors in 2 trials":  {{Seed: 1, Trials: 2, Errors: 3}},
	} {
		_, err := l.StepEpoch(state.Metrics{Seeds: seeds})
		require.ErrorIs(t, err, state.ErrArgument)
		require.ErrorContains(t, err, want)
		require.Zero(t, l.Epoch())
	}
}
