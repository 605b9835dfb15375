package llm

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestConditionTransitions tests every change in every phase.
func TestConditionTransitions(t *testing.T) {
	phases := []phase{ready, incomplete, damaged, detached, engineless, closed}
	for what, want := range map[change][]phase{
		updateMade:    {incomplete, incomplete, damaged, detached, engineless, closed},
		stepCompleted: {ready, ready, damaged, detached, engineless, closed},
		updateFailed:  {damaged, incomplete, damaged, detached, engineless, closed},
		restoreFailed: {incomplete, incomplete, damaged, detached, engineless, closed},
		modelLost:     {damaged, damaged, damaged, detached, engineless, closed},
		pushFailed:    {detached, detached, detached, detached, engineless, closed},
		engineLost:    {engineless, engineless, engineless, engineless, engineless, closed},
		restored:      {ready, ready, ready, ready, ready, closed},
		closing:       {closed, closed, closed, closed, closed, closed},
	} {
		for i, from := range phases {
			c := condition{from, nil}
			c.on(what, nil)
			require.Equal(t, want[i], c.phase, "change %d in phase %d", what, from)
		}
	}
}

// TestConditionCauses checks that a phase keeps its first cause, that an incomplete step takes the reason
// why it cannot be completed, and that a restored trainer has no cause.
func TestConditionCauses(t *testing.T) {
	first, second := errors.New("first"), errors.New("second")
	var c condition
	require.NoError(t, c.err())
	c.on(updateFailed, first)
	c.on(updateFailed, second)
	require.ErrorIs(t, c.err(), first)
	require.ErrorIs(t, c.damage(), first)
	require.True(t, c.mirrored())

	c.on(restored, nil)
	require.NoError(t, c.err())
	require.NoError(t, c.damage())

	c.on(updateMade, first)
	c.on(updateMade, second)
	require.ErrorIs(t, c.err(), second)
	require.NoError(t, c.damage())
	c.on(pushFailed, first)
	require.ErrorIs(t, c.err(), first)
	require.False(t, c.mirrored())

	c.on(closing, nil)
	require.ErrorIs(t, c.err(), errClosed)
}
