package run

// State is what has become of a machine's runs. All that depends on the past of a machine asks it.
type State struct {
	phase     Phase
	capturing bool // what is enqueued is recorded, and runs later
}

// Phase is how far the last run is.
type Phase uint8

// The phases.
const (
	Fresh    Phase = iota // nothing has run
	Enqueued              // a run is on its way
	Waited                // the run is over, and the host knows
	// the run is on its way, and the squares of its gradients are those of the update
	Looked
	WaitedLooked // likewise, of a run that the host knows to be over
	Closed
)

// Event is what changes a state.
type Event uint8

// The events.
const (
	Run   Event = iota // a run was enqueued
	Wait               // the host has waited for all runs
	Look               // the squares of the gradients were formed
	Begin              // a run is about to change the gradients
	Close
)

// transitions are the phases that follow, by the event. An event that is not listed leaves a phase.
var transitions = map[Event]map[Phase]Phase{
	Run:   {Fresh: Enqueued, Waited: Enqueued, Looked: Enqueued, WaitedLooked: Enqueued},
	Wait:  {Enqueued: Waited, Looked: WaitedLooked},
	Look:  {Enqueued: Looked, Waited: WaitedLooked},
	Begin: {Looked: Enqueued, WaitedLooked: Waited},
	Close: {Fresh: Closed, Enqueued: Closed, Waited: Closed, Looked: Closed, WaitedLooked: Closed},
}

// On changes the state.
func (s *State) On(e Event) {
	if next, ok := transitions[e][s.phase]; ok {
		s.phase = next
	}
}

// Closed reports whether the machine is closed.
func (s *State) Closed() bool { return s.phase == Closed }

// Ran reports whether there was a run.
func (s *State) Ran() bool { return s.phase != Fresh && s.phase != Closed }

// Waited reports whether the host knows the last run to be over.
func (s *State) Waited() bool { return s.phase == Waited || s.phase == WaitedLooked }

// Looked reports whether the squares are those of the present gradients.
func (s *State) Looked() bool { return s.phase == Looked || s.phase == WaitedLooked }

// Capturing reports whether what is enqueued is recorded, and runs later.
func (s *State) Capturing() bool { return s.capturing }
