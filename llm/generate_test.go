package llm

import (
	"context"
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/sampler"
)

func newGenerator(t *testing.T, c Config) (*Generator, *sampler.Sampler) {
	t.Helper()
	m, err := NewModel(c, tensor.Float32, 1)
	require.NoError(t, err)
	g, err := NewGenerator(m)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.Close()) })
	s, err := sampler.New(sampler.Config{Temperature: 1, Seed: 3})
	require.NoError(t, err)
	return g, s
}

// TestGenerateStreams wants tokens as they are drawn, no more after the caller has had enough, and
// the end with the context.
func TestGenerateStreams(t *testing.T) {
	g, s := newGenerator(t, tiny())
	taken := 0
	for _, err := range g.Generate(t.Context(), []int{1}, math.MaxInt, s) {
		require.NoError(t, err)
		if taken++; taken == 3 {
			break
		}
	}
	enough := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	taken = 0
	var last error
	for _, err := range g.Generate(ctx, []int{1}, math.MaxInt, s) {
		require.NoError(t, last, "it goes on after an error")
		if last = err; err == nil {
			if taken++; taken == 4 {
				cancel(enough)
			}
		}
	}
	require.ErrorIs(t, last, enough)
	require.Equal(t, 4, taken)
	var none context.Context
	_, err := collect(g.Generate(none, []int{1}, 1, s))
	require.ErrorContains(t, err, "the context is nil")
}

// TestGenerateStopsWithinAPass wants the context to end the pass over a prompt, which may take
// minutes, and the generator to be as good as before.
func TestGenerateStopsWithinAPass(t *testing.T) {
	g, s := newGenerator(t, tiny())
	enough := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	logits, err := g.decoder()
	require.NoError(t, err)
	cancel(enough)
	_, err = logits(ctx, []int{1, 2, 3})
	require.ErrorIs(t, err, enough)
	_, err = logits(t.Context(), []int{1, 2})
	require.NoError(t, err)
	_, err = logits(ctx, []int{1, 2, 3})
	require.ErrorIs(t, err, enough)
	want, err := logits(t.Context(), []int{1, 2, 3})
	require.NoError(t, err)
	again, err := g.decoder()
	require.NoError(t, err)
	got, err := again(t.Context(), []int{1, 2, 3})
	require.NoError(t, err)
	require.Less(t, apartBy(t, got, want), 1e-5)
	tokens, err := collect(g.Generate(t.Context(), []int{1}, 5, s))
	require.NoError(t, err)
	require.Len(t, tokens, 5)
}

// TestGenerateOfAWideWindow wants time and memory to follow the tokens that there are: a file may
// name a window of 2²⁴ positions for a model of some bytes. Passes over such a window would take
// days.
func TestGenerateOfAWideWindow(t *testing.T) {
	c := smallConfig()
	c.Seq = 1 << 24
	g, s := newGenerator(t, c)
	bounded.Run(t, 2<<20, func() { // 16 MiB and more if it were for the window
		tokens, err := collect(g.Generate(t.Context(), []int{0, 1, 2, 1, 0}, 40, s))
		require.NoError(t, err)
		require.Len(t, tokens, 40)
	})
}

// TestWindowsThatGrow wants the same logits from a window for the tokens as from one for all, over
// several sizes.
func TestWindowsThatGrow(t *testing.T) {
	c := tiny()
	c.Seq = 100
	m, err := NewModel(c, tensor.Float64, 1)
	require.NoError(t, err)
	i := &Inference{Model: m}
	defer i.Close()
	whole, err := i.runner(ForLogits, 1)
	require.NoError(t, err)
	defer whole.Machine.Close()
	r := texttest.Rand(t)
	var all []int
	for len(all) < c.Seq+3 {
		all = append(all, r.IntN(c.Vocab))
	}
	for _, first := range []int{1, 16, 17, 40, 100, 3} {
		next, err := i.Decoder()
		require.NoError(t, err)
		for n := first; n <= len(all); n++ {
			window := all[max(0, n-c.Seq):n]
			got, err := next(t.Context(), window)
			require.NoError(t, err)
			if n%7 > 0 && n > first && n < c.Seq {
				continue
			}
			want, err := whole.Next(t.Context(), window)
			require.NoError(t, err)
			require.Less(t, apartBy(t, got, want), 1e-13, "%d tokens, the first %d at once", n, first)
		}
	}
}
