package hf

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/sampler"
)

//go:generate python3 testdata/greedy.py

// greedyPositions is the number of positions of the models in TestGreedy.
const greedyPositions = 576

var everyWindow = flag.Bool("every-window", false, "TestGreedy also recomputes the window for each token, which takes a minute")

// TestGreedy checks that 512 greedy tokens of every family equal those of transformers: with cached keys and
// values, in a batch, and recomputed from the whole text.
func TestGreedy(t *testing.T) {
	text, err := os.ReadFile("testdata/greedy.json")
	require.NoError(t, err)
	var all map[string]struct{ Prompt, Tokens []int }
	require.NoError(t, json.Unmarshal(text, &all))
	require.Len(t, all, len(folders))

	for _, name := range randtest.SampleOf(t, 5, folders) {
		t.Run(name, func(t *testing.T) {
			want := all[name]
			require.Len(t, want.Tokens, 512)
			m := loadLonger(t, name)

			b, err := llm.NewBatcher(m, llm.BatcherOptions{Lookup: 8})
			require.NoError(t, err)
			defer b.Close()
			i := &llm.Inference{Model: m}
			defer i.Close()
			for kind, g := range map[string]*llm.Generator{"batcher": b.Generator(), "decoder": llm.GeneratorOf(m.Config, i.Decoder)} {
				s, err := sampler.New(sampler.Config{})
				require.NoError(t, err)
				var got []int
				for token, err := range g.Generate(t.Context(), want.Prompt, len(want.Tokens), s) {
					require.NoError(t, err)
					got = append(got, token)
				}
				require.Equal(t, want.Tokens, got, kind)
			}

			// One pass over the whole text has the logits of every window, because the model is causal.
			whole := append(slices.Clone(want.Prompt), want.Tokens...)
			logits, err := llm.AllLogits(t.Context(), m, whole)
			require.NoError(t, err)
			rows := logits.Float32s()
			for n, token := range want.Tokens {
				row := rows[(len(want.Prompt)+n-1)*m.Config.Vocab:][:m.Config.Vocab]
				require.Equal(t, token, slices.Index(row, slices.Max(row)), "token %d", n)
			}

			if !*everyWindow {
				return
			}
			for n, token := range want.Tokens {
				logits, err := llm.AllLogits(t.Context(), m, whole[:len(want.Prompt)+n])
				require.NoError(t, err)
				rows := logits.Float32s()
				row := rows[len(rows)-m.Config.Vocab:]
				require.Equal(t, token, slices.Index(row, slices.Max(row)), "window of token %d", n)
			}
		})
	}
}

// loadLonger loads a model with room for greedyPositions positions. The position vectors of GPT-2 are repeated.
func loadLonger(t *testing.T, name string) *llm.Model {
	dir := copyOf(t, name)
	rewrite(t, filepath.Join(dir, "config.json"), func(c map[string]any) {
		for _, key := range []string{"max_position_embeddings", "n_positions", "n_ctx"} {
			if _, ok := c[key]; ok {
				c[key] = greedyPositions
			}
		}
	})
	if name == "gpt2" {
		resave(t, filepath.Join(dir, "model.safetensors"), func(all []safetensors.Tensor) []safetensors.Tensor {
			for i, x := range all {
				if filepath.Ext(x.Name) == ".weight" && slices.Contains([]string{"transformer.wpe.weight", "wpe.weight"}, x.Name) {
					values := x.Data.([]float32)
					all[i].Data = slices.Repeat(values, greedyPositions/x.Shape[0])
					all[i].Shape = []int{greedyPositions, x.Shape[1]}
				}
			}
			return all
		})
	}
	m, err := Load(t.Context(), dir)
	require.NoError(t, err)
	require.Equal(t, greedyPositions, m.Config.Seq)
	return m
}
