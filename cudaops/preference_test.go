package cudaops_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/runtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/chatdata"
	engine "github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// preferred records the losses of steps and evaluations on preference pairs, and the figures of the pairs.
type preferred struct {
	losses, valLosses   []float64
	figures, valFigures []op.PreferenceFigures
}

// near checks that r equals want up to rounding.
func (r preferred) near(t *testing.T, want preferred, msg ...any) {
	t.Helper()
	require.InDeltaSlice(t, want.losses, r.losses, 1e-5, msg...)
	require.InDeltaSlice(t, want.valLosses, r.valLosses, 1e-5, msg...)
	got, expected := append(r.figures, r.valFigures...), append(want.figures, want.valFigures...)
	require.Len(t, got, len(expected), msg...)
	for i, f := range got {
		require.Equal(t, expected[i].Pairs, f.Pairs, msg...)
		require.InDelta(t, expected[i].Chosen, f.Chosen, 1e-4, msg...)
		require.InDelta(t, expected[i].Rejected, f.Rejected, 1e-4, msg...)
		if i > 0 { // before the first update, the rewards are 0 but for rounding
			require.Equal(t, expected[i].Right, f.Right, msg...)
		}
	}
}

// trainPairs trains on preference pairs with an engine, which is the CPU's if newEngine is nil, and evaluates the model
// after every other step.
func trainPairs(t *testing.T, batch, accumulate int, p op.Preference, newEngine func(*llm.Model, optim.Optimizer,
	llm.TrainConfig) (llm.Engine, error)) (r preferred) {
	c := llm.Config{Vocab: 64, Dim: 16, Layers: 1, Heads: 2, Seq: 24, Documents: true}.Default()
	m := tuning{}.model(t, c)
	var sequences []chatdata.Sequence
	for i := range 32 {
		s := chatdata.Sequence{Line: i/2 + 1}
		for j := range 4 + i%7 {
			s.IDs, s.Learn = append(s.IDs, (7*i+3*j)%64), append(s.Learn, j > i%3)
		}
		sequences = append(sequences, s)
	}

	pairs, err := chatdata.NewPairs(sequences, batch, c.Seq)
	require.NoError(t, err)
	o, err := optim.NewAdamW(optim.WithLR(0.01))
	require.NoError(t, err)
	tr, err := llm.NewTrainer(m, pairs.Loader(3), o, llm.TrainConfig{Steps: 6, Batch: batch, Accumulate: accumulate,
		Schedule: optim.Constant(0.01), Clip: 1, Engine: newEngine, Preference: &p})
	require.NoError(t, err)
	defer tr.Close()
	require.NoError(t, tr.Use(llm.NewReferences(pairs)))

	tr.On(func(e llm.Event) error {
		switch e.Kind {
		case llm.StepEnd:
			r.losses, r.figures = append(r.losses, e.Loss), append(r.figures, e.Preferences)
			if e.Step%2 > 0 {
				return nil
			}
			held, err := pairs.Evaluation()
			if err != nil {
				return err
			}
			return llm.Evaluate(tr, held, 1)(e)
		case llm.EvalEnd:
			r.valLosses, r.valFigures = append(r.valLosses, e.ValLoss), append(r.valFigures, e.ValPreferences)
		}
		return nil
	})
	require.NoError(t, tr.Run(t.Context()))
	return r
}

// TestPairsOnFake checks that the losses and figures of preference pairs on a device equal the CPU's, with several
// batches in a step, and with several ranks. The loss has kernels, so WithStrict accepts it.
func TestPairsOnFake(t *testing.T) {
	for _, p := range []op.Preference{{Kind: op.PreferenceSigmoid, Beta: 0.3}, {Kind: op.PreferenceIPO, Beta: 0.3}} {
		want := trainPairs(t, 4, 1, p, nil)
		require.Positive(t, want.figures[5].Pairs)
		require.Positive(t, want.valFigures[2].Pairs)
		for _, batch := range []int{4, 1} {
			alone := trainPairs(t, batch, 4/batch, p, nil)
			got := trainPairs(t, batch, 4/batch, p, engine.Engine(cudaops.OpenFake(t), cudaops.Float32,
				cudaops.WithStrict()))
			got.near(t, alone, "batches of %d", batch)
		}

		alone := trainPairs(t, 1, 4, p, nil)
		for _, err := range fakeRanks(t, 2, nil, func(rank int, build runtest.Build) error {
			got := trainPairs(t, 1, 4, p, build)
			if rank == 0 {
				got.near(t, alone, "two ranks")
			}
			return nil
		}) {
			require.NoError(t, err)
		}
	}
}

// TestAnswersOfPairs checks that a device rejects invalid answers with the same errors as the CPU.
func TestAnswersOfPairs(t *testing.T) {
	device := cudaops.OpenFake(t)
	for _, answers := range [][]int{{0, 1, -1, 0}, {-1, -1, -1, -2}, {0, 1, 8, 1}} {
		var errs []error
		for _, onDevice := range []bool{false, true} {
			g := gorgonia.NewGraph()
			x := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(4), gorgonia.WithInit(gorgonia.Gaussian(0, 1)))
			ref := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(4), gorgonia.WithInit(gorgonia.Zeroes()))
			ids := gorgonia.NewVector(g, tensor.Int, gorgonia.WithShape(4), gorgonia.WithValue(
				tensor.New(tensor.WithShape(4), tensor.WithBacking(answers))))
			loss, err := op.PreferenceLoss(x, ref, ids, op.Preference{Kind: op.PreferenceHinge, Beta: 1})
			require.NoError(t, err)

			var m llm.Machine
			if onDevice {
				m, err = cudaops.NewMachine(device, g, cudaops.WithStrict(), cudaops.WithOutputs(loss))
			} else {
				m, err = cpuops.NewMachine(g, cpuops.WithOutputs(loss))
			}
			require.NoError(t, err)
			errs = append(errs, m.Run(t.Context()))
			require.NoError(t, m.Close())
		}

		if answers[0] == 0 && answers[2] < 0 {
			require.NoError(t, errs[0])
			require.NoError(t, errs[1])
			continue
		}
		require.ErrorContains(t, errs[1], "PreferenceLoss")
		require.ErrorContains(t, errs[0], "PreferenceLoss")
		want := "there are no pairs"
		if answers[2] == 8 {
			want = "answer 8 of row 2 belongs to pair 4, want less than the 4 rows"
		}
		require.ErrorContains(t, errs[0], want)
		require.ErrorContains(t, errs[1], want)
	}
}
