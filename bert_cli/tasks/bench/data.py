"""`bert bench data`: how fast text becomes sentences, records and batches on this machine.

Every step is the command's own function on a folder that is gone afterwards, timed from its call to
its files; records are then read as a run reads them, by one thread in batches. Made-up text has words
as frequent as Zipf's law says, of letters as they come, so that a vocabulary can be learnt of it.
"""

import contextlib
import io
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bert_cli.config.bench import BenchDataSettings
from bert_cli.config.data import IndexSettings, PreprocessSettings, TokenizeSettings, VocabSettings
from bert_cli.config.layout import size
from bert_cli.data.records import index, tokenize, vocab
from bert_cli.data.records.corpus import read_corpus
from bert_cli.data.shards.manifest import finished_files, package_versions
from bert_cli.data.stream.reader import Batching, Reader
from bert_cli.data.stream.source import open_records
from bert_cli.data.text import preprocess
from bert_cli.files import is_stdout, output_json
from bert_cli.tasks.bench.table import machine_told, seconds
from bert_cli.terminal import print_table

VERSIONS = ("numpy", "tokenizers")
WORDS = 20_000
LETTERS = "etaoinshrdlucmfwypvbgk"
SENTENCES_OF_DOCUMENT = 40
PIECES = 8_000
"""Of a vocabulary that is trained here, where the text has so many."""
BATCH = 256
"""Records of a batch that is read."""
Row = dict[str, Any]


def run(settings: BenchDataSettings) -> None:
    """Measure each step, print a table, and write the figures where --json says.

    Raises what the steps raise for the text that was given.
    """
    alone = is_stdout(settings.json_file)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench_") as home:
        for row in _steps(settings, Path(home)):
            rows.append(row)
            if sys.stderr.isatty():
                print(f"{row['name']}: {seconds(row['seconds'])}", file=sys.stderr)
    figures: dict[str, Any] = {
        "what": "data",
        "input": "made up" if settings.input is None else str(settings.input),
        "steps": rows,
        "machine": machine_told(),
        "versions": package_versions(VERSIONS),
        "settings": settings.model_dump(mode="json"),
    }
    if not alone:
        _show(settings, rows, figures["machine"])
    if settings.json_file is not None:
        output_json(settings.json_file, figures)


def _steps(settings: BenchDataSettings, home: Path) -> Iterator[Row]:
    """The steps one after the other, each on what those before have left."""
    text, sentences = settings.input or home / "text", home / "sentences"
    if settings.input is None:
        text.mkdir()
        made_up_text(text / "made_up.txt", settings.megabytes, settings.seed)
    given, own = _size_of(text), {"processes": settings.processes}
    split = {"input": text, "out": sentences, "sentence_splitter": settings.sentence_splitter}
    yield _timed(
        "preprocess", preprocess.run, PreprocessSettings.model_validate(split | own), given
    )
    given, words = _size_of(sentences), settings.vocab
    if words is None:
        words = str(home / "vocab")
        learn = {"input": sentences, "out": words, "size": PIECES}
        yield _timed("vocab", vocab.run, VocabSettings.model_validate(learn), given)
    places = {"sequence_length": settings.sequence_length, "mask_tokens": settings.mask_tokens}
    for masking in ("static", "dynamic"):
        out = home / masking
        recipe = {"input": sentences, "out": out, "vocab": words, "masking": masking}
        asked = TokenizeSettings.model_validate(recipe | places | own)
        row = _timed(f"tokenize, {masking}", tokenize.run, asked, given)
        yield _per_example(row, read_corpus(out)["records"])
    yield from _indexes(settings, home / "static")
    for name, folder, most in (
        ("read, static", home / "static", None),
        ("read, dynamic", home / "dynamic", None),
        ("read, packs", home / "dynamic", settings.max_sequences_per_pack),
    ):
        yield _reading(name, folder, most, settings)


def _indexes(settings: BenchDataSettings, folder: Path) -> Iterator[Row]:
    """`bert index` on records whose indexes are not there, as another tool leaves them."""
    for path in folder.rglob("*.index"):
        path.unlink()
    records, given = read_corpus(folder)["records"], _size_of(folder)
    asked = IndexSettings(folder=folder, processes=settings.processes)
    yield _per_example(_timed("index", index.run, asked, given), records)


def _timed(name: str, step: Callable[[Any], None], asked: Any, size_of_input: int) -> Row:
    """A step's seconds and megabytes a second of what it reads; what it prints is left out."""
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        step(asked)
    took = time.perf_counter() - began
    return {
        "name": name,
        "seconds": took,
        "bytes": size_of_input,
        "megabytes_per_second": size_of_input / 1e6 / took,
    }


def _per_example(row: Row, examples: int) -> Row:
    return {**row, "examples": examples, "examples_per_second": examples / row["seconds"]}


def _reading(name: str, folder: Path, most: int | None, settings: BenchDataSettings) -> Row:
    """Batch after batch by one thread, for as long as the settings say; of packs their sequences."""
    corpus = read_corpus(folder)
    batch = min(BATCH, corpus["records"])
    if most is not None:
        batch = max(1, batch // most)
    source = open_records(
        folder,
        seed=settings.seed,
        sequence_length=settings.sequence_length,
        predictions=settings.mask_tokens,
        max_sequences_per_pack=most,
    )
    reader = Reader(source, Batching(batch, batch))
    # The first opens files, and makes what is made once.
    reader[0]
    examples, held, began, now = 0, 0, time.perf_counter(), 0.0
    for step in itertools.count(1):
        columns = reader[step]
        examples += int(np.sum(np.max(columns["input_mask"], axis=-1)))
        held += sum(column.nbytes for column in columns.values())
        now = time.perf_counter() - began
        if now >= settings.reading_seconds:
            break
    row = {"name": name, "seconds": now, "bytes": held, "megabytes_per_second": held / 1e6 / now}
    return _per_example(row, examples)


def _size_of(text: Path) -> int:
    """Bytes of a file, or of a folder's. DataError where there is none."""
    return sum(path.stat().st_size for path in finished_files(text))


def made_up_text(path: Path, megabytes: float, seed: int) -> None:
    """Write documents of made-up sentences, a blank line between two, until there is as much text."""
    drawn = np.random.default_rng(seed)
    letters = np.array(list(LETTERS))
    chances = 1.0 / np.arange(2, len(letters) + 2)
    spelt = drawn.choice(letters, (WORDS, 12), p=chances / chances.sum())
    lengths = 1 + drawn.binomial(11, 0.4, WORDS)
    words = np.array(["".join(row[:n]) for row, n in zip(spelt, lengths, strict=True)])
    # Zipf: the n-th word is 1/n as frequent as the first.
    bounds = np.cumsum(1.0 / np.arange(1, WORDS + 1))
    with path.open("w", encoding="utf-8") as out:
        while out.tell() < megabytes * 1e6:
            counts = 4 + drawn.poisson(18, SENTENCES_OF_DOCUMENT)
            ranks = np.searchsorted(bounds, drawn.random(counts.sum()) * bounds[-1])
            taken = np.split(words[ranks], np.cumsum(counts)[:-1])
            said = (" ".join(row).capitalize() + "." for row in taken)
            out.write(" ".join(said) + "\n\n")


def _show(settings: BenchDataSettings, rows: list[Row], told: dict[str, Any]) -> None:
    text = "made-up text" if settings.input is None else str(settings.input)
    print(f"{told['processor']}; {size(told['memory_bytes'])} of memory")
    print(f"data, {text}, {settings.processes} at a time, {settings.sequence_length} places\n")
    shown = []
    for row in rows:
        paced = f"{row['examples_per_second']:,.0f}" if "examples" in row else ""
        pace = f"{row['megabytes_per_second']:,.2f}"
        shown.append(
            (row["name"], f"{row['bytes'] / 1e6:,.1f}", seconds(row["seconds"]), pace, paced)
        )
    print_table(("step", "MB", "time", "MB/s", "examples/s"), shown, right=range(1, 5))
    print("\nMB: of text, for index of records, and for reading of the batches that come out")
