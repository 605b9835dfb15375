package layer

import (
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
)

// Embedding copies row ids[r] of the table, which has d features, to row r of y.
func Embedding[T cpu.Float](y []T, ids []int, table []T, d int) {
	cpu.Spread(len(ids), cpu.Grain(d), embedding[T]{y, table, ids, d})
}

type embedding[T cpu.Float] struct {
	y, table []T
	ids      []int
	d        int
}

func (s *embedding[T]) Span(lo, hi int) {
	for r := lo; r < hi; r++ {
		copy(s.y[r*s.d:][:s.d], s.table[s.ids[r]*s.d:])
	}
}

// EmbeddingCompact is [Embedding] for a table in a compact type.
func EmbeddingCompact(y []float32, ids []int, table *gemm.Compact) {
	cpu.Spread(len(ids), cpu.Grain(8*table.In), embeddingCompact{y, ids, table})
}

type embeddingCompact struct {
	y     []float32
	ids   []int
	table *gemm.Compact
}

func (s *embeddingCompact) Span(lo, hi int) {
	for r := lo; r < hi; r++ {
		s.table.Row(s.y[r*s.table.In:], s.ids[r])
	}
}

// EmbeddingBackward computes the gradient of the table, dt[v] = Σ_{r: ids[r] = v} g[r], adding rows
// in order.
func EmbeddingBackward[T cpu.Float](dt []T, ids []int, g []T, d int) {
	cpu.Spread(len(dt), 1<<16, zero[T]{dt})
	cpu.Spread(d, max(16, cpu.Grain(len(ids))), embeddingBackward[T]{dt, g, ids, d})
}

type embeddingBackward[T cpu.Float] struct {
	dt, g []T
	ids   []int
	d     int
}

func (s *embeddingBackward[T]) Span(lo, hi int) {
	for r, id := range s.ids {
		dst, src := s.dt[id*s.d+lo:id*s.d+hi], s.g[r*s.d+lo:r*s.d+hi]
		for i, v := range src {
			dst[i] += v
		}
	}
}

type zero[T cpu.Float] struct{ x []T }

func (s *zero[T]) Span(lo, hi int) { clear(s.x[lo:hi]) }
