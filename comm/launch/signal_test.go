//go:build unix

package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/comm/loopback"
)

func init() {
	maps.Copy(roles, map[string]func(int){
		// Exits successfully when asked to terminate.
		"polite": func(int) {
			signals := make(chan os.Signal, 1)
			signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGUSR1)
			fmt.Println("ready")
			for s := range signals {
				fmt.Println("got", s)
				if s != syscall.SIGUSR1 {
					return
				}
			}
		},
		// Rank 0 fails, and the remaining ranks refuse to terminate.
		"stubborn": func(rank int) {
			signal.Ignore(syscall.SIGTERM, syscall.SIGINT)
			if rank == 0 {
				fmt.Println("ready")
				time.Sleep(100 * time.Millisecond)
				os.Exit(3)
			}
			time.Sleep(patience)
		},
		// Rank 2 fails, but rank 0 exits before it because of that.
		"blame": func(rank int) {
			switch rank {
			case 0:
				for os.Chdir("ready") != nil {
					time.Sleep(time.Millisecond)
				}
				os.Exit(comm.ExitPeer)
			case 2:
				signal.Ignore(syscall.SIGTERM)
				if err := os.Mkdir("ready", 0o755); err != nil {
					panic(err)
				}
				time.Sleep(100 * time.Millisecond)
				fmt.Fprintln(os.Stderr, "what it died of")
				os.Exit(4)
			}
			time.Sleep(patience)
		},
		"deaf": func(int) {
			signal.Ignore(syscall.SIGTERM, syscall.SIGINT)
			fmt.Println("ready")
			time.Sleep(patience)
		},
		// Exits while a child holds its output open.
		"parent": func(rank int) {
			if rank == 0 {
				cmd := exec.Command("sleep", "1000")
				cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
				if err := cmd.Start(); err != nil {
					panic(err)
				}
				fmt.Println("child", cmd.Process.Pid)
				os.Exit(9)
			}
			time.Sleep(patience)
		},
		"reduce": reduceForever,
	})
}

// reduceForever computes sums with the other ranks until one is gone.
func reduceForever(int) {
	err := func() error {
		ctx := context.Background()
		place, err := comm.FromEnvironment(os.Getenv)
		if err != nil {
			return err
		}
		w, err := comm.Join(ctx, place, comm.Options{Timeout: patience})
		if err != nil {
			return err
		}
		h := loopback.NewHost()
		g, err := loopback.New(ctx, w, h)
		if err != nil {
			return w.Blame(err)
		}
		go func() { _ = comm.Watch(ctx, w, g, time.Millisecond) }()
		const count = 10_007
		p, err := g.Alloc(4 * count)
		if err != nil {
			return err
		}
		for step := 0; ; step++ {
			err := errors.Join(g.AllReduce(p, p, count, comm.Float32, comm.Sum, 0), h.Sync(0))
			if err != nil {
				return w.Blame(err)
			}
			if step == 0 {
				fmt.Println("pid", os.Getpid())
			}
		}
	}()

	fmt.Fprintln(os.Stderr, err)
	os.Exit(comm.ExitCode(err))
}

// TestKilledRank kills a rank at a random moment of a collective. It checks that the remaining ranks
// exit, and that all of them as well as the launcher name the killed rank.
func TestKilledRank(t *testing.T) {
	const size = 3
	for range 5 {
		j, stdout, stderr := job(t, "reduce", size)
		victim := rand.IntN(size)
		delay := time.Duration(rand.IntN(50)) * time.Millisecond
		go func() {
			stdout.await("pid", size)
			time.Sleep(delay)
			for line := range strings.Lines(stdout.String()) {
				var rank, pid int
				if n, _ := fmt.Sscanf(line, "[%d] pid %d", &rank, &pid); n == 2 && rank == victim {
					_ = syscall.Kill(pid, syscall.SIGKILL)
				}
			}
		}()
		start := time.Now()
		var e *Error
		require.ErrorAs(t, Run(t.Context(), j), &e)
		t.Logf("rank %d killed after %v: all ended %v after the start", victim,
			delay, time.Since(start))
		require.Len(t, e.Deaths, size)
		require.Equal(t, victim, e.Deaths[0].Rank, "%v\n%v", e, stderr)
		require.Equal(t, syscall.SIGKILL, e.Deaths[0].Signal)
		require.ErrorContains(t, e,
			"was killed by a signal: killed (by a person, or by the kernel because memory ran out")
		// Each rank reports the killed one, unless it was asked to terminate before it could. A rank
		// may also blame another rank that was asked to terminate.
		named := strconv.Itoa(victim)
		for _, d := range e.Deaths[1:] {
			if d.Signal != nil {
				named += "|" + strconv.Itoa(d.Rank)
			}
		}
		for _, d := range e.Deaths[1:] {
			if d.Signal == nil {
				require.Equal(t, comm.ExitPeer, d.Code)
				require.Regexp(t, fmt.Sprintf(`rank (%s)( \(process \d+ on .*\))? died`, named),
					strings.Join(d.Last, "\n"))
			}
		}
	}
}

// TestStubbornRanks checks that ranks that ignore the request to terminate are killed.
func TestStubbornRanks(t *testing.T) {
	j, _, _ := job(t, "stubborn", 3)
	j.Grace = 300 * time.Millisecond
	var e *Error
	require.ErrorAs(t, Run(t.Context(), j), &e)
	require.Equal(t, 0, e.Deaths[0].Rank)
	require.Equal(t, 3, e.Deaths[0].Code)
	for _, d := range e.Deaths[1:] {
		require.True(t, d.Asked)
	}
}

// TestBlame checks that a process that reports another's failure isn't blamed, even if it exits first.
func TestBlame(t *testing.T) {
	j, _, _ := job(t, "blame", 3)
	j.Dir = t.TempDir()
	var e *Error
	require.ErrorAs(t, Run(t.Context(), j), &e)
	require.Equal(t, 2, e.Deaths[0].Rank, e)
	require.Equal(t, []string{"what it died of"}, e.Deaths[0].Last)
	require.Equal(t, 0, e.Deaths[1].Rank, e)
}

// TestLeftChildren checks that a rank's children are killed with it and don't delay the end of the
// run.
func TestLeftChildren(t *testing.T) {
	j, stdout, _ := job(t, "parent", 2)
	require.ErrorContains(t, Run(t.Context(), j), "rank 0")
	_, after, found := strings.Cut(stdout.String(), "[0] child ")
	require.True(t, found, stdout)
	pid, err := strconv.Atoi(strings.TrimSpace(after))
	require.NoError(t, err)
	for syscall.Kill(pid, 0) == nil && !zombie(pid) {
		time.Sleep(time.Millisecond)
	}
}

// zombie reports whether a process has exited without being waited for.
func zombie(pid int) bool {
	out, err := exec.Command("ps", "-o", "stat=", "-p", strconv.Itoa(pid)).Output()
	return err != nil || strings.HasPrefix(strings.TrimSpace(string(out)), "Z")
}

// TestSignals checks that all processes receive the launcher's signals and may exit in their own
// time.
func TestSignals(t *testing.T) {
	for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		j, stdout, _ := job(t, "polite", 2)
		go func() {
			stdout.await("ready", 2)
			_ = syscall.Kill(os.Getpid(), syscall.SIGUSR1)
			stdout.await("got user", 2)
			_ = syscall.Kill(os.Getpid(), s)
		}()
		require.NoError(t, Run(t.Context(), j))
		require.Equal(t, 2, strings.Count(stdout.String(), "got "+s.String()), stdout)
	}
}

// TestSecondSignal checks that a second signal terminates processes that ignored the first.
func TestSecondSignal(t *testing.T) {
	j, stdout, _ := job(t, "deaf", 2)
	j.Grace = 100 * time.Millisecond
	go func() {
		stdout.await("ready", 2)
		_ = syscall.Kill(os.Getpid(), syscall.SIGINT)
		_ = syscall.Kill(os.Getpid(), syscall.SIGTERM)
	}()
	err := Run(t.Context(), j)
	require.ErrorContains(t, err, "launch: the run was ended: ")
	require.ErrorContains(t, err, ", after ")
}

// TestBrokenConnection checks that a broken network connection does not interrupt a run, and that a
// broken pipe at standard output does.
func TestBrokenConnection(t *testing.T) {
	defer signal.Reset(syscall.SIGHUP, syscall.SIGPIPE, syscall.SIGTERM, os.Interrupt)
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer w.Close()
	stdout := os.Stdout
	os.Stdout = w
	ctx := UntilInterrupt(io.Discard)
	os.Stdout = stdout

	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	conn, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	peer, err := l.Accept()
	require.NoError(t, err)
	require.NoError(t, peer.Close())
	for err == nil {
		_, err = conn.Write([]byte("x"))
		time.Sleep(time.Millisecond)
	}

	for !errors.Is(err, syscall.EPIPE) {
		_, err = conn.Write([]byte("x"))
	}

	select {
	case <-ctx.Done():
		t.Fatal("a broken connection has interrupted the run")
	case <-time.After(200 * time.Millisecond):
	}

	require.NoError(t, r.Close())
	_, err = w.WriteString("x")
	require.ErrorIs(t, err, syscall.EPIPE)
	select {
	case <-ctx.Done():
	case <-time.After(patience):
		t.Fatal("a broken pipe has not interrupted the run")
	}
}
