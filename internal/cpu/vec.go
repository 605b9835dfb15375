package cpu

import (
	"math"
)

// The functions in this file run on the calling goroutine, float32 in vectors where the CPU has them and float64 in plain
// Go. An element's result does not depend on its place in the slice, and a sum's order depends on its length alone.

// Exp sets dst = exp(src) element by element, float32 to within 2 units in the last place. dst may be src.
func Exp[T Float](dst, src []T) { ExpSub(dst, src, 0) }

// ExpSub sets dst = exp(src − shift) element by element, to the accuracy of [Exp], and returns the sum of dst. dst may be
// src.
func ExpSub[T Float](dst, src []T, shift T) (sum T) {
	if d, ok := any(dst).([]float32); ok {
		return T(expSub32(d[:len(src)], any(src).([]float32), float32(shift)))
	}
	return expSubPortable(dst, src, shift)
}

// Max returns the largest element of x, and −Inf if x is empty. If x holds a NaN, the result is any element.
func Max[T Float](x []T) T {
	if x, ok := any(x).([]float32); ok {
		return T(maximum32(x))
	}
	return maximumPortable(x)
}

// SiLUMulSerial sets h = silu(a) ⊙ b with silu(a) = a·σ(a), σ(a) = 1/(1+exp(−a)). h may be a or b.
func SiLUMulSerial[T Float](h, a, b []T) {
	if h, ok := any(h).([]float32); ok {
		siluMul32(h, any(a).([]float32)[:len(h)], any(b).([]float32)[:len(h)])
		return
	}
	siluMulPortable(h, a[:len(h)], b)
}

// SiLUMulBackwardSerial sets h as siluMul does, and from the gradient dh of h those of a and b:
//
//	da = dh ⊙ b ⊙ σ(a)(1 + a(1−σ(a))),  db = dh ⊙ silu(a).
//
// da may be dh.
func SiLUMulBackwardSerial[T Float](h, da, db, dh, a, b []T) {
	if h, ok := any(h).([]float32); ok {
		n := len(h)
		siluMulBackward32(h, any(da).([]float32)[:n], any(db).([]float32)[:n], any(dh).([]float32)[:n],
			any(a).([]float32)[:n], any(b).([]float32)[:n])
		return
	}
	siluMulBackwardPortable(h, da, db, dh, a[:len(h)], b)
}

func expSubPortable[T Float](dst, src []T, shift T) (sum T) {
	for i, x := range src {
		e := T(math.Exp(float64(x - shift)))
		dst[i] = e
		sum += e
	}
	return sum
}

func maximumPortable[T Float](x []T) T {
	m := T(math.Inf(-1))
	for _, v := range x {
		if v > m {
			m = v
		}
	}
	return m
}

func siluMulPortable[T Float](h, a, b []T) {
	for i, x := range a {
		s, _ := sigmoids(x)
		h[i] = x * s * b[i]
	}
}

func siluMulBackwardPortable[T Float](h, da, db, dh, a, b []T) {
	for i, x := range a {
		s, rest := sigmoids(x)
		g, silu := dh[i], x*s
		h[i] = silu * b[i]
		db[i] = g * silu
		da[i] = g * b[i] * s * (1 + x*rest)
	}
}

// sigmoids returns σ(x) and 1 − σ(x), the latter without cancellation.
func sigmoids[T Float](x T) (s, rest T) {
	e := math.Exp(-math.Abs(float64(x)))
	s, rest = T(1/(1+e)), T(e/(1+e))
	if x < 0 {
		return rest, s
	}
	return s, rest
}
