package llm

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

// checkpointAt5 saves a checkpoint after step 5 of a run of 10 steps with the settings of newTrainer.
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

// abacus is the CPU engine under a different name.
type abacus struct{ Engine }

func (abacus) Name() string { return "abacus" }

// TestResumeWithOtherSettings checks that a change in any setting that affects a run's results is
// rejected by name, with both values, and that a caller who accepts new settings is informed of the
// same difference.
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
		"Accumulate is 2 here and 1 there": func(_ *testing.T, tr *Trainer) {
			tr.Config.Accumulate = 2
		},
		"Batch is 4 here and 3 there":  func(_ *testing.T, tr *Trainer) { tr.Config.Batch = 4 },
		"Clip is 0.5 here and 1 there": func(_ *testing.T, tr *Trainer) { tr.Config.Clip = 0.5 },
		"Epoch is 4 here and 3 there":  func(_ *testing.T, tr *Trainer) { tr.Config.Epoch = 4 },
		"Seed is 6 here and 5 there": func(t *testing.T, tr *Trainer) {
			c := tr.Loader.Config()
			c.Seed = 6
			tr.Loader = mustLoader(t, tr.Loader.(*data.Loader).Tokens(), c)
		},
		"Engine is \"abacus\" here and \"cpu\" there": func(_ *testing.T, tr *Trainer) {
			tr.driver.engine = abacus{tr.driver.engine}
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
		"Beta2 is 0.5 here and 0.999 there for model.embed_tokens.weight": adamW(
			optim.WithBetas(0.9, 0.5)),
		"Eps is 0.1 here and 1e-08 there":  adamW(optim.WithEps(0.1)),
		"Decay is 0.2 here and 0.01 there": adamW(optim.WithWeightDecay(0.2)),
		"LRScale is 0.5 here and 1 there for model.norm.weight": adamW(
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
				t.Errorf("the loader goes on with seed %d, want %d", s.Seed,
					tr.Loader.Config().Seed)
			}
		})
	}
}

// TestResumeWithMoreSteps checks that a finished run can be extended. If nothing depends on Steps, it
// continues as if planned that way; if the schedule does, it requires consent.
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
			newTrainer(t, trainerOptions{config: tiny(), steps: 9}),
			newTrainer(t, trainerOptions{config: tiny(), steps: 9})
		if planned {
			first.Config.Schedule, straight.Config.Schedule, more.Config.Schedule = cosine(5),
				cosine(9), cosine(9)
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

// TestResumeOfACompleteRun checks that a resumed run without steps left is still evaluated, saved and
// sampled.
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
	again.On(func(e Event) error {
		kinds = append(kinds, e.Kind)
		return nil
	}, Evaluate(again, heldOut(t, 100, 2), 0),
		Checkpoint(again, path, 0), SampleText(again, tokenizer.Bytes{}, "x", 3,
			sampler.Config{}, "", 0))

	if err := again.Run(context.Background()); err != nil {
		t.Fatal(err)
	}

	if want := []EventKind{RunStart, Complete, EvalEnd, Saved, Sampled,
		RunEnd}; !slices.Equal(kinds, want) {
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

// TestResumeWithOtherMuon checks that the settings of Muon are compared too.
func TestResumeWithOtherMuon(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.safetensors")
	source := newTrainer(t, trainerOptions{config: tiny(), steps: 2, optimizer: muon})
	if err := source.Save(path); err != nil {
		t.Fatal(err)
	}

	for want, opt := range map[string]optim.MuonOption{
		"Beta1 is 0.5 here and 0.95 there":      optim.WithMomentum(0.5),
		"Nesterov is false here and true there": optim.WithNesterov(false),
		"Iterations is 7 here and 5 there":      optim.WithIterations(7),
		"Kernel is AdamW here and Muon there":   optim.WithAdamWFor(optim.NameContains("mlp")),
		"LRScale is 1 here and 0.5 there":       optim.WithAdamW(optim.WithLR(0.02)),
		"ShapeScale is 0.8 here and 1 there":    optim.WithScale(optim.RMSScale),
		"Decay is 0.3 here and 0 there for": optim.WithGroup(optim.NameContains("norm"),
			optim.Decay(0.3)),
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

// nameless simulates the engine of a checkpoint from before engines had names.
type nameless struct{ Engine }

func (nameless) Name() string { return "" }

// TestResumeWithoutEngine checks that a checkpoint that does not name its engine can be resumed with any
// engine.
func TestResumeWithoutEngine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.safetensors")
	old := newTrainer(t, trainerOptions{config: tiny(), steps: 2})
	old.driver.engine = nameless{old.driver.engine}
	if err := old.Save(path); err != nil {
		t.Fatal(err)
	}
	if err := newTrainer(t, trainerOptions{config: tiny(), steps: 2}).Resume(t.Context(),
		path); err != nil {
		t.Error(err)
	}
}

// onText returns a new trainer for the given text.
func onText(t *testing.T, name, text string) *Trainer {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o666))
	corpus, err := data.Open(path)
	require.NoError(t, err)
	tokens, err := data.Tokenize(t.Context(), corpus.Train, tokenizer.Bytes{})
	require.NoError(t, err)
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 8})
	tr.Loader, err = data.NewLoader(tokens, data.LoaderConfig{Batch: tr.Config.Batch,
		Seq: tr.Model.Config.Seq, Seed: 5})
	require.NoError(t, err)
	return tr
}

// savedOn saves a checkpoint of a run of four steps on a text.
func savedOn(t *testing.T, text string) string {
	t.Helper()
	tr := onText(t, "text", text)
	for range 4 {
		require.NoError(t, tr.step())
	}
	path := filepath.Join(t.TempDir(), "run.safetensors")
	require.NoError(t, tr.Save(path))
	return path
}

// TestResumeOnOtherText checks that a run can be resumed with the same text under another file name,
// and that different text of the same name and size is rejected without WithNewData. With that
// option, Resume must keep the parts of the run that the caller selects.
func TestResumeOnOtherText(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	one, two := strings.Repeat("all of one text. ", 60), strings.Repeat("all of two text. ", 60)
	path := savedOn(t, one)

	renamed := onText(t, "renamed", one)
	require.NoError(t, renamed.Resume(t.Context(), path))
	require.Equal(t, 4, renamed.Step())

	other := onText(t, "text", two)
	before := other.Loader.State()
	for _, opts := range [][]ResumeOption{nil, {WithNewSettings(nil)}} {
		err := other.Resume(t.Context(), path, opts...)
		require.ErrorIs(t, err, data.ErrChanged)
		require.ErrorContains(t, err, "WithNewData")
		require.Equal(t, before, other.Loader.State())
		require.Zero(t, other.Step())
	}

	for _, keep := range []Keep{{}, {Optimizer: true}, {Steps: true},
		{Optimizer: true, Steps: true}} {
		tr := onText(t, "text", two)
		require.NoError(t, tr.Resume(t.Context(), path, WithNewData(keep)), "%+v", keep)
		require.Equal(t, before, tr.Loader.State(), "%+v", keep)
		require.Equal(t, keep.Steps, tr.Step() == 4, "%+v: step %d", keep, tr.Step())
		require.Equal(t, keep.Optimizer, updates(tr.Optimizer) == 4, "%+v: %d updates", keep,
			updates(tr.Optimizer))
		require.NoError(t, tr.step())
		again := filepath.Join(t.TempDir(), "again.safetensors")
		require.NoError(t, tr.Save(again))
		require.NoError(t, onText(t, "text", two).Resume(t.Context(), again), "%+v", keep)
	}
}

// updates returns the largest number of updates recorded for a parameter in the optimizer's state.
func updates(o optim.Optimizer) (n int64) {
	for _, s := range o.State() {
		if steps, ok := s.Data.([]int64); ok {
			n = max(n, steps[0])
		}
	}
	return n
}

// TestResumeGrowth checks that a run must continue with the same growth settings unless the caller
// accepts new ones, whether Grow is called before Resume or after.
func TestResumeGrowth(t *testing.T) {
	validation := func(text string, batch int) *data.Evaluation {
		e, err := data.NewEvaluation([]byte(text), tokenizer.Bytes{}, batch, tiny().Seq)
		require.NoError(t, err)
		return e
	}
	controller := func(active int) state.Controller {
		h := control.NewHeuristic(active, 1<<20)
		h.RampEpochs = 2
		return h
	}
	text := string(texttest.Words(9, 120))
	grown := Growth{Controller: controller(4), Validation: validation(text, 2), Every: 2}
	plain := newTrainer(t, trainerOptions{config: tiny(), steps: 8})
	growing := newTrainer(t, trainerOptions{config: tiny(), steps: 8})
	require.NoError(t, growing.Grow(grown))
	paths := map[bool]string{}
	for grows, tr := range map[bool]*Trainer{false: plain, true: growing} {
		require.NoError(t, tr.step())
		paths[grows] = filepath.Join(t.TempDir(), "run.safetensors")
		require.NoError(t, tr.Save(paths[grows]))
	}

	with := func(change func(*Growth)) *Growth { g := grown; change(&g); return &g }
	for name, c := range map[string]struct {
		grew bool
		now  *Growth
		want string
	}{
		"the same":  {true, with(func(*Growth) {}), ""},
		"never":     {false, nil, ""},
		"no longer": {true, nil, "this trainer does not grow"},
		"only now":  {false, &grown, "the run did not grow"},
		"another budget": {true, with(func(g *Growth) { g.Controller = controller(5) }),
			`the controller's "MaxActive" is 5 here and 4 there`},
		"another interval": {true, with(func(g *Growth) {
			g.Every = 1
		}), "Growth.Every is 1 here and 2 there"},
		"another text": {true, with(func(g *Growth) {
			g.Validation = validation(text[1:], 2)
		}), "Growth.Validation"},
		"another batch": {true, with(func(g *Growth) {
			g.Validation = validation(text, 1)
		}), "Growth.Validation"},
		"another controller": {true, with(func(g *Growth) {
			g.Controller = otherController{}
		}), "llm.otherController"},
	} {
		for _, first := range []bool{true, false} {
			for _, accept := range []bool{false, true} {
				tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1})
				grow := func() {
					if c.now != nil {
						require.NoError(t, tr.Grow(*c.now))
					}
				}
				var opts []ResumeOption
				told := ""
				if accept {
					opts = append(opts, WithNewSettings(func(d []string) {
						told = strings.Join(d, "; ")
					}))
				}
				if first {
					grow()
				}
				err := tr.Resume(t.Context(), paths[c.grew], opts...)
				if err == nil {
					if !first {
						grow()
					}
					err = tr.Run(t.Context()) // no steps are left
				}
				if accept || c.want == "" {
					require.NoError(t, err, "%s, Grow first: %v", name, first)
					if first || c.now == nil {
						require.Contains(t, told, c.want, "%s, Grow first: %v", name, first)
					}
					continue
				}
				require.ErrorIs(t, err, ErrSettings, "%s, Grow first: %v", name, first)
				require.ErrorContains(t, err, c.want, "%s, Grow first: %v", name, first)
			}
		}
	}
}

// TestGrowthIsNotForgotten checks that a resumed run remembers its growth settings: when Grow is called a
// second time, and when it is saved again before its first step.
func TestGrowthIsNotForgotten(t *testing.T) {
	validation, err := data.NewEvaluation(texttest.Words(9, 120), tokenizer.Bytes{}, 2, tiny().Seq)
	require.NoError(t, err)
	grown := Growth{Controller: control.NewHeuristic(4, 1<<20), Validation: validation, Every: 2}
	other := Growth{Controller: control.NewHeuristic(4, 1<<20), Validation: validation, Every: 3}
	build := func(growths ...Growth) *Trainer {
		tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1})
		for _, g := range growths {
			require.NoError(t, tr.Grow(g))
		}
		return tr
	}

	dir := t.TempDir()
	path, again := filepath.Join(dir, "run.safetensors"), filepath.Join(dir, "again.safetensors")
	require.NoError(t, build(grown).Save(path))

	twice := build(grown)
	require.NoError(t, twice.Resume(t.Context(), path))
	require.NoError(t, twice.Grow(other))
	require.ErrorIs(t, twice.Run(t.Context()), ErrSettings)
	require.NoError(t, twice.Grow(grown))
	require.NoError(t, twice.Run(t.Context()))
	require.NoError(t, twice.Grow(other), "a run may change as it goes on")
	require.NoError(t, twice.Run(t.Context()))

	idle := build()
	require.NoError(t, idle.Resume(t.Context(), path))
	require.NoError(t, idle.Save(again))
	err = build(other).Resume(t.Context(), again)
	require.ErrorIs(t, err, ErrSettings)
	require.ErrorContains(t, err, "Growth.Every is 3 here and 2 there")
	require.ErrorContains(t, err, "WithNewSettings")
	require.NoError(t, build(grown).Resume(t.Context(), again))
}

type otherController struct{}

func (otherController) Decide([]state.Report) []state.Command { return nil }
