// Package cpu holds the arithmetic that the ops run on a CPU: plain loops over slices that read like the formulas, for
// float32 and float64, with rows or heads spread over the cores. It knows nothing of graphs, nodes or tensors; callers
// check shapes, so functions here index without further tests.
//
// Results do not depend on how many cores share the work: a sum is always formed by one goroutine in one order, or from
// partial sums over fixed blocks that are added in a fixed order. The same inputs give the same bits on every run.
package cpu

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// Float is the element type of every kernel in this package.
type Float interface{ float32 | float64 }

// Parallel splits [0, n) into spans of at most grain indices and calls f(lo, hi) for each, on as many goroutines as there
// are cores. It returns when all calls have. Spans begin at multiples of grain, whatever the number of cores, so that a
// caller may keep one partial result a span and add them up in order.
func Parallel(n, grain int, f func(lo, hi int)) {
	if n <= 0 {
		return
	}
	grain = max(grain, 1)
	workers := min(runtime.GOMAXPROCS(0), (n+grain-1)/grain)
	if workers == 1 {
		for lo := 0; lo < n; lo += grain {
			f(lo, min(lo+grain, n))
		}
		return
	}
	t := teams.Get().(*team)
	t.f, t.n, t.grain = f, n, grain
	t.next.Store(0)
	t.helpers.Add(workers - 1)
	for range workers - 1 {
		select {
		case idle <- t:
		default:
			go help(t)
		}
	}
	t.work()
	t.helpers.Wait()
	t.f = nil
	teams.Put(t)
}

// team is one call of Parallel and the goroutines at work on it. Teams and goroutines are kept for the next call, so that
// a steady state allocates nothing.
type team struct {
	f        func(lo, hi int)
	n, grain int
	next     atomic.Int64
	helpers  sync.WaitGroup
}

var (
	teams = sync.Pool{New: func() any { return new(team) }}
	idle  = make(chan *team) // to a helper that waits for work
)

func (t *team) work() {
	for {
		lo := (int(t.next.Add(1)) - 1) * t.grain
		if lo >= t.n {
			return
		}
		t.f(lo, min(lo+t.grain, t.n))
	}
}

// help works for t and then for whoever calls next.
func help(t *team) {
	for {
		t.work()
		t.helpers.Done()
		t = <-idle
	}
}

// grain returns how many items of the given cost (in elementary operations) make one span worth handing to a goroutine.
func grain(cost int) int { return max(1, 1<<15/max(cost, 1)) }
