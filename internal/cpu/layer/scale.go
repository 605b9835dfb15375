package layer

import (
	"math"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
)

// ScaleColumns computes y[r] = x[r] ⊙ f for each row r of x, which has len(f) columns.
func ScaleColumns[T cpu.Float](y, x, f []T) {
	cpu.Spread(len(x)/len(f), cpu.Grain(len(f)), scaleColumns[T]{y, x, f})
}

type scaleColumns[T cpu.Float] struct{ y, x, f []T }

func (s *scaleColumns[T]) Span(lo, hi int) {
	d := len(s.f)
	for r := lo; r < hi; r++ {
		vec.MulScaled(s.y[r*d:][:d], s.x[r*d:][:d], s.f, 1)
	}
}

// ScaleColumnsBackward computes the gradient of the factors, df = Σ_r g[r] ⊙ x[r], adding rows in
// order.
func ScaleColumnsBackward[T cpu.Float](df, g, x []T) {
	clear(df)
	cpu.Spread(len(df), max(64, cpu.Grain(len(g)/len(df))), scaleBackward[T]{df, g, x})
}

type scaleBackward[T cpu.Float] struct{ df, g, x []T }

func (s *scaleBackward[T]) Span(lo, hi int) {
	d := len(s.df)
	for at := 0; at < len(s.g); at += d {
		for i := lo; i < hi; i++ {
			s.df[i] += s.g[at+i] * s.x[at+i]
		}
	}
}

// Dropout computes y = x/(1−p) for elements selected by keep, and 0 elsewhere.
func Dropout[T cpu.Float](y, x []T, p float64, keep func(i int) bool) {
	scale := T(1 / (1 - p))
	cpu.Parallel(len(y), 1<<13, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			y[i] = 0
			if keep(i) {
				y[i] = x[i] * scale
			}
		}
	})
}

// RowNorms computes the norms of the rows of w + scale·b·a without forming that sum:
//
//	norms[o]² = ‖w[o]‖² + b[o]·(2·scale·a·w[o] + scale²·a·aᵀ·b[o])
//
// Here w is [out, in] and b is [out, r], with the products p = w·aᵀ [out, r] and q = b·a·aᵀ [out, r].
func RowNorms[T cpu.Float](norms, w, b, p, q []T, r int, scale float64) {
	out := len(norms)
	in := len(w) / out
	cpu.Parallel(out, cpu.Grain(in), func(lo, hi int) {
		for o := lo; o < hi; o++ {
			sum := vec.SumSquares(w[o*in:][:in])
			for i := o * r; i < (o+1)*r; i++ {
				sum += float64(b[i]) * (2*scale*float64(p[i]) + scale*scale*float64(q[i]))
			}
			norms[o] = T(math.Sqrt(max(0, sum)))
		}
	})
}
