package llm

import (
	"context"
	"errors"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// replanting is a controller that plants a LoRA, blends it in and removes it again, over and over, so
// that the model's parameters and its engine keep changing.
type replanting struct{ layer int }

func (c replanting) Decide(reports []state.Report) []state.Command {
	do := func(action state.Action, to state.Stage) []state.Command {
		return []state.Command{{Action: action, Layer: c.layer, To: to,
			Request: state.GerminationRequest{Kind: blueprints.LoRA, Size: 2}}}
	}
	switch reports[c.layer].Seeds[0].Stage {
	case state.Dormant:
		return append(do(state.Germinate, 0), do(state.Move, state.Training)...)
	case state.Training:
		return do(state.Move, state.Grafting)
	case state.Grafting:
		return do(state.Move, state.RolledBack)
	}

	return do(state.Recycle, 0)
}

// TestConcurrentCallsWhileGrowing makes all calls that are allowed from other goroutines while a run keeps
// replacing its parameters and its engine. The race detector finds calls that do not lock the model.
func TestConcurrentCallsWhileGrowing(t *testing.T) {
	randtest.Concurrent(t)
	c := tiny()
	c.Weights = c.WeightSites("q")
	m, err := NewModel(c, tensor.Float32, 7, state.WithoutGates(), state.WithEmbargo(0))
	require.NoError(t, err)
	options := trainerOptions{config: c, steps: 1 << 30}
	other := newTrainer(t, options)
	require.NoError(t, other.Close())
	config := other.Config
	config.Epoch = 1
	tr, err := NewTrainer(m, other.Loader, other.Optimizer, config)
	require.NoError(t, err)
	t.Cleanup(func() { tr.Close() })

	text := heldOut(t, 40, 1)
	layer := m.LayerAt(blueprints.Weight)
	require.NoError(t, tr.Grow(Growth{Controller: replanting{layer}, Validation: text,
		Refused: func(state.Command, error) {}}))
	const enough = 4 // reshapes
	reshaped, often := 0, make(chan struct{})
	dir := t.TempDir()
	checkpoint := filepath.Join(dir, "checkpoint")
	require.NoError(t, tr.Save(checkpoint))
	tr.On(func(e Event) error {
		if e.Kind == Reshaped {
			if reshaped++; reshaped == enough {
				close(often)
			}
		}
		return nil
	}, SampleText(tr, tokenizer.Bytes{}, "the", 4, sampler.Config{Temperature: 1}, "", 1))

	check := func(err error) {
		if err != nil {
			t.Error(err)
		}
	}
	calls := map[string]func(){
		"Evaluate": func() {
			_, _, err := tr.Evaluate(text)
			check(err)
		},
		"Save":       func() { check(tr.Save(filepath.Join(dir, "save"))) },
		"SaveParts":  func() { check(tr.SaveParts(filepath.Join(dir, "parts"))) },
		"Model.Save": func() { check(m.Save(filepath.Join(dir, "model"))) },
		"Resume":     func() { check(tr.Resume(t.Context(), checkpoint)) },
		"Steer": func() {
			tr.Steer(state.Command{Action: state.SetAlpha, Layer: layer, Alpha: 0.5})
			tr.Note("a note")
			_ = tr.SaveSoon()
		},
		"Submit": func() { m.Kasmina.Submit(state.Command{Action: state.SetAlpha, Layer: layer, Alpha: 0.5}) },
		"SaveBlueprint": func() {
			_ = m.SaveBlueprint(filepath.Join(dir, "blueprint"), 0, 0) // it has no blueprint
			_, _ = m.ReadBlueprint(filepath.Join(dir, "blueprint"), 0, 0)
		},
		"NewGenerator": func() {
			g, err := NewGenerator(m)
			check(err)
			s, err := sampler.New(sampler.Config{Temperature: 1})
			check(err)
			for _, err := range g.Generate(context.Background(), []int{1, 2}, 2, s) {
				check(err)
			}
			check(g.Close())
		},
		"Last": func() { tr.Last(); tr.Step(); tr.On(func(Event) error { return nil }) },
	}

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var callers sync.WaitGroup
	rounds := 15
	if randtest.Long() {
		rounds = 60
	}

	for _, call := range calls {
		callers.Go(func() {
			for range rounds {
				call()
				time.Sleep(time.Millisecond)
			}
		})
	}

	go func() {
		defer cancel()
		callers.Wait()
		select {
		case <-often:
		case <-time.After(2 * time.Minute):
		}
	}()
	err = tr.Run(ctx)
	callers.Wait()
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}

	require.GreaterOrEqual(t, reshaped, enough)
}

// TestResumeBetweenSteps resumes a model with different blocks while a callback of a run is active.
// The race detector finds accesses of the run to the engine that is being replaced.
func TestResumeBetweenSteps(t *testing.T) {
	randtest.Concurrent(t)
	tr := growthRun{config: querySites(), steps: 6}.trainer(t)
	path := filepath.Join(t.TempDir(), "run")
	require.NoError(t, tr.Save(path))
	build, replacing := tr.Config.Engine, make(chan struct{})
	tr.Config.Engine = func(m *Model, o optim.Optimizer, c TrainConfig) (Engine, error) {
		if len(m.Planted) == 0 {
			close(replacing)
			time.Sleep(100 * time.Millisecond) // give the run time to continue
		}
		if build == nil {
			build = CPUEngine()
		}
		return build(m, o, c)
	}

	resumed := make(chan error, 1)
	begun := false
	tr.On(func(e Event) error {
		switch {
		case e.Kind == StepEnd && e.Step == 2:
			return tr.Model.Kasmina.Do(germinate(0, blueprints.LoRA, 2), move(0, state.Training))
		case e.Kind == StepEnd && e.Step == 4 && !begun:
			begun = true
			go func() { resumed <- tr.Resume(t.Context(), path) }()
			<-replacing
		}
		return nil
	})

	require.NoError(t, tr.Run(t.Context()))
	require.True(t, begun)
	require.NoError(t, <-resumed)
}
