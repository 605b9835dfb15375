package layer

import (
	"math"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
)

// LayerNormStats is the number of statistics that LayerNorm keeps for a row: the mean in two parts, and
// the reciprocal of the standard deviation.
//
// The first part of the mean is rounded to T, so subtracting it from a number close to it is exact.
// The second part is the mean of these differences. A single number would lose precision for rows far
// from 0, since in float32 the rounding error of a mean near 10⁷ can reach ½.
const LayerNormStats = 3

// LayerNorm computes, for each row r of x, which is rows×len(w),
//
//	y[r] = (x[r] − mean(x[r])) / sqrt(var(x[r]) + eps) ⊙ w + b
//
// and writes LayerNormStats statistics of the row to stats.
func LayerNorm[T cpu.Float](y, stats, x, w, b []T, eps float64) {
	rows := len(stats) / LayerNormStats
	cpu.Spread(rows, cpu.Grain(6*len(w)), layerNorm[T]{y, stats, x, w, b, eps})
}

type layerNorm[T cpu.Float] struct {
	y, stats, x, w, b []T
	eps               float64
}

func (s *layerNorm[T]) Span(lo, hi int) {
	d := len(s.w)
	for r := lo; r < hi; r++ {
		x, y, stats := s.x[r*d:][:d], s.y[r*d:][:d], s.stats[r*LayerNormStats:]
		first := T(vec.Sum64(x) / float64(d))
		vec.AddNumber(y, x, -first)
		second := T(vec.Sum64(y) / float64(d))
		vec.AddNumber(y, y, -second)

		rstd := T(1 / math.Sqrt(vec.SumSquares(y)/float64(d)+s.eps))
		stats[0], stats[1], stats[2] = first, second, rstd

		vec.MulScaled(y, y, s.w, rstd)
		vec.Add(y, y, s.b)
	}
}

// LayerNormBackward computes the gradients of LayerNorm for the output gradient g: with s the
// reciprocal of the standard deviation and n = (x[r] − mean(x[r]))·s,
//
//	dx[r] = s·(g ⊙ w − mean(g ⊙ w) − n·mean(g ⊙ w ⊙ n)),  dw = Σ_r g[r] ⊙ n,  db = Σ_r g[r].
func LayerNormBackward[T cpu.Float](dx, dw, db, g, x, w, stats []T) {
	d, rows := len(w), len(stats)/LayerNormStats
	span := max(32, cpu.Grain(12*d)) // rows that share partial sums for dw and db
	buf := cpu.GetBuffers[T]()
	defer cpu.PutBuffers(buf)
	sums := buf.Elements(cpu.CeilDiv(rows, span) * 3 * d)
	cpu.Spread(rows, span, layerNormBackward[T]{dx, sums, g, x, w, stats, span})

	clear(dw)
	clear(db)
	for i := 0; i < len(sums); i += 3 * d {
		vec.Add(dw, dw, sums[i:])
		vec.Add(db, db, sums[i+d:])
	}
}

type layerNormBackward[T cpu.Float] struct {
	dx, sums, g, x, w, stats []T
	span                     int
}

func (s *layerNormBackward[T]) Span(lo, hi int) {
	d := len(s.w)
	own := s.sums[lo/s.span*3*d:][:3*d]
	dw, db, centered := own[:d], own[d:2*d], own[2*d:]
	clear(dw)
	clear(db)

	for r := lo; r < hi; r++ {
		x, g, dx, stats := s.x[r*d:][:d], s.g[r*d:][:d], s.dx[r*d:][:d], s.stats[r*LayerNormStats:]
		vec.AddNumber(centered, x, -stats[0])
		vec.AddNumber(centered, centered, -stats[1])
		rstd := stats[2]

		along := T(vec.Dot3(g, s.w, centered) / float64(d) * float64(rstd) * float64(rstd))
		mean := vec.Dot(g, s.w) / T(d)
		vec.AddScaled(dw, g, centered, rstd)
		vec.Add(db, db, g)
		vec.NormGradient(dx, g, s.w, centered, rstd, along)
		vec.AddNumber(dx, dx, -rstd*mean)
	}
}
