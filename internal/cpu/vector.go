package cpu

import "sync/atomic"

// vectorGrain is the fixed block over which vector reductions form one partial result.
const vectorGrain = 1 << 14

// SumSquares returns Σ x². It adds in float64 over fixed blocks, so that the bits do not depend on the number of cores.
func SumSquares[T Float](x []T) float64 {
	partial := make([]float64, (len(x)+vectorGrain-1)/vectorGrain)
	Parallel(len(x), vectorGrain, func(lo, hi int) {
		var sum float64
		for _, v := range x[lo:hi] {
			sum += float64(v) * float64(v)
		}
		partial[lo/vectorGrain] = sum
	})
	var sum float64
	for _, p := range partial {
		sum += p
	}
	return sum
}

// ScaleBy multiplies every element of x by s.
func ScaleBy[T Float](x []T, s float64) {
	Parallel(len(x), vectorGrain, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			x[i] *= T(s)
		}
	})
}

// FirstNonFinite returns the index of the first NaN or infinity in x, and -1 if there is none.
func FirstNonFinite[T Float](x []T) int {
	var first atomic.Int64
	first.Store(int64(len(x)))
	Parallel(len(x), vectorGrain, func(lo, hi int) {
		for i, v := range x[lo:hi] {
			if v-v == 0 { // false for NaN and ±Inf alone
				continue
			}
			for at := int64(lo + i); ; {
				seen := first.Load()
				if at >= seen || first.CompareAndSwap(seen, at) {
					return
				}
			}
		}
	})
	if i := int(first.Load()); i < len(x) {
		return i
	}
	return -1
}
