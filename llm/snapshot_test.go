package llm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// script is a controller that gives the commands listed for each epoch.
type script map[int][]state.Command

func (s script) Decide(r []state.Report) []state.Command { return s[r[0].Epoch] }

// trialOf returns a script that plants a LoRA, puts it on trial and rolls it back.
func trialOf() script {
	move := func(to state.Stage) []state.Command {
		return []state.Command{{Action: state.Move, To: to}}
	}
	return script{
		1: {{Action: state.Germinate, Request: state.GerminationRequest{Kind: blueprints.LoRA, Size: 2}},
			{Action: state.Move, To: state.Training}},
		2: move(state.Grafting), 4: move(state.Stabilization), 5: move(state.Evaluating),
		7: move(state.RolledBack)}
}

// querySites returns the configuration of a small model with seeds on the query projections.
func querySites() Config {
	c := Config{Vocab: 256, Dim: 16, Layers: 2, Heads: 2, Seq: 12}.Default()
	c.Weights = c.WeightSites("q")
	return c
}

// growthRun is a run of a small model that grows.
type growthRun struct {
	config     Config
	steps      int
	accumulate int
	controller state.Controller // with held-out text; nil for no growth
	optimizer  optim.Optimizer  // nil for AdamW without weight decay
	engine     func(*Trainer, *Model, optim.Optimizer, TrainConfig) (Engine, error)
}

func (r growthRun) trainer(t *testing.T) *Trainer {
	t.Helper()
	o := r.optimizer
	if o == nil {
		var err error
		o, err = optim.NewAdamW(optim.WithLR(0.01), optim.WithWeightDecay(0))
		require.NoError(t, err)
	}

	base := newTrainer(t, trainerOptions{config: r.config, steps: r.steps, accumulate: r.accumulate,
		optimizer: func() (optim.Optimizer, error) { return o, nil }})
	m, err := NewModel(r.config, tensor.Float32, 7, state.WithoutGates())
	require.NoError(t, err)
	require.NoError(t, base.Close())
	c := base.Config
	c.Epoch = 2
	var tr *Trainer
	if r.engine != nil {
		c.Engine = func(m *Model, o optim.Optimizer, c TrainConfig) (Engine, error) {
			return r.engine(tr, m, o, c)
		}
	}

	tr, err = NewTrainer(m, base.Loader, o, c)
	require.NoError(t, err)
	t.Cleanup(func() { tr.Close() })
	if r.controller != nil {
		require.NoError(t, tr.Grow(Growth{Controller: r.controller, Validation: heldOut(t, 60, 2)}))
	}

	return tr
}

// saveSteps returns a callback that saves the trainer after each step to a file in a directory.
func saveSteps(tr *Trainer, dir string) Callback {
	return func(e Event) error {
		if e.Kind == StepEnd {
			return tr.Save(filepath.Join(dir, fmt.Sprint(e.Step)))
		}
		return nil
	}
}

func fileOf(t *testing.T, tr *Trainer) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, tr.Save(path))
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return b
}

// TestResumeWhileInterleaving resumes a run after each of its steps, with one Interleave committed and
// another one pending. In each of the models that such a checkpoint holds, the Kasmina layer follows a
// different block.
func TestResumeWhileInterleaving(t *testing.T) {
	c := Config{Vocab: 256, Dim: 16, Layers: 2, Heads: 2, Seq: 12, Kasmina: []int{1}, Seeds: 4, Depth: 2}
	r := growthRun{config: c.Default(), steps: 12}
	start := func() *Trainer {
		tr := r.trainer(t)
		layer := tr.Model.LayerAt(blueprints.Depth)
		free, err := state.NewLattice(2, 2, state.At(blueprints.Depth), state.WithoutGates())
		require.NoError(t, err)
		require.NoError(t, tr.Model.Kasmina.Lattice(layer).SetArrays(free.Arrays()))
		interleave := func(seed int) []state.Command {
			return []state.Command{{Action: state.Germinate, Layer: layer, Seed: seed,
				Request: state.GerminationRequest{Kind: blueprints.Interleave, Size: 2}},
				{Action: state.Move, Layer: layer, Seed: seed, To: state.Training},
				{Action: state.Move, Layer: layer, Seed: seed, To: state.Grafting}}
		}
		move := func(seed int, stages ...state.Stage) (all []state.Command) {
			for _, to := range stages {
				all = append(all, state.Command{Action: state.Move, Layer: layer, Seed: seed, To: to})
			}
			return all
		}
		commands := map[int][]state.Command{
			2: interleave(0),
			4: move(0, state.Stabilization, state.Evaluating, state.FineTuning, state.Fossilized),
			6: interleave(1), 10: move(1, state.RolledBack)}
		tr.On(func(e Event) error {
			if e.Kind == StepEnd {
				return tr.Model.Kasmina.Do(commands[e.Step]...)
			}
			return nil
		})
		return tr
	}

	dir := t.TempDir()
	whole := start()
	whole.On(saveSteps(whole, dir))
	require.NoError(t, whole.Run(t.Context()))
	want := fileOf(t, whole)
	for _, step := range randtest.Ints(t, 3, 1, r.steps-1) {
		path := filepath.Join(dir, fmt.Sprint(step))
		resumed := start()
		require.NoError(t, resumed.Resume(t.Context(), path), "step %d", step)
		require.NoError(t, resumed.Run(t.Context()))
		require.True(t, bytes.Equal(want, fileOf(t, resumed)), "resumed after step %d", step)

		m, err := LoadModel(t.Context(), path)
		require.NoError(t, err)
		other := start()
		require.NoError(t, other.Close())
		o, err := optim.NewAdamW(optim.WithLR(0.01), optim.WithWeightDecay(0))
		require.NoError(t, err)
		loaded, err := NewTrainer(m, other.Loader, o, other.Config)
		require.NoError(t, err)
		require.NoError(t, loaded.Resume(t.Context(), path), "a loaded model, step %d", step)
		require.NoError(t, loaded.Close())
	}
}

// TestResumeInTheSameTrainer returns to a checkpoint in a trainer that has grown since, and then grows
// again with another size under the same names.
func TestResumeInTheSameTrainer(t *testing.T) {
	size := 2
	r := growthRun{config: querySites(), steps: 8}
	start := func() *Trainer {
		tr := r.trainer(t)
		tr.On(func(e Event) error {
			if e.Kind == StepEnd && e.Step == 4 {
				return tr.Model.Kasmina.Do(state.Command{Action: state.Germinate,
					Request: state.GerminationRequest{Kind: blueprints.LoRA, Size: size}},
					state.Command{Action: state.Move, To: state.Training})
			}
			return nil
		})
		return tr
	}

	dir := t.TempDir()
	tr := start()
	tr.On(saveSteps(tr, dir))
	require.NoError(t, tr.Run(t.Context()))
	ended := fileOf(t, tr)
	end := filepath.Join(t.TempDir(), "end")
	require.NoError(t, os.WriteFile(end, ended, 0o666))

	size = 3
	require.NoError(t, tr.Resume(t.Context(), filepath.Join(dir, "2")))
	require.NoError(t, tr.Run(t.Context()))
	require.Len(t, tr.Model.Planted, 1)
	straight := start()
	require.NoError(t, straight.Run(t.Context()))
	require.True(t, bytes.Equal(fileOf(t, straight), fileOf(t, tr)))

	require.NoError(t, tr.Resume(t.Context(), end)) // of another size again
	require.True(t, bytes.Equal(ended, fileOf(t, tr)))
}

// TestEvaluatingIsFrozen checks that the parameters of a blueprint in Evaluating remain unchanged,
// bit for bit, even while the twin makes its steps in place of the model, and that a run resumed
// after any step saves the same final file.
func TestEvaluatingIsFrozen(t *testing.T) {
	r := growthRun{config: querySites(), steps: 14, controller: trialOf()}
	own := func(tr *Trainer) (all []float32) {
		for _, name := range []string{"kasmina.weight.0.a", "kasmina.weight.0.b"} {
			all = append(all, tr.Model.Param(name).Float32s()...)
		}
		return all
	}

	dir := t.TempDir()
	whole := r.trainer(t)
	var before []float32
	evaluating := 0
	whole.On(func(e Event) error {
		if e.Kind != StepEnd {
			return nil
		}
		stage, err := whole.Model.Kasmina.Lattice(0).Stage(0)
		require.NoError(t, err)
		if stage != state.Evaluating {
			before = nil
			return nil
		}
		if now := own(whole); before != nil {
			require.Equal(t, before, now, "step %d", e.Step)
			evaluating++
		} else {
			before = now
		}
		return nil
	}, saveSteps(whole, dir))

	require.NoError(t, whole.Run(t.Context()))
	require.Greater(t, evaluating, 2)
	want := fileOf(t, whole)
	for _, step := range randtest.Ints(t, 3, 1, r.steps-1) {
		resumed := r.trainer(t)
		require.NoError(t, resumed.Resume(t.Context(), filepath.Join(dir, fmt.Sprint(step))))
		require.NoError(t, resumed.Run(t.Context()))
		require.True(t, bytes.Equal(want, fileOf(t, resumed)), "resumed after step %d", step)
	}
}

var errNoMemory = errors.New("no memory")

// TestRollbackWithoutMemory makes a rollback fail because no engine can be created. It checks that
// the run stops, and that both the same trainer and a resumed one then end bit-identical to a run
// without the failure.
func TestRollbackWithoutMemory(t *testing.T) {
	fail := false
	r := growthRun{config: querySites(), steps: 12,
		engine: func(tr *Trainer, m *Model, o optim.Optimizer, c TrainConfig) (Engine, error) {
			if stage, _ := m.Kasmina.Lattice(0).Stage(0); fail && stage == state.RolledBack {
				fail = false
				return nil, errNoMemory
			}
			return CPUEngine()(m, o, c)
		}}

	start := func() *Trainer {
		tr := r.trainer(t)
		commands := map[int][]state.Command{
			2: {{Action: state.Germinate, Request: state.GerminationRequest{Kind: blueprints.LoRA, Size: 2}},
				{Action: state.Move, To: state.Training}},
			4: {{Action: state.Move, To: state.Grafting}, {Action: state.SetAlpha, Alpha: 0.7}},
			9: {{Action: state.Move, To: state.RolledBack}}}
		tr.On(func(e Event) error {
			if e.Kind == StepEnd {
				return tr.Model.Kasmina.Do(commands[e.Step]...)
			}
			return nil
		})
		return tr
	}

	straight := start()
	require.NoError(t, straight.Run(t.Context()))
	want := fileOf(t, straight)

	path := filepath.Join(t.TempDir(), "run")
	failed := start()
	failed.On(Checkpoint(failed, path, 0))
	fail = true
	require.ErrorIs(t, failed.Run(t.Context()), errNoMemory)
	resumed := start()
	require.NoError(t, resumed.Resume(t.Context(), path))
	for name, tr := range map[string]*Trainer{"the same trainer": failed, "another one": resumed} {
		require.NoError(t, tr.Run(t.Context()), name)
		require.True(t, bytes.Equal(want, fileOf(t, tr)), name)
	}
}

// TestTwinSurvivesARefusedPlanting puts a LoRA on trial and fails to plant a second one. The first must
// be rolled back to the model that never contained it, as if the second had not been tried.
func TestTwinSurvivesARefusedPlanting(t *testing.T) {
	r := growthRun{config: querySites(), steps: 18,
		engine: func(tr *Trainer, m *Model, o optim.Optimizer, c TrainConfig) (Engine, error) {
			if len(m.Planted) > 1 {
				return nil, errNoMemory
			}
			return CPUEngine()(m, o, c)
		}}

	end := func(controller script) []byte {
		r.controller = controller
		tr := r.trainer(t)
		require.NoError(t, tr.Run(t.Context()))
		var all bytes.Buffer
		for _, p := range tr.Model.Params {
			fmt.Fprintln(&all, p.Name, p.Value.Float32s())
		}
		return all.Bytes()
	}

	want := end(script{})
	require.Equal(t, want, end(trialOf()))
	second := trialOf()
	second[4] = append(second[4], state.Command{Action: state.Germinate, Seed: 1,
		Request: state.GerminationRequest{Kind: blueprints.LoRA, Size: 2}},
		state.Command{Action: state.Move, Seed: 1, To: state.Training})
	require.Equal(t, want, end(second))
}

// failingState is an optimizer that fails in SetState on request.
type failingState struct {
	*optim.AdamW
	fail func() bool
}

func (o *failingState) SetState(s []optim.Tensor) error {
	if o.fail != nil && o.fail() {
		return errNoMemory
	}
	return o.AdamW.SetState(s)
}

// TestOptimizerRefusesTwin makes the n-th SetState fail among the calls that end a rolled-back trial.
// The run's checkpoint, whether it was saved before or after the failure, must then hold the parameters
// and the moments of the same model, and a run resumed from it must end bit-identical to a run without the
// failure.
func TestOptimizerRefusesTwin(t *testing.T) {
	newOptimizer := func() *failingState {
		o, err := optim.NewAdamW(optim.WithLR(0.01), optim.WithWeightDecay(0))
		require.NoError(t, err)
		return &failingState{AdamW: o}
	}
	start := func() (*Trainer, *failingState) {
		o := newOptimizer()
		r := growthRun{config: querySites(), steps: 20, controller: trialOf(), optimizer: o}
		return r.trainer(t), o
	}
	steps := t.TempDir()
	straight, _ := start()
	straight.On(saveSteps(straight, steps))
	require.NoError(t, straight.Run(t.Context()))
	want := fileOf(t, straight)

	for _, n := range randtest.Ints(t, 2, 0, 3) {
		t.Run(fmt.Sprint("call ", n), func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "run")
			tr, o := start()
			calls, rolledBack := 0, false
			o.fail = func() bool {
				if !rolledBack {
					return false
				}
				calls++
				return calls == n+1
			}
			tr.On(func(e Event) error {
				if e.Kind == StepEnd {
					stage, err := tr.Model.Kasmina.Lattice(0).Stage(0)
					require.NoError(t, err)
					rolledBack = stage == state.RolledBack
				}
				return nil
			}, Checkpoint(tr, path, 5))
			err := tr.Run(t.Context())
			if calls <= n {
				require.NoError(t, err)
				return
			}
			require.ErrorIs(t, err, errNoMemory)
			resumed, _ := start()
			require.NoError(t, resumed.Resume(t.Context(), path))

			// The twin may have replaced the model before the failure, but not in part.
			before, _ := start()
			require.NoError(t, before.Resume(t.Context(), filepath.Join(steps, fmt.Sprint(resumed.Step()))))
			sameParams := slices.EqualFunc(before.Model.Params, resumed.Model.Params, func(a, b Param) bool {
				return reflect.DeepEqual(a.Value.Data(), b.Value.Data())
			})
			sameMoments := reflect.DeepEqual(before.Optimizer.State(), resumed.Optimizer.State())
			require.Equal(t, sameParams, sameMoments,
				"the checkpoint has the parameters of one model and the moments of another")

			require.NoError(t, resumed.Run(t.Context()))
			require.True(t, bytes.Equal(want, fileOf(t, resumed)))
		})
	}
}

// hooked is an engine that calls a function before the gradients of each batch.
type hooked struct {
	Engine
	before func()
}

func (e hooked) Gradients(b data.Batch) (float64, error) {
	e.before()
	return e.Engine.Gradients(b)
}

// TestInterruptedStepLeavesNothing interrupts a run between the batches of each of its steps. The
// checkpoint must equal one saved before the step, and the run must continue bit for bit.
func TestInterruptedStepLeavesNothing(t *testing.T) {
	const steps, accumulate = 12, 3
	before := func() {}
	r := growthRun{config: querySites(), steps: steps, accumulate: accumulate, controller: trialOf(),
		engine: func(tr *Trainer, m *Model, o optim.Optimizer, c TrainConfig) (Engine, error) {
			e, err := CPUEngine()(m, o, c)
			return hooked{e, func() { before() }}, err
		}}
	dir := t.TempDir()
	whole := r.trainer(t)
	whole.On(saveSteps(whole, dir))
	require.NoError(t, whole.Run(t.Context()))
	want := fileOf(t, whole)

	interrupted, some := 0, randtest.Ints(t, 4, 1, steps-1)
	for _, step := range some {
		tr := r.trainer(t)
		path := filepath.Join(dir, fmt.Sprint(step))
		require.NoError(t, tr.Resume(t.Context(), path))
		ctx, cancel := context.WithCancel(t.Context())
		batches := 0
		before = func() {
			if batches++; batches == 2 {
				cancel()
			}
		}
		if step < steps-1 {
			require.ErrorIs(t, tr.Run(ctx), context.Canceled)
		} else {
			_ = tr.Run(ctx) // the last step may have been completed
		}
		if tr.Step() == step { // a step just after growth is completed instead
			interrupted++
			saved, err := os.ReadFile(path)
			require.NoError(t, err)
			require.True(t, bytes.Equal(saved, fileOf(t, tr)), "after step %d", step)
		}
		require.NoError(t, tr.Run(t.Context()))
		require.True(t, bytes.Equal(want, fileOf(t, tr)), "interrupted after step %d", step)
	}

	require.GreaterOrEqual(t, interrupted, len(some)/2)
}

// TestNothingAfterAFailedCallback makes a callback fail with ErrDiverged at each event that precedes
// StepEnd. Callbacks must then receive no StepEnd, and Checkpoint must keep the better file.
func TestNothingAfterAFailedCallback(t *testing.T) {
	for _, kind := range []EventKind{Chosen, Reshaped, Noted, EpochEnd, StepEnd} {
		t.Run(kind.String(), func(t *testing.T) {
			r := growthRun{config: querySites(), steps: 9}
			tr := r.trainer(t)
			path := filepath.Join(t.TempDir(), "run")
			failed, step := false, 0
			var heard []string
			tr.On(func(e Event) error {
				if failed {
					heard = append(heard, e.Kind.String())
				}
				if e.Kind == StepEnd && e.Step == 2 {
					tr.Note("a note")
					return tr.Model.Kasmina.Do(state.Command{Action: state.Germinate,
						Request: state.GerminationRequest{Kind: blueprints.LoRA, Size: 2}},
						state.Command{Action: state.Move, To: state.Training})
				}
				if e.Kind == kind && (e.Step > 2 || kind == Chosen) {
					failed, step = true, e.Step
					return fmt.Errorf("enough: %w", ErrDiverged)
				}
				return nil
			}, Checkpoint(tr, path, 1))
			require.ErrorIs(t, tr.Run(t.Context()), ErrDiverged)
			require.True(t, failed)
			require.NotContains(t, heard, "StepEnd")
			require.NotContains(t, heard, "Saved")
			if step > 1 {
				again := r.trainer(t)
				require.NoError(t, again.Resume(t.Context(), path))
				require.Equal(t, step-1, again.Step())
			}
		})
	}
}

// TestResumeWhileSampling resumes a checkpoint that needs a different engine while SampleText draws
// tokens.
func TestResumeWhileSampling(t *testing.T) {
	randtest.Concurrent(t)
	c := querySites()
	c.Seq = 300
	r := growthRun{config: c, steps: 4}
	path := filepath.Join(t.TempDir(), "run")
	first := r.trainer(t)
	require.NoError(t, first.Model.Kasmina.Do(state.Command{Action: state.Germinate,
		Request: state.GerminationRequest{Kind: blueprints.LoRA, Size: 2}},
		state.Command{Action: state.Move, To: state.Training}))
	first.On(func(e Event) error {
		if e.Kind == StepEnd && e.Step == 2 {
			return first.Save(path)
		}
		return nil
	})

	require.NoError(t, first.Run(t.Context()))

	tr := r.trainer(t)
	resumed := make(chan error, 1)
	tr.On(func(e Event) error {
		if e.Kind == StepEnd && e.Step == 1 {
			go func() { resumed <- tr.Resume(t.Context(), path) }()
		}
		return nil
	}, SampleText(tr, tokenizer.Bytes{}, "the", 250, sampler.Config{Temperature: 1}, "", 1))

	require.NoError(t, tr.Run(t.Context()))
	require.NoError(t, <-resumed)
	require.Len(t, tr.Model.Planted, 1)
	require.False(t, slices.ContainsFunc(tr.Model.Params, func(p Param) bool { return p.Value == nil }))
}

// TestResumeAfterAFailedResume makes the creation of an engine fail during Resume. The trainer must
// refuse to run until another Resume succeeds, and then end bit-identical to a run without the
// failure.
func TestResumeAfterAFailedResume(t *testing.T) {
	fail := false
	r := growthRun{config: querySites(), steps: 6,
		engine: func(tr *Trainer, m *Model, o optim.Optimizer, c TrainConfig) (Engine, error) {
			if fail {
				fail = false
				return nil, errNoMemory
			}
			return CPUEngine()(m, o, c)
		}}

	path := filepath.Join(t.TempDir(), "run")
	whole := r.trainer(t)
	require.NoError(t, whole.Model.Kasmina.Do(state.Command{Action: state.Germinate,
		Request: state.GerminationRequest{Kind: blueprints.LoRA, Size: 2}},
		state.Command{Action: state.Move, To: state.Training}))
	whole.On(func(e Event) error {
		if e.Kind == StepEnd && e.Step == 2 {
			return whole.Save(path)
		}
		return nil
	})

	require.NoError(t, whole.Run(t.Context()))

	tr := r.trainer(t)
	fail = true
	require.ErrorIs(t, tr.Resume(t.Context(), path), errNoMemory)
	require.ErrorContains(t, tr.Run(t.Context()), "another Resume")
	require.NoError(t, tr.Resume(t.Context(), path))
	require.NoError(t, tr.Run(t.Context()))
	require.True(t, bytes.Equal(fileOf(t, whole), fileOf(t, tr)))
}

// TestRefusedPlantingStartsNoTrial plants, grafts and stabilizes a blueprint within one epoch, but no
// engine can be created for it. No trial must remain that would cost the run further steps.
func TestRefusedPlantingStartsNoTrial(t *testing.T) {
	move := func(to state.Stage) state.Command { return state.Command{Action: state.Move, To: to} }
	refused := false
	r := growthRun{config: querySites(), steps: 8, controller: script{
		1: {{Action: state.Germinate, Request: state.GerminationRequest{Kind: blueprints.LoRA, Size: 2}},
			move(state.Training), move(state.Grafting), move(state.Stabilization)}},
		engine: func(tr *Trainer, m *Model, o optim.Optimizer, c TrainConfig) (Engine, error) {
			if len(m.Planted) > 0 {
				refused = true
				return nil, errNoMemory
			}
			return CPUEngine()(m, o, c)
		}}

	tr := r.trainer(t)
	require.NoError(t, tr.Run(t.Context()))
	require.True(t, refused)
	require.Nil(t, tr.growth.twin)
	require.Empty(t, tr.Model.Planted)

	plain := r
	plain.controller = script{}
	other := plain.trainer(t)
	require.NoError(t, other.Run(t.Context()))
	require.Equal(t, learntBy(t, other), learntBy(t, tr))
	require.Equal(t, other.spent, tr.spent)
}

// TestTwinCannotBeUnloaded makes the trainer fail to restore its own model after the steps of a twin. The
// parameters are then the twin's, and must not be saved as the model's.
func TestTwinCannotBeUnloaded(t *testing.T) {
	o, err := optim.NewAdamW(optim.WithLR(0.01), optim.WithWeightDecay(0))
	require.NoError(t, err)
	failing := &failingState{AdamW: o}
	tr := growthRun{config: querySites(), steps: 20, controller: trialOf(), optimizer: failing}.trainer(t)
	calls := 0
	failing.fail = func() bool {
		if tr.growth.twin == nil {
			return false
		}
		calls++
		return calls == 2 // the first call sets the twin's state
	}

	require.ErrorIs(t, tr.Run(t.Context()), errNoMemory)
	require.Equal(t, 2, calls)
	require.ErrorIs(t, tr.Model.Save(filepath.Join(t.TempDir(), "model")), errNoMemory)
	require.ErrorIs(t, tr.Save(filepath.Join(t.TempDir(), "run")), errNoMemory)
}

// TestPlantingRefusedAsAnotherEnds fails to plant a LoRA at the moment when another one ends. The new one
// must be given up and the old one removed, and the run must continue.
func TestPlantingRefusedAsAnotherEnds(t *testing.T) {
	r := growthRun{config: querySites(), steps: 8,
		engine: func(tr *Trainer, m *Model, o optim.Optimizer, c TrainConfig) (Engine, error) {
			for _, p := range m.Planted {
				if p.Seed == 1 {
					return nil, errNoMemory
				}
			}
			return CPUEngine()(m, o, c)
		}}

	plant := func(seed int) []state.Command {
		return []state.Command{{Action: state.Germinate, Seed: seed,
			Request: state.GerminationRequest{Kind: blueprints.LoRA, Size: 2}},
			{Action: state.Move, Seed: seed, To: state.Training}}
	}
	tr := r.trainer(t)
	commands := map[int][]state.Command{2: plant(0),
		4: append(plant(1), state.Command{Action: state.Move, To: state.Cancelled})}
	var texts []string
	tr.On(func(e Event) error {
		if e.Kind == Reshaped {
			texts = append(texts, fmt.Sprint(e.Text, ": ", e.Err))
		}
		if e.Kind == StepEnd {
			return tr.Model.Kasmina.Do(commands[e.Step]...)
		}
		return nil
	})

	require.NoError(t, tr.Run(t.Context()))
	require.Empty(t, tr.Model.Planted)
	stage, err := tr.Model.Kasmina.Lattice(0).Stage(1)
	require.NoError(t, err)
	require.Equal(t, state.Cancelled, stage)
	require.Len(t, texts, 3, "planted, refused, removed: %v", texts)
}
