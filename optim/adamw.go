package optim

import (
	"fmt"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/optimizer"
)

// AdamW is Adam with decoupled weight decay: for the t-th gradient g of a parameter p,
//
//	m ← β1·m + (1−β1)·g,   v ← β2·v + (1−β2)·g²
//	p ← (1 − lr·decay)·p − lr · m/(1−β1ᵗ) / (sqrt(v/(1−β2ᵗ)) + ε)
//
// t counts the steps of each parameter separately, so that a parameter added later is corrected for
// its own, shorter history.
//
// Gradients are limited to ±2⁶³, or ±2⁵¹¹ in float64. A larger one would make v infinite permanently,
// as happens in PyTorch, where the element then silently stops changing. (Loshchilov and Hutter,
// "Decoupled Weight Decay Regularization", 2019.)
type AdamW struct {
	common
	*updater
	eps float64
}

var (
	_ Partial = (*AdamW)(nil)
	_ Dropper = (*AdamW)(nil)
)

var adamWKernel = &Kernel{
	Name:    "AdamW",
	Moments: []Moment{{Name: "exp_avg", Mean: OfGradients}, {Name: "exp_avg_sq", Mean: OfSquares}},
	float32: adamW[float32],
	float64: adamW[float64],
}

// NewAdamW returns an AdamW. Its defaults are PyTorch's: WithLR(1e-3), WithBetas(0.9, 0.999),
// WithEps(1e-8) and WithWeightDecay(0.01).
func NewAdamW(opts ...AdamWOption) (*AdamW, error) {
	a := &AdamW{common: common{lr: 1e-3,
		base: hyper{scale: 1, decay: 0.01, beta1: 0.9, beta2: 0.999}}, eps: 1e-8}
	a.updater = newUpdater("optim.AdamW", a.rule)
	if err := applyAll("optim.NewAdamW", opts, func(o AdamWOption) error { return o.adamW(a) }); err != nil {
		return nil, err
	}
	return a, nil
}

// chooseAdamW returns the AdamW of [Choice.New].
func chooseAdamW(lr float64, opts []Option) (Partial, error) {
	own := []AdamWOption{WithLR(lr), WithBetas(0.9, 0.95), WithWeightDecay(0.1)}
	return NewAdamW(append(own, optionsOf[AdamWOption](opts)...)...)
}

// SetLR sets the learning rate of subsequent steps.
func (a *AdamW) SetLR(lr float64) error {
	if err := notNegative("SetLR", lr); err != nil {
		return fmt.Errorf("optim.AdamW: %w", err)
	}
	a.lr = lr
	return nil
}

func (a *AdamW) rule(name string, shape []int) (Rule, float64) {
	h := a.resolve(name, shape)
	return Rule{Kernel: adamWKernel, LRScale: h.scale, Decay: h.decay, Beta1: h.beta1,
		Beta2: h.beta2, Eps: a.eps}, a.lr * h.scale
}

func adamW[T cpu.Float](p, g []T, moments []any, s step) {
	m, v := moments[0].([]T), moments[1].([]T)
	optimizer.AdamW(p, g, m, v, optimizer.AdamWStep{LR: s.lr, Beta1: s.Beta1,
		Beta2: s.Beta2, Eps: s.Eps, Decay: s.Decay, Step: s.count})
}
