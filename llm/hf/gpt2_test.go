package hf

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm"
)

// TestOriginalGPT2 reads a folder as OpenAI published it: without "transformer." in the names of tensors,
// and with causal masks. A saved copy has the same tensors except for the masks.
func TestOriginalGPT2(t *testing.T) {
	dir := copyOf(t, "gpt2")
	path := filepath.Join(dir, weightsName)
	tensors, _, err := safetensors.Load(path)
	require.NoError(t, err)
	want := len(tensors)
	for i := range tensors {
		tensors[i].Name = strings.TrimPrefix(tensors[i].Name, "transformer.")
	}

	tensors = append(tensors, safetensors.Tensor{Name: "h.1.attn.bias", DType: safetensors.F32, Shape: []int{1, 1, 2, 2},
		Data: []float32{1, 0, 1, 1}})
	require.NoError(t, os.Remove(path))
	require.NoError(t, safetensors.Save(path, tensors, map[string]string{"format": "pt"}))

	f, err := Open(dir)
	require.NoError(t, err)
	defer f.Close()
	m, err := f.Load(t.Context())
	require.NoError(t, err)
	require.Less(t, offLogits(t, readGolden(t, "gpt2"), &llm.Inference{Model: m}), 1e-5)

	out := filepath.Join(t.TempDir(), "out")
	require.NoError(t, SavePretrained(t.Context(), out, m, Like(f)))
	again, err := Open(out)
	require.NoError(t, err)
	defer again.Close()
	require.Len(t, again.Tensors(), want)
	for _, x := range again.Tensors() {
		require.False(t, strings.HasPrefix(x.Name, "transformer."), x.Name)
	}
}

// TestGPT2Refused checks that settings of a GPT-2 that change its computation are rejected.
func TestGPT2Refused(t *testing.T) {
	for change, want := range map[string]string{
		`{"scale_attn_by_inverse_layer_idx": true}`: "scale_attn_by_inverse_layer_idx",
		`{"scale_attn_weights": false}`:             "scale_attn_weights",
		`{"activation_function": "relu"}`:           "activation_function",
		`{"add_cross_attention": true}`:             "add_cross_attention",
		`{"n_ctx": 65}`:                             "n_ctx",
		`{"n_head": 3}`:                             "n_embd: it is 16, want a multiple of n_head, 3",
		`{"n_positions": 65}`:                       "tensor transformer.wpe.weight has shape",
		`{"n_inner": 41}`:                           "tensor transformer.h.0.mlp.c_fc.bias has shape",
	} {
		dir := copyOf(t, "gpt2")
		rewrite(t, filepath.Join(dir, configName), func(fields map[string]any) {
			require.NoError(t, json.Unmarshal([]byte(change), &fields))
		})
		requireRefused(t, dir, want)
	}

	_, err := open(t, "gpt2").Load(t.Context(), WithConfig(func(c *llm.Config) { c.Seq = 65 }))
	require.ErrorContains(t, err, "want at most Positions, 64")
}

// TestGrownFamilies checks that a GPT-2 and an OLMo 2 with more blocks than their folders are saved like
// the folders and can be loaded again.
func TestGrownFamilies(t *testing.T) {
	for _, name := range []string{"gpt2", "olmo2"} {
		f := open(t, name)
		c := f.Config
		c.Layers *= 2
		m, err := llm.NewModel(c, tensor.Float32, 1)
		require.NoError(t, err)
		dir := filepath.Join(t.TempDir(), name)
		require.NoError(t, SavePretrained(t.Context(), dir, m, Like(f), WithDtype("float32")))

		again, err := Load(t.Context(), dir)
		require.NoError(t, err)
		require.Equal(t, c.Layers, again.Config.Layers)
		for _, p := range m.Params {
			require.Equal(t, p.Value.Float32s(), again.Param(p.Name).Float32s(), p.Name)
		}
	}
}
