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
// steps. If newEngine is nil, it trains on the CPU.
func tuneMasked(t *testing.T, batch, accumulate int, newEngine func(*llm.Model, optim.Optimizer,
	llm.TrainConfig) (llm.Engine, error)) (losses []float64) {
	t.Helper()
	c := llm.Config{Vocab: 64, Dim: 16, Layers: 2, Heads: 2, KVHeads: 1, Seq: 12, Documents: true}.Default()
	m, err := llm.NewModel(c, tensor.Float32, 7)
	require.NoError(t, err)

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
		Schedule: optim.Constant(0.01), Clip: 1, Engine: newEngine})
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
	want := tuneMasked(t, 4, 1, nil)
	for _, batch := range []int{4, 2, 1} {
		got := tuneMasked(t, batch, 4/batch, engine.Engine(cudaops.OpenFake(t), cudaops.Float32))
		require.InDeltaSlice(t, want, got, 1e-5, "batches of %d", batch)
	}
}
