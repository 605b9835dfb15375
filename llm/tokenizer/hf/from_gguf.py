"""Writes the tokenizer.json of a byte-level encoding, given its vocabulary in a GGUF file.

    pip install gguf
    python3 from_gguf.py VOCABULARY.gguf tokenizer.json

A GGUF file has only the name of its pre-tokenizer. The script knows the pre-tokenizers of these models.
"""

import json
import sys

from gguf import GGUFReader

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}


PIPELINES = {
    "gpt-2": [BYTES],
    "starcoder": [DIGITS, BYTES],  # also SmolLM
}


def text(field):
    return [bytes(field.parts[i]).decode() for i in field.data]


def main(source, target):
    fields = GGUFReader(source).fields
    tokens = text(fields["tokenizer.ggml.tokens"])
    merges = text(fields["tokenizer.ggml.merges"])
    kinds = [int(fields["tokenizer.ggml.token_type"].parts[i][0])
             for i in fields["tokenizer.ggml.token_type"].data]
    name = next(n for n in PIPELINES if n in source)
    added = [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": kinds[i] == 3}
             for i, t in enumerate(tokens) if kinds[i] in (3, 4)]
    with open(target, "w", encoding="utf-8") as f:
        json.dump({
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": PIPELINES[name]},
            "post_processor": None, "decoder": BYTES,
            "model": {"type": "BPE", "dropout": None, "unk_token": None,
                      "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": {t: i for i, t in enumerate(tokens)}, "merges": merges},
        }, f, ensure_ascii=False)


main(*sys.argv[1:])
