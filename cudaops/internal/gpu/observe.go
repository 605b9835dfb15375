package gpu

import "sync"

// Work is a piece of work on a stream, as an [Observer] sees it.
type Work struct {
	Name  string  // of the kernel, or what is done: a product of cuBLASLt, a copy, a memset
	FLOPs float64 // of a product: multiplications and additions
}

// Observer is told of each piece of work just before and just after it is enqueued. An error fails
// the call.
type Observer interface {
	Before(w Work) error
	After(w Work) error
}

// Observers are those of a context. They watch the kernels, products, copies and memsets that its
// streams are given. Launches of graphs are not told: what is in them was when it was captured.
type Observers struct{ of sync.Map } // an Observer by its Stream

// Observe sets who is told of a stream's work from now on; nil for nobody.
func (c *Observers) Observe(s Stream, o Observer) {
	if o == nil {
		c.of.Delete(s)
		return
	}
	c.of.Store(s, o)
}

// Watch enqueues work before the observer's eyes.
func (c *Observers) Watch(s Stream, w Work, enqueue func() error) error {
	o, watched := c.of.Load(s)
	if !watched {
		return enqueue()
	}
	if err := o.(Observer).Before(w); err != nil {
		return err
	}
	if err := enqueue(); err != nil {
		return err
	}
	return o.(Observer).After(w)
}
