package tensorboard_test

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/internal/eventtest"
	"github.com/kasmina-go/kasmina/llm/tensorboard"
	"github.com/kasmina-go/kasmina/state"
)

// events returns the events of a run with seeds and a sample.
func events() []llm.Event {
	all := eventtest.Run(0, 10)
	end := all[len(all)-1]
	epoch := end
	epoch.Kind = llm.EpochEnd
	epoch.Reports = []state.Report{{Seeds: []state.SeedReport{
		{Stage: state.Grafting, Alpha: 0.5, Health: state.Health{DeadRatio: 0.25}},
		{Seed: 1, Alpha: 0, Health: state.Health{DeadRatio: 0.75, Variance: math.Inf(1)}}}}}
	sample := end
	sample.Kind, sample.Text = llm.Sampled, "func <main>"
	return append(all[:len(all)-1], epoch, sample, end)
}

// reader is a Python script that prints an event file as TensorBoard reads it.
const reader = `
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
a = EventAccumulator(sys.argv[1], size_guidance={"tensors": 0, "scalars": 0, "histograms": 0})
a.Reload()
t = a.Tags()
h = a.Histograms("lattice/0/dead_ratio")[0].histogram_value
print(json.dumps({
    "scalars": {n: [[e.step, e.value] for e in a.Scalars(n)] for n in t["scalars"]},
    "histograms": t["histograms"], "texts": [e.tensor_proto.string_val[0].decode() for e in a.Tensors("sample")],
    "plugin": a.SummaryMetadata("sample").plugin_data.plugin_name,
    "dead": [h.min, h.max, h.num, h.sum, h.sum_squares, sum(h.bucket), len(h.bucket)]}))
`

// python returns a Python interpreter that has a package. It skips the test without one.
func python(t *testing.T, pack string) string {
	t.Helper()
	name := os.Getenv("KASMINA_PYTHON")
	if name == "" {
		name = "python3"
	}
	if exec.Command(name, "-c", "import "+pack).Run() != nil {
		t.Skipf("no Python with %s: set KASMINA_PYTHON to one", pack)
	}
	return name
}

// importer is a Python script that imports event files into trackio and prints the imported losses.
const importer = `
import json, sys, trackio
from trackio.sqlite_storage import SQLiteStorage
trackio.import_tf_events(sys.argv[1], "project")
run = SQLiteStorage.get_runs("project")[0]
print("\n" + json.dumps([[m["step"], m["train/loss"]] for m in SQLiteStorage.get_logs("project", run)
    if m.get("train/loss") is not None]))
`

// TestTrackio checks that trackio imports event files, without a service.
func TestTrackio(t *testing.T) {
	name := python(t, "trackio, tbparse")
	folder := t.TempDir()
	eventtest.Send(t, tensorboard.Events(folder), events()...)
	c := exec.Command(name, "-c", importer, folder)
	c.Env = append(os.Environ(), "TRACKIO_DIR="+t.TempDir())
	out, err := c.Output()
	require.NoError(t, err, string(out))
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	var read [][2]float64
	require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &read), string(out))
	require.Equal(t, losses(), read)
}

// losses returns the training losses of the events by step.
func losses() (all [][2]float64) {
	for _, e := range events() {
		if e.Kind == llm.StepEnd {
			all = append(all, [2]float64{float64(e.Step), float64(float32(e.Loss))})
		}
	}
	return all
}

// TestTensorBoard checks that TensorBoard itself reads event files.
func TestTensorBoard(t *testing.T) {
	name := python(t, "tensorboard")
	folder := t.TempDir()
	eventtest.Send(t, tensorboard.Events(folder), events()...)
	out, err := exec.Command(name, "-c", reader, folder).Output()
	require.NoError(t, err)
	var read struct {
		Scalars           map[string][][2]float64
		Histograms, Texts []string
		Plugin            string
		Dead              []float64
	}

	require.NoError(t, json.Unmarshal(out, &read), string(out))
	require.Equal(t, losses(), read.Scalars["train/loss"])
	require.NotEmpty(t, read.Scalars["validation/bits_per_byte"])
	require.Equal(t, 1.0, read.Scalars["seeds/Grafting"][0][1])
	require.Equal(t, []string{"func <main>"}, read.Texts)
	require.Equal(t, "text", read.Plugin)
	require.Contains(t, read.Histograms, "lattice/0/alpha")
	require.Equal(t, []float64{0.25, 0.75, 2, 1, 0.625, 2, 30}, read.Dead)
}

// TestRecords checks that the lengths of the records add up to the length of the file.
func TestRecords(t *testing.T) {
	folder := t.TempDir()
	write := tensorboard.Events(folder)
	eventtest.Send(t, write, events()...)
	eventtest.Send(t, write, events()...) // a second run gets its own file
	files, err := filepath.Glob(filepath.Join(folder, "*tfevents*"))
	require.NoError(t, err)
	require.Len(t, files, 2)
	for _, f := range files {
		text, err := os.ReadFile(f)
		require.NoError(t, err)
		n := 0
		for ; len(text) > 0; n++ {
			size := binary.LittleEndian.Uint64(text)
			require.LessOrEqual(t, size+16, uint64(len(text)))
			text = text[size+16:]
		}
		require.Greater(t, n, 12)
	}

	require.Error(t, tensorboard.Events("")(llm.Event{Kind: llm.RunStart}))
}
