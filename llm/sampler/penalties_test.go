package sampler

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// greedyAfter draws the most probable token n times and returns the tokens.
func greedyAfter(t *testing.T, s *Sampler, logits []float64, n int) (ids []int) {
	for range n {
		ids = append(ids, mustDraw(t, s, logits))
	}
	return ids
}

// TestPenalties checks the tokens of greedy draws from constant logits.
func TestPenalties(t *testing.T) {
	inf := math.Inf(-1)
	for name, c := range map[string]struct {
		config   Config
		observed []int
		logits   []float64
		want     []int
	}{
		"none": {Config{Repetition: 1}, []int{1}, []float64{1, 3, 2}, []int{1, 1, 1}},
		"presence counts once": {Config{Presence: 1.5}, nil, []float64{1, 3, 2},
			[]int{1, 2, 1, 1}},
		"presence spares the prompt": {Config{Presence: 9}, []int{1}, []float64{1, 3, 2},
			[]int{1, 2, 0, 1}},
		"frequency counts each time": {Config{Frequency: 0.6}, nil, []float64{1, 3, 2},
			[]int{1, 1, 2, 1, 2, 1}},
		"negative penalties reward": {Config{Presence: -5}, nil, []float64{1, 3, 2},
			[]int{1, 1, 1}},
		"repetition of the prompt": {Config{Repetition: 2}, []int{1}, []float64{1, 3, 2},
			[]int{2, 1, 1}},
		"repetition of negative logits": {Config{Repetition: 2}, nil, []float64{-1, -1.5, -9},
			[]int{0, 1, 0, 0}},
		"bias":             {Config{Bias: map[int]float64{0: 2.5}}, nil, []float64{1, 3, 2}, []int{0, 0}},
		"bias rules out":   {Config{Bias: map[int]float64{1: inf}}, nil, []float64{1, 3, 2}, []int{2}},
		"bias outside":     {Config{Bias: map[int]float64{7: 100}}, nil, []float64{1, 3}, []int{1}},
		"bias of a banned": {Config{Bias: map[int]float64{1: 100}}, nil, []float64{1, inf}, []int{0}},
	} {
		s := mustSampler(t, c.config)
		s.Observe(c.observed...)
		require.Equal(t, c.want, greedyAfter(t, s, c.logits, len(c.want)), name)
	}
}

// TestMinP checks which tokens can be drawn.
func TestMinP(t *testing.T) {
	logits := []float64{0, math.Log(0.5), math.Log(0.3), math.Log(0.1)}
	for _, c := range []struct {
		config Config
		want   []bool
	}{
		{Config{Temperature: 1, MinP: 0.29}, []bool{true, true, true, false}},
		{Config{Temperature: 1, MinP: 0.31}, []bool{true, true, false, false}},
		{Config{Temperature: 2, MinP: 0.31}, []bool{true, true, true, true}}, // after temperature
		{Config{Temperature: 1, MinP: 1}, []bool{true, false, false, false}},
		{Config{Temperature: 1, MinP: 0.05, TopK: 3}, []bool{true, true, true, false}},
		{Config{Temperature: 1, MinP: 0.29, TopP: 0.6}, []bool{true, true, false, false}},
	} {
		s := mustSampler(t, c.config)
		seen := make([]bool, len(logits))
		for range 3000 {
			seen[mustDraw(t, s, logits)] = true
		}
		require.Equal(t, c.want, seen, "%+v", c.config)
	}
}

// TestLogProbs compares log-probabilities with the definition. Settings other than Vocab must not change
// them.
func TestLogProbs(t *testing.T) {
	inf := math.Inf(-1)
	logits := []float32{1, 3, float32(inf), 3, 2, 50}
	s := mustSampler(t, Config{Temperature: 0.1, TopK: 1, LogProbs: true, Top: 3, Vocab: 5,
		Bias: map[int]float64{0: 100}, Presence: 1})
	require.Equal(t, 0, mustDraw(t, s, logits))

	norm := math.Log(math.Exp(1) + 2*math.Exp(3) + math.Exp(2))
	require.InDelta(t, 1-norm, s.LogProb(), 1e-12)
	require.Len(t, s.Top(), 3)
	for i, want := range []TokenProb{{1, 3 - norm}, {3, 3 - norm}, {4, 2 - norm}} {
		require.Equal(t, want.ID, s.Top()[i].ID)
		require.InDelta(t, want.LogProb, s.Top()[i].LogProb, 1e-12)
	}

	// There are fewer tokens than requested, and excluded ones are not counted.
	s = mustSampler(t, Config{LogProbs: true, Top: 20})
	mustDraw(t, s, logits[:3])
	require.Len(t, s.Top(), 2)

	s = mustSampler(t, Config{LogProbs: true})
	mustDraw(t, s, logits)
	require.Empty(t, s.Top())
	require.InDelta(t, 0, s.LogProb(), 1e-12)
}

// TestPenaltyErrors checks that invalid settings are rejected by name, and that a failed draw is not
// counted.
func TestPenaltyErrors(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for want, c := range map[string]Config{
		"MinP is 1.5":        {MinP: 1.5},
		"MinP is NaN":        {MinP: nan},
		"Repetition is -1":   {Repetition: -1},
		"Repetition is +Inf": {Repetition: inf},
		"Presence is NaN":    {Presence: nan},
		"Frequency is -Inf":  {Frequency: -inf},
		"Top is -1":          {Top: -1},
		"Top is 3 without":   {Top: 3},
		"Bias[4] is +Inf":    {Bias: map[int]float64{1: 1, 4: inf}},
		"Bias[-2] is 1":      {Bias: map[int]float64{-2: 1}},
	} {
		_, err := New(c)
		require.ErrorContains(t, err, want)
	}

	s := mustSampler(t, Config{Presence: 10})
	_, err := Draw(s, []float64{3, nan})
	require.Error(t, err)
	require.Equal(t, []int{0, 1}, greedyAfter(t, s, []float64{3, 1}, 2))

	// A penalty can exceed the range of numbers.
	s = mustSampler(t, Config{Repetition: 5e-324})
	s.Observe(0)
	_, err = Draw(s, []float32{3, 1})
	require.ErrorContains(t, err, "logits[0] is +Inf")
}

// TestBiasIsCopied checks that a caller can reuse the map of biases.
func TestBiasIsCopied(t *testing.T) {
	bias := map[int]float64{0: 10}
	s := mustSampler(t, Config{Bias: bias})
	bias[0] = -10
	require.Equal(t, 0, mustDraw(t, s, []float64{1, 3}))
}
