package gpu

import (
	"slices"
	"sync"
	"unsafe"
)

// Work is a piece of work on a stream, as an [Observer] sees it.
type Work struct {
	Name  string  // of the kernel, or what is done: a product of cuBLASLt, a copy, a memset
	FLOPs float64 // of a product: multiplications and additions
}

// Observer is given each piece of work to enqueue it.
type Observer func(w Work, enqueue func() error) error

// Observers are those of a context. They watch the kernels, products, copies and memsets that its
// streams are given. Launches of graphs are not: what is in them was when it was captured.
type Observers struct{ of sync.Map } // an Observer by its Stream

// Observe sets who is given a stream's work from now on; nil for nobody.
func (c *Observers) Observe(s Stream, o Observer) {
	if o == nil {
		c.of.Delete(s)
		return
	}
	c.of.Store(s, o)
}

// Watch enqueues work before the observer's eyes.
func (c *Observers) Watch(s Stream, w Work, enqueue func() error) error {
	if o, watched := c.of.Load(s); watched {
		return o.(Observer)(w, enqueue)
	}
	return enqueue()
}

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

// Remove forgets memory given to Add, and refuses other memory.
func (p *Pinned) Remove(b []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.spans, spanOf(b))
	if i < 0 {
		return NewError("cuMemFreeHost", InvalidValue, "", "not a slice that AllocHost returned")
	}
	p.spans = slices.Delete(p.spans, i, i+1)
	return nil
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
