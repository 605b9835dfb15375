package optim

import (
	"fmt"
	"math"
	"reflect"
	"slices"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/optimizer"
	"github.com/kasmina-go/kasmina/internal/parallel"
)

// Scale selects how Muon scales the orthogonalized update of a rows×cols matrix.
type Scale int

const (
	// SpectralScale is Keller Jordan's scale, sqrt(max(1, rows/cols)). A learning rate then changes
	// the outputs of layers by about the same amount, regardless of their shape.
	SpectralScale Scale = iota

	// RMSScale is 0.2·sqrt(max(rows, cols)). The elements of updates are then about as large as in
	// AdamW's updates, so that AdamW's learning rates fit. (Liu et al., "Muon is Scalable for LLM
	// Training", 2025.)
	RMSScale
)

// Muon updates matrices by the orthogonal factor of their momentum, which [op.NewtonSchulz]
// approximates:
//
//	m ← μ·m + (1−μ)·g,   u = (1−μ)·g + μ·m
//	p ← (1 − lr·decay)·p − lr · scale · NewtonSchulz(u)
//
// AdamW updates all other parameters, namely vectors, and embeddings and output layers, whose rows
// are independent of each other.
//
// A weight stored as [out, in] has rows = out. To keep m finite, gradients are limited to a quarter
// of the largest number in magnitude. (Keller Jordan, "Muon: An optimizer for hidden layers in neural
// networks", 2024.)
//
// [op.NewtonSchulz]: https://pkg.go.dev/github.com/kasmina-go/kasmina/op#NewtonSchulz
type Muon struct {
	common
	*updater
	momentum   float64
	nesterov   bool
	iterations int
	scale      Scale
	match      Match
	rest       *AdamW  // rules for the parameters updated by AdamW
	restShare  float64 // AdamW's learning rate as a share of Muon's
}

var (
	_ Partial = (*Muon)(nil)
	_ Dropper = (*Muon)(nil)
)

var muonKernel = &Kernel{
	Name:    "Muon",
	Moments: []Moment{{Name: "momentum_buffer", Mean: OfGradients}},
	Whole:   true,
	float32: muon[float32],
	float64: muon[float64],
	check:   checkMomentum,
}

// NewMuon returns a Muon with the defaults of Keller Jordan's implementation: WithLR(0.02),
// WithMomentum(0.95), WithNesterov(true), WithIterations(5) and WithWeightDecay(0). For the remaining
// parameters see [WithAdamW] and [WithAdamWFor].
func NewMuon(opts ...MuonOption) (*Muon, error) {
	rest, err := NewAdamW(WithLR(3e-4), WithBetas(0.9, 0.95), WithEps(1e-10), WithWeightDecay(0))
	if err != nil {
		return nil, err
	}

	m := &Muon{common: common{lr: 0.02, base: hyper{scale: 1}}, momentum: 0.95, nesterov: true,
		iterations: 5, match: NameContains("embed", "head", "kasmina"), rest: rest}
	m.updater = newUpdater("optim.Muon", m.rule)
	if err := applyAll("optim.NewMuon", opts, func(o MuonOption) error { return o.muon(m) }); err != nil {
		return nil, err
	}

	m.restShare = m.rest.lr / m.lr
	m.rest.groups = slices.Concat(m.groups, m.rest.groups)
	return m, nil
}

// muonRestShare is the usual learning rate of Muon's AdamW, as a share of Muon's.
const muonRestShare = 0.15

// chooseMuon returns the Muon of [Choice.New]. Its matrices are not decayed.
func chooseMuon(lr float64, opts []Option) (Partial, error) {
	own := []MuonOption{WithLR(lr), WithAdamW(WithLR(muonRestShare*lr), WithBetas(0.9, 0.95),
		WithWeightDecay(0.1))}
	return NewMuon(append(own, optionsOf[MuonOption](opts)...)...)
}

// SetLR sets the learning rate of subsequent steps for matrices. AdamW's learning rate changes by the
// same factor.
func (m *Muon) SetLR(lr float64) error {
	if err := notNegative("SetLR", lr); err != nil {
		return fmt.Errorf("optim.Muon: %w", err)
	}
	m.lr, m.rest.lr = lr, lr*m.restShare
	return nil
}

// usesAdamW reports whether AdamW updates a parameter.
func (m *Muon) usesAdamW(name string, shape []int) bool {
	return len(shape) != 2 || m.match(name, shape)
}

func (m *Muon) rule(name string, shape []int) (Rule, float64) {
	if m.usesAdamW(name, shape) {
		r, lr := m.rest.rule(name, shape)
		r.LRScale *= m.restShare
		return r, lr
	}
	h := m.resolve(name, shape)
	return Rule{Kernel: muonKernel, LRScale: h.scale, Decay: h.decay, Beta1: m.momentum,
		ShapeScale: m.scale.factor(shape[0], shape[1]), Nesterov: m.nesterov,
		Iterations: m.iterations}, m.lr * h.scale
}

func muon[T cpu.Float](p, g []T, moments []any, s step) {
	optimizer.Muon(p, g, moments[0].([]T), s.shape[0], s.shape[1], optimizer.MuonStep{
		Rate: s.lr * s.ShapeScale, Keep: 1 - s.lr*s.Decay, Momentum: s.Beta1, Nesterov: s.Nesterov,
		Iterations: s.Iterations})
}

func (s Scale) factor(rows, cols int) float64 {
	if s == RMSScale {
		return 0.2 * math.Sqrt(float64(max(rows, cols)))
	}
	return math.Sqrt(math.Max(1, float64(rows)/float64(cols)))
}

// checkMomentum returns an error for a momentum that no gradients can produce. The elements of gradients
// are at most the largest number F of their type, and t steps from zero add up to (1 − μᵗ)·F. A lower
// limit would depend on the caller's clipping, which may have changed.
func checkMomentum(r Rule, e *entry) error {
	const rounding = 1 + 1e-4
	share := -math.Expm1(float64(e.step)*math.Log(r.Beta1)) * rounding
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
		"of %v: the state is corrupted; continue from an older checkpoint", r.Kernel.Moments[0].Name,
		reflect.ValueOf(e.moments[0]).Index(at), at, most, e.step, r.Beta1)
}
