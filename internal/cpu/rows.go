package cpu

import (
	"math"
	"unsafe"
)

// The functions in this file run on the calling goroutine over one row or one block, float32 in vectors where the CPU has
// them and anything else in plain Go. A sum's order depends on its length alone.

// rowKernels are these functions for float32 in the vectors of an instruction set.
type rowKernels struct {
	sumSquares      func(x *float32, n int) float64
	dot3            func(g, w, x *float32, n int) float64
	dotProduct      func(a, b *float32, n int) float32
	finite          func(x *float32, n int) float32
	mulScaled       func(y, x, w *float32, n int, s float32)
	normGradient    func(dx, g, w, x *float32, n int, s, m float32)
	addScaled       func(y, a, b *float32, n int, s float32)
	rotate          func(ya, yb, xa, xb, c, s *float32, n int, sign float32)
	addVectors      func(y, a, b *float32, n int)
	scaleVector     func(x *float32, n int, s float32)
	softmaxGradient func(dp, p *float32, n int, d float32)
	adamW           func(p, g, m, v *float32, n int, keep, rate, root, gain1, beta2, gain2, eps float32)
}

// rows32 are the kernels in use, nil where plain Go is.
var rows32 *rowKernels

// vectorized returns the kernels, if T is float32 and there are any.
func vectorized[T Float]() *rowKernels {
	if _, ok := any(T(0)).(float32); ok {
		return rows32
	}
	return nil
}

// p32 is where the elements of x, which are float32, begin.
func p32[T Float](x []T) *float32 { return (*float32)(unsafe.Pointer(unsafe.SliceData(x))) }

// squares returns Σ x², formed in float64.
func Squares[T Float](x []T) float64 {
	if k := vectorized[T](); k != nil {
		return k.sumSquares(p32(x), len(x))
	}
	var sum float64
	for _, v := range x {
		sum += float64(v) * float64(v)
	}
	return sum
}

// dot3 returns Σ (g·w)·x, formed in float64.
func dot3[T Float](g, w, x []T) float64 {
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

// dot returns Σ a·b.
func dot[T Float](a, b []T) T {
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

// finite reports whether x holds neither NaN nor infinity.
func Finite[T Float](x []T) bool {
	if k := vectorized[T](); k != nil {
		return k.finite(p32(x), len(x)) == 0
	}
	for _, v := range x {
		if v-v != 0 { // NaN, which differs from 0 too
			return false
		}
	}
	return true
}

// mulScaled sets y = x·s·w.
func mulScaled[T Float](y, x, w []T, s T) {
	y, w = y[:len(x)], w[:len(x)]
	if k := vectorized[T](); k != nil {
		k.mulScaled(p32(y), p32(x), p32(w), len(x), float32(s))
		return
	}
	for i, v := range x {
		y[i] = v * s * w[i]
	}
}

// normGradient sets dx = s·(g·w − x·m).
func normGradient[T Float](dx, g, w, x []T, s, m T) {
	dx, g, w = dx[:len(x)], g[:len(x)], w[:len(x)]
	if k := vectorized[T](); k != nil {
		k.normGradient(p32(dx), p32(g), p32(w), p32(x), len(x), float32(s), float32(m))
		return
	}
	for i, v := range x {
		dx[i] = s * (g[i]*w[i] - v*m)
	}
}

// addScaled adds a·b·s to y.
func addScaled[T Float](y, a, b []T, s T) {
	a, b = a[:len(y)], b[:len(y)]
	if k := vectorized[T](); k != nil {
		k.addScaled(p32(y), p32(a), p32(b), len(y), float32(s))
		return
	}
	for i := range y {
		y[i] += a[i] * b[i] * s
	}
}

// rotate sets ya = xa·c − xb·s and yb = xb·c + xa·s, s taken times sign.
func rotate[T Float](ya, yb, xa, xb, c, s []T, sign T) {
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

// addVectors sets y = a + b. y may be a or b.
func addVectors[T Float](y, a, b []T) {
	a, b = a[:len(y)], b[:len(y)]
	if k := vectorized[T](); k != nil {
		k.addVectors(p32(y), p32(a), p32(b), len(y))
		return
	}
	for i := range y {
		y[i] = a[i] + b[i]
	}
}

// scale multiplies x by s.
func scale[T Float](x []T, s T) {
	if k := vectorized[T](); k != nil {
		k.scaleVector(p32(x), len(x), float32(s))
		return
	}
	for i := range x {
		x[i] *= s
	}
}

// softmaxGradient sets dp = p·(dp − d).
func softmaxGradient[T Float](dp, p []T, d T) {
	p = p[:len(dp)]
	if k := vectorized[T](); k != nil {
		k.softmaxGradient(p32(dp), p32(p), len(dp), float32(d))
		return
	}
	for i, v := range p {
		dp[i] = v * (dp[i] - d)
	}
}

// step updates a block as AdamW says.
func (s *adamW[T]) step(p, g, m, v []T) {
	g, m, v = g[:len(p)], m[:len(p)], v[:len(p)]
	if k := vectorized[T](); k != nil {
		k.adamW(p32(p), p32(g), p32(m), p32(v), len(p), float32(s.keep), float32(s.rate), float32(s.root), float32(s.gain1),
			float32(s.beta2), float32(s.gain2), float32(s.eps))
		return
	}
	for i, gi := range g {
		mi := m[i] + s.gain1*(gi-m[i])
		vi := s.beta2*v[i] + s.gain2*gi*gi
		m[i], v[i], g[i] = mi, vi, 0
		p[i] = s.keep*p[i] - s.rate*mi/(T(math.Sqrt(float64(vi)))/s.root+s.eps)
	}
}
