"""Writes nf4.json: matrices in NF4 as bitsandbytes encodes and decodes them.

Needs PyTorch and bitsandbytes; the file was made with torch 2.15.0 and bitsandbytes 0.50.2 on a CPU:

    python3 nf4.py > nf4.json
"""

import base64
import json

import bitsandbytes.functional as F
import torch


def text(t):
    return base64.b64encode(t.contiguous().numpy().tobytes()).decode()


def case(name, w):
    codes, state = F.quantize_4bit(w, quant_type="nf4", compress_statistics=True)
    scales = F.quantize_4bit(w, quant_type="nf4", compress_statistics=False)[1].absmax
    return {
        "name": name,
        "rows": w.shape[0],
        "cols": w.shape[1],
        "weights": text(w),
        "codes": text(codes.flatten()),
        "scales": text(scales),
        "nested_codes": text(state.absmax),
        "nested_scales": text(state.state2.absmax),
        "offset": text(state.offset.reshape(1)),
        "decoded": text(F.dequantize_4bit(codes, state).flatten()),
    }


torch.manual_seed(3)
normal = torch.randn(12, 448) * 0.02
wide = torch.randn(12, 256) * torch.exp2(-20 * torch.rand(12, 256))
zeros = torch.randn(10, 64)
zeros[3] = 0
print(json.dumps([case("normal", normal), case("wide", wide), case("a block of zeros", zeros)], indent=1))
