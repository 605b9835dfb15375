package optim

import "fmt"

// AdamWOption configures [NewAdamW].
type AdamWOption interface{ adamW(*AdamW) error }

// MuonOption configures [NewMuon].
type MuonOption interface{ muon(*Muon) error }

// Option configures every optimizer.
type Option struct{ set func(*common) error }

func (o Option) adamW(a *AdamW) error { return o.apply(&a.common) }

func (o Option) muon(m *Muon) error {
	if err := o.apply(&m.common); err != nil {
		return err
	}
	if n := len(m.groups); n > 0 && m.groups[n-1].betas {
		return fmt.Errorf("WithGroup: Betas has no effect on Muon's matrices; pass the group to " +
			"WithAdamW")
	}
	return nil
}

func (o Option) apply(c *common) error {
	if o.set == nil {
		return fmt.Errorf("an option is a zero value: functions such as WithLR return options")
	}
	return o.set(c)
}

// BetasOption configures optimizers with two decay rates for their moments. The matrices of [NewMuon]
// use only one.
type BetasOption struct{ beta1, beta2 float64 }

func (o BetasOption) adamW(a *AdamW) error { return o.apply(&a.common) }

func (o BetasOption) apply(c *common) error {
	c.base.beta1, c.base.beta2 = o.beta1, o.beta2
	return checkBetas("WithBetas", o.beta1, o.beta2)
}

// EpsOption configures optimizers that divide by the root of a second moment.
type EpsOption struct{ eps float64 }

func (o EpsOption) adamW(a *AdamW) error {
	a.eps = o.eps
	return positive("WithEps", o.eps)
}

type muonOption func(*Muon) error

func (f muonOption) muon(m *Muon) error { return f(m) }

// applyAll applies all options, and adds the name of the constructor to an error.
func applyAll[O any](constructor string, opts []O, apply func(O) error) error {
	for _, opt := range opts {
		if err := apply(opt); err != nil {
			return fmt.Errorf("%s: %w", constructor, err)
		}
	}
	return nil
}

// WithLR sets the learning rate, which must be positive. For Muon, this is the learning rate of
// matrices; [WithAdamW] sets the rate of all other parameters. The constructors document the default.
func WithLR(lr float64) Option {
	return Option{func(c *common) error {
		c.lr = lr
		return positive("WithLR", lr)
	}}
}

// WithWeightDecay sets the decoupled weight decay: each step multiplies a parameter by 1 − lr·decay.
// Parameters with fewer than two dimensions do not decay unless a group specifies it. For Muon, this
// is the decay of matrices; [WithAdamW] sets the decay of all other parameters. The constructors
// document the default.
func WithWeightDecay(d float64) Option {
	return Option{func(c *common) error {
		c.base.decay = d
		return notNegative("WithWeightDecay", d)
	}}
}

// WithGroup changes the learning rate, decay or betas of matching parameters. If several groups match,
// the first one applies. Muon's groups apply to all its parameters, even if AdamW updates them, and
// precede the groups in [WithAdamW].
func WithGroup(match Match, opts ...GroupOption) Option {
	g, err := newGroup(match, opts)
	return Option{func(c *common) error {
		c.groups = append(c.groups, g)
		return err
	}}
}

// WithBetas sets the decay rates of the moments, which must be at least 0 and less than 1. The
// constructors document the default.
func WithBetas(beta1, beta2 float64) BetasOption { return BetasOption{beta1, beta2} }

// WithEps sets the positive number added to the root of the second moment. The default is 1e-8.
func WithEps(eps float64) EpsOption { return EpsOption{eps} }

// WithMomentum sets the decay rate of Muon's momentum, which must be at least 0 and less than 1. The
// default is 0.95.
func WithMomentum(mu float64) MuonOption {
	return muonOption(func(m *Muon) error {
		m.momentum = mu
		return belowOne("WithMomentum", mu)
	})
}

// WithNesterov selects Nesterov's momentum for Muon, the default, or plain momentum.
func WithNesterov(on bool) MuonOption {
	return muonOption(func(m *Muon) error {
		m.nesterov = on
		return nil
	})
}

// WithIterations sets the number of Newton-Schulz steps, which must be at least 1. The default is 5.
func WithIterations(n int) MuonOption {
	return muonOption(func(m *Muon) error {
		m.iterations = n
		if n < 1 {
			return fmt.Errorf("WithIterations: got %d, want at least 1", n)
		}
		return nil
	})
}

// WithScale selects the scale of orthogonalized updates. The default is [SpectralScale].
func WithScale(s Scale) MuonOption {
	return muonOption(func(m *Muon) error {
		m.scale = s
		if s != SpectralScale && s != RMSScale {
			return fmt.Errorf("WithScale: got %d, want SpectralScale or RMSScale", s)
		}
		return nil
	})
}

// WithAdamWFor selects matrices for AdamW to update. The default is NameContains("embed", "head",
// "kasmina").
func WithAdamWFor(match Match) MuonOption {
	return muonOption(func(m *Muon) error {
		m.match = match
		return nil
	})
}

// WithAdamW configures the AdamW for all other parameters. The default is WithLR(3e-4),
// WithBetas(0.9, 0.95), WithEps(1e-10), WithWeightDecay(0).
func WithAdamW(opts ...AdamWOption) MuonOption {
	return muonOption(func(m *Muon) error {
		return applyAll("WithAdamW", opts, func(o AdamWOption) error { return o.adamW(m.rest) })
	})
}
