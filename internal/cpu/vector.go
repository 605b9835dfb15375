package cpu

import (
	"sync"
	"sync/atomic"
)

// vectorGrain is the fixed block over which vector reductions form one partial result.
const vectorGrain = 1 << 14

// SumSquares returns Σ x². It adds in float64 over fixed blocks, so that the bits do not depend on the number of cores.
func SumSquares[T Float](x []T) float64 {
	b := getBuffers[T]()
	defer putBuffers(b)
	partial := b.floats((len(x) + vectorGrain - 1) / vectorGrain)
	ParallelCall(len(x), vectorGrain, sumSquares[T]{x, partial})
	return sum(partial)
}

type sumSquares[T Float] struct {
	x       []T
	partial []float64
}

func (s *sumSquares[T]) Span(lo, hi int) {
	s.partial[lo/vectorGrain] = Squares(s.x[lo:hi])
}

// ScaleBy multiplies every element of x by s.
func ScaleBy[T Float](x []T, s float64) { ParallelCall(len(x), vectorGrain, scaling[T]{x, T(s)}) }

type scaling[T Float] struct {
	x []T
	s T
}

func (s *scaling[T]) Span(lo, hi int) { scale(s.x[lo:hi], s.s) }

// FirstNonFinite returns the index of the first NaN or infinity in x, and -1 if there is none.
func FirstNonFinite[T Float](x []T) int {
	first := firsts.Get().(*atomic.Int64)
	defer firsts.Put(first)
	first.Store(int64(len(x)))
	ParallelCall(len(x), vectorGrain, firstNonFinite[T]{x, first})
	if i := int(first.Load()); i < len(x) {
		return i
	}
	return -1
}

var firsts = sync.Pool{New: func() any { return new(atomic.Int64) }}

type firstNonFinite[T Float] struct {
	x     []T
	first *atomic.Int64
}

func (s *firstNonFinite[T]) Span(lo, hi int) {
	if Finite(s.x[lo:hi]) {
		return
	}
	for i, v := range s.x[lo:hi] {
		if v-v == 0 { // false for NaN and ±Inf alone
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
