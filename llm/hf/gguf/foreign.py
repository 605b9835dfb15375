"""Writes testdata/tiny-q8_0.gguf: the model ../testdata/tiny in q8_0, with llama.cpp's own package for GGUF files.

The script does what llama.cpp's convert_hf_to_gguf.py does for this model. TestOpenForeign reads the file.

    pip install gguf safetensors torch && python3 foreign.py
"""

import json
import os

import numpy
from gguf import (MODEL_ARCH, GGMLQuantizationType, GGUFType, GGUFWriter, LlamaFileType, get_tensor_name_map,
                  quants)
from safetensors import safe_open

HERE = os.path.dirname(os.path.abspath(__file__))
TINY = os.path.join(HERE, "../testdata/tiny")
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def metadata(w, config, tokenizer):
    w.add_type(GGUFType.MODEL)
    w.add_name("tiny")
    w.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    w.add_quantization_version(2)
    w.add_vocab_size(config["vocab_size"])
    w.add_block_count(config["num_hidden_layers"])
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_head_count_kv(config["num_key_value_heads"])
    w.add_rope_freq_base(10000.0)
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_rope_dimension_count(config["head_dim"])
    w.add_key_length(config["head_dim"])
    w.add_value_length(config["head_dim"])

    tokens = [f"[PAD{i}]" for i in range(config["vocab_size"])]
    types = [UNUSED] * len(tokens)
    for text, i in tokenizer["model"]["vocab"].items():
        tokens[i], types[i] = text, NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    w.add_bos_token_id(0)
    w.add_eos_token_id(1)
    w.add_add_bos_token(True)
    with open(os.path.join(TINY, "chat_template.jinja"), encoding="utf-8") as f:
        w.add_chat_template(f.read())


def interleaved(x, heads):
    """Reorders the rows of heads as llama.cpp's RoPE expects them."""
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def main():
    with open(os.path.join(TINY, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    with open(os.path.join(TINY, "tokenizer.json"), encoding="utf-8") as f:
        tokenizer = json.load(f)

    w = GGUFWriter(os.path.join(HERE, "testdata/tiny-q8_0.gguf"), "llama")
    metadata(w, config, tokenizer)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    weights = safe_open(os.path.join(TINY, "model.safetensors"), "pt")
    for name in weights.keys():
        x = weights.get_tensor(name).float().numpy()
        if "q_proj" in name:
            x = interleaved(x, config["num_attention_heads"])
        if "k_proj" in name:
            x = interleaved(x, config["num_key_value_heads"])
        kind = GGMLQuantizationType.Q8_0 if x.ndim == 2 else GGMLQuantizationType.F32
        w.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")),
                     quants.quantize(numpy.ascontiguousarray(x), kind), raw_dtype=kind)

    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


main()
