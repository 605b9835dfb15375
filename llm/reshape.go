package llm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/memory"
	"github.com/kasmina-go/kasmina/internal/phases"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
	"github.com/kasmina-go/kasmina/state"
)

// beforeStates returns the part of the snapshots that a checkpoint holds as JSON.
func (t *Trainer) beforeStates() (all beforeStates) {
	for _, b := range t.snapshots {
		s := beforeState{Seeds: b.seeds, Config: b.Config, LossScale: b.scale}
		if len(b.seeds) == 1 && b.seeds[0].Layer == t.Model.LayerAt(blueprints.Depth) {
			s.Seed, s.Seeds = b.seeds[0].Seed, nil
		}
		all = append(all, s)
	}
	return all
}

// beforePrefix begins the names of the tensors of what the model was before a graft.
func beforePrefix(i int) string {
	if i == 0 {
		return modelfile.BeforePrefix
	}
	return fmt.Sprintf("%s%d.", modelfile.BeforePrefix, i)
}

// beforeTensors returns the tensors of the snapshots for a checkpoint. They share the snapshots'
// memory, which is never modified.
func (t *Trainer) beforeTensors() (all []safetensors.Tensor, err error) {
	for i, b := range t.snapshots {
		own, e := b.tensors(beforePrefix(i))
		all, err = append(all, own...), errors.Join(err, e)
	}
	return all, err
}

// beforeIn reads what the model of a checkpoint was before it grew to what it is now.
func (t *Trainer) beforeIn(ctx context.Context, f *modelfile.File, states beforeStates,
	now Config) (all snapshots, err error) {
	for i, s := range states {
		seeds, err := t.beforeSeeds(s, now)
		if err != nil {
			return nil, f.Errorf("%w", err)
		}
		b := snapshot{seeds: seeds}
		if b.branch, err = t.branchIn(ctx, f, s.Config, beforePrefix(i), s.LossScale); err != nil {
			return nil, err
		}
		all = append(all, b)
	}
	return all, nil
}

// beforeSeeds checks what a checkpoint says of what the model was, and returns the seeds that can
// be taken back to it.
func (t *Trainer) beforeSeeds(s beforeState, now Config) ([]state.Address, error) {
	if err := s.Config.Check(); err != nil {
		return nil, fmt.Errorf("what the model was before it grew: %w", err)
	}
	if have, want := s.Config.Origin(), t.Model.Config.Origin(); !have.SameBlocks(want) {
		return nil, fmt.Errorf("%w: what the model was before it grew is another one",
			ErrArchitecture)
	}
	depth, seeds := t.Model.LayerAt(blueprints.Depth), s.Seeds
	if len(seeds) == 0 {
		seeds = []state.Address{{Layer: depth, Seed: s.Seed}}
	}

	sameGrowth := func(a, b Grown) bool {
		return a.Seed == b.Seed && a.Stream == b.Stream && slices.Equal(a.Order, b.Order)
	}
	grown := len(s.Config.Grown)
	if len(now.Grown) < grown || !slices.EqualFunc(now.Grown[:grown], s.Config.Grown, sameGrowth) {
		return nil, fmt.Errorf("%w: what the model was before seed %d grew has grown by %d seeds, "+
			"which are not the first of those by which the model has grown", ErrArchitecture,
			seeds[0].Seed, grown)
	}
	for _, at := range seeds {
		l := t.Model.Kasmina.Lattice(at.Layer)
		if l == nil || l.Site() == blueprints.Chunk || at.Seed < 0 || at.Seed >= l.Seeds() {
			return nil, fmt.Errorf("%w: it holds the model as it was before seed %d grew, and layer "+
				"%d has no such seed that grows", ErrArchitecture, at.Seed, at.Layer)
		}
	}
	return seeds, nil
}

// reshape makes the model what the seeds in depth, at weights and in the stream say. It is called
// between two steps, in the model's turn.
func (t *Trainer) reshape() error {
	if err := t.reshapeDepth(); err != nil {
		return err
	}
	return t.replant()
}

// reshapeDepth makes the model's blocks what the seeds in depth say. From Grafting on a blueprint is
// in the model, and a rollback puts the model back to what it was before, moments included.
func (t *Trainer) reshapeDepth() error {
	m := t.Model
	layer := m.LayerAt(blueprints.Depth)
	if layer < 0 {
		return nil
	}
	for _, s := range m.Kasmina.Lattice(layer).Report().Seeds {
		in := slices.ContainsFunc(m.Config.Grown, func(g Grown) bool {
			return g.Seed == s.Seed && !g.Stream
		})
		var err error
		switch wanted := s.Stage.Blends(); {
		case wanted && !in:
			err = t.graft(s)
		case !wanted && in && s.Stage.Ended():
			err = t.takeBack(s)
		case s.Stage == state.Fossilized:
			t.commitGrowth(state.Address{Layer: layer, Seed: s.Seed})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// commitGrowth discards the snapshot of a growth in depth that has been accepted, and applies the
// growth to the other snapshots that lack it. In depth one blueprint is grafted at a time, so the
// growth is the model's last.
func (t *Trainer) commitGrowth(at state.Address) {
	if t.snapshots.find(at) < 0 {
		return
	}
	grown := t.Model.Config.Grown
	t.snapshots = t.snapshots.without(at)
	for i := range t.snapshots {
		if b := &t.snapshots[i]; len(b.Config.Grown) < len(grown) {
			b.modelState = b.Grow(grown[len(grown)-1]).Clone()
		}
	}
}

// now returns the model as it is, on the host; with an ErrDiverged too.
func (t *Trainer) now() (m modelState, err error) {
	if err = pull(t.Model); err != nil && !errors.Is(err, ErrDiverged) {
		return m, err
	}
	if err := t.gatherState(); err != nil {
		return m, err
	}
	m = modelState{Config: t.Model.Config, Params: t.Model.Params, Moments: t.Optimizer.State()}
	return t.there(m), err
}

// there notes that a model is what the engine has, where that can leave it to the next one.
func (t *Trainer) there(m modelState) modelState {
	if k, ok := t.engine.(Keeper); ok && k.CanKeep() {
		m.From, m.Here = map[string]string{}, map[string]bool{}
		for _, p := range m.Params {
			if m.Config.Learns(p.Name) {
				m.From[p.Name] = p.Name
			}
		}
	}
	return m
}

// part returns the model as it is, on the host the named parameters alone where the engine can leave
// the others to the next one.
func (t *Trainer) part(names ...string) (modelState, error) {
	m := t.there(modelState{Config: t.Model.Config, Params: t.Model.Params})
	if m.From == nil {
		return t.now()
	}
	if len(names) == 0 {
		return m, nil
	}
	return m, pull(t.Model, names...)
}

// graft gives the model the blocks of a seed's blueprint. When that cannot be, as for want of
// memory, the model stays as it is, the seed is rolled back, and the run goes on.
func (t *Trainer) graft(s state.SeedReport) error {
	began, m := time.Now(), t.Model
	blocks := m.Config.Layers
	order, err := blueprints.Order(s.Kind, blocks, s.Size)
	if err == nil {
		err = t.growBlocks(Grown{Seed: s.Seed, Kind: s.Kind.String(),
			Size: s.Size, Step: t.last.Step,
			Order: order})
	}
	what := fmt.Sprintf("%v of size %d, %d blocks to %d", s.Kind, s.Size, blocks, len(order))
	if err == nil {
		t.tellReshaped(what, time.Since(began), nil)
		return nil
	}
	if t.condition.err() != nil {
		return err
	}

	// A seed that has been fossilized before the model could grow cannot be rolled back: the run ends.
	l := m.Kasmina.Lattice(m.LayerAt(blueprints.Depth))
	if stuck := l.Transition(s.Seed, state.RolledBack); stuck != nil {
		return errors.Join(err, stuck)
	}
	t.tellReshaped(what, time.Since(began), err)
	return nil
}

// growBlocks is graft without its consequences for the seed.
func (t *Trainer) growBlocks(g Grown) error {
	next := t.Model.Config.Grow(g)
	if err := t.canReshape(next); err != nil {
		return err
	}
	now, err := t.now()
	if err != nil {
		return err
	}
	scale := t.lossScale()
	grown := growthState{snapshots: t.snapshots.with(now, scale,
		state.Address{Layer: t.Model.LayerAt(blueprints.Depth), Seed: g.Seed})}
	if err := t.change(now, now.Grow(g), scale); err != nil {
		return err
	}

	// A twin has other blocks. If blueprints are on trial, it starts again from the grown model.
	t.growthState = grown
	if t.growth != nil && t.growth.FreshMoments {
		if err := t.forgetCopies(g.Order); err != nil {
			t.on(restoreFailed, fmt.Errorf("the moments of the new blocks were not cleared: %w", err))
			return err
		}
	}
	return nil
}

// forgetCopies clears the optimizer's moments of every block of a new order that an earlier block is
// a copy of, too.
func (t *Trainer) forgetCopies(order []int) error {
	for i, from := range order {
		if from == blueprints.NewBlock || slices.Index(order, from) == i {
			continue
		}

		for _, p := range t.Model.Params {
			if !strings.HasPrefix(p.Name, blockPrefix(i)) || !t.Model.Config.Learns(p.Name) {
				continue
			}
			if err := t.engine.Forget(p.Name, 0, p.Value.Shape().TotalSize()); err != nil {
				return err
			}
		}
	}
	return nil
}

// takeBack puts the model back to what it was before the blueprint of a seed in depth was grafted.
// The loader and the count of steps go on from where they are.
func (t *Trainer) takeBack(s state.SeedReport) error {
	began, m := time.Now(), t.Model
	at := state.Address{Layer: m.LayerAt(blueprints.Depth), Seed: s.Seed}
	i := t.snapshots.find(at)
	if i < 0 {
		return fmt.Errorf("seed %d in depth is %v, and what the model was before it grew is not "+
			"known: resume from a checkpoint of the run, which has it, or from one before", s.Seed,
			s.Stage)
	}
	b := t.snapshots[i]
	c := b.Config
	c.Planted = m.Config.Planted
	if err := t.canReshape(c); err != nil {
		return err
	}
	what := fmt.Sprintf("%v of size %d taken back, %d blocks to %d", s.Kind,
		s.Size, m.Config.Layers, c.Layers)
	now, err := t.part()
	if err != nil && !errors.Is(err, ErrDiverged) {
		return err
	}
	if err := t.change(now, now.Back(b.modelState, c), b.scale); err != nil {
		return err
	}
	t.growthState = growthState{snapshots: t.snapshots.rolledBackTo(i).without(at)}
	t.tellReshaped(what, time.Since(began), nil)
	return nil
}

// withdraw takes the latest grafts back for which a step has diverged, if there are any: the run
// goes on as it was before. Otherwise it returns the step's error.
func (t *Trainer) withdraw(cause error) error {
	if t.twin != nil {
		return t.giveUp(cause)
	}
	if len(t.snapshots) == 0 {
		return cause
	}
	for _, at := range t.snapshots[len(t.snapshots)-1].seeds {
		if t.Model.Kasmina.Lattice(at.Layer).Transition(at.Seed, state.RolledBack) != nil {
			return cause
		}
	}
	if err := t.reshape(); err != nil {
		return errors.Join(cause, err)
	}
	t.reshaped[len(t.reshaped)-1].Err = cause
	return nil
}

// canReshape returns an error if the model cannot get another configuration.
func (t *Trainer) canReshape(next Config) error {
	if trainersOf(t.Model) > 1 {
		return errors.New("another trainer of the model is open, whose graphs are of the blocks " +
			"that there are: close it")
	}
	if err := next.Check(); err != nil {
		return err
	}
	bytes := uint64(0)
	for p := range next.Specs() {
		bytes += uint64(tensor.Shape(p.Shape).TotalSize()) * uint64(t.Model.Dtype().Size())
	}
	// Parameters, gradients and two moments, beside what the model was.
	return t.agree(memory.Check("the larger model takes", 4*bytes))
}

// change makes the model, which is as now returned it, another one, and makes the trainer an engine
// for that. On an error all is as before, or there is no engine any more.
func (t *Trainer) change(old, next modelState, scale *LossScale) error {
	clock, oldScale := phases.Start(), t.lossScale()
	make, end, err := t.leave(old)
	if err != nil {
		return t.loseEngine(err)
	}
	clock.End("leaving the engine")
	put := func(m modelState, scale *LossScale) error {
		own := t.Model.Params
		become(t.Model, m.Config, m.Params)
		if err := t.agree(t.setOptimizer(own, m)); err != nil {
			return err
		}
		clock.End("the optimiser")
		return t.replaceEngine(func() (Engine, error) { return make(m) }, scale)
	}
	if err = put(next, scale); err != nil {
		if again := put(old, oldScale); again != nil {
			err = t.loseEngine(fmt.Errorf("%w; and the one before: %w", err, again))
		}
	}
	clock.End("the next engine")
	if left := end(); left != nil {
		slog.Warn("llm: memory of the engine before could not be given back", "error", left)
	}
	clock.End("what is left")
	slog.Debug("llm: the model has another engine", "in", clock)
	return err
}

// loseEngine notes that no engine could be made for the model, and returns why.
func (t *Trainer) loseEngine(cause error) error {
	t.engine = nil
	t.on(engineLost, cause)
	return t.condition.err()
}

// setOptimizer makes the optimizer one of a model, with the model's moments. It forgets those
// parameters that it knows and the model lacks, or has in another shape: a seed that grows again
// may do so in another size.
func (t *Trainer) setOptimizer(known []Param, m modelState) error {
	if o, ok := t.Optimizer.(interface{ Drop(names ...string) }); ok {
		shapes := map[string]tensor.Shape{}
		for _, p := range m.Params {
			shapes[p.Name] = p.Value.Shape()
		}
		for _, p := range known {
			if s, ok := shapes[p.Name]; !ok || !s.Eq(p.Value.Shape()) {
				o.Drop(p.Name)
			}
		}
	}
	if err := t.Optimizer.Declare(valueGradsOf(m.Config, m.Params)); err != nil {
		return err
	}
	return t.Optimizer.SetState(m.MomentsHere())
}

// leave closes the engine, before the next one takes memory. It returns what makes that for a model,
// and what is to be called in the end.
func (t *Trainer) leave(old modelState) (make func(modelState) (Engine, error),
	end func() error, err error) {
	if old.From == nil {
		closed := t.engine.Close()
		return func(modelState) (Engine, error) {
			if err := closed; err != nil {
				closed = nil
				return nil, err
			}
			return t.newEngine()
		}, func() error { return nil }, nil
	}
	kept, err := t.engine.(Keeper).Keep()
	if err != nil {
		return nil, nil, err
	}
	return func(m modelState) (Engine, error) {
		t.attached = attachedTo(t.Model.Kasmina)
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

// newEngine makes an engine for the model as it is on the host.
func (t *Trainer) newEngine() (Engine, error) {
	build := t.Config.Engine
	if build == nil {
		build = CPUEngine()
	}
	t.attached = attachedTo(t.Model.Kasmina)
	e, err := build(t.Model, t.Optimizer, t.Config)
	if err == nil && isNil(e) {
		err = errors.New("llm: TrainConfig.Engine has returned neither an engine nor an error")
	}
	return e, err
}

// replaceEngine makes an engine for the model as it is.
func (t *Trainer) replaceEngine(make func() (Engine, error), scale *LossScale) error {
	held := holderOf(t.Model)
	hold(t.Model, nil) // parameters are the host's until there is an engine
	e, err := make()
	hold(t.Model, held)
	if err != nil {
		return err
	}
	t.engine, t.name, t.learning = e, e.Name(), nil
	t.note(func(e *Event) {
		e.Params, e.AllParams = t.Model.NumTrainable(), t.Model.NumParams()
		e.Lattices = t.Model.Config.Lattices()
	})
	return t.setLossScale(scale)
}

// tellReshaped notes what the callbacks hear of behind the step.
func (t *Trainer) tellReshaped(what string, took time.Duration, err error) {
	text := fmt.Sprintf("%s, %d parameters, in %.2f s", what, t.Model.NumParams(), took.Seconds())
	if err != nil {
		text = what + " was not possible"
	}
	t.reshaped = append(t.reshaped, Event{Text: text, Err: err})
}

// tellGrowth tells the callbacks how the model has grown. After an error the rest waits for the next
// step.
func (t *Trainer) tellGrowth() error {
	for {
		next, ok := t.nextReshaped()
		if !ok {
			return nil
		}
		err := t.emit(Reshaped, func(e *Event) { e.Text, e.Err = next.Text, next.Err })
		if err != nil {
			return err
		}
	}
}

// nextReshaped takes the oldest Reshaped event that callbacks have not been told about.
func (t *Trainer) nextReshaped() (e Event, ok bool) {
	defer take(t.Model)()
	if len(t.reshaped) == 0 {
		return e, false
	}
	e, t.reshaped = t.reshaped[0], t.reshaped[1:]
	return e, true
}

// forgetFrozen drops the momentum of slots with which no seed learns any more.
func (t *Trainer) forgetFrozen() (err error) {
	t.learning, err = slotStore{Model: t.Model}.ForgetFrozen(t.engine, t.learning)
	return err
}
