package llm

import (
	"context"
	"sync"

	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/state"
)

// The engine and the configuration are read in the model's turn, because a Resume on another
// goroutine may replace them.

// currentEngine returns the engine as it is now.
func (t *Trainer) currentEngine() Engine {
	defer take(t.Model)()
	return t.driver.engine
}

// config returns the model's configuration as it is now.
func (t *Trainer) config() Config {
	defer take(t.Model)()
	return t.Model.Config
}

// canScore returns an error unless the model can score a text.
func (t *Trainer) canScore(text *data.Evaluation) error {
	if err := t.made(); err != nil {
		return err
	}
	defer take(t.Model)()
	return t.canEvaluate(text)
}

// agreeNow is agree for callers outside the model's turn.
func (t *Trainer) agreeNow(err error) error {
	e, _ := t.currentEngine().(Parallel)
	return agreed(e, err)
}

// busyNow is busy for callers outside the model's turn.
func (t *Trainer) busyNow(what string) (done func()) { return busy(t.currentEngine(), what) }

// parallel reports whether the trainer may be one of several ranks.
func (t *Trainer) parallel() bool {
	_, ok := t.currentEngine().(Parallel)
	return ok
}

// writesNow is writes for callers outside the model's turn.
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

// addSaver counts a callback that saves.
func (t *Trainer) addSaver() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.steering.savers++
}

// decoder returns a decoder whose every call is a turn of its own. When the model or the engine has
// changed since the last call, as by a Resume on another goroutine, it starts again with those.
func (t *Trainer) decoder() (logitsFunc, error) {
	var next logitsFunc
	var changes uint64
	renew := func() (err error) {
		if now := changesOf(t.Model); next == nil || now != changes {
			next, err = t.driver.engine.Decoder()
			changes = now
		}
		return err
	}

	if err := t.inTurn(renew); err != nil {
		return nil, err
	}

	return func(ctx context.Context, tokens []int) (logits any, err error) {
		err = t.inTurn(func() error {
			if err := renew(); err != nil {
				return err
			}
			logits, err = next(ctx, tokens)
			return err
		})
		return logits, err
	}, nil
}

// opTimes is that of the trainer's engine, also when a step has failed.
func (t *Trainer) opTimes(p Profiler) ([]OpTime, error) {
	defer take(t.Model)()
	if t.phase == closed {
		return nil, nil
	}
	return p.OpTimes()
}

// seedEvents gathers what happens to seeds during a run. Whoever makes it happen adds to it, on
// whatever goroutine.
type seedEvents struct {
	mu   sync.Mutex
	list []state.Event
}

func (s *seedEvents) add(e state.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, e)
}

// take returns the gathered events and empties the list.
func (s *seedEvents) take() []state.Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.list
	s.list = nil
	return list
}

// tellEpoch tells the callbacks of the seeds if the last step has ended an epoch of the lattices,
// or somebody has steered behind it.
func (t *Trainer) tellEpoch() error {
	steered := t.steering.told
	t.steering.told = false
	if t.Step()%t.Config.Epoch != 0 && !steered {
		return nil
	}
	return t.tellSeeds(t.happened.take())
}

// tellRest tells the callbacks what has happened to seeds since the last epoch, if anything has.
func (t *Trainer) tellRest() error {
	happened := t.happened.take()
	if len(happened) == 0 {
		return nil
	}
	return t.tellSeeds(happened)
}

func (t *Trainer) tellSeeds(happened []state.Event) error {
	if t.Model.Kasmina.Layers() == 0 {
		return nil
	}
	reports := t.Model.Kasmina.Report()
	return t.emit(EpochEnd, func(e *Event) { e.Reports, e.SeedEvents = reports, happened })
}
