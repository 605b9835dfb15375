package llm

import (
	"fmt"
	"math"

	"github.com/kasmina-go/kasmina/internal/jsonfloat"
)

// An EarlyStopping is a [Part] that stops a run when the held-out loss no longer improves. Every
// checkpoint contains the best loss.
type EarlyStopping struct {
	t        *Trainer
	patience int
	least    float64
	best     float64
	waited   int // evaluations since the best one
	step     int // step of the latest evaluation
}

// NewEarlyStopping returns a part that stops the run of a trainer after the given number of consecutive
// evaluations, at least 1, without lowering the best held-out loss by more than least nats per token. Run
// then returns an error that wraps [ErrStopped]. Running or resuming a run that has stopped returns this error
// without a further step.
//
// [Trainer.Use] adds it to the trainer. The evaluations are performed by an [Evaluate] callback.
func NewEarlyStopping(t *Trainer, patience int, least float64) (*EarlyStopping, error) {
	switch {
	case patience < 1:
		return nil, fmt.Errorf("llm: NewEarlyStopping: the patience is %d, want at least 1", patience)
	case !(least >= 0) || math.IsInf(least, 0):
		return nil, fmt.Errorf("llm: NewEarlyStopping: the least improvement is %v, want a finite number "+
			"of at least 0", least)
	}

	s := &EarlyStopping{t: t, patience: patience, least: least, best: math.Inf(1)}
	t.team.addMeeting(func(e Event) bool { return e.Step != s.step && t.evaluates(e) })
	return s, nil
}

// Name implements [Part].
func (s *EarlyStopping) Name() string { return "early-stopping" }

// Receive implements [EventReceiver].
func (s *EarlyStopping) Receive(e Event) error {
	switch e.Kind {
	case EvalEnd:
		// Ranks meet after every evaluation, because a rank whose callback failed earlier cannot know
		// the result.
		if err := s.t.meet(); err != nil {
			return err
		}
		s.count(e)
	case RunStart: // the run may have stopped already
	default:
		return nil
	}

	if s.waited < s.patience || e.Last {
		return nil
	}

	s.t.team.stopNow()
	return s.t.Stop(fmt.Sprintf("the held-out loss has not improved on %.4f in %d evaluations", s.best,
		s.waited))
}

// count counts an evaluation. A step may be evaluated again when its run is started again.
func (s *EarlyStopping) count(e Event) {
	switch {
	case e.Step == s.step && e.Step > 0:
	case e.ValLoss < s.best-s.least:
		s.best, s.waited = e.ValLoss, 0
	default:
		s.waited++
	}
	s.step = e.Step
}

// stoppingState is the state of an EarlyStopping in a checkpoint.
type stoppingState struct {
	Patience int             `json:"patience"`
	Least    float64         `json:"least"`
	Best     jsonfloat.Float `json:"best"`
	Waited   int             `json:"waited"`
	Step     int             `json:"step"` // 0 in checkpoints of earlier versions
}

// Save implements [Part].
func (s *EarlyStopping) Save(w *CheckpointWriter) error {
	w.Value("state", stoppingState{s.patience, s.least, jsonfloat.Float(s.best), s.waited, s.step})
	return nil
}

// Load implements [Part].
func (s *EarlyStopping) Load(r *CheckpointReader) (install func(), err error) {
	var saved stoppingState
	if err := r.Value("state", &saved); err != nil {
		return nil, err
	}
	if saved.Patience != s.patience || saved.Least != s.least {
		r.Differs("it waits for %d evaluations without an improvement of more than %v, and the run waited for %d "+
			"and %v", s.patience, s.least, saved.Patience, saved.Least)
	}
	return func() { s.best, s.waited, s.step = bestOf(saved.Best), saved.Waited, saved.Step }, nil
}

// bestOf returns the best loss in a checkpoint, which is infinite before the first evaluation.
func bestOf(saved jsonfloat.Float) float64 {
	if math.IsNaN(float64(saved)) {
		return math.Inf(1)
	}
	return float64(saved)
}

// A BestCheckpoint is a [Part] that saves a checkpoint whenever an evaluation lowers the best
// held-out loss, so that the file always holds the best step so far.
type BestCheckpoint struct {
	*checkpointer
	best float64
	seen int // step of the latest evaluation
}

// NewBestCheckpoint returns a part that keeps the best checkpoint of a trainer's runs in the file at
// path. It takes the options of [Checkpoint], but InBackground has no effect. Saving emits a Saved event.
//
// [Trainer.Use] adds it to the trainer. The evaluations are performed by an [Evaluate] callback.
func NewBestCheckpoint(t *Trainer, path string, opts ...CheckpointOption) (*BestCheckpoint, error) {
	c := &checkpointer{t: t, path: path, write: saveWhole}
	for _, opt := range opts {
		opt(c)
	}

	b := &BestCheckpoint{checkpointer: c, best: math.Inf(1)}
	t.team.addMeeting(func(e Event) bool { return e.Step != b.seen && t.evaluates(e) })
	return b, nil
}

// Name implements [Part].
func (b *BestCheckpoint) Name() string { return "best-checkpoint" }

// Receive implements [EventReceiver].
func (b *BestCheckpoint) Receive(e Event) error {
	switch e.Kind {
	case RunStart:
		b.seen = e.Step
		return b.begin()
	case RunEnd:
		return b.end()
	case EvalEnd:
		// Ranks meet after every evaluation, because a rank whose callback failed earlier cannot know
		// the result.
		if err := b.t.meet(); err != nil {
			return err
		}
		b.seen = e.Step

		if e.ValLoss < b.best {
			return b.saveBest(e)
		}
	}

	return nil
}

// saveBest saves the model with the best loss so far. If the file cannot be written, the previous loss remains
// the best one, because the file still holds its model.
func (b *BestCheckpoint) saveBest(e Event) error {
	previous := b.best
	b.best = e.ValLoss // before saving, because the checkpoint contains it

	err := b.save(e.Step)
	if err != nil && b.complete != e.Step {
		b.best = previous
	}
	return err
}

// Save implements [Part].
func (b *BestCheckpoint) Save(w *CheckpointWriter) error {
	w.Value("loss", jsonfloat.Float(b.best))
	return nil
}

// Load implements [Part].
func (b *BestCheckpoint) Load(r *CheckpointReader) (install func(), err error) {
	var best jsonfloat.Float
	if err := r.Value("loss", &best); err != nil {
		return nil, err
	}
	return func() { b.best = bestOf(best) }, nil
}
