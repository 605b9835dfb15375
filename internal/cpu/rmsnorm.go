package cpu

import (
	"math"
)

// RMSNorm computes y[r] = x[r]·rstd[r] ⊙ w with rstd[r] = 1/sqrt(mean(x[r]²) + eps) for each row r of x, which is
// len(rstd)×len(w).
func RMSNorm[T Float](y, rstd, x, w []T, eps float64) {
	ParallelCall(len(rstd), Grain(4*len(w)), rmsNorm[T]{y, rstd, x, w, eps})
}

type rmsNorm[T Float] struct {
	y, rstd, x, w []T
	eps           float64
}

func (s *rmsNorm[T]) Span(lo, hi int) {
	d := len(s.w)
	for r := lo; r < hi; r++ {
		x, y, w := s.x[r*d:][:d], s.y[r*d:][:d], s.w[:d]
		rstd := T(1 / math.Sqrt(Squares(x)/float64(d)+s.eps))
		s.rstd[r] = rstd
		mulScaled(y, x, w, rstd)
	}
}

// RMSNormBackward computes the gradients of RMSNorm for the output gradient g: with n = x[r]·rstd[r],
//
//	dx[r] = rstd[r]·(g ⊙ w − n·mean(g ⊙ w ⊙ n)),  dw = Σ_r g[r] ⊙ n.
func RMSNormBackward[T Float](dx, dw, g, x, w, rstd []T) {
	d := len(w)
	rows := max(32, Grain(8*d)) // of a span, which has a sum of its own for dw
	buf := getBuffers[T]()
	defer putBuffers(buf)
	sums := buf.elements(ceilDiv(len(rstd), rows) * d)
	ParallelCall(len(rstd), rows, rmsNormBackward[T]{dx, sums, g, x, w, rstd, rows})
	clear(dw)
	for i := 0; i < len(sums); i += d {
		addVectors(dw, dw, sums[i:])
	}
}

type rmsNormBackward[T Float] struct {
	dx, sums, g, x, w, rstd []T
	rows                    int
}

func (s *rmsNormBackward[T]) Span(lo, hi int) {
	d := len(s.w)
	sum := s.sums[lo/s.rows*d:][:d]
	clear(sum)
	for r := lo; r < hi; r++ {
		x, g, dx, w, rstd := s.x[r*d:][:d], s.g[r*d:][:d], s.dx[r*d:][:d], s.w[:d], s.rstd[r]
		m := T(dot3(g, w, x) / float64(d) * float64(rstd) * float64(rstd))
		addScaled(sum, g, x, rstd)
		normGradient(dx, g, w, x, rstd, m)
	}
}
