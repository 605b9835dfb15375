package state

import (
	"fmt"
	"math"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state/graft"
	"github.com/kasmina-go/kasmina/state/lifecycle"
)

// GerminationRequest says what a dormant seed shall grow.
type GerminationRequest struct {
	// row of the layer's weights and scales, from 1; seeds may share one; 0 elsewhere than on a
	// chunk
	Slot int
	Kind blueprints.Kind // which blueprint
	Size int             // of a blueprint elsewhere than on a chunk, as its kind says; 0 on one
	// how α will rise; nil for a linear FixedRamp to 1 over 50 epochs; in depth it is not used
	Strategy graft.Strategy
}

// defaultStrategy is that of a germination request which names none.
var defaultStrategy = graft.FixedRamp{Ramp: graft.Linear, Epochs: 50, Target: 1}

// RequestGermination gives a dormant seed a blueprint and makes it Germinated. It returns an error
// that names the seed when the seed is not dormant, or the slot, the kind or the strategy is not
// valid. Then nothing has changed. The parameters of the slot stay as they are. Those that are all
// 0 become the kind's identity start when the layer next runs. blueprints.Identity makes any others
// so, and a [Network] that is given its [Slots] does all of this.
func (l *Lattice) RequestGermination(seed int, r GerminationRequest) error {
	l.mu.Lock()
	defer l.unlockAndTell()
	return l.germinate(seed, r)
}

func (l *Lattice) germinate(seed int, r GerminationRequest) error {
	const method = "RequestGermination"
	if err := l.checkCommand(method, seed); err != nil {
		return err
	}
	if err := l.checkTransition(method, seed, Germinated); err != nil {
		return err
	}
	if what, err := l.checkBlueprint(r); err != nil {
		return fmt.Errorf("state.%s: %w: seed %d: %s%w", method, ErrArgument, seed, what, err)
	}
	if r.Strategy == nil {
		r.Strategy = defaultStrategy
	}
	strategy, err := l.intern(r.Strategy)
	if err != nil {
		return fmt.Errorf("state.%s: %w: seed %d: Strategy: %w", method, ErrArgument, seed, err)
	}
	s := l.seeds
	s.slot[seed], s.kind[seed], s.strategy[seed] = uint16(r.Slot), uint8(r.Kind), strategy
	if l.config.Site != blueprints.Chunk {
		s.slot[seed] = uint16(r.Size)
	}
	l.enter(seed, Germinated)
	return nil
}

// checkBlueprint returns an error unless a request fits the lattice's site, slots and their width,
// and the field that it is about.
func (l *Lattice) checkBlueprint(r GerminationRequest) (field string, err error) {
	if l.config.Site != blueprints.Chunk {
		return l.checkGrowth(r)
	}
	slots := math.MaxUint16 + 1
	if l.config.Slots > 0 {
		slots = l.config.Slots
	}
	if r.Slot < 1 || r.Slot >= slots {
		return "Slot ", fmt.Errorf("is %d, want 1 to %d (slot 0 means none)", r.Slot, slots-1)
	}
	if r.Size != 0 {
		return "Size ",
			fmt.Errorf("is %d, want 0: the width of the slots says how large a blueprint is",
				r.Size)
	}
	width := math.MaxInt32
	if l.config.Width > 0 {
		width = l.config.Width
	}
	size, err := blueprints.Size(r.Kind, l.hidden/l.n, width)
	if err == nil && l.config.Width > 0 {
		_, err = blueprints.Parts(r.Kind, l.hidden/l.n, size) // as which files will hold them
	}
	return "Kind: ", err
}

// checkGrowth is checkBlueprint elsewhere than on a chunk.
func (l *Lattice) checkGrowth(r GerminationRequest) (field string, err error) {
	b, err := blueprints.Lookup(r.Kind)
	switch {
	case err != nil:
		return "Kind: ", err
	case b.Site != l.config.Site:
		return "Kind: ", fmt.Errorf("a %v grows at site %v, and the seed at %v", r.Kind,
			b.Site, l.config.Site)
	case r.Slot != 0:
		return "Slot ", fmt.Errorf("is %d, want 0: in %v there are none", r.Slot, l.config.Site)
	case r.Size < 1 || r.Size > math.MaxUint16:
		return "Size ", fmt.Errorf("is %d, want 1 to %d", r.Size, math.MaxUint16)
	}
	return "", nil
}

// intern returns the index of s in the lattice's strategies, adding it when it is new.
func (l *Lattice) intern(s graft.Strategy) (uint8, error) {
	entry, err := graft.NewEntry(s)
	if err != nil {
		return 0, err
	}
	for i, known := range l.strategies {
		if known.Saved.Name == entry.Saved.Name &&
			string(known.Saved.Params) == string(entry.Saved.Params) {
			return uint8(i), nil
		}
	}
	if len(l.strategies) <= math.MaxUint8 {
		l.strategies = append(l.strategies, entry)
		return uint8(len(l.strategies) - 1), nil
	}
	var used [math.MaxUint8 + 1]bool
	for _, i := range l.seeds.strategy {
		used[i] = true
	}
	for i, u := range used {
		if !u {
			l.strategies[i] = entry
			return uint8(i), nil
		}
	}
	return 0, fmt.Errorf("%d different strategies are in use, which is all a lattice can hold",
		len(used))
}

// Transition moves a seed to another stage. It returns an error wrapping [ErrTransition] when the
// table of stages does not allow it, or [ErrGate] when a threshold is not met. It names the seed
// and both stages, and nothing has changed.
//
// Only [Lattice.RequestGermination] gives a seed a blueprint. [WithoutGates], a seed may become
// Germinated this way too: it has slot 0, "none", and passes through every stage with t(x) = x.
// With gates it may not.
func (l *Lattice) Transition(seed int, to Stage) error {
	l.mu.Lock()
	defer l.unlockAndTell()
	return l.transition(seed, to)
}

func (l *Lattice) transition(seed int, to Stage) error {
	if err := l.checkCommand("Transition", seed); err != nil {
		return err
	}
	if err := l.checkTransition("Transition", seed, to); err != nil {
		return err
	}
	l.enter(seed, to)
	return nil
}

func (l *Lattice) checkTransition(method string, seed int, to Stage) error {
	from := Stage(l.seeds.stage[seed])
	if !from.CanBecome(to) {
		return fmt.Errorf("state.%s: %w: seed %d cannot go from %v to %v: %s",
			method, ErrTransition,
			seed, from, to, from.Way())
	}
	if other := l.growing(seed); to == Grafting && other >= 0 {
		return fmt.Errorf("state.%s: %w: seed %d: seed %d is %v, and in %v one blueprint is "+
			"grafted at a time", method,
			ErrTransition, seed, other, Stage(l.seeds.stage[other]), l.config.Site)
	}
	if l.config.Gates {
		if method == "Transition" && from == Dormant {
			return fmt.Errorf("state.%s: %w: seed %d from %v to %v needs a blueprint: ask "+
				"RequestGermination for one",
				method, ErrGate, seed, from, to)
		}
		if s, open := l.config.Thresholds.Gate(from, to, l.evidence(seed)); !open {
			return fmt.Errorf("state.%s: %w: seed %d from %v to %v needs %v", method,
				ErrGate, seed, from, to, s)
		}
	}
	return nil
}

// growing returns another seed than the given one that is grafted and not yet fossilized, in depth,
// or −1. What the model was before a graft is kept for one.
func (l *Lattice) growing(seed int) int {
	if l.config.Site != blueprints.Depth {
		return -1
	}
	for other, stage := range l.seeds.stage {
		if other != seed && Stage(stage).Grafted() {
			return other
		}
	}
	return -1
}

// checkCommand returns an error when there is no such seed or it is corrupt.
func (l *Lattice) checkCommand(method string, seed int) error {
	if err := l.checkSeed(method, seed); err != nil {
		return err
	}
	return l.checkIntact(method, seed)
}

// enter puts a seed into a stage and starts the stage's counters.
func (l *Lattice) enter(seed int, to Stage) {
	s, nan, from := l.seeds, float32(math.NaN()), Stage(l.seeds.stage[seed])
	if n := len(s.past); n > 0 {
		for k := n - 1; k > 0; k-- {
			s.past[k][seed] = s.past[k-1][seed]
		}
		s.past[0][seed] = Transition{Epoch: int(l.epoch), From: from, To: to}.Pack()
	}
	if to.Alive() && !from.Alive() {
		l.users[s.slot[seed]]++
	} else if from.Alive() && !to.Alive() {
		l.users[s.slot[seed]]--
	}
	if !to.Grafted() {
		delete(l.kept, seed)
	}
	s.stage[seed] = uint8(to)
	s.epochsInStage[seed] = 0
	s.lastUpdate[seed] = l.epoch
	s.entryLoss[seed], s.entryPerformance[seed], s.entryTrainingError[seed] = nan, nan, nan
	s.stageErrors[seed], s.stageTrials[seed] = 0, 0
	s.finished[seed] = 0
	switch {
	case to == Germinated:
		s.alpha[seed] = 0
		s.trainingError[seed], s.basePerformance[seed] = nan, nan
		s.performance[seed], s.stability[seed] = 0, 0
		s.memory0[seed], s.memory1[seed] = 0, 0
		s.slotSum[seed], s.learning[seed], s.scored[seed] = 0, 0, 0
	case to == FineTuning:
		s.alpha[seed] = 1
	case to.Ended():
		s.alpha[seed] = 0
		s.embargoUntil[seed] = uint32(min(uint64(l.epoch)+uint64(l.config.Embargo), math.MaxUint32))
	}
	l.seal(seed, seed+1)
	l.tell(Event{Kind: StageChanged, Seed: seed, Epoch: int(l.epoch), From: from, To: to})
}

// Transitions returns a seed's last transitions, the latest first, as many as [WithTransitions]
// keeps.
func (l *Lattice) Transitions(seed int) ([]Transition, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if err := l.checkSeed("Transitions", seed); err != nil {
		return nil, err
	}
	var all []Transition
	for _, p := range l.seeds.past {
		if p[seed] != 0 { // which would be from Dormant to Dormant
			all = append(all, lifecycle.Unpack(p[seed]))
		}
	}
	return all, nil
}

// Mute takes a seed out of forward passes, or puts it back: while it is muted they see it as
// Dormant, whatever its stage. It is for comparing what the model does with the seed and without
// it, is not saved, and no reason for an event.
func (l *Lattice) Mute(seed int, muted bool) error { return l.pose("Mute", seed, Dormant, muted) }

// Probe has forward passes see a seed that trains as if it were FineTuning, y = t(x), or ends that.
// It is for measuring what the blueprint would do to the model, is not saved, and no reason for an
// event. A seed of any other stage is an error.
func (l *Lattice) Probe(seed int, on bool) error { return l.pose("Probe", seed, FineTuning, on) }

// pose has forward passes see a seed in another stage than it is in, or ends that.
func (l *Lattice) pose(method string, seed int, as Stage, on bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.checkSeed(method, seed); err != nil {
		return err
	}
	if stage := Stage(l.seeds.stage[seed]); on && as == FineTuning && stage != Training {
		return fmt.Errorf("state.%s: %w: seed %d is %v, want Training", method,
			ErrArgument, seed, stage)
	}
	if l.posed == nil {
		l.posed = map[int]Stage{}
	}
	if delete(l.posed, seed); on {
		l.posed[seed] = as
	}
	return nil
}

// Recycle returns a seed whose blueprint's life is over to Dormant. It returns an error wrapping
// [ErrTransition] when it is not over, or [ErrEmbargo] when it ended too few epochs ago.
func (l *Lattice) Recycle(seed int) error {
	l.mu.Lock()
	defer l.unlockAndTell()
	return l.recycle(seed)
}

func (l *Lattice) recycle(seed int) error {
	if err := l.checkCommand("Recycle", seed); err != nil {
		return err
	}
	s := l.seeds
	if from := Stage(s.stage[seed]); !from.Ended() {
		return fmt.Errorf("state.Recycle: %w: seed %d is %v, want Culled, Cancelled or RolledBack",
			ErrTransition, seed, from)
	}
	if until := s.embargoUntil[seed]; l.epoch < until {
		return fmt.Errorf("state.Recycle: %w: seed %d is %v until epoch %d, and this is epoch %d",
			ErrEmbargo, seed,
			Stage(s.stage[seed]), until, l.epoch)
	}
	s.slot[seed], s.kind[seed], s.strategy[seed] = 0, 0, 0
	l.enter(seed, Dormant)
	return nil
}

// SetAlpha sets a seed's own α, for grafting by hand. Stages Grafting, Stabilization and Evaluating
// blend with it, and in Grafting the seed's strategy, unless it has finished, goes on from there.
// Set in Germinated or Training, it is where grafting will begin. The other stages have an α of
// their own, 0 or 1, and there it changes nothing but [SeedReport.LastUpdate]. It returns an error
// when alpha is not in [0, 1].
func (l *Lattice) SetAlpha(seed int, alpha float64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.setAlpha(seed, alpha)
}

func (l *Lattice) setAlpha(seed int, alpha float64) error {
	if err := l.checkCommand("SetAlpha", seed); err != nil {
		return err
	}
	if !(alpha >= 0 && alpha <= 1) {
		return fmt.Errorf("state.SetAlpha: %w: seed %d: alpha is %v, want a number from 0 to 1",
			ErrArgument, seed, alpha)
	}
	l.seeds.alpha[seed] = float32(alpha)
	l.seeds.lastUpdate[seed] = l.epoch
	l.seal(seed, seed+1)
	return nil
}

// evidence gathers what the gates judge a seed by.
func (l *Lattice) evidence(seed int) Evidence {
	s, base := l.seeds, float64(l.seeds.basePerformance[seed])
	e := Evidence{
		Epochs:        int(s.epochsInStage[seed]),
		TrainingError: float64(s.trainingError[seed]),
		ErrorFalling:  s.trainingError[seed] < s.entryTrainingError[seed],
		LossFalling:   float32(l.loss) < s.entryLoss[seed],
		Learning:      l.learns(seed),
		Resting:       liveness(s.learning[seed]) == resting,
		Delta:         float64(s.performance[seed]) - float64(s.entryPerformance[seed]),
		Improvement:   (float64(s.performance[seed]) - base) / math.Abs(base),
		Stability:     fromFloat16(s.stability[seed]),
		Errors:        int(s.stageErrors[seed]),
	}
	if l.config.Site == blueprints.Depth { // whose blueprints have learnt before they are planted
		e.TrainingError = 0
	}
	if s.stageTrials[seed] > 0 {
		e.ErrorRate = float64(s.stageErrors[seed]) / float64(s.stageTrials[seed])
	}
	return e
}

// learns reports whether a seed's blueprint learns: by its own parameters where they have been
// reported, and else by the gradient of its chunk.
func (l *Lattice) learns(seed int) bool {
	switch liveness(l.seeds.learning[seed]) {
	case changing:
		return true
	case resting:
		return false
	}
	norm := float64(l.seeds.gradNorm[seed])
	return norm > 0 && finite(norm)
}
