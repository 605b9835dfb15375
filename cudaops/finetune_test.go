package cudaops_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/data"
	engine "github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/optim"
)

// tuneMasked trains on sequences with different numbers of learned tokens, and returns the losses of the
// steps. If newEngine is nil, it trains on the CPU. The model gets the adapter unless that is zero.
func tuneMasked(t *testing.T, batch, accumulate int, adapter llm.LoRA, tuned []string, newEngine func(*llm.Model, optim.Optimizer,
	llm.TrainConfig) (llm.Engine, error)) (losses []float64) {
	t.Helper()
	c := llm.Config{Vocab: 64, Dim: 16, Layers: 2, Heads: 2, KVHeads: 1, Seq: 12, Documents: true}.Default()
	m, err := llm.NewModel(c, tensor.Float32, 7)
	require.NoError(t, err)
	if !adapter.IsZero() {
		m, err = llm.Adapt(m, adapter, 3)
		require.NoError(t, err)
	}

	var sequences []chatdata.Sequence
	for i := range 20 {
		s := chatdata.Sequence{Line: i + 1}
		for j := range 4 + i%7 {
			s.IDs, s.Learn = append(s.IDs, (7*i+3*j)%64), append(s.Learn, j > i%3)
		}
		sequences = append(sequences, s)
	}

	l, err := chatdata.NewLoader(sequences, data.LoaderConfig{Batch: batch, Seq: c.Seq, Seed: 3})
	require.NoError(t, err)
	o, err := optim.NewAdamW(optim.WithLR(0.01))
	require.NoError(t, err)
	tr, err := llm.NewTrainer(m, l, o, llm.TrainConfig{Steps: 6, Batch: batch, Accumulate: accumulate,
		Schedule: optim.Constant(0.01), Clip: 1, Engine: newEngine, Tuned: tuned})
	require.NoError(t, err)
	defer tr.Close()

	tr.On(func(e llm.Event) error {
		if e.Kind == llm.StepEnd {
			losses = append(losses, e.Loss)
		}
		return nil
	})
	require.NoError(t, tr.Run(t.Context()))
	return losses
}

// TestMaskedStepsOnFake checks that a device has the losses of the CPU on batches with different
// numbers of targets.
func TestMaskedStepsOnFake(t *testing.T) {
	want := tuneMasked(t, 4, 1, llm.LoRA{}, nil, nil)
	for _, batch := range []int{4, 2, 1} {
		got := tuneMasked(t, batch, 4/batch, llm.LoRA{}, nil,
			engine.Engine(cudaops.OpenFake(t), cudaops.Float32))
		require.InDeltaSlice(t, want, got, 1e-5, "batches of %d", batch)
	}
}

// TestTuningOnFake checks that a device tunes adapters, or some of the parameters, with the losses of
// the CPU.
func TestTuningOnFake(t *testing.T) {
	c := llm.Config{Vocab: 64, Dim: 16, Layers: 2, Heads: 2, KVHeads: 1, Seq: 12}.Default()
	all, err := c.MatchLayers(llm.AllLinear)
	require.NoError(t, err)
	some, err := c.MatchLayers("v_proj", "up_proj")
	require.NoError(t, err)
	last, err := c.LastBlocks(1)
	require.NoError(t, err)
	for name, s := range map[string]struct {
		adapter llm.LoRA
		tuned   []string
	}{
		"LoRA":    {adapter: llm.LoRA{Rank: 4, Alpha: 8, Targets: all}},
		"rsLoRA":  {adapter: llm.LoRA{Rank: 4, Alpha: 8, RankStabilized: true, Targets: all}},
		"DoRA":    {adapter: llm.LoRA{Rank: 4, Alpha: 4, Magnitude: true, Targets: all}},
		"dropout": {adapter: llm.LoRA{Rank: 4, Alpha: 8, Dropout: 0.2, Targets: all}},
		"DoRA with dropout on some layers": {adapter: llm.LoRA{Rank: 4, Alpha: 8, Magnitude: true,
			Dropout: 0.2, Targets: some}},
		"the last block":            {tuned: last},
		"values and the embeddings": {tuned: []string{"*.v_proj.weight", "model.embed_tokens.weight"}},
	} {
		t.Run(name, func(t *testing.T) {
			want := tuneMasked(t, 2, 2, s.adapter, s.tuned, nil)
			got := tuneMasked(t, 2, 2, s.adapter, s.tuned,
				engine.Engine(cudaops.OpenFake(t), cudaops.Float32))
			require.InDeltaSlice(t, want, got, 1e-5)
			require.Less(t, want[5], want[0])
		})
	}
}
