package serve

import (
	"context"
	"errors"
	"slices"
	"sync"
)

// errBusy reports that too many requests wait for slots.
var errBusy = errors.New("too many requests wait")

// slots limits the number of requests whose answers are generated at the same time. Requests get slots in
// the order of their arrival.
type slots struct {
	mu      sync.Mutex
	free    int
	running int // requests that have slots
	queue   int // largest number of requests that wait
	waiting []*ticket
}

// A ticket is a request that waits for n slots.
type ticket struct {
	n     int
	ready chan struct{}
}

func newSlots(n, queue int) *slots { return &slots{free: n, queue: queue} }

// acquire takes n slots. It returns errBusy if too many requests wait already.
func (s *slots) acquire(ctx context.Context, n int) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}

	s.mu.Lock()
	if len(s.waiting) == 0 && s.free >= n {
		s.free, s.running = s.free-n, s.running+1
		s.mu.Unlock()
		return nil
	}
	if len(s.waiting) >= s.queue {
		s.mu.Unlock()
		return errBusy
	}
	t := &ticket{n, make(chan struct{})}
	s.waiting = append(s.waiting, t)
	s.mu.Unlock()

	select {
	case <-t.ready:
		return nil
	case <-ctx.Done():
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(s.waiting, t); i >= 0 {
		s.waiting = slices.Delete(s.waiting, i, i+1)
	} else { // it got its slots at the same time
		s.free, s.running = s.free+n, s.running-1
	}
	s.admit() // the next request may need fewer slots
	return context.Cause(ctx)
}

// release returns n slots.
func (s *slots) release(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free, s.running = s.free+n, s.running-1
	s.admit()
}

// admit gives slots to the requests that have waited longest.
func (s *slots) admit() {
	for len(s.waiting) > 0 && s.waiting[0].n <= s.free {
		t := s.waiting[0]
		s.waiting = slices.Delete(s.waiting, 0, 1)
		s.free, s.running = s.free-t.n, s.running+1
		close(t.ready)
	}
}

// counts returns the number of requests with slots and the number of waiting requests.
func (s *slots) counts() (running, waiting int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.running, len(s.waiting)
}
