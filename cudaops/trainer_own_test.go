package cudaops_test

import (
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// trainersKind is a registered blueprint, which has no kernel.
var trainersKind = sync.OnceValues(func() (blueprints.Kind, error) {
	b, err := blueprints.Lookup(blueprints.ConvFilter)
	if err != nil {
		return 0, err
	}
	own := *b
	own.Name = "trainer test's own"
	return blueprints.Register(own)
})

// TestTrainerOwnKind wants a run in which a registered kind germinates, trains, grafts and goes to
// have the losses on a GPU that it has on a CPU.
func TestTrainerOwnKind(t *testing.T) {
	kind, err := trainersKind()
	require.NoError(t, err)
	life := map[int][]state.Command{
		2: {{Action: state.Germinate, Request: state.GerminationRequest{Slot: 3, Kind: kind}}, {Action: state.Move, To: state.Training}},
		5: {{Action: state.Move, To: state.Grafting}, {Action: state.SetAlpha, Alpha: 0.75}},
		8: {{Action: state.Move, To: state.RolledBack}},
	}
	losses := func(engine func(*llm.Model, optim.Optimizer, llm.TrainConfig) (llm.Engine, error)) (all []float64) {
		model, loader, optimizer := newRun(t, filepath.Join(t.TempDir(), "text"), 0)
		c := llm.TrainConfig{Steps: 12, Batch: batch, Clip: 1, Epoch: 5, Schedule: optim.Constant(0.02), Engine: engine}
		tr, err := llm.NewTrainer(model, loader, optimizer, c)
		require.NoError(t, err)
		tr.On(func(e llm.Event) error {
			if e.Kind != llm.StepEnd {
				return nil
			}
			all = append(all, e.Loss)
			var commands []state.Command
			for _, command := range life[e.Step] {
				command.Seed = 3
				commands = append(commands, command)
			}
			return model.Kasmina.Do(commands...)
		})
		require.NoError(t, tr.Run(t.Context()))
		require.NoError(t, tr.Close())
		return all
	}
	device, fakes := cudaops.OpenFake(t)
	want, got := losses(nil), losses(gpu.Engine(device, cudaops.Float32, fakes))
	require.InDeltaSlice(t, want, got, 1e-4)
	require.Len(t, got, 12)
}
