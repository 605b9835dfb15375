package hf

import (
	"encoding/json"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/chatdata"
	tokenizers "github.com/kasmina-go/kasmina/llm/tokenizer/hf"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// preferencesGolden is the file that testdata/preferences.py writes.
type preferencesGolden struct {
	Pairs  []json.RawMessage `json:"pairs"`
	Tokens []struct {
		Chosen       []int `json:"chosen"`
		Rejected     []int `json:"rejected"`
		ChosenMask   []int `json:"chosen_mask"`
		RejectedMask []int `json:"rejected_mask"`
	} `json:"tokens"`
	Runs map[string]struct {
		Loss       op.PreferenceKind `json:"loss"`
		Beta       float64           `json:"beta"`
		Smoothing  float64           `json:"smoothing"`
		Losses     []float64         `json:"losses"`
		Margins    []float64         `json:"margins"`
		Accuracies []float64         `json:"accuracies"`
	} `json:"runs"`
}

// preferencePairs reads the golden file and encodes its pairs. The tokens and masks must be TRL's.
func preferencePairs(t *testing.T, f *Folder) (g preferencesGolden, all []chatdata.Sequence) {
	t.Helper()
	text, err := os.ReadFile("testdata/preferences/golden.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &g))

	tok, err := tokenizers.Load("testdata/tiny")
	require.NoError(t, err)
	e := &chatdata.Encoder{Tokenizer: tok, End: f.Generation.End, Now: time.Unix(0, 0)}
	var lines []string
	for _, p := range g.Pairs {
		lines = append(lines, string(p))
	}
	for x, err := range chatdata.Read(strings.NewReader(strings.Join(lines, "\n")), "pairs") {
		require.NoError(t, err)
		pair, err := e.Encode(x)
		require.NoError(t, err)
		all = append(all, pair...)
	}

	require.Len(t, all, 2*len(g.Tokens))
	mask := func(learn []bool) (all []int) {
		for _, l := range learn {
			n := 0
			if l {
				n = 1
			}
			all = append(all, n)
		}
		return all
	}
	for i, want := range g.Tokens {
		require.Equal(t, want.Chosen, all[2*i].IDs)
		require.Equal(t, want.Rejected, all[2*i+1].IDs)
		require.Equal(t, want.ChosenMask, mask(all[2*i].Learn))
		require.Equal(t, want.RejectedMask, mask(all[2*i+1].Learn))
	}
	return g, all
}

// TestPreferences compares the losses, the reward margins and the accuracies of 30 AdamW steps with those
// of TRL, with all pairs in one batch and divided into batches with different numbers of pairs.
func TestPreferences(t *testing.T) { testPreferences(t, nil, 1e-12) }

// testPreferences trains with an engine. Before the first update, the margins must be within the tolerance of 0.
func testPreferences(t *testing.T, engine func(*llm.Model, optim.Optimizer, llm.TrainConfig) (llm.Engine, error),
	tolerance float64) {
	f := open(t, "tiny")
	g, sequences := preferencePairs(t, f)
	longest := 0
	for _, n := range chatdata.PairLengths(sequences) {
		longest = max(longest, n)
	}

	for name, want := range randtest.Sample(t, 2, g.Runs) {
		for _, batches := range []int{1, 0} {
			t.Run(name+" "+strconv.Itoa(batches), func(t *testing.T) {
				seq := longest
				base, err := f.Load(t.Context(), WithConfig(func(c *llm.Config) { c.Seq, c.Documents = seq, true }))
				require.NoError(t, err)
				m, rate := base, 1e-4
				if name == "lora" || name == "robust" {
					rate = 1e-3
					m, err = LoadAdapter(t.Context(), "testdata/preferences/adapter", base, f)
					require.NoError(t, err)
				}

				probe, err := chatdata.NewPairs(sequences, 1, seq)
				require.NoError(t, err)
				batch, accumulate := probe.Loader(0).Rows(), 1
				if batches == 0 {
					batch, accumulate = accumulate, batch
				}
				pairs, err := chatdata.NewPairs(sequences, batch, seq)
				require.NoError(t, err)

				o, err := optim.NewAdamW(optim.WithBetas(0.9, 0.99), optim.WithWeightDecay(0))
				require.NoError(t, err)
				tr, err := llm.NewTrainer(m, pairs.Loader(3), o, llm.TrainConfig{Steps: len(want.Losses), Batch: batch,
					Accumulate: accumulate, Schedule: optim.Constant(rate), Engine: engine,
					Preference: &op.Preference{Kind: want.Loss, Beta: want.Beta, Smoothing: want.Smoothing}})
				require.NoError(t, err)
				defer tr.Close()
				require.NoError(t, tr.Use(llm.NewReferences(pairs)))

				var losses, margins, accuracies []float64
				tr.On(func(e llm.Event) error {
					if e.Kind == llm.StepEnd {
						losses = append(losses, e.Loss)
						margins = append(margins, e.Preferences.Margin())
						accuracies = append(accuracies, e.Preferences.Accuracy())
					}
					return nil
				})
				require.NoError(t, tr.Run(t.Context()))
				require.InDeltaSlice(t, want.Losses, losses, 1e-4)
				require.InDeltaSlice(t, want.Margins, margins, 1e-3)
				require.InDeltaSlice(t, want.Accuracies[1:], accuracies[1:], 1e-6)
				require.InDelta(t, 0, margins[0], tolerance)
			})
		}
	}
}
