package llm

import (
	"context"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/optim"
)

// TestDivergedIsNotSaved saves after every step, breaks the model in different ways after step 5, and wants an error and
// the checkpoint of the last good step.
func TestDivergedIsNotSaved(t *testing.T) {
	const name = "model.layers.1.mlp.up_proj.weight"
	at5 := func(f func(*Trainer) error) func(*Trainer) {
		return func(tr *Trainer) {
			tr.On(func(e Event) error {
				if e.Kind == StepEnd && e.Step == 5 {
					return f(tr)
				}
				return nil
			})
		}
	}
	overflow := func(tr *Trainer) {
		tr.Config.Schedule = func(step int) float64 {
			if step == 4 {
				return 1e39
			}
			return 0.01
		}
	}
	for what, c := range map[string]struct {
		steps    int
		breaking func(*Trainer)
		words    string
	}{
		"an update that overflows":              {10, overflow, "step 5|the update overflowed|value|model."},
		"an update that overflows at the end":   {5, overflow, "step 5|the update overflowed"},
		"a parameter that another callback set": {5, at5(func(tr *Trainer) error { tr.Model.Param(name).Float32s()[17] = float32(math.Inf(-1)); return nil }), name},
		"parameters that make the loss overflow": {5, at5(func(tr *Trainer) error {
			x := tr.Model.Param(embedName).Float32s()
			for i := range x {
				x[i] = 3e38
			}
			return nil
		}), "the loss is"},
		"a moment that overflowed": {5, at5(func(tr *Trainer) error {
			tr.Optimizer = overflown{tr.Optimizer, name + ".exp_avg_sq"}
			return nil
		}), name + ".exp_avg_sq"},
	} {
		t.Run(what, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "m.safetensors")
			tr := newTrainer(t, trainerOptions{config: tiny(), steps: c.steps})
			c.breaking(tr)
			tr.On(Checkpoint(tr, path, 1))
			err := tr.Run(context.Background())
			if !errors.Is(err, ErrDiverged) {
				t.Fatalf("got %v, want ErrDiverged", err)
			}
			for _, word := range strings.Split(c.words, "|") {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("error %q does not say %q", err, word)
				}
			}
			again := newTrainer(t, trainerOptions{config: tiny(), steps: 10})
			if err := again.Resume(t.Context(), path, WithNewSettings(nil)); err != nil ||
				again.Step() != 4 {
				t.Errorf("the checkpoint gives step %d, %v, want 4", again.Step(), err)
			}
		})
	}
}

// overflown is an optimiser in whose state an element has become infinite, as a square of a large
// gradient does.
type overflown struct {
	optim.Optimizer
	moment string
}

func (o overflown) State() []optim.Tensor {
	state := o.Optimizer.State()
	for _, x := range state {
		if x.Name == o.moment {
			x.Data.([]float32)[3] = float32(math.Inf(1))
		}
	}
	return state
}

// unchecked is an engine whose fifth step makes its update before it finds that the gradients are not finite.
type unchecked struct {
	Engine
	steps  int
	poison func() // what the update does to the parameters
}

func (u *unchecked) Step(b data.Batch) (loss, norm float64, err error) {
	if loss, err = u.Gradients(b); err != nil {
		return loss, 0, err
	}
	norm, err = u.Update()
	if u.steps++; err == nil && u.steps == 5 {
		u.poison()
		norm, err = math.Inf(1), fmt.Errorf("%w: the norm was +Inf", ErrOverflow)
	}
	return loss, norm, err
}

// TestUpdateOverflowed wants a run to end as one that has diverged where parameters have been updated with gradients that are not finite, the
// checkpoint before to stay, and the trainer to do nothing with these parameters, also if they are all finite, until it goes on from the
// checkpoint.
func TestUpdateOverflowed(t *testing.T) {
	for what, value := range map[string]float32{"a parameter that is not finite": float32(math.NaN()), "finite parameters": 0.5} {
		t.Run(what, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "m.safetensors")
			tr := newTrainer(t, trainerOptions{config: tiny(), steps: 7})
			tr.engine = &unchecked{tr.engine, 0, func() { tr.Model.Param(normName).Float32s()[2] = value }}
			tr.On(Checkpoint(tr, path, 2))
			err := tr.Run(t.Context())
			if !errors.Is(err, ErrDiverged) || tr.Step() != 4 {
				t.Fatalf("got %v at step %d, want ErrDiverged at 4", err, tr.Step())
			}
			for _, word := range []string{"step 5", "the update overflowed: the norm was +Inf", "resume from the last checkpoint"} {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("error %q does not say %q", err, word)
				}
			}
			if named := strings.Contains(err.Error(), normName); named != (value != value) {
				t.Errorf("error %q names the parameter: %v", err, named)
			}
			for name, f := range map[string]func() error{
				"Run":      func() error { return tr.Run(t.Context()) },
				"Save":     func() error { return tr.Save(path) },
				"Evaluate": func() error { _, _, err := tr.Evaluate(heldOut(t, 50, 1)); return err },
			} {
				if err := f(); !errors.Is(err, ErrDiverged) || !strings.Contains(err.Error(), "before a Resume") {
					t.Errorf("%s: got %v, want ErrDiverged and what to do", name, err)
				}
			}
			if err := tr.Model.Save(path); !errors.Is(err, ErrDiverged) {
				t.Errorf("Model.Save: got %v, want ErrDiverged", err)
			}
			if err := tr.Resume(t.Context(), path); err != nil || tr.Step() != 4 {
				t.Fatalf("the checkpoint gives step %d, %v, want 4", tr.Step(), err)
			}
			if err := tr.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
			straight := newTrainer(t, trainerOptions{config: tiny(), steps: 7})
			if err := straight.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
			checkSame(t, straight, tr)
		})
	}
}

func TestEvaluateDiverged(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 5})
	tr.Model.Param(normName).Float32s()[2] = float32(math.NaN())
	if _, _, err := tr.Evaluate(heldOut(t, 50, 1)); !errors.Is(err, ErrDiverged) || !strings.Contains(err.Error(), normName) {
		t.Errorf("got %v, want ErrDiverged in %s", err, normName)
	}
	if err := tr.Model.Save(filepath.Join(t.TempDir(), "m")); !errors.Is(err, ErrDiverged) {
		t.Errorf("Model.Save: got %v, want ErrDiverged", err)
	}
}
