package llm

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm/sampler"
)

// repetitive returns a text that repeats a phrase, with other tokens in between.
func repetitive(r *rand.Rand, vocab, n int) (text []int) {
	phrase := make([]int, 12)
	for i := range phrase {
		phrase[i] = r.IntN(vocab)
	}
	for len(text) < n {
		text = append(text, phrase...)
		if r.IntN(3) == 0 {
			text = append(text, r.IntN(vocab))
		}
	}
	return text[:n]
}

// TestLookup checks that texts are the same with and without lookup, greedy and sampled, alone and together, and
// that lookup saves passes.
func TestLookup(t *testing.T) {
	randtest.Concurrent(t)
	c := compactConfigs()["Llama"]
	c.Seq = 80
	m, err := NewModel(c, tensor.Float32, 1)
	require.NoError(t, err)
	compact, err := m.Compact(cpuops.Q8)
	require.NoError(t, err)

	const texts = 3
	generate := func(t *testing.T, compactly bool, how sampler.Config, o BatcherOptions) (all [texts][]int, passes int) {
		open := func() (*Batcher, error) { return NewBatcher(m, o) }
		if compactly {
			open = func() (*Batcher, error) { return NewCompactBatcher(compact, o) }
		}
		b, err := open()
		require.NoError(t, err)
		var work sync.WaitGroup
		for i := range texts {
			work.Go(func() {
				how := how
				how.Seed += uint64(i)
				s, err := sampler.New(how)
				if err != nil {
					t.Error(err)
					return
				}
				// The texts outgrow the window.
				prompt := repetitive(rand.New(rand.NewPCG(uint64(i), 1)), c.Vocab, 20+10*i)
				for token, err := range b.Generator().Generate(t.Context(), prompt, 60, s) {
					if err != nil {
						t.Error(err)
						return
					}
					all[i] = append(all[i], token)
				}
			})
			if o.Texts == 1 {
				work.Wait()
			}
		}
		work.Wait()
		require.NoError(t, b.Close())
		return all, b.passes
	}

	for name, how := range map[string]sampler.Config{"greedy": {}, "sampled": {Temperature: 0.1, TopK: 5, Seed: 5},
		"penalty": {Temperature: 1, Seed: 6, Repetition: 1.2}} {
		for _, compactly := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s compact=%v", name, compactly), func(t *testing.T) {
				want, most := generate(t, compactly, how, BatcherOptions{Texts: 1})
				for _, o := range randtest.SampleOf(t, 2, []BatcherOptions{{Texts: 1, Lookup: 16}, {Texts: 1, Lookup: 1},
					{Texts: 5, Rows: 20, Lookup: 7}, {Texts: 2, Rows: 5, Lookup: 4, Kept: -1}}) {
					got, passes := generate(t, compactly, how, o)
					require.Equal(t, want, got, "%+v", o)
					if name == "greedy" && o.Texts == 1 {
						t.Logf("%d passes instead of %d with %d", passes, most, o.Lookup)
						require.Less(t, passes, most*9/10)
					}
				}
			})
		}
	}

	_, err = NewBatcher(m, BatcherOptions{Lookup: 128})
	require.ErrorContains(t, err, "Lookup is 128")
	_, err = NewBatcher(m, BatcherOptions{Lookup: -1})
	require.ErrorContains(t, err, "Lookup is -1")
}

// TestLookupFollowsTheModel checks that proposed tokens do not hide a change of the model.
func TestLookupFollowsTheModel(t *testing.T) {
	randtest.Concurrent(t)
	c := tiny()
	c.Seq = 64
	m, err := NewModel(c, tensor.Float32, 1)
	require.NoError(t, err)
	b := newBatcher(t, m, BatcherOptions{Lookup: 8})
	next, err := b.Decoder()
	require.NoError(t, err)
	text := []int{1, 2, 3, 4, 1, 2, 3}
	_, err = next(t.Context(), text)
	require.NoError(t, err)
	text = append(text, 4)
	before, err := next(t.Context(), text)
	require.NoError(t, err)
	require.Equal(t, 1, b.passes, "the proposed token was not used")

	for _, p := range m.Params {
		values := p.Value.Data().([]float32)
		for i := range values {
			values[i] *= 1.5
		}
	}
	m.changes.Add(1)
	text = append(text, 1)
	after, err := next(t.Context(), text)
	require.NoError(t, err)
	whole := wholeLogits(t, m)
	defer whole.Machine.Close()
	want, err := whole.Next(t.Context(), text)
	require.NoError(t, err)
	require.Less(t, apartBy(t, after, want), 1e-5)
	require.NotEqual(t, before, after)
}

var lookupTokens = flag.Int("lookup-tokens", 192, "tokens per text of BenchmarkLookup")

// BenchmarkLookup times a repetitive and a random text with and without lookup, in turns, with a model of 124
// million parameters. The texts are given, so that the share of proposals that turn out right does not depend on
// the model's random weights.
func BenchmarkLookup(b *testing.B) {
	c := Config{Vocab: 50304, Dim: 768, Layers: 12, Heads: 12, FF: 2048, Seq: 1024}.Default()
	m, err := NewModel(c, tensor.Float32, 1)
	require.NoError(b, err)
	for _, typ := range []cpuops.WeightType{cpuops.BFloat16, cpuops.Q8} {
		compact, err := m.Compact(typ)
		require.NoError(b, err)
		for _, texts := range []int{1, 8} {
			for _, kind := range []string{"repetitive", "random"} {
				b.Run(fmt.Sprintf("%v/texts=%d/%s", typ, texts, kind), func(b *testing.B) {
					best := map[int]time.Duration{}
					for b.Loop() {
						for _, lookup := range []int{0, 8} {
							d := followTexts(b, compact, texts, lookup, kind == "repetitive")
							if best[lookup] == 0 || d < best[lookup] {
								best[lookup] = d
							}
						}
					}
					tokens := float64(texts * *lookupTokens)
					b.ReportMetric(tokens/best[0].Seconds(), "tok/s")
					b.ReportMetric(tokens/best[8].Seconds(), "lookup-tok/s")
				})
			}
		}
	}
}

// followTexts requests the logits after each token of fixed texts, and returns the time this takes,
// without the prompts.
func followTexts(b *testing.B, m *CompactModel, texts, lookup int, repeats bool) time.Duration {
	batcher, err := NewCompactBatcher(m, BatcherOptions{Texts: texts, Lookup: lookup})
	require.NoError(b, err)
	defer batcher.Close()
	const prompt = 64
	var ready, done sync.WaitGroup
	start := make(chan struct{})
	ready.Add(texts)
	for i := range texts {
		done.Go(func() {
			r := rand.New(rand.NewPCG(uint64(i), 1))
			text := repetitive(r, 50257, prompt+*lookupTokens)
			if !repeats {
				for i := range text {
					text[i] = r.IntN(50257)
				}
			}
			next, err := batcher.Decoder()
			if err != nil {
				b.Error(err)
			}
			if _, err := next(b.Context(), text[:prompt]); err != nil {
				b.Error(err)
			}
			ready.Done()
			<-start
			for n := prompt + 1; n <= len(text); n++ {
				if _, err := next(b.Context(), text[:n]); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	ready.Wait()
	from := time.Now()
	close(start)
	done.Wait()
	return time.Since(from)
}
