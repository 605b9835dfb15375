package comm

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm/internal/channel"
)

// patience is much longer than any operation in these tests; a test that needs it fails.
const patience = 100 * time.Second

// Ports of the runs in tests. Systems assign only higher ones by themselves, so that no other program takes a port
// before the run does.
const firstPort, lastPort = 10_000, 15_000

var ports struct {
	sync.Mutex
	next int
}

// unusedPort returns the first of [PortWindow] unused ports. Every call returns other ports, until it has returned
// all of them.
func unusedPort(t *testing.T) int {
	t.Helper()
	ports.Lock()
	defer ports.Unlock()

	const windows = (lastPort - firstPort) / PortWindow
	if ports.next == 0 {
		ports.next = firstPort + PortWindow*rand.IntN(windows)
	}
	for range windows {
		first := ports.next
		if ports.next += PortWindow; ports.next+PortWindow > lastPort {
			ports.next = firstPort
		}
		if unused(first) {
			return first
		}
	}
	t.Fatal("all ports are in use")
	return 0
}

// unused reports whether a run can use all ports of the window that starts with the given one.
func unused(first int) bool {
	for port := first; port < first+PortWindow; port++ {
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			return false
		}
		l.Close()
	}
	return true
}

// places returns the places of a run on this host, at unused ports.
func places(t *testing.T, size int) []Place {
	t.Helper()
	port := unusedPort(t)
	all, secret := make([]Place, size), NewSecret()
	for r := range all {
		all[r] = Place{Rank: r, Size: size, LocalRank: r, LocalSize: size, MasterAddr: "127.0.0.1",
			MasterPort: port, Secret: secret,
			Run: fmt.Sprintf("%s %d %d", t.Name(), os.Getpid(), port)}
	}

	return all
}

// everywhere runs f for all ranks concurrently and returns their errors.
func everywhere(size int, f func(rank int) error) []error {
	errs := make([]error, size)
	var wg sync.WaitGroup
	for r := range size {
		wg.Go(func() { errs[r] = f(r) })
	}
	wg.Wait()
	return errs
}

// worlds joins all ranks of a run.
func worlds(t *testing.T, size int, o Options) []*World {
	t.Helper()
	p, all := places(t, size), make([]*World, size)
	if o.Timeout == 0 {
		o.Timeout = patience
	}

	errs := everywhere(size, func(r int) (err error) {
		all[r], err = Join(t.Context(), p[r], o)
		return err
	})
	require.NoError(t, errors.Join(errs...))
	t.Cleanup(func() {
		everywhere(size, func(r int) error {
			all[r].Fail(errors.New("the test is over"))
			return all[r].Close()
		})
	})

	return all
}

func TestGather(t *testing.T) {
	for _, size := range []int{1, 2, 3, 8} {
		all := worlds(t, size, Options{})
		var values [][]byte
		for r := range size {
			values = append(values, bytes.Repeat([]byte{byte(r)}, r*r*1000))
		}
		errs := everywhere(size, func(r int) error {
			if all[r].Rank() != r || all[r].Size() != size {
				return fmt.Errorf("rank %d of %d", all[r].Rank(), all[r].Size())
			}

			for range 3 { // keys may be reused
				got, err := all[r].Gather(t.Context(), "values", values[r])
				if err != nil {
					return err
				}
				for i := range got {
					if !bytes.Equal(got[i], values[i]) {
						return fmt.Errorf("part %d differs", i)
					}
				}
			}

			if err := all[r].Barrier(t.Context(), "end"); err != nil {
				return err
			}
			return all[r].Close()
		})
		require.NoError(t, errors.Join(errs...), size)
		for _, w := range all {
			require.ErrorIs(t, w.Err(), ErrClosed)
			_, err := w.Gather(t.Context(), "values", nil)
			require.ErrorIs(t, err, ErrClosed)
		}
	}
}

// TestBarrierWaits checks that no rank passes a barrier before the last has arrived.
func TestBarrierWaits(t *testing.T) {
	all := worlds(t, 3, Options{})
	var mu sync.Mutex
	come := 0
	errs := everywhere(3, func(r int) error {
		mu.Lock()
		come++
		mu.Unlock()
		err := all[r].Barrier(t.Context(), "b")
		mu.Lock()
		defer mu.Unlock()

		if come != 3 {
			return fmt.Errorf("passed after %d", come)
		}
		return err
	})

	require.NoError(t, errors.Join(errs...))
}

func TestFactsMustAgree(t *testing.T) {
	p := places(t, 3)
	errs := everywhere(3, func(r int) error {
		lr := "0.1"
		if r == 2 {
			lr = "0.2"
		}
		_, err := Join(t.Context(), p[r], Options{Timeout: patience,
			Facts: []Fact{{"version", "1"}, {"learning rate", lr}}})
		return err
	})

	for r, err := range errs {
		require.ErrorContains(t, err, `learning rate differs: "0.1" at rank 0, "0.2" at rank 2`, r)
	}

	p = places(t, 2)
	errs = everywhere(2, func(r int) error {
		_, err := Join(t.Context(), p[r], Options{Timeout: patience, Facts: make([]Fact, r)})
		return err
	})
	for _, err := range errs {
		require.ErrorContains(t, err, "start the same program everywhere")
	}
}

func TestMissingRanksAreNamed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		run := newPipedRun(t, 4, Options{Timeout: 3 * time.Second})
		errs := everywhere(4, func(r int) error {
			if r == 1 || r == 3 {
				return nil
			}
			_, err := run.join(t, r)
			return err
		})

		for _, r := range []int{0, 2} {
			var e *RankError
			require.ErrorAs(t, errs[r], &e)
			require.Equal(t, 1, e.Rank)
			require.ErrorContains(t, e, "did not join within 3s. Missing of 4: [rank 1 rank 3]")
		}
	})
}

func TestRankZeroIsMissing(t *testing.T) {
	p := places(t, 2)
	_, err := Join(t.Context(), p[1], Options{Timeout: 50 * time.Millisecond})
	require.ErrorContains(t, err,
		"rank 0 was not found at 127.0.0.1, ports "+strconv.Itoa(p[1].ports()[0]))
	require.ErrorContains(t, err, "is MASTER_ADDR its host?")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	ctx, cancel := context.WithCancelCause(t.Context())
	stopped := errors.New("stopped")
	cancel(stopped)
	_, err = Join(ctx, p[1], Options{})
	require.ErrorIs(t, err, stopped)
}

// tryJoin tries each address once to join a run with the given place.
func tryJoin(t *testing.T, p Place) error {
	t.Helper()
	id, err := channel.New(string(p.Secret))
	require.NoError(t, err)
	c := caller{place: p, id: id, targets: p.targets()}
	var failures []error
	for _, target := range c.targets {
		w, _, err := c.attempt(t.Context(), target)
		if err == nil {
			w.Close()
			return nil
		}
		failures = append(failures, err)
	}
	return errors.Join(failures...)
}

// open starts the store of a run without joining as rank 0.
func open(t *testing.T, p Place, deadline time.Duration) *store {
	t.Helper()
	id, err := channel.New(string(p.Secret))
	require.NoError(t, err)
	s, err := openStore(t.Context(), p, id, patience, deadline)
	require.NoError(t, err)
	t.Cleanup(func() { s.close(0) })
	return s
}

// TestTakenPorts joins a run while its first ports are taken: by a run with another secret, by a
// run with the same secret, and by programs that send garbage, close connections or never answer.
func TestTakenPorts(t *testing.T) {
	p := places(t, 2)
	another, namesake := p[0], p[0]
	another.Secret = NewSecret()
	namesake.Run = "another run"
	open(t, another, 0)
	open(t, namesake, 0)
	for i, say := range []string{"HTTP/1.1 400 Bad Request\r\n\r\n and so on", "", "hang"} {
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1",
			strconv.Itoa(p[0].MasterPort+2+i)))
		if err != nil {
			continue // taken by an unrelated program
		}

		defer l.Close()
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				if say != "hang" {
					_, _ = conn.Write([]byte(say))
					conn.Close()
				}
			}
		}()
	}

	errs := everywhere(2, func(r int) error {
		if r == 0 {
			time.Sleep(100 * time.Millisecond) // rank 1 has usually found only the other programs so far
		}
		w, err := Join(t.Context(), p[r], Options{Timeout: patience})
		if err != nil {
			return err
		}
		return w.Close()
	})

	require.NoError(t, errors.Join(errs...))
}

// TestUnresponsivePorts checks that ports that never answer do not delay a rank.
func TestUnresponsivePorts(t *testing.T) {
	defer func(before time.Duration) { channel.HandshakeTimeout = before }(channel.HandshakeTimeout)
	channel.HandshakeTimeout = time.Hour // much longer than patience
	p := places(t, 2)
	s := open(t, p[0], 0)

	var targets []string
	for range 3 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		defer l.Close()
		targets = append(targets, l.Addr().String())
	}
	targets = slices.Insert(targets, 2, s.listener.Addrs()[0].String())

	id, err := channel.New(string(p[1].Secret))
	require.NoError(t, err)
	c := caller{place: p[1], id: id, targets: targets}
	w, _, err := c.connect(t.Context(), patience)
	require.NoError(t, err)
	require.NoError(t, w.Close())
}

// TestRefusals tries to join with the right secret but a place that does not fit the run.
func TestRefusals(t *testing.T) {
	p := places(t, 3)
	s := open(t, p[0], 0)
	id, err := channel.New(string(p[0].Secret))
	require.NoError(t, err)
	c := caller{place: p[1], id: id, targets: p[1].targets()}
	w, _, err := c.connect(t.Context(), patience)
	require.NoError(t, err)
	defer w.Close()
	for _, test := range []struct {
		change func(*Place)
		final  bool
		want   string
	}{
		{func(p *Place) { p.Run = "yesterday" }, false, "this is run"},
		{func(p *Place) { p.Size = 5 }, true, "rank 1 of 5 came to a run of 3 ranks"},
		{func(p *Place) { p.Rank = 7 }, true, "rank 7 of 3 came"},
		{func(p *Place) { p.Rank = -1 << 62 }, true, "of 3 came"},
		{func(*Place) {}, true, "has this rank already"},
	} {
		q := p[1]
		test.change(&q)
		err := tryJoin(t, q)
		require.ErrorContains(t, err, test.want)
		require.Equal(t, test.final, isFinal(err), test.want)
	}

	require.Nil(t, s.failure)
}

// TestFailureIsReported checks that every rank reports the cause of a failure, no matter which rank
// fails and how.
func TestFailureIsReported(t *testing.T) {
	const size = 3
	for _, c := range []struct {
		name string
		end  func(*World)
		want string
	}{
		{"fails", func(w *World) { w.Fail(errors.New("out of paper")) }, "failed: out of paper"},
		{"dies", func(w *World) { w.wire.Close() }, "died"},
	} {
		for bad := range size {
			if c.name == "dies" && bad == 0 {
				continue // tested below
			}

			all := worlds(t, size, Options{})
			errs := everywhere(size, func(r int) error {
				if r == bad {
					c.end(all[r])
					<-all[r].Done()
					return nil
				}
				return all[r].Barrier(t.Context(), "b")
			})
			for r, err := range errs {
				if r == bad {
					continue
				}
				var e *RankError
				require.ErrorAs(t, err, &e, "%s: rank %d of %d", c.name, bad, r)
				require.Equal(t, bad, e.Rank)
				require.Equal(t, os.Getpid(), e.PID)
				require.ErrorContains(t, e, c.want)
				<-all[r].Done()
				require.Equal(t, err, all[r].Err())
			}

			require.Error(t, all[bad].Err())
		}
	}
}

// TestRankZeroDies checks that the other ranks learn which rank is gone even without the store.
func TestRankZeroDies(t *testing.T) {
	all := worlds(t, 3, Options{})
	all[0].store.mu.Lock() // a dead rank does not report that another connection closed before its own
	for _, seat := range all[0].store.seats {
		seat.wire.conn.(*tls.Conn).NetConn().(*net.TCPConn).SetLinger(0)
		seat.wire.Close()
	}

	all[0].store.mu.Unlock()
	for _, w := range all[1:] {
		err := w.Barrier(t.Context(), "b")
		var e *RankError
		require.ErrorAs(t, err, &e)
		require.Equal(t, 0, e.Rank)
		require.ErrorContains(t, e, "died")
	}
}

func TestGatherGivesUp(t *testing.T) {
	all := worlds(t, 2, Options{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := all[0].Gather(ctx, "alone", nil)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, `gathering "alone"`)
	require.NoError(t, all[0].Err())
}

func TestAlone(t *testing.T) {
	w, err := Join(t.Context(), Place{Size: 1, LocalSize: 1}, Options{})
	require.NoError(t, err)
	require.NoError(t, w.Report(0))
	require.NoError(t, w.Close())
	_, err = Join(t.Context(), Place{Rank: 2, Size: 2, LocalSize: 1}, Options{})
	require.ErrorContains(t, err, "rank 2 of 2")
}
