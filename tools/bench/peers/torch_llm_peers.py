"""Fine-tuning and decoding of models with published shapes and random weights, in PyTorch on one GPU.

    python3 torch_llm_peers.py lora MODEL                      # LoRA steps with torch.compile
    python3 torch_llm_peers.py bnb MODEL [HOW [BATCH SEQ]]     # QLoRA steps with transformers, PEFT and bitsandbytes; HOW is plain or checkpoint
    python3 torch_llm_peers.py decode MODEL [TEXTS]            # one token for each text, with a static cache and CUDA graphs

MODEL is llama124M, llama3.2-1B or llama3.1-8B, and the first is only for decode. Prints one JSON line, with the median of
wall-clock times after warm-up steps. Memory is the most that PyTorch's tensors took. The figures in BENCHMARKS.md were
measured with torch 2.11, transformers 5.17, peft 0.21 and bitsandbytes 0.50.
"""
import json
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

BF16 = torch.bfloat16
# vocabulary, width, layers, heads, key/value heads, hidden, tied, base of the rotary angles
SHAPES = {
    "llama124M": (50304, 768, 12, 12, 12, 2048, True, 1e4),
    "llama3.2-1B": (128256, 2048, 16, 32, 8, 8192, True, 5e5),
    "llama3.1-8B": (128256, 4096, 32, 32, 8, 14336, False, 5e5)}
BATCH = {"llama3.2-1B": (4, 4096), "llama3.1-8B": (2, 4096)}  # sequences and their tokens


class LoRA(nn.Module):
    def __init__(self, base, r=16, alpha=32):
        super().__init__()
        self.base, self.s = base, alpha / r
        self.a = nn.Parameter(torch.randn(r, base.in_features, device=base.weight.device) * 0.02)
        self.b = nn.Parameter(torch.zeros(base.out_features, r, device=base.weight.device))

    def forward(self, x):
        return self.base(x) + self.s * F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype))


class Block(nn.Module):
    def __init__(self, d, nh, kv, ff):
        super().__init__()
        hd = d // nh
        self.nh, self.kv, self.hd = nh, kv, hd
        self.n1, self.n2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.q, self.k, self.v = (nn.Linear(d, o, bias=False) for o in (nh * hd, kv * hd, kv * hd))
        self.o = nn.Linear(nh * hd, d, bias=False)
        self.gate, self.up, self.down = nn.Linear(d, ff, bias=False), nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)
        self.cache = None

    def rot(self, x, cs):
        c, s = cs
        a, b = x.chunk(2, -1)
        return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)

    def forward(self, x, cs, pos=None):
        B, T, d = x.shape
        h = self.n1(x)
        q = self.rot(self.q(h).view(B, T, self.nh, self.hd).transpose(1, 2), cs)
        k = self.rot(self.k(h).view(B, T, self.kv, self.hd).transpose(1, 2), cs)
        v = self.v(h).view(B, T, self.kv, self.hd).transpose(1, 2)
        if self.cache is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv != self.nh)
        else:
            ck, cv, mask = self.cache
            ck.index_copy_(2, pos, k)
            cv.index_copy_(2, pos, v)
            y = F.scaled_dot_product_attention(q, ck, cv, attn_mask=mask[pos], enable_gqa=self.kv != self.nh)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, -1))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class LM(nn.Module):
    def __init__(self, shape):
        super().__init__()
        V, d, L, nh, kv, ff, tied, theta = shape
        self.emb, self.blocks, self.norm = nn.Embedding(V, d), nn.ModuleList(Block(d, nh, kv, ff) for _ in range(L)), nn.RMSNorm(d, eps=1e-5)
        self.head = nn.Linear(d, V, bias=False)
        if tied:
            self.head.weight = self.emb.weight
        nn.init.normal_(self.emb.weight, std=0.02)

    def forward(self, ids, cs, targets=None, pos=None):
        x = self.emb(ids)
        for b in self.blocks:
            x = b(x, cs, pos)
        x = self.head(self.norm(x))
        return x if targets is None else F.cross_entropy(x.flatten(0, 1).float(), targets.flatten())


def angles(T, hd, theta, dev):
    a = torch.outer(torch.arange(T, device=dev).float(), theta ** (-torch.arange(0, hd, 2, device=dev).float() / hd))
    return a.cos(), a.sin()


def median(step, n, warm):
    for _ in range(warm):
        step()
    torch.cuda.synchronize()
    ts = []
    for _ in range(n):
        t = time.perf_counter()
        step()
        torch.cuda.synchronize()
        ts.append(time.perf_counter() - t)
    return sorted(ts)[n // 2]


def emit(**r):
    print(json.dumps(r), flush=True)


def lora(m):
    shape, (B, T) = SHAPES[m], BATCH[m]
    dev = "cuda"
    torch.manual_seed(0)
    with torch.device(dev):
        torch.set_default_dtype(BF16)
        model = LM(shape)
        torch.set_default_dtype(torch.float32)
    model.requires_grad_(False)
    for b in model.blocks:
        for n in ("q", "k", "v", "o", "gate", "up", "down"):
            setattr(b, n, LoRA(getattr(b, n)))
    ps = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(ps, lr=1e-5, fused=True)
    cs = angles(T, shape[1] // shape[3], shape[7], dev)
    ids, tg = (torch.randint(0, shape[0], (B, T), device=dev) for _ in range(2))
    f = torch.compile(model)

    def step():
        l = f(ids, cs, tg)
        l.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)

    torch.cuda.reset_peak_memory_stats()
    t = median(step, 10, 4)
    emit(bench=f"finetune_{m}_lora16", peer="torch.compile", us=round(t * 1e6), tok_s=round(B * T / t), trained=sum(p.numel() for p in ps),
         batch=B, seq=T, peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2))


def bnb(model, how="plain", batch=0, seq=0):
    import bitsandbytes, peft, transformers
    from transformers import LlamaConfig, LlamaForCausalLM
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    dev = "cuda"
    (V, d, L, nh, kv, ff, tied, theta), (B, T) = SHAPES[model], BATCH[model]
    B, T = int(batch) or B, int(seq) or T
    c = LlamaConfig(vocab_size=V, hidden_size=d, intermediate_size=ff, num_hidden_layers=L, num_attention_heads=nh,
                    num_key_value_heads=kv, max_position_embeddings=8192, tie_word_embeddings=tied, use_cache=False,
                    attn_implementation="sdpa")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(dev):
        m = LlamaForCausalLM(c)
    torch.set_default_dtype(torch.float32)

    # Quantize the linear layers of the blocks as transformers does for BitsAndBytesConfig(load_in_4bit, nf4, double quantization).
    for name, layer in list(m.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            q = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16,
                                           compress_statistics=True, quant_type="nf4", device="meta")
            q.weight = bitsandbytes.nn.Params4bit(layer.weight.data, requires_grad=False, compress_statistics=True,
                                                  quant_type="nf4", module=q)
            parent = m.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], q.to(dev))
            del layer
    m.is_loaded_in_4bit, m.is_quantized = True, True
    m.train()
    if how == "checkpoint":
        m = prepare_model_for_kbit_training(m, use_gradient_checkpointing=True,
                                            gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        m.requires_grad_(False)
    m = get_peft_model(m, LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM",
                       target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]))
    ps = [x for x in m.parameters() if x.requires_grad]
    opt = torch.optim.AdamW(ps, lr=1e-5, fused=True)
    ids = torch.randint(0, V, (B, T), device=dev)

    def step():
        with torch.autocast(dev, torch.bfloat16):
            l = m(input_ids=ids, labels=ids).loss
        l.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    t = median(step, 8, 3)
    emit(bench=f"finetune_{model}_lora16_nf4", peer="peft+bitsandbytes", how=how, us=round(t * 1e6), tok_s=round(B * T / t),
         trained=sum(x.numel() for x in ps), batch=B, seq=T, peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2),
         versions=dict(bitsandbytes=bitsandbytes.__version__, peft=peft.__version__, transformers=transformers.__version__))


@torch.no_grad()
def decode(m, texts="1", S=2048, at=1024):
    shape, B = SHAPES[m], int(texts)
    V, d, L, nh, kv = shape[:5]
    dev = "cuda"
    with torch.device(dev):
        torch.set_default_dtype(BF16)
        model = LM(shape)
        mask = torch.tril(torch.ones(S, S, dtype=torch.bool))
        for b in model.blocks:
            b.cache = torch.zeros(B, kv, S, d // nh), torch.zeros(B, kv, S, d // nh), mask
        torch.set_default_dtype(torch.float32)
    cs = angles(S, d // nh, shape[7], dev)
    f = torch.compile(lambda i, c, p: model(i, c, None, p)[:, -1].argmax(-1, keepdim=True), mode="reduce-overhead", fullgraph=True)
    ids = torch.zeros(B, 1, dtype=torch.long, device=dev)
    p = [at]

    def step():
        nonlocal ids
        pos = torch.tensor([p[0]], device=dev)
        ids = f(ids, (cs[0][pos], cs[1][pos]), pos).clone()
        p[0] += 1

    t = median(step, 100, 10)
    w = sum(x.numel() for x in model.parameters()) * 2 - (0 if shape[6] else V * d * 2)
    emit(bench=f"decode_{m}_b{B}", peer="torch.compile", us=round(t * 1e6, 1), tok_s=round(B / t), weights_gbps=round(w / t / 1e9), context=at)


if __name__ == "__main__":
    {"lora": lora, "bnb": bnb, "decode": decode}[sys.argv[1]](*sys.argv[2:])
