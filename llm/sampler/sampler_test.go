package sampler

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
)

func mustSampler(t testing.TB, c Config) *Sampler {
	t.Helper()
	s, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func mustDraw[T float32 | float64](t testing.TB, s *Sampler, logits []T) int {
	t.Helper()
	id, err := Draw(s, logits)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// reference returns the distribution that a config defines for logits, computed straight from the
// definitions.
func reference(c Config, logits []float64) []float64 {
	order := make([]int, len(logits))
	for i := range order {
		order[i] = i
	}

	slices.SortStableFunc(order, func(a, b int) int {
		switch {
		case logits[a] > logits[b]:
			return -1
		case logits[a] < logits[b]:
			return 1
		}
		return 0
	})

	if c.TopK > 0 && c.TopK < len(order) {
		order = order[:c.TopK]
	}

	p := make([]float64, len(logits))
	normalise := func() {
		sum := 0.0
		clear(p)
		for _, i := range order {
			p[i] = math.Exp(logits[i] / c.Temperature)
			sum += p[i]
		}
		for i := range p {
			p[i] /= sum
		}
	}

	normalise()
	if c.TopP > 0 {
		sum, n := 0.0, 0
		for n < len(order) && sum < c.TopP {
			sum += p[order[n]]
			n++
		}
		order = order[:n]
		normalise()
	}

	return p
}

// TestSampleDistribution applies Pearson's chi-square test to 20000 draws. Tokens that are expected fewer
// than 20 times share one cell; otherwise a single draw of a very rare token would dominate the
// statistic.
//
// For k cells the statistic has the mean k-1 and the standard deviation sqrt(2(k-1)). A correct sampler
// exceeds the limit, slightly more than six deviations, less than once in a million runs.
func TestSampleDistribution(t *testing.T) {
	r := randtest.New(t)
	const draws = 20000
	for _, c := range []Config{
		{Temperature: 1}, {Temperature: 0.5}, {Temperature: 2}, {Temperature: 1,
			TopK: 3}, {Temperature: 1, TopP: 0.7},
		{Temperature: 1.5, TopK: 6, TopP: 0.8}, {Temperature: 1, TopK: 100, TopP: 1},
	} {
		c.Seed = r.Uint64()
		s := mustSampler(t, c)
		logits := make([]float64, 12)
		for i := range logits {
			logits[i] = 1.5 * r.NormFloat64()
		}
		logits[3] = math.Inf(-1)
		before := slices.Clone(logits)
		want := reference(c, logits)
		got := make([]float64, len(logits))
		for range draws {
			got[mustDraw(t, s, logits)]++
		}
		chi2, cells := 0.0, 0.0
		var rare, drawnRare float64
		add := func(got, want float64) {
			cells++
			chi2 += (got - want) * (got - want) / want
		}
		for i, p := range want {
			switch {
			case p == 0 && got[i] > 0:
				t.Errorf("%+v draws %d, which is ruled out, %v times from %v", c, i, got[i], logits)
			case draws*p < 20:
				rare, drawnRare = rare+draws*p, drawnRare+got[i]
			default:
				add(got[i], draws*p)
			}
		}
		if rare >= 5 {
			add(drawnRare, rare)
		} else if drawnRare > 40 {
			t.Errorf("%+v draws tokens %v times that are expected %v times\ngot  %v\nwant %v", c,
				drawnRare, rare, got, want)
		}
		if limit := cells + 8*math.Sqrt(2*cells) + 15; chi2 > limit {
			t.Errorf("%+v: chi-square is %.1f with %v tokens\ngot  %v\nwant %v", c, chi2, cells,
				got, want)
		}
		if !slices.Equal(logits, before) {
			t.Error("the logits have been changed")
		}
	}
}

func TestSampleEdges(t *testing.T) {
	inf := math.Inf(-1)
	for name, c := range map[string]struct {
		config Config
		logits []float64
		want   []int // exactly these occur in 2000 draws
	}{
		"greedy":       {Config{}, []float64{1, 3, 2}, []int{1}},
		"greedy, ties": {Config{}, []float64{1, 3, 3}, []int{1}},
		"top-k 1, ties": {Config{Temperature: 1, TopK: 1}, []float64{0, 3, 3},
			[]int{1}},
		"top-k 2, ties": {Config{Temperature: 9, TopK: 2}, []float64{1, 1, 1, 1},
			[]int{0, 1}},
		"top-k beyond all": {Config{Temperature: 1, TopK: 9}, []float64{1, 1},
			[]int{0, 1}},
		"top-p keeps one": {Config{Temperature: 1, TopP: 1e-300}, []float64{1, 1.1, 1},
			[]int{1}},
		"top-p, ties": {Config{Temperature: 1, TopP: 0.5}, []float64{1, 1, 1, 1},
			[]int{0, 1}},
		"top-p crosses the limit": {Config{Temperature: 1, TopP: 0.51}, []float64{1, 1, 1, 1},
			[]int{0, 1, 2}},
		"top-p of what top-k leaves": {Config{Temperature: 1, TopK: 2, TopP: 0.5},
			[]float64{1, 1, 1}, []int{0}},
		"top-p 1 keeps all": {Config{Temperature: 1, TopP: 1}, []float64{1, 1, 1},
			[]int{0, 1, 2}},
		"one token": {Config{Temperature: 1}, []float64{-7}, []int{0}},
		"only one possible": {Config{Temperature: 1}, []float64{inf, -1e300, inf},
			[]int{1}},
		"greedy, very small": {Config{}, []float64{inf, -1e308}, []int{1}},
		"large logits":       {Config{Temperature: 1}, []float64{1e308, -1e308}, []int{0}},
		"the least temperature": {Config{Temperature: 5e-324}, []float64{1, 2, 2 + 1e-9},
			[]int{2}},
		"the least temperature, ties": {Config{Temperature: 5e-324}, []float64{1, 2, 2},
			[]int{1, 2}},
		"a high temperature": {Config{Temperature: 1e300}, []float64{1, 50}, []int{0, 1}},
	} {
		s := mustSampler(t, c.config)
		seen := make([]bool, len(c.logits))
		for range 2000 {
			seen[mustDraw(t, s, c.logits)] = true
		}
		var got []int
		for id, s := range seen {
			if s {
				got = append(got, id)
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: draws %v from %v, want %v", name, got, c.logits, c.want)
		}
	}
}

func TestSamplerRepeats(t *testing.T) {
	logits := make([]float64, 50)
	narrow := make([]float32, 50)
	draw := func(s *Sampler) []int {
		ids := make([]int, 40)
		for i := range ids {
			ids[i] = mustDraw(t, s, logits)
		}
		return ids
	}

	seed := randtest.New(t).Uint64()
	c := Config{Temperature: 1, TopP: 0.9, Seed: seed}
	s := mustSampler(t, c)
	first := draw(s)
	if again := draw(mustSampler(t, c)); !slices.Equal(again, first) {
		t.Errorf("the same seed draws %v and %v", first, again)
	}

	wide := mustSampler(t, c)
	for i, want := range first {
		if got := mustDraw(t, wide, narrow); got != want {
			t.Fatalf("draw %d from float32 is %d, from float64 %d", i, got, want)
		}
	}

	c.Seed++
	other := mustSampler(t, c)
	if again := draw(other); slices.Equal(again, first) {
		t.Error("two seeds draw the same tokens")
	}

	state, err := s.State()
	if err != nil {
		t.Fatal(err)
	}

	want := draw(s)
	if err := other.SetState(state[:len(state)-1]); err == nil {
		t.Error("a state cut short is accepted")
	}

	if err := other.SetState(state); err != nil {
		t.Fatal(err)
	}

	if got := draw(other); !slices.Equal(got, want) {
		t.Errorf("from the saved state: %v, want %v", got, want)
	}
}

func TestSamplerErrors(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for _, c := range []struct {
		config Config
		want   string
	}{
		{Config{Temperature: -0.1}, "Temperature is -0.1"},
		{Config{Temperature: nan}, "Temperature is NaN"},
		{Config{Temperature: inf}, "Temperature is +Inf"},
		{Config{TopK: -1}, "TopK is -1"},
		{Config{TopP: -0.5}, "TopP is -0.5"},
		{Config{TopP: 1.01}, "TopP is 1.01"},
		{Config{TopP: nan}, "TopP is NaN"},
		{Config{Vocab: -1}, "Vocab is -1"},
	} {
		if _, err := New(c.config); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want an error with %q", c.config, err, c.want)
		}
	}

	for _, temperature := range []float64{0, 1} {
		s := mustSampler(t, Config{Temperature: temperature})
		before, _ := s.State()
		for _, c := range []struct {
			logits []float64
			want   string
		}{
			{nil, "none of 0 logits"},
			{[]float64{-inf, -inf}, "none of 2 logits"},
			{[]float64{1, nan}, "logits[1] is NaN"},
			{[]float64{inf, 1}, "logits[0] is +Inf"},
		} {
			if id, err := Draw(s, c.logits); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v: %d, %v, want an error with %q", c.logits, id, err, c.want)
			}
		}
		if after, _ := s.State(); !slices.Equal(after, before) {
			t.Error("an error uses up random numbers")
		}
	}
}

// TestSampleOutsideVocab checks that logits beyond Vocab make no difference, regardless of their
// values.
func TestSampleOutsideVocab(t *testing.T) {
	r := randtest.New(t)
	for range 300 {
		n, padding := 1+r.IntN(40), r.IntN(40)
		c := Config{Temperature: []float64{0, 0.5, 3}[r.IntN(3)], TopK: r.IntN(5),
			TopP: r.Float64(), Seed: r.Uint64()}
		logits := make([]float64, n+padding)
		for i := range logits {
			logits[i] = r.NormFloat64()
			if i >= n {
				logits[i] = []float64{1e300, math.NaN(), math.Inf(1), math.Inf(-1), 1}[r.IntN(5)]
			}
		}
		unmasked := mustSampler(t, c)
		c.Vocab = n
		masked := mustSampler(t, c)
		for range 5 {
			if got, want := mustDraw(t, masked, logits), mustDraw(t, unmasked,
				logits[:n]); got != want {
				t.Fatalf("%+v: token %d of %v, want %d", c, got, logits, want)
			}
		}
	}

	larger := mustSampler(t, Config{Vocab: 9})
	if id := mustDraw(t, larger, []float64{1, 2}); id != 1 {
		t.Errorf("token %d with fewer logits than the vocabulary has entries, want 1", id)
	}
}

// FuzzSamplerState checks that SetState either rejects a state or restores it exactly.
func FuzzSamplerState(f *testing.F) {
	s, err := New(Config{Temperature: 1})
	require.NoError(f, err)
	whole, err := s.State()
	require.NoError(f, err)
	f.Add(whole)
	f.Add(whole[:5])
	f.Fuzz(func(t *testing.T, state []byte) {
		before, err := s.State()
		require.NoError(t, err)
		if s.SetState(state) == nil {
			before = state
		}
		after, err := s.State()
		require.NoError(t, err)
		require.Equal(t, before, after)
		_, err = Draw(s, []float64{1, 2, 3})
		require.NoError(t, err)
	})
}

func mustState(t *testing.T) []byte {
	t.Helper()
	s, err := New(Config{})
	require.NoError(t, err)
	state, err := s.State()
	require.NoError(t, err)
	return state
}

// TestZeroSampler checks that the zero value is greedy, and that it has no state until one is set.
func TestZeroSampler(t *testing.T) {
	id, err := Draw(new(Sampler), []float32{1, 3, 2})
	require.NoError(t, err)
	require.Equal(t, 1, id)
	_, err = new(Sampler).State()
	require.ErrorContains(t, err, "New makes one")
	require.NoError(t, new(Sampler).SetState(mustState(t)))
}

// TestNucleusOfZero checks that a top_p of 0 keeps only the most probable token, even if other tokens are
// nearly as probable.
func TestNucleusOfZero(t *testing.T) {
	logits := []float64{1, 1 + 1e-15, 1, -1e300, math.Inf(-1), 1 + 1e-15}
	for seed := range uint64(50) {
		for _, temperature := range []float64{1e-3, 1, 1e6} {
			s := mustSampler(t, Config{Temperature: temperature, TopP: Nucleus(0), Seed: seed})
			require.Equal(t, 1, mustDraw(t, s, logits))
		}
	}
	require.InDelta(t, 0.9, Nucleus(0.9), 0)
}
