package state

import (
	"fmt"
	"slices"
)

// EventKind says what an [Event] tells of.
type EventKind uint8

// The kinds of event.
const (
	GateOpened     EventKind = iota + 1 // a gate that was shut lets the seed go from From to To
	RampFinished                        // the strategy has ended, and α is Value; told once
	EmbargoOver                         // the seed may be recycled
	NonFinite                           // Value NaN or Inf were seen in the seed's activations or gradients since the last epoch
	StrategyFailed                      // the seed's strategy gave no answer, for the Reason given, so α stays as it is
	StageChanged                        // the seed has gone from From to To
	Quarantined                         // the seed was corrupt, for the Reason given, and is a new one now
)

var eventNames = [...]string{GateOpened: "GateOpened", RampFinished: "RampFinished", EmbargoOver: "EmbargoOver",
	NonFinite: "NonFinite", StrategyFailed: "StrategyFailed", StageChanged: "StageChanged", Quarantined: "Quarantined"}

// String returns the kind's name.
func (k EventKind) String() string {
	if k > 0 && int(k) < len(eventNames) {
		return eventNames[k]
	}
	return fmt.Sprintf("EventKind(%d)", uint8(k))
}

// Event is something that happened to a seed.
type Event struct {
	Kind     EventKind
	Layer    int // in events of a Network; otherwise 0
	Seed     int
	Epoch    int     // epochs that had ended, the one included with whose end it happened
	From, To Stage   // GateOpened, StageChanged: the transition; otherwise both are the seed's stage
	Value    float64 // RampFinished, NonFinite
	Reason   string  // StrategyFailed, Quarantined
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

// listeners gets events to those who listen: in order, one at a time, and while the lattice is not locked, so that a listener
// may use it. Its fields but telling are guarded by the lattice's lock.
type listeners struct {
	list    []*func(Event)
	waiting []Event
	telling chan struct{} // holds a token while a goroutine is at it
}

// Listen makes f hear of every event from now on, until stop is called: those that StepEpoch returns, and every transition,
// whoever makes it. Events come in the order in which they happened, one at a time, on the goroutine of a method that changes
// the lattice, which waits for f. f may use the lattice; what that causes is told when f has returned.
func (l *Lattice) Listen(f func(Event)) (stop func(), err error) {
	if f == nil {
		return nil, fmt.Errorf("state.Listen: %w: f is nil, want a function", ErrArgument)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.listeners.telling == nil {
		l.listeners.telling = make(chan struct{}, 1)
	}
	l.listeners.list = append(slices.Clip(l.listeners.list), &f)
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.listeners.list = slices.DeleteFunc(slices.Clone(l.listeners.list), func(g *func(Event)) bool { return g == &f })
	}, nil
}

// tell notes events for the listeners. The caller holds the lock, and ends with unlockAndTell.
func (l *Lattice) tell(events ...Event) {
	if len(l.listeners.list) > 0 {
		l.listeners.waiting = append(l.listeners.waiting, events...)
	}
}

// unlockAndTell unlocks the lattice and hands what waits to the listeners, unless another goroutine or a caller of this one is
// at it, which will see to it: it looks again after it has put the token back.
func (l *Lattice) unlockAndTell() {
	for {
		waiting, telling := len(l.listeners.waiting) > 0, l.listeners.telling
		l.mu.Unlock()
		if !waiting {
			return
		}
		select {
		case telling <- struct{}{}:
		default:
			return
		}
		l.tellAll()
		l.mu.Lock()
	}
}

// tellAll hands over what waits, and puts the token back even if a listener panics.
func (l *Lattice) tellAll() {
	defer func() { <-l.listeners.telling }()
	for {
		l.mu.Lock()
		events, list := l.listeners.waiting, l.listeners.list
		l.listeners.waiting = nil
		l.mu.Unlock()
		if len(events) == 0 {
			return
		}
		for _, e := range events {
			for _, f := range list {
				(*f)(e)
			}
		}
	}
}
