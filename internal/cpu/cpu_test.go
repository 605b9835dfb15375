package cpu

import (
	"bytes"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// recovered returns the panic value of f.
func recovered(f func()) (r any) {
	defer func() { r = recover() }()
	f()
	return nil
}

// everywhere calls f on the calling goroutine and on a helper of Parallel at the same time. The
// argument is true on the calling goroutine.
func everywhere(f func(caller bool)) {
	var both sync.WaitGroup // a rendezvous, so that neither goroutine takes both spans
	both.Add(2)
	caller := goroutine()
	Parallel(2, 1, func(int, int) {
		both.Done()
		both.Wait()
		f(goroutine() == caller)
	})
}

// TestParallelPanics checks that a panic on a helper, or the helper's end, reaches the caller with
// the helper's stack, that a panic on the calling goroutine reaches it unchanged, and that the pool
// keeps working.
func TestParallelPanics(t *testing.T) {
	atLeastTwoCores(t)
	for range 50 {
		r := recovered(func() {
			everywhere(func(caller bool) {
				if !caller {
					panicsOnHelper()
				}
			})
		})
		if p, ok := r.(*Panic); !ok || p.Value != "boom" ||
			!strings.Contains(p.String(), "panicsOnHelper") {
			t.Fatalf("a panic on a helper arrives as %v", r)
		}
		if r := recovered(func() {
			everywhere(func(caller bool) {
				if caller {
					panic("bang")
				}
			})
		}); r != "bang" {
			t.Fatalf("a panic on the calling goroutine arrives as %v", r)
		}
		if p, ok := recovered(func() {
			everywhere(func(caller bool) {
				if !caller {
					runtime.Goexit()
				}
			})
		}).(*Panic); !ok || !strings.Contains(p.String(), "Goexit") {
			t.Fatalf("the end of a helper arrives as %v", p)
		}

		var sum atomic.Int64
		Parallel(1000, 1, func(lo, hi int) { sum.Add(int64(lo)) })
		if sum.Load() != 999*1000/2 {
			t.Fatalf("after panics, the sum of the spans' starts is %d", sum.Load())
		}
	}
}

// TestLateHelpers checks that a call does not wait for helpers that arrive after all work is done,
// and that these do nothing for it. They may work for the next call of the same team.
func TestLateHelpers(t *testing.T) {
	var indices atomic.Int32
	count := func(lo, hi int) { indices.Add(int32(hi - lo)) }
	late := &team{wake: make(chan struct{}, 1)}
	late.divide(7, 2, 3, count)
	late.lead()
	if n := indices.Load(); n != 7 || late.join() {
		t.Errorf("a leader alone has met %d of 7 indices, or can be joined then", n)
	}

	late.divide(7, 2, 3, count)
	for range 4 { // more than needed
		if !late.join() {
			t.Error("the second call cannot be joined")
		}
		late.help()
	}

	late.lead()
	if n := indices.Load(); n != 14 {
		t.Errorf("after two calls %d of 14 indices have been met", n)
	}
}

// TestParallelFromManyGoroutines makes calls from many goroutines, close together and far apart, so
// that helpers are looking for work, about to sleep or asleep. Each call must run all of its spans
// once.
func TestParallelFromManyGoroutines(t *testing.T) {
	atLeastTwoCores(t)
	var callers sync.WaitGroup
	for caller := range 8 {
		callers.Go(func() {
			r := rand.New(rand.NewPCG(uint64(caller), 1))
			for range 300 {
				n, grain := 1+r.IntN(50), 1+r.IntN(5)
				calls := make([]atomic.Int32, n)
				Parallel(n, grain, func(lo, hi int) {
					for i := lo; i < hi; i++ {
						calls[i].Add(1)
					}
				})
				for i := range calls {
					if c := calls[i].Load(); c != 1 {
						t.Errorf("index %d of %d was met %d times", i, n, c)
						return
					}
				}
				if r.IntN(4) == 0 {
					time.Sleep(time.Duration(r.IntN(200)) * time.Microsecond)
				}
			}
		})
	}

	callers.Wait()
}

// goroutine identifies the calling goroutine by the first line of its stack, "goroutine 7
// [running]:".
func goroutine() string {
	line := make([]byte, 64)
	line = line[:runtime.Stack(line, false)]
	return string(line[:bytes.IndexByte(line, '[')])
}

// atLeastTwoCores makes Parallel use helpers even on a machine with a single core.
func atLeastTwoCores(t *testing.T) {
	cores := runtime.GOMAXPROCS(0)
	runtime.GOMAXPROCS(max(2, cores))
	t.Cleanup(func() { runtime.GOMAXPROCS(cores) })
}

func panicsOnHelper() { panic("boom") }

// TestParallelStopsAtPanic checks that no call is in progress when Parallel panics, and that calls
// that have not started by then never do.
func TestParallelStopsAtPanic(t *testing.T) {
	atLeastTwoCores(t)
	const n = 10_000
	var calls, running atomic.Int64
	r := recovered(func() {
		Parallel(n, 1, func(lo, _ int) {
			calls.Add(1)
			running.Add(1)
			defer running.Add(-1)
			if lo == 100 {
				panic(lo)
			}
			if lo > 100 { // slow enough for the panic to be noticed long before the end
				time.Sleep(time.Millisecond)
			}
		})
	})

	if r == nil || running.Load() != 0 {
		t.Errorf("recovered %v with %d calls under way", r, running.Load())
	}

	if calls.Load() == n {
		t.Error("all spans were worked off after a panic in one of the first")
	}
}

// TestNestedParallelPanics checks that a panic below two levels of Parallel keeps the stack of its
// goroutine.
func TestNestedParallelPanics(t *testing.T) {
	atLeastTwoCores(t)
	r := recovered(func() {
		everywhere(func(caller bool) {
			if !caller {
				everywhere(func(caller bool) {
					if !caller {
						panicsOnHelper()
					}
				})
			}
		})
	})

	if p, ok := r.(*Panic); !ok || p.Value != "boom" ||
		!strings.Contains(p.String(), "panicsOnHelper") {
		t.Errorf("a nested panic arrives as %v", r)
	}
}
