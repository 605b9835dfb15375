package llm

import (
	"context"

	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/optime"
)

// The interfaces in this file are optional abilities of an [Engine], which a trainer and its
// callbacks use if the engine implements them. Package state defines the abilities of a controller.

// Optional abilities of the engine on the CPU.
var (
	_ Sensor          = (*cpuEngine)(nil)
	_ PreferenceMeter = (*cpuEngine)(nil)
	_ Listener        = (*cpuEngine)(nil)
	_ Profiler        = (*cpuEngine)(nil)
	_ Chooser         = (*cpuEngine)(nil)
	_ Measurer        = (*cpuEngine)(nil)
)

// A Stepper is an [Engine] that can compute the last batch of a step and perform the update without
// waiting in between.
type Stepper interface {
	Engine
	// Step combines Gradients and Update, and returns their errors. If it returns no error, the
	// update has been applied, unless the loss is not finite or a [Scaler] skipped the update.
	Step(b data.Batch) (loss, norm float64, err error)
}

// A Scaler is an [Engine] that multiplies the loss by a scale of its own choosing, so that the
// gradients fit a narrow type. The scale is saved in checkpoints.
type Scaler interface {
	Engine
	LossScale() LossScale
	// SetLossScale sets the scale. If it is not a value that LossScale could have returned,
	// SetLossScale returns an error and changes nothing.
	SetLossScale(LossScale) error
}

// A LossScale is a loss scale with its history.
type LossScale struct {
	Scale   float64 `json:"scale"`
	Good    int     `json:"good"`    // steps since the scale was last changed
	Skipped int     `json:"skipped"` // steps without an update because a gradient overflowed
}

// A Sensor is an [Engine] that measures the blueprints at weights and in the residual stream.
type Sensor interface {
	Engine
	// Figures returns the measurements of the last step.
	Figures() ([]SeedFigures, error)
}

// A Listener is an [Engine] that returns gradients.
type Listener interface {
	Engine
	// Gradient returns the gradient of a parameter, gathered since the last Drop, as a []float32 or a
	// []float64. The caller must not retain it.
	Gradient(param string) (any, error)
}

// A PreferenceMeter is an [Engine] that can train on preference pairs.
type PreferenceMeter interface {
	Engine
	// LogProbs returns the log-probabilities of the targets of a batch, and 0 for tokens without a
	// target.
	LogProbs(ctx context.Context, b data.Batch) ([]float64, error)
	// TakePreferences returns the figures of all pairs since the last call, of all ranks together.
	TakePreferences() op.PreferenceFigures
}

// A Keeper is an [Engine] that can hand its parameters over to the next engine for the same model,
// which may have grown in the meantime.
type Keeper interface {
	Engine
	// CanKeep reports whether Keep is possible.
	CanKeep() bool
	// Keep closes the engine, except for the parameters and their optimizer state.
	Keep() (Kept, error)
}

// Kept holds the parameters of a closed engine.
type Kept interface {
	// Engine creates an engine of the same kind for the model in its current form.
	//
	// The keys of from name the parameters whose values and optimizer state are taken from the kept
	// ones, and the values of from are the previous names of these parameters. Their values on the
	// host are not read; [Engine.Pull] copies them there. All other parameters are read from the
	// host. If Engine returns an error, Kept still holds the parameters.
	Engine(from map[string]string) (Engine, error)
	// Close frees everything that was not taken over by an engine.
	Close() error
}

// A Profiler is an [Engine] that times its ops while it trains.
type Profiler interface {
	Engine
	// OpTimes returns the mean times so far, longest first. It returns none before the first sample.
	OpTimes() ([]optime.OpTime, error)
}

// A Chooser is an [Engine] that reports which implementation it uses for each op. See the Choices
// methods of cudaops.Machine and cpuops.Machine.
type Chooser interface {
	Engine
	// Choices returns the choices made so far. All choices are made by the end of the first step.
	Choices() []optime.Choice
}

// MemoryPlanner is an engine that knows before the first step how much memory a run needs.
type MemoryPlanner interface {
	Engine
	MemoryPlan() MemoryPlan
}

// MemoryPlan is the memory that training needs, in bytes.
type MemoryPlan struct {
	Weights   int // parameters, in all types in which they are held
	Gradients int // sums of gradients over the batches of a step
	Moments   int // state of the optimizer
	Run       int // activations, gradients and scratch memory of a batch, which share memory
	Workspace int // of matrix products on a device
}

// Total returns the sum of all fields.
func (p MemoryPlan) Total() int { return p.Weights + p.Gradients + p.Moments + p.Run + p.Workspace }

// MemoryPlan returns the memory that the run needs. ok is false if the engine is not a [MemoryPlanner].
func (t *Trainer) MemoryPlan() (p MemoryPlan, ok bool) {
	err := t.inTurn(func() error {
		if e, is := t.driver.engine.(MemoryPlanner); is {
			p, ok = e.MemoryPlan(), true
		}
		return nil
	})
	return p, ok && err == nil
}

// A Measurer is an [Engine] that can measure the peak performance of its device.
type Measurer interface {
	Engine
	// Ceiling performs the measurement, between two steps and in a fraction of a second. On a GPU it
	// temporarily uses up to 1 GiB of free memory.
	Ceiling() (optime.Ceiling, error)
}

// A Tracer is an [Engine] that can profile a step of training. Profiling does not change the results.
type Tracer interface {
	Engine
	// StartProfile starts profiling with the next step. At least one step must have been completed.
	StartProfile() error
	// Profile returns the profile once enough steps have been profiled, and nil before that.
	Profile() (*optime.Profile, error)
}

// Parallel is an [Engine] that trains a model together with the engines of other processes, its
// ranks. All ranks share the same model, data, settings and callbacks, and the batches of a step are
// divided among them. Package llm/parallel provides such an engine.
//
// All ranks call Batches, Update, Exchange and Gather in the same order. The trainer makes sure that
// they make the same decisions: commands submitted at one rank take effect at all ranks between the
// same two steps, rank 0's controller and clock apply to all, and when one rank fails or is asked to
// stop, all stop after the same step. Only rank 0 writes checkpoints.
type Parallel interface {
	Engine
	// Rank returns the rank, from 0 to Ranks−1.
	Rank() int
	Ranks() int
	// Batches replaces Gradients. It accumulates the gradients of n batches and returns their losses.
	// Each call of next returns another batch in the same memory.
	Batches(n int, next func() (data.Batch, error)) (losses []float64, err error)
	// Exchange sends a value to all ranks and returns the values of all ranks, by rank.
	Exchange(value []byte) ([][]byte, error)
	// Gather completes the optimizer state on this host, so that it covers the whole model.
	Gather() error
	// Own brings the optimizer state on this host up to date for the parts this rank updates, and
	// returns those parts, in the same order as the parts of all ranks. It does not wait for other
	// ranks. The optimizer is an [optim.Partial].
	Own() ([]optim.Part, error)
}

// Busier is a [Parallel] engine that fails the run if its ranks make no progress for a certain time.
type Busier interface {
	Parallel
	// Busy declares long work outside a step, such as "writing a checkpoint", until done is called.
	Busy(what string) (done func())
}

// ParallelStepper is a [Parallel] engine that updates without waiting on the host for the losses of a
// step. The ranks exchange the losses during the update.
type ParallelStepper interface {
	Parallel
	// StepBatches combines Batches and Update, and returns their errors. If it returns no error, the
	// update has been applied, unless a loss is not finite.
	//
	// word is a message to the other ranks. No rank applies the update before it has received the
	// words of all ranks.
	StepBatches(n int, next func() (data.Batch, error), word []byte) (StepResult, error)
}

// StepResult is the result of a step of several ranks.
type StepResult struct {
	Losses []float64 // of the step's batches
	Norm   float64   // of the gradient
	Made   bool      // the update was applied, or may have been
	Words  [][]byte  // messages by rank; nil if the ranks have not agreed on an update
}
