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

// The measured figures are defined in package telemetry.
type (
	// Telemetry configures the measurements; see [telemetry.Config].
	Telemetry = telemetry.Config
	// TelemetryMode determines when figures are collected; see [telemetry.Mode].
	TelemetryMode = telemetry.Mode
	// Reduction determines how figures of rows are combined; see [telemetry.Reduction].
	Reduction = telemetry.Reduction
	// Health holds the figures of a seed's input chunk; see [telemetry.Health].
	Health = telemetry.Health
	// Gradient holds the figures of the gradient of a seed's output; see [telemetry.Gradient].
	Gradient = telemetry.Gradient
	// Moments are the count, mean and variance of numbers; see [telemetry.Moments].
	Moments = telemetry.Moments
	// Histogram counts elements by magnitude; see [telemetry.Histogram].
	Histogram = telemetry.Histogram
	// HealthSample is the measurement of a forward pass; see [telemetry.HealthSample].
	HealthSample = telemetry.HealthSample
	// GradientSample is the measurement of a backward pass; see [telemetry.GradientSample].
	GradientSample = telemetry.GradientSample
	// Timing is the time of one run of a layer; see [telemetry.Timing].
	Timing = telemetry.Timing
)

// Telemetry modes, reductions, and the length of a histogram.
const (
	Production = telemetry.Production // every pass, every seed
	Sampling   = telemetry.Sampling   // every n-th pass, or a share of the seeds, or both
	Debug      = telemetry.Debug      // Production, plus a histogram of every seed's activations
	Off        = telemetry.Off        // nothing is measured; NaN and Inf are still counted

	Hierarchical = telemetry.Hierarchical // exact figures over all rows × C elements
	MeanOfRows   = telemetry.MeanOfRows   // average of the rows' figures
	MaxOfRows    = telemetry.MaxOfRows    // largest of the rows' figures

	HistogramBins = telemetry.HistogramBins
)

// SetTelemetry changes the telemetry settings from the next forward pass on. It returns an error,
// and changes nothing, if a field of t is out of range.
//
// Use it for a lattice that no trainer is using. During a run, send a [Measure] command instead,
// which takes effect between two steps, on all ranks alike, and becomes part of the run's record.
func (l *Lattice) SetTelemetry(t Telemetry) error {
	if err := t.Check(); err != nil {
		return fmt.Errorf("state.SetTelemetry: %w: %w", ErrArgument, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()

	l.config.Telemetry = t
	return nil
}

// Telemetry returns the current telemetry settings.
func (l *Lattice) Telemetry() Telemetry {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.config.Telemetry
}

// Pass is the view of a lattice shared by a forward pass and its backward pass. It is a copy taken at
// the start of the forward pass, unaffected by later commands, and its slices hold one element per
// seed. It is meant for executors of the layer; other code uses [Lattice.Report].
type Pass struct {
	Record    bool      // whether the passes record their measurements; otherwise they leave no trace
	Telemetry Telemetry // settings in force at the start
	Epoch     uint32
	Step      uint64
	Stage     []Stage
	Slot      []uint16
	Kind      []blueprints.Kind
	// Alpha is the seed's own α in Grafting, Stabilization and Evaluating; 1 in Training (where it
	// applies to gradients), FineTuning and Fossilized; and 0 elsewhere.
	Alpha []float32
	Watch []bool    // whether the seed's figures are measured in this pass
	Input []Moments // moments of the chunk in the previous pass; Count 0 if there was none
	Norms []Moments // running moments of the per-row norm of the chunk's gradient
}

// seeds returns the number of seeds of the pass, or −1 if its slices differ in length.
func (p *Pass) seeds() int {
	for _, n := range []int{len(p.Slot), len(p.Kind), len(p.Alpha), len(p.Watch),
		len(p.Input), len(p.Norms)} {
		if n != len(p.Stage) {
			return -1
		}
	}
	return len(p.Stage)
}

// Begin fills p for a forward pass starting now, reusing p's memory.
//
// With record set, the caller passes the results to [Lattice.RecordHealth] and
// [Lattice.RecordGradient], and p.Watch selects the seeds to measure. Otherwise Watch is false for
// all seeds.
func (l *Lattice) Begin(p *Pass, record bool) { l.BeginAhead(p, record, 0) }

// BeginAhead is like [Lattice.Begin] for a pass that starts before the results of the given number of
// earlier passes have been recorded. Sampling counts those passes as if their results had been
// recorded.
func (l *Lattice) BeginAhead(p *Pass, record bool, ahead int) {
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

	p.Record, p.Telemetry, p.Epoch, p.Step = record, l.config.Telemetry, l.epoch, l.step+l.ahead+uint64(ahead)
	for i := range n {
		stage := Stage(s.stage[i])
		if len(l.overrides) > 0 {
			if override, ok := l.overrides[i]; ok {
				stage = override
			}
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

// BeginStep sets the number of the training step that [Lattice.Draw] draws for.
func (l *Lattice) BeginStep(step int) { l.training.Store(uint64(step)) }

// Draw replaces the α of seeds in Grafting in a pass filled by Begin with a random one; see
// [WithAlphaNoise]. The values depend only on the training step. Draw serves blueprints that are part
// of a graph, whereas Begin draws for the passes of a Kasmina layer.
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

// RecordHealth records the measurements of the forward pass p. It calls sample for every seed, from
// several goroutines concurrently. Unless p.Record is set, RecordHealth changes nothing.
func (l *Lattice) RecordHealth(p *Pass, sample func(seed int) HealthSample) error {
	l.mu.lockToRecord()
	defer l.mu.Unlock()

	if err := l.checkPass("RecordHealth", p, sample != nil); err != nil {
		return err
	}

	switch {
	case !p.Record:
		return nil
	case l.deferred != nil:
		l.deferHealth(sample)
		return nil
	}

	l.step++
	l.record(recorder{pass: p, health: sample})
	if p.Telemetry.Mode != Off && slices.Contains(p.Watch, true) {
		l.ring.push(l, p, sample)
	}
	return nil
}

// recorder carries the samples of a pass into the lattice. Either health or gradient is set.
type recorder struct {
	pass     *Pass
	health   func(seed int) HealthSample
	gradient func(seed int) GradientSample
	span     func(lo, hi int) // the method value l.recordSpan; kept, because creating it allocates memory
}

// record stores the samples of r, using all cores. recordSpan finds them in l.recorder. The caller holds the
// lock.
func (l *Lattice) record(r recorder) {
	if r.span = l.recorder.span; r.span == nil {
		r.span = l.recordSpan
	}
	l.recorder = r
	cpu.Parallel(l.n, columns.Block, r.span)
	l.recorder = recorder{span: r.span}
}

// recordSpan stores the samples of seeds [lo, hi) and computes their checksums again. A seed that is corrupt
// must stay recognizable as corrupt, so each seed that did not match its checksum before gets a checksum
// that is wrong in the same bits.
func (l *Lattice) recordSpan(lo, hi int) {
	corrupt := l.sums.Faults(lo, hi, l.seeds.crc)

	r := &l.recorder
	for i := lo; i < hi; i++ {
		if r.health != nil {
			h := r.health(i)
			l.seeds.nonFiniteX[i] = addSaturating(l.seeds.nonFiniteX[i], h.NonFinite)
			if h.Moments.Count > 0 {
				l.seeds.takeHealth(i, &h, r.pass.Watch[i])
			}
			continue
		}

		g := r.gradient(i)
		l.seeds.nonFiniteG[i] = addSaturating(l.seeds.nonFiniteG[i], g.NonFinite)
		l.seeds.takeGradient(i, &g, r.pass.Watch[i])
	}

	l.seal(lo, hi)
	for _, fault := range corrupt {
		l.seeds.crc[fault.Row] ^= fault.Syndrome
	}
}

func moments(count, mean, variance float64) Moments {
	return Moments{Count: count, Mean: mean, Variance: variance}
}

// takeHealth stores the health of seed i, and its figures if they were watched.
func (s *seedState) takeHealth(i int, h *HealthSample, watched bool) {
	m := h.Moments
	run := moments(s.runCount[i], s.runMean[i], s.runVariance[i]).Merge(m)

	// Later passes derive limits from the moments, so these must stay finite.
	if m.Valid() && run.Valid() {
		s.stepCount[i], s.stepMean[i], s.stepVariance[i] = m.Count, m.Mean, m.Variance
		s.runCount[i], s.runMean[i], s.runVariance[i] = run.Count, run.Mean, run.Variance
	}
	if watched {
		s.variance[i], s.deadRatio[i] = float32OrInf(h.Health.Variance), float32OrInf(h.Health.DeadRatio)
		s.mean[i], s.snr[i] = toBFloat16(h.Health.Mean), toBFloat16(h.Health.SNR)
		s.lowest[i], s.highest[i] = toBFloat16(h.Health.Min), toBFloat16(h.Health.Max)
	}
}

// RecordGradient records the measurements of the backward pass of p, as [Lattice.RecordHealth]
// does.
func (l *Lattice) RecordGradient(p *Pass, sample func(seed int) GradientSample) error {
	l.mu.lockToRecord()
	defer l.mu.Unlock()

	if err := l.checkPass("RecordGradient", p, sample != nil); err != nil {
		return err
	}

	switch {
	case !p.Record:
		return nil
	case l.deferred != nil:
		l.deferred.Gradient = samples(l.n, sample)
		return nil
	}

	l.record(recorder{pass: p, gradient: sample})
	l.ring.addGradient(l, p)
	return nil
}

// takeGradient stores the gradient of seed i, and its figures if they were watched.
func (s *seedState) takeGradient(i int, g *GradientSample, watched bool) {
	s.clips[i] += uint64(g.Clipped)
	m := moments(s.normCount[i], s.normMean[i], s.normVariance[i]).Merge(g.Norms)
	if m.Valid() {
		s.normCount[i], s.normMean[i], s.normVariance[i] = m.Count, m.Mean, m.Variance
	}
	if watched && g.Norms.Count > 0 {
		s.gradNorm[i] = float32OrInf(g.Gradient.Norm)
		s.gradVariance[i], s.gradMax[i] = toBFloat16(g.Gradient.Variance),
			toBFloat16(g.Gradient.Max)
	}
}

// float32OrInf converts a figure that is stored as a float32. It converts NaN to +Inf, because a NaN means
// that the figure overflowed while it was computed.
func float32OrInf(v float64) float32 {
	if math.IsNaN(v) {
		return float32(math.Inf(1))
	}
	return float32(v)
}

// checkPass checks the arguments of RecordHealth and RecordGradient.
func (l *Lattice) checkPass(method string, p *Pass, sampled bool) error {
	if !sampled {
		return fmt.Errorf("state.%s: %w: sample is nil, want a function", method, ErrArgument)
	}
	if p == nil || l.n == 0 || p.seeds() != l.n {
		return fmt.Errorf("state.%s: %w: the pass does not come from Begin of this lattice of %d seeds",
			method, ErrArgument, l.n)
	}
	return nil
}

// Measured holds the measurements of one batch's passes before a lattice records them.
type Measured struct {
	Health   []HealthSample   // by seed; nil if no forward pass has reported
	Gradient []GradientSample // by seed; nil if no backward pass has reported
}

// Defer makes passes store their measurements in m instead of the lattice, until Defer is called with
// nil. Until then, the passes belong to the batch that is ahead batches from now (0 is the next one),
// and see only figures recorded before the first of these batches.
//
// It is used by processes that compute the batches of a step in parallel. Each process then records
// all measurements, in batch order, with [Lattice.Take].
func (l *Lattice) Defer(m *Measured, ahead int) {
	l.mu.Lock()
	defer l.mu.Unlock()

	l.deferred, l.ahead = m, uint64(ahead)
	if m == nil {
		l.ahead = 0
	}
}

// Take records the measurements of a batch, taken in this process or another, as if its passes had
// run here and now.
func (l *Lattice) Take(m Measured) error {
	if m.Health == nil && m.Gradient == nil {
		return nil
	}

	var p Pass
	l.Begin(&p, true)
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

// deferHealth copies the measurements of a forward pass to l.deferred. The caller holds the lock.
func (l *Lattice) deferHealth(sample func(seed int) HealthSample) {
	l.deferred.Health = samples(l.n, sample)

	// The histograms belong to the caller, who will use them again.
	for i := range l.deferred.Health {
		if h := &l.deferred.Health[i].Histogram; *h != nil {
			own := **h
			*h = &own
		}
	}
}

// samples returns the results of sample for all seeds, using all cores.
func samples[S any](seeds int, sample func(seed int) S) []S {
	all := make([]S, seeds)
	cpu.Parallel(seeds, 64, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			all[i] = sample(i)
		}
	})
	return all
}

// Digest returns a checksum of all lattices' seeds, progress and telemetry settings. Processes
// compare digests to detect that their lattices differ.
func (n *Network) Digest() uint32 {
	var sum uint32
	for _, l := range n.layers {
		sum = l.Lattice.digest(sum)
	}
	return sum
}

// digest returns sum extended by the lattice's own state.
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

// Obey carries out commands between the passes of the model, all or none. The goroutine that runs
// the model calls it, and it must already hold the lock that protects the parameters of the slots.
func (n *Network) Obey(commands ...Command) error {
	defer n.deliver()
	return n.do(commands)
}

// ApplyShared is like [Network.Apply], but for several processes that train the same model. Each process
// carries out the commands that were submitted to any of them.
//
// exchange receives the commands submitted here and returns the commands of all processes, in the
// same order in every process, and the index of the first command of this process. If it fails, its
// error becomes the answer to all commands submitted here, and ApplyShared returns it.
func (n *Network) ApplyShared(exchange func(own [][]Command) (all [][]Command,
	at int, err error)) error {
	waiting := n.queue.take(false)
	own := make([][]Command, len(waiting))
	for i, s := range waiting {
		own[i] = s.commands
	}

	all, at, err := exchange(own)
	if err == nil && (at < 0 || at+len(own) > len(all)) {
		err = fmt.Errorf("state.ApplyShared: %w: %d own submissions do not fit among the %d that exchange returned, from index %d", ErrArgument,
			len(own), len(all), at)
	}

	if err != nil {
		for _, s := range waiting {
			s.done <- err
		}
		return err
	}

	// If a listener panics, the remaining submissions still get an answer.
	answered := 0
	defer func() {
		for _, s := range waiting[answered:] {
			s.done <- errListener
		}
	}()

	for i, commands := range all {
		err := n.do(commands)
		if i >= at && i < at+len(own) {
			answered++ // first, so that the deferred function does not answer again
			waiting[answered-1].done <- err
		}
		n.deliver()
	}

	return nil
}
