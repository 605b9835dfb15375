package cpu

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
func Muon[T Float](p, g, m []T, rows, cols int, s MuonStep) {
	u, o := make([]T, len(p)), make([]T, len(p))
	mu, gain := T(s.Momentum), T(1-s.Momentum)
	Parallel(len(p), vectorGrain, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			m[i] += gain * (g[i] - m[i])
			u[i] = m[i]
			if s.Nesterov {
				u[i] = g[i] + mu*(m[i]-g[i])
			}
			g[i] = 0
		}
	})
	NewtonSchulz(o, u, rows, cols, s.Iterations)
	keep, rate := T(s.Keep), T(s.Rate)
	Parallel(len(p), vectorGrain, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			p[i] = keep*p[i] - rate*o[i]
		}
	})
}
