package llm

import (
	"context"
	"math"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm/sampler"
)

// TestEmbed multiplies the vectors of Embed by the output matrix and compares the products with the model's logits. The
// texts differ in length and are embedded together while other texts are being generated.
func TestEmbed(t *testing.T) {
	randtest.Concurrent(t)
	for name, c := range map[string]Config{
		"llama": {Vocab: 61, Dim: 64, Layers: 2, Heads: 4, KVHeads: 2, FF: 96, Seq: 60},
		"gpt2": {Vocab: 61, Dim: 64, Layers: 2, Heads: 4, FF: 96, Seq: 60, Traits: Traits{QKVBias: true, OutBias: true,
			MLPBias: true, LayerNorm: true, PlainMLP: true, GELU: true, Positions: 60, Blocks: []Block{{NoRoPE: true}}}},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := NewModel(c.Default(), tensor.Float32, 1)
			require.NoError(t, err)
			compact, err := m.Compact(cpuops.Float32)
			require.NoError(t, err)
			small, err := NewCompactBatcher(compact, BatcherOptions{Texts: 3})
			require.NoError(t, err)
			defer small.Close()
			for _, b := range []*Batcher{newBatcher(t, m, BatcherOptions{Texts: 3}), small} {
				testEmbed(t, m, b)
			}
		})
	}
}

func testEmbed(t *testing.T, m *Model, b *Batcher) {
	var texts [][]int
	for i := range 40 {
		text := []int{i, 3}
		for k := range (i * 7) % 58 {
			text = append(text, (k*k+i)%61)
		}
		texts = append(texts, text)
	}

	var work sync.WaitGroup
	defer work.Wait()
	for i := range 3 { // embedding must not change the generated tokens
		work.Go(func() {
			s, err := sampler.New(sampler.Config{})
			assert.NoError(t, err)
			alone, err := NewGenerator(m)
			assert.NoError(t, err)
			defer alone.Close()

			want, got := []int{}, []int{}
			for id, err := range alone.Generate(t.Context(), texts[i+9], 30, s) {
				assert.NoError(t, err)
				want = append(want, id)
			}

			for id, err := range b.Generator().Generate(t.Context(), texts[i+9], 30, s) {
				assert.NoError(t, err)
				got = append(got, id)
			}

			assert.Equal(t, want, got)
		})
	}

	g := b.Generator()
	last, err := g.Embed(t.Context(), texts, LastPooling)
	require.NoError(t, err)
	mean, err := g.Embed(t.Context(), texts, MeanPooling)
	require.NoError(t, err)

	head := m.Param(embedName).Float32s()
	dim := m.Config.Dim
	for i, text := range texts {
		logits, err := AllLogits(t.Context(), m, text)
		require.NoError(t, err)
		x := logits.Data().([]float32)
		for id := range m.Config.Vocab {
			product := func(v []float64) (sum float64) {
				for k, w := range head[id*dim:][:dim] {
					sum += float64(w) * v[k]
				}
				return sum
			}

			average := 0.0
			for row := range text {
				average += float64(x[row*m.Config.Vocab+id]) / float64(len(text))
			}

			require.InDelta(t, x[(len(text)-1)*m.Config.Vocab+id], product(last[i]), 1e-4, "text %d", i)
			require.InDelta(t, average, product(mean[i]), 1e-4, "text %d", i)
		}
	}

	_, err = g.Embed(t.Context(), [][]int{{1}, {}}, MeanPooling)
	require.ErrorContains(t, err, "text 1: there are 0 tokens")
	_, err = g.Embed(t.Context(), [][]int{make([]int, 61)}, MeanPooling)
	require.ErrorContains(t, err, "there are 61 tokens, want 1 to 60")

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = g.Embed(ctx, texts, MeanPooling)
	require.ErrorIs(t, err, context.Canceled)

	alone, err := NewGenerator(m)
	require.NoError(t, err)
	defer alone.Close()
	_, err = alone.Embed(t.Context(), texts, MeanPooling)
	require.ErrorContains(t, err, "not one of a Batcher")
}

// TestEmbedWithAdapters checks that a generator with an adapter embeds texts as the adapted model does.
func TestEmbedWithAdapters(t *testing.T) {
	c := Config{Vocab: 61, Dim: 64, Layers: 2, Heads: 4, KVHeads: 2, FF: 96, Seq: 60}.Default()
	base, err := NewModel(c, tensor.Float32, 1)
	require.NoError(t, err)
	targets, err := c.MatchLayers(AllLinear)
	require.NoError(t, err)
	a, err := NewAdapter(c, LoRA{Rank: 4, Alpha: 8, Targets: targets}, tensor.Float32)
	require.NoError(t, err)
	for i, p := range a.Params {
		for k, x := 0, p.Value.Float32s(); k < len(x); k++ {
			x[k] = float32(math.Sin(float64(i + 3*k)))
		}
	}
	adapted, err := base.Attach(a)
	require.NoError(t, err)

	text := [][]int{{3, 1, 4, 1, 5}}
	b := newBatcher(t, base, BatcherOptions{Adapters: []*Adapter{a}})
	g, err := b.Adapted(0)
	require.NoError(t, err)
	got, err := g.Embed(t.Context(), text, MeanPooling)
	require.NoError(t, err)
	want, err := newBatcher(t, adapted, BatcherOptions{}).Generator().Embed(t.Context(), text, MeanPooling)
	require.NoError(t, err)
	require.InDeltaSlice(t, want[0], got[0], 1e-4)
	plain, err := b.Generator().Embed(t.Context(), text, MeanPooling)
	require.NoError(t, err)
	require.NotEqual(t, plain, got)
}
