package llm

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/parallel"
	"github.com/kasmina-go/kasmina/llm/site"
	"github.com/kasmina-go/kasmina/op/graft"
)

// mergeSeeds merges the blueprints of the given seeds into the model now and into its earlier states. It
// returns now, followed by the earlier states.
//
// A blueprint at a weight is added to the weight, bit-identical to what the CPU computes from the
// two. A blueprint in the stream becomes a block that computes the same function.
func mergeSeeds(at blueprints.Site, seeds []int, step int, now modelState, before ...modelState) ([]modelState, error) {
	merged := append([]modelState{now}, before...)
	if len(seeds) == 0 {
		return merged, nil
	}

	var err error
	if at == blueprints.Weight {
		var all []plantedSeed
		for _, seed := range seeds {
			o, err := now.planted(at, seed)
			if err != nil {
				return nil, err
			}
			all = append(all, o)
		}
		for i, m := range merged {
			if merged[i], err = m.add(all); err != nil {
				return nil, err
			}
		}
		return merged, nil
	}

	for _, seed := range seeds {
		o, err := merged[0].planted(at, seed)
		if err != nil {
			return nil, err
		}
		for i, m := range merged {
			if merged[i], err = m.block(o, step); err != nil {
				return nil, o.notMerged(err)
			}
		}
	}

	return merged, nil
}

func (o plantedSeed) notMerged(err error) error {
	return fmt.Errorf("merging the %v of seed %d of site %v: %w", o.kind, o.Seed, o.Site, err)
}

// add adds the blueprints to their weights and removes them from the model. It processes the weights in
// parallel, and the blueprints of one weight in order.
func (m modelState) add(all []plantedSeed) (modelState, error) {
	by, c := map[string][]plantedSeed{}, m.layout
	for _, o := range all {
		name := m.Config.WeightName(m.Config.Weights[o.Seed])
		by[name] = append(by[name], o)
		c = c.Uproot(o.Site, o.Seed)
	}

	names := slices.Sorted(maps.Keys(by))
	values, errs := m.values(), make([]error, len(names))
	sums := make([]*tensor.Dense, len(names))
	parallel.Each(len(names), func(i int) {
		sums[i] = values[names[i]]
		for _, o := range by[names[i]] {
			if sums[i], errs[i] = m.sum(o, sums[i]); errs[i] != nil {
				errs[i] = o.notMerged(errs[i])
				return
			}
		}
	})

	if err := errors.Join(errs...); err != nil {
		return m, err
	}

	for i, name := range names {
		values[name] = sums[i]
	}

	return m.replace(values, names).become(c, sameName, nil), nil
}

// sum computes the graph of a weight with its blueprint at full strength.
func (m modelState) sum(o plantedSeed, w *tensor.Dense) (*tensor.Dense, error) {
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

	return sum, nil // newly allocated by the machine
}

// seedParams returns the names of a blueprint's parameters in order, without their prefix.
func (m modelState) seedParams(o plantedSeed) (names []string, err error) {
	c := m.Config
	specs, err := c.SeedParams(o.Planted)
	for _, s := range specs {
		names = append(names, s.Name[len(o.Prefix()):])
	}
	return names, err
}

// fullStrength returns the controls of one seed with α = 1.
func fullStrength(dt tensor.Dtype) *tensor.Dense {
	one := func() float64 { return 1 }
	return newParamValue(dt, []int{1, graft.Controls}, one)
}

// block turns a blueprint in the stream into a block. The blueprint's parameters become the first
// rows of the block's parameters, or the first columns of the parameters that write to the stream.
// The remaining rows are initialized like a new block's, and the remaining columns to 0, so that the
// block can train at its full size.
func (m modelState) block(o plantedSeed, step int) (modelState, error) {
	if !blueprints.Mergeable(o.kind) {
		return m, fmt.Errorf("no block of the model computes it")
	}

	shape, attention, err := m.Config.StreamShape(o.kind, o.Size)
	if err != nil {
		return m, err
	}

	g := Grown{Stream: true, Seed: o.Seed, Kind: o.Planted.Kind, Size: o.Size, Step: step,
		Order: m.Config.StreamOrder(o.Seed)}
	next := m.layout.GrowStream(g)
	if err := next.Check(); err != nil {
		return m, err
	}

	grown := m.become(next, g.Source, func(i int, p ParamSpec) func() float64 {
		return p.Fresh(uint64(step), i)
	})
	prefix := blockPrefix(m.Config.Streams[o.Seed] + 1)
	for _, p := range shape.Half(attention) {
		if err := padTensor(grown.param(prefix+p.Name), o.values[p.Name]); err != nil {
			return m, fmt.Errorf("%s: %w", p.Name, err)
		}
	}

	return grown, nil
}

// padTensor copies a smaller tensor to the first rows of a larger one, or to its first columns. In the
// latter case the remaining columns become 0.
func padTensor(to, from *tensor.Dense) error {
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
