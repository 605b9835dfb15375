package llm

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/phases"
	"github.com/kasmina-go/kasmina/state"
)

// A blueprint at a weight or in the stream is planted when its seed enters Training. From then on,
// its parameters are part of the graph. When it is fossilized, it is merged into the model; if its
// life ends otherwise, it is removed and the model returns to its state before the graft.
//
// All of this happens between two steps and for all seeds together, because each change needs a new
// engine.

// planting lists the changes that the stages of seeds at weights and in the stream require.
type planting struct {
	plant  []Planted
	gone   []state.Address // blueprints at the end of their lives
	merge  []state.Address // fossilized blueprints
	grafts []state.Address // seeds that enter Grafting
}

func (p *planting) none() bool {
	return len(p.plant)+len(p.gone)+len(p.merge)+len(p.grafts) == 0
}

// asked returns the changes required by the seeds' stages.
func (g *growth) asked() (p planting) {
	c := g.t.Model.layout()
	for layer, l := range g.t.Model.Kasmina.Lattices() {
		where := l.Site()
		if where != blueprints.Weight && where != blueprints.Stream {
			continue
		}
		l.Begin(&g.pass, false)
		for seed, stage := range g.pass.Stage {
			at := state.Address{Layer: layer, Seed: seed}
			_, in := c.PlantedAt(where, seed)
			switch alive := stage >= state.Training && stage < state.Fossilized; {
			case alive && !in:
				p.plant = append(p.plant, Planted{Site: where, Seed: seed,
					Kind: g.pass.Kind[seed].String(), Size: int(g.pass.Slot[seed])})
			case stage == state.Fossilized && in:
				if g.canMerge(where, g.pass.Kind[seed]) {
					p.merge = append(p.merge, at)
				} else if !blueprints.Mergeable(g.pass.Kind[seed]) {
					g.snapshots = g.snapshots.without(at)
				}
			case !alive && stage != state.Fossilized && in:
				p.gone = append(p.gone, at)
			}
			// A frozen host needs no snapshot: removing the blueprint restores it.
			if stage.Grafted() && g.snapshots.find(at) < 0 && !g.triesOut() && !g.t.Config.Frozen {
				p.grafts = append(p.grafts, at)
			}
		}
	}

	return p
}

// canMerge reports whether a fossilized blueprint can be merged into the model now. No block is added
// while growth in depth may still be undone, because its order of blocks would no longer fit.
func (g *growth) canMerge(where blueprints.Site, kind blueprints.Kind) bool {
	if where == blueprints.Stream {
		depth := g.t.Model.LayerAt(blueprints.Depth)
		for _, b := range g.snapshots {
			if slices.ContainsFunc(b.seeds, func(s state.Address) bool { return s.Layer == depth }) {
				return false
			}
		}
	}
	return blueprints.Mergeable(kind)
}

// settleSeeds removes and merges blueprints when a run ends. Nothing is planted.
func (g *growth) settleSeeds() error {
	err := g.t.inTurn(func() error {
		p := g.asked()
		p.plant, p.grafts = nil, nil
		if p.none() {
			return nil
		}
		return g.obeySeeds(p)
	})
	return errors.Join(err, g.emitReshaped())
}

// replant brings the planted and the attached blueprints in line with the stages of their seeds.
func (g *growth) replant() error {
	if err := g.attach(); err != nil {
		return err
	}
	if p := g.asked(); !p.none() {
		return g.obeySeeds(p)
	}
	return nil
}

// obeySeeds plants, removes, merges and grafts blueprints. If it fails, the trainer's growth state is
// unchanged.
func (g *growth) obeySeeds(p planting) error {
	began, clock := time.Now(), phases.Start()
	now, err := g.needed(p)
	clock.End("copying to the host")
	if errors.Is(err, ErrDiverged) && len(p.gone) > 0 {
		err = nil // a model that has diverged can still be rolled back
	}
	if err = g.t.team.agree(err); err != nil {
		return err
	}

	next, growing, scale, err := g.settled(now, p)
	if err != nil {
		return err
	}

	clock.End("merging")

	along, err := g.directions(p.plant)
	if err != nil {
		return err
	}

	for _, planted := range p.plant {
		next = next.Plant(planted, g.t.last.Step, along.Rows(planted)...)
	}

	growing.twin = growing.twin.with(p.plant, g.t.last.Step)

	if len(p.plant)+len(p.gone)+len(p.merge) > 0 {
		if err := g.canReshape(next.layout); err != nil {
			return g.refuse(p, err, began)
		}
		if err := g.t.driver.change(now, next, scale); err != nil {
			return g.refuse(p, err, began)
		}
	}

	clock.End("planting and the engine")

	g.growthState = growing
	if len(p.grafts) > 0 {
		g.snapshots = g.snapshots.with(next, g.t.driver.lossScale(), p.grafts...)
	}

	clock.End("snapshots")
	slog.Debug("llm: planted, merged or removed blueprints", "in", clock)
	if what := describePlanting(p.plant, p.gone, p.merge, g.siteOf); what != "" {
		g.queueReshaped(what, time.Since(began), nil)
	}

	return nil
}

// settled merges fossilized blueprints into a model and removes blueprints at the end of their lives. It
// returns the resulting model with the matching growth state and loss scale.
func (g *growth) settled(now modelState, p planting) (next modelState, growing growthState,
	scale *LossScale, err error) {
	next, growing, scale = now, g.growthState, g.t.driver.lossScale()

	growing.snapshots = growing.snapshots.without(p.merge...)
	for _, where := range []blueprints.Site{blueprints.Weight, blueprints.Stream} {
		var seeds []int
		for _, at := range p.merge {
			if g.siteOf(at) == where {
				seeds = append(seeds, at.Seed)
			}
		}
		all, err := mergeSeeds(where, seeds, g.t.last.Step, next, growing.models()...)
		if err != nil {
			return next, growing, scale, err
		}
		next, growing = all[0], growing.withModels(all[1:])
	}

	if i := growing.snapshots.find(p.gone...); i >= 0 {
		back := growing.snapshots[i]
		next, scale = next.Back(back.modelState, next.layout), back.scale
		growing.snapshots = growing.snapshots.rolledBackTo(i)
	}

	growing.snapshots = growing.snapshots.without(p.gone...)
	for _, at := range p.gone {
		next = next.Uproot(g.siteOf(at), at.Seed)
		others := growing.models()
		for i := range others {
			others[i] = others[i].Uproot(g.siteOf(at), at.Seed)
		}
		growing = growing.withModels(others)
	}

	return next, growing, scale, nil
}

// needed returns the model with the parameters that a planting needs on the host: all parameters before a
// graft or for directed blueprints, and otherwise only the ones to be merged.
func (g *growth) needed(p planting) (modelState, error) {
	c := g.t.Model.Config
	if len(p.grafts) > 0 || g.t.Config.Directed && len(p.plant) > 0 {
		return g.t.driver.now()
	}

	var prefixes, names []string
	for _, at := range p.merge {
		where := g.siteOf(at)
		if where == blueprints.Weight {
			prefixes = append(prefixes, c.WeightName(c.Weights[at.Seed]))
		}
		prefixes = append(prefixes, seedPrefix(where, at.Seed))
	}

	for _, q := range g.t.Model.Params {
		if slices.ContainsFunc(prefixes, func(prefix string) bool {
			return strings.HasPrefix(q.Name, prefix)
		}) {
			names = append(names, q.Name)
		}
	}

	return g.t.driver.handover(names...)
}

// attach rebuilds the engine if the set of chunk blueprints computed as graphs has changed. Seeds
// whose graph cannot be built are abandoned.
func (g *growth) attach() error {
	all := attachedTo(g.t.Model.Kasmina)
	if slices.Equal(all, g.t.driver.attached) {
		return nil
	}

	began := time.Now()
	m, err := g.t.driver.handover()
	if err = g.t.team.agree(err); err != nil {
		return err
	}

	what := fmt.Sprintf("%d chunk seeds use kinds computed as graphs", len(all))
	if _, err := g.t.Config.Graph(g.t.Model); err != nil {
		g.queueReshaped(what, time.Since(began), err)
		return g.detach(all)
	}

	if err := g.t.driver.change(m, m, g.t.driver.lossScale()); err != nil {
		return err
	}

	g.queueReshaped(what, time.Since(began), nil)
	return nil
}

// detach abandons the chunk seeds with graph blueprints that the engine does not compute yet.
func (g *growth) detach(all []attachedSeed) error {
	for _, a := range all {
		if slices.Contains(g.t.driver.attached, a) {
			continue
		}
		if err := g.abandon(state.Address{Layer: a.Layer, Seed: a.Seed}); err != nil {
			return err
		}
	}
	return nil
}

// abandon ends the life of a seed after its blueprint could not be added to the model.
func (g *growth) abandon(at state.Address) error {
	l := g.t.Model.Kasmina.Lattice(at.Layer)
	stage, err := l.Stage(at.Seed)
	if err != nil {
		return err
	}
	if stage == state.Training {
		return l.Transition(at.Seed, state.Cancelled)
	}
	return l.Transition(at.Seed, state.RolledBack)
}

// siteOf returns the site of a seed's lattice.
func (g *growth) siteOf(at state.Address) blueprints.Site {
	return g.t.Model.Kasmina.Lattice(at.Layer).Site()
}

// with returns the twin with additional blueprints planted in it.
func (w *twin) with(plant []Planted, step int) *twin {
	if w == nil || w.lost || len(plant) == 0 {
		return w
	}
	next := *w
	for _, p := range plant {
		next.modelState = next.Plant(p, step)
	}
	return &next
}

// refuse gives up the seeds after their blueprints could not be planted, for example because of too
// little memory, and then makes the other required changes. It returns the cause if the trainer can no
// longer be used, or if nothing was to be planted: a failure to remove or merge a blueprint ends the run.
func (g *growth) refuse(p planting, cause error, began time.Time) error {
	if g.t.condition.err() != nil || len(p.plant) == 0 {
		return cause
	}

	for _, planted := range p.plant {
		at := state.Address{Layer: g.t.Model.LayerAt(planted.Site), Seed: planted.Seed}
		if err := g.abandon(at); err != nil {
			return errors.Join(cause, err)
		}
	}

	g.queueReshaped(describePlanting(p.plant, nil, nil, g.siteOf), time.Since(began), cause)

	// Other changes, such as a snapshot before a graft, cannot wait for the next step.
	return g.replant()
}
