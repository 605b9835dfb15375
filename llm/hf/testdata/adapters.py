"""Creates the folders in adapters/: adapters of small models in this folder, saved by PEFT.

Each folder has a golden.safetensors with ids, a mask of the tokens to learn, the logits in float32, and
the losses of 100 steps of AdamW on these tokens. The script works with transformers 5.24.0, torch 2.15.0
and peft 0.21.2:

    python3 adapters.py

To compare adapters that Kasmina has written with golden results:

    python3 adapters.py check llama2 lora FOLDER
"""

import os
import shutil
import sys
import warnings

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()

HERE = os.path.dirname(os.path.abspath(__file__))

# name: model, settings
ADAPTERS = {
    "lora": ("llama2", dict(r=4, lora_alpha=8, target_modules="all-linear")),
    "rslora": ("qwen2.5", dict(r=6, lora_alpha=5, use_rslora=True, target_modules=["q_proj", "v_proj"])),
    "dora": ("gemma3", dict(r=3, lora_alpha=6, use_dora=True, target_modules="all-linear",
                            rank_pattern={"q_proj": 5}, alpha_pattern={"layers.1.mlp.up_proj": 2})),
    # The embedding and the output layer, which share no weight, and an embedding that the output layer shares.
    "outer": ("llama2", dict(r=4, lora_alpha=6, target_modules=["embed_tokens", "lm_head", "q_proj"])),
    "outer-dora": ("llama2", dict(r=4, lora_alpha=6, use_dora=True, target_modules=["lm_head", "v_proj"])),
    "tied": ("gemma3", dict(r=3, lora_alpha=6, target_modules=["embed_tokens", "q_proj"])),
}


def load(name):
    path = os.path.join(HERE, name)
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def create(name, base, settings):
    torch.manual_seed(7)
    model = get_peft_model(load(base), LoraConfig(task_type="CAUSAL_LM", **settings))
    for key, p in model.named_parameters():
        if "lora_B" in key or "lora_embedding_A" in key:  # otherwise adapters change nothing at first
            torch.nn.init.normal_(p, std=0.2)
        if "lora_magnitude" in key:
            p.data += 0.1 * torch.rand_like(p)

    folder = os.path.join(HERE, "adapters", name)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, save_embedding_layers=name == "tied")
    os.remove(os.path.join(folder, "README.md"))

    ids = torch.randint(3, 48, (2, 12))
    learn = torch.rand(2, 12) < torch.tensor([[0.7], [0.3]])
    learn[:, 0], learn[:, -1] = False, True
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    save_file({"ids": ids, "learn": learn.long(), "logits": logits.contiguous(),
               "losses": train(model, ids, learn)}, os.path.join(folder, "golden.safetensors"))


def train(model, ids, learn):
    """Returns the losses of 100 steps of AdamW."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-4,
                                  betas=(0.9, 0.99), eps=1e-8, weight_decay=0)
    labels = torch.where(learn, ids, -100)
    losses = []
    for _ in range(100):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def check(base, name, folder):
    golden = load_file(os.path.join(HERE, "adapters", name, "golden.safetensors"))
    model = PeftModel.from_pretrained(load(base), folder)
    with torch.no_grad():
        logits = model(input_ids=golden["ids"]).logits
    print("distance of the logits:", ((logits - golden["logits"]).norm() / golden["logits"].norm()).item())


if __name__ == "__main__":
    if sys.argv[1:2] == ["check"]:
        check(*sys.argv[2:])
    else:
        for adapter, (model, options) in ADAPTERS.items():
            create(adapter, model, options)
