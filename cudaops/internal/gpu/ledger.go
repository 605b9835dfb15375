package gpu

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"unsafe"
)

// Ledger is what every implementation of Context keeps beside the calls themselves: statistics,
// which host memory is pinned, and which streams are being captured. A zero Ledger is ready. It is
// safe for concurrent use.
type Ledger struct {
	mu       sync.Mutex
	stats    Stats
	pinned   []span // sorted by start
	captures map[Stream]*tally
	events   map[Event]*tally // that were recorded in captures
	device   map[Ptr]int      // sizes of live allocations
}

type span struct{ start, end uintptr }

// tally is what one capture has recorded so far.
type tally struct {
	work    Stats
	surplus []uintptr
}

func spanOf(b []byte) span {
	start := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	return span{start, start + uintptr(len(b))}
}

// Stats is a copy of the statistics.
func (l *Ledger) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stats
}

// Add counts work that was enqueued on a stream: at once, or at every launch of the graph if the
// stream is captured.
func (l *Ledger) Add(s Stream, work Stats) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if t := l.captures[s]; t != nil {
		t.work = t.work.plus(work, 1)
		return
	}
	l.stats = l.stats.plus(work, 1)
}

// Allocated and Freed keep the sum of device memory.
func (l *Ledger) Allocated(p Ptr, bytes int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.device == nil {
		l.device = map[Ptr]int{}
	}
	l.device[p] = bytes
	l.stats.DeviceBytes += int64(bytes)
}

// Freed takes an allocation out again.
func (l *Ledger) Freed(p Ptr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stats.DeviceBytes -= int64(l.device[p])
	delete(l.device, p)
}

// Pin remembers pinned host memory.
func (l *Ledger) Pin(b []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := spanOf(b)
	i, _ := l.find(s.start)
	l.pinned = slices.Insert(l.pinned, i, s)
	l.stats.HostBytes += int64(len(b))
}

// Unpin forgets memory given to Pin, and reports whether it was there.
func (l *Ledger) Unpin(b []byte) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.Index(l.pinned, spanOf(b))
	if i < 0 || len(b) == 0 {
		return false
	}
	l.pinned = slices.Delete(l.pinned, i, i+1)
	l.stats.HostBytes -= int64(len(b))
	return true
}

// Pinned reports whether all of b is pinned.
func (l *Ledger) Pinned(b []byte) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := spanOf(b)
	i, found := l.find(s.start)
	if !found {
		i--
	}
	return i >= 0 && s.end <= l.pinned[i].end
}

// find is the position of the first pinned span that starts at or after an address.
func (l *Ledger) find(start uintptr) (int, bool) {
	return slices.BinarySearchFunc(l.pinned, start, func(p span, at uintptr) int {
		return cmp.Compare(p.start, at)
	})
}

// BeginCapture notes that a stream is being captured.
func (l *Ledger) BeginCapture(s Stream) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.captures == nil {
		l.captures = map[Stream]*tally{}
	}
	l.captures[s] = &tally{}
}

// Record notes that an event was recorded on a stream.
func (l *Ledger) Record(e Event, s Stream) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if t := l.captures[s]; t == nil {
		delete(l.events, e)
	} else if l.events == nil {
		l.events = map[Event]*tally{e: t}
	} else {
		l.events[e] = t
	}
}

// Wait notes that a stream waits for an event: it joins the capture in which that was recorded.
func (l *Ledger) Wait(s Stream, e Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if t := l.events[e]; t != nil {
		l.captures[s] = t
	}
}

// Surplus notes a node of the graph that is being captured, which it can do without.
func (l *Ledger) Surplus(s Stream, node uintptr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if t := l.captures[s]; t != nil {
		t.surplus = append(t.surplus, node)
	}
}

// EndCapture forgets the capture and returns the work in it, and the nodes that it can do without.
func (l *Ledger) EndCapture(s Stream) (work Stats, surplus []uintptr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.captures[s]
	if t == nil {
		return Stats{}, nil
	}
	maps.DeleteFunc(l.captures, func(_ Stream, other *tally) bool { return other == t })
	maps.DeleteFunc(l.events, func(_ Event, other *tally) bool { return other == t })
	return t.work, t.surplus
}

// Capturing reports whether the stream is being captured.
func (l *Ledger) Capturing(s Stream) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.captures[s] != nil
}

// CheckHost refuses a captured copy with memory that is not pinned, and reports whether a copy is
// asynchronous.
func (l *Ledger) CheckHost(call string, b []byte, s Stream) (async bool, err error) {
	if l.Pinned(b) {
		return true, nil
	}
	if l.Capturing(s) {
		return false, NewError(call, CaptureUnsupported, "",
			"a captured copy needs pinned host memory, from AllocHost")
	}
	return false, nil
}
