package state

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/curve"
	"github.com/kasmina-go/kasmina/internal/enum"
	"github.com/kasmina-go/kasmina/state/graft"
	"github.com/kasmina-go/kasmina/state/internal/columns"
	"github.com/kasmina-go/kasmina/state/telemetry"
)

// Metrics is what the training loop reports when an epoch ends.
type Metrics struct {
	Loss  float64       // the host's training loss; 0 when it was not measured
	Share float64       // of the run's budget that is spent, from 0 to 1
	Seeds []SeedMetrics // of those seeds that something was measured of
}

// SeedMetrics reports on one seed.
type SeedMetrics struct {
	Seed int
	// TrainingError is that of the seed's own objective, the lower the better. Of a seed that
	// trains it is by how much the model's loss rises when its blueprint works at full strength
	// (see [Lattice.Probe]). NaN leaves it as it was.
	TrainingError float64
	// Parameters are the blueprint's weights and scale as they are now, nil when they are not
	// reported. A [Network] that is given its [Slots] fills them in for seeds that train.
	Parameters []float64
	// Performance, Stability and Compared say nothing: the last score stays, and counts as old
	Unscored    bool
	Performance float64 // a score of the model with the seed in it, the higher the better
	Compared    bool    // whether Without was measured
	// the score of the model with the seed muted (see [Lattice.Mute]), beside which the seed is
	// judged from now on
	Without   float64
	Stability float64 // from 0 to 1: how little the seed's performance fluctuates
	Trials    int     // evaluations in this epoch ...
	Errors    int     // ... and how many of them failed
}

// StepEpoch ends an epoch. It takes in the metrics, counts the epoch, and moves the α of every seed
// that is being grafted. It returns what became possible or went wrong, ordered by seed. It makes
// no transitions itself: those are decisions. On metrics that are not valid, and on a corrupt seed
// unless the lattice is made [WithQuarantine], it returns an error and changes nothing.
func (l *Lattice) StepEpoch(m Metrics) ([]Event, error) {
	l.mu.Lock()
	defer l.unlockAndTell()
	found, err := l.canStep(m)
	if err != nil {
		return nil, err
	}
	return l.stepEpoch(m, found), nil
}

// canStep returns an error when the epoch cannot end, or the corrupt seeds that are put into
// quarantine when it does.
func (l *Lattice) canStep(m Metrics) ([]columns.Fault, error) {
	if err := l.checkMetrics(m); err != nil {
		return nil, err
	}
	found := l.faults()
	if err := faultError(l.sums, found, l.n); err != nil && !l.config.Quarantine {
		return nil, fmt.Errorf("state.StepEpoch: %w", err)
	}
	return found, nil
}

func (l *Lattice) stepEpoch(m Metrics, found []columns.Fault) []Event {
	l.tell(l.quarantined...)
	all := append(l.quarantined, l.quarantine(found)...)
	l.quarantined = nil
	const grain = 1024
	before := make([]gates, l.n)
	cpu.Parallel(l.n, grain, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			before[i] = l.openGates(i)
		}
	})
	l.epoch++
	if m.Loss != 0 {
		l.loss = m.Loss
	}
	if l.config.Site != blueprints.Chunk && m.Loss != 0 {
		l.curve = curve.Add(l.curve, Point{Epoch: int(l.epoch), Share: m.Share, Loss: m.Loss})
	}
	for _, sm := range m.Seeds {
		l.report(sm)
	}
	if l.seeds != nil {
		defer clear(l.seeds.sinceScore)
	}
	events := make([][]Event, (l.n+grain-1)/grain)
	renormalize := int(l.epoch)%max(1, l.config.Renormalize) == 0
	cpu.Parallel(l.n, grain, func(lo, hi int) {
		var e []Event
		for i := lo; i < hi; i++ {
			e = l.endEpoch(e, i, renormalize, before[i])
		}
		events[lo/grain] = e
		l.seal(lo, hi)
	})
	for _, e := range events {
		l.tell(e...)
		all = append(all, e...)
	}
	return all
}

func (l *Lattice) checkMetrics(m Metrics) error {
	if !finite(m.Loss) {
		return fmt.Errorf("state.StepEpoch: %w: Loss is %v, want a finite number", ErrArgument,
			m.Loss)
	}
	if !(m.Share >= 0 && m.Share <= 1) {
		return fmt.Errorf("state.StepEpoch: %w: Share is %v, want a number from 0 to 1",
			ErrArgument, m.Share)
	}
	seen := make(map[int]bool, len(m.Seeds))
	for _, s := range m.Seeds {
		if err := l.checkSeed("StepEpoch", s.Seed); err != nil {
			return err
		}
		if seen[s.Seed] {
			return fmt.Errorf("state.StepEpoch: %w: there are two metrics of seed %d", ErrArgument,
				s.Seed)
		}
		seen[s.Seed] = true
		switch {
		case s.Errors > s.Trials:
			return fmt.Errorf("state.StepEpoch: %w: seed %d: %d errors in %d trials", ErrArgument,
				s.Seed, s.Errors, s.Trials)
		case math.IsInf(s.TrainingError, 0):
			return fmt.Errorf("state.StepEpoch: %w: seed %d: TrainingError is %v", ErrArgument,
				s.Seed, s.TrainingError)
		case !(math.Abs(s.Performance) < 65520):
			return fmt.Errorf("state.StepEpoch: %w: seed %d: Performance is %v, want a number "+
				"within ±65504", ErrArgument, s.Seed, s.Performance)
		case s.Compared && !(math.Abs(s.Without) < 65520):
			return fmt.Errorf("state.StepEpoch: %w: seed %d: Without is %v, want a number within "+
				"±65504", ErrArgument, s.Seed, s.Without)
		case !(s.Stability >= 0 && s.Stability <= 1):
			return fmt.Errorf("state.StepEpoch: %w: seed %d: Stability is %v, want a number from "+
				"0 to 1", ErrArgument, s.Seed, s.Stability)
		case s.Trials < 0 || s.Errors < 0 || s.Trials > math.MaxUint32 || s.Errors > math.MaxUint32:
			return fmt.Errorf("state.StepEpoch: %w: seed %d: Trials is %d and Errors is %d, want "+
				"numbers from 0 to %d",
				ErrArgument, s.Seed, s.Trials, s.Errors, uint32(math.MaxUint32))
		}
	}
	return nil
}

// report takes in the metrics of one seed.
func (l *Lattice) report(m SeedMetrics) {
	s, i := l.seeds, m.Seed
	if !math.IsNaN(m.TrainingError) {
		s.trainingError[i] = single(m.TrainingError)
		setOnce(&s.entryTrainingError[i], s.trainingError[i])
	}
	if m.Parameters != nil {
		l.reportParameters(i, m.Parameters)
	}
	s.stageTrials[i] = addSaturating(s.stageTrials[i], m.Trials)
	s.stageErrors[i] = addSaturating(s.stageErrors[i], m.Errors)
	if m.Unscored {
		return
	}
	s.performance[i], s.stability[i] = float32(m.Performance), toFloat16(m.Stability)
	s.sinceScore[i], s.scored[i] = l.epoch-s.scored[i], l.epoch
	if m.Compared {
		s.entryPerformance[i], s.basePerformance[i] = float32(m.Without), float32(m.Without)
	}
	setOnce(&s.entryPerformance[i], s.performance[i])
	setOnce(&s.basePerformance[i], s.performance[i])
}

// liveness is what is known of a blueprint's own parameters.
type liveness uint8

const (
	unreported liveness = iota
	resting             // not finite, all 0, or the same as in the report before
	changing
)

// reportParameters compares the parameters of a seed's blueprint with those of the last report.
func (l *Lattice) reportParameters(i int, p []float64) {
	s, live, zero := l.seeds, changing, true
	h := crc32.NewIEEE()
	var word [8]byte
	for _, v := range p {
		if !finite(v) {
			live = resting
		}
		zero = zero && v == 0
		binary.LittleEndian.PutUint64(word[:], math.Float64bits(v))
		h.Write(word[:])
	}
	sum := max(h.Sum32(), 1)
	if zero || s.slotSum[i] == sum || s.slotSum[i] == 0 { // of a first report nothing is known yet
		live = resting
	}
	s.slotSum[i], s.learning[i] = sum, uint8(live)
}

// setOnce sets *v unless it has been set since it was NaN.
func setOnce(v *float32, to float32) {
	if *v != *v {
		*v = to
	}
}

// single rounds a number to single precision. A number beyond the range of float32 becomes the largest
// one in it, since a lattice with an infinite figure could not be loaded again.
func single(v float64) float32 {
	return float32(max(-math.MaxFloat32, min(v, math.MaxFloat32)))
}

func addSaturating(n uint32, more int) uint32 {
	return uint32(min(uint64(n)+uint64(more), math.MaxUint32))
}

// endEpoch ends the epoch for one seed and appends its events to e. Every seed's end is independent
// of the others'.
func (l *Lattice) endEpoch(e []Event, i int, renormalize bool, before gates) []Event {
	s, stage := l.seeds, Stage(l.seeds.stage[i])
	tell := func(k EventKind, to Stage, value float64) {
		e = append(e, Event{Kind: k, Seed: i, Epoch: int(l.epoch), From: stage,
			To: to, Value: value})
	}
	if s.epochsInStage[i] < math.MaxUint16 {
		s.epochsInStage[i]++
	}
	if l.loss != 0 {
		setOnce(&s.entryLoss[i], single(l.loss))
	}
	l.endStatistics(i, renormalize)
	if stage == Grafting {
		switch finished, failure := l.advance(i); {
		case failure != "":
			tell(StrategyFailed, stage, 0)
			e[len(e)-1].Reason = failure
		case finished:
			tell(RampFinished, stage, float64(s.alpha[i]))
		}
	}
	if until := s.embargoUntil[i]; stage.Ended() && (until == l.epoch || until < l.epoch &&
		s.epochsInStage[i] == 1) {
		tell(EmbargoOver, stage, 0)
	}
	if seen := addSaturating(s.nonFiniteX[i], int(s.nonFiniteG[i])); seen != s.nonFiniteTold[i] {
		tell(NonFinite, stage, float64(seen-s.nonFiniteTold[i]))
		s.nonFiniteTold[i] = seen
	}
	if l.config.Gates {
		after := l.openGates(i)
		if after.on && !before.on {
			tell(GateOpened, stage.Next(), 0)
		}
		if after.cull && !before.cull {
			tell(GateOpened, Culled, 0)
		}
	}
	return e
}

// endStatistics measures the drift of a seed's running moments over the epoch.
func (l *Lattice) endStatistics(i int, renormalize bool) {
	s := l.seeds
	if s.runCount[i] == 0 {
		return
	}
	if s.epochVariance[i] != 0 || s.epochMean[i] != 0 {
		s.drift[i] = float32(telemetry.Drift(s.epochMean[i], s.epochVariance[i],
			s.runMean[i], s.runVariance[i]))
	}
	s.epochMean[i], s.epochVariance[i] = s.runMean[i], s.runVariance[i]
	if renormalize {
		s.runCount[i] = min(s.runCount[i], max(s.stepCount[i], 1))
		s.normCount[i] = min(s.normCount[i], max(s.stepCount[i]/float64(l.hidden/l.n), 1))
	}
}

// advance moves the α of a seed that is being grafted. It reports whether the strategy has ended
// with this epoch, or why it had no answer.
func (l *Lattice) advance(i int) (finished bool, failure string) {
	s := l.seeds
	if s.finished[i] != 0 {
		return false, ""
	}
	alpha, memory, done, failure := ask(l.strategies[s.strategy[i]].Strategy, graft.Progress{
		Seed:        i,
		Alpha:       float64(s.alpha[i]),
		Epochs:      int(s.epochsInStage[i]),
		Performance: float64(s.performance[i]),
		Stale:       s.sinceScore[i] == 0,
		Interval:    int(s.sinceScore[i]),
		Drift:       float64(s.drift[i]),
		GradNorm:    float64(s.gradNorm[i]),
		Memory:      [2]float32{s.memory0[i], s.memory1[i]},
	})
	if failure != "" {
		return false, failure
	}
	s.memory0[i], s.memory1[i] = memory[0], memory[1]
	if next := float32(min(1, max(0, alpha))); next > s.alpha[i] {
		s.alpha[i], s.lastUpdate[i] = next, l.epoch
	}
	if done {
		s.finished[i] = 1
	}
	return done, ""
}

// ask returns a strategy's answer, or why there is none. A panic counts as none: the epoch must end
// for all seeds.
func ask(s graft.Strategy, p graft.Progress) (alpha float64, memory [2]float32,
	done bool, failure string) {
	defer func() {
		if r := recover(); r != nil {
			failure = fmt.Sprintf("panic: %v", r)
		}
	}()
	if alpha, memory, done = s.Advance(p); alpha != alpha {
		failure = "α is NaN"
	}
	return alpha, memory, done, failure
}

// gates says which gates of a seed are open: the one onward and, when the seed is being evaluated,
// the one to Culled.
type gates struct{ on, cull bool }

func (l *Lattice) openGates(i int) (g gates) {
	stage := Stage(l.seeds.stage[i])
	if !l.config.Gates || stage < Training || stage > FineTuning {
		return g
	}
	evidence := l.evidence(i)
	_, g.on = l.config.Thresholds.Gate(stage, stage.Next(), evidence)
	if stage == Evaluating {
		_, g.cull = l.config.Thresholds.Gate(stage, Culled, evidence)
	}
	return g
}

// EventKind says what an [Event] tells of.
type EventKind uint8

// The kinds of event.
const (
	GateOpened   EventKind = iota + 1 // a gate that was shut lets the seed go from From to To
	RampFinished                      // the strategy has ended, and α is Value; told once
	EmbargoOver                       // the seed may be recycled
	// Value NaN or Inf were seen in the seed's activations or gradients since the last epoch
	NonFinite
	StrategyFailed // the seed's strategy gave no answer, for the Reason given, so α stays as it is
	StageChanged   // the seed has gone from From to To
	Quarantined    // the seed was corrupt, for the Reason given, and is a new one now
)

var eventNames = [...]string{GateOpened: "GateOpened", RampFinished: "RampFinished",
	EmbargoOver: "EmbargoOver",
	NonFinite:   "NonFinite", StrategyFailed: "StrategyFailed", StageChanged: "StageChanged",
	Quarantined: "Quarantined"}

// String returns the kind's name.
func (k EventKind) String() string { return enum.Name(k, "EventKind", eventNames[:]) }

// Event is something that happened to a seed.
type Event struct {
	Kind  EventKind
	Layer int // in events of a Network; otherwise 0
	Seed  int
	Epoch int // epochs that had ended, the one included with whose end it happened
	// GateOpened, StageChanged: the transition; otherwise both are the seed's stage
	From, To Stage
	Value    float64 // RampFinished, NonFinite
	Reason   string  // StrategyFailed, Quarantined; StageChanged by a Command: its Why
}

// String describes the event in a line.
func (e Event) String() string {
	s := fmt.Sprintf("epoch %d, layer %d, seed %d: ", e.Epoch, e.Layer, e.Seed)
	switch e.Kind {
	case GateOpened:
		return s + fmt.Sprintf("the gate from %v to %v is open", e.From, e.To)
	case RampFinished:
		return s + fmt.Sprintf("the ramp has ended at α = %.3g", e.Value)
	case EmbargoOver:
		return s + fmt.Sprintf("%v, may be recycled", e.From)
	case NonFinite:
		return s + fmt.Sprintf("%.0f NaN or Inf were met", e.Value)
	case StageChanged:
		return s + fmt.Sprintf("%v → %v", e.From, e.To)
	}
	return s + fmt.Sprintf("%v: %s", e.Kind, e.Reason)
}

// Listen makes f hear of every event from now on, until stop is called: those that StepEpoch
// returns, and every transition, whoever makes it. Events come in the order in which they happened,
// one at a time. They come on the goroutine of a method that changes the lattice, which waits for
// f. f may use the lattice; what that causes is told when f has returned.
func (l *Lattice) Listen(f func(Event)) (stop func(), err error) {
	if f == nil {
		return nil, fmt.Errorf("state.Listen: %w: f is nil, want a function", ErrArgument)
	}
	return l.outbox.Listen(f), nil
}

// tell notes events that the listeners will hear of. The caller holds the lock, and ends with
// unlockAndTell.
func (l *Lattice) tell(events ...Event) { l.pending = append(l.pending, events...) }

func (l *Lattice) unlockAndTell() {
	l.release()
	l.outbox.Deliver()
}

// release unlocks the lattice and leaves the delivery of what has happened to the caller.
func (l *Lattice) release() {
	l.outbox.Add(l.pending...)
	l.pending = nil
	l.mu.Unlock()
}
