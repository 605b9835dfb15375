package cudaops_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	engine "github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// families have the traits of published models.
var families = map[string]llm.Traits{
	"Llama 3.1": {Scaling: op.RoPEScaling{Factor: 8, LowFreq: 1, HighFreq: 4, Original: 16}},
	"Qwen2": {QKVBias: true, Scaling: op.RoPEScaling{Factor: 4, BetaFast: 32,
		BetaSlow: 1, Original: 16},
		Blocks: []llm.Block{{}, {Window: 5}}},
	"Qwen3":   {QKNorm: true},
	"Mistral": {Blocks: []llm.Block{{Window: 7}}},
	"SmolLM3": {Blocks: []llm.Block{{}, {NoRoPE: true}}},
	"Gemma 3": {QKNorm: true, NormPlusOne: true, PostNorms: true, GELU: true,
		EmbedScale: 4, AttentionScale: 0.3,
		Blocks: []llm.Block{{Window: 5, Base: 100}, {}}},
}

// TestFamilies wants models with the traits of each family to have the losses of a CPU, in steps
// whose gradients the next ones show, with documents and blocks that are computed again too. No op
// is computed on the host.
func TestFamilies(t *testing.T) {
	for name, traits := range families {
		for variant := range 3 {
			t.Run(fmt.Sprint(name, variant), func(t *testing.T) {
				c := llm.Config{Vocab: 19, Dim: 12, Layers: 2, Heads: 4, KVHeads: 2,
					HeadDim: 4, FF: 10, Seq: 12,
					Documents: variant == 1, Traits: traits}.Default()
				device, fakes := cudaops.OpenFake(t)
				want := familyLosses(t, c, variant == 2, llm.CPUEngine())
				got := familyLosses(t, c, variant == 2, engine.Engine(device, cudaops.Float32,
					fakes, cudaops.WithStrict()))
				require.InEpsilonSlice(t, want, got, 1e-4)
				require.Less(t, want[len(want)-1], want[0]-0.1)
			})
		}
	}
}

// familyLosses are those of some steps on one batch.
func familyLosses(t *testing.T, c llm.Config, recompute bool,
	build func(*llm.Model, optim.Optimizer, llm.TrainConfig) (llm.Engine, error)) (all []float64) {
	m, err := llm.NewModel(c, tensor.Float32, 4)
	require.NoError(t, err)
	o, err := optim.NewAdamW(optim.WithLR(0.01))
	require.NoError(t, err)
	const sequences = 2
	e, err := build(m, o, llm.TrainConfig{Batch: sequences, Recompute: recompute})
	require.NoError(t, err)
	defer e.Close()
	r := rand.New(rand.NewPCG(5, 5))
	var b data.Batch
	for i := range sequences * c.Seq {
		b.Inputs, b.Targets = append(b.Inputs, r.IntN(c.Vocab)), append(b.Targets, r.IntN(c.Vocab))
		b.Starts = append(b.Starts, i%c.Seq/8*8)
		b.Count++
	}
	for range 8 {
		loss, err := e.Gradients(b)
		require.NoError(t, err)
		_, err = e.Update()
		require.NoError(t, err)
		all = append(all, loss)
	}
	return all
}
