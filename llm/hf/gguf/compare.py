"""Checks that llama.cpp computes the right results with the files of package gguf.

The script creates small models with the tokenizer of ../testdata/tiny and trains them with kasmina, so
that their logits have gaps. It then checks that llama.cpp continues a text from their files in the same
way as transformers does with weights rounded to the type of the file.

llama.cpp quantizes the activations too when it multiplies them with quantized weights, and rounds them
to bfloat16 for bfloat16 weights, so its logits have errors. If the texts differ at a token, the gap
between the two tokens' logits must be smaller than the error there.

Needs transformers and llama-cpp-python:

    go build -o kasmina ../../../cmd/kasmina && python3 compare.py ./kasmina TEXT
"""

import os
import shutil
import subprocess
import sys
import tempfile
import warnings

import gguf
import numpy
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
PROMPTS = ["Permission is hereby granted, free of", "The model", "func main() {", "A ", "and the"]
LENGTH = 48
STEPS = "300"


def run(*args):
    p = subprocess.run(args, capture_output=True)
    if p.returncode:
        sys.exit(f"{args}: {p.stderr.decode()[-2000:]}")
    return p.stdout


def as_kept(x, kind, t):
    """Returns a weight rounded as in a file of the given kind. t holds the types of the file's tensors."""
    if x.dim() < 2 or t == gguf.GGMLQuantizationType.F32:
        return x
    if kind == "q8_0":
        q = gguf.quantize(x.numpy(), t)
        return torch.from_numpy(numpy.array(gguf.dequantize(q, t))).reshape(x.shape)
    return x.to({"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[kind]).float()


def compare(model, llama, prompt):
    """Returns the number of equal tokens, the gap between the two logits at the first different one,
    and the error of the logits on average and at these two tokens."""
    llama.reset()
    llama.eval(prompt)
    ids = list(prompt)
    apart = []
    for n in range(LENGTH):
        with torch.no_grad():
            exact = model(torch.tensor([ids])).logits[0, -1].double().numpy()
        theirs = numpy.array(llama._scores[len(ids) - 1], dtype=float)
        apart.append(numpy.sqrt(numpy.mean((exact - theirs) ** 2)))
        a, b = exact.argmax(), theirs.argmax()
        if a != b:
            return n, exact[a] - exact[b], numpy.mean(apart), abs(exact - theirs)[[a, b]].sum()
        ids.append(int(a))
        llama.eval([int(a)])
    return LENGTH, 0, numpy.mean(apart), 0


def main(kasmina, text):
    failed = False
    with tempfile.TemporaryDirectory() as work:
        for name, (family, fields) in MODELS.items():
            folder, trained = os.path.join(work, name), os.path.join(work, name + "-trained")
            shutil.copytree(TINY, folder)
            torch.manual_seed(len(name))
            config = getattr(transformers, family + "Config")(**{**SMALL, **fields})
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            run(kasmina, "train", "--model", folder, "--data", text, "--out", trained, "--steps", STEPS,
                "--batch", "8", "--seq", "64", "--lr", "3e-3", "--device", "cpu")
            tokenizer = transformers.AutoTokenizer.from_pretrained(trained)
            for kind in "f32", "f16", "bf16", "q8_0":
                path = os.path.join(work, f"{name}-{kind}.gguf")
                run(kasmina, "convert", "--model", trained, "--out", path, "--gguf", kind)
                types = {t.tensor_type for t in gguf.GGUFReader(path).tensors if len(t.shape) > 1}
                assert len(types) == 1, types
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    trained, dtype=torch.float32)
                with torch.no_grad():
                    for p in model.parameters():
                        p.copy_(as_kept(p.detach(), kind, next(iter(types))))
                llama = Llama(path, n_ctx=256, verbose=False, n_threads=1, logits_all=True)
                same, ties, off = 0, 0, 0
                for prompt in PROMPTS:
                    ids = tokenizer(prompt).input_ids
                    theirs = llama.tokenize(prompt.encode(), add_bos=True, special=True)
                    if theirs != ids:
                        print(name, prompt, ids, theirs)
                        failed = True
                    n, gap, mean, there = compare(model, llama, ids)
                    off = max(off, mean)
                    if n == LENGTH:
                        same += 1
                        continue
                    tie = gap <= there and kind in ("bf16", "q8_0")
                    ties += tie
                    failed = failed or not tie
                    print(f"    {name} {kind} {prompt!r}: token {n} differs by a gap of {gap:.4f}, "
                          f"where logits are off by {there:.4f}, {mean:.4f} on average")
                print(f"{name:8} {kind:5} {same} of {len(PROMPTS)} texts of {LENGTH} tokens are the same, "
                      f"{ties} differ at a tie; logits are off by {off:.2g}", flush=True)
    sys.exit(failed)


main(*sys.argv[1:])
