// Package control provides controllers, which decide what happens to the seeds of a [state.Network]
// based on its reports.
//
// [Heuristic] plants blueprints where a layer looks unhealthy and guides them through their life.
// [Forecast] grows a model by whole blocks if it predicts that this pays off by the end of the run,
// [Depth] does so when the loss flattens, and [Schedule] at fixed shares of a run. [Adapters] plants
// LoRAs in a frozen model. [Together] combines controllers for different sites, and [DryRun] prints
// the commands of a controller. [Governor] supervises them and rolls harmful blueprints back.
//
// Pass a controller to a trainer with llm.Trainer's method Grow. The optional interfaces of package state,
// such as state.Planner and state.CostLearner, describe what else a controller can do before and during a run.
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

// Heuristic is a controller that germinates the unhealthiest chunks and advances every blueprint as
// soon as its gate opens. It gives up blueprints that have failed or remain behind a shut gate for
// too long, and recycles their seeds. Create one with [NewHeuristic].
//
// The health of a chunk is judged by the largest of four ratios. If it is at least 1, the chunk is
// unhealthy:
//
//	hungry    norm of its gradient / (Hunger × median of the layer): the loss requires a change
//	dead      dead ratio / Dead
//	silent    Silence × median of the layer's variances / its variance
//	spiky     largest deviation from its mean / (Spike × its standard deviation)
//
// The problem determines the blueprint. A hungry chunk gets the first kind in Capacity that fits the
// layer's slots, a dead one a Residual, which can shift it, and a silent or spiky one an
// AttentionGate, which can scale its features.
//
// A seed at a weight gets a LoRA, and a seed in the stream a Perceptron. Such a seed has no chunk and
// can only be hungry, which is judged by the gradient of the weight, or of the preceding block, per
// parameter.
//
// Blueprints that are ready in the same epoch are grafted together and judged by their combined
// effect. No more are grafted until these are fossilized or given up. The strategy is
// DriftControlled if the activations drift by more than Drift per epoch, GradNormGated if the
// gradient is more than twice the limit for hunger, and PerformanceLinked otherwise.
//
// A Heuristic must not be used concurrently.
type Heuristic struct {
	MaxActive     int // maximum number of living, unfossilized blueprints
	MaxParameters int // maximum number of parameters of all living blueprints
	PerEpoch      int // maximum number of germinations per epoch
	Begin, End    int // germinations take place in epochs [Begin, End)
	Patience      int // number of epochs behind a shut gate after which a blueprint is given up
	RampEpochs    int // duration of a grafting in epochs, if its strategy neither accelerates nor delays it

	Hunger, Dead, Silence, Spike, Drift float64
	Capacity                            []blueprints.Kind // in order of preference

	// Rank is the rank of a LoRA at a weight, and Features the number of hidden features of a
	// Perceptron in the stream.
	Rank, Features int

	Where  Where  `json:",omitempty"`
	Random uint64 `json:",omitempty"` // for AtRandom: seed of the random choice

	parameters func(layer, seed int, kind blueprints.Kind, size int) int
}

// Parameters sets the function that returns the number of parameters of a blueprint at a weight or
// in the stream, or 0 if it does not fit. MaxParameters limits their sum. The trainer calls it.
func (h *Heuristic) Parameters(of func(layer, seed int, kind blueprints.Kind, size int) int) {
	h.parameters = of
}

// sized returns the kind and size of blueprints at a weight or in the stream.
func (h *Heuristic) sized(site blueprints.Site) (kind blueprints.Kind, size int) {
	if site == blueprints.Weight {
		return blueprints.LoRA, h.Rank
	}
	return blueprints.Perceptron, h.Features
}

// parameterCount returns the number of parameters of a seed's blueprint, or of its possible
// blueprint.
func (h *Heuristic) parameterCount(layer int, r *state.Report, s state.SeedReport) int {
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

// Where selects the seeds that a controller plants.
type Where string

// Selections of seeds. AtRandom and AllAtOnce are baselines for Unhealthiest.
const (
	Unhealthiest Where = ""       // the unhealthiest first
	AtRandom     Where = "random" // random seeds, regardless of their health
	AllAtOnce    Where = "all"    // all seeds in epoch Begin, ignoring PerEpoch
)

// NewHeuristic returns a controller with the given budgets, a PerEpoch of a quarter of maxActive
// (at least 1), Begin 1 and no End. Patience is 200, RampEpochs 50, Rank 8, Features 128, Hunger 1,
// Dead 0.5, Silence 0.1, Spike 30 and Drift 0.1. Capacity is ChunkMLP, LowRank, ConvFilter. The
// fields may be changed before the first use.
func NewHeuristic(maxActive, maxParameters int) *Heuristic {
	return &Heuristic{
		MaxActive: maxActive, MaxParameters: maxParameters, PerEpoch: max(1, maxActive/4),
		Begin: 1, End: math.MaxInt,
		Patience: 200, RampEpochs: 50,
		Rank: 8, Features: 128, Hunger: 1, Dead: 0.5, Silence: 0.1, Spike: 30, Drift: 0.1,
		Capacity: []blueprints.Kind{blueprints.ChunkMLP, blueprints.LowRank, blueprints.ConvFilter},
	}
}

// Check returns an error that names the invalid fields.
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

// fastest is the maximum speed of a grafting, in steps of its ramp per epoch.
const fastest = 4

var errNoLattice = fmt.Errorf("control: LeastEpochs: %w: the lattice is nil: state.NewLattice "+
	"makes one",
	state.ErrArgument)

// LeastEpochs returns the minimum number of epochs after which a blueprint that h plants in the
// lattice can be fossilized, if blueprints are evaluated once in `every` epochs. It returns 0 for a
// lattice in depth and for one created with [state.WithoutGates], which has no thresholds. It
// returns an error that names the stage if the Patience of h ends before the gate out of a stage
// can open.
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

	epochs = max(h.Begin, 0) + 1 // one epoch to germinate, and one to enter Training
	for stage := state.Training; stage <= state.FineTuning; stage++ {
		least := max(1, thresholds.MinEpochs[stage])
		if stage >= state.Evaluating { // these gates require an evaluation
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

// Decide returns the commands for all layers: first those for seeds with a blueprint, then the
// germinations.
func (h *Heuristic) Decide(reports []state.Report) (commands []state.Command) {
	active, parameters, trial := 0, 0, onTrial(reports)
	for layer := range reports {
		r := &reports[layer]
		if r.Site == blueprints.Depth {
			continue
		}

		for _, s := range r.Seeds {
			if s.Stage.Alive() {
				parameters += h.parameterCount(layer, r, s)
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

		more := h.parameterCount(c.layer, r, r.Seeds[c.seed])
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

// onTrial reports whether grafted blueprints are being compared with the model's twin.
func onTrial(reports []state.Report) bool {
	return slices.ContainsFunc(reports, func(r state.Report) bool {
		return r.Site != blueprints.Depth && slices.ContainsFunc(r.Seeds,
			func(s state.SeedReport) bool { return s.Stage.Grafted() })
	})
}

// next returns the command that is due for a seed with a present or past blueprint.
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
			return move(state.Stabilization, "the ramp has finished")
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
		return move(state.Cancelled, "it has not learned")
	case late && s.Stage >= state.Evaluating:
		return move(state.RolledBack, fmt.Sprintf("%d epochs have not qualified it for %v: %s",
			s.EpochsInStage, s.Stage.Next(), verdict(s)))
	case late:
		return move(state.RolledBack, fmt.Sprintf("its gate has stayed shut for %d epochs",
			s.EpochsInStage))
	}

	return c, false
}

// verdict describes the comparison of the model with and without a seed's blueprint.
func verdict(s state.SeedReport) string {
	how := "lower"
	if s.Delta < 0 {
		how = "higher"
	}
	return fmt.Sprintf("the loss is %.4g %s with it (%.2g%%), and %.0f%% of the text's batches "+
		"agree", math.Abs(s.Delta), how, 100*math.Abs(s.Improvement), 100*s.Stability)
}

// freeSlots returns the unused slots of each layer, in order.
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

// ailment is a kind of health problem.
type ailment uint8

const (
	hungry ailment = iota
	dead
	silent
	spiky
)

// problem is a health problem of a chunk with its severity; 1 is the limit of the healthy range.
type problem struct {
	ailment  ailment
	severity float64
}

func (p problem) String() string {
	if p == (problem{hungry, 1}) {
		return "chosen regardless of its health"
	}
	names := [...]string{"hungry", "dead", "silent", "spiky"}
	return fmt.Sprintf("its place is %s (%.2f times the limit)", names[p.ailment], p.severity)
}

// candidate is a dormant seed with an unhealthy chunk.
type candidate struct {
	problem
	layer, seed int
}

// candidates returns the dormant seeds with measured and unhealthy chunks, worst first.
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

// measured reports whether a dormant seed has been measured and may get a blueprint.
func (h *Heuristic) measured(layer int, r *state.Report, s state.SeedReport) bool {
	if r.Site == blueprints.Chunk {
		return s.Health != (state.Health{})
	}
	return s.Gradient.Norm > 0 && (h.parameters == nil || h.parameterCount(layer, r, s) > 0)
}

// draw returns a random number specific to a candidate.
func (h *Heuristic) draw(c candidate) uint64 { return drawn(h.Random, c.layer, c.seed) }

// drawn returns a random number specific to a seed.
func drawn(random uint64, layer, seed int) uint64 {
	return rand.NewPCG(random, uint64(layer)<<32|uint64(uint32(seed))).Uint64()
}

// diagnose returns the worst problem of a chunk, given the medians of its layer.
func (h *Heuristic) diagnose(s state.SeedReport, norm, variance float64) (worst problem) {
	deviation := math.Max(s.Health.Max-s.Health.Mean, s.Health.Mean-s.Health.Min)
	for _, p := range []problem{
		{hungry, s.Gradient.Norm / (h.Hunger * norm)},
		{dead, s.Health.DeadRatio / h.Dead},
		{silent, h.Silence * variance / s.Health.Variance},
		{spiky, deviation / (h.Spike * math.Sqrt(s.Health.Variance))},
	} {
		if p.severity > worst.severity && !math.IsInf(p.severity, 0) { // excludes 0/0 and 1/0
			worst = p
		}
	}

	return worst
}

// remedy returns the kind of blueprint for an unhealthy chunk, and its grafting strategy.
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

// median returns the median of the positive values of a figure, or 0 if there are none.
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
