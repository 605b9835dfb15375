package hf

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/optim"
)

// adapterModels lists the adapters that testdata/adapters.py creates, and the models they belong to.
var adapterModels = map[string]string{"lora": "llama2", "rslora": "qwen2.5", "dora": "gemma3", "outer": "llama2",
	"outer-dora": "llama2", "tied": "gemma3"}

// loadAdapted returns a model with the adapters that PEFT has saved.
func loadAdapted(t *testing.T, name string, change func(*llm.Config)) (*Folder, *llm.Model) {
	t.Helper()
	f := open(t, adapterModels[name])
	base, err := f.Load(t.Context(), WithConfig(change))
	require.NoError(t, err)
	m, err := LoadAdapter(t.Context(), filepath.Join("testdata/adapters", name), base, f)
	require.NoError(t, err)
	return f, m
}

// TestAdapterLogits compares the logits of models with adapters with PEFT, both with the adapters next to
// the weights and merged into them.
func TestAdapterLogits(t *testing.T) {
	for name := range adapterModels {
		t.Run(name, func(t *testing.T) {
			_, m := loadAdapted(t, name, func(*llm.Config) {})
			g := readGolden(t, filepath.Join("adapters", name))
			require.Less(t, offLogits(t, g, &llm.Inference{Model: m}), 1e-5)

			merged, err := Plain(m)
			require.NoError(t, err)
			require.Less(t, offLogits(t, g, &llm.Inference{Model: merged}), 1e-5)

			// Merging an adapter of a tied embedding unties the output layer, in the files too.
			dir := filepath.Join(t.TempDir(), "merged")
			require.NoError(t, SavePretrained(t.Context(), dir, m, Like(open(t, adapterModels[name])), WithDtype("float32")))
			saved, err := Load(t.Context(), dir)
			require.NoError(t, err)
			require.Less(t, offLogits(t, g, &llm.Inference{Model: saved}), 1e-5)

			base, err := open(t, adapterModels[name]).Load(t.Context())
			require.NoError(t, err)
			require.Greater(t, offLogits(t, g, &llm.Inference{Model: base}), 1e-2, "the adapters change little")
		})
	}
}

// TestAdapterLosses compares the losses of 100 AdamW steps with PEFT's: in one batch, in two batches with
// accumulated gradients, and with both sequences packed into one.
func TestAdapterLosses(t *testing.T) { testAdapterLosses(t, nil) }

func testAdapterLosses(t *testing.T, engine func(*llm.Model, optim.Optimizer, llm.TrainConfig) (llm.Engine, error)) {
	for name := range adapterModels {
		g := readGolden(t, filepath.Join("adapters", name))
		n := len(g.ids[0])
		for how, s := range randtest.Sample(t, 1, map[string]struct{ batch, accumulate, seq int }{
			"batch": {2, 1, n - 1}, "accumulated": {1, 2, n - 1}, "packed": {1, 1, 2 * n}}) {
			t.Run(name+" "+how, func(t *testing.T) {
				_, m := loadAdapted(t, name, func(c *llm.Config) { c.Seq, c.Documents = s.seq, true })
				l, err := chatdata.NewLoader(maskedSequences(t, name, g), data.LoaderConfig{Batch: s.batch, Seq: s.seq})
				require.NoError(t, err)
				o, err := optim.NewAdamW(optim.WithBetas(0.9, 0.99), optim.WithWeightDecay(0))
				require.NoError(t, err)
				tr, err := llm.NewTrainer(m, l, o, llm.TrainConfig{Steps: len(g.losses), Batch: s.batch,
					Accumulate: s.accumulate, Schedule: optim.Constant(5e-4), Engine: engine})
				require.NoError(t, err)
				defer tr.Close()

				var losses []float32
				tr.On(func(e llm.Event) error {
					if e.Kind == llm.StepEnd {
						losses = append(losses, float32(e.Loss))
					}
					return nil
				})
				require.NoError(t, tr.Run(t.Context()))
				require.InDeltaSlice(t, g.losses, losses, 1e-4)
				require.Less(t, losses[len(losses)-1], losses[0]-0.1)
			})
		}
	}
}

// maskedSequences returns the sequences that PEFT was trained on.
func maskedSequences(t *testing.T, name string, g golden) (all []chatdata.Sequence) {
	t.Helper()
	tensors, _, err := safetensors.Load(filepath.Join("testdata/adapters", name, "golden.safetensors"))
	require.NoError(t, err)
	for _, x := range tensors {
		if x.Name != "learn" {
			continue
		}
		for i, ids := range g.ids {
			s := chatdata.Sequence{IDs: ids}
			for _, learn := range x.Data.([]int64)[i*len(ids):][:len(ids)] {
				s.Learn = append(s.Learn, learn != 0)
			}
			all = append(all, s)
		}
	}
	require.Len(t, all, 2)
	return all
}

// TestAdapterInAndOut checks that saving loaded adapters reproduces the tensors and the settings that
// PEFT has saved, together with the tokenizer.
func TestAdapterInAndOut(t *testing.T) {
	for name := range adapterModels {
		t.Run(name, func(t *testing.T) {
			f, m := loadAdapted(t, name, func(*llm.Config) {})
			dir := filepath.Join(t.TempDir(), "out")
			require.NoError(t, CheckSaveAdapter(m.Config, "base", Like(f), WithTokenizer("testdata/tiny")))
			require.NoError(t, SaveAdapter(t.Context(), dir, "base", m, Like(f), WithTokenizer("testdata/tiny")))
			require.FileExists(t, filepath.Join(dir, "tokenizer.json"))
			require.FileExists(t, filepath.Join(dir, "chat_template.jinja"))
			require.True(t, IsAdapter(dir))
			base, err := AdapterBase(dir)
			require.NoError(t, err)
			require.Equal(t, "base", base)

			original := filepath.Join("testdata/adapters", name)
			want, _, err := safetensors.Load(filepath.Join(original, adapterWeightsName))
			require.NoError(t, err)
			have, _, err := safetensors.Load(filepath.Join(dir, adapterWeightsName))
			require.NoError(t, err)
			want = slices.DeleteFunc(want, func(x safetensors.Tensor) bool {
				return strings.HasSuffix(x.Name, ".base_layer.weight") // as they are in the model
			})
			require.ElementsMatch(t, want, have)

			settings := func(dir string) (all map[string]any) {
				text, err := os.ReadFile(filepath.Join(dir, adapterConfigName))
				require.NoError(t, err)
				require.NoError(t, json.Unmarshal(text, &all))
				return all
			}
			theirs, ours := settings(original), settings(dir)
			for _, key := range []string{"r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "peft_type",
				"task_type", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights"} {
				require.Equal(t, theirs[key], ours[key], key)
			}

			again, err := LoadAdapter(t.Context(), dir, wholeModel(t, f), f)
			require.NoError(t, err)
			require.Equal(t, m.Config, again.Config)
		})
	}
}

// wholeModel loads the model of a folder.
func wholeModel(t *testing.T, f *Folder) *llm.Model {
	t.Helper()
	m, err := f.Load(t.Context())
	require.NoError(t, err)
	return m
}

func TestAdapterErrors(t *testing.T) {
	f := open(t, "llama2")
	base := wholeModel(t, f)
	config, err := os.ReadFile("testdata/adapters/lora/adapter_config.json")
	require.NoError(t, err)
	weights, err := os.ReadFile("testdata/adapters/lora/adapter_model.safetensors")
	require.NoError(t, err)
	for want, change := range map[string]func(config string) string{
		"peft_type is \"IA3\"": func(c string) string { return strings.Replace(c, `"LORA"`, `"IA3"`, 1) },
		"bias is \"all\"":      func(c string) string { return strings.Replace(c, `"none"`, `"all"`, 1) },
		"modules_to_save is [\"lm_head\"]": func(c string) string {
			return strings.Replace(c, `"modules_to_save": null`, `"modules_to_save": ["lm_head"]`, 1)
		},
		"lora_bias is true": func(c string) string { return strings.Replace(c, `"lora_bias": false`, `"lora_bias": true`, 1) },
		"r is 0":            func(c string) string { return strings.Replace(c, `"r": 4`, `"r": 0`, 1) },
		"no tensor base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": func(c string) string {
			return strings.Replace(c, `"use_dora": false`, `"use_dora": true`, 1)
		},
		"unexpected end": func(c string) string { return c[:len(c)/2] },
	} {
		dir := t.TempDir()
		changed := change(string(config))
		require.NotEqual(t, string(config), changed, want)
		require.NoError(t, os.WriteFile(filepath.Join(dir, adapterConfigName), []byte(changed), 0o666))
		require.NoError(t, os.WriteFile(filepath.Join(dir, adapterWeightsName), weights, 0o666))
		_, err := LoadAdapter(t.Context(), dir, base, f)
		require.ErrorContains(t, err, want)
	}

	_, err = LoadAdapter(t.Context(), t.TempDir(), base, f)
	require.ErrorContains(t, err, "it has no adapter_config.json")

	other := open(t, "qwen3")
	_, err = LoadAdapter(t.Context(), "testdata/adapters/dora", wholeModel(t, other), other)
	require.Error(t, err)

	gpt2 := open(t, "gpt2")
	_, err = LoadAdapter(t.Context(), "testdata/adapters/lora", wholeModel(t, gpt2), gpt2)
	require.ErrorContains(t, err, "save the merged model instead")

	require.ErrorContains(t, SaveAdapter(t.Context(), t.TempDir(), "", base), "the model has no adapters")
}
