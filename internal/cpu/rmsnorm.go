package cpu

import "math"

// RMSNorm computes y[r] = x[r]·rstd[r] ⊙ w with rstd[r] = 1/sqrt(mean(x[r]²) + eps) for each row r of x, which is
// len(rstd)×len(w).
func RMSNorm[T Float](y, rstd, x, w []T, eps float64) {
	d := len(w)
	Parallel(len(rstd), grain(4*d), func(lo, hi int) {
		for r := lo; r < hi; r++ {
			xr, yr := x[r*d:][:d], y[r*d:][:d]
			var sum float64
			for _, v := range xr {
				sum += float64(v) * float64(v)
			}
			s := T(1 / math.Sqrt(sum/float64(d)+eps))
			rstd[r] = s
			for i, v := range xr {
				yr[i] = v * s * w[i]
			}
		}
	})
}

// RMSNormBackward computes the gradients of RMSNorm for the output gradient g: with n = x[r]·rstd[r],
//
//	dx[r] = rstd[r]·(g ⊙ w − n·mean(g ⊙ w ⊙ n)),  dw = Σ_r g[r] ⊙ n.
func RMSNormBackward[T Float](dx, dw, g, x, w, rstd []T) {
	d := len(w)
	Parallel(len(rstd), grain(8*d), func(lo, hi int) {
		for r := lo; r < hi; r++ {
			xr, gr, dr, s := x[r*d:][:d], g[r*d:][:d], dx[r*d:][:d], rstd[r]
			var dot float64
			for i, v := range xr {
				dot += float64(gr[i]*w[i]) * float64(v)
			}
			m := T(dot / float64(d) * float64(s) * float64(s))
			for i, v := range xr {
				dr[i] = s * (gr[i]*w[i] - v*m)
			}
		}
	})
	// Each core takes some columns over all rows, so that no partial sums need adding.
	Parallel(d, max(16, grain(4*len(rstd))), func(lo, hi int) {
		clear(dw[lo:hi])
		for r, s := range rstd {
			xr, gr := x[r*d:], g[r*d:]
			for i := lo; i < hi; i++ {
				dw[i] += gr[i] * xr[i] * s
			}
		}
	})
}
