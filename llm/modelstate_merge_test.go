package llm

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
)

// TestMerge checks that merging blueprints together, two on the same weight, is bit-identical to
// merging them one after the other, in the model and in its earlier state.
func TestMerge(t *testing.T) {
	c := Config{Vocab: 32, Dim: 16, Layers: 2, Heads: 2, Seq: 8}.Default()
	c.Weights = append(c.WeightSites("q", "down"), c.WeightSites("q")[0])
	c.Streams = []int{0, 1}
	m, err := NewModel(c, tensor.Float32, 3)
	require.NoError(t, err)
	now := modelState{layout: m.layout(), Params: m.Params}
	for i := range c.Weights {
		now = now.Plant(Planted{Site: blueprints.Weight, Seed: i, Kind: "LoRA", Size: 2}, 5)
	}

	for i := range c.Streams {
		now = now.Plant(Planted{Site: blueprints.Stream, Seed: i, Kind: "Perceptron",
			Size: 4}, 5)
	}

	r := rand.New(rand.NewPCG(1, 2))
	for _, p := range now.Params { // otherwise a LoRA adds nothing
		for i, x := 0, p.Value.Data().([]float32); i < len(x); i++ {
			x[i] += float32(0.1 * r.NormFloat64())
		}
	}

	before := now.Clone()
	for _, p := range before.Params {
		p.Value.Data().([]float32)[0]++
	}

	for site, seeds := range map[blueprints.Site]int{blueprints.Weight: len(c.Weights),
		blueprints.Stream: len(c.Streams)} {
		var all []int
		oneByOne := []modelState{now, before}
		for seed := range seeds {
			all = append(all, seed)
			oneByOne, err = mergeSeeds(site, []int{seed}, 7, oneByOne[0], oneByOne[1:]...)
			require.NoError(t, err)
		}
		together, err := mergeSeeds(site, all, 7, now, before)
		require.NoError(t, err)
		for i := range together {
			require.Equal(t, oneByOne[i].Config, together[i].Config)
			require.Len(t, together[i].Params, len(oneByOne[i].Params))
			for j, p := range together[i].Params {
				require.Equal(t, oneByOne[i].Params[j].Name, p.Name)
				require.Equal(t, oneByOne[i].Params[j].Value.Data(), p.Value.Data(), p.Name)
			}
		}
		_, err = mergeSeeds(site, []int{seeds}, 7, now)
		require.Error(t, err, "there is no such seed")
	}
}
