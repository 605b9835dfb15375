// Package layer computes the layers of a transformer that need no matrix product, with their gradients: RMSNorm and layer
// normalization, rotary position embedding, the gated activations SiLU and GELU, biases and embeddings.
package layer

import (
	"math"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
)

// RMSNorm computes y[r] = x[r]·rstd[r] ⊙ w with rstd[r] = 1/sqrt(mean(x[r]²) + eps) for each row r
// of x, which is len(rstd)×len(w).
func RMSNorm[T cpu.Float](y, rstd, x, w []T, eps float64) {
	cpu.Spread(len(rstd), cpu.Grain(4*len(w)), rmsNorm[T]{y, rstd, x, w, eps})
}

type rmsNorm[T cpu.Float] struct {
	y, rstd, x, w []T
	eps           float64
}

func (s *rmsNorm[T]) Span(lo, hi int) {
	d := len(s.w)
	for r := lo; r < hi; r++ {
		x, y, w := s.x[r*d:][:d], s.y[r*d:][:d], s.w[:d]
		rstd := T(1 / math.Sqrt(vec.SumSquares(x)/float64(d)+s.eps))
		s.rstd[r] = rstd
		vec.MulScaled(y, x, w, rstd)
	}
}

// RMSNormBackward computes the gradients of RMSNorm for the output gradient g. With n =
// x[r]·rstd[r],
//
//	dx[r] = rstd[r]·(g ⊙ w − n·mean(g ⊙ w ⊙ n)),  dw = Σ_r g[r] ⊙ n.
func RMSNormBackward[T cpu.Float](dx, dw, g, x, w, rstd []T) {
	d := len(w)
	rows := max(32, cpu.Grain(8*d)) // rows per span, each with a separate sum for dw
	buf := cpu.GetBuffers[T]()
	defer cpu.PutBuffers(buf)
	sums := buf.Elements(cpu.CeilDiv(len(rstd), rows) * d)
	cpu.Spread(len(rstd), rows, rmsNormBackward[T]{dx, sums, g, x, w, rstd, rows})
	clear(dw)
	for i := 0; i < len(sums); i += d {
		vec.Add(dw, dw, sums[i:])
	}
}

type rmsNormBackward[T cpu.Float] struct {
	dx, sums, g, x, w, rstd []T
	rows                    int
}

func (s *rmsNormBackward[T]) Span(lo, hi int) {
	d := len(s.w)
	sum := s.sums[lo/s.rows*d:][:d]
	clear(sum)
	for r := lo; r < hi; r++ {
		x, g, dx, w, rstd := s.x[r*d:][:d], s.g[r*d:][:d], s.dx[r*d:][:d], s.w[:d], s.rstd[r]
		m := T(vec.Dot3(g, w, x) / float64(d) * float64(rstd) * float64(rstd))
		vec.AddScaled(sum, g, x, rstd)
		vec.NormGradient(dx, g, w, x, rstd, m)
	}
}
