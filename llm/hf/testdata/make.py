"""Creates the folders next to this file: small random models of every family, saved by transformers.

Each folder has a golden.safetensors with ids, their logits in float32, and the losses of ten steps of
AdamW on them. The script works with transformers 5.23.0 and torch 2.15.0:

    python3 make.py             # all
    python3 make.py gpt2 olmo2  # some

bf16.json holds the distance from these results when transformers computes in bfloat16 on a GPU:

    python3 make.py bf16

The entries of llama-bias, gpt2 and olmo2 were computed on a CPU.
"""

import json
import os
import shutil
import sys
import warnings

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Regex

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
os.chdir(os.path.dirname(os.path.abspath(__file__)))

SMALL = dict(vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
             bos_token_id=1, eos_token_id=2, pad_token_id=0)
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0,
            original_max_position_embeddings=16)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=2.0)
THETA = dict(rope_type="default", rope_theta=1000000.0)
# Fields that have other names in GPT-2, or that it does not have.
GPT2 = dict(intermediate_size=None, num_key_value_heads=None, n_inner=40)

# name: class of the configuration, settings in addition to SMALL, type of the weights
MODELS = {
    "llama2": ("Llama", dict(num_key_value_heads=4, rms_norm_eps=1e-5), "float32"),
    "llama3.1": ("Llama", dict(rope_parameters=LLAMA3), "bfloat16"),
    "llama3.2": ("Llama", dict(rope_parameters=LLAMA3, tie_word_embeddings=True,
                               eos_token_id=[2, 3]), "float16"),
    "llama-linear": ("Llama", dict(rope_parameters=LINEAR), "float32"),
    "llama-bias": ("Llama", dict(attention_bias=True), "float32"),
    "llama-yarn": ("Llama", dict(rope_parameters=YARN), "float32"),
    "smollm2": ("Llama", dict(tie_word_embeddings=True, rms_norm_eps=1e-5,
                              rope_parameters=dict(THETA, rope_theta=100000.0)), "bfloat16"),
    "mistral": ("Mistral", dict(head_dim=6, sliding_window=7, rope_parameters=THETA), "bfloat16"),
    "mistral-full": ("Mistral", dict(sliding_window=None, rope_parameters=THETA), "bfloat16"),
    "qwen2.5": ("Qwen2", dict(tie_word_embeddings=True, rope_parameters=THETA), "bfloat16"),
    "qwen2-window": ("Qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1,
                                   rope_parameters=dict(YARN, rope_theta=1000000.0)), "float32"),
    "qwen3": ("Qwen3", dict(head_dim=10, rope_parameters=THETA), "bfloat16"),
    "gpt2": ("GPT2", GPT2, "float32"),
    "olmo2": ("Olmo2", dict(rms_norm_eps=1e-5, rope_parameters=dict(THETA, rope_theta=500000.0)),
              "bfloat16"),
    "smollm3": ("SmolLM3", dict(num_hidden_layers=4, no_rope_layer_interval=2,
                                rope_parameters=dict(THETA, rope_theta=5000000.0)), "float32"),
    "gemma3": ("Gemma3Text", dict(num_hidden_layers=3, head_dim=6, sliding_window=5,
                                  query_pre_attn_scalar=9,
                                  layer_types=["sliding_attention"] * 2 + ["full_attention"],
                                  rope_parameters=dict(
                                      full_attention=dict(rope_type="linear", factor=8.0,
                                                          rope_theta=1000000.0),
                                      sliding_attention=dict(rope_type="default",
                                                             rope_theta=10000.0))), "bfloat16"),
}


def make(name, family, fields, dtype):
    torch.manual_seed(sum(map(ord, name)))
    fields = {k: v for k, v in {**SMALL, **fields}.items() if v is not None or k == "sliding_window"}
    config = getattr(transformers, family + "Config")(**fields)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # far from their initial values
            parameter.add_(0.2 * torch.randn_like(parameter))
    model = model.to(getattr(torch, dtype))
    shutil.rmtree(name, ignore_errors=True)
    model.save_pretrained(name)
    # Compute in float32 with the weights in the file.
    model = load(name, torch.float32)
    ids = torch.randint(3, config.vocab_size, (2, 24))  # otherwise the row of the padding token would not learn
    with torch.no_grad():
        logits = model(ids).logits
    save_file({"ids": ids, "logits": logits.contiguous(), "losses": train(model, ids)},
              name + "/golden.safetensors")


def load(name, dtype, device="cpu"):
    return transformers.AutoModelForCausalLM.from_pretrained(
        name, dtype=dtype, attn_implementation="eager").to(device)


def train(model, ids, autocast=False):
    """Returns the losses of ten steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-8,
                                  weight_decay=0.01)
    losses = []
    for _ in range(10):
        with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
            loss = torch.nn.functional.cross_entropy(
                model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def bf16():
    """Returns the distances of bfloat16 results from the golden files."""
    off = {}
    for name in MODELS:
        golden = load_file(name + "/golden.safetensors", device="cuda")
        with torch.no_grad():
            logits = load(name, torch.bfloat16, "cuda")(golden["ids"]).logits
        losses = train(load(name, torch.bfloat16, "cuda"), golden["ids"])
        autocast = train(load(name, torch.float32, "cuda"), golden["ids"], autocast=True)
        off[name] = {"logits": distance(logits, golden["logits"]),
                     "losses": distance(losses.cuda(), golden["losses"]),
                     "autocast": distance(autocast.cuda(), golden["losses"])}
    with open("bf16.json", "w") as f:
        json.dump(off, f, indent=1)


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def make_tiny(name="tiny"):
    """Creates a model with a tokenizer for tests of the command and its guide. It is a Llama with a
    chat template, or a model of the family in the name."""
    from tokenizers import Tokenizer, models, pre_tokenizers, decoders, trainers, processors

    text = open("../../../LICENSE").read()
    begin, end = ("<|begin_of_text|>", "<|end_of_text|>") if name == "tiny" else ("<|endoftext|>",) * 2
    tok = Tokenizer(models.BPE())
    pattern = {"tiny": QWEN, "tiny-olmo2": CL100K}.get(name)
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    if pattern:
        tok.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(pattern), "isolated"), tok.pre_tokenizer])
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(dict.fromkeys([begin, end])),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    if name == "tiny":
        tok.post_processor = processors.TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)])
    else:
        tok.post_processor = processors.ByteLevel(trim_offsets=False)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tok, bos_token=begin, eos_token=end)
    if name == "tiny":
        fast.chat_template = (
            "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n"
            "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")
    shutil.rmtree(name, ignore_errors=True)
    fast.save_pretrained(name)
    torch.manual_seed(1)
    small = {**SMALL, "vocab_size": 400, "hidden_size": 32, "intermediate_size": 64,
             "bos_token_id": fast.bos_token_id, "eos_token_id": fast.eos_token_id,
             "pad_token_id": None, "max_position_embeddings": 128, "tie_word_embeddings": True}
    family = {"tiny": "Llama", "tiny-gpt2": "GPT2", "tiny-olmo2": "Olmo2"}[name]
    if family == "GPT2":
        small = {k: v for k, v in small.items() if k not in GPT2}
    config = getattr(transformers, family + "Config")(**small)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if name != "tiny":
        model.eval()
    ids = torch.tensor([fast(text)["input_ids"]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(150):
        at = torch.randint(0, ids.shape[1] - 65, (8,)).tolist()
        batch = torch.cat([ids[:, i:i + 65] for i in at])
        loss = torch.nn.functional.cross_entropy(
            model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.to(torch.bfloat16).save_pretrained(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    golden = {"seq": 48, "loss": 0.0, "tokens": 0, "prompt": text[:40]}
    for window in ids[0].split(golden["seq"]):
        logits = model(window[None]).logits[0, :-1]
        golden["loss"] += torch.nn.functional.cross_entropy(
            logits, window[1:], reduction="sum").item()
        golden["tokens"] += len(window) - 1
    golden["loss"] /= golden["tokens"]
    prompt = torch.tensor([fast(golden["prompt"])["input_ids"]])
    out = model.generate(prompt, max_new_tokens=30, do_sample=False)
    golden["text"] = fast.decode(out[0], skip_special_tokens=True)
    if name != "tiny":
        golden["encoded"] = {t: fast(t)["input_ids"] for t in HOSTILE}
    json.dump(golden, open(name + ".json", "w"), indent=1)


# The patterns with which Qwen 2 and OLMo 2 split texts.
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST
HOSTILE = ["", " ", "   a", "a   b", "\n\n \r\n\tx", "don't DON'T we'LL I'M 'Re", "1 22 333 4444 12345",
           "x1y22z \u00bd", "e\u0301 \u00e9 \uff26\uff35\uff2c\uff2c", "\U0001f469\u200d\U0001f467 \u4eba\u4eba\u751f",
           "a<|endoftext|>b <|endoftext|", "func main() {\n\tx := 0x1F // hi\n}", "\u0000\u00ad\ufffd\U0010ffff",
           "All human beings are born free"]

if sys.argv[1:] == ["bf16"]:
    bf16()
elif sys.argv[1:]:
    for name in sys.argv[1:]:
        make_tiny(name) if name.startswith("tiny") else make(name, *MODELS[name])
else:
    for name, (family, fields, dtype) in MODELS.items():
        make(name, family, fields, dtype)
    for name in ["tiny", "tiny-gpt2", "tiny-olmo2"]:
        make_tiny(name)
