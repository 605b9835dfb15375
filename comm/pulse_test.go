package comm

import (
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm/internal/channel"
)

// short is a deadline. These tests run in bubbles of synctest, whose clock only advances while all goroutines wait. A
// busy machine therefore delays no rank.
const short = time.Second

// A pipedRun is a run whose ranks are connected by pipes instead of a network, which a bubble does not permit.
type pipedRun struct {
	places  []Place
	options Options
	store   *store
}

// newPipedRun returns a run that no rank has joined.
func newPipedRun(t *testing.T, size int, o Options) *pipedRun {
	t.Helper()
	run := &pipedRun{options: o}
	for r := range size {
		run.places = append(run.places, Place{Rank: r, Size: size, LocalRank: r, LocalSize: size,
			MasterAddr: "127.0.0.1", Run: t.Name()})
	}

	id, err := channel.New("the secret of a run without a network")
	require.NoError(t, err)
	l, err := id.Listen() // at no address
	require.NoError(t, err)
	run.store = newStore(run.places[0], l, 0, o.Timeout, o.Deadline)
	t.Cleanup(func() { run.store.close(0) })
	return run
}

// connect connects a rank to the store.
func (run *pipedRun) connect(t *testing.T, rank int) (w *wire, deadline time.Duration) {
	t.Helper()
	own, other := net.Pipe()
	go run.store.serve(other)
	c := caller{place: run.places[rank]}
	w, deadline, err := c.join(t.Context(), own)
	require.NoError(t, err)
	t.Cleanup(func() { w.Close() })
	return w, deadline
}

// join joins the run as the given rank.
func (run *pipedRun) join(t *testing.T, rank int) (*World, error) {
	t.Helper()
	w := &World{place: run.places[rank], options: run.options, waiting: map[string]chan message{},
		turns: map[string]int{}, done: make(chan struct{})}
	if rank == 0 {
		w.store = run.store
	}
	w.wire, w.options.Deadline = run.connect(t, rank)
	t.Cleanup(func() {
		w.Fail(errors.New("the test is over"))
		w.Close()
	})
	return w, w.enter(patiently(t))
}

// patiently returns a context that ends after patience, so that a test whose run does not fail ends too.
func patiently(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// pipedWorlds joins all ranks of a run.
func pipedWorlds(t *testing.T, size int, deadline time.Duration) []*World {
	t.Helper()
	run, all := newPipedRun(t, size, Options{Timeout: patience, Deadline: deadline}), make([]*World, size)
	errs := everywhere(size, func(r int) (err error) {
		all[r], err = run.join(t, r)
		return err
	})
	require.NoError(t, errors.Join(errs...))
	return all
}

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
func (run *pipedRun) player(t *testing.T, rank int) *wire {
	t.Helper()
	w, _ := run.connect(t, rank)
	w.post(message{Kind: give, Key: joinKey, Values: [][]byte{[]byte("null")}})
	go func() { // reads, as the kernel of a suspended process does
		for {
			if _, err := w.receive(maxHead, MaxGather); err != nil {
				return
			}
		}
	}()
	return w
}

// withPlayer starts a run with a player as the last rank.
func withPlayer(t *testing.T, size int) ([]*World, *wire) {
	t.Helper()
	run := newPipedRun(t, size, Options{Timeout: patience, Deadline: short})
	all := make([]*World, size-1)
	var last *wire
	errs := everywhere(size, func(r int) (err error) {
		if r == size-1 {
			last = run.player(t, r)
			return nil
		}
		all[r], err = run.join(t, r)
		return err
	})

	require.NoError(t, errors.Join(errs...))
	return all, last
}

// TestSilentRankIsFound checks that a live rank without progress after its first report is blamed.
func TestSilentRankIsFound(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		all := pipedWorlds(t, 3, short)
		require.NoError(t, all[1].Report(41))
		blames(t, all, 1, "hangs: no progress for 1s. Last steps reported, by rank: -1, 41, -1")
	})
}

// TestReportsKeepARunAlive checks that the run does not fail because of ranks that report regularly, or ranks that have
// not reported yet.
func TestReportsKeepARunAlive(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		all := pipedWorlds(t, 3, short)
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
	})
}

// TestWaitingRankIsNotSilent checks that the rank that others wait for is blamed, and not the waiting ranks.
func TestWaitingRankIsNotSilent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		all := pipedWorlds(t, 3, short)
		ctx := patiently(t)
		end := func(w *World) error {
			select {
			case <-w.Done():
			case <-ctx.Done():
			}
			return w.Err()
		}
		errs := everywhere(3, func(r int) error {
			if err := all[r].Report(0); err != nil {
				return err
			}
			switch r {
			case 0:
				return all[r].Barrier(ctx, "x")
			case 1:
				return all[r].Wait(func() error { return end(all[r]) })
			}
			return end(all[r])
		})

		for _, err := range errs {
			require.ErrorContains(t, err, "no progress")
		}

		blames(t, all, 2, "hangs: no progress")
	})
}

// TestBusyRankIsNotSilent checks that neither a busy rank nor a rank waiting for it is blamed, whether
// or not that wait is declared, and that the deadline applies again afterwards.
func TestBusyRankIsNotSilent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		all := pipedWorlds(t, 3, short)
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
	})
}

// TestFrozenRank checks that a suspended process is detected in any state of the run.
func TestFrozenRank(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]func(*testing.T){
		"before its first step": func(t *testing.T) {
			all, _ := withPlayer(t, 3)
			blames(t, all, 2, "hangs: no message for 1s. Last steps")
		},
		"while another is busy": func(t *testing.T) {
			all, _ := withPlayer(t, 3)
			defer all[1].Busy("saving")()
			blames(t, all, 2, "hangs: no message for 1s. Last steps")
		},
		"while it is busy": func(t *testing.T) {
			all, last := withPlayer(t, 2)
			for range 10 {
				last.post(message{Kind: beat, Pulse: &pulse{Step: 3, Busy: "writing the model"}})
				time.Sleep(short / 5)
			}
			require.NoError(t, all[0].Err())
			blames(t, all, 1, "hangs: no message for 1s while writing the model. "+
				"Last steps reported, by rank: -1, 3")
		},
	} {
		t.Run(name, func(t *testing.T) { synctest.Test(t, test) })
	}
}

// TestFrozenRankZero checks that the other ranks detect a suspended rank 0, which runs the store.
func TestFrozenRankZero(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		own, other := net.Pipe()
		zero := newWire(other)
		defer zero.Close()
		zero.post(message{Kind: welcome, Deadline: short}) // and then nothing
		go func() { _, _ = io.Copy(io.Discard, other) }()

		w := &World{place: Place{Rank: 1, Size: 2}, waiting: map[string]chan message{},
			turns: map[string]int{}, done: make(chan struct{})}
		var err error
		w.wire, w.options.Deadline, err = (&caller{place: w.place}).join(t.Context(), own)
		require.NoError(t, err)
		defer w.wire.Close()

		err = w.enter(patiently(t))
		var e *RankError
		require.ErrorAs(t, err, &e)
		require.Equal(t, 0, e.Rank)
		require.ErrorContains(t, err, "hangs: no message for 1s")
	})
}

// TestAllWait checks that the deadlock of two ranks gathering under different keys is detected.
func TestAllWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		all := pipedWorlds(t, 2, short/2)
		ctx := patiently(t)
		errs := everywhere(2, func(r int) error {
			return all[r].Barrier(ctx, strconv.Itoa(r))
		})
		for _, err := range errs {
			var e *RankError
			require.ErrorAs(t, err, &e)
			require.ErrorContains(t, err, "hangs: all ranks have been waiting for each other for ")
		}
	})
}
