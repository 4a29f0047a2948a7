#!/usr/bin/env python3
"""Compare small classifiers trained with and without a teacher, for equal numbers of epochs and equal processor time.

    scripts/bench_distillation.py MODEL GLUE OUT [--tasks sst2 mrpc] [--seeds 0 1 2]

MODEL (6 layers of 384) learns 2,000 labelled examples of SST-2, or all of MRPC, and is the teacher. Students are three
of its layers as they were before, and 2 layers of 128 with random weights. Arms: the labels alone for three epochs;
also the teacher; the teacher and texts without labels (10,000 sentences, or the test set of MRPC); the labels for the
processor time of the last arm, by the time of an epoch, which a run of six epochs gives. The same command continues.
"""

import argparse
import csv
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

EPOCHS = 3
LABELLED = 2000
UNLABELLED = 10000
RATES = {"3 x 384": 1e-4, "2 x 128": 1e-3}
SMALL = {"num-hidden-layers": 2, "hidden-size": 128, "num-attention-heads": 2} | {
    "intermediate-size": 512
}


def bert(*words: object) -> float:
    """Run a command of the tool and return the processor seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "bert_cli", *map(str, words)], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def write_tables(glue: Path, out: Path) -> None:
    """Write the tables of both tasks as JSON lines: train, unlabelled, dev."""

    def write(name: str, rows: list[dict[str, str]]) -> None:
        lines = (json.dumps(row) + "\n" for row in rows)
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")

    def read(path: Path) -> list[list[str]]:
        with path.open(encoding="utf-8-sig") as file:
            return list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]

    train = [{"text": row[0], "label": row[1]} for row in read(glue / "SST-2" / "train.tsv")]
    stride = len(train) // (LABELLED + UNLABELLED)
    chosen = train[::stride][: LABELLED + UNLABELLED]
    every = (LABELLED + UNLABELLED) // LABELLED
    write("sst2_train", chosen[::every])
    without = [row for number, row in enumerate(chosen) if number % every]
    write("sst2_unlabelled", [{"text": row["text"]} for row in without])
    dev = read(glue / "SST-2" / "dev.tsv")
    write("sst2_dev", [{"text": row[0], "label": row[1]} for row in dev])
    for part in ("train", "dev", "test"):
        rows = read(glue / "MRPC" / f"{part}.tsv")
        pairs = [{"label": row[0], "text": row[3], "second": row[4]} for row in rows]
        write(f"mrpc_{part}", pairs)
        if part == "test":
            without = [{"text": pair["text"], "second": pair["second"]} for pair in pairs]
            write("mrpc_unlabelled", without)


class Bench:
    """Runs of a task, each made once."""

    def __init__(self, args: argparse.Namespace, task: str) -> None:
        self.out, self.task, self.model = args.out, task, args.model
        self.epoch_seconds: dict[str, float] = {}
        self.common: list[object] = ["--train-file", self.out / f"{task}_train.jsonl"]
        self.common += ["--validation-file", self.out / f"{task}_dev.jsonl"]
        self.common += ["--max-seq-length", 64 if task == "sst2" else 128, "--text-column", "text"]
        self.common += ["--text-column", "second"] if task == "mrpc" else []

    def run(self, name: str, epochs: float, rate: float, *words: object) -> tuple[float, float]:
        """Return accuracy and processor seconds of a run."""
        folder = self.out / f"{self.task}_{name}".replace(" ", "")
        result = folder.with_suffix(".json")
        if not result.exists():
            length = ["--num-epochs", epochs, "--precision", "mixed_bfloat16"]
            flags = ["--optimizer-opts.learning-rate.max-learning-rate", rate, *length]
            # The examples and the teacher's outputs are made again in each run, so that its time is complete.
            flags += ["--cache-dir", folder / "cache", "--save-ckpt-path", folder]
            seconds = bert("classify", *self.common, *flags, *words)
            scores = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
            result.write_text(json.dumps([scores["accuracy"], seconds]), encoding="utf-8")
        accuracy, seconds = json.loads(result.read_text(encoding="utf-8"))
        return 100 * accuracy, seconds

    def arms(self, student: str, seed: int) -> None:
        """Run all arms of a student with a seed, and print a line for each."""
        rate = RATES[student]
        start: list[object] = ["--pretrained-ckpt-path", self.out / "shrunk"]
        if student == "2 x 128":
            start = ["--tokenizer-path", self.model]
            start += [word for n, v in SMALL.items() for word in (f"--bert-config.{n}", v)]
        start += ["--seed", seed]
        teacher = ["--distillation.teacher", self.out / f"{self.task}_teacher"]
        unlabelled = ["--distillation.unlabelled-file", self.out / f"{self.task}_unlabelled.jsonl"]

        def arm(name: str, epochs: float, *words: object) -> tuple[float, float]:
            values = self.run(f"{student}_{name}_{seed}", epochs, rate, *start, *words)
            print(f"| {self.task} | {student} | {seed} | {name} | {epochs:.1f} |", end="")
            print(f" {values[1]:.0f} s | {values[0]:.1f} |", flush=True)
            return values

        _, once = arm("labels", EPOCHS)
        cases: dict[str, list[Any]] = {"teacher": [EPOCHS, *teacher]}
        cases["teacher and unlabelled"] = [EPOCHS, *teacher, *unlabelled]
        for name, words in cases.items():
            _, seconds = arm(name, *words)
        if student not in self.epoch_seconds:
            _, twice = arm("labels twice", 2 * EPOCHS)
            self.epoch_seconds[student] = (twice - once) / EPOCHS
        longer = (seconds - once) / self.epoch_seconds[student]
        arm("labels for the time of the last", max(EPOCHS, round(EPOCHS + longer, 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("model", "glue", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--tasks", nargs="+", default=["sst2", "mrpc"])
    parser.add_argument("--students", nargs="+", default=list(RATES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    write_tables(args.glue, args.out)
    if not (args.out / "shrunk").exists():
        bert("shrink", args.model, args.out / "shrunk", *("--layers", "0,2,4"))
    for task in args.tasks:
        bench = Bench(args, task)
        teacher, seconds = bench.run("teacher", 3, 1e-4, "--pretrained-ckpt-path", args.model)
        print(f"| {task} | teacher | 0 | labels | 3.0 | {seconds:.0f} s | {teacher:.1f} |")
        for seed in args.seeds:
            for student in args.students:
                bench.arms(student, seed)


if __name__ == "__main__":
    main()
