// Package scrub looks for corrupt seeds while a run goes on.
package scrub

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kasmina-go/kasmina/state"
)

// Scrubber verifies the seeds of a network.
type Scrubber struct {
	Network *state.Network
	Period  time.Duration // in which it looks at each seed once
	end     func()        // stops the scrubbing and waits for it; nil when there is none

	mu    sync.Mutex
	known map[string]bool // what has been found since Start
	fresh []error         // of it, what Fresh has not returned
}

// Start forgets what was found, looks at all seeds once, and goes on beside the caller.
func (s *Scrubber) Start() {
	s.known, s.fresh = map[string]bool{}, nil
	for i, l := range s.Network.Lattices() {
		if err := l.Verify(); err != nil {
			s.found(i, err)
		}
	}

	ctx, stop := context.WithCancel(context.Background())
	var scrubbing sync.WaitGroup
	scrubbing.Go(func() {
		// Its error would be that of the arguments.
		_ = s.Network.Scrub(ctx, s.Period, s.found)
	})
	s.end = func() {
		stop()
		scrubbing.Wait()
	}
}

// Stop ends the scrubbing.
func (s *Scrubber) Stop() {
	if s.end != nil {
		s.end()
		s.end = nil
	}
}

// Fresh returns what has been found since it was last called, each fault once.
func (s *Scrubber) Fresh() []error {
	s.mu.Lock()
	defer s.mu.Unlock()
	fresh := s.fresh
	s.fresh = nil
	return fresh
}

// found notes what is wrong with a layer. It is called from several goroutines.
func (s *Scrubber) found(layer int, err error) {
	if cause := errors.Unwrap(err); cause != nil { // without the name of the method that found it
		err = cause
	}
	err = fmt.Errorf("layer %d: %w", layer, err)
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.known[err.Error()] {
		s.known[err.Error()] = true
		s.fresh = append(s.fresh, err)
	}
}
