package run

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestStateTransitions checks the effect of every event in every phase.
func TestStateTransitions(t *testing.T) {
	phases := []Phase{Fresh, Enqueued, Normed, Closed}
	want := map[Event][]Phase{ // the phase that follows each of phases
		Run:         {Enqueued, Enqueued, Enqueued, Closed},
		ComputeNorm: {Fresh, Normed, Normed, Closed},
		Begin:       {Fresh, Enqueued, Enqueued, Closed},
		Close:       {Closed, Closed, Closed, Closed},
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

// TestStateAnswers checks Closed, Ran and Normed in every phase.
func TestStateAnswers(t *testing.T) {
	for p, want := range map[Phase][3]bool{ // closed, ran, looked
		Fresh: {}, Enqueued: {false, true}, Normed: {false, true, true}, Closed: {true},
	} {
		s := State{phase: p}
		require.Equal(t, want, [3]bool{s.Closed(), s.Ran(), s.Normed()}, "phase %d", p)
	}
}
