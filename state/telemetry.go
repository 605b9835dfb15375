package state

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/seed"
	"github.com/kasmina-go/kasmina/state/graft"
	"github.com/kasmina-go/kasmina/state/internal/columns"
)

// TelemetryMode says when figures are collected.
type TelemetryMode uint8

// The telemetry modes.
const (
	Production TelemetryMode = iota // every pass, every seed
	Sampling                        // every n-th pass, or a share of the seeds, or both
	Debug                           // as Production, with a histogram of every seed's activations
	Off                             // nothing; NaN and Inf are still counted
)

var modeNames = [...]string{"Production", "Sampling", "Debug", "Off"}

// String returns the mode's name.
func (m TelemetryMode) String() string { return nameOf(m, "TelemetryMode", modeNames[:]) }

// Reduction says how the figures of a chunk's rows become those of the seed.
type Reduction uint8

// The reductions.
const (
	// the exact figures over all rows × C elements, by merging partial moments
	Hierarchical = Reduction(seed.Exact)
	MeanOfRows   = Reduction(seed.Mean) // the average of the figures of the rows
	MaxOfRows    = Reduction(seed.Max)  // the largest figure of any row
)

var reductionNames = [...]string{"Hierarchical", "MeanOfRows", "MaxOfRows"}

// String returns the reduction's name.
func (r Reduction) String() string { return nameOf(r, "Reduction", reductionNames[:]) }

// Telemetry configures what is measured.
type Telemetry struct {
	Mode      TelemetryMode `json:"mode"`
	Reduction Reduction     `json:"reduction"`
	// Sampling: measure every n-th pass; 0 and 1 mean every pass
	Every int `json:"every"`
	// Sampling: measure this share of the seeds, in turn; 0 and 1 mean all
	Share float64 `json:"share"`
}

func (t Telemetry) check() error {
	switch {
	case int(t.Mode) >= len(modeNames):
		return fmt.Errorf("telemetry Mode is %d, want Production, Sampling, Debug or Off", t.Mode)
	case int(t.Reduction) >= len(reductionNames):
		return fmt.Errorf("telemetry Reduction is %d, want Hierarchical, MeanOfRows or MaxOfRows",
			t.Reduction)
	case t.Every < 0:
		return fmt.Errorf("telemetry Every is %d, want at least 0", t.Every)
	case !(t.Share >= 0 && t.Share <= 1):
		return fmt.Errorf("telemetry Share is %v, want a number from 0 to 1", t.Share)
	}
	return nil
}

// watches reports whether a seed's figures are collected in the given pass. The sampled seeds of
// one pass are spread evenly over the lattice, and move on by one share from pass to pass, so that
// all get their turn.
func (t Telemetry) watches(seed int, step uint64) bool {
	switch t.Mode {
	case Off:
		return false
	case Sampling:
		if t.Every > 1 && step%uint64(t.Every) != 0 {
			return false
		}
		if t.Share > 0 && t.Share < 1 {
			const unit = 1 << 32
			share, turn := max(1, uint64(t.Share*unit)), step/uint64(max(1, t.Every))
			return (uint64(seed)+turn)*share%unit < share
		}
	}
	return true
}

// SetTelemetry changes what is measured, from the next forward pass on. It returns an error, and
// changes nothing, when a field of t is out of range.
func (l *Lattice) SetTelemetry(t Telemetry) error {
	if err := t.check(); err != nil {
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

// Health are the six figures of a seed's input chunk, before any clamp. Non-finite elements are
// counted, not included. In a [Report], Variance and DeadRatio have float32 precision and the
// others that of a bfloat16, 2⁻⁹, over the same range.
type Health struct {
	Variance  float64 // mean squared deviation from the mean
	Mean      float64
	Min, Max  float64
	DeadRatio float64 // share of elements with |x| < ε
	SNR       float64 // signal-to-noise ratio |mean|/sqrt(variance + ε)
}

// Gradient are the three figures of the gradient of a seed's output chunk, before any clipping. In
// a [Report], Norm has float32 precision and the others that of a bfloat16, 2⁻⁹, over the same
// range.
type Gradient struct {
	Norm     float64 // square root of the sum of squares
	Variance float64
	Max      float64 // largest magnitude
}

// Moments sum up numbers: how many, their mean, and the mean squared deviation from it.
type Moments struct{ Count, Mean, Variance float64 }

// ok reports whether numbers can have these moments.
func (m Moments) ok() bool {
	return m.Count >= 0 && m.Variance >= 0 && finite(m.Count) &&
		finite(m.Mean) && finite(m.Variance)
}

// merge returns the moments of the numbers of m and n together (Chan, Golub and LeVeque, "Updating
// Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979).
func (m Moments) merge(n Moments) Moments {
	if n.Count == 0 {
		return m
	}
	if m.Count == 0 {
		return n
	}
	count := m.Count + n.Count
	f, d := n.Count/count, n.Mean-m.Mean
	return Moments{count, m.Mean + d*f, m.Variance*(1-f) + n.Variance*f + d*d*f*(1-f)}
}

// HistogramBins is the length of a histogram of activations. Bin i counts the elements with
// 2^(i−24) ≤ |x| < 2^(i−23); bin 0 also holds all smaller ones and the last bin all larger ones.
const HistogramBins = 40

// Histogram counts elements by their magnitude; see [HistogramBins].
type Histogram [HistogramBins]uint32

// HealthSample is what a forward pass has measured of one seed.
type HealthSample struct {
	Health Health // reduced as Pass.Telemetry says
	// of all finite elements, whatever the reduction; Count 0 when not measured
	Moments   Moments
	NonFinite int        // elements that are NaN or Inf
	Histogram *Histogram // in mode Debug; nil otherwise. It is copied.
}

// GradientSample is what a backward pass has measured of one seed.
type GradientSample struct {
	Gradient  Gradient // reduced as Pass.Telemetry says
	Norms     Moments  // of the rows' gradient norms; Count 0 when not measured
	NonFinite int
	Clipped   int // rows whose gradient was clipped
}

// Pass is what a forward pass, and the backward pass that belongs to it, know of the lattice: a
// copy, taken at the start of the forward pass, that later commands do not change. Slices have one
// element for each seed. It is for those who execute the layer; the others use [Lattice.Report].
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
		p.Watch[i] = record && p.Telemetry.watches(i, p.Step)
		p.Input[i] = Moments{s.stepCount[i], s.stepMean[i], s.stepVariance[i]}
		p.Norms[i] = Moments{s.normCount[i], s.normMean[i], s.normVariance[i]}
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

func (s *seedState) takeHealth(i int, h *HealthSample, watched bool) {
	m := h.Moments
	run := Moments{s.runCount[i], s.runMean[i], s.runVariance[i]}.merge(m)
	if m.ok() && run.ok() { // limits are made of them, which must not be infinite
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
	m := Moments{s.normCount[i], s.normMean[i], s.normVariance[i]}.merge(g.Norms)
	if m.ok() {
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

// drift is the relative change of a chunk's moments: the change of its root mean square or of its
// mean, whichever is larger, relative to the former root mean square.
func drift(mean0, variance0, mean1, variance1 float64) float64 {
	rms0, rms1 := math.Sqrt(mean0*mean0+variance0), math.Sqrt(mean1*mean1+variance1)
	if rms0 == 0 {
		return 0
	}
	return math.Max(math.Abs(rms1-rms0), math.Abs(mean1-mean0)) / rms0
}

// Measured is what the passes of one batch have measured of a lattice, not yet taken in.
type Measured struct {
	Recorded bool             // whether the passes were made with telemetry
	Health   []HealthSample   // by seed; nil where no forward pass has reported
	Gradient []GradientSample // by seed; nil where no backward pass has reported
}

// Defer makes passes leave what they measure in m, in the place of the lattice, until it is called
// with nil. They count as those of the ahead-th batch from now, from 0, and know of the figures
// before the first alone. Processes that compute the batches of a step side by side do so: each
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

// Digest is a checksum of the lattices' seeds and of how far they are. Processes whose lattices
// shall be the same compare it.
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
	return crc32.Update(sum, crc32.IEEETable, b)
}

// Obey carries out one command, for whoever runs the model, between the passes of the model.
func (n *Network) Obey(c Command) error {
	n = n.orNone()
	defer n.deliver()
	return n.do([]Command{c})
}

// ApplyShared is [Network.Apply] of several processes with the same model: what was submitted to
// any of them is carried out at each. exchange hands over the commands that were submitted here,
// and returns those of all processes in an order that all have; at is the place of its own among
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
