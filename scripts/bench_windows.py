#!/usr/bin/env python3
"""Compare long texts that are read in windows with truncated ones.

    scripts/bench_windows.py topics MODEL SQUAD OUT
    scripts/bench_windows.py late MODEL SQUAD OUT

`topics` takes the ten articles of SQUAD, a file of questions, with the most paragraphs. Whole paragraphs are joined in
order until a text has 200 tokens; every second text of an article is for the test. Which article is the text from?
`late` puts 14 such texts of each article behind a paragraph of another, so that the beginning says nothing: an
artificial task.
All sides have the same number of updates and are not chosen among their checkpoints. Printed are the command of each
side, its mean accuracy over three seeds, the regression on words, and the gains of windows, with intervals by
resampling the test texts together.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from bert_cli.data.finetune import simple
from bert_cli.data.finetune.tables import TextExamples, read_table, samples_of
from bert_cli.data.tokens.tokenizer import read_tokenizer
from bert_cli.statistics import Sample, difference, interval

SEEDS, TOPICS, TOKENS, LATE = 3, 10, 200, 14
LENGTH, STRIDE, METRIC = 64, 48, "accuracy"
Rows = list[tuple[str, str]]
USUAL = (
    f"--seeds {SEEDS} --global-batch.micro-batch-size 16 --evaluate-every-steps 1000000 --no-baselines "
    "--optimizer-opts.learning-rate.max-learning-rate 2e-4 --cache-dir null --log-every-steps 1000000"
).split()


def topics(model: Path, squad: Path, is_late: bool) -> tuple[Rows, Rows]:
    """Return the training and test texts of the articles with the most paragraphs, each with its title."""
    library = read_tokenizer(model).library
    articles = {
        article["title"]: [paragraph["context"] for paragraph in article["paragraphs"]]
        for article in json.loads(squad.read_text("utf-8"))["data"]
    }
    by_size = sorted(articles, key=lambda title: -len(articles[title]))
    others = chain.from_iterable(articles[title] for title in by_size[TOPICS:])
    sides: tuple[Rows, Rows] = ([], [])
    for title in by_size[:TOPICS]:
        texts = [""]
        for paragraph in articles[title]:
            if len(library.encode(texts[-1], add_special_tokens=False).ids) >= TOKENS:
                texts.append("")
            texts[-1] = f"{texts[-1]} {paragraph}".strip()
        for number, text in enumerate(texts[: LATE if is_late else -1]):
            before = f"{next(others)} " if is_late else ""
            sides[number % 2].append((before + text, title))
    return sides


def samples(out: Path, name: str, test: TextExamples) -> list[Sample]:
    """Return the sample of each seed, from its predictions."""
    assert test.labels is not None
    found = []
    for seed in range(SEEDS):
        lines = (out / name / f"seed_{seed}" / "predictions.jsonl").read_text("utf-8").splitlines()
        numbers = {label: number for number, label in enumerate(test.label_names or ())}
        predicted = np.array([numbers[json.loads(line)["predicted"]] for line in lines])
        found.append(samples_of((METRIC,), test.labels, predicted, test.examples)[METRIC])
    return found


def compare(model: Path, out: Path, sides: Mapping[str, Sequence[str]]) -> None:
    """Train each side and print its accuracy, and its gain over the first side."""
    files = out / "train.jsonl", out / "test.jsonl"
    train, test = (read_table(f, text_columns=["text"], label_columns=["label"]) for f in files)
    assert train.labels is not None and test.labels is not None
    print(f"{len(train)} training texts, {len(test)} test texts; {METRIC}, {SEEDS} seeds")
    results: dict[str, list[Sample]] = {}
    for name, flags in sides.items():
        paths = ["--pretrained-ckpt-path", model, "--save-ckpt-path", out / name]
        paths += ["--train-file", files[0], "--validation-file", files[1], "--seed", "0"]
        words = ["classify", *map(str, paths), *flags, *USUAL]
        print("bert", *words, flush=True)
        subprocess.run([sys.executable, "-m", "bert_cli", *words], check=True, stdout=sys.stderr)
        results[name] = samples(out, name, test)
    predicted = simple.by_regression(train.first, train.labels, test.first)
    by_words = samples_of((METRIC,), test.labels, predicted, test.examples)[METRIC]
    results["regression on words"] = [by_words]
    for name, found in results.items():
        print(f"{name:<20} {interval(*found):.4f}")
    print(
        f"windows over truncated: gain {difference(results['windows'], results['truncated']):.4f}"
    )
    print(f"windows over words: gain {difference(results['windows'], [by_words]):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["topics", "late"])
    for name in ("model", "data", "out"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    model = options.model
    rows = topics(model, options.data, options.task == "late")
    options.out.mkdir(parents=True, exist_ok=True)
    for name, side in zip(("train", "test"), rows, strict=True):
        lines = (json.dumps({"text": text, "label": label}) for text, label in side)
        (options.out / f"{name}.jsonl").write_text("\n".join(lines), "utf-8")
    library = read_tokenizer(model).library
    sizes = [len(library.encode(text, add_special_tokens=False).ids) for text, _ in rows[0]]
    windows = sum(1 + max(0, -(-(size - LENGTH + 2) // STRIDE)) for size in sizes)
    usual = ["--max-seq-length", str(LENGTH), "--num-epochs"]
    sides = {
        "truncated": [*usual, f"{windows / len(sizes):.2f}"],
        "windows": [*usual, "1", "--doc-stride", str(STRIDE)],
    }
    compare(model, options.out, sides)


if __name__ == "__main__":
    main()
