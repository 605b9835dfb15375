package docs_test

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
)

// clusterText creates a folder of training text, and returns the options of a very short run.
func clusterText(t *testing.T) (data string, small []string) {
	t.Helper()
	data = t.TempDir()
	for i := range 12 {
		text := strings.Repeat(fmt.Sprintf("line %d of a text to learn from\n", i), 40)
		require.NoError(t, os.WriteFile(filepath.Join(data, fmt.Sprint(i, ".txt")), []byte(text),
			0o666))
	}
	return data,
		strings.Fields(
			"--dim 16 --layers 1 --heads 2 --vocab 300 --seq 16 --batch 2 --held-out 400")
}

// freePort returns a free port.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
}

// onePlain trains in one process and returns the bytes of the trained model.
func onePlain(t *testing.T, program, data string, args ...string) []byte {
	t.Helper()
	out := filepath.Join(t.TempDir(), "plain")
	c := exec.Command(program, append([]string{"train", "--preset", "small", "--device", "cpu", "--data", data,
		"--cache", t.TempDir(), "--out", out, "--accumulate", "8"}, args...)...)
	output, err := c.CombinedOutput()
	require.NoError(t, err, "%s", output)
	b, err := os.ReadFile(filepath.Join(out, "model.safetensors"))
	require.NoError(t, err)
	return b
}

// fakeSrun starts the number of processes that the script requests from Slurm, with the variables that
// srun sets. It exits with the status of the first process that fails.
const fakeSrun = `#!/bin/bash
set -e
[ "$1" = --kill-on-bad-exit=1 ] && shift
export SLURM_JOB_ID=$JOB SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$TASKS SLURM_STEP_NODELIST=localhost \
  SLURM_STEP_TASKS_PER_NODE=$TASKS SLURM_NODEID=0
pids=()
for r in $(seq 0 $((TASKS - 1))); do
  SLURM_PROCID=$r SLURM_LOCALID=$r "$@" & pids+=($!)
done
for p in "${pids[@]}"; do wait "$p"; done
`

// TestSlurmScript runs the script with a fake srun. The script trains and continues when submitted again,
// and the result is bit-identical to a single process's.
func TestSlurmScript(t *testing.T) {
	p := built(t)
	script, err := filepath.Abs("cluster/train.sbatch")
	require.NoError(t, err)
	text, err := os.ReadFile(script)
	require.NoError(t, err)
	tasks := regexp.MustCompile(`(?m)^#SBATCH --ntasks-per-node=(\d+)$`).FindSubmatch(text)
	require.NotNil(t, tasks)
	if !randtest.Long() {
		tasks[1] = []byte("2") // eight processes do the same
	}

	bin := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(bin, "srun"), []byte(fakeSrun), 0o777))
	data, small := clusterText(t)
	out, program := filepath.Join(t.TempDir(), "out"), filepath.Join(p.folder, "kasmina")
	submit := func(args ...string) string {
		c := exec.Command("bash", append([]string{script}, args...)...)
		c.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "TASKS="+string(tasks[1]),
			"PRESET=small", "PROGRAM="+program, "DATA="+data, "OUT="+out, "DEVICE=cpu",
			"JOB="+strconv.Itoa(os.Getpid())) // ranks derive their port from the job's number, so each test process has its own
		output, err := c.CombinedOutput()
		require.NoError(t, err, "%s", output)
		return string(output)
	}

	require.Contains(t, submit(append(small, "--steps", "4")...), "ranks     "+string(tasks[1])+
		" processes, according to the variables of Slurm")
	b, err := os.ReadFile(filepath.Join(out, "model.safetensors"))
	require.NoError(t, err)
	require.Equal(t, onePlain(t, program, data, append(small, "--steps", "4")...), b)
	require.Contains(t, submit(append(small, "--steps", "4")...), "finished")
}

// TestTrainJob runs the container's command from the manifest, with the environment that the Kubeflow
// runtime sets on a node.
func TestTrainJob(t *testing.T) {
	p := built(t)
	text, err := os.ReadFile("cluster/trainjob.yaml")
	require.NoError(t, err)
	field := func(name string) string {
		m := regexp.MustCompile(`(?m)^ +` + name + `: (.*)$`).FindSubmatch(text)
		require.NotNil(t, m, name)
		return string(m[1])
	}
	var program, args []string
	require.NoError(t, json.Unmarshal([]byte(field("command")), &program))
	require.NoError(t, json.Unmarshal([]byte(field("args")), &args))
	require.Equal(t, []string{"/kasmina"}, program)
	data, small := clusterText(t)
	out := filepath.Join(t.TempDir(), "out")
	for i, a := range args {
		args[i] = strings.NewReplacer("/text", data, "/runs/cluster", out, "/runs/tokens", t.TempDir(), "cuda", "cpu").Replace(a)
	}

	small = append(small, "--preset", "small", "--steps", "3")
	c := exec.Command(filepath.Join(p.folder, "kasmina"), append(args, small...)...)
	c.Env = append(os.Environ(), "PET_NNODES="+field("numNodes"), "PET_NPROC_PER_NODE="+
		field("numProcPerNode"), "PET_NODE_RANK=0",
		"PET_MASTER_ADDR=127.0.0.1", "PET_MASTER_PORT="+freePort(t))
	output, err := c.CombinedOutput()
	require.NoError(t, err, "%s", output)
	require.Contains(t, string(output), "ranks     "+field("numProcPerNode")+" processes")
	b, err := os.ReadFile(filepath.Join(out, "model.safetensors"))
	require.NoError(t, err)
	require.Equal(t, onePlain(t, filepath.Join(p.folder, "kasmina"), data, small...), b)
}

// TestGPUsOption checks that a run with --gpus is bit-identical to a single process, and that too few
// batches and an invalid number of GPUs are reported.
func TestGPUsOption(t *testing.T) {
	p := built(t)
	data, small := clusterText(t)
	program, out := filepath.Join(p.folder, "kasmina"), filepath.Join(t.TempDir(), "out")
	small = append(small, "--steps", "3")
	args := append([]string{"train", "--preset", "small", "--device", "cpu", "--data", data, "--cache", t.TempDir(),
		"--out", out, "--gpus", "3"}, small...)
	output, err := exec.Command(program, append(args, "--accumulate", "8")...).CombinedOutput()
	require.NoError(t, err, "%s", output)
	b, err := os.ReadFile(filepath.Join(out, "model.safetensors"))
	require.NoError(t, err)
	require.Equal(t, onePlain(t, program, data, small...), b)
	output, err = exec.Command(program, append(args, "--accumulate", "2")...).CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(output), "give --accumulate 3, or a multiple of it")
	output, err = exec.Command(program, append(args, "--gpus", "-1")...).CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(output), "--gpus is -1, want at least 1")
}
