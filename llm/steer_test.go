package llm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/state"
)

// never is a controller that commands nothing.
type never struct{}

func (never) Decide([]state.Report) []state.Command { return nil }

// TestSteer wants commands from beside a run to take effect behind a step, also between the ends of
// epochs, and callbacks to hear of them; and a run that follows the record to have the same bits.
func TestSteer(t *testing.T) {
	text, err := data.NewEvaluation(texttest.Words(9, 120), tokenizer.Bytes{}, 2, tiny().Seq)
	require.NoError(t, err)
	plant := state.Command{Action: state.Germinate, Layer: 0, Seed: 0, Why: "a person asks",
		Request: state.GerminationRequest{Slot: 1, Kind: blueprints.Residual}}
	train := state.Command{Action: state.Move, Layer: 0, Seed: 0, To: state.Training}
	const steps = 25
	var record bytes.Buffer
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: steps})
	require.NoError(t, tr.Grow(Growth{Controller: never{}, Validation: text, Record: &record}))
	var told []string
	var answers []<-chan error
	tr.On(func(e Event) error {
		switch {
		case e.Kind == EpochEnd && e.Step%tr.Config.Epoch != 0:
			for _, s := range e.SeedEvents {
				told = append(told, s.To.String()+": "+s.Reason)
			}
		case e.Kind == StepEnd && e.Step == 12:
			// which is not dormant then
			answers = append(answers, tr.Steer(plant, train), tr.Steer(plant))
		case e.Kind == StepEnd && e.Step == 17: // behind whose next step an epoch ends
			answers = append(answers,
				tr.Steer(state.Command{Action: state.Move, To: state.Grafting}))
		}
		return nil
	})
	require.NoError(t, tr.Run(t.Context()))
	require.NoError(t, <-answers[0])
	require.Equal(t, []string{"Germinated: a person asks", "Training: "}, told)
	require.ErrorIs(t, <-answers[1], state.ErrTransition)
	require.NoError(t, <-answers[2])
	require.ErrorIs(t, <-tr.Steer(plant), state.ErrClosed)

	read, err := ReadRecord(bytes.NewReader(record.Bytes()))
	require.NoError(t, err)
	again := newTrainer(t, trainerOptions{config: tiny(), steps: steps})
	require.NoError(t, again.Grow(Growth{Validation: text, Replay: read}))
	var refused error
	again.On(func(e Event) error {
		if e.Kind == StepEnd && e.Step == 5 {
			answer := again.Steer(plant)
			again.On(func(e Event) error {
				if e.Kind == RunEnd {
					refused = <-answer
				}
				return nil
			})
		}
		return nil
	})
	require.NoError(t, again.Run(t.Context()))
	require.ErrorContains(t, refused, "follows a record")
	require.Equal(t, tr.Last().Loss, again.Last().Loss)
	for i, p := range tr.Model.Params {
		require.Equal(t, p.Value.Data(), again.Model.Params[i].Value.Data(), p.Name)
	}
}

// TestNote wants what somebody has asked for told behind the step, once, and nothing while no run
// goes on.
func TestNote(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 4})
	tr.Note("too early")
	var told []string
	tr.On(func(e Event) error {
		switch {
		case e.Kind == StepEnd && e.Step == 2:
			tr.Note("somebody asks")
		case e.Kind == Noted:
			told = append(told, fmt.Sprint(e.Step, " ", e.Text))
		}
		return nil
	})
	require.NoError(t, tr.Run(t.Context()))
	require.Equal(t, []string{"3 somebody asks"}, told)
}

// TestStopAndSave wants a run that is asked to save and to stop to do so behind its step.
func TestStopAndSave(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 20})
	require.ErrorIs(t, tr.SaveSoon(), state.ErrClosed)
	tr.Stop("nothing goes on")
	var unsaved error
	tr.On(func(e Event) error {
		if e.Kind == StepEnd && e.Step == 1 {
			unsaved = tr.SaveSoon()
			tr.Stop("to add a checkpoint")
		}
		return nil
	})
	require.ErrorContains(t, tr.Run(t.Context()), "to add a checkpoint")
	require.ErrorContains(t, unsaved, "no Checkpoint")
	tr.On(Checkpoint(tr, filepath.Join(t.TempDir(), "m.safetensors"), 0))
	var saved []int
	tr.On(func(e Event) error {
		switch {
		case e.Kind == Saved:
			saved = append(saved, e.Step)
		case e.Kind == StepEnd && e.Step == 4:
			return tr.SaveSoon()
		case e.Kind == StepEnd && e.Step == 7:
			tr.Stop("enough")
		}
		return nil
	})
	err := tr.Run(t.Context())
	require.True(t, errors.Is(err, context.Canceled))
	require.ErrorContains(t, err, "enough")
	require.Equal(t, []int{5, 7}, saved)
	require.NoError(t, tr.Run(t.Context()))
	require.Equal(t, []int{5, 7, 20}, saved)
}
