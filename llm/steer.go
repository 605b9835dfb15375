package llm

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/state"
)

// steering holds the requests made to a run. The trainer's mu guards it, except for told.
type steering struct {
	t        *Trainer
	requests []pendingRequest
	open     bool // whether the run accepts requests
	granted  int  // granted requests to save
	savers   int  // callbacks that save
	halt     error
	notes    []string
	shared   bool // whether several ranks train
	told     bool // seeds were steered since the last step's events; guarded by the model's lock
}

// pendingRequest is a request that waits for the end of a step.
type pendingRequest struct {
	Request
	done chan<- error // has room for the answer
}

var (
	errNoRun    = fmt.Errorf("llm: no run is in progress: %w", state.ErrClosed)
	errLastStep = fmt.Errorf("llm: %w: the run has made its last step, after which nothing changes",
		state.ErrClosed)
	errRunEnded = fmt.Errorf("llm: %w: the run has ended before the request could be granted",
		state.ErrClosed)
	errReplay = errors.New("llm: the run follows a record (Growth.Replay), and takes no other " +
		"commands")
	errNoSaver = errors.New("llm: the run has no Checkpoint callback to save it")
)

// Ask sends the run a request from a person or another program. It may be called from any goroutine.
//
// The request is granted after the current step and before the step's events, or after the next step.
// If several ranks train, every rank grants the requests of all ranks between the same two steps and
// in the same order. The channel, which need not be read, then receives nil or the reason why the
// request was rejected. If the run ends first, the request is rejected.
//
// Growth.Record contains every request, with the Why of each command, so that a run following the
// record receives the same commands at the same steps.
func (t *Trainer) Ask(r Request) <-chan error {
	done := make(chan error, 1)
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case !t.steering.open:
		done <- errNoRun
	case t.last.Last:
		done <- errLastStep
	case r.Save && t.steering.savers == 0:
		done <- errNoSaver
	default:
		r.Commands = slices.Clone(r.Commands)
		t.steering.requests = append(t.steering.requests, pendingRequest{r, done})
	}

	return done
}

// Steer is Ask with a request that contains only commands. Callbacks receive an EpochEnd when the
// commands have taken effect.
//
// Commands submitted to Model.Kasmina directly are not recorded in Growth.Record.
func (t *Trainer) Steer(commands ...state.Command) <-chan error {
	return t.Ask(Request{Commands: commands})
}

// SaveSoon is Ask with a request for a checkpoint. It does not wait, and returns an error if the
// request is rejected at once, for example because no run is in progress or the run has no Checkpoint
// callback.
func (t *Trainer) SaveSoon() error {
	select {
	case err := <-t.Ask(Request{Save: true}):
		return err
	default:
		return nil
	}
}

// Stop stops the run, usually after the current step. Callbacks receive Interrupted, so that a
// Checkpoint saves, and Run returns an error that wraps [ErrStopped] and contains the reason. If
// there are several ranks, all of them stop after the same step. If Stop is called again, the first
// reason counts. It has no effect once the run has made its last step (Event.Last).
//
// Stop returns an error if no run is in progress, or if the run is already ending.
func (t *Trainer) Stop(why string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.steering.open {
		return errNoRun
	}
	if t.steering.halt == nil && !t.last.Last {
		t.steering.halt = halted(why)
	}
	return nil
}

// Note sends a text to the callbacks after the current step, as a [Noted] event. It does nothing if no
// run is in progress.
func (t *Trainer) Note(text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.steering.open {
		t.steering.notes = append(t.steering.notes, text)
	}
}

// emitNotes emits the notes. After an error the rest waits for the next step.
func (s *steering) emitNotes() error {
	for {
		s.t.mu.Lock()
		if len(s.notes) == 0 {
			s.t.mu.Unlock()
			return nil
		}
		text := s.notes[0]
		s.notes = s.notes[1:]
		s.t.mu.Unlock()

		if err := s.t.emit(Noted, func(e *Event) { e.Text = text }); err != nil {
			return err
		}
	}
}

// ErrStopped is wrapped by the error from Run if [Trainer.Stop] stopped the run.
var ErrStopped = errors.New("the run has been stopped")

// halted is the reason for stopping a run.
type halted string

func (why halted) Error() string { return "llm: " + ErrStopped.Error() + ": " + string(why) }
func (halted) Unwrap() error     { return ErrStopped }

// saves returns the number of granted requests to save.
func (s *steering) saves() int {
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	return s.granted
}

// requested reports whether requests are waiting.
func (s *steering) requested() bool {
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	return len(s.requests) > 0
}

// takeRequests returns the waiting requests and empties the queue.
func (s *steering) takeRequests() []pendingRequest {
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	taken := s.requests
	s.requests = nil
	return taken
}

// closeRequests rejects the waiting requests and all later ones.
func (s *steering) closeRequests() {
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	s.dismiss()
}

// dismiss is closeRequests for callers that hold t.mu.
func (s *steering) dismiss() {
	refuse(s.requests, errRunEnded)
	s.open, s.requests = false, nil
}

// refuse answers requests with an error.
func refuse(requests []pendingRequest, err error) {
	for _, r := range requests {
		r.done <- err
	}
}

// plain returns the requests without the channels for their answers.
func plain(requests []pendingRequest) []Request {
	all := make([]Request, len(requests))
	for i, r := range requests {
		all[i] = r.Request
	}
	return all
}

// grantAll grants requests in order and records them. own holds this process's requests, which start at
// index at.
//
// A request is answered after it has been recorded. If recording fails, the run ends, and no request is
// reported as granted.
func (s *steering) grantAll(requests []Request, own []pendingRequest, at int) error {
	defer func() { refuse(own, errRunEnded) }() // after an error, or a panic in a listener

	for i, r := range requests {
		err := s.grant(r)
		failed := s.recordRequest(r, err)
		if i >= at && len(own) > 0 {
			own[0].done <- cmp.Or(failed, err)
			own = own[1:]
		}
		if failed != nil {
			return failed
		}
	}

	return nil
}

// grant carries out a request, or returns the reason for rejecting it.
func (s *steering) grant(r Request) error {
	if len(r.Commands) > 0 && s.t.growth.replay() != nil {
		return errReplay
	}

	if len(r.Commands) > 0 {
		if err := s.obey(r.Commands); err != nil {
			return err
		}
	}

	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	if r.Save {
		s.granted++
	}

	if r.Note != "" {
		s.notes = append(s.notes, r.Note)
	}

	return nil
}

// recordRequest records a request. err is the reason if it was rejected.
func (s *steering) recordRequest(r Request, err error) error {
	refused := ""
	if err != nil {
		refused = err.Error()
	}

	for _, c := range r.Commands {
		if err := s.t.growth.record(Decision{Command: &c, Refused: refused}); err != nil {
			return err
		}
	}

	if r.Save {
		return s.t.growth.record(Decision{Asked: AskedToSave, Why: r.Note, Refused: refused})
	}

	return nil
}

// recordStop records why the run was stopped, if this was requested.
func (s *steering) recordStop() error {
	var why halted
	if !errors.As(s.t.stopped(), &why) {
		return nil
	}
	defer take(s.t.Model)()
	return s.t.growth.record(Decision{Asked: AskedToStop, Why: string(why)})
}

// obey carries out commands immediately. The model must be locked.
func (s *steering) obey(commands []state.Command) error {
	err := s.t.Model.Kasmina.Obey(commands...)
	s.told = s.told || err == nil
	return err
}
