package run

// State tracks how far a machine's runs have progressed. All decisions that depend on the machine's
// history consult it.
type State struct {
	phase     Phase
	capturing bool // work is being captured rather than executed
}

// Phase is the progress of the last run.
type Phase uint8

// The phases of a machine.
const (
	Fresh    Phase = iota // nothing has run
	Enqueued              // a run has been at least partly enqueued
	Normed                // the sums of squares belong to the current gradients
	Closed
)

// Event is an event that changes the phase.
type Event uint8

// The events.
const (
	Run         Event = iota // a run was enqueued, possibly only in part because of an error
	ComputeNorm              // the sums of squares of the gradients were computed
	Begin                    // a run is about to change the gradients
	Close
)

// transitions maps each event to the phases that it changes. Any other phase remains as it is.
var transitions = map[Event]map[Phase]Phase{
	Run:         {Fresh: Enqueued, Normed: Enqueued},
	ComputeNorm: {Enqueued: Normed},
	Begin:       {Normed: Enqueued},
	Close:       {Fresh: Closed, Enqueued: Closed, Normed: Closed},
}

// On applies an event to the state.
func (s *State) On(e Event) {
	if next, ok := transitions[e][s.phase]; ok {
		s.phase = next
	}
}

// Closed reports whether the machine is closed.
func (s *State) Closed() bool { return s.phase == Closed }

// Ran reports whether a run has started, even if it failed.
func (s *State) Ran() bool { return s.phase != Fresh && s.phase != Closed }

// Normed reports whether the sums of squares belong to the current gradients.
func (s *State) Normed() bool { return s.phase == Normed }

// Capturing reports whether work is being captured rather than executed.
func (s *State) Capturing() bool { return s.capturing }
