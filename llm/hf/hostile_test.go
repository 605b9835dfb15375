package hf

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/internal/half"
	"github.com/kasmina-go/kasmina/internal/processor"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm"
)

// copyOf returns a copy of a model's folder for a test to corrupt.
func copyOf(t *testing.T, folder string) string {
	dir := t.TempDir()
	require.NoError(t, os.CopyFS(dir, os.DirFS(filepath.Join("testdata", folder))))
	return dir
}

// sharded returns the folder of a model in several files.
func sharded(t *testing.T) string {
	f := open(t, "llama2")
	m, err := f.Load(t.Context())
	require.NoError(t, err)
	dir := filepath.Join(t.TempDir(), "shards")
	require.NoError(t, SavePretrained(t.Context(), dir, m, Like(f), WithShardSize(8000)))
	return dir
}

// rewrite changes a JSON file.
func rewrite(t *testing.T, path string, change func(map[string]any)) {
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	var fields map[string]any
	require.NoError(t, json.Unmarshal(text, &fields))
	change(fields)
	text, err = json.Marshal(fields)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, text, 0o666))
}

// resave changes the tensors of a file of weights.
func resave(t *testing.T, path string, change func([]safetensors.Tensor) []safetensors.Tensor) {
	tensors, metadata, err := safetensors.Load(path)
	require.NoError(t, err)
	require.NoError(t, safetensors.Save(path, change(tensors), metadata))
}

// requireRefused checks that opening a folder returns an error that contains want, without using much CPU
// time.
func requireRefused(t *testing.T, dir, want string) {
	t.Helper()
	start := processor.Time(t)
	f, err := Open(dir)
	if err == nil {
		_, err = f.Load(t.Context())
		require.NoError(t, f.Close())
	}
	require.ErrorContains(t, err, want)
	require.Less(t, processor.Time(t)-start, time.Second)
}

// TestHostileFolders checks that the error names the problem.
func TestHostileFolders(t *testing.T) {
	requireRefused(t, filepath.Join(t.TempDir(), "none"), "no such file")
	requireRefused(t, t.TempDir(), "it has no config.json")
	const q = "model.layers.1.self_attn.q_proj.weight"
	weights := map[string]struct {
		change func([]safetensors.Tensor) []safetensors.Tensor
		want   string
	}{
		"missing tensor": {func(x []safetensors.Tensor) []safetensors.Tensor {
			return slices.DeleteFunc(x, func(x safetensors.Tensor) bool { return x.Name == q })
		}, "tensor " + q + " is missing"},
		"left over": {func(x []safetensors.Tensor) []safetensors.Tensor {
			more := x[0]
			more.Name = "model.layers.7.extra"
			return append(x, more)
		}, `tensor "model.layers.7.extra" does not belong to`},
		"wrong shape": {func(x []safetensors.Tensor) []safetensors.Tensor {
			for i := range x {
				if x[i].Name == q {
					x[i].Shape = []int{x[i].Shape[1] * 2, x[i].Shape[0] / 2}
				}
			}
			return x
		}, "tensor " + q + " has shape [32 8], but config.json implies [16 16]"},
		"wrong type": {func(x []safetensors.Tensor) []safetensors.Tensor {
			for i := range x {
				if x[i].Name == q {
					x[i].DType, x[i].Data = safetensors.I32, make([]int32, 256)
				}
			}
			return x
		}, "tensor " + q + " is of type I32"},
		"not finite": {func(x []safetensors.Tensor) []safetensors.Tensor {
			for i := range x {
				if x[i].Name == q {
					x[i].Data.([]float32)[17] /= 0
				}
			}
			return x
		}, "tensor " + q + ": " + llm.ErrDiverged.Error() + ": element 17"},
	}

	for name, c := range weights {
		t.Run(name, func(t *testing.T) {
			dir := copyOf(t, "llama2")
			resave(t, filepath.Join(dir, weightsName), c.change)
			requireRefused(t, dir, c.want)
		})
	}

	t.Run("no weights", func(t *testing.T) {
		dir := copyOf(t, "llama2")
		require.NoError(t, os.Rename(filepath.Join(dir, weightsName),
			filepath.Join(dir, "pytorch_model.bin")))
		requireRefused(t, dir, "only safetensors can be read")
	})

	t.Run("cut short", func(t *testing.T) {
		dir := copyOf(t, "llama2")
		require.NoError(t, os.Truncate(filepath.Join(dir, weightsName), 9000))
		requireRefused(t, dir, "cut short")
	})
	t.Run("another head", func(t *testing.T) {
		dir := copyOf(t, "llama2")
		rewrite(t, filepath.Join(dir, configName), func(f map[string]any) {
			f["tie_word_embeddings"] = true
		})
		requireRefused(t, dir, "tensor lm_head.weight differs")
	})
}

// TestHostileShards checks that an index must agree with its files.
func TestHostileShards(t *testing.T) {
	entry := func(f map[string]any) map[string]any { return f["weight_map"].(map[string]any) }
	for name, c := range map[string]struct {
		change func(t *testing.T, dir string, shards []string)
		want   string
	}{
		"missing shard": {func(t *testing.T, dir string, shards []string) {
			require.NoError(t, os.Remove(shards[1]))
		}, "the file " + "model-00002-of-"},
		"duplicate tensor": {func(t *testing.T, dir string, shards []string) {
			first, _, err := safetensors.Load(shards[0])
			require.NoError(t, err)
			resave(t, shards[1], func(x []safetensors.Tensor) []safetensors.Tensor {
				return append(x, first[0])
			})
		}, "is in model-00001-of-"},
		"file elsewhere": {func(t *testing.T, dir string, shards []string) {
			rewrite(t, filepath.Join(dir, indexName), func(f map[string]any) {
				entry(f)[embedName] = "../../etc/passwd"
			})
		}, "want one in the same folder"},
		"wrong file": {func(t *testing.T, dir string, shards []string) {
			rewrite(t, filepath.Join(dir, indexName), func(f map[string]any) {
				entry(f)[embedName] = filepath.Base(shards[1])
			})
		}, "tensor \"" + embedName + "\" is in model-00001-of-"},
		"not in the index": {func(t *testing.T, dir string, shards []string) {
			rewrite(t, filepath.Join(dir, indexName), func(f map[string]any) {
				delete(entry(f), embedName)
			})
		}, "is not in the index"},
		"in no file": {func(t *testing.T, dir string, shards []string) {
			rewrite(t, filepath.Join(dir, indexName), func(f map[string]any) {
				entry(f)["model.more"] = filepath.Base(shards[0])
			})
		}, `tensor "model.more" is not in`},
		"empty": {func(t *testing.T, dir string, shards []string) {
			require.NoError(t, os.WriteFile(filepath.Join(dir, indexName), []byte("{}"), 0o666))
		}, "weight_map is empty"},
		"both": {func(t *testing.T, dir string, shards []string) {
			require.NoError(t, os.Link(shards[0], filepath.Join(dir, weightsName)))
		}, "remove one"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := sharded(t)
			shards, err := filepath.Glob(filepath.Join(dir, "model-*.safetensors"))
			require.NoError(t, err)
			slices.Sort(shards)
			c.change(t, dir, shards)
			requireRefused(t, dir, c.want)
		})
	}
}

// TestHostileConfig checks that errors name fields of config.json that are unknown, missing or contradict
// the weights.
func TestHostileConfig(t *testing.T) {
	original, err := os.ReadFile(filepath.Join("testdata", "llama2", configName))
	require.NoError(t, err)
	var fields map[string]any
	require.NoError(t, json.Unmarshal(original, &fields))
	for text, want := range map[string]string{
		`{"rope_twist": 2}`: "rope_twist is 2: this " +
			"field is not supported",
		`{"model_type": "mamba"}`:           `model_type is "mamba", want one of gemma3_text`,
		`{"model_type": "gemma3"}`:          "only its text part",
		`{"architectures": ["LlamaModel"]}`: "architectures",
		`{"hidden_act": "relu"}`:            "hidden_act",
		`{"hidden_size": -1}`:               "hidden_size: it is -1",
		`{"hidden_size": 1e30}`:             "hidden_size: it is 1e+30",
		`{"hidden_size": null}`:             "hidden_size: it is missing",
		// encoding/json accepts a number in quotes as a json.Number.
		`{"hidden_size": "16"}`:          "tensor",
		`{"vocab_size": 2}`:              "vocab_size: it is 2",
		`{"vocab_size": 49}`:             "tensor model.embed_tokens.weight has shape",
		`{"num_hidden_layers": 3}`:       "tensor model.layers.2.input_layernorm.weight is missing",
		`{"num_hidden_layers": 1}`:       "does not belong to",
		`{"num_hidden_layers": 4000000}`: "num_hidden_layers: it is 4000000",
		`{"num_key_value_heads": 3}`:     "num_attention_heads: it is 4, want a multiple",
		`{"head_dim": 3}`: "head_dim: it " +
			"is 3, want an even number",
		`{"rms_norm_eps": -1}`:                                                   "rms_norm_eps",
		`{"dtype": "int8"}`:                                                      "dtype",
		`{"attention_dropout": 0.1}`:                                             "attention_dropout",
		`{"mlp_bias": true}`:                                                     "mlp_bias",
		`{"quantization_config": {"bits": 4}}`:                                   "quantization_config",
		`{"auto_map": {"AutoModel": "x.Y"}}`:                                     "auto_map",
		`{"rope_parameters": {"rope_theta": 0}}`:                                 "rope_theta",
		`{"rope_scaling": {"type": "dynamic", "factor": 2}}`:                     `"dynamic" is not supported`,
		`{"rope_scaling": {"type": "linear", "factor": 0.5}}`:                    "rope_scaling.factor",
		`{"rope_scaling": {"type": "linear", "factor": 2, "beta": 1}}`:           "rope_scaling.beta is 1: this field is not",
		`{"rope_scaling": {"rope_type": "llama3", "factor": 2}}`:                 "rope_scaling.high_freq_factor",
		`{"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 0.5}}`: "rope_scaling.beta_fast",
	} {
		t.Run(text, func(t *testing.T) {
			dir := copyOf(t, "llama2")
			all := maps.Clone(fields)
			require.NoError(t, json.Unmarshal([]byte(text), &all))
			written, err := json.Marshal(all)
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(filepath.Join(dir, configName), written, 0o666))
			if text == `{"hidden_size": "16"}` {
				_, err := Open(dir)
				require.NoError(t, err)
				return
			}
			requireRefused(t, dir, want)
		})
	}

	for text, want := range map[string]string{
		"": "invalid JSON", "[1]": "want a JSON object", "{": "invalid JSON", "{} {}": "",
		`{"a": 1, "a": 2}`:             `"a" occurs twice`,
		`{"a": {"b": 1, "b": 2}}`:      `"b" occurs twice`,
		strings.Repeat(`{"a":`, 1<<18): "nested deeper",
		strings.Repeat(" ", 5<<20):     "at most",
	} {
		dir := copyOf(t, "llama2")
		require.NoError(t, os.WriteFile(filepath.Join(dir, configName), []byte(text), 0o666))
		requireRefused(t, dir, want)
	}
}

// FuzzOpen varies the text files of a folder: config.json, generation_config.json and the index of
// weights in two files.
func FuzzOpen(f *testing.F) {
	dir := f.TempDir()
	folder, err := Open(filepath.Join("testdata", "llama2"))
	require.NoError(f, err)
	defer folder.Close()
	m, err := folder.Load(f.Context())
	require.NoError(f, err)
	shards := filepath.Join(dir, "shards")
	require.NoError(f, SavePretrained(f.Context(), shards, m, Like(folder), WithShardSize(16000)))
	index, err := os.ReadFile(filepath.Join(shards, indexName))
	require.NoError(f, err)
	for _, name := range folders {
		config, err := os.ReadFile(filepath.Join("testdata", name, configName))
		require.NoError(f, err)
		generation, err := os.ReadFile(filepath.Join("testdata", name, generationName))
		require.NoError(f, err)
		f.Add(config, generation, index)
	}

	f.Fuzz(func(t *testing.T, config, generation, index []byte) {
		for name, text := range map[string][]byte{configName: config, generationName: generation,
			indexName: index} {
			require.NoError(t, os.WriteFile(filepath.Join(shards, name), text, 0o666))
		}
		size := int64(0)
		entries, err := os.ReadDir(shards)
		require.NoError(t, err)
		for _, e := range entries {
			info, err := e.Info()
			require.NoError(t, err)
			size += info.Size()
		}
		bounded.Run(t, size, func() {
			folder, err := Open(shards)
			if err != nil {
				return
			}
			_, err = folder.Load(t.Context())
			require.NoError(t, errors.Join(err, folder.Close()))
		})
	})
}

// TestOldConfig checks that the config.json of older versions of transformers is read with the same
// meaning.
func TestOldConfig(t *testing.T) {
	dir := copyOf(t, "llama2")
	rewrite(t, filepath.Join(dir, configName), func(f map[string]any) {
		delete(f, "rope_parameters")
		delete(f, "head_dim")
		delete(f, "dtype")
		f["torch_dtype"], f["rope_theta"], f["rope_scaling"] = "float32", 10000.0, nil
		f["pretraining_tp"], f["_name_or_path"] = 1, "x"
	})

	f, err := Open(dir)
	require.NoError(t, err)
	defer f.Close()
	require.Equal(t, open(t, "llama2").Config, f.Config)
}

// TestGeneration checks that the fields of generation_config.json are read or rejected.
func TestGeneration(t *testing.T) {
	dir := copyOf(t, "llama2")
	path := filepath.Join(dir, generationName)
	require.NoError(t,
		os.WriteFile(path, []byte(`{"do_sample": true, "temperature": 0.6, "top_k": 20,
		"top_p": 0.9, "eos_token_id": [4, 5], "repetition_penalty": 1.05, "min_p": 0.1, "no_repeat_ngram_size": 3}`), 0o666))
	f, err := Open(dir)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.Equal(t, Generation{Begin: 1, Pad: 0, End: []int{4, 5}, Sample: true, Temperature: 0.6,
		TopK: 20, TopP: 0.9, MinP: 0.1, Repetition: 1.05,
		Ignored: []string{"no_repeat_ngram_size"}}, f.Generation)
	for text, want := range map[string]string{`{"eos_token_id": 48}`: "eos_token_id",
		`{"top_p": 2}`:              "top_p",
		`{"more": 1}`:               "more is 1: this field is not supported",
		`{"repetition_penalty": 0}`: "repetition_penalty", `{"min_p": 1.5}`: "min_p",
		`{"temperature": -1}`: "temperature"} {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o666))
		requireRefused(t, dir, want)
	}
}

// TestSamplingDefaults checks the sampling settings if fields are missing, null or 0, or occur only in
// config.json. The wanted values are those of GenerationConfig in transformers 5.24.
func TestSamplingDefaults(t *testing.T) {
	for _, c := range []struct {
		generation, config string
		want               Generation
	}{
		{`{"do_sample": true}`, `{}`, Generation{Sample: true, Temperature: 1, TopK: 50, TopP: 1, Repetition: 1}},
		{`{"do_sample": true, "top_k": null, "top_p": null, "temperature": null}`, `{}`,
			Generation{Sample: true, Temperature: 1, TopK: 50, TopP: 1, Repetition: 1}},
		{`{"do_sample": true, "top_k": 0, "top_p": 0}`, `{}`,
			Generation{Sample: true, Temperature: 1, Repetition: 1}},
		{`{"temperature": 0.5}`, `{"do_sample": true, "top_k": 7}`,
			Generation{Temperature: 0.5, TopK: 50, TopP: 1, Repetition: 1}},
		{"", `{"do_sample": true, "top_k": 7, "temperature": 0.5, "top_p": 0.25}`,
			Generation{Sample: true, Temperature: 0.5, TopK: 7, TopP: 0.25, Repetition: 1}},
		{"", `{}`, Generation{Temperature: 1, TopK: 50, TopP: 1, Repetition: 1}},
	} {
		dir := copyOf(t, "llama2")
		path := filepath.Join(dir, generationName)
		require.NoError(t, os.WriteFile(path, []byte(c.generation), 0o666))
		if c.generation == "" {
			require.NoError(t, os.Remove(path))
		}
		rewrite(t, filepath.Join(dir, configName), func(f map[string]any) {
			require.NoError(t, json.Unmarshal([]byte(c.config), &f))
		})

		f, err := Open(dir)
		require.NoError(t, err, c)
		defer f.Close()
		c.want.Begin, c.want.Pad, c.want.End = f.Generation.Begin, f.Generation.Pad, f.Generation.End
		require.Equal(t, c.want, f.Generation, c)

		// Saving the folder again preserves the settings.
		m, err := f.Load(t.Context())
		require.NoError(t, err)
		again := filepath.Join(t.TempDir(), "again")
		require.NoError(t, SavePretrained(t.Context(), again, m, Like(f)))
		g, err := Open(again)
		require.NoError(t, err)
		require.NoError(t, g.Close())
		require.Equal(t, f.Generation, g.Generation, c)
	}
}

// TestWiden checks the conversion of every 16-bit number at every position, and that non-finite
// numbers are found.
func TestWiden(t *testing.T) {
	for h := range 1 << 16 {
		for dtype, want := range map[safetensors.DType]float64{
			safetensors.F16:  half.Float16(h).Float64(),
			safetensors.BF16: float64(half.BFloat16(h).Float32())} {
			place := h % 7
			from, to := make([]byte, 14), make([]float32, 7)
			binary.LittleEndian.PutUint16(from[2*place:], uint16(h))
			require.Equal(t, 7, widen(to, from, dtype))
			require.Equal(t, math.IsNaN(want) || math.IsInf(want, 0), suspect(from, dtype),
				"%s %#x", dtype, h)
			if !math.IsNaN(want) && want != float64(to[place]) {
				require.Equal(t, want, float64(to[place]), "%s %#x", dtype, h)
			}
		}
	}

	for _, x := range []float32{0, -1, math.MaxFloat32, float32(math.Inf(-1)),
		float32(math.NaN())} {
		for _, all := range [][]float32{{x}, {1, x}, {x, 1, 1}} {
			raw, back := narrow(nil, all, safetensors.F32), make([]float32, len(all))
			require.Equal(t, notFinite(x), suspect(raw, safetensors.F32))
			require.Equal(t, len(all), widen(back, raw, safetensors.F32))
			require.Equal(t, raw, narrow(nil, back, safetensors.F32))
		}
	}
}

// TestLargeTensor checks that a tensor read by several goroutines equals the one in the file, and
// that the position of a non-finite number is reported.
func TestLargeTensor(t *testing.T) {
	const vocab, dim = 300_000, 64
	dir := copyOf(t, "llama2")
	rewrite(t, filepath.Join(dir, configName), func(f map[string]any) {
		f["vocab_size"], f["hidden_size"], f["head_dim"] = vocab, dim, 16
		f["num_hidden_layers"], f["tie_word_embeddings"] = 1, true
		f["num_attention_heads"], f["num_key_value_heads"], f["intermediate_size"] = 4, 4, 8
	})
	config, err := os.ReadFile(filepath.Join(dir, configName))
	require.NoError(t, err)
	traits, err := parseConfig(config)
	require.NoError(t, err)
	c, err := traits.config()
	require.NoError(t, err)
	var all []safetensors.Tensor
	for name, shape := range c.Parameters() {
		n := 1
		for _, d := range shape {
			n *= d
		}
		x := make([]float32, n)
		for i := range x {
			x[i] = float32(i%8191) - 77
		}
		all = append(all, safetensors.Tensor{Name: name, DType: safetensors.F32, Shape: shape,
			Data: x})
	}

	path := filepath.Join(dir, weightsName)
	save := func() { // without checksums, like files of other programs
		header, at := map[string]any{}, 0
		var data []byte
		for _, x := range all {
			data = narrow(data, x.Data.([]float32), safetensors.F32)
			header[x.Name] = map[string]any{"dtype": x.DType, "shape": x.Shape,
				"data_offsets": []int{at, len(data)}}
			at = len(data)
		}
		text, err := json.Marshal(header)
		require.NoError(t, err)
		file := binary.LittleEndian.AppendUint64(nil, uint64(len(text)))
		require.NoError(t, os.WriteFile(path, slices.Concat(file, text, data), 0o666))
	}

	save()
	f, err := Open(dir)
	require.NoError(t, err)
	require.Greater(t, f.weights.in[embedName].Bytes(embedName), int64(2*partBytes))
	require.False(t, f.weights.in[embedName].HasDigest())
	m, err := f.Load(t.Context())
	require.NoError(t, err)
	for i, p := range m.Params {
		require.True(t, slices.Equal(all[i].Data.([]float32), p.Value.Float32s()), p.Name)
	}

	require.NoError(t, f.Close())
	all[0].Data.([]float32)[vocab*dim-5] = float32(math.NaN())
	save()
	_, err = Load(t.Context(), dir)
	require.ErrorIs(t, err, llm.ErrDiverged)
	require.ErrorContains(t, err, fmt.Sprintf("element %d is NaN", vocab*dim-5))
}
