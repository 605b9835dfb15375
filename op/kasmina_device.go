package op

import (
	"errors"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/seed"
	"github.com/kasmina-go/kasmina/state"
)

// KasminaPass is a pass of a Kasmina layer for code that performs the arithmetic outside the op, for
// example on a GPU. It takes a snapshot of the lattice for the arithmetic, and afterwards records the
// measurements in the lattice, like the op's own run. [KasminaOp.NewPass] creates a KasminaPass. A
// zero KasminaPass has no seeds, and all its methods that can return an error do so.
type KasminaPass struct {
	op     *KasminaOp
	origin *kasminaRun // the run of the op itself
	limits []float64

	begun    bool
	revision uint64 // revision of the lattice when the pass began
}

// NewPass returns a pass that has not begun and does not affect the op's own runs. For a zero
// KasminaOp it returns a zero KasminaPass.
func (o *KasminaOp) NewPass() *KasminaPass {
	if !o.initialized() {
		return new(KasminaPass)
	}
	return &KasminaPass{op: &KasminaOp{Lattice: o.Lattice, Config: o.Config, run: &kasminaRun{}},
		origin: o.run}
}

// SharesRun reports whether o and p use the same snapshot because one replays the other or both
// replay a third op.
func (o *KasminaOp) SharesRun(p *KasminaOp) bool { return p != nil && o.run == p.run }

// Begin takes the snapshot of the lattice.
func (p *KasminaPass) Begin() { p.BeginAhead(0) }

// BeginAhead is like Begin for a pass that starts before the measurements of the given number of earlier
// passes have been recorded.
func (p *KasminaPass) BeginAhead(ahead int) {
	// If the lattice changes in between, the snapshot is newer than the revision, which is harmless.
	p.begun, p.revision = true, p.op.Lattice.Revision()
	p.op.Lattice.BeginAhead(&p.op.run.pass, !p.op.Config.NoTelemetry, ahead)
	p.limits = gradLimits(p.op, p.limits)
}

// Current reports whether Begin would take the snapshot that the pass already has, because the layer
// records no telemetry and its lattice has not changed.
func (p *KasminaPass) Current() bool {
	return p.begun && p.op.Config.NoTelemetry && !p.NeedsLast() &&
		p.revision == p.op.Lattice.Revision()
}

// Revision returns the revision of the lattice when the pass began.
func (p *KasminaPass) Revision() uint64 { return p.revision }

// Attached returns an error if a seed's kind is a graph that the surrounding graph does not compute.
func (p *KasminaPass) Attached() error {
	return p.op.attached(&p.op.run.pass)
}

// Leave stores the snapshot in place of that of the op's own last run, for a separately computed
// backward pass.
func (p *KasminaPass) Leave() {
	p.origin.mu.Lock()
	defer p.origin.mu.Unlock()

	copyPass(&p.origin.pass, &p.op.run.pass)
	p.origin.begun = true
}

// Resume takes the snapshot of the op's own last run instead of a new one. It returns an error unless
// that snapshot was stored by Leave or the op's Do.
func (p *KasminaPass) Resume() error {
	p.origin.mu.Lock()
	defer p.origin.mu.Unlock()

	if !p.origin.begun {
		return errNotRun
	}

	copyPass(&p.op.run.pass, &p.origin.pass)
	p.begun = false
	p.limits = gradLimits(p.op, p.limits)
	return nil
}

// copyPass copies *src to *dst without sharing memory. It reuses the memory of dst.
func copyPass(dst, src *state.Pass) {
	old := *dst
	*dst = *src
	dst.Stage, dst.Slot = append(old.Stage[:0], src.Stage...), append(old.Slot[:0], src.Slot...)
	dst.Kind, dst.Alpha = append(old.Kind[:0], src.Kind...), append(old.Alpha[:0], src.Alpha...)
	dst.Watch, dst.Input = append(old.Watch[:0], src.Watch...), append(old.Input[:0], src.Input...)
	dst.Norms = append(old.Norms[:0], src.Norms...)
}

// Snapshot returns the snapshot taken by Begin or Resume. The caller must not modify it.
func (p *KasminaPass) Snapshot() *state.Pass {
	return &p.op.run.pass
}

// Start writes the kind's identity start to the weights and the scale of a seed's slot if they are
// all 0, which means that they are unwritten. scale has one element. started reports whether Start
// wrote them.
func (o *KasminaOp) Start(kind blueprints.Kind, seed, slot int,
	weights, scale []float32) (started bool, err error) {
	if !o.initialized() {
		return false, errors.New("op: the KasminaOp is its zero value, want one that Kasmina returns")
	}

	if len(scale) != 1 || scale[0] != 0 || slices.ContainsFunc(weights, func(w float32) bool {
		return w != 0
	}) {
		return false, nil
	}

	w, a := make([]float32, 2*len(weights)), make([]float32, 2) // like the rows of slots 0 and 1
	if err := blueprints.Identity(kind, 1, o.Chunk(), o.draw(seed, slot), w, a); err != nil {
		return false, err
	}

	copy(weights, w[len(weights):])
	scale[0] = a[1]
	return true, nil
}

// KasminaSeed holds the properties of a seed in a pass.
type KasminaSeed = seed.Seed

// Seed returns the properties of seed i that the arithmetic needs. Limit is 0 unless the layer clips.
// If there is no seed i in the snapshot, Seed returns a zero KasminaSeed.
func (p *KasminaPass) Seed(i int) KasminaSeed {
	if i < 0 || i >= len(p.Snapshot().Stage) {
		return KasminaSeed{}
	}
	k := p.op.seed(&p.op.run.pass, i)
	if p.limits != nil {
		k.Limit = p.limits[i]
	}
	return k
}

// Measures reports whether this pass must record more than the number of NaN and Inf. In a sampling
// pass, there may be no seed to measure.
func (p *KasminaPass) Measures() bool {
	s := p.Snapshot()
	return s.Record && (slices.Contains(s.Watch, true) || p.NeedsLast())
}

// NeedsLast reports whether the limits of this pass depend on the measurements of the previous pass.
// These must then be in the lattice before this pass starts.
func (p *KasminaPass) NeedsLast() bool {
	return p.op != nil && (p.op.Config.Stability == Strict || p.op.Config.AdaptiveClip > 0)
}

// RecordHealth records the measurements of a forward pass in the lattice. It calls sample for every
// seed, from several goroutines. The error wraps [ErrNonFinite] if the layer stops on NaN or Inf and
// found one in x.
func (p *KasminaPass) RecordHealth(sample func(seed int) state.HealthSample) error {
	if err := p.canRecord(sample != nil); err != nil {
		return err
	}

	s := &p.op.run.pass
	bad := p.countNonFinite(func(seed int) int { return sample(seed).NonFinite })
	if s.Record {
		err := p.op.Lattice.RecordHealth(s, func(seed int) state.HealthSample {
			h := sample(seed)
			if !s.Watch[seed] && p.op.Config.Stability != Strict {
				h = state.HealthSample{NonFinite: h.NonFinite}
			}
			return h
		})
		if err != nil {
			return err
		}
	}

	return bad.error(p.op, "x")
}

// RecordGradient records the measurements of a backward pass in the same way. The error wraps
// [ErrNonFinite] if the layer stops on NaN or Inf and found one in the gradient of y.
func (p *KasminaPass) RecordGradient(sample func(seed int) state.GradientSample) error {
	if err := p.canRecord(sample != nil); err != nil {
		return err
	}

	s := &p.op.run.pass
	bad := p.countNonFinite(func(seed int) int { return sample(seed).NonFinite })
	if s.Record {
		err := p.op.Lattice.RecordGradient(s, func(seed int) state.GradientSample {
			g := sample(seed)
			if !s.Watch[seed] && p.op.Config.AdaptiveClip == 0 {
				g = state.GradientSample{NonFinite: g.NonFinite, Clipped: g.Clipped}
			}
			return g
		})
		if err != nil {
			return err
		}
	}

	return bad.error(p.op, "the gradient of y")
}

func (p *KasminaPass) canRecord(sampled bool) error {
	if !sampled {
		return errors.New("op: the function that returns samples is nil")
	}
	return nil
}

func (p *KasminaPass) countNonFinite(of func(seed int) int) (n nonFinite) {
	for seed := range p.op.run.pass.Stage {
		if bad := of(seed); bad > 0 {
			if n.seeds == 0 {
				n.seed = seed
			}
			n.seeds++
			n.elements += bad
		}
	}
	return n
}
