package llm

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"slices"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/phases"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/internal/ranks"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// A driver owns the trainer's engine. It makes the engine compute steps, and replaces it when the
// model changes.
type driver struct {
	t        *Trainer
	engine   Engine         // nil if the model has no engine
	name     string         // of the last successfully created engine
	attached []attachedSeed // seeds of chunks that the engine's graph computes
	whole    bool           // the step must not be interrupted between two batches
}

// update holds the progress of a step's update.
type update struct {
	rate, before float64 // the learning rate, and the learning rate of the step before
	made         bool    // whether the update was, or may have been, applied
	norm         float64
	preferences  op.PreferenceFigures // of the step's pairs
	err          error                // ErrGradients or ErrOverflow from finish
}

// beforeStep returns a function that undoes a step that fails before its update. It discards the gathered
// gradients, and restores the learning rate, the loader's position and the measurements of the lattices.
func (d *driver) beforeStep() (restore func() error) {
	loader, rate, progress := d.t.Loader.State(), d.t.Optimizer.LR(), d.t.progress
	unmark := d.t.Model.Kasmina.Mark()

	return func() error {
		// Drop comes first: the engine may not yet have given the lattices everything that the step
		// has measured.
		dropped := d.engine.Drop()
		unmark()
		d.t.progress = progress
		d.t.learning = nil // recomputed, because the optimizer may have forgotten frozen slots
		return errors.Join(dropped, d.t.Optimizer.SetLR(rate), d.t.Loader.SetState(loader))
	}
}

// compute gathers the gradients of all batches of a step and applies its update.
func (d *driver) compute(u *update) (loss float64, err error) {
	d.takePreferences()
	gather := d.gather
	if d.t.team.ranks() != nil {
		gather = d.gatherAll
	}

	if loss, err = gather(u); err != nil {
		return 0, err
	}

	if math.IsNaN(loss) || math.IsInf(loss, 0) {
		u.made = errors.Is(u.err, ErrOverflow) // a Stepper makes no other update in this case
		return 0, d.diverged(fmt.Errorf("the loss is %v", loss))
	}

	u.preferences = d.takePreferences()
	if !u.made {
		// If a rank cannot prepare the update, no rank makes it.
		if err := d.t.team.agree(d.prepare(u.rate)); err != nil {
			return 0, err
		}
		u.made = true
		u.norm, u.err = d.engine.Update()
	}

	switch {
	case errors.Is(u.err, ErrGradients):
		u.made = false
		return 0, d.diverged(u.err)
	case errors.Is(u.err, ErrOverflow):
		return 0, d.diverged(u.err)
	}

	return loss, u.err
}

// gatherAll is the counterpart of gather for several ranks. A ParallelStepper also applies the
// update.
func (d *driver) gatherAll(u *update) (loss float64, err error) {
	batches := newStepBatches(d.t.Loader, d.t.Config.Accumulate)
	var losses []float64
	if e, ok := d.engine.(ParallelStepper); ok {
		losses, err = d.finishAll(e, batches, u)
	} else {
		losses, err = d.t.team.ranks().Batches(d.t.Config.Accumulate, batches.next)
	}

	if errors.Is(err, op.ErrNonFinite) {
		err = d.diverged(err)
	}

	for i, l := range losses {
		loss += batches.weigh(i, l)
	}

	return loss, err
}

// gather gathers the gradients of all batches of a step. A Stepper also applies the update.
func (d *driver) gather(u *update) (loss float64, err error) {
	batches := newStepBatches(d.t.Loader, d.t.Config.Accumulate)
	for i := range d.t.Config.Accumulate {
		if i > 0 && !d.whole && d.t.stopped() != nil {
			return 0, errBetweenBatches
		}
		batch, err := batches.next()
		if err != nil {
			return 0, err
		}
		var l float64
		if e, ok := d.engine.(Stepper); ok && i == d.t.Config.Accumulate-1 && loss-loss == 0 {
			l, err = d.finish(e, batch, u)
		} else {
			l, err = d.engine.Gradients(batch)
		}
		if errors.Is(err, op.ErrNonFinite) {
			err = d.diverged(err)
		}
		if err != nil {
			return 0, err
		}
		loss += batches.weigh(i, l)
	}

	return loss, nil
}

// finishAll is the counterpart of finish for several ranks. It computes all batches of a step.
func (d *driver) finishAll(e ParallelStepper, batches *stepBatches, u *update) (losses []float64, err error) {
	if err := d.prepare(u.rate); err != nil {
		d.t.team.refuseStep(e, err)
		return nil, err
	}

	own, err := d.t.team.say()
	if err != nil {
		return nil, err
	}

	r, err := e.StepBatches(d.t.Config.Accumulate, batches.next, own)
	u.norm, u.made = r.Norm, r.Made
	if errors.Is(err, ErrGradients) {
		u.err, err = err, nil
	}

	var unheard error
	d.t.heard, unheard = ranks.Hear(r.Words)
	return r.Losses, errors.Join(err, unheard)
}

// prepare readies the optimizer for an update.
func (d *driver) prepare(rate float64) error {
	if err := d.t.Optimizer.SetLR(rate); err != nil {
		return fmt.Errorf("TrainConfig.Schedule: %w", err)
	}
	return d.forgetFrozen()
}

// finish computes the last batch of a step and applies its update.
func (d *driver) finish(e Stepper, b data.Batch, u *update) (loss float64, err error) {
	if err := d.prepare(u.rate); err != nil {
		return 0, err
	}
	loss, u.norm, err = e.Step(b)
	u.made = true
	if errors.Is(err, ErrGradients) || errors.Is(err, ErrOverflow) {
		u.err, err = err, nil
	}
	return loss, err
}

// diverged returns an error that names the quantity that has diverged and locates the first non-finite
// number, in a parameter's value or else in its gradient.
func (d *driver) diverged(what error) error {
	where := "all parameters and gradients are finite"
	if name, kind, found := d.engine.FirstNonFinite(); found {
		where = fmt.Sprintf("the first %s that is not finite is in parameter %s", kind, name)
	}
	return fmt.Errorf("%w: %w: %s; resume from the last checkpoint with a lower learning rate, "+
		"or clip gradients", ErrDiverged, what, where)
}

// takePreferences returns the figures of the preference pairs that the engine has computed since the last
// call.
func (d *driver) takePreferences() (f op.PreferenceFigures) {
	if e, ok := d.engine.(PreferenceMeter); ok && d.t.Config.Preference != nil {
		f = e.TakePreferences()
	}
	return f
}

// loss returns the model's mean loss on a batch and does not affect training.
func (d *driver) loss(b data.Batch) (float64, error) {
	l, err := d.engine.Loss(b)
	if err == nil && (math.IsNaN(l) || math.IsInf(l, 0)) {
		err = d.diverged(fmt.Errorf("the loss is %v", l))
	}
	return l, err
}

// probe returns an error unless the model's loss is finite, so that its next step can succeed.
func (d *driver) probe() error {
	_, err := d.loss(d.t.Loader.InUse())
	return err
}

// now returns the current model, copied to the host. It returns the model even if the error is
// ErrDiverged. If several ranks train, all call it, and if it fails on one, it fails on all.
func (d *driver) now() (m modelState, err error) {
	err = pull(d.t.Model)
	var diverged error
	if errors.Is(err, ErrDiverged) {
		err, diverged = nil, err
	}
	if err := d.t.team.agree(err); err != nil {
		return m, err
	}

	if err := d.gatherState(); err != nil {
		return m, err
	}
	m = modelState{layout: d.t.Model.layout(), Params: d.t.Model.Params, Moments: d.t.Optimizer.State()}
	return d.markHeld(m), diverged
}

// markHeld marks the parameters of m as held by the engine, if the engine can hand them over to the next
// one.
func (d *driver) markHeld(m modelState) modelState {
	if k, ok := d.engine.(Keeper); ok && k.CanKeep() {
		m.From, m.Here = map[string]string{}, map[string]bool{}
		for _, p := range m.Params {
			if d.t.Config.Learns(p.Name) {
				m.From[p.Name] = p.Name
			}
		}
	}
	return m
}

// handover returns the current model for change. If the engine can hand its parameters over to the next one,
// only the named ones are copied to the host.
func (d *driver) handover(names ...string) (modelState, error) {
	m := d.markHeld(modelState{layout: d.t.Model.layout(), Params: d.t.Model.Params})
	if m.From == nil {
		return d.now()
	}
	if len(names) == 0 {
		return m, nil
	}
	return m, pull(d.t.Model, names...)
}

// change replaces the model with next and creates an engine for it. old is the current model, as returned by
// now or handover. After an error, either the old model has been restored or the trainer has no engine.
func (d *driver) change(old, next modelState, scale *LossScale) error {
	clock, oldScale := phases.Start(), d.lossScale()
	create, cleanUp, err := d.leave(old)
	if err != nil {
		return d.loseEngine(old, errors.Join(err, d.engine.Close()))
	}

	clock.End("closing the engine")
	put := func(m modelState, scale *LossScale) error {
		own := d.t.Model.Params
		become(d.t.Model, m.layout, m.Params)
		if err := d.t.team.agree(d.setOptimizer(own, m)); err != nil {
			return err
		}
		clock.End("the optimizer")
		return d.replaceEngine(func() (Engine, error) { return create(m) }, scale)
	}

	if err = put(next, scale); err != nil {
		if again := put(old, oldScale); again != nil {
			err = d.loseEngine(old, fmt.Errorf("%w; restoring the previous engine: %w", err, again))
		}
	}

	clock.End("the next engine")
	if err := cleanUp(); err != nil {
		slog.Warn("llm: memory of the previous engine could not be freed", "error", err)
	}

	clock.End("freeing memory")
	slog.Debug("llm: replaced the engine", "in", clock)
	return err
}

// loseEngine records that no engine could be created for the model, which is in state m, and returns the
// reason.
func (d *driver) loseEngine(m modelState, cause error) error {
	what := engineLost
	if m.From != nil { // the host does not have all parameters
		what = allLost
	}

	d.engine = nil
	d.t.on(what, cause)
	return d.t.condition.err()
}

// setOptimizer declares the parameters of m to the optimizer and sets its moments. It first drops
// known parameters that are missing from m or have a different shape there, since a seed may grow
// again at another size.
func (d *driver) setOptimizer(known []Param, m modelState) error {
	if o, ok := d.t.Optimizer.(optim.Dropper); ok {
		shapes := map[string]tensor.Shape{}
		for _, p := range m.Params {
			if p.Value != nil {
				shapes[p.Name] = p.Value.Shape()
			}
		}
		for _, p := range known {
			if p.Value == nil { // frozen, in the model's Base
				continue
			}
			if s, ok := shapes[p.Name]; !ok || !s.Eq(p.Value.Shape()) {
				o.Drop(p.Name)
			}
		}
	}

	if err := d.t.Optimizer.Declare(valueGradsOf(m.Params, d.t.Config.Learns)); err != nil {
		return err
	}

	return d.t.Optimizer.SetState(m.MomentsHere())
}

// leave closes the engine before its successor allocates memory. It returns a function that creates
// the next engine for a model, and a cleanup function.
func (d *driver) leave(old modelState) (create func(modelState) (Engine, error),
	cleanUp func() error, err error) {
	if old.From == nil {
		// If closing fails on one rank, all ranks return to the old model.
		closed := d.t.team.agree(d.engine.Close())
		return func(modelState) (Engine, error) {
			if err := closed; err != nil {
				closed = nil
				return nil, err
			}
			return d.newEngine()
		}, func() error { return nil }, nil
	}

	kept, err := d.engine.(Keeper).Keep()
	if err != nil {
		return nil, nil, err
	}

	return func(m modelState) (Engine, error) {
		d.attached = attachedTo(d.t.Model.Kasmina)
		e, err := kept.Engine(m.From)
		if err != nil || len(m.Here) == 0 {
			return e, err
		}
		if err := e.Push(slices.Sorted(maps.Keys(m.Here))...); err != nil {
			return nil, errors.Join(err, e.Close())
		}
		return e, nil
	}, kept.Close, nil
}

// newEngine creates an engine for the model on the host.
func (d *driver) newEngine() (Engine, error) {
	build := d.t.Config.Engine
	if build == nil {
		build = CPUEngine()
	}
	d.attached = attachedTo(d.t.Model.Kasmina)
	e, err := build(d.t.Model, d.t.Optimizer, d.t.Config)
	if err == nil && isNil(e) {
		err = errors.New("llm: TrainConfig.Engine has returned neither an engine nor an error")
	}
	return e, err
}

// replaceEngine installs the engine that create returns for the current model. If it returns an error, the
// new engine, if any, has been closed.
func (d *driver) replaceEngine(create func() (Engine, error), scale *LossScale) error {
	held := holderOf(d.t.Model)
	hold(d.t.Model, nil) // the parameters are only on the host until the new engine exists
	e, err := create()
	hold(d.t.Model, held)
	if err != nil {
		return err
	}

	if s, ok := e.(Scaler); ok && scale != nil {
		if err := s.SetLossScale(*scale); err != nil {
			return errors.Join(err, e.Close())
		}
	}

	d.engine, d.name, d.t.learning = e, e.Name(), nil
	d.t.note(func(e *Event) {
		e.Params, e.AllParams = trainableIn(d.t.Model, d.t.Config), d.t.Model.NumParams()
		e.Lattices = d.t.Model.Config.Lattices()
	})
	return nil
}

// forgetFrozen clears the optimizer state of slots that no seed trains any more.
func (d *driver) forgetFrozen() (err error) {
	d.t.learning, err = slotStore{Model: d.t.Model}.ForgetFrozen(d.engine, d.t.learning)
	return err
}

// recreateEngine closes the engine, if there is one, and creates another for the model on the host.
func (d *driver) recreateEngine(scale *LossScale) error {
	if old := d.engine; old != nil {
		d.engine = nil
		if err := old.Close(); err != nil {
			return err
		}
	}
	return d.replaceEngine(d.newEngine, scale)
}

// lossScale returns the engine's loss scale, or nil if it has none.
func (d *driver) lossScale() *LossScale {
	e, ok := d.engine.(Scaler)
	if !ok {
		return nil
	}
	s := e.LossScale()
	return &s
}

// setLossScale sets the loss scale of an engine that has one. It does nothing if s is nil.
func (d *driver) setLossScale(s *LossScale) error {
	if e, ok := d.engine.(Scaler); ok && s != nil {
		return e.SetLossScale(*s)
	}
	return nil
}

// engineName returns the name of the engine or, without an engine, of the previous one.
func (d *driver) engineName() string {
	if d.engine == nil {
		return d.name
	}
	return d.engine.Name()
}

// gatherState brings the optimizer state on the host up to date for the whole model.
func (d *driver) gatherState() error {
	if e := d.t.team.ranks(); e != nil {
		return e.Gather()
	}
	return nil
}

// figures returns the measurements of the planted blueprints from the step's last batch, no matter which rank
// computed it. measured is false for an engine that is not a Sensor.
func (d *driver) figures() (all []SeedFigures, measured bool, err error) {
	s, ok := d.engine.(Sensor)
	if !ok {
		return nil, false, nil
	}

	e := d.t.team.ranks()
	if e == nil {
		all, err = s.Figures()
		return all, true, err
	}

	last := (d.t.Config.Accumulate - 1) % e.Ranks()
	if e.Rank() == last { // other ranks may have computed no batch
		all, err = s.Figures()
	}

	if err := d.t.team.agree(err); err != nil {
		return nil, true, err
	}

	of, err := ranks.Swap(e, "figures", all)
	if err != nil {
		return nil, true, err
	}

	return of[last], true, nil
}
