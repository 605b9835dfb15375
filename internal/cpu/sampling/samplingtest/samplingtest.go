// Package samplingtest makes random rules and logits for tests of sampling.
package samplingtest

import (
	"math"
	"math/rand/v2"

	"github.com/kasmina-go/kasmina/internal/cpu/sampling"
)

// Rule returns a random rule for a vocabulary of n tokens.
func Rule(r *rand.Rand, n int) sampling.Rule {
	maybe := func(f func()) {
		if r.IntN(2) == 0 {
			f()
		}
	}

	rule := sampling.Rule{Scale: sampling.ScaleOf(math.Exp2(4*r.Float64() - 2)), Uniform: r.Uint64(),
		Greedy: r.IntN(8) == 0}
	if r.IntN(20) == 0 {
		rule.Scale = sampling.ScaleOf([]float64{5e-324, 1e300}[r.IntN(2)])
	}
	maybe(func() { rule.TopK = 1 + r.IntN(min(n+3, 1+1<<r.IntN(18))) })
	maybe(func() { rule.TopP = sampling.ShareOf(r.Float64()) })
	maybe(func() { rule.MinWeight = sampling.WeightOf(r.Float64() * r.Float64()) })
	maybe(func() { rule.Vocab = 1 + r.IntN(n+3) })
	maybe(func() {
		rule.Repetition, rule.Presence, rule.Frequency = float32(2*r.Float64()+0.1), float32(r.NormFloat64()),
			float32(r.NormFloat64())
		for range r.IntN(3) {
			rule.Pending = append(rule.Pending, r.IntN(n))
		}
		rare := 4 + n/500
		for id := range n {
			if r.IntN(rare) == 0 {
				e := sampling.Entry{ID: id, Occurred: r.IntN(2) == 0, Drawn: r.IntN(3), Bias: float32(r.NormFloat64())}
				if r.IntN(9) == 0 {
					e.Bias = []float32{-100, float32(math.Inf(-1))}[r.IntN(2)]
				}
				rule.Entries = append(rule.Entries, e)
			}
		}
	})
	return rule
}

// Logits fills x with random logits. There are ties, excluded tokens, zeros of both signs and, seldom, numbers
// that are not finite.
func Logits(r *rand.Rand, x []float64) {
	for i := range x {
		switch x[i] = r.NormFloat64() * 4; r.IntN(12) {
		case 0:
			x[i] = math.Round(x[i])
		case 1:
			x[i] = math.Inf(-1)
		case 2:
			x[i] = math.Copysign(0, x[i])
		}
	}
	if r.IntN(40) == 0 {
		x[r.IntN(len(x))] = []float64{math.NaN(), math.Inf(1)}[r.IntN(2)]
	}
}
