package gguf

import (
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestGPT2 checks that a GPT-2 is written in the layout that llama.cpp reads: queries, keys and values in
// one tensor, learned positions in float32, biases, and no rotary embedding.
func TestGPT2(t *testing.T) {
	f, m := load(t, "../testdata/tiny-gpt2")
	path := filepath.Join(t.TempDir(), "m.gguf")
	require.NoError(t, Save(t.Context(), path, f, m, F16, nil))
	fields, tensors := read(t, path)

	require.Equal(t, "gpt2", fields["general.architecture"])
	require.Equal(t, "gpt-2", fields["tokenizer.ggml.pre"])
	require.InDelta(t, 1e-5, fields["gpt2.attention.layer_norm_epsilon"], 1e-12)
	require.NotContains(t, fields, "gpt2.attention.layer_norm_rms_epsilon")
	require.NotContains(t, fields, "gpt2.rope.freq_base")

	part := func(name string) []float32 { return m.Param("model.layers.1." + name).Float32s() }
	for kind, suffix := range map[string]string{"weight": ".weight", "bias": ".bias"} {
		want := slices.Concat(part("self_attn.q_proj"+suffix), part("self_attn.k_proj"+suffix),
			part("self_attn.v_proj"+suffix))
		require.InDeltaSlice(t, want, tensors["blk.1.attn_qkv"+suffix].values(), 2e-3, kind)
	}

	for name, param := range map[string]string{"position_embd.weight": positions,
		"output_norm.bias": "model.norm.bias", "blk.1.ffn_norm.bias": "model.layers.1." +
			"post_attention_layernorm.bias", "blk.1.attn_output.bias": "model.layers.1." +
			"self_attn.o_proj.bias"} {
		require.Equal(t, F32, tensors[name].dtype, name)
		require.Equal(t, m.Param(param).Float32s(), tensors[name].values(), name)
	}

	require.Equal(t, F16, tensors["blk.0.ffn_up.weight"].dtype)
	require.Len(t, tensors, 3+1+2*12)
}

// TestOLMo2 checks the names of OLMo 2's norms, that the rows of its heads keep their order, and that the
// output layer is written although the model shares it with the embedding: llama.cpp requires it.
func TestOLMo2(t *testing.T) {
	f, m := load(t, "../testdata/tiny-olmo2")
	path := filepath.Join(t.TempDir(), "m.gguf")
	require.NoError(t, Save(t.Context(), path, f, m, F32, nil))
	fields, tensors := read(t, path)

	require.Equal(t, "olmo2", fields["general.architecture"])
	require.Equal(t, "dbrx", fields["tokenizer.ggml.pre"])
	require.Contains(t, fields, "olmo2.attention.layer_norm_rms_epsilon")
	for name, param := range map[string]string{"blk.1.attn_q.weight": "self_attn.q_proj.weight",
		"blk.1.attn_q_norm.weight":         "self_attn.q_norm.weight",
		"blk.1.post_attention_norm.weight": "post_attention_layernorm.weight",
		"blk.1.post_ffw_norm.weight":       "post_feedforward_layernorm.weight"} {
		want := m.Param("model.layers.1." + param).Float32s()
		require.Equal(t, want, tensors[name].values(), name)
	}

	require.NotContains(t, tensors, "blk.1.attn_norm.weight")
	require.False(t, m.Config.Untied)
	require.Equal(t, m.Param("model.embed_tokens.weight").Float32s(), tensors["output.weight"].values())
}
