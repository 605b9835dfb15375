package llm

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/safetensors"
)

// TestCheckpointNames checks that a checkpoint can be written and resumed under every name allowed by
// the file system, and that other names fail the run before its first step.
func TestCheckpointNames(t *testing.T) {
	for _, n := range []int{200, 220, 232, 233, 234, 240, 255, 256} {
		name := strings.Repeat("n", n)
		legal := os.WriteFile(filepath.Join(t.TempDir(), name), nil, 0o666) == nil
		for _, opts := range [][]CheckpointOption{nil, {OptimizerApart()}} {
			path := filepath.Join(t.TempDir(), name)
			tr := newTrainer(t, trainerOptions{config: tiny(), steps: 2})
			tr.On(Checkpoint(tr, path, 1, opts...))
			err := tr.Run(t.Context())
			if !legal {
				require.Error(t, err)
				require.Zero(t, tr.Step(), "a name of %d bytes fails after the steps", n)
				continue
			}
			require.NoError(t, err, "a name of %d bytes", n)

			again := newTrainer(t, trainerOptions{config: tiny(), steps: 2})
			require.NoError(t, again.Resume(t.Context(), path))
			entries, err := os.ReadDir(filepath.Dir(path))
			require.NoError(t, err)
			require.Len(t, entries, 1+len(opts))
		}
	}
}

// TestCheckpointReplacesCheckpoints checks that the run fails before its first step, without touching the
// file, if the checkpoint's path holds a file of another program.
func TestCheckpointReplacesCheckpoints(t *testing.T) {
	dir := t.TempDir()
	notes, tensors := filepath.Join(dir, "notes"), filepath.Join(dir, "tensors")
	require.NoError(t, os.WriteFile(notes, []byte("notes"), 0o666))
	x, err := safetensors.New("x", []int{1}, []float32{1})
	require.NoError(t, err)
	require.NoError(t, safetensors.Save(tensors, []safetensors.Tensor{x}, nil))

	for _, path := range []string{notes, tensors} {
		before, err := os.ReadFile(path)
		require.NoError(t, err)
		tr := newTrainer(t, trainerOptions{config: tiny(), steps: 2})
		tr.On(Checkpoint(tr, path, 1))
		require.ErrorContains(t, tr.Run(t.Context()), "move it away, or choose another name")
		require.Zero(t, tr.Step())
		after, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, before, after)
	}

	model := filepath.Join(dir, "model")
	for range 2 {
		tr := newTrainer(t, trainerOptions{config: tiny(), steps: 2})
		require.NoError(t, tr.Model.Save(model))
		tr.On(Checkpoint(tr, model, 1))
		require.NoError(t, tr.Run(t.Context()))
	}
}
