package llm

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
	"github.com/kasmina-go/kasmina/llm/internal/ranks"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/optime"
)

// ErrArchitecture reports a checkpoint of a model with another architecture.
var ErrArchitecture = modelfile.ErrArchitecture

// ErrDiverged reports a loss, gradients or parameters that are no longer finite. The parameters keep
// their values from before the failed step, unless its update overflowed. Overflowed parameters are never
// saved, and the trainer refuses to continue from them.
var ErrDiverged = modelfile.ErrDiverged

// TrainConfig configures the training of a model.
type TrainConfig struct {
	// Steps is the number of optimizer steps after which the run stops, counted from the model's first
	// step. With a Budget, 0 means no limit.
	Steps int
	// Batch is the number of sequences in a batch, and Accumulate the number of batches in a step, which
	// uses their mean gradient; 0 means 1.
	Batch      int
	Accumulate int
	// Schedule returns the learning rate of each step.
	Schedule optim.Schedule
	// Clip limits the global norm of the gradients, and separately the norm of all blueprints' gradients;
	// 0 means no limit.
	Clip float64
	// Epoch is the number of steps in an epoch of the Kasmina lattices; 0 means 10.
	Epoch int

	// Recompute saves memory by recomputing each block for its gradient.
	Recompute bool
	// RecomputeMLPs is the number of blocks, from the first, in which only the MLP is recomputed. This saves
	// less memory than Recompute, which overrides it, and takes less time.
	RecomputeMLPs int

	// Frozen restricts training to the blueprints planted at Config.Weights and in Config.Streams.
	// The model's own parameters remain unchanged, bit for bit, until a blueprint is merged into
	// them.
	Frozen bool
	// Directed initializes the rows of A in a LoRA with the right singular vectors of its weight's
	// gradient that have the largest singular values, instead of random values. It requires Frozen.
	Directed bool

	// Tuned names the parameters that learn, with the wildcards of [path.Match]. All others remain
	// unchanged, bit for bit, and need neither gradients nor optimizer state. If Tuned is empty, all
	// parameters learn or, if the model has adapters, only those of the adapters, which learn in any
	// case. [Config.LastBlocks] names the parameters of the last blocks.
	Tuned []string

	// Preference trains on preference pairs with the given loss, unless it is nil. It requires a loader
	// of pairs, such as chatdata.Pairs.Loader returns, and the part [NewReferences].
	Preference *op.Preference

	// Budget, unless zero, stops the run after the step that exhausts it.
	Budget Budget
	// Annealing multiplies the learning rate of Schedule by a factor that depends on the spent share
	// of the Budget, which must be set; nil means 1.
	Annealing optim.Annealing

	// OmitBase writes checkpoints without the parameters that do not learn, if there are any. A
	// checkpoint contains their digest instead. Resume requires a model with the same parameters, and
	// [LoadModel] refuses the file.
	OmitBase bool

	// Engine creates the engine that computes the steps; nil selects the CPU. It receives the TrainConfig
	// with defaults filled in. The model is locked while Engine runs, so Engine must not call methods
	// that wait for a step, such as Save.
	Engine func(*Model, optim.Optimizer, TrainConfig) (Engine, error)

	// Notes holds up to 256 KiB of information that the program needs to resume the run. Every
	// checkpoint contains the notes, which ReadNotes returns.
	Notes map[string]string

	listen  []string // parameters whose gradients the engine reports, instead of updating any; see Listener
	adapted bool     // whether the model has adapters
	masked  bool     // whether the loader is a MaskedLoader, so that batches differ in their share of a step
}

func (c *TrainConfig) check() error {
	if c.Accumulate == 0 {
		c.Accumulate = 1
	}

	if c.Epoch == 0 {
		c.Epoch = 10
	}

	if err := c.Budget.Check(); err != nil {
		return err
	}

	if c.Steps == 0 && c.Budget != (Budget{}) {
		c.Steps = unlimitedSteps
	}

	switch {
	case c.Annealing != nil && c.Budget == (Budget{}):
		return errors.New("llm: TrainConfig.Annealing is set, but not Budget, which it " +
			"depends on")
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
	case c.RecomputeMLPs < 0:
		return fmt.Errorf("llm: TrainConfig.RecomputeMLPs is %d, want at least 0", c.RecomputeMLPs)
	case c.Epoch < 1:
		return fmt.Errorf("llm: TrainConfig.Epoch is %d, want at least 1", c.Epoch)
	}

	if c.Preference != nil {
		if err := c.Preference.Check(); err != nil {
			return fmt.Errorf("llm: TrainConfig.Preference: %w", err)
		}
	}

	if notes, err := json.Marshal(c.Notes); err != nil || len(notes) > modelfile.MaxNotes {
		return fmt.Errorf("llm: TrainConfig.Notes takes %d bytes as JSON, want at most %d: keep "+
			"long texts in separate files", len(notes), modelfile.MaxNotes)
	}

	return nil
}

// Trainer trains a model on batches of a loader. Everything else in a run (showing progress,
// evaluating, saving) is up to its callbacks. Commands submitted to Model.Kasmina, from any
// goroutine, take effect after a step and before its StepEnd, or when the run starts. Commands that
// are too late for the run's last step are rejected with [state.ErrClosed].
//
// A step does not change blueprints that no seed trains, unless the optimizer decays weights, as
// optim.NewAdamW does by default. optim.WithGroup(optim.NameContains("kasmina"), optim.Decay(0)) exempts
// them.
//
// While Run is in progress, any goroutine may call the other methods. Step, Last and On return
// immediately. All other methods wait for the end of the current step and see the model's state at that
// time, which does not include changes by callbacks that have yet to be called. Loader and Optimizer are
// then reserved for callbacks.
type Trainer struct {
	Model     *Model
	Loader    Loader
	Optimizer optim.Optimizer
	Config    TrainConfig

	parts []Part // added with Use
	base  string // digest of the parameters that do not learn; "" until it is needed

	// The components of the trainer. Except for steering, they are guarded by the model's lock.
	driver   driver
	growth   growth
	team     team
	steering steering

	progress
	condition

	happened seedEvents // seed events that callbacks have not received yet

	mu          sync.Mutex // guards the following fields, and steering
	callbacks   []Callback
	evaluations []int // intervals of the Evaluate callbacks
	last        Event // changes only while the model is locked
	started     time.Time
	running     bool
	ctx         context.Context // of Run; nil outside
	unlisten    func()          // stops collecting seed events
}

// progress is the part of a run's position that training steps advance, besides the model, the optimizer,
// the loader and the lattices. A copy of progress is a snapshot: see driver.suspend.
type progress struct {
	learning [][]bool    // slots of each Kasmina layer that learned at the last step, or nil
	heard    ranks.Heard // the ranks' words from the last step
	spent    Budget      // so far
	share    float64     // spent share of Config.Budget that the steps see
	losses   float64     // sum of the losses of the current epoch's steps
	summed   int         // number of steps in that sum
}

// NewTrainer returns a trainer at step 0. The loader's sequences must have the model's length, and
// its tokens must be in the model's vocabulary. Several trainers of the same model may be used
// alternately, in which case each continues from the model's current state. If a failed trainer has left
// parameters that do not belong to a complete step, the new trainer can only be used after a Resume.
func NewTrainer(m *Model, l Loader, o optim.Optimizer, c TrainConfig) (*Trainer, error) {
	switch {
	case m == nil:
		return nil, errors.New("llm: NewTrainer: the model is nil")
	case l == nil:
		return nil, errors.New("llm: NewTrainer: the loader is nil")
	case checkMade(m) != nil:
		return nil, fmt.Errorf("llm: NewTrainer: %w", errZeroModel)
	case l.Config() == data.LoaderConfig{}:
		return nil, errors.New("llm: NewTrainer: the loader is nil or its zero value: data.NewLoader " +
			"makes one")
	case o == nil:
		return nil, errors.New("llm: NewTrainer: the optimizer is nil, want one such as " +
			"optim.NewAdamW returns")
	}

	if err := errors.Join(c.check(), c.checkFrozen(m.Config), c.checkTuned(m.Config)); err != nil {
		return nil, err
	}

	if v := l.VocabSize(); v > m.Config.Vocab {
		return nil, fmt.Errorf("llm: the loader's tokens are of a vocabulary of %d, want at most "+
			"Config.Vocab, %d", v, m.Config.Vocab)
	}

	if l.Config().Seq != m.Config.Seq || l.Config().Batch != c.Batch {
		return nil, fmt.Errorf("llm: the loader makes batches of %d × %d tokens, want %d × %d: "+
			"TrainConfig.Batch by Config.Seq",
			l.Config().Batch, l.Config().Seq, c.Batch, m.Config.Seq)
	}

	if m.Config.Documents && !l.KnowsDocuments() {
		return nil, errors.New("llm: Config.Documents: the loader's tokens do not say where " +
			"documents end; want tokens from Tokenize with a tokenizer.Bytes, or " +
			"from CacheTokens with a BPE or another tokenizer that has a method EndOfDocument() int")
	}

	if pairs := l.InUse().Answers != nil; pairs != (c.Preference != nil) {
		return nil, fmt.Errorf("llm: NewTrainer: TrainConfig.Preference must be set if the loader returns preference pairs, as "+
			"chatdata.Pairs.Loader does, and only then: it is set: %v, and the loader has pairs: %v", !pairs, pairs)
	}

	_, c.masked = l.(MaskedLoader)
	c.adapted = !m.Config.Adapter.IsZero()
	t := &Trainer{Model: m, Loader: l, Optimizer: o, Config: c}
	t.driver.t, t.growth.t, t.team.t, t.steering.t = t, t, t, t
	if err := t.checkBaseFrozen(); err != nil {
		return nil, err
	}
	defer take(m)()
	if err := pull(m); err != nil { // from the trainer that holds the parameters
		return nil, fmt.Errorf("llm: NewTrainer: %w", err)
	}

	var err error
	if t.driver.engine, err = t.driver.newEngine(); err != nil {
		return nil, err
	}

	if _, ok := t.driver.engine.(PreferenceMeter); c.Preference != nil && !ok {
		return nil, errors.Join(fmt.Errorf("llm: NewTrainer: the engine %s cannot train on preference pairs",
			t.driver.engine.Name()), t.driver.engine.Close())
	}

	t.driver.name = t.driver.engine.Name()
	spoiled := spoiledBy(m)
	hold(m, holder{t})
	if spoiled != nil {
		t.on(modelLost, spoiled)
	}
	join(m)
	t.last = Event{Steps: c.Steps, Budget: c.Budget,
		StepTokens: c.Batch * c.Accumulate * m.Config.Seq,
		Params:     trainableIn(m, c), AllParams: m.NumParams(), Seeds: m.NumSeeds(),
		Lattices: m.Config.Lattices(),
		Loss:     math.NaN(), ValLoss: math.NaN(), ValBPB: math.NaN()}
	return t, nil
}

// isNil reports whether an engine is nil or a nil pointer.
func isNil(e Engine) bool {
	v := reflect.ValueOf(e)
	return !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil()
}

// On adds callbacks. They are called in the order in which they were added, starting with the next
// event. A callback that changes the model or its lattices must come before any callback that saves,
// because otherwise a resumed run would miss the last change.
func (t *Trainer) On(callbacks ...Callback) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.callbacks = append(t.callbacks, callbacks...)
}

// Step returns the number of optimizer steps the model has been trained for.
func (t *Trainer) Step() int { return t.Last().Step }

// Last returns the latest event, with the latest values of the run.
func (t *Trainer) Last() Event {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.last
}

// note updates the latest values of the run.
func (t *Trainer) note(set func(*Event)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	set(&t.last)
}

// Close frees the machines and copies the trained parameters back to the model. The trainer can no
// longer be used, and a run in progress stops before its next step. When the last trainer of a model
// is closed, waiting commands are rejected with state.ErrClosed.
func (t *Trainer) Close() error {
	defer take(t.Model)()

	if t.phase == closed {
		return nil
	}

	var errs []error
	if t.holds() {
		errs = append(errs, t.release())
	}

	leave(t.Model)
	if t.driver.engine != nil {
		errs = append(errs, t.driver.engine.Close())
	}

	t.on(closing, nil)
	return errors.Join(errs...)
}

// release copies the parameters back to the model, which no trainer holds afterwards. If they cannot be
// copied or do not belong to a complete step, the model can no longer be saved.
func (t *Trainer) release() error {
	err, damage := pull(t.Model), t.damage()
	if err != nil && !errors.Is(err, ErrDiverged) { // after ErrDiverged, the parameters have been copied
		damage = cmp.Or(damage, err)
	}

	hold(t.Model, nil)
	if damage != nil {
		hold(t.Model, abandoned{damage})
	}
	return err
}

// inTurn calls f with the model locked, unless the trainer cannot be used.
func (t *Trainer) inTurn(f func() error) error {
	defer take(t.Model)()
	if err := t.usable(); err != nil {
		return err
	}
	return f()
}

// holder is a trainer in its role as the holder of the model's parameters.
type holder struct{ *Trainer }

func (h holder) Spoiled() error    { return h.damage() }
func (h holder) Spoil(cause error) { h.on(modelLost, cause) }

func (h holder) FailAlone(cause error) { h.team.failedAlone(cause) }

func (h holder) Mirror() paramMirror {
	if !h.mirrored() {
		return nil
	}
	return h.driver.engine
}

// holds reports whether the trainer holds the model's parameters.
func (t *Trainer) holds() bool { return holderOf(t.Model) == holder{t} }

// usable returns an error if the trainer cannot work with the model. If another trainer holds the
// parameters, usable takes them over.
func (t *Trainer) usable() error {
	if t.phase != closed && !t.holds() {
		return t.takeOver()
	}
	return t.condition.err()
}

// takeOver copies the parameters from another trainer to this trainer's engine.
func (t *Trainer) takeOver() error {
	if t.phase != ready && t.phase != detached { // the other trainer has not restored this one's own state
		return t.condition.err()
	}

	if err := settleParams(t.Model); err != nil {
		return err
	}

	hold(t.Model, nil)
	if err := t.driver.engine.Push(); err != nil {
		return fmt.Errorf("the engine %s could not take over the model from another "+
			"trainer: %w", t.driver.engine.Name(), err)
	}

	hold(t.Model, holder{t})
	t.on(restored, nil)
	t.growth.twin = nil
	changed(t.Model)
	return nil
}

// emit sends an event to all callbacks, which may emit further events, such as EvalEnd. If a callback
// fails, the remaining ones are skipped, except for events that are a last chance to save and to close
// files, and for Saved.
func (t *Trainer) emit(kind EventKind, set func(*Event)) error {
	t.mu.Lock()
	t.last.Kind, t.last.Elapsed = kind, time.Since(t.started)
	e, callbacks := t.last, t.callbacks
	t.mu.Unlock()
	if set != nil {
		set(&e)
	}

	var errs error
	for i, c := range callbacks {
		if c == nil {
			errs = errors.Join(errs, fmt.Errorf("llm: callback %d is nil", i))
			continue
		}
		errs = errors.Join(errs, c(e))
		if errs != nil && !slices.Contains([]EventKind{Interrupted, Failed, Saved, RunEnd}, kind) {
			return errs
		}
	}

	return errs
}

// Run trains until the model has made Config.Steps steps or spent Config.Budget, [Trainer.Stop] is
// called, a step or callback fails, or ctx is canceled. After Stop, the error wraps [ErrStopped].
//
// Cancellation is noticed between steps, between the batches of an accumulated step, and during
// evaluation and sampling. A step interrupted between batches is discarded, unless the model has
// just grown for it. Run then returns [context.Cause] of ctx.
//
// However the run ends, callbacks receive RunEnd. Only one Run may be active at a time; calling Run
// again continues with the remaining steps.
func (t *Trainer) Run(ctx context.Context) error {
	if err := t.begin(ctx); err != nil {
		return fmt.Errorf("llm: Trainer.Run: %w", err)
	}
	defer t.end()

	err := t.team.settleInTurn()
	if started := t.emit(RunStart, nil); err == nil { // RunStart is emitted in any case, like RunEnd
		err = started
	} else {
		err = errors.Join(err, started)
	}

	if err == nil && t.Last().Last {
		err = t.emit(Complete, nil)
	}

	err = t.team.between(err)

	for err == nil && t.stopped() == nil && !t.Last().Last {
		if err = t.step(); err == errTakenBack {
			err = t.growth.emitReshaped()
		} else if err == nil {
			err = t.emitStep()
		}
		err = t.team.between(err)
	}

	t.steering.closeRequests()

	switch {
	case err == nil && t.stopped() != nil || errors.Is(err, errBetweenBatches):
		err = errors.Join(t.stopped(), t.steering.recordStop(), t.emit(Interrupted, nil))
	case err != nil && t.Last().RunTokens > 0:
		err = errors.Join(err, t.emit(Failed, func(e *Event) { e.Err = err }))
	}

	if err == nil && t.Last().Last {
		if err = t.growth.settleSeeds(); err == nil {
			err = t.growth.review()
		}
	}

	t.refuseLate()
	err = ranks.WithNews(err, t.emitRest())
	return errors.Join(err, t.emit(RunEnd, func(e *Event) { e.Err = err }))
}

// refuseLate rejects the commands that wait in Model.Kasmina, because no checkpoint of the run would
// contain their effect. If another trainer of the model is running, the commands wait for its next
// step instead.
func (t *Trainer) refuseLate() {
	defer take(t.Model)()
	if runsOf(t.Model) == 1 {
		t.Model.Kasmina.Refuse(errRunEnded)
	}
}

// emitStep emits the events of a step. It stops at the first error, so that later callbacks do not assume
// that every earlier callback has accepted the step.
func (t *Trainer) emitStep() error {
	for _, emit := range []func() error{t.emitChoices, t.growth.emitReshaped, t.steering.emitNotes, t.emitEpochEnd} {
		if err := emit(); err != nil {
			return err
		}
	}
	return t.emit(StepEnd, nil)
}

// begin prepares the trainer for a run.
func (t *Trainer) begin(ctx context.Context) error {
	return t.inTurn(func() error {
		if diff := t.growth.settings().Differences(t.growth.grew); len(diff) > 0 {
			return fmt.Errorf("%w: %s", ErrSettings, withRemedy(diff))
		}
		if err := t.team.compare(); err != nil {
			return err
		}
		if err := t.team.agree(t.startParts(ctx)); err != nil {
			return err
		}
		t.growth.grew = nil
		t.noteEnd()
		t.mu.Lock()
		defer t.mu.Unlock()
		if i := slices.IndexFunc(t.callbacks, func(c Callback) bool { return c == nil }); i >= 0 {
			return fmt.Errorf("callback %d is nil", i)
		}
		if t.running {
			return errors.New("the trainer is running already")
		}
		t.happened.take()
		stop, err := t.Model.Kasmina.Listen(t.happened.add)
		if err != nil {
			return err
		}
		t.steering.shared, t.steering.open = t.team.ranks() != nil, true
		t.running, t.ctx, t.started = true, ctx, time.Now()
		t.last.RunTokens, t.last.RunFLOPs = 0, 0
		t.team.outer, t.team.cancel = ctx, func(error) {}
		if t.team.ranks() != nil {
			t.ctx, t.team.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
		}
		t.unlisten = stop
		startRun(t.Model)
		return nil
	})
}

func (t *Trainer) end() {
	defer take(t.Model)()
	endRun(t.Model)

	t.mu.Lock()
	defer t.mu.Unlock()
	t.unlisten()
	t.team.cancel(nil)
	t.steering.dismiss() // a callback may have panicked
	t.steering.halt, t.steering.notes = nil, nil
	t.running, t.ctx = false, nil
}

// emitChoices emits Chosen after the first step of a run, when all kernels have been chosen.
func (t *Trainer) emitChoices() error {
	if e := t.Last(); e.RunTokens != int64(e.StepTokens) {
		return nil
	}
	choices := t.choices()
	if len(choices) == 0 {
		return nil
	}
	return t.emit(Chosen, func(e *Event) { e.Choices = choices })
}

func (t *Trainer) choices() []optime.Choice {
	defer take(t.Model)()
	c, ok := t.driver.engine.(Chooser)
	if !ok || t.phase == closed {
		return nil
	}
	return c.Choices()
}

// context returns the context of the run, or context.Background without a run.
func (t *Trainer) context() context.Context {
	t.mu.Lock()
	defer t.mu.Unlock()
	return cmp.Or(t.ctx, context.Background())
}

// stopped returns the reason why the run is canceled or should stop, or nil.
func (t *Trainer) stopped() error {
	t.mu.Lock()
	halt := t.steering.halt
	if t.steering.shared { // all ranks stop together; see between
		halt = nil
	}
	t.mu.Unlock()
	if halt != nil {
		return halt
	}
	return context.Cause(t.context())
}

// errTakenBack is the result of a step that diverged and was undone. The growth that caused the
// divergence has been undone, and the run continues.
var errTakenBack = errors.New("the model's growth has been taken back")

// errBetweenBatches is the result of a step that was canceled before all of its batches were computed.
var errBetweenBatches = errors.New("the context was canceled between two batches")

// step computes the gradients of one optimizer step and applies them.
//
// A step that fails before its update changes nothing, except that growth completed before its first
// batch remains, and the next attempt starts from there. If a step fails during or after its update, the
// trainer needs a Resume; see condition.
func (t *Trainer) step() error {
	defer takeToChange(t.Model)()
	began := time.Now()
	if err := t.usable(); err != nil { // a callback may have let another trainer use the model
		return fmt.Errorf("llm: Trainer.Run: %w", err)
	}

	growing, changes := t.growth.growthState, changesOf(t.Model)
	err := t.growth.settleGrowth()
	if err == nil {
		err = t.prepareParts()
	}

	grew := changesOf(t.Model) != changes
	if err != nil {
		t.team.refuse(err)
		if !grew && t.condition.err() == nil {
			t.growth.growthState = growing
		}
		return err
	}

	// Growth cannot be undone cheaply, so the first step after growth is not interrupted.
	t.driver.whole = grew
	defer func() { t.driver.whole = false }()

	done := t.last.Step
	restore := t.driver.beforeStep()
	u := update{rate: t.rate(done), before: t.Optimizer.LR()}
	changed(t.Model)
	for _, l := range t.Model.Kasmina.Lattices() {
		l.BeginStep(done)
	}

	loss, err := t.driver.compute(&u)

	switch {
	case err == nil:
		t.on(updateMade, errors.New("a callback or the controller panicked"))
		if err = t.team.settle(t.count(loss, u, began), true); err == nil {
			t.on(stepCompleted, nil)
		} else {
			t.on(updateMade, err)
		}
	case u.made:
		t.on(updateFailed, err)
		err = errors.Join(err, t.driver.engine.Drop())
	default:
		if err = t.undo(err, restore); t.condition.err() != nil {
			return fmt.Errorf("llm: step %d: %w", done+1, err)
		}
		if errors.Is(err, ErrDiverged) {
			if err = t.growth.withdraw(err); err == nil {
				return errTakenBack
			}
		}
		if !grew && t.condition.err() == nil {
			t.growth.growthState = growing
		}
	}
	if err != nil {
		return fmt.Errorf("llm: step %d: %w", done+1, err)
	}

	return nil
}

// settleGrowth adapts the model to the stages of its seeds before a step.
func (g *growth) settleGrowth() error {
	if err := g.tryOut(); err != nil {
		return fmt.Errorf("llm: the trial of blueprints: %w", err)
	}

	if err := g.plantFirst(); err != nil {
		return fmt.Errorf("llm: the model's growth: %w", err)
	}

	if err := g.reshape(); err != nil {
		return fmt.Errorf("llm: the model's growth: %w", err)
	}

	// A newly planted blueprint may already be on trial, and if planting or grafting failed, a trial
	// may be over.
	if err := g.tryOut(); err != nil {
		return fmt.Errorf("llm: the trial of blueprints: %w", err)
	}

	if g.t.Config.Frozen && len(g.t.Model.Planted) == 0 {
		return fmt.Errorf("llm: Trainer.Run: %w", errUnplanted)
	}

	return nil
}

// count completes a step after its update.
func (t *Trainer) count(loss float64, u update, began time.Time) error {
	t.losses, t.summed = t.losses+loss, t.summed+1
	t.note(func(e *Event) {
		e.Step, e.Loss, e.LearningRate, e.GradNorm = e.Step+1, loss, u.rate, u.norm
		e.Preferences = u.preferences
		e.RunTokens += int64(e.StepTokens)
		e.RunFLOPs += t.stepFLOPs()
	})

	if err := t.growth.finishStep(loss, u); err != nil {
		return err
	}

	if t.last.Step%t.Config.Epoch == 0 {
		t.losses, t.summed = 0, 0
	}

	if err := t.finishParts(); err != nil {
		return err
	}

	if err := t.spend(began); err != nil {
		return err
	}

	return t.growth.follow()
}

// spend records the budget that a step has spent. It measures time only if the budget limits it, so that
// the checkpoints of other runs are reproducible byte for byte.
func (t *Trainer) spend(began time.Time) error {
	tokens := int64(t.last.StepTokens)
	b := Budget{Tokens: tokens, FLOPs: t.stepFLOPs()}
	if t.Config.Budget.Time > 0 {
		var err error
		if b.Time, err = t.team.spentTime(began); err != nil {
			return err
		}
	}

	t.spent = t.spent.Plus(b)
	share := t.Config.Budget.ShareOf(t.spent)
	if r := t.growth.replay(); r != nil {
		share = t.share
		if told, ok := r.Share(t.last.Step); ok {
			share = told
		}
	}

	changed := share != t.share
	t.share = share
	t.noteEnd()
	if !changed {
		return nil
	}

	return t.growth.record(Decision{})
}

// stepFLOPs returns the number of operations in a step.
func (t *Trainer) stepFLOPs() float64 {
	flops := t.Model.layout().FLOPs()
	if len(t.Config.Tuned) > 0 {
		flops = t.Model.Config.tuningFLOPs(learning{false, t.Config.Tuned, t.Config.adapted})
	}
	return float64(t.last.StepTokens) * flops
}

// noteEnd updates the budget in the latest event and whether the run has made its last step.
func (t *Trainer) noteEnd() {
	ended := t.ended()
	t.note(func(e *Event) {
		e.Spent = t.spent
		e.Steps, e.Budget, e.Share = t.Config.Steps, t.Config.Budget, t.share
		if e.Budget == (Budget{}) {
			e.Share = min(1, float64(e.Step)/float64(e.Steps))
		}
		e.Last = e.Step >= e.Steps || e.Share >= 1 || ended
	})
}

// rate returns the learning rate of the next step.
func (t *Trainer) rate(done int) float64 {
	r := t.Config.Schedule(done)
	if t.Config.Annealing != nil {
		r *= t.Config.Annealing(t.share)
	}
	return r * t.growth.rewarmed(done) * t.rateFactor()
}

// canEvaluate returns an error unless the model can be evaluated on a text. The model must be locked.
func (t *Trainer) canEvaluate(e *data.Evaluation) error {
	switch seq := t.Model.Config.Seq; {
	case e == nil:
		return errors.New("the held-out text is nil")
	case e.Seq() != seq:
		return fmt.Errorf("the held-out text is in sequences of %d tokens, want Config.Seq, %d",
			e.Seq(), seq)
	}

	if err := t.Model.Config.Knows(e.IDs()); err != nil {
		return fmt.Errorf("the held-out text: %w", err)
	}

	return nil
}

// Evaluate returns the model's mean loss on held-out text, in nats per token, and its bits per byte. It
// does not change the model. If the loss is not finite, it returns ErrDiverged.
func (t *Trainer) Evaluate(e *data.Evaluation) (loss, bitsPerByte float64, err error) {
	loss, bitsPerByte, _, err = t.evaluate(e)
	return loss, bitsPerByte, err
}

// evaluate is like Evaluate, and also returns the figures of preference pairs.
func (t *Trainer) evaluate(e *data.Evaluation) (loss, bitsPerByte float64, pairs op.PreferenceFigures, err error) {
	defer take(t.Model)()

	if err := t.canEvaluate(e); err != nil {
		return 0, 0, pairs, fmt.Errorf("llm: evaluation: %w", err)
	}

	if err := t.usable(); err != nil {
		return 0, 0, pairs, fmt.Errorf("llm: evaluation: %w", err)
	}

	t.driver.takePreferences()
	var sum float64
	for b := range e.Batches() {
		if err := t.stopped(); err != nil {
			return 0, 0, pairs, err
		}
		l, err := t.driver.loss(b)
		if err != nil {
			return 0, 0, pairs, fmt.Errorf("llm: evaluation: %w", err)
		}
		sum += l * float64(b.Count)
	}

	loss, bitsPerByte = e.Score(sum)
	return loss, bitsPerByte, t.driver.takePreferences(), nil
}
