package llm

import (
	"context"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/allocs"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

// TestAllocations checks that a training step on the CPU (gradients, clipping and update, with Kasmina
// layers in every block) makes no more allocations for a larger model.
func TestAllocations(t *testing.T) {
	if testing.Short() {
		t.Skip("counting allocations needs a process without the race detector")
	}

	for name, fresh := range randtest.Sample(t, 1, map[string]func() (optim.Optimizer, error){
		"AdamW": func() (optim.Optimizer, error) { return optim.NewAdamW() },
		"Muon":  func() (optim.Optimizer, error) { return optim.NewMuon() },
	}) {
		for _, layers := range []int{2, 12} {
			c := Config{Vocab: 64, Dim: 32, Layers: layers, Heads: 2, Seq: 32,
				Kasmina: blocks(layers), Seeds: 4}.Default()
			m, err := NewModel(c, tensor.Float32, 1)
			if err != nil {
				t.Fatal(err)
			}
			o, err := fresh()
			if err != nil {
				t.Fatal(err)
			}
			e, err := CPUEngine()(m, o, TrainConfig{Batch: 2, Accumulate: 1})
			if err != nil {
				t.Fatal(err)
			}
			ids := make([]int, 2*c.Seq)
			step := func() {
				if _, err := e.Gradients(data.Batch{Inputs: ids, Targets: ids}); err != nil {
					t.Fatal(err)
				}
				if _, err := e.Update(); err != nil {
					t.Fatal(err)
				}
			}
			for range 20 { // fill the history of reports of every layer
				step()
			}
			n := allocs.PerRun(10, step)
			t.Logf("%s, %d layers: %v allocations", name, layers, n)
			if n > 50 {
				t.Errorf("a step of a model of %d layers with %s makes %v allocations, want at "+
					"most 50", layers, name, n)
			}
			if err := e.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// kasminaNames returns the names of the parameters of the Kasmina layer after a block.
func kasminaNames(block int) []string {
	p := blockPrefix(block)
	return []string{p + kasminaWeights, p + kasminaScales}
}

// mirrored is an engine that records which parameters are pushed to it.
type mirrored struct {
	Engine
	pushed [][]string
	fail   error
	pull   func() // copies its parameters to the host
	closed int
}

func (m *mirrored) Pull(params ...string) error {
	if m.pull != nil {
		m.pull()
	}
	return m.Engine.Pull(params...)
}

func (m *mirrored) Close() error {
	m.closed++
	return m.Engine.Close()
}

func (m *mirrored) Push(params ...string) error {
	m.pushed = append(m.pushed, params)
	return m.fail
}

// TestSlotsReachTheEngine checks that the slots written by commands are pushed to the engine, once for
// each layer. If the engine fails to take them, the slots on the host are restored.
func TestSlotsReachTheEngine(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1})
	m, e := tr.Model, &mirrored{Engine: tr.driver.engine}
	tr.driver.engine = e
	command := func(a state.Action, layer, seed int, to state.Stage, slot int) state.Command {
		return state.Command{Action: a, Layer: layer, Seed: seed, To: to,
			Request: state.GerminationRequest{Slot: slot, Kind: blueprints.AttentionGate}}
	}
	commands := []state.Command{
		command(state.Move, 0, 1, state.Cancelled, 0), command(state.Germinate, 0, 0, 0, 1),
		command(state.Move, 1, 1, state.Cancelled, 0), command(state.Germinate, 1, 0, 0, 1),
		command(state.Move, 1, 2, state.RolledBack, 0), // restores slot 2
	}
	before := bitsOf(m.Param(blockPrefix(1) + kasminaWeights))
	e.fail = errors.New("no room")
	if err := m.Kasmina.Do(commands...); !errors.Is(err, e.fail) {
		t.Errorf("error %v", err)
	}

	if !slices.Equal(before, bitsOf(m.Param(blockPrefix(1)+kasminaWeights))) {
		t.Error("slots that the engine refused have changed")
	}

	e.fail, e.pushed = nil, nil
	if err := m.Kasmina.Do(commands...); err != nil {
		t.Fatal(err)
	}

	if want := [][]string{slices.Concat(kasminaNames(0),
		kasminaNames(1))}; !reflect.DeepEqual(e.pushed, want) {
		t.Errorf("pushed %v, want %v", e.pushed, want)
	}
}

// TestEngineRefusesCheckpoint checks that a trainer refuses to work after its engine has failed to
// take a checkpoint. The model on the host is the file's, and the trainer works again after a successful
// Resume.
func TestEngineRefusesCheckpoint(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.safetensors")
	straight := newTrainer(t, trainerOptions{config: tiny(), steps: 4})
	straight.On(func(e Event) error {
		if e.Kind == StepEnd && e.Step == 2 {
			return straight.Save(path)
		}
		return nil
	})

	if err := straight.Run(t.Context()); err != nil {
		t.Fatal(err)
	}

	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 4})
	e := &mirrored{Engine: tr.driver.engine, fail: errors.New("no room")}
	tr.driver.engine = e
	tr.On(func(e Event) error {
		t.Errorf("step %d of a trainer that cannot be used", e.Step)
		return nil
	})
	eval, err := data.NewEvaluation([]byte("some held-out words"), tokenizer.Bytes{},
		1, tr.Model.Config.Seq)
	if err != nil {
		t.Fatal(err)
	}

	for name, f := range map[string]func() error{
		"Run":      func() error { return tr.Run(t.Context()) },
		"Save":     func() error { return tr.Save(path) },
		"Evaluate": func() error { _, _, err := tr.Evaluate(eval); return err },
	} {
		if err := tr.Resume(t.Context(), path); !errors.Is(err, e.fail) {
			t.Fatalf("Resume: error %v", err)
		}
		if err := f(); !errors.Is(err, e.fail) || !strings.Contains(err.Error(), "another Resume") {
			t.Errorf("%s: error %v", name, err)
		}
	}

	e.pull = func() { t.Error("the parameters are pulled from an engine that does not have them") }
	if err := tr.Resume(t.Context(), path+"x"); err == nil {
		t.Error("Resume from a missing checkpoint returns no error")
	}

	model := filepath.Join(t.TempDir(), "model")
	if err := tr.Model.Save(model); err != nil {
		t.Fatal(err)
	}

	for _, p := range []string{path, model} {
		m, err := LoadModel(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		for i, p := range m.Params {
			if !slices.Equal(bitsOf(p.Value), bitsOf(tr.Model.Params[i].Value)) {
				t.Errorf("%s differs from the file", p.Name)
			}
		}
	}

	e.fail, e.pull, tr.callbacks = nil, nil, nil
	if err := tr.Resume(t.Context(), path); err != nil {
		t.Fatal(err)
	}

	if err := tr.Run(t.Context()); err != nil {
		t.Fatal(err)
	}

	checkSame(t, straight, tr)
}

// TestAnotherTrainer checks that a second trainer of a model starts with the first one's parameters,
// wherever they are. The first trainer continues only after its engine has taken the second one's
// changes, and never after it has been closed.
func TestAnotherTrainer(t *testing.T) {
	first := newTrainer(t, trainerOptions{config: tiny(), steps: 2})
	e := &mirrored{Engine: first.driver.engine}
	first.driver.engine = e
	norm := first.Model.Param(normName)
	e.pull = func() { norm.Float32s()[0] = 7 }
	path := filepath.Join(t.TempDir(), "model.safetensors")
	if err := first.Save(path); err != nil {
		t.Fatal(err)
	}

	norm.Float32s()[0] = 1 // the value on the host until the next Pull
	c, seen := first.Config, float32(0)
	c.Engine = func(m *Model, o optim.Optimizer, c TrainConfig) (Engine, error) {
		seen = m.Param(normName).Float32s()[0]
		return CPUEngine()(m, o, c)
	}
	second, err := NewTrainer(first.Model, first.Loader, first.Optimizer, c)
	if err != nil || seen != 7 {
		t.Fatalf("the second engine sees %v, error %v", seen, err)
	}
	defer second.Close()

	e.pull = func() { t.Error("the parameters are pulled from the first engine, which no longer has them") }
	if err := second.Run(t.Context()); err != nil {
		t.Fatal(err)
	}

	e.fail = errors.New("no room")
	save := func() error { return first.Save(path) }
	for name, f := range map[string]func() error{"Run": func() error { return first.Run(t.Context()) }, "Save": save, "Save again": save} {
		if err := f(); !errors.Is(err, e.fail) {
			t.Errorf("%s: error %v, want %v", name, err, e.fail)
		}
	}

	if err := second.Save(path); err != nil || norm.Float32s()[0] == 7 {
		t.Errorf("the second trainer has lost the model: error %v", err)
	}

	e.fail, e.pull, e.pushed = nil, nil, nil
	if err := errors.Join(first.Run(t.Context()), second.Resume(t.Context(), path)); err != nil ||
		len(e.pushed) != 1 || len(e.pushed[0]) > 0 || first.Step() != 2 {
		t.Errorf("the first engine takes %v and is at step %d, error %v",
			e.pushed, first.Step(), err)
	}

	e.pull = func() { t.Error("the parameters are pulled from the first engine after a Resume") }
	if err := errors.Join(first.Close(), first.Close()); err != nil || e.closed != 1 {
		t.Errorf("the first engine is closed %d times, error %v", e.closed, err)
	}

	for name, f := range map[string]func() error{
		"Run": func() error {
			return first.Run(t.Context())
		}, "Save": save, "Resume": func() error { return first.Resume(t.Context(), path) },
	} {
		if err := f(); !errors.Is(err, errClosed) {
			t.Errorf("%s: error %v, want %v", name, err, errClosed)
		}
	}
}

// blocks returns the integers from 0 to n−1.
func blocks(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

// TestDivergedIsNotSaved saves after every step and corrupts the model in different ways after step
// 5. It checks that the run fails and that the checkpoint holds the last good step.
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
		"an update that overflows": {10, overflow,
			"step 5|the update overflowed|value|model."},
		"an update that overflows at the end": {5, overflow, "step 5|the update overflowed"},
		"a parameter that another callback set": {5, at5(func(tr *Trainer) error {
			tr.Model.Param(name).Float32s()[17] = float32(math.Inf(-1))
			return nil
		}), name},
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

// overflown is an optimizer with an infinite element in its state, such as the square of a large
// gradient.
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

// unchecked is an engine that, in its fifth step, applies the update before it finds that the
// gradients are not finite.
type unchecked struct {
	Engine
	steps  int
	poison func() // corrupts the parameters
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

// TestUpdateOverflowed checks that a run fails with ErrDiverged if an update used non-finite
// gradients. The checkpoint is kept, and even if all parameters are finite, the trainer refuses to
// use them until it has resumed from the checkpoint.
func TestUpdateOverflowed(t *testing.T) {
	for what, value := range map[string]float32{"a parameter that is not " +
		"finite": float32(math.NaN()), "finite parameters": 0.5} {
		t.Run(what, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "m.safetensors")
			tr := newTrainer(t, trainerOptions{config: tiny(), steps: 7})
			tr.driver.engine = &unchecked{tr.driver.engine, 0, func() {
				tr.Model.Param(normName).Float32s()[2] = value
			}}
			tr.On(Checkpoint(tr, path, 2))
			err := tr.Run(t.Context())
			if !errors.Is(err, ErrDiverged) || tr.Step() != 4 {
				t.Fatalf("got %v at step %d, want ErrDiverged at 4", err, tr.Step())
			}
			for _, word := range []string{"step 5", "the update overflowed: the norm was +Inf",
				"resume from the last checkpoint"} {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("error %q does not say %q", err, word)
				}
			}
			if named := strings.Contains(err.Error(), normName); named != (value != value) {
				t.Errorf("error %q names the parameter: %v", err, named)
			}
			for name, f := range map[string]func() error{
				"Run":  func() error { return tr.Run(t.Context()) },
				"Save": func() error { return tr.Save(path) },
				"Evaluate": func() error {
					_, _, err := tr.Evaluate(heldOut(t, 50, 1))
					return err
				},
			} {
				if err := f(); !errors.Is(err, ErrDiverged) ||
					!strings.Contains(err.Error(), "before a Resume") {
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
	if _, _, err := tr.Evaluate(heldOut(t, 50, 1)); !errors.Is(err, ErrDiverged) ||
		!strings.Contains(err.Error(), normName) {
		t.Errorf("got %v, want ErrDiverged in %s", err, normName)
	}
	if err := tr.Model.Save(filepath.Join(t.TempDir(), "m")); !errors.Is(err, ErrDiverged) {
		t.Errorf("Model.Save: got %v, want ErrDiverged", err)
	}
}

// TestDivergedPassesCountNothing checks that NaN in the passes of an evaluation, a save, a comparison of seeds or
// a generator is not counted in the lattices, so that a run with more of them ends with the same checkpoint.
func TestDivergedPassesCountNothing(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 5})
	require.NoError(t, tr.Grow(Growth{Controller: control.NewHeuristic(1, 5), Validation: heldOut(t, 50, 1)}))
	for i := range tr.Model.Param(embedName).Float32s() {
		tr.Model.Param(embedName).Float32s()[i] = float32(math.NaN())
	}
	before := tr.Model.Kasmina.Digest()

	_, _, err := tr.Evaluate(heldOut(t, 50, 1))
	require.ErrorIs(t, err, ErrDiverged)
	require.Equal(t, before, tr.Model.Kasmina.Digest(), "Evaluate")

	require.ErrorIs(t, tr.Save(filepath.Join(t.TempDir(), "m")), ErrDiverged)
	require.Equal(t, before, tr.Model.Kasmina.Digest(), "Save")

	losses, err := tr.growth.judge().Losses()
	require.NoError(t, err)
	require.True(t, math.IsNaN(losses[0]))
	require.Equal(t, before, tr.Model.Kasmina.Digest(), "the judge")

	g, err := NewGenerator(tr.Model)
	require.NoError(t, err)
	defer g.Close()
	s, err := sampler.New(sampler.Config{})
	require.NoError(t, err)
	_, err = collect(g.Generate(t.Context(), []int{1, 2, 3}, 2, s))
	require.Error(t, err)
	require.Equal(t, before, tr.Model.Kasmina.Digest(), "a generator")
}

// TestListeningCountsNothing checks that a graph for measuring gradients leaves the lattices alone.
func TestListeningCountsNothing(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1})
	c := tr.Config
	c.listen = []string{embedName}
	e, err := CPUEngine()(tr.Model, tr.Optimizer, c)
	require.NoError(t, err)
	defer e.Close()

	before := tr.Model.Kasmina.Digest()
	b, err := tr.Loader.Next()
	require.NoError(t, err)
	_, err = e.Gradients(b)
	require.NoError(t, err)
	require.Equal(t, before, tr.Model.Kasmina.Digest())
}

// TestForgetAllOrNothing checks that an engine clears no range if one of them does not exist.
func TestForgetAllOrNothing(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 2})
	require.NoError(t, tr.Run(t.Context()))
	moments := func() string { return fmt.Sprint(tr.Optimizer.State()) }
	before := moments()
	valid := ParamRange{normName, 0, 3}
	for _, r := range []ParamRange{{normName, 0, 17}, {normName, -1, 2}, {normName, 3, 2}, {"unknown", 0, 1}} {
		require.Error(t, tr.driver.engine.Forget(valid, r), r)
		require.Equal(t, before, moments(), r)
	}

	require.NoError(t, tr.driver.engine.Forget(valid))
	require.NotEqual(t, before, moments())
}

// scaling is the CPU engine with a loss scale that counts updates and skips every third one.
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
	s := &scaling{tr.driver.engine, LossScale{Scale: 1024}}
	tr.driver.engine = s
	return s
}

// TestScaler checks that a skipped update is not an error, that the loss scale is saved and resumed,
// and that a scale that the engine rejects does not change the trainer.
func TestScaler(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.safetensors")
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 7})
	s := scale(tr)
	if err := tr.Run(context.Background()); err != nil {
		t.Fatal(err)
	}

	if want := (LossScale{Scale: 1024, Good: 7, Skipped: 2}); s.scale != want {
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
		t.Errorf("a file with an invalid scale: %v, at step %d with scale %+v", err,
			other.Step(), into.scale)
	}

	// The CPU engine has no loss scale and ignores the file's.
	plain := newTrainer(t, trainerOptions{config: tiny(), steps: 7})
	if err := plain.Resume(t.Context(), path); err != nil || plain.Step() != 7 {
		t.Errorf("resumed at step %d on the CPU: %v", plain.Step(), err)
	}
}
