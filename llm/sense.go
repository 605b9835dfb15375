package llm

import (
	"math"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm/graph"
	"github.com/kasmina-go/kasmina/op/graft"
	"github.com/kasmina-go/kasmina/state"
)

// sense has the lattices of weights and of the stream take in what the epoch's last batch has
// measured of what is planted. Of dormant seeds nothing is measured.
func (t *Trainer) sense() error {
	s, ok := t.engine.(Sensor)
	if !ok || len(t.Model.Config.Planted) == 0 {
		return nil
	}
	all, err := t.figures(s)
	if err != nil {
		return err
	}
	for _, l := range t.Model.Kasmina.Lattices() {
		if site := l.Site(); site == blueprints.Weight || site == blueprints.Stream {
			if err := t.senseAt(l, all); err != nil {
				return err
			}
		}
	}
	return nil
}

// figures are those of the step's last batch, whoever has computed it.
func (t *Trainer) figures(s Sensor) (all []graph.Figures, err error) {
	e := t.ranks()
	if e == nil {
		return s.Figures()
	}
	last := (t.Config.Accumulate - 1) % e.Ranks()
	if e.Rank() == last { // others may have computed none
		all, err = s.Figures()
	}
	if err := t.agree(err); err != nil {
		return nil, err
	}
	of, err := swap(e, "figures", all)
	if err != nil {
		return nil, err
	}
	return of[last], nil
}

// senseAt is sense of one lattice.
func (t *Trainer) senseAt(l *state.Lattice, all []graph.Figures) error {
	bySeed, site := map[int]graph.Figures{}, l.Site()
	for _, f := range all {
		if f.Site == site {
			bySeed[f.Seed] = f
		}
	}
	l.Begin(&t.pass, true)
	err := l.RecordHealth(&t.pass, func(seed int) state.HealthSample {
		f, ok := bySeed[seed]
		if !ok {
			return state.HealthSample{}
		}
		return healthOf(f.Health, t.Model.Config.Dim)
	})
	if err != nil {
		return err
	}
	return l.RecordGradient(&t.pass, func(seed int) state.GradientSample {
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

// healthOf is what a lattice takes of figures of activations of so many features.
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
