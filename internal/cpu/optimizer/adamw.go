// Package optimizer computes the steps of AdamW, Lion and Muon, and the Newton-Schulz iteration.
package optimizer

import (
	"math"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
)

// AdamWStep holds the parameters of an AdamW step. Step counts from 1.
type AdamWStep struct {
	LR, Beta1, Beta2, Eps, Decay float64
	Step                         int
}

// AdamW updates the parameter p and its moments m and v from the gradient g, and sets g to zero:
//
//	m ← β1·m + (1−β1)·g,   v ← β2·v + (1−β2)·g²
//	p ← (1 − lr·decay)·p − lr/(1−β1ᵗ) · m / (sqrt(v)/sqrt(1−β2ᵗ) + ε)
//
// all in one pass. (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019; the order
// of operations is PyTorch's.)
//
// A gradient beyond ±[vec.LargestGradient] counts as ±LargestGradient. In PyTorch, the square of a
// larger one makes v infinite permanently, so that the element never moves again.
func AdamW[T cpu.Float](p, g, m, v []T, s AdamWStep) {
	cpu.Spread(len(p), cpu.VectorGrain, adamW[T]{p, g, m, v, adamWRule[T](s)})
}

// adamWRule returns the rule that a step applies to each element.
func adamWRule[T cpu.Float](s AdamWStep) vec.AdamW[T] {
	t := float64(s.Step)
	return vec.AdamW[T]{
		Keep:  T(1 - s.LR*s.Decay),
		Rate:  T(s.LR / (1 - math.Pow(s.Beta1, t))),
		Root:  T(math.Sqrt(1 - math.Pow(s.Beta2, t))),
		Gain1: T(1 - s.Beta1),
		Beta2: T(s.Beta2),
		Gain2: T(1 - s.Beta2),
		Eps:   T(s.Eps),
	}
}

type adamW[T cpu.Float] struct {
	p, g, m, v []T
	rule       vec.AdamW[T]
}

func (s *adamW[T]) Span(lo, hi int) {
	s.rule.Step(s.p[lo:hi], s.g[lo:hi], s.m[lo:hi], s.v[lo:hi])
}
