package layer

import (
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
)

// SiLUMul computes h = silu(a) ⊙ b with silu(a) = a/(1+exp(−a)).
func SiLUMul[T cpu.Float](h, a, b []T) { cpu.Spread(len(h), cpu.Grain(4), silu[T]{h, a, b}) }

type silu[T cpu.Float] struct{ h, a, b []T }

func (s *silu[T]) Span(lo, hi int) { vec.SiLUMul(s.h[lo:hi], s.a[lo:hi], s.b[lo:hi]) }

// SiLUMulBackward computes h as SiLUMul does and, from the gradient dh of h, the gradients of a and
// b:
//
//	da = dh ⊙ b ⊙ σ(a)(1 + a(1−σ(a))),  db = dh ⊙ silu(a).
//
// da may be dh, since each element is read before it is written.
func SiLUMulBackward[T cpu.Float](h, da, db, dh, a, b []T) {
	cpu.Spread(len(h), cpu.Grain(8), siluBackward[T]{h, da, db, dh, a, b})
}

type siluBackward[T cpu.Float] struct{ h, da, db, dh, a, b []T }

func (s *siluBackward[T]) Span(lo, hi int) {
	vec.SiLUMulBackward(s.h[lo:hi], s.da[lo:hi], s.db[lo:hi], s.dh[lo:hi], s.a[lo:hi], s.b[lo:hi])
}
