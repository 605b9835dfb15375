package state

import (
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/curve"
)

// Point is where a run was when an epoch ended.
type Point = curve.Progress

// SeedReport is the logical view of one seed.
type SeedReport struct {
	Seed  int
	Stage Stage
	Slot  int // 0: none
	Kind  blueprints.Kind
	Size  int // of the blueprint, elsewhere than on a chunk
	// the blueprint becomes a part of a plain model once it is fossilized; see blueprints.Mergeable
	Mergeable     bool
	Alpha         float64 // with which the output blends: 0 where it is x
	EpochsInStage int
	LastUpdate    int     // epoch of the last change of stage or α
	Performance   float64 // in half precision, as Stability
	Stability     float64
	// performance less that without the seed, or else at the first report in this stage; 0 when
	// unknown
	Delta float64
	// likewise relative to that without the seed, or else at the first report; 0 when unknown
	Improvement float64
	// the seed has a blueprint and the gate onward is open: Stage.Next is allowed
	CanAdvance   bool
	RampFinished bool    // the strategy has ended, in Grafting
	CanCull      bool    // a transition to Culled would be allowed
	CanRecycle   bool    // the blueprint's life is over, and the embargo too
	Drift        float64 // relative change of the chunk's running moments over the last epoch
	Health       Health
	Gradient     Gradient
	NonFiniteX   int        // NaN and Inf seen in the activations since the lattice was made
	NonFiniteG   int        // likewise in the gradient, also where a loss scale made it overflow
	Clips        int        // rows whose gradient was clipped since the lattice was made
	Histogram    *Histogram // in mode Debug, in reports of History; otherwise nil
	// Health is of the pass, in reports of History; else, under sampling, it is zero
	Measured bool
}

// Report is the logical view of a lattice.
type Report struct {
	Epoch     int // epochs that have ended
	Step      int // passes with telemetry so far
	Telemetry Telemetry
	Site      blueprints.Site
	Curve     []Point // of the run, at other sites than chunks, the oldest first
	Hidden    int     // features of the layer
	Slots     int     // of the layer's weights, slot 0 included; 0 when the lattice was not told
	// SlotParameters is how many parameters a slot has: weights and scale.
	SlotParameters int
	Layer          LayerReport
	Seeds          []SeedReport
}

// Report returns the present state of all seeds, with the last figures measured of each.
func (l *Lattice) Report() Report {
	l.mu.RLock()
	defer l.mu.RUnlock()
	r := Report{Epoch: int(l.epoch), Step: int(l.step), Telemetry: l.config.Telemetry,
		Site:  l.config.Site,
		Curve: slices.Clone(l.curve), Seeds: make([]SeedReport, l.n)}
	if l.n == 0 {
		return r
	}
	r.Hidden, r.Slots, r.SlotParameters = l.hidden, l.config.Slots,
		max(l.config.Width, l.hidden/l.n)+1
	cpu.Parallel(l.n, 1024, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			r.Seeds[i] = l.seedReport(i)
		}
	})
	r.Layer = l.timing.report()
	for i := range r.Seeds {
		r.Layer.Errors += r.Seeds[i].NonFiniteX + r.Seeds[i].NonFiniteG
		r.Layer.Clips += r.Seeds[i].Clips
	}
	return r
}

func (l *Lattice) seedReport(i int) SeedReport {
	s, stage, e := l.seeds, Stage(l.seeds.stage[i]), l.evidence(i)
	can := func(to Stage) bool {
		if !stage.CanBecome(to) || !l.config.Gates {
			return stage.CanBecome(to)
		}
		_, open := l.config.Thresholds.Gate(stage, to, e)
		return open
	}
	known := func(v float64) float64 {
		if !finite(v) {
			return 0
		}
		return v
	}
	slot, size := int(s.slot[i]), 0
	if l.config.Site != blueprints.Chunk {
		slot, size = 0, slot
	}
	return SeedReport{
		Seed: i, Stage: stage, Slot: slot, Kind: blueprints.Kind(s.kind[i]), Size: size,
		Mergeable:     stage.Alive() && s.slot[i] != 0 && blueprints.Mergeable(blueprints.Kind(s.kind[i])),
		Alpha:         float64(stage.Share(s.alpha[i])),
		EpochsInStage: int(s.epochsInStage[i]), LastUpdate: int(s.lastUpdate[i]),
		Performance: fromFloat16(toFloat16(float64(s.performance[i]))), Stability: e.Stability,
		Delta: known(e.Delta), Improvement: known(e.Improvement),
		CanAdvance: s.slot[i] != 0 && can(stage.Next()), RampFinished: s.finished[i] != 0,
		CanCull:    can(Culled),
		CanRecycle: stage.Ended() && l.epoch >= s.embargoUntil[i],
		Drift:      float64(s.drift[i]),
		Health:     s.health(i),
		Gradient:   s.gradient(i),
		NonFiniteX: int(s.nonFiniteX[i]), NonFiniteG: int(s.nonFiniteG[i]), Clips: int(s.clips[i]),
	}
}

func (s *seedState) health(i int) Health {
	return Health{
		Variance: float64(s.variance[i]), Mean: fromBFloat16(s.mean[i]),
		Min: fromBFloat16(s.lowest[i]), Max: fromBFloat16(s.highest[i]),
		DeadRatio: float64(s.deadRatio[i]), SNR: fromBFloat16(s.snr[i]),
	}
}

func (s *seedState) gradient(i int) Gradient {
	return Gradient{Norm: float64(s.gradNorm[i]), Variance: fromBFloat16(s.gradVariance[i]),
		Max: fromBFloat16(s.gradMax[i])}
}

// ring keeps the telemetry of the last passes in the form in which it is transported. It has one
// array per field, normal figures as bfloat16 and α as Float16. It is not saved with the lattice.
type ring struct {
	frames []frame // oldest first once full, from next on
	next   int
}

type frame struct {
	epoch      uint32
	step       uint64 // the pass's
	telemetry  Telemetry
	stage      []uint8
	slot       []uint16
	kind       []uint8
	alpha      []uint16
	watched    []bool    // seeds whose figures the pass has measured
	figures    seedState // health and gradient of the pass; the other fields stay empty
	histograms []Histogram
	gradients  bool // the backward pass has told its figures too
}

// push adds the pass p, whose health the seeds have taken in, in place of the oldest one.
func (r *ring) push(l *Lattice, p *Pass, sample func(seed int) HealthSample) {
	if l.config.History == 0 {
		return
	}
	if len(r.frames) < l.config.History {
		r.frames = append(r.frames, frame{})
		r.next = len(r.frames) - 1
	}
	f, s := &r.frames[r.next], l.seeds
	r.next = (r.next + 1) % l.config.History
	f.epoch, f.step, f.telemetry = p.Epoch, p.Step, p.Telemetry
	f.stage, f.slot, f.kind, f.alpha = f.stage[:0], f.slot[:0], f.kind[:0], f.alpha[:0]
	f.watched, f.gradients = append(f.watched[:0], p.Watch...), false
	for i, stage := range p.Stage {
		f.stage = append(f.stage, uint8(stage))
		f.slot = append(f.slot, p.Slot[i])
		f.kind = append(f.kind, uint8(p.Kind[i]))
		f.alpha = append(f.alpha, toFloat16(float64(stage.Share(p.Alpha[i]))))
	}
	g := &f.figures
	g.variance, g.deadRatio = append(g.variance[:0], s.variance...),
		append(g.deadRatio[:0], s.deadRatio...)
	g.mean, g.snr = append(g.mean[:0], s.mean...), append(g.snr[:0], s.snr...)
	g.lowest, g.highest = append(g.lowest[:0], s.lowest...), append(g.highest[:0], s.highest...)
	f.histograms = f.histograms[:0]
	if p.Telemetry.Mode == Debug {
		for i := range p.Stage {
			var h Histogram
			if m := sample(i).Histogram; m != nil {
				h = *m
			}
			f.histograms = append(f.histograms, h)
		}
	}
}

func (f *frame) copyGradient(s *seedState) {
	g := &f.figures
	f.gradients = true
	g.gradNorm = append(g.gradNorm[:0], s.gradNorm...)
	g.gradVariance, g.gradMax = append(g.gradVariance[:0], s.gradVariance...),
		append(g.gradMax[:0], s.gradMax...)
}

// addGradient completes the frame of the pass p with the gradients that the seeds have taken in
// since.
func (r *ring) addGradient(l *Lattice, p *Pass) {
	if len(r.frames) == 0 {
		return
	}
	if last := &r.frames[(r.next+len(r.frames)-1)%len(r.frames)]; last.step == p.Step {
		last.copyGradient(l.seeds)
	}
}

// History returns the reports of the last passes that measured, the oldest first, as many as
// [WithHistory] keeps. They hold what is measured in a pass, of the seeds that it has measured.
// They also hold stage, slot, kind and α (in half precision) at its start. The other fields are
// zero.
func (l *Lattice) History() []Report {
	l.mu.RLock()
	defer l.mu.RUnlock()
	reports := make([]Report, 0, len(l.ring.frames))
	for k := range l.ring.frames {
		f := &l.ring.frames[(l.ring.next+k)%len(l.ring.frames)]
		r := Report{Epoch: int(f.epoch), Step: int(f.step), Telemetry: f.telemetry,
			Seeds: make([]SeedReport, len(f.stage))}
		for i := range r.Seeds {
			r.Seeds[i] = SeedReport{
				Seed: i, Stage: Stage(f.stage[i]), Slot: int(f.slot[i]),
				Kind:  blueprints.Kind(f.kind[i]),
				Alpha: fromFloat16(f.alpha[i]),
			}
			if !f.watched[i] {
				continue
			}
			r.Seeds[i].Health, r.Seeds[i].Measured = f.figures.health(i), true
			if f.gradients {
				r.Seeds[i].Gradient = f.figures.gradient(i)
			}
			if len(f.histograms) > 0 {
				h := f.histograms[i]
				r.Seeds[i].Histogram = &h
			}
		}
		reports = append(reports, r)
	}
	return reports
}

// LayerReport holds the figures of a layer as a whole.
type LayerReport struct {
	// runs of the layer, forward or backward, that were timed since the lattice was made or loaded
	Timed     int
	Kernel    time.Duration // mean time of one of them
	Bandwidth float64       // bytes a second that they read and wrote on average
	Overhead  float64       // per cent by which telemetry and bookkeeping prolonged them
	Errors    int           // NaN and Inf seen by all seeds
	Clips     int           // rows of all seeds whose gradient was clipped
}

// timing sums up what was measured. It is not saved with the lattice.
type timing struct {
	runs  int
	total Timing
}

// RecordTiming takes in the timing of a run of the layer.
func (l *Lattice) RecordTiming(t Timing) {
	l.mu.Lock()
	defer l.mu.Unlock()
	sum := &l.timing.total
	sum.Kernel, sum.Telemetry, sum.Bytes = sum.Kernel+t.Kernel, sum.Telemetry+t.Telemetry,
		sum.Bytes+t.Bytes
	l.timing.runs++
}

func (t *timing) report() (r LayerReport) {
	if r.Timed = t.runs; r.Timed > 0 && t.total.Kernel > 0 {
		r.Kernel = t.total.Kernel / time.Duration(t.runs)
		r.Bandwidth = float64(t.total.Bytes) / t.total.Kernel.Seconds()
		r.Overhead = max(0, 100*t.total.Telemetry.Seconds()/t.total.Kernel.Seconds())
	}
	return r
}
