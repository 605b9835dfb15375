package llm

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/state"
)

// TestEpochEnd wants callbacks to be told, once an epoch and before the step's end, how all seeds
// are and what has happened to them since, and of what happens behind the last epoch when the run
// ends.
func TestEpochEnd(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 7}) // in epochs of 3
	var events []Event
	var listened []state.Event
	_, err := tr.Model.Kasmina.Listen(func(e state.Event) { listened = append(listened, e) })
	require.NoError(t, err)
	tr.On(func(e Event) error {
		switch e.Kind {
		case StepEnd, RunEnd:
			require.Nil(t, e.Reports)
			require.Nil(t, e.SeedEvents)
			events = append(events, e)
		case EpochEnd:
			require.Equal(t, tr.Model.Kasmina.Report(), e.Reports)
			events = append(events, e)
		}
		if e.Kind == StepEnd && e.Step == 4 {
			return tr.Model.Kasmina.Lattice(1).Transition(1, state.Grafting)
		}
		if e.Kind == StepEnd && e.Step == 7 {
			return tr.Model.Germinate(0, 0, state.GerminationRequest{Slot: 4})
		}
		return nil
	})
	require.NoError(t, tr.Run(t.Context()))

	var kinds []EventKind
	var ends []Event
	var happened []state.Event
	for _, e := range events {
		kinds = append(kinds, e.Kind)
		if e.Kind == EpochEnd {
			ends, happened = append(ends, e), append(happened, e.SeedEvents...)
		}
	}
	require.Equal(t, []EventKind{StepEnd, StepEnd, EpochEnd, StepEnd, StepEnd, StepEnd, EpochEnd,
		StepEnd, StepEnd, EpochEnd, RunEnd}, kinds)
	require.Equal(t, []int{3, 6, 7}, []int{ends[0].Step, ends[1].Step, ends[2].Step})
	require.ElementsMatch(t, listened, happened)
	changed := func(layer, seed int, from, to state.Stage, epoch int) state.Event {
		return state.Event{Kind: state.StageChanged, Layer: layer, Seed: seed, From: from, To: to,
			Epoch: epoch}
	}
	require.Contains(t, ends[1].SeedEvents, changed(1, 1, state.Training, state.Grafting, 1))
	require.Equal(t, []state.Event{changed(0, 0, state.Dormant, state.Germinated, 2)},
		ends[2].SeedEvents)
	for i, r := range ends[1].Reports {
		require.Equal(t, 2, r.Epoch)
		for _, s := range r.Seeds {
			require.NotZero(t, s.Health, "layer %d, seed %d", i, s.Seed)
		}
	}
}

// TestNoEpochEnd wants nothing to be told of seeds where a model has none.
func TestNoEpochEnd(t *testing.T) {
	tr := smallTrainer(t, Config{Vocab: 8, Dim: 8, Layers: 1, Heads: 1, Seq: 2}.Default())
	tr.Config.Epoch = 1
	tr.On(func(e Event) error {
		require.NotEqual(t, EpochEnd, e.Kind)
		return nil
	})
	require.NoError(t, tr.Run(t.Context()))
}
