// Package scrub detects corrupt seeds during a run.
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
	Period  time.Duration // time for checking every seed once
	end     func()        // stops the scrubbing and waits for it; nil if not running

	mu    sync.Mutex
	known map[string]bool // findings since Start
	fresh []error         // findings that Fresh has not returned yet
}

// Start forgets earlier findings, checks all seeds once, and then continues in the background.
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
		// Scrub fails only for invalid arguments.
		_ = s.Network.Scrub(ctx, s.Period, s.found)
	})
	s.end = func() {
		stop()
		scrubbing.Wait()
	}
}

// Stop stops the scrubbing in the background.
func (s *Scrubber) Stop() {
	if s.end != nil {
		s.end()
		s.end = nil
	}
}

// Fresh returns the findings since its last call, each once.
func (s *Scrubber) Fresh() []error {
	s.mu.Lock()
	defer s.mu.Unlock()
	fresh := s.fresh
	s.fresh = nil
	return fresh
}

// found records a fault in a layer. It may be called from several goroutines.
func (s *Scrubber) found(layer int, err error) {
	if cause := errors.Unwrap(err); cause != nil { // strip the name of the failing method
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
