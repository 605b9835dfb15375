"""Creates preferences/: the losses and rewards of TRL's DPOTrainer over 30 steps of AdamW.

The model is tiny, tuned with new low-rank adapters, which preferences/adapter holds, or with all weights.
The pairs have answers of different lengths, and some share a prompt or its beginning. The script works with
transformers 5.24.0, torch 2.15.0, peft 0.21.2 and trl 1.16.0:

    python3 preferences.py
"""

import json
import os
import shutil
import warnings

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()

HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.path.join(HERE, "preferences")

PAIRS = [
    ("Permission is ", "hereby granted, free of charge", "denied"),
    ("Permission is hereby ", "granted", "taken away from every person who asks for it"),
    ("Permission is ", "granted to any person", "not granted to any person"),
    ("The software is provided ", "as is", "with warranties of any kind"),
    ("The software is provided \"as is\", ", "without warranty of any kind", "and it works"),
    ("In no event shall ", "the authors be liable for any claim", "anything happen at all"),
]

# name: adapters or not, loss
RUNS = {
    "lora": (True, dict(loss_type=["sigmoid"], beta=0.1)),
    "full": (False, dict(loss_type=["sigmoid"], beta=0.5)),
    "ipo": (False, dict(loss_type=["ipo"], beta=0.2)),
    "hinge": (False, dict(loss_type=["hinge"], beta=0.3)),
    "robust": (True, dict(loss_type=["robust"], beta=0.3, label_smoothing=0.1)),
}


def run(adapted, loss):
    """Returns the losses, the margins and the accuracies of 30 steps, and the tokens of the answers."""
    path = os.path.join(HERE, "tiny")
    torch.manual_seed(7)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear") if adapted else None
    data = Dataset.from_list([dict(prompt=p, chosen=c, rejected=r) for p, c, r in PAIRS])
    trainer = DPOTrainer(
        model, train_dataset=data, processing_class=tokenizer, peft_config=config,
        args=DPOConfig(output_dir="/tmp/preferences", report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
                       precompute_ref_log_probs=False, **loss))
    if adapted:
        folder = os.path.join(OUT, "adapter")
        shutil.rmtree(folder, ignore_errors=True)
        trainer.model.save_pretrained(folder)
        os.remove(os.path.join(folder, "README.md"))

    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(len(PAIRS))])
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3 if adapted else 1e-4, betas=(0.9, 0.99), eps=1e-8, weight_decay=0)
    out = dict(loss=loss["loss_type"][0], beta=loss["beta"], smoothing=loss.get("label_smoothing", 0),
               losses=[], margins=[], accuracies=[])
    trainer.model.train()
    for _ in range(30):
        value = trainer.compute_loss(trainer.model, dict(batch))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        out["losses"].append(value.item())
    metrics = trainer._metrics["train"]
    out["margins"], out["accuracies"] = metrics["rewards/margins"], metrics["rewards/accuracies"]

    n = batch["attention_mask"].sum(1).tolist()
    ids = [row[:k] for row, k in zip(batch["input_ids"].tolist(), n)]
    masks = [row[:k] for row, k in zip(batch["completion_mask"].tolist(), n)]
    half = len(PAIRS)
    tokens = [dict(chosen=ids[i], rejected=ids[half + i], chosen_mask=masks[i], rejected_mask=masks[half + i])
              for i in range(half)]
    return out, tokens


if __name__ == "__main__":
    os.makedirs(OUT, exist_ok=True)
    result = {"pairs": [dict(prompt=p, chosen=c, rejected=r) for p, c, r in PAIRS], "runs": {}}
    for name, (adapted, loss) in RUNS.items():
        result["runs"][name], result["tokens"] = run(adapted, loss)
        print(name, result["runs"][name]["losses"][::10], result["runs"][name]["margins"][-1])
    with open(os.path.join(OUT, "golden.json"), "w") as f:
        json.dump(result, f)
        f.write("\n")
