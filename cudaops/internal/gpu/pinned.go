package gpu

import (
	"slices"
	"sync"
	"unsafe"
)

// Pinned is the host memory that a context has pinned. A zero one is ready. It is safe for
// concurrent use.
type Pinned struct {
	mu    sync.Mutex
	spans []span
}

type span struct{ start, end uintptr }

func spanOf(b []byte) span {
	start := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	return span{start, start + uintptr(len(b))}
}

// Add remembers pinned memory.
func (p *Pinned) Add(b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.spans = append(p.spans, spanOf(b))
}

// Remove forgets memory given to Add, and reports whether it was there.
func (p *Pinned) Remove(b []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.spans, spanOf(b))
	if i >= 0 {
		p.spans = slices.Delete(p.spans, i, i+1)
	}
	return i >= 0
}

// Has reports whether all of b is pinned.
func (p *Pinned) Has(b []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := spanOf(b)
	return slices.ContainsFunc(p.spans, func(o span) bool {
		return o.start <= s.start && s.end <= o.end
	})
}
