package cpu

import "math"

// RMSNorm computes y[r] = x[r]·rstd[r] ⊙ w with rstd[r] = 1/sqrt(mean(x[r]²) + eps) for each row r of x, which is
// len(rstd)×len(w).
func RMSNorm[T Float](y, rstd, x, w []T, eps float64) {
	parallel(len(rstd), grain(4*len(w)), rmsNorm[T]{y, rstd, x, w, eps})
}

type rmsNorm[T Float] struct {
	y, rstd, x, w []T
	eps           float64
}

func (s *rmsNorm[T]) span(lo, hi int) {
	d := len(s.w)
	for r := lo; r < hi; r++ {
		x, y, w := s.x[r*d:][:d], s.y[r*d:][:d], s.w[:d]
		var sum float64
		for _, v := range x {
			sum += float64(v) * float64(v)
		}
		rstd := T(1 / math.Sqrt(sum/float64(d)+s.eps))
		s.rstd[r] = rstd
		for i, v := range x {
			y[i] = v * rstd * w[i]
		}
	}
}

// RMSNormBackward computes the gradients of RMSNorm for the output gradient g: with n = x[r]·rstd[r],
//
//	dx[r] = rstd[r]·(g ⊙ w − n·mean(g ⊙ w ⊙ n)),  dw = Σ_r g[r] ⊙ n.
func RMSNormBackward[T Float](dx, dw, g, x, w, rstd []T) {
	d := len(w)
	parallel(len(rstd), grain(8*d), rmsNormInput[T]{dx, g, x, w, rstd})
	// Each core takes some columns over all rows, so that no partial sums need adding.
	parallel(d, max(16, grain(4*len(rstd))), rmsNormWeight[T]{dw, g, x, rstd})
}

type rmsNormInput[T Float] struct{ dx, g, x, w, rstd []T }

func (s *rmsNormInput[T]) span(lo, hi int) {
	d := len(s.w)
	for r := lo; r < hi; r++ {
		x, g, dx, w, rstd := s.x[r*d:][:d], s.g[r*d:][:d], s.dx[r*d:][:d], s.w[:d], s.rstd[r]
		var dot float64
		for i, v := range x {
			dot += float64(g[i]*w[i]) * float64(v)
		}
		m := T(dot / float64(d) * float64(rstd) * float64(rstd))
		for i, v := range x {
			dx[i] = rstd * (g[i]*w[i] - v*m)
		}
	}
}

type rmsNormWeight[T Float] struct{ dw, g, x, rstd []T }

func (s *rmsNormWeight[T]) span(lo, hi int) {
	d, dw := len(s.dw), s.dw[lo:hi]
	clear(dw)
	for r, rstd := range s.rstd {
		x, g := s.x[r*d+lo:][:len(dw)], s.g[r*d+lo:][:len(dw)]
		for i := range dw {
			dw[i] += g[i] * x[i] * rstd
		}
	}
}
