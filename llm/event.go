package llm

import (
	"io"

	"github.com/kasmina-go/kasmina/llm/event"
)

// What a run tells and decides is in package event.
type (
	// Event is what a callback sees: [event.Event].
	Event = event.Event
	// EventKind says what happened in a training run: [event.Kind].
	EventKind = event.Kind
	// A Callback reacts to the events of a training run: [event.Callback].
	Callback = event.Callback
	// Budget is what a run may spend: [event.Budget].
	Budget = event.Budget
	// Decision is a line of a record of growth: [event.Decision].
	Decision = event.Decision
	// Record is all that a controller and the clock have decided in a run: [event.Record].
	Record = event.Record
)

// The events of a run: see [event.Kind].
const (
	RunStart    = event.RunStart
	Complete    = event.Complete
	StepEnd     = event.StepEnd
	EvalEnd     = event.EvalEnd
	Saved       = event.Saved
	Sampled     = event.Sampled
	Profiled    = event.Profiled
	Interrupted = event.Interrupted
	RunEnd      = event.RunEnd
	Chosen      = event.Chosen
	Failed      = event.Failed
	EpochEnd    = event.EpochEnd
	Corrupted   = event.Corrupted
	Reshaped    = event.Reshaped
	Measured    = event.Measured
	Noted       = event.Noted
)

// ReadRecord reads what a Growth.Record has written. It returns an error that names the line which
// is no decision.
func ReadRecord(r io.Reader) (*Record, error) { return event.ReadRecord(r) }
