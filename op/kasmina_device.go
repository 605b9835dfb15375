package op

import (
	"errors"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/seed"
	"github.com/kasmina-go/kasmina/state"
)

// KasminaPass is a pass of a Kasmina layer whose arithmetic somebody else does, such as a machine
// on a GPU. It takes the snapshot of the lattice that the arithmetic goes by. It hands the lattice
// what was measured, as the op's own run does. [KasminaOp.NewPass] makes one; a zero value has no
// seeds, and what can fail does.
type KasminaPass struct {
	op     *KasminaOp
	origin *kasminaRun // the op's own
	limits []float64
}

// NewPass returns a pass that has not begun. It is independent of the op's own runs. That of
// a zero value is one.
func (o *KasminaOp) NewPass() *KasminaPass {
	if !o.made() {
		return new(KasminaPass)
	}
	return &KasminaPass{op: &KasminaOp{Lattice: o.Lattice, Config: o.Config, run: &kasminaRun{}},
		origin: o.run}
}

// SharesRun reports whether o and p go by the same snapshot: one replays the other, or both a
// third.
func (o *KasminaOp) SharesRun(p *KasminaOp) bool { return p != nil && o.run == p.run }

// errZeroPass is the error of a pass that nobody has made.
var errZeroPass = errors.New("op: the KasminaPass is its zero value, want one that NewPass returns")

// Begin takes the snapshot.
func (p *KasminaPass) Begin() {
	if p.op == nil {
		return
	}
	p.op.Lattice.Begin(&p.op.run.pass, !p.op.Config.NoTelemetry)
	p.limits = gradLimits(p.op, p.limits)
}

// Attached returns an error if a seed works with a kind that is a graph, and nobody computes that.
func (p *KasminaPass) Attached() error {
	if p.op == nil {
		return errZeroPass
	}
	return p.op.attached(&p.op.run.pass)
}

// Leave makes the snapshot that of the op's own last run, for a backward pass that is computed
// apart from this one.
func (p *KasminaPass) Leave() {
	if p.origin == nil {
		return
	}
	p.origin.mu.Lock()
	defer p.origin.mu.Unlock()
	copyPass(&p.origin.pass, &p.op.run.pass)
	p.origin.begun = true
}

// Resume takes, in place of Begin, the snapshot of the op's own last run: what Leave has left, or
// the op's Do.
func (p *KasminaPass) Resume() error {
	if p.origin == nil {
		return errZeroPass
	}
	p.origin.mu.Lock()
	defer p.origin.mu.Unlock()
	if !p.origin.begun {
		return errNotRun
	}
	copyPass(&p.op.run.pass, &p.origin.pass)
	p.limits = gradLimits(p.op, p.limits)
	return nil
}

// copyPass is *dst = *src without shared memory; dst's is used again.
func copyPass(dst, src *state.Pass) {
	old := *dst
	*dst = *src
	dst.Stage, dst.Slot = append(old.Stage[:0], src.Stage...), append(old.Slot[:0], src.Slot...)
	dst.Kind, dst.Alpha = append(old.Kind[:0], src.Kind...), append(old.Alpha[:0], src.Alpha...)
	dst.Watch, dst.Input = append(old.Watch[:0], src.Watch...), append(old.Input[:0], src.Input...)
	dst.Norms = append(old.Norms[:0], src.Norms...)
}

// Snapshot is what Begin has found. It is not to be changed.
func (p *KasminaPass) Snapshot() *state.Pass {
	if p.op == nil {
		return new(state.Pass)
	}
	return &p.op.run.pass
}

// Start makes the weights and the one scale of a seed's slot the identity start of its kind, if all
// are 0. They have then not been written yet. It reports whether it has.
func (o *KasminaOp) Start(kind blueprints.Kind, seed, slot int,
	weights, scale []float32) (started bool, err error) {
	if !o.made() {
		return false, errors.New("op: the KasminaOp is its zero value, want one that Kasmina returns")
	}
	if len(scale) != 1 || scale[0] != 0 || slices.ContainsFunc(weights, func(w float32) bool {
		return w != 0
	}) {
		return false, nil
	}
	w, a := make([]float32, 2*len(weights)), make([]float32, 2) // as the rows of slots 0 and 1
	if err := blueprints.Identity(kind, 1, o.Chunk(), o.draw(seed, slot), w, a); err != nil {
		return false, err
	}
	copy(weights, w[len(weights):])
	scale[0] = a[1]
	return true, nil
}

// KasminaSeed is a seed as a pass finds it.
type KasminaSeed = seed.Seed

// Seed returns what arithmetic needs to know of a seed. Limit is 0 unless the layer clips. Of a seed
// that the snapshot does not have it returns a zero value.
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

// Measures reports whether this pass shall tell the lattice anything but the number of NaN and Inf.
// A sampling pass may watch no seed.
func (p *KasminaPass) Measures() bool {
	s := p.Snapshot()
	return s.Record && (slices.Contains(s.Watch, true) || p.NeedsLast())
}

// NeedsLast reports whether this pass makes its limits of what the pass before it has measured.
// That must then be in the lattice before this one begins.
func (p *KasminaPass) NeedsLast() bool {
	return p.op != nil && (p.op.Config.Stability == Strict || p.op.Config.AdaptiveClip > 0)
}

// RecordHealth gives the lattice what a forward pass has measured; sample is called for every seed,
// from several goroutines. The error wraps [ErrNonFinite] when the layer shall stop at what was
// met.
func (p *KasminaPass) RecordHealth(sample func(seed int) state.HealthSample) error {
	if err := p.canRecord(sample != nil); err != nil {
		return err
	}
	s := &p.op.run.pass
	bad := p.countNonFinite(func(seed int) int { return sample(seed).NonFinite })
	if s.Record || bad.elements > 0 {
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

// RecordGradient does the same for a backward pass.
func (p *KasminaPass) RecordGradient(sample func(seed int) state.GradientSample) error {
	if err := p.canRecord(sample != nil); err != nil {
		return err
	}
	s := &p.op.run.pass
	bad := p.countNonFinite(func(seed int) int { return sample(seed).NonFinite })
	if s.Record || bad.elements > 0 {
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
	switch {
	case p.op == nil:
		return errZeroPass
	case !sampled:
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
