package vec

import (
	"math"
	"unsafe"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// kernels holds the float32 implementations of this package's functions for one vector instruction set.
type kernels struct {
	expSub          func(dst, src *float32, n int, shift float32) float32
	maximum         func(x *float32, n int) float32
	siluMul         func(h, a, b *float32, n int)
	siluMulBackward func(h, da, db, dh, a, b *float32, n int)
	sumSquares      func(x *float32, n int) float64
	sum64           func(x *float32, n int) float64
	dot3            func(g, w, x *float32, n int) float64
	dotProduct      func(a, b *float32, n int) float32
	finite          func(x *float32, n int) float32
	mulScaled       func(y, x, w *float32, n int, s float32)
	normGradient    func(dx, g, w, x *float32, n int, s, m float32)
	addScaled       func(y, a, b *float32, n int, s float32)
	rotate          func(ya, yb, xa, xb, c, s *float32, n int, sign float32)
	addVectors      func(y, a, b *float32, n int)
	addNumber       func(y, x *float32, n int, s float32)
	scaleVector     func(x *float32, n int, s float32)
	softmaxGradient func(dp, p *float32, n int, d float32)
	adamW           func(p, g, m, v *float32, n int, keep, rate, root, gain1,
		beta2, gain2, eps, largest float32)
}

// kernels32 holds the kernels in use. It is nil if the processor, or KASMINA_CPU, allows only plain Go.
var kernels32 *kernels

func init() { cpu.OnISA(func(l cpu.ISA) { kernels32 = kernelsFor(l) }) }

// vectorized returns the kernels if T is float32 and kernels are in use, otherwise nil.
func vectorized[T cpu.Float]() *kernels {
	if _, ok := any(T(0)).(float32); ok {
		return kernels32
	}
	return nil
}

// p32 returns a pointer to the elements of x, which must be float32.
func p32[T cpu.Float](x []T) *float32 { return (*float32)(unsafe.Pointer(unsafe.SliceData(x))) }

// SumSquares returns Σ x², computed in float64.
func SumSquares[T cpu.Float](x []T) float64 {
	if k := vectorized[T](); k != nil {
		return k.sumSquares(p32(x), len(x))
	}
	var sum float64
	for _, v := range x {
		sum += float64(v) * float64(v)
	}
	return sum
}

// Sum64 returns Σ x, computed in float64.
func Sum64[T cpu.Float](x []T) (s float64) {
	if k := vectorized[T](); k != nil {
		return k.sum64(p32(x), len(x))
	}
	for _, v := range x {
		s += float64(v)
	}
	return s
}

// Dot3 returns Σ (g·w)·x, where g·w is rounded to T and the rest is computed in float64.
func Dot3[T cpu.Float](g, w, x []T) float64 {
	g, w = g[:len(x)], w[:len(x)]
	if k := vectorized[T](); k != nil {
		return k.dot3(p32(g), p32(w), p32(x), len(x))
	}
	var sum float64
	for i, v := range x {
		sum += float64(g[i]*w[i]) * float64(v)
	}
	return sum
}

// Dot returns Σ a·b.
func Dot[T cpu.Float](a, b []T) T {
	b = b[:len(a)]
	if k := vectorized[T](); k != nil {
		return T(k.dotProduct(p32(a), p32(b), len(a)))
	}
	var sum T
	for i, x := range a {
		sum += x * b[i]
	}
	return sum
}

// Finite reports whether x holds neither NaN nor infinity.
func Finite[T cpu.Float](x []T) bool {
	if k := vectorized[T](); k != nil {
		return k.finite(p32(x), len(x)) == 0
	}
	for _, v := range x {
		if v-v != 0 { // true for NaN as well
			return false
		}
	}
	return true
}

// MulScaled sets y = x·s·w.
func MulScaled[T cpu.Float](y, x, w []T, s T) {
	y, w = y[:len(x)], w[:len(x)]
	if k := vectorized[T](); k != nil {
		k.mulScaled(p32(y), p32(x), p32(w), len(x), float32(s))
		return
	}
	for i, v := range x {
		y[i] = v * s * w[i]
	}
}

// NormGradient sets dx = s·(g·w − x·m).
func NormGradient[T cpu.Float](dx, g, w, x []T, s, m T) {
	dx, g, w = dx[:len(x)], g[:len(x)], w[:len(x)]
	if k := vectorized[T](); k != nil {
		k.normGradient(p32(dx), p32(g), p32(w), p32(x), len(x), float32(s), float32(m))
		return
	}
	for i, v := range x {
		dx[i] = s * (g[i]*w[i] - v*m)
	}
}

// AddScaled adds a·b·s to y.
func AddScaled[T cpu.Float](y, a, b []T, s T) {
	a, b = a[:len(y)], b[:len(y)]
	if k := vectorized[T](); k != nil {
		k.addScaled(p32(y), p32(a), p32(b), len(y), float32(s))
		return
	}
	for i := range y {
		y[i] += a[i] * b[i] * s
	}
}

// Rotate sets ya = xa·c − xb·s and yb = xb·c + xa·s, with s multiplied by sign.
func Rotate[T cpu.Float](ya, yb, xa, xb, c, s []T, sign T) {
	n := len(xa)
	ya, yb, xb, c, s = ya[:n], yb[:n], xb[:n], c[:n], s[:n]
	if k := vectorized[T](); k != nil {
		k.rotate(p32(ya), p32(yb), p32(xa), p32(xb), p32(c), p32(s), n, float32(sign))
		return
	}

	for i, a := range xa {
		b, si := xb[i], sign*s[i]
		ya[i] = a*c[i] - b*si
		yb[i] = b*c[i] + a*si
	}
}

// Add sets y = a + b. y may be a or b.
func Add[T cpu.Float](y, a, b []T) {
	a, b = a[:len(y)], b[:len(y)]
	if k := vectorized[T](); k != nil {
		k.addVectors(p32(y), p32(a), p32(b), len(y))
		return
	}
	for i := range y {
		y[i] = a[i] + b[i]
	}
}

// AddNumber sets y = x + s. y may be x.
func AddNumber[T cpu.Float](y, x []T, s T) {
	x = x[:len(y)]
	if k := vectorized[T](); k != nil {
		k.addNumber(p32(y), p32(x), len(y), float32(s))
		return
	}
	for i, v := range x {
		y[i] = v + s
	}
}

// Scale multiplies x by s.
func Scale[T cpu.Float](x []T, s T) {
	if k := vectorized[T](); k != nil {
		k.scaleVector(p32(x), len(x), float32(s))
		return
	}
	for i := range x {
		x[i] *= s
	}
}

// SoftmaxGradient sets dp = p·(dp − d).
func SoftmaxGradient[T cpu.Float](dp, p []T, d T) {
	p = p[:len(dp)]
	if k := vectorized[T](); k != nil {
		k.softmaxGradient(p32(dp), p32(p), len(dp), float32(d))
		return
	}
	for i, v := range p {
		dp[i] = v * (dp[i] - d)
	}
}

// AdamW holds the constants of an AdamW step, p ← Keep·p − Rate·m/(sqrt(v)/Root + Eps), with m ← m
// + Gain1·(g − m) and v ← Beta2·v + Gain2·g².
//
// Gradients are limited to ±[LargestGradient].
type AdamW[T cpu.Float] struct {
	Keep, Rate, Root, Gain1, Beta2, Gain2, Eps T
}

// LargestGradient returns the largest power of two with a square well within the range of T: 2⁶³ or
// 2⁵¹¹. A mean of squares of gradients up to it stays finite and can therefore decay again.
func LargestGradient[T cpu.Float]() T {
	if _, ok := any(T(0)).(float32); ok {
		return T(math.Ldexp(1, 63))
	}
	return T(math.Ldexp(1, 511))
}

// Step updates p, m and v from the gradient g, and sets g to zero.
func (s *AdamW[T]) Step(p, g, m, v []T) {
	g, m, v = g[:len(p)], m[:len(p)], v[:len(p)]
	largest := LargestGradient[T]()
	if k := vectorized[T](); k != nil {
		k.adamW(p32(p), p32(g), p32(m), p32(v), len(p), float32(s.Keep), float32(s.Rate),
			float32(s.Root), float32(s.Gain1),
			float32(s.Beta2), float32(s.Gain2), float32(s.Eps), float32(largest))
		return
	}

	for i, gi := range g {
		gi = max(-largest, min(gi, largest))
		mi := m[i] + s.Gain1*(gi-m[i])
		vi := s.Beta2*v[i] + s.Gain2*gi*gi
		m[i], v[i], g[i] = mi, vi, 0
		p[i] = s.Keep*p[i] - s.Rate*mi/(T(math.Sqrt(float64(vi)))/s.Root+s.Eps)
	}
}
