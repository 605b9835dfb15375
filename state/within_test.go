package state_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/state"
)

// TestWithin wants the whole life of a blueprint to fit into half of a run, and what fits already to stay.
func TestWithin(t *testing.T) {
	all := func(t state.Thresholds) (n int) {
		for _, e := range t.MinEpochs {
			n += e
		}
		return n
	}
	for _, epochs := range []int{-1, 0, 1, 10, 100, 499} {
		require.LessOrEqual(t, all(state.DefaultThresholds().Within(epochs)), max(0, epochs)/2)
	}
	require.Equal(t, state.DefaultThresholds(), state.DefaultThresholds().Within(500))
}

// TestLeastEpochs wants it to be what a life takes in which nothing is late, and a controller without the patience to be told so.
func TestLeastEpochs(t *testing.T) {
	l := lattice(t, 2, 4)
	h := state.NewHeuristic(1, 100)
	n, err := h.LeastEpochs(l, 1)
	require.NoError(t, err)
	require.Equal(t, 1+1+100+50+20+30+50, n)
	h.RampEpochs, h.Begin = 400, 9
	n, err = h.LeastEpochs(l, 40)
	require.NoError(t, err)
	require.Equal(t, 9+1+100+100+20+40+50, n)
	h.Patience = 98
	_, err = h.LeastEpochs(l, 1)
	require.ErrorContains(t, err, "Patience of 98 epochs ends before the gate out of Training can open, after 100")
	n, err = h.LeastEpochs(lattice(t, 2, 4, state.WithoutGates()), 1)
	require.NoError(t, err)
	require.Zero(t, n)
}
