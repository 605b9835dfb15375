// Package array provides sums, tests and arithmetic over whole slices, using all cores.
package array

import (
	"sync"
	"sync/atomic"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
)

// SumSquares returns Σ x². It accumulates in float64 over fixed blocks, so the result does not depend
// on the number of cores.
func SumSquares[T cpu.Float](x []T) float64 {
	b := cpu.GetBuffers[T]()
	defer cpu.PutBuffers(b)
	partial := b.Floats((len(x) + cpu.VectorGrain - 1) / cpu.VectorGrain)
	cpu.Spread(len(x), cpu.VectorGrain, sumSquares[T]{x, partial})
	return vec.Sum(partial)
}

// BlockSquares sets partial[i] to Σ x² over the i-th block of cpu.VectorGrain elements; the last
// block may be shorter. Adding the partial sums from left to right yields SumSquares.
func BlockSquares[T cpu.Float](partial []float64, x []T) {
	cpu.Spread(len(x), cpu.VectorGrain, sumSquares[T]{x, partial})
}

// sumSquares are the arguments of SumSquares.
type sumSquares[T cpu.Float] struct {
	x       []T
	partial []float64
}

func (s *sumSquares[T]) Span(lo, hi int) {
	s.partial[lo/cpu.VectorGrain] = vec.SumSquares(s.x[lo:hi])
}

// ScaleBy multiplies every element of x by s.
func ScaleBy[T cpu.Float](x []T, s float64) {
	cpu.Spread(len(x), cpu.VectorGrain, scaling[T]{x, T(s)})
}

type scaling[T cpu.Float] struct {
	x []T
	s T
}

func (s *scaling[T]) Span(lo, hi int) { vec.Scale(s.x[lo:hi], s.s) }

// FirstNonFinite returns the index of the first NaN or infinity in x, or −1 if all elements are
// finite.
func FirstNonFinite[T cpu.Float](x []T) int {
	first := firsts.Get().(*atomic.Int64)
	defer firsts.Put(first)
	first.Store(int64(len(x)))
	cpu.Spread(len(x), cpu.VectorGrain, firstNonFinite[T]{x, first})
	if i := int(first.Load()); i < len(x) {
		return i
	}
	return -1
}

// firsts holds counters for the functions of this file.
var firsts = sync.Pool{New: func() any { return new(atomic.Int64) }}

type firstNonFinite[T cpu.Float] struct {
	x     []T
	first *atomic.Int64
}

func (s *firstNonFinite[T]) Span(lo, hi int) {
	if vec.Finite(s.x[lo:hi]) {
		return
	}

	for i, v := range s.x[lo:hi] {
		if v-v == 0 { // false only for NaN and ±Inf
			continue
		}
		for at := int64(lo + i); ; {
			seen := s.first.Load()
			if at >= seen || s.first.CompareAndSwap(seen, at) {
				return
			}
		}
	}
}

// IsZero reports whether all elements of x are zero.
func IsZero[T cpu.Float](x []T) bool {
	found := firsts.Get().(*atomic.Int64)
	defer firsts.Put(found)
	found.Store(0)
	cpu.Spread(len(x), cpu.VectorGrain, nonZero[T]{x, found})
	return found.Load() == 0
}

type nonZero[T cpu.Float] struct {
	x     []T
	found *atomic.Int64
}

func (s *nonZero[T]) Span(lo, hi int) {
	if s.found.Load() != 0 {
		return
	}
	for _, v := range s.x[lo:hi] {
		if v != 0 {
			s.found.Store(1)
			return
		}
	}
}

// Copy copies src to dst, which must be at least as long.
func Copy[T cpu.Float](dst, src []T) {
	cpu.Spread(len(src), cpu.VectorGrain, copying[T]{dst[:len(src)], src})
}

type copying[T cpu.Float] struct{ dst, src []T }

func (s *copying[T]) Span(lo, hi int) { copy(s.dst[lo:hi], s.src[lo:hi]) }
