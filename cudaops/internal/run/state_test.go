package run

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestStateTransitions wants every event to lead from every phase where the table says, and the
// rest to stay.
func TestStateTransitions(t *testing.T) {
	phases := []Phase{Fresh, Enqueued, Looked, Closed}
	want := map[Event][]Phase{ // behind each of the phases
		Run:   {Enqueued, Enqueued, Enqueued, Closed},
		Look:  {Fresh, Looked, Looked, Closed},
		Begin: {Fresh, Enqueued, Enqueued, Closed},
		Close: {Closed, Closed, Closed, Closed},
	}

	for e, all := range want {
		for i, p := range phases {
			s := State{phase: p}
			s.On(e)
			require.Equal(t, all[i], s.phase, "event %d in phase %d", e, p)
		}
	}

	require.Len(t, transitions, len(want))
}

// TestStateAnswers wants what is asked of a state to follow from its phase alone.
func TestStateAnswers(t *testing.T) {
	for p, want := range map[Phase][3]bool{ // closed, ran, looked
		Fresh: {}, Enqueued: {false, true}, Looked: {false, true, true}, Closed: {true},
	} {
		s := State{phase: p}
		require.Equal(t, want, [3]bool{s.Closed(), s.Ran(), s.Looked()}, "phase %d", p)
	}
}
