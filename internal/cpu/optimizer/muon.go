package optimizer

import "github.com/kasmina-go/kasmina/internal/cpu"

// MuonStep holds the figures of one Muon step. Rate multiplies the orthogonalised update.
type MuonStep struct {
	Rate, Keep, Momentum float64
	Nesterov             bool
	Iterations           int
}

// Muon updates the rows×cols matrix p and its momentum m from the gradient g, which it leaves zero:
//
//	m ← μ·m + (1−μ)·g,   u = (1−μ)·g + μ·m (Nesterov), or u = m
//	p ← keep·p − rate·NewtonSchulz(u)
//
// (Keller Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024.)
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
	for i := range g {
		m[i] += s.gain * (g[i] - m[i])
		u[i] = m[i]
		if s.nesterov {
			u[i] = g[i] + s.mu*(m[i]-g[i])
		}
		g[i] = 0
	}
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
