// Package outbox brings events to those who listen.
package outbox

import (
	"slices"
	"sync"
)

// Outbox delivers events in order, one at a time, and while nothing is locked, so that a listener
// may use what it listens to. Its zero value is ready.
type Outbox[E any] struct {
	mu      sync.Mutex
	list    []*func(E)
	waiting []E
	busy    bool // a goroutine is delivering
	held    int  // callers of Hold
	relays  []relay[E]
}

// relay is an outbox that gets the events of another one too, as mark changes them.
type relay[E any] struct {
	to   *Outbox[E]
	mark func(*E)
}

// Relay hands what is added from now on to another outbox too, changed by mark.
func (o *Outbox[E]) Relay(to *Outbox[E], mark func(*E)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.relays = append(slices.Clip(o.relays), relay[E]{to, mark})
}

// Listen makes f hear of every event that is added from now on, until stop is called.
func (o *Outbox[E]) Listen(f func(E)) (stop func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.list = append(slices.Clip(o.list), &f)
	return func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.list = slices.DeleteFunc(slices.Clone(o.list), func(g *func(E)) bool { return g == &f })
	}
}

// Add puts events in, which wait for Deliver.
func (o *Outbox[E]) Add(events ...E) {
	if len(events) == 0 {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.list) > 0 {
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

// Deliver hands over what waits. Another goroutine that is at it, or a caller of this one, sees to
// that instead.
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

// Hold adds to the number of those who keep all events back, or with −1 takes one away.
func (o *Outbox[E]) Hold(more int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.held += more
}

// take hands over what waits now, and reports whether it did.
func (o *Outbox[E]) take() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.busy || o.held > 0 || len(o.waiting) == 0 {
		return false
	}
	events, list := o.waiting, o.list
	o.waiting, o.busy = nil, true
	o.mu.Unlock()
	defer func() { // also when a listener panics
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
