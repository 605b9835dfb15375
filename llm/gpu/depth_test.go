package gpu_test

import (
	"math"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// growInDepth makes a trainer's model grow in depth after step 3 and rolls the growth back after step 7. If
// folder isn't empty, a checkpoint is saved there after each step.
func growInDepth(t *testing.T, tr *llm.Trainer, folder string) {
	t.Helper()
	commands := map[int][]state.Command{
		3: {{Action: state.Germinate, Request: state.GerminationRequest{Kind: blueprints.Stack,
			Size: 2}},
			{Action: state.Move, To: state.Training}, {Action: state.Move, To: state.Grafting}},
		7: {{Action: state.Move, To: state.RolledBack}},
	}

	tr.On(func(e llm.Event) error {
		if e.Kind != llm.StepEnd {
			return nil
		}
		for _, c := range commands[e.Step] {
			c.Layer = tr.Model.Kasmina.Layers() - 1
			if err := tr.Model.Kasmina.Do(c); err != nil {
				return err
			}
		}
		if folder == "" {
			return nil
		}
		return tr.Save(checkpointAt(folder, e.Step))
	})
}

func checkpointAt(folder string, step int) string {
	return filepath.Join(folder, string(rune('a'+step))+".safetensors")
}

// depthPlan returns a run that grows in depth and is rolled back.
func depthPlan() plan {
	p := planned()
	p.steps, p.graft, p.load, p.depth = 10, 100, 0, 2 // no other seed is grafted in
	return p
}

// TestDepthOnGPU checks that a model that grows in depth and is rolled back has the same losses on a GPU
// as on a CPU.
func TestDepthOnGPU(t *testing.T) {
	device := open(t)
	for _, muon := range []bool{false, true} {
		var all [2][]float64
		for i, d := range []*cudaops.Device{nil, device} {
			tr := depthPlan().trainer(t, d, cudaops.Float32, 1, muon, state.WithEmbargo(0))
			growInDepth(t, tr, "")
			blocks := tr.Model.Config.Layers
			most := 0
			tr.On(func(e llm.Event) error { most = max(most, tr.Model.Config.Layers); return nil })
			all[i] = losses(t, tr)
			require.Equal(t, 2*blocks, most)
			require.Equal(t, blocks, tr.Model.Config.Layers)
		}
		require.Len(t, all[1], len(all[0]))
		for step, want := range all[0] {
			require.LessOrEqual(t, math.Abs(all[1][step]-want), 1e-4*want,
				"muon %v, step %d", muon, step+1)
		}
	}
}

// TestDepthResumesOnGPU grows a model in depth on a GPU in every precision. It checks that resuming
// after any step reproduces an uninterrupted run bit for bit.
func TestDepthResumesOnGPU(t *testing.T) {
	device := open(t)
	for _, precision := range []cudaops.Precision{cudaops.Float32, cudaops.BFloat16,
		cudaops.Float16, cudaops.Float8} {
		t.Run(precision.String(), func(t *testing.T) {
			p, folder := depthPlan(), t.TempDir()
			first := p.trainer(t, device, precision, 1, false, state.WithEmbargo(0))
			growInDepth(t, first, folder)
			want := losses(t, first)
			for _, step := range []int{2, 3, 4, 6, 7, 8} {
				again := p.trainer(t, device, precision, 1, false, state.WithEmbargo(0))
				growInDepth(t, again, "")
				require.NoError(t, again.Resume(t.Context(), checkpointAt(folder, step)))
				require.Equal(t, want[step:], losses(t, again), "after step %d", step)
			}
		})
	}
}
