// Package outbox delivers events to listeners.
package outbox

import (
	"slices"
	"sync"
)

// Outbox delivers events in order, one at a time and without holding a lock, so that listeners may
// use the source of the events. The zero value is ready to use.
type Outbox[E any] struct {
	mu        sync.Mutex
	listeners []*func(E)
	waiting   []E
	busy      bool // a goroutine is delivering
	held      int  // number of callers that hold events back
	relays    []relay[E]
}

// relay is another outbox that receives the same events after mark has modified them.
type relay[E any] struct {
	to   *Outbox[E]
	mark func(*E)
}

// Relay also adds all later events, modified by mark, to another outbox.
func (o *Outbox[E]) Relay(to *Outbox[E], mark func(*E)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.relays = append(slices.Clip(o.relays), relay[E]{to, mark})
}

// Listen registers f to be called with every event added from now on, until stop is called.
func (o *Outbox[E]) Listen(f func(E)) (stop func()) {
	o.mu.Lock()
	defer o.mu.Unlock()

	o.listeners = append(slices.Clip(o.listeners), &f)
	return func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.listeners = slices.DeleteFunc(slices.Clone(o.listeners), func(g *func(E)) bool { return g == &f })
	}
}

// Add queues events until Deliver is called.
func (o *Outbox[E]) Add(events ...E) {
	if len(events) == 0 {
		return
	}

	o.mu.Lock()
	defer o.mu.Unlock()

	if len(o.listeners) > 0 {
		o.waiting = append(o.waiting, events...)
	}

	for _, r := range o.relays {
		events = slices.Clone(events)
		for i := range events {
			r.mark(&events[i])
		}
		r.to.Add(events...)
	}
}

// Deliver calls the listeners with the queued events. If another goroutine, or a caller further up
// the stack, is already delivering, that one delivers them too.
func (o *Outbox[E]) Deliver() {
	for o.take() {
	}
	o.mu.Lock()
	relays := o.relays
	o.mu.Unlock()
	for _, r := range relays {
		r.to.Deliver()
	}
}

// Hold adds to the number of callers that hold all events back; −1 ends one hold.
func (o *Outbox[E]) Hold(more int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.held += more
}

// take delivers the currently queued events, and reports whether there were any.
func (o *Outbox[E]) take() bool {
	o.mu.Lock()
	defer o.mu.Unlock()

	if o.busy || o.held > 0 || len(o.waiting) == 0 {
		return false
	}

	events, list := o.waiting, o.listeners
	o.waiting, o.busy = nil, true
	o.mu.Unlock()
	defer func() { // even if a listener panics
		o.mu.Lock()
		o.busy = false
	}()
	for _, e := range events {
		for _, f := range list {
			(*f)(e)
		}
	}

	return true
}
