"""Compares models that start with half of the features and grow in width with static models and growth in depth.

    go run ./tools/bench study -prepare -data ~/text -ext .py -vocab 8192 -cache cache
    python3 width_growth.py --tokens cache/*-8192.tokens --out width.jsonl
    python3 width_growth.py --check

The models are those of the study with 8 blocks of 256 features in docs/GROWTH.md: RMSNorm, rotary positions, SwiGLU, tied
embeddings, heads of 64 features, output projections that start at zero, and Muon with a rate that is constant for half of the
run and then decreases to zero. AdamW updates embeddings and norms.

A model is written as BLOCKSxFEATURES. A model that grows is written as the models before and after each growth, separated by
dashes, with the shares of the time at which it grows: 4x128-8x256@0.1. Growth in depth copies the stack of blocks. Growth in
width copies every feature, every head and every hidden feature, and halves the weights of the copied inputs, so that the model
computes the same as before. Noise makes the copies differ: it is added to the weights of an input and subtracted from those of
its copy, which leaves their sum unchanged. (Samragh et al., "Scaling Smart: Accelerating Large Language Model Pre-training with
Small Model Initialization", 2024.) Optimizer moments grow as the gradients do.

All runs on a budget take as long as the largest model needs for its tokens. The time of a step is measured beforehand, without
compilation and evaluation. The time for growing counts. Steps are CUDA graphs, with compiled blocks and losses.

One JSON line for each run goes to --out. --check tests the arithmetic of growth on a CPU, in double precision. The program
needs torch 2.5 or later. docs/lab/growth.md presents the results.
"""
import argparse
import glob
import json
import math
import os
import sys
import time

import torch
import torch.nn.functional as F

HEAD = 64  # features of a head
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
MUON, WARMUP, MOMENTUM = 0.02, 50, 0.95
ADAM_SHARE, BETA1, BETA2, EPS, DECAY = 0.15, 0.9, 0.95, 1e-8, 0.1

# The usual arms, which are the models to compare, in the order of their runs, by the number of tokens per parameter.
ARMS = {
    10: ["8x256", "8x128-8x256@0.1", "4x128-8x256@0.1", "4x256-8x256@0.2", "8x128-8x256@0.05", "8x128-8x256@0.2",
         "4x128-8x256@0.05", "4x128-8x256@0.2", "4x256"],
    5: ["8x256", "4x256", "4x128-4x256@0.1", "8x128-8x256@0.1", "4x128-8x256@0.1", "4x128-4x256@0.05", "4x128-4x256@0.2",
        "8x128-8x256@0.05", "8x128-8x256@0.2", "4x128-8x256@0.2"],
}


# ---- The model ----


def parse_shape(text):
    blocks, dim = map(int, text.split("x"))
    return blocks, dim


def hidden(dim):
    """The hidden features of the perceptrons: 8/3 of the features, rounded up to a multiple of 32, as 704 for 256."""
    return (dim * 8 // 3 + 31) // 32 * 32


def new_parameters(shape, vocab, seed, dtype=torch.float32):
    """The parameters of a new model. Those of all blocks lie in one tensor."""
    blocks, dim = shape
    ff, r = hidden(dim), torch.Generator().manual_seed(seed)
    normal = lambda *size: torch.randn(*size, generator=r, dtype=dtype) * 0.02
    p = {"embed": normal(vocab, dim), "norm": torch.ones(dim, dtype=dtype),
         "norm1": torch.ones(blocks, dim, dtype=dtype), "norm2": torch.ones(blocks, dim, dtype=dtype)}
    for name in ("q", "k", "v"):
        p[name] = normal(blocks, dim, dim)
    for name in ("gate", "up"):
        p[name] = normal(blocks, ff, dim)
    p["o"], p["down"] = torch.zeros(blocks, dim, dim, dtype=dtype), torch.zeros(blocks, dim, ff, dtype=dtype)
    return p


def block_parameters(shape):
    blocks, dim = shape
    return blocks * (4 * dim * dim + 3 * dim * hidden(dim) + 2 * dim)


def rope_angles(seq, device, dtype):
    a = torch.outer(torch.arange(seq, device=device).double(), 1e4 ** (-torch.arange(0, HEAD, 2, device=device).double() / HEAD))
    return a.cos().to(dtype), a.sin().to(dtype)


def rms_norm(x, w):
    y = x if x.dtype == torch.float64 else x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
    return (y * w).to(x.dtype)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def block(x, cos, sin, norm1, norm2, q, k, v, o, gate, up, down):
    batch, seq, dim = x.shape
    linear = lambda x, w: F.linear(x, w.to(x.dtype))
    y = rms_norm(x, norm1)
    q, k, v = (linear(y, w).view(batch, seq, dim // HEAD, HEAD).transpose(1, 2) for w in (q, k, v))
    a = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
    x = x + linear(a.transpose(1, 2).reshape(batch, seq, dim), o)
    y = rms_norm(x, norm2)
    return x + linear(F.silu(linear(y, gate)) * linear(y, up), down)


def head_loss(x, norm, embed, targets):
    y = rms_norm(x, norm)
    logits = F.linear(y, embed.to(y.dtype)).flatten(0, 1)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets.flatten().long())


def embedding(ids, embed, dtype):
    return F.embedding(ids, embed).to(dtype)


def forward(p, ids, angles, dtype, embedding=embedding, block=block, head_loss=head_loss):
    """The mean loss of a batch of sequences, each with one more token than the model has positions."""
    x = embedding(ids[:, :-1], p["embed"], dtype)
    layers = [p[name].unbind() for name in ("norm1", "norm2") + MATRICES]
    for weights in zip(*layers):
        x = block(x, *angles, *weights)
    return head_loss(x, p["norm"], p["embed"], ids[:, 1:])


# ---- Growth ----


def widen(p, noise, seed=0):
    """Doubles the features, heads and hidden features of a model without changing what it computes.

    noise is the deviation of the noise, relative to the weights' root mean square. With 0.5, the weights of the wide model are
    smaller than those of the narrow one by √2, as those of a new model with twice the inputs would be."""
    r = torch.Generator(p["embed"].device).manual_seed(seed)
    wide = {}
    for name, w in p.items():
        if name in MATRICES:
            rows = torch.cat((w, w), -2) / 2
            deviation = noise * w.square().mean((-2, -1), keepdim=True).sqrt()
            n = deviation * torch.randn(rows.shape, generator=r, dtype=w.dtype, device=w.device)
            wide[name] = torch.cat((rows + n, rows - n), -1)
        else:
            wide[name] = torch.cat((w, w), -1)
    wide["norm"] = wide["norm"] / 2  # the logits are sums over twice as many features
    return wide


def widen_moments(first, second):
    """Grows the optimizer's moments as the gradients of a model grow without noise."""
    m, v = {}, {}
    for name, w in first.items():
        if name in MATRICES:
            w = torch.cat((w, w), -2)
        scale = 1 if name == "norm" else 0.5
        m[name] = torch.cat((w, w), -1) * scale
        if name in second:
            v[name] = torch.cat((second[name],) * 2, -1) * scale**2
    return m, v


def deepen(p):
    """Copies the stack of blocks."""
    return {name: torch.cat((w, w)) if name in MATRICES + ("norm1", "norm2") else w for name, w in p.items()}


def grow(state, old, new, noise, moments, seed):
    """Returns the parameters and moments of a model of another shape."""
    p, m, v = state
    while old[1] < new[1]:
        p, (m, v), old = widen(p, noise, seed), widen_moments(m, v), (old[0], 2 * old[1])
    while old[0] < new[0]:
        p, m, v, old = deepen(p), deepen(m), deepen(v), (2 * old[0], old[1])
    if old != new:
        raise ValueError(f"growth doubles features and blocks, and cannot end at {new}")
    if moments == "zero":
        m, v = ({name: torch.zeros_like(w) for name, w in x.items()} for x in (m, v))
    return p, m, v


# ---- Training ----


def orthogonalized(g):
    """Muon's Newton-Schulz iteration for a stack of matrices."""
    x = g.bfloat16()
    if tall := g.shape[-2] > g.shape[-1]:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).to(g.dtype)


class Trainer:
    """Trains models of one shape. Its tensors keep their places, so that a CUDA graph can repeat the step."""

    def __init__(self, shape, text, batch, seq, device, compiled):
        self.shape, self.text, self.batch, self.device = shape, text, batch, device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.angles = rope_angles(seq, device, torch.float32)
        to = lambda p: {name: w.to(device) for name, w in p.items()}
        self.p = {name: w.requires_grad_() for name, w in to(new_parameters(shape, text.vocab, 1)).items()}
        self.m = {name: torch.zeros_like(w) for name, w in self.p.items()}
        self.v = {name: torch.zeros_like(w) for name, w in self.p.items() if name not in MATRICES}
        self.starts = torch.zeros(batch, dtype=torch.long, device=device)
        self.span = torch.arange(seq + 1, device=device)
        self.rate, self.t, self.loss = (torch.zeros((), device=device) for _ in range(3))
        self.functions = compiled
        self.graph = self.capture() if device == "cuda" else None

    def capture(self):
        """A CUDA graph of the step."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()

        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.step()
        except RuntimeError as e:
            print(f"steps of {self.shape} are launched one kernel at a time, because they cannot become a graph: {e}", file=sys.stderr)
            return None
        return graph

    def step(self):
        ids = self.text.tokens[self.starts[:, None] + self.span]
        loss = forward(self.p, ids, self.angles, self.dtype, **self.functions)
        names = list(self.p)
        grads = dict(zip(names, torch.autograd.grad(loss, [self.p[name] for name in names])))
        with torch.no_grad():
            norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
            clip = (1 / (norm + 1e-6)).clamp(max=1)
            self.t += 1
            rest = self.rate * ADAM_SHARE
            for name in self.v:
                g, p, m, v = grads[name] * clip, self.p[name], self.m[name], self.v[name]
                m.lerp_(g, 1 - BETA1)
                v.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
                if "norm" not in name:
                    p *= 1 - rest * DECAY
                p -= rest * (m / (1 - BETA1**self.t)) / ((v / (1 - BETA2**self.t)).sqrt() + EPS)
            for group in (("q", "k", "v", "o"), ("gate", "up"), ("down",)):
                updates = []
                for name in group:
                    g, m = grads[name] * clip, self.m[name]
                    m.lerp_(g, 1 - MOMENTUM)
                    updates.append(g.lerp(m, MOMENTUM))
                rows, columns = updates[0].shape[-2:]
                for name, u in zip(group, orthogonalized(torch.cat(updates)).chunk(len(group))):
                    self.p[name].sub_(u * (self.rate * math.sqrt(max(1, rows / columns))))
        self.loss.copy_(loss.detach())

    def replay(self, starts, rate):
        self.starts.copy_(starts, non_blocking=True)
        self.rate.fill_(rate)
        self.graph.replay() if self.graph else self.step()

    def load(self, state, t):
        with torch.no_grad():
            for own, other in zip((self.p, self.m, self.v), state):
                for name in own:
                    own[name].copy_(other[name])
            self.t.fill_(t)

    def reset(self, seed):
        zeros = lambda x: {name: torch.zeros_like(w) for name, w in x.items()}
        self.load((new_parameters(self.shape, self.text.vocab, seed), zeros(self.m), zeros(self.v)), 0)

    def state(self):
        return tuple({name: w.detach() for name, w in x.items()} for x in (self.p, self.m, self.v))

    @torch.no_grad()
    def evaluate(self):
        """The mean held-out loss per token."""
        total = 0.0
        for starts in self.text.held_out.split(self.batch):
            ids = self.text.tokens[starts[:, None] + self.span]
            total += forward(self.p, ids, self.angles, self.dtype).item() * len(starts)
        return total / len(self.text.held_out)

    def seconds(self, least):
        """The duration of a step."""
        starts, steps = self.text.training[:self.batch], 0
        for _ in range(10):
            self.replay(starts, 0)
        synchronize(self.device)
        began = time.perf_counter()
        while True:
            for _ in range(10):
                self.replay(starts, 0)
            synchronize(self.device)
            steps += 10
            if (took := time.perf_counter() - began) >= least:
                return took / steps


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


class Text:
    """Tokens, divided into sequences for training and for evaluation."""

    def __init__(self, tokens, vocab, bytes_per_token, seq, device):
        self.vocab, self.bytes_per_token = vocab, bytes_per_token
        self.tokens = tokens.to(device)
        # Every 64th stretch of 16 sequences is held out. Its first and last sequences are not used at all, because they adjoin
        # the training text.
        sequences = torch.arange((len(tokens) - 1) // seq)
        stretch, at = sequences // 16, sequences % 16
        held = stretch % 64 == 32
        if not held.any():
            held = stretch % 4 == 2
        self.training = (sequences[~held] * seq).to(device)
        self.held_out = (sequences[held & (at > 0) & (at < 15)] * seq)[:512].to(device)

    def order(self, seed, sequences):
        """The starts of the sequences of a run, epoch by epoch."""
        r, parts = torch.Generator().manual_seed(seed), []
        while sequences > 0:
            parts.append(self.training[torch.randperm(len(self.training), generator=r).to(self.training.device)])
            sequences -= len(parts[-1])
        return torch.cat(parts)


def read_tokens(path, seq, device):
    """Reads a file of tokens of llm/data, and the byte-pair encoding next to it."""
    import numpy as np
    with open(path, "rb") as f:
        magic, header = f.readline(), json.loads(f.readline())
    if magic != b"kasmina tokens 1\n":
        sys.exit(f"{path} is not a file of tokens")
    ids = np.fromfile(path, dtype=f"<u{header['width']}", offset=4096, count=header["count"])
    lengths = [1] * 256
    with open(path.removesuffix(".tokens") + ".bpe") as f:
        merges = int(next(line for line in f if line.startswith("merges ")).split()[1])
        for _ in range(merges):
            a, b = map(int, f.readline().split())
            lengths.append(lengths[a] + lengths[b])
    lengths += [0] * (header["vocab_size"] - len(lengths))  # the end of a document
    counts = np.bincount(ids, minlength=len(lengths))
    vocab = (header["vocab_size"] + 63) // 64 * 64
    return Text(torch.from_numpy(ids.astype(np.int32)), vocab, float(counts @ np.array(lengths)) / len(ids), seq, device)


def run(arm, budget, seed, trainers, seconds, largest, args, text):
    """Trains an arm and returns its record."""
    shapes, _, shares = arm.partition("@")
    shapes = [parse_shape(s) for s in shapes.split("-")]
    shares = [float(s) for s in shares.split(",")] if shares else []
    if len(shares) != len(shapes) - 1:
        sys.exit(f"{arm}: want a share for each growth")

    tokens = budget * block_parameters(largest)
    total = tokens / (args.batch * args.seq) * seconds[largest]
    warmup = min(WARMUP, tokens / (args.batch * args.seq) / 20)
    order = text.order(seed, int(total / min(seconds.values()) + 2) * args.batch).split(args.batch)
    record = {"arm": arm, "tokens_per_parameter": budget, "random_seed": seed, "growths": []}
    planned, steps, losses, curve = 0.0, 0, [], []
    measured = 0.0

    for i, shape in enumerate(shapes):
        t = trainers[shape]
        if i == 0:
            t.reset(seed)
        else:
            before = trainers[shapes[i - 1]].evaluate()
            synchronize(args.device)
            began = time.perf_counter()
            t.load(grow(trainers[shapes[i - 1]].state(), shapes[i - 1], shape, args.noise, args.moments, seed), steps)
            synchronize(args.device)
            took = time.perf_counter() - began
            planned, measured = planned + took, measured + took
            record["growths"].append({"share": planned / total, "step": steps, "seconds": round(took, 4),
                                      "before": before / text.bytes_per_token, "after": t.evaluate() / text.bytes_per_token})

        end = (shares + [1.0])[i] * total
        synchronize(args.device)
        began = time.perf_counter()
        while planned + seconds[shape] / 2 < end:
            share = planned / total
            rate = MUON * min(1, (steps + 1) / warmup) * min(1, 2 * (1 - share))
            t.replay(order[steps], rate)
            losses.append(t.loss.clone())
            planned, steps = planned + seconds[shape], steps + 1
        synchronize(args.device)
        measured += time.perf_counter() - began

    losses = torch.stack(losses).tolist()
    portion = max(1, len(losses) // 50)
    for i in range(0, len(losses) - portion + 1, portion):
        curve.append(round(sum(losses[i:i + portion]) / portion, 4))
    last = t.evaluate()
    return record | {"loss": last / text.bytes_per_token, "loss_per_token": last, "steps": steps, "seconds": round(measured, 3),
                     "planned_seconds": round(total, 3), "tokens": steps * args.batch * args.seq, "training_losses": curve}


def check():
    """Tests growth in double precision: widening changes neither the loss nor, without noise, the gradients."""
    torch.manual_seed(1)
    vocab, seq, shape = 100, 16, (2, 128)
    p = {name: torch.randn_like(w) * (0.3 if "norm" in name else 0.05) + (1 if "norm" in name else 0)
         for name, w in new_parameters(shape, vocab, 1, torch.float64).items()}
    ids, angles = torch.randint(vocab, (3, seq + 1)), rope_angles(seq, "cpu", torch.float64)

    def gradients(p):
        p = {name: w.clone().requires_grad_() for name, w in p.items()}
        loss = forward(p, ids, angles, torch.float64)
        return loss.item(), dict(zip(p, torch.autograd.grad(loss, list(p.values()))))

    loss, g = gradients(p)
    for noise in (0, 0.5):
        wide = widen(p, noise)
        assert wide["q"].shape == (2, 256, 256) and wide["down"].shape == (2, 256, 2 * hidden(128)), "shapes"
        assert 2 * hidden(128) == hidden(256), "hidden features"
        same, wider = gradients(wide)
        print(f"noise {noise}: loss {loss:.15f}, after widening {same:.15f}")
        assert abs(loss - same) < 1e-12
        a, b = wider["q"].chunk(2, -2)
        print(f"  gradients of copied outputs differ by {(a - b).abs().max().item() / a.abs().max().item():.3g} of the largest")
        assert ((a - b).abs().max() < 1e-9 * a.abs().max()) == (noise == 0), "symmetry"
        if noise == 0:
            m, v = widen_moments(g, {name: x.square() for name, x in g.items() if name not in MATRICES})
            for name, x in wider.items():
                assert torch.allclose(x, m[name], rtol=1e-9, atol=1e-15), name
                assert name in MATRICES or torch.allclose(x.square(), v[name], rtol=1e-9, atol=1e-20), name
    ratio = (widen(p, 0.5)["up"].square().mean() / p["up"].square().mean()).item()
    print(f"noise 0.5: the mean square of the weights changes by a factor of {ratio:.3f}")
    assert abs(ratio - 0.5) < 0.02

    deep = deepen(p)
    assert deep["q"].shape[0] == 4 and deep["q"][2].equal(p["q"][0]) and deep["embed"].equal(p["embed"])
    q, _, _ = grow((p, g, {}), shape, (4, 256), 0.5, "kept", 1)
    assert q["gate"].shape == (4, hidden(256), 256)
    print("growth is correct")


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--tokens", help="file of tokens that tools/bench study -prepare has written")
    a.add_argument("--out", default="width.jsonl", help="file for the records; runs with a record are not repeated")
    a.add_argument("--device", default="cuda")
    a.add_argument("--budgets", default="10,5", help="tokens for each parameter in the blocks of the largest model; "
                   "other values than 10 and 5 need a list of arms")
    a.add_argument("--seeds", default="1", help="random seeds")
    a.add_argument("--limit", type=float, default=0, help="start no run that would end after so many seconds")
    a.add_argument("--batch", type=int, default=32)
    a.add_argument("--seq", type=int, default=1024)
    a.add_argument("--noise", type=float, default=0.5, help="noise added to the copies, relative to the weights")
    a.add_argument("--moments", default="kept", choices=("kept", "zero"), help="what happens to the optimizer's moments")
    a.add_argument("--timing", type=float, default=1, help="seconds for measuring the time of a step")
    a.add_argument("--check", action="store_true", help="only test the arithmetic of growth")
    a.add_argument("arms", nargs="*", help="models to compare instead of the usual ones, such as 8x256 8x128-8x256@0.1")
    args = a.parse_args()
    if args.check:
        return check()

    budgets, seeds = [float(b) for b in args.budgets.split(",")], [int(s) for s in args.seeds.split(",")]
    without_arms = [f"{b:g}" for b in budgets if b not in ARMS]
    if without_arms and not args.arms:
        a.error(f"there are no usual arms for {', '.join(without_arms)} tokens per parameter, only for "
                f"{' and '.join(map(str, ARMS))}: name the arms after the options, such as 8x256 8x128-8x256@0.1")

    started = time.perf_counter()
    say = lambda text: print(f"{time.perf_counter() - started:7.1f} s  {text}", flush=True)
    torch.set_float32_matmul_precision("high")
    text = read_tokens(args.tokens, args.seq, args.device)
    say(f"{len(text.tokens) / 1e6:.1f} million tokens of {text.bytes_per_token:.3f} bytes, "
        f"{len(text.held_out)} held-out sequences, torch {torch.__version__}")

    jobs = [(b, arm, seed) for seed in seeds for b in budgets for arm in args.arms or ARMS[b]]
    name = lambda r: (r["tokens_per_parameter"], r["arm"], r["random_seed"], r["noise"], r["moments"])
    done = []
    if os.path.exists(args.out):
        with open(args.out) as f:
            done = [name(json.loads(line)) for line in f]

    shapes = {parse_shape(s) for _, arm, _ in jobs for s in arm.partition("@")[0].split("-")}
    largest = max(shapes, key=block_parameters)
    jobs = [j for j in jobs if j + (args.noise, args.moments) not in done]
    compiled = {}
    if args.device == "cuda":
        compiled = {f.__name__: torch.compile(f, dynamic=False) for f in (embedding, block, head_loss)}
    trainers, seconds = {}, {}
    for shape in sorted(shapes):
        trainers[shape] = Trainer(shape, text, args.batch, args.seq, args.device, compiled)
        seconds[shape] = trainers[shape].seconds(args.timing)
        say(f"{shape[0]} blocks of {shape[1]}: {block_parameters(shape) / 1e6:.2f} million parameters in blocks, "
            f"{seconds[shape] * 1e3:.2f} ms for a step")
    for small in sorted(shapes):  # load the kernels of growth and evaluation
        trainers[small].evaluate()
        if small[1] < largest[1] and (small[0], largest[1]) in shapes:
            grow(trainers[small].state(), small, (small[0], largest[1]), args.noise, args.moments, 1)

    for budget, arm, seed in jobs:
        expected = 1.2 * budget * block_parameters(largest) / (args.batch * args.seq) * seconds[largest] + 2
        if args.limit and time.perf_counter() - started + expected > args.limit:
            say(f"left out, because of --limit: {budget:g} tokens per parameter, {arm}, random seed {seed}")
            continue
        r = run(arm, budget, seed, trainers, seconds, largest, args, text)
        r |= {"noise": args.noise, "moments": args.moments, "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
              "milliseconds": {f"{b}x{d}": round(s * 1e3, 3) for (b, d), s in seconds.items()}}
        with open(args.out, "a") as f:
            f.write(json.dumps(r) + "\n")
        growths = ", ".join(f"{g['before']:.4f} to {g['after']:.4f} at {g['share']:.3f} in {g['seconds']} s" for g in r["growths"])
        say(f"{budget:g} tokens per parameter, {arm}, random seed {seed}: {r['loss']:.4f} nats per byte, {r['steps']} steps in "
            f"{r['seconds']} s, planned {r['planned_seconds']} s  {growths}")


if __name__ == "__main__":
    main()
