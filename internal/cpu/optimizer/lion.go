package optimizer

import "github.com/kasmina-go/kasmina/internal/cpu"

// LionStep holds the constants of one Lion step.
type LionStep struct{ LR, Beta1, Beta2, Decay float64 }

// Lion updates the parameter p and its moment m from the gradient g, and sets g to zero:
//
//	c = β1·m + (1−β1)·g
//	p ← (1 − lr·decay)·p − lr·sign(c)
//	m ← β2·m + (1−β2)·g
//
// Gradients are limited to a quarter of the largest number in magnitude, so that m stays finite.
// (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023.)
func Lion[T cpu.Float](p, g, m []T, s LionStep) {
	cpu.Spread(len(p), cpu.VectorGrain, lion[T]{p: p, g: g, m: m, keep: T(1 - s.LR*s.Decay),
		rate: T(s.LR), beta1: T(s.Beta1), gain1: T(1 - s.Beta1), beta2: T(s.Beta2),
		gain2: T(1 - s.Beta2)})
}

type lion[T cpu.Float] struct {
	p, g, m                                []T
	keep, rate, beta1, gain1, beta2, gain2 T
}

// Span updates the elements lo ≤ i < hi. The conversions round each product, so that no machine fuses
// it with the sum and all machines agree on the signs.
func (s *lion[T]) Span(lo, hi int) {
	p, g, m := s.p[lo:hi], s.g[lo:hi], s.m[lo:hi]
	largest := largestGradient[T]()
	for i, gi := range g {
		gi = max(-largest, min(gi, largest))
		move := T(0)
		switch c := T(s.beta1*m[i]) + T(s.gain1*gi); {
		case c > 0:
			move = s.rate
		case c < 0:
			move = -s.rate
		}
		p[i] = T(s.keep*p[i]) - move
		m[i] = T(s.beta2*m[i]) + T(s.gain2*gi)
		g[i] = 0
	}
}
