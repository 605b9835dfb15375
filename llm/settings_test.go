package llm

import (
	"context"
	"errors"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
)

// checkpointAt5 returns a checkpoint of step 5 of a run of 10 with the settings of newTrainer.
func checkpointAt5(t *testing.T) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "model.safetensors")
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 10})
	tr.Config.Notes = map[string]string{"flag": "a \"value\""}
	tr.On(func(e Event) error {
		if e.Kind == StepEnd && e.Step == 5 {
			return tr.Save(path)
		}
		return nil
	})
	if err := tr.Run(context.Background()); err != nil {
		t.Fatal(err)
	}
	return path
}

// abacus is the CPU's engine under another name.
type abacus struct{ Engine }

func (abacus) Name() string { return "abacus" }

// TestResumeWithOtherSettings wants each setting that decides the bits of a run to be refused by name, with both values,
// unless the caller asks for it, who is then told the same.
func TestResumeWithOtherSettings(t *testing.T) {
	path := checkpointAt5(t)
	adamW := func(opts ...optim.AdamWOption) func(*testing.T, *Trainer) {
		return func(t *testing.T, tr *Trainer) {
			o, err := optim.NewAdamW(append([]optim.AdamWOption{optim.WithLR(0.01)}, opts...)...)
			if err != nil {
				t.Fatal(err)
			}
			tr.Optimizer = o
		}
	}
	for want, change := range map[string]func(*testing.T, *Trainer){
		"Accumulate is 2 here and 1 there": func(_ *testing.T, tr *Trainer) { tr.Config.Accumulate = 2 },
		"Batch is 4 here and 3 there":      func(_ *testing.T, tr *Trainer) { tr.Config.Batch = 4 },
		"Clip is 0.5 here and 1 there":     func(_ *testing.T, tr *Trainer) { tr.Config.Clip = 0.5 },
		"Epoch is 4 here and 3 there":      func(_ *testing.T, tr *Trainer) { tr.Config.Epoch = 4 },
		"Seed is 6 here and 5 there": func(t *testing.T, tr *Trainer) {
			c := tr.Loader.Config()
			c.Seed = 6
			tr.Loader = mustLoader(t, tr.Loader.Tokens(), c)
		},
		"Engine is \"abacus\" here and \"cpu\" there": func(_ *testing.T, tr *Trainer) {
			tr.engine = abacus{tr.engine}
		},
		"learning rate of step 1 is 0.02 here and 0.01 there": func(_ *testing.T, tr *Trainer) {
			tr.Config.Schedule = optim.Constant(0.02)
		},
		"learning rate of step 8 is 0.02 here and 0.01 there": func(_ *testing.T, tr *Trainer) {
			tr.Config.Schedule = func(step int) float64 {
				if step >= 7 {
					return 0.02
				}
				return 0.01
			}
		},
		"Beta2 is 0.5 here and 0.999 there of the optimiser for model.embed_tokens.weight": adamW(optim.WithBetas(0.9, 0.5)),
		"Eps is 0.1 here and 1e-08 there":                                                  adamW(optim.WithEps(0.1)),
		"Decay is 0.2 here and 0.01 there":                                                 adamW(optim.WithWeightDecay(0.2)),
		"LRScale is 0.5 here and 1 there of the optimiser for model.norm.weight": adamW(
			optim.WithGroup(optim.NameContains("model.norm"), optim.LRScale(0.5))),
	} {
		t.Run(want, func(t *testing.T) {
			tr := newTrainer(t, trainerOptions{config: tiny(), steps: 10})
			change(t, tr)
			err := tr.Resume(t.Context(), path)
			if !errors.Is(err, ErrSettings) || !strings.Contains(err.Error(), want) {
				t.Fatalf("got %v, want ErrSettings with %q", err, want)
			}
			if tr.Step() != 0 {
				t.Errorf("the refused trainer is at step %d", tr.Step())
			}
			var told []string
			if err := tr.Resume(t.Context(), path,
				WithNewSettings(func(d []string) { told = d })); err != nil {
				t.Fatal(err)
			}
			if tr.Step() != 5 || !strings.Contains(strings.Join(told, "; "), want) {
				t.Errorf("resumed at step %d and told of %q, want 5 and %q", tr.Step(), told, want)
			}
			if s := tr.Loader.State(); s.Seed != tr.Loader.Config().Seed {
				t.Errorf("the loader goes on with seed %d, want %d", s.Seed, tr.Loader.Config().Seed)
			}
		})
	}
}

// TestResumeWithMoreSteps wants a run that has ended to go on: as if it had been planned so where nothing depends on Steps,
// and by consent where the schedule does.
func TestResumeWithMoreSteps(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.safetensors")
	cosine := func(steps int) optim.Schedule {
		s, err := optim.WarmupCosine(0.01, 0.001, 2, steps)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	for _, planned := range []bool{false, true} {
		first, straight, more := newTrainer(t, trainerOptions{config: tiny(), steps: 5}),
			newTrainer(t, trainerOptions{config: tiny(), steps: 9}), newTrainer(t, trainerOptions{config: tiny(), steps: 9})
		if planned {
			first.Config.Schedule, straight.Config.Schedule, more.Config.Schedule = cosine(5), cosine(9), cosine(9)
		}
		first.On(Checkpoint(first, path, 0))
		for _, tr := range []*Trainer{first, straight} {
			if err := tr.Run(context.Background()); err != nil {
				t.Fatal(err)
			}
		}
		err := more.Resume(t.Context(), path)
		if errors.Is(err, ErrSettings) != planned || (err != nil) != planned {
			t.Fatalf("the schedule follows Steps: %v; got %v", planned, err)
		}
		if planned {
			if err := more.Resume(t.Context(), path, WithNewSettings(nil)); err != nil {
				t.Fatal(err)
			}
		}
		if err := more.Run(context.Background()); err != nil || more.Step() != 9 {
			t.Fatalf("at step %d, %v", more.Step(), err)
		}
		if !planned {
			checkSame(t, straight, more)
		}
	}
	less := newTrainer(t, trainerOptions{config: tiny(), steps: 4})
	if err := less.Resume(t.Context(), path); err == nil || !strings.Contains(err.Error(),
		"step 5, want 0 to TrainConfig.Steps, which is 4") {
		t.Errorf("a run of 4 steps resumed at step 5: %v", err)
	}
}

func TestNotes(t *testing.T) {
	path := checkpointAt5(t)
	notes, err := ReadNotes(path)
	if want := map[string]string{"flag": "a \"value\""}; err != nil || !maps.Equal(notes, want) {
		t.Errorf("notes %v, %v, want %v", notes, err, want)
	}
	m, err := LoadModel(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	only := filepath.Join(t.TempDir(), "only.safetensors")
	if err := m.Save(only); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadNotes(only); err == nil || !strings.Contains(err.Error(), "no notes") {
		t.Errorf("a model alone: %v", err)
	}
}

// TestResumeOfACompleteRun wants a run without steps left to be evaluated, saved and sampled all the same.
func TestResumeOfACompleteRun(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.safetensors")
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 5})
	tr.On(Checkpoint(tr, path, 0))
	if err := tr.Run(context.Background()); err != nil {
		t.Fatal(err)
	}
	again := newTrainer(t, trainerOptions{config: tiny(), steps: 5})
	if err := again.Resume(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	var kinds []EventKind
	again.On(func(e Event) error { kinds = append(kinds, e.Kind); return nil }, Evaluate(again, heldOut(t, 100, 2), 0),
		Checkpoint(again, path, 0), SampleText(again, tokenizer.Bytes{}, "x", 3, sampler.Config{}, "", 0))
	if err := again.Run(context.Background()); err != nil {
		t.Fatal(err)
	}
	if want := []EventKind{RunStart, Complete, EvalEnd, Saved, Sampled, RunEnd}; !slices.Equal(kinds, want) {
		t.Errorf("events %v, want %v", kinds, want)
	}
	if !(again.Last().ValBPB > 0) {
		t.Errorf("%v bits per byte", again.Last().ValBPB)
	}
}

func heldOut(t *testing.T, n, batch int) *data.Evaluation {
	t.Helper()
	e, err := data.NewEvaluation(texttest.Words(4, n), tokenizer.Bytes{}, batch, tiny().Seq)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// TestResumeWithOtherMuon wants what sets a Muon apart from another one to be compared too.
func TestResumeWithOtherMuon(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.safetensors")
	source := newTrainer(t, trainerOptions{config: tiny(), steps: 2, optimizer: muon})
	if err := source.Save(path); err != nil {
		t.Fatal(err)
	}
	for want, opt := range map[string]optim.MuonOption{
		"Beta1 is 0.5 here and 0.95 there":        optim.WithMomentum(0.5),
		"Nesterov is false here and true there":   optim.WithNesterov(false),
		"Iterations is 7 here and 5 there":        optim.WithIterations(7),
		"Muon is false here and true there":       optim.WithAdamWFor(optim.NameContains("mlp")),
		"LRScale is 1 here and 0.5 there":         optim.WithAdamW(optim.WithLR(0.02)),
		"ShapeScale is 0.8 here and 1 there":      optim.WithScale(optim.RMSScale),
		"Decay is 0.3 here and 0 there of the op": optim.WithGroup(optim.NameContains("norm"), optim.Decay(0.3)),
	} {
		o, err := optim.NewMuon(optim.WithAdamW(optim.WithLR(0.01)), opt)
		if err != nil {
			t.Fatal(err)
		}
		tr := newTrainer(t, trainerOptions{config: tiny(), steps: 2, optimizer: muon})
		tr.Optimizer = o
		if err := tr.Resume(t.Context(), path); !errors.Is(err, ErrSettings) ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("got %.200v, want ErrSettings with %q", err, want)
		}
	}
}

// nameless is the engine of a checkpoint from before engines had names.
type nameless struct{ Engine }

func (nameless) Name() string { return "" }

// TestResumeWithoutEngine wants a checkpoint that does not say what engine computed it to go on with any.
func TestResumeWithoutEngine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.safetensors")
	old := newTrainer(t, trainerOptions{config: tiny(), steps: 2})
	old.engine = nameless{old.engine}
	if err := old.Save(path); err != nil {
		t.Fatal(err)
	}
	if err := newTrainer(t, trainerOptions{config: tiny(), steps: 2}).Resume(t.Context(),
		path); err != nil {
		t.Error(err)
	}
}
