// Package vec provides the loops over one row or block that kernels consist of. They run on the
// calling goroutine, using vector instructions for float32 if the CPU supports them and plain Go
// otherwise. An element's result does not depend on its position in the slice, and the order of a sum
// depends only on its length.
package vec

import (
	"math"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// ExpSub sets dst = exp(src − shift) elementwise, for float32 to within 2 units in the last place,
// and returns the sum of dst. dst may be src.
func ExpSub[T cpu.Float](dst, src []T, shift T) (sum T) {
	dst = dst[:len(src)]
	if k := vectorized[T](); k != nil {
		return T(k.expSub(p32(dst), p32(src), len(src), float32(shift)))
	}
	for i, x := range src {
		e := T(math.Exp(float64(x - shift)))
		dst[i] = e
		sum += e
	}
	return sum
}

// Max returns the largest element of x, or −Inf if x is empty. If x contains a NaN, the result may
// be any element.
func Max[T cpu.Float](x []T) T {
	if k := vectorized[T](); k != nil {
		return T(k.maximum(p32(x), len(x)))
	}
	m := T(math.Inf(-1))
	for _, v := range x {
		if v > m {
			m = v
		}
	}
	return m
}

// SiLUMul sets h = silu(a) ⊙ b with silu(a) = a·σ(a), σ(a) = 1/(1+exp(−a)). h may be a or b.
func SiLUMul[T cpu.Float](h, a, b []T) {
	a, b = a[:len(h)], b[:len(h)]
	if k := vectorized[T](); k != nil {
		k.siluMul(p32(h), p32(a), p32(b), len(h))
		return
	}
	for i, x := range a {
		s, _ := sigmoids(x)
		h[i] = x * s * b[i]
	}
}

// SiLUMulBackward sets h as SiLUMul does and, from the gradient dh of h, computes the gradients of
// a and b:
//
//	da = dh ⊙ b ⊙ σ(a)(1 + a(1−σ(a))),  db = dh ⊙ silu(a).
//
// da may be dh.
func SiLUMulBackward[T cpu.Float](h, da, db, dh, a, b []T) {
	n := len(h)
	da, db, dh, a, b = da[:n], db[:n], dh[:n], a[:n], b[:n]
	if k := vectorized[T](); k != nil {
		k.siluMulBackward(p32(h), p32(da), p32(db), p32(dh), p32(a), p32(b), n)
		return
	}

	for i, x := range a {
		s, rest := sigmoids(x)
		g, silu := dh[i], x*s
		h[i] = silu * b[i]
		db[i] = g * silu
		da[i] = g * b[i] * s * (1 + x*rest)
	}
}

// sigmoids returns σ(x) and 1 − σ(x), the latter without cancellation.
func sigmoids[T cpu.Float](x T) (s, rest T) {
	e := math.Exp(-math.Abs(float64(x)))
	s, rest = T(1/(1+e)), T(e/(1+e))
	if x < 0 {
		return rest, s
	}
	return s, rest
}

// Sum returns Σ x, added in order.
func Sum(x []float64) float64 {
	var s float64
	for _, v := range x {
		s += v
	}
	return s
}
