package comm

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestZeroValues checks that the errors of zero values name the constructor, and that nothing
// panics or blocks.
func TestZeroValues(t *testing.T) {
	for _, w := range []*World{nil, new(World)} {
		_, err := w.Gather(t.Context(), "x", nil)
		require.ErrorIs(t, err, errZero)
		require.ErrorIs(t, w.Barrier(t.Context(), "x"), errZero)
		require.ErrorIs(t, w.Report(1), errZero)
		require.ErrorIs(t, w.Err(), errZero)
		require.ErrorIs(t, w.Blame(ErrPeer), errZero)
		w.Fail(nil)
		<-w.Done()
		require.Zero(t, w.Rank()+w.Size()+int(w.Deadline()))
		require.Equal(t, Place{}, w.Place())
		require.NoError(t, w.Close())
		require.ErrorContains(t, Watch(t.Context(), w, nil, time.Second), "nil or a zero value")
	}

	var none Shards
	require.Error(t, none.Check(1))
	require.Zero(t, none.Count()+none.Len(0)+none.Len(-1))
	require.Error(t, EvenShards(5, 0, 1).Check(0))
	require.Error(t, EvenShards(5, 2, 0).Check(2))
	require.Error(t, EvenShards(-5, 2, 1).Check(2))
	require.Error(t, EvenShards(5, 1<<40, 1).Check(1<<40))
	require.Error(t, CutShards([]Piece{{Len: 5}}, -1).Check(-1))
	require.Zero(t, OrderedSum{}.StagingLen()+Type(255).Size())
	require.ErrorContains(t, GatherShards(nil, 0, none, Float32, 0), "the group is nil")
	require.ErrorContains(t, CheckCall("x", nil, 0, Float32, Sum, 0), "nil")
	_, err := FromEnvironment(nil)
	require.ErrorContains(t, err, "os.Getenv")
	var noContext context.Context
	_, err = Join(noContext, Place{Size: 2, LocalSize: 1, MasterAddr: "h", MasterPort: 1}, Options{})
	require.ErrorContains(t, err, "the context is nil")
	alone, err := Join(t.Context(), Place{Size: 1, LocalSize: 1}, Options{})
	require.NoError(t, err)
	alone.Fail(nil)
	require.ErrorContains(t, alone.Err(), "no cause")
}
