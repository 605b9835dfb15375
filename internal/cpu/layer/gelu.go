package layer

import (
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
)

// GELU's approximation by tanh is a SiLU of a polynomial, since (1 + tanh u)/2 = σ(2u):
//
//	gelu(a) = a/2·(1 + tanh(√(2/π)·(a + c·a³))) = a·σ(z),  z = k·a·(1 + c·a²),  k = 2√(2/π)
//
// so gelu(a)·b = silu(z)·b/(k·(1 + c·a²)), which is computed with SiLU's vector instructions.
const (
	geluScale = 1.595769121605730711759542
	geluCubic = 0.044715
)

// GELUMul computes h = gelu(a) ⊙ b with gelu(a) = a·σ(z).
func GELUMul[T cpu.Float](h, a, b []T) { cpu.Spread(len(h), cpu.Grain(8), gelu[T]{h, a, b}) }

type gelu[T cpu.Float] struct{ h, a, b []T }

// geluTile is the number of elements that are processed together, in the first-level cache.
const geluTile = 256

func (s *gelu[T]) Span(lo, hi int) {
	var z, f [geluTile]T
	for ; lo < hi; lo += geluTile {
		n := min(geluTile, hi-lo)
		a, b, h := s.a[lo:][:n], s.b[lo:][:n], s.h[lo:][:n]
		for i, x := range a {
			k := geluScale * (1 + geluCubic*x*x)
			z[i], f[i] = k*x, b[i]/k
		}
		vec.SiLUMul(h, z[:n], f[:n])
	}
}

// GELUMulBackward computes h as GELUMul does and, from the gradient dh of h, the gradients of a and
// b:
//
//	da = dh ⊙ b ⊙ σ(z)(1 + a(1−σ(z))·k(1 + 3c·a²)),  db = dh ⊙ gelu(a).
//
// da may be dh, since each element is read before it is written.
func GELUMulBackward[T cpu.Float](h, da, db, dh, a, b []T) {
	cpu.Spread(len(h), cpu.Grain(16), geluBackward[T]{h, da, db, dh, a, b})
}

type geluBackward[T cpu.Float] struct{ h, da, db, dh, a, b []T }

func (s *geluBackward[T]) Span(lo, hi int) {
	// With f = b/(k(1 + c·a²)), h = silu(z)·f: df and dz are SiLU's gradients, and
	// da = dz·z' + df·f', where f' = −f·2c·a/(1 + c·a²).
	var z, f, dz, df [geluTile]T
	for ; lo < hi; lo += geluTile {
		n := min(geluTile, hi-lo)
		a, b, da, db := s.a[lo:][:n], s.b[lo:][:n], s.da[lo:][:n], s.db[lo:][:n]
		for i, x := range a {
			k := geluScale * (1 + geluCubic*x*x)
			z[i], f[i] = k*x, b[i]/k
		}
		vec.SiLUMulBackward(s.h[lo:][:n], dz[:n], df[:n], s.dh[lo:][:n], z[:n], f[:n])
		for i, x := range a {
			q := geluCubic * x * x
			da[i] = dz[i]*geluScale*(1+3*q) - df[i]*f[i]*2*geluCubic*x/(1+q)
			db[i] = df[i] / (geluScale * (1 + q))
		}
	}
}

// GELU computes y = gelu(x).
func GELU[T cpu.Float](y, x []T) { cpu.Spread(len(y), cpu.Grain(8), plainGELU[T]{y, x}) }

type plainGELU[T cpu.Float] struct{ y, x []T }

// geluFar bounds the magnitudes for which the formula is evaluated. Beyond ±geluFar, gelu(a) equals a
// or 0, and a³ could overflow.
const geluFar = 100

func (s *plainGELU[T]) Span(lo, hi int) {
	var z, f [geluTile]T
	for ; lo < hi; lo += geluTile {
		n := min(geluTile, hi-lo)
		for i, x := range s.x[lo:][:n] {
			b := max(-geluFar, min(x, geluFar))
			k := geluScale * (1 + geluCubic*b*b)
			z[i], f[i] = k*b, 1/k
			if b != x {
				f[i] *= x / b // silu(z)·f is then x·σ(z)
			}
		}
		vec.SiLUMul(s.y[lo:][:n], z[:n], f[:n])
	}
}

// GELUBackward computes dx = dy ⊙ gelu'(x), with
//
//	gelu'(a) = σ(z)(1 + a(1−σ(z))·k(1 + 3c·a²)).
func GELUBackward[T cpu.Float](dx, dy, x []T) {
	cpu.Spread(len(dx), cpu.Grain(16), plainGELUBackward[T]{dx, dy, x})
}

type plainGELUBackward[T cpu.Float] struct{ dx, dy, x []T }

func (s *plainGELUBackward[T]) Span(lo, hi int) {
	// With f = 1/(k(1 + c·a²)), gelu = silu(z)·f. Of the two gradients of that product, dz is
	// multiplied by z' and df by f' = −f·2c·a/(1 + c·a²).
	var z, f, h, dz, df [geluTile]T
	for ; lo < hi; lo += geluTile {
		n := min(geluTile, hi-lo)
		x, dx := s.x[lo:][:n], s.dx[lo:][:n]
		for i, a := range x {
			b := max(-geluFar, min(a, geluFar))
			k := geluScale * (1 + geluCubic*b*b)
			z[i], f[i] = k*b, 1/k
		}
		dy := s.dy[lo:][:n]
		vec.SiLUMulBackward(h[:n], dz[:n], df[:n], dy, z[:n], f[:n])

		for i, a := range x {
			switch q := geluCubic * a * a; {
			case a > geluFar:
				dx[i] = dy[i]
			case a < -geluFar:
				dx[i] = 0
			default:
				dx[i] = dz[i]*geluScale*(1+3*q) - df[i]*f[i]*2*geluCubic*a/(1+q)
			}
		}
	}
}
