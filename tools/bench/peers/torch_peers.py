"""The measurements of tools/bench in PyTorch: eager, torch.compile, cuDNN's and flash attention, Liger's kernels.

    python3 torch_peers.py [--groups copy,ops,attention,loss,muon,kasmina,optim,stock,train,train-f8,recompute,train-published] > torch.jsonl
    python3 torch_peers.py --groups train --models llama925M --batch 40 > torch.jsonl
    python3 torch_peers.py --device cpu [--groups copy,gemm,kasmina,train] > torch.jsonl

One JSON line for each measurement, as tools/bench prints them; run both on one machine, one after the other, and make a
table of their lines with `go run ./tools/bench -table`. If a measurement fails, the error is printed to
standard error, the remaining measurements continue, and the exit status is 1. It needs torch 2.5 or later, with Triton on a GPU; it was run with torch 2.11 and Triton 3.6. Liger's kernels
(liger-kernel 0.6) are measured if that package is installed.

Bytes count each input read once and each output written once; causal attention counts half of the scores. Times of kernels
are medians of CUDA events, with the cache cleared before each launch; those of training steps are medians of wall-clock
times.
"""
import argparse
import datetime
import json
import os
import subprocess
import sys
import time

import torch
import torch._functorch.config
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch._functorch.config.donated_buffer = False  # backward passes are run again and again over one saved graph
BF16 = torch.bfloat16
DEVICE = "cuda"
MODELS = ["llama124M", "llama350M", "llama925M"]
BATCH = None  # sequences; each model's own
CLIP = 0  # the largest global norm of the gradients; no limit
FAILED = []  # what could not be measured


def emit(bench, peer, us, bytes=0, flops=0, **more):
    line = {"bench": bench, "peer": peer, "us": round(us, 2)}
    if bytes:
        line["gbps"] = round(bytes / us / 1e3, 2)
    if flops:
        line["tflops"] = round(flops / us / 1e6, 4)
    print(json.dumps(line | more), flush=True)
    print(f"{bench:52} {peer:24} {us:12.1f} us", file=sys.stderr)


def attempt(what, f, *args, **how):
    """Calls f. Should it fail, by want of memory for one, that costs no other measurement, and the program ends with status 1."""
    try:
        f(*args, **how)
    except Exception as e:
        print(f"{what}: {type(e).__name__}: {e}", file=sys.stderr)
        FAILED.append(what)
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def median(values):
    return sorted(values)[len(values) // 2]


def kernel(f):
    """Microseconds of a call: the cache is cleared before each."""
    from triton.testing import do_bench
    return do_bench(f, warmup=25, rep=100, return_mode="median") * 1e3


def wall(f, runs, warmup):
    """Microseconds of a call that ends when the device is done."""
    times = []
    for i in range(warmup + runs):
        start = time.perf_counter()
        f()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        if i >= warmup:
            times.append(time.perf_counter() - start)
    return median(times) * 1e6


def normal(*shape, grad=False, dtype=BF16):
    return torch.randn(*shape, device=DEVICE, dtype=dtype, requires_grad=grad)


def backward(output, inputs, grad):
    """A call that runs the backward pass of output again."""
    return lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)


def liger(module, name):
    """Something of Liger, None where that is not installed."""
    try:
        return getattr(__import__(f"liger_kernel.{module}", fromlist=[name]), name)
    except ImportError as e:
        print(f"Liger's {name} is left out: {e}", file=sys.stderr)
        return None


# ---- Kernels ----


def copy():
    x = normal(1 << 30)
    y = torch.empty_like(x)
    emit("copy_2GiB", "torch", kernel(lambda: y.copy_(x)), bytes=4 * x.numel())
    del x, y
    a, b = normal(8192, 8192), normal(8192, 8192)
    emit("gemm_8192_bf16", "cublas", kernel(lambda: a @ b), flops=2 * 8192**3)


def ops():
    for f in (rms_norm, silu_mul, rope, cross_entropy, embedding):
        f()


def rms_norm():
    rows, d = 32768, 4096
    shape, size = f"{rows}x{d}", 2 * rows * d
    x, w, g = normal(rows, d, grad=True), normal(d, grad=True), normal(rows, d)
    norm = lambda x, w: F.rms_norm(x, (d,), w, 1e-5)
    peers = {"inductor": torch.compile(norm)}
    if op := liger("ops.rms_norm", "LigerRMSNormFunction"):
        peers["liger"] = lambda x, w: op.apply(x, w, 1e-5, 0.0, "llama", True)
    for peer, f in peers.items():
        y = f(x, w)
        emit(f"rmsnorm_fwd_{shape}", peer, kernel(lambda: f(x, w)), bytes=2 * size)
        emit(f"rmsnorm_bwd_{shape}", peer, kernel(backward(y, (x, w), g)), bytes=3 * size)

    def add_norm(x, r, w):
        s = x + r
        return s, norm(s, w)

    f, r, gs = torch.compile(add_norm), normal(rows, d), normal(rows, d)
    s, y = f(x, r, w)
    emit(f"add_rmsnorm_fwd_{shape}", "inductor", kernel(lambda: f(x, r, w)), bytes=4 * size)
    emit(f"add_rmsnorm_bwd_{shape}", "inductor",
         kernel(lambda: torch.autograd.grad((s, y), (x, w), (gs, g), retain_graph=True)), bytes=4 * size)


def silu_mul():
    rows, n = 16384, 11008
    shape, size = f"{rows}x{n}", 2 * rows * n
    a, b, g = normal(rows, n, grad=True), normal(rows, n, grad=True), normal(rows, n)
    peers = {"inductor": torch.compile(lambda a, b: F.silu(a) * b)}
    if op := liger("ops.swiglu", "LigerSiLUMulFunction"):
        peers["liger"] = op.apply
    for peer, f in peers.items():
        y = f(a, b)
        emit(f"silumul_fwd_{shape}", peer, kernel(lambda: f(a, b)), bytes=3 * size)
        emit(f"silumul_bwd_{shape}", peer, kernel(backward(y, (a, b), g)), bytes=5 * size)


def angles(seq, dim, base=1e4):
    a = torch.outer(torch.arange(seq, device=DEVICE).float(), base ** (-torch.arange(0, dim, 2, device=DEVICE).float() / dim))
    return a.cos(), a.sin()


def rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def rope():
    batch, seq, heads, dim = 32, 1024, 32, 128
    x, g = normal(batch, seq, heads, dim, grad=True), normal(batch, seq, heads, dim)
    cos, sin = (t[:, None] for t in angles(seq, dim))
    f = torch.compile(lambda x: rotated(x, cos, sin))
    y = f(x)
    emit("rope_32x1024x32x128", "inductor", kernel(lambda: f(x)), bytes=4 * x.numel())
    emit("rope_bwd_32x1024x32x128", "inductor", kernel(backward(y, (x,), g)), bytes=4 * x.numel())
    if op := liger("ops.rope", "LigerRopeFunction"):  # works in place, on queries and keys together
        q, k = (normal(batch, seq, heads // 2, dim).transpose(1, 2) for _ in range(2))
        c, s = (torch.cat((t.squeeze(1),) * 2, -1)[None].to(BF16) for t in (cos, sin))
        emit("rope_32x1024x32x128", "liger", kernel(lambda: op.apply(q, k, c, s)), bytes=4 * x.numel())


def cross_entropy():
    rows, v = 8192, 50304
    size = 2 * rows * v
    x, t = normal(rows, v, grad=True), torch.randint(0, v, (rows,), device=DEVICE)
    f = torch.compile(lambda x: F.cross_entropy(x.float(), t))
    y = f(x)
    emit(f"crossentropy_fwd_{rows}x{v}", "inductor", kernel(lambda: f(x)), bytes=size)
    emit(f"crossentropy_bwd_{rows}x{v}", "inductor", kernel(backward(y, (x,), torch.ones_like(y))), bytes=2 * size)


def embedding():
    rows, v, d = 32768, 50304, 768
    w, g = normal(v, d, grad=True), normal(rows, d)
    ids = torch.randint(0, v, (rows,), device=DEVICE)
    y = F.embedding(ids, w)
    emit(f"embedding_fwd_{rows}x{v}x{d}", "torch", kernel(lambda: F.embedding(ids, w)), bytes=4 * rows * d)
    w = w.detach().float().requires_grad_()  # whose gradient is float32, as a master weight's
    y = F.embedding(ids, w)
    emit(f"embedding_bwd_{rows}x{v}x{d}", "torch", kernel(backward(y, (w,), g.float())), bytes=2 * rows * d + 4 * v * d)


def attention():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    for b, h, s, d in [(32, 12, 1024, 64), (16, 16, 2048, 128), (4, 16, 8192, 128)]:
        q, k, v = (normal(b, h, s, d, grad=True) for _ in range(3))
        flops = 2 * b * h * s * s * d
        f = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        for peer, backend in (("flash2", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            with sdpa_kernel(backend):
                y = f()
                emit(f"attn_causal_fwd_b{b}h{h}s{s}d{d}", peer, kernel(f), flops=flops)
                back = kernel(backward(y, (q, k, v), torch.randn_like(y)))
                emit(f"attn_causal_bwd_b{b}h{h}s{s}d{d}", peer, back, flops=2.5 * flops)


def loss():
    rows, d, v = 16384, 2048, 50304
    h, t = normal(rows, d, grad=True), torch.randint(0, v, (rows,), device=DEVICE)
    w = (0.02 * normal(v, d)).requires_grad_()
    peers = {"inductor": torch.compile(lambda h, w: F.cross_entropy((h @ w.t()).float(), t))}
    if fused := liger("transformers", "LigerFusedLinearCrossEntropyLoss"):
        module = fused()
        peers["liger"] = lambda h, w: module(w, h, t)
    for peer, f in peers.items():
        def step():
            f(h, w).backward()
            h.grad = w.grad = None
        step()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        extra = torch.cuda.max_memory_allocated() - before - 2 * (h.numel() + w.numel())
        emit(f"linear_ce_fwdbwd_{rows}x{d}x{v}", peer, kernel(step), flops=6 * rows * d * v, extra_gib=round(extra / 2**30, 3))


def muon():
    def newton_schulz(g):
        x = g / (g.norm() + 1e-7)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        return x

    for m, n in [(768, 3072), (2048, 2048), (2048, 8192)]:
        g, flops = normal(m, n), 5 * 2 * m * m * (2 * n + m)
        compiled = torch.compile(newton_schulz)
        compiled(g)
        emit(f"newton_schulz5_{m}x{n}", "torch", kernel(lambda: newton_schulz(g)), flops=flops)
        emit(f"newton_schulz5_{m}x{n}", "inductor", kernel(lambda: compiled(g)), flops=flops)


def kasmina_layer(rows, d, seeds, dtype, conv=True):
    """The four kinds as pointwise arithmetic, all seeds blending, and the layer's arguments and gradient. Without conv the
    fourth kind, the only one that looks at neighbours, is the identity."""
    chunk = d // seeds
    spread = lambda t: t.repeat_interleave(chunk)
    kind = spread(torch.randint(0, 4, (seeds,), device=DEVICE))
    alpha = spread(torch.rand(seeds, device=DEVICE))

    def layer(x, w, scale):
        a, p = spread(scale), torch.softmax(w.view(seeds, chunk), -1).view(-1)
        v = fourth = x.float()
        if conv:
            c = v.view(-1, seeds, chunk)
            one, two = (F.pad(c, (i, 0))[..., :chunk].reshape(v.shape) for i in (1, 2))
            taps = [spread(w.view(seeds, chunk)[:, i]) for i in range(3)]
            fourth = a * (taps[0] * v + taps[1] * one + taps[2] * two)
        t = torch.where(kind == 2, a * torch.relu(v * w), fourth)
        t = torch.where(kind == 0, v + a * w, torch.where(kind == 1, a * v * p, t))
        return (v + alpha * (t - v)).to(x.dtype)

    x, g = normal(rows, d, grad=True, dtype=dtype), normal(rows, d, dtype=dtype)
    w, scale = normal(d, grad=True, dtype=torch.float32), torch.rand(seeds, device=DEVICE, requires_grad=True)
    return layer, (x, w, scale), g


def kasmina_loop(rows, d, seeds, dtype):
    """The same layer as a program that goes through its seeds one by one."""
    chunk = d // seeds
    alpha, sizes = torch.rand(seeds).tolist(), [chunk] * seeds
    transforms = [
        lambda v, w, a: v + a * w,
        lambda v, w, a: a * v * torch.softmax(w, -1),
        lambda v, w, a: a * torch.relu(v * w),
        lambda v, w, a: a * (w[0] * v + w[1] * F.pad(v, (1, 0))[:, :-1] + w[2] * F.pad(v, (2, 0))[:, :-2]),
    ]

    def layer(x, w, scale):
        chunks = zip(x.float().split(sizes, 1), w.split(sizes), scale.unbind(), alpha)
        return torch.cat([(v + q * (transforms[i % 4](v, u, a) - v)).to(x.dtype) for i, (v, u, a, q) in enumerate(chunks)], 1)

    x, g = normal(rows, d, grad=True, dtype=dtype), normal(rows, d, dtype=dtype)
    w, scale = normal(d, grad=True, dtype=torch.float32), torch.rand(seeds, device=DEVICE, requires_grad=True)
    return layer, (x, w, scale), g


def kasmina():
    rows, d, seeds = 1024, 4000, 1000
    layer, args, g = kasmina_loop(rows, d, seeds, BF16)
    y = layer(*args)
    emit(f"kasmina_fwd_{rows}x{d}_s{seeds}", "torch_loop", wall(lambda: layer(*args), 5, 1), bytes=4 * rows * d)
    emit(f"kasmina_bwd_{rows}x{d}_s{seeds}", "torch_loop", wall(backward(y, args, g), 3, 1), bytes=6 * rows * d)
    for rows, d, seeds in [(32768, 4096, 1024), (64, 4000, 1000)]:
        for peer, conv in (("inductor", True), ("inductor_without_conv", False)):
            layer, args, g = kasmina_layer(rows, d, seeds, BF16, conv)
            f = torch.compile(layer)
            y = f(*args)
            emit(f"kasmina_fwd_{rows}x{d}_s{seeds}", peer, kernel(lambda: f(*args)), bytes=4 * rows * d)
            emit(f"kasmina_bwd_{rows}x{d}_s{seeds}", peer, kernel(backward(y, args, g)), bytes=6 * rows * d)


def optim():
    d, layers, ff, v = 1024, 24, 2816, 50304
    shapes = [(v, d), (d,)] + layers * ([(d,)] * 2 + [(d, d)] * 4 + [(ff, d)] * 3)
    params = [nn.Parameter(normal(*s, dtype=torch.float32)) for s in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    total = sum(p.numel() for p in params)
    grads = [p.grad for p in params]
    emit("gradnorm_llama350M", "torch", kernel(lambda: torch.nn.utils.get_total_norm(grads, foreach=True)), bytes=4 * total)
    adamw = torch.optim.AdamW(params, lr=3e-4, fused=True)
    emit("adamw_llama350M", "torch", kernel(adamw.step), bytes=28 * total)


def stock():
    rows, n = 32768, 4096
    shape, size = f"{rows}x{n}", 2 * rows * n
    x, y, row, wide = normal(rows, n, grad=True), normal(rows, n), normal(n), normal(rows, n, dtype=torch.float32)
    with torch.no_grad():
        for name, f, bytes in [
            ("add", torch.compile(lambda: x + y), 3 * size),
            ("add_row", torch.compile(lambda: x + row), 2 * size),
            ("tanh", torch.compile(lambda: torch.tanh(x)), 2 * size),
            ("cast", torch.compile(lambda: wide.to(BF16)), 3 * size),
            ("sum", torch.compile(lambda: x.float().sum()), size),
            ("sum_rows", torch.compile(lambda: x.float().sum(1)), size),
            ("sum_columns", torch.compile(lambda: x.float().sum(0)), size),
            ("transpose", torch.compile(lambda: x.t().contiguous()), 2 * size),
        ]:
            f()
            emit(f"{name}_{shape}", "inductor", kernel(f), bytes=bytes)
    f = torch.compile(lambda x: torch.softmax(x, -1))
    z = f(x)
    emit(f"softmax_fwd_{shape}", "inductor", kernel(lambda: f(x)), bytes=2 * size)
    emit(f"softmax_bwd_{shape}", "inductor", kernel(backward(z, (x,), y)), bytes=3 * size)


# ---- Training ----


def float8_rows(x):
    """x in float8 and what it is to be multiplied with, for each row."""
    scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def float8_product(a, b):
    """a·bᵀ of matrices rounded to float8 by rows."""
    (a, scale_a), (b, scale_b) = float8_rows(a), float8_rows(b)
    return torch._scaled_mm(a, b.t(), scale_a, scale_b.t(), out_dtype=BF16, use_fast_accum=True)


class Float8Product(torch.autograd.Function):
    """x·wᵀ and the gradient of x in float8, that of w in bfloat16: what torchao calls rowwise_with_gw_hp."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return float8_product(x, w)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return float8_product(g, w.t().contiguous()), g.t() @ x


class Float8Linear(nn.Linear):
    def forward(self, x):
        return Float8Product.apply(x.flatten(0, -2).to(BF16), self.weight.to(BF16)).unflatten(0, x.shape[:-1])


class Block(nn.Module):
    def __init__(self, d, heads, ff, kind=nn.Linear, kv=None):
        super().__init__()
        self.heads, self.kv = heads, kv or heads
        self.norm1, self.norm2 = nn.RMSNorm(d), nn.RMSNorm(d)
        linear = lambda i, o: kind(i, o, bias=False)
        wide = d // heads * (heads + 2 * self.kv)
        self.qkv, self.out, self.gate_up, self.down = linear(d, wide), linear(d, d), linear(d, 2 * ff), linear(ff, d)

    def forward(self, x, cos, sin):
        batch, seq, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq, self.heads + 2 * self.kv, d // self.heads).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv, self.kv), 1)
        y = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True,
                                           enable_gqa=self.kv != self.heads)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, d))
        a, b = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(a) * b)


class Model(nn.Module):
    """A Llama-style decoder whose output layer is the embedding."""

    def __init__(self, v, d, layers, heads, ff, recompute=False, kind=nn.Linear, kv=None):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(v, d), nn.RMSNorm(d)
        self.blocks = nn.ModuleList(Block(d, heads, ff, kind, kv) for _ in range(layers))
        self.recompute = recompute
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, ids, targets, cos, sin):
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False) if self.recompute else block(x, cos, sin)
        return F.cross_entropy(F.linear(self.norm(x), self.embedding.weight).float().flatten(0, 1), targets.flatten())


SIZES = {  # vocabulary, features, layers, heads, features of the perceptron, sequences, their length
    "llama124M": (50304, 768, 12, 12, 2048, 32, 1024),
    "llama350M": (50304, 1024, 24, 16, 2816, 16, 1024),
    "llama925M": (50304, 2048, 16, 16, 5632, 8, 2048),
    "llama3M_cpu": (256, 256, 4, 4, 704, 4, 256),
    "llama3.2-1B": (128256, 2048, 16, 32, 8192, 4, 4096),
}


def train_one(name, suffix="", base=1e4, **how):
    v, d, layers, heads, ff, batch, seq = SIZES[name]
    batch = BATCH or batch
    gpu = DEVICE == "cuda"
    torch._dynamo.reset()
    model = Model(v, d, layers, heads, ff, **how).to(DEVICE)
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    cos, sin = angles(seq, d // heads, base)
    ids, targets = (torch.randint(0, v, (batch, seq), device=DEVICE) for _ in range(2))

    def measure(peer, f):
        def step():
            with torch.autocast(DEVICE, BF16, enabled=gpu):
                loss = f(ids, targets, cos, sin)
            loss.backward()
            if CLIP:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            adamw.step()
            adamw.zero_grad(set_to_none=True)

        if gpu:
            torch.cuda.reset_peak_memory_stats()
        us = wall(step, 20 if gpu else 10, 5 if gpu else 2)
        params = sum(p.numel() for p in model.parameters())
        tokens = batch * seq
        more = {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)} if gpu else {}
        emit(f"train_{name}{suffix}", peer, us, flops=tokens * (6 * params + 6 * layers * d * seq),
             tok_s=round(tokens / us * 1e6), params=params, **more)

    if not gpu:
        measure("torch", model)
    measure("torch.compile", torch.compile(model))


def train(suffix="", **how):
    for name in MODELS:
        attempt(f"train_{name}{suffix}", train_one, name, suffix, **how)


def recompute():
    train("_recompute", recompute=True)


def train_published():
    """The shape of a published model."""
    attempt("train_llama3.2-1B", train_one, "llama3.2-1B", kv=8, base=5e5)


def train_f8():
    """With the products of the blocks' linear layers in float8, which a card with compute capability 9.0 has."""
    train("_f8", kind=Float8Linear)


# ---- The CPU ----


def cpu_copy():
    x = torch.randn(64 << 20)
    y = torch.empty_like(x)
    emit("copy_256MiB_cpu", "torch", wall(lambda: y.copy_(x), 20, 1), bytes=8 * x.numel())


def cpu_gemm():
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    emit("gemm_1024_f32_cpu", "torch", wall(lambda: a @ b, 50, 1), flops=2 * 1024**3)


def cpu_kasmina():
    rows, d, seeds = 1024, 4096, 256
    layer, args, g = kasmina_layer(rows, d, seeds, torch.float32)

    def both(f):
        torch.autograd.grad(f(*args), args, g)

    for peer, f in (("torch_no_telemetry", layer), ("inductor_no_telemetry", torch.compile(layer))):
        with torch.no_grad():
            emit(f"kasmina_fwd_{rows}x{d}_s{seeds}_cpu", peer, wall(lambda: f(*args), 10, 2), bytes=8 * rows * d)
        emit(f"kasmina_fwdbwd_{rows}x{d}_s{seeds}_cpu", peer, wall(lambda: both(f), 10, 2), bytes=20 * rows * d)


def cpu_train():
    train_one("llama3M_cpu")


GROUPS = {
    "cuda": {f.__name__.replace("_", "-"): f for f in (copy, ops, attention, loss, muon, kasmina, optim, stock, train, train_f8, recompute, train_published)},
    "cpu": {"copy": cpu_copy, "gemm": cpu_gemm, "kasmina": cpu_kasmina, "train": cpu_train},
}


def where():
    """Says where and when this runs."""
    line = {"bench": "run", "peer": "torch", "versions": f"torch {torch.__version__}", "date": str(datetime.date.today()),
            "command": "python3 " + " ".join(["torch_peers.py"] + sys.argv[1:])}
    if DEVICE == "cuda":
        driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                                capture_output=True, text=True)
        line |= {"card": torch.cuda.get_device_name(), "driver": driver.stdout.split("\n")[0],
                 "versions": f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"}
    else:
        line["card"] = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    print(json.dumps(line), flush=True)


def main():
    global DEVICE, MODELS, BATCH, CLIP
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=list(GROUPS))
    parser.add_argument("--groups", help="separated by commas (default: all)")
    parser.add_argument("--models", help="that train and recompute train, separated by commas (default: all)")
    parser.add_argument("--batch", type=int, help="sequences in a batch (default: the model's own)")
    parser.add_argument("--clip", type=float, default=0, help="limit the global norm of the gradients to this (default: no limit)")
    o = parser.parse_args()
    DEVICE, BATCH, CLIP = o.device, o.batch, o.clip
    MODELS = o.models.split(",") if o.models else MODELS
    groups = o.groups.split(",") if o.groups else list(GROUPS[DEVICE])
    for name in groups:
        if name not in GROUPS[DEVICE]:
            parser.error(f"there is no group {name}, want some of {', '.join(GROUPS[DEVICE])}")
    for name in MODELS:
        if name not in SIZES:
            parser.error(f"there is no model {name}, want some of {', '.join(SIZES)}")
    if BATCH is not None and BATCH < 1:
        parser.error(f"a batch of {BATCH} sequences, want at least 1")
    if not 0 <= CLIP < float("inf"):
        parser.error(f"--clip is {CLIP}, want a number above 0, or 0 for no limit")
    where()
    for name in groups:
        attempt(name, GROUPS[DEVICE][name])
    if FAILED:
        sys.exit(f"not measured: {', '.join(FAILED)}")


if __name__ == "__main__":
    main()
