package gguf

import (
	"encoding/binary"
	"encoding/json"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
)

// TestOpen checks that Open reads what Save wrote, for each family and type: the configuration, the weights, the
// tokenizer, the tokens that end a text, and the chat template.
func TestOpen(t *testing.T) {
	for _, dir := range []string{"tiny", "tiny-gpt2", "tiny-olmo2", "scaled"} {
		for _, name := range []string{"f32", "f16", "bf16", "q8_0"} {
			t.Run(dir+"/"+name, func(t *testing.T) {
				kind, err := ParseType(name)
				require.NoError(t, err)
				folder := filepath.Join("../testdata", dir)
				if dir == "scaled" {
					folder = scaled(t)
				}
				f, m := load(t, folder)
				path := filepath.Join(t.TempDir(), "m.gguf")
				require.NoError(t, Save(t.Context(), path, f, m, kind, nil))
				require.True(t, Is(path))
				got, err := Open(path)
				require.NoError(t, err)
				defer got.Close()

				require.Equal(t, f.Config, got.Config)
				for _, id := range f.Generation.End {
					require.Contains(t, got.Generation.End, id)
				}
				checkTexts(t, f, got)
				checkWeights(t, path, m, got)
				checkTypes(t, got, name)
			})
		}
	}
}

// scaled returns the folder of a model with the rotary scaling of Llama 3.1 and a context so short that one factor is
// interpolated.
func scaled(t *testing.T) string {
	dir := t.TempDir()
	require.NoError(t, os.CopyFS(dir, os.DirFS(tiny)))
	path := filepath.Join(dir, "config.json")
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	var config map[string]any
	require.NoError(t, json.Unmarshal(text, &config))
	delete(config, "rope_parameters")
	config["rope_theta"] = 10000.0
	config["rope_scaling"] = map[string]any{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
		"high_freq_factor": 4.0, "original_max_position_embeddings": 20}
	text, err = json.Marshal(config)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, text, 0o666))
	return dir
}

// checkTexts compares the tokenizers and the chat templates of two folders.
func checkTexts(t *testing.T, want, got *hf.Folder) {
	a, err := want.Tokenizer()
	require.NoError(t, err)
	b, err := got.Tokenizer()
	require.NoError(t, err)
	require.Equal(t, a.VocabSize(), b.VocabSize())
	for _, text := range []string{"Permission is hereby granted, free of charge\n\n  to 12345 x", "<|begin_of_text|>a<|im_end|>",
		"naïve 字 \xff", ""} {
		require.Equal(t, a.EncodeWhole([]byte(text)), b.EncodeWhole([]byte(text)), text)
		ids := a.EncodeOrdinary([]byte(text))
		require.Equal(t, ids, b.EncodeOrdinary([]byte(text)), text)
		x, err := a.Decode(ids)
		require.NoError(t, err)
		y, err := b.Decode(ids)
		require.NoError(t, err)
		require.Equal(t, x, y)
	}

	template, err := want.Template()
	other, otherErr := got.Template()
	if err != nil {
		require.ErrorIs(t, otherErr, chat.ErrNoTemplate)
		return
	}
	require.NoError(t, otherErr)
	messages := []chat.Message{{Role: "user", Content: "Hello"}}
	x, err := template.Render(messages, chat.Options{AddGenerationPrompt: true})
	require.NoError(t, err)
	y, err := other.Render(messages, chat.Options{AddGenerationPrompt: true})
	require.NoError(t, err)
	require.Equal(t, x, y)
}

// checkWeights checks that an opened file has the model's weights, rounded to the type of the file.
func checkWeights(t *testing.T, path string, m *llm.Model, got *hf.Folder) {
	_, tensors := read(t, path)
	back, err := got.Load(t.Context())
	require.NoError(t, err)
	require.Len(t, back.Params, len(m.Params))
	a := architectures[got.Family]
	for _, p := range m.Params {
		want := p.Value.Float32s()
		have := back.Param(p.Name).Float32s()
		to, err := a.nameOf(p.Name)
		require.NoError(t, err)
		if stored, ok := tensors[to]; ok && stored.dtype == F32 {
			require.Equal(t, want, have, p.Name)
			continue
		}
		require.InDeltaSlice(t, want, have, 1e-2*float64(largest(want)), p.Name)
		require.NotEqual(t, make([]float32, len(have)), have)
	}
}

// checkTypes checks the names of types, and that matrices in bf16 and q8_0 are the same after another conversion
// to their type.
func checkTypes(t *testing.T, f *hf.Folder, name string) {
	for _, x := range f.Tensors() {
		if len(x.Shape) == 2 && x.Name != positions {
			require.Equal(t, strings.ToUpper(name), x.Type)
		}
	}
	kind, ok := map[string]cpuops.WeightType{"bf16": cpuops.BFloat16, "q8_0": cpuops.Q8}[name]
	if !ok {
		return
	}

	tokens := func(k cpuops.WeightType) (ids []int) {
		m, err := llm.LoadCompact(t.Context(), k, f.Config, f)
		require.NoError(t, err)
		g := m.Generator()
		defer g.Close()
		s, err := sampler.New(sampler.Config{Vocab: f.Config.Vocab})
		require.NoError(t, err)
		for id, err := range g.Generate(t.Context(), []int{1, 2, 3}, 40, s) {
			require.NoError(t, err)
			ids = append(ids, id)
		}
		return ids
	}
	require.Equal(t, tokens(cpuops.Float32), tokens(kind))
}

// TestWidenQ80 checks that quantizing numbers of type q8_0 again changes no bit.
func TestWidenQ80(t *testing.T) {
	row := make([]float32, 8*blockSize)
	for i := range row {
		row[i] = float32(math.Sin(float64(i*i))) * float32(math.Pow(10, float64(i/blockSize-4)))
	}
	first, fits := appendQ80(nil, row)
	require.True(t, fits)
	wide := widenQ80(nil, first)
	for i := range row {
		row[i] = math.Float32frombits(binary.LittleEndian.Uint32(wide[4*i:]))
	}
	second, fits := appendQ80(nil, row)
	require.True(t, fits)
	require.Equal(t, first, second)
}

// TestOpenConverts checks that a folder saved from a GGUF file is the folder that the file was saved from.
func TestOpenConverts(t *testing.T) {
	f, m := load(t, "../testdata/tiny-gpt2")
	path := filepath.Join(t.TempDir(), "m.gguf")
	require.NoError(t, Save(t.Context(), path, f, m, F32, nil))
	g, err := Open(path)
	require.NoError(t, err)
	defer g.Close()
	back, err := g.Load(t.Context())
	require.NoError(t, err)
	folder := filepath.Join(t.TempDir(), "again")
	require.NoError(t, hf.SavePretrained(t.Context(), folder, back, hf.Like(g)))
	again, n := load(t, folder)
	require.Equal(t, f.Config, again.Config)
	for _, p := range m.Params {
		require.Equal(t, p.Value.Float32s(), n.Param(p.Name).Float32s(), p.Name)
	}
	checkTexts(t, f, again)
}

// TestOpenRefused checks that errors name unsupported fields, types, tensors and tokenizers.
func TestOpenRefused(t *testing.T) {
	f, m := load(t, tiny)
	path := filepath.Join(t.TempDir(), "m.gguf")
	require.NoError(t, Save(t.Context(), path, f, m, F32, nil))
	whole, err := os.ReadFile(path)
	require.NoError(t, err)
	refused := func(want string, change func(b []byte) []byte) {
		t.Helper()
		require.NoError(t, os.WriteFile(path, change(append([]byte(nil), whole...)), 0o666))
		_, err := Open(path)
		require.ErrorIs(t, err, hf.ErrFolder)
		require.ErrorContains(t, err, want)
	}
	swap := func(old, new string) func([]byte) []byte {
		require.Len(t, new, len(old))
		require.Contains(t, string(whole), old)
		return func(b []byte) []byte { return []byte(strings.Replace(string(b), old, new, 1)) }
	}

	refused(`its architecture is "gemma"`, swap("\x05\x00\x00\x00\x00\x00\x00\x00llama", "\x05\x00\x00\x00\x00\x00\x00\x00gemma"))
	refused("the field llama.vocab_sizz, which is 400, is not supported", swap("llama.vocab_size", "llama.vocab_sizz"))
	refused(`tokenizer is "bert"`, swap("ggml.model\x08\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00gpt2",
		"ggml.model\x08\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00bert"))
	refused(`tokenizer.ggml.pre is "qwen9"`, swap("\x00qwen2", "\x00qwen9"))
	refused("blk.1.attn_q.weight is missing", swap("blk.1.attn_q.weight", "blk.1.attn_x.weight"))
	refused("ends beyond", func(b []byte) []byte { return b[:len(b)-1] })
	refused("cut short", func(b []byte) []byte { return b[:1000] })
	refused("has the type q4_K", func(b []byte) []byte {
		at := strings.Index(string(b), "output_norm.weight") + len("output_norm.weight") + 4 + 8
		b[at] = 12
		return b
	})

	_, err = Open(filepath.Join(t.TempDir(), "none.gguf"))
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.False(t, Is(t.TempDir()))
}

// FuzzOpen opens files of arbitrary bytes.
func FuzzOpen(f *testing.F) {
	path := filepath.Join(f.TempDir(), "m.gguf")
	for _, head := range heads() {
		f.Add(head)
	}
	folder, err := hf.Open(tiny)
	require.NoError(f, err)
	defer folder.Close()
	m, err := folder.Load(f.Context())
	require.NoError(f, err)
	for _, kind := range []Type{F16, Q80} {
		whole := filepath.Join(f.TempDir(), "whole.gguf")
		require.NoError(f, Save(f.Context(), whole, folder, m, kind, nil))
		text, err := os.ReadFile(whole)
		require.NoError(f, err)
		f.Add(text)
	}
	text, err := os.ReadFile("testdata/sentencepiece.gguf")
	require.NoError(f, err)
	f.Add(text)
	f.Fuzz(func(t *testing.T, file []byte) {
		require.NoError(t, os.WriteFile(path, file, 0o666))
		bounded.Run(t, int64(64*len(file)), func() {
			if g, err := Open(path); err == nil {
				_, _ = g.Load(t.Context())
				require.NoError(t, g.Close())
			}
		})
	})
}

// TestOpenForeign checks that a file that llama.cpp's own package wrote has the weights of the model, in the same
// q8_0 as Save, and its tokenizer and chat template. foreign.py wrote the file.
func TestOpenForeign(t *testing.T) {
	f, m := load(t, tiny)
	path := filepath.Join(t.TempDir(), "m.gguf")
	require.NoError(t, Save(t.Context(), path, f, m, Q80, nil))
	ours, err := Open(path)
	require.NoError(t, err)
	defer ours.Close()
	theirs, err := Open("testdata/tiny-q8_0.gguf")
	require.NoError(t, err)
	defer theirs.Close()

	require.Equal(t, f.Config, theirs.Config)
	require.Equal(t, ours.Generation, theirs.Generation)
	checkTexts(t, f, theirs)
	a, err := ours.Load(t.Context())
	require.NoError(t, err)
	b, err := theirs.Load(t.Context())
	require.NoError(t, err)
	for _, p := range a.Params {
		require.Equal(t, p.Value.Float32s(), b.Param(p.Name).Float32s(), p.Name)
	}
}
