"""`bert bench data`: measure how fast text becomes sentences, records and batches.

Each step is the function of its command, run on a temporary folder and timed completely. Then one thread reads the
records in batches. The words of synthetic text follow Zipf's law and consist of random letters.
"""

import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bert_cli.config.bench import BenchDataSettings
from bert_cli.config.data import IndexSettings, PreprocessSettings, TokenizeSettings, VocabSettings
from bert_cli.data.examples.reader import Batching, Reader
from bert_cli.data.examples.source import Records
from bert_cli.data.io.manifest import finished_files, package_versions
from bert_cli.data.records import index, tokenize
from bert_cli.data.records.corpus import read_corpus
from bert_cli.data.text import preprocess
from bert_cli.data.tokens import vocab
from bert_cli.files import JSONObject, is_stdout, output_json
from bert_cli.processes import print_error, print_line, print_table
from bert_cli.tasks.look import machine
from bert_cli.text import count, format_bytes, format_duration

WORDS = 20_000
Row = JSONObject


def run(settings: BenchDataSettings) -> None:
    """Measure each step, print a table and, with --json, write the metrics."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        for row in _steps(settings, Path(folder)):
            rows.append(row)
            if sys.stderr.isatty():
                print_error(f"{row['name']}: {format_duration(row['seconds'])}")
    described = machine.description()
    if not is_stdout(settings.json_file):
        text = "synthetic text" if settings.input is None else str(settings.input)
        print_line(f"{described['processor']}; {format_bytes(described['memory_bytes'])} of memory")
        print_line(
            f"data, {text}, {count(settings.processes, 'process')}, "
            f"sequence length {settings.sequence_length}\n"
        )
        shown = []
        for row in rows:
            examples = f"{row['examples_per_second']:,.0f}" if "examples" in row else ""
            rate = f"{row['megabytes_per_second']:,.2f}"
            seconds = format_duration(row["seconds"])
            shown.append((row["name"], f"{row['bytes'] / 1e6:,.1f}", seconds, rate, examples))
        print_table(("step", "MB", "time", "MB/s", "examples/s"), shown, right=range(1, 5))
        print_line("\nMB: input text; for index the records; for read the batches in memory")
    if settings.json_file is not None:
        metrics: JSONObject = {
            "what": "data",
            "input": "synthetic" if settings.input is None else str(settings.input),
            "steps": rows,
            "machine": described,
            "versions": package_versions(("numpy", "tokenizers")),
            "settings": settings.model_dump(mode="json"),
        }
        output_json(settings.json_file, metrics)


def _steps(settings: BenchDataSettings, folder: Path) -> Iterator[Row]:
    text = settings.input or folder / "text"
    sentences = folder / "sentences"
    if settings.input is None:
        text.mkdir()
        write_synthetic_text(text / "synthetic.txt", settings.megabytes, settings.seed)
    processes = {"processes": settings.processes}
    split = {"input": text, "out": sentences, "sentence_splitter": settings.sentence_splitter}
    values = PreprocessSettings.model_validate(split | processes)
    yield _row("preprocess", _seconds(preprocess.run, values), _bytes_of(text))
    text_bytes = _bytes_of(sentences)
    vocabulary = settings.vocab
    if vocabulary is None:
        vocabulary = str(folder / "vocab")
        learn = {"input": sentences, "out": vocabulary, "size": 8_000}
        yield _row("vocab", _seconds(vocab.run, VocabSettings.model_validate(learn)), text_bytes)
    shape = {"sequence_length": settings.sequence_length, "mask_tokens": settings.mask_tokens}
    static = folder / "static"
    dynamic = folder / "dynamic"
    for masking, out in (("static", static), ("dynamic", dynamic)):
        recipe = {"input": sentences, "out": out, "vocab": vocabulary, "masking": masking}
        tokenized = TokenizeSettings.model_validate(recipe | shape | processes)
        seconds = _seconds(tokenize.run, tokenized)
        yield _row(f"tokenize, {masking}", seconds, text_bytes, read_corpus(out)["records"])
    # Records of other tools have no indexes.
    for path in static.rglob("*.index"):
        path.unlink()
    records = read_corpus(static)["records"]
    record_bytes = _bytes_of(static)
    seconds = _seconds(index.run, IndexSettings(folder=static, processes=settings.processes))
    yield _row("index", seconds, record_bytes, records)
    yield _reading("read, static", static, None, settings)
    yield _reading("read, dynamic", dynamic, None, settings)
    yield _reading("read, packs", dynamic, settings.max_sequences_per_pack, settings)


def _seconds(step: Callable[[Any], None], settings: Any) -> float:
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        step(settings)
    return time.perf_counter() - began


def _row(name: str, seconds: float, number: int, examples: int | None = None) -> Row:
    rate = number / 1e6 / seconds
    row = {"name": name, "seconds": seconds, "bytes": number, "megabytes_per_second": rate}
    if examples is not None:
        row |= {"examples": examples, "examples_per_second": examples / seconds}
    return row


def _reading(name: str, folder: Path, packed: int | None, settings: BenchDataSettings) -> Row:
    """Read batches with one thread for `reading_seconds`; a pack counts as its sequences."""
    batch = max(1, min(256, read_corpus(folder)["records"]) // (packed or 1))
    source = Records(
        folder,
        seed=settings.seed,
        sequence_length=settings.sequence_length,
        predictions=settings.mask_tokens,
        max_sequences_per_pack=packed,
    )
    reader = Reader(source, Batching(batch, batch))
    reader[0]  # opens the files
    examples = 0
    read = 0
    step = 0
    seconds = 0.0
    began = time.perf_counter()
    while seconds < settings.reading_seconds:
        step += 1
        columns = reader[step]
        examples += int(np.sum(np.max(columns["input_mask"], axis=-1)))
        read += sum(column.nbytes for column in columns.values())
        seconds = time.perf_counter() - began
    return _row(name, seconds, read, examples)


def _bytes_of(text: Path) -> int:
    return sum(path.stat().st_size for path in finished_files(text))


def write_synthetic_text(path: Path, megabytes: float, seed: int) -> None:
    """Write documents of synthetic sentences, separated by blank lines, until the size is reached."""
    rng = np.random.default_rng(seed)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    probabilities = 1.0 / np.arange(2, len(letters) + 2)
    spelling = rng.choice(letters, (WORDS, 12), p=probabilities / probabilities.sum())
    lengths = 1 + rng.binomial(11, 0.4, WORDS)
    words = np.array(["".join(row[:n]) for row, n in zip(spelling, lengths, strict=True)])
    # Zipf: the n-th word is 1/n as frequent as the first.
    bounds = np.cumsum(1.0 / np.arange(1, WORDS + 1))
    with path.open("w", encoding="utf-8") as out:
        while out.tell() < megabytes * 1e6:
            counts = 4 + rng.poisson(18, 40)  # of the sentences of a document
            ranks = np.searchsorted(bounds, rng.random(counts.sum()) * bounds[-1])
            sentences = np.split(words[ranks], np.cumsum(counts)[:-1])
            text = (" ".join(sentence).capitalize() + "." for sentence in sentences)
            out.write(" ".join(text) + "\n\n")
