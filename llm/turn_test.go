package llm

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

// gathering is an engine that calls added after each batch.
type gathering struct {
	Engine
	added func()
}

func (g gathering) Gradients(b data.Batch) (float64, error) {
	defer g.added()
	return g.Engine.Gradients(b)
}

// TestInterruptBetweenBatches checks that a run stops when its context is canceled while a step
// gathers gradients, with a checkpoint of the previous step. A run that resumes from it reproduces an
// uninterrupted one bit for bit.
func TestInterruptBetweenBatches(t *testing.T) {
	randtest.Concurrent(t)
	o := trainerOptions{config: tiny(), steps: 5, accumulate: 3}
	straight, first, second := newTrainer(t, o), newTrainer(t, o), newTrainer(t, o)
	require.NoError(t, straight.Run(t.Context()))
	path := filepath.Join(t.TempDir(), "run")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	batches := 0
	first.driver.engine = gathering{first.driver.engine, func() {
		if batches++; batches == 2*3+2 {
			cancel()
		}
	}}
	first.On(Checkpoint(first, path, 0))
	require.ErrorIs(t, first.Run(ctx), context.Canceled)
	require.Equal(t, 8, batches, "batches that were computed")
	require.NoError(t, second.Resume(t.Context(), path))
	require.Equal(t, 2, second.Step())
	require.NoError(t, second.Run(t.Context()))
	checkSame(t, straight, second)
	require.NoError(t, first.Run(t.Context()), "the interrupted one itself")
	checkSame(t, straight, first)
}

// TestLastCheckpoint checks that a run stopped by a callback saves a checkpoint of its last step, and
// returns the callback's error first. A run without a new, sound step keeps the old file.
func TestLastCheckpoint(t *testing.T) {
	full := errors.New("the disk is full")
	for name, c := range map[string]struct {
		err  error
		at   EventKind
		want int // step of the file; 0 for none
	}{
		"a callback":   {full, StepEnd, 3},
		"at the start": {full, RunStart, 0},
		"diverged":     {ErrDiverged, StepEnd, 0},
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, "run")
		o := trainerOptions{config: tiny(), steps: 5}
		straight, tr, again := newTrainer(t, o), newTrainer(t, o), newTrainer(t, o)
		var kinds []EventKind
		tr.On(func(e Event) error {
			kinds = append(kinds, e.Kind)
			if e.Kind == c.at && (e.Step == 3 || c.at == RunStart) {
				return c.err
			}
			return nil
		}, Checkpoint(tr, path, 0))
		err := tr.Run(t.Context())
		require.ErrorIs(t, err, c.err, name)
		if c.want == 0 {
			require.NoFileExists(t, path, name)
			continue
		}
		require.Equal(t, []EventKind{StepEnd, Failed, Saved, RunEnd}, kinds[len(kinds)-4:], name)
		require.NoError(t, again.Resume(t.Context(), path), name)
		require.Equal(t, c.want, again.Step(), name)
		require.NoError(t, again.Run(t.Context()))
		require.NoError(t, straight.Run(t.Context()))
		checkSame(t, straight, again)
	}
}

// TestTornStep checks that a step whose epoch was not ended is neither saved nor continued from.
func TestTornStep(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run")
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 9}) // epochs of 3
	require.NoError(t, tr.Grow(Growth{Controller: stubborn{}, Validation: heldOut(t, 40, 1)}))
	tr.On(Checkpoint(tr, path, 2))
	require.ErrorIs(t, tr.Run(t.Context()), state.ErrTransition)
	require.ErrorIs(t, tr.Save(path), state.ErrTransition)
	require.ErrorContains(t, tr.Run(t.Context()), "before a Resume")
	require.NoError(t, tr.Model.Save(path+".model"))
	tr.growth.options = nil
	require.NoError(t, tr.Resume(t.Context(), path, WithNewSettings(nil)))
	require.Equal(t, 2, tr.Step())
	require.NoError(t, tr.Run(t.Context()))
}

// stubborn is a controller that requests an impossible transition.
type stubborn struct{}

func (stubborn) Decide([]state.Report) []state.Command {
	return []state.Command{{Action: state.Move, Seed: 1, To: state.Fossilized}}
}

// TestPanickingController checks that a step cut short by a panic counts as incomplete, like a step that
// failed.
func TestPanickingController(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run")
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 9}) // epochs of 3
	require.NoError(t,
		tr.Grow(Growth{Controller: panickingController{}, Validation: heldOut(t, 40, 1)}))
	require.PanicsWithValue(t, "decide", func() { tr.Run(t.Context()) })
	require.ErrorContains(t, tr.Save(path), "panicked")
	require.NoFileExists(t, path)
}

type panickingController struct{}

func (panickingController) Decide([]state.Report) []state.Command { panic("decide") }

// TestTurns checks that callbacks and listeners can do everything that other goroutines may do during a
// run, without a deadlock.
func TestTurns(t *testing.T) {
	randtest.Concurrent(t)
	path := filepath.Join(t.TempDir(), "file")
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 6})
	text := heldOut(t, 40, 1)
	heard := 0
	all := func() {
		_, _, err := tr.Evaluate(text)
		require.NoError(t, errors.Join(err, tr.Save(path), tr.Model.Save(path),
			tr.Model.SaveBlueprint(path, 0, 2), tr.Model.LoadBlueprint(path, 0, 2)))
		require.ErrorContains(t, tr.Run(t.Context()), "running already")
		tr.On(func(Event) error { return nil })
	}

	_, err := tr.Model.Kasmina.Listen(func(e state.Event) {
		heard++
		all()
	})
	require.NoError(t, err)
	tr.On(func(e Event) error {
		all()
		if e.Kind == StepEnd && e.Step == 2 {
			require.NoError(t, tr.Model.Kasmina.Lattice(1).Transition(1, state.Cancelled))
			tr.Model.Kasmina.Submit(state.Command{Action: state.Germinate,
				Request: state.GerminationRequest{Slot: 4, Kind: blueprints.Residual}})
		}
		saved := make(chan error)
		go func() { saved <- tr.Save(path) }()
		return <-saved
	})

	require.NoError(t, tr.Run(t.Context()))
	require.GreaterOrEqual(t, heard, 2)
	require.NoError(t, os.Remove(path))
}

// TestClosedTrainerAnswers checks that commands are answered when the model has no open trainer left, and
// that closing a trainer ends its run.
func TestClosedTrainerAnswers(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 6})
	plant := state.Command{Action: state.Germinate, Request: state.GerminationRequest{Slot: 4,
		Kind: blueprints.Residual}}
	var before <-chan error
	tr.On(func(e Event) error {
		if e.Kind == StepEnd && e.Step == 2 {
			before = tr.Model.Kasmina.Submit(plant)
			return tr.Close()
		}
		return nil
	})

	require.ErrorIs(t, tr.Run(t.Context()), errClosed)
	require.ErrorIs(t, <-before, state.ErrClosed)
	require.ErrorIs(t, <-tr.Model.Kasmina.Submit(plant), state.ErrClosed)
	next, err := NewTrainer(tr.Model, tr.Loader, tr.Optimizer, tr.Config)
	require.NoError(t, err)
	after := tr.Model.Kasmina.Submit(plant)
	require.NoError(t, next.Run(t.Context()))
	require.NoError(t, <-after)
	require.NoError(t, next.Close())
}

// TestLateCommands checks that a command that is too late for the last checkpoint of a run is
// rejected, whoever gives it, and that an accepted command is in the checkpoint.
func TestLateCommands(t *testing.T) {
	plant := func(seed int) state.Command {
		return state.Command{Action: state.Germinate, Seed: seed,
			Request: state.GerminationRequest{Slot: 4, Kind: blueprints.Residual}}
	}
	for _, end := range []string{"all steps made", "interrupted"} {
		t.Run(end, func(t *testing.T) {
			tr := newTrainer(t, trainerOptions{config: tiny(), steps: 4})
			path := filepath.Join(t.TempDir(), "run")
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var inTime, late, steered <-chan error
			tr.On(func(e Event) error {
				switch {
				case e.Kind == StepEnd && e.Step == 3:
					inTime = tr.Model.Kasmina.Submit(plant(0))
				case e.Kind == StepEnd && e.Last, e.Kind == Interrupted:
					late = tr.Model.Kasmina.Submit(state.Command{Action: state.SetAlpha, Seed: 2, Alpha: 0.125})
					steered = tr.Steer(state.Command{Action: state.SetAlpha, Seed: 3, Alpha: 0.125})
				}
				return nil
			}, Checkpoint(tr, path, 0), func(e Event) error {
				if e.Kind == StepEnd && e.Step == 3 && end == "interrupted" {
					cancel()
				}
				return nil
			})

			err := tr.Run(ctx)
			if end == "interrupted" {
				require.ErrorIs(t, err, context.Canceled)
				require.ErrorIs(t, <-inTime, state.ErrClosed)
			} else {
				require.NoError(t, err)
				require.NoError(t, <-inTime)
			}
			require.ErrorIs(t, <-late, state.ErrClosed)
			require.ErrorIs(t, <-steered, state.ErrClosed)
			saved, err := LoadModel(t.Context(), path)
			require.NoError(t, err)
			require.Equal(t, saved.Kasmina.Digest(), tr.Model.Kasmina.Digest())
		})
	}
}

// TestCommandsOfARunWithin trains the model with a second trainer inside a callback. A command that is
// too late for the inner run takes effect in the outer one.
func TestCommandsOfARunWithin(t *testing.T) {
	outer, other := newTrainer(t, trainerOptions{config: tiny(), steps: 4}),
		newTrainer(t, trainerOptions{config: tiny(), steps: 2})
	inner, err := NewTrainer(outer.Model, other.Loader, other.Optimizer, other.Config)
	require.NoError(t, err)
	defer inner.Close()

	var late <-chan error
	inner.On(func(e Event) error {
		if e.Kind == StepEnd && e.Last {
			late = outer.Model.Kasmina.Submit(state.Command{Action: state.Germinate,
				Request: state.GerminationRequest{Slot: 4, Kind: blueprints.Residual}})
		}
		return nil
	})

	outer.On(func(e Event) error {
		if e.Kind == StepEnd && e.Step == 2 {
			return inner.Run(t.Context())
		}
		return nil
	})

	require.NoError(t, outer.Run(t.Context()))
	require.NoError(t, <-late)
	stage, err := outer.Model.Kasmina.Lattice(0).Stage(0)
	require.NoError(t, err)
	require.Equal(t, state.Germinated, stage)
}

// TestCommandsAfterAFailedRecord checks that commands are rejected in a step that cannot record a
// request, because the step is not complete and no checkpoint would contain their effect.
func TestCommandsAfterAFailedRecord(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 4})
	full := errors.New("the disk is full")
	require.NoError(t, tr.Grow(Growth{Controller: never{}, Validation: heldOut(t, 40, 1),
		Record: failingWriter{full}}))
	var command, request <-chan error
	tr.On(func(e Event) error {
		if e.Kind == StepEnd && e.Step == 1 {
			request = tr.Ask(Request{Save: true})
			command = tr.Model.Kasmina.Submit(state.Command{Action: state.SetAlpha, Alpha: 0.125})
		}
		return nil
	}, Checkpoint(tr, filepath.Join(t.TempDir(), "run"), 0))

	require.ErrorIs(t, tr.Run(t.Context()), full)
	require.ErrorIs(t, <-request, full)
	require.ErrorIs(t, <-command, state.ErrClosed)
}

// operations returns the number of concurrent calls to make during a run. KASMINA_OPERATIONS overrides
// it; 10000 take minutes.
func operations(t *testing.T) int64 {
	n, err := strconv.ParseInt(os.Getenv("KASMINA_OPERATIONS"), 10, 64)
	if err != nil {
		n = 150
		if randtest.Long() {
			n = 500
		}
	}
	t.Logf("%d operations", n)
	return n
}

var turnSeed = maphash.MakeSeed()

// sumOf returns a hash of a model's parameters, for comparing the parameters of thousands of steps.
func sumOf(m *Model) uint64 {
	var h maphash.Hash
	h.SetSeed(turnSeed)
	var all []byte
	for _, p := range m.Params {
		all, _ = binary.Append(all[:0], binary.LittleEndian, p.Value.Data())
		h.Write(all)
	}
	return h.Sum64()
}

// concurrent is a run during which other goroutines call the trainer.
type concurrent struct {
	*testing.T
	*Trainer
	dir   string
	text  *data.Evaluation
	after sync.Map // hashes of the parameters after each step
	files sync.Map // hashes of the parameters in each saved file
}

// TestBesideARun checks that everything other goroutines do during a run (saves, loads, blueprints,
// samples, evaluations, commands and queries) sees the model between two steps. Every file must load,
// and its parameters must be the model's parameters after some step.
func TestBesideARun(t *testing.T) {
	randtest.Concurrent(t)
	left := operations(t)
	tr := newTrainer(t, trainerOptions{config: roomy(), steps: 1 << 30})
	b := &concurrent{T: t, Trainer: tr, dir: t.TempDir(), text: heldOut(t, 40, 1)}
	b.after.Store(sumOf(tr.Model), true)
	within := &savedWithin{Engine: tr.driver.engine, concurrent: b}
	tr.driver.engine = within
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	tr.On(func(e Event) error {
		b.after.Store(sumOf(tr.Model), true)
		return nil
	}, Checkpoint(tr, filepath.Join(b.dir, "run"), 7, InBackground()))
	calls := []func(name string){b.save, b.saveRun, b.blueprint, b.sample, b.evaluate, b.ask}
	var others sync.WaitGroup
	for g, call := range calls {
		others.Go(func() {
			for atomic.AddInt64(&left, -1) >= 0 && !t.Failed() {
				call(filepath.Join(b.dir, fmt.Sprint(g)))
			}
		})
	}

	go func() { others.Wait(); cancel() }()
	require.ErrorIs(t, tr.Run(ctx), context.Canceled)
	others.Wait()
	within.saves.Wait()
	require.NotZero(t, tr.Step())
	t.Logf("%d steps", tr.Step())
	b.files.Range(func(sum, path any) bool {
		if _, there := b.after.Load(sum); !there {
			t.Errorf("%s had parameters of no step", path)
		}
		return true
	})

	again := newTrainer(t, trainerOptions{config: roomy(), steps: 1 << 30})
	require.NoError(t, again.Resume(t.Context(), filepath.Join(b.dir, "run")))
	checkSame(t, tr, again)
}

// savedWithin is an engine that starts a save during each update, while a parameter has a value that no
// step produces.
type savedWithin struct {
	Engine
	*concurrent
	saves  sync.WaitGroup
	saving atomic.Bool
}

func (e *savedWithin) Update() (float64, error) {
	x := e.Model.Params[0].Value.Data().([]float32)
	was := x[0]
	x[0]++
	if !e.saving.Swap(true) { // otherwise the save of an earlier step is still waiting
		e.saves.Go(func() {
			defer e.saving.Store(false)
			e.save(filepath.Join(e.dir, "within"))
		})
	}

	for e.saving.Load() && !waitsToSave() {
		time.Sleep(time.Millisecond)
	}

	x[0] = was
	return e.Engine.Update()
}

// waitsToSave reports whether a goroutine is waiting for the model's lock to save it.
func waitsToSave() bool {
	all := make([]byte, 1<<20)
	all = all[:runtime.Stack(all, true)]
	for g := range strings.SplitSeq(string(all), "\n\n") {
		if strings.Contains(g, "[sync.Mutex.Lock") && strings.Contains(g, "savedWithin") &&
			strings.Contains(g, "llm.take(") {
			return true
		}
	}
	return false
}

func (b *concurrent) check(err error) {
	if err != nil {
		b.Error(err)
	}
}

// loaded checks a file that was saved during the run.
func (b *concurrent) loaded(path string) {
	m, err := LoadModel(context.Background(), path)
	b.check(err)
	if err != nil {
		return
	}
	b.files.Store(sumOf(m), path)
}

func (b *concurrent) save(name string) {
	b.check(b.Model.Save(name))
	b.loaded(name)
}

func (b *concurrent) saveRun(name string) {
	b.check(b.Save(name))
	b.loaded(name)
	_, err := ReadNotes(name)
	b.check(err)
}

func (b *concurrent) blueprint(name string) {
	b.check(b.Model.SaveBlueprint(name, 0, 2))
	_, err := b.Model.ReadBlueprint(name, 0, 2)
	b.check(err)
}

func (b *concurrent) sample(string) {
	g, err := NewGenerator(b.Model)
	b.check(err)
	s, err := sampler.New(sampler.Config{Temperature: 1})
	b.check(err)
	for _, err := range g.Generate(context.Background(), []int{1, 2}, 3, s) {
		b.check(err)
	}
	b.check(g.Close())
}

func (b *concurrent) evaluate(string) {
	_, _, err := b.Evaluate(b.text)
	b.check(err)
	b.On(func(Event) error { return nil })
}

func (b *concurrent) ask(string) {
	if step, e := b.Step(), b.Last(); e.Step < step {
		b.Errorf("the last event is of step %d, and step %d is over", e.Step, step)
	}
	c := state.Command{Action: state.Germinate, Layer: 1, Request: state.GerminationRequest{Slot: 4,
		Kind: blueprints.Residual}}
	<-b.Model.Kasmina.Submit(c) // rejected after the first time
}

// never is a controller that gives no commands.
type never struct{}

func (never) Decide([]state.Report) []state.Command { return nil }

// TestSteer checks that commands given during a run take effect after a step, even in the middle of
// an epoch, that callbacks are notified, and that replaying the record reproduces the run bit for
// bit.
func TestSteer(t *testing.T) {
	randtest.Concurrent(t)
	text, err := data.NewEvaluation(texttest.Words(9, 120), tokenizer.Bytes{}, 2, tiny().Seq)
	require.NoError(t, err)
	plant := state.Command{Action: state.Germinate, Layer: 0, Seed: 0, Why: "a person asks",
		Request: state.GerminationRequest{Slot: 1, Kind: blueprints.Residual}}
	train := state.Command{Action: state.Move, Layer: 0, Seed: 0, To: state.Training}
	const steps = 25
	var record bytes.Buffer
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: steps})
	require.NoError(t, tr.Grow(Growth{Controller: never{}, Validation: text, Record: &record}))
	var told []string
	var answers []<-chan error
	tr.On(func(e Event) error {
		switch {
		case e.Kind == EpochEnd && e.Step%tr.Config.Epoch != 0:
			for _, s := range e.SeedEvents {
				told = append(told, s.To.String()+": "+s.Reason)
			}
		case e.Kind == StepEnd && e.Step == 12:
			// the seed is no longer dormant when the second one is due
			answers = append(answers, tr.Steer(plant, train), tr.Steer(plant))
		case e.Kind == StepEnd && e.Step == 17: // an epoch ends after the next step
			answers = append(answers,
				tr.Steer(state.Command{Action: state.Move, To: state.Grafting}))
		}
		return nil
	})

	require.NoError(t, tr.Run(t.Context()))
	require.NoError(t, <-answers[0])
	require.Equal(t, []string{"Germinated: a person asks", "Training: "}, told)
	require.ErrorIs(t, <-answers[1], state.ErrTransition)
	require.NoError(t, <-answers[2])
	require.ErrorIs(t, <-tr.Steer(plant), state.ErrClosed)

	read, err := ReadRecord(bytes.NewReader(record.Bytes()))
	require.NoError(t, err)
	again := newTrainer(t, trainerOptions{config: tiny(), steps: steps})
	require.NoError(t, again.Grow(Growth{Validation: text, Replay: read}))
	var refused error
	again.On(func(e Event) error {
		if e.Kind == StepEnd && e.Step == 5 {
			answer := again.Steer(plant)
			again.On(func(e Event) error {
				if e.Kind == RunEnd {
					refused = <-answer
				}
				return nil
			})
		}
		return nil
	})

	require.NoError(t, again.Run(t.Context()))
	require.ErrorContains(t, refused, "follows a record")
	require.Equal(t, tr.Last().Loss, again.Last().Loss)
	for i, p := range tr.Model.Params {
		require.Equal(t, p.Value.Data(), again.Model.Params[i].Value.Data(), p.Name)
	}
}

// TestMeasureIsRecorded checks that a change of telemetry takes effect between two steps, that the record
// and the log contain it, and that replaying the record gives the same lattices.
func TestMeasureIsRecorded(t *testing.T) {
	text, err := data.NewEvaluation(texttest.Words(9, 120), tokenizer.Bytes{}, 2, tiny().Seq)
	require.NoError(t, err)
	measure := func(mode state.TelemetryMode) (all []state.Command) {
		for layer := range tiny().Kasmina {
			all = append(all, state.Command{Action: state.Measure, Layer: layer,
				Telemetry: state.Telemetry{Mode: mode}, Why: "a person asks"})
		}
		return all
	}

	const steps = 25
	var record bytes.Buffer
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: steps})
	require.NoError(t, tr.Grow(Growth{Controller: never{}, Validation: text, Record: &record}))
	before := tr.Model.Kasmina.Lattice(0).Telemetry()
	var answers []<-chan error
	var noted []string
	tr.On(func(e Event) error {
		now := tr.Model.Kasmina.Lattice(0).Telemetry()
		switch {
		case e.Kind == RunStart: // before the first step, which a record could not replay
			answers = append(answers, tr.Ask(Request{Commands: measure(state.Debug)}))
		case e.Kind == Noted:
			noted = append(noted, fmt.Sprint(e.Step, " ", e.Text))
		case e.Kind == StepEnd && e.Step == 1:
			require.Equal(t, state.Debug, now.Mode)
		case e.Kind == StepEnd && e.Step == 12:
			answers = append(answers, tr.Ask(Request{Commands: measure(state.Off),
				Note: "a person asks for less"}))
			require.NotEqual(t, state.Off, now.Mode, "the request must wait for the next step")
		case e.Kind == StepEnd && e.Step == 13:
			require.Equal(t, state.Off, now.Mode)
		case e.Kind == StepEnd && e.Step == 19: // after the next step an epoch ends
			answers = append(answers, tr.Ask(Request{Commands: measure(state.Sampling)}))
		}
		return nil
	})

	require.NoError(t, tr.Run(t.Context()))
	for _, a := range answers {
		require.NoError(t, <-a)
	}

	require.Equal(t, []string{"13 a person asks for less"}, noted)
	require.NotEqual(t, before, tr.Model.Kasmina.Lattice(0).Telemetry())

	read, err := ReadRecord(bytes.NewReader(record.Bytes()))
	require.NoError(t, err)
	for step, n := range map[int]int{1: 1, 13: 1, 20: 1, 0: 0} {
		require.Len(t, read.Commands(step), n*len(tiny().Kasmina), "after step %d", step)
	}

	again := newTrainer(t, trainerOptions{config: tiny(), steps: steps})
	require.NoError(t, again.Grow(Growth{Validation: text, Replay: read}))
	require.NoError(t, again.Run(t.Context()))
	require.Equal(t, tr.Model.Kasmina.Report(), again.Model.Kasmina.Report())
	require.Equal(t, tr.Model.Kasmina.Digest(), again.Model.Kasmina.Digest())
}

// TestRequestsAreAnsweredTruthfully checks that a granted request has taken effect, and that a
// request after the last step is rejected, whatever the run is doing.
func TestRequestsAreAnsweredTruthfully(t *testing.T) {
	off := Request{Commands: []state.Command{{Action: state.Measure,
		Telemetry: state.Telemetry{Mode: state.Off}}}}
	save := Request{Save: true}
	for _, c := range []struct {
		name    string
		when    func(Event) bool
		granted bool
	}{
		{"evaluating", func(e Event) bool { return e.Kind == EvalEnd && e.Step == 2 }, true},
		{"at the last step but one", func(e Event) bool {
			return e.Kind == StepEnd && e.Step == 5
		}, true},
		{"evaluating at the last step", func(e Event) bool {
			return e.Kind == EvalEnd && e.Step == 6
		}, false},
		{"at the last step", func(e Event) bool { return e.Kind == StepEnd && e.Step == 6 }, false},
		{"when the run is interrupted", func(e Event) bool { return e.Kind == Interrupted }, false},
		{"at the end", func(e Event) bool { return e.Kind == RunEnd }, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			text, err := data.NewEvaluation(texttest.Words(9, 60), tokenizer.Bytes{}, 2, tiny().Seq)
			require.NoError(t, err)
			path := filepath.Join(t.TempDir(), "m.safetensors")
			tr := newTrainer(t, trainerOptions{config: tiny(), steps: 6})
			tr.On(Evaluate(tr, text, 2), Checkpoint(tr, path, 0))

			var answers []<-chan error
			saved := 0
			tr.On(func(e Event) error {
				if e.Kind == Saved {
					saved++
				}
				if e.Kind == StepEnd && e.Step == 3 && c.name == "when the run is interrupted" {
					require.NoError(t, tr.Stop("to be interrupted"))
				}
				if c.when(e) {
					answers = append(answers, tr.Ask(off), tr.Ask(save))
				}
				return nil
			})
			err = tr.Run(t.Context())
			require.True(t, err == nil || errors.Is(err, ErrStopped) || errors.Is(err, context.Canceled), "%v",
				err)

			mode := tr.Model.Kasmina.Lattice(0).Telemetry().Mode
			for _, a := range answers {
				if c.granted {
					require.NoError(t, <-a)
				} else {
					require.ErrorIs(t, <-a, state.ErrClosed)
				}
			}
			require.Equal(t, c.granted, mode == state.Off)
			if c.granted && c.name == "evaluating" {
				require.Equal(t, 2, saved)
			} else {
				require.Equal(t, 1, saved, "the checkpoint of the end")
			}

			other := newTrainer(t, trainerOptions{config: tiny(), steps: 6})
			require.NoError(t, other.Resume(t.Context(), path))
			require.Equal(t, mode, other.Model.Kasmina.Lattice(0).Telemetry().Mode,
				"what was granted is in the checkpoint")
			require.ErrorIs(t, tr.Stop("too late"), state.ErrClosed)
		})
	}
}

// TestRecordOfSavesAndStops checks that the record states who requested a save or a stop, and that a
// run which replays the record is neither stopped nor rejected a save.
func TestRecordOfSavesAndStops(t *testing.T) {
	text, err := data.NewEvaluation(texttest.Words(9, 120), tokenizer.Bytes{}, 2, tiny().Seq)
	require.NoError(t, err)
	var record bytes.Buffer
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 9})
	require.NoError(t, tr.Grow(Growth{Controller: never{}, Validation: text, Record: &record}))
	tr.On(Checkpoint(tr, filepath.Join(t.TempDir(), "m.safetensors"), 0), func(e Event) error {
		switch {
		case e.Kind == StepEnd && e.Step == 3:
			tr.Ask(Request{Save: true, Note: "Ann asked to save"})
		case e.Kind == StepEnd && e.Step == 6:
			return tr.Stop("Bob asked to stop")
		}
		return nil
	})

	require.ErrorContains(t, tr.Run(t.Context()), "Bob asked to stop")
	require.Contains(t, record.String(),
		`"asked":"save","why":"Ann asked to save"`+"}\n")
	require.Contains(t, record.String(), `{"step":6,`)
	require.True(t, strings.HasSuffix(record.String(),
		`"asked":"stop","why":"Bob asked to stop"`+"}\n"), record.String())

	read, err := ReadRecord(bytes.NewReader(record.Bytes()))
	require.NoError(t, err)
	again := newTrainer(t, trainerOptions{config: tiny(), steps: 9})
	require.NoError(t, again.Grow(Growth{Validation: text, Replay: read}))
	saved := []int{}
	again.On(Checkpoint(again, filepath.Join(t.TempDir(), "m.safetensors"), 0),
		func(e Event) error {
			switch {
			case e.Kind == Saved:
				saved = append(saved, e.Step)
			case e.Kind == StepEnd && e.Step == 4:
				return again.SaveSoon()
			}
			return nil
		})

	require.NoError(t, again.Run(t.Context()))
	require.Equal(t, []int{5, 9}, saved)
}

// TestNote checks that a note is emitted once, after the step, and that a note outside a run is dropped.
func TestNote(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 4})
	tr.Note("too early")
	var told []string
	tr.On(func(e Event) error {
		switch {
		case e.Kind == StepEnd && e.Step == 2:
			tr.Note("somebody asks")
		case e.Kind == Noted:
			told = append(told, fmt.Sprint(e.Step, " ", e.Text))
		}
		return nil
	})

	require.NoError(t, tr.Run(t.Context()))
	require.Equal(t, []string{"3 somebody asks"}, told)
}

// TestStopAndSave checks that a run saves and stops on request, after the current step.
func TestStopAndSave(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 20})
	require.ErrorIs(t, tr.SaveSoon(), state.ErrClosed)
	tr.Stop("nothing goes on")
	var unsaved error
	tr.On(func(e Event) error {
		if e.Kind == StepEnd && e.Step == 1 {
			unsaved = tr.SaveSoon()
			tr.Stop("to add a checkpoint")
		}
		return nil
	})

	require.ErrorContains(t, tr.Run(t.Context()), "to add a checkpoint")
	require.ErrorContains(t, unsaved, "no Checkpoint")
	tr.On(Checkpoint(tr, filepath.Join(t.TempDir(), "m.safetensors"), 0))
	var saved []int
	tr.On(func(e Event) error {
		switch {
		case e.Kind == Saved:
			saved = append(saved, e.Step)
		case e.Kind == StepEnd && e.Step == 4:
			return tr.SaveSoon()
		case e.Kind == StepEnd && e.Step == 7:
			tr.Stop("enough")
		}
		return nil
	})

	err := tr.Run(t.Context())
	require.ErrorIs(t, err, ErrStopped)
	require.NotErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "enough")
	require.Equal(t, []int{5, 7}, saved)
	require.NoError(t, tr.Run(t.Context()))
	require.Equal(t, []int{5, 7, 20}, saved)
}

// frozen returns the options of a run that freezes the tiny model without Kasmina layers, whose weights can
// only grow LoRA.
func frozen(directed bool, steps int) trainerOptions {
	c := tiny()
	c.Kasmina, c.Seeds, c.Slots = nil, 0, 0
	c.Weights = c.WeightSites("q", "k", "v", "o", "gate", "up", "down")
	return trainerOptions{config: c, steps: steps, frozen: true, directed: directed}
}

// hostBits returns a checksum of each of the model's own parameters.
func hostBits(t *testing.T, tr *Trainer) map[string]uint32 {
	all := learntBy(t, tr)
	for name := range all {
		if strings.HasPrefix(name, "kasmina.") {
			delete(all, name)
		}
	}
	return all
}

// TestAdapters checks that LoRA learns in a frozen model with every placement strategy, and that the
// model's own parameters remain unchanged, bit for bit. A run that resumes after any step, or replays
// the record, reproduces the uninterrupted run bit for bit. All blueprints are merged at the end.
func TestAdapters(t *testing.T) {
	for _, where := range []control.Where{control.Unhealthiest, control.AtRandom, control.AllAtOnce} {
		t.Run("where "+string(where), func(t *testing.T) {
			const steps = 12
			dir := t.TempDir()
			path := func(step int) string { return filepath.Join(dir, fmt.Sprint(step)) }
			options := frozen(where == control.Unhealthiest, steps)
			var record bytes.Buffer
			growth := func() Growth {
				a := control.NewAdapters(700)
				a.Where = where
				if where != control.Unhealthiest {
					a.Rank = 1
				}
				return Growth{Controller: a, Record: &record}
			}
			whole := newTrainer(t, options)
			require.NoError(t, whole.Grow(growth()))
			before := hostBits(t, whole)
			whole.On(MergeAtEnd(whole), func(e Event) error {
				if e.Kind != StepEnd {
					return nil
				}
				require.NotEmpty(t, whole.Model.Planted)
				require.Equal(t, before, hostBits(t, whole), "step %d", e.Step)
				return whole.Save(path(e.Step))
			})
			from := whole.Loader.State()
			b, err := whole.Loader.Next()
			require.NoError(t, err)
			require.NoError(t, whole.Loader.SetState(from))
			b.Inputs, b.Targets = slices.Clone(b.Inputs), slices.Clone(b.Targets)
			first, err := whole.driver.loss(b)
			require.NoError(t, err)
			require.NoError(t, whole.Run(context.Background()))
			last, err := whole.driver.loss(b)
			require.NoError(t, err)
			require.Less(t, last, first)
			require.Empty(t, whole.Model.Planted)
			want := learntBy(t, whole)
			require.NotEqual(t, before, want)
			lines := record.String()
			for _, step := range randtest.Ints(t, 3, 1, steps-1) {
				tr := newTrainer(t, options)
				require.NoError(t, tr.Grow(growth()))
				require.NoError(t, tr.Resume(context.Background(), path(step)), "step %d", step)
				tr.On(MergeAtEnd(tr))
				require.NoError(t, tr.Run(context.Background()), "step %d", step)
				require.Equal(t, want, learntBy(t, tr), "from step %d", step)
			}
			again := newTrainer(t, options)
			replay, err := ReadRecord(strings.NewReader(lines))
			require.NoError(t, err)
			var repeated bytes.Buffer
			require.NoError(t, again.Grow(Growth{Replay: replay, Record: &repeated}))
			again.On(MergeAtEnd(again))
			require.NoError(t, again.Run(context.Background()))
			require.Equal(t, want, learntBy(t, again))
			require.Equal(t, lines, repeated.String())
			require.Equal(t, whole.Model.Kasmina.Digest(), again.Model.Kasmina.Digest())
		})
	}
}

// TestAdaptersBudget checks that gradient-directed placement uses nearly all of the parameter budget and
// does not exceed it.
func TestAdaptersBudget(t *testing.T) {
	const budget = 500
	tr := newTrainer(t, frozen(true, 1))
	require.NoError(t, tr.Grow(Growth{Controller: control.NewAdapters(budget)}))
	host := tr.Model.NumParams()
	require.NoError(t, tr.Run(context.Background()))
	require.InDelta(t, budget, tr.Model.NumParams()-host, 32)
	require.LessOrEqual(t, tr.Model.NumParams()-host, budget)
	for _, p := range tr.Model.Planted {
		square := 0.0
		for _, v := range tr.Model.Param(p.Prefix() + "a").Float32s() {
			square += float64(v) * float64(v)
		}
		require.InEpsilon(t, p.Size, square, 0.2, "rows of length 1, which a step has moved")
	}
}

// TestFrozenAlone checks that a frozen model without blueprints reports that nothing can learn, and that
// it learns after a blueprint has been planted by hand.
func TestFrozenAlone(t *testing.T) {
	tr := newTrainer(t, frozen(false, 2))
	require.ErrorContains(t, tr.Run(context.Background()), "nothing is planted")
	layer := tr.Model.LayerAt(blueprints.Weight)
	commands := []state.Command{germinate(3, blueprints.LoRA, 2), move(3, state.Training)}
	for i := range commands {
		commands[i].Layer = layer
	}

	require.NoError(t, tr.Model.Kasmina.Do(commands...))
	require.NoError(t, tr.Run(context.Background()))
	require.Len(t, tr.Model.Planted, 1)

	for want, change := range map[string]func(*trainerOptions){
		"TrainConfig.Frozen is set":   func(o *trainerOptions) { o.config.Weights = nil },
		"TrainConfig.Directed is set": func(o *trainerOptions) { o.frozen = false },
		"1 seeds in Depth":            func(o *trainerOptions) { o.config.Depth = 1 },
	} {
		o := frozen(true, 1)
		change(&o)
		m, err := NewModel(o.config, tensor.Float32, 1)
		require.NoError(t, err)
		_, err = NewTrainer(m, tr.Loader, tr.Optimizer, TrainConfig{Steps: 1, Batch: 3, Frozen: o.frozen,
			Directed: o.directed, Schedule: optim.Constant(0.1)})
		require.ErrorContains(t, err, want)
	}

	// A checkpoint of the run does not continue without freezing the model.
	path := filepath.Join(t.TempDir(), "run.safetensors")
	require.NoError(t, tr.Save(path))
	thawed := frozen(false, 2)
	thawed.frozen = false
	err := newTrainer(t, thawed).Resume(t.Context(), path)
	require.ErrorIs(t, err, ErrSettings)
	require.ErrorContains(t, err, "Frozen is false here and true there")
}

// TestBudgets checks that a controller is rejected if its budget fits no blueprint, its sizes fit no
// place, or its epochs end before they start, and that the error names the smallest sufficient value,
// which must then be accepted.
func TestBudgets(t *testing.T) {
	text, err := data.NewEvaluation(texttest.Words(9, 120), tokenizer.Bytes{}, 2, tiny().Seq)
	require.NoError(t, err)
	stream := tiny()
	stream.Kasmina, stream.Seeds, stream.Slots, stream.Streams = nil, 0, 0, []int{0, 1}
	heuristic := func(change func(*control.Heuristic)) state.Controller {
		h := control.NewHeuristic(4, 1<<20)
		h.Features = 8
		change(h)
		return h
	}

	adapters := func(most, rank int, where control.Where) state.Controller {
		a := control.NewAdapters(most)
		a.Rank, a.Where = rank, where
		return a
	}
	for name, c := range map[string]struct {
		config Config
		by     state.Controller
		want   string
	}{
		"stream": {stream, heuristic(func(h *control.Heuristic) { h.MaxParameters = 399 }),
			"MaxParameters is 399, and the smallest possible blueprint has 400"},
		"stream, enough": {stream, heuristic(func(h *control.Heuristic) { h.MaxParameters = 400 }), ""},
		"stream, wide": {stream, heuristic(func(h *control.Heuristic) { h.Features = 1000 }),
			"no blueprint of its size fits any of the 2 seeds: lower its Features, 1000"},
		"epochs": {stream, heuristic(func(h *control.Heuristic) { h.Begin, h.End = 5, 5 }),
			"End is 5 and Begin is 5"},
		"nothing": {stream, heuristic(func(h *control.Heuristic) { h.MaxActive = 0 }), ""},
		"chunks": {tiny(), heuristic(func(h *control.Heuristic) { h.MaxParameters = 4 }),
			"MaxParameters is 4, and the smallest possible blueprint has 5"},
		"adapters": {frozen(true, 1).config, adapters(23, 4, control.Unhealthiest),
			"MaxParameters is 23, and the smallest possible blueprint has 24"},
		"adapters, enough": {frozen(true, 1).config, adapters(24, 4, control.Unhealthiest), ""},
		"adapters at random": {frozen(true, 1).config, adapters(24, 4, control.AtRandom),
			"the smallest possible blueprint has 96"},
		"adapters of a high rank": {frozen(true, 1).config, adapters(1e6, 17, control.AllAtOnce),
			"no blueprint of its size fits any of the 14 seeds: lower its Rank, 17"},
	} {
		tr := newTrainer(t, trainerOptions{config: c.config, steps: 1000})
		err := tr.Grow(Growth{Controller: c.by, Validation: text})
		if c.want == "" {
			require.NoError(t, err, name)
			continue
		}
		require.ErrorIs(t, err, state.ErrArgument, name)
		require.ErrorContains(t, err, c.want, name)
	}
}
