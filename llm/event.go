package llm

import (
	"time"

	"github.com/kasmina-go/kasmina/internal/enum"
	"github.com/kasmina-go/kasmina/internal/optime"
	"github.com/kasmina-go/kasmina/state"
)

// EventKind says what happened in a training run.
type EventKind uint8

// The events of a run. It begins with RunStart and ends with RunEnd, whether it succeeded or not.
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
	// before a StepEnd: the blocks have become others, as Text says, or could not, as Err does
	Reshaped
	Measured // what the engine's device reaches at best has been measured: Ceiling is set
	Noted    // before a StepEnd: somebody has asked for something, as Text says
)

var eventNames = [...]string{RunStart: "RunStart", "Complete", "StepEnd", "EvalEnd", "Saved", "Sampled",
	"Profiled", "Interrupted", "RunEnd", "Chosen", "Failed", "EpochEnd", "Corrupted", "Reshaped",
	"Measured", "Noted"}

// String returns the event's name.
func (k EventKind) String() string {
	return enum.Name(k, "EventKind", eventNames[:])
}

// Event is what a callback sees. Fields that an event does not set hold what the run last knew, so
// that a callback needs no memory of its own.
type Event struct {
	Kind EventKind
	Step int // optimiser steps done since the model was initialised
	// step at which the run ends at the latest; of one that a budget alone ends, 2³¹−1
	Steps        int
	Budget       Budget          // of the run
	Spent        Budget          // so far; Time of a run on a budget of time alone
	Share        float64         // of the budget, or without one of the steps, that is spent: 0 to 1
	Last         bool            // the run is at its end
	Loss         float64         // training loss of the last step, in nats per token
	LearningRate float64         // of the last step
	GradNorm     float64         // global gradient norm of the last step, before clipping
	StepTokens   int             // tokens in one step
	RunTokens    int64           // tokens trained on since this process started the run
	RunFLOPs     float64         // of those, as Config.FLOPs counts them
	Elapsed      time.Duration   // time since this process started the run
	ValLoss      float64         // held-out loss in nats per token; NaN before the first evaluation
	ValBPB       float64         // held-out bits per byte; NaN before the first evaluation
	Path         string          // Saved: the checkpoint's file
	Text         string          // Sampled: prompt and continuation
	Ops          []optime.OpTime // Profiled: what the engine's ops take
	Choices      []optime.Choice // Chosen: the ways in which they are computed

	Ceiling  optime.Ceiling // of the devices together; 0 before Measured
	Lattices []Lattice      // of the model: where its seeds are

	// Reports are those of the Kasmina layers, of an EpochEnd. There is one when an epoch of their
	// lattices has ended or somebody has steered the seeds (Trainer.Steer). There is one too before
	// the RunEnd of a run in which more has happened to seeds since.
	Reports []state.Report
	// SeedEvents are what has happened to seeds since the EpochEnd before, or since the run began.
	SeedEvents []state.Event

	// Params is the number of parameters that training changes, and AllParams that of all parameters
	// of the model. They differ if the model is frozen: only what is planted in it learns.
	Params, AllParams int

	Seeds int   // number of seeds in the model's Kasmina layers
	Err   error // Corrupted: what was found; Failed, RunEnd: why the run stopped early, or nil
}

// A Callback reacts to the events of a training run: it shows progress, writes a log, evaluates,
// saves. Callbacks run in the order in which they were added, on the training goroutine, between
// steps. They may call all methods of the trainer and its model but Run. An error ends the run.
type Callback func(Event) error
