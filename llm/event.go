package llm

import (
	"sync"
	"time"

	"github.com/kasmina-go/kasmina/state"
)

// EventKind says what happened in a training run.
type EventKind uint8

// The events of a run, in the order in which they can first occur. Every run begins with RunStart
// and ends with RunEnd, whether it succeeded or not.
const (
	RunStart    EventKind = iota + 1 // before the first step
	Complete                         // after RunStart, when all steps were done before
	StepEnd                          // the optimiser has updated the parameters
	EvalEnd                          // held-out text has been scored: ValLoss and ValBPB are set
	Saved                            // a checkpoint has been written: Path is set
	Sampled                          // text has been drawn from the model: Text is set
	Profiled                         // the engine has timed its ops: Ops is set
	Interrupted                      // between steps, as asked to: a last chance to save
	RunEnd                           // after the last step, or after the failure in Err
	Chosen                           // before the first StepEnd of a run: Choices is set
	Failed                           // before RunEnd, a step or callback has: a last chance to save
	EpochEnd                         // before a StepEnd: Reports and SeedEvents are set
	Corrupted                        // Scrub has found corrupt seeds: Err is set
)

// Event is what a callback sees. Fields that an event does not set hold what the run last knew, so
// that a callback needs no memory of its own.
type Event struct {
	Kind         EventKind
	Step         int           // optimiser steps done since the model was initialised
	Steps        int           // step at which the run ends
	Loss         float64       // training loss of the last step, in nats per token
	LearningRate float64       // of the last step
	GradNorm     float64       // global gradient norm of the last step, before clipping
	StepTokens   int           // tokens in one step
	RunTokens    int64         // tokens trained on since this process started the run
	Elapsed      time.Duration // time since this process started the run
	ValLoss      float64       // held-out loss in nats per token; NaN before the first evaluation
	ValBPB       float64       // held-out bits per byte; NaN before the first evaluation
	Path         string        // Saved: the checkpoint's file
	Text         string        // Sampled: prompt and continuation
	Ops          []OpTime      // Profiled: what the engine's ops take
	Choices      []Choice      // Chosen: the ways in which they are computed

	// Reports are those of the Kasmina layers, of an EpochEnd: an epoch of their lattices has ended,
	// or a run has (before its RunEnd) in which more has happened to seeds since.
	Reports []state.Report
	// SeedEvents are what has happened to seeds since the EpochEnd before, or since the run began.
	SeedEvents []state.Event

	Params int   // trainable parameters of the model
	Seeds  int   // seeds of its Kasmina layers
	Err    error // Corrupted: what was found; Failed, RunEnd: why the run stopped early, or nil
}

// A Callback reacts to the events of a training run: it shows progress, writes a log, evaluates,
// saves. Callbacks run in the order in which they were added, on the training goroutine, between
// steps, and may call all methods of the trainer and its model but Run. An error ends the run.
type Callback func(Event) error

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
