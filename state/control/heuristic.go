// Package control has controllers, which decide by the reports of a network what becomes of its
// seeds.
package control

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/graft"
)

// Heuristic is a controller that germinates the unhealthiest chunks and moves every blueprint on as
// soon as its gate opens. It gives up those that have failed or whose gate stays shut for too long,
// and recycles their seeds. Make one with [NewHeuristic].
//
// At a weight it plants a LoRA, and in the stream a Perceptron. It does so where the gradients of
// the weight, or of the block in front, are largest for each parameter. Such a seed is hungry in
// the way of chunks, and that is all it can be.
//
// A chunk is unhealthy by the largest of four ratios, if that is 1 or more:
//
//	hungry    norm of its gradient / (Hunger × median of the layer): the loss wants it to change
//	dead      dead ratio / Dead
//	silent    Silence × median of the layer's variances / its variance
//	spiky     largest deviation from its mean / (Spike × its standard deviation)
//
// What it grows there follows. A hungry chunk gets the first of Capacity that the layer's slots are
// wide enough for. A dead one gets a Residual, which can shift it. A silent or spiky one gets an
// AttentionGate, which can scale its features. Blueprints that are ready in one epoch are grafted
// together, and no others until these are fossilized or given up. They are judged by what they
// cause together. Each is grafted by DriftControlled where activations drift by more than Drift an
// epoch. Where the gradient is more than twice what makes a chunk hungry it is grafted by
// GradNormGated, and else by PerformanceLinked.
//
// A Heuristic is for one goroutine at a time.
type Heuristic struct {
	MaxActive     int // blueprints that are alive and not fossilized, at most
	MaxParameters int // parameters in the slots of all living blueprints, at most
	PerEpoch      int // germinations in an epoch, at most
	Begin, End    int // germinations happen from epoch Begin on, and before epoch End
	Patience      int // epochs in a stage, after which a blueprint is given up whose gate is shut
	RampEpochs    int // epochs of a grafting that nothing speeds up or delays

	Hunger, Dead, Silence, Spike, Drift float64
	Capacity                            []blueprints.Kind // in order of preference

	// Rank is that of a LoRA at a weight, and Features are the hidden ones of a Perceptron in the
	// stream.
	Rank, Features int

	Where  Where  `json:",omitempty"`
	Random uint64 `json:",omitempty"` // for AtRandom: another number, other places

	parameters func(layer, seed int, kind blueprints.Kind, size int) int
}

// Parameters tells the controller how many parameters a blueprint would have at a weight or in the
// stream, for MaxParameters. 0 is for one that cannot be. A trainer calls it.
func (h *Heuristic) Parameters(of func(layer, seed int, kind blueprints.Kind, size int) int) {
	h.parameters = of
}

// sized returns what a seed grows elsewhere than on a chunk and in depth.
func (h *Heuristic) sized(site blueprints.Site) (kind blueprints.Kind, size int) {
	if site == blueprints.Weight {
		return blueprints.LoRA, h.Rank
	}
	return blueprints.Perceptron, h.Features
}

// takes is how many parameters a blueprint of a layer's seed has, or would have.
func (h *Heuristic) takes(layer int, r *state.Report, s state.SeedReport) int {
	switch {
	case r.Site == blueprints.Chunk:
		return r.SlotParameters
	case h.parameters == nil:
		return 0
	case s.Stage == state.Dormant:
		kind, size := h.sized(r.Site)
		return h.parameters(layer, s.Seed, kind, size)
	}
	return h.parameters(layer, s.Seed, s.Kind, s.Size)
}

// Where says in which of its seeds a Heuristic plants.
type Where string

// The places. AtRandom and AllAtOnce are what Unhealthiest is to be measured against.
const (
	Unhealthiest Where = ""       // the unhealthiest chunks first
	AtRandom     Where = "random" // any, healthy or not, as if they were hungry
	AllAtOnce    Where = "all"    // all of them at epoch Begin, whatever PerEpoch says
)

// NewHeuristic returns a controller with the given budgets, Begin 1, no End and PerEpoch a quarter
// of maxActive. Patience is 200, RampEpochs 50, Rank 8, Features 128, Hunger 1, Dead 0.5, Silence
// 0.1, Spike 30 and Drift 0.1. Capacity is ChunkMLP, LowRank, ConvFilter. Its fields may be changed
// before it is used.
func NewHeuristic(maxActive, maxParameters int) *Heuristic {
	return &Heuristic{
		MaxActive: maxActive, MaxParameters: maxParameters, PerEpoch: max(1, maxActive/4),
		Begin: 1, End: math.MaxInt,
		Patience: 200, RampEpochs: 50,
		Rank: 8, Features: 128, Hunger: 1, Dead: 0.5, Silence: 0.1, Spike: 30, Drift: 0.1,
		Capacity: []blueprints.Kind{blueprints.ChunkMLP, blueprints.LowRank, blueprints.ConvFilter},
	}
}

// Check returns an error that names a field which makes no sense.
func (h *Heuristic) Check() error {
	for _, f := range []struct {
		name  string
		value float64
	}{{"Hunger", h.Hunger}, {"Dead", h.Dead}, {"Silence", h.Silence}, {"Spike", h.Spike},
		{"Drift", h.Drift}} {
		if !(f.value > 0) || math.IsInf(f.value, 1) {
			return fmt.Errorf("control.Heuristic: %w: %s is %v, want a finite number above 0",
				state.ErrArgument, f.name, f.value)
		}
	}
	var errs []error
	if !slices.Contains([]Where{Unhealthiest, AtRandom, AllAtOnce}, h.Where) {
		errs = append(errs, fmt.Errorf("control.Heuristic: %w: Where is %.40q, want one of "+
			"Unhealthiest, AtRandom and AllAtOnce", state.ErrArgument, string(h.Where)))
	}
	for _, f := range []struct {
		name               string
		value, least, most int
	}{
		{"MaxActive", h.MaxActive, 0, math.MaxInt},
		{"MaxParameters", h.MaxParameters, 0, math.MaxInt},
		{"PerEpoch", h.PerEpoch, 0, math.MaxInt}, {"Patience", h.Patience, 1, math.MaxUint16 - 1},
		{"RampEpochs", h.RampEpochs, 1, math.MaxUint16},
		{"Rank", h.Rank, 1, math.MaxUint16}, {"Features", h.Features, 1, math.MaxUint16},
	} {
		if f.value < f.least || f.value > f.most {
			want := fmt.Sprintf("%d to %d", f.least, f.most)
			if f.most == math.MaxInt {
				want = fmt.Sprintf("at least %d", f.least)
			}
			errs = append(errs, fmt.Errorf("control.Heuristic: %w: %s is %d, want %s",
				state.ErrArgument, f.name, f.value, want))
		}
	}
	return errors.Join(errs...)
}

// fastest is how many steps of its ramp a grafting takes in an epoch at most.
const fastest = 4

var errNoLattice = fmt.Errorf("control: LeastEpochs: %w: the lattice is nil: state.NewLattice "+
	"makes one",
	state.ErrArgument)

// LeastEpochs returns the fewest epochs after which a blueprint that h plants in the lattice can be
// fossilized. Blueprints are compared every so many epochs. It is 0 for a lattice
// [state.WithoutGates], which has no thresholds to meet. The error names a stage that h gives up
// before its gate can open.
func (h *Heuristic) LeastEpochs(l *state.Lattice, every int) (epochs int, err error) {
	if err := h.Check(); err != nil {
		return 0, err
	}
	if l == nil {
		return 0, errNoLattice
	}
	thresholds, gated := l.Thresholds()
	if !gated || l.Site() == blueprints.Depth {
		return 0, nil
	}
	epochs = max(h.Begin, 0) + 1 // to be planted, and to begin to train
	for stage := state.Training; stage <= state.FineTuning; stage++ {
		least := max(1, thresholds.MinEpochs[stage])
		if stage >= state.Evaluating { // whose gates open with a comparison
			least = max(least, every)
		}
		if least > h.Patience+1 {
			return 0,
				fmt.Errorf("control.Heuristic: %w: its Patience of %d epochs ends before the "+
					"gate out of %v can open, after %d: raise Patience, or lower MinEpochs in "+
					"the lattices' Thresholds", state.ErrArgument, h.Patience, stage, least)
		}
		if stage == state.Grafting {
			least = max(least, (h.RampEpochs+fastest-1)/fastest)
		}
		epochs += least
	}
	return epochs, nil
}

// Decide returns the commands for all layers, those on seeds that have a blueprint first.
func (h *Heuristic) Decide(reports []state.Report) (commands []state.Command) {
	active, parameters, trial := 0, 0, onTrial(reports)
	for layer := range reports {
		r := &reports[layer]
		if r.Site == blueprints.Depth {
			continue
		}
		for _, s := range r.Seeds {
			if s.Stage.Alive() {
				parameters += h.takes(layer, r, s)
				if s.Stage != state.Fossilized {
					active++
				}
			}
			if c, due := h.next(s); due && !(trial && c.To == state.Grafting) {
				c.Layer, c.Seed = layer, s.Seed
				commands = append(commands, c)
			}
		}
	}
	free := freeSlots(reports)
	germinated := 0
	for _, c := range h.candidates(reports) {
		r := &reports[c.layer]
		if active >= h.MaxActive || germinated == h.PerEpoch && h.Where != AllAtOnce {
			break
		}
		more := h.takes(c.layer, r, r.Seeds[c.seed])
		if r.Site == blueprints.Chunk && len(free[c.layer]) == 0 ||
			parameters+more > h.MaxParameters {
			continue
		}
		var request state.GerminationRequest
		if request.Kind, request.Strategy = h.remedy(r, c); r.Site == blueprints.Chunk {
			request.Slot = free[c.layer][0]
			free[c.layer] = free[c.layer][1:]
		} else {
			request.Kind, request.Size = h.sized(r.Site)
		}
		commands = append(commands, state.Command{Action: state.Germinate, Layer: c.layer,
			Seed: c.seed, Why: c.problem.String(), Request: request})
		active, germinated, parameters = active+1, germinated+1, parameters+more
	}
	return commands
}

// onTrial reports whether blueprints are grafted that are judged beside the model's twin.
func onTrial(reports []state.Report) bool {
	return slices.ContainsFunc(reports, func(r state.Report) bool {
		return r.Site != blueprints.Depth && slices.ContainsFunc(r.Seeds,
			func(s state.SeedReport) bool { return s.Stage.Grafted() })
	})
}

// next returns what is due for a seed that has a blueprint, or had one.
func (h *Heuristic) next(s state.SeedReport) (c state.Command, due bool) {
	move := func(to state.Stage, why string) (state.Command, bool) {
		return state.Command{Action: state.Move, To: to, Why: why}, true
	}
	late := s.EpochsInStage > h.Patience && !(s.Stage == state.Training && s.CanAdvance)
	switch s.Stage {
	case state.Dormant, state.Fossilized:
		return c, false
	case state.Germinated:
		return move(state.Training, "")
	case state.Culled, state.Cancelled, state.RolledBack:
		return state.Command{Action: state.Recycle}, s.CanRecycle
	case state.Grafting:
		if s.CanAdvance && s.RampFinished {
			return move(state.Stabilization, "the ramp has ended")
		}
	case state.Evaluating, state.FineTuning:
		if s.CanAdvance {
			return move(s.Stage.Next(), verdict(s))
		}
	default:
		if s.CanAdvance {
			return move(s.Stage.Next(), "")
		}
	}
	switch {
	case s.Stage == state.Evaluating && s.CanCull:
		return move(state.Culled, "the model is better without it: "+verdict(s))
	case late && s.Stage == state.Training:
		return move(state.Cancelled, "it has not learnt")
	case late && s.Stage >= state.Evaluating:
		return move(state.RolledBack, fmt.Sprintf("%d epochs have not brought what %v asks for: %s",
			s.EpochsInStage, s.Stage.Next(), verdict(s)))
	case late:
		return move(state.RolledBack, fmt.Sprintf("%d epochs were not enough for it to get on",
			s.EpochsInStage))
	}
	return c, false
}

// verdict says what the comparison of the model with and without a seed came to.
func verdict(s state.SeedReport) string {
	how := "lower"
	if s.Delta < 0 {
		how = "higher"
	}
	return fmt.Sprintf("the loss is %.4g %s with it (%.2g %%), and %.0f %% of the text's batches "+
		"agree", math.Abs(s.Delta), how, 100*math.Abs(s.Improvement), 100*s.Stability)
}

// freeSlots returns the slots of each layer that no living blueprint uses, in order.
func freeSlots(reports []state.Report) [][]int {
	free := make([][]int, len(reports))
	for layer, r := range reports {
		slots := r.Slots
		if slots == 0 {
			slots = len(r.Seeds) + 1
		}
		used := make([]bool, slots)
		for _, s := range r.Seeds {
			if s.Stage.Alive() && s.Slot < slots {
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
	if p == (problem{hungry, 1}) {
		return "it is its turn"
	}
	names := [...]string{"hungry", "dead", "silent", "spiky"}
	return fmt.Sprintf("its place is %s, %.2f times the limit", names[p.ailment], p.severity)
}

// candidate is an unhealthy chunk of a dormant seed.
type candidate struct {
	problem
	layer, seed int
}

// candidates returns the unhealthy chunks with dormant seeds of which something has been measured,
// the worst first.
func (h *Heuristic) candidates(reports []state.Report) (found []candidate) {
	for layer, r := range reports {
		if r.Site == blueprints.Depth || r.Epoch < h.Begin || r.Epoch >= h.End {
			continue
		}
		norm := median(r.Seeds, func(s state.SeedReport) float64 { return s.Gradient.Norm })
		variance := median(r.Seeds, func(s state.SeedReport) float64 { return s.Health.Variance })
		for _, s := range r.Seeds {
			if s.Stage != state.Dormant || !h.measured(layer, &r, s) {
				continue
			}
			if h.Where != Unhealthiest {
				found = append(found, candidate{problem{hungry, 1}, layer, s.Seed})
			} else if p := h.diagnose(s, norm, variance); p.severity >= 1 {
				found = append(found, candidate{p, layer, s.Seed})
			}
		}
	}
	slices.SortStableFunc(found, func(a, b candidate) int {
		if h.Where == AtRandom {
			return cmp.Compare(h.draw(a), h.draw(b))
		}
		return cmp.Compare(b.severity, a.severity)
	})
	return found
}

// measured reports whether something is known of a dormant seed, and can be planted in it.
func (h *Heuristic) measured(layer int, r *state.Report, s state.SeedReport) bool {
	if r.Site == blueprints.Chunk {
		return s.Health != (state.Health{})
	}
	return s.Gradient.Norm > 0 && (h.parameters == nil || h.takes(layer, r, s) > 0)
}

// draw returns a random number that is a candidate's own.
func (h *Heuristic) draw(c candidate) uint64 { return drawn(h.Random, c.layer, c.seed) }

// drawn returns a random number that is a seed's own.
func drawn(random uint64, layer, seed int) uint64 {
	return rand.NewPCG(random, uint64(layer)<<32|uint64(uint32(seed))).Uint64()
}

// diagnose returns the worst problem of a chunk beside the medians of its layer.
func (h *Heuristic) diagnose(s state.SeedReport, norm, variance float64) (worst problem) {
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
func (h *Heuristic) remedy(r *state.Report, c candidate) (blueprints.Kind, graft.Strategy) {
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
		return kind, graft.DriftControlled{Epochs: h.RampEpochs, Target: 1,
			Threshold: h.Drift, Pause: 2}
	case c.ailment == hungry && c.severity > 2:
		high := math.Exp2(math.Ceil(math.Log2(2 * s.Gradient.Norm)))
		return kind, graft.GradNormGated{Epochs: h.RampEpochs, Target: 1, High: high}
	}
	return kind, graft.PerformanceLinked{Epochs: h.RampEpochs, Target: 1, Gain: 0.25,
		MaxSpeed: fastest}
}

// median returns the median of a figure of the seeds that have it; 0 and NaN do not count.
func median(seeds []state.SeedReport, figure func(state.SeedReport) float64) float64 {
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
