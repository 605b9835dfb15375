package llm

import (
	"github.com/kasmina-go/kasmina/internal/optime"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/optim"
)

// The interfaces in this file are optional abilities of an [Engine], which a trainer and its callbacks
// use if the engine has them. Package state defines the abilities of a controller.

// Optional abilities of the engine on the CPU.
var (
	_ Sensor   = (*cpuEngine)(nil)
	_ Listener = (*cpuEngine)(nil)
	_ Profiler = (*cpuEngine)(nil)
	_ Chooser  = (*cpuEngine)(nil)
	_ Measurer = (*cpuEngine)(nil)
)

// A Stepper is an [Engine] that can compute the last batch of a step and make the update without
// waiting in between.
type Stepper interface {
	Engine
	// Step does the work of Gradients and Update, and returns their errors. Without an error it has
	// made the update, unless the loss is not finite or a [Scaler] has skipped the update.
	Step(b data.Batch) (loss, norm float64, err error)
}

// A Scaler is an [Engine] that multiplies the loss by a scale that it chooses itself, so that the
// gradients fit a narrow type. A checkpoint contains the scale.
type Scaler interface {
	Engine
	LossScale() LossScale
	// SetLossScale sets the scale. If LossScale cannot have returned it, SetLossScale returns an error
	// and changes nothing.
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
	// []float64. The caller must not keep it.
	Gradient(param string) (any, error)
}

// A Keeper is an [Engine] that can hand its parameters over to the next engine for the same model,
// which may have grown in the meantime.
type Keeper interface {
	Engine
	// CanKeep reports whether Keep is possible.
	CanKeep() bool
	// Keep closes the engine except for the parameters and their optimizer state.
	Keep() (Kept, error)
}

// Kept holds the parameters of a closed engine.
type Kept interface {
	// Engine makes an engine of the same kind for the model as it is now.
	//
	// The keys of from name the parameters that take their values and optimizer state from the kept ones;
	// the values of from are the names that these parameters had before. Their values on the host are not
	// read; [Engine.Pull] copies them there. All other parameters are read from the host. After an error
	// the parameters are still kept.
	Engine(from map[string]string) (Engine, error)
	// Close frees everything that no engine has taken over.
	Close() error
}

// A Profiler is an [Engine] that times its ops while it trains.
type Profiler interface {
	Engine
	// OpTimes returns the mean times so far, the longest first. Before the first sample there are none.
	OpTimes() ([]OpTime, error)
}

// OpTime is the mean time that the nodes of one op took in a step.
type OpTime = optime.OpTime

// A Chooser is an [Engine] that reports the implementation that it uses for each op. See the Choices of
// cudaops.Machine and cpuops.Machine.
type Chooser interface {
	Engine
	// Choices returns the choices made so far. The last ones are made in the first step.
	Choices() []Choice
}

// Choice is the chosen implementation of an op of some shape.
type Choice = optime.Choice

// A Measurer is an [Engine] that can measure the peak performance of its device.
type Measurer interface {
	Engine
	// Ceiling measures between two steps, in a fraction of a second. On a GPU it takes up to 1 GiB of
	// free memory.
	Ceiling() (Ceiling, error)
}

// Ceiling is the measured peak performance of a device.
type Ceiling = optime.Ceiling

// A Tracer is an [Engine] that can profile a step of training. Profiling does not change the results.
type Tracer interface {
	Engine
	// StartProfile starts profiling with the next step. At least one step must have been made.
	StartProfile() error
	// Profile returns the profile once the steps that it takes have been made, and nil before.
	Profile() (*Profile, error)
}

// Profile says where the time of a step on a GPU went, kernel by kernel.
type Profile = optime.Profile

// Parallel is an [Engine] that trains a model together with the engines of other processes, its ranks.
// Every rank has the same model, data, settings and callbacks, and the batches of a step are divided
// among the ranks. Package llm/parallel has such an engine.
//
// All ranks call Batches, Update, Exchange and Gather in the same order. The trainer makes sure that
// they take the same decisions: commands that are submitted at one rank take effect at all ranks
// between the same two steps, the controller and the clock of rank 0 count for all, and when one
// rank fails or is asked to stop, all stop after the same step. Only rank 0 writes checkpoints.
type Parallel interface {
	Engine
	// Rank returns the rank, from 0 to Ranks−1.
	Rank() int
	Ranks() int
	// Batches takes the place of Gradients. It gathers the gradients of n batches and returns their
	// losses. Each call of next returns another batch in the same memory.
	Batches(n int, next func() (data.Batch, error)) (losses []float64, err error)
	// Exchange sends a value to all ranks and returns the values of all ranks, by rank.
	Exchange(value []byte) ([][]byte, error)
	// Gather completes the optimizer state on this host, so that it covers the whole model.
	Gather() error
	// Own makes the optimizer state on this host current for the parts that this rank updates, and
	// returns those parts, ordered like the parts of all ranks. It does not wait for other ranks. The
	// optimizer is an [optim.Partial].
	Own() ([]optim.Part, error)
}

// Busier is a [Parallel] engine that fails the run if its ranks make no progress for some time.
type Busier interface {
	Parallel
	// Busy declares long work outside a step, such as "writing a checkpoint", until done is called.
	Busy(what string) (done func())
}

// ParallelStepper is a [Parallel] engine that updates without waiting on the host for the losses of a
// step. The ranks exchange the losses during the update.
type ParallelStepper interface {
	Parallel
	// StepBatches does the work of Batches and Update, and returns their errors. Without an error it has
	// made the update, unless a loss is not finite. Before the update every rank has received the words
	// of all ranks.
	StepBatches(n int, next func() (data.Batch, error), word []byte) (StepResult, error)
}

// StepResult is the result of a step of several ranks.
type StepResult struct {
	Losses []float64 // of the step's batches
	Norm   float64   // of the gradient
	Made   bool      // the update has been made, or may have been
	Words  [][]byte  // by rank; nil if the ranks have not agreed on an update
}
