package state

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/curve"
)

// Point is the progress of a run at the end of an epoch. Epoch is the number of epochs that have ended, Share the
// fraction of the run's budget that is spent, and Loss the loss of the model without the blueprints on trial.
type Point = curve.Progress

// SeedReport describes one seed with its stage, its blueprint and its latest figures.
type SeedReport struct {
	Seed  int
	Stage Stage
	Slot  int // slot of the blueprint; 0 means none
	Kind  blueprints.Kind
	Size  int // size of the blueprint, at sites other than chunks
	// Mergeable reports whether the blueprint can become part of a plain model once it is
	// fossilized; see blueprints.Mergeable.
	Mergeable     bool
	Alpha         float64 // effective α of the output; 0 in stages with y = x
	EpochsInStage int
	LastUpdate    int     // epoch of the last change of the stage or α
	Performance   float64 // rounded to half precision, as is Stability
	Stability     float64
	// Delta is the performance minus the performance without the seed. If the latter was never
	// measured, it is the performance minus the first one reported in this stage. It is 0 if
	// unknown.
	Delta float64
	// Improvement is the relative improvement over the performance without the seed or, if that was
	// never measured, over the first one reported since germination. It is 0 if unknown.
	Improvement float64
	// CanAdvance reports whether the seed has a blueprint and the gate to Stage.Next is open.
	CanAdvance   bool
	RampFinished bool    // the strategy has finished, in Grafting
	CanCull      bool    // a transition to Culled is allowed
	CanRecycle   bool    // the blueprint's life and the embargo have ended
	Drift        float64 // relative change of the chunk's running moments over the last epoch
	Health       Health
	Gradient     Gradient
	NonFiniteX   int        // NaN and Inf seen in the activations since the lattice was created
	NonFiniteG   int        // NaN and Inf seen in the gradient, including overflows caused by a loss scale
	Clips        int        // clipped rows of the gradient since the lattice was created
	Histogram    *Histogram // in reports of History in mode Debug; otherwise nil
	// Measured reports, in reports of History, whether Health was measured in this pass; under
	// sampling, the Health of other seeds is zero.
	Measured bool
}

// Report describes the state of a lattice. It prints as a table with one row per seed; see
// [Report.String].
type Report struct {
	Epoch     int // number of epochs that have ended
	Step      int // number of forward passes recorded, which differs from the step of a run
	Telemetry Telemetry
	Site      blueprints.Site
	Curve     []Point // at sites other than chunks, the progress of the run, oldest first
	Hidden    int     // number of features of the layer
	Slots     int     // number of slots including slot 0; 0 if unknown
	// SlotParameters is the number of parameters in a slot: its weights and the scale.
	SlotParameters int
	Layer          LayerReport
	Seeds          []SeedReport
}

// String formats the report as a human-readable table, with a line about the lattice followed by one
// row per seed. The layout may change.
//
// A row shows the seed's number, its stage and the epochs spent in it, the kind of its blueprint with
// its slot (or, at sites other than chunks, its size), the effective α, the variance of its input
// chunk, the norm of the gradient of its output chunk, its performance, Delta and Stability, and its
// possible next steps. A dash means that the seed has no blueprint.
func (r Report) String() string {
	place := "SLOT"
	if r.Site != blueprints.Chunk {
		place = "SIZE"
	}

	var b strings.Builder
	fmt.Fprintf(&b, "%d seeds at site %v, epoch %d, %d passes recorded, telemetry %v\n", len(r.Seeds),
		r.Site, r.Epoch, r.Step, r.Telemetry)
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "SEED\tSTAGE\tEPOCHS\tKIND\t%s\tα\tVARIANCE\tGRADIENT\tPERFORMANCE\tDELTA\t"+
		"STABILITY\tNEXT\n", place)
	for _, s := range r.Seeds {
		kind, number := "–", "–"
		if n := s.Slot + s.Size; n > 0 { // at least one is 0
			kind, number = s.Kind.String(), strconv.Itoa(n)
		}
		fmt.Fprintf(w, "%d\t%v\t%d\t%s\t%s\t%.3g\t%.3g\t%.3g\t%.4g\t%.3g\t%.2g\t%s\n", s.Seed, s.Stage,
			s.EpochsInStage, kind, number, s.Alpha, s.Health.Variance, s.Gradient.Norm, s.Performance,
			s.Delta, s.Stability, s.next())
	}

	// Writing to a strings.Builder cannot fail.
	_ = w.Flush()
	return b.String()
}

// next describes the seed's possible next steps.
func (s SeedReport) next() string {
	var all []string
	if s.CanAdvance {
		all = append(all, s.Stage.Next().String())
	}
	if s.CanCull {
		all = append(all, "cull")
	}
	if s.CanRecycle {
		all = append(all, "recycle")
	}
	if len(all) == 0 {
		return "–"
	}
	return strings.Join(all, ", ")
}

// Report returns the current state of all seeds, with the latest figures of each.
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

// seedReport returns the report on seed i. The caller holds the lock.
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

// health returns the latest health figures of seed i.
func (s *seedState) health(i int) Health {
	return Health{
		Variance: float64(s.variance[i]), Mean: fromBFloat16(s.mean[i]),
		Min: fromBFloat16(s.lowest[i]), Max: fromBFloat16(s.highest[i]),
		DeadRatio: float64(s.deadRatio[i]), SNR: fromBFloat16(s.snr[i]),
	}
}

// gradient returns the latest gradient figures of seed i.
func (s *seedState) gradient(i int) Gradient {
	return Gradient{Norm: float64(s.gradNorm[i]), Variance: fromBFloat16(s.gradVariance[i]),
		Max: fromBFloat16(s.gradMax[i])}
}

// ring holds the telemetry of the most recent passes in transport form: one array per field, with
// normal-quality figures as bfloat16 and α as Float16. It is not saved with the lattice.
type ring struct {
	frames []frame // once the ring is full, frames[next] is the oldest
	next   int
}

// frame holds the telemetry of one pass.
type frame struct {
	epoch      uint32
	step       uint64 // step of the pass
	telemetry  Telemetry
	stage      []uint8
	slot       []uint16
	kind       []uint8
	alpha      []uint16
	watched    []bool    // seeds measured by the pass
	figures    seedState // health and gradient of the pass; other fields stay empty
	histograms []Histogram
	gradients  bool // whether the backward pass has reported
}

// push stores the pass p in place of the oldest one. The seeds must already have recorded the
// health measured in p.
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

// copyGradient stores the gradient figures held by the seeds.
func (f *frame) copyGradient(s *seedState) {
	g := &f.figures
	f.gradients = true
	g.gradNorm = append(g.gradNorm[:0], s.gradNorm...)
	g.gradVariance, g.gradMax = append(g.gradVariance[:0], s.gradVariance...),
		append(g.gradMax[:0], s.gradMax...)
}

// addGradient adds the gradient figures that the seeds now hold to the frame of pass p, if that is
// still the latest.
func (r *ring) addGradient(l *Lattice, p *Pass) {
	if len(r.frames) == 0 {
		return
	}
	if last := &r.frames[(r.next+len(r.frames)-1)%len(r.frames)]; last.step == p.Step {
		last.copyGradient(l.seeds)
	}
}

// History returns reports of the most recent passes that measured any seed, oldest first, up to the
// number set by [WithHistory].
//
// Each report holds the figures of the seeds measured in that pass, and the stage, slot, kind and α
// (in half precision) of all seeds at its start. All other fields are zero.
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

// LayerReport holds the figures of a whole layer.
type LayerReport struct {
	// Timed is the number of timed runs of the layer, forward or backward, since the lattice was
	// created or loaded.
	Timed     int
	Kernel    time.Duration // mean time of a timed run
	Bandwidth float64       // mean bytes per second read and written by the timed runs
	Overhead  float64       // extra time for telemetry and bookkeeping, in percent
	Errors    int           // NaN and Inf seen by all seeds
	Clips     int           // clipped rows of the gradient, over all seeds
}

// timing accumulates measured times. It is not saved with the lattice.
type timing struct {
	runs  int
	total Timing
}

// RecordTiming adds the timing of one run of the layer.
func (l *Lattice) RecordTiming(t Timing) {
	l.mu.lockToRecord()
	defer l.mu.Unlock()

	sum := &l.timing.total
	sum.Kernel, sum.Telemetry, sum.Bytes = sum.Kernel+t.Kernel, sum.Telemetry+t.Telemetry,
		sum.Bytes+t.Bytes
	l.timing.runs++
}

// report returns the averages of the recorded timings.
func (t *timing) report() (r LayerReport) {
	if r.Timed = t.runs; r.Timed > 0 && t.total.Kernel > 0 {
		r.Kernel = t.total.Kernel / time.Duration(t.runs)
		r.Bandwidth = float64(t.total.Bytes) / t.total.Kernel.Seconds()
		r.Overhead = max(0, 100*t.total.Telemetry.Seconds()/t.total.Kernel.Seconds())
	}
	return r
}
