package llm

import (
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/parallel"
	"github.com/kasmina-go/kasmina/llm/internal/directions"
	"github.com/kasmina-go/kasmina/state"
)

// listenBatches is the number of batches over which gradients are summed, and listenRank the number
// of directions extracted for each weight.
const listenBatches, listenRank = 8, 32

// heardModel holds the gradients of weights with seeds, by name.
type heardModel struct {
	config Config
	by     map[string]directions.Gradient
}

// listenedWeights returns the names of the weights with seeds, without duplicates.
func listenedWeights(c Config) (names []string) {
	seen := map[string]bool{}
	for _, s := range c.Weights {
		if name := c.WeightName(s); !seen[name] {
			seen[name] = true
			names = append(names, name)
		}
	}
	return names
}

// listenTo measures the gradients of a model over the next batches of a loader. The engine must compute the
// gradients of the Weights; listenTo closes it.
func listenTo(c Config, e Engine, loader Loader) (m heardModel, err error) {
	defer func() { err = errors.Join(err, e.Close()) }()
	l, ok := e.(Listener)
	if !ok {
		return m, fmt.Errorf("the engine %s does not report gradients", e.Name())
	}

	names := listenedWeights(c)
	sums, err := sumGradients(l, loader, names)
	if err != nil {
		return m, err
	}

	shapes := map[string][]int{}
	for name, shape := range c.Parameters() {
		shapes[name] = shape
	}

	found := make([]directions.Gradient, len(names))
	parallel.Each(len(names), func(i int) {
		shape := shapes[names[i]]
		found[i] = directions.Of(sums[i], shape[0], shape[1], listenRank)
	})
	m = heardModel{c, map[string]directions.Gradient{}}
	for i, name := range names {
		m.by[name] = found[i]
	}

	return m, nil
}

// sumGradients sums the gradients of some parameters over the next batches.
func sumGradients(l Listener, loader Loader, names []string) ([][]float32, error) {
	sums := make([][]float32, len(names))
	for range listenBatches {
		b, err := loader.Next()
		if err != nil {
			return nil, err
		}
		if _, err := l.Gradients(b); err != nil {
			return nil, err
		}
		for i, name := range names {
			g, err := l.Gradient(name)
			if err != nil {
				return nil, err
			}
			switch g := g.(type) {
			case []float32:
				sums[i] = addTo(sums[i], g)
			case []float64:
				sums[i] = addTo(sums[i], g)
			}
		}
		if err := l.Drop(); err != nil {
			return nil, err
		}
	}

	return sums, nil
}

func addTo[T float32 | float64](sum []float32, x []T) []float32 {
	if sum == nil {
		sum = make([]float32, len(x))
	}
	for i, v := range x {
		sum[i] += float32(v)
	}
	return sum
}

// gradientOf returns the gradient of a seed's weight.
func (m heardModel) gradientOf(seed int) directions.Gradient {
	return m.by[m.config.WeightName(m.config.Weights[seed])]
}

// Norms returns the gradient norms of the seeds' weights.
func (m heardModel) Norms() []float64 {
	norms := make([]float64, len(m.config.Weights))
	for seed := range norms {
		norms[seed] = m.gradientOf(seed).Norm
	}
	return norms
}

// Sigma returns a function for the singular values, in decreasing order, of the gradient of a seed's
// weight. The argument weights is the layer of the seeds at weights; seeds in other layers have no
// singular values.
func (m heardModel) Sigma(weights int) func(layer, seed int) []float64 {
	return func(layer, seed int) []float64 {
		if layer != weights || seed < 0 || seed >= len(m.config.Weights) {
			return nil
		}
		return m.gradientOf(seed).Sigma
	}
}

// Rows returns the initial values of the first rows of a blueprint: the directions of the gradient, for a
// LoRA.
func (m heardModel) Rows(p Planted) [][]float32 {
	if p.Site != blueprints.Weight || p.Kind != blueprints.LoRA.String() || m.by == nil {
		return nil
	}
	d := m.gradientOf(p.Seed).Directions
	return d[:min(len(d), p.Size)]
}

// The weights of a frozen model have no gradients during training to show where seeds are needed. The
// trainer therefore listens before anything is planted: it computes the gradients of weights with
// seeds once, over the next batches, then discards them and restores the loader's position.

// errUnplanted is the error for a step of a frozen model without anything to train.
var errUnplanted = errors.New("the model is frozen (TrainConfig.Frozen), and nothing is planted that " +
	"could learn: plant with Trainer.Grow and a controller such as control.NewAdapters, or with " +
	"Model.Kasmina.Do")

// plantFirst lets the controller of a frozen model decide before the first step that could train a
// blueprint. If a decision cannot be carried out or recorded, all of them are undone.
func (g *growth) plantFirst() error {
	seeds := g.t.Model.Kasmina
	if !g.t.Config.Frozen || len(g.t.Model.Planted) > 0 || g.options == nil || anyAwake(seeds) {
		return nil
	}

	before := seeds.Arrays()
	err := g.decideFirst()
	if err == nil {
		return nil
	}

	return g.t.undo(err, func() error {
		install, err := seeds.Load(before)
		if err == nil {
			install()
		}
		return err
	})
}

// decideFirst asks the controller for its first commands, and carries them out.
func (g *growth) decideFirst() error {
	// Listen also when following a record, so that the seeds' figures are the recorded run's.
	if err := g.listen(); err != nil {
		return err
	}

	commands, err := g.decide(nil)
	if err != nil {
		return err
	}

	return g.carryOut(commands, nil)
}

// listen records the gradient norms of the seeds at weights, and passes their singular values to the
// controller if it is a GradientListener.
func (g *growth) listen() error {
	layer := g.t.Model.LayerAt(blueprints.Weight)
	if layer < 0 {
		return nil
	}

	heard, err := g.t.driver.hear()
	if err != nil {
		return err
	}

	if by, ok := g.options.Controller.(state.GradientListener); ok {
		by.Heard(heard.Sigma(layer))
	}

	return measureNeeds(g.t.Model.Kasmina.Lattice(layer), heard.Norms())
}

// directions returns the gradients that directed blueprints are initialized from.
func (g *growth) directions(plant []Planted) (m heardModel, err error) {
	if g.t.Config.Directed && len(plant) > 0 {
		return g.t.driver.hear()
	}
	return m, nil
}

// hear returns the current gradients of the weights with seeds.
func (d *driver) hear() (m heardModel, err error) {
	if d.t.team.ranks() != nil {
		return m, errors.New("several ranks cannot listen to a frozen model: train it with one, or " +
			"plant with Model.Kasmina.Do, without TrainConfig.Directed")
	}

	c, build := d.t.Config, d.t.Config.Engine
	if build == nil {
		build = CPUEngine()
	}

	c.Accumulate, c.listen = 1, listenedWeights(d.t.Model.Config)
	e, err := build(d.t.Model, d.t.Optimizer, c)
	if err == nil {
		from := d.t.Loader.State()
		m, err = listenTo(d.t.Model.Config, e, d.t.Loader)
		err = d.t.undo(err, func() error { return d.t.Loader.SetState(from) })
	}
	if err != nil {
		err = fmt.Errorf("listening to the frozen model: %w", err)
	}

	return m, err
}
