package optim

import "fmt"

// AdamWOption configures [NewAdamW].
type AdamWOption interface{ adamW(*AdamW) error }

// MuonOption configures [NewMuon].
type MuonOption interface{ muon(*Muon) error }

// Option configures either optimiser.
type Option interface {
	AdamWOption
	MuonOption
}

type adamWOption func(*AdamW) error

func (f adamWOption) adamW(a *AdamW) error { return f(a) }

type muonOption func(*Muon) error

func (f muonOption) muon(m *Muon) error { return f(m) }

type option struct {
	adamWOption
	muonOption
}

// WithLR sets the learning rate, above 0: Muon's for matrices, beside which [WithAdamW] sets that
// of the rest. Default 1e-3 for AdamW, 0.02 for Muon.
func WithLR(lr float64) Option {
	err := positive("WithLR", lr)
	return option{
		func(a *AdamW) error { a.lr = lr; return err },
		func(m *Muon) error { m.lr = lr; return err },
	}
}

// WithWeightDecay sets the decoupled weight decay: each step multiplies a parameter by 1 −
// lr·decay. Parameters with fewer than two dimensions have none unless a group says otherwise;
// Muon's is that of matrices, and [WithAdamW] sets that of the rest. Default 0.01 for AdamW, 0 for
// Muon.
func WithWeightDecay(d float64) Option {
	err := notNegative("WithWeightDecay", d)
	return option{
		func(a *AdamW) error { a.base.decay = d; return err },
		func(m *Muon) error { m.base.decay = d; return err },
	}
}

// WithGroup changes the learning rate, decay or betas of the parameters that match. The first group
// that matches counts. Muon's groups hold for all its parameters, those that it leaves to AdamW
// included, and come before the ones in [WithAdamW].
func WithGroup(match Match, opts ...GroupOption) Option {
	g, err := newGroup(match, opts)
	return option{
		func(a *AdamW) error { a.groups = append(a.groups, g); return err },
		func(m *Muon) error {
			if err == nil && g.betas {
				return fmt.Errorf("WithGroup: Betas has no meaning for Muon's matrices; give the " +
					"group to WithAdamW")
			}
			m.groups = append(m.groups, g)
			return err
		},
	}
}

// WithBetas sets the decay rates of the two moments, at least 0 and below 1. Default 0.9 and 0.999.
func WithBetas(beta1, beta2 float64) AdamWOption {
	return adamWOption(func(a *AdamW) error {
		a.base.beta1, a.base.beta2 = beta1, beta2
		return checkBetas("WithBetas", beta1, beta2)
	})
}

// WithEps sets what is added to the root of the second moment, above 0. Default 1e-8.
func WithEps(eps float64) AdamWOption {
	return adamWOption(func(a *AdamW) error {
		a.eps = eps
		return positive("WithEps", eps)
	})
}

// WithMomentum sets the decay rate of the momentum, at least 0 and below 1. Default 0.95.
func WithMomentum(mu float64) MuonOption {
	return muonOption(func(m *Muon) error {
		m.momentum = mu
		return belowOne("WithMomentum", mu)
	})
}

// WithNesterov chooses between Nesterov's momentum, the default, and the plain one.
func WithNesterov(on bool) MuonOption {
	return muonOption(func(m *Muon) error {
		m.nesterov = on
		return nil
	})
}

// WithIterations sets the number of Newton-Schulz steps, at least 1. Default 5.
func WithIterations(n int) MuonOption {
	return muonOption(func(m *Muon) error {
		m.iterations = n
		if n < 1 {
			return fmt.Errorf("WithIterations: got %d, want at least 1", n)
		}
		return nil
	})
}

// WithScale chooses how an orthogonalised update is scaled. Default [SpectralScale].
func WithScale(s Scale) MuonOption {
	return muonOption(func(m *Muon) error {
		m.scale = s
		if s != SpectralScale && s != RMSScale {
			return fmt.Errorf("WithScale: got %d, want SpectralScale or RMSScale", s)
		}
		return nil
	})
}

// WithAdamWFor chooses the parameters that AdamW updates, besides those that are no matrices.
// Default NameContains("embed", "head", "kasmina").
func WithAdamWFor(match Match) MuonOption {
	return muonOption(func(m *Muon) error {
		m.match = match
		if match == nil {
			return fmt.Errorf("WithAdamWFor: match is nil, want a function such as " +
				"optim.NameContains(\"embed\", \"head\")")
		}
		return nil
	})
}

// WithAdamW configures the AdamW that updates the rest. Default WithLR(3e-4), WithBetas(0.9, 0.95),
// WithEps(1e-10), WithWeightDecay(0).
func WithAdamW(opts ...AdamWOption) MuonOption {
	return muonOption(func(m *Muon) error {
		for _, opt := range opts {
			if opt == nil {
				return fmt.Errorf("WithAdamW: an option is nil")
			}
			if err := opt.adamW(m.rest); err != nil {
				return fmt.Errorf("WithAdamW: %w", err)
			}
		}
		return nil
	})
}
