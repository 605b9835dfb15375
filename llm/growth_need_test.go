package llm

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/optim"
)

// TestNeedsAreReproducible checks that repeated sums over the parameters of a block are bit-identical. Their squares span
// twelve orders of magnitude, so that adding them in any other order would change the last bits.
func TestNeedsAreReproducible(t *testing.T) {
	adamw, err := optim.NewAdamW()
	require.NoError(t, err)
	c := Config{Streams: []int{0, 1, 1}}
	moments := []optim.Tensor{{Name: "tok.exp_avg_sq", Data: []float64{1e9}}}
	squares := []float64{1e6, 3e-6, 0.7, 2e-3, 5e4, 1.0 / 3, 9e-5, 7e2, 1.1e-6}
	for block := range 2 {
		for i, v := range squares {
			param := fmt.Sprintf("%sp%d", blockPrefix(block), i)
			v *= math.Pow(1.37, float64(block))
			moments = append(moments,
				optim.Tensor{Name: param + ".exp_avg", Data: []float64{5}},
				optim.Tensor{Name: param + ".exp_avg_sq", Data: []float64{v, v / 3}},
				optim.Tensor{Name: param + ".step", Data: []int64{4}})
		}
	}

	want := needsOf(c, blueprints.Stream, moments, adamw)
	require.Len(t, want, 3)
	require.Equal(t, want[1], want[2], "two seeds after the same block")
	for range 200 {
		require.Equal(t, want, needsOf(c, blueprints.Stream, moments, adamw))
	}

	// In the order of the moments, and using only the squares of the block.
	sum := 0.0
	for _, v := range squares {
		sum += v + v/3
	}

	require.Equal(t, math.Sqrt(sum/float64(2*len(squares))), want[0])
}

// TestNeeds compares the needs of weights with the formula, for a mean of squares and a mean of
// gradients, and for both types.
func TestNeeds(t *testing.T) {
	c := Config{Weights: []WeightSite{{Block: 0, Layer: "q"}, {Block: 1, Layer: "up"},
		{Block: 1, Layer: "down"}}}
	muon, err := optim.NewMuon(optim.WithAdamWFor(optim.NameContains(c.WeightName(c.Weights[0]))))
	require.NoError(t, err)
	moments := []optim.Tensor{
		{Name: c.WeightName(c.Weights[0]) + ".exp_avg_sq", Shape: []int{2, 2}, Data: []float32{1, 4, 9, 2}},
		{Name: c.WeightName(c.Weights[0]) + "x.exp_avg_sq", Shape: []int{1, 1}, Data: []float32{100}},
		{Name: c.WeightName(c.Weights[1]) + ".momentum_buffer", Shape: []int{1, 2}, Data: []float64{3, -4}},
		{Name: c.WeightName(c.Weights[2]) + ".step", Shape: []int{1}, Data: []int64{7}},
	}

	require.Equal(t, []float64{2, math.Sqrt(12.5), 0}, needsOf(c, blueprints.Weight, moments,
		muon))
	require.Equal(t, []float64{0}, needsOf(Config{Depth: 1}, blueprints.Depth, moments,
		muon))

	unknown := struct{ optim.Optimizer }{muon} // declares no rules
	require.Equal(t, []float64{0, 0, 0}, needsOf(c, blueprints.Weight, moments, unknown))
}
