package comm

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestImpossibleShards checks that shards that do not fit a number of ranks are rejected.
func TestImpossibleShards(t *testing.T) {
	var none Shards
	require.Error(t, none.Check(1))
	require.Zero(t, none.Count()+none.Len(0)+none.Len(-1))
	require.Error(t, EvenShards(5, 0, 1).Check(0))
	require.Error(t, EvenShards(5, 2, 0).Check(2))
	require.Error(t, EvenShards(-5, 2, 1).Check(2))
	require.Error(t, EvenShards(5, 1<<40, 1).Check(1<<40))
	require.Error(t, CutShards([]Piece{{Len: 5}}, -1).Check(-1))
}

// TestFailWithoutCause checks that a rank that fails without a cause reports so.
func TestFailWithoutCause(t *testing.T) {
	alone, err := Join(t.Context(), Place{Size: 1, LocalSize: 1}, Options{})
	require.NoError(t, err)
	alone.Fail(nil)
	require.ErrorContains(t, alone.Err(), "no cause")
}
