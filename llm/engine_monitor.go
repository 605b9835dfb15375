package llm

import "github.com/kasmina-go/kasmina/internal/optime"

// OpTime is what the nodes of one op took in a step, on average.
type OpTime = optime.OpTime

// Profiler is an engine that times its ops while it trains.
type Profiler interface {
	Engine
	// OpTimes returns the mean times so far, the longest first, none before the first sample.
	OpTimes() ([]OpTime, error)
}

// Choice is the way in which an op of some shape is computed.
type Choice = optime.Choice

// Chooser is an engine that tells the ways in which it computes ops; see the Choices of
// cudaops.Machine and cpuops.Machine.
type Chooser interface {
	Engine
	// Choices returns those made so far. The last ones are made in the first step.
	Choices() []Choice
}

// Ceiling is what a device reaches at best, as measured.
type Ceiling = optime.Ceiling

// Measurer is an engine that measures what its device reaches at best.
type Measurer interface {
	Engine
	// Ceiling measures between two steps, in a fraction of a second. On a GPU it takes up to a GiB
	// of memory that is free.
	Ceiling() (Ceiling, error)
}

// Profile is where the time of a step on a GPU went, kernel by kernel.
type Profile = optime.Profile

// Tracer is an engine that profiles a step of training, which computes the same bits as ever.
type Tracer interface {
	Engine
	// StartProfile begins with the next step. At least one must have been made.
	StartProfile() error
	// Profile returns the profile once the steps that it takes have been made, and nil before.
	Profile() (*Profile, error)
}
