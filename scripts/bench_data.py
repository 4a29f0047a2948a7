#!/usr/bin/env python
r"""Print the megabytes per second of each data step on one core, compared with other tools.

Every row is a complete process on one core, from its start to its files on disk. The rows run alternately. The table
shows medians of wall-clock time and of processor time, which other programs disturb less. `extract` is compared with
WikiExtractor. `tokenize` is compared with Google's create_pretraining_data.py (or a script with its flags) and with a
process that only encodes all sentences with the `tokenizers` library, which is a lower bound for tools that use this
library. --tenfold shows the memory for the same text ten times in one file.

    scripts/bench_data.py extracted/ --vocab vocab.txt --dump dump.xml.bz2 --tenfold \
        --google create_pretraining_data.py
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ENCODE = """
import sys
from bert_cli.data.tokens.tokenizer import Normalization, read_vocabulary
from bert_cli.data.tokens.tokenizer import library_tokenizer
from pathlib import Path
tokenizer = library_tokenizer(read_vocabulary(Path(sys.argv[1])).ids, Normalization())
tokens, lines = 0, []
for line in open(sys.argv[2], encoding="utf-8"):
    lines.append(line)
    if len(lines) == 10_000:
        tokens += sum(len(e.ids) for e in tokenizer.encode_batch_fast(lines, add_special_tokens=False))
        lines = []
tokens += sum(len(e.ids) for e in tokenizer.encode_batch_fast(lines, add_special_tokens=False))
print(tokens)
"""


class Row(NamedTuple):
    """One line of the table."""

    name: str
    command: list[str]
    size: int
    """Bytes of the input."""
    out: Path | None = None
    baseline: str = ""
    """Name of the row that this one is compared with."""


class Run(NamedTuple):
    """Time and memory of one process."""

    seconds: float
    processor: float
    megabytes: float


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="output folder of `bert extract`")
    parser.add_argument("--vocab", type=Path, required=True, help="an uncased vocab.txt")
    parser.add_argument("--google", type=Path, help="path of create_pretraining_data.py")
    parser.add_argument("--dump", type=Path, help="MediaWiki dump for `extract`")
    parser.add_argument("--megabytes", type=float, default=10.0, help="size of the text to use")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--tenfold", action="store_true", help="show memory for ten times the text")
    return parser.parse_args()


def measure(command: list[str], core: int, log: Path) -> Run:
    """Run a process and its children on one core; return its time and memory."""
    started = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        )
        _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{log.read_text()[-2000:]}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3)


def join(files: list[Path], joined: Path) -> None:
    """Join files with a blank line between them.

    The copy uses small buffers: Linux includes the memory of this process in the peak memory of its children.
    """
    with joined.open("wb") as out:
        for number, path in enumerate(files):
            out.write(b"\n" if number else b"")
            with path.open("rb") as file:
                shutil.copyfileobj(file, out)


def text_rows(args: argparse.Namespace, home: Path, articles: Path, sentences: Path) -> list[Row]:
    """Return the rows of `preprocess` and `tokenize`."""
    bert = [sys.executable, "-m", "bert_cli"]
    rows = []
    for splitter in ("sentencex", "lines"):
        out = home / f"preprocess_{splitter}"
        command = [*bert, "preprocess", str(articles), str(out), "--processes", "1"]
        command += ["--sentence-splitter", splitter]
        rows.append(Row(f"preprocess, {splitter}", command, articles.stat().st_size, out))
    size = sentences.stat().st_size
    plain = [sys.executable, "-c", ENCODE, str(args.vocab), str(sentences)]
    rows.append(Row("plain encoding", plain, size))
    recipes = {
        "static, once": ["--duplication-factor", "1"],
        "static, five times": [],
        "dynamic": ["--masking", "dynamic"],
        "dynamic, no pairs": ["--masking", "dynamic", "--no-nsp"],
    }
    for name, flags in recipes.items():
        out = home / "records"
        command = [*bert, "tokenize", str(sentences), str(out), "--vocab", str(args.vocab)]
        command += [*flags, "--processes", "1"]
        rows.append(Row(f"tokenize, {name}", command, size, out, "plain encoding"))
    if args.google:
        command = [sys.executable, str(args.google), f"--input_file={sentences}"]
        command += [f"--output_file={home / 'google.tfrecord'}", f"--vocab_file={args.vocab}"]
        command += ["--do_lower_case=True", "--max_seq_length=128", "--dupe_factor=5"]
        command += ["--max_predictions_per_seq=20"]
        rows.append(
            Row("create_pretraining_data.py, five times", command, size, None, "plain encoding")
        )
    return rows


def dump_rows(dump: Path, home: Path) -> list[Row]:
    """Return the rows of `extract`, in MB of the compressed file."""
    size, out = dump.stat().st_size, home / "extracted"
    baseline = [sys.executable, "-m", "wikiextractor.WikiExtractor", str(dump), "-o", str(out)]
    baseline += ["--processes", "1", "--no-templates", "--quiet"]
    ours = [sys.executable, "-m", "bert_cli", "extract", str(dump), str(out), "--processes", "1"]
    return [
        Row("WikiExtractor", baseline, size, out),
        Row("extract", ours, size, out, "WikiExtractor"),
    ]


def time_rows(rows: list[Row], args: argparse.Namespace, home: Path) -> None:
    """Run all rows alternately and print the table."""
    runs: dict[str, list[Run]] = {row.name: [] for row in rows}
    for _ in range(args.rounds):
        for row in rows:
            if row.out:
                shutil.rmtree(row.out, ignore_errors=True)
            runs[row.name].append(measure(row.command, args.core, home / "log"))
    print("| step | MB | MB/s | MB/s of processor time | time relative to the baseline | peak MB |")
    print("|---|---:|---:|---:|---:|---:|")
    rates = {}
    for row in rows:
        size = row.size / 1e6
        clock, processor, memory = (
            statistics.median(values) for values in zip(*runs[row.name], strict=True)
        )
        rates[row.name] = size / processor
        ratio = f"{rates[row.baseline] / rates[row.name]:.2f}" if row.baseline else ""
        speeds = f"{size / clock:.2f} | {rates[row.name]:.2f}"
        print(f"| {row.name} | {size:.1f} | {speeds} | {ratio} | {memory:.0f} |", flush=True)


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        articles, split, sentences = home / "articles", home / "split", home / "sentences"
        files = sorted(path for path in args.text.rglob("wiki_*") if path.is_file())
        selected, size = [], 0
        while files and size < args.megabytes * 1e6:
            selected.append(files.pop(0))
            size += selected[-1].stat().st_size
        join(selected, articles)
        command = [sys.executable, "-m", "bert_cli", "preprocess", str(articles), str(split)]
        measure([*command, "--sentence-splitter", "sentencex"], args.core, home / "log")
        parts = sorted(split.glob("*.txt"))
        join(parts, sentences)
        print(f"{size / 1e6:.1f} MB of articles, {sentences.stat().st_size / 1e6:.1f} as sentences")
        rows = text_rows(args, home, articles, sentences)
        if args.dump:
            rows = dump_rows(args.dump, home) + rows
        time_rows(rows, args, home)
        if args.tenfold:
            join(selected * 10, articles)
            join(parts * 10, sentences)
            print("ten times the text:")
            args.rounds = 1
            names = ("preprocess, sentencex", "tokenize, dynamic")
            rows = text_rows(args, home, articles, sentences)
            time_rows([row._replace(baseline="") for row in rows if row.name in names], args, home)


if __name__ == "__main__":
    main()
