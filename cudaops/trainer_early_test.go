package cudaops_test

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/optim"
)

// TestTrainerUpdatesEarly wants a run whose early updates turn out to be of gradients that are not finite to end as one that has diverged, to
// save nothing of what they have left, and to be able to go on from its checkpoint; and the engine to be refused with a limit of the norm.
func TestTrainerUpdatesEarly(t *testing.T) {
	device, fakes := cudaops.OpenFake(t)
	engine := gpu.Engine(device, cudaops.Float32, fakes, cudaops.UpdateEarly)
	folder := t.TempDir()
	path := filepath.Join(folder, "a.safetensors")
	model, loader, optimizer := newRun(t, filepath.Join(folder, "text"), 0)
	c := llm.TrainConfig{Steps: 12, Batch: batch, Clip: 1, Epoch: 5, Schedule: optim.Constant(0), Engine: engine}
	if _, err := llm.NewTrainer(model, loader, optimizer, c); err == nil || !strings.Contains(err.Error(), "TrainConfig.Clip") {
		t.Errorf("with a limit of the norm: %v, want what sets it", err)
	}
	c.Clip = 0
	var e llm.Engine
	c.Engine = func(m *llm.Model, o optim.Optimizer, c llm.TrainConfig) (_ llm.Engine, err error) {
		e, err = engine(m, o, c)
		return e, err
	}
	tr, err := llm.NewTrainer(model, loader, optimizer, c)
	check(t, err)
	defer tr.Close()
	tr.On(func(v llm.Event) error {
		if v.Kind != llm.StepEnd || v.Step != 4 { // by when runs are replayed
			return nil
		}
		err := e.Pull()
		overflowAt('Z')(model)
		var names []string
		for _, p := range model.Params {
			names = append(names, p.Name)
		}
		return errors.Join(err, e.Push(names...))
	}, llm.Checkpoint(tr, path, 4))
	err = tr.Run(t.Context())
	if !errors.Is(err, llm.ErrDiverged) || !strings.Contains(err.Error(), "the update overflowed") || !strings.Contains(err.Error(), "value that is not finite") {
		t.Fatalf("the run ends with %v, want ErrDiverged in a value", err)
	}
	if err := model.Save(path); !errors.Is(err, llm.ErrDiverged) {
		t.Errorf("saving the model: %v, want ErrDiverged", err)
	}
	check(t, tr.Resume(path))
	if tr.Step() != 4 {
		t.Errorf("the checkpoint is of step %d, want 4", tr.Step())
	}
}
