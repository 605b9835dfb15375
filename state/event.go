package state

import "fmt"

// EventKind says what an [Event] tells of.
type EventKind uint8

// The kinds of event.
const (
	GateOpened   EventKind = iota + 1 // a gate that was shut lets the seed go from From to To
	RampFinished                      // the strategy has ended, and α is Value; told once
	EmbargoOver                       // the seed may be recycled
	// Value NaN or Inf were seen in the seed's activations or gradients since the last epoch
	NonFinite
	StrategyFailed // the seed's strategy gave no answer, for the Reason given, so α stays as it is
	StageChanged   // the seed has gone from From to To
	Quarantined    // the seed was corrupt, for the Reason given, and is a new one now
)

var eventNames = [...]string{GateOpened: "GateOpened", RampFinished: "RampFinished",
	EmbargoOver: "EmbargoOver",
	NonFinite:   "NonFinite", StrategyFailed: "StrategyFailed", StageChanged: "StageChanged",
	Quarantined: "Quarantined"}

// String returns the kind's name.
func (k EventKind) String() string { return nameOf(k, "EventKind", eventNames[:]) }

// Event is something that happened to a seed.
type Event struct {
	Kind  EventKind
	Layer int // in events of a Network; otherwise 0
	Seed  int
	Epoch int // epochs that had ended, the one included with whose end it happened
	// GateOpened, StageChanged: the transition; otherwise both are the seed's stage
	From, To Stage
	Value    float64 // RampFinished, NonFinite
	Reason   string  // StrategyFailed, Quarantined; StageChanged by a Command: its Why
}

// String describes the event in a line.
func (e Event) String() string {
	s := fmt.Sprintf("epoch %d, layer %d, seed %d: ", e.Epoch, e.Layer, e.Seed)
	switch e.Kind {
	case GateOpened:
		return s + fmt.Sprintf("the gate from %v to %v is open", e.From, e.To)
	case RampFinished:
		return s + fmt.Sprintf("the ramp has ended at α = %.3g", e.Value)
	case EmbargoOver:
		return s + fmt.Sprintf("%v, may be recycled", e.From)
	case NonFinite:
		return s + fmt.Sprintf("%.0f NaN or Inf were met", e.Value)
	case StageChanged:
		return s + fmt.Sprintf("%v → %v", e.From, e.To)
	}
	return s + fmt.Sprintf("%v: %s", e.Kind, e.Reason)
}

// Listen makes f hear of every event from now on, until stop is called: those that StepEpoch
// returns, and every transition, whoever makes it. Events come in the order in which they happened,
// one at a time, on the goroutine of a method that changes the lattice, which waits for f. f may
// use the lattice; what that causes is told when f has returned.
func (l *Lattice) Listen(f func(Event)) (stop func(), err error) {
	if f == nil {
		return nil, fmt.Errorf("state.Listen: %w: f is nil, want a function", ErrArgument)
	}
	return l.outbox.Listen(f), nil
}

// tell notes events that the listeners will hear of. The caller holds the lock, and ends with
// unlockAndTell.
func (l *Lattice) tell(events ...Event) { l.pending = append(l.pending, events...) }

func (l *Lattice) unlockAndTell() {
	l.release()
	l.outbox.Deliver()
}

// release unlocks the lattice and leaves the delivery of what has happened to the caller.
func (l *Lattice) release() {
	l.outbox.Add(l.pending...)
	l.pending = nil
	l.mu.Unlock()
}
