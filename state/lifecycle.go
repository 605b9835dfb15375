package state

import (
	"fmt"
	"math"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state/graft"
	"github.com/kasmina-go/kasmina/state/lifecycle"
)

// GerminationRequest describes the blueprint for a dormant seed to grow.
type GerminationRequest struct {
	// Slot is the row of the layer's weights and scales that holds the parameters, counted from 1.
	// Several seeds may share a slot. At sites other than chunks, it is 0.
	Slot int
	Kind blueprints.Kind // kind of blueprint
	// Size is the size of a blueprint at sites other than chunks, in the unit defined by its kind,
	// such as the rank of a LoRA. On a chunk, it is 0.
	Size int
	// Strategy decides how α rises. Nil means a linear FixedRamp to 1 over 50 epochs. It is not
	// used in depth.
	Strategy graft.Strategy
}

// defaultStrategy is the strategy of germination requests that specify none.
var defaultStrategy = graft.FixedRamp{Ramp: graft.Linear, Epochs: 50, Target: 1}

// RequestGermination gives a dormant seed a blueprint and moves it to Germinated. If the seed is
// not dormant, or the slot, size, kind or strategy is invalid, it returns an error that names the
// seed and changes nothing.
//
// RequestGermination does not change the parameters of the slot. If they are all 0 when the layer
// next runs, they are set to the kind's identity start; otherwise, initialize them with
// blueprints.Identity. A [Network] with [Slots] does this by itself.
func (l *Lattice) RequestGermination(seed int, r GerminationRequest) error {
	l.mu.Lock()
	defer l.unlockAndDeliver()
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

// checkBlueprint returns an error, and the field it concerns, unless a request fits the lattice's
// site, number of slots and slot width.
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
			fmt.Errorf("is %d, want 0: the slot width determines the size of a blueprint",
				r.Size)
	}

	width := math.MaxInt32
	if l.config.Width > 0 {
		width = l.config.Width
	}

	size, err := blueprints.Size(r.Kind, l.hidden/l.n, width)
	if err == nil && l.config.Width > 0 {
		_, err = blueprints.Parts(r.Kind, l.hidden/l.n, size) // files store the parameters as these arrays
	}
	return "Kind: ", err
}

// checkGrowth is the form of checkBlueprint for sites other than a chunk.
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

// intern returns the index of s in the lattice's table of strategies, adding s if it is new. If the
// table is full, it replaces a strategy that no seed uses.
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

	return 0, fmt.Errorf("%d different strategies are in use, and a lattice cannot hold more",
		len(used))
}

// Transition moves a seed to another stage.
//
// It returns an error that names the seed and both stages, and changes nothing, if the table of
// stages does not allow the transition ([ErrTransition]) or a threshold is not met ([ErrGate]).
//
// With gates, only [Lattice.RequestGermination] gives a seed a blueprint. A lattice created with
// [WithoutGates] also allows a transition from Dormant to Germinated, after which the seed uses slot
// 0, "none", and passes through all stages with t(x) = x.
func (l *Lattice) Transition(seed int, to Stage) error {
	l.mu.Lock()
	defer l.unlockAndDeliver()
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

// checkTransition returns an error unless the table and the gates allow the transition.
func (l *Lattice) checkTransition(method string, seed int, to Stage) error {
	from := Stage(l.seeds.stage[seed])
	if !from.CanBecome(to) {
		return fmt.Errorf("state.%s: %w: seed %d cannot go from %v to %v: %s",
			method, ErrTransition,
			seed, from, to, from.NextSteps())
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

// growing returns another seed in depth that is grafted but not yet fossilized, or −1. The trainer
// keeps the model from before a graft for only one seed.
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

// checkCommand returns an error if seed is out of range or corrupt.
func (l *Lattice) checkCommand(method string, seed int) error {
	if err := l.checkSeed(method, seed); err != nil {
		return err
	}
	return l.checkIntact(method, seed)
}

// enter moves a seed to a stage and resets the counters of the stage.
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
	l.notify(Event{Kind: StageChanged, Seed: seed, Epoch: int(l.epoch), From: from, To: to})
}

// Transitions returns the most recent transitions of a seed, latest first, up to the number set by
// [WithTransitions].
func (l *Lattice) Transitions(seed int) ([]Transition, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()

	if err := l.checkSeed("Transitions", seed); err != nil {
		return nil, err
	}

	var all []Transition
	for _, p := range l.seeds.past {
		if p[seed] != 0 { // 0 marks an unused entry
			all = append(all, lifecycle.Unpack(p[seed]))
		}
	}

	return all, nil
}

// Mute hides a seed from forward passes, which then treat it as Dormant regardless of its stage, or
// shows it again. Muting serves to compare the model with and without the seed. It is not saved and
// causes no event.
func (l *Lattice) Mute(seed int, muted bool) error { return l.override("Mute", seed, Dormant, muted) }

// Probe makes forward passes treat a seed in Training as if it were FineTuning, with y = t(x), or
// stops doing so. Probing serves to measure the effect that the blueprint would have. It is not saved
// and causes no event. Probing a seed in any other stage is an error.
func (l *Lattice) Probe(seed int, on bool) error { return l.override("Probe", seed, FineTuning, on) }

// override makes forward passes see a seed in a stage other than its own, or stops doing so.
func (l *Lattice) override(method string, seed int, as Stage, on bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()

	if err := l.checkSeed(method, seed); err != nil {
		return err
	}
	if stage := Stage(l.seeds.stage[seed]); on && as == FineTuning && stage != Training {
		return fmt.Errorf("state.%s: %w: seed %d is %v, want Training", method,
			ErrArgument, seed, stage)
	}

	if l.overrides == nil {
		l.overrides = map[int]Stage{}
	}

	if delete(l.overrides, seed); on {
		l.overrides[seed] = as
	}
	return nil
}

// Recycle makes a seed dormant again after its blueprint's life has ended. It returns an error
// wrapping [ErrTransition] if it has not ended, or [ErrEmbargo] if it ended too recently.
func (l *Lattice) Recycle(seed int) error {
	l.mu.Lock()
	defer l.unlockAndDeliver()
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

// SetAlpha sets a seed's own α, for grafting by hand. It returns an error unless alpha is in [0,
// 1].
//
// Stages Grafting, Stabilization and Evaluating blend with this α, and in Grafting the seed's
// strategy continues from it unless it has finished. An α set in Germinated or Training is the
// start of the grafting. The other stages have a fixed α of 0 or 1; there, SetAlpha only changes
// [SeedReport.LastUpdate].
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

// evidence collects the figures by which a seed's gates judge.
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

	if l.config.Site == blueprints.Depth { // blocks are copies of trained ones, so they have no training error
		e.TrainingError = 0
	}

	if s.stageTrials[seed] > 0 {
		e.ErrorRate = float64(s.stageErrors[seed]) / float64(s.stageTrials[seed])
	}
	return e
}

// learns reports whether a seed's blueprint learns, judging by its parameters if they were reported,
// and otherwise by the gradient of its chunk.
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
