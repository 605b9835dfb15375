package control

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
)

// Adapters is a controller for frozen models (llm.TrainConfig.Frozen) with lattices created with
// state.WithoutGates. Before the first step it plants LoRA blueprints at weights, within a budget of
// parameters, and moves them to FineTuning at once, so that they are fully blended in while they
// learn. This does not disturb the model, because a new LoRA adds 0. Adapters makes no further
// decisions, so the blueprints stay until the trainer fossilizes them, which merges them into the
// weights.
//
// With Unhealthiest, gradients determine the rank of each weight's LoRA. Each singular value σ of a
// weight's gradient corresponds to a direction that one rank could follow. Directions are chosen in
// decreasing order of σ²/(in+out), the initial decrease of the loss per parameter, until the budget
// is spent. AllAtOnce is conventional LoRA with the same Rank at every weight, and AtRandom uses that
// Rank at random weights.
//
// An Adapters must not be used concurrently. Create one with [NewAdapters].
type Adapters struct {
	MaxParameters int // total budget for all LoRAs
	Rank          int // rank of each LoRA; with Unhealthiest, the maximum

	Where  Where  `json:",omitempty"`
	Random uint64 `json:",omitempty"` // for AtRandom: seed of the random choice

	parameters func(layer, seed int, kind blueprints.Kind, size int) int
	heard      func(layer, seed int) []float64
}

// NewAdapters returns a controller with the given budget of parameters and a Rank of 32. Its fields
// may be changed before its first use.
func NewAdapters(maxParameters int) *Adapters {
	return &Adapters{MaxParameters: maxParameters, Rank: 32}
}

// Check returns an error that names the first invalid field.
func (a *Adapters) Check() error {
	switch {
	case a.MaxParameters < 1:
		return fmt.Errorf("control.Adapters: %w: MaxParameters is %d, want at least 1",
			state.ErrArgument, a.MaxParameters)
	case a.Rank < 1 || a.Rank > math.MaxUint16:
		return fmt.Errorf("control.Adapters: %w: Rank is %d, want 1 to %d", state.ErrArgument,
			a.Rank, math.MaxUint16)
	case !slices.Contains([]Where{Unhealthiest, AtRandom, AllAtOnce}, a.Where):
		return fmt.Errorf("control.Adapters: %w: Where is %.40q, want one of Unhealthiest, "+
			"AtRandom and AllAtOnce", state.ErrArgument, string(a.Where))
	}

	return nil
}

// Parameters sets the function that returns the number of parameters of a LoRA, or 0 if it does not
// fit. The trainer calls it.
func (a *Adapters) Parameters(of func(layer, seed int, kind blueprints.Kind, size int) int) {
	a.parameters = of
}

// Heard sets the function that returns the singular values of the gradient of a seed's weight,
// largest first. The trainer calls it.
func (a *Adapters) Heard(of func(layer, seed int) []float64) {
	a.heard = of
}

// place is a candidate for a LoRA.
type place struct {
	layer, seed, rank int
	cost              int     // number of parameters per rank
	last              float64 // smallest singular value among the chosen directions
}

// Decide returns the commands that plant the LoRA blueprints, or nil unless all seeds are dormant.
func (a *Adapters) Decide(reports []state.Report) (commands []state.Command) {
	if a.parameters == nil {
		return nil // no trainer has called Parameters
	}

	var places []*place
	for layer, r := range reports {
		for _, s := range r.Seeds {
			if s.Stage != state.Dormant {
				return nil
			}
			if n := a.parameters(layer, s.Seed, blueprints.LoRA, 1); r.Site == blueprints.Weight && n > 0 {
				places = append(places, &place{layer: layer, seed: s.Seed, cost: n})
			}
		}
	}

	if a.Where == Unhealthiest {
		a.followGradients(places)
	} else {
		a.spread(places)
	}

	stages := []state.Stage{state.Training, state.Grafting, state.Stabilization, state.Evaluating,
		state.FineTuning}
	for _, p := range places {
		if p.rank == 0 {
			continue
		}
		c := state.Command{Action: state.Germinate, Layer: p.layer, Seed: p.seed, Why: a.why(p),
			Request: state.GerminationRequest{Kind: blueprints.LoRA, Size: p.rank}}
		commands = append(commands, c)
		for _, to := range stages {
			commands = append(commands, state.Command{Action: state.Move, Layer: p.layer,
				Seed: p.seed, To: to})
		}
	}

	return commands
}

// why returns a human-readable reason for planting at a place.
func (a *Adapters) why(p *place) string {
	switch a.Where {
	case AtRandom:
		return "chosen at random"
	case AllAtOnce:
		return "every place gets one"
	}

	return fmt.Sprintf("the smallest of its %d chosen singular values is %.3g", p.rank, p.last)
}

// followGradients distributes ranks over places, one direction at a time.
func (a *Adapters) followGradients(places []*place) {
	type direction struct {
		*place
		sigma, gain float64
	}
	var all []direction
	for _, p := range places {
		var values []float64
		if a.heard != nil {
			values = a.heard(p.layer, p.seed)
		}
		for _, s := range values[:min(len(values), a.Rank)] {
			all = append(all, direction{p, s, s * s / float64(p.cost)})
		}
	}

	slices.SortStableFunc(all, func(a, b direction) int { return cmp.Compare(b.gain, a.gain) })
	left := a.MaxParameters
	for _, d := range all {
		if d.cost > left || a.parameters(d.layer, d.seed, blueprints.LoRA, d.rank+1) == 0 {
			continue
		}
		d.rank, d.last, left = d.rank+1, d.sigma, left-d.cost
	}
}

// spread visits the places in order or at random, and gives the full rank to each one that still
// fits the budget.
func (a *Adapters) spread(places []*place) {
	order := slices.Clone(places)
	if a.Where == AtRandom {
		slices.SortStableFunc(order, func(x, y *place) int {
			return cmp.Compare(drawn(a.Random, x.layer, x.seed), drawn(a.Random, y.layer, y.seed))
		})
	}

	left := a.MaxParameters
	for _, p := range order {
		if n := a.parameters(p.layer, p.seed, blueprints.LoRA, a.Rank); n > 0 && n <= left {
			p.rank, left = a.Rank, left-n
		}
	}
}
