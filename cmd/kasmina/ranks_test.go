package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/comm/launch"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/hf"
)

// These variables make the test binary act as the command, make one of its ranks die, and delay the
// writing of a model.
const (
	commandVariable = "KASMINA_COMMAND_TEST"
	victimVariable  = "KASMINA_COMMAND_TEST_VICTIM"
	slowVariable    = "KASMINA_COMMAND_TEST_SLOW"
)

// shared is the folder of [sharedDir], or empty.
var shared string

// sharedDir returns a folder for files that several tests read. It is removed after the last test.
func sharedDir(t *testing.T) string {
	t.Helper()
	if shared == "" {
		dir, err := os.MkdirTemp("", "kasmina-test-")
		require.NoError(t, err)
		shared = dir
	}
	return shared
}

// TestMain acts as the command in a process that a test has started.
func TestMain(m *testing.M) {
	if os.Getenv(commandVariable) == "" {
		randtest.CollectRarely()
		randtest.OneProcessor()
		code := m.Run()
		if shared != "" {
			_ = os.RemoveAll(shared)
		}
		os.Exit(code)
	}

	if rank := os.Getenv("RANK"); rank != "" && rank == os.Getenv(victimVariable) {
		go die()
	}

	claimWait = time.Minute // the system may need long to remove a killed process
	prepareKill()
	if slow, err := time.ParseDuration(os.Getenv(slowVariable)); err == nil {
		savePretrained = func(ctx context.Context, dir string, m *llm.Model,
			opts ...hf.SaveOption) error {
			time.Sleep(slow)
			return hf.SavePretrained(ctx, dir, m, opts...)
		}
	}

	main()
}

// die kills this process once the log of the run contains a step.
func die() {
	at := slices.Index(os.Args, "--out")
	for {
		log, _ := os.ReadFile(filepath.Join(os.Args[at+1], runFolder, logName))
		if bytes.Contains(log, []byte(`"event":"step"`)) {
			self, err := os.FindProcess(os.Getpid())
			if err != nil {
				panic(err)
			}
			self.Kill()
		}
		time.Sleep(time.Millisecond)
	}
}

// placeVariables are prefixes of the variables that could make the test process believe it is one of
// several ranks.
var placeVariables = []string{"RANK=", "WORLD_SIZE=", "LOCAL_", "MASTER_", "PET_", "SLURM_",
	"OMPI_", "TORCHELASTIC_", "KASMINA_SECRET"}

// program returns the command as a process with the given environment.
func program(t *testing.T, env []string, args ...string) *exec.Cmd {
	self, err := os.Executable()
	require.NoError(t, err)
	c := exec.CommandContext(t.Context(), self, args...)
	c.Env = slices.DeleteFunc(os.Environ(), func(v string) bool {
		return slices.ContainsFunc(placeVariables, func(p string) bool {
			return strings.HasPrefix(v, p)
		})
	})
	c.Env = append(append(c.Env, commandVariable+"=1"), env...)
	return c
}

// watchedOutput collects the output of a program, so that tests can wait for it.
type watchedOutput struct {
	mu    sync.Mutex
	text  bytes.Buffer
	want  string
	found func() // is called once the text contains want
}

// Write adds to the output. When the output contains the expected text, it calls found, once.
func (w *watchedOutput) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n, err := w.text.Write(p)
	if w.found != nil && strings.Contains(w.text.String(), w.want) {
		w.found()
		w.found = nil
	}
	return n, err
}

func (w *watchedOutput) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.String()
}

// training returns the arguments of a short run.
func training(out string, more ...string) []string {
	return append([]string{"train", "--model", tiny, "--data", license, "--out", out, "--batch", "1",
		"--seq", "16", "--device", "cpu", "--accumulate", "3", "--lr", "0.003"}, more...)
}

// sameRun checks that two runs have written the same model and the same checkpoint.
func sameRun(t *testing.T, want, got string) {
	t.Helper()
	for _, name := range []string{"model.safetensors", filepath.Join(runFolder, checkpointName)} {
		a, err := os.ReadFile(filepath.Join(want, name))
		require.NoError(t, err)
		b, err := os.ReadFile(filepath.Join(got, name))
		require.NoError(t, err)
		require.True(t, bytes.Equal(a, b), "%s differs", name)
	}
}

// TestTrainGPUs checks that several processes produce the same bits as one, label their output, and can
// continue as a different number of processes after an interrupt.
func TestTrainGPUs(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("Windows does not let a process interrupt another")
	}

	dir := t.TempDir()
	alone, together := filepath.Join(dir, "alone"), filepath.Join(dir, "together")
	steps := []string{"--steps", "40", "--save-every", "0"}
	_, err := kasmina(t, training(alone, steps...)...)
	require.NoError(t, err)

	w := &watchedOutput{want: "step"}
	c := program(t, nil, training(together, append(steps, "--gpus", "2",
		"--save-parts")...)...)
	c.Stdout, c.Stderr = w, w
	w.found = func() { _ = c.Process.Signal(os.Interrupt) }
	err = c.Run()
	require.Contains(t, w.String(), "[0] ranks     2 processes, according to the variables of torchrun")
	if err == nil {
		t.Skip("all steps were done before the interrupt came")
	}

	require.Contains(t, w.String(), "give the same command again to continue")
	require.Contains(t, w.String(), "signal interrupt")
	parts, err := filepath.Glob(filepath.Join(together, runFolder, checkpointName+".*-?of2"))
	require.NoError(t, err)
	require.Len(t, parts, 2)
	out, err := program(t, nil, training(together, append(steps, "--gpus", "3",
		"--resume")...)...).CombinedOutput()
	require.NoError(t, err, string(out))
	require.NotContains(t, string(out), "[1]")
	sameRun(t, alone, together)
}

// TestAdaptersNeedOneProcess checks that adapters are rejected before several processes start to train, whether
// --gpus or a launcher starts them.
func TestAdaptersNeedOneProcess(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	args := training(out, "--steps", "2", "--adapters", "all")
	port, secret := freePort(t), "KASMINA_SECRET="+string(comm.NewSecret())
	launched := func(rank string) *exec.Cmd {
		return program(t, []string{"RANK=" + rank, "WORLD_SIZE=2", "LOCAL_RANK=" + rank, "LOCAL_WORLD_SIZE=2",
			"MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + port, secret}, args...)
	}

	other := launched("1")
	require.NoError(t, other.Start())
	first, firstErr := launched("0").CombinedOutput()
	require.Error(t, firstErr)
	require.Error(t, other.Wait())
	own, ownErr := program(t, nil, append(args, "--gpus", "2")...).CombinedOutput()
	require.Error(t, ownErr)

	for _, text := range []string{string(first), string(own)} {
		require.Contains(t, text, "--adapters needs a single process")
		require.NotContains(t, text, "TrainConfig")
	}
	require.NoDirExists(t, out)
}

// TestTrainRankDies checks that the death of a process quickly ends all processes and is named in the
// error.
func TestTrainRankDies(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	c := program(t, []string{victimVariable + "=1"}, training(out, "--gpus", "2",
		"--steps", "1000000", "--quiet")...)
	text, err := c.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(text), "kasmina: launch: rank 1 (process ")
	require.NoFileExists(t, filepath.Join(out, "config.json"))
}

// TestTrainSlowDisk checks that a run waits for rank 0 to write the model, however long this takes.
func TestTrainSlowDisk(t *testing.T) {
	alone := filepath.Join(t.TempDir(), "alone")
	_, err := kasmina(t, training(alone, "--steps", "3")...)
	require.NoError(t, err)

	// On a busy machine, other programs may delay a step for longer than a short deadline. The disk is always slower
	// than the deadline.
	for deadline := 2 * time.Second; ; deadline *= 2 {
		together := filepath.Join(t.TempDir(), "together")
		text, err := program(t, []string{slowVariable + "=" + (2 * deadline).String()},
			training(together, "--steps", "3", "--gpus", "2", "--deadline",
				deadline.String())...).CombinedOutput()
		if err != nil && deadline < time.Minute && strings.Contains(string(text), "hangs: ") {
			continue
		}
		require.NoError(t, err, string(text))
		sameRun(t, alone, together)
		return
	}
}

// freePort returns a free port.
func freePort(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
}

// TestTrainUnderLaunchers checks that the command joins the other ranks under torchrun and Slurm, and that it
// starts them on a node of Kubeflow Trainer.
func TestTrainUnderLaunchers(t *testing.T) {
	dir := t.TempDir()
	alone := filepath.Join(dir, "alone")
	_, err := kasmina(t, training(alone, "--steps", "2")...)
	require.NoError(t, err)
	port := freePort(t)
	secret := comm.SecretVariable + "=" + string(comm.NewSecret())
	for name, places := range map[string][][]string{
		"torchrun": {{"RANK=0", "LOCAL_RANK=0"}, {"RANK=1", "LOCAL_RANK=1"}},
		"Slurm": {{"SLURM_PROCID=0", "SLURM_LOCALID=0"}, {"SLURM_PROCID=1",
			"SLURM_LOCALID=1"}},
		"Kubeflow": {{"PET_NNODES=1", "PET_NODE_RANK=0", "PET_NPROC_PER_NODE=2",
			"PET_MASTER_ADDR=127.0.0.1", "PET_MASTER_PORT=" + port}},
	} {
		t.Run(name, func(t *testing.T) {
			common := []string{secret, "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + port}
			switch name {
			case "torchrun":
				common = append(common, "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2")
			case "Slurm":
				common = append(common, "SLURM_JOB_ID=7", "SLURM_STEP_ID=0", "SLURM_NODEID=0",
					"SLURM_STEP_NUM_TASKS=2", "SLURM_STEP_TASKS_PER_NODE=2")
			default:
				common = common[:1]
			}
			out := filepath.Join(dir, name)
			var wait sync.WaitGroup
			errs := make([]error, len(places))
			for i, place := range places {
				c := program(t, append(place, common...), training(out, "--steps", "2")...)
				w := &watchedOutput{}
				c.Stdout, c.Stderr = w, w
				wait.Go(func() {
					if err := c.Run(); err != nil {
						errs[i] = fmt.Errorf("process %d: %w: %s", i, err, w)
					}
				})
			}
			wait.Wait()
			for _, err := range errs {
				require.NoError(t, err)
			}
			sameRun(t, alone, out)
		})
	}
}

// jobOf returns the job of a command line. Commands that start no processes, and invalid command lines, have
// none.
func jobOf(args []string) (job *launch.Job, err error) {
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(io.Discard)
	for _, c := range root.Commands() {
		c.RunE = func(c *cobra.Command, _ []string) error {
			if saves(c) {
				job, err = ranksJob(c, args)
			}
			return nil
		}
	}
	_ = root.Execute() // the errors of invalid command lines have tests of their own
	return job, err
}

// TestRanksJob checks that no processes are started under another launcher, and that mistakes are
// reported once.
func TestRanksJob(t *testing.T) {
	for _, v := range os.Environ() {
		for _, p := range placeVariables {
			if name, _, _ := strings.Cut(v, "="); strings.HasPrefix(v, p) {
				t.Setenv(name, "")
			}
		}
	}

	for _, args := range []string{"", "eval --gpus 2", "train --gpus 1", "train --gpus -1",
		"train --gpus x", "train --help --gpus 2", "train -h --gpus 2", "no --gpus 2",
		"train --gpus 2", "train -m x -d y -o z --gpus 2 w", "train -model x -d y -o z --gpus 2"} {
		job, err := jobOf(strings.Fields(args))
		require.NoError(t, err, args)
		require.Nil(t, job, args)
	}

	job, err := jobOf(training("x", "--gpus", "2"))
	require.NoError(t, err)
	require.Equal(t, 2, job.PerNode)
	require.Equal(t, training("x", "--gpus", "2"), job.Args)
	_, err = jobOf(training("x", "--gpus", "3", "--accumulate", "2"))
	require.EqualError(t, err, "--gpus: with --accumulate 2, a step leaves nothing to do for some of 3 processes: give "+
		"--accumulate 3, or a multiple of it")
	_, err = jobOf(strings.Fields("finetune -m x -d y -o z --gpus 2 --grow-rank"))
	require.ErrorIs(t, err, errGrowRankProcesses)
	_, err = kasmina(t, training("x", "--gpus", "-1")...)
	require.ErrorContains(t, err, "--gpus is -1")
	for name, value := range map[string]string{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
		"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2",
		"MASTER_ADDR": "127.0.0.1"} {
		t.Setenv(name, value)
	}

	_, err = jobOf(training("x", "--gpus", "2"))
	require.ErrorContains(t, err, "Slurm has already started the processes")
	_, err = kasmina(t, training("x")...)
	require.ErrorContains(t, err, "environment of Slurm: no usable secret")
	require.ErrorContains(t, err, "KASMINA_SECRET")
	t.Setenv(comm.SecretVariable, string(comm.NewSecret()))
	_, err = kasmina(t, training("x", "--accumulate", "1")...)
	require.ErrorContains(t, err, "accumulate 2")
}

// TestPartsAreChecked checks that the run ends before the first step if a rank cannot write its part of a
// checkpoint.
func TestPartsAreChecked(t *testing.T) {
	outs := []string{filepath.Join(t.TempDir(), "out"), filepath.Join(t.TempDir(), "out")}
	require.NoError(t, os.MkdirAll(outs[1], 0o777))
	require.NoError(t, os.WriteFile(filepath.Join(outs[1], runFolder), nil, 0o666))
	texts := ranksOf(t, outs, "--steps", "3", "--save-parts")
	require.Contains(t, texts[1], "the part of this rank")
	log, err := os.ReadFile(filepath.Join(outs[0], runFolder, logName))
	if err == nil {
		require.NotContains(t, string(log), `"event":"step"`)
	}
}

// ranksOf runs a failing training of two processes, each with its own folder, and returns their output.
func ranksOf(t *testing.T, outs []string, more ...string) []string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := l.Addr().(*net.TCPAddr).Port
	require.NoError(t, l.Close())

	secret := comm.SecretVariable + "=" + string(comm.NewSecret())
	var group sync.WaitGroup
	texts := make([]string, len(outs))
	for rank, out := range outs {
		env := []string{"RANK=" + strconv.Itoa(rank), "WORLD_SIZE=2", "LOCAL_RANK=" + strconv.Itoa(rank),
			"LOCAL_WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + strconv.Itoa(port),
			secret}
		group.Go(func() {
			text, err := program(t, env, training(out, more...)...).CombinedOutput()
			texts[rank] = string(text)
			if err == nil {
				t.Errorf("rank %d has succeeded: %s", rank, text)
			}
		})
	}

	group.Wait()
	return texts
}
