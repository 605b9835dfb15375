"""The training steps of tools/bench in llm.c: GPT-2's models of the same width, depth and vocabulary.

    python3 llmc_peers.py path/to/train_gpt2cu [--models llama124M,llama350M] [--steps 100] > llmc.jsonl

Build the program from github.com/karpathy/llm.c with `make train_gpt2cu USE_CUDNN=1`. With CUDA 13, replace `cudaCpuDeviceId` in the
call of cudaMemAdvise in llmc/cuda_utils.cuh by `cudaMemLocation{cudaMemLocationTypeHost, 0}`. Like the other programs, it trains from
random weights on random tokens, in bfloat16 with float32 master weights. The output has the format of torch_peers.py. Times are
medians of the steps that the program prints, without the first third.
"""
import argparse
import array
import datetime
import json
import os
import random
import re
import subprocess
import sys
import tempfile

MODELS = {"llama124M": ("d12", 32), "llama350M": ("d24", 16)}  # llm.c's name, and sequences of 1024 tokens in a batch
SEQ, VOCAB = 1024, 50257


def write_tokens(path, n):
    """A file as llm.c reads it: 256 integers, of which the first three say what it is, and tokens of 16 bits."""
    with open(path, "wb") as f:
        array.array("i", [20240520, 1, n] + [0] * 253).tofile(f)
        array.array("H", random.Random(1).choices(range(VOCAB), k=n)).tofile(f)


def train(program, folder, model, steps):
    depth, batch = MODELS[model]
    data = os.path.join(folder, "tokens.bin")
    write_tokens(data, batch * SEQ * 8 + 1)
    done = subprocess.run(
        [program, "-i", data, "-j", data, "-e", depth, "-b", str(batch), "-t", str(SEQ), "-d", str(batch * SEQ), "-l", "3e-4", "-x",
         str(steps), "-v", str(10 * steps), "-m", "1", "-s", str(10 * steps), "-h", "0"], capture_output=True, text=True, cwd=folder)
    times = [float(t) for t in re.findall(r"^step .*\| ([0-9.]+) ms \|", done.stdout, re.M)]
    if done.returncode != 0 or len(times) < steps:
        sys.exit(f"{program} ended with status {done.returncode} after {len(times)} of {steps} steps:\n{(done.stdout + done.stderr)[-2000:]}")
    times = sorted(times[len(times) // 3:])
    took = times[len(times) // 2]
    print(json.dumps({"bench": f"train_{model}", "peer": "llm.c", "us": round(took * 1e3, 2), "tok_s": round(batch * SEQ / took * 1e3)}),
          flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    unknown = [m for m in args.models.split(",") if m not in MODELS]
    if unknown or args.steps < 3:
        parser.error(f"want models of {', '.join(MODELS)} and at least 3 steps, got {args.models} and {args.steps}")
    card = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    name, driver = card.stdout.split("\n")[0].split(", ")
    print(json.dumps({"bench": "run", "peer": "llm.c", "card": name, "driver": driver, "date": str(datetime.date.today()),
                      "command": "python3 " + " ".join(["llmc_peers.py"] + sys.argv[1:])}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models.split(","):
            train(os.path.abspath(args.program), folder, model, args.steps)


if __name__ == "__main__":
    main()
