package llm

import (
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// TestZeroValues wants what nobody has made to say who makes it, and nothing to panic.
func TestZeroValues(t *testing.T) {
	second := func(_ any, err error) error { return err }
	var m Model
	for name, err := range map[string]error{
		"NewGenerator makes one": second(collect(new(Generator).Generate(t.Context(), []int{1}, 1,
			nil))),
		"needs a Graph and a Machine":  second(Runner{}.Run(data.Batch{})),
		"Runner needs a Graph":         second(Runner{}.Next(t.Context(), []int{1})),
		"an Inference needs a Model":   second(new(Inference).Loss(data.Batch{})),
		"which NewModel and LoadModel": second((&Inference{Model: &m}).Decoder()),
		"NewModel and LoadModel make":  second(NewGenerator(&m)),
	} {
		require.ErrorContains(t, err, name)
	}
	_, err := NewTrainer(&m, new(data.Loader), nil, TrainConfig{})
	require.ErrorContains(t, err, "the model is nil or its zero value")
	for _, m := range []*Model{nil, &m} {
		_, graph := m.Graph(ForLoss, 1)
		_, read := m.ReadBlueprint("file", 0, 0)
		for name, err := range map[string]error{
			"saving the model": m.Save("file"), "Graph": graph, "Germinate": m.Germinate(0, 0, state.GerminationRequest{}),
			"SaveBlueprint": m.SaveBlueprint("file", 0, 0), "ReadBlueprint: the": m.LoadBlueprint("file", 0, 0), "ReadBlueprint": read,
		} {
			require.ErrorContains(t, err, name)
			require.ErrorIs(t, err, errZeroModel)
		}
		require.Nil(t, m.Param(normName))
		require.Zero(t, m.NumParams()+m.NumSeeds())
		require.Zero(t, m.Dtype())
	}
	var tr Trainer
	_, _, evaluate := tr.Evaluate(nil)
	for name, err := range map[string]error{
		"Run": tr.Run(t.Context()), "saving the run": tr.Save("file"), "Resume": tr.Resume(t.Context(), "file"), "evaluation": evaluate,
		"Grow": tr.Grow(Growth{}), "Checkpoint": Checkpoint(&tr, "file", 0)(Event{Kind: RunStart}),
		"Evaluate": Evaluate(&tr, nil, 0)(Event{Kind: RunStart}),
	} {
		require.ErrorContains(t, err, name)
		require.ErrorIs(t, err, errZeroTrainer)
	}
	require.ErrorContains(t, SampleText(&tr, tokenizer.Bytes{}, "x", 1, sampler.Config{}, "", 0)(Event{Kind: RunStart}), "SampleText")
	require.ErrorContains(t, Monitor(&tr, io.Discard, 0)(Event{Kind: RunStart}), "Monitor")
	require.ErrorContains(t, ProfileStep(&tr, io.Discard, "file", 1)(Event{Kind: RunStart}), "ProfileStep")
	require.NoError(t, tr.Close())
	require.Zero(t, tr.Step())
	require.NoError(t, new(Generator).Close())
	require.NoError(t, new(Inference).Close())
}

// TestNoEngine wants a factory that returns no engine and no error to be told of.
func TestNoEngine(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1})
	for _, none := range []Engine{nil, (*host)(nil)} {
		c := tr.Config
		c.Engine = func(*Model, optim.Optimizer, TrainConfig) (Engine, error) { return none, nil }
		_, err := NewTrainer(tr.Model, tr.Loader, tr.Optimizer, c)
		require.ErrorContains(t, err, "neither an engine nor an error")
	}
}
