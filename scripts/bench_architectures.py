#!/usr/bin/env python3
"""Train BERT and ModernBERT of 5 M weights for the same processor time, and compare held-out bits per byte and SST-2.

    scripts/bench_architectures.py RECORDS HELD_OUT GLUE OUT [--seconds 220] [--rates 1e-3] [--seeds 0 1]

RECORDS and HELD_OUT come from `bert tokenize --sequence-length 32 --mask-tokens 8 --masking dynamic --no-nsp`, with
8,192 pieces. `--seconds` are those of the steps on one core, measured first by steps of both models in turn. The same
command continues.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from bert_cli.config.load import load
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.parallel.cluster import Processes
from bert_cli.planning.plan import make_plan
from bert_cli.tasks.run import build, corpora, resolve

SHAPES: dict[str, dict[str, Any]] = {
    "bert": {
        "num_hidden_layers": 4,
        "intermediate_size": 1024,
        "attention_probs_dropout_prob": 0.0,
    },
    "modernbert": {"num_hidden_layers": 6, "intermediate_size": 384},
}
EXAMPLES = 32
SCHEDULE = {"schedule_name": "up_down", "max_learning_rate": 0.001, "warmup_frac": 0.06}
COMMON: dict[str, Any] = {
    "max_seq_length": 32,
    "max_predictions_per_seq": 8,
    "masking": {"probability": 0.2},
    "global_batch": {"micro_batch_size": EXAMPLES},
    "precision": "mixed_bfloat16",
    "optimizer_opts": {
        "name": "AdamW",
        "weight_decay_rate": 0.01,
        "beta_2": 0.98,
        "learning_rate": SCHEDULE,
    },
    "log_every_steps": 100,
}
RATE = "--optimizer-opts.learning-rate.max-learning-rate"


def bert(*words: object) -> None:
    """Run a command of the tool."""
    subprocess.run([sys.executable, "-m", "bert_cli", *map(str, words)], check=True)


def flags_of(architecture: str, args: argparse.Namespace) -> list[str]:
    """Return the flags of a run, and write its config."""
    config = args.out / f"{architecture}.json"
    widths = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 64}
    shape = (
        widths | SHAPES[architecture] | {"architecture": architecture, "hidden_dropout_prob": 0.0}
    )
    config.write_text(json.dumps(COMMON | {"bert_config": shape}), encoding="utf-8")
    return ["--config", str(config), "--dataset-dir", str(args.records)]


def seconds_of_steps(args: argparse.Namespace, steps: int = 40) -> dict[str, float]:
    """Return the median processor seconds of a step of each model; their steps alternate."""
    runs = {}
    for architecture in SHAPES:
        flags = [*flags_of(architecture, args), "--num-epochs", "1"]
        settings = corpora.with_sizes_of_records(load(PretrainSettings, flags, "bench")[0])
        stream = corpora.open_stream(settings)
        plan = make_plan(settings, stream.epoch_size)
        mesh = resolve.open_mesh(settings, Processes(()))
        runs[architecture] = (build.build_run(settings, mesh, plan).step, stream)
    seconds: dict[str, list[float]] = {architecture: [] for architecture in SHAPES}
    for number in range(steps):
        for architecture, (step, stream) in runs.items():
            began = time.process_time()
            step(stream[number])
            seconds[architecture].append(time.process_time() - began)
    return {architecture: median(times[5:]) for architecture, times in seconds.items()}


def bits_per_byte(
    architecture: str, examples: int, rate: float, seed: int, args: argparse.Namespace
) -> float:
    """Train a model, and return its score on the held-out text."""
    run = args.out / f"{architecture}_{rate}_{seed}"
    score = run / "held_out.json"
    if not score.exists():
        length = ("--total-num-train-samples", examples, "--seed", seed)
        bert(
            "pretrain", *flags_of(architecture, args), "--save-ckpt-path", run, RATE, rate, *length
        )
        bert("evaluate", run, "--dataset-dir", args.held_out, "--json", score)
    return float(json.loads(score.read_text(encoding="utf-8"))["scores"]["bits_per_byte"])


def accuracy(architecture: str, rate: float, seed: int, args: argparse.Namespace) -> float:
    """Fine-tune on 10,000 examples of SST-2, and return the accuracy."""
    run = args.out / f"{architecture}_{rate}_{seed}"
    task = run / "sst2"
    if not (task / "scores.json").exists():
        start = (
            "--pretrained-ckpt-path",
            run,
            "--save-ckpt-path",
            task,
            "--dataset-dir",
            args.glue,
        )
        settings = (
            "--num-epochs",
            0.15,
            "--seed",
            seed,
            "--precision",
            "mixed_bfloat16",
            RATE,
            3e-4,
        )
        bert("glue", "--glue-task", "sst2", *start, *settings, "--log-every-steps", 100)
    return float(json.loads((task / "scores.json").read_text(encoding="utf-8"))["accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("records", "held_out", "glue", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--seconds", type=float, default=220.0)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    speed = args.out / "seconds.json"
    if not speed.exists():
        speed.write_text(json.dumps(seconds_of_steps(args)), encoding="utf-8")
    cases = [
        (architecture, EXAMPLES * round(args.seconds / step), rate, seed)
        for rate in args.rates
        for seed in args.seeds
        for architecture, step in json.loads(speed.read_text()).items()
    ]
    bits = [bits_per_byte(*case, args) for case in cases]
    print("| model | examples | rate | seed | bits per byte | SST-2 |", flush=True)
    for case, value in zip(cases, bits, strict=True):
        architecture, examples, rate, seed = case
        score = 100 * accuracy(architecture, rate, seed, args)
        print(
            f"| {architecture} | {examples:,} | {rate} | {seed} | {value:.4f} | {score:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
