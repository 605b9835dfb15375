package optim

import (
	"fmt"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/optimizer"
)

// Lion moves every element by the same distance, in the direction opposite to the sign of an
// interpolation between its gradient g and the gradients' running mean m:
//
//	c = β1·m + (1−β1)·g
//	p ← (1 − lr·decay)·p − lr·sign(c)
//	m ← β2·m + (1−β2)·g
//
// Lion keeps a single moment, so it needs half as much memory as [AdamW]. Its updates are larger than
// AdamW's, so the learning rate should be 3 to 10 times smaller, and the weight decay larger by the
// same factor. Since any sign moves an element by the full distance, Lion suits large batches, whose
// gradients are less noisy.
//
// Gradients are limited to a quarter of the largest number in magnitude, so that m stays finite.
// (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023.)
type Lion struct {
	common
	*updater
}

var (
	_ Partial = (*Lion)(nil)
	_ Dropper = (*Lion)(nil)
)

// LionOption configures [NewLion].
type LionOption interface{ lion(*Lion) error }

func (o Option) lion(l *Lion) error      { return o.apply(&l.common) }
func (o BetasOption) lion(l *Lion) error { return o.apply(&l.common) }

var lionKernel = &Kernel{
	Name:    "Lion",
	Moments: []Moment{{Name: "exp_avg", Mean: OfGradients}},
	float32: lion[float32],
	float64: lion[float64],
}

// NewLion returns a Lion with the defaults of the paper's implementation: WithLR(1e-4), WithBetas(0.9,
// 0.99) and WithWeightDecay(0).
func NewLion(opts ...LionOption) (*Lion, error) {
	l := &Lion{common: common{lr: 1e-4, base: hyper{scale: 1, beta1: 0.9, beta2: 0.99}}}
	l.updater = newUpdater("optim.Lion", l.rule)
	if err := applyAll("optim.NewLion", opts, func(o LionOption) error { return o.lion(l) }); err != nil {
		return nil, err
	}
	return l, nil
}

// chooseLion returns the Lion of [Choice.New]. The betas are the paper's for language models. The
// decay compensates for the learning rate, which is a fifth of AdamW's.
func chooseLion(lr float64, opts []Option) (Partial, error) {
	own := []LionOption{WithLR(lr), WithBetas(0.95, 0.98), WithWeightDecay(0.5)}
	return NewLion(append(own, optionsOf[LionOption](opts)...)...)
}

// SetLR sets the learning rate of subsequent steps.
func (l *Lion) SetLR(lr float64) error {
	if err := notNegative("SetLR", lr); err != nil {
		return fmt.Errorf("optim.Lion: %w", err)
	}
	l.lr = lr
	return nil
}

func (l *Lion) rule(name string, shape []int) (Rule, float64) {
	h := l.resolve(name, shape)
	return Rule{Kernel: lionKernel, LRScale: h.scale, Decay: h.decay, Beta1: h.beta1,
		Beta2: h.beta2}, l.lr * h.scale
}

func lion[T cpu.Float](p, g []T, moments []any, s step) {
	optimizer.Lion(p, g, moments[0].([]T), optimizer.LionStep{LR: s.lr, Beta1: s.Beta1, Beta2: s.Beta2,
		Decay: s.Decay})
}
