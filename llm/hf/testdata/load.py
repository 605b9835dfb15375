"""Checks that transformers and peft load the folders that the command kasmina writes.

    go build ./cmd/kasmina && python3 llm/hf/testdata/load.py ./kasmina

The script tests every folder next to this file, with weights in one file and in several, and a trained
model. Each folder must load without warnings that the original does not cause, and must have the same
tensors and, unless the model was trained, the same logits. peft must be able to add LoRA and train it
for a step.
"""

import logging
import os
import pathlib
import subprocess
import sys
import tempfile

import peft
import torch
import transformers

HERE = pathlib.Path(__file__).parent


class Told(logging.Handler):
    """Collects the log messages of transformers."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


TOLD = Told()
transformers.logging.get_logger("transformers").addHandler(TOLD)
transformers.logging.set_verbosity_warning()


def load(folder):
    """Returns the model, the messages from loading it, and the logits for some ids."""
    TOLD.messages.clear()
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    transformers.GenerationConfig.from_pretrained(folder)
    for kind, keys in info.items():
        assert not keys, (folder, kind, keys)
    ids = torch.arange(3, 23).reshape(2, 10)
    with torch.no_grad():
        return model, list(TOLD.messages), model(ids).logits


def adapt(model):
    """Adds LoRA to all linear layers and makes a step."""
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear",
                                                       task_type="CAUSAL_LM"))
    ids = torch.arange(3, 23).reshape(2, 10)
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]).step()


def main(kasmina):
    with tempfile.TemporaryDirectory() as work:
        for source in sorted(p for p in HERE.iterdir() if p.is_dir()):
            want, told, logits = load(source)
            for how, more in {"one": [], "several": ["--shard", "0.000003"]}.items():
                out = f"{work}/{source.name}-{how}"
                subprocess.run([kasmina, "convert", "--model", source, "--out", out, *more], check=True)
                assert (how == "several") == (len(list(pathlib.Path(out).glob("*.safetensors"))) > 1)
                got, said, same = load(out)
                assert said == told, (out, said, told)
                mine, theirs = got.state_dict(), want.state_dict()
                assert mine.keys() == theirs.keys()
                for name in mine:
                    assert mine[name].dtype == theirs[name].dtype and mine[name].equal(theirs[name]), name
                assert same.equal(logits)
                adapt(got.float())
            print(source.name, "is the same", flush=True)
        out = f"{work}/trained"
        subprocess.run([kasmina, "train", "--model", HERE / "tiny", "--data", HERE / "../../../LICENSE",
                        "--out", out, "--steps", "5", "--seq", "32", "--quiet", "--device", "cpu"], check=True)
        got, said, _ = load(out)
        assert not said, said
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        got = got.float()
        text = tokenizer.decode(got.generate(**tokenizer("Permission is", return_tensors="pt"),
                                             max_new_tokens=20, do_sample=False)[0],
                                skip_special_tokens=True)
        ours = subprocess.run([kasmina, "generate", "--model", out, "--prompt", "Permission is", "-n", "20",
                               "--temperature", "0", "--precision", "f32"], check=True,
                              stdout=subprocess.PIPE, text=True).stdout
        assert ours == text + "\n", (ours, text)
        print("trained: both write", repr(text), flush=True)
        adapt(got)


main(os.path.abspath(sys.argv[1]))
