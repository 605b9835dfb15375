package stream

// phase is the state of the kernel on the device, as far as the host knows.
type phase uint8

// The phases of a [Kernel].
const (
	stopped phase = iota // no kernel runs, or the last one has announced that it takes no more batches
	running
	failed // the device has reported an error
	closed
)

// event is an event that changes the phase.
type event uint8

// The events.
const (
	launch event = iota // the kernel was launched
	end                 // the kernel has announced its end
	fail
	closing
)

// transitions maps each event to the phases that it changes. Any other phase remains as it is.
var transitions = map[event]map[phase]phase{
	launch:  {stopped: running},
	end:     {running: stopped},
	fail:    {stopped: failed, running: failed},
	closing: {stopped: closed, running: closed, failed: closed},
}

// on applies an event to the phase.
func (p *phase) on(e event) {
	if next, ok := transitions[e][*p]; ok {
		*p = next
	}
}
