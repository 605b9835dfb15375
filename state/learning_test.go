package state_test

import (
	"context"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/graft"
)

// TestScoresInIntervals wants a ramp that speeds up with the score to end about when it does with a score every epoch, however
// many epochs pass from one to the next, and not to take an old score for one that has not improved.
func TestScoresInIntervals(t *testing.T) {
	ends := func(every int, improves bool) (epochs int) {
		l := lattice(t, 2, 4, state.WithoutGates())
		require.NoError(t, l.RequestGermination(1, state.GerminationRequest{Slot: 1,
			Strategy: graft.PerformanceLinked{Epochs: 200, Target: 1, Gain: 0.05, MaxSpeed: 5}}))
		require.NoError(t, l.Transition(1, state.Training))
		require.NoError(t, l.Transition(1, state.Grafting))
		for epochs = 1; ; epochs++ {
			var m state.Metrics
			if epochs%every == 0 {
				score := state.SeedMetrics{Seed: 1, TrainingError: math.NaN(), Performance: -10, Trials: 1}
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
	often := ends(1, true)
	require.Less(t, often, 100)
	for _, every := range []int{2, 5, 10} {
		require.InDelta(t, often, ends(every, true), float64(every)+1, "a score every %d epochs", every)
		require.Equal(t, 200, ends(every, false), "a score every %d epochs that stays the same", every)
	}
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

// TestProbe wants passes to see a probed seed at full strength, and its stage to stay.
func TestProbe(t *testing.T) {
	l := lattice(t, 2, 4, state.WithoutGates())
	require.ErrorIs(t, l.Probe(1, true), state.ErrArgument)
	require.ErrorIs(t, l.Probe(2, true), state.ErrSeed)
	require.NoError(t, l.RequestGermination(1, state.GerminationRequest{Slot: 1}))
	require.NoError(t, l.Transition(1, state.Training))
	var p state.Pass
	for _, on := range []bool{true, false} {
		require.NoError(t, l.Probe(1, on))
		l.Begin(&p, false)
		require.Equal(t, on, p.Stage[1].Blends())
		require.Equal(t, float32(1), p.Alpha[1])
		require.Equal(t, state.Training, l.Report().Seeds[1].Stage)
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

// TestFiguresKeepTheirRange wants figures of normal quality that float16 cannot hold.
func TestFiguresKeepTheirRange(t *testing.T) {
	l := lattice(t, 2, 4)
	h := state.Health{Variance: 1e10, Mean: 1e5, Min: -3e8, Max: 3e8, SNR: 1e6}
	g := state.Gradient{Norm: 1e-6, Variance: 1e-14, Max: 1e-9}
	m := state.Moments{Count: 4, Mean: 1, Variance: 1}
	pass(t, l, true, state.HealthSample{Health: h, Moments: m}, state.GradientSample{Gradient: g, Norms: m})
	for _, r := range append(l.History(), l.Report()) {
		s := r.Seeds[1]
		for _, f := range [][2]float64{{s.Health.Mean, h.Mean}, {s.Health.Min, h.Min}, {s.Health.Max, h.Max}, {s.Health.SNR, h.SNR},
			{s.Gradient.Variance, g.Variance}, {s.Gradient.Max, g.Max}} {
			require.InEpsilon(t, f[1], f[0], 0x1p-8)
		}
	}
}

// TestHistoryUnderSampling wants reports of passes that measured alone, and in them figures of that pass alone.
func TestHistoryUnderSampling(t *testing.T) {
	l := lattice(t, 4, 8, state.WithHistory(20), state.WithTelemetry(state.Telemetry{Mode: state.Sampling, Every: 3, Share: 0.5}))
	for i := range 12 {
		m := state.Moments{Count: 4, Mean: 1, Variance: 1}
		pass(t, l, true, state.HealthSample{Health: state.Health{Variance: float64(i + 1)}, Moments: m},
			state.GradientSample{Gradient: state.Gradient{Norm: float64(i + 1)}, Norms: m})
	}
	reports := l.History()
	require.Len(t, reports, 4)
	seen := map[float64]bool{}
	for _, r := range reports {
		measured, value := 0, 0.0
		for _, s := range r.Seeds {
			if !s.Measured {
				require.Zero(t, s.Health)
				require.Zero(t, s.Gradient)
				continue
			}
			measured++
			require.True(t, value == 0 || s.Health.Variance == value)
			value = s.Health.Variance
			require.Equal(t, value, s.Gradient.Norm)
		}
		require.Equal(t, 2, measured)
		require.False(t, seen[value], "variance %v is told twice", value)
		seen[value] = true
	}
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

// TestEmptyArguments wants neither a panic nor a hang where nothing is given.
func TestEmptyArguments(t *testing.T) {
	var none context.Context
	l := lattice(t, 2, 4)
	n, err := state.NewNetwork(nil, state.Layer{Name: "a", Lattice: l})
	require.NoError(t, err)
	for _, n := range []*state.Network{n, {}} {
		require.ErrorIs(t, n.Scrub(none, 1, nil), state.ErrArgument)
		require.ErrorIs(t, n.Scrub(t.Context(), 0, nil), state.ErrArgument)
	}
	require.ErrorIs(t, l.Scrub(none, 1, nil), state.ErrArgument)
	require.ErrorIs(t, l.Scrub(t.Context(), -1, nil), state.ErrArgument)
}

// TestZeroNetworkAnswers wants what is submitted to a network without layers, which nobody applies anything to, to be refused.
func TestZeroNetworkAnswers(t *testing.T) {
	var zero state.Network
	done := zero.Submit(state.Command{Action: state.Recycle})
	require.Len(t, done, 1, "it would never answer")
	require.ErrorIs(t, <-done, state.ErrSeed)
	require.NoError(t, <-zero.Submit())
}

// TestCraftedPass wants a pass that no lattice has begun to be refused.
func TestCraftedPass(t *testing.T) {
	l := lattice(t, 2, 4)
	p := state.Pass{Stage: make([]state.Stage, 2), Record: true}
	require.ErrorIs(t, l.RecordHealth(&p, func(int) state.HealthSample { return state.HealthSample{} }), state.ErrArgument)
	require.ErrorIs(t, l.RecordGradient(&p, func(int) state.GradientSample { return state.GradientSample{} }), state.ErrArgument)
}
