#!/usr/bin/env python3
"""Writes the golden vectors golden_*.safetensors beside this file.

    python make_golden.py

needs any Python with torch, numpy and safetensors. The references are PyTorch's own functions where it has one and the
formula written out where it has none, in float64 on one thread, differentiated by torch.autograd.

A file holds cases. Case NAME has the inputs NAME/x, NAME/weight, ... (float32, so that float32 and float64 programs start
from the same numbers; ids are int64), the output NAME/y, the upstream gradient NAME/g, and NAME/dx, NAME/dweight, ..., the
gradients of sum(g * y) (all float64). The metadata entry NAME is a JSON object: "op", its settings, "inputs", the
names of the inputs in the order of the op's arguments, and where the case is ill-conditioned "Float32Error", the relative
error that float32 may have. Random numbers depend on the case's name alone, so that adding a case changes no other.
"""

import json
import math
import pathlib
import zlib

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
HERE = pathlib.Path(__file__).parent


class File:
    """Collects the cases of one file."""

    def __init__(self, name):
        self.path = HERE / f"golden_{name}.safetensors"
        self.tensors, self.metadata = {}, {}

    def case(self, name, f, inputs, **settings):
        """Adds a case: f of the inputs, a dict of name to tensor, in order."""
        leaves = {k: v.double().requires_grad_() if v.is_floating_point() else v for k, v in inputs.items()}
        y = f(**leaves)
        g = Random(name + "/g").normal(*y.shape)
        (y * g.double()).sum().backward()
        self.put(name, {"y": y.detach(), "g": g}, inputs, {k: v for k, v in leaves.items() if v.is_floating_point()}, settings)

    def put(self, name, outputs, inputs, leaves, settings):
        for k, v in inputs.items():
            self.tensors[f"{name}/{k}"] = v.detach().clone(memory_format=torch.contiguous_format)
        for k, v in outputs.items():
            self.tensors[f"{name}/{k}"] = v.detach().clone(memory_format=torch.contiguous_format)
        for k, v in leaves.items():  # what the output does not depend on has no gradient: zero
            self.tensors[f"{name}/d{k}"] = torch.zeros_like(v) if v.grad is None else v.grad.contiguous()
        self.metadata[name] = json.dumps({**settings, "inputs": list(inputs)}, sort_keys=True)

    def save(self):
        save_file(self.tensors, self.path, metadata=self.metadata)
        print(f"{self.path.name}: {len(self.metadata)} cases, {self.path.stat().st_size} bytes")


class Random:
    """Random float32 numbers and ids that depend on a name."""

    def __init__(self, name):
        self.generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def normal(self, *shape, scale=1.0):
        return torch.randn(shape, generator=self.generator, dtype=torch.float32) * scale

    def ids(self, limit, *shape):
        return torch.randint(limit, shape, generator=self.generator)


def rmsnorm():
    out = File("rmsnorm")
    for rows, d, eps, scale in [(1, 1, 0.5, 1), (3, 7, 1e-6, 1), (17, 33, 1e-5, 1), (5, 64, 1e-5, 1e-3), (2, 65, 0.0, 1e3)]:
        name = f"{rows}x{d}-eps{eps}-scale{scale}"
        r = Random(name)
        out.case(name, lambda x, weight: F.rms_norm(x, (d,), weight, eps),
                 {"x": r.normal(rows, d, scale=scale), "weight": r.normal(d)}, op="RMSNorm", Eps=eps)
    out.save()


def rope_frequencies(head_dim, base, scaling=None):
    f = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is None:
        return f
    factor, low, high = scaling["Factor"], scaling["LowFreq"], scaling["HighFreq"]
    if high == 0:
        return f / factor
    # As the transformers library computes "llama3" scaling.
    original = scaling["Original"]
    wavelength = 2 * math.pi / f
    smooth = (original / wavelength - low) / (high - low)
    medium = (1 - smooth) * f / factor + smooth * f
    return torch.where(wavelength > original / low, f / factor, torch.where(wavelength < original / high, f, medium))


def rope_apply(x, seq, heads, head_dim, base=1e4, scaling=None):
    """Row r has position r mod seq; feature i of a head turns with feature i + head_dim/2."""
    angles = torch.outer(torch.arange(seq, dtype=torch.float64), rope_frequencies(head_dim, base, scaling))
    cos, sin = torch.cat([angles.cos()] * 2, -1)[:, None], torch.cat([angles.sin()] * 2, -1)[:, None]
    h = x.reshape(-1, seq, heads, head_dim)
    a, b = h.chunk(2, -1)
    return (h * cos + torch.cat([-b, a], -1) * sin).reshape(x.shape)


def rope():
    out = File("rope")
    llama3 = {"Factor": 8.0, "LowFreq": 1.0, "HighFreq": 4.0, "Original": 64}
    linear = {"Factor": 4.0, "LowFreq": 0.0, "HighFreq": 0.0, "Original": 0}
    for batch, seq, heads, head_dim, base, scaling in [
        (1, 1, 1, 2, 1e4, None), (2, 7, 3, 6, 1e4, None), (1, 65, 1, 4, 5e5, None), (1, 5, 1, 64, 1e4, None),
        (1, 33, 1, 16, 1e4, llama3), (2, 9, 1, 6, 1e4, linear),
    ]:
        name = f"B{batch}-T{seq}-H{heads}-Dh{head_dim}-base{base:g}" + ("" if scaling is None else f"-factor{scaling['Factor']:g}")
        settings = {"op": "RoPE", "Seq": seq, "Heads": heads, "HeadDim": head_dim, "Base": base}
        if scaling:
            settings["Scaling"] = scaling
        out.case(name, lambda x: rope_apply(x, seq, heads, head_dim, base, scaling),
                 {"x": Random(name).normal(batch * seq, heads * head_dim)}, **settings)
    out.save()


def attend(q, k, v, seq, heads, kv_heads, head_dim, causal=True, scale=None):
    def split(x, n):
        return x.reshape(-1, seq, n, head_dim).transpose(1, 2)

    # Written out, because PyTorch 2's own function takes the root of the scale and gives NaN for a negative one.
    k, v = (split(x, kv_heads).repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    scores = split(q, heads) @ k.mT * (head_dim ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(q.shape)


def attention():
    out = File("attention")
    for batch, seq, heads, kv_heads, head_dim, causal, scale in [
        (1, 1, 1, 1, 2, True, 0), (1, 1, 2, 1, 6, False, 0),
        (3, 7, 4, 2, 6, True, 0), (3, 7, 4, 2, 6, False, 0),  # grouped queries
        (2, 17, 3, 3, 2, True, 0), (2, 17, 3, 3, 2, False, 0.3),  # as many keys as queries
        (1, 7, 2, 1, 64, True, 0), (2, 3, 2, 1, 64, False, 0),  # one key for all
        (1, 65, 3, 1, 6, True, 0), (1, 65, 4, 2, 2, False, 0), (1, 65, 2, 2, 6, True, 1.5),
        (2, 7, 6, 2, 6, True, -0.7),
        (1, 130, 1, 1, 4, True, 0), (1, 129, 2, 1, 2, False, 0),
    ]:
        name = f"B{batch}-T{seq}-H{heads}-KV{kv_heads}-Dh{head_dim}-{'causal' if causal else 'full'}-scale{scale}"
        r = Random(name)
        out.case(name, lambda q, k, v: attend(q, k, v, seq, heads, kv_heads, head_dim, causal, scale or None),
                 {"q": r.normal(batch * seq, heads * head_dim), "k": r.normal(batch * seq, kv_heads * head_dim),
                  "v": r.normal(batch * seq, kv_heads * head_dim)},
                 op="Attention", Seq=seq, Heads=heads, KVHeads=kv_heads, HeadDim=head_dim, Causal=causal, Scale=scale)
    # Scores of about 300, whose exponentials overflow float32 unless the maximum is taken off first. Rounding them to
    # float32 alone costs 1e-5.
    name = "large-scores"
    r = Random(name)
    q, k, v = r.normal(17, 12), r.normal(17, 6), r.normal(17, 6)
    q[:, ::6], k[:, 0] = 32, 24
    out.case(name, lambda q, k, v: attend(q, k, v, 17, 2, 1, 6), {"q": q, "k": k, "v": v},
             op="Attention", Seq=17, Heads=2, KVHeads=1, HeadDim=6, Causal=True, Scale=0, Float32Error=1e-4)
    out.save()


def mlp():
    out = File("mlp")
    for rows, d, f in [(1, 1, 1), (3, 5, 7), (17, 8, 33), (7, 33, 16)]:
        name = f"linear-{rows}x{d}x{f}"
        r = Random(name)
        out.case(name, lambda x, w: F.linear(x, w), {"x": r.normal(rows, d), "w": r.normal(f, d)}, op="Linear")
        name = f"silu-{rows}x{d}x{f}"
        r = Random(name)
        s = d ** -0.5
        out.case(name, silu_mlp, {"x": r.normal(rows, d, scale=2), "gate": r.normal(f, d, scale=s), "up": r.normal(f, d, scale=s),
                                  "down": r.normal(d, f, scale=f ** -0.5)}, op="SiLUMLP")
    out.save()


def silu_mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def embedding():
    out = File("embedding")
    for rows, v, d in [(1, 1, 1), (9, 4, 3), (17, 50, 7)]:
        name = f"{rows}-of-{v}x{d}"
        r = Random(name)
        out.case(name, lambda ids, table: F.embedding(ids, table), {"ids": r.ids(v, rows), "table": r.normal(v, d)}, op="Embedding")
    out.save()


def cross_entropy():
    out = File("crossentropy")
    for rows, v, d, ignored, scale in [(1, 1, 1, [], 1), (1, 3, 2, [], 1), (7, 5, 3, [0, 3, 6], 1), (17, 65, 9, [1], 10), (5, 300, 7, [0, 1, 2, 3], 1)]:
        name = f"{rows}x{v}-ignored{len(ignored)}-scale{scale}"
        r = Random(name)
        targets = r.ids(v, rows)
        targets[ignored] = -1
        out.case("logits-" + name, lambda logits, targets: F.cross_entropy(logits, targets, ignore_index=-1),
                 {"logits": r.normal(rows, v, scale=scale), "targets": targets}, op="CrossEntropy")
        out.case("linear-" + name, lambda x, w, targets: F.cross_entropy(F.linear(x, w), targets, ignore_index=-1),
                 {"x": r.normal(rows, d), "w": r.normal(v, d, scale=scale), "targets": targets}, op="LinearCrossEntropy")
    out.save()


def newton_schulz_apply(x, steps):
    a, b, c = 3.4445, -4.7750, 2.0315
    y = x / (x.norm() + 1e-7)
    if x.shape[0] > x.shape[1]:
        y = y.T
    for _ in range(steps):
        s = y @ y.T
        y = a * y + (b * s + c * s @ s) @ y
    return y.T if x.shape[0] > x.shape[1] else y


def newton_schulz():
    out = File("newtonschulz")
    for rows, columns, steps in [(1, 2, 5), (7, 7, 5), (5, 9, 5), (9, 5, 5), (17, 33, 3), (33, 16, 1), (1, 8, 2), (8, 1, 5)]:
        name = f"{rows}x{columns}-{steps}"
        out.case(name, lambda x: newton_schulz_apply(x, steps), {"x": Random(name).normal(rows, columns)}, op="NewtonSchulz", Steps=steps)
    out.save()


if __name__ == "__main__":
    rmsnorm()
    rope()
    attention()
    mlp()
    embedding()
    cross_entropy()
    newton_schulz()
