"""Creates greedy.json: 512 tokens that transformers generates greedily with the models of make.py.

    python3 greedy.py

The models get room for 576 positions; the position vectors of GPT-2 are repeated. A prompt is used whose most
probable tokens are always certain, so that rounding cannot change them. The script works with transformers 5.23.0
and torch 2.15.0.
"""

import json
import os
import warnings

import torch
import transformers

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()

os.chdir(os.path.dirname(os.path.abspath(__file__)))
torch.set_num_threads(1)  # the models are small

POSITIONS, TOKENS = 576, 512


def greedy(name):
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation="eager")
    model.config.max_position_embeddings = POSITIONS
    if name == "gpt2":
        table = model.transformer.wpe.weight.data
        model.transformer.wpe = torch.nn.Embedding.from_pretrained(table.repeat(POSITIONS // len(table), 1))
    torch.manual_seed(1)
    for _ in range(20):
        prompt = torch.randint(3, model.config.vocab_size, (1, 5))
        with torch.no_grad():
            ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                                 max_new_tokens=TOKENS, eos_token_id=None, pad_token_id=0, use_cache=True)
            logits = model(ids).logits[0, prompt.shape[1] - 1:-1]
        top = logits.topk(2).values
        margin = (top[:, 0] - top[:, 1]).min().item()
        tokens = ids[0, prompt.shape[1]:].tolist()
        if margin > 2e-4 and len(tokens) == TOKENS and logits.argmax(1).tolist() == tokens:
            print(name, margin, len(set(tokens)), flush=True)
            return {"prompt": prompt[0].tolist(), "tokens": tokens}
    raise SystemExit(name + ": no prompt has certain tokens")


if __name__ == "__main__":
    names = sorted(d for d in os.listdir() if os.path.exists(d + "/golden.safetensors"))
    results = {name: greedy(name) for name in names}
    with open("greedy.json", "w") as f:
        f.write("{\n" + ",\n".join(f" {json.dumps(n)}: {json.dumps(r)}" for n, r in results.items()) + "\n}\n")
