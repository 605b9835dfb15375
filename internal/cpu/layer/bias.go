package layer

import (
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
)

// Bias computes y[r] = x[r] + b for each row r of x, which has len(b) columns.
func Bias[T cpu.Float](y, x, b []T) {
	cpu.Spread(len(x)/len(b), cpu.Grain(len(b)), bias[T]{y, x, b})
}

type bias[T cpu.Float] struct{ y, x, b []T }

func (s *bias[T]) Span(lo, hi int) {
	d := len(s.b)
	for r := lo; r < hi; r++ {
		vec.Add(s.y[r*d:][:d], s.x[r*d:][:d], s.b)
	}
}

// BiasBackward computes the gradient of the bias, db = Σ_r g[r], adding rows in order.
func BiasBackward[T cpu.Float](db, g []T) {
	clear(db)
	cpu.Spread(len(db), max(64, cpu.Grain(len(g)/len(db))), biasBackward[T]{db, g})
}

type biasBackward[T cpu.Float] struct{ db, g []T }

func (s *biasBackward[T]) Span(lo, hi int) {
	d, sum := len(s.db), s.db[lo:hi]
	for at := lo; at < len(s.g); at += d {
		vec.Add(sum, sum, s.g[at:])
	}
}
