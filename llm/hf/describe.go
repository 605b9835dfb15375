package hf

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm"
)

// config returns the config.json to write. If the model was loaded from a folder, this is the
// folder's file or a modified copy; otherwise it is a new one.
func (s *saving) config(c llm.Config) ([]byte, error) {
	if s.like == nil {
		return s.ownConfig(c.Plain())
	}
	d := s.dtypeOf(embedName)
	if same(c, s.like.Config) && (s.dtype == "" || dtypeNames[d] == s.like.traits.dtype) {
		return s.like.config, nil
	}
	return s.changedConfig(c, d)
}

// same reports whether two configurations compute the same outputs for sequences of any length.
func same(a, b llm.Config) bool {
	a, b = a.Plain(), b.Plain()
	a.Seq, b.Seq = 0, 0
	a.Documents, b.Documents = false, false
	a.Blocks, b.Blocks = eachBlock(a), eachBlock(b)
	return fmt.Sprintf("%+v", a) == fmt.Sprintf("%+v", b)
}

// eachBlock returns the settings of every block. Config.Blocks may be a shorter pattern that repeats.
func eachBlock(c llm.Config) []llm.Block {
	all := make([]llm.Block, c.Layers)
	for i := range all {
		if len(c.Blocks) > 0 {
			all[i] = c.Blocks[i%len(c.Blocks)]
		}
	}
	return all
}

// changedConfig returns the folder's config.json, updated for the given weight type, the current number of
// blocks, and an output layer that may no longer share its weight with the embedding.
func (s *saving) changedConfig(c llm.Config, d safetensors.DType) ([]byte, error) {
	var fields map[string]any
	if err := json.Unmarshal(s.like.config, &fields); err != nil {
		return nil, err
	}

	delete(fields, "torch_dtype")
	fields["dtype"] = dtypeNames[d]
	if c.Untied != s.like.Config.Untied { // a merged adapter has separated the output layer from the embedding
		fields["tie_word_embeddings"] = !c.Untied
	}
	if c.Layers != s.like.Config.Layers {
		fields[families[s.like.Family].field("num_hidden_layers")] = c.Layers
		describeLayers(fields, c)
	}

	text, err := json.MarshalIndent(fields, "", "  ")
	if err != nil {
		return nil, err
	}

	t, err := parseConfig(text)
	if err != nil {
		return nil, err
	}

	described, err := t.config()
	if err != nil {
		return nil, err
	}

	if !same(c, described) {
		return nil, fmt.Errorf("the model differs from the one in %s: save without Like", s.like.Dir)
	}

	return append(text, '\n'), nil
}

// describeLayers replaces the lists in config.json that contain one entry per layer.
func describeLayers(fields map[string]any, c llm.Config) {
	types, rope := make([]string, c.Layers), make([]int, c.Layers) // rope is 0 for a layer without RoPE
	for i, b := range eachBlock(c) {
		types[i] = "full_attention"
		if b.Window > 0 {
			types[i] = "sliding_attention"
		}
		if !b.NoRoPE {
			rope[i] = 1
		}
	}

	// Without layer_types, other fields specify which layers are windowed, and they describe the
	// original layers. In Mistral, all layers are alike.
	windowed := slices.Contains(types, "sliding_attention") && fields["model_type"] != "mistral"
	if fields["layer_types"] != nil || windowed {
		fields["layer_types"] = types
	}

	if fields["no_rope_layers"] != nil {
		fields["no_rope_layers"] = rope
	}
}

// ownConfig returns a config.json for a model that wasn't loaded from a folder.
func (s *saving) ownConfig(c llm.Config) ([]byte, error) {
	if c.Dim%c.Heads != 0 {
		return nil, fmt.Errorf("Config.Dim is %d, but transformers requires a multiple of Heads, %d",
			c.Dim,
			c.Heads)
	}

	if c.Documents {
		c.Documents = false // affects training only: a single text is one document
	}

	fields := map[string]any{
		"architectures": []string{"LlamaForCausalLM"}, "model_type": "llama",
		"vocab_size": c.Vocab, "hidden_size": c.Dim, "num_hidden_layers": c.Layers,
		"num_attention_heads": c.Heads, "num_key_value_heads": c.KVHeads, "head_dim": c.HeadDim,
		"intermediate_size": c.FF, "max_position_embeddings": c.Seq, "rms_norm_eps": c.Eps,
		"rope_theta": c.Base, "tie_word_embeddings": !c.Untied, "hidden_act": "silu",
		"attention_bias": false, "mlp_bias": false, "attention_dropout": 0.0,
		"initializer_range": 0.02, "use_cache": true, "bos_token_id": nil, "eos_token_id": nil,
		"dtype": dtypeNames[s.dtypeOf(embedName)],
	}

	if c.Eps == 0 || math.IsInf(c.Eps, 0) {
		fields["rms_norm_eps"] = 0.0
	}

	text, err := json.MarshalIndent(fields, "", "  ")
	if err != nil {
		return nil, err
	}

	t, err := parseConfig(text)
	if err != nil {
		return nil, err
	}

	described, err := t.config()
	if err != nil {
		return nil, err
	}

	if !same(c, described) {
		return nil,
			fmt.Errorf("the model is not a plain Llama: pass the folder that it came from with Like")
	}

	return append(text, '\n'), nil
}
