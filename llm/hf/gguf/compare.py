"""Compares files of package gguf with what llama.cpp makes of them.

Makes small random models with the tokenizer of ../testdata/tiny, has the command kasmina continue a
text and convert them, and wants llama.cpp to continue it alike. Needs transformers and
llama-cpp-python:

    go build -o kasmina ../../../cmd/kasmina && python3 compare.py ./kasmina
"""

import os
import shutil
import subprocess
import sys
import tempfile
import warnings

import gguf
import torch
import transformers
from llama_cpp import Llama

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
TINY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../testdata/tiny")
SMALL = dict(vocab_size=400, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
             bos_token_id=0, eos_token_id=1)
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=2.0)
MODELS = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", dict(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "linear": ("Llama", dict(rope_parameters=LINEAR)),
    "yarn": ("Llama", dict(rope_parameters=YARN)),
    "mistral": ("Mistral", dict(sliding_window=None)),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", dict(head_dim=32)),
}
PROMPT = "Permission is hereby granted, free of"


def run(*args):
    out = subprocess.run(args, check=True, capture_output=True).stdout
    return out.decode(errors="ignore")  # as llama.cpp's binding does


def close(path, kind):
    """Whether tensors are those of the file in f32, as far as their type goes."""
    whole = gguf.GGUFReader(path.replace(kind, "f32")).tensors
    for a, b in zip(gguf.GGUFReader(path).tensors, whole):
        x = gguf.dequantize(a.data, a.tensor_type).reshape(-1)
        y = b.data.reshape(-1)
        if a.name != b.name or abs(x - y).max() > {"f32": 0, "f16": 1e-3, "bf16": 4e-3,
                                                   "q8_0": 5e-3}[kind] * abs(y).max():
            print(kind, a.name, abs(x - y).max(), abs(y).max())
            return False
    return True


def main(kasmina):
    failed = False
    with tempfile.TemporaryDirectory() as work:
        for name, (family, fields) in MODELS.items():
            folder = os.path.join(work, name)
            shutil.copytree(TINY, folder)
            torch.manual_seed(len(name))
            config = getattr(transformers, family + "Config")(**{**SMALL, **fields})
            model = transformers.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.15 * torch.randn_like(p))
            model.save_pretrained(folder)
            want = run(kasmina, "generate", "-model", folder, "-prompt", PROMPT, "-n", "24",
                       "-temperature", "0")[len(PROMPT):-1]
            for kind in "f32", "f16", "bf16", "q8_0":
                path = os.path.join(work, f"{name}-{kind}.gguf")
                run(kasmina, "convert", "-model", folder, "-out", path, "-gguf", kind)
                llama = Llama(path, n_ctx=256, verbose=False, n_threads=1)
                got = llama(PROMPT, max_tokens=24, temperature=0)["choices"][0]["text"]
                same = os.path.commonprefix([got, want])
                # The binding ends some texts of bytes that are no UTF-8 later.
                ok = len(same) == min(len(got), len(want)) or kind in ("bf16", "q8_0")
                failed = failed or not ok or not close(path, kind)
                print(f"{name:8} {kind:5} {len(same)} of {len(want)} characters are the same")
    sys.exit(failed)


main(sys.argv[1])
