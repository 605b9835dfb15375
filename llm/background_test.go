package llm

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestBackgroundCheckpoint wants each file that was written while a growing model went on training to be, byte for byte, the
// one that is written between steps.
func TestBackgroundCheckpoint(t *testing.T) {
	files := func(opts ...CheckpointOption) map[int][]byte {
		tr := newTrainer(t, trainerOptions{config: tiny(), steps: 11})
		path := filepath.Join(t.TempDir(), "m")
		files := map[int][]byte{}
		tr.On(Checkpoint(tr, path, 2, opts...), func(e Event) error {
			if e.Kind != Saved {
				return nil
			}
			if files[e.Step] != nil || e.Path != path {
				t.Errorf("step %d is saved twice, or to %s", e.Step, e.Path)
			}
			if later := tr.Step() > e.Step; later != (len(opts) > 0 && e.Step < e.Steps) {
				t.Errorf("step %d: its file is complete after step %d", e.Step, tr.Step())
			}
			var err error
			files[e.Step], err = os.ReadFile(path)
			return err
		})
		if err := tr.Run(context.Background()); err != nil {
			t.Fatal(err)
		}
		return files
	}
	want, got := files(), files(InBackground())
	for _, step := range []int{2, 4, 6, 8, 10, 11} {
		if len(want[step]) == 0 || !bytes.Equal(want[step], got[step]) {
			t.Errorf("step %d: %d bytes, want the %d that are written between steps", step, len(got[step]), len(want[step]))
		}
	}
}

// TestBackgroundCheckpointFails wants a file that cannot be written to end the run, also if the run ends first.
func TestBackgroundCheckpointFails(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	for _, steps := range []int{30, 2} {
		tr := newTrainer(t, trainerOptions{config: tiny(), steps: steps})
		tr.On(Checkpoint(tr, filepath.Join(file, "m"), 1, InBackground()))
		if err := tr.Run(context.Background()); err == nil || !strings.Contains(err.Error(), file) {
			t.Errorf("%d steps: got %v, want an error that names %s", steps, err, file)
		}
	}
}
