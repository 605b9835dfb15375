package llm

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/op/kvcache"
	"github.com/kasmina-go/kasmina/state"
)

func newBatcher(t *testing.T, m *Model, o BatcherOptions) *Batcher {
	t.Helper()
	b, err := NewBatcher(m, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	return b
}

// TestBatcher continues texts of random lengths concurrently, up to and beyond the window, and compares
// the logits of every token with a separate pass over the text.
func TestBatcher(t *testing.T) {
	randtest.Concurrent(t)
	learned := tiny()
	learned.Positions, learned.Blocks = learned.Seq, []Block{{NoRoPE: true}, {NoRoPE: true}}
	window := tiny()
	window.Blocks = []Block{{Window: 3}, {}}
	kasmina := tiny()
	kasmina.SlotWidth, kasmina.Untied = 16, true
	for name, c := range map[string]Config{"plain": tiny(), "learned positions": learned, "window": window,
		"Kasmina layers": kasmina} {
		t.Run(name, func(t *testing.T) {
			r := randtest.New(t)
			m, err := NewModel(c, tensor.Float64, 1)
			require.NoError(t, err)
			whole := wholeLogits(t, m)
			defer whole.Machine.Close()
			var mu sync.Mutex // of whole
			b := newBatcher(t, m, BatcherOptions{Texts: 3, Rows: 5, Kept: 40})

			var texts sync.WaitGroup
			for i := range 12 {
				r := rand.New(rand.NewPCG(r.Uint64(), uint64(i)))
				texts.Go(func() {
					next, err := b.Decoder()
					if err != nil {
						t.Error(err)
						return
					}

					// Some texts have a common beginning.
					all := []int{i % 3, 5, 6, 7, i % 2}
					for range r.IntN(c.Seq) {
						all = append(all, r.IntN(256))
					}
					for range c.Seq {
						seen := all[max(0, len(all)-c.Seq):]
						got, err := next(t.Context(), seen)
						if err != nil {
							t.Error(err)
							return
						}
						mu.Lock()
						want, err := whole.Next(t.Context(), seen)
						if err != nil {
							t.Error(err)
						} else if off := apartBy(t, got, want); !(off < 1e-13) {
							t.Errorf("after %d tokens: the logits differ by %.2g", len(all), off)
						}
						mu.Unlock()
						all = append(all, r.IntN(256))
					}
				})
			}
			texts.Wait()
		})
	}
}

// TestBatcherPasses checks how texts are scheduled: a pass serves all waiting texts, and tokens cached
// for an earlier text are not computed again.
func TestBatcherPasses(t *testing.T) {
	c := tiny()
	c.Seq = 64
	m, err := NewModel(c, tensor.Float32, 1)
	require.NoError(t, err)
	b := newBatcher(t, m, BatcherOptions{Rows: 40})
	jobs := func(texts ...[]int) (all []*batchJob) {
		for _, tokens := range texts {
			all = append(all, &batchJob{ctx: t.Context(), tokens: tokens, done: make(chan struct{})})
		}
		return all
	}
	long := make([]int, 50)
	for i := range long {
		long[i] = 2 * i
	}

	// The short text finishes first, because the long one needs two passes.
	all := jobs(long, []int{7})
	finished, _, err := b.pass(all)
	require.NoError(t, err)
	require.Equal(t, all[1:], finished)
	require.Len(t, all[0].text.tokens, 39)
	finished, _, err = b.pass(all[:1])
	require.NoError(t, err)
	require.Equal(t, all[:1], finished)

	// Texts with a cached beginning need only their new tokens. A text that is cached entirely needs its
	// last token to compute logits.
	again := jobs(append(long[:50:50], 3), append(long[:48:48], 1, 2, 3), long)
	again[0].text = all[0].text
	chosen := b.choose(again)
	require.Len(t, chosen, 3)
	require.Equal(t, []int{1, 1, 3}, []int{chosen[0].rows, chosen[1].rows, chosen[2].rows})
	require.Equal(t, long[49:], chosen[1].next())
	finished, _, err = b.pass(again)
	require.NoError(t, err)
	require.Len(t, finished, 3)
	require.Equal(t, all[0].logits, again[2].logits)

	// A change of the model invalidates all cached tokens.
	m.changes.Add(1)
	require.NoError(t, b.prepare())
	again[0].text.tokens = long
	require.Equal(t, 40, b.choose(again[:1])[0].rows)

	require.Equal(t, []int{1, 2, 3, 4, 6, 6, 8, 12, 64, 96}, []int{roundRows(1), roundRows(2), roundRows(3),
		roundRows(4), roundRows(5), roundRows(6), roundRows(7), roundRows(12), roundRows(50), roundRows(65)})
}

// TestBatcherLeaves checks that texts can be abandoned at any time without affecting other texts, that
// invalid tokens are rejected, and that closing the batcher ends all texts with an error.
func TestBatcherLeaves(t *testing.T) {
	randtest.Concurrent(t)
	m, err := NewModel(tiny(), tensor.Float32, 1)
	require.NoError(t, err)
	b := newBatcher(t, m, BatcherOptions{Texts: 4, Rows: 8})
	want := textOf(t, b.Generator(), t.Context(), 1)

	var others sync.WaitGroup
	for i := range 20 {
		others.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*time.Millisecond)
			defer cancel()
			s, _ := sampler.New(sampler.Config{Temperature: 1, Seed: uint64(i)})
			for _, err := range b.Generator().Generate(ctx, []int{1, i}, 1000, s) {
				if err != nil && !errors.Is(err, context.DeadlineExceeded) {
					t.Error(err)
				}
			}
		})
	}
	for range 5 {
		require.Equal(t, want, textOf(t, b.Generator(), t.Context(), 1))
	}
	others.Wait()

	s, err := sampler.New(sampler.Config{})
	require.NoError(t, err)
	_, err = collect(b.Generator().Generate(t.Context(), []int{1, 256}, 1, s))
	require.ErrorContains(t, err, "256")
	require.Equal(t, want, textOf(t, b.Generator(), t.Context(), 1))

	ended := make(chan error)
	go func() {
		_, err := collect(b.Generator().Generate(t.Context(), []int{1}, 1<<30, s))
		ended <- err
	}()
	require.NoError(t, b.Close())
	require.ErrorIs(t, <-ended, errBatcherClosed)
	_, err = collect(b.Generator().Generate(t.Context(), []int{1}, 1, s))
	require.ErrorIs(t, err, errBatcherClosed)
	require.NoError(t, b.Close())

	_, err = NewBatcher(nil, BatcherOptions{})
	require.Error(t, err)
	_, err = NewBatcher(m, BatcherOptions{Texts: 3, Rows: 2})
	require.ErrorContains(t, err, "as many rows as texts")
}

// textOf generates a text of 30 tokens.
func textOf(t *testing.T, g *Generator, ctx context.Context, seed uint64) []int {
	t.Helper()
	s, err := sampler.New(sampler.Config{Temperature: 1, Seed: seed})
	require.NoError(t, err)
	tokens, err := collect(g.Generate(ctx, []int{3, 1, 4}, 30, s))
	require.NoError(t, err)
	return tokens
}

// BenchmarkBatcher measures the total throughput of texts generated concurrently.
func BenchmarkBatcher(b *testing.B) {
	c := Config{Vocab: 8192, Dim: 512, Layers: 8, Heads: 8, FF: 1536, Seq: 512}.Default()
	m, err := NewModel(c, tensor.Float32, 1)
	require.NoError(b, err)
	for _, texts := range []int{1, 2, 4, 8, 16, 32} {
		b.Run(fmt.Sprint(texts), func(b *testing.B) {
			batcher, err := NewBatcher(m, BatcherOptions{})
			require.NoError(b, err)
			defer batcher.Close()
			var all sync.WaitGroup
			for i := range texts {
				all.Go(func() {
					s, _ := sampler.New(sampler.Config{Temperature: 1, Seed: uint64(i)})
					if _, err := collect(batcher.Generator().Generate(b.Context(), []int{1}, b.N, s)); err != nil {
						b.Error(err)
					}
				})
			}
			all.Wait()
			b.ReportMetric(float64(texts)*float64(b.N)/b.Elapsed().Seconds(), "tokens/s")
		})
	}
}

// TestBatcherAdapters continues texts with different adapters, and without one, in the same passes. It
// compares the logits of every token with a separate inference of the adapted model.
func TestBatcherAdapters(t *testing.T) {
	randtest.Concurrent(t)
	t.Run("model", func(t *testing.T) { testBatcherAdapters(t, tensor.Float64, false, 1e-12) })
	t.Run("compact model", func(t *testing.T) { testBatcherAdapters(t, tensor.Float32, true, 2e-5) })
}

// seededModels returns models with seeds after the blocks of a model: LowRank seeds, ChunkMLP seeds, and seeds of all
// kinds in several chunks with different values of α.
func seededModels(t *testing.T, base *Model) (all []*Model) {
	for _, kind := range []blueprints.Kind{blueprints.LowRank, blueprints.ChunkMLP} {
		m, err := TuneSeeds(base, kind, 3)
		require.NoError(t, err)
		fillSeeds(m)
		all = append(all, m)
	}

	c := base.Config
	c.Kasmina, c.Seeds, c.SlotWidth = []int{1}, 4, 2*c.Dim
	c = c.Default()
	m, err := base.withLayers(c)
	require.NoError(t, err)
	for i, kind := range []blueprints.Kind{blueprints.Residual, blueprints.LowRank, blueprints.MLPExpansion} {
		require.NoError(t, m.activate(0, i, i+1, kind, state.Grafting))
		require.NoError(t, m.Kasmina.Do(state.Command{Action: state.SetAlpha, Layer: 0, Seed: i, Alpha: 0.3 * float64(i+1)}))
	}
	fillSeeds(m)
	return append(all, m)
}

// fillSeeds sets the weights of a model's seeds so that the seeds change its output.
func fillSeeds(m *Model) {
	for k, p := range m.Params {
		if !IsSeedParam(p.Name) {
			continue
		}
		set := func(i int) float64 { return 0.4 * math.Sin(float64(k*1000+i)) }
		switch x := p.Value.Data().(type) {
		case []float32:
			for i := range x {
				x[i] = float32(set(i))
			}
		case []float64:
			for i := range x {
				x[i] = set(i)
			}
		}
	}
}

func testBatcherAdapters(t *testing.T, dt tensor.Dtype, compact bool, tolerance float64) {
	c := maskedConfig()
	c.Documents = false
	if compact {
		c.Dim, c.HeadDim, c.FF = 64, 32, 96 // matrices large enough to be compact
	}
	base, err := NewModel(c, dt, 7)
	require.NoError(t, err)
	if compact { // the compact model has the same weights
		for _, p := range base.Params {
			for i, x := range p.Value.Float32s() {
				p.Value.Float32s()[i] = math.Float32frombits(math.Float32bits(x) &^ 0xFFFF)
			}
		}
	}

	models := []*Model{base}
	var all []*Adapter
	kinds := adapters(t, c)
	for i, name := range []string{"LoRA", "DoRA with dropout", "some layers"} {
		m, err := Adapt(base, kinds[name], uint64(i))
		require.NoError(t, err)
		fill(m)
		a := &Adapter{LoRA: kinds[name]}
		for _, p := range m.Params {
			if IsAdapterParam(p.Name) {
				a.Params = append(a.Params, p)
			}
		}
		models, all = append(models, m), append(all, a)
	}
	for _, m := range seededModels(t, base) {
		a, err := m.SeedAdapter()
		require.NoError(t, err)
		models, all = append(models, m), append(all, a)
	}

	o := BatcherOptions{Texts: 4, Rows: 7, Kept: 60, Adapters: all}
	inference := func(m *Model) *Inference { return &Inference{Model: m} }
	var b *Batcher
	if compact {
		small, err := base.Compact(cpuops.BFloat16)
		require.NoError(t, err)
		b, err = NewCompactBatcher(small, o)
		require.NoError(t, err)
		defer b.Close()
		inference = func(m *Model) *Inference {
			if len(m.Config.Kasmina) > 0 { // which compact models do not have
				return &Inference{Model: m}
			}
			small, err := m.Compact(cpuops.BFloat16)
			require.NoError(t, err)
			return small.Inference()
		}
	} else {
		b = newBatcher(t, base, o)
	}
	var alones []*Inference
	n := 3 * len(models)
	for i := range n {
		alones = append(alones, inference(models[i%len(models)]))
	}

	var texts sync.WaitGroup
	for i := range n {
		texts.Go(func() {
			g := b.Generator()
			if adapter := i%len(models) - 1; adapter >= 0 {
				var err error
				if g, err = b.Adapted(adapter); err != nil {
					t.Error(err)
					return
				}
			}

			alone := alones[i]
			defer alone.Close()
			next, err := g.decoder()
			if err != nil {
				t.Error(err)
				return
			}
			want, err := alone.Decoder()
			if err != nil {
				t.Error(err)
				return
			}
			for text := []int{1, 2, 3}; len(text) < c.Seq; text = append(text, (5*len(text)+i/len(models))%16) {
				x, err := next(t.Context(), text)
				if err != nil {
					t.Error(err)
					return
				}
				y, err := want(t.Context(), text)
				if err != nil {
					t.Error(err)
				} else if off := apartBy(t, x, y); !(off < tolerance) {
					t.Errorf("text %d of %d tokens: the logits differ by %.2g", i, len(text), off)
				}
			}
		})
	}
	texts.Wait()

	_, err = b.Adapted(6)
	require.ErrorContains(t, err, "there is no adapter 6 of 6")
	_, err = NewBatcher(models[1], BatcherOptions{Adapters: all})
	require.ErrorContains(t, err, "give the model without them")
	_, err = NewBatcher(base, BatcherOptions{Adapters: []*Adapter{nil}})
	require.ErrorContains(t, err, "adapter 0: it is nil")
	other := *all[0]
	other.Params = all[2].Params
	_, err = NewBatcher(base, BatcherOptions{Adapters: []*Adapter{&other}})
	require.ErrorContains(t, err, "does not fit the model")
}

// TestBatcherOfInference continues texts in a paged cache that is too small for all of them. Some texts
// have a common beginning. The logits of every token must match a separate pass over the text.
func TestBatcherOfInference(t *testing.T) {
	randtest.Concurrent(t)
	learned := tiny()
	learned.Positions, learned.Blocks = 150, []Block{{NoRoPE: true}, {NoRoPE: true}}
	window := tiny()
	window.Blocks = []Block{{Window: 70}, {}}
	configs := map[string]Config{"plain": tiny(), "learned positions": learned, "window": window}
	for name, c := range randtest.Sample(t, 1, configs) {
		t.Run(name, func(t *testing.T) {
			r := randtest.New(t)
			c.Seq = 150
			m, err := NewModel(c, tensor.Float64, 1)
			require.NoError(t, err)
			whole := wholeLogits(t, m)
			defer whole.Machine.Close()
			var mu sync.Mutex // of whole

			parts, closed := m.Parts(), false
			i := &Inference{outline: &parts, Make: func(g *Graph) (Machine, error) {
				r, err := runnerOnCPU(g)
				return r.Machine, err
			}, owner: func() error {
				closed = true
				return nil
			}}
			_, err = i.NewBatcher(BatcherOptions{Tokens: c.Seq - 1})
			require.ErrorContains(t, err, "the cache holds 149 tokens")
			b, err := i.NewBatcher(BatcherOptions{Texts: 3, Rows: 40, Tokens: 5 * kvcache.PageTokens})
			require.NoError(t, err)

			var texts sync.WaitGroup
			for i := range 8 {
				r := rand.New(rand.NewPCG(r.Uint64(), uint64(i)))
				texts.Go(func() {
					next, err := b.Decoder()
					if err != nil {
						t.Error(err)
						return
					}

					all := make([]int, 66+i%2)
					for j := range all {
						all[j] = (j*j + i%3) % 256
					}
					for len(all) < 60+10*i {
						all = append(all, r.IntN(256))
					}
					for range 12 {
						seen := all[max(0, len(all)-c.Seq):]
						got, err := next(t.Context(), seen)
						if err != nil {
							t.Error(err)
							return
						}
						mu.Lock()
						want, err := whole.Next(t.Context(), seen)
						if err != nil {
							t.Error(err)
						} else if off := apartBy(t, got, want); !(off < 1e-13) {
							t.Errorf("after %d tokens: the logits differ by %.2g", len(all), off)
						}
						mu.Unlock()
						all = append(all, r.IntN(256))
					}
				})
			}
			texts.Wait()
			require.NoError(t, b.Close())
			require.True(t, closed)
		})
	}
}
