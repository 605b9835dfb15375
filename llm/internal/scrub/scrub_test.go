package scrub

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/seedtest"
	"github.com/kasmina-go/kasmina/state"
)

// TestScrubber checks that corrupt seeds are found at the start and in the background, that each finding is
// returned once, and that a new start forgets them.
func TestScrubber(t *testing.T) {
	early, err := state.NewLattice(4, 8)
	require.NoError(t, err)
	late, err := state.NewLattice(4, 8)
	require.NoError(t, err)
	n, err := state.NewNetwork(nil, state.Layer{Name: "a", Lattice: early}, state.Layer{Name: "b", Lattice: late})
	require.NoError(t, err)

	s := &Scrubber{Network: n, Period: 10 * time.Millisecond}
	seedtest.FlipAlpha(t, early, 2)
	s.Start()
	found := s.Fresh()
	require.Len(t, found, 1)
	require.ErrorIs(t, found[0], state.ErrCorrupt)
	require.ErrorContains(t, found[0], "layer 0: ")

	seedtest.FlipAlpha(t, late, 1)
	require.Eventually(t, func() bool {
		found = append(found, s.Fresh()...)
		return len(found) == 2
	}, 2*time.Minute, time.Millisecond)
	require.ErrorContains(t, found[1], "layer 1: ")
	time.Sleep(3 * s.Period)
	require.Empty(t, s.Fresh(), "findings that are known")
	s.Stop()
	s.Stop()

	s.Start()
	defer s.Stop()
	require.Len(t, s.Fresh(), 2)
}
