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

// Metrics are the figures reported by the training loop about one layer at the end of an epoch.
type Metrics struct {
	Loss  float64       // training loss of the host model; 0 if it was not measured
	Share float64       // fraction of the run's budget spent so far, from 0 to 1
	Seeds []SeedMetrics // metrics of the measured seeds
}

// SeedMetrics holds the measurements of one seed during an epoch.
type SeedMetrics struct {
	Seed int
	// TrainingError is the error of the seed's own objective; lower is better. For a seed in
	// Training, it is the increase in the model's loss when the blueprint is applied at full strength
	// (see [Lattice.Probe]). NaN keeps the previous value.
	TrainingError float64
	// Parameters holds the blueprint's current weights followed by its scale, or nil if they are
	// not reported. A [Network] with [Slots] fills them in for seeds that train.
	Parameters []float64
	// Unscored means that Performance, Without, Compared and Stability are not set, so the seed keeps
	// its last score, which counts as stale.
	Unscored    bool
	Performance float64 // score of the model with the seed; higher is better
	Compared    bool    // whether Without was measured
	// Without is the score of the model with the seed muted (see [Lattice.Mute]). From then on, it is
	// the baseline against which the seed is judged.
	Without   float64
	Stability float64 // 0 to 1; higher means that the performance fluctuates less
	Trials    int     // evaluations of the seed in this epoch
	Errors    int     // evaluations that failed
}

// StepEpoch ends an epoch: it records the metrics, increments the epoch counter, and lets the
// strategy of every seed in Grafting raise its α. It makes no transitions, which are left to the
// caller or a [Controller].
//
// It returns the events of the epoch in seed order, preceded by the Quarantined events of corrupt
// seeds.
//
// For invalid metrics, the error wraps [ErrArgument] or [ErrSeed]. For a corrupt seed, it wraps
// [ErrCorrupt], unless the lattice was created with [WithQuarantine], which resets the seed. After an
// error, the lattice is unchanged.
func (l *Lattice) StepEpoch(m Metrics) ([]Event, error) {
	l.mu.Lock()
	defer l.unlockAndDeliver()

	found, err := l.canStep(m)
	if err != nil {
		return nil, err
	}
	return l.stepEpoch(m, found), nil
}

// canStep reports whether an epoch may end with the given metrics. It returns the corrupt seeds
// that stepEpoch then has to quarantine.
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

// stepEpoch ends the epoch after a successful canStep, which returned found. The caller holds the
// lock.
func (l *Lattice) stepEpoch(m Metrics, found []columns.Fault) []Event {
	l.notify(l.quarantined...)
	all := append(l.quarantined, l.quarantine(found)...)
	l.quarantined = nil

	// The opening of a gate is an event, so the state of the gates before the epoch is needed too.
	const grain = 1024
	gatesBefore := make([]gates, l.n)
	cpu.Parallel(l.n, grain, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			gatesBefore[i] = l.openGates(i)
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
		l.recordMetrics(sm)
	}

	if l.seeds != nil {
		defer clear(l.seeds.sinceScore)
	}

	events := make([][]Event, (l.n+grain-1)/grain)
	renormalize := int(l.epoch)%max(1, l.config.Renormalize) == 0
	cpu.Parallel(l.n, grain, func(lo, hi int) {
		var e []Event
		for i := lo; i < hi; i++ {
			e = l.endEpoch(e, i, renormalize, gatesBefore[i])
		}
		events[lo/grain] = e
		l.seal(lo, hi)
	})

	for _, e := range events {
		l.notify(e...)
		all = append(all, e...)
	}

	return all
}

// checkMetrics returns an error for metrics that are out of range or that name a seed twice.
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
			return fmt.Errorf("state.StepEpoch: %w: seed %d has two entries in Seeds", ErrArgument,
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

// recordMetrics stores the metrics of one seed.
func (l *Lattice) recordMetrics(m SeedMetrics) {
	s, i := l.seeds, m.Seed
	if !math.IsNaN(m.TrainingError) {
		s.trainingError[i] = single(m.TrainingError)
		setOnce(&s.entryTrainingError[i], s.trainingError[i])
	}

	if m.Parameters != nil {
		l.recordParameters(i, m.Parameters)
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

// liveness records whether the parameters of a blueprint change.
type liveness uint8

const (
	unreported liveness = iota
	resting             // not finite, all 0, or unchanged since the previous report
	changing
)

// recordParameters compares the reported parameters of a seed's blueprint, by checksum, with the
// parameters of the previous report.
func (l *Lattice) recordParameters(i int, p []float64) {
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
	if zero || s.slotSum[i] == sum || s.slotSum[i] == 0 { // the first report has nothing to compare with
		live = resting
	}
	s.slotSum[i], s.learning[i] = sum, uint8(live)
}

// setOnce sets *v if it is NaN, that is, has not been set before.
func setOnce(v *float32, to float32) {
	if *v != *v {
		*v = to
	}
}

// single rounds v to single precision. Values beyond the range of float32 saturate, because a lattice
// with an infinite figure could not be loaded again.
func single(v float64) float32 {
	return float32(max(-math.MaxFloat32, min(v, math.MaxFloat32)))
}

// addSaturating returns n + more, or the largest uint32 if the sum overflows.
func addSaturating(n uint32, more int) uint32 {
	return uint32(min(uint64(n)+uint64(more), math.MaxUint32))
}

// endEpoch ends the epoch for seed i and appends its events to e. It touches no other seed, so
// epochs of different seeds may end concurrently. before holds the gates as they were before the
// metrics were recorded.
func (l *Lattice) endEpoch(e []Event, i int, renormalize bool, before gates) []Event {
	s, stage := l.seeds, Stage(l.seeds.stage[i])
	add := func(k EventKind, to Stage, value float64) {
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
			add(StrategyFailed, stage, 0)
			e[len(e)-1].Reason = failure
		case finished:
			add(RampFinished, stage, float64(s.alpha[i]))
		}
	}

	if until := s.embargoUntil[i]; stage.Ended() && (until == l.epoch || until < l.epoch &&
		s.epochsInStage[i] == 1) {
		add(EmbargoOver, stage, 0)
	}

	if seen := addSaturating(s.nonFiniteX[i], int(s.nonFiniteG[i])); seen != s.nonFiniteReported[i] {
		add(NonFinite, stage, float64(seen-s.nonFiniteReported[i]))
		s.nonFiniteReported[i] = seen
	}

	if l.config.Gates {
		after := l.openGates(i)
		if after.on && !before.on {
			add(GateOpened, stage.Next(), 0)
		}
		if after.cull && !before.cull {
			add(GateOpened, Culled, 0)
		}
	}

	return e
}

// endStatistics measures how far a seed's running moments drifted during the epoch. With
// renormalize set, it also reduces their weight to one pass.
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

// advance lets the strategy of a seed in Grafting raise α. It reports whether the strategy has
// finished with this epoch, or why it failed to answer.
func (l *Lattice) advance(i int) (finished bool, failure string) {
	s := l.seeds
	if s.finished[i] != 0 {
		return false, ""
	}

	alpha, memory, done, failure := callStrategy(l.strategies[s.strategy[i]].Strategy, graft.Progress{
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

// callStrategy returns a strategy's answer, or the reason why it gave none. A panic or a NaN counts
// as no answer, because the epoch must end for all seeds.
func callStrategy(s graft.Strategy, p graft.Progress) (alpha float64, memory [2]float32,
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

// gates records which gates out of a seed's stage are open: the one to the next stage and, for a
// seed in Evaluating, the one to Culled.
type gates struct{ on, cull bool }

// openGates judges the gates of seed i by the current evidence.
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

// EventKind identifies what happened in an [Event].
type EventKind uint8

// Kinds of events.
const (
	GateOpened   EventKind = iota + 1 // a gate that was shut now allows the transition from From to To
	RampFinished                      // the strategy has finished, with α at Value; sent once per grafting
	EmbargoOver                       // the seed may be recycled
	// NonFinite counts, in Value, the NaN and Inf seen in the seed's activations and gradients
	// since the last such event.
	NonFinite
	StrategyFailed // the seed's strategy failed for the given Reason, so α is unchanged
	StageChanged   // the seed moved from From to To
	Quarantined    // the seed was corrupt, as Reason describes, and was reset
)

var eventNames = [...]string{GateOpened: "GateOpened", RampFinished: "RampFinished",
	EmbargoOver: "EmbargoOver",
	NonFinite:   "NonFinite", StrategyFailed: "StrategyFailed", StageChanged: "StageChanged",
	Quarantined: "Quarantined"}

// String returns the kind's name.
func (k EventKind) String() string { return enum.Name(k, "EventKind", eventNames[:]) }

// Event describes a change in a seed's state.
type Event struct {
	Kind  EventKind
	Layer int // always 0 in events of a single lattice
	Seed  int
	Epoch int // number of epochs that have ended, including the epoch that caused the event
	// GateOpened, StageChanged: the transition; otherwise both hold the seed's stage.
	From, To Stage
	Value    float64 // RampFinished, NonFinite
	Reason   string  // StrategyFailed, Quarantined; Command.Why for a StageChanged by a command
}

// String describes the event in one line.
func (e Event) String() string {
	s := fmt.Sprintf("epoch %d, layer %d, seed %d: ", e.Epoch, e.Layer, e.Seed)
	switch e.Kind {
	case GateOpened:
		return s + fmt.Sprintf("the gate from %v to %v is open", e.From, e.To)
	case RampFinished:
		return s + fmt.Sprintf("the ramp finished at α = %.3g", e.Value)
	case EmbargoOver:
		return s + fmt.Sprintf("%v and may be recycled", e.From)
	case NonFinite:
		return s + fmt.Sprintf("%.0f NaN or Inf seen", e.Value)
	case StageChanged:
		return s + fmt.Sprintf("%v → %v", e.From, e.To)
	}

	return s + fmt.Sprintf("%v: %s", e.Kind, e.Reason)
}

// Listen registers f to be called, until stop is called, with the events that StepEpoch returns and
// with all transitions, whatever caused them.
//
// Events arrive in order and never concurrently. f runs on the goroutine of a method that changes the
// lattice, and the method returns only after f does. f may use the lattice. Any events it causes are
// delivered after it returns.
func (l *Lattice) Listen(f func(Event)) (stop func(), err error) {
	return l.outbox.Listen(f), nil
}

// notify queues events for the listeners. The caller holds the lock and releases it with
// unlockAndDeliver.
func (l *Lattice) notify(events ...Event) { l.pending = append(l.pending, events...) }

// unlockAndDeliver unlocks the lattice and then calls the listeners with the queued events.
func (l *Lattice) unlockAndDeliver() {
	l.release()
	l.outbox.Deliver()
}

// release unlocks the lattice after moving the queued events to the outbox. The caller delivers
// them.
func (l *Lattice) release() {
	l.outbox.Add(l.pending...)
	l.pending = nil
	l.mu.Unlock()
}
