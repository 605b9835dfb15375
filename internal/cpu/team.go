package cpu

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// team is one call of Parallel and the goroutines at work on it. Teams and goroutines are kept for
// the next call, so that a steady state allocates nothing.
type team struct {
	f        func(lo, hi int)
	n, grain int
	parts    []part
	joined   atomic.Int32          // helpers who have begun
	helpers  atomic.Int32          // at work; closed, and asleep while the leader sleeps
	wake     chan struct{}         // from the last helper to a leader who sleeps
	panicked atomic.Pointer[Panic] // a helper's; a team that has one is not used again
}

const (
	closed = 1 << 29 // all spans have begun: who comes now comes too late, and is not waited for
	asleep = 1 << 30
)

// part is a share of the spans, one for the leader and for each helper: who is through with theirs
// goes on with the others'. The leader has the first part and, on two cores, always the same helper
// the second. So a core mostly reads in one call what it has itself written in the one before,
// where the same rows are split.
type part struct {
	next atomic.Int64 // the next span to run
	end  int64
	_    [48]byte // to the end of a cache line
}

// divide gives n indices in spans of grain out to workers parts.
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
	t.helpers.Store(0) // which opens it, also to who was recruited for an earlier call
}

// To wake a sleeping thread takes tens of microseconds, more than many a kernel. So helpers who
// have run out of work look out for more before they sleep, as many as there are cores for. Leaders
// look out for the end of their helpers' work. rounds pauses are some 50 microseconds.
const rounds = 1000

var (
	teams    = sync.Pool{New: func() any { return &team{wake: make(chan struct{}, 1)} }}
	hired    atomic.Int32                   // helpers there are
	lookouts atomic.Int32                   // helpers who look out and are nobody's yet
	offers   = make(chan *team, maxHelpers) // to them
	idle     = make(chan *team)             // to a helper who sleeps
	queue    = make(chan *team, queued)     // to the next helper who has done with another team
)

const (
	maxHelpers = 1024
	// Where other processes have the cores, calls end before helpers come to what is queued for
	// them.
	queued = 64
)

// recruit finds t a helper: one who looks out, one who sleeps, or a new one. When there are as many
// as cores and all are at work, t waits for the next who is not.
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

// hire reports whether there may be one helper more, and counts it. There are as many as cores at
// most, whatever number of goroutines call Parallel. They stay, also when GOMAXPROCS becomes less.
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
			return <-offers // as many are on their way as there are helpers here
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
		default: // another helper was there first
		}
	}
}

// work runs spans, those of part w first; w may be any number, as the helpers of an earlier call
// may join.
func (t *team) work(w int) {
	for i := range t.parts {
		p := &t.parts[(w+i)%len(t.parts)]
		for s := p.next.Add(1) - 1; s < p.end; s = p.next.Add(1) - 1 {
			lo := int(s) * t.grain
			t.f(lo, min(lo+t.grain, t.n))
		}
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
	t.work(0)
	done = true
}

// wait returns when no helper is at work, and none will be.
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

// stop lets no further span begin.
func (t *team) stop() {
	for w := range t.parts {
		t.parts[w].next.Store(t.parts[w].end)
	}
}

// join makes the calling helper one of t's, unless t is closed.
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

// help works for t and then for whoever calls next.
func help(t *team) {
	defer hired.Add(-1) // for runtime.Goexit
	for {
		if t.join() {
			t.help()
		}
		t = await()
	}
}

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
