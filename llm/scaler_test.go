package llm

import (
	"context"
	"errors"
	"math"
	"path/filepath"
	"testing"
)

// scaling is the CPU's engine with a loss scale that counts its updates, and skips every third.
type scaling struct {
	Engine
	scale LossScale
}

func (s *scaling) LossScale() LossScale { return s.scale }

var errScale = errors.New("no such scale")

func (s *scaling) SetLossScale(l LossScale) error {
	if l.Scale < 1 {
		return errScale
	}
	s.scale = l
	return nil
}

func (s *scaling) Update() (float64, error) {
	if s.scale.Good++; s.scale.Good%3 != 0 {
		return s.Engine.Update()
	}
	s.scale.Skipped++
	return math.Inf(1), s.Drop()
}

func scale(tr *Trainer) *scaling {
	s := &scaling{tr.engine, LossScale{Scale: 1024}}
	tr.engine = s
	return s
}

// TestScaler wants a skipped update to be no error, and the loss scale to be saved and resumed; one that the engine refuses
// to leave the trainer as it was.
func TestScaler(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.safetensors")
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 7})
	s := scale(tr)
	if err := tr.Run(context.Background()); err != nil {
		t.Fatal(err)
	}
	if want := (LossScale{1024, 7, 2}); s.scale != want {
		t.Errorf("the scale is %+v, want %+v", s.scale, want)
	}
	if err := tr.Save(path); err != nil {
		t.Fatal(err)
	}
	resumed := newTrainer(t, trainerOptions{config: tiny(), steps: 7})
	into := scale(resumed)
	if err := resumed.Resume(t.Context(), path); err != nil || into.scale != s.scale {
		t.Errorf("the scale is resumed as %+v, %v, want %+v", into.scale, err, s.scale)
	}
	s.scale.Scale = 0.5
	if err := tr.Save(path); err != nil {
		t.Fatal(err)
	}
	other := newTrainer(t, trainerOptions{config: tiny(), steps: 7})
	into = scale(other)
	if err := other.Resume(t.Context(), path); !errors.Is(err, errScale) || other.Step() != 0 ||
		into.scale.Scale != 1024 {
		t.Errorf("a file with a scale that is none: %v, at step %d with scale %+v", err, other.Step(), into.scale)
	}
	// The CPU has no scale, whatever the file says.
	plain := newTrainer(t, trainerOptions{config: tiny(), steps: 7})
	if err := plain.Resume(t.Context(), path); err != nil || plain.Step() != 7 {
		t.Errorf("resumed at step %d on the CPU: %v", plain.Step(), err)
	}
}
