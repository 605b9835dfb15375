package llm

import (
	"context"
	"errors"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"
)

// TestScore compares the scores of many continuations of different lengths, some of which share all tokens
// but the last, with the logits of AllLogits, on machines that are made for each shape.
func TestScore(t *testing.T) {
	c := Config{Vocab: 19, Dim: 8, Layers: 2, Heads: 2, Seq: 160, Kasmina: []int{0}, Seeds: 2}.Default()
	m, err := NewModel(c, tensor.Float64, 1)
	require.NoError(t, err)

	var texts []Continuation
	for n := range 120 {
		tokens := make([]int, 2+n*n%160)
		for i := range tokens {
			tokens[i] = (i*i + n/3) % c.Vocab
		}
		text := Continuation{tokens, 1 + n%(len(tokens)-1)}
		texts = append(texts, text)
		if n%4 == 0 {
			other := slices.Clone(tokens)
			other[len(other)-1] = (other[len(other)-1] + 1) % c.Vocab
			texts = append(texts, Continuation{other, 1}, text)
		}
	}
	greedy := []int{1, 2, 3}
	for range 3 {
		logits, err := AllLogits(t.Context(), m, greedy)
		require.NoError(t, err)
		rows := logits.Data().([]float64)
		_, best := logNorm(rows[len(rows)-c.Vocab:])
		greedy = append(greedy, best)
	}
	texts = append(texts, Continuation{greedy, 3})

	var open, made int
	i := &Inference{Model: m, Make: func(g *Graph) (Machine, error) {
		r, err := runnerOnCPU(g, g.Outputs()...)
		open, made = open+1, made+1
		return counted{r.Machine, &open}, err
	}}
	var scores []ContinuationScore
	for part := range slices.Chunk(texts, 23) {
		some, err := i.Score(t.Context(), part)
		require.NoError(t, err)
		scores = append(scores, some...)
	}
	require.Greater(t, made, scoreGraphs)
	require.LessOrEqual(t, open, scoreGraphs)

	for n, text := range texts {
		last := len(text.Tokens) - 1
		logits, err := AllLogits(t.Context(), m, text.Tokens[:last])
		require.NoError(t, err)
		rows, want, best := logits.Data().([]float64), 0.0, true
		for at := last - text.Scored; at < last; at++ {
			row := rows[at*c.Vocab:][:c.Vocab]
			sum := 0.0
			for _, x := range row {
				sum += math.Exp(x)
			}
			want += row[text.Tokens[at+1]] - math.Log(sum)
			best = best && slices.Max(row) == row[text.Tokens[at+1]]
		}
		require.InDelta(t, want, scores[n].LogProb, 1e-9, "text %d", n)
		require.Equal(t, best, scores[n].Greedy, "text %d", n)
	}
	require.True(t, scores[len(scores)-1].Greedy)
	require.NoError(t, i.Close())
	require.Zero(t, open)
}

// TestScoreRefuses checks the errors for continuations that cannot be scored.
func TestScoreRefuses(t *testing.T) {
	m, err := NewModel(Config{Vocab: 19, Dim: 8, Layers: 1, Heads: 2, Seq: 12}.Default(), tensor.Float32, 1)
	require.NoError(t, err)
	i := &Inference{Model: m}
	for want, text := range map[string]Continuation{
		"continuation 1 has 2 tokens and scores 2": {[]int{1, 2}, 2},
		"continuation 1 has 2 tokens and scores 0": {[]int{1, 2}, 0},
		"want at most 13":                          {make([]int, 14), 1},
		"token 19 is outside":                      {[]int{1, 19}, 1},
	} {
		_, err := i.Score(t.Context(), []Continuation{{[]int{1, 2}, 1}, text})
		require.ErrorContains(t, err, want)
	}
	scores, err := i.Score(t.Context(), []Continuation{{make([]int, 13), 12}})
	require.NoError(t, err)
	require.Len(t, scores, 1)

	ended, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("enough")
	cancel(cause)
	_, err = i.Score(ended, []Continuation{{[]int{1, 2}, 1}})
	require.ErrorIs(t, err, cause)
	_, err = BuildGraph(m.Parts(), ForLogits, 1, WithRows(-1))
	require.ErrorContains(t, err, "WithRows(-1): want a number of rows, or 0 for one row per sequence")
	require.NoError(t, i.Close())
}
