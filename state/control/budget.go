package control

import (
	"fmt"
	"math"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
)

// Affords returns an error if h is meant to plant blueprints but never could in a network with the
// given reports, because the budget is too small for any blueprint, no blueprint of the configured
// size fits anywhere, or End is not after Begin. The trainer calls it after Parameters.
func (h *Heuristic) Affords(reports []state.Report) error {
	if h.MaxActive == 0 || h.MaxParameters == 0 {
		return nil // configured to plant nothing
	}
	if h.End <= h.Begin {
		return fmt.Errorf("control.Heuristic: %w: End is %d and Begin is %d, so there is no epoch to "+
			"plant in: set End to a later epoch than Begin", state.ErrArgument, h.End, h.Begin)
	}

	return affords("control.Heuristic", h.MaxParameters, reports, h.cost,
		func(site blueprints.Site) string {
			if site == blueprints.Weight {
				return fmt.Sprintf("Rank, %d", h.Rank)
			}
			return fmt.Sprintf("Features, %d", h.Features)
		})
}

// cost returns the number of parameters that a new blueprint of a seed would have, or 0 if none
// fits.
func (h *Heuristic) cost(layer int, r *state.Report, seed int) int {
	s := r.Seeds[seed]
	s.Stage = state.Dormant
	return h.parameterCount(layer, r, s)
}

// Affords returns an error if a could never plant a LoRA; see [Heuristic.Affords].
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

// affords compares the budget with the cheapest blueprint of any seed outside depth. who names the
// controller in errors, and size describes the field that determines the size of blueprints at a
// site.
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
		return nil // the report does not state the size of a slot
	case least == math.MaxInt:
		return fmt.Errorf("%s: %w: no blueprint of its size fits any of the %d seeds: lower its %s",
			who, state.ErrArgument, seeds, size(last))
	case least > most:
		return fmt.Errorf("%s: %w: MaxParameters is %d, and the smallest possible blueprint "+
			"has %d: raise MaxParameters to at least that, or make blueprints smaller", who,
			state.ErrArgument, most, least)
	}

	return nil
}
