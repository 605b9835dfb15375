package llm

import (
	"math"

	"github.com/kasmina-go/kasmina/op/graft"
	"github.com/kasmina-go/kasmina/state"
)

// senseSite passes the measurements of blueprints to a lattice of weights or of the stream. The argument
// features is the width of the model, and pass is scratch space.
func senseSite(l *state.Lattice, pass *state.Pass, all []SeedFigures, features int) error {
	bySeed, site := map[int]SeedFigures{}, l.Site()
	for _, f := range all {
		if f.Site == site {
			bySeed[f.Seed] = f
		}
	}

	l.Begin(pass, true)
	err := l.RecordHealth(pass, func(seed int) state.HealthSample {
		f, ok := bySeed[seed]
		if !ok {
			return state.HealthSample{}
		}
		return healthOf(f.Health, features)
	})
	if err != nil {
		return err
	}

	return l.RecordGradient(pass, func(seed int) state.GradientSample {
		f, ok := bySeed[seed]
		switch {
		case !ok:
			return state.GradientSample{}
		case f.Gradient < 0:
			return state.GradientSample{NonFinite: 1}
		}
		square := f.Gradient * f.Gradient / float64(max(1, f.Params))
		return state.GradientSample{Norms: state.Moments{Count: 1, Mean: f.Gradient},
			Gradient: state.Gradient{Norm: f.Gradient, Variance: square}}
	})
}

// healthOf converts the figures of activations with the given number of features to a lattice's sample.
func healthOf(f [graft.Figures]float64, features int) state.HealthSample {
	if f[graft.Variance] < 0 {
		return state.HealthSample{NonFinite: 1}
	}
	h := state.Health{Mean: f[graft.Mean], Variance: f[graft.Variance], Min: f[graft.Min],
		Max: f[graft.Max], DeadRatio: f[graft.DeadRatio]}
	h.SNR = math.Abs(h.Mean) / math.Sqrt(h.Variance+graft.DeadBelow)
	return state.HealthSample{Health: h, Moments: state.Moments{Count: float64(features),
		Mean: h.Mean, Variance: h.Variance}}
}

// anyAwake reports whether a seed is not dormant.
func anyAwake(seeds *state.Network) bool {
	for _, r := range seeds.Report() {
		for _, s := range r.Seeds {
			if s.Stage != state.Dormant {
				return true
			}
		}
	}
	return false
}
