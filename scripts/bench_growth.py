#!/usr/bin/env python3
"""Measure how processor time and memory of data steps, and of many labels, grow with the size of the text.

    scripts/bench_growth.py TEXT --megabytes 1 4 16 64 --steps preprocess vocab tokenize search
    scripts/bench_growth.py TEXT --megabytes 1 10 --steps labels --model MODEL

TEXT is a folder of plain text. Each size is made of its paragraphs, repeated with one word of six replaced by another
word of the text, so that copies are no near-duplicates. Every step is a process of its own, on one core. The last
column has the exponent between the smallest and the largest size: 1 is linear, 0 a fixed amount. The step `labels`
does not read TEXT: it makes 1,000 texts for each megabyte, each with a label of its own, trains MODEL on them for a
step, and scores it.
"""

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from turns import first_cores

CHANGED = 6
"""One word of so many is replaced."""
LABELS = "labels"


def paragraphs_of(text: Path) -> list[str]:
    """Return the paragraphs of at least ten words in a folder, without the tags of `bert extract`."""
    lines = (
        line.strip()
        for path in sorted(path for path in text.rglob("*") if path.is_file())
        for line in path.read_text(encoding="utf-8").splitlines()
    )
    return [line for line in lines if not line.startswith("<") and line.count(" ") >= 9]


def texts_of(paragraphs: list[str], size: int) -> Iterator[str]:
    """Yield documents of five paragraphs, so many bytes in all; after the first round words are replaced."""
    draw = random.Random(0)
    words = [word for paragraph in paragraphs[:2000] for word in paragraph.split()]
    written = number = 0
    while written < size:
        document = []
        for _ in range(5):
            row = paragraphs[number % len(paragraphs)].split()
            if number >= len(paragraphs):
                for place in draw.sample(range(len(row)), len(row) // CHANGED):
                    row[place] = draw.choice(words)
            document.append(" ".join(row))
            number += 1
        text = "\n".join(document)
        written += len(text.encode()) + 2
        yield text


def write_text(paragraphs: list[str], folder: Path, megabytes: int) -> None:
    folder.mkdir()
    with (folder / "text.txt").open("w", encoding="utf-8") as file:
        for text in texts_of(paragraphs, megabytes * 1_000_000):
            file.write(f"{text}\n\n")


def write_labels(file: Path, number: int) -> None:
    """Write so many texts, each with a label of its own."""
    rows = ({"text": f"text {n}", "label": f"label {n}"} for n in range(number))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def commands_of(home: Path, model: str = "") -> dict[str, list[str]]:
    """Return the arguments of each step, in the order in which they need one another's output."""
    labelled = str(home / "labels.jsonl")
    one = ["--processes", "1"]
    text, sentences = str(home / "text"), str(home / "sentences")
    return {
        "preprocess": ["preprocess", text, sentences, *one],
        "near-duplicates": [
            "preprocess",
            text,
            str(home / "near"),
            "--deduplicate",
            "--near-duplicates",
            "0.8",
            *one,
        ],
        "vocab": ["vocab", sentences, str(home / "vocab"), "--size", "8192"],
        "tokenize": [
            *("tokenize", sentences, str(home / "records"), "--vocab", str(home / "vocab")),
            *("--masking", "dynamic", "--sequence-length", "128", "--mask-tokens", "20", *one),
        ],
        "search": ["search", "make", str(home / "text.index"), text],
        LABELS: [
            *("classify", "--train-file", labelled, "--validation-file", labelled),
            *("--pretrained-ckpt-path", model, "--save-ckpt-path", str(home / "run")),
            *("--total-num-train-samples", "32", "--max-seq-length", "16", "--no-baselines"),
        ],
    }


def measure(words: list[str]) -> tuple[float, float]:
    """Run `bert` on one core; return its seconds of processor time and its largest memory in MB.

    With one process all work is in the process itself.
    """
    program = (
        "import json, resource as r, sys; from bert_cli.cli import main; code = main(sys.argv[1:]);"
        "of = [r.getrusage(who) for who in (r.RUSAGE_SELF, r.RUSAGE_CHILDREN)];"
        "from bert_cli.tasks.look.machine import resident_bytes;"
        "print(); print(json.dumps([sum(x.ru_utime + x.ru_stime for x in of), resident_bytes()[1]]));"
        "sys.exit(code)"
    )
    command = ["taskset", "--cpu-list", first_cores(1), sys.executable, "-c", program, *words]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"bert {' '.join(words)}: {done.stderr}")
    seconds, size = json.loads(done.stdout.splitlines()[-1])
    return seconds, size / 1e6


def exponent(values: dict[int, float]) -> float:
    """Return the power of the size with which a value grows, between the smallest and the largest size."""
    low, high = min(values), max(values)
    return math.log(values[high] / values[low]) / math.log(high / low)


def main() -> None:
    """Measure all sizes and print a table for time and one for memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 4, 16, 64])
    names = [*commands_of(Path())]
    parser.add_argument("--steps", nargs="+", choices=names, default=names[:-1])
    parser.add_argument("--model", help="a small model, for the step labels")
    options = parser.parse_args()
    if LABELS in options.steps and options.model is None:
        parser.error("--model: is missing; pass a model for the step labels")
    if len(options.megabytes) < 2:
        parser.error("--megabytes: pass two sizes or more")
    paragraphs = paragraphs_of(options.text)
    results: dict[str, dict[int, tuple[float, float]]] = {step: {} for step in options.steps}
    for megabytes in options.megabytes:
        home = Path(tempfile.mkdtemp(prefix="growth."))
        try:
            write_text(paragraphs, home / "text", megabytes)
            write_labels(home / "labels.jsonl", megabytes * 1000)
            for step in options.steps:
                results[step][megabytes] = measure(commands_of(home, options.model)[step])
                print(f"{megabytes} MB, {step}: {results[step][megabytes]}", flush=True)
        finally:
            shutil.rmtree(home)
    for place, what in enumerate(("seconds of processor time", "MB of memory")):
        print(f"\n| {what} | {' | '.join(f'{n} MB' for n in options.megabytes)} | exponent |")
        print(f"|---|{'---|' * (len(options.megabytes) + 1)}")
        for step, of_size in results.items():
            values = {size: both[place] for size, both in of_size.items()}
            cells = [f"{value:.1f}" for value in values.values()]
            print(f"| {step} | {' | '.join(cells)} | {exponent(values):.2f} |")


if __name__ == "__main__":
    main()
