package sampling_test

import (
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/sampling"
	"github.com/kasmina-go/kasmina/internal/cpu/sampling/samplingtest"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// TestWeight compares weights with the exponential function, and checks the ends of their range.
func TestWeight(t *testing.T) {
	r := randtest.New(t)
	for range 100000 {
		d, temperature := -r.Float64()*30, math.Exp2(6*r.Float64()-3)
		scale := sampling.ScaleOf(temperature)
		exact := math.Exp2(float64(float32(d)) * float64(scale))
		got := float64(sampling.Weight(float32(d), scale)) / sampling.One
		// The exponent, of at most 41, has 24 bits, and so has its power of two. Weights are integers.
		require.InDelta(t, exact, got, exact*4e-6+2.0/sampling.One, "%g at temperature %g", d, temperature)
	}

	require.EqualValues(t, sampling.One, sampling.Weight(0, sampling.ScaleOf(1)))
	require.EqualValues(t, sampling.One, sampling.Weight(0, sampling.ScaleOf(5e-324)))
	require.EqualValues(t, sampling.One, sampling.Weight(-1e30, sampling.ScaleOf(math.MaxFloat64)))
	require.Zero(t, sampling.Weight(float32(math.Inf(-1)), sampling.ScaleOf(1)))
	require.Zero(t, sampling.Weight(-1, sampling.ScaleOf(5e-324)))
	require.Zero(t, sampling.Weight(float32(math.Inf(-1)), 0)) // −Inf·0 is NaN
	require.Positive(t, sampling.Weight(-40, 1))
}

// TestNeeded compares shares of totals with exact arithmetic.
func TestNeeded(t *testing.T) {
	r := randtest.New(t)
	for range 100000 {
		share, total := sampling.ShareOf(r.Float64()), r.Uint64()>>(5+r.IntN(50))
		switch r.IntN(9) {
		case 0:
			share = 1 << 32
		case 1:
			share = 1
		}
		want := new(big.Int).Mul(new(big.Int).SetUint64(share), new(big.Int).SetUint64(total))
		want.Add(want, big.NewInt(1<<32-1)).Rsh(want, 32)
		require.Equal(t, want.Uint64(), sampling.Needed(share, total), "%d of %d", share, total)
	}
	require.Zero(t, sampling.ShareOf(0))
	require.EqualValues(t, 1, sampling.ShareOf(math.SmallestNonzeroFloat64))
	require.EqualValues(t, 1<<32, sampling.ShareOf(1))
}

// expected draws a token by sorting all tokens. It returns −1 where Draw returns an error.
func expected[T cpu.Float](logits []T, r *sampling.Rule) int {
	x := slices.Clone(logits)
	if r.Vocab > 0 && r.Vocab < len(x) {
		x = x[:r.Vocab]
	}
	entries := map[int]sampling.Entry{}
	for _, e := range r.Entries {
		entries[e.ID] = e
	}
	for _, id := range r.Pending {
		e := entries[id]
		entries[id] = sampling.Entry{id, true, e.Drawn + 1, e.Bias}
	}
	for id, e := range entries {
		if id >= len(x) || x[id]-x[id] != 0 {
			continue
		}
		v := x[id]
		if e.Occurred && r.Repetition != 0 {
			if v > 0 {
				v /= T(r.Repetition)
			} else {
				v *= T(r.Repetition)
			}
		}
		if e.Drawn > 0 {
			v -= T(T(e.Drawn)*T(r.Frequency)) + T(r.Presence)
		}
		x[id] = v + T(e.Bias)
	}

	var order []int
	for id, v := range x {
		if v != v || v > math.MaxFloat32 && v-v != 0 {
			return -1
		}
		if v-v == 0 {
			order = append(order, id)
		}
	}
	if len(order) == 0 {
		return -1
	}
	slices.SortStableFunc(order, func(a, b int) int {
		switch {
		case x[a] > x[b]:
			return -1
		case x[a] < x[b]:
			return 1
		}
		return a - b
	})
	if r.Greedy {
		return order[0]
	}

	if r.TopK > 0 && r.TopK < len(order) {
		order = order[:r.TopK]
	}
	weight := func(id int) uint64 { return sampling.Weight(float32(x[id]-x[order[0]]), r.Scale) }
	sum := func() (total uint64) {
		for _, id := range order {
			total += weight(id)
		}
		return total
	}
	if r.TopP > 0 {
		needed, part, n := sampling.Needed(r.TopP, sum()), uint64(0), 0
		for part < needed {
			part += weight(order[n])
			n++
		}
		order = order[:n]
	}
	first := order[0]
	order = slices.DeleteFunc(order, func(id int) bool {
		return sampling.Weight(float32(x[id]-x[first]), r.Scale) < r.MinWeight
	})
	total := uint64(0)
	for _, id := range order {
		total += sampling.Weight(float32(x[id]-x[first]), r.Scale)
	}
	rest := new(big.Int).Mul(new(big.Int).SetUint64(r.Uniform), new(big.Int).SetUint64(total))
	left := rest.Rsh(rest, 64).Uint64()
	slices.Sort(order)
	for _, id := range order {
		w := sampling.Weight(float32(x[id]-x[first]), r.Scale)
		if left < w {
			return id
		}
		left -= w
	}
	return -1
}

// TestDraw compares Draw with a sort of all tokens, for random rules and logits with ties and with numbers
// that are not finite.
func TestDraw(t *testing.T) {
	r := randtest.New(t)
	var narrow sampling.Drawer[float32]
	var wide sampling.Drawer[float64]
	drawn := map[int]int{}
	for i := range 6000 {
		n := 1 + r.IntN(60)
		if i%100 == 0 {
			n = 5000
		}
		rule := samplingtest.Rule(r, n)
		logits := make([]float64, n)
		samplingtest.Logits(r, logits)
		before := slices.Clone(logits)
		short := make([]float32, n)
		for j, v := range logits {
			short[j] = float32(v)
		}

		check := func(got int, err error, want int) {
			require.Equal(t, want < 0, err != nil, "%+v of %v: %v", rule, logits, err)
			if err == nil {
				require.Equal(t, want, got, "%+v of %v", rule, logits)
			}
		}
		got, err := narrow.Draw(short, &rule)
		check(got, err, expected(short, &rule))
		drawn[got]++
		got, err = wide.Draw(logits, &rule)
		check(got, err, expected(logits, &rule))
		for j, v := range before {
			require.Equal(t, math.Float64bits(v), math.Float64bits(logits[j]), "the logits have changed")
		}
	}
	require.Greater(t, len(drawn), 30)
}

// BenchmarkDraw draws from logits as a model with a large vocabulary makes them.
func BenchmarkDraw(b *testing.B) {
	const n = 128256
	r := rand.New(rand.NewPCG(1, 2))
	logits := make([]float32, n)
	for i := range logits {
		logits[i] = float32(3 * r.NormFloat64())
	}
	for name, rule := range map[string]sampling.Rule{
		"greedy": {Greedy: true}, "all": {Scale: sampling.ScaleOf(1)}, "top-k": {Scale: sampling.ScaleOf(1), TopK: 50},
		"top-p": {Scale: sampling.ScaleOf(1), TopP: sampling.ShareOf(0.9)},
	} {
		b.Run(name, func(b *testing.B) {
			var d sampling.Drawer[float32]
			r := rand.New(rand.NewPCG(3, 4))
			for range b.N {
				rule.Uniform = r.Uint64()
				if _, err := d.Draw(logits, &rule); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
