package control

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
)

// Adapters is a controller for a frozen model (llm.Config.Frozen) whose lattices are made
// state.WithoutGates. Before the first step it plants LoRA at weights, within a budget of
// parameters. It takes them at once to FineTuning, where they learn blended in. That is no jolt, as
// a LoRA adds nothing at first. It decides nothing after that: they stay until whoever trains has
// them fossilized, which merges them.
//
// Unhealthiest weights get the ranks that their gradients ask for. Each singular value σ of a
// gradient is a direction of rank 1 that could be followed. Those of the largest σ²/(in+out), by
// which the loss falls first for each parameter, are taken until the budget is spent. AllAtOnce is
// LoRA as it is known, of one Rank everywhere. AtRandom is of that Rank in random places.
//
// An Adapters is for one goroutine at a time. Make one with [NewAdapters].
type Adapters struct {
	MaxParameters int // of all LoRA together
	Rank          int // of each; of Unhealthiest at most

	Where  Where  `json:",omitempty"`
	Random uint64 `json:",omitempty"` // for AtRandom: another number, other places

	parameters func(layer, seed int, kind blueprints.Kind, size int) int
	heard      func(layer, seed int) []float64
}

// NewAdapters returns a controller with a budget of parameters, and ranks up to 32. Its fields may
// be changed before it is used.
func NewAdapters(maxParameters int) *Adapters {
	return &Adapters{MaxParameters: maxParameters, Rank: 32}
}

// Check returns an error that names a field which makes no sense.
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

// Parameters tells the controller how many parameters a LoRA would have, 0 for one that cannot be.
// A trainer calls it.
func (a *Adapters) Parameters(of func(layer, seed int, kind blueprints.Kind, size int) int) {
	a.parameters = of
}

// Heard tells the controller the singular values of the gradient of each seed's weight, the largest
// first. A trainer calls it.
func (a *Adapters) Heard(of func(layer, seed int) []float64) {
	a.heard = of
}

// place is a seed that may get a LoRA.
type place struct {
	layer, seed, rank int
	cost              int // parameters of a rank
	last              float64
}

// Decide returns what plants, where all seeds are dormant.
func (a *Adapters) Decide(reports []state.Report) (commands []state.Command) {
	if a.parameters == nil {
		return nil // no trainer has asked
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

func (a *Adapters) why(p *place) string {
	switch a.Where {
	case AtRandom:
		return "it was drawn"
	case AllAtOnce:
		return "all get one"
	}
	return fmt.Sprintf("the least of its %d directions has a singular value of %.3g", p.rank, p.last)
}

// followGradients gives ranks to places, a direction at a time.
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

// spread gives places one rank, as far as the budget goes: in order, or at random.
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
