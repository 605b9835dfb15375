package become

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm/arch"
	"github.com/kasmina-go/kasmina/llm/graph"
	"github.com/kasmina-go/kasmina/llm/site"
	"github.com/kasmina-go/kasmina/op/graft"
)

// Merge returns the models in which what the blueprint of a seed of now has become is a part of the
// model, and the blueprint gone: of now itself first, and of what it was at some times before.
// At a weight that is the sum of both, with the bits that the CPU computes with. In the stream it is
// a block of the configuration, which is the identity but for what the blueprint does.
func Merge(at blueprints.Site, seed, step int, now Model, before ...Model) ([]Model, error) {
	o, err := now.planted(at, seed)
	if err != nil {
		return nil, err
	}
	merged := append([]Model{now}, before...)
	for i, m := range merged {
		if at == blueprints.Weight {
			merged[i], err = m.addTo(o)
		} else {
			merged[i], err = m.block(o, step)
		}
		if err != nil {
			return nil, fmt.Errorf("merging the %v of seed %d of site %v: %w", o.kind, seed, at, err)
		}
	}
	return merged, nil
}

// addTo adds what a blueprint adds to its weight.
func (m Model) addTo(o own) (Model, error) {
	name := m.Config.WeightName(m.Config.Weights[o.Seed])
	w := m.param(name)
	sum, err := m.sum(o, w)
	if err != nil {
		return m, err
	}
	return m.replace(name, sum).Uproot(o.Site, o.Seed), nil
}

// sum computes the graph of a weight with its blueprint at full strength.
func (m Model) sum(o own, w *tensor.Dense) (*tensor.Dense, error) {
	g := gorgonia.NewGraph()
	c := gorgonia.NodeFromAny(g, fullStrength(m.dtype()), gorgonia.WithName("controls"))
	weight := gorgonia.NodeFromAny(g, w, gorgonia.WithName("weight"))
	specs, err := m.seedParams(o)
	if err != nil {
		return nil, err
	}
	var params gorgonia.Nodes
	for _, s := range specs {
		params = append(params, gorgonia.NodeFromAny(g, o.values[s], gorgonia.WithName(s)))
	}
	y, err := site.Weight(o.kind, weight, params, o.Size, m.Config.LoRAScale(o.Size),
		graft.Row{Of: c})
	if err != nil {
		return nil, err
	}
	machine := gorgonia.NewTapeMachine(g)
	defer machine.Close()
	if err := machine.RunAll(); err != nil {
		return nil, err
	}
	sum, ok := y.Value().(*tensor.Dense)
	if !ok {
		return nil, fmt.Errorf("the sum is a %T", y.Value())
	}
	return sum, nil // in memory of its own, which the machine has taken for it
}

// seedParams is the names of a blueprint's parameters in order, without their prefix.
func (m Model) seedParams(o own) (names []string, err error) {
	c := m.Config
	specs, err := c.SeedParams(o.Planted)
	for _, s := range specs {
		names = append(names, s.Name[len(o.Prefix()):])
	}
	return names, err
}

// fullStrength is the controls of one seed that is blended in with α = 1.
func fullStrength(dt tensor.Dtype) *tensor.Dense {
	one := func() float64 { return 1 }
	return graph.NewParam(dt, []int{1, graft.Controls}, one)
}

// block makes a blueprint of the stream a block. Its parameters are the first rows of the block's,
// and the first columns of those that write to the stream. Other rows start as those of a new block,
// and other columns at 0, so that the block may go on to learn with all it has.
func (m Model) block(o own, step int) (Model, error) {
	if !blueprints.Mergeable(o.kind) {
		return m, fmt.Errorf("no block of the model computes it")
	}
	shape, attention, err := m.Config.StreamShape(o.kind, o.Size)
	if err != nil {
		return m, err
	}
	g := arch.Grown{Stream: true, Seed: o.Seed, Kind: o.Planted.Kind, Size: o.Size, Step: step,
		Order: m.Config.StreamOrder(o.Seed)}
	next := m.Config.GrowStream(g)
	if err := next.Check(); err != nil {
		return m, err
	}
	grown := m.become(next, g.Source, func(i int, p arch.Spec) func() float64 {
		return p.Fresh(uint64(step), i)
	})
	prefix := arch.BlockPrefix(m.Config.Streams[o.Seed] + 1)
	for _, p := range shape.Half(attention) {
		if err := pad(grown.param(prefix+p.Name), o.values[p.Name]); err != nil {
			return m, fmt.Errorf("%s: %w", p.Name, err)
		}
	}
	return grown, nil
}

// pad writes a smaller tensor over the first rows of a larger one, or over its first columns: then
// the others become 0.
func pad(to, from *tensor.Dense) error {
	if from == nil || to == nil || len(from.Shape()) != len(to.Shape()) {
		return fmt.Errorf("there is no such parameter")
	}
	switch x := to.Data().(type) {
	case []float32:
		padNumbers(x, from.Data().([]float32), to.Shape(), from.Shape())
	case []float64:
		padNumbers(x, from.Data().([]float64), to.Shape(), from.Shape())
	}
	return nil
}

func padNumbers[T float32 | float64](to, from []T, shape, small tensor.Shape) {
	columns, own := shape[len(shape)-1], small[len(small)-1]
	if columns == own || len(shape) == 1 {
		copy(to, from)
		return
	}
	clear(to)
	for r := range small[0] {
		copy(to[r*columns:][:own], from[r*own:])
	}
}
