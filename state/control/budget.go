package control

import (
	"fmt"
	"math"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
)

// Affords returns an error if a controller that may plant never could, in a network of such
// reports. Its budget is too small for a single blueprint, none of its size fits anywhere, or its
// epochs are over before they begin. A trainer calls it, behind Parameters.
func (h *Heuristic) Affords(reports []state.Report) error {
	if h.MaxActive == 0 || h.MaxParameters == 0 {
		return nil // it is to plant nothing
	}
	if h.End <= h.Begin {
		return fmt.Errorf("control.Heuristic: %w: End is %d and Begin is %d, so no epoch is left to "+
			"plant in: End after Begin", state.ErrArgument, h.End, h.Begin)
	}
	return affords("control.Heuristic", h.MaxParameters, reports, h.cost,
		func(site blueprints.Site) string {
			if site == blueprints.Weight {
				return fmt.Sprintf("Rank, %d", h.Rank)
			}
			return fmt.Sprintf("Features, %d", h.Features)
		})
}

// cost is how many parameters a blueprint of a layer's seed would have, 0 where none can be.
func (h *Heuristic) cost(layer int, r *state.Report, seed int) int {
	s := r.Seeds[seed]
	s.Stage = state.Dormant
	return h.takes(layer, r, s)
}

// Affords is that of [Heuristic].
func (a *Adapters) Affords(reports []state.Report) error {
	if a.parameters == nil {
		return nil
	}
	rank := 1
	if a.Where != Unhealthiest {
		rank = a.Rank
	}
	return affords("control.Adapters", a.MaxParameters, reports,
		func(layer int, r *state.Report, seed int) int {
			if r.Site != blueprints.Weight {
				return 0
			}
			return a.parameters(layer, seed, blueprints.LoRA, rank)
		}, func(blueprints.Site) string { return fmt.Sprintf("Rank, %d", a.Rank) })
}

// affords looks for the cheapest blueprint of all seeds elsewhere than in depth.
func affords(who string, most int, reports []state.Report,
	cost func(layer int, r *state.Report, seed int) int, size func(blueprints.Site) string) error {
	least, seeds, last := math.MaxInt, 0, blueprints.Chunk
	for layer := range reports {
		r := &reports[layer]
		if r.Site == blueprints.Depth {
			continue
		}
		for seed := range r.Seeds {
			seeds, last = seeds+1, r.Site
			if n := cost(layer, r, seed); n > 0 {
				least = min(least, n)
			}
		}
	}
	switch {
	case seeds == 0:
		return nil
	case least == math.MaxInt && last == blueprints.Chunk:
		return nil // a report that does not say what a slot has
	case least == math.MaxInt:
		return fmt.Errorf("%s: %w: no blueprint of its size fits any of the %d seeds: lower its %s",
			who, state.ErrArgument, seeds, size(last))
	case least > most:
		return fmt.Errorf("%s: %w: MaxParameters is %d, and the smallest blueprint that it could "+
			"plant has %d: raise MaxParameters to that at least, or make blueprints smaller", who,
			state.ErrArgument, most, least)
	}
	return nil
}
