package loopback

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm"
)

// TestWatchAbortsWork checks that ranks waiting for a failed rank return the cause of its failure.
func TestWatchAbortsWork(t *testing.T) {
	all := ranks(t, 4)
	errs := everywhere(4, func(r int) error {
		me := all[r]
		watched := make(chan error, 1)
		go func() { watched <- comm.Watch(t.Context(), me.world, me.Group, time.Hour) }()
		if r == 2 {
			me.world.Fail(errors.New("out of paper"))
			return <-watched
		}

		p := me.Alloc(4)
		work := errors.Join(me.AllReduce(p, p, 1, comm.Float32, comm.Sum, 0), me.Sync(0))
		require.Error(t, work)
		require.Error(t, me.Group.Close())
		require.Error(t, me.AllReduce(p, p, 1, comm.Float32, comm.Sum, 0),
			"later work fails at once")
		cause := <-watched
		require.Equal(t, cause, me.world.Blame(work))
		return cause
	})

	for r, err := range errs {
		var e *comm.RankError
		if r == 2 {
			require.EqualError(t, err, "out of paper")
			continue
		}
		require.ErrorAs(t, err, &e)
		require.Equal(t, 2, e.Rank)
		require.Equal(t, "failed: out of paper", e.Reason)
	}
}

// TestWatchReportsFailedWork checks that the other ranks learn the reason if a group fails at one
// rank that has not died.
func TestWatchReportsFailedWork(t *testing.T) {
	all := ranks(t, 3)
	errs := everywhere(3, func(r int) error {
		me := all[r]
		watched := make(chan error, 1)
		go func() { watched <- comm.Watch(t.Context(), me.world, me.Group, time.Millisecond) }()
		p := me.Alloc(4)
		count := 1
		if r == 1 {
			count = 100 // more than was allocated
		}
		if err := me.AllReduce(p, p, count, comm.Float32, comm.Sum, 0); err != nil {
			return me.world.Blame(err)
		}
		return <-watched
	})

	for r, err := range errs {
		require.ErrorContains(t, err, "400 bytes at", r)
		var e *comm.RankError
		require.Equal(t, r != 1, errors.As(err, &e))
	}
}

// TestWatchEndsWithItsContext checks that a successful run is not aborted.
func TestWatchEndsWithItsContext(t *testing.T) {
	all := ranks(t, 2)
	ctx, cancel := context.WithCancel(t.Context())
	errs := everywhere(2, func(r int) error {
		watched := make(chan error, 1)
		go func() { watched <- comm.Watch(ctx, all[r].world, all[r].Group, time.Millisecond) }()
		err := all[r].world.Barrier(t.Context(), "work")
		cancel()
		return errors.Join(err, <-watched, all[r].Group.Err(), all[r].Group.Close())
	})
	require.NoError(t, errors.Join(errs...))
}

// TestLeftRank checks that work involving a rank that has closed its group fails with an error that
// says so.
func TestLeftRank(t *testing.T) {
	all := ranks(t, 2)
	require.NoError(t, all[1].Group.Close())
	require.ErrorIs(t, all[1].Group.Err(), comm.ErrClosed)
	p := all[0].Alloc(4)
	err := errors.Join(all[0].Recv(p, 1, comm.Float32, 1, 0), all[0].Sync(0))
	require.ErrorContains(t, err,
		"rank 1 has left, rank 0 waits for its Send and Recv of 1 float32")
}
