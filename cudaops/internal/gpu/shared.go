package gpu

import (
	"slices"
	"sync"
	"unsafe"
)

// Work describes a unit of work on a stream for an [Observer].
type Work struct {
	Name  string  // name of the kernel, or the kind of work: a cuBLASLt product, a copy, or a memset
	FLOPs float64 // multiplications and additions of a product
}

// Observer receives each unit of work and must enqueue it.
type Observer func(w Work, enqueue func() error) error

// Observers holds the observers of a context's streams. They see kernels, products, copies and
// memsets, but no launches of graphs: the work in a graph was observed during its capture.
type Observers struct{ of sync.Map } // an Observer by its Stream

// Observe sets the observer of a stream's work; nil removes it.
func (c *Observers) Observe(s Stream, o Observer) {
	if o == nil {
		c.of.Delete(s)
		return
	}
	c.of.Store(s, o)
}

// Watch enqueues work, through the stream's observer if it has one.
func (c *Observers) Watch(s Stream, w Work, enqueue func() error) error {
	if o, watched := c.of.Load(s); watched {
		return o.(Observer)(w, enqueue)
	}
	return enqueue()
}

// Pinned records the host memory that a context has pinned. The zero value is ready for use. It is safe
// for concurrent use.
type Pinned struct {
	mu    sync.Mutex
	spans []span
}

type span struct{ start, end uintptr }

func spanOf(b []byte) span {
	start := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	return span{start, start + uintptr(len(b))}
}

// Add records pinned memory.
func (p *Pinned) Add(b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.spans = append(p.spans, spanOf(b))
}

// Remove removes memory recorded by Add. It returns an error for other memory.
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
