package op

import (
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/cpu"
	cpukasmina "github.com/kasmina-go/kasmina/internal/cpu/kasmina"
	cpufigures "github.com/kasmina-go/kasmina/internal/cpu/kasmina/figures"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/seed"
	"github.com/kasmina-go/kasmina/state"
)

// kasminaRun holds the state that a run of the forward op shares with its replays and its backward op.
type kasminaRun struct {
	mu    sync.Mutex
	begun bool
	pass  state.Pass // the snapshot that they all use
	plan  any        // *cpukasmina.Layer[T]; every run reuses its buffers

	health     func(seed int) state.HealthSample // measurements of the plan's last run
	gradient   func(seed int) state.GradientSample
	histograms [][cpufigures.Exponents]uint32 // of the last forward pass, in debug mode
}

var errNotRun = errors.New("the layer's forward pass has not run")

// catch converts the panic of a blueprint's function to an error. Gorgonia's machine runs ops on a
// separate goroutine, where the caller cannot recover from a registered blueprint's panic. Other
// panics are bugs in this module, so catch does not intercept them.
func (r *kasminaRun) catch(err *error) {
	cause := recover()
	if cause == nil {
		return
	}

	if p, ok := cause.(*cpu.Panic); ok {
		if rule, ok := p.Value.(cpukasmina.RulePanic); ok {
			*err = fmt.Errorf("seed %d: %w in %v: %v\n\n%s", rule.Seed, ErrBlueprint,
				r.pass.Kind[rule.Seed], rule.Value, p.Stack)
			return
		}
	}

	panic(cause)
}

// kasmina is the forward kernel.
func kasmina[T cpu.Float](o *KasminaOp, y []T, in opbase.Args) (err error) {
	r := o.run
	r.mu.Lock()
	defer r.mu.Unlock()

	defer r.catch(&err)
	if o.Replaying && !r.begun {
		return errNotRun
	}

	if !o.Replaying {
		o.Lattice.Begin(&r.pass, !o.Config.NoTelemetry)
		r.begun = true
	}

	if err := o.attached(&r.pass); err != nil {
		return err
	}

	k, err := kasminaPlan[T](o)
	if err != nil {
		return err
	}

	x, weights, scales := opbase.Slice[T](in, 0), opbase.Slice[T](in, 1), opbase.Slice[T](in, 2)
	if err := startSlots(o, k, weights, scales); err != nil {
		return err
	}

	run := func() { k.Forward(y, x, weights, scales) }
	if o.Replaying {
		run()
		return nil
	}

	cost := timed(o, y, x, run)
	defer cost.record(o)
	if r.pass.Record {
		for s, watch := range r.pass.Watch {
			// The limits of the next pass depend on the moments.
			k.Measure[s] = watch || o.Config.Stability == Strict
		}
	}

	run()
	bad := countNonFinite(k.Figures)
	if r.pass.Record {
		r.histograms = nil
		if r.pass.Telemetry.Mode == state.Debug {
			r.histograms = k.Exponents(x)
		}
		if err := o.Lattice.RecordHealth(&r.pass, r.health); err != nil {
			return err
		}
	}

	return bad.error(o, "x")
}

// kasminaGrad is the backward kernel.
func kasminaGrad[T cpu.Float](b *KasminaGradOp, out []T, in opbase.Args) (err error) {
	o, r := b.Forward, b.Forward.run
	r.mu.Lock()
	defer r.mu.Unlock()

	defer r.catch(&err)
	if !r.begun {
		return errNotRun
	}

	k, err := kasminaPlan[T](o)
	if err != nil {
		return err
	}

	k.Limit = gradLimits(o, k.Limit)
	x, weights, scales, g := opbase.Slice[T](in, 0), opbase.Slice[T](in, 1), opbase.Slice[T](in, 2),
		opbase.Slice[T](in, 4)

	// The machine may have passed copies of the weights to the forward pass. The weights passed to the
	// backward pass then still need their start.
	if err := startSlots(o, k, weights, scales); err != nil {
		return err
	}

	dx, rest := out[:len(x)], out[len(x):]
	dweights, dscales := rest[:len(weights)], rest[len(weights):]
	run := func() { k.Backward(dx, dweights, dscales, g, x, weights, scales) }
	cost := timed(o, dx, g, run)
	defer cost.record(o)
	if r.pass.Record {
		for s, watch := range r.pass.Watch {
			// The limits of the next pass depend on the norms.
			k.Measure[s] = watch || o.Config.AdaptiveClip > 0
		}
	}

	run()
	bad := countNonFinite(k.Figures)
	if r.pass.Record {
		if err := o.Lattice.RecordGradient(&r.pass, r.gradient); err != nil {
			return err
		}
	}

	return bad.error(o, "the gradient of y")
}

// timedEvery is the number of steps from one timed pass to the next.
const timedEvery = 128

// passCost is the measured cost so far of a timed pass.
type passCost struct {
	kernel time.Duration // time without telemetry; 0 if the pass is not timed
	start  time.Time     // when the pass with telemetry started
	bytes  int
}

// timed must be called when everything except the list of measurements is ready to run. If the pass
// is to be timed, timed runs the arithmetic twice without telemetry. The first run fills the
// caches, and the second is measured.
func timed[T cpu.Float](o *KasminaOp, out, in []T, run func()) passCost {
	p := &o.run.pass
	if !p.Record || p.Telemetry.Mode == state.Off || p.Step%timedEvery != 0 || &out[0] == &in[0] {
		return passCost{}
	}
	run()
	start := time.Now()
	run()
	now := time.Now()
	return passCost{now.Sub(start), now, 2 * len(in) * int(unsafe.Sizeof(in[0]))}
}

// record reports to the lattice, after the pass, how much longer it took with telemetry.
func (c passCost) record(o *KasminaOp) {
	if c.kernel > 0 {
		o.Lattice.RecordTiming(state.Timing{Kernel: c.kernel, Telemetry: time.Since(c.start) - c.kernel,
			Bytes: int64(c.bytes)})
	}
}

// kasminaPlan prepares the arithmetic for the snapshot of o's run, with all participating seeds. The
// plan does not measure anything yet.
func kasminaPlan[T cpu.Float](o *KasminaOp) (*cpukasmina.Layer[T], error) {
	k, ok := o.run.plan.(*cpukasmina.Layer[T])
	x, weights := o.InputShape(0), o.InputShape(1)
	if !ok {
		seeds := o.Lattice.Seeds()
		k = &cpukasmina.Layer[T]{
			Rows: x[0], Seeds: seeds, Chunk: x[1] / seeds, Slots: weights[0], Width: weights[1],
			Stability: seed.Stability(o.Config.Stability),
			Eps:       o.Config.Epsilon,
			Measure:   make([]bool, seeds),
		}
		o.run.plan, o.run.health, o.run.gradient = k, healthSamples(o.run, k), gradientSamples(k)
	}

	p := &o.run.pass
	k.Reduce = seed.Reduction(p.Telemetry.Reduction)
	clear(k.Measure)
	k.Active = k.Active[:0]
	for i := range p.Stage {
		if err := k.Activate(i, o.seed(p, i)); err != nil {
			return nil, fmt.Errorf("%w (shape %v)", err, weights)
		}
	}

	return k, nil
}

// seed returns the properties of seed i in a pass, except Limit. Low and High change from pass to
// pass. They are 0 unless the mode is Strict.
func (o *KasminaOp) seed(p *state.Pass, i int) seed.Seed {
	s := seed.Seed{Kind: p.Kind[i], Slot: p.Slot[i], Blend: p.Stage[i].Blends(),
		Learn: p.Stage[i].Learns(), Alpha: p.Alpha[i]}
	if blueprints.IsGraph(s.Kind) { // the surrounding graph computes it
		s = seed.Seed{}
	}
	if o.Config.Stability == Strict {
		s.Low, s.High = clampLimits(p.Input[i])
	}
	return s
}

// attached returns an error if a seed's kind is a graph that the surrounding graph does not compute.
func (o *KasminaOp) attached(p *state.Pass) error {
	for i, stage := range p.Stage {
		if (stage.Blends() || stage.Learns()) && blueprints.IsGraph(p.Kind[i]) &&
			!slices.Contains(o.Config.Graphs, i) {
			return fmt.Errorf("seed %d: %w %q is a graph that is not part of the running one: "+
				"llm.Trainer adds it before a step; Model.Graph adds the graphs of seeds that are "+
				"active when it is called; graphs that you build yourself need a kind with "+
				"arithmetic (blueprints.Register)", i, blueprints.ErrInvalid, p.Kind[i])
		}
	}
	return nil
}

// startSlots writes the identity start to the unwritten slots of active seeds. The weights and scale of
// an unwritten slot are all 0.
func startSlots[T cpu.Float](o *KasminaOp, k *cpukasmina.Layer[T], weights, scales []T) error {
	for i := range k.Active {
		s := &k.Active[i]
		slot := int(s.Slot)
		row := weights[slot*k.Width:][:k.Width]
		if scales[slot] != 0 || slices.ContainsFunc(row, func(w T) bool { return w != 0 }) {
			continue
		}
		draw := o.draw(s.Index, slot)
		if err := blueprints.Identity(s.Kind, slot, k.Chunk, draw, weights, scales); err != nil {
			return fmt.Errorf("seed %d: %w", s.Index, err)
		}
	}

	return nil
}

// draw returns the random seed for the identity start of a slot. It depends on the name of the layer's
// weights, the seed and the slot, so it is the same in every run of a program, and layers with different
// weight names get different seeds.
func (o *KasminaOp) draw(seed, slot int) uint64 {
	h := fnv.New64a()
	fmt.Fprint(h, o.inputs[1].Name())
	return rand.NewPCG(h.Sum64(), uint64(seed)<<32|uint64(slot)).Uint64()
}

// clampLimits returns mean ± 6σ, or ±Inf if nothing has been measured.
func clampLimits(m state.Moments) (low, high float64) {
	if m.Count == 0 {
		return math.Inf(-1), math.Inf(1)
	}
	reach := 6 * math.Sqrt(m.Variance)
	return m.Mean - reach, m.Mean + reach
}

// gradLimits returns the maximum norm of a row's gradient for each seed, or nil if o does not clip.
// It reuses limits.
func gradLimits(o *KasminaOp, limits []float64) []float64 {
	if o.Config.GradClip == 0 && o.Config.AdaptiveClip == 0 {
		return nil
	}

	if limits == nil {
		limits = make([]float64, len(o.run.pass.Stage))
	}

	for s, m := range o.run.pass.Norms {
		switch {
		case o.Config.GradClip > 0:
			limits[s] = o.Config.GradClip
		case m.Count == 0:
			limits[s] = math.Inf(1)
		default:
			limits[s] = m.Mean + o.Config.AdaptiveClip*math.Sqrt(m.Variance)
		}
	}

	return limits
}

func moments(m cpufigures.Moments) state.Moments {
	return state.Moments{Count: m.N, Mean: m.Mean, Variance: m.Variance()}
}

func healthSamples[T cpu.Float](r *kasminaRun,
	k *cpukasmina.Layer[T]) func(int) state.HealthSample {
	return func(seed int) state.HealthSample {
		f := &k.Figures[seed]
		v := f.Health(k.Reduce, k.Eps)
		h := state.HealthSample{
			Health: state.Health{Variance: v[0], Mean: v[1], Min: v[2], Max: v[3],
				DeadRatio: v[4], SNR: v[5]},
			Moments:   moments(f.Moments),
			NonFinite: f.Bad,
		}
		if r.histograms != nil {
			h.Histogram = (*state.Histogram)(&r.histograms[seed])
		}
		return h
	}
}

func gradientSamples[T cpu.Float](k *cpukasmina.Layer[T]) func(int) state.GradientSample {
	return func(seed int) state.GradientSample {
		f := &k.Figures[seed]
		v := f.Gradient(k.Reduce)
		return state.GradientSample{
			Gradient:  state.Gradient{Norm: v[0], Variance: v[1], Max: v[2]},
			Norms:     moments(f.Norms),
			NonFinite: f.Bad,
			Clipped:   f.Clipped,
		}
	}
}

// nonFinite counts NaN and Inf: the first seed with any, the number of such seeds, and the number
// of elements.
type nonFinite struct{ seed, seeds, elements int }

func countNonFinite(figures []cpufigures.Chunk) (n nonFinite) {
	for seed := range figures {
		if bad := figures[seed].Bad; bad > 0 {
			if n.seeds == 0 {
				n.seed = seed
			}
			n.seeds++
			n.elements += bad
		}
	}
	return n
}

// error returns an error if n is not empty and the layer stops on NaN and Inf. where names the
// tensor.
func (n nonFinite) error(o *KasminaOp, where string) error {
	if n.elements == 0 || !o.Config.StopOnNonFinite {
		return nil
	}
	return fmt.Errorf("%w in %s: %d elements in the chunks of %d seeds, the first of them seed %d",
		ErrNonFinite, where, n.elements, n.seeds, n.seed)
}
