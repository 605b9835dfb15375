package llm

import (
	"math"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

// oldText returns a text with answers that never occur in the training text of newTuningTrainer.
func oldText(t *testing.T, c Config) *data.Evaluation {
	t.Helper()
	all := masked(12)
	for _, s := range all {
		for i := range s.IDs {
			if s.Learn[i] {
				s.IDs[i] += 100
			}
		}
	}

	l, err := chatdata.NewLoader(all, data.LoaderConfig{Batch: 4, Seq: c.Seq})
	require.NoError(t, err)
	b, err := l.Next()
	require.NoError(t, err)
	e, err := data.NewPackedEvaluation(b, 100, 2, c.Seq)
	require.NoError(t, err)
	return e
}

// retentionModels returns functions that make models to tune.
func retentionModels(t *testing.T) map[string]func() *Trainer {
	make := func(tuned ...string) *Trainer {
		base, err := NewModel(maskedConfig(), tensor.Float32, 7)
		require.NoError(t, err)
		if len(tuned) > 0 {
			return newTuningTrainer(t, base, false, tuned...)
		}
		m, err := Adapt(base, adapters(t, base.Config)["DoRA"], 3)
		require.NoError(t, err)
		return newTuningTrainer(t, m, false)
	}
	return map[string]func() *Trainer{
		"adapters":    func() *Trainer { return make() },
		"all weights": func() *Trainer { return make("*") },
	}
}

// useRetention adds a forgetting budget, checked every two steps.
func useRetention(t *testing.T, tr *Trainer, budget float64) {
	t.Helper()
	r, err := NewRetention(RetentionConfig{Text: oldText(t, tr.Model.Config), Budget: budget, Every: 2})
	require.NoError(t, err)
	require.NoError(t, tr.Use(r))
}

// TestRetention checks that a run with a forgetting budget ends within the budget although the same run
// without a budget does not, that the run reports its rollbacks, that the model still learns, and that a
// resumed run continues bit for bit before and after a rollback.
func TestRetention(t *testing.T) {
	for name, start := range retentionModels(t) {
		t.Run(name, func(t *testing.T) {
			free := start()
			text := oldText(t, free.Model.Config)
			before, _, err := free.Evaluate(text)
			require.NoError(t, err)
			first := lossesOf(t, free)
			after, _, err := free.Evaluate(text)
			require.NoError(t, err)
			rise := after - before
			require.Greater(t, rise, 0.01)

			whole, budget := start(), rise/4
			useRetention(t, whole, budget)
			var notes []string
			var rolledBack []int
			paths := map[int]string{}
			whole.On(func(e Event) error {
				switch {
				case e.Kind == Noted:
					notes = append(notes, e.Text)
				case e.Kind == StepEnd && e.Step%2 == 0:
					if n := len(rolledBack); e.Retention.Rollbacks > n {
						rolledBack = append(rolledBack, e.Step)
					}
					paths[e.Step] = filepath.Join(t.TempDir(), "run.safetensors")
					return whole.Save(paths[e.Step])
				}
				return nil
			})
			require.NoError(t, whole.Run(t.Context()))

			f := whole.Last().Retention
			now, _, err := whole.Evaluate(text)
			require.NoError(t, err)
			require.InDelta(t, before, f.Before, 1e-9)
			require.InDelta(t, now, f.Loss, 1e-9)
			require.LessOrEqual(t, now-before, budget)
			require.Positive(t, f.Rollbacks)
			require.Len(t, notes, f.Rollbacks)
			require.Contains(t, notes[0], "exceeds the budget")
			require.Less(t, f.RateFactor, 1.0)
			require.Less(t, f.Step, whole.Step())
			require.Less(t, whole.Last().Loss, first[0])

			steps := []int{2, rolledBack[0]}
			for _, at := range steps {
				resumed := start()
				useRetention(t, resumed, budget)
				require.NoError(t, resumed.Resume(t.Context(), paths[at]))
				require.NoError(t, resumed.Run(t.Context()))
				require.Equal(t, copies(whole.Model), copies(resumed.Model), at)
				require.Equal(t, f, resumed.Last().Retention)
				require.Equal(t, whole.Step(), resumed.Step())
			}

			other := start()
			useRetention(t, other, 2*budget)
			require.ErrorIs(t, other.Resume(t.Context(), paths[2]), ErrSettings)
		})
	}
}

// TestRetentionEnds checks that a run ends early once the learning rate has been halved often enough,
// that the final model is the one from before the first violation, and that a Resume also ends at once.
func TestRetentionEnds(t *testing.T) {
	start := retentionModels(t)["adapters"]
	tr := start()
	useRetention(t, tr, 1e-12)
	before := copies(tr.Model)
	path := filepath.Join(t.TempDir(), "run.safetensors")
	require.NoError(t, tr.Run(t.Context()))
	require.NoError(t, tr.Save(path))
	require.Equal(t, 10, tr.Step())
	require.True(t, tr.Last().Last)
	require.Equal(t, 5, tr.Last().Retention.Rollbacks)
	require.Equal(t, before, copies(tr.Model))

	resumed := start()
	useRetention(t, resumed, 1e-12)
	require.NoError(t, resumed.Resume(t.Context(), path))
	var kinds []EventKind
	resumed.On(func(e Event) error {
		kinds = append(kinds, e.Kind)
		return nil
	})
	require.NoError(t, resumed.Run(t.Context()))
	require.Equal(t, []EventKind{RunStart, Complete, RunEnd}, kinds)
}

// TestRetentionOfGrowingModel checks that a run with a forgetting budget refuses models whose structure can
// change between two checks. The last state within the budget would not fit the grown model.
func TestRetentionOfGrowingModel(t *testing.T) {
	plain := Config{Vocab: 256, Dim: 16, Layers: 2, Heads: 2, Seq: 16}.Default()
	for name, site := range map[string]func(*Config){
		"depth":   func(c *Config) { c.Depth = 1 },
		"weights": func(c *Config) { c.Weights = c.WeightSites("q") },
		"stream":  func(c *Config) { c.Streams = []int{0} },
	} {
		t.Run(name, func(t *testing.T) {
			c := plain
			site(&c)
			tr := newTrainer(t, trainerOptions{config: c, steps: 2})
			text, err := data.NewEvaluation([]byte(strings.Repeat("\xf1\xe2\xd3", 20)), tokenizer.Bytes{}, 2, c.Seq)
			require.NoError(t, err)
			r, err := NewRetention(RetentionConfig{Text: text, Budget: 1, Every: 1})
			require.NoError(t, err)
			require.NoError(t, tr.Use(r))
			require.ErrorContains(t, tr.Run(t.Context()), "does not apply to a model that can grow")
			require.Zero(t, tr.Step())
		})
	}
}

// TestRetentionErrors checks the errors for invalid arguments.
func TestRetentionErrors(t *testing.T) {
	text := oldText(t, maskedConfig())
	for _, c := range []RetentionConfig{{Budget: 1}, {Text: text}, {Text: text, Budget: math.NaN()},
		{Text: text, Budget: math.Inf(1)}, {Text: text, Budget: 1, Every: -1}} {
		_, err := NewRetention(c)
		require.ErrorContains(t, err, "llm: NewRetention: RetentionConfig.")
	}

	tr, _ := newPreferenceTrainer(t, preferenceModels(t)["adapters"](), 2, 2)
	c := tr.Model.Config
	r, err := NewRetention(RetentionConfig{Text: oldText(t, c), Budget: 1})
	require.NoError(t, err)
	require.NoError(t, tr.Use(r))
	require.ErrorContains(t, tr.Run(t.Context()), "does not apply to preference pairs")
	require.Zero(t, tr.Step())
}
