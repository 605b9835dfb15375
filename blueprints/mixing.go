package blueprints

import (
	"math"
	"math/rand/v2"
)

// Mixing returns m, the rank or the number of hidden features of a kind that mixes the features of a chunk. Such a kind
// has 2·m·c weights, so m is the largest number for which they fit into a slot of the given width. Mixing returns 0 if
// either argument is not positive.
func Mixing(c, width int) (m int) {
	if c < 1 || width < 1 {
		return 0
	}
	return width / 2 / c
}

// mixingSize is the Size of kinds that mix features; it requires m ≥ 1.
func mixingSize(c, width int) int { return 2 * c * max(1, Mixing(c, width)) }

// mixingParts returns the Parts of a kind with the matrices v [m, c] and u [c, m].
func mixingParts(v, u string) func(c, n int) []Part {
	return func(c, n int) []Part {
		m := Mixing(c, n)
		return []Part{{v, []int{m, c}}, {u, []int{c, m}}}
	}
}

// mixingIdentity sets the matrix [c, m] to 0. It draws the matrix [m, c] at random, scaled such that inputs of
// variance 1 result in hidden features of variance 1. If both were 0, neither would ever receive a gradient.
func mixingIdentity(w []float64, c int, r *rand.Rand) (scale float64) {
	clear(w)
	for i := range w[:len(w)/2] {
		w[i] = r.NormFloat64() / math.Sqrt(float64(c))
	}
	return 1
}

// mixing computes t = x + a·U·h with V [m, C], U [C, m], z = V·x and h = f(z). With q = Uᵀg and dz
// = a·q ⊙ f'(z), its gradients are
//
//	dx = g + Vᵀdz,  dV = dz xᵀ,  dU = a·g hᵀ,  da = Σ q ⊙ h
//
// f returns f(z) and f'(z). Hidden features are computed one at a time, so no memory is allocated.
func mixing[T Float](f func(z T) (h, slope T)) Arithmetic[T] {
	return Arithmetic[T]{
		Forward: func(t, x, p []T, a T) {
			c := len(x)
			m := len(p) / (2 * c)
			v, u := p[:m*c], p[m*c:]
			copy(t, x)
			for k := range m {
				h, _ := f(dot(v[k*c:][:c], x))
				h *= a
				for i := range t {
					t[i] += h * u[i*m+k]
				}
			}
		},
		Backward: func(dx, dp, g, x, p []T, a T) (da float64) {
			c := len(x)
			m := len(p) / (2 * c)
			v, u, dv, du := p[:m*c], p[m*c:], dp[:m*c], dp[m*c:]
			copy(dx, g)
			for k := range m {
				row, drow := v[k*c:][:c], dv[k*c:][:c]
				h, slope := f(dot(row, x))
				var q T
				for i, gi := range g {
					q += gi * u[i*m+k]
					du[i*m+k] += gi * a * h
				}
				da += float64(q) * float64(h)
				dz := a * q * slope
				for i := range dx {
					dx[i] += dz * row[i]
					drow[i] += dz * x[i]
				}
			}

			return da
		},
	}
}

// dot returns Σ a[i]·b[i].
func dot[T Float](a, b []T) (sum T) {
	b = b[:len(a)]
	for i, v := range a {
		sum += v * b[i]
	}
	return sum
}

// linear returns z and its derivative.
func linear[T Float](z T) (h, slope T) { return z, 1 }

// silu returns z·σ(z) and its derivative σ(z)(1 + z(1 − σ(z))).
func silu[T Float](z T) (h, slope T) {
	e := math.Exp(-math.Abs(float64(z)))
	on, off := T(1/(1+e)), T(e/(1+e)) // σ(|z|) and 1 − σ(|z|), the latter without cancellation
	if z < 0 {
		on, off = off, on
	}
	return z * on, on * (1 + z*off)
}
