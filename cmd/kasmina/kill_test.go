//go:build unix

package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/failpoint"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm/runlog"
)

// kills is the number of runs that TestKilled and TestKilledFinetune each kill:
//
//	go test ./cmd/kasmina -run TestKilled -kills 200 -timeout 1h -v
var (
	kills = flag.Int("kills", 0, "how many times kasmina train and kasmina finetune are killed (default 2, or 10 in "+
		"long tests)")
	killTime = flag.Duration("kill-time", time.Hour, "how long TestKilled and TestKilledFinetune start further runs")
)

const (
	// aimVariable tells a process when to kill itself; see aim.
	aimVariable = "KASMINA_COMMAND_TEST_AIM"
	// shardVariable is the largest size of a file of weights.
	shardVariable = "KASMINA_COMMAND_TEST_SHARD"
)

// An aim is a moment for killing a run: some time after it has reached a failpoint for the n-th time, or
// some time after the start if there is no failpoint.
type aim struct {
	phase       string
	point, path string // path is a part of the path reported with the point
	n           int
	delay       time.Duration
	alone       string // the rank that is killed alone; "" if the processes are killed together
}

// prepareKill makes this process kill itself if the environment demands it. Unless a rank is to die
// alone, it also kills the process that started the ranks, and Linux then kills the other ranks.
func prepareKill() {
	if size, err := strconv.ParseInt(os.Getenv(shardVariable), 10, 64); err == nil {
		modelShard = size
	}

	fields := strings.Split(os.Getenv(aimVariable), "|")
	if len(fields) != 5 || slices.Contains(os.Args, "--gpus") &&
		os.Getenv("RANK") != cmp.Or(fields[4], "0") {
		return
	}

	n, err := strconv.ParseInt(fields[2], 10, 64)
	if err != nil {
		panic(err)
	}

	delay, err := time.ParseDuration(fields[3])
	if err != nil {
		panic(err)
	}

	var left atomic.Int64
	left.Store(n)
	failpoint.Set(func(point, path string) {
		if point != fields[0] || !strings.Contains(path, fields[1]) || left.Add(-1) != 0 {
			return
		}
		kill := func() { killRun(fields[4] != "") }
		if delay > 0 {
			time.AfterFunc(delay, kill)
			return
		}
		kill()
	})
}

// killRun kills this process. Unless it is to die alone, it first kills the process that started the
// ranks.
func killRun(alone bool) {
	if os.Getenv("RANK") != "" && !alone {
		_ = syscall.Kill(os.Getppid(), syscall.SIGKILL)
	}
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {} // until the signal arrives
}

// A killedRun is a command that TestKilled kills and starts again.
type killedRun struct {
	name   string
	args   []string
	merges bool
	shard  int  // bytes
	parts  bool // ranks write checkpoints in parts, which have random names
	fresh  bool // the model is trained from scratch

	tunes string // data of kasmina finetune; "" for kasmina train
}

func (r *killedRun) command(t *testing.T, out string, env ...string) *exec.Cmd {
	model := []string{"train", "--model", tiny}
	if r.fresh {
		model = append([]string{"train", "--cache", filepath.Join(filepath.Dir(out), "cache")}, freshSizes...)
	}

	if r.tunes != "" {
		args := append([]string{"finetune", "--model", tiny, "--data", r.tunes, "--out", out, "--device", "cpu",
			"--lr", "0.003", "--quiet"}, r.args...)
		c := program(t, env, args...)
		c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		return c
	}

	args := append(append(model, "--data", license, "--out", out, "--seq", "16",
		"--device", "cpu", "--lr", "0.003", "--quiet"), r.args...)
	if r.shard > 0 {
		env = append(env, shardVariable+"="+strconv.Itoa(r.shard))
	}

	c := program(t, env, args...)
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return c
}

// killedRuns are short runs of all kinds. Runs on two ranks must be bit-identical to runs on one. Runs
// with adapters have one rank, because listening to gradients is not possible with several.
func killedRuns() []*killedRun {
	plain := []string{"--steps", "12", "--batch", "1", "--accumulate", "2", "--save-every", "3",
		"--eval-every", "4"}
	grow := []string{"--steps", "100", "--batch", "1", "--accumulate", "2", "--save-every", "9",
		"--eval-every", "50", "--grow", "2"}
	adapters := []string{"--steps", "24", "--batch", "1", "--accumulate", "2", "--save-every", "5",
		"--eval-every", "12", "--adapters", "all", "--rank", "2"}
	on2 := func(args []string) []string { return append(slices.Clone(args), "--gpus", "2") }
	return []*killedRun{
		{name: "plain", args: plain},
		{name: "plain, sharded, 2 ranks", args: on2(plain), shard: 40 << 10},
		{name: "grow", args: grow},
		{name: "adapters, sharded", args: adapters, merges: true, shard: 40 << 10},
		{name: "grow, 2 ranks", args: on2(grow)},
		{name: "plain, sharded", args: plain, shard: 40 << 10},
		{name: "adapters", args: adapters, merges: true},
		{name: "from scratch", args: plain, fresh: true},
		{name: "from scratch, 2 ranks", args: on2(plain), fresh: true},
		{name: "plain, 2 ranks, parts", args: append(on2(plain), "--save-parts"), parts: true},
	}
}

// tuningRuns are short runs of kasmina finetune of all kinds, on one rank and on two.
func tuningRuns(t *testing.T) []*killedRun {
	texts, pairs := writeTuning(t, 40), writePairs(t, 40)
	common := []string{"--steps", "12", "--batch", "1", "--accumulate", "2", "--save-every", "3", "--eval-every",
		"4"}
	with := func(more ...string) []string { return append(slices.Clone(common), more...) }
	return []*killedRun{
		{name: "lora", tunes: texts, args: with("--rank", "4")},
		{name: "dora with dropout, 2 ranks", tunes: texts, args: with("--method", "dora", "--dropout", "0.1", "--rank",
			"4", "--gpus", "2")},
		{name: "nf4", tunes: texts, args: with("--rank", "4", "--base", "nf4")},
		{name: "pairs", tunes: pairs, args: with("--rank", "4")},
		{name: "full", tunes: texts, args: with("--method", "full")},
		{name: "pairs, full, 2 ranks", tunes: pairs, args: with("--method", "full", "--gpus", "2")},
		{name: "growing ranks with a budget", tunes: texts, args: with("--rank", "4", "--grow-rank", "--keep", "self",
			"--forget", "0.001")},
		{name: "lora, merged", tunes: texts, args: with("--rank", "4", "--merge")},
	}
}

// randomAim returns a random moment in a phase.
func randomAim(r *rand.Rand, phase string) aim {
	up := func(d time.Duration) time.Duration { return time.Duration(r.Int64N(int64(d))) }
	writes := []string{"file created", "file written", "file synced", "file renamed"}
	write := writes[r.IntN(len(writes))]
	a := aim{phase: phase, n: 1}
	switch phase {
	case "start":
		a.delay = 1 + up(250*time.Millisecond)
	case "claim":
		a.point, a.delay = "claimed", up(2*time.Millisecond)
		if r.IntN(2) > 0 { // while it checks whether the model can be written
			a.point, a.path, a.delay = "file created", configName, 0
		}
	case "manifest":
		a.point, a.path, a.n = write, manifestName, 1+r.IntN(3)
	case "first step":
		a.point, a.path, a.delay = "event", "RunStart", up(5*time.Millisecond)
	case "update":
		a.point, a.path, a.n, a.delay = "event", "StepEnd", 1+r.IntN(20), up(10*time.Millisecond)
	case "save":
		a.point, a.path, a.n = write, checkpointName, 1+r.IntN(8)
	case "merge":
		a.point = "merge"
		if r.IntN(2) > 0 {
			a.delay = up(3 * time.Millisecond)
		}
	case "final save":
		a.point, a.path = write, "model"
		if r.IntN(2) > 0 {
			a.path, a.n = ".kasmina-", 1+r.IntN(4)
		}
		if r.IntN(2) > 0 {
			folder := []string{"folder created", "folder filled", "folder renamed"}
			a.point, a.path, a.n = folder[r.IntN(len(folder))], "", 1
		}
	case "renames":
		a.point, a.n = "publish", 1+r.IntN(7)
		if r.IntN(4) == 0 {
			a.point, a.n = "published", 1
		}
	}

	return a
}

var killPhases = []string{"start", "claim", "manifest", "first step", "update", "save", "merge",
	"final save", "renames", "end"}

// TestKilled kills kasmina train at random moments of all phases, on one and on two ranks, and gives the
// same command again until it finishes. Each folder must then have exactly the files of a run that was
// never killed, byte for byte.
func TestKilled(t *testing.T) { testKilled(t, killedRuns()) }

// TestKilledFinetune is TestKilled for kasmina finetune.
func TestKilledFinetune(t *testing.T) { testKilled(t, tuningRuns(t)) }

func testKilled(t *testing.T, runs []*killedRun) {
	total := *kills
	if total == 0 {
		total = 2
		if randtest.Long() {
			total = 10
		}
	}

	r := rand.New(rand.NewPCG(randtest.Seed(t), 1))
	dir, began := t.TempDir(), time.Now()
	want := map[string]string{} // folders of runs without a kill
	count, finished, countBy, phases := 0, 0, map[string]int{}, map[string]int{}

	for i := r.IntN(len(runs)); count < total && time.Since(began) < *killTime; i++ {
		run := runs[i%len(runs)]
		if want[run.name] == "" {
			want[run.name] = filepath.Join(dir, strings.ReplaceAll("want "+run.name, " ", "-"))
			alone := *run
			if gpus := slices.Index(run.args, "--gpus"); gpus > 0 && !run.parts {
				alone.args = run.args[:gpus]
			}
			text, err := alone.command(t, want[run.name]).CombinedOutput()
			require.NoError(t, err, "%s: %s", run.name, text)
		}

		out := filepath.Join(dir, fmt.Sprint("killed-", count))
		var history []string
		for left := 1 + r.IntN(5); left > 0 && count < total; left-- {
			phase := run.phase(r, phases)
			a := randomAim(r, phase)
			if a.point != "" && slices.Contains(run.args, "--gpus") && r.IntN(3) == 0 {
				a.alone = strconv.Itoa(r.IntN(2))
			}
			if phase == "end" {
				// The run finishes first. The command that detects this is then killed.
				run.finish(t, out, history)
				a.delay = 1 + time.Duration(r.Int64N(int64(100*time.Millisecond)))
			}
			history = append(history, fmt.Sprintf("%+v", a))
			if run.kill(t, out, a, history) {
				count++
				phases[phase]++
				countBy["phase "+phase+", "+run.ranks()]++
				countBy["run "+run.name]++
			}
		}
		run.finish(t, out, history)
		run.sameFolder(t, want[run.name], out, history)

		// After the run has finished, the same command changes nothing.
		run.finish(t, out, history)
		run.sameFolder(t, want[run.name], out, history)
		require.NoError(t, os.RemoveAll(out))
		finished++
	}

	t.Logf("%d runs were killed %d times, and each ended with the files of a run that was never killed", finished, count)
	for _, name := range slices.Sorted(maps.Keys(countBy)) {
		t.Logf("%4d kills: %s", countBy[name], name)
	}
}

// ranks describes the number of ranks of a run.
func (r *killedRun) ranks() string {
	if slices.Contains(r.args, "--gpus") {
		return "2 ranks"
	}
	return "1 rank"
}

// phase returns a random phase among the phases with the fewest kills so far.
func (r *killedRun) phase(random *rand.Rand, kills map[string]int) string {
	phases := slices.DeleteFunc(slices.Clone(killPhases), func(p string) bool {
		return p == "merge" && !r.merges
	})
	fewest := math.MaxInt
	for _, p := range phases {
		fewest = min(fewest, kills[p])
	}
	phases = slices.DeleteFunc(phases, func(p string) bool { return kills[p] > fewest+2 })
	return phases[random.IntN(len(phases))]
}

// kill starts the command and kills it at a given moment. It returns false if the run finished before.
func (r *killedRun) kill(t *testing.T, out string, a aim, history []string) bool {
	t.Helper()
	var env []string
	if a.point != "" {
		env = []string{fmt.Sprintf("%s=%s|%s|%d|%v|%v", aimVariable, a.point, a.path, a.n,
			a.delay, a.alone)}
	}

	c := r.command(t, out, env...)
	text := &watchedOutput{}
	c.Stdout, c.Stderr = text, text
	require.NoError(t, c.Start())
	if a.point == "" {
		time.AfterFunc(a.delay, func() { _ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL) })
	}

	err := c.Wait()
	if err == nil {
		return false
	}

	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	killed := exit.Sys().(syscall.WaitStatus).Signaled()
	if a.alone != "" {
		killed = strings.Contains(text.String(), "kasmina: launch: rank "+a.alone+" ") &&
			strings.Contains(text.String(), "killed by a signal: killed")
	}

	require.True(t, killed, "%s: %v: %s\n%s", r.name, err, text, strings.Join(history, "\n"))
	return true
}

// finish gives the command again and requires it to succeed.
func (r *killedRun) finish(t *testing.T, out string, history []string) {
	t.Helper()
	text, err := r.command(t, out).CombinedOutput()
	require.NoError(t, err, "%s: %s\nafter %s", r.name, text, strings.Join(history, "\n"))
}

// sameFolder checks that two folders contain the same files with the same bytes. For the logs it compares
// the last loss of every step, and for checkpoints in parts the number of files.
func (r *killedRun) sameFolder(t *testing.T, want, got string, history []string) {
	t.Helper()
	after := r.name + " after " + strings.Join(history, "\n")
	checkpoint := runFolder + "/" + checkpointName
	names := func(dir string) (all []string) {
		for _, name := range filesIn(t, dir) {
			if part := strings.LastIndexByte(name, '-'); r.parts && part > 0 &&
				strings.HasPrefix(name, checkpoint+".") {
				name = checkpoint + " part " + name[part+1:]
			}
			all = append(all, name)
		}
		return all
	}

	require.Equal(t, names(want), names(got), after)
	for _, name := range names(want) {
		switch {
		case strings.HasSuffix(name, "/"), r.parts && strings.HasPrefix(name, checkpoint):
			continue
		case filepath.Base(name) == logName:
			require.Equal(t, lossesIn(t, filepath.Join(want, name)),
				lossesIn(t, filepath.Join(got, name)), after)
			continue
		case filepath.Base(name) == resultName:
			require.Equal(t, resultIn(t, filepath.Join(want, name)), resultIn(t, filepath.Join(got, name)), after)
			continue
		}
		x, err := os.ReadFile(filepath.Join(want, name))
		require.NoError(t, err)
		y, err := os.ReadFile(filepath.Join(got, name))
		require.NoError(t, err)
		if !slices.Equal(x, y) {
			t.Fatalf("%s differs: %s", name, after)
		}
	}
}

// resultIn returns the result of a run without its speed, its memory and its folder.
func resultIn(t *testing.T, path string) (result tuned) {
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &result))
	result.TokensPerS, result.PeakGiB, result.Out = 0, 0, ""
	return result
}

// filesIn lists everything in a folder.
func filesIn(t *testing.T, dir string) (all []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() && path == dir {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if e.IsDir() {
			name += "/"
		}
		all = append(all, name)
		return err
	}))

	return all
}

// lossesIn returns the last loss of every step in a log.
func lossesIn(t *testing.T, path string) map[int]float64 {
	t.Helper()
	losses := map[int]float64{}
	require.NoError(t, runlog.Read(path, func(r runlog.Record) {
		if r.Event == "step" && r.TrainLoss != nil {
			losses[r.Step] = float64(*r.TrainLoss)
		}
	}))
	for step, loss := range losses {
		if math.IsNaN(loss) {
			t.Fatal(errors.New("a loss is not finite"), step)
		}
	}

	return losses
}
