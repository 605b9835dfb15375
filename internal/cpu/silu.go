package cpu

import "math"

// SiLUMul computes h = silu(a) ⊙ b with silu(a) = a/(1+exp(−a)).
func SiLUMul[T Float](h, a, b []T) {
	Parallel(len(h), grain(20), func(lo, hi int) {
		for i := lo; i < hi; i++ {
			h[i] = a[i] * sigmoid(a[i]) * b[i]
		}
	})
}

// SiLUMulBackward computes h as SiLUMul does, and from the gradient dh of h those of a and b:
//
//	da = dh ⊙ b ⊙ σ(a)(1 + a(1−σ(a))),  db = dh ⊙ silu(a).
//
// da may be the memory of dh, since each element is read before it is written.
func SiLUMulBackward[T Float](h, da, db, dh, a, b []T) {
	Parallel(len(h), grain(30), func(lo, hi int) {
		for i := lo; i < hi; i++ {
			s, g := sigmoid(a[i]), dh[i]
			silu := a[i] * s
			h[i] = silu * b[i]
			db[i] = g * silu
			da[i] = g * b[i] * s * (1 + a[i]*(1-s))
		}
	})
}

func sigmoid[T Float](x T) T { return T(1 / (1 + math.Exp(-float64(x)))) }
