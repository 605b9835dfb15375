package gpu

import "sync"

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
