package cpu

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// team is one call of Parallel together with the goroutines that work on it: the caller, which is the leader, and its
// helpers. Teams and helpers are reused by later calls, so that in the steady state nothing is allocated.
type team struct {
	f        func(lo, hi int)
	n, grain int
	parts    []part
	joined   atomic.Int32          // number of helpers that have started
	helpers  atomic.Int32          // number of working helpers, with the flags closed and asleep
	wake     chan struct{}         // from the last helper to a sleeping leader
	panicked atomic.Pointer[Panic] // a helper's panic; such a team is not used again
}

const (
	closed = 1 << 29 // all spans have started, so helpers can no longer join
	asleep = 1 << 30 // the leader sleeps, and the last helper must wake it
)

// part is one worker's share of the spans. A worker that has finished its own part continues with the parts of others.
//
// The leader has the first part and, on two cores, the second part always goes to the same helper. If consecutive calls
// divide the same rows, each core therefore mostly reads data that it has written itself.
type part struct {
	next atomic.Int64 // next span to run
	end  int64
	_    [48]byte // padding to a cache line
}

// divide distributes n indices, in spans of grain, over workers parts.
func (t *team) divide(n, grain, workers int, f func(lo, hi int)) {
	t.f, t.n, t.grain = f, n, grain
	if workers > cap(t.parts) {
		t.parts = make([]part, workers)
	}

	t.parts = t.parts[:workers]
	spans := CeilDiv(n, grain)
	for w := range t.parts {
		t.parts[w].next.Store(int64(spans * w / workers))
		t.parts[w].end = int64(spans * (w + 1) / workers)
	}

	t.joined.Store(0)
	t.helpers.Store(0) // opens the team, even to helpers recruited for an earlier call
}

// rounds is the number of pauses, about 50 microseconds in total, for which idle helpers poll for work before they sleep,
// and leaders poll for the end of their helpers' work. Waking a sleeping thread would take tens of microseconds, which is
// longer than many calls.
const rounds = 1000

var (
	teams    = sync.Pool{New: func() any { return &team{wake: make(chan struct{}, 1)} }}
	hired    atomic.Int32                   // number of helper goroutines
	lookouts atomic.Int32                   // number of helpers that poll for work and have not been claimed
	offers   = make(chan *team, maxHelpers) // to helpers that poll
	idle     = make(chan *team)             // to a sleeping helper
	queue    = make(chan *team, queued)     // to the next helper that finishes work for another team
)

const (
	maxHelpers = 1024
	// The queue is this long because calls often end before a helper takes their team from it, if other processes occupy
	// the cores.
	queued = 64
)

// recruit finds a helper for t: a helper looking for work, a sleeping one, or a new one. If there
// are as many helpers as cores and all are working, t is queued for the next one to finish.
func (t *team) recruit() {
	if claim() {
		offers <- t
		return
	}

	select {
	case idle <- t:
		return
	default:
	}

	if hire() {
		go help(t)
		return
	}

	select {
	case queue <- t:
	default:
	}
}

// hire reports whether another helper may be started, and counts it. There are at most as many
// helpers as cores, no matter how many goroutines call Parallel. Helpers stay even if GOMAXPROCS
// decreases.
func hire() bool {
	most := int32(min(runtime.GOMAXPROCS(0), maxHelpers))
	for {
		n := hired.Load()
		if n >= most {
			return false
		}
		if hired.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// claim claims a helper that is looking for work, if there is one.
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
	for looked := 0; ; {
		looks := int(lookouts.Add(1)) < runtime.GOMAXPROCS(0)
		for ; looks && looked < rounds && len(queue) == 0; looked++ {
			select {
			case t := <-offers:
				return t
			default:
				pause()
			}
		}

		if !claim() {
			return <-offers // a claimed helper is certain to be offered a team
		}

		if !looks || looked == rounds {
			select {
			case t := <-queue:
				return t
			case t := <-idle:
				return t
			}
		}

		select {
		case t := <-queue:
			return t
		default: // another helper was faster
		}
	}
}

// work runs spans, starting with part w. w may be any number, since helpers of an earlier call may
// join.
func (t *team) work(w int) {
	for i := range t.parts {
		p := &t.parts[(w+i)%len(t.parts)]
		for s := p.next.Add(1) - 1; s < p.end; s = p.next.Add(1) - 1 {
			lo := int(s) * t.grain
			t.f(lo, min(lo+t.grain, t.n))
		}
	}
}

// lead works for t and waits for its helpers, even if f panics, because they still use f's data.
func (t *team) lead() {
	done := false
	defer func() {
		if !done {
			t.stop()
		}
		t.wait()
	}()
	t.work(0)
	done = true
}

// wait returns when no helper is working for t and none can join.
func (t *team) wait() {
	t.helpers.Or(closed)
	for range rounds {
		if t.helpers.Load() == closed {
			return
		}
		pause()
	}
	if t.helpers.Or(asleep) != closed {
		<-t.wake
	}
}

// stop prevents further spans from starting.
func (t *team) stop() {
	for w := range t.parts {
		t.parts[w].next.Store(t.parts[w].end)
	}
}

// join makes the calling goroutine a helper of t, unless t is closed.
func (t *team) join() bool {
	for {
		n := t.helpers.Load()
		if n&closed != 0 {
			return false
		}
		if t.helpers.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// help works for t and then for later calls.
func help(t *team) {
	defer hired.Add(-1) // in case of runtime.Goexit
	for {
		if t.join() {
			t.help()
		}
		t = await()
	}
}

// help runs spans of t as a helper, and passes on a panic.
func (t *team) help() {
	done := false
	defer func() {
		if r := recover(); !done {
			if r == nil {
				r = "runtime.Goexit was called"
			}
			t.stop()
			t.panicked.CompareAndSwap(nil, AsPanic(r))
		}
		if t.helpers.Add(-1) == closed|asleep {
			t.wake <- struct{}{}
		}
	}()

	t.work(int(t.joined.Add(1)))
	done = true
}
