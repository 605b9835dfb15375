package optim

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu/optimizer"
	"github.com/kasmina-go/kasmina/internal/parallel"
	"github.com/kasmina-go/kasmina/internal/params"
)

// Scale says how Muon scales the orthogonalised update of a rows×cols matrix.
type Scale int

const (
	// SpectralScale is sqrt(max(1, rows/cols)), Keller Jordan's: a step of a given rate changes
	// what a layer does by about as much whatever its shape.
	SpectralScale Scale = iota
	// RMSScale is 0.2·sqrt(max(rows, cols)): updates are about as large, element by element, as
	// AdamW's, whose learning rates then fit. (Liu et al., "Muon is Scalable for LLM Training",
	// 2025.)
	RMSScale
)

// Muon updates matrices along the orthogonal factor of their momentum, as [op.NewtonSchulz]
// approximates it. It leaves the other parameters to AdamW: vectors, and embeddings and output
// layers, whose rows are independent.
//
//	m ← μ·m + (1−μ)·g,   u = (1−μ)·g + μ·m
//	p ← (1 − lr·decay)·p − lr · scale · NewtonSchulz(u)
//
// A weight stored as [out, in] has rows = out. A gradient beyond a quarter of the largest number
// counts as that, so that m stays finite. (Keller Jordan, "Muon: An optimizer for hidden
// layers in neural networks", 2024.)
//
// [op.NewtonSchulz]: https://pkg.go.dev/github.com/kasmina-go/kasmina/op#NewtonSchulz
type Muon struct {
	lr, momentum float64
	nesterov     bool
	iterations   int
	scale        Scale
	base         hyper
	groups       []group
	match        Match
	store        store
	rest         *AdamW
	restShare    float64        // AdamW's learning rate as a share of Muon's
	own, others  []params.Param // room for those of a step
}

var _ Optimizer = (*Muon)(nil)

// NewMuon returns a Muon; its defaults are those of Keller Jordan's implementation.
func NewMuon(opts ...MuonOption) (*Muon, error) {
	rest, err := NewAdamW(WithLR(3e-4), WithBetas(0.9, 0.95), WithEps(1e-10), WithWeightDecay(0))
	if err != nil {
		return nil, err
	}
	m := &Muon{lr: 0.02, momentum: 0.95, nesterov: true, iterations: 5,
		base: hyper{scale: 1}, rest: rest}
	m.match = NameContains("embed", "head", "kasmina")
	m.store = newStore(muonFields...)
	for _, opt := range opts {
		if opt == nil {
			return nil, fmt.Errorf("optim.NewMuon: an option is nil")
		}
		if err := opt.muon(m); err != nil {
			return nil, fmt.Errorf("optim.NewMuon: %w", err)
		}
	}
	m.restShare = m.rest.lr / m.lr
	m.rest.groups = slices.Concat(m.groups, m.rest.groups)
	return m, nil
}

// LR returns the learning rate of the next step for matrices.
func (m *Muon) LR() float64 { return m.lr }

// SetLR sets the learning rate of the next steps for matrices, and AdamW's in proportion to what
// both were at first.
func (m *Muon) SetLR(lr float64) error {
	if m == nil || m.rest == nil {
		return fmt.Errorf("optim.Muon: SetLR: %w", errZero)
	}
	if err := notNegative("SetLR", lr); err != nil {
		return fmt.Errorf("optim.Muon: %w", err)
	}
	m.lr, m.rest.lr = lr, lr*m.restShare
	return nil
}

// usesAdamW reports whether a parameter is left to AdamW.
func (m *Muon) usesAdamW(name string, shape []int) bool {
	return len(shape) != 2 || m.match(name, shape)
}

// storeOf returns where a parameter's state is kept.
func (m *Muon) storeOf(name string, shape []int) *store {
	if m.usesAdamW(name, shape) {
		return &m.rest.store
	}
	return &m.store
}

// allFit returns the entries of both stores apart, once all fit. With closed, no entry may be new.
func (m *Muon) allFit(entries map[string]*entry,
	closed bool) (own, rest map[string]*entry, err error) {
	own, rest = map[string]*entry{}, map[string]*entry{}
	for name, e := range entries {
		if m.usesAdamW(name, e.shape) {
			rest[name] = e
		} else {
			own[name] = e
		}
	}
	for _, name := range slices.Sorted(maps.Keys(entries)) {
		e := entries[name]
		if closed && m.storeOf(name, e.shape).entries[name] == nil {
			return nil, nil, fmt.Errorf("there is no parameter %q of shape %v", name,
				tensor.Shape(e.shape))
		}
		if err := m.fits(name, e.shape, e.dtype); err != nil {
			return nil, nil, err
		}
	}
	return own, rest, nil
}

// fits is store.fits for both stores: a parameter that becomes a matrix, or ceases to be one, fits
// neither.
func (m *Muon) fits(name string, shape []int, dtype tensor.Dtype) error {
	if err := m.store.fits(name, shape, dtype); err != nil {
		return err
	}
	return m.rest.store.fits(name, shape, dtype)
}

// Declare implements [Optimizer].
func (m *Muon) Declare(model []gorgonia.ValueGrad) error {
	if m == nil || m.rest == nil {
		return fmt.Errorf("optim.Muon: Declare: %w", errZero)
	}
	decls, err := declarations(model)
	if err != nil {
		return fmt.Errorf("optim.Muon: Declare: %w", err)
	}
	own, rest, err := m.allFit(decls, false)
	if err != nil {
		return fmt.Errorf("optim.Muon: Declare: %w", err)
	}
	m.store.declare(own)
	m.rest.store.declare(rest)
	return nil
}

// Step updates every parameter in model from its gradient, and leaves the gradients zero. Errors
// are as for [AdamW.Step].
func (m *Muon) Step(model []gorgonia.ValueGrad) error {
	if m == nil || m.rest == nil {
		return fmt.Errorf("optim.Muon: Step: %w", errZero)
	}
	ps, err := m.store.readModel(model)
	if err != nil {
		return fmt.Errorf("optim.Muon: Step: %w", err)
	}
	own, rest := m.own[:0], m.others[:0]
	for _, p := range ps {
		if err := m.fits(p.Name, p.Shape, p.Dtype); err != nil {
			return fmt.Errorf("optim.Muon: Step: %w", err)
		}
		if m.usesAdamW(p.Name, p.Shape) {
			rest = append(rest, p)
		} else {
			own = append(own, p)
		}
	}
	m.own, m.others = own, rest
	m.update(own)
	m.rest.update(rest)
	if err := overflowed(ps); err != nil {
		return fmt.Errorf("optim.Muon: Step: %w", err)
	}
	return nil
}

func (m *Muon) update(ps []params.Param) {
	for _, p := range ps {
		h, e := resolve(m.base, m.groups, p.Name, p.Shape), m.store.entry(p)
		e.step++
		rows, cols, lr := p.Shape[0], p.Shape[1], m.lr*h.scale
		s := optimizer.MuonStep{Rate: lr * m.scale.of(rows, cols),
			Keep: 1 - lr*h.decay, Momentum: m.momentum,
			Nesterov: m.nesterov, Iterations: m.iterations}
		switch g := p.Grad.(type) {
		case []float32:
			optimizer.Muon(p.Value.([]float32), g, e.moments[0].([]float32), rows, cols, s)
		case []float64:
			optimizer.Muon(p.Value.([]float64), g, e.moments[0].([]float64), rows, cols, s)
		}
	}
}

func (s Scale) of(rows, cols int) float64 {
	if s == RMSScale {
		return 0.2 * math.Sqrt(float64(max(rows, cols)))
	}
	return math.Sqrt(math.Max(1, float64(rows)/float64(cols)))
}

// Forget implements [Optimizer].
func (m *Muon) Forget(name string, from, to int) error {
	if m == nil || m.rest == nil {
		return fmt.Errorf("optim.Muon: Forget: %w", errZero)
	}
	for _, s := range []*store{&m.store, &m.rest.store} { // one of them knows the parameter
		if err := s.forget(name, from, to); err != nil {
			return fmt.Errorf("optim.Muon: Forget: %w", err)
		}
	}
	return nil
}

// Drop is that of [AdamW.Drop].
func (m *Muon) Drop(names ...string) {
	if m != nil && m.rest != nil {
		m.store.drop(names)
		m.rest.store.drop(names)
	}
}

// State returns each matrix's "NAME.momentum_buffer" and "NAME.step", and AdamW's state of the
// other parameters.
func (m *Muon) State() []Tensor {
	if m.rest == nil {
		return nil
	}
	state := append(m.store.state(), m.rest.store.state()...)
	slices.SortFunc(state, func(a, b Tensor) int { return cmp.Compare(a.Name, b.Name) })
	return state
}

// SetState implements [Optimizer].
func (m *Muon) SetState(state []Tensor) error {
	if m == nil || m.rest == nil {
		return fmt.Errorf("optim.Muon: SetState: %w", errZero)
	}
	entries, err := parse(state, func(name string, shape []int) []string {
		return m.storeOf(name, shape).fields
	})
	if err != nil {
		return fmt.Errorf("optim.Muon: SetState: %w", err)
	}
	own, rest, err := m.allFit(entries, len(m.store.entries)+len(m.rest.store.entries) > 0)
	if err != nil {
		return fmt.Errorf("optim.Muon: SetState: %w", err)
	}
	for _, name := range slices.Sorted(maps.Keys(own)) {
		if err := m.checkMomentum(own[name]); err != nil {
			return fmt.Errorf("optim.Muon: SetState: parameter %q: %w", name, err)
		}
	}
	m.store.restore(own)
	m.rest.store.restore(rest)
	return nil
}

// checkMomentum returns an error for a momentum that no gradients lead to. Finite ones are at most
// the largest number F of their type, and t steps from zero add up to (1 − μᵗ)·F. Nothing less is
// certain here: how gradients are clipped is up to the caller, and may have changed since.
func (m *Muon) checkMomentum(e *entry) error {
	const rounding = 1 + 1e-4
	share := -math.Expm1(float64(e.step)*math.Log(m.momentum)) * rounding
	at, most := -1, share*math.MaxFloat64/rounding
	switch x := e.moments[0].(type) {
	case []float32:
		most = share * math.MaxFloat32
		at = parallel.Index(len(x), func(i int) bool { return math.Abs(float64(x[i])) > most })
	case []float64:
		at = parallel.Index(len(x), func(i int) bool { return math.Abs(x[i])/rounding > most })
	}
	if at < 0 {
		return nil
	}
	return fmt.Errorf("%s is %v at element %d, want at most %.3g after %d steps with a momentum "+
		"of %v: the state is damaged; go on from an older checkpoint", muonFields[0],
		reflect.ValueOf(e.moments[0]).Index(at), at, most, e.step, m.momentum)
}
