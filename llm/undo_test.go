package llm

import (
	"errors"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// In most tests of this file, an operation fails, and so does restoring the state from before. The trainer must
// then refuse to be used until it resumes from a checkpoint, and end with the parameters of a run without
// failures.

// errUndo is the reason why the state from before cannot be restored.
var errUndo = errors.New("the device is lost")

// failures holds functions that are called before methods of an engine, which then return their errors.
type failures struct {
	gradients, push, pull, drop, scale func() error
	keep, engine                       func() error // before an engine hands over the parameters, or takes them over

	closed int // number of engines that have been closed
}

func (f *failures) before(method func() error) error {
	if method == nil {
		return nil
	}
	return method()
}

// answers returns a function that returns the errors one after another, and then nil.
func answers(errs ...error) func() error {
	return func() (err error) {
		if len(errs) > 0 {
			err, errs = errs[0], errs[1:]
		}
		return err
	}
}

// unreliable is an engine with methods that fail on request.
type unreliable struct {
	Engine
	*failures
}

func (e unreliable) Gradients(b data.Batch) (float64, error) {
	if err := e.before(e.gradients); err != nil {
		return 0, err
	}
	return e.Engine.Gradients(b)
}

func (e unreliable) Push(params ...string) error {
	return errors.Join(e.before(e.push), e.Engine.Push(params...))
}

func (e unreliable) Pull(params ...string) error {
	return errors.Join(e.before(e.pull), e.Engine.Pull(params...))
}

func (e unreliable) Drop() error {
	if err := e.before(e.drop); err != nil {
		return err
	}
	return e.Engine.Drop()
}

func (e unreliable) Close() error {
	e.closed++
	return e.Engine.Close()
}

// unreliableScaler is an unreliable [Scaler]. Its scale has no effect.
type unreliableScaler struct {
	unreliable
	current *LossScale
}

func (e unreliableScaler) LossScale() LossScale { return *e.current }

func (e unreliableScaler) SetLossScale(s LossScale) error {
	if err := e.before(e.scale); err != nil {
		return err
	}
	*e.current = s
	return nil
}

// unreliableKeeper is an unreliable [Keeper]. The parameters stay on the host, but the trainer must assume
// that they do not.
type unreliableKeeper struct {
	unreliable
	build func() (Engine, error)
}

func (unreliableKeeper) CanKeep() bool { return true }

func (e unreliableKeeper) Keep() (Kept, error) {
	if err := e.before(e.keep); err != nil {
		return nil, err
	}
	return unreliableKept{e}, e.Close()
}

type unreliableKept struct{ from unreliableKeeper }

func (unreliableKept) Close() error { return nil }

func (k unreliableKept) Engine(map[string]string) (Engine, error) {
	if err := k.from.before(k.from.engine); err != nil {
		return nil, err
	}
	return k.from.build()
}

// unreliableRun returns a run of a model with engines that fail on request.
func unreliableRun(c Config, f *failures) growthRun {
	return growthRun{config: c, steps: 6,
		engine: func(_ *Trainer, m *Model, o optim.Optimizer, c TrainConfig) (Engine, error) {
			e, err := CPUEngine()(m, o, c)
			return unreliable{e, f}, err
		}}
}

// started returns a trainer and its checkpoint at the start, together with the parameters at the end of a run
// without failures.
func (r growthRun) started(t *testing.T) (tr *Trainer, start string, want map[string]uint32) {
	t.Helper()
	start = filepath.Join(t.TempDir(), "start")
	good := r.trainer(t)
	require.NoError(t, good.Save(start))
	require.NoError(t, good.Run(t.Context()))
	return r.trainer(t), start, learntBy(t, good)
}

// needsResume checks that a trainer cannot be used because of a failure, and that a Resume repairs it.
func needsResume(t *testing.T, tr *Trainer, failure error, from string, want map[string]uint32) {
	t.Helper()
	require.ErrorIs(t, tr.Save(filepath.Join(t.TempDir(), "run")), failure)
	require.ErrorIs(t, tr.Run(t.Context()), failure)

	require.NoError(t, tr.Resume(t.Context(), from))
	require.NoError(t, tr.Run(t.Context()))
	require.Equal(t, want, learntBy(t, tr))
}

// cannotBeSaved checks that a model cannot be saved because of a failure.
func cannotBeSaved(t *testing.T, m *Model, failure error) {
	t.Helper()
	require.ErrorIs(t, m.Save(filepath.Join(t.TempDir(), "model")), failure)
}

// TestSlotsNotRestored makes the engine refuse the slot of a new blueprint, and then the slot's old contents.
func TestSlotsNotRestored(t *testing.T) {
	f := &failures{}
	tr, start, want := unreliableRun(tiny(), f).started(t)

	f.push = answers(errNoMemory, errUndo)
	require.ErrorIs(t, tr.Model.Germinate(0, 1, state.GerminationRequest{Slot: 1, Kind: blueprints.Residual}), errNoMemory)
	cannotBeSaved(t, tr.Model, errUndo)
	needsResume(t, tr, errUndo, start, want)
}

// TestStepNotUndone makes the second batch of a step fail, and then the removal of the first batch's gradients.
// The next step must not contain them.
func TestStepNotUndone(t *testing.T) {
	f := &failures{}
	r := unreliableRun(tiny(), f)
	r.accumulate = 2
	tr, start, want := r.started(t)

	f.gradients, f.drop = answers(nil, errNoMemory), answers(errUndo)
	require.ErrorIs(t, tr.Run(t.Context()), errNoMemory)
	needsResume(t, tr, errUndo, start, want)
}

// TestStepOfTwinNotUndone does the same with a step that does not count.
func TestStepOfTwinNotUndone(t *testing.T) {
	f := &failures{}
	tr, start, want := unreliableRun(tiny(), f).started(t)

	f.gradients, f.drop = answers(errNoMemory), answers(errUndo)
	_, err := tr.driver.repeat([]float64{0.01})
	require.ErrorIs(t, err, errUndo)
	needsResume(t, tr, errUndo, start, want)
}

// TestResumeNotUndone makes the optimizer refuse the state of a checkpoint, and then its own.
func TestResumeNotUndone(t *testing.T) {
	o, err := optim.NewAdamW(optim.WithLR(0.01), optim.WithWeightDecay(0))
	require.NoError(t, err)
	failing := &failingState{AdamW: o}
	tr := growthRun{config: tiny(), steps: 6, optimizer: failing}.trainer(t)
	start := filepath.Join(t.TempDir(), "start")
	require.NoError(t, tr.Save(start))
	require.NoError(t, tr.Run(t.Context()))
	want := learntBy(t, tr)

	failing.fail = func() bool { return true }
	require.ErrorIs(t, tr.Resume(t.Context(), start), errNoMemory)
	failing.fail = nil
	needsResume(t, tr, errNoMemory, start, want)
}

// TestTwinNotEntered makes the optimizer refuse the moments of a twin that replaces the model, and then the
// engine the loss scale of the model.
func TestTwinNotEntered(t *testing.T) {
	f := &failures{}
	o, err := optim.NewAdamW(optim.WithLR(0.01), optim.WithWeightDecay(0))
	require.NoError(t, err)
	failing := &failingState{AdamW: o}
	tr := growthRun{config: tiny(), steps: 6, optimizer: failing,
		engine: func(_ *Trainer, m *Model, o optim.Optimizer, c TrainConfig) (Engine, error) {
			e, err := CPUEngine()(m, o, c)
			return unreliableScaler{unreliable{e, f}, &LossScale{Scale: 1}}, err
		}}.trainer(t)
	start := filepath.Join(t.TempDir(), "start")
	require.NoError(t, tr.Save(start))

	b, err := tr.driver.branch()
	require.NoError(t, err)
	b.scale = &LossScale{Scale: 2}
	tr.growth.twin = &twin{branch: b}
	failing.fail = func() bool { return true }
	f.scale = answers(nil, errUndo)
	require.ErrorIs(t, tr.growth.adopt(), errNoMemory)
	failing.fail = nil
	require.ErrorIs(t, tr.Run(t.Context()), errUndo)

	require.NoError(t, tr.Resume(t.Context(), start))
	require.NoError(t, tr.Run(t.Context()))
	require.EqualValues(t, 1, tr.driver.lossScale().Scale)
}

// TestRefusedScaleClosesEngine makes a new engine refuse its loss scale.
func TestRefusedScaleClosesEngine(t *testing.T) {
	f := &failures{scale: answers(errNoMemory)}
	tr := growthRun{config: tiny(), steps: 6,
		engine: func(_ *Trainer, m *Model, o optim.Optimizer, c TrainConfig) (Engine, error) {
			e, err := CPUEngine()(m, o, c)
			return unreliableScaler{unreliable{e, f}, &LossScale{Scale: 1}}, err
		}}.trainer(t)
	require.ErrorIs(t, tr.driver.recreateEngine(&LossScale{Scale: 2}), errNoMemory)
	require.Equal(t, 2, f.closed, "engines are closed: the old one and the new one")
}

// unreliableLoader is a loader that fails on request to return to a position.
type unreliableLoader struct {
	Loader
	fail func() error
}

func (l unreliableLoader) SetState(s data.LoaderState) error {
	if err := l.fail(); err != nil {
		return err
	}
	return l.Loader.SetState(s)
}

// TestListeningNotUndone makes the loader fail to return to its position after the trainer has listened to the
// gradients of a frozen model. The next step must not get later batches.
func TestListeningNotUndone(t *testing.T) {
	plant := func() *Trainer {
		tr := newTrainer(t, frozen(true, 6))
		require.NoError(t, tr.Model.Kasmina.Do(state.Command{Action: state.Germinate,
			Request: state.GerminationRequest{Kind: blueprints.LoRA, Size: 2}},
			state.Command{Action: state.Move, To: state.Training}))
		return tr
	}
	good := plant()
	start := filepath.Join(t.TempDir(), "start")
	require.NoError(t, good.Save(start))
	require.NoError(t, good.Run(t.Context()))

	tr := plant()
	tr.Loader = unreliableLoader{tr.Loader, answers(errUndo)}
	require.ErrorIs(t, tr.Run(t.Context()), errUndo)
	needsResume(t, tr, errUndo, start, learntBy(t, good))
}

// TestParametersLost makes an engine fail to hand its parameters over, or the next engine to take them over: for a
// model with a new blueprint and then for the old model. The parameters on the host are out of date and must not be
// saved. The old engine must be closed.
func TestParametersLost(t *testing.T) {
	t.Run("handing over", func(t *testing.T) { loseParameters(t, &failures{}, func(f *failures) { f.keep = answers(errUndo) }) })
	t.Run("taking over", func(t *testing.T) {
		loseParameters(t, &failures{}, func(f *failures) { f.engine = answers(errNoMemory, errUndo) })
	})
}

func loseParameters(t *testing.T, f *failures, fail func(*failures)) {
	var engine func(*Model, optim.Optimizer, TrainConfig) (Engine, error)
	engine = func(m *Model, o optim.Optimizer, c TrainConfig) (Engine, error) {
		e, err := CPUEngine()(m, o, c)
		return unreliableKeeper{unreliable{e, f}, func() (Engine, error) { return engine(m, o, c) }}, err
	}
	tr := growthRun{config: querySites(), steps: 6,
		engine: func(_ *Trainer, m *Model, o optim.Optimizer, c TrainConfig) (Engine, error) {
			return engine(m, o, c)
		}}.trainer(t)
	start := filepath.Join(t.TempDir(), "start")
	require.NoError(t, tr.Save(start))
	require.NoError(t, tr.Model.Kasmina.Do(state.Command{Action: state.Germinate,
		Request: state.GerminationRequest{Kind: blueprints.LoRA, Size: 2}},
		state.Command{Action: state.Move, To: state.Training}))

	fail(f)
	require.ErrorIs(t, tr.Run(t.Context()), errUndo)
	require.Equal(t, 1, f.closed)
	cannotBeSaved(t, tr.Model, errUndo)
	require.ErrorIs(t, tr.Save(filepath.Join(t.TempDir(), "run")), errUndo)

	require.NoError(t, tr.Resume(t.Context(), start))
	require.NoError(t, tr.Run(t.Context()))
	require.NoError(t, tr.Model.Save(filepath.Join(t.TempDir(), "model")))
}

// TestSpoiledModel checks that parameters that belong to no complete step cannot be saved after their trainer
// has been closed, and that no other trainer continues from them without a Resume.
func TestSpoiledModel(t *testing.T) {
	r := growthRun{config: tiny(), steps: 6}
	tr, start, want := r.started(t)
	tr.on(modelLost, errUndo)
	require.NoError(t, tr.Close())
	cannotBeSaved(t, tr.Model, errUndo)

	next, err := NewTrainer(tr.Model, tr.Loader, tr.Optimizer, tr.Config)
	require.NoError(t, err)
	defer next.Close()
	cannotBeSaved(t, tr.Model, errUndo)
	needsResume(t, next, errUndo, start, want)
	require.NoError(t, next.Model.Save(filepath.Join(t.TempDir(), "model")))
}

// TestSpoiledByAnotherTrainer alternates between two trainers of a model. A failure of one of them must not be
// forgotten because the other has used the model.
func TestSpoiledByAnotherTrainer(t *testing.T) {
	r := growthRun{config: tiny(), steps: 6}
	a, start, want := r.started(t)
	b := r.trainer(t)
	require.NoError(t, b.Close())
	b, err := NewTrainer(a.Model, b.Loader, b.Optimizer, b.Config)
	require.NoError(t, err)
	defer b.Close()

	b.on(modelLost, errUndo)
	require.ErrorIs(t, a.Run(t.Context()), errUndo)
	require.NoError(t, b.Resume(t.Context(), start))
	require.NoError(t, a.Save(filepath.Join(t.TempDir(), "run")))

	a.on(restoreFailed, errUndo)
	require.NoError(t, b.Save(filepath.Join(t.TempDir(), "run")))
	needsResume(t, a, errUndo, start, want)
}

// TestCloseWithoutParameters makes the engine fail to return the parameters when its trainer is closed.
func TestCloseWithoutParameters(t *testing.T) {
	f := &failures{}
	tr := unreliableRun(tiny(), f).trainer(t)
	f.pull = answers(errUndo)
	require.ErrorIs(t, tr.Close(), errUndo)
	cannotBeSaved(t, tr.Model, errUndo)
}
