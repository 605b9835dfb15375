// Package parallel spreads work that shares nothing over the processors.
package parallel

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// Each calls f with every i from 0 to n−1, on as many goroutines as there are processors to use. It
// returns when all calls have. The order is any. A panic of f is that of the program.
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
