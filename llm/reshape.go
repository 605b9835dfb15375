package llm

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/memory"
	"github.com/kasmina-go/kasmina/state"
)

// reshape adapts the model's structure to the stages of its seeds in depth, at weights and in the
// stream. It is called between two steps, with the model locked.
func (g *growth) reshape() error {
	if err := g.reshapeDepth(); err != nil {
		return err
	}
	return g.replant()
}

// reshapeDepth adapts the model's blocks to the stages of the seeds in depth. From Grafting on, a
// blueprint's blocks are part of the model, and a rollback restores the earlier model, including its
// moments.
func (g *growth) reshapeDepth() error {
	m := g.t.Model
	layer := m.LayerAt(blueprints.Depth)
	if layer < 0 {
		return nil
	}

	for _, s := range m.Kasmina.Lattice(layer).Report().Seeds {
		hasBlocks := slices.ContainsFunc(m.Config.Grown, func(g Grown) bool {
			return g.Seed == s.Seed && !g.Stream
		})
		var err error
		switch needsBlocks := s.Stage.Blends(); {
		case needsBlocks && !hasBlocks:
			err = g.graft(s)
		case !needsBlocks && hasBlocks && s.Stage.Ended():
			err = g.takeBack(s)
		case s.Stage == state.Fossilized:
			g.commitGrowth(state.Address{Layer: layer, Seed: s.Seed})
		}
		if err != nil {
			return err
		}
	}

	return nil
}

// commitGrowth discards the snapshot of an accepted growth in depth and applies the growth to the
// remaining snapshots that lack it. Only one blueprint in depth is grafted at a time, so the growth is
// the model's latest.
func (g *growth) commitGrowth(at state.Address) {
	if g.snapshots.find(at) < 0 {
		return
	}
	g.snapshots = g.snapshots.without(at)

	grown := g.t.Model.Config.Grown
	for i := range g.snapshots {
		snapshot := &g.snapshots[i]
		if len(snapshot.Config.Grown) < len(grown) { // it lacks the growth
			snapshot.modelState = snapshot.Grow(grown[len(grown)-1]).Clone()
		}
	}
}

// graft adds the blocks of a seed's blueprint to the model. If that is impossible, for example because of
// too little memory, the model does not change, the seed is rolled back, and the run continues.
func (g *growth) graft(s state.SeedReport) error {
	start, m := time.Now(), g.t.Model
	blocks := m.Config.Layers
	order, err := blueprints.Order(s.Kind, blocks, s.Size)
	if err == nil {
		err = g.growBlocks(Grown{Seed: s.Seed, Kind: s.Kind.String(),
			Size: s.Size, Step: g.t.last.Step,
			Order: order})
	}

	what := fmt.Sprintf("%v of size %d, %d blocks to %d", s.Kind, s.Size, blocks, len(order))
	if err == nil {
		g.queueReshaped(what, time.Since(start), nil)
		return nil
	}

	if g.t.condition.err() != nil {
		return err // the failed change has left the trainer unusable
	}

	// A seed that was fossilized before the model could grow cannot be rolled back, so the run ends.
	lattice := m.Kasmina.Lattice(m.LayerAt(blueprints.Depth))
	if stuck := lattice.Transition(s.Seed, state.RolledBack); stuck != nil {
		return errors.Join(err, stuck)
	}

	g.queueReshaped(what, time.Since(start), err)
	return nil
}

// growBlocks adds the blocks that grown describes to the model, after taking a snapshot to roll back to. It
// does not change the seed. If it returns an error before the model changes, the snapshots do not change
// either.
func (g *growth) growBlocks(grown Grown) error {
	next := g.t.Model.layout().Grow(grown)
	if err := g.canReshape(next); err != nil {
		return err
	}

	now, err := g.t.driver.now()
	if err != nil {
		return err
	}

	scale := g.t.driver.lossScale()
	after := growthState{snapshots: g.snapshots.with(now, scale,
		state.Address{Layer: g.t.Model.LayerAt(blueprints.Depth), Seed: grown.Seed})}
	if err := g.t.driver.change(now, now.Grow(grown), scale); err != nil {
		return err
	}

	// The next growthState has no twin, because the present twin lacks the new blocks. If blueprints are on
	// trial, a new twin starts from the grown model.
	g.growthState = after
	if g.options != nil && g.options.FreshMoments {
		if err := g.forgetCopies(grown.Order); err != nil {
			g.t.on(restoreFailed, fmt.Errorf("the moments of the new blocks were not cleared: %w", err))
			return err
		}
	}

	return nil
}

// forgetCopies clears the optimizer's moments of blocks that are further copies of an earlier block. order[i]
// is the former number of block i, or blueprints.NewBlock.
func (g *growth) forgetCopies(order []int) error {
	var copies []ParamRange
	for i, from := range order {
		if from == blueprints.NewBlock || slices.Index(order, from) == i {
			continue // not a copy, or the first one
		}

		for _, p := range g.t.Model.Params {
			if !strings.HasPrefix(p.Name, blockPrefix(i)) || !g.t.Config.Learns(p.Name) {
				continue
			}
			copies = append(copies, ParamRange{p.Name, 0, p.Value.Shape().TotalSize()})
		}
	}

	return g.t.team.agree(g.t.driver.engine.Forget(copies...))
}

// takeBack restores the model from before a depth seed's blueprint was grafted. The loader and the
// step count continue from their current positions.
func (g *growth) takeBack(s state.SeedReport) error {
	start, m := time.Now(), g.t.Model
	at := state.Address{Layer: m.LayerAt(blueprints.Depth), Seed: s.Seed}
	i := g.snapshots.find(at)
	if i < 0 {
		return fmt.Errorf("seed %d in depth is %v, and the trainer has no snapshot from before "+
			"it grew: resume from a checkpoint of the run, which contains it, or from an earlier one", s.Seed,
			s.Stage)
	}

	// The blueprints that are planted now stay planted.
	snapshot := g.snapshots[i]
	restored := snapshot.layout
	restored.Planted = m.Planted
	if err := g.canReshape(restored); err != nil {
		return err
	}

	what := fmt.Sprintf("%v of size %d taken back, %d blocks to %d", s.Kind,
		s.Size, m.Config.Layers, restored.Layers)
	now, err := g.t.driver.handover()
	if errors.Is(err, ErrDiverged) {
		err = nil // a model that has diverged can still be taken back
	}
	if err = g.t.team.agree(err); err != nil {
		return err
	}

	if err := g.t.driver.change(now, now.Back(snapshot.modelState, restored), snapshot.scale); err != nil {
		return err
	}

	// As in growBlocks, the twin is given up.
	g.growthState = growthState{snapshots: g.snapshots.rolledBackTo(i).without(at)}
	g.queueReshaped(what, time.Since(start), nil)
	return nil
}

// withdraw undoes the latest grafts after a step has diverged, so that the run continues without
// them. It returns the cause and changes nothing if there is nothing to undo. If the grafts cannot be
// undone, it returns the cause joined with the reason.
func (g *growth) withdraw(cause error) error {
	if g.twin != nil {
		return g.giveUp(cause)
	}

	if len(g.snapshots) == 0 {
		return cause
	}

	latest := g.snapshots[len(g.snapshots)-1]
	if err := g.rollBack(latest.seeds); err != nil {
		return errors.Join(cause, err)
	}

	if err := g.reshape(); err != nil {
		return errors.Join(cause, err)
	}

	// The event of the last change reports why grafts were taken back.
	g.reshaped[len(g.reshaped)-1].Err = cause
	return nil
}

// rollBack rolls back all of the seeds or none.
func (g *growth) rollBack(seeds []state.Address) error {
	var commands []state.Command
	for _, at := range seeds {
		commands = append(commands, state.Command{Action: state.Move, Layer: at.Layer, Seed: at.Seed,
			To: state.RolledBack, Why: "a step has diverged"})
	}
	return g.t.Model.Kasmina.Obey(commands...)
}

// canReshape returns an error if the model cannot change to another configuration.
func (g *growth) canReshape(next layout) error {
	if trainersOf(g.t.Model) > 1 {
		return errors.New("another trainer of the model is open, and its graphs depend on the " +
			"current blocks: close it")
	}

	if err := next.Check(); err != nil {
		return err
	}

	paramBytes := uint64(0)
	for p := range next.Specs() {
		paramBytes += uint64(tensor.Shape(p.Shape).TotalSize()) * uint64(g.t.Model.Dtype().Size())
	}

	// The new model needs parameters, gradients and two moments, in addition to the current model.
	const copies = 4
	return g.t.team.agree(memory.Check("the larger model takes", copies*paramBytes))
}

// queueReshaped queues a Reshaped event for the end of the step.
func (g *growth) queueReshaped(what string, took time.Duration, err error) {
	text := fmt.Sprintf("%s, %d parameters, in %.2f s", what, g.t.Model.NumParams(), took.Seconds())
	if err != nil {
		text = what + " was not possible"
	}
	g.reshaped = append(g.reshaped, Event{Text: text, Err: err})
}

// emitReshaped emits the queued Reshaped events. After an error the rest waits for the next step.
func (g *growth) emitReshaped() error {
	for {
		next, ok := g.nextReshaped()
		if !ok {
			return nil
		}
		err := g.t.emit(Reshaped, func(e *Event) { e.Text, e.Err = next.Text, next.Err })
		if err != nil {
			return err
		}
	}
}

// nextReshaped takes the oldest Reshaped event from the queue.
func (g *growth) nextReshaped() (e Event, ok bool) {
	defer take(g.t.Model)()
	if len(g.reshaped) == 0 {
		return e, false
	}
	e, g.reshaped = g.reshaped[0], g.reshaped[1:]
	return e, true
}
