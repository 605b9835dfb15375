package llm

import (
	"sync"

	"github.com/kasmina-go/kasmina/state"
)

// seedEvents gathers what happens to seeds during a run. Whoever makes it happen adds to it, on
// whatever goroutine.
type seedEvents struct {
	mu   sync.Mutex
	list []state.Event
}

func (s *seedEvents) add(e state.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, e)
}

// take returns what has been gathered, and begins anew.
func (s *seedEvents) take() []state.Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.list
	s.list = nil
	return list
}

// tellEpoch tells the callbacks of the seeds if the last step has ended an epoch of the lattices.
func (t *Trainer) tellEpoch() error {
	if t.Step()%t.Config.Epoch != 0 {
		return nil
	}
	return t.tellSeeds(t.happened.take())
}

// tellRest tells the callbacks what has happened to seeds since the last epoch, if anything has.
func (t *Trainer) tellRest() error {
	happened := t.happened.take()
	if len(happened) == 0 {
		return nil
	}
	return t.tellSeeds(happened)
}

func (t *Trainer) tellSeeds(happened []state.Event) error {
	if t.Model.Kasmina.Layers() == 0 {
		return nil
	}
	reports := t.Model.Kasmina.Report()
	return t.emit(EpochEnd, func(e *Event) { e.Reports, e.SeedEvents = reports, happened })
}
