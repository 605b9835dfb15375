package llm

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/optime"
	"github.com/kasmina-go/kasmina/state"
)

// Callbacks and the exported methods of the trainer that they call run without the model's lock. The methods
// in this file give them access to the trainer: they lock the model to read the engine and the
// configuration, because a Resume on another goroutine may replace both.

// currentEngine returns the engine in use.
func (t *Trainer) currentEngine() Engine {
	defer take(t.Model)()
	return t.driver.engine
}

// config returns the model's current configuration.
func (t *Trainer) config() Config {
	defer take(t.Model)()
	return t.Model.Config
}

// canScore returns an error unless the model can score a text.
func (t *Trainer) canScore(text *data.Evaluation) error {
	defer take(t.Model)()
	return t.canEvaluate(text)
}

// agreeNow calls agreed for callers that have not locked the model.
func (t *Trainer) agreeNow(err error) error {
	e, _ := t.currentEngine().(Parallel)
	return agreed(e, err)
}

// busyNow calls busy for callers that have not locked the model.
func (t *Trainer) busyNow(what string) (done func()) { return busy(t.currentEngine(), what) }

// parallel reports whether the trainer may be one of several ranks.
func (t *Trainer) parallel() bool {
	_, ok := t.currentEngine().(Parallel)
	return ok
}

// writesNow reports whether this rank writes files, for callers that have not locked the model.
func (t *Trainer) writesNow() bool {
	e, ok := t.currentEngine().(Parallel)
	return !ok || e.Rank() == 0
}

// rankCount returns the number of ranks, which is 1 for a single process.
func (t *Trainer) rankCount() int {
	if e, ok := t.currentEngine().(Parallel); ok {
		return e.Ranks()
	}
	return 1
}

// addSaver counts a callback that saves checkpoints.
func (t *Trainer) addSaver() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.steering.savers++
}

// addEvaluation registers an Evaluate callback with its interval.
func (t *Trainer) addEvaluation(every int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.evaluations = append(t.evaluations, every)
}

// evaluates reports whether an Evaluate callback emits EvalEnd when it receives the event.
func (t *Trainer) evaluates(e Event) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.ContainsFunc(t.evaluations, func(every int) bool { return due(e, every) })
}

// meet waits until all ranks are about to start an operation that needs all of them. If a callback has failed
// on one rank instead, meet returns the error of that callback on all ranks.
func (t *Trainer) meet() error { return t.agreeNow(nil) }

// decoder returns a decoder that locks the model during each call. If the model or the engine has changed
// since the last call, as after a Resume on another goroutine, the decoder starts again with the new one.
func (t *Trainer) decoder() (logitsFunc, error) {
	var next logitsFunc
	var changes uint64 // the model's count of changes when next was created
	refresh := func() (err error) {
		if now := changesOf(t.Model); next == nil || now != changes {
			next, err = t.driver.engine.Decoder()
			changes = now
		}
		return err
	}

	if err := t.inTurn(refresh); err != nil {
		return nil, err
	}

	return func(ctx context.Context, tokens []int) (logits any, err error) {
		err = t.inTurn(func() error {
			if err := refresh(); err != nil {
				return err
			}
			logits, err = next(ctx, tokens)
			return err
		})
		return logits, err
	}, nil
}

// drawer returns a function that draws tokens on the engine's device, or nil if the engine does not. Like decoder, it
// locks the model during each call.
func (t *Trainer) drawer() (DrawFunc, error) {
	var next DrawFunc
	var changes uint64
	refresh := func() (err error) {
		if now := changesOf(t.Model); next == nil || now != changes {
			if d, ok := t.driver.engine.(drawer); ok {
				next, err = d.Drawer()
			}
			changes = now
		}
		return err
	}

	if err := t.inTurn(refresh); err != nil || next == nil {
		return nil, err
	}

	return func(ctx context.Context, tokens []int, s *sampler.Sampler, last bool) (id int, err error) {
		err = t.inTurn(func() error {
			if err := refresh(); err != nil {
				return err
			}
			if next == nil {
				return errors.New("the engine that draws tokens has been replaced by one that does not: start again")
			}
			id, err = next(ctx, tokens, s, last)
			return err
		})
		return id, err
	}, nil
}

// drawer is an engine that can draw tokens on its device.
type drawer interface{ Drawer() (DrawFunc, error) }

// opTimes returns the op times of the trainer's engine, even if a step has failed.
func (t *Trainer) opTimes(p Profiler) ([]optime.OpTime, error) {
	defer take(t.Model)()
	if t.phase == closed {
		return nil, nil
	}
	return p.OpTimes()
}

// seedEvents collects the seed events of a run, which may come from any goroutine.
type seedEvents struct {
	mu   sync.Mutex
	list []state.Event
}

func (s *seedEvents) add(e state.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, e)
}

// take returns the collected events and empties the list.
func (s *seedEvents) take() []state.Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.list
	s.list = nil
	return list
}

// emitEpochEnd emits EpochEnd with the seed events since the previous one, if the last step completed an epoch
// of the lattices or the seeds have been steered since the events of the previous step.
func (t *Trainer) emitEpochEnd() error {
	steered := t.steering.told
	t.steering.told = false
	if t.Step()%t.Config.Epoch != 0 && !steered {
		return nil
	}
	return t.emitSeedEvents(t.happened.take())
}

// emitRest emits EpochEnd at the end of a run if there have been seed events since the previous EpochEnd.
func (t *Trainer) emitRest() error {
	happened := t.happened.take()
	if len(happened) == 0 {
		return nil
	}
	return t.emitSeedEvents(happened)
}

// emitSeedEvents emits EpochEnd with the given seed events and a report on each lattice, if there are any lattices.
func (t *Trainer) emitSeedEvents(happened []state.Event) error {
	if t.Model.Kasmina.Layers() == 0 {
		return nil
	}
	reports := t.Model.Kasmina.Report()
	return t.emit(EpochEnd, func(e *Event) { e.Reports, e.SeedEvents = reports, happened })
}
