#!/usr/bin/env python3
"""BERT-base at 128 positions on one NVIDIA GPU: the JAX engine beside Hugging Face's model in PyTorch, in turn.

    scripts/bench_gpu.py 128 512     # examples of a micro-batch; four micro-batches a step, bfloat16, dropout 0.1

It needs JAX and PyTorch with CUDA. The peer is BertForPreTraining with sdpa attention in autocast and fused AdamW,
eager and compiled. Ours is `bert bench pretrain` with LAMB. Each side is a process of its own.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ACCUMULATION = 4
STEPS = 12
PEER = """
import sys, time, torch
from transformers import BertConfig, BertForPreTraining
size, mode, accumulation, steps = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_float32_matmul_precision("high")
model = BertForPreTraining(BertConfig(vocab_size=30400, attention_probs_dropout_prob=0.0)).cuda().train()
run = torch.compile(model) if mode == "compiled" else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
ids = torch.randint(5, 30000, (size, 128), device="cuda")
labels = torch.full_like(ids, -100)
labels[:, 1:21] = ids[:, 1:21]
pairs = torch.randint(0, 2, (size,), device="cuda")
times = []
for _ in range(5 + steps):
    began = time.perf_counter()
    for _ in range(accumulation):
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(input_ids=ids, labels=labels, next_sentence_label=pairs).loss
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    times.append(time.perf_counter() - began)
median = sorted(times[5:])[steps // 2]
print(accumulation * size / median, torch.cuda.max_memory_allocated() / 1e9)
"""
LAYOUT = "given --parallel.pipeline-stages null --parallel.pipeline-device-mapping null"


def of_pytorch(size: int, mode: str) -> tuple[float, float]:
    """Return examples per second and GB of the peer."""
    words = [sys.executable, "-c", PEER, str(size), mode, str(ACCUMULATION), str(STEPS)]
    printed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    speed, memory = map(float, printed.split()[-2:])
    return speed, memory


def of_jax(size: int) -> tuple[float, float]:
    """Return examples per second and GB of the JAX engine."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "bench.json"
        words = [
            sys.executable,
            "-m",
            "bert_cli",
            "bench",
            "pretrain",
            "--engine",
            "jax",
            "--require-gpu",
        ]
        words += [
            "--config",
            "pretrain_base_128_phase1",
            "--precision",
            "mixed_bfloat16",
            "--generated-dataset",
        ]
        words += ["--parallel.layout", *LAYOUT.split(), "--global-batch.replicas", "1"]
        words += ["--global-batch.micro-batch-size", str(size), "--steps", str(STEPS)]
        words += [
            "--global-batch.grad-acc-steps-per-replica",
            str(ACCUMULATION),
            "--json",
            str(output),
        ]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        metrics = json.loads(output.read_text())
    return metrics["examples_per_second"], metrics["peak_memory_bytes"] / 1e9


def main() -> None:
    """Print a line for each side and size."""
    for size in map(int, sys.argv[1:] or ["128"]):
        for name, (speed, memory) in {
            "JAX engine": of_jax(size),
            "PyTorch, eager": of_pytorch(size, "eager"),
            "PyTorch, compiled": of_pytorch(size, "compiled"),
        }.items():
            print(
                f"{name:<18} {ACCUMULATION} x {size}: {speed:8,.0f} examples/s, {memory:5.1f} GB",
                flush=True,
            )


if __name__ == "__main__":
    main()
