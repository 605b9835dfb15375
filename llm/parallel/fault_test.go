//go:build unix

package parallel_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/comm/launch"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/parallel"
)

// deadline is the time that a rank may be silent. It is far longer than a step takes, even on a busy machine.
const deadline = 2 * time.Minute

// Environment variables of processes that the tests start as ranks.
const (
	folderVariable  = "KASMINA_PARALLEL_TEST" // directory for checkpoints
	versionVariable = "KASMINA_PARALLEL_VERSION"
	partsVariable   = "KASMINA_PARALLEL_PARTS"   // set if each rank saves its own part
	silenceVariable = "KASMINA_PARALLEL_SILENCE" // another deadline
)

// TestMain also serves as the main function of the ranks that tests start.
func TestMain(m *testing.M) {
	randtest.CollectRarely()
	dir := os.Getenv(folderVariable)
	if dir == "" {
		randtest.OverlapWaits()
		os.Exit(m.Run())
	}
	err := rankIn(dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(comm.ExitCode(err))
}

// faulty returns the run for tests that kill ranks.
func faulty(dir string) setup {
	return setup{config: small(), steps: 24, accumulate: 3, grow: true, commands: true,
		save:  filepath.Join(dir, "run.safetensors"),
		every: 1}
}

// rankIn trains as the rank that the environment describes. It resumes from a checkpoint in the
// directory, if there is one.
func rankIn(dir string) (err error) {
	place, err := comm.FromEnvironment(os.Getenv)
	if err != nil {
		return err
	}

	binary, err := comm.Binary()
	if err != nil {
		return err
	}

	if v := os.Getenv(versionVariable); v != "" && place.Rank == 1 {
		binary.Value = v
	}

	silence := deadline
	if d, err := time.ParseDuration(os.Getenv(silenceVariable)); err == nil {
		silence = d
	}

	ctx := context.Background()
	w, err := comm.Join(ctx, place, comm.Options{Timeout: patience, Deadline: silence,
		Facts: []comm.Fact{binary}})
	if err != nil {
		return err
	}

	team, err := parallel.Join(ctx, w)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, team.Close(err)) }()

	s := faulty(dir)
	if _, err := os.Stat(s.save); err == nil {
		s.resume = s.save
	}

	s.more = func(tr *llm.Trainer) {
		tr.On(func(e llm.Event) error {
			if e.Kind == llm.StepEnd && place.Rank == 0 {
				fmt.Println("step", e.Step)
			}
			return nil
		})
	}

	s.parts = os.Getenv(partsVariable) != ""
	return s.train(ctx, place.Rank, place.Size, aimed(place.Rank, s.save, team.Engine))
}

// screen collects the output of ranks.
type screen struct {
	mu    sync.Mutex
	text  bytes.Buffer
	lines chan struct{} // buffered: receives a value for each line written
}

func (s *screen) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case s.lines <- struct{}{}:
	default:
	}
	return s.text.Write(b)
}

// start launches ranks with the given directory.
func start(ctx context.Context, t *testing.T, dir string, size int, env ...string) (out *screen,
	ended chan error) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	out, ended = &screen{lines: make(chan struct{}, 1000)}, make(chan error, 1)
	go func() {
		ended <- launch.Run(ctx, launch.Job{Path: self, PerNode: size, Stdout: out, Stderr: out,
			Env: append(append(os.Environ(), folderVariable+"="+dir), env...)})
	}()
	return out, ended
}

// children returns the process ids of the ranks that this test started.
func children(t *testing.T) map[int]int {
	t.Helper()
	all := map[int]int{}
	entries, err := filepath.Glob("/proc/[0-9]*/environ")
	require.NoError(t, err)
	for _, path := range entries {
		environ, err := os.ReadFile(path)
		if err != nil || !bytes.Contains(environ, []byte(folderVariable+"="+dirOf(t)+"\x00")) {
			continue
		}
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		for _, v := range bytes.Split(environ, []byte{0}) {
			if r, ok := bytes.CutPrefix(v, []byte("RANK=")); ok {
				rank, err := strconv.Atoi(string(r))
				require.NoError(t, err)
				all[rank] = pid
			}
		}
	}

	return all
}

var folders sync.Map // checkpoint directories, by the name of the test

func dirOf(t *testing.T) string {
	dir, _ := folders.Load(t.Name())
	return dir.(string)
}

// TestKilledRanks kills a rank at a random time. It checks that all processes exit before the deadline of silent ranks
// and name the rank, that no file is corrupted, and that continuing on another number of ranks reproduces an
// uninterrupted run bit for bit.
func TestKilledRanks(t *testing.T) {
	if _, err := os.Stat("/proc/self/environ"); err != nil {
		t.Skip("needs /proc to find processes")
	}

	kills := 1 // TestAimedKills makes further kills
	if randtest.Long() {
		kills = 5
	}

	want := faulty(t.TempDir()).file(t, 0)
	r := rand.New(rand.NewPCG(randtest.Seed(t), 1))
	dir := t.TempDir()
	folders.Store(t.Name(), dir)
	for kill := 0; kill < kills; {
		size := 2 + r.IntN(3)
		ctx, cancel := context.WithCancel(t.Context())
		out, ended := start(ctx, t, dir, size)
		for range 1 + r.IntN(3) { // wait for a few lines
			select {
			case <-out.lines:
			case err := <-ended:
				ended <- err
			case <-time.After(patience):
				t.Fatal("no rank has printed anything")
			}
		}
		time.Sleep(time.Duration(r.Int64N(int64(30 * time.Millisecond))))
		all, victim := children(t), r.IntN(size)
		pid, found := all[victim]
		if found {
			found = syscall.Kill(pid, syscall.SIGKILL) == nil
		}
		from := time.Now()
		err := <-ended
		cancel()
		var e *launch.Error
		if found && errors.As(err, &e) {
			require.Less(t, time.Since(from), deadline)
			require.Equal(t, victim, e.Deaths[0].Rank, "%v\n%s", err, out.text.String())
			require.ErrorContains(t, err, fmt.Sprintf("rank %d", victim))
			require.Empty(t, children(t))
			kill++
		}
		path := faulty(dir).save
		if _, err := os.Stat(path); err != nil {
			continue // killed before the first checkpoint
		}
		m, err := llm.LoadModel(t.Context(), path)
		require.NoError(t, err, "the checkpoint after a kill")
		require.NotZero(t, m.Config.Layers)
		// If the run had already finished when the rank was killed, the next one starts from scratch.
		if b, err := os.ReadFile(path); err == nil && bytes.Equal(b, want) {
			require.NoError(t, os.Remove(path))
		}
	}

	for range 3 {
		_, ended := start(t.Context(), t, dir, 2)
		require.NoError(t, <-ended)
	}

	b, err := os.ReadFile(faulty(dir).save)
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, b),
		"the run that was killed and resumed ended with other bits")
}

// TestStoppedRank checks that a rank that stops responding, for example because its host hangs, is
// detected by the deadline and named.
func TestStoppedRank(t *testing.T) {
	if _, err := os.Stat("/proc/self/environ"); err != nil {
		t.Skip("needs /proc to find processes")
	}

	t.Parallel()
	dir := t.TempDir()
	folders.Store(t.Name(), dir)
	out, ended := start(t.Context(), t, dir, 3, silenceVariable+"=10s")
	<-out.lines
	require.NoError(t, syscall.Kill(children(t)[1], syscall.SIGSTOP))
	require.Error(t, <-ended)
	require.Contains(t, out.text.String(), "rank 1 (process")
	require.Contains(t, out.text.String(), "hangs: no message for 10s")
	require.Empty(t, children(t))
}

// TestHangingCallback checks that the hanging rank is blamed, and not the ranks waiting for it.
func TestHangingCallback(t *testing.T) {
	t.Parallel()
	untilPatient(t, func(silence time.Duration) error {
		errs := withHangingCallback(t, silence)
		for _, err := range errs {
			var e *comm.RankError
			require.ErrorAs(t, err, &e)
			require.ErrorContains(t, err, "hangs")
			if e.Rank != 2 {
				return fmt.Errorf("rank %d is blamed instead of rank 2: %w", e.Rank, err)
			}
		}
		return nil
	})
}

// withHangingCallback returns the errors of a run of four ranks in which a callback of rank 2 hangs.
func withHangingCallback(t *testing.T, silence time.Duration) []error {
	t.Helper()
	release := make(chan struct{})
	s := setup{config: small(), steps: 9, accumulate: 3}
	var once sync.Once
	return on(t, 4, comm.Options{Deadline: silence},
		func(rank int, team *parallel.Team) error {
			own := s
			own.more = func(tr *llm.Trainer) {
				tr.On(func(e llm.Event) error {
					if e.Kind == llm.StepEnd && e.Step == 3 && rank == 2 {
						<-release
					}
					return nil
				})
			}
			err := own.train(t.Context(), rank, 4, team.Engine)
			once.Do(func() { close(release) })
			return err
		})
}

// TestFailingCallback checks that if a callback fails at one rank, all ranks stop after the same step
// with the same checkpoint, and report the rank and the reason.
func TestFailingCallback(t *testing.T) {
	s := setup{config: small(), steps: 9, accumulate: 3,
		save: filepath.Join(t.TempDir(), "run.safetensors")}
	errs := on(t, 3, comm.Options{}, func(rank int, team *parallel.Team) error {
		own := s
		own.more = func(tr *llm.Trainer) {
			tr.On(func(e llm.Event) error {
				if e.Kind == llm.StepEnd && e.Step == 4 && rank == 1 {
					return errors.New("the disk is full")
				}
				return nil
			})
		}
		return own.train(t.Context(), rank, 3, team.Engine)
	})

	for r, err := range errs {
		require.ErrorContains(t, err, "the disk is full")
		if r != 1 {
			require.ErrorContains(t, err, "rank 1: ")
		}
	}

	short := s
	short.steps, short.stop = 9, 4
	short.save = filepath.Join(t.TempDir(), "other.safetensors")
	require.ErrorIs(t, short.run(t, 0), errStop)
	want, err := os.ReadFile(short.save)
	require.NoError(t, err)
	got, err := os.ReadFile(s.save)
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, got))
}

// TestOtherBinary checks that a rank with a different binary is rejected at the start and named.
func TestOtherBinary(t *testing.T) {
	out, ended := start(t.Context(), t, t.TempDir(), 3, versionVariable+"=older")
	require.Error(t, <-ended)
	require.Contains(t, out.text.String(), `the program's binary differs: "`)
	require.Contains(t, out.text.String(), `"older" at rank 1`)
}
