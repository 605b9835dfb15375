package llm

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// TestBoundaries checks where the operator of Config.Boundary applies after growths.
func TestBoundaries(t *testing.T) {
	order := func(k blueprints.Kind, blocks, size int) []int {
		return must(blueprints.Order(k, blocks, size))
	}
	c := Config{Vocab: 8, Dim: 4, Layers: 2, Heads: 1, Seq: 4, Depth: 2, Boundary: 0.5}.Default()
	require.Equal(t, []bool{false, false}, c.boundaries())
	c = c.Grow(Grown{Order: order(blueprints.Stack, 2, 2)})
	require.Equal(t, []bool{false, false, true, false}, c.boundaries())
	twice := c.Grow(Grown{Seed: 1, Order: order(blueprints.Stack, 4, 2)})
	require.Equal(t, []bool{false, false, true, false, true, false, true, false}, twice.boundaries())
	more := c.Grow(Grown{Seed: 1, Order: order(blueprints.NewBlocks, 4, 2)})
	require.Equal(t, 1, len(slices.DeleteFunc(more.boundaries(), func(at bool) bool { return !at })))
	c.Boundary = 0
	require.Equal(t, make([]bool, 4), c.boundaries())
}

// TestBoundary checks the gradients of a model with the operator, that the operator changes what the model
// computes, that cached decoding agrees with whole passes, and that the model is not exported.
func TestBoundary(t *testing.T) {
	r := rand.New(rand.NewPCG(randtest.Seed(t), 0))
	c := Config{Vocab: 7, Dim: 6, Layers: 2, Heads: 3, HeadDim: 2, FF: 5, Seq: 5, Depth: 1, Boundary: 0.3}.Default()
	c = c.Grow(Grown{Size: 2, Kind: "Stack", Order: []int{0, 1, 0, 1}})
	m := must(NewModel(c, tensor.Float64, 1))
	for _, p := range m.Params {
		x := p.Value.Float64s()
		for k := range x {
			x[k] += 0.3 * r.NormFloat64()
		}
	}
	checkModel(t, r, m)

	tokens := []int{1, 2, 3, 4}
	logits := func(m *Model) []float64 {
		d := must(NewDecoding(m.Parts(), nil))
		defer d.Close()
		must(d.Next(t.Context(), tokens[:3])) // fills the cache
		return slices.Clone(must(d.Next(t.Context(), tokens)).([]float64))
	}
	cached := logits(m)
	whole := must(NewDecoding(m.Parts(), nil))
	defer whole.Close()
	for i, want := range must(whole.Next(t.Context(), tokens)).([]float64) {
		require.InDelta(t, want, cached[i], 1e-12)
	}

	_, err := m.Plain()
	require.ErrorContains(t, err, "it is not a Llama")
	m.Config.Boundary = 0
	require.NotEqual(t, cached, logits(m))
	_, err = m.Plain()
	require.NoError(t, err)
}
