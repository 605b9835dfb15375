# Times training steps of a 124M Llama in PyTorch with bf16 autocast: without LoRA, and with LoRA of
# rank 16 from peft, with the other weights frozen or learning. Prints one line per measurement.
import time, torch, sys
from transformers import LlamaConfig, LlamaForCausalLM
from peft import LoraConfig, get_peft_model
torch.manual_seed(1)
torch.set_float32_matmul_precision("high")
c = LlamaConfig(vocab_size=50304, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
                num_attention_heads=12, num_key_value_heads=12, max_position_embeddings=1024,
                tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa")
x = torch.randint(0, 50304, (16, 1024), device="cuda")
def pace(name, targets, host, compiled):
    m = LlamaForCausalLM(c).cuda()
    if targets:
        m = get_peft_model(m, LoraConfig(r=16, lora_alpha=16, target_modules=targets))
        if host:
            for p in m.parameters(): p.requires_grad_(True)
    o = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-3, fused=True)
    f = torch.compile(m) if compiled else m
    took = []
    try:
        for i in range(16):
            torch.cuda.synchronize(); t = time.time()
            with torch.autocast("cuda", torch.bfloat16):
                l = f(input_ids=x, labels=x).loss
            l.backward(); torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            o.step(); o.zero_grad()
            torch.cuda.synchronize(); took.append(time.time() - t)
        took = sorted(took[6:])
        print(f"peft: {name:44} compiled {compiled}: median {took[len(took)//2]*1e3:7.2f} ms, least {took[0]*1e3:7.2f}", flush=True)
    except Exception as e:
        print("peft:", name, compiled, "failed:", str(e)[:200], flush=True)
    del m, o, f; torch.cuda.empty_cache()
every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
for compiled in (False, True):
    pace("plain", None, True, compiled)
    pace("q and v, host learns", ["q_proj", "v_proj"], True, compiled)
    pace("all weights, host learns", every, True, compiled)
    pace("all weights, host frozen", every, False, compiled)
