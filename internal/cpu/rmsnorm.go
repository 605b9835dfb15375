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
		rstd := T(1 / math.Sqrt(squares(x)/float64(d)+s.eps))
		s.rstd[r] = rstd
		mulScaled(y, x, w, rstd)
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
		m := T(dot3(g, w, x) / float64(d) * float64(rstd) * float64(rstd))
		normGradient(dx, g, w, x, rstd, m)
	}
}

type rmsNormWeight[T Float] struct{ dw, g, x, rstd []T }

func (s *rmsNormWeight[T]) span(lo, hi int) {
	d, dw := len(s.dw), s.dw[lo:hi]
	clear(dw)
	for r, rstd := range s.rstd {
		addScaled(dw, s.g[r*d+lo:], s.x[r*d+lo:], rstd)
	}
}
