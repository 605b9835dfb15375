package llm

import (
	"slices"

	"github.com/kasmina-go/kasmina/llm/internal/settings"
	"github.com/kasmina-go/kasmina/state"
)

// growth makes the model follow its seeds. It plants, grafts, merges and removes blueprints between
// two steps, and requests commands from a controller when an epoch of the lattices ends.
type growth struct {
	t       *Trainer
	options *Growth          // nil without a controller
	grew    *settings.Growth // of the resumed run, until Run has compared it; or nil
	growthState
	reshaped []Event    // Reshaped events not yet sent to callbacks
	pass     state.Pass // scratch space
}

// growthState holds the state of growth that has not been decided yet.
//
// Its values are never modified in place. An operation that may fail prepares the next growthState
// and assigns it once nothing can fail any more. A copy of the struct is a copy of the whole state.
type growthState struct {
	snapshots snapshots // models to roll back to, the oldest first
	twin      *twin     // the model without the blueprints on trial, or nil without a trial
}

// A snapshot is the model from before the blueprints of certain seeds were grafted. It is kept as
// long as one of these blueprints can be rolled back.
//
// Growth that other seeds complete in the meantime is applied to the snapshot as well, so that a
// rollback undoes the growth of these seeds and nothing else.
type snapshot struct {
	branch
	seeds []state.Address
}

type snapshots []snapshot

// find returns the index of the oldest snapshot taken for one of the seeds, or -1.
func (s snapshots) find(seeds ...state.Address) int {
	return slices.IndexFunc(s, func(b snapshot) bool {
		return slices.ContainsFunc(seeds, func(at state.Address) bool {
			return slices.Contains(b.seeds, at)
		})
	})
}

// without returns the snapshots that remain once the growth of some seeds has been decided.
func (s snapshots) without(decided ...state.Address) (left snapshots) {
	for _, b := range s {
		b.seeds = slices.DeleteFunc(slices.Clone(b.seeds), func(at state.Address) bool {
			return slices.Contains(decided, at)
		})
		if len(b.seeds) > 0 {
			left = append(left, b)
		}
	}
	return left
}

// rolledBackTo returns the remaining snapshots after the model has been rolled back to the i-th.
// The rollback also removes all later grafts, so the i-th snapshot now serves their seeds too.
func (s snapshots) rolledBackTo(i int) snapshots {
	left := slices.Clone(s[:i+1])
	left[i].seeds = slices.Clone(left[i].seeds)
	for _, later := range s[i+1:] {
		left[i].seeds = append(left[i].seeds, later.seeds...)
	}
	return left
}

// with returns the snapshots with a copy of m added.
func (s snapshots) with(m modelState, scale *LossScale, seeds ...state.Address) snapshots {
	return append(slices.Clone(s), snapshot{branch{m.Clone(), scale}, seeds})
}

// models returns the models of the snapshots and the twin. Decided growth is applied to them as well.
func (g growthState) models() (all []modelState) {
	for _, b := range g.snapshots {
		all = append(all, b.modelState)
	}
	if g.twin != nil && !g.twin.lost {
		all = append(all, g.twin.modelState)
	}
	return all
}

// withModels returns the state with its models replaced, in the order of models.
func (g growthState) withModels(all []modelState) growthState {
	g.snapshots = slices.Clone(g.snapshots)
	for i := range g.snapshots {
		g.snapshots[i].modelState = all[i]
	}
	if len(all) > len(g.snapshots) {
		w := *g.twin
		w.modelState = all[len(g.snapshots)]
		g.twin = &w
	}
	return g
}
