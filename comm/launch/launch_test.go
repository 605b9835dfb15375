package launch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm"
)

// patience is far longer than anything in these tests takes.
const patience = 100 * time.Second

const roleVariable = "KASMINA_LAUNCH_TEST"

// TestMain also serves as the program that the tests start. The role determines the behavior of a
// process.
func TestMain(m *testing.M) {
	role := os.Getenv(roleVariable)
	if role == "" {
		os.Exit(m.Run())
	}
	rank, err := strconv.Atoi(os.Getenv("RANK"))
	if err != nil {
		panic(err)
	}
	roles[role](rank)
}

// roles holds the roles of processes that need no signals.
var roles = map[string]func(rank int){
	"environment": func(int) {
		for _, name := range placeVariables {
			fmt.Printf("%s=%s\n", name, os.Getenv(name))
		}
		fmt.Fprintln(os.Stderr, "an error of no account")
	},
	"secret": func(int) {
		fmt.Println(os.Getenv(comm.SecretVariable), strings.Join(os.Args, " "))
		os.Exit(3)
	},
	"flood": func(rank int) {
		for i := range floodLines {
			fmt.Printf("%d %d %s\n", rank, i, strings.Repeat("x", i%500))
			fmt.Fprintf(os.Stderr, "%d %d\n", rank, i)
		}
		fmt.Print(strings.Repeat("y", 3*maxLine), "no end")
	},
	"early": func(rank int) {
		if rank == 0 {
			time.Sleep(200 * time.Millisecond)
			fmt.Println("done")
		}
	},
	"exit": func(rank int) {
		if rank == 1 {
			for i := range 30 {
				fmt.Fprintf(os.Stderr, "line %d\n", i)
			}
			os.Exit(3)
		}
		time.Sleep(patience)
	},
	"sleep": func(rank int) {
		fmt.Println("ready")
		time.Sleep(patience)
	},
}

var placeVariables = []string{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
	"MASTER_PORT", comm.SecretVariable, "TORCHELASTIC_USE_AGENT_STORE", "OF_THE_JOB"}

const floodLines = 20000

// screen collects output. Tests can wait until it contains a text.
type screen struct {
	mu   sync.Mutex
	text bytes.Buffer
	more sync.Cond
}

func newScreen() *screen {
	s := &screen{}
	s.more.L = &s.mu
	return s
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.more.Broadcast()
	return s.text.Write(p)
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// await waits until a text has occurred the given number of times.
func (s *screen) await(text string, times int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for strings.Count(s.text.String(), text) < times {
		s.more.Wait()
	}
}

func job(t *testing.T, role string, n int) (Job, *screen, *screen) {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	stdout, stderr := newScreen(), newScreen()
	return Job{Path: exe, PerNode: n, Stdout: stdout, Stderr: stderr, Grace: patience,
		Env: append(os.Environ(), roleVariable+"="+role, "OF_THE_JOB=yes",
			"TORCHELASTIC_USE_AGENT_STORE=True", "RANK=77")}, stdout, stderr
}

func TestPlaces(t *testing.T) {
	j, stdout, stderr := job(t, "environment", 3)
	require.NoError(t, Run(t.Context(), j))
	seen := map[int]map[string]string{}
	for line := range strings.Lines(stdout.String()) {
		m := regexp.MustCompile(`^\[(\d)\] (\w+)=(.*)\n$`).FindStringSubmatch(line)
		require.NotNil(t, m, line)
		rank := int(m[1][0] - '0')
		if seen[rank] == nil {
			seen[rank] = map[string]string{}
		}
		seen[rank][m[2]] = m[3]
	}

	require.Equal(t, []int{0, 1, 2}, slices.Sorted(maps.Keys(seen)))
	for rank, got := range seen {
		r := strconv.Itoa(rank)
		require.Equal(t, map[string]string{"RANK": r, "WORLD_SIZE": "3", "LOCAL_RANK": r,
			"LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1",
			"MASTER_PORT":       seen[0]["MASTER_PORT"],
			comm.SecretVariable: seen[0][comm.SecretVariable], "TORCHELASTIC_USE_AGENT_STORE": "",
			"OF_THE_JOB": "yes"}, got)
		require.Contains(t, stderr.String(), "["+r+"] an error of no account\n")
		p, err := comm.FromEnvironment(func(name string) string { return got[name] })
		require.NoError(t, err)
		require.Equal(t, rank, p.Rank)
	}

	require.GreaterOrEqual(t, len(seen[0][comm.SecretVariable]), 22)
}

// TestSecretOfARun checks that each run gets a new secret, which appears in the environment of its
// processes but not in their arguments or in the launcher's error.
func TestSecretOfARun(t *testing.T) {
	seen := map[string]bool{}
	for range 3 {
		j, stdout, stderr := job(t, "secret", 2)
		j.Args = []string{"an", "argument"}
		err := Run(t.Context(), j)
		var secret string
		for line := range strings.Lines(stdout.String()) {
			fields := strings.Fields(line)
			require.Len(t, fields, 5, line)
			require.Equal(t, []string{"an", "argument"}, fields[3:])
			require.True(t, secret == "" || secret == fields[1])
			secret = fields[1]
		}
		require.NotEmpty(t, secret)
		require.False(t, seen[secret], "two runs have the same secret")
		seen[secret] = true
		require.ErrorContains(t, err, "exit code 3")
		require.NotContains(t, err.Error(), secret)
		require.NotContains(t, stderr.String(), secret)
	}
}

// TestTrainerNode replays the variables that Kubeflow Trainer sets for a node with four GPUs.
func TestTrainerNode(t *testing.T) {
	trainer := map[string]string{"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1",
		"PET_MASTER_ADDR": "kasmina-node-0-0.kasmina", "PET_MASTER_PORT": "29400"}
	getenv := func(name string) string { return trainer[name] }
	n, per, found, err := NodeFromEnvironment(getenv)
	require.NoError(t, err)
	require.True(t, found)
	require.Equal(t, 4, per)
	require.Equal(t, Node{1, 2, "kasmina-node-0-0.kasmina", 29400}, n)

	// Several nodes need the same secret, which the launcher cannot create.
	j, stdout, _ := job(t, "environment", per)
	j.Node = n
	err = Run(t.Context(), j)
	require.ErrorIs(t, err, comm.ErrSecret)
	require.ErrorContains(t, err, "openssl rand -hex 32")
	require.Empty(t, stdout.String())

	secret := string(comm.NewSecret())
	path := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, os.WriteFile(path, []byte(secret), 0o600))
	for _, given := range []string{comm.SecretVariable + "=" + secret,
		comm.SecretFileVariable + "=" + path} {
		j, stdout, _ = job(t, "environment", per)
		j.Node, j.Env = n, append(j.Env, given)
		require.NoError(t, Run(t.Context(), j))
		for local := range 4 {
			for _, want := range []string{"WORLD_SIZE=8", fmt.Sprintf("LOCAL_RANK=%d", local),
				"MASTER_ADDR=kasmina-node-0-0.kasmina", "MASTER_PORT=29400",
				comm.SecretVariable + "=" + secret} {
				require.Contains(t, stdout.String(), fmt.Sprintf("[%d] %s\n", 4+local, want))
			}
		}
	}

	for _, nproc := range []string{"auto", "gpu", ""} {
		trainer["PET_NPROC_PER_NODE"] = nproc
		_, per, found, err := NodeFromEnvironment(getenv)
		require.NoError(t, err)
		require.True(t, found)
		require.Zero(t, per)
	}

	trainer["PET_NODE_RANK"] = "first"
	_, _, _, err = NodeFromEnvironment(getenv)
	require.ErrorContains(t, err, `PET_NODE_RANK="first"`)
	trainer["RANK"] = "3" // as if torchrun had started this process
	_, _, found, err = NodeFromEnvironment(getenv)
	require.NoError(t, err)
	require.False(t, found)
}

// TestFlood checks that every line arrives whole and in the order of its process, and that an endless
// line is split.
func TestFlood(t *testing.T) {
	j, stdout, stderr := job(t, "flood", 3)
	require.NoError(t, Run(t.Context(), j))
	next := [3]int{}
	ends := 0
	for line := range strings.Lines(stdout.String()) {
		if strings.Contains(line, "no end") {
			ends++
		}
		if strings.Contains(line, "y") || strings.Contains(line, "no end") {
			require.LessOrEqual(t, len(line), maxLine+len("[0] \n"))
			continue
		}
		var prefix, rank, i int
		_, err := fmt.Sscanf(line, "[%d] %d %d ", &prefix, &rank, &i)
		require.NoError(t, err, "%q", line)
		require.Equal(t, prefix, rank)
		require.Equal(t, next[rank], i)
		require.Equal(t, fmt.Sprintf("[%d] %d %d %s\n", rank, rank, i, strings.Repeat("x", i%500)),
			line)
		next[rank]++
	}

	require.Equal(t, [3]int{floodLines, floodLines, floodLines}, next)
	require.Equal(t, 3, ends)
	require.Equal(t, 3*floodLines, strings.Count(stderr.String(), "\n"))
}

// TestEarlyEnd checks that a process that exits successfully doesn't terminate the rest of the run.
func TestEarlyEnd(t *testing.T) {
	j, stdout, _ := job(t, "early", 2)
	require.NoError(t, Run(t.Context(), j))
	require.Equal(t, "[0] done\n", stdout.String())
}

func TestExitEndsTheOthers(t *testing.T) {
	j, _, _ := job(t, "exit", 3)
	var e *Error
	require.ErrorAs(t, Run(t.Context(), j), &e)
	require.Len(t, e.Deaths, 3)
	require.Equal(t, 1, e.Deaths[0].Rank)
	require.Equal(t, 3, e.Deaths[0].Code)
	require.Len(t, e.Deaths[0].Last, tailLines)
	require.Regexp(t,
		`^launch: rank 1 \(process \d+\) ended with exit code 3; 2 other ranks stopped after it`+
			`. Its last lines:\n  line 10\n(  line \d+\n)+  line 29$`, e.Error())
}

func TestGuilt(t *testing.T) {
	deaths := []Death{{Rank: 0, Code: comm.ExitPeer}, {Rank: 1, Code: -1, Signal: os.Kill,
		Asked: true},
		{Rank: 2, Code: 1, Asked: true}, {Rank: 3, Code: 5}, {Rank: 4, Code: -1, Signal: os.Kill}}
	slices.SortStableFunc(deaths, func(a, b Death) int { return a.guilt() - b.guilt() })
	var order []int
	for _, d := range deaths {
		order = append(order, d.Rank)
	}
	require.Equal(t, []int{4, 3, 2, 0, 1}, order)
}

func TestContextEndsTheRun(t *testing.T) {
	j, stdout, _ := job(t, "sleep", 2)
	ctx, cancel := context.WithCancelCause(t.Context())
	stopped := errors.New("somebody stopped it")
	go func() {
		stdout.await("ready", 2)
		cancel(stopped)
	}()

	err := Run(ctx, j)
	require.ErrorIs(t, err, stopped)
	require.EqualError(t, err, "launch: the run was ended: somebody stopped it")
}

func TestBadJobs(t *testing.T) {
	j, _, _ := job(t, "sleep", 2)
	j.Path = filepath.Join(t.TempDir(), "nothing")
	require.ErrorContains(t, Run(t.Context(), j), "launch: rank 0")
	j.PerNode = 0
	require.ErrorContains(t, Run(t.Context(), j), "0 processes on this host")
	j.PerNode, j.Node = 2, Node{Rank: 2, Count: 2, MasterAddr: "a", MasterPort: 1}
	require.ErrorContains(t, Run(t.Context(), j), "host 2 of 2: rank 5 of 4")
	j.Node = Node{Count: 2}
	require.ErrorContains(t, Run(t.Context(), j), "set MASTER_ADDR")
}

type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) { return 0, errors.New("disk full") }

// TestOutputThatCannotBeWritten checks that a write error doesn't terminate the processes and is
// returned at the end.
func TestOutputThatCannotBeWritten(t *testing.T) {
	j, _, stderr := job(t, "flood", 1)
	j.Stdout = fullDisk{}
	require.ErrorContains(t, Run(t.Context(), j), "disk full")
	require.NotContains(t, stderr.String(), "panic")
}
