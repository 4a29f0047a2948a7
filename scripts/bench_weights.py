#!/usr/bin/env python3
"""Compare ways to learn labels of which one is rare, on SST-2.

    scripts/bench_weights.py MODEL GLUE OUT --texts 2000 --share 0.05 --draws 10

A draw has --texts texts of the training set, and --share of them are positive. The test texts are the development set
without most of its positive texts, so that the share is the same. The sides are `bert classify` without and with
balanced weights, scored at its last checkpoint, and scikit-learn's regressions with balanced weights on counts of words
and on the vectors of MODEL. The script prints the mean macro F1 of each side over the draws, and its gain over the
first side in the same draws, with 95 % intervals (t).
"""

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.stats import t as student
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bert_cli.tasks.use.model import Model

NAMES = "negative", "positive"
USUAL = ["--max-seq-length", "64", "--evaluate-every-steps", "1000000", "--no-baselines"]
USUAL += ["--cache-dir", "null", "--log-every-steps", "1000000"]
Rows = list[dict[str, str]]


def read(path: Path) -> Rows:
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [{"text": r["sentence"].strip(), "label": NAMES[int(r["label"])]} for r in rows]


def drawn(rows: Rows, negative: int, positive: int, seed: int) -> Rows:
    """Return so many random rows of each label."""
    draw = np.random.default_rng(seed)
    labels = np.array([row["label"] for row in rows])
    counts = zip(NAMES, (negative, positive), strict=True)
    parts = [draw.permutation(np.flatnonzero(labels == name))[:size] for name, size in counts]
    return [rows[n] for n in draw.permutation(np.concatenate(parts)).tolist()]


def by_classify(model: Path, out: Path, seed: int, more: Sequence[str]) -> list[str]:
    run = out / "_".join(["run", str(seed), *more[1:]])
    files = ["--train-file", out / "train.jsonl", "--validation-file", out / "test.jsonl"]
    files += ["--pretrained-ckpt-path", model, "--save-ckpt-path", run, "--seed", seed]
    words = ["classify", *map(str, files), *USUAL, *more]
    print("bert", *words, flush=True)
    subprocess.run([sys.executable, "-m", "bert_cli", *words], check=True, stdout=sys.stderr)
    lines = (run / "predictions.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["predicted"] for line in lines]


def described(scores: Sequence[float]) -> str:
    """Return the mean of the draws with its interval, if there are two or more."""
    mean = f"{np.mean(scores):.4f}"
    if len(scores) < 2:
        return mean
    half = student.ppf(0.975, len(scores) - 1) * np.std(scores, ddof=1) / len(scores) ** 0.5
    return f"{mean} +- {half:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "glue", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--draws", type=int, default=10)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    train, test = (read(options.glue / "SST-2" / f"{name}.tsv") for name in ("train", "dev"))
    negative = sum(row["label"] == NAMES[0] for row in test)
    rare = round(negative * options.share / (1 - options.share))
    positive = round(options.texts * options.share)
    encoder = Model(str(options.model))
    scores: dict[str, list[float]] = {}
    for seed in range(options.draws):
        sides = (
            drawn(train, options.texts - positive, positive, seed),
            drawn(test, negative, rare, seed),
        )
        for name, rows in zip(("train", "test"), sides, strict=True):
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (options.out / f"{name}.jsonl").write_text(lines, "utf-8")
        texts, tested = ([row["text"] for row in rows] for rows in sides)
        labels, true = ([row["label"] for row in rows] for rows in sides)
        method = LogisticRegression(max_iter=1000, class_weight="balanced")
        words = make_pipeline(CountVectorizer(), method).fit(texts, labels).predict(tested)
        vectors = make_pipeline(StandardScaler(), method).fit(encoder.embed(texts), labels)
        predicted = {
            "plain": by_classify(options.model, options.out, seed, []),
            "--class-weights balanced": by_classify(
                options.model, options.out, seed, ["--class-weights", "balanced"]
            ),
            "regression on words": words,
            "regression on vectors": vectors.predict(encoder.embed(tested)),
        }
        for name, answers in predicted.items():
            scores.setdefault(name, []).append(f1_score(true, answers, average="macro"))
    print(f"macro F1 of {len(true)} test texts with {rare} positive ones, {options.draws} draws")
    for name, values in scores.items():
        gain = described(np.subtract(values, scores["plain"]).tolist())
        print(f"{name:<24}  {described(values)}  gain {gain}")


if __name__ == "__main__":
    main()
