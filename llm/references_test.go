package llm

import (
	"math"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// preferring returns pairs that share the first tokens of their answers' sequences.
func preferring(n int) (all []chatdata.Sequence) {
	for i, s := range masked(n) {
		other := chatdata.Sequence{File: s.File, Line: s.Line}
		for j, id := range s.IDs {
			if s.Learn[j] {
				id = (id + 3) % 16
			}
			other.IDs, other.Learn = append(other.IDs, id), append(other.Learn, s.Learn[j])
		}
		if i%2 == 0 {
			other.IDs, other.Learn = append(other.IDs, 5), append(other.Learn, true)
		}
		all = append(all, s, other)
	}
	return all
}

// newPreferenceTrainer returns a trainer on preference pairs, and the held-out pairs as an evaluation.
func newPreferenceTrainer(t *testing.T, m *Model, batch, accumulate int) (*Trainer, *data.Evaluation) {
	t.Helper()
	learned, err := chatdata.NewPairs(preferring(20), batch, m.Config.Seq)
	require.NoError(t, err)
	held, err := chatdata.NewPairs(preferring(24)[40:], batch, m.Config.Seq)
	require.NoError(t, err)
	evaluation, err := held.Evaluation()
	require.NoError(t, err)

	o, err := optim.NewAdamW(optim.WithLR(0.005))
	require.NoError(t, err)
	tr, err := NewTrainer(m, learned.Loader(5), o, TrainConfig{Steps: 16, Batch: batch, Accumulate: accumulate,
		Schedule: optim.Constant(0.005), Clip: 1,
		Preference: &op.Preference{Kind: op.PreferenceSigmoid, Beta: 0.5}})
	require.NoError(t, err)
	t.Cleanup(func() { tr.Close() })
	require.NoError(t, tr.Use(NewReferences(learned, held)))
	return tr, evaluation
}

// preferenceModels returns functions that make models to tune with pairs.
func preferenceModels(t *testing.T) map[string]func() *Model {
	c := maskedConfig()
	c.Seq = 48
	all := func() *Model {
		m, err := NewModel(c, tensor.Float32, 7)
		require.NoError(t, err)
		return m
	}
	return map[string]func() *Model{"all weights": all, "adapters": func() *Model {
		targets, err := c.MatchLayers(AllLinear)
		require.NoError(t, err)
		m, err := Adapt(all(), LoRA{Rank: 4, Alpha: 8, Magnitude: true, Dropout: 0.1, Targets: targets}, 3)
		require.NoError(t, err)
		return m
	}}
}

// TestPreferencePairs checks that a model learns to prefer the chosen answers, that the loss of the first
// step is log 2 because the model is still its own reference, and that the loss of a step does not depend on
// how the step is divided into batches.
func TestPreferencePairs(t *testing.T) {
	for name, m := range preferenceModels(t) {
		t.Run(name, func(t *testing.T) {
			var first []float64
			for _, s := range [][2]int{{4, 1}, {2, 2}, {1, 4}} {
				tr, held := newPreferenceTrainer(t, m(), s[0], s[1])
				tr.On(Evaluate(tr, held, 8))
				var events []Event
				tr.On(func(e Event) error {
					if e.Kind == StepEnd || e.Kind == EvalEnd {
						events = append(events, e)
					}
					return nil
				})
				losses := lossesOf(t, tr)
				last := tr.Last()
				require.Less(t, losses[len(losses)-1], 0.6)
				require.Greater(t, last.Preferences.Margin(), 0.2)
				require.Greater(t, last.Preferences.Accuracy(), 0.8)
				require.Equal(t, 4, last.ValPreferences.Pairs)
				require.NotZero(t, last.ValPreferences.Margin())
				require.InDelta(t, last.ValLoss, math.Log(2), 0.5)
				require.True(t, math.IsNaN(last.ValBPB))

				if name == "all weights" { // dropout depends on the batches
					require.InDelta(t, math.Log(2), losses[0], 1e-6)
					require.InDelta(t, 0, events[0].Preferences.Margin(), 1e-9)
					if first == nil {
						first = losses
					}
					require.InDeltaSlice(t, first, losses, 1e-5)
				}
			}
		})
	}
}

// TestPreferencesResume checks that a resumed run continues bit for bit, with the references of its first
// step, and that a run without them is rejected.
func TestPreferencesResume(t *testing.T) {
	for name, m := range preferenceModels(t) {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "run.safetensors")
			whole, held := newPreferenceTrainer(t, m(), 2, 2)
			whole.On(Evaluate(whole, held, 6), func(e Event) error {
				if e.Kind == StepEnd && e.Step == 7 {
					return whole.Save(path)
				}
				return nil
			})
			want := lossesOf(t, whole)

			resumed, held := newPreferenceTrainer(t, m(), 2, 2)
			require.NoError(t, resumed.Resume(t.Context(), path))
			require.Equal(t, 4, resumed.Last().ValPreferences.Pairs)
			require.Positive(t, resumed.Last().Preferences.Pairs)
			resumed.On(Evaluate(resumed, held, 6))
			require.Equal(t, want[7:], lossesOf(t, resumed))
			require.Equal(t, copies(whole.Model), copies(resumed.Model))
			a, b := whole.Last(), resumed.Last()
			require.Equal(t, a.Preferences, b.Preferences)
			require.Equal(t, a.ValPreferences, b.ValPreferences)
			require.Equal(t, a.ValLoss, b.ValLoss)

			// Other settings, and no references.
			other, _ := newPreferenceTrainer(t, m(), 2, 2)
			other.Config.Preference.Beta = 0.4
			require.ErrorContains(t, other.Resume(t.Context(), path), "sigmoid, β 0.5")
			other.parts = nil
			require.ErrorContains(t, other.Resume(t.Context(), path), "references")
			require.NoError(t, other.Resume(t.Context(), path, WithNewSettings(nil)))
			require.ErrorContains(t, other.Run(t.Context()), "add llm.NewReferences to the trainer")
		})
	}
}

func TestPreferenceErrors(t *testing.T) {
	m := preferenceModels(t)["all weights"]()
	tr, _ := newPreferenceTrainer(t, m, 2, 2)
	for want, change := range map[string]func(*TrainConfig){
		"the loss of preference pairs is \"dpo\"": func(c *TrainConfig) { c.Preference = &op.Preference{Kind: "dpo", Beta: 1} },
		"β is 0":                     func(c *TrainConfig) { c.Preference = &op.Preference{Kind: "sigmoid"} },
		"the loss hinge has none":    func(c *TrainConfig) { c.Preference = &op.Preference{Kind: "hinge", Beta: 1, Smoothing: 0.1} },
		"less than 0.5":              func(c *TrainConfig) { c.Preference = &op.Preference{Kind: "sigmoid", Beta: 1, Smoothing: 0.5} },
		"the loader has pairs: true": func(c *TrainConfig) { c.Preference = nil },
	} {
		config := tr.Config
		change(&config)
		_, err := NewTrainer(m, tr.Loader, tr.Optimizer, config)
		require.ErrorContains(t, err, want)
	}
}
