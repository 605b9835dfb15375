package llm

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/state"
)

// A twin is the model without the blueprints on trial.
//
// It starts as a copy, just before the first of these blueprints is blended in, and makes the same
// steps on the same batches. The difference between the two is therefore the effect of the
// blueprints, even as the model adapts to them. When the blueprints are given up, the twin replaces
// the model.
//
// All its outstanding steps are made together, before a comparison. A twin is never modified in
// place; see growthState.
type twin struct {
	branch
	trial  []state.Address
	loader data.LoaderState // position of the twin's next batch
	rates  []float64        // learning rates of the twin's outstanding steps
	lost   bool             // the twin has diverged and makes no more steps
	sum    float64          // of the model's gradient norms over those steps

	// Mean gradient norms over the steps up to the last comparison, of the model and of the twin.
	norm, without float64
}

// owing returns the twin with one more outstanding step, which the model has just made.
func (w *twin) owing(rate, norm float64) *twin {
	if w == nil || w.lost {
		return w
	}
	next := *w
	next.rates, next.sum = append(w.rates, rate), w.sum+norm
	return &next
}

// tryOut starts, changes or ends a trial, according to the stages of the seeds. A blueprint is on
// trial from Grafting until it is fossilized or its life ends. tryOut is called between two steps,
// with the model locked. Seeds in depth are judged by the run's curve instead: see reshape.
func (g *growth) tryOut() error {
	if !g.triesOut() {
		return nil
	}

	grafted := g.grafted()
	if g.twin == nil {
		if len(grafted) == 0 {
			return nil
		}
		b, err := g.t.driver.branch()
		if err != nil {
			return err
		}
		g.twin = &twin{branch: b, trial: grafted, loader: g.t.Loader.State()}
		return nil
	}

	fossilized := func(at state.Address) bool {
		stage, err := g.t.Model.Kasmina.Lattice(at.Layer).Stage(at.Seed)
		return err == nil && stage == state.Fossilized
	}
	switch {
	case slices.ContainsFunc(g.twin.trial, fossilized):
		// The twin lacks a blueprint that has become part of the model.
		g.twin = nil
		return g.tryOut()
	case len(grafted) == 0:
		return g.adopt()
	}

	w := *g.twin
	w.trial = grafted
	g.twin = &w
	return nil
}

// triesOut reports whether blueprints at sites other than depth are compared with a twin.
func (g *growth) triesOut() bool { return g.options != nil && g.options.Validation != nil }

// grafted returns the seeds, at sites other than depth, with blueprints that are blended into the model
// but not fossilized. A blueprint that is still to be planted does not count.
func (g *growth) grafted() (all []state.Address) {
	for layer, l := range g.t.Model.Kasmina.Lattices() {
		site := l.Site()
		if site == blueprints.Depth {
			continue
		}
		for _, seed := range l.Grafted() {
			_, planted := g.t.Model.layout().PlantedAt(site, seed)
			if planted || site == blueprints.Chunk {
				all = append(all, state.Address{Layer: layer, Seed: seed})
			}
		}
	}

	return all
}

// catchUp makes the twin's outstanding steps, and returns its losses on the validation text, or a
// single infinite loss if it has diverged. Everything else is restored afterwards, even after an
// error.
func (g *growth) catchUp() (losses []float64, err error) {
	restore, err := g.t.driver.suspend()
	if err != nil {
		return nil, err
	}

	w, loader := *g.twin, g.t.Loader.State()

	losses, err = g.train(&w)
	spent := g.t.spent.FLOPs
	w.rates, w.sum, w.loader = nil, 0, loader
	if err = errors.Join(err, restore()); err != nil {
		return nil, err
	}

	g.t.spent.FLOPs = spent
	g.twin = &w
	return losses, nil
}

// load replaces the model with the twin, and mutes the blueprints on trial.
func (g *growth) load(w *twin) error {
	for _, s := range w.trial {
		if err := g.t.Model.Kasmina.Lattice(s.Layer).Mute(s.Seed, true); err != nil {
			return err
		}
	}

	if !w.lost {
		if err := g.t.driver.enter(w.branch); err != nil {
			return err
		}
	}

	return g.t.Loader.SetState(w.loader)
}

// train makes the twin's outstanding steps, with the twin loaded in place of the model.
func (g *growth) train(w *twin) (losses []float64, err error) {
	if err := g.t.team.agree(g.load(w)); err != nil {
		return nil, err
	}

	sum, err := g.t.driver.repeat(w.rates)
	if err != nil && !errors.Is(err, ErrDiverged) {
		return nil, err
	}

	steps := float64(max(1, len(w.rates)))
	w.norm, w.without = w.sum/steps, sum/steps

	if w.lost = w.lost || err != nil; w.lost {
		w.branch = branch{}
		return []float64{math.Inf(1)}, nil
	}

	losses, err = g.judge().Losses()
	if err = g.t.team.agree(err); err != nil {
		return nil, err
	}

	w.branch, err = g.t.driver.branch()
	return losses, err
}

// adopt ends a trial without remaining blueprints by replacing the model with the twin. A twin that
// has diverged is dropped, and the model continues without the blueprints.
func (g *growth) adopt() error {
	began := time.Now()
	if len(g.twin.rates) > 0 {
		_, err := g.catchUp()
		if err = g.t.team.agree(err); err != nil {
			return err
		}
	}

	if g.twin.lost {
		g.twin = nil
		return nil
	}

	err := g.t.driver.enter(g.twin.branch)
	switch {
	case errors.Is(err, errNotTaken):
		g.t.on(pushFailed, err)
	case errors.Is(err, errNotUndone):
		g.t.on(restoreFailed, err)
	}
	if err = g.t.team.agree(err); err != nil {
		return err
	}

	g.twin = nil
	g.reshaped = append(g.reshaped, Event{Text: fmt.Sprintf("the twin replaced the model, as if the "+
		"blueprints on trial had never been grafted, in %.2f s", time.Since(began).Seconds())})
	return nil
}

// giveUp rolls back all blueprints on trial, because a step of the model has diverged.
func (g *growth) giveUp(cause error) error {
	if err := g.rollBack(g.twin.trial); err != nil {
		return errors.Join(cause, err)
	}
	if err := g.tryOut(); err != nil {
		return errors.Join(cause, err)
	}
	if n := len(g.reshaped); n > 0 {
		g.reshaped[n-1].Err = cause
	}
	return nil
}
