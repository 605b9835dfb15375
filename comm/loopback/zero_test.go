package loopback

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm"
)

// TestZeroValues checks that the errors of zero values name the constructor.
func TestZeroValues(t *testing.T) {
	var g Group
	second := func(_ any, err error) error { return err }
	for _, err := range []error{g.AllReduce(0, 0, 1, 0, 0, 0), g.ReduceScatter(0, 0, 1, 0, 0, 0),
		g.AllGather(0, 0, 1, 0, 0), g.Broadcast(0, 1, 0, 0, 0), g.Send(0, 1, 0, 0, 0),
		g.Recv(0, 1, 0, 0, 0), g.Free(0), second(g.Alloc(1)), second(g.Register(0, 1)),
		g.Batch(func(comm.Collectives) error { return nil })} {
		require.ErrorIs(t, err, comm.ErrZero)
	}

	require.Error(t, g.Deregister(1))
	require.Zero(t, g.Rank()+g.Size())
	g.Abort(comm.ErrZero)
	require.NoError(t, new(Group).Close())
	require.ErrorContains(t, new(Host).Enqueue(0, nil), "NewHost")
	require.ErrorContains(t, second(New(t.Context(), nil, NewHost())), "nil")
	require.ErrorContains(t, second(New(t.Context(), new(comm.World), NewHost())), "nil")
}
