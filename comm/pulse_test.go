package comm

import (
	"context"
	"errors"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm/internal/channel"
)

// short is a deadline long enough for a busy machine.
const short = time.Second

// blames checks that all worlds fail and blame the given rank.
func blames(t *testing.T, all []*World, rank int, why string) {
	t.Helper()
	for r, w := range all {
		select {
		case <-w.Done():
		case <-time.After(patience):
			t.Fatalf("rank %d has not failed", r)
		}
		var e *RankError
		require.ErrorAs(t, w.Err(), &e)
		require.Equal(t, rank, e.Rank, "rank %d: %v", r, e)
		require.ErrorContains(t, e, why)
	}
}

// goesOn checks that no world fails for the given time.
func goesOn(t *testing.T, all []*World, during time.Duration) {
	t.Helper()
	over := time.After(during)
	for r, w := range all {
		select {
		case <-w.Done():
			t.Fatalf("rank %d failed: %v", r, w.Err())
		case <-over:
			return
		}
	}

	<-over
}

// player joins as a rank without pulses that sends only the test's messages.
func player(t *testing.T, p Place) *wire {
	t.Helper()
	id, err := channel.New(string(p.Secret))
	require.NoError(t, err)
	c := caller{place: p, id: id, targets: p.targets()}
	w, _, err := c.connect(t.Context(), patience)
	require.NoError(t, err)
	t.Cleanup(func() { w.Close() })
	w.post(message{Kind: give, Key: joinKey, Values: [][]byte{[]byte("null")}})
	return w
}

// withPlayer starts a run with a player as the last rank.
func withPlayer(t *testing.T, size int) ([]*World, *wire) {
	t.Helper()
	p := places(t, size)
	all := make([]*World, size-1)
	var last *wire
	errs := everywhere(size, func(r int) (err error) {
		if r == size-1 {
			last = player(t, p[r])
			return nil
		}
		all[r], err = Join(t.Context(), p[r], Options{Timeout: patience, Deadline: short})
		return err
	})

	require.NoError(t, errors.Join(errs...))
	t.Cleanup(func() {
		for _, w := range all {
			w.Fail(errors.New("the test is over"))
			w.Close()
		}
	})

	return all, last
}

// TestSilentRankIsFound checks that a live rank without progress after its first report is blamed.
func TestSilentRankIsFound(t *testing.T) {
	t.Parallel()
	all := worlds(t, 3, Options{Deadline: short})
	require.NoError(t, all[1].Report(41))
	blames(t, all, 1, "hangs: no progress for 1s. Last steps reported, by rank: -1, 41, -1")
}

// TestReportsKeepARunAlive checks that the run does not fail because of ranks that report regularly, or ranks that have
// not reported yet.
func TestReportsKeepARunAlive(t *testing.T) {
	t.Parallel()
	all := worlds(t, 3, Options{Deadline: short})
	errs := everywhere(3, func(r int) error {
		if r == 2 { // never reports
			time.Sleep(3 * short)
			return nil
		}
		for step := range 30 {
			if err := all[r].Report(step); err != nil {
				return err
			}
			time.Sleep(short / 10)
		}
		return nil
	})

	require.NoError(t, errors.Join(errs...))
	require.NoError(t, errors.Join(everywhere(3, func(r int) error { return all[r].Close() })...))
}

// TestWaitingRankIsNotSilent checks that the rank that others wait for is blamed, and not the waiting ranks.
func TestWaitingRankIsNotSilent(t *testing.T) {
	t.Parallel()
	all := worlds(t, 3, Options{Deadline: short})
	errs := everywhere(3, func(r int) error {
		if err := all[r].Report(0); err != nil {
			return err
		}
		switch r {
		case 0:
			return all[r].Barrier(t.Context(), "x")
		case 1:
			return all[r].Wait(func() error { <-all[r].Done(); return all[r].Err() })
		}
		<-all[r].Done()
		return all[r].Err()
	})

	for _, err := range errs {
		require.ErrorContains(t, err, "no progress")
	}

	blames(t, all, 2, "hangs: no progress")
}

// TestBusyRankIsNotSilent checks that neither a busy rank nor a rank waiting for it is blamed, whether
// or not that wait is declared, and that the deadline applies again afterwards.
func TestBusyRankIsNotSilent(t *testing.T) {
	t.Parallel()
	all := worlds(t, 3, Options{Deadline: short})
	for _, w := range all {
		require.NoError(t, w.Report(7))
	}

	outer := all[0].Busy("saving")
	inner := all[0].Busy("writing the model")
	waited := make(chan error, 1)
	go func() { waited <- all[1].Barrier(t.Context(), "x") }()
	goesOn(t, all, 3*short/2) // rank 2 has an undeclared wait, such as for a CUDA stream
	inner()
	goesOn(t, all, 3*short/2)
	outer()
	for range 15 { // like the batches of an evaluation
		require.NoError(t, all[0].Report(8))
		time.Sleep(short / 10)
	}

	blames(t, all, 2, "hangs: no progress for 1s. Last steps reported, by rank: 8, 7, 7")
	require.Error(t, <-waited)
}

// TestFrozenRank checks that a suspended process is detected in any state of the run.
func TestFrozenRank(t *testing.T) {
	t.Parallel()
	t.Run("before its first step", func(t *testing.T) {
		t.Parallel()
		all, _ := withPlayer(t, 3)
		blames(t, all, 2, "hangs: no message for 1s. Last steps")
	})
	t.Run("while another is busy", func(t *testing.T) {
		t.Parallel()
		all, _ := withPlayer(t, 3)
		defer all[1].Busy("saving")()
		blames(t, all, 2, "hangs: no message for 1s. Last steps")
	})
	t.Run("while it is busy", func(t *testing.T) {
		t.Parallel()
		all, last := withPlayer(t, 2)
		for range 10 {
			last.post(message{Kind: beat, Pulse: &pulse{Step: 3, Busy: "writing the model"}})
			time.Sleep(short / 5)
		}
		require.NoError(t, all[0].Err())
		blames(t, all, 1, "hangs: no message for 1s while writing the model. "+
			"Last steps reported, by rank: -1, 3")
	})
}

// TestFrozenRankZero checks that the other ranks detect a suspended rank 0, which runs the store.
func TestFrozenRankZero(t *testing.T) {
	t.Parallel()
	p := places(t, 2)
	id, err := channel.New(string(p[0].Secret))
	require.NoError(t, err)
	l, err := id.Listen(net.JoinHostPort("127.0.0.1", strconv.Itoa(p[0].MasterPort)))
	require.NoError(t, err)
	defer l.Close()
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		w := newWire(conn)
		w.post(message{Kind: welcome, Deadline: short}) // and then nothing
		<-t.Context().Done()
		w.Close()
	}()

	_, err = Join(t.Context(), p[1], Options{Timeout: patience, Deadline: time.Hour})
	var e *RankError
	require.ErrorAs(t, err, &e)
	require.Equal(t, 0, e.Rank)
	require.ErrorContains(t, err, "hangs: no message for 1s")
}

// TestAllWait checks that the deadlock of two ranks gathering under different keys is detected.
func TestAllWait(t *testing.T) {
	t.Parallel()
	all := worlds(t, 2, Options{Deadline: short / 2})
	errs := everywhere(2, func(r int) error {
		return all[r].Barrier(context.Background(), strconv.Itoa(r))
	})
	for _, err := range errs {
		var e *RankError
		require.ErrorAs(t, err, &e)
		require.ErrorContains(t, err, "hangs: all ranks have been waiting for each other for ")
	}
}
