package gpu_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/state"
)

// schedule lists the commands for seed 7 of each layer after a step. The trainer's own schedule handles
// the other seeds.
var schedule = map[int][]state.Command{
	1: {{Action: state.Germinate, Request: state.GerminationRequest{Slot: 8,
		Kind: blueprints.LowRank}}, {Action: state.Move, To: state.Training}},
	3: {{Action: state.Move, To: state.Grafting}, {Action: state.SetAlpha, Alpha: 0.75}},
	6: {{Action: state.Move, To: state.Stabilization}, {Action: state.Move, To: state.Evaluating}},
	8: {{Action: state.Move, To: state.RolledBack}},
	9: {{Action: state.Recycle}, {Action: state.Germinate,
		Request: state.GerminationRequest{Slot: 8, Kind: blueprints.ChunkMLP}}},
	10: {{Action: state.Move, To: state.Training}},
	11: {{Action: state.Move, To: state.Grafting}, {Action: state.SetAlpha, Alpha: 1}},
}

// pace returns the number of steps of the schedule that pass during one step of a run. In short mode the
// entire schedule fits in three of the four steps.
func pace() int {
	if testing.Short() {
		return 4
	}
	return 1
}

// runSchedule returns the losses of a run under the schedule, and by how much the model's final loss
// increases without seed 7 of the last layer.
func runSchedule(t *testing.T, device *cudaops.Device) (all []float64, worth float64) {
	t.Helper()
	tr := newTrainer(t, device, cudaops.Float32, 1, false, state.WithEmbargo(0))
	text := must[*data.Evaluation](t)(data.NewEvaluation([]byte("func main() { return }\n"),
		tokenizer.Bytes{}, 2, tr.Model.Config.Seq))
	tr.On(func(e llm.Event) error {
		var commands []state.Command
		for layer := range tr.Model.Kasmina.Layers() {
			for step := pace() * (e.Step - 1); step < pace()*e.Step; step++ {
				for _, c := range schedule[step+1] {
					c.Layer, c.Seed = layer, 7
					commands = append(commands, c)
				}
			}
		}
		if e.Kind != llm.StepEnd {
			return nil
		}
		return tr.Model.Kasmina.Do(commands...)
	})

	all = losses(t, tr)
	for _, muted := range []bool{true, false} {
		require.NoError(t, tr.Model.Kasmina.Lattice(tr.Model.Kasmina.Layers()-1).Mute(7, muted))
		loss, _, err := tr.Evaluate(text)
		require.NoError(t, err)
		worth = loss - worth
	}

	return all, -worth
}

// TestSameSchedule checks that a schedule of commands that includes a rollback gives the same losses on
// CPU and GPU, and that muting a seed makes the same difference.
func TestSameSchedule(t *testing.T) {
	device := open(t)
	want, worth := runSchedule(t, nil)
	got, gpuWorth := runSchedule(t, device)
	requireClose(t, want, got, 1e-4)
	require.NotZero(t, worth)
	require.InDelta(t, worth, gpuWorth, 1e-3*math.Abs(worth)+1e-4, "worth of seed 7")
}
