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
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// maskedLosses trains on sequences with different numbers of targets and returns the loss of every step.
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

// TestMaskedRanks checks that two ranks produce bit-identical losses to a single process. It also checks
// that accumulating four batches gives the same losses, up to rounding, as one batch four times the size,
// even though the batches differ in their number of targets.
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

// preferred records the results of training on preference pairs.
type preferred struct {
	Losses     []float64
	Figures    []op.PreferenceFigures
	References []float64
}

// trainPairs trains a small model on preference pairs and returns the results.
func trainPairs(ctx context.Context, engine func(*llm.Model, optim.Optimizer,
	llm.TrainConfig) (llm.Engine, error)) (p preferred, err error) {
	c := llm.Config{Vocab: 64, Dim: 16, Layers: 1, Heads: 2, Seq: 24, Documents: true}.Default()
	m, err := llm.NewModel(c, tensor.Float32, 7)
	if err != nil {
		return p, err
	}

	var sequences []chatdata.Sequence
	for i := range 30 {
		s := chatdata.Sequence{Line: i/2 + 1}
		for j := range 4 + i%7 {
			s.IDs, s.Learn = append(s.IDs, (7*i+3*j)%64), append(s.Learn, j > i%3)
		}
		sequences = append(sequences, s)
	}

	pairs, err := chatdata.NewPairs(sequences, 1, c.Seq)
	if err != nil {
		return p, err
	}

	o, err := adamW()
	if err != nil {
		return p, err
	}

	tr, err := llm.NewTrainer(m, pairs.Loader(3), o, llm.TrainConfig{Steps: 6, Batch: 1, Accumulate: 4,
		Schedule: optim.Constant(o.LR()), Clip: 1, Engine: engine,
		Preference: &op.Preference{Kind: op.PreferenceSigmoid, Beta: 0.3}})
	if err != nil {
		return p, err
	}
	defer tr.Close()
	if err := tr.Use(llm.NewReferences(pairs)); err != nil {
		return p, err
	}

	tr.On(func(e llm.Event) error {
		if e.Kind == llm.StepEnd {
			p.Losses, p.Figures = append(p.Losses, e.Loss), append(p.Figures, e.Preferences)
		}
		return nil
	})
	err = tr.Run(ctx)
	p.References = pairs.References()
	return p, err
}

// TestPreferenceRanks checks that training on several ranks produces losses, rewards and references that
// are bit-identical to a single process, although each rank computes only a share of the batches.
func TestPreferenceRanks(t *testing.T) {
	alone, err := trainPairs(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, alone.Losses, 6)
	require.Positive(t, alone.Figures[5].Pairs)
	for _, ranks := range []int{2, 3} {
		for _, err := range on(t, ranks, comm.Options{}, func(rank int, team *parallel.Team) error {
			together, err := trainPairs(t.Context(), team.Engine)
			if err == nil {
				require.Equal(t, alone, together, "rank %d of %d", rank, ranks)
			}
			return err
		}) {
			require.NoError(t, err)
		}
	}
}
