package optim

import (
	"fmt"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/optimizer"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/quant"
)

// AdamW8bit is [AdamW] with 8-bit moments, which take a quarter of the memory of float32. They are
// stored as in bitsandbytes: the scale of each block of 256 elements is its largest magnitude, and
// each element is one of 256 numbers relative to that scale. Parameters are updated with the new
// moments before these are rounded.
//
// Small parameters ([WithMin8bitSize]) and those selected by [WithFloatMomentsFor] keep
// floating-point moments. By default these are embeddings, since in any step most of their rows
// receive no gradient and a few receive a large one.
//
// There are two differences from bitsandbytes. As in AdamW, the parameter decays before its update
// rather than after it. And if the rounded second moment and the gradient are both 0, the first
// moment counts as 0 too, since dividing it by ε could result in an arbitrarily large step. (Dettmers
// et al., "8-bit Optimizers via Block-wise Quantization", 2022.)
type AdamW8bit struct {
	common
	*updater
	floats *AdamW // rules for the parameters with floating-point moments
	match  Match
	least  int // minimum number of elements for 8-bit moments
}

var (
	_ Partial = (*AdamW8bit)(nil)
	_ Dropper = (*AdamW8bit)(nil)
)

// AdamW8bitOption configures [NewAdamW8bit].
type AdamW8bitOption interface{ adamW8bit(*AdamW8bit) error }

func (o Option) adamW8bit(a *AdamW8bit) error      { return o.apply(&a.floats.common) }
func (o BetasOption) adamW8bit(a *AdamW8bit) error { return o.apply(&a.floats.common) }
func (o EpsOption) adamW8bit(a *AdamW8bit) error   { return o.adamW(a.floats) }

type adamW8bitOption func(*AdamW8bit) error

func (f adamW8bitOption) adamW8bit(a *AdamW8bit) error { return f(a) }

// WithFloatMomentsFor selects the parameters that keep floating-point moments, in addition to small
// ones. The default is NameContains("embed").
func WithFloatMomentsFor(match Match) AdamW8bitOption {
	return adamW8bitOption(func(a *AdamW8bit) error {
		a.match = match
		return nil
	})
}

// WithMin8bitSize sets the minimum number of elements of a parameter with 8-bit moments, which must
// be at least 1. The default is 4096.
func WithMin8bitSize(n int) AdamW8bitOption {
	return adamW8bitOption(func(a *AdamW8bit) error {
		a.least = n
		if n < 1 {
			return fmt.Errorf("WithMin8bitSize: got %d, want at least 1", n)
		}
		return nil
	})
}

var adamW8bitKernel = &Kernel{
	Name: "AdamW8bit",
	Moments: []Moment{
		{Name: "exp_avg_codes", Mean: OfGradients, Codes: &quant.Signed8.Values,
			Scale: "exp_avg_scales"},
		{Name: "exp_avg_scales", Mean: IsScale, Block: optimizer.Block8},
		{Name: "exp_avg_sq_codes", Mean: OfSquares, Codes: &quant.Unsigned8.Values,
			Scale: "exp_avg_sq_scales"},
		{Name: "exp_avg_sq_scales", Mean: IsScale, Block: optimizer.Block8},
	},
	float32: adamW8bit[float32],
	float64: adamW8bit[float64],
}

// NewAdamW8bit returns an AdamW8bit with the defaults of [NewAdamW].
func NewAdamW8bit(opts ...AdamW8bitOption) (*AdamW8bit, error) {
	floats, err := NewAdamW()
	if err != nil {
		return nil, err
	}

	a := &AdamW8bit{floats: floats, match: NameContains("embed"), least: 4096}
	a.updater = newUpdater("optim.AdamW8bit", a.rule)
	if err := applyAll("optim.NewAdamW8bit", opts, func(o AdamW8bitOption) error {
		return o.adamW8bit(a)
	}); err != nil {
		return nil, err
	}

	a.common = floats.common
	return a, nil
}

// chooseAdamW8bit returns the AdamW8bit of [Choice.New].
func chooseAdamW8bit(lr float64, opts []Option) (Partial, error) {
	own := []AdamW8bitOption{WithLR(lr), WithBetas(0.9, 0.95), WithWeightDecay(0.1)}
	return NewAdamW8bit(append(own, optionsOf[AdamW8bitOption](opts)...)...)
}

// SetLR sets the learning rate of subsequent steps.
func (a *AdamW8bit) SetLR(lr float64) error {
	if err := notNegative("SetLR", lr); err != nil {
		return fmt.Errorf("optim.AdamW8bit: %w", err)
	}
	a.lr, a.floats.lr = lr, lr
	return nil
}

func (a *AdamW8bit) rule(name string, shape []int) (Rule, float64) {
	r, lr := a.floats.rule(name, shape)
	if opbase.Size(shape) >= a.least && !a.match(name, shape) {
		r.Kernel = adamW8bitKernel
	}
	return r, lr
}

func adamW8bit[T cpu.Float](p, g []T, moments []any, s step) {
	m, v := moments[0].([]uint8), moments[2].([]uint8)
	mScale, vScale := moments[1].([]T), moments[3].([]T)
	optimizer.AdamW8bit(p, g, m, v, mScale, vScale, optimizer.AdamWStep{LR: s.lr, Beta1: s.Beta1,
		Beta2: s.Beta2, Eps: s.Eps, Decay: s.Decay, Step: s.count})
}
