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
			if site == blueprints.Weight { // the name and the value of the field
				return fmt.Sprintf("Rank, %d", h.Rank)
			}
			return fmt.Sprintf("Features, %d", h.Features)
		})
}

// cost returns the number of parameters that a new blueprint of a seed would have, or 0 if none
// fits.
func (h *Heuristic) cost(layer int, r *state.Report, seed int) int {
	s := r.Seeds[seed]
	s.Stage = state.Dormant // of a dormant seed, parameterCount counts the blueprint that h would plant
	return h.parameterCount(layer, r, s)
}

// Affords returns an error if a could never plant a LoRA; see [Heuristic.Affords].
func (a *Adapters) Affords(reports []state.Report) error {
	if a.parameters == nil {
		return nil // Parameters has not been called, so nothing is known about the costs
	}

	rank := 1 // with Unhealthiest, the gradients may call for any rank up to a.Rank
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

// affords returns an error if the budget of maxParameters is too small for the cheapest blueprint of any
// seed outside depth, or if no blueprint fits any of these seeds.
//
// The function cost returns the parameters of a seed's blueprint, or 0 if none fits or the number is
// unknown. If it returns 0 for all seeds and the last of them is on a chunk, the numbers count as unknown,
// and affords returns nil. For errors, controller is the controller's name, and sizeField returns the name
// and value of the field that determines the size of blueprints at a site.
func affords(controller string, maxParameters int, reports []state.Report,
	cost func(layer int, r *state.Report, seed int) int, sizeField func(blueprints.Site) string) error {
	const none = math.MaxInt
	cheapest, seeds, lastSite := none, 0, blueprints.Chunk
	for layer := range reports {
		r := &reports[layer]
		if r.Site == blueprints.Depth {
			continue
		}
		for seed := range r.Seeds {
			seeds, lastSite = seeds+1, r.Site
			if n := cost(layer, r, seed); n > 0 {
				cheapest = min(cheapest, n)
			}
		}
	}

	switch {
	case seeds == 0:
		return nil
	case cheapest == none && lastSite == blueprints.Chunk:
		return nil // the costs are unknown, because the reports lack the number of parameters in a slot
	case cheapest == none:
		return fmt.Errorf("%s: %w: no blueprint of its size fits any of the %d seeds: lower its %s",
			controller, state.ErrArgument, seeds, sizeField(lastSite))
	case cheapest > maxParameters:
		return fmt.Errorf("%s: %w: MaxParameters is %d, and the smallest possible blueprint "+
			"has %d: raise MaxParameters to at least that, or make blueprints smaller", controller,
			state.ErrArgument, maxParameters, cheapest)
	}

	return nil
}
