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
	Enqueued              // a run, be it a part of one, is on its way or over
	Looked                // and the squares of its gradients are those of the update
	Closed
)

// Event is what changes a state.
type Event uint8

// The events.
const (
	Run   Event = iota // a run was enqueued, be it in part: an error may end it there
	Look               // the squares of the gradients were formed
	Begin              // a run is about to change the gradients
	Close
)

// transitions are the phases that follow, by the event. An event that is not listed leaves a phase.
var transitions = map[Event]map[Phase]Phase{
	Run:   {Fresh: Enqueued, Looked: Enqueued},
	Look:  {Enqueued: Looked},
	Begin: {Looked: Enqueued},
	Close: {Fresh: Closed, Enqueued: Closed, Looked: Closed},
}

// On changes the state.
func (s *State) On(e Event) {
	if next, ok := transitions[e][s.phase]; ok {
		s.phase = next
	}
}

// Closed reports whether the machine is closed.
func (s *State) Closed() bool { return s.phase == Closed }

// Ran reports whether there was a run, be it one that an error ended.
func (s *State) Ran() bool { return s.phase != Fresh && s.phase != Closed }

// Looked reports whether the squares are those of the present gradients.
func (s *State) Looked() bool { return s.phase == Looked }

// Capturing reports whether what is enqueued is recorded, and runs later.
func (s *State) Capturing() bool { return s.capturing }
