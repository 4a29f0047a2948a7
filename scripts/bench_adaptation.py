#!/usr/bin/env python3
"""Measure what it brings to go on from a model with new pieces: bits per byte of held-out text, several seeds.

    scripts/bench_adaptation.py MODEL TEXT HELD_OUT OUT [--size 1000] [--steps 300] [--seeds 3] [-- FLAG ...]

TEXT and HELD_OUT have a sentence on each line. MODEL is trained on TEXT with its own vocabulary, and with that extended
by so many pieces; whole words are masked, because a piece of a word is easier to guess than the word. Before the first
step the new rows are compared with random ones. More flags are those of `bert pretrain`. What is made is kept in OUT,
and the same command continues.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from bert_cli.train.checkpoint import MODEL, complete_checkpoints

LENGTH, PREDICTIONS, BATCH = 32, 8, 64
RECORDS = [
    "--masking",
    "dynamic",
    "--no-nsp",
    "--sequence-length",
    LENGTH,
    "--mask-tokens",
    PREDICTIONS,
]
RUN = {
    "max-seq-length": LENGTH,
    "max-predictions-per-seq": PREDICTIONS,
    "masking.unit": "word",
    "masking.probability": 0.2,
    "global-batch.micro-batch-size": BATCH,
    "optimizer-opts.name": "AdamW",
    "optimizer-opts.beta-2": 0.98,
    "optimizer-opts.learning-rate.max-learning-rate": 5e-4,
    "optimizer-opts.learning-rate.warmup-frac": 0.1,
    "precision": "mixed_bfloat16",
    "log-every-steps": 50,
    "evaluation-examples": 2000,
}
BITS = "validation_bits_per_byte"


def bert(*words: object) -> None:
    """Run a command of the tool."""
    subprocess.run([sys.executable, "-m", "bert_cli", *map(str, words)], check=True)


def with_random_rows(model: Path, vocab: Path, out: Path) -> Path:
    """Write the model with new rows drawn as those of a new model are."""
    tensors, draw = load_file(model / MODEL), np.random.default_rng(0)
    pieces = len((vocab / "vocab.txt").read_text(encoding="utf-8").splitlines())
    for name, value in tensors.items():
        if name.endswith(("word_embeddings.weight", "predictions.bias")):
            more = pieces - len(value), *value.shape[1:]
            rows = draw.normal(0.0, 0.02, more) if value.ndim == 2 else np.zeros(more)
            tensors[name] = np.concatenate([value, rows.astype(value.dtype)])
    shutil.copytree(vocab, out, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(json.dumps(config | {"vocab_size": pieces}), encoding="utf-8")
    save_file(tensors, out / MODEL, metadata={"format": "pt"})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("model", "text", "held_out", "out"):
        parser.add_argument(name, type=Path)
    for name, default in {"size": 1000, "steps": 300, "seeds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given, flags = parser.parse_known_args()
    out, model = given.out, (complete_checkpoints(given.model) or [given.model])[-1]
    bert("vocab", given.text, out / "vocab", "--extend", model, "--size", f"+{given.size}")
    for name, vocab in {"plain": model, "extended": out / "vocab"}.items():
        for part, folder in {"text": given.text, "held_out": given.held_out}.items():
            bert("tokenize", folder, out / name / part, "--vocab", vocab, *RECORDS)
            bert("index", out / name / part)
    random = with_random_rows(model, out / "vocab", out / "random_rows")
    cases = {
        "own vocabulary": ("plain", model, given.steps),
        f"{given.size:,} more pieces": ("extended", model, given.steps),
        "random new rows": ("extended", random, 1),
    }
    print("| start | bits per byte before the first step | at the end |\n|---|---|---|")
    for case, (records, start, steps) in cases.items():
        found: list[tuple[float, float]] = []
        for seed in range(given.seeds):
            run = out / "runs" / f"{case.replace(' ', '_')}_{seed}"
            words = [word for flag, value in RUN.items() for word in (f"--{flag}", value)]
            words += [
                "--dataset-dir",
                out / records / "text",
                "--validation-dir",
                out / records / "held_out",
            ]
            words += ["--pretrained-ckpt-path", start, "--save-ckpt-path", run, "--seed", seed]
            words += ["--total-num-train-samples", steps * BATCH]
            bert("pretrain", *words, *[flag for flag in flags if flag != "--"])
            lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            found.append((json.loads(lines[0])[BITS], json.loads(lines[-1])[BITS]))
        columns = [
            f"{statistics.mean(values):.4f} +- {statistics.stdev(values):.4f}"
            if len(values) > 1
            else f"{values[0]:.4f}"
            for values in zip(*found, strict=True)
        ]
        print(f"| {case} | {columns[0]} | {columns[1] if steps > 1 else ''} |", flush=True)


if __name__ == "__main__":
    main()
