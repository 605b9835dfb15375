package state

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/state/graft"
	"github.com/kasmina-go/kasmina/state/internal/columns"
	"github.com/kasmina-go/kasmina/state/telemetry"
)

// What is measured of a seed is in package telemetry.
type (
	// Telemetry says what is measured: [telemetry.Config].
	Telemetry = telemetry.Config
	// TelemetryMode says when: [telemetry.Mode].
	TelemetryMode = telemetry.Mode
	// Reduction says how rows' figures become the seed's: [telemetry.Reduction].
	Reduction = telemetry.Reduction
	// Health are the figures of a seed's input chunk: [telemetry.Health].
	Health = telemetry.Health
	// Gradient are the figures of its output's gradient: [telemetry.Gradient].
	Gradient = telemetry.Gradient
	// Moments sum up numbers: [telemetry.Moments].
	Moments = telemetry.Moments
	// Histogram counts elements by magnitude: [telemetry.Histogram].
	Histogram = telemetry.Histogram
	// HealthSample is what a forward pass has measured: [telemetry.HealthSample].
	HealthSample = telemetry.HealthSample
	// GradientSample is what a backward pass has measured: [telemetry.GradientSample].
	GradientSample = telemetry.GradientSample
	// Timing is the time of one run of a layer: [telemetry.Timing].
	Timing = telemetry.Timing
)

// The telemetry modes, the reductions, and the length of a histogram.
const (
	Production = telemetry.Production // every pass, every seed
	Sampling   = telemetry.Sampling   // every n-th pass, or a share of the seeds, or both
	Debug      = telemetry.Debug      // as Production, with a histogram of every seed's activations
	Off        = telemetry.Off        // nothing; NaN and Inf are still counted

	Hierarchical = telemetry.Hierarchical // the exact figures over all rows × C elements
	MeanOfRows   = telemetry.MeanOfRows   // the average of the figures of the rows
	MaxOfRows    = telemetry.MaxOfRows    // the largest figure of any row

	HistogramBins = telemetry.HistogramBins
)

// SetTelemetry changes what is measured, from the next forward pass on. It returns an error, and
// changes nothing, when a field of t is out of range.
//
// It is for a lattice that no trainer uses at the moment. During a run a [Measure] command changes
// telemetry instead: the command takes effect between two steps, on all ranks alike, and the
// record of the run has it.
func (l *Lattice) SetTelemetry(t Telemetry) error {
	if err := t.Check(); err != nil {
		return fmt.Errorf("state.SetTelemetry: %w: %w", ErrArgument, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.config.Telemetry = t
	return nil
}

// Telemetry returns what is measured.
func (l *Lattice) Telemetry() Telemetry {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.config.Telemetry
}

// Pass is what a forward pass, and the backward pass that belongs to it, know of the lattice. It is
// a copy, taken at the start of the forward pass, that later commands do not change. Slices have
// one element for each seed. It is for those who execute the layer; the others use
// [Lattice.Report].
type Pass struct {
	Record    bool      // whether the passes leave their figures in the lattice
	Telemetry Telemetry // in force at the start
	Epoch     uint32
	Step      uint64
	Stage     []Stage
	Slot      []uint16
	Kind      []blueprints.Kind
	// the seed's own in Grafting to Evaluating, 1 in Training (for gradients), FineTuning and
	// Fossilized
	Alpha []float32
	Watch []bool    // whether the figures of this pass are reported
	Input []Moments // of the chunk in the pass before this one; Count 0 when there was none
	Norms []Moments // running moments of the chunk's gradient norm over rows
}

// seeds returns of how many seeds the pass is, or -1 when its slices disagree.
func (p *Pass) seeds() int {
	for _, n := range []int{len(p.Slot), len(p.Kind), len(p.Alpha), len(p.Watch),
		len(p.Input), len(p.Norms)} {
		if n != len(p.Stage) {
			return -1
		}
	}
	return len(p.Stage)
}

// Begin fills p for a forward pass that starts now, reusing p's memory. With record set, the passes
// will be given to [Lattice.RecordHealth] and [Lattice.RecordGradient], so p.Watch says which seeds
// to measure; otherwise it is false for all.
func (l *Lattice) Begin(p *Pass, record bool) {
	if p == nil {
		return
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	s, n := l.seeds, l.n
	if len(p.Stage) != n {
		*p = Pass{
			Stage: make([]Stage, n), Slot: make([]uint16, n), Kind: make([]blueprints.Kind, n),
			Alpha: make([]float32, n),
			Watch: make([]bool, n), Input: make([]Moments, n), Norms: make([]Moments, n),
		}
	}
	p.Record, p.Telemetry, p.Epoch, p.Step = record, l.config.Telemetry, l.epoch, l.step+l.ahead
	for i := range n {
		stage := Stage(s.stage[i])
		if posed, ok := l.posed[i]; ok {
			stage = posed
		}
		p.Stage[i], p.Slot[i], p.Kind[i] = stage, s.slot[i], blueprints.Kind(s.kind[i])
		p.Alpha[i] = stage.Weight(s.alpha[i])
		if noise := l.config.Noise; noise > 0 && record && stage == Grafting {
			p.Alpha[i] = float32(graft.Noisy(float64(p.Alpha[i]), noise, i, p.Epoch, p.Step))
		}
		p.Watch[i] = record && p.Telemetry.Watches(i, p.Step)
		p.Input[i] = moments(s.stepCount[i], s.stepMean[i], s.stepVariance[i])
		p.Norms[i] = moments(s.normCount[i], s.normMean[i], s.normVariance[i])
	}
}

// BeginStep says which step of training comes, for [Lattice.Draw].
func (l *Lattice) BeginStep(step int) { l.training.Store(uint64(step)) }

// Draw has α drawn anew around its schedule for the seeds in Grafting of a pass that Begin has
// filled. The same step of training draws the same. It is for blueprints that are part of a graph;
// a Kasmina layer's own passes draw by themselves. See [WithAlphaNoise].
func (l *Lattice) Draw(p *Pass) {
	noise, step := l.config.Noise, l.training.Load()
	if noise == 0 {
		return
	}
	for i, stage := range p.Stage {
		if stage == Grafting {
			p.Alpha[i] = float32(graft.Noisy(float64(p.Alpha[i]), noise, i, p.Epoch, step))
		}
	}
}

// RecordHealth takes in what the forward pass p has measured: sample is called for every seed, from
// several goroutines at once. Non-finite elements are counted always, the rest only when p records.
func (l *Lattice) RecordHealth(p *Pass, sample func(seed int) HealthSample) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.checkPass("RecordHealth", p, sample != nil); err != nil {
		return err
	}
	if l.deferred != nil {
		l.deferHealth(p, sample)
		return nil
	}
	if p.Record {
		l.step++
	}
	l.record(recorder{pass: p, health: sample})
	if p.Record && p.Telemetry.Mode != Off && slices.Contains(p.Watch, true) {
		l.ring.push(l, p, sample)
	}
	return nil
}

// recorder is what a pass has measured, on its way into the lattice: one of health and gradient.
type recorder struct {
	pass     *Pass
	health   func(seed int) HealthSample
	gradient func(seed int) GradientSample
	span     func(lo, hi int) // of the lattice, made once: a training step allocates nothing for it
}

// record takes in what r holds, on all cores. The caller holds the lock.
func (l *Lattice) record(r recorder) {
	if r.span = l.recorder.span; r.span == nil {
		r.span = l.recordSpan
	}
	l.recorder = r
	cpu.Parallel(l.n, columns.Block, r.span)
	l.recorder = recorder{span: r.span}
}

// recordSpan takes in the figures of seeds lo to hi−1 and renews their checksums. A seed that did
// not match its own before does not do so afterwards.
func (l *Lattice) recordSpan(lo, hi int) {
	found := l.sums.Faults(lo, hi, l.seeds.crc)
	r := &l.recorder
	for i := lo; i < hi; i++ {
		if r.health != nil {
			h := r.health(i)
			l.seeds.nonFiniteX[i] = addSaturating(l.seeds.nonFiniteX[i], h.NonFinite)
			if r.pass.Record && h.Moments.Count > 0 {
				l.seeds.takeHealth(i, &h, r.pass.Watch[i])
			}
			continue
		}
		g := r.gradient(i)
		l.seeds.nonFiniteG[i] = addSaturating(l.seeds.nonFiniteG[i], g.NonFinite)
		if r.pass.Record {
			l.seeds.takeGradient(i, &g, r.pass.Watch[i])
		}
	}
	l.seal(lo, hi)
	for _, bad := range found {
		l.seeds.crc[bad.Row] ^= bad.Syndrome
	}
}

func moments(count, mean, variance float64) Moments {
	return Moments{Count: count, Mean: mean, Variance: variance}
}

func (s *seedState) takeHealth(i int, h *HealthSample, watched bool) {
	m := h.Moments
	run := moments(s.runCount[i], s.runMean[i], s.runVariance[i]).Merge(m)
	if m.Valid() && run.Valid() { // limits are made of them, which must not be infinite
		s.stepCount[i], s.stepMean[i], s.stepVariance[i] = m.Count, m.Mean, m.Variance
		s.runCount[i], s.runMean[i], s.runVariance[i] = run.Count, run.Mean, run.Variance
	}
	if watched {
		s.variance[i], s.deadRatio[i] = critical(h.Health.Variance), critical(h.Health.DeadRatio)
		s.mean[i], s.snr[i] = toBFloat16(h.Health.Mean), toBFloat16(h.Health.SNR)
		s.lowest[i], s.highest[i] = toBFloat16(h.Health.Min), toBFloat16(h.Health.Max)
	}
}

// RecordGradient takes in what the backward pass that belongs to p has measured, as
// [Lattice.RecordHealth] does.
func (l *Lattice) RecordGradient(p *Pass, sample func(seed int) GradientSample) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.checkPass("RecordGradient", p, sample != nil); err != nil {
		return err
	}
	if l.deferred != nil {
		l.deferred.Recorded, l.deferred.Gradient = p.Record, samples(l.n, sample)
		return nil
	}
	l.record(recorder{pass: p, gradient: sample})
	if p.Record {
		l.ring.addGradient(l, p)
	}
	return nil
}

func (s *seedState) takeGradient(i int, g *GradientSample, watched bool) {
	s.clips[i] += uint64(g.Clipped)
	m := moments(s.normCount[i], s.normMean[i], s.normVariance[i]).Merge(g.Norms)
	if m.Valid() {
		s.normCount[i], s.normMean[i], s.normVariance[i] = m.Count, m.Mean, m.Variance
	}
	if watched && g.Norms.Count > 0 {
		s.gradNorm[i] = critical(g.Gradient.Norm)
		s.gradVariance[i], s.gradMax[i] = toBFloat16(g.Gradient.Variance),
			toBFloat16(g.Gradient.Max)
	}
}

// critical is a figure of critical quality as it is stored. One that is NaN has overflowed on its
// way.
func critical(v float64) float32 {
	if v != v {
		return float32(math.Inf(1))
	}
	return float32(v)
}

func (l *Lattice) checkPass(method string, p *Pass, sampled bool) error {
	if !sampled {
		return fmt.Errorf("state.%s: %w: sample is nil, want a function", method, ErrArgument)
	}
	if p == nil || l.n == 0 || p.seeds() != l.n {
		return fmt.Errorf("state.%s: %w: the pass was not begun on this lattice of %d seeds",
			method, ErrArgument, l.n)
	}
	return nil
}

// Measured is what the passes of one batch have measured of a lattice, not yet taken in.
type Measured struct {
	Recorded bool             // whether the passes were made with telemetry
	Health   []HealthSample   // by seed; nil where no forward pass has reported
	Gradient []GradientSample // by seed; nil where no backward pass has reported
}

// Defer makes passes leave what they measure in m, in the place of the lattice, until it is called
// with nil. They count as those of the ahead-th batch from now, from 0, and know of the figures
// before the first alone. Processes that compute the batches of a step side by side do so. Each
// then takes in what all have measured, in the order of batches, by [Lattice.Take].
func (l *Lattice) Defer(m *Measured, ahead int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deferred, l.ahead = m, uint64(ahead)
	if m == nil {
		l.ahead = 0
	}
}

// Take takes in what the passes of a batch have measured, at this process or another one, as if
// they had run here and now.
func (l *Lattice) Take(m Measured) error {
	if m.Health == nil && m.Gradient == nil {
		return nil
	}
	var p Pass
	l.Begin(&p, m.Recorded)
	for _, n := range []int{len(m.Health), len(m.Gradient)} {
		if n != 0 && n != len(p.Stage) {
			return fmt.Errorf("state.Take: %w: figures of %d seeds, want %d",
				ErrArgument, n, len(p.Stage))
		}
	}
	if m.Health != nil {
		if err := l.RecordHealth(&p, func(i int) HealthSample { return m.Health[i] }); err != nil {
			return err
		}
	}
	if m.Gradient == nil {
		return nil
	}
	return l.RecordGradient(&p, func(i int) GradientSample { return m.Gradient[i] })
}

// deferHealth keeps what a forward pass has measured for later. The caller holds the lock.
func (l *Lattice) deferHealth(p *Pass, sample func(seed int) HealthSample) {
	l.deferred.Recorded = p.Record
	l.deferred.Health = samples(l.n, sample)
	for i := range l.deferred.Health {
		if h := &l.deferred.Health[i].Histogram; *h != nil {
			own := **h
			*h = &own
		}
	}
}

// samples asks for those of all seeds, on all cores.
func samples[S any](seeds int, sample func(seed int) S) []S {
	all := make([]S, seeds)
	cpu.Parallel(seeds, 64, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			all[i] = sample(i)
		}
	})
	return all
}

// Digest returns a checksum of the lattices' seeds, of their progress and of their telemetry.
// Processes whose lattices must be the same compare it.
func (n *Network) Digest() uint32 {
	n = n.orNone()
	var sum uint32
	for _, l := range n.layers {
		sum = l.Lattice.digest(sum)
	}
	return sum
}

func (l *Lattice) digest(sum uint32) uint32 {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.n == 0 {
		return sum
	}
	b := binary.LittleEndian.AppendUint64(nil, l.step)
	b = binary.LittleEndian.AppendUint32(b, l.epoch)
	for _, c := range l.seeds.crc {
		b = binary.LittleEndian.AppendUint32(b, c)
	}
	t := l.config.Telemetry
	b = append(b, byte(t.Mode), byte(t.Reduction))
	b = binary.LittleEndian.AppendUint64(b, uint64(t.Every))
	b = binary.LittleEndian.AppendUint64(b, math.Float64bits(t.Share))
	return crc32.Update(sum, crc32.IEEETable, b)
}

// Obey carries out commands between the passes of the model: all of them, or, when one is refused,
// none. It is for the goroutine that runs the model, which must already hold the slots' lock.
func (n *Network) Obey(commands ...Command) error {
	n = n.orNone()
	defer n.deliver()
	return n.do(commands)
}

// ApplyShared is [Network.Apply] of several processes with the same model: what was submitted to
// any of them is carried out at each. exchange hands over the commands that were submitted here,
// and returns those of all processes in an order that all have. at is the place of its own among
// them. Its error is the answer to those who have submitted something, and is returned.
func (n *Network) ApplyShared(exchange func(own [][]Command) (all [][]Command,
	at int, err error)) error {
	if exchange == nil {
		return fmt.Errorf("state.ApplyShared: %w: exchange is nil", ErrArgument)
	}
	n = n.orNone()
	waiting := n.queue.take(false)
	own := make([][]Command, len(waiting))
	for i, s := range waiting {
		own[i] = s.commands
	}
	all, at, err := exchange(own)
	if err == nil && (at < 0 || at+len(own) > len(all)) {
		err = fmt.Errorf("state.ApplyShared: %w: %d of %d commands from the %d-th on", ErrArgument,
			len(own), len(all), at)
	}
	if err != nil {
		for _, s := range waiting {
			s.done <- err
		}
		return err
	}
	answered := 0
	defer func() { // a listener has panicked
		for _, s := range waiting[answered:] {
			s.done <- errListener
		}
	}()
	for i, commands := range all {
		err := n.do(commands)
		if i >= at && i < at+len(own) {
			answered++
			waiting[answered-1].done <- err
		}
		n.deliver()
	}
	return nil
}
