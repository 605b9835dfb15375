package parallel_test

import (
	"context"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/parallel"
	"github.com/kasmina-go/kasmina/optim"
)

// maskedLosses trains on sequences with different numbers of targets and returns the losses of the steps.
func maskedLosses(ctx context.Context, batch, accumulate int, engine func(*llm.Model, optim.Optimizer,
	llm.TrainConfig) (llm.Engine, error)) (losses []float64, err error) {
	c := llm.Config{Vocab: 64, Dim: 16, Layers: 1, Heads: 2, Seq: 12, Documents: true}.Default()
	m, err := llm.NewModel(c, tensor.Float32, 7)
	if err != nil {
		return nil, err
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
	if err != nil {
		return nil, err
	}

	o, err := adamW()
	if err != nil {
		return nil, err
	}

	tr, err := llm.NewTrainer(m, l, o, llm.TrainConfig{Steps: 6, Batch: batch, Accumulate: accumulate,
		Schedule: optim.Constant(o.LR()), Clip: 1, Engine: engine})
	if err != nil {
		return nil, err
	}
	defer tr.Close()

	tr.On(func(e llm.Event) error {
		if e.Kind == llm.StepEnd {
			losses = append(losses, e.Loss)
		}
		return nil
	})
	return losses, tr.Run(ctx)
}

// TestMaskedRanks checks that results of several ranks are bit-identical to those of one process, and
// that losses equal those of steps with a single batch, although batches differ in their number of
// targets.
func TestMaskedRanks(t *testing.T) {
	whole, err := maskedLosses(t.Context(), 4, 1, nil)
	require.NoError(t, err)
	divided, err := maskedLosses(t.Context(), 1, 4, nil)
	require.NoError(t, err)
	for i, l := range whole {
		if math.Abs(l-divided[i]) > 1e-6 {
			t.Errorf("step %d: %v in one batch, %v in four", i+1, l, divided[i])
		}
	}

	for _, err := range on(t, 2, comm.Options{}, func(rank int, team *parallel.Team) error {
		losses, err := maskedLosses(t.Context(), 1, 4, team.Engine)
		if err == nil {
			require.Equal(t, divided, losses, "rank %d of 2", rank)
		}
		return err
	}) {
		require.NoError(t, err)
	}
}
