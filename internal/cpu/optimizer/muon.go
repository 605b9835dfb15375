package optimizer

import (
	"math"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// MuonStep holds the parameters of a Muon step. Rate multiplies the orthogonalized update.
type MuonStep struct {
	Rate, Keep, Momentum float64
	Nesterov             bool
	Iterations           int
}

// Muon updates the rows×cols matrix p and its momentum m from the gradient g, and sets g to zero:
//
//	m ← μ·m + (1−μ)·g,   u = (1−μ)·g + μ·m (Nesterov), or u = m
//	p ← keep·p − rate·NewtonSchulz(u)
//
// Gradients are limited to a quarter of the largest number in magnitude, so that momentum and u
// stay finite. (Keller Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024.)
func Muon[T cpu.Float](p, g, m []T, rows, cols int, s MuonStep) {
	b := cpu.GetBuffers[T]()
	defer cpu.PutBuffers(b)
	room := b.Elements(2 * len(p))
	u, o := room[:len(p)], room[len(p):]
	cpu.Spread(len(p), cpu.VectorGrain, muonDirection[T]{g, m, u, T(s.Momentum),
		T(1 - s.Momentum), s.Nesterov})
	NewtonSchulz(o, u, rows, cols, s.Iterations)
	cpu.Spread(len(p), cpu.VectorGrain, muonUpdate[T]{p, o, T(s.Keep), T(s.Rate)})
}

type muonDirection[T cpu.Float] struct {
	g, m, u  []T
	mu, gain T
	nesterov bool
}

func (s *muonDirection[T]) Span(lo, hi int) {
	g, m, u := s.g[lo:hi], s.m[lo:hi], s.u[lo:hi]
	largest := largestGradient[T]()
	for i, gi := range g {
		gi = max(-largest, min(gi, largest))
		m[i] += s.gain * (gi - m[i])
		u[i] = m[i]
		if s.nesterov {
			u[i] = gi + s.mu*(m[i]-gi)
		}
		g[i] = 0
	}
}

// largestGradient returns the limit for gradients, chosen so that T can represent the difference of
// any two.
func largestGradient[T cpu.Float]() T {
	if _, ok := any(T(0)).(float32); ok {
		return T(math.Ldexp(1, 126))
	}
	return T(math.Ldexp(1, 1022))
}

type muonUpdate[T cpu.Float] struct {
	p, o       []T
	keep, rate T
}

func (s *muonUpdate[T]) Span(lo, hi int) {
	p, o := s.p[lo:hi], s.o[lo:hi]
	for i := range p {
		p[i] = s.keep*p[i] - s.rate*o[i]
	}
}
