package optim

import (
	"fmt"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/cpu/optimizer"
	"github.com/kasmina-go/kasmina/internal/params"
)

// AdamW is Adam with decoupled weight decay: for the t-th gradient g of a parameter p,
//
//	m ← β1·m + (1−β1)·g,   v ← β2·v + (1−β2)·g²
//	p ← (1 − lr·decay)·p − lr · m/(1−β1ᵗ) / (sqrt(v/(1−β2ᵗ)) + ε)
//
// t counts the steps of each parameter by itself, so that one which joins later is corrected for
// its own short history.
//
// A gradient beyond ±2⁶³ counts as ±2⁶³, and in float64 beyond ±2⁵¹¹ as ±2⁵¹¹. A larger one would make
// v infinite for good, as it does in PyTorch, where the element then never moves again without an
// error. (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.)
type AdamW struct {
	lr, eps float64
	base    hyper
	groups  []group
	store   store
}

var _ Optimizer = (*AdamW)(nil)

// NewAdamW returns an AdamW; its defaults are PyTorch's.
func NewAdamW(opts ...AdamWOption) (*AdamW, error) {
	a := &AdamW{lr: 1e-3, eps: 1e-8, base: hyper{scale: 1, decay: 0.01, beta1: 0.9, beta2: 0.999}}
	a.store = newStore(adamWFields...)
	for _, opt := range opts {
		if opt == nil {
			return nil, fmt.Errorf("optim.NewAdamW: an option is nil")
		}
		if err := opt.adamW(a); err != nil {
			return nil, fmt.Errorf("optim.NewAdamW: %w", err)
		}
	}
	return a, nil
}

// Declare implements [Optimizer].
func (a *AdamW) Declare(model []gorgonia.ValueGrad) error {
	if a == nil || a.store.entries == nil {
		return fmt.Errorf("optim.AdamW: Declare: %w", errZero)
	}
	decls, err := declarations(model)
	if err == nil {
		err = a.store.allFit(decls, false)
	}
	if err != nil {
		return fmt.Errorf("optim.AdamW: Declare: %w", err)
	}
	a.store.declare(decls)
	return nil
}

// LR returns the learning rate of the next step.
func (a *AdamW) LR() float64 { return a.lr }

// SetLR sets the learning rate of the next steps.
func (a *AdamW) SetLR(lr float64) error {
	if err := notNegative("SetLR", lr); err != nil {
		return fmt.Errorf("optim.AdamW: %w", err)
	}
	a.lr = lr
	return nil
}

// Step updates every parameter in model from its gradient, and leaves the gradients zero. On an
// error nothing changes, but for [ErrOverflow]. An error is a parameter without a name, a value or
// a gradient, or of another shape than before. A gradient that is not finite is another.
func (a *AdamW) Step(model []gorgonia.ValueGrad) error {
	if a == nil || a.store.entries == nil {
		return fmt.Errorf("optim.AdamW: Step: %w", errZero)
	}
	ps, err := a.store.readModel(model)
	if err != nil {
		return fmt.Errorf("optim.AdamW: Step: %w", err)
	}
	for _, p := range ps {
		if err := a.store.fits(p.Name, p.Shape, p.Dtype); err != nil {
			return fmt.Errorf("optim.AdamW: Step: %w", err)
		}
	}
	a.update(ps)
	if err := overflowed(ps); err != nil {
		return fmt.Errorf("optim.AdamW: Step: %w", err)
	}
	return nil
}

func (a *AdamW) update(ps []params.Param) {
	for _, p := range ps {
		h, e := resolve(a.base, a.groups, p.Name, p.Shape), a.store.entry(p)
		e.step++
		s := optimizer.AdamWStep{LR: a.lr * h.scale, Beta1: h.beta1, Beta2: h.beta2, Eps: a.eps,
			Decay: h.decay, Step: e.step}
		switch g := p.Grad.(type) {
		case []float32:
			optimizer.AdamW(p.Value.([]float32), g, e.moments[0].([]float32),
				e.moments[1].([]float32), s)
		case []float64:
			optimizer.AdamW(p.Value.([]float64), g, e.moments[0].([]float64),
				e.moments[1].([]float64), s)
		}
	}
}

// Forget implements [Optimizer].
func (a *AdamW) Forget(name string, from, to int) error {
	if err := a.store.forget(name, from, to); err != nil {
		return fmt.Errorf("optim.AdamW: Forget: %w", err)
	}
	return nil
}

// Drop forgets parameters that are no more, names and shapes too. It is part of no interface: a
// trainer calls it where there is one, before a model grows under the same names in other shapes.
func (a *AdamW) Drop(names ...string) {
	if a != nil {
		a.store.drop(names)
	}
}

// State returns each parameter's moments and step count, as "NAME.exp_avg", "NAME.exp_avg_sq" and
// "NAME.step".
func (a *AdamW) State() []Tensor { return a.store.state() }

// SetState implements [Optimizer].
func (a *AdamW) SetState(state []Tensor) error {
	if a == nil || a.store.entries == nil {
		return fmt.Errorf("optim.AdamW: SetState: %w", errZero)
	}
	entries, err := parse(state, func(string, []int) []string { return a.store.fields })
	if err == nil {
		err = a.store.allFit(entries, len(a.store.entries) > 0)
	}
	if err != nil {
		return fmt.Errorf("optim.AdamW: SetState: %w", err)
	}
	a.store.restore(entries)
	return nil
}
