package chatdata

import (
	"errors"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm/data"
)

// answer returns a sequence of prompt tokens followed by learned ones.
func answer(line, first, prompt, learned int) Sequence {
	s := Sequence{File: "pairs.jsonl", Line: line}
	for i := range prompt + learned {
		s.IDs, s.Learn = append(s.IDs, first+i), append(s.Learn, i >= prompt)
	}
	return s
}

// fewPairs returns three pairs with different numbers of prompt and answer tokens.
func fewPairs() []Sequence {
	return []Sequence{answer(1, 10, 2, 2), answer(1, 20, 2, 4), answer(2, 30, 2, 1), answer(2, 40, 2, 5),
		answer(3, 50, 3, 6), answer(3, 60, 3, 4)}
}

// sumOfAnswer returns, for the number of each answer in b, the sum of values over the answer's tokens.
func sumOfAnswer(b data.Batch, values func(i int) float64) map[int]float64 {
	sums := map[int]float64{}
	for i, a := range b.Answers {
		if a >= 0 {
			sums[a] += values(i)
		}
	}
	return sums
}

// TestPairs checks that batches assign each token to the right answer of the right pair and contain the exact references,
// both in training and in evaluations. An evaluation may be created before or after the references are set.
func TestPairs(t *testing.T) {
	p, err := NewPairs(fewPairs(), 2, 16)
	require.NoError(t, err)
	require.Equal(t, 3, p.Count())
	l := p.Loader(1)
	require.Equal(t, 2, l.Rows())
	_, err = l.Next()
	require.ErrorContains(t, err, "add llm.NewReferences to the trainer")

	// The log-probability of a token is its id divided by 7.
	early, err := p.Evaluation()
	require.NoError(t, err)
	all, err := p.ComputeReferences(func(b data.Batch) ([]float64, error) {
		values := make([]float64, len(b.Targets))
		for i, target := range b.Targets {
			values[i] = float64(target) / 7
		}
		return values, nil
	})
	require.NoError(t, err)
	want := []float64{(12 + 13) / 7., (22 + 23 + 24 + 25) / 7., 32 / 7., (42 + 43 + 44 + 45 + 46) / 7.,
		(53 + 54 + 55 + 56 + 57 + 58) / 7., (63 + 64 + 65 + 66) / 7.}
	require.InDeltaSlice(t, want, all, 1e-12)
	require.NoError(t, p.SetReferences(all))

	late, err := p.Evaluation()
	require.NoError(t, err)
	require.Equal(t, 3, late.Tokens())
	batches := map[string]data.Batch{}
	batches["loader"], err = l.Next()
	require.NoError(t, err)
	for b := range early.Batches() {
		batches["early evaluation"] = b
	}
	for b := range late.Batches() {
		batches["late evaluation"] = b
	}

	for name, b := range batches {
		require.Equal(t, 3, b.Count, name)
		sums := sumOfAnswer(b, func(i int) float64 { return b.Reference[i] })
		targets := sumOfAnswer(b, func(i int) float64 { return float64(b.Targets[i]) / 7 })
		require.Len(t, sums, 6, name)
		for a, sum := range sums {
			require.Less(t, a/2, len(b.Inputs))
			require.Contains(t, sums, a^1, "an answer without its partner")
			require.InDelta(t, targets[a], sum, 1e-6, name)
		}
		for i, a := range b.Answers {
			require.Equal(t, a >= 0, b.Targets[i] >= 0, name)
			require.Equal(t, float64(float32(b.Reference[i])), b.Reference[i], name)
		}
	}

	// The sum is exact although each number is a float32.
	p, err = NewPairs(fewPairs()[:2], 1, 16)
	require.NoError(t, err)
	require.NoError(t, p.SetReferences([]float64{-1. / 3, -200. / 3}))
	b, err := p.Loader(1).Next()
	require.NoError(t, err)
	for a, sum := range sumOfAnswer(b, func(i int) float64 { return b.Reference[i] }) {
		require.InDelta(t, []float64{-1. / 3, -200. / 3}[a%2], sum, 1e-12)
	}

	require.Equal(t, 1, p.Loader(1).CountTargets(1))
	_, bitsPerByte := late.Score(1)
	require.True(t, bitsPerByte != bitsPerByte, "bits per byte of pairs mean nothing")
}

func TestPairsErrors(t *testing.T) {
	broken := fewPairs()
	broken[3].Learn = make([]bool, len(broken[3].IDs))
	for want, f := range map[string]func() (*Pairs, error){
		"at least 1 of each":      func() (*Pairs, error) { return NewPairs(fewPairs(), 0, 16) },
		"there are no pairs":      func() (*Pairs, error) { return NewPairs(nil, 1, 16) },
		"a pair has two":          func() (*Pairs, error) { return NewPairs(fewPairs()[:3], 1, 16) },
		"pairs.jsonl:2 has no":    func() (*Pairs, error) { return NewPairs(broken, 1, 16) },
		"have 14 tokens with the": func() (*Pairs, error) { return NewPairs(fewPairs(), 1, 13) },
	} {
		_, err := f()
		require.ErrorContains(t, err, want)
	}

	p, err := NewPairs(fewPairs(), 1, 14)
	require.NoError(t, err)
	require.ErrorContains(t, p.SetReferences([]float64{1}), "want one for each of 6 answers")
	failed := errors.New("failed")
	_, err = p.ComputeReferences(func(data.Batch) ([]float64, error) { return nil, failed })
	require.ErrorIs(t, err, failed)
	_, err = p.ComputeReferences(func(data.Batch) ([]float64, error) { return []float64{1}, nil })
	require.ErrorContains(t, err, "1 log-probabilities of 14 tokens")
}

// TestAlignAnswers checks that both answers of a text pair start at the same token.
func TestAlignAnswers(t *testing.T) {
	chosen, rejected := answer(1, 0, 3, 2), answer(1, 0, 2, 4)
	alignAnswers(chosen, rejected)
	require.Equal(t, []bool{false, false, true, true, true}, chosen.Learn)
	require.Equal(t, 2, slices.Index(rejected.Learn, true))
}
