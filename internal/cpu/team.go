package cpu

import (
	"sync"
	"sync/atomic"
)

// team is one call of Parallel and the goroutines at work on it. Teams and goroutines are kept for the next call, so that
// a steady state allocates nothing.
type team struct {
	f        func(lo, hi int)
	n, grain int
	next     atomic.Int64
	helpers  atomic.Int32          // at work, and asleep while the leader sleeps
	wake     chan struct{}         // from the last helper to a leader who sleeps
	panicked atomic.Pointer[Panic] // a helper's; a team that has one is not used again
}

const asleep = 1 << 30

// To wake a sleeping thread takes tens of microseconds, more than many a kernel. So helpers who have run out of work look out
// for more before they sleep, and leaders for the end of their helpers' work: rounds pauses, some 50 microseconds.
const rounds = 1000

var (
	teams    = sync.Pool{New: func() any { return &team{wake: make(chan struct{}, 1)} }}
	lookouts atomic.Int32             // helpers who look out and are nobody's yet
	offers   = make(chan *team, 1024) // to them
	idle     = make(chan *team)       // to a helper who sleeps
)

// recruit finds t a helper: one who looks out, one who sleeps, or a new one.
func (t *team) recruit() {
	if claim() {
		offers <- t
		return
	}
	select {
	case idle <- t:
	default:
		go help(t)
	}
}

// claim takes one of the lookouts, if there are any.
func claim() bool {
	for {
		n := lookouts.Load()
		if n == 0 {
			return false
		}
		if lookouts.CompareAndSwap(n, n-1) {
			return true
		}
	}
}

// await returns the next team that a helper works for.
func await() *team {
	lookouts.Add(1)
	for range rounds {
		select {
		case t := <-offers:
			return t
		default:
			pause()
		}
	}
	if claim() {
		return <-idle
	}
	return <-offers // as many are on their way as there are helpers here
}

func (t *team) work() {
	for {
		lo := (int(t.next.Add(1)) - 1) * t.grain
		if lo >= t.n {
			return
		}
		t.f(lo, min(lo+t.grain, t.n))
	}
}

// lead works for t and waits for its helpers, even when f panics: they still use what f does.
func (t *team) lead() {
	done := false
	defer func() {
		if !done {
			t.stop()
		}
		t.wait()
	}()
	t.work()
	done = true
}

// wait returns when no helper is at work.
func (t *team) wait() {
	for range rounds {
		if t.helpers.Load() == 0 {
			return
		}
		pause()
	}
	if t.helpers.Or(asleep) != 0 {
		<-t.wake
	}
}

// stop lets no further span begin.
func (t *team) stop() { t.next.Store(int64((t.n + t.grain - 1) / t.grain)) }

// help works for t and then for whoever calls next.
func help(t *team) {
	for {
		t.help()
		t = await()
	}
}

func (t *team) help() {
	defer func() {
		if r := recover(); r != nil {
			t.stop()
			t.panicked.CompareAndSwap(nil, asPanic(r))
		}
		if t.helpers.Add(-1) == asleep {
			t.wake <- struct{}{}
		}
	}()
	t.work()
}
