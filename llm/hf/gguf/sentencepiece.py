"""Writes testdata/sentencepiece.gguf, a model with a tokenizer as SentencePiece makes them, and
testdata/sentencepiece.json, texts with the tokens that llama.cpp and Hugging Face's tokenizers find in them.

TestSentencePiece compares the tokens with ours. Where the two libraries differ, the script prints a line and keeps
llama.cpp's tokens.

    npm install node-llama-cpp
    pip install gguf tokenizers && python3 sentencepiece.py
"""

import json
import os
import subprocess
import sys

import numpy
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tokenizers import Tokenizer, decoders, models, normalizers, trainers

HERE = os.path.dirname(os.path.abspath(__file__))
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
DIM, FF, HEADS = 32, 64, 4

TEXTS = ["", " ", "  ", "Hello", " Hello", "Permission is hereby granted, free of charge", "a  b   c    d", "tab\tand\nlines\n\n\n",
         "naïve café 字 🙂 e\u0301", "▁already▁escaped ▁ ", "<s>not special</s>", "x<|user|> y<|user|>z", "<0x41> <unk> <0x0A>",
         "1234567890 3.14159", "THE SOFTWARE IS PROVIDED \"AS IS\"", "\u200b\ufeff\u00a0nbsp", "the the the thethethe", "\x00\x01",
         "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "ssss ss sss", "</s", "s>", "emoji 👩‍👩‍👧 family", "\r\n\r\n", "Z̧̡a̕l͢g̸o"]

JS = """
import {getLlama, LlamaLogLevel} from "node-llama-cpp";
import fs from "fs";
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error, skipDownload: true, progressLogs: false});
const model = await llama.loadModel({modelPath: process.argv[2]});
const texts = JSON.parse(fs.readFileSync(process.argv[3]));
console.log(JSON.stringify(texts.map(t => [model.tokenize(t, false), model.tokenize(t, true)])));
process.exit(0);
"""


def train(text):
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    initial = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    words = text.replace("\n", " \n").split(" ")  # SentencePiece joins no words
    t.train_from_iterator(words, trainers.BpeTrainer(vocab_size=600, special_tokens=initial, show_progress=False))
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return json.loads(t.to_str())


def main():
    npm = sys.argv[1] if len(sys.argv) > 1 else HERE
    with open(os.path.join(HERE, "../../../LICENSE"), encoding="utf-8") as f:
        trained = train(f.read() + " <s> </s> the the sss s> </ aaaa")
    vocab = trained["model"]["vocab"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in trained["model"]["merges"]]

    # SentencePiece numbers the tokens in the order of their merges, followed by single characters.
    joined = [m.replace(" ", "") for m in merges]
    first = [t for t in sorted(vocab, key=vocab.get) if vocab[t] < 259]
    chars = [t for t in sorted(vocab, key=vocab.get) if vocab[t] >= 259 and t not in joined]
    tokens = first + list(dict.fromkeys(joined)) + chars + ["<|user|>", "[PAD]"]
    ids = {t: i for i, t in enumerate(tokens)}
    types = [NORMAL] * len(tokens)
    types[:259] = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    types[-2:] = [USER_DEFINED, UNUSED]
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 261)] + [-1000.0, -10000.0]

    path = os.path.join(HERE, "testdata/sentencepiece.gguf")
    w = GGUFWriter(path, "llama")
    w.add_name("sentencepiece")
    w.add_context_length(64)
    w.add_embedding_length(DIM)
    w.add_block_count(1)
    w.add_feed_forward_length(FF)
    w.add_head_count(HEADS)
    w.add_head_count_kv(HEADS)
    w.add_rope_dimension_count(DIM // HEADS)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(len(tokens))
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list(tokens)
    w.add_token_scores(scores)
    w.add_token_types(types)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    w.add_add_bos_token(True)
    w.add_add_eos_token(False)

    r = numpy.random.default_rng(1)
    shapes = {"token_embd": (len(tokens), DIM), "output": (len(tokens), DIM), "blk.0.attn_q": (DIM, DIM), "blk.0.attn_k": (DIM, DIM),
              "blk.0.attn_v": (DIM, DIM), "blk.0.attn_output": (DIM, DIM), "blk.0.ffn_gate": (FF, DIM), "blk.0.ffn_up": (FF, DIM),
              "blk.0.ffn_down": (DIM, FF), "blk.0.attn_norm": (DIM,), "blk.0.ffn_norm": (DIM,), "output_norm": (DIM,)}
    for name, shape in shapes.items():
        x = numpy.ones(shape, "float32") if len(shape) == 1 else r.normal(0, 0.1, shape).astype("float32")
        kind = GGMLQuantizationType.Q8_0 if len(shape) == 2 else GGMLQuantizationType.F32
        w.add_tensor(name + ".weight", quants.quantize(x, kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()

    script, texts = os.path.join(npm, "tokenize.mjs"), os.path.join(npm, "texts.json")
    with open(script, "w", encoding="utf-8") as f:
        f.write(JS)
    with open(texts, "w", encoding="utf-8") as f:
        json.dump(TEXTS, f)
    theirs = json.loads(subprocess.run(["node", script, path, texts], check=True, capture_output=True, cwd=npm).stdout)
    os.remove(script)
    os.remove(texts)

    # Hugging Face's tokenizer for the same vocabulary.
    trained["model"]["vocab"] = {t: i for t, i in ids.items() if i < len(tokens) - 2}
    trained["added_tokens"] = [{"id": ids[t], "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                                "special": t != "<|user|>"} for t in ("<unk>", "<s>", "</s>", "<|user|>")]
    hf = Tokenizer.from_str(json.dumps(trained))
    golden = []
    for text, (ordinary, special) in zip(TEXTS, theirs):
        other = hf.encode(text, add_special_tokens=False).ids
        if other != special:
            print("differs:", repr(text), [tokens[i] for i in special], [tokens[i] for i in other])
        golden.append({"text": text, "ordinary": ordinary, "special": special, "decoded": hf.decode(special, skip_special_tokens=True)})
    with open(os.path.join(HERE, "testdata/sentencepiece.json"), "w", encoding="utf-8") as f:
        f.write("[\n" + ",\n".join(json.dumps(g, ensure_ascii=False) for g in golden) + "\n]\n")


main()
