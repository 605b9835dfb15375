package llm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/memory"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm/engine"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
	"github.com/kasmina-go/kasmina/llm/model"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// grafted is what a model was before the blueprint of a seed in depth was grafted, for as long as
// it may be taken back.
type grafted struct {
	seed   int
	config Config
	branch
}

// state returns what a checkpoint has of b beside tensors.
func (b *grafted) state() *beforeState {
	if b == nil {
		return nil
	}
	return &beforeState{Seed: b.seed, Config: b.config, LossScale: b.scale}
}

// tensors returns what a checkpoint has of b, sharing its memory: nobody changes it.
func (b *grafted) tensors() (all []safetensors.Tensor, err error) {
	if b == nil {
		return nil, nil
	}
	return b.branch.tensors(modelfile.BeforePrefix)
}

// beforeIn reads what the model of a checkpoint was before it grew to what it is now.
func (t *Trainer) beforeIn(ctx context.Context, f *modelfile.File, s *beforeState,
	now Config) (*grafted, error) {
	if s == nil {
		return nil, nil
	}
	if err := s.Config.Check(); err != nil {
		return nil, f.Errorf("what the model was before it grew: %w", err)
	}
	if have, want := s.Config.Origin(), t.Model.Config.Origin(); !have.SameBlocks(want) {
		return nil, f.Errorf("%w: what the model was before it grew is another one",
			ErrArchitecture)
	}
	grown := len(s.Config.Grown)
	if len(now.Grown) != grown+1 || now.Grown[grown].Seed != s.Seed {
		return nil,
			f.Errorf("%w: what the model was before seed %d grew has grown by %d seeds, and the "+
				"model by %d: want one more, that seed", ErrArchitecture, s.Seed,
				grown, len(now.Grown))
	}
	b, err := t.branchIn(ctx, f, s.Config, modelfile.BeforePrefix, s.LossScale)
	if err != nil {
		return nil, err
	}
	c := s.Config
	c.KasminaOptions = t.Model.Config.KasminaOptions
	return &grafted{seed: s.Seed, config: c, branch: b}, nil
}

// reshape makes the model's blocks what the seeds in depth say: from Grafting on a blueprint is in
// the model, and a rollback puts the model back to what it was before, moments included. It is
// called between two steps, in the model's turn.
func (t *Trainer) reshape() error {
	m := t.Model
	if m.Config.Depth == 0 {
		return nil
	}
	layer := m.Kasmina.Layers() - 1
	l := m.Kasmina.Lattice(layer)
	for _, s := range l.Report().Seeds {
		in := slices.ContainsFunc(m.Config.Grown, func(g Grown) bool { return g.Seed == s.Seed })
		var err error
		switch wanted := s.Stage.Blends(); {
		case wanted && !in:
			err = t.graft(s)
		case !wanted && in && s.Stage.Ended():
			err = t.takeBack(s)
		}
		if err != nil {
			return err
		}
		if t.before != nil && t.before.seed == s.Seed && s.Stage == state.Fossilized {
			t.before = nil
		}
	}
	return nil
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
	if errors.Is(err, engine.ErrNone) {
		return err
	}
	t.tellReshaped(what, time.Since(began), err)
	return m.Kasmina.Lattice(m.Kasmina.Layers()-1).Transition(s.Seed, state.RolledBack)
}

// growBlocks is graft without its consequences for the seed.
func (t *Trainer) growBlocks(g Grown) error {
	m := t.Model
	next := m.Config.Grow(g)
	if err := t.canReshape(next); err != nil {
		return err
	}
	b, err := t.branch()
	if err != nil {
		return err
	}
	before := &grafted{g.Seed, m.Config, b}
	params, moments := model.Grown(m, g, next), momentsOf(g, before.optimizer, next)
	if err := t.change(next, params, moments, before.scale); err != nil {
		return err
	}
	t.before = before
	return nil
}

// takeBack puts the model back to what it was before the blueprint of a seed was grafted. The
// loader and the count of steps go on from where they are.
func (t *Trainer) takeBack(s state.SeedReport) error {
	began, m, b := time.Now(), t.Model, t.before
	if b == nil || b.seed != s.Seed {
		return fmt.Errorf("seed %d in depth is %v, and what the model was before it grew is not "+
			"known: resume from a checkpoint of the run, which has it, or from one before", s.Seed,
			s.Stage)
	}
	if err := t.canReshape(b.config); err != nil {
		return err
	}
	what := fmt.Sprintf("%v of size %d taken back, %d blocks to %d", s.Kind,
		s.Size, m.Config.Layers,
		b.config.Layers)
	if err := t.change(b.config, b.params, b.optimizer, b.scale); err != nil {
		return err
	}
	t.before = nil
	t.tellReshaped(what, time.Since(began), nil)
	return nil
}

// withdraw takes the latest growth back for which a step has diverged, if there is one: the run
// goes on as it was before. Otherwise it returns the step's error.
func (t *Trainer) withdraw(cause error) error {
	b, m := t.before, t.Model
	if t.twin != nil {
		return t.giveUp(cause)
	}
	if b == nil {
		return cause
	}
	l := m.Kasmina.Lattice(m.Kasmina.Layers() - 1)
	if err := l.Transition(b.seed, state.RolledBack); err != nil {
		return cause
	}
	if err := t.reshape(); err != nil {
		return errors.Join(cause, err)
	}
	t.reshaped[len(t.reshaped)-1].Err = cause
	return nil
}

// canReshape returns an error if the model cannot get another configuration.
func (t *Trainer) canReshape(next Config) error {
	if model.Trainers(t.Model) > 1 {
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

// momentsOf returns what an optimiser remembers of the parameters of a grown model: copies have the
// moments of what they are copies of.
func momentsOf(g Grown, state []optim.Tensor, next Config) (moments []optim.Tensor) {
	byParam := map[string][]optim.Tensor{}
	for _, x := range state {
		dot := strings.LastIndexByte(x.Name, '.')
		byParam[x.Name[:dot]] = append(byParam[x.Name[:dot]], x)
	}
	for p := range next.Specs() {
		from := g.Source(p.Name)
		for _, x := range byParam[from] {
			x.Name = p.Name + strings.TrimPrefix(x.Name, from)
			moments = append(moments, x)
		}
	}
	return moments
}

// change gives the model another configuration, parameters and moments, and the trainer an engine
// for them. On an error all is as before, unless it is engine.ErrNone.
func (t *Trainer) change(c Config, params []Param, moments []optim.Tensor, scale *LossScale) error {
	m, o := t.Model, t.Optimizer
	if err := t.gatherState(); err != nil {
		return err
	}
	t.twin = nil // which has other blocks: blueprints are judged by muting them from now on
	old := grafted{config: m.Config, branch: branch{m.Params, o.State(), t.lossScale()}}
	put := func(c Config, params []Param, moments []optim.Tensor, scale *LossScale) error {
		model.Become(m, c, params)
		if err := o.Declare(valueGrads(params)); err != nil {
			return err
		}
		if err := o.SetState(moments); err != nil {
			return err
		}
		return t.replaceEngine(scale)
	}
	closed := t.engine.Close() // before the next one takes memory
	err := errors.Join(closed, put(c, params, moments, scale))
	if err == nil {
		return nil
	}
	if again := put(old.config, old.params, old.optimizer, old.scale); again != nil {
		t.engine = engine.None{}
		return fmt.Errorf("%w: %w; and the one before: %w", engine.ErrNone, err, again)
	}
	return err
}

// replaceEngine makes an engine for the model as it is.
func (t *Trainer) replaceEngine(scale *LossScale) error {
	build := t.Config.Engine
	if build == nil {
		build = CPUEngine()
	}
	held := model.HolderOf(t.Model)
	model.Hold(t.Model, nil) // parameters are the host's until there is an engine
	e, err := build(t.Model, t.Optimizer, t.Config)
	model.Hold(t.Model, held)
	switch {
	case err != nil:
		return err
	case isNil(e):
		return errors.New("TrainConfig.Engine has returned neither an engine nor an error")
	}
	t.engine, t.learning = e, nil
	t.note(func(e *Event) { e.Params = t.Model.NumParams() })
	return t.setLossScale(scale)
}

// valueGrads are parameters as an optimiser declares them.
func valueGrads(params []Param) (all []gorgonia.ValueGrad) {
	g := gorgonia.NewGraph()
	for _, p := range params {
		all = append(all, gorgonia.NodeFromAny(g, p.Value, gorgonia.WithName(p.Name)))
	}
	return all
}

// tellReshaped notes what the callbacks hear of behind the step.
func (t *Trainer) tellReshaped(what string, took time.Duration, err error) {
	text := fmt.Sprintf("%s, %d parameters, in %.2f s", what, t.Model.NumParams(), took.Seconds())
	if err != nil {
		text = what + " was not possible"
	}
	t.reshaped = append(t.reshaped, Event{Text: text, Err: err})
}

// tellGrowth tells the callbacks how the model's blocks have become others.
func (t *Trainer) tellGrowth() (errs error) {
	happened := t.reshaped
	t.reshaped = nil
	for _, h := range happened {
		errs = errors.Join(errs, t.emit(Reshaped, func(e *Event) { e.Text, e.Err = h.Text, h.Err }))
	}
	return errs
}

// forgetFrozen drops the momentum of slots with which no seed learns any more.
func (t *Trainer) forgetFrozen() (err error) {
	t.learning, err = model.Slots{Model: t.Model}.ForgetFrozen(t.engine, t.learning)
	return err
}
