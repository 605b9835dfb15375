package llm

import (
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm/internal/judge"
	"github.com/kasmina-go/kasmina/llm/internal/listen"
)

// A frozen model has no gradients of its own weights, by which seeds could tell where they are
// needed. So before anything is planted it is listened to. The gradients of the weights that seeds
// sit on, over the next batches, are formed once, and forgotten. The loader stands where it stood.

// errUnplanted is the error of a step of a frozen model in which nothing could learn.
var errUnplanted = errors.New("the model is frozen (Config.Frozen), and nothing is planted that " +
	"could learn: Trainer.Grow with a controller such as control.NewAdapters plants, and so does " +
	"Model.Kasmina.Do")

// plantFirst has the controller of a frozen model decide before the first step in which something
// is to learn.
func (t *Trainer) plantFirst() error {
	c := t.Model.Config
	if !c.Frozen || len(c.Planted) > 0 || t.growth == nil || judge.Awake(t.Model.Kasmina) {
		return nil
	}
	if t.replay() == nil {
		if err := t.listen(); err != nil {
			return err
		}
	}
	commands, err := t.decide(nil)
	if err != nil {
		return err
	}
	return t.carryOut(commands, nil)
}

// listen tells the seeds at weights how large the gradients of these are, and the controller what
// else they ask for, if it wants to know.
func (t *Trainer) listen() error {
	layer := t.Model.LayerAt(blueprints.Weight)
	if layer < 0 {
		return nil
	}
	heard, err := t.hear()
	if err != nil {
		return err
	}
	if by, ok := t.growth.Controller.(interface {
		Heard(func(layer, seed int) []float64)
	}); ok {
		by.Heard(heard.Sigma(layer))
	}
	return judge.Measure(t.Model.Kasmina.Lattice(layer), heard.Norms())
}

// hear returns what the gradients of the weights that seeds sit on ask for now.
func (t *Trainer) hear() (m listen.Model, err error) {
	if t.ranks() != nil {
		return m, errors.New("several ranks cannot listen to a frozen model: train it with one, or " +
			"plant by Model.Kasmina.Do, without Config.Directed")
	}
	c, build := t.Config, t.Config.Engine
	if build == nil {
		build = CPUEngine()
	}
	c.Accumulate, c.listen = 1, listen.Weights(t.Model.Config)
	e, err := build(t.Model, t.Optimizer, c)
	if err == nil {
		m, err = listen.To(t.Model.Config, e, t.Loader)
	}
	if err != nil {
		err = fmt.Errorf("listening to the frozen model: %w", err)
	}
	return m, err
}

// directions are what blueprints begin along.
func (t *Trainer) directions(plant []Planted) (m listen.Model, err error) {
	if t.Model.Config.Directed && len(plant) > 0 {
		return t.hear()
	}
	return m, nil
}
