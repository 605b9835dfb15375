package state

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestForged wants a lattice that nothing can have led to be refused although its checksums fit, by both ways in, and to change
// nothing.
func TestForged(t *testing.T) {
	nan, inf := float32(math.NaN()), math.Inf(1)
	for name, forge := range map[string]func(l *Lattice, s *seedState){
		"slot is 300 of 300":             func(_ *Lattice, s *seedState) { s.slot[1] = 300 },
		"stage is 11":                    func(_ *Lattice, s *seedState) { s.stage[1] = 11 },
		"strategy is 9 of":               func(_ *Lattice, s *seedState) { s.strategy[1] = 9 },
		"α is NaN":                       func(_ *Lattice, s *seedState) { s.alpha[1] = nan },
		"α is 1.5":                       func(_ *Lattice, s *seedState) { s.alpha[1] = 1.5 },
		"schema version is 1":            func(_ *Lattice, s *seedState) { s.schema[1] = 1 },
		"finished is 2":                  func(_ *Lattice, s *seedState) { s.finished[1] = 2 },
		"learning is 3":                  func(_ *Lattice, s *seedState) { s.learning[1] = 3 },
		"7 errors in 3 trials":           func(_ *Lattice, s *seedState) { s.stageErrors[1], s.stageTrials[1] = 7, 3 },
		"run_mean is +Inf":               func(_ *Lattice, s *seedState) { s.runMean[1] = inf },
		"run_variance is -1":             func(_ *Lattice, s *seedState) { s.runVariance[1] = -1 },
		"norm_count is -3":               func(_ *Lattice, s *seedState) { s.normCount[1] = -3 },
		"grad_norm is NaN":               func(_ *Lattice, s *seedState) { s.gradNorm[1] = nan },
		"stability is NaN":               func(_ *Lattice, s *seedState) { s.stability[1] = half(math.NaN()) },
		"variance is -1":                 func(_ *Lattice, s *seedState) { s.variance[1] = -1 },
		"base_performance is -Inf":       func(_ *Lattice, s *seedState) { s.basePerformance[1] = float32(-inf) },
		"training_error is +Inf":         func(_ *Lattice, s *seedState) { s.trainingError[1] = float32(inf) },
		"told of 9 NaN and Inf":          func(_ *Lattice, s *seedState) { s.nonFiniteTold[1], s.nonFiniteX[1], s.nonFiniteG[1] = 9, 4, 4 },
		"epoch 4294967295 and step":      func(l *Lattice, _ *seedState) { l.epoch = math.MaxUint32 },
		"and step 18446744073709551615":  func(l *Lattice, _ *seedState) { l.step = math.MaxUint64 },
		"performance is NaN":             func(_ *Lattice, s *seedState) { s.performance[1] = nan },
		"it is Grafting and has no slot": func(l *Lattice, s *seedState) { l.config.Gates = true; s.stage[1], s.slot[1] = uint8(Grafting), 0 },
	} {
		t.Run(name, func(t *testing.T) {
			l := filled(t, 4)
			forge(l, l.seeds)
			l.seal(0, l.n)
			data, err := l.MarshalBinary()
			require.NoError(t, err)
			into := filled(t, 4)
			before, err := into.MarshalBinary()
			require.NoError(t, err)
			for _, err := range []error{into.UnmarshalBinary(data), into.SetArrays(l.Arrays())} {
				require.ErrorIs(t, err, ErrCorrupt)
				require.ErrorContains(t, err, name)
			}
			after, err := into.MarshalBinary()
			require.NoError(t, err)
			require.Equal(t, before, after)
		})
	}
}

// TestOverflowingFigures wants figures that overflow neither to become limits by which later passes go, nor to keep a lattice that has
// met them from being loaded.
func TestOverflowingFigures(t *testing.T) {
	l, err := NewLattice(1, 4)
	require.NoError(t, err)
	var p Pass
	for _, m := range []Moments{{8, 1, 2}, {8, math.MaxFloat64, math.Inf(1)}, {8, math.NaN(), 1}, {8, 1, 1e300}} {
		l.Begin(&p, true)
		require.NoError(t, l.RecordHealth(&p, func(int) HealthSample {
			return HealthSample{Moments: m, Health: Health{Variance: m.Variance, Mean: m.Mean}}
		}))
		require.NoError(t, l.RecordGradient(&p, func(int) GradientSample {
			return GradientSample{Norms: m, Gradient: Gradient{Norm: m.Variance}}
		}))
		_, err := l.StepEpoch(Metrics{})
		require.NoError(t, err)
		l.Begin(&p, true)
		require.True(t, p.Input[0].ok() && p.Norms[0].ok())
		data, err := l.MarshalBinary()
		require.NoError(t, err)
		require.NoError(t, new(Lattice).UnmarshalBinary(data), "after %+v", m)
	}
}
