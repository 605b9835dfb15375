package llm

import (
	"time"

	"github.com/kasmina-go/kasmina/internal/enum"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optime"
	"github.com/kasmina-go/kasmina/state"
)

// EventKind identifies what happened in a training run.
type EventKind uint8

// The events of a run. The first is always RunStart and the last RunEnd, whether or not the run succeeds.
const (
	RunStart    EventKind = iota + 1 // before the first step
	Complete                         // after RunStart, if no steps are left
	StepEnd                          // the optimizer has updated the parameters
	EvalEnd                          // held-out text has been scored: ValLoss and ValBPB are set
	Saved                            // a checkpoint has been written: Path is set
	Sampled                          // text has been drawn from the model: Text is set
	Profiled                         // the engine has timed its ops: Ops is set
	Interrupted                      // between steps, after a request to stop: the last chance to save
	RunEnd                           // after the last step, or after the failure in Err
	Chosen                           // before the first StepEnd of a run: Choices is set
	Failed                           // before RunEnd, after a step or callback failed: the last chance to save
	EpochEnd                         // before a StepEnd: Reports and SeedEvents are set
	Corrupted                        // Scrub has found corrupt seeds: Err is set
	// before a StepEnd: the blocks have changed, as described by Text, or could not be changed, as
	// explained by Err
	Reshaped
	Measured // the peak performance of the engine's device has been measured: Ceiling is set
	Noted    // before a StepEnd: a request has been granted, as described by Text
)

var eventNames = [...]string{RunStart: "RunStart", "Complete", "StepEnd", "EvalEnd", "Saved", "Sampled",
	"Profiled", "Interrupted", "RunEnd", "Chosen", "Failed", "EpochEnd", "Corrupted", "Reshaped",
	"Measured", "Noted"}

// String returns the event's name.
func (k EventKind) String() string {
	return enum.Name(k, "EventKind", eventNames[:])
}

// Event is passed to callbacks. Fields that do not belong to the event hold the run's latest values, so
// callbacks need not remember them.
type Event struct {
	Kind EventKind
	Step int // optimizer steps since the model was initialized
	// maximum number of steps; 2³¹−1 if only a budget ends the run
	Steps        int
	Budget       Budget        // of the run
	Spent        Budget        // so far; Time only for a run on a time budget
	Share        float64       // fraction of the budget spent, or of the steps without a budget: 0 to 1
	Last         bool          // whether the run has completed its last step
	Loss         float64       // training loss of the last step, in nats per token
	LearningRate float64       // of the last step
	GradNorm     float64       // global gradient norm of the last step, before clipping
	StepTokens   int           // tokens in one step
	RunTokens    int64         // tokens trained on since this process started the run
	RunFLOPs     float64       // operations for those tokens, as counted by Config.FLOPs
	Elapsed      time.Duration // time since this process started the run
	ValLoss      float64       // held-out loss in nats per token; NaN before the first evaluation
	ValBPB       float64       // held-out bits per byte; NaN before the first evaluation
	// Preferences are the figures of the preference pairs of the last step, and ValPreferences those of
	// the last evaluation, if the run trains on pairs.
	Preferences, ValPreferences op.PreferenceFigures

	// Retention has the latest figures of the run's [Retention], if it has one.
	Retention RetentionFigures

	Path    string          // Saved: the checkpoint's file
	Text    string          // Sampled: prompt and continuation
	Ops     []optime.OpTime // Profiled: times of the engine's ops
	Choices []optime.Choice // Chosen: how the engine computes its ops

	Ceiling  optime.Ceiling // of all devices together; 0 before Measured
	Lattices []Lattice      // locations of the model's seeds

	// Reports holds, for an EpochEnd, a report on each lattice. EpochEnd is emitted when an epoch of
	// the lattices ends, after the seeds are steered (Trainer.Steer), and before RunEnd if there are
	// further seed events.
	Reports []state.Report
	// SeedEvents lists the seed events since the previous EpochEnd, or since the start of the run.
	SeedEvents []state.Event

	// Params is the number of parameters that training changes, and AllParams the number of all
	// parameters of the model. They differ if the model is frozen, because then only planted
	// blueprints learn.
	Params, AllParams int

	Seeds int   // number of seeds in the model's Kasmina layers
	Err   error // Corrupted: the finding; Failed, RunEnd: why the run stopped early, or nil
}

// A Callback reacts to the events of a training run, for example by showing progress, writing a log,
// evaluating, or saving. Callbacks run in the order of their registration, on the training goroutine,
// between steps. They may call every method of the trainer and its model except Run. If a callback
// returns an error, the run stops.
type Callback func(Event) error
