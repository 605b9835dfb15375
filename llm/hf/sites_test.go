package hf_test

import (
	"math"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// tokens is a text that contains all ids of a vocabulary.
type tokens struct{ vocab int }

func (k tokens) Tokenizer() string   { return "ids" }
func (k tokens) VocabSize() int      { return k.vocab }
func (k tokens) Len() int64          { return 1000 }
func (k tokens) Fingerprint() string { return "ids" }

func (k tokens) ReadTokens(dst []int, offset int64) error {
	for i := range dst {
		dst[i] = (int(offset) + 7*i) % k.vocab
	}
	return nil
}

// planted returns a model of random parameters with blueprints in stage Training, as a run would plant
// them.
func planted(t *testing.T, c llm.Config, all ...llm.Planted) *llm.Model {
	t.Helper()
	r := rand.New(rand.NewPCG(randtest.Seed(t), 1))
	m, err := llm.NewModelFrom(c, tensor.Float32, func(p llm.Param) error {
		for i := range p.Value.Float32s() {
			p.Value.Float32s()[i] += float32(0.1 * math.Sin(float64(i)+float64(len(p.Name))))
		}
		return nil
	}, state.WithoutGates())
	require.NoError(t, err)

	for _, p := range all {
		kind, ok := blueprints.ByName(p.Kind)
		require.True(t, ok)
		layer := m.LayerAt(p.Site)
		require.NoError(t, m.Kasmina.Do(state.Command{Action: state.Germinate, Layer: layer, Seed: p.Seed,
			Request: state.GerminationRequest{Kind: kind, Size: p.Size}},
			state.Command{Action: state.Move, Layer: layer, Seed: p.Seed, To: state.Training}))
	}

	loader, err := data.NewLoader(tokens{c.Vocab}, data.LoaderConfig{Batch: 1, Seq: c.Seq})
	require.NoError(t, err)
	optimizer, err := optim.NewAdamW()
	require.NoError(t, err)
	tr, err := llm.NewTrainer(m, loader, optimizer, llm.TrainConfig{Steps: 1, Batch: 1,
		Schedule: optim.Constant(1e-3)})
	require.NoError(t, err)
	require.NoError(t, tr.Run(t.Context()))
	require.NoError(t, tr.Close())
	require.Len(t, m.Planted, len(all))

	for _, p := range all {
		for _, q := range m.Params {
			if strings.HasPrefix(q.Name, p.Prefix()) {
				for i := range q.Value.Float32s() {
					q.Value.Float32s()[i] = float32(0.1 * r.NormFloat64())
				}
			}
		}
	}

	return m
}

// fossilize fossilizes the planted blueprints of a model. They are not merged yet, as at the end of a run.
func fossilize(t *testing.T, m *llm.Model) {
	t.Helper()
	for _, p := range m.Planted {
		for stage := state.Grafting; stage <= state.Fossilized; stage++ {
			require.NoError(t, m.Kasmina.Do(state.Command{Action: state.Move, Layer: m.LayerAt(p.Site),
				Seed: p.Seed, To: stage}))
		}
	}
}

// logits returns the logits after a few tokens.
func logits(t *testing.T, m *llm.Model) []float32 {
	t.Helper()
	i := &llm.Inference{Model: m}
	defer i.Close()
	next, err := i.Decoder()
	require.NoError(t, err)
	_, err = next(t.Context(), []int{3, 1, 4, 1, 5})
	require.NoError(t, err)
	x, err := next(t.Context(), []int{3, 1, 4, 1, 5, 9}) // uses the cache of keys and values
	require.NoError(t, err)
	return append([]float32(nil), x.([]float32)...)
}

// TestMergedLoads grows models of every family at weights and in the stream. It checks that the plain
// models have the same logits, and that the plain Llama can be saved and loaded.
func TestMergedLoads(t *testing.T) {
	base := llm.Config{Vocab: 40, Dim: 24, Layers: 2, Heads: 4, KVHeads: 2, HeadDim: 6, FF: 32,
		Seq: 16}
	for name, traits := range map[string]llm.Traits{"llama": {},
		"qwen2": {QKVBias: true}, "qwen3": {QKNorm: true},
		"gemma3": {QKNorm: true, NormPlusOne: true, PostNorms: true, GELU: true, EmbedScale: 4.5,
			AttentionScale: 0.4, Blocks: []llm.Block{{Window: 4}, {}}}} {
		for _, untied := range []bool{false, true} {
			c := base
			c.Traits, c.Untied = traits, untied
			c = c.Default()
			c.Weights, c.LoRAAlpha = c.WeightSites("q", "v", "o", "gate", "down", "head"), 4
			c.Streams = []int{0, 1, 1, 1}
			var all []llm.Planted
			for seed := range c.Weights {
				all = append(all, llm.Planted{Site: blueprints.Weight, Seed: seed, Kind: "LoRA",
					Size: 1 + seed%3})
			}
			for seed := range c.Streams {
				p := llm.Planted{Site: blueprints.Stream, Seed: seed, Kind: "Perceptron", Size: 11}
				if seed%2 == 1 {
					p.Kind, p.Size = "Attention", []int{1, 1, 2, 2}[seed]
				}
				all = append(all, p)
			}
			t.Run(name, func(t *testing.T) {
				m := planted(t, c, all...)
				fossilize(t, m)
				want := logits(t, m)
				again, err := hf.Plain(m)
				require.NoError(t, err)
				if name == "llama" { // the other families are saved like the folders they came from
					dir := filepath.Join(t.TempDir(), "grown")
					require.NoError(t, hf.SavePretrained(t.Context(), dir, m))
					again, err = hf.Load(t.Context(), dir)
					require.NoError(t, err)
				}
				require.Equal(t, 2+len(c.Streams), again.Config.Layers)
				require.Less(t, distance(logits(t, again), want), 1e-5)
				require.Equal(t, want, logits(t, m), "the grown model has changed")
			})
		}
	}
}

// distance returns ‖a − b‖ / ‖b‖.
func distance(a, b []float32) float64 {
	var diff, norm float64
	for i := range b {
		d := float64(a[i]) - float64(b[i])
		diff, norm = diff+d*d, norm+float64(b[i])*float64(b[i])
	}
	return math.Sqrt(diff / norm)
}

// TestUnmergedIsRefused checks that a model isn't saved if other programs would compute different results
// with it.
func TestUnmergedIsRefused(t *testing.T) {
	c := llm.Config{Vocab: 40, Dim: 24, Layers: 1, Heads: 2, Seq: 16}.Default()
	c.Weights = c.WeightSites("q")
	m := planted(t, c, llm.Planted{Site: blueprints.Weight, Kind: "LoRA", Size: 2})
	require.NoError(t, m.Kasmina.Do(state.Command{Action: state.Move, To: state.Grafting}))

	require.NoError(t, hf.SavePretrained(t.Context(), filepath.Join(t.TempDir(), "isolated"), m))
	require.NoError(t, m.Kasmina.Do(state.Command{Action: state.SetAlpha, Alpha: 0.5}))
	err := hf.SavePretrained(t.Context(), filepath.Join(t.TempDir(), "blended"), m)
	require.ErrorContains(t, err, "seed 0 of site weight is Grafting")
}
