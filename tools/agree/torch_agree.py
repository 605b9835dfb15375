"""Trains the model in a folder created by `go run ./tools/agree write` in PyTorch, and writes the loss of every step.

    python3 torch_agree.py FOLDER [--device cpu|cuda] [--precision f32|bf16]

f32 computes in float32 throughout (no TF32); bf16 is autocast over float32 weights. It needs torch 2.4 or later, numpy and
safetensors.
"""
import argparse
import json
import pathlib

import numpy
import torch
import torch.nn.functional as F
from safetensors.torch import load_file


def model(weights, c, ids, targets):
    """The mean cross-entropy of a Llama-style model; weights by the names of published Llama weights."""
    batch, seq = ids.shape
    heads, kv, dim = c["heads"], c["kv_heads"], c["head_dim"]
    angles = torch.outer(torch.arange(seq, dtype=torch.float64),
                         c["rope_base"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)).to(ids.device)
    cos, sin = angles.cos().float(), angles.sin().float()

    def rotated(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], weights[name], c["eps"])

    def split(x, n):
        return x.view(batch, seq, n, dim).transpose(1, 2)

    x = F.embedding(ids, weights["model.embed_tokens.weight"])
    for i in range(c["layers"]):
        p = f"model.layers.{i}."
        linear = lambda x, name: F.linear(x, weights[p + name + ".weight"])
        h = norm(x, p + "input_layernorm.weight")
        q, k, v = (split(linear(h, f"self_attn.{n}_proj"), m) for n, m in (("q", heads), ("k", kv), ("v", kv)))
        k, v = (t.repeat_interleave(heads // kv, 1) for t in (rotated(k), v))
        y = F.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
        x = x + linear(y.transpose(1, 2).reshape(batch, seq, heads * dim), "self_attn.o_proj")
        h = norm(x, p + "post_attention_layernorm.weight")
        x = x + linear(F.silu(linear(h, "mlp.gate_proj")) * linear(h, "mlp.up_proj"), "mlp.down_proj")
    logits = F.linear(norm(x, "model.norm.weight"), weights.get("lm_head.weight", weights["model.embed_tokens.weight"]))
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="f32", choices=["f32", "bf16"])
    o = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    s = json.loads((o.folder / "settings.json").read_text())
    c, rates = s["model"], s["learning_rates"]
    weights = {name: t.to(o.device).requires_grad_() for name, t in load_file(o.folder / "model.safetensors").items()}
    tokens = torch.from_numpy(numpy.fromfile(o.folder / "tokens.i32", "<i4").astype("int64"))
    tokens = tokens.view(len(rates), s["batch"], c["seq"] + 1).to(o.device)
    optimizer = torch.optim.AdamW(
        [{"params": [w for w in weights.values() if w.dim() >= 2]},
         {"params": [w for w in weights.values() if w.dim() < 2], "weight_decay": 0}],
        betas=(s["beta1"], s["beta2"]), eps=s["epsilon"], weight_decay=s["weight_decay"])
    losses = []
    for rate, batch in zip(rates, tokens):
        with torch.autocast(o.device, torch.bfloat16, enabled=o.precision == "bf16"):
            loss = model(weights, c, batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), s["clip"])
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    losses = [loss.item() for loss in losses]
    who = f"torch-{o.device}-{o.precision}"
    print(f"{who}: {len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    (o.folder / f"losses.{who}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
