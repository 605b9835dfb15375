#!/usr/bin/env python3
"""Writes the golden vectors golden_*.safetensors beside this file.

    python make_golden.py

needs any Python with torch, numpy and safetensors. The references are PyTorch's own functions where it has one and the
formula written out where it has none, in float64 on one thread, differentiated by torch.autograd.

A file holds cases. Case NAME has the inputs NAME/x, NAME/weight, ... (float32, so that float32 and float64 programs start
from the same numbers; ids are int64), the output NAME/y, the upstream gradient NAME/g, and NAME/dx, NAME/dweight, ..., the
gradients of sum(g * y) (all float64). The metadata entry "cases" is a JSON object of case names to objects with "Op", the
op's settings, "Inputs", the names of the inputs in the order of the op's arguments, and where a case is ill-conditioned
"Float32Error", the relative error that float32 may have. Random numbers depend on the case's name alone, so that adding a
case changes no other.
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
        self.tensors, self.cases = {}, {}

    def case(self, name, f, inputs, **settings):
        """Adds a case: f of the inputs, a dict of name to tensor, in order."""
        leaves = {k: v.double().requires_grad_() if v.is_floating_point() else v for k, v in inputs.items()}
        y = f(**leaves)
        g = Random(name + "/g").normal(*y.shape)
        (y * g.double()).sum().backward()
        self.put(name, {"y": y.detach(), "g": g}, inputs, {k: v for k, v in leaves.items() if v.is_floating_point()}, settings)

    def put(self, name, outputs, inputs, leaves, settings):
        for k, v in {**inputs, **outputs}.items():
            self.tensors[f"{name}/{k}"] = v.detach().clone(memory_format=torch.contiguous_format)
        for k, v in leaves.items():  # what the output does not depend on has no gradient: zero
            self.tensors[f"{name}/d{k}"] = torch.zeros_like(v) if v.grad is None else v.grad.contiguous()
        self.cases[name] = {**settings, "Inputs": list(inputs)}

    def save(self):
        save_file(self.tensors, self.path, metadata={"cases": json.dumps(self.cases)})
        print(f"{self.path.name}: {len(self.cases)} cases, {self.path.stat().st_size} bytes")


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
                 {"x": r.normal(rows, d, scale=scale), "weight": r.normal(d)}, Op="RMSNorm", Eps=eps)
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
        settings = {"Op": "RoPE", "Seq": seq, "Heads": heads, "HeadDim": head_dim, "Base": base}
        if scaling:
            settings["Scaling"] = scaling
        out.case(name, lambda x: rope_apply(x, seq, heads, head_dim, base, scaling),
                 {"x": Random(name).normal(batch * seq, heads * head_dim)}, **settings)
    out.save()


def attend(q, k, v, seq, heads, kv_heads, head_dim, causal=True, scale=None, starts=None):
    def split(x, n):
        return x.reshape(-1, seq, n, head_dim).transpose(1, 2)

    # Written out, because PyTorch 2's own function takes the root of the scale and gives NaN for a negative one.
    k, v = (split(x, kv_heads).repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    scores = split(q, heads) @ k.mT * (head_dim ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), -math.inf)
    if starts is not None:
        scores = scores.masked_fill(torch.arange(seq) < starts.reshape(-1, 1, seq, 1), -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(q.shape)


def attention():
    out = File("attention")
    for batch, seq, heads, kv_heads, head_dim, causal, scale in [
        (1, 1, 1, 1, 2, True, 0), (1, 1, 2, 1, 6, False, 0),
        (3, 7, 4, 2, 6, True, 0), (3, 7, 4, 2, 6, False, 0),  # grouped queries
        (2, 17, 3, 3, 2, True, 0), (2, 17, 3, 3, 2, False, 0.3),  # as many keys as queries
        (1, 7, 2, 1, 64, True, 0), (2, 3, 2, 1, 64, False, 0),  # one key for all
        (1, 65, 3, 1, 6, True, 0), (1, 65, 4, 2, 2, False, 0), (1, 65, 2, 2, 2, True, 1.5),
        (2, 7, 6, 2, 6, True, -0.7),
        (1, 130, 1, 1, 2, True, 0), (1, 129, 2, 1, 2, False, 0),
    ]:
        name = f"B{batch}-T{seq}-H{heads}-KV{kv_heads}-Dh{head_dim}-{'causal' if causal else 'full'}-scale{scale}"
        r = Random(name)
        out.case(name, lambda q, k, v: attend(q, k, v, seq, heads, kv_heads, head_dim, causal, scale or None),
                 {"q": r.normal(batch * seq, heads * head_dim), "k": r.normal(batch * seq, kv_heads * head_dim),
                  "v": r.normal(batch * seq, kv_heads * head_dim)},
                 Op="Attention", Seq=seq, Heads=heads, KVHeads=kv_heads, HeadDim=head_dim, Causal=causal, Scale=scale)
    # Scores of about 300, whose exponentials overflow float32 unless the maximum is taken off first. Rounding them to
    # float32 alone costs 1e-5.
    name = "large-scores"
    r = Random(name)
    q, k, v = r.normal(17, 12), r.normal(17, 6), r.normal(17, 6)
    q[:, ::6], k[:, 0] = 32, 24
    out.case(name, lambda q, k, v: attend(q, k, v, 17, 2, 1, 6), {"q": q, "k": k, "v": v},
             Op="Attention", Seq=17, Heads=2, KVHeads=1, HeadDim=6, Causal=True, Scale=0, Float32Error=1e-4)
    for seq, heads, kv_heads, head_dim, lengths in [
        (7, 4, 2, 6, [[3, 4], [1, 5, 1]]), (17, 2, 2, 2, [[17], [1] * 17]), (70, 1, 1, 6, [[64, 6]]),
        (130, 2, 1, 2, [[100, 1, 29], [3, 127]]),
    ]:
        name = f"documents-T{seq}-H{heads}-KV{kv_heads}-Dh{head_dim}"
        r = Random(name)
        rows = seq * len(lengths)
        starts = torch.tensor([sum(row[:i]) for row in lengths for i, n in enumerate(row) for _ in range(n)])
        out.case(name, lambda q, k, v, starts: attend(q, k, v, seq, heads, kv_heads, head_dim, starts=starts),
                 {"q": r.normal(rows, heads * head_dim), "k": r.normal(rows, kv_heads * head_dim),
                  "v": r.normal(rows, kv_heads * head_dim), "starts": starts},
                 Op="DocumentAttention", Seq=seq, Heads=heads, KVHeads=kv_heads, HeadDim=head_dim, Causal=True)
    out.save()


def mlp():
    out = File("mlp")
    for rows, d, f in [(1, 1, 1), (3, 5, 7), (17, 8, 33), (7, 33, 16)]:
        name = f"linear-{rows}x{d}x{f}"
        r = Random(name)
        out.case(name, lambda x, w: F.linear(x, w), {"x": r.normal(rows, d), "w": r.normal(f, d)}, Op="Linear")
        name = f"silu-{rows}x{d}x{f}"
        r = Random(name)
        s = d ** -0.5
        out.case(name, silu_mlp, {"x": r.normal(rows, d, scale=2), "gate": r.normal(f, d, scale=s), "up": r.normal(f, d, scale=s),
                                  "down": r.normal(d, f, scale=f ** -0.5)}, Op="SiLUMLP")
    out.save()


def silu_mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def embedding():
    out = File("embedding")
    for rows, v, d in [(1, 1, 1), (9, 4, 3), (17, 50, 7)]:
        name = f"{rows}-of-{v}x{d}"
        r = Random(name)
        out.case(name, lambda ids, table: F.embedding(ids, table), {"ids": r.ids(v, rows), "table": r.normal(v, d)}, Op="Embedding")
    out.save()


def cross_entropy():
    out = File("crossentropy")
    for rows, v, d, ignored, scale in [(1, 1, 1, [], 1), (1, 3, 2, [], 1), (7, 5, 3, [0, 3, 6], 1), (17, 65, 9, [1], 10), (5, 300, 7, [0, 1, 2, 3], 1)]:
        name = f"{rows}x{v}-ignored{len(ignored)}-scale{scale}"
        r = Random(name)
        targets = r.ids(v, rows)
        targets[ignored] = -1
        out.case("logits-" + name, lambda logits, targets: F.cross_entropy(logits, targets, ignore_index=-1),
                 {"logits": r.normal(rows, v, scale=scale), "targets": targets}, Op="CrossEntropy")
        out.case("linear-" + name, lambda x, w, targets: F.cross_entropy(F.linear(x, w), targets, ignore_index=-1),
                 {"x": r.normal(rows, d), "w": r.normal(v, d, scale=scale), "targets": targets}, Op="LinearCrossEntropy")
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
        # Five steps multiply small singular values, and their rounding errors, by up to 3.4445 ** 5 = 485.
        settings = {"Float32Error": 1e-5} if steps == 5 else {}
        out.case(name, lambda x: newton_schulz_apply(x, steps), {"x": Random(name).normal(rows, columns)},
                 Op="NewtonSchulz", Steps=steps, **settings)
    out.save()


STAGES = ["Dormant", "Germinated", "Training", "Grafting", "Stabilization", "Evaluating", "FineTuning", "Fossilized",
          "Culled", "Cancelled", "RolledBack"]
KINDS = ["Residual", "AttentionGate", "MLPExpansion", "ConvFilter"]
MIXING = ["LowRank", "ChunkMLP"]


def transform(kind, x, w, a):
    """t(x) of a blueprint for a chunk x [rows, C], a slot's weights w and scale a. A kind uses the first of the weights."""
    c = x.shape[-1]
    if kind in MIXING:
        m = len(w) // (2 * c)
        h = F.linear(x, w[:m * c].view(m, c))
        return x + a * F.linear(F.silu(h) if kind == "ChunkMLP" else h, w[m * c:2 * m * c].view(c, m))
    w = w[:c]
    if kind == "Residual":
        return x + a * w
    if kind == "AttentionGate":
        return a * x * w.softmax(-1)
    if kind == "MLPExpansion":
        return a * F.relu(x * w)
    taps = min(3, len(w))  # ConvFilter
    padded = F.pad(x, (taps - 1, 0))[:, None]
    return a * F.conv1d(padded, w[:taps].flip(0)[None, None])[:, 0]


def kasmina_apply(x, weights, scales, seeds, clip=math.inf, epsilon=0.0, limits=None):
    """limits are those of the strict mode: the lowest and the highest value of each seed's chunk."""
    chunks = []
    for i, (c, seed) in enumerate(zip(x.chunk(len(seeds), -1), seeds)):
        stage, w, a = seed["Stage"], weights[seed["Slot"]], scales[seed["Slot"]]
        held = c if limits is None else torch.where(c.abs() < epsilon, 0, c.clamp(*limits[i]))
        if stage == "Training":  # the straight-through estimator: the value of x, the parameters' gradient of t(x)
            t = transform(seed["Kind"], held.detach(), w, a)
            y = c + t - t.detach()
        elif stage in ("Grafting", "Stabilization", "Evaluating", "FineTuning", "Fossilized"):
            if stage in ("Evaluating", "Fossilized"):
                w, a = w.detach(), a.detach()
            alpha = 1.0 if stage in ("FineTuning", "Fossilized") else seed["Alpha"]
            y = held + alpha * (transform(seed["Kind"], held, w, a) - held)
        else:
            y = c.clone()
        if y.requires_grad:
            y.register_hook(lambda g: g * (clip / (g.norm(dim=-1, keepdim=True) + 1e-8)).clamp(max=1))
        chunks.append(y)
    return torch.cat(chunks, -1)


def kasmina_inputs(r, rows, seeds, chunk, slots, scale=1.0, width=0):
    return {"x": r.normal(rows, len(seeds) * chunk, scale=scale), "weights": r.normal(slots, max(width, chunk)), "scales": 1 + r.normal(slots)}


def random_seeds(r, seeds, slots, all_kinds=KINDS):
    """Seeds of any stage. Those that share a slot share its kind."""
    kinds = r.ids(len(all_kinds), slots)
    return [seed(STAGES[r.ids(len(STAGES), 1)], all_kinds[kinds[slot]], int(slot), int(r.ids(64, 1)) / 64)
            for slot in 1 + r.ids(slots - 1, seeds)]


def seed(stage, kind, slot, alpha):
    return {"Stage": stage, "Kind": kind, "Slot": slot, "Alpha": alpha}


def kasmina():
    out = File("kasmina")

    def case(name, rows, seeds, chunk, slots, scale=1.0, width=0):
        out.case(name, lambda x, weights, scales: kasmina_apply(x, weights, scales, seeds),
                 kasmina_inputs(Random(name), rows, seeds, chunk, slots, scale, width), Op="Kasmina", Seeds=seeds)

    for stage in STAGES:
        for kind in KINDS:  # two of the three seeds share a slot, and slot 3 is free
            case(f"{stage}-{kind}", 5, [seed(stage, kind, 1, 0.25), seed(stage, kind, 2, 0.625), seed(stage, kind, 1, 0.875)], 5, 4)
    for rows, seeds, chunk, slots in [(7, 13, 3, 6), (3, 31, 1, 9), (9, 17, 2, 5), (17, 2, 65, 2), (1, 1, 1, 2), (33, 5, 7, 3)]:
        name = f"mixed-{rows}x{seeds}x{chunk}-slots{slots}"
        case(name, rows, random_seeds(Random(name + "/seeds"), seeds, slots), chunk, slots)
    # Activations that the adaptive mode scales down and up again, by powers of two: the same function.
    case("large", 5, random_seeds(Random("large/seeds"), 11, 6), 3, 6, scale=1e8)
    # Kinds that need slots wider than the chunk, alone and beside the others.
    for stage in STAGES:
        for kind in MIXING:
            case(f"{stage}-{kind}", 5, [seed(stage, kind, 1, 0.25), seed(stage, kind, 2, 0.625), seed(stage, kind, 1, 0.875)], 5, 4, width=23)
    for rows, seeds, chunk, slots, width in [(7, 13, 3, 6, 20), (3, 31, 1, 9, 7), (9, 17, 2, 5, 4), (65, 2, 33, 2, 330), (2, 9, 5, 40, 9)]:
        name = f"mixed-{rows}x{seeds}x{chunk}-slots{slots}x{width}"
        kinds = KINDS + MIXING if width >= 2 * chunk else KINDS
        case(name, rows, random_seeds(Random(name + "/seeds"), seeds, slots, kinds), chunk, slots, width=width)
    case("large-mixing", 5, random_seeds(Random("large-mixing/seeds"), 11, 6, ["LowRank"]), 3, 6, scale=1e8, width=12)
    out.save()


def kasmina_options():
    """Clipping of gradients, and the strict mode, in whose cases "previous" is the input of the pass before."""
    out = File("kasmina_options")
    pointwise = [seed(stage, KINDS[i % 4], 1 + i % 4, 0.375) for i, stage in enumerate(STAGES)]
    for limit in [0.5, 1.5, 100.0]:
        name = f"clip{limit}"
        out.case(name, lambda x, weights, scales: kasmina_apply(x, weights, scales, pointwise, clip=limit),
                 kasmina_inputs(Random(name), 7, pointwise, 3, 5), Op="Kasmina", Seeds=pointwise, GradClip=limit)
    mixing = [seed(stage, MIXING[i % 2], 1 + i % 4, 0.375) for i, stage in enumerate(STAGES)]
    name = "mixing-clip1.5"
    out.case(name, lambda x, weights, scales: kasmina_apply(x, weights, scales, mixing, clip=1.5),
             kasmina_inputs(Random(name), 7, mixing, 3, 5, width=13), Op="Kasmina", Seeds=mixing, GradClip=1.5)
    for prefix, seeds, width in [("", pointwise, 3), ("mixing-", mixing, 13)]:
        for epsilon, spread in [(0.25, 0.25), (1e-8, 0.1)]:
            name = f"{prefix}strict{epsilon}-spread{spread}"
            previous = Random(name + "/previous").normal(7, len(seeds) * 3, scale=spread)
            statistics = [(c.mean(), c.std(correction=0)) for c in previous.double().chunk(len(seeds), -1)]
            limits = [(m - 6 * s, m + 6 * s) for m, s in statistics]
            out.case(name, lambda x, weights, scales: kasmina_apply(x, weights, scales, seeds, epsilon=epsilon, limits=limits),
                     kasmina_inputs(Random(name), 7, seeds, 3, 5, width=width), Op="Kasmina", Seeds=seeds, Epsilon=epsilon)
            out.tensors[name + "/previous"] = previous
    out.save()


def model():
    """A Llama of two blocks with a Kasmina layer between them, from ids to loss."""
    out = File("model")
    name, batch, seq, vocabulary, d, heads, kv_heads, head_dim, hidden, chunk, slots = "llama", 2, 9, 257, 15, 2, 1, 6, 33, 3, 6
    eps, blocks = 1e-5, 2
    seeds = [seed("Training", "Residual", 1, 0), seed("Grafting", "AttentionGate", 2, 0.375), seed("FineTuning", "MLPExpansion", 3, 1),
             seed("Evaluating", "ConvFilter", 4, 0.75), seed("Dormant", "Residual", 0, 0)]
    r = Random(name)

    def matrix(rows, columns):
        return r.normal(rows, columns, scale=columns ** -0.5)

    inputs = {"ids": r.ids(vocabulary, batch * seq), "targets": r.ids(vocabulary, batch * seq), "embedding": r.normal(vocabulary, d)}
    inputs["targets"][[3, 17]] = -1
    for i in range(blocks):
        b = f"block{i}."
        inputs |= {b + "norm1": 1 + r.normal(d, scale=0.1), b + "norm2": 1 + r.normal(d, scale=0.1),
                   b + "q": matrix(heads * head_dim, d), b + "k": matrix(kv_heads * head_dim, d), b + "v": matrix(kv_heads * head_dim, d),
                   b + "o": matrix(d, heads * head_dim), b + "gate": matrix(hidden, d), b + "up": matrix(hidden, d), b + "down": matrix(d, hidden)}
    inputs |= {"weights": r.normal(slots, chunk), "scales": 1 + r.normal(slots, scale=0.1), "norm": 1 + r.normal(d, scale=0.1),
               "head": matrix(vocabulary, d)}

    def loss(**p):
        x = F.embedding(p["ids"], p["embedding"])
        for i in range(blocks):
            w = {k.removeprefix(f"block{i}."): v for k, v in p.items() if k.startswith(f"block{i}.")}
            h = F.rms_norm(x, (d,), w["norm1"], eps)
            q = rope_apply(F.linear(h, w["q"]), seq, heads, head_dim)
            k = rope_apply(F.linear(h, w["k"]), seq, kv_heads, head_dim)
            x = x + F.linear(attend(q, k, F.linear(h, w["v"]), seq, heads, kv_heads, head_dim), w["o"])
            x = x + silu_mlp(F.rms_norm(x, (d,), w["norm2"], eps), w["gate"], w["up"], w["down"])
            if i == 0:
                x = kasmina_apply(x, p["weights"], p["scales"], seeds)
        return F.cross_entropy(F.linear(F.rms_norm(x, (d,), p["norm"], eps), p["head"]), p["targets"], ignore_index=-1)

    out.case(name, loss, inputs, Op="Llama", Seq=seq, Heads=heads, KVHeads=kv_heads, HeadDim=head_dim, Blocks=blocks, Eps=eps, Seeds=seeds)
    out.save()


def optimisers():
    """Cases of four steps: p is the parameter before the first, g has the gradient of every step and y the parameter after it."""
    out = File("optim")

    def case(name, shape, optimiser, rates, **settings):
        r = Random(name)
        start, grads = r.normal(*shape), r.normal(len(rates), *shape)
        p, after = torch.nn.Parameter(start.double()), []
        step = optimiser(p)
        for rate, g in zip(rates, grads.double()):
            p.grad = g.clone()
            step(rate)
            after.append(p.detach().clone())
        out.put(name, {"y": torch.stack(after)}, {"p": start, "g": grads}, {}, {**settings, "Rates": rates})

    def adamw(beta1, beta2, eps, decay):
        def start(p):
            o = torch.optim.AdamW([p], betas=(beta1, beta2), eps=eps, weight_decay=decay)

            def step(rate):
                o.param_groups[0]["lr"] = rate
                o.step()
            return step
        return start

    def muon(momentum, nesterov, decay, steps, rms_scale):
        def start(p):
            average = torch.zeros_like(p)

            @torch.no_grad()
            def step(rate):
                average.lerp_(p.grad, 1 - momentum)
                update = newton_schulz_apply(p.grad.lerp(average, momentum) if nesterov else average, steps)
                scale = 0.2 * max(p.shape) ** 0.5 if rms_scale else max(1, p.shape[0] / p.shape[1]) ** 0.5
                p.mul_(1 - rate * decay).sub_(rate * scale * update)
            return step
        return start

    for shape, beta1, beta2, eps, decay in [((7,), 0.9, 0.999, 1e-8, 0.0), ((3, 5), 0.9, 0.95, 1e-8, 0.1), ((17, 33), 0.8, 0.99, 1e-2, 1.0)]:
        case(f"adamw-{shape}-decay{decay}".replace(" ", ""), shape, adamw(beta1, beta2, eps, decay), [1e-2, 1e-2, 3e-3, 1e-3], Op="AdamW",
             Beta1=beta1, Beta2=beta2, Eps=eps, Decay=decay)
    for shape, momentum, nesterov, decay, rms in [((5, 5), 0.95, True, 0.0, False), ((9, 4), 0.95, True, 0.1, False),
                                                  ((7, 17), 0.9, False, 0.5, False), ((6, 11), 0.95, True, 0.1, True)]:
        case(f"muon-{shape}-decay{decay}".replace(" ", ""), shape, muon(momentum, nesterov, decay, 5, rms), [2e-2, 2e-2, 1e-2, 5e-3], Op="Muon",
             Momentum=momentum, Nesterov=nesterov, Decay=decay, Steps=5, RMSScale=rms)
    out.save()


if __name__ == "__main__":
    rmsnorm()
    rope()
    attention()
    mlp()
    embedding()
    cross_entropy()
    newton_schulz()
    kasmina()
    kasmina_options()
    model()
    optimisers()
