package llm

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/kasmina-go/kasmina/optim"
)

// ErrDiverged is wrapped by the error of a run whose loss, gradients or parameters are no longer finite. Parameters are
// those before the step that failed, unless its update overflowed; such ones are never saved, and the trainer refuses to go on from them.
var ErrDiverged = errors.New("training diverged")

// TrainConfig says how a model is trained.
type TrainConfig struct {
	Steps      int            // the run ends after this many optimiser steps, counted from the model's initialisation
	Batch      int            // sequences in a batch
	Accumulate int            // batches whose mean gradient makes one step; 0 means 1
	Schedule   optim.Schedule // learning rate of each step
	Clip       float64        // limit of the global gradient norm; 0 for none
	Epoch      int            // steps in an epoch of the Kasmina lattices; 0 means 10
	Recompute  bool           // save memory: compute the inside of each block again for its gradient

	// Engine makes what computes the steps; nil for the CPU's. It gets the TrainConfig with its defaults filled in.
	Engine func(*Model, optim.Optimizer, TrainConfig) (Engine, error)

	Notes map[string]string // saved with every checkpoint, for ReadNotes: what the program wants to know on resumption, up to 256 KiB
}

func (c *TrainConfig) check() error {
	if c.Accumulate == 0 {
		c.Accumulate = 1
	}
	if c.Epoch == 0 {
		c.Epoch = 10
	}
	switch {
	case c.Steps < 1:
		return fmt.Errorf("llm: TrainConfig.Steps is %d, want at least 1", c.Steps)
	case c.Batch < 1:
		return fmt.Errorf("llm: TrainConfig.Batch is %d, want at least 1", c.Batch)
	case c.Accumulate < 1:
		return fmt.Errorf("llm: TrainConfig.Accumulate is %d, want at least 1", c.Accumulate)
	case c.Schedule == nil:
		return errors.New("llm: TrainConfig.Schedule is nil, want one such as optim.WarmupCosine")
	case !(c.Clip >= 0) || math.IsInf(c.Clip, 0):
		return fmt.Errorf("llm: TrainConfig.Clip is %v, want a finite number of at least 0", c.Clip)
	case c.Epoch < 1:
		return fmt.Errorf("llm: TrainConfig.Epoch is %d, want at least 1", c.Epoch)
	}
	if notes, err := json.Marshal(c.Notes); err != nil || len(notes) > maxNotes {
		return fmt.Errorf("llm: TrainConfig.Notes takes %d bytes as JSON, want at most %d: keep long texts in files of their own", len(notes), maxNotes)
	}
	return nil
}

// Trainer trains a model on batches of a loader. What else a run does (showing progress, evaluating, saving) is up to its
// callbacks. Commands that are submitted to Model.Kasmina, from whatever goroutine, take effect after a step and before its
// StepEnd, or when the run begins or ends.
//
// A step leaves blueprints with which no seed learns as they are, unless the optimiser decays weights, as optim.NewAdamW does
// by default: optim.WithGroup(optim.NameContains("kasmina"), optim.Decay(0)) spares them.
type Trainer struct {
	Model     *Model
	Loader    *Loader
	Optimizer optim.Optimizer
	Config    TrainConfig

	engine    Engine
	callbacks []Callback
	growth    *Growth         // nil without a controller
	grew      *growthSettings // of the run that was resumed, until Run has compared it; or nil
	learning  [][]bool        // slots of each Kasmina layer that learned at the last step; nil before the first
	last      Event
	started   time.Time
	ctx       context.Context // of Run; nil outside
	apart     error           // why the engine's parameters are not the model's, after a Resume that failed
	spoiled   error           // of the update that overflowed, until a Resume: its parameters may be finite, but are of no step
	closed    bool
}

// NewTrainer returns a trainer at step 0. The loader's sequences must be as long as the model's, and its tokens inside the
// model's vocabulary. Trainers of the same model take turns: each goes on with what the others have made of it.
func NewTrainer(m *Model, l *Loader, o optim.Optimizer, c TrainConfig) (*Trainer, error) {
	switch {
	case m == nil:
		return nil, errors.New("llm: NewTrainer: the model is nil")
	case l == nil:
		return nil, errors.New("llm: NewTrainer: the loader is nil")
	case o == nil:
		return nil, errors.New("llm: NewTrainer: the optimiser is nil, want one such as optim.NewAdamW returns")
	}
	if err := c.check(); err != nil {
		return nil, err
	}
	if v := l.tokens.VocabSize(); v > m.Config.Vocab {
		return nil, fmt.Errorf("llm: the loader's tokens are of a vocabulary of %d, want at most Config.Vocab, %d", v, m.Config.Vocab)
	}
	if l.config.Seq != m.Config.Seq || l.config.Batch != c.Batch {
		return nil, fmt.Errorf("llm: the loader makes batches of %d × %d tokens, want %d × %d: TrainConfig.Batch by Config.Seq",
			l.config.Batch, l.config.Seq, c.Batch, m.Config.Seq)
	}
	if m.Config.Documents && l.starts == nil {
		return nil, errors.New("llm: Config.Documents: the loader's tokens do not say where documents end; want those that Tokenize makes with a " +
			"ByteTokenizer, or CacheTokens with a BPE or another tokenizer that has a method EndOfDocument() int")
	}
	t := &Trainer{Model: m, Loader: l, Optimizer: o, Config: c}
	if c.Engine == nil {
		c.Engine = CPUEngine()
	}
	if err := m.pull(); err != nil { // from the trainer whose turn it was
		return nil, fmt.Errorf("llm: NewTrainer: %w", err)
	}
	var err error
	if t.engine, err = c.Engine(m, o, c); err != nil {
		return nil, err
	}
	m.trainer = t
	t.last = Event{Steps: c.Steps, StepTokens: c.Batch * c.Accumulate * m.Config.Seq, Params: m.NumParams(), Seeds: m.NumSeeds(),
		Loss: math.NaN(), ValLoss: math.NaN(), ValBPB: math.NaN()}
	return t, nil
}

// On adds callbacks, which see events in the order in which they were added. One that changes the model or its lattices
// must stand before one that saves, or a resumed run would miss its last change.
func (t *Trainer) On(callbacks ...Callback) { t.callbacks = append(t.callbacks, callbacks...) }

// Step returns the number of optimiser steps that the model has seen.
func (t *Trainer) Step() int { return t.last.Step }

// Last returns the latest event, with everything that is known of the run so far.
func (t *Trainer) Last() Event { return t.last }

// Close frees the machines. The model is left as it was trained; the trainer can do no more.
func (t *Trainer) Close() error {
	if t.closed {
		return nil
	}
	t.closed = true
	var err error
	if t.Model.trainer == t {
		err = t.Model.pull()
		t.Model.trainer = nil
	}
	return errors.Join(err, t.engine.Close())
}

// usable returns an error when the trainer cannot work with the model. If it is another one's turn, that ends here.
func (t *Trainer) usable() error {
	switch {
	case t.closed:
		return errClosed
	case t.Model.trainer != t:
		return t.takeOver()
	case t.apart != nil:
		return fmt.Errorf("the engine %s has not taken the checkpoint's parameters, so the trainer cannot be used before another Resume: %w",
			t.engine.Name(), t.apart)
	case t.spoiled != nil:
		return fmt.Errorf("the trainer cannot be used before a Resume, since its last update failed: %w", t.spoiled)
	}
	return nil
}

var errClosed = errors.New("the trainer is closed")

// takeOver gives the engine what another trainer has made of the model.
func (t *Trainer) takeOver() error {
	if err := t.Model.pull(); err != nil {
		return err
	}
	t.Model.trainer = nil
	if err := t.engine.Push(); err != nil {
		return fmt.Errorf("the engine %s has not taken what another trainer has made of the model: %w", t.engine.Name(), err)
	}
	t.Model.trainer, t.apart, t.spoiled = t, nil, nil
	return nil
}

// emit tells all callbacks of an event. They may emit further ones, such as EvalEnd. After an error the rest hear only of
// events that are a last chance to save and to close files.
func (t *Trainer) emit(kind EventKind, set func(*Event)) error {
	t.last.Kind, t.last.Elapsed = kind, time.Since(t.started)
	e := t.last
	if set != nil {
		set(&e)
	}
	var errs error
	for _, c := range t.callbacks {
		errs = errors.Join(errs, c(e))
		if errs != nil && kind != Interrupted && kind != RunEnd {
			return errs
		}
	}
	return errs
}

// Run trains until Config.Steps, until a callback or a step fails, or until the context ends, which is checked between
// steps and within evaluations and samples; in every case the callbacks see RunEnd.
func (t *Trainer) Run(ctx context.Context) error {
	for i, c := range t.callbacks {
		if c == nil {
			return fmt.Errorf("llm: Trainer.Run: callback %d is nil", i)
		}
	}
	if err := t.usable(); err != nil {
		return fmt.Errorf("llm: Trainer.Run: %w", err)
	}
	if diff := t.growsAs(t.grew); len(diff) > 0 {
		return fmt.Errorf("llm: Trainer.Run: %w: %s", ErrSettings, withRemedy(diff))
	}
	t.grew = nil
	t.ctx = ctx
	defer func() { t.ctx = nil }()
	t.started, t.last.RunTokens = time.Now(), 0
	t.Model.Kasmina.Apply()
	err := t.emit(RunStart, nil)
	if err == nil && t.last.Step >= t.Config.Steps {
		err = t.emit(Complete, nil)
	}
	for err == nil && t.stopped() == nil && t.last.Step < t.Config.Steps {
		if err = t.step(); err == nil {
			err = errors.Join(t.tellChoices(), t.emit(StepEnd, nil))
		}
	}
	if err == nil && t.stopped() != nil {
		err = errors.Join(t.stopped(), t.emit(Interrupted, nil))
	}
	t.Model.Kasmina.Apply()
	return errors.Join(err, t.emit(RunEnd, func(e *Event) { e.Err = err }))
}

// tellChoices tells the callbacks, behind the first step of a run, which makes the last choices, how ops are computed.
func (t *Trainer) tellChoices() error {
	c, ok := t.engine.(Chooser)
	if !ok || t.last.RunTokens != int64(t.last.StepTokens) {
		return nil
	}
	choices := c.Choices()
	if len(choices) == 0 {
		return nil
	}
	return t.emit(Chosen, func(e *Event) { e.Choices = choices })
}

// stopped returns why the run's context has ended, if it has.
func (t *Trainer) stopped() error {
	if t.ctx == nil {
		return nil
	}
	return context.Cause(t.ctx)
}

// step computes the gradients of one optimiser step and applies them. On an error the parameters are as before, unless the
// update itself overflowed, and the gradients gathered so far are dropped.
func (t *Trainer) step() error {
	if err := t.usable(); err != nil { // a callback may have let another trainer have its turn
		return fmt.Errorf("llm: Trainer.Run: %w", err)
	}
	step := t.last.Step + 1
	fail := func(err error) error {
		return fmt.Errorf("llm: step %d: %w", step, errors.Join(err, t.engine.Drop()))
	}
	u := update{rate: t.Config.Schedule(t.last.Step), before: t.Optimizer.LR()}
	var loss float64
	for i := range t.Config.Accumulate {
		batch, err := t.Loader.Next()
		if err != nil {
			return fail(err)
		}
		var l float64
		if e, ok := t.engine.(Stepper); ok && i == t.Config.Accumulate-1 && loss-loss == 0 {
			l, err = t.finish(e, batch, &u)
		} else {
			l, err = t.engine.Gradients(batch)
		}
		if err != nil {
			return fail(err)
		}
		loss += l / float64(t.Config.Accumulate)
	}
	if math.IsNaN(loss) || math.IsInf(loss, 0) {
		return fail(errors.Join(t.diverged(fmt.Sprintf("the loss is %v", loss)), t.Optimizer.SetLR(u.before)))
	}
	if !u.made {
		if err := t.prepare(u.rate); err != nil {
			return fail(err)
		}
		u.norm, u.err = t.engine.Update()
	}
	switch {
	case errors.Is(u.err, ErrOverflow):
		t.spoiled = t.diverged(u.err.Error())
		return fail(t.spoiled)
	case errors.Is(u.err, ErrGradients):
		return fail(t.diverged(u.err.Error()))
	}
	if u.err != nil {
		return fail(u.err)
	}
	t.last.Step, t.last.Loss, t.last.LearningRate, t.last.GradNorm = step, loss, u.rate, u.norm
	t.last.RunTokens += int64(t.last.StepTokens)
	if step%t.Config.Epoch == 0 {
		if err := t.endEpoch(loss); err != nil {
			return fail(fmt.Errorf("end of an epoch of the Kasmina layers: %w", err))
		}
	}
	t.Model.Kasmina.Apply()
	return nil
}

// update is that of a step.
type update struct {
	rate, before float64 // the learning rate, and that of the step before
	made         bool
	norm         float64
	err          error // ErrGradients or ErrOverflow alone, where finish has made it
}

// prepare makes the optimiser ready for an update.
func (t *Trainer) prepare(rate float64) error {
	if err := t.Optimizer.SetLR(rate); err != nil {
		return fmt.Errorf("TrainConfig.Schedule: %w", err)
	}
	return t.forgetFrozen()
}

// finish computes the last batch of a step and makes its update.
func (t *Trainer) finish(e Stepper, b Batch, u *update) (loss float64, err error) {
	if err := t.prepare(u.rate); err != nil {
		return 0, err
	}
	loss, u.norm, err = e.Step(b)
	u.made = true
	if errors.Is(err, ErrGradients) || errors.Is(err, ErrOverflow) {
		u.err, err = err, nil
	}
	return loss, err
}

// diverged says what is no longer finite and where that shows first: in a parameter's value, or else in its gradient.
func (t *Trainer) diverged(what string) error {
	where := "all parameters and gradients are finite"
	if name, kind, found := t.engine.FirstNonFinite(); found {
		where = fmt.Sprintf("the first %s that is not finite is in parameter %s", kind, name)
	}
	return fmt.Errorf("%w: %s: %s; resume from the last checkpoint with a lower learning rate, or clip gradients", ErrDiverged, what, where)
}

// loss returns the model's mean loss on a batch, without a trace in the model.
func (t *Trainer) loss(b Batch) (float64, error) {
	l, err := t.engine.Loss(b)
	if err == nil && (math.IsNaN(l) || math.IsInf(l, 0)) {
		err = t.diverged(fmt.Sprintf("the loss is %v", l))
	}
	return l, err
}

// probe returns an error unless the model gives a finite loss, so that its next step can succeed.
func (t *Trainer) probe() error {
	_, err := t.loss(t.Loader.inUse)
	return err
}

func (t *Trainer) canEvaluate(e *Evaluation) error {
	switch seq := t.Model.Config.Seq; {
	case e == nil:
		return errors.New("the held-out text is nil")
	case e.seq != seq:
		return fmt.Errorf("the held-out text is in sequences of %d tokens, want Config.Seq, %d", e.seq, seq)
	}
	if err := t.Model.Config.knows(e.ids); err != nil {
		return fmt.Errorf("the held-out text: %w", err)
	}
	return nil
}

// Evaluate returns the model's mean loss on held-out text, in nats per token, and its bits per byte. It changes nothing in
// the model. A loss that is not finite is an ErrDiverged.
func (t *Trainer) Evaluate(e *Evaluation) (loss, bitsPerByte float64, err error) {
	if err := cmp.Or(t.usable(), t.canEvaluate(e)); err != nil {
		return 0, 0, fmt.Errorf("llm: evaluation: %w", err)
	}
	var sum float64
	for b := range e.Batches() {
		if err := t.stopped(); err != nil {
			return 0, 0, err
		}
		l, err := t.loss(b)
		if err != nil {
			return 0, 0, fmt.Errorf("llm: evaluation: %w", err)
		}
		sum += l * float64(b.Count)
	}
	loss, bitsPerByte = e.Score(sum)
	return loss, bitsPerByte, nil
}
