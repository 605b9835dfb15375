// Package parallel spreads independent work over the processors.
package parallel

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
)

// Each calls f with every i from 0 to n−1, in any order, on as many goroutines as there are
// processors, and returns when all calls have returned. A panic in f terminates the program.
func Each(n int, f func(i int)) {
	var next atomic.Int64
	var wait sync.WaitGroup
	for range min(n, runtime.GOMAXPROCS(0)) {
		wait.Go(func() {
			for i := next.Add(1) - 1; i < int64(n); i = next.Add(1) - 1 {
				f(int(i))
			}
		})
	}
	wait.Wait()
}

// chunk is the number of slice elements processed by one call.
const chunk = 1 << 19

// Chunks calls f with ranges [lo, hi) that cover n elements, like Each.
func Chunks(n int, f func(lo, hi int)) {
	if n <= chunk {
		f(0, n)
		return
	}
	Each((n+chunk-1)/chunk, func(i int) { f(i*chunk, min(n, (i+1)*chunk)) })
}

// Clone is a parallel slices.Clone.
func Clone[T any](x []T) []T {
	if len(x) <= chunk {
		return slices.Clone(x)
	}
	y := make([]T, len(x))
	Chunks(len(x), func(lo, hi int) { copy(y[lo:hi], x[lo:hi]) })
	return y
}

// Index is a parallel slices.IndexFunc over the numbers from 0 to n−1.
func Index(n int, f func(i int) bool) int {
	var first atomic.Int64
	first.Store(int64(n))
	Chunks(n, func(lo, hi int) {
		for i := lo; i < hi && int64(i) < first.Load(); i++ {
			if f(i) {
				for at := first.Load(); int64(i) < at && !first.CompareAndSwap(at, int64(i)); {
					at = first.Load()
				}
				return
			}
		}
	})

	if at := first.Load(); at < int64(n) {
		return int(at)
	}

	return -1
}
