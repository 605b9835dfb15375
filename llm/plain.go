package llm

import (
	"fmt"
	"slices"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
)

// Plain returns the model in the form that other programs expect. Blueprints fossilized at weights
// and in the stream are merged into it, and its parameters are then copies. Plain returns an error
// that names the seed if any other seed affects the model's output. Matrices in Base become float32. The
// model must be locked.
func (m *Model) Plain() (*Model, error) {
	if slices.Contains(m.Config.boundaries(), true) {
		return nil, fmt.Errorf("the model has grown with Config.Boundary of %v, so it is not a Llama that "+
			"other programs could load: save the run with Trainer.Save, or train with a Boundary of 0",
			m.Config.Boundary)
	}

	chunks, now := len(m.Config.Kasmina), modelState{layout: m.layout(), Params: m.Params}
	for layer, r := range m.Kasmina.Report() {
		var ripe []int
		for _, seed := range r.Seeds {
			_, planted := m.layout().PlantedAt(r.Site, seed.Seed)
			switch {
			case layer < chunks && seed.Slot != 0 && seed.Alpha != 0:
				return nil, fmt.Errorf("seed %d of the Kasmina layer after block %d is %v with α "+
					"%.3g, and transformers has no such layer: cull the seed, or save the run "+
					"with Trainer.Save",
					seed.Seed, m.Config.Kasmina[layer], seed.Stage, seed.Alpha)
			case !planted || seed.Alpha == 0:
			case seed.Stage != state.Fossilized || !blueprints.Mergeable(seed.Kind):
				return nil, fmt.Errorf("seed %d of site %v is %v with α %.3g, and its %v is not "+
					"part of the model: fossilize it, if it can be merged, or roll it back",
					seed.Seed, r.Site, seed.Stage, seed.Alpha, seed.Kind)
			default:
				ripe = append(ripe, seed.Seed)
			}
		}
		merged, err := mergeSeeds(r.Site, ripe, 0, now)
		if err != nil {
			return nil, err
		}
		now = merged[0]
	}

	if !m.Config.Adapter.IsZero() { // which excludes seeds
		return m.merged()
	}

	if m.Base != nil { // without adapters, merging only widens the matrices
		return m.merged()
	}

	if len(m.Planted) == 0 {
		return m, nil
	}

	values := map[string]*tensor.Dense{}
	for _, p := range now.Params {
		values[p.Name] = p.Value
	}

	return NewModelFrom(now.Config.Plain(), m.Dtype(), func(p Param) error {
		return tensor.Copy(p.Value, values[p.Name])
	})
}

// Plain returns the configuration without settings unknown to transformers.
func (c Config) Plain() Config {
	c.Kasmina, c.Seeds, c.Slots, c.SlotWidth, c.Depth, c.Grown = nil, 0, 0, 0, 0, nil
	c.Weights, c.Streams, c.LoRAAlpha = nil, nil, 0
	c.ZeroOutputs, c.Boundary = false, 0
	c.Adapter = LoRA{}
	return c
}
