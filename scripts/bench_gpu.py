#!/usr/bin/env python3
"""BERT-base at 128 positions on one NVIDIA GPU: variants of the JAX engine beside PyTorch, in twelve minutes.

    scripts/bench_gpu.py OUT.jsonl                    # every row of the table, until --seconds have passed
    scripts/bench_gpu.py OUT.jsonl --rows lamb-128 pytorch-compiled-128
    scripts/bench_gpu.py OUT.jsonl --rehearse         # a tiny model on the CPU: do the flags and the patches work?

Four micro-batches a step, bfloat16, dropout 0.1. It needs JAX and PyTorch with CUDA. The peer is BertForPreTraining
with sdpa attention in autocast and fused AdamW. Ours is `bert bench pretrain` of the config, whose optimizer is LAMB.
Each row is a process of its own, and its result is a line of OUT.jsonl when it ends. The same command continues with
the rows that have no result, so a row that failed is tried again. The last rows compare losses with the CPU's, and
write a profile of the fastest row of ours.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ACCUMULATION = 4
PEER = """
import sys, time, torch
from transformers import BertConfig, BertForPreTraining
device, size, mode, accumulation, steps, layers, width = sys.argv[1:]
size, accumulation, steps, layers, width = map(int, (size, accumulation, steps, layers, width))
torch.set_float32_matmul_precision("high")
model = BertForPreTraining(BertConfig(
    vocab_size=30400, attention_probs_dropout_prob=0.0, num_hidden_layers=layers, hidden_size=width,
    num_attention_heads=width // 64, intermediate_size=4 * width)).to(device).train()
run = torch.compile(model) if mode == "compiled" else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
ids = torch.randint(5, 30000, (size, 128), device=device)
labels = torch.full_like(ids, -100)
labels[:, 1:21] = ids[:, 1:21]
pairs = torch.randint(0, 2, (size,), device=device)
times = []
for _ in range(5 + steps):
    began = time.perf_counter()
    for _ in range(accumulation):
        with torch.autocast(device, torch.bfloat16):
            loss = run(input_ids=ids, labels=labels, next_sentence_label=pairs).loss
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if device == "cuda":
        torch.cuda.synchronize()
    times.append(time.perf_counter() - began)
median = sorted(times[5:])[steps // 2]
memory = torch.cuda.max_memory_allocated() if device == "cuda" else 0
print(accumulation * size / median, memory)
"""
# Attention by cuDNN. The config has no dropout of the probabilities, which jax.nn.dot_product_attention does not have.
CUDNN = """
import os
import jax
from bert_cli.model.bert.encoder import SelfAttention
def context(self, x, bias, key):
    shape = (*x.shape[:2], self.config.num_attention_heads, -1)
    layers = self.query, self.key, self.value
    parts = [self.operations.project(layer, x).astype(self.compute_dtype).reshape(shape) for layer in layers]
    kind = os.environ["ATTENTION"]
    lengths = (bias[:, 0, 0] == 0).sum(-1, dtype="int32")  # a bias for cuDNN would be [B, 1, S, S]
    mixed = jax.nn.dot_product_attention(*parts, key_value_seq_lengths=lengths, implementation=kind)
    return mixed.reshape(x.shape)
SelfAttention.context = context
"""
# A mask by one round of the hash instead of two: neighbouring elements are less independent. For its speed only.
ROUND = """
from bert_cli.model.arithmetic import fused
def keep_mask(shape, rate, seed):
    return fused._mix(fused._indices_from(seed, shape) ^ seed) >= round(rate * 2**32) - 2**31
fused.keep_mask = keep_mask
"""
# Every operation as JAX differentiates it.
PLAIN = """
from bert_cli.model.arithmetic import fused
fused.is_fused = lambda x, fuse_above: False
"""
PROFILE = """
import os
import jax
from bert_cli.parallel.jax.engine import JaxEngine
plain, calls = JaxEngine._run_step, []
def run_step(self, *arguments):
    calls.append(1)
    if len(calls) == 4:  # after the warm-up
        jax.profiler.start_trace(os.environ["PROFILE"])
    result = plain(self, *arguments)
    if len(calls) == 5:
        jax.block_until_ready(jax.tree.leaves(vars(result)) if hasattr(result, "__dict__") else result)
        jax.profiler.stop_trace()
    return result
JaxEngine._run_step = run_step
"""
START = "\nimport sys\nfrom bert_cli.cli import main\nsys.exit(main(sys.argv[1:]))\n"
ADAMW = "--optimizer-opts.name AdamW --optimizer-opts.learning-rate.max-learning-rate 1e-5"
NO_DROPOUT = "--bert-config.hidden-dropout-prob 0"
BASE = "--config pretrain_base_128_phase1 --precision mixed_bfloat16"
TINY = "--config pretrain_tiny_128_phase1 --precision mixed_bfloat16 --bert-config.vocab-size 2000"
LAYOUT = "--parallel.layout given --parallel.pipeline-stages null --parallel.pipeline-device-mapping null"


class Row(NamedTuple):
    """A variant: the examples of a micro-batch, and what differs from the config."""

    size: int
    flags: str = ""
    xla: str = ""
    patch: str = ""
    peer: str = ""
    """`eager` or `compiled`: PyTorch instead of the JAX engine."""


# The first rows matter most.
ROWS: dict[str, Row] = {
    "lamb-128": Row(128),
    "pytorch-compiled-128": Row(128, peer="compiled"),
    "cudnn-128": Row(128, patch=CUDNN),
    "adamw-128": Row(128, ADAMW),
    "no-dropout-128": Row(128, NO_DROPOUT),
    "one-round-128": Row(128, patch=ROUND),
    "plain-128": Row(128, patch=PLAIN),
    "lamb-512": Row(512),
    "pytorch-compiled-512": Row(512, peer="compiled"),
    "cudnn-512": Row(512, patch=CUDNN),
    "scheduler-128": Row(128, xla="--xla_gpu_enable_latency_hiding_scheduler=true"),
    "cublas-128": Row(128, xla="--xla_gpu_enable_triton_gemm=false"),
    "graphs-off-128": Row(128, xla="--xla_gpu_enable_command_buffer="),
    "lamb-256": Row(256),
    "pytorch-compiled-256": Row(256, peer="compiled"),
    "recompute-512": Row(512, "--parallel.recompute"),
    "lamb-1024": Row(1024),
    "pytorch-compiled-1024": Row(1024, peer="compiled"),
    "pytorch-eager-128": Row(128, peer="eager"),
}


def printed_by(words: list[str], variables: Mapping[str, str], seconds: float) -> str:
    """Return what a process prints. Raises SubprocessError."""
    environment = {**os.environ, "KERAS_BACKEND": "jax", **variables}
    done = subprocess.run(
        words, check=True, capture_output=True, text=True, timeout=seconds, env=environment
    )
    return done.stdout


def of_pytorch(row: Row, options: argparse.Namespace, seconds: float) -> dict[str, float]:
    """Return examples per second and bytes of the peer."""
    sizes = ("cpu", 2, row.peer, ACCUMULATION, options.steps, 2, 128)
    if not options.rehearse:
        sizes = ("cuda", row.size, row.peer, ACCUMULATION, options.steps, 12, 768)
    words = [sys.executable, "-c", PEER, *map(str, sizes)]
    speed, memory = map(float, printed_by(words, {}, seconds).split()[-2:])
    return {"examples_per_second": speed, "peak_memory_bytes": memory}


def of_jax(
    row: Row, options: argparse.Namespace, seconds: float, variables: Mapping[str, str]
) -> dict[str, float]:
    """Return examples per second and bytes of the JAX engine."""
    config = TINY if options.rehearse else f"{BASE} --require-gpu"
    size = 2 if options.rehearse else row.size
    flags = (
        f"{config} {LAYOUT} {row.flags} --engine jax --generated-dataset --global-batch.replicas 1"
    )
    flags += f" --global-batch.micro-batch-size {size} --steps {options.steps}"
    flags += f" --global-batch.grad-acc-steps-per-replica {ACCUMULATION}"
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "bench.json"
        words = [sys.executable, "-c", row.patch + START, "bench", "pretrain", *flags.split()]
        attention = "xla" if options.rehearse else "cudnn"
        flags_of_xla = f"{os.environ.get('XLA_FLAGS', '')} {row.xla}".strip()
        set_here = {"ATTENTION": attention, "XLA_FLAGS": flags_of_xla, **variables}
        printed_by([*words, "--json", str(output)], set_here, seconds)
        metrics = json.loads(output.read_text())
    return {name: metrics[name] for name in ("examples_per_second", "peak_memory_bytes")}


def difference_of_losses(options: argparse.Namespace, seconds: float) -> dict[str, float]:
    """Return how far the masked-LM losses of a tiny model are from the CPU's."""
    steps = 5 if options.rehearse else 100
    flags = f"{TINY} {LAYOUT} --engine jax --generated-dataset --global-batch.micro-batch-size 8"
    flags += f" --global-batch.grad-acc-steps-per-replica 1 --total-num-train-samples {8 * steps}"
    losses: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, variables in (("cpu", {"JAX_PLATFORMS": "cpu"}), ("device", {})):
            words = [sys.executable, "-m", "bert_cli", "pretrain", *flags.split()]
            printed_by([*words, "--save-ckpt-path", f"{folder}/{name}"], variables, seconds / 2)
            lines = (Path(folder) / name / "metrics.jsonl").read_text().splitlines()
            losses.append([loss for line in lines if (loss := json.loads(line).get("mlm_loss"))])
    pairs = list(zip(*losses, strict=True))
    return {"steps": len(pairs), "largest_difference": max(abs(a - b) for a, b in pairs)}


def measure(name: str, results: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a row; of one that fails, its error."""
    seconds = options.began + options.seconds - time.monotonic()
    try:
        if name == "losses":
            return difference_of_losses(options, seconds)
        if name == "profile":
            speeds = {n: r.get("examples_per_second", 0) for n, r in results.items() if n in ROWS}
            best = max((n for n in speeds if not ROWS[n].peer), key=lambda n: speeds[n])
            folder = str(options.output.with_suffix(".profile"))
            row = ROWS[best]
            row = row._replace(patch=row.patch + PROFILE)
            return {"of": best, **of_jax(row, options, seconds, {"PROFILE": folder})}
        row = ROWS[name]
        return of_pytorch(row, options, seconds) if row.peer else of_jax(row, options, seconds, {})
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        return {"error": f"{error} {getattr(error, 'stderr', '')}"[-2000:]}


def main() -> None:
    """Measure the rows that have no result yet, and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [*ROWS, "losses", "profile"]
    parser.add_argument("output", type=Path)
    parser.add_argument("--rows", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=720, help="no row starts after them")
    parser.add_argument("--steps", type=int, default=12, help="measured steps of a row")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args(namespace=argparse.Namespace(began=time.monotonic()))
    lines = options.output.read_text().splitlines() if options.output.exists() else []
    results = {line.pop("row"): line for line in map(json.loads, lines) if "error" not in line}
    for name in options.rows:
        began = time.monotonic()
        if name in results or began > options.began + options.seconds:
            continue
        result = measure(name, results, options)
        results[name] = result
        result["seconds"] = round(time.monotonic() - began, 1)
        with options.output.open("a") as file:
            file.write(json.dumps({"row": name, **result}) + "\n")
        print(name, result, flush=True)


if __name__ == "__main__":
    main()
