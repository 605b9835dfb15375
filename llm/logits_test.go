package llm

import (
	"context"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm/data"
)

// TestAllLogits compares each row with the decoder's logits for the tokens up to that position, and the
// loss computed from all rows with the model's loss.
func TestAllLogits(t *testing.T) {
	c := Config{Vocab: 19, Dim: 8, Layers: 2, Heads: 2, Seq: 12, Kasmina: []int{0}, Seeds: 2}.Default()
	m, err := NewModel(c, tensor.Float64, 1)
	require.NoError(t, err)
	require.Equal(t, 0, m.LayerAt(blueprints.Chunk))
	tokens := []int{3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8}

	all, err := AllLogits(t.Context(), m, tokens)
	require.NoError(t, err)
	require.Equal(t, tensor.Shape{len(tokens), c.Vocab}, all.Shape())
	logits := all.Data().([]float64)
	i := &Inference{Model: m}
	next, err := i.Decoder()
	require.NoError(t, err)
	for n := range tokens {
		want, err := next(t.Context(), tokens[:n+1])
		require.NoError(t, err)
		require.InDeltaSlice(t, want, logits[n*c.Vocab:][:c.Vocab], 1e-12, "position %d", n)
	}

	targets, mean := append(tokens[1:], 7), 0.0
	for n, target := range targets {
		row, sum := logits[n*c.Vocab:][:c.Vocab], 0.0
		for _, x := range row {
			sum += math.Exp(x)
		}
		mean += (math.Log(sum) - row[target]) / float64(len(targets))
	}

	loss, err := i.Loss(data.Batch{Inputs: tokens, Targets: targets, Count: len(tokens)})
	require.NoError(t, err)
	require.InDelta(t, loss, mean, 1e-12)
	require.NoError(t, i.Close())

	short, err := AllLogits(t.Context(), m, tokens[:5])
	require.NoError(t, err)
	require.InDeltaSlice(t, logits[:5*c.Vocab], short.Data(), 1e-12)
	for want, bad := range map[string][]int{"no tokens": {}, "at most Config.Seq, 12": make([]int, 13),
		"token 19 is outside": {19}} {
		_, err := AllLogits(t.Context(), m, bad)
		require.ErrorContains(t, err, want)
	}

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = AllLogits(ended, m, tokens)
	require.ErrorIs(t, err, context.Canceled)
	_, err = AllLogits(t.Context(), nil, tokens)
	require.Error(t, err)
	plain, err := NewModel(Config{Vocab: 19, Dim: 8, Layers: 1, Heads: 2, Seq: 12}.Default(), tensor.Float32, 1)
	require.NoError(t, err)
	require.Equal(t, -1, plain.LayerAt(blueprints.Chunk))
}
