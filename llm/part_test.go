package llm

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/state"
)

// withEMA returns a trainer with an EMA of its weights.
func withEMA(t *testing.T, o trainerOptions, decay float64) (*Trainer, *EMA) {
	t.Helper()
	tr := newTrainer(t, o)
	e, err := NewEMA(decay)
	require.NoError(t, err)
	require.NoError(t, tr.Use(e))
	return tr, e
}

// TestEMA compares averages with a float64 recursion over the weights of every step.
func TestEMA(t *testing.T) {
	const decay = 0.9
	tr, e := withEMA(t, trainerOptions{config: tiny(), steps: 12}, decay)
	_, err := e.Model()
	require.ErrorIs(t, err, errNoAverage)

	var want []float64
	tr.On(func(ev Event) error {
		if ev.Kind != StepEnd {
			return nil
		}
		now := tr.Model.Params[1].Value.Float32s()
		if want == nil {
			want = make([]float64, len(now))
			for i, x := range now {
				want[i] = float64(x)
			}
			return nil
		}
		for i, x := range now {
			want[i] = decay*want[i] + (1-decay)*float64(x)
		}
		return nil
	})

	require.NoError(t, tr.Run(t.Context()))

	m, err := e.Model()
	require.NoError(t, err)
	got := m.Params[1].Value.Float32s()
	for i := range want {
		require.InDelta(t, want[i], got[i], 1e-6)
	}

	require.Equal(t, tr.Model.Kasmina.Digest(), m.Kasmina.Digest())

	text, err := data.NewEvaluation(texttest.Words(9, 200), tokenizer.Bytes{}, 2, tr.Model.Config.Seq)
	require.NoError(t, err)
	averaged, _, err := e.Evaluate(t.Context(), text)
	require.NoError(t, err)
	trained, err := NewTrainer(m, tr.Loader, tr.Optimizer, tr.Config)
	require.NoError(t, err)
	want64, _, err := trained.Evaluate(text)
	require.NoError(t, err)
	require.NoError(t, trained.Close())
	require.Equal(t, want64, averaged)

	path := filepath.Join(t.TempDir(), "average.safetensors")
	require.NoError(t, m.Save(path))
	loaded, err := LoadModel(t.Context(), path)
	require.NoError(t, err)
	require.Equal(t, got, loaded.Params[1].Value.Float32s())
}

// TestEMAResumes checks that the average of a resumed run is bit-identical to that of an
// uninterrupted run, even if blocks are added in between.
func TestEMAResumes(t *testing.T) {
	commands := depthCommands{1: {germinate(0, blueprints.Interleave, 2)},
		2: {move(0, state.Training), move(0, state.Grafting)}}
	options := trainerOptions{config: deep(), steps: 12}
	straight, want := withEMA(t, options, 0.9)
	straight.On(commanded(straight, commands))
	require.NoError(t, straight.Run(t.Context()))
	require.Greater(t, straight.Model.Config.Layers, deep().Layers)

	for _, at := range []int{1, 3, 4, 11} {
		path := filepath.Join(t.TempDir(), "run")
		first, _ := withEMA(t, options, 0.9)
		ctx, cancel := context.WithCancel(t.Context())
		first.On(commanded(first, commands), func(e Event) error {
			if e.Kind == StepEnd && e.Step == at {
				cancel()
				return first.Save(path)
			}
			return nil
		})
		require.ErrorIs(t, first.Run(ctx), context.Canceled)

		again, got := withEMA(t, options, 0.9)
		again.On(commanded(again, commands))
		require.NoError(t, again.Resume(t.Context(), path))
		require.NoError(t, again.Run(t.Context()))
		a, err := want.Model()
		require.NoError(t, err)
		b, err := got.Model()
		require.NoError(t, err)
		require.Equal(t, a.Config, b.Config)
		for i, p := range a.Params {
			require.Equal(t, p.Value.Data(), b.Params[i].Value.Data(), "after step %d: %s", at, p.Name)
		}
	}
}

// cutLoader is a loader that fails at one of its batches.
type cutLoader struct {
	Loader
	next func() error // called before each batch
}

func (l cutLoader) Next() (data.Batch, error) {
	if err := l.next(); err != nil {
		return data.Batch{}, err
	}
	return l.Loader.Next()
}

// TestEMAResumesAfterGrowth checks that the average of a resumed run is bit-identical to that of an uninterrupted
// run if the checkpoint was saved after the model had grown for a step that failed.
func TestEMAResumesAfterGrowth(t *testing.T) {
	for name, c := range map[string]struct {
		config   Config
		commands depthCommands
	}{
		"depth": {deep(), depthCommands{2: {germinate(0, blueprints.Interleave, 2), move(0, state.Training),
			move(0, state.Grafting)}}},
		"taken back": {deep(), depthCommands{1: {germinate(0, blueprints.Interleave, 2), move(0, state.Training),
			move(0, state.Grafting)}, 2: {move(0, state.RolledBack)}}},
		"weights": {querySites(), depthCommands{2: {germinate(0, blueprints.LoRA, 2), move(0, state.Training)}}},
	} {
		t.Run(name, func(t *testing.T) {
			options := trainerOptions{config: c.config, steps: 5}
			straight, want := withEMA(t, options, 0.9)
			straight.On(commanded(straight, c.commands))
			require.NoError(t, straight.Run(t.Context()))

			first, _ := withEMA(t, options, 0.9)
			first.On(commanded(first, c.commands))
			first.Loader = cutLoader{first.Loader, answers(nil, nil, errNoMemory)}
			require.ErrorIs(t, first.Run(t.Context()), errNoMemory)
			require.Equal(t, 2, first.Step())
			path := filepath.Join(t.TempDir(), "run")
			require.NoError(t, first.Save(path))

			again, got := withEMA(t, options, 0.9)
			again.On(commanded(again, c.commands))
			require.NoError(t, again.Resume(t.Context(), path))
			require.NoError(t, again.Run(t.Context()))
			a, err := want.Model()
			require.NoError(t, err)
			b, err := got.Model()
			require.NoError(t, err)
			require.Equal(t, copies(a), copies(b))
		})
	}
}

// TestPartsDiffer checks that Resume rejects a checkpoint of a run with other parts or differently
// configured ones, and accepts it with WithNewSettings. A rejected checkpoint must change nothing.
func TestPartsDiffer(t *testing.T) {
	options := trainerOptions{config: tiny(), steps: 4}
	path := filepath.Join(t.TempDir(), "run")
	tr, _ := withEMA(t, options, 0.9)
	require.NoError(t, tr.step())
	require.NoError(t, tr.Save(path))

	plain := newTrainer(t, options)
	before := stateOf(t, plain)
	err := plain.Resume(t.Context(), path)
	require.ErrorIs(t, err, ErrSettings)
	require.ErrorContains(t, err, `the run has a part "ema"`)
	require.Equal(t, before, stateOf(t, plain))
	require.NoError(t, plain.Resume(t.Context(), path, WithNewSettings(nil)))

	other, _ := withEMA(t, options, 0.5)
	err = other.Resume(t.Context(), path)
	require.ErrorIs(t, err, ErrSettings)
	require.ErrorContains(t, err, "part ema: the decay is 0.5 here and 0.9 there")

	require.NoError(t, plain.Save(path))
	more, _ := withEMA(t, options, 0.9)
	err = more.Resume(t.Context(), path)
	require.ErrorIs(t, err, ErrSettings)
	require.ErrorContains(t, err, "part ema is new")
}

// failing is a part with hooks that fail at one step.
type failing struct {
	at            int
	before, after bool
}

var errFailing = errors.New("the part fails")

func (failing) Name() string                           { return "failing" }
func (failing) Save(*CheckpointWriter) error           { return nil }
func (failing) Load(*CheckpointReader) (func(), error) { return nil, nil }

func (f failing) PrepareStep(u Turn) error {
	if f.before && u.Last().Step == f.at {
		return errFailing
	}
	return nil
}

func (f failing) FinishStep(u Turn) error {
	if f.after && u.Last().Step == f.at {
		return errFailing
	}
	return nil
}

// TestPartsFail checks that an error before a step does not change the trainer, and that an error after
// an update requires a Resume.
func TestPartsFail(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 4})
	require.NoError(t, tr.Use(failing{at: 2, before: true}))
	err := tr.Run(t.Context())
	require.ErrorIs(t, err, errFailing)
	require.ErrorContains(t, err, "part failing")
	require.Equal(t, 2, tr.Step())
	require.NoError(t, tr.Save(filepath.Join(t.TempDir(), "run")))

	tr = newTrainer(t, trainerOptions{config: tiny(), steps: 4})
	require.NoError(t, tr.Use(failing{at: 2, after: true}))
	require.ErrorIs(t, tr.Run(t.Context()), errFailing)
	require.ErrorContains(t, tr.Save(filepath.Join(t.TempDir(), "run")), "before a Resume")
}

// TestUse checks that parts with invalid names are rejected.
func TestUse(t *testing.T) {
	tr, e := withEMA(t, trainerOptions{config: tiny(), steps: 1}, 0.5)
	require.ErrorContains(t, tr.Use(e), `a part named "ema" already`)
	require.Error(t, tr.Use(named("A")), "a capital letter")
	require.Error(t, tr.Use(named("")))
	require.Error(t, tr.Use(named("growth")), "the trainer's own")
	require.NoError(t, tr.Use(named("a-1")))
	for _, decay := range []float64{-0.1, 1, math.NaN()} {
		_, err := NewEMA(decay)
		require.Error(t, err)
	}
}

type named string

func (n named) Name() string                         { return string(n) }
func (named) Save(*CheckpointWriter) error           { return nil }
func (named) Load(*CheckpointReader) (func(), error) { return nil, nil }

// scores emits evaluations with the given losses, one after each step.
func scores(tr *Trainer, losses ...float64) Callback {
	return func(e Event) error {
		if e.Kind != StepEnd || e.Step > len(losses) {
			return nil
		}
		tr.note(func(e *Event) { e.ValLoss = losses[e.Step-1] })
		return tr.emit(EvalEnd, nil)
	}
}

// TestEarlyStopping checks that a run stops when the held-out loss has not improved often enough, even if
// the run was interrupted in between.
func TestEarlyStopping(t *testing.T) {
	losses := []float64{5, 4, 4.1, 3.99, 3.5, 3.6, 3.6, 3.6, 3}
	use := func() *Trainer {
		tr := newTrainer(t, trainerOptions{config: tiny(), steps: 20})
		s, err := NewEarlyStopping(tr, 3, 0.1)
		require.NoError(t, err)
		require.NoError(t, tr.Use(s))
		tr.On(scores(tr, losses...))
		return tr
	}

	tr := use()
	err := tr.Run(t.Context())
	require.ErrorIs(t, err, ErrStopped)
	require.ErrorContains(t, err, "3.5000")
	require.Equal(t, 8, tr.Step())

	for _, at := range []int{1, 3, 6} {
		path := filepath.Join(t.TempDir(), "run")
		first := use()
		first.On(func(e Event) error {
			if e.Kind == StepEnd && e.Step == at {
				return errors.Join(first.Save(path), first.Stop("to resume"))
			}
			return nil
		})
		require.ErrorIs(t, first.Run(t.Context()), ErrStopped)
		again := use()
		require.NoError(t, again.Resume(t.Context(), path))
		require.ErrorIs(t, again.Run(t.Context()), ErrStopped)
		require.Equal(t, 8, again.Step(), at)
	}
}

// TestBestCheckpoint checks that the file holds the best step, and that a resumed run remembers its loss.
func TestBestCheckpoint(t *testing.T) {
	path := filepath.Join(t.TempDir(), "best")
	use := func() (tr *Trainer, saved *[]int) {
		tr = newTrainer(t, trainerOptions{config: tiny(), steps: 6})
		b, err := NewBestCheckpoint(tr, path)
		require.NoError(t, err)
		require.NoError(t, tr.Use(b))
		saved = new([]int)
		tr.On(scores(tr, 5, 4, 4.5, 3, 3.5, 3.2), func(e Event) error {
			if e.Kind == Saved {
				*saved = append(*saved, e.Step)
			}
			return nil
		})
		return tr, saved
	}

	tr, saved := use()
	require.NoError(t, tr.Run(t.Context()))
	require.Equal(t, []int{1, 2, 4}, *saved)

	again, saved := use()
	require.NoError(t, again.Resume(t.Context(), path))
	require.Equal(t, 4, again.Step())
	require.NoError(t, again.Run(t.Context()))
	require.Empty(t, *saved)
}

// TestBestCheckpointThatCannotBeWritten makes the best checkpoint fail. Once the path can be written again, a later
// loss that is better than the file's must replace it, even if the failed one was better still.
func TestBestCheckpointThatCannotBeWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "folder", "best")
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 5})
	b, err := NewBestCheckpoint(tr, path)
	require.NoError(t, err)
	require.NoError(t, tr.Use(b))
	aside, blocked := filepath.Dir(path)+" aside", true
	tr.On(func(e Event) error {
		if e.Kind == StepEnd && e.Step == 2 && blocked {
			blocked = false
			require.NoError(t, os.Rename(filepath.Dir(path), aside))
			return os.WriteFile(filepath.Dir(path), nil, 0o666)
		}
		return nil
	}, scores(tr, 5, 3, 4, 4.5, 6))
	require.Error(t, tr.Run(t.Context()))
	require.Equal(t, 2, tr.Step())

	require.NoError(t, os.Remove(filepath.Dir(path)))
	require.NoError(t, os.Rename(aside, filepath.Dir(path)))
	require.NoError(t, tr.Run(t.Context()))
	again := newTrainer(t, trainerOptions{config: tiny(), steps: 5})
	require.NoError(t, again.Use(&BestCheckpoint{checkpointer: &checkpointer{t: again}}))
	require.NoError(t, again.Resume(t.Context(), path))
	require.Equal(t, 3, again.Step())
}

// TestBestCheckpointAfterGoingBack makes the best checkpoint fail at a step at which an earlier run with the same
// callback has written it. The file then holds the model of the earlier run, so its loss must remain the best one.
func TestBestCheckpointAfterGoingBack(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "folder")
	early := filepath.Join(t.TempDir(), "early")
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 2})
	b, err := NewBestCheckpoint(tr, filepath.Join(folder, "best"))
	require.NoError(t, err)
	require.NoError(t, tr.Use(b))
	again := false
	tr.On(func(e Event) error {
		switch {
		case e.Kind == StepEnd && e.Step == 1 && !again:
			return tr.Save(early)
		case e.Kind == StepEnd && e.Step == 2 && again:
			require.NoError(t, os.Rename(folder, folder+" aside"))
			return os.WriteFile(folder, nil, 0o666)
		}
		return nil
	}, scores(tr, 5, 3, 2))
	require.NoError(t, tr.Run(t.Context()))
	require.Equal(t, 3.0, b.best)

	again = true
	require.NoError(t, tr.Resume(t.Context(), early))
	require.Error(t, tr.Run(t.Context()))
	require.Equal(t, math.Inf(1), b.best) // nothing was evaluated before the checkpoint
}

// TestStopInLastStep checks that stopping has no effect once the run has made its last step.
func TestStopInLastStep(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 2})
	tr.On(func(e Event) error {
		if e.Kind == StepEnd && e.Last || e.Kind == Complete {
			return tr.Stop("too late")
		}
		return nil
	})
	require.NoError(t, tr.Run(t.Context()))
}

// TestMergeAtEndBeforeThresholds checks that a run does not fail at its end because a blueprint has only
// just entered FineTuning.
func TestMergeAtEndBeforeThresholds(t *testing.T) {
	c := tiny()
	c.Depth = 1
	m, err := NewModel(c, tensor.Float32, 1)
	require.NoError(t, err)
	depth := m.LayerAt(blueprints.Depth)
	require.NoError(t, m.Germinate(depth, 0, state.GerminationRequest{Kind: blueprints.Stack, Size: 1}))
	for _, to := range []state.Stage{state.Training, state.Grafting, state.Stabilization, state.Evaluating} {
		require.NoError(t, m.Kasmina.Do(state.Command{Action: state.Move, Layer: depth, To: to}), to)
	}
	better := make([]state.Metrics, m.Kasmina.Layers())
	better[depth].Seeds = []state.SeedMetrics{{Performance: -1, Compared: true, Without: -2, Stability: 1}}
	_, err = m.Kasmina.StepEpoch(better)
	require.NoError(t, err)
	require.NoError(t, m.Kasmina.Do(state.Command{Action: state.Move, Layer: depth, To: state.FineTuning}))

	require.NoError(t, MergeAtEnd(&Trainer{Model: m})(Event{Kind: StepEnd, Last: true}))
	require.Equal(t, state.FineTuning, m.Kasmina.Report()[depth].Seeds[0].Stage)
}

// TestMergeAtEndAfterAFailure makes a callback fail after the last step, before MergeAtEnd. The blueprint must be
// merged when the run is started again, in the same trainer or in one that resumes from the checkpoint.
func TestMergeAtEndAfterAFailure(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run")
	start := func(fail func() error) *Trainer {
		tr := newTrainer(t, frozen(false, 4))
		tr.On(func(e Event) error {
			if e.Kind == StepEnd && e.Last {
				return fail()
			}
			return nil
		}, MergeAtEnd(tr), Checkpoint(tr, path, 0))
		return tr
	}
	plant := func(tr *Trainer) {
		commands := []state.Command{{Action: state.Germinate,
			Request: state.GerminationRequest{Kind: blueprints.LoRA, Size: 2}}}
		for _, to := range []state.Stage{state.Training, state.Grafting, state.Stabilization, state.Evaluating,
			state.FineTuning} {
			commands = append(commands, state.Command{Action: state.Move, To: to})
		}
		require.NoError(t, tr.Model.Kasmina.Do(commands...))
	}

	straight := start(answers())
	plant(straight)
	require.NoError(t, straight.Run(t.Context()))
	require.Empty(t, straight.Model.Planted)

	failed := start(answers(errNoMemory))
	plant(failed)
	require.ErrorIs(t, failed.Run(t.Context()), errNoMemory)
	resumed := start(answers())
	require.NoError(t, resumed.Resume(t.Context(), path))
	for name, tr := range map[string]*Trainer{"the same trainer": failed, "another one": resumed} {
		require.NoError(t, tr.Run(t.Context()), name)
		require.Equal(t, learntBy(t, straight), learntBy(t, tr), name)
	}
}
