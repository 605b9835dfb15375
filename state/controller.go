package state

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
)

// Controller decides what becomes of the seeds of a network. After every epoch it is given the reports of all layers, and
// returns commands, each of which takes effect or is refused by itself. One that decides by the reports alone, as [Heuristic]
// does, goes on after a restart as if nothing had happened.
type Controller interface {
	Decide([]Report) []Command
}

// DryRun returns a controller that writes what c would do to w, a line for each command, and does nothing. Since nothing comes
// of what c decides, c decides the same again for as long as it sees the same.
// Without a controller there is nothing to say; a nil w says it to nobody.
func DryRun(c Controller, w io.Writer) Controller {
	if w == nil {
		w = io.Discard
	}
	return dryRun{c, w}
}

type dryRun struct {
	Controller
	w io.Writer
}

// Check is what a trainer's Grow asks before a run: it is the controller's own.
func (d dryRun) Check() error {
	if d.Controller == nil {
		return fmt.Errorf("state.DryRun: %w: the controller is nil, want one such as NewHeuristic returns", ErrArgument)
	}
	if c, ok := d.Controller.(interface{ Check() error }); ok {
		return c.Check()
	}
	return nil
}

func (d dryRun) Decide(reports []Report) []Command {
	if d.Controller == nil {
		return nil
	}
	for _, c := range d.Controller.Decide(reports) {
		fmt.Fprintf(d.w, "would do: %v\n", c)
	}
	return nil
}

// Heuristic is a controller that germinates the unhealthiest chunks, moves every blueprint on as soon as its gate opens, gives
// up those that have failed or whose gate stays shut for too long, and recycles their seeds. Make one with [NewHeuristic].
//
// A chunk is unhealthy by the largest of four ratios, if that is 1 or more:
//
//	hungry    norm of its gradient / (Hunger × median of the layer): the loss wants the chunk to change
//	dead      dead ratio / Dead
//	silent    Silence × median of the layer's variances / its variance
//	spiky     largest deviation from its mean / (Spike × its standard deviation)
//
// What it grows there follows: a hungry chunk gets the first of Capacity that the layer's slots are wide enough for, a dead one a
// Residual, which can shift it, and a silent or spiky one an AttentionGate, which can scale its features. It is grafted by
// DriftControlled where activations drift by more than Drift an epoch, by GradNormGated where the gradient is more than twice
// what makes a chunk hungry, and else by PerformanceLinked.
type Heuristic struct {
	MaxActive     int // blueprints that are alive and not fossilized, at most
	MaxParameters int // parameters in the slots of all living blueprints, at most
	PerEpoch      int // germinations in an epoch, at most
	Begin, End    int // germinations happen from epoch Begin on, and before epoch End
	Patience      int // epochs in a stage after which a blueprint is given up whose gate onward is still shut
	RampEpochs    int // epochs of a grafting that nothing speeds up or delays

	Hunger, Dead, Silence, Spike, Drift float64
	Capacity                            []blueprints.Kind // in order of preference
}

// NewHeuristic returns a controller with the given budgets, Begin 1, no End, PerEpoch a quarter of maxActive, Patience 200,
// RampEpochs 50, Hunger 1, Dead 0.5, Silence 0.1, Spike 30, Drift 0.1, and Capacity ChunkMLP, LowRank, ConvFilter. Its fields
// may be changed before it is used.
func NewHeuristic(maxActive, maxParameters int) *Heuristic {
	return &Heuristic{
		MaxActive: maxActive, MaxParameters: maxParameters, PerEpoch: max(1, maxActive/4), Begin: 1, End: math.MaxInt,
		Patience: 200, RampEpochs: 50,
		Hunger: 1, Dead: 0.5, Silence: 0.1, Spike: 30, Drift: 0.1,
		Capacity: []blueprints.Kind{blueprints.ChunkMLP, blueprints.LowRank, blueprints.ConvFilter},
	}
}

// Check returns an error that names a field which makes no sense.
func (h *Heuristic) Check() error {
	for _, f := range []struct {
		name  string
		value float64
	}{{"Hunger", h.Hunger}, {"Dead", h.Dead}, {"Silence", h.Silence}, {"Spike", h.Spike}, {"Drift", h.Drift}} {
		if !(f.value > 0) || !finite(f.value) {
			return fmt.Errorf("state.Heuristic: %w: %s is %v, want a finite number above 0", ErrArgument, f.name, f.value)
		}
	}
	var errs []error
	for _, err := range []error{inRange("MaxActive", h.MaxActive, 0, math.MaxInt), inRange("MaxParameters", h.MaxParameters, 0, math.MaxInt),
		inRange("PerEpoch", h.PerEpoch, 0, math.MaxInt), inRange("Patience", h.Patience, 1, math.MaxUint16-1),
		inRange("RampEpochs", h.RampEpochs, 1, math.MaxUint16)} {
		if err != nil {
			errs = append(errs, fmt.Errorf("state.Heuristic: %w: %w", ErrArgument, err))
		}
	}
	return errors.Join(errs...)
}

// fastest is how many steps of its ramp a grafting takes in an epoch at most.
const fastest = 4

// LeastEpochs returns the fewest epochs after which a blueprint that h plants in the lattice can be fossilized, when blueprints are
// compared every so many epochs; 0 for a lattice [WithoutGates], which has no thresholds to meet. The error names a stage that h
// gives up before its gate can open.
func (h *Heuristic) LeastEpochs(l *Lattice, every int) (epochs int, err error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if !l.config.Gates {
		return 0, nil
	}
	epochs = max(h.Begin, 0) + 1 // to be planted, and to begin to train
	for stage := Training; stage <= FineTuning; stage++ {
		least := max(1, l.config.Thresholds.MinEpochs[stage])
		if stage >= Evaluating { // whose gates open with a comparison
			least = max(least, every)
		}
		if least > h.Patience+1 {
			return 0, fmt.Errorf("state.Heuristic: %w: its Patience of %d epochs ends before the gate out of %v can open, after %d: "+
				"raise Patience, or lower MinEpochs in the lattices' Thresholds", ErrArgument, h.Patience, stage, least)
		}
		if stage == Grafting {
			least = max(least, (h.RampEpochs+fastest-1)/fastest)
		}
		epochs += least
	}
	return epochs, nil
}

// Decide returns the commands for all layers, those on seeds that have a blueprint first.
func (h *Heuristic) Decide(reports []Report) (commands []Command) {
	active, parameters := 0, 0
	for layer := range reports {
		r := &reports[layer]
		for _, s := range r.Seeds {
			if s.Stage.alive() {
				parameters += r.SlotParameters
				if s.Stage != Fossilized {
					active++
				}
			}
			if c, due := h.next(s); due {
				c.Layer, c.Seed = layer, s.Seed
				commands = append(commands, c)
			}
		}
	}
	free := freeSlots(reports)
	germinated := 0
	for _, c := range h.candidates(reports) {
		r := &reports[c.layer]
		if active >= h.MaxActive || germinated == h.PerEpoch {
			break
		}
		if len(free[c.layer]) == 0 || parameters+r.SlotParameters > h.MaxParameters {
			continue
		}
		kind, strategy := h.remedy(r, c)
		commands = append(commands, Command{Action: Germinate, Layer: c.layer, Seed: c.seed, Why: c.problem.String(),
			Request: GerminationRequest{Slot: free[c.layer][0], Kind: kind, Strategy: strategy}})
		active, germinated, parameters = active+1, germinated+1, parameters+r.SlotParameters
		free[c.layer] = free[c.layer][1:]
	}
	return commands
}

// next returns what is due for a seed that has a blueprint, or had one.
func (h *Heuristic) next(s SeedReport) (c Command, due bool) {
	move := func(to Stage, why string) (Command, bool) { return Command{Action: Move, To: to, Why: why}, true }
	late := s.EpochsInStage > h.Patience
	switch s.Stage {
	case Dormant, Fossilized:
		return c, false
	case Germinated:
		return move(Training, "")
	case Culled, Cancelled, RolledBack:
		return Command{Action: Recycle}, s.CanRecycle
	case Grafting:
		if s.CanAdvance && s.RampFinished {
			return move(Stabilization, "the ramp has ended")
		}
	default:
		if s.CanAdvance {
			return move(s.Stage.Next(), "")
		}
	}
	switch {
	case s.Stage == Evaluating && s.CanCull:
		return move(Culled, fmt.Sprintf("the model is better without it (performance delta %.4g, stability %.2f)", s.Delta, s.Stability))
	case late && s.Stage == Training:
		return move(Cancelled, "it has not learnt")
	case late:
		return move(RolledBack, fmt.Sprintf("%d epochs were not enough (performance delta %.4g, improvement %.4g, stability %.2f)",
			s.EpochsInStage, s.Delta, s.Improvement, s.Stability))
	}
	return c, false
}

// freeSlots returns the slots of each layer that no living blueprint uses, in order.
func freeSlots(reports []Report) [][]int {
	free := make([][]int, len(reports))
	for layer, r := range reports {
		slots := r.Slots
		if slots == 0 {
			slots = len(r.Seeds) + 1
		}
		used := make([]bool, slots)
		for _, s := range r.Seeds {
			if s.Stage.alive() && s.Slot < slots {
				used[s.Slot] = true
			}
		}
		for slot := 1; slot < slots; slot++ {
			if !used[slot] {
				free[layer] = append(free[layer], slot)
			}
		}
	}
	return free
}

// ailment is a way of being unhealthy.
type ailment uint8

const (
	hungry ailment = iota
	dead
	silent
	spiky
)

// problem is what is wrong with a chunk, and by how much: 1 is the limit of what is healthy.
type problem struct {
	ailment  ailment
	severity float64
}

func (p problem) String() string {
	return fmt.Sprintf("its chunk is %s, %.2f times the limit", [...]string{"hungry", "dead", "silent", "spiky"}[p.ailment], p.severity)
}

// candidate is an unhealthy chunk of a dormant seed.
type candidate struct {
	problem
	layer, seed int
}

// candidates returns the unhealthy chunks with dormant seeds of which something has been measured, the worst first.
func (h *Heuristic) candidates(reports []Report) (found []candidate) {
	for layer, r := range reports {
		if r.Epoch < h.Begin || r.Epoch >= h.End {
			continue
		}
		norm := median(r.Seeds, func(s SeedReport) float64 { return s.Gradient.Norm })
		variance := median(r.Seeds, func(s SeedReport) float64 { return s.Health.Variance })
		for _, s := range r.Seeds {
			if s.Stage != Dormant || s.Health == (Health{}) {
				continue
			}
			if p := h.diagnose(s, norm, variance); p.severity >= 1 {
				found = append(found, candidate{p, layer, s.Seed})
			}
		}
	}
	slices.SortStableFunc(found, func(a, b candidate) int { return cmp.Compare(b.severity, a.severity) })
	return found
}

// diagnose returns the worst problem of a chunk beside the medians of its layer.
func (h *Heuristic) diagnose(s SeedReport, norm, variance float64) (worst problem) {
	deviation := math.Max(s.Health.Max-s.Health.Mean, s.Health.Mean-s.Health.Min)
	for _, p := range []problem{
		{hungry, s.Gradient.Norm / (h.Hunger * norm)},
		{dead, s.Health.DeadRatio / h.Dead},
		{silent, h.Silence * variance / s.Health.Variance},
		{spiky, deviation / (h.Spike * math.Sqrt(s.Health.Variance))},
	} {
		if p.severity > worst.severity && !math.IsInf(p.severity, 0) { // not 0/0 or 1/0
			worst = p
		}
	}
	return worst
}

// remedy returns the kind of blueprint for an unhealthy chunk, and how it shall be grafted.
func (h *Heuristic) remedy(r *Report, c candidate) (blueprints.Kind, Strategy) {
	kind := blueprints.Residual
	switch c.ailment {
	case hungry:
		chunk := r.Hidden / len(r.Seeds)
		for _, k := range h.Capacity {
			if _, err := blueprints.Size(k, chunk, r.SlotParameters-1); err == nil {
				kind = k
				break
			}
		}
	case silent, spiky:
		kind = blueprints.AttentionGate
	}
	s := r.Seeds[c.seed]
	switch {
	case s.Drift > h.Drift:
		return kind, DriftControlled{Epochs: h.RampEpochs, Target: 1, Threshold: h.Drift, Pause: 2}
	case c.ailment == hungry && c.severity > 2:
		return kind, GradNormGated{Epochs: h.RampEpochs, Target: 1, Low: 0, High: math.Exp2(math.Ceil(math.Log2(2 * s.Gradient.Norm)))}
	}
	return kind, PerformanceLinked{Epochs: h.RampEpochs, Target: 1, Gain: 0.25, MaxSpeed: fastest}
}

// median returns the median of a figure of the seeds that have it; 0 and NaN do not count.
func median(seeds []SeedReport, figure func(SeedReport) float64) float64 {
	var all []float64
	for _, s := range seeds {
		if v := figure(s); v > 0 {
			all = append(all, v)
		}
	}
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[len(all)/2]
}
