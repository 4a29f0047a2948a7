#!/usr/bin/env python3
"""Measure `bert embed`: the scores of a model before and after, and the memory of a batch of 1,024 pairs.

    scripts/bench_embed.py MODEL GLUE OUT [--seeds 0 1 2] [--epochs 3] [--rate 2e-5]

The pairs are the paraphrases of MRPC's training set, in the folder GLUE. A model is scored on the development set: the
rank correlation of cosines with "is a paraphrase", and how well the first sentence of a paraphrase finds the second
among the sentences of the development and the test set. SimCSE trains on the sentences of the same pairs. All
files are in OUT, and the same command continues.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

STEP, MICRO_BATCHES = 1024, (16, 64)
BATCH = ["--global-batch.micro-batch-size", "32", "--max-seq-length", "64"]
OBJECTIVES = {
    "pairs": ["--train-file", "pairs.tsv", "--global-batch.grad-acc-steps-per-replica", "4"],
    "simcse": ["--train-file", "texts.txt", "--global-batch.grad-acc-steps-per-replica", "2"],
}


def bert(*words: object, folder: Path) -> tuple[dict[str, float], float]:
    """Run a command of the tool; return the JSON object of its last line, and its peak memory in MB."""
    command = [sys.executable, "-m", "bert_cli", *map(str, words)]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        lines = program.stdout.read().splitlines()
        _, status, usage = os.wait4(program.pid, 0)
        program.returncode = os.waitstatus_to_exitcode(status)
    if program.returncode:
        sys.exit(f"{' '.join(command)}: exit code {program.returncode}")
    scores = json.loads(lines[-1]) if lines[-1].startswith("{") else {}
    return scores, usage.ru_maxrss / 1000


def rows_of(path: Path) -> Iterator[list[str]]:
    yield from (line.split("\t") for line in path.read_text("utf-8-sig").splitlines()[1:])


def write_files(glue: Path, out: Path) -> None:
    """Write the pairs, their texts, the judged pairs and the folder for retrieval."""
    train = [(a, b) for label, _, _, a, b in rows_of(glue / "MRPC/train.tsv") if label == "1"]
    judged = [(a, b, label) for label, _, _, a, b in rows_of(glue / "MRPC/dev.tsv")]
    others = [(a, b) for _, _, _, a, b in rows_of(glue / "MRPC/test.tsv")]
    tables = {"pairs": ["anchor\tpositive", *map("\t".join, train)]}
    tables["judged"] = ["sentence1\tsentence2\tscore", *map("\t".join, judged)]
    for name, lines in tables.items():
        (out / f"{name}.tsv").write_text("\n".join(lines) + "\n", "utf-8")
    texts = dict.fromkeys(text for pair in train for text in pair)
    (out / "texts.txt").write_text("\n".join(texts) + "\n", "utf-8")
    numbers: dict[str, int] = {}
    for row in (*judged, *others):
        for text in row[:2]:
            numbers.setdefault(text, len(numbers))
    same = [(a, b) for a, b, label in judged if label == "1"]
    for name, chosen in (("corpus", list(numbers)), ("queries", [a for a, _ in same])):
        rows = (json.dumps({"_id": str(numbers[text]), "text": text}) for text in chosen)
        (out / f"{name}.jsonl").write_text("\n".join(rows) + "\n", "utf-8")
    (out / "qrels").mkdir(exist_ok=True)
    lines = ["query-id\tcorpus-id\tscore", *(f"{numbers[a]}\t{numbers[b]}\t1" for a, b in same)]
    (out / "qrels/dev.tsv").write_text("\n".join(lines) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=lambda text: Path(text).absolute())
    parser.add_argument("glue", type=Path)
    parser.add_argument("out", type=lambda text: Path(text).absolute())
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--rate", type=float, default=2e-5)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    write_files(given.glue, given.out)
    score = ["--validation-file", "judged.tsv", "--retrieval-file", "qrels/dev.tsv"]
    start = ["embed", "--pretrained-ckpt-path", given.model, *score, "--max-seq-length", 64]
    print("| vectors | Spearman | nDCG@10 | recall@10 |\n|---|---|---|---|")
    for pooling in ("mean", "cls"):
        words = [*start, "--no-do-training", "--pooling", pooling]
        print_row(f"before, {pooling}", [bert(*words, folder=given.out)[0]])
    for objective, flags in OBJECTIVES.items():
        runs = []
        for seed in given.seeds:
            run = given.out / f"{objective}_{seed}"
            words = [*start, *BATCH, "--objective", objective, *flags, "--seed", seed]
            words += [
                "--num-epochs",
                given.epochs,
                "--save-ckpt-path",
                run,
                "--log-every-steps",
                20,
            ]
            words += ["--optimizer-opts.learning-rate.max-learning-rate", given.rate]
            bert(*words, "--evaluate-every-steps", 10_000, folder=given.out)
            runs.append(json.loads((run / "scores.json").read_text("utf-8")))
        print_row(objective, runs)
    print("\n| pairs of a step | micro-batch | peak memory, MB |\n|---|---|---|")
    for size in MICRO_BATCHES:
        words = ["embed", "--pretrained-ckpt-path", given.model, "--train-file", "pairs.tsv"]
        words += ["--no-do-validation", "--dry-run", "--max-seq-length", 64]
        words += ["--global-batch.micro-batch-size", size]
        words += ["--global-batch.grad-acc-steps-per-replica", STEP // size]
        print(f"| {STEP:,} | {size} | {bert(*words, folder=given.out)[1]:,.0f} |", flush=True)


def print_row(name: str, runs: list[dict[str, float]]) -> None:
    cells = []
    for metric in ("spearman", "ndcg_10", "recall_10"):
        values = [run[metric] for run in runs]
        spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        cells.append(f"{statistics.mean(values):.3f}{spread}")
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
