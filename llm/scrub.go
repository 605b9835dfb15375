package llm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

// Scrub verifies the checksums of all seeds when a run begins, and then once every period while it
// goes on. What it finds it writes to w, a line for each layer or part of a large one, and tells
// the callbacks of (Corrupted), both behind the next step and once. It changes nothing: a corrupt
// seed ends the run with state.ErrCorrupt when the epoch does, unless the lattices are made with
// [state.WithQuarantine].
func Scrub(t *Trainer, w io.Writer, period time.Duration) Callback {
	switch {
	case t.made() != nil:
		return refuse("Scrub: %w", errZeroTrainer)
	case w == nil:
		return refuse("Scrub: the writer is nil, want one such as os.Stderr")
	case period <= 0:
		return refuse("Scrub: the period is %v, want one above 0", period)
	}
	return (&scrubber{t: t, w: w, period: period}).event
}

type scrubber struct {
	t      *Trainer
	w      io.Writer
	period time.Duration
	end    func() // stops the scrubbing and waits for it; nil when there is none

	mu    sync.Mutex
	known map[string]bool // what has been found in this run
	fresh []error         // of it, what is not told
}

func (s *scrubber) event(e Event) error {
	switch e.Kind {
	case RunStart:
		s.known, s.fresh = map[string]bool{}, nil
		s.verify()
		s.begin()
	case StepEnd, Interrupted, Failed:
		return s.tell(func(err error) error {
			return s.t.emit(Corrupted, func(e *Event) { e.Err = err })
		})
	case RunEnd:
		if s.end != nil {
			s.end()
			s.end = nil
		}
		return s.tell(func(error) error { return nil }) // a log is closed by now
	}
	return nil
}

// verify looks at all seeds once.
func (s *scrubber) verify() {
	for i, l := range s.t.Model.Kasmina.Lattices() {
		if err := l.Verify(); err != nil {
			s.found(i, err)
		}
	}
}

func (s *scrubber) begin() {
	ctx, stop := context.WithCancel(context.Background())
	var scrubbing sync.WaitGroup
	scrubbing.Go(func() {
		// Its error would be that of the arguments.
		_ = s.t.Model.Kasmina.Scrub(ctx, s.period, s.found)
	})
	s.end = func() {
		stop()
		scrubbing.Wait()
	}
}

// found notes what is wrong with a layer. It is called from several goroutines.
func (s *scrubber) found(layer int, err error) {
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

// tell writes what has been found since, and calls to with it.
func (s *scrubber) tell(to func(error) error) error {
	s.mu.Lock()
	fresh := s.fresh
	s.fresh = nil
	s.mu.Unlock()
	var errs error
	for _, found := range fresh {
		_, err := fmt.Fprintf(s.w, "corrupt   %v\n", found)
		errs = errors.Join(errs, err, to(found))
	}
	return errs
}
