#!/usr/bin/env python3
"""Measure which pairs of a text make a model of sentences better for real questions about it.

    scripts/bench_pairs.py squad SQUAD.json MODEL OUT --pairs cloze --seeds 0 1 2
    scripts/bench_pairs.py titles EXTRACTED MODEL OUT --pairs first title --negatives
    scripts/bench_pairs.py manuals FOLDER MODEL OUT --pairs sentence --interpolate 0.5

Three kinds of questions judge: `squad` has SQuAD's questions, and training reads the paragraphs that are searched;
`titles` searches articles, the output of `bert extract`, by their titles, and `manuals` text files of manual pages by
their one-line descriptions. In these two the questions are not in the text, and training reads other documents.
Scores are those of `bert search score`, with differences from MODEL on the same questions. OUT keeps the files.
"""

import argparse
import json
import math
import os
import pickle
import random
import re
import shutil
import sqlite3  # noqa: F401  # before TensorFlow, whose SQLite lacks FTS5
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}

import numpy as np
from safetensors.numpy import load_file, save_file

from bert_cli.data.io import files
from bert_cli.data.search.index import open_index, write_index
from bert_cli.data.search.passages import Document, documents_of, passages_of
from bert_cli.data.text.preprocess import load_splitter
from bert_cli.statistics import difference, interval, mean_of
from bert_cli.tasks.init.text import without_rarest
from bert_cli.tasks.search.score import USUAL, WEIGHTS, question_scores

QUESTIONS = 2000  # of SQuAD
JUDGED = 300  # articles or manuals
MOST_PASSAGES = 3  # of a document
MOST_LINES = 40
TERMS = 6  # of a question of key terms
BATCH = 32  # pairs
LENGTH = 96  # tokens of a text in training
WORD = re.compile(r"\w+")
SPLIT = load_splitter("sentencex", "en")
Pair = tuple[str, str]


class Text(NamedTuple):
    """Documents that are searched, the documents of questions, and (title, lines) to train on."""

    documents: list[Document]
    questions: dict[str, int]
    training: list[Document]


def squad(path: Path) -> Text:
    """Return the paragraphs, each a document, and their questions."""
    documents: list[Document] = []
    asked = []
    for article in json.loads(path.read_text("utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            asked += [(row["question"], len(documents)) for row in paragraph["qas"]]
            documents.append(Document("", paragraph["context"].splitlines()))
    drawn = np.random.default_rng(0).choice(len(asked), QUESTIONS, replace=False)
    return Text(documents, dict(asked[n] for n in drawn), documents)


def titles(folder: Path) -> Text:
    """Return articles without their title and first paragraph, and their titles as questions."""
    rows = []
    reading = files.Reading()
    for path in sorted(folder.rglob("wiki_*")):
        part = files.recognise(path, reading)
        for document in documents_of(part, reading) if part else ():
            lines = [line for line in document.lines if line != document.title]
            rows.append((document.title, Document(document.title, lines[1 : MOST_LINES // 4])))
    return divided(rows)


def manuals(folder: Path) -> Text:
    """Return manual pages without their section NAME, and their descriptions as questions."""
    rows = []
    for path in sorted(folder.glob("*.txt")):
        _, _, tail = path.read_text("utf-8").partition("\nNAME\n")
        name, _, body = tail.lstrip().partition("\n\n")
        _, dash, description = " ".join(name.split()).partition(" - ")
        lines = [line.strip() for line in body.splitlines() if line.strip()]
        if dash and lines:
            rows.append((description, Document(description, lines[:-1][:MOST_LINES])))
    return divided(rows)


def divided(rows: Sequence[tuple[str, Document]]) -> Text:
    """Return the first of the shuffled documents to judge on, the others to train on; a question has one document."""
    rows = [*dict(reversed(rows)).items()]
    random.Random(0).shuffle(rows)
    judged = rows[:JUDGED]
    questions = {question: number for number, (question, _) in enumerate(judged)}
    return Text([document for _, document in judged], questions, [row for _, row in rows[JUDGED:]])


def write(path: Path, documents: Sequence[Document]) -> list[list[str]]:
    """Write an index of documents without vectors, and return the passages of each."""
    passages = [passages_of(document.lines, SPLIT)[:MOST_PASSAGES] for document in documents]
    path.unlink(missing_ok=True)
    with write_index(path) as index, index.table:
        file = index.add_file("text", "text", "")
        for number, (document, of_document) in enumerate(zip(documents, passages, strict=True)):
            index.add(file, number, document, of_document)
    return [[" ".join(passage.text.split()) for passage in row] for row in passages]


def neighbours_of(sentences: Sequence[str]) -> list[Pair]:
    """Return a sentence and a later passage of each third of a document, or of shorter parts of a long one."""
    long = [sentence for sentence in sentences if len(sentence) >= 20]
    number = min(max(3, math.ceil(3 * sum(map(len, long)) / 20_000)), len(long) // 4)
    bounds = [len(long) * n // number for n in range(number + 1)] if number else []
    return [(long[first], " ".join(long[end - 3 : end])) for first, end in pairwise(bounds)]


class Maker:
    """Makes pairs of passages; words have their inverse frequency in these."""

    def __init__(self, passages: list[list[str]], documents: list[Document], seed: int) -> None:
        self.passages = passages
        self.documents = documents
        self.random = random.Random(seed)
        texts = [text for row in passages for text in row]
        counts = Counter(word for text in texts for word in {*WORD.findall(text.lower())})
        self.frequencies = counts

    def terms(self, sentence: str) -> str:
        """Return the rarest words of a sentence."""
        words = WORD.findall(sentence)
        rarest = sorted(range(len(words)), key=lambda n: self.frequencies[words[n].lower()])[:TERMS]
        return " ".join(words[n] for n in sorted(rarest))

    def of_kind(self, kind: str) -> Iterator[tuple[str, str, int]]:
        """Yield anchors, positives and the number of their document."""
        for number, (document, row) in enumerate(zip(self.documents, self.passages, strict=True)):
            sentences = [" ".join(text.split()) for line in document.lines for text in SPLIT(line)]
            if kind == "sentence":
                yield from ((*pair, number) for pair in neighbours_of(sentences))
            elif kind == "title" and document.title and row:
                yield document.title, self.random.choice(row), number
            for passage in row:
                parts = [part for part in map(str.strip, SPLIT(passage)) if len(part) > 30]
                if kind == "first" and len(parts) > 1:
                    yield parts[0], passage[passage.index(parts[0]) + len(parts[0]) :], number
                elif kind in ("cloze", "gap", "terms") and parts:
                    asked = self.random.choice(parts)
                    is_terms = kind == "terms"
                    anchor = (
                        self.terms(asked) if is_terms else without_rarest(asked, self.frequencies)
                    )
                    rest = passage.replace(asked, " ") if kind == "gap" else passage
                    yield anchor, rest, number

    def pairs(self, kinds: Sequence[str], most: int) -> list[tuple[str, str, int]]:
        """Return shuffled pairs of these kinds, in equal parts; no anchor and no positive occurs twice."""
        chosen: list[tuple[str, str, int]] = []
        seen: set[str] = set()
        for place, kind in enumerate(kinds, 1):
            rows = list(self.of_kind(kind))
            self.random.shuffle(rows)
            for anchor, positive, number in rows:
                positive = positive.strip()
                is_full = len(chosen) >= most * place // len(kinds)
                is_short = min(len(anchor.split()), len(positive.split())) < 2
                if not is_full and not is_short and not {anchor, positive} & seen:
                    seen |= {anchor, positive}
                    chosen.append((anchor, positive, number))
        self.random.shuffle(chosen)
        return chosen


def train(
    options: argparse.Namespace, pairs: Sequence[Sequence[str]], run: Path, seed: int
) -> Path:
    """Train with `bert embed`, and return the folder of the weights between those of both models."""
    columns = ["anchor", "positive", "negative"][: len(pairs[0])]
    rows = (json.dumps(dict(zip(columns, pair, strict=True))) for pair in pairs)
    run.mkdir(exist_ok=True)
    (run / "pairs.jsonl").write_text("\n".join(rows) + "\n", "utf-8")
    words = ["embed", "--pretrained-ckpt-path", options.model, "--train-file", run / "pairs.jsonl"]
    words += ["--text-column", ",".join(columns), "--no-do-validation", "--seed", seed]
    words += ["--save-ckpt-path", run / "model", "--max-seq-length", LENGTH]
    words += ["--global-batch.micro-batch-size", BATCH, "--precision", "mixed_bfloat16"]
    words += ["--optimizer-opts.learning-rate.max-learning-rate", options.rate]
    words += ["--optimizer-opts.learning-rate.warmup-frac", 0.1]
    command = [sys.executable, "-m", "bert_cli", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    from bert_cli.tasks.run.models import find_source

    trained = find_source(str(run / "model"))
    between = run / "between"
    shutil.copytree(options.model, between, dirs_exist_ok=True)
    start = load_file(options.model / "model.safetensors")
    end = load_file(trained.weights)
    part = np.float32(options.interpolate)
    mixed = {
        name: (1 - part) * weight + part * end[f"bert.{name}" if f"bert.{name}" in end else name]
        for name, weight in start.items()
        if weight.dtype == np.float32 and not name.startswith("pooler")
    }
    save_file({**start, **mixed}, between / "model.safetensors")
    return between


def in_bfloat16(folder: Path) -> Any:
    """Return the model of an index in bfloat16, in which it is twice as fast."""
    from bert_cli.tasks.run import opened
    from bert_cli.tasks.run.vectors import Embedding, open_vectors
    from bert_cli.tasks.search.opened import Model

    class InBfloat16(Model):
        @cached_property
        def _predictor(self) -> Embedding:
            model = opened.open_model(self._source, "embed", "mixed_bfloat16", uses_library=True)
            return open_vectors(self._source, normalize=True, model=model)

    return InBfloat16(str(folder))


def gains_of(options: argparse.Namespace, folder: Path, text: Text, vectors: Path) -> Any:
    """Return nDCG@10 of each question and weight of the meaning [n, W]."""
    if vectors.exists():
        return np.load(vectors)
    model = in_bfloat16(folder)
    path = options.out / f"{vectors.stem}.index"
    shutil.copy(options.out / "words.index", path)
    with write_index(path) as index, index.table:
        numbers, texts = zip(*index.without_vector(10**9), strict=True)
        index.record(model=str(folder), weights=model.weights)
        index.add_vectors(numbers, model(texts))
    index = open_index(path)
    index.embed = model
    index.weights = model.weights
    gains = question_scores(index, {q: {n} for q, n in text.questions.items()})[:, :, 0]
    path.unlink()
    np.save(vectors, gains)
    return gains


def read(options: argparse.Namespace, read_text: Callable[[Path], Text]) -> tuple[Text, Any]:
    """Return the text and the passages to train on, with indexes of both in OUT."""
    cache = options.out / "text.pickle"
    if not cache.exists():
        text = read_text(options.text)
        write(options.out / "words.index", text.documents)
        passages = write(options.out / "training.index", text.training)
        cache.write_bytes(pickle.dumps((text, passages)))
    text, passages = pickle.loads(cache.read_bytes())
    return text, passages


def rows_of(
    options: argparse.Namespace, maker: Maker, passages: list[list[str]]
) -> list[tuple[str, ...]]:
    """Return pairs, each with the passage of another document that its words find first if it is asked for."""
    pairs = maker.pairs(options.pairs, options.number)
    if not options.negatives:
        return [pair[:2] for pair in pairs]
    index = open_index(options.out / "training.index")
    flat = [(number, text) for number, row in enumerate(passages) for text in row]
    owner = np.array([number for number, _ in flat])
    rows: list[tuple[str, ...]] = []
    for anchor, positive, number in pairs:
        scores = index.by_words(anchor)
        scores[owner == number] = -1.0
        rows.append((anchor, positive, flat[int(np.argmax(scores))][1]))
    return rows


def main() -> None:
    """Print the scores of the start and of each seed, with the gains over the start."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    texts: dict[str, Callable[[Path], Text]] = {
        "squad": squad,
        "titles": titles,
        "manuals": manuals,
    }
    parser.add_argument("judge", choices=texts)
    parser.add_argument("text", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    kinds = ("sentence", "title", "first", "cloze", "gap", "terms")
    parser.add_argument(
        "--pairs", nargs="+", choices=kinds, default=[], help="none: the start alone"
    )
    parser.add_argument("--negatives", action="store_true", help="one for each pair, by words")
    parser.add_argument("--rate", type=float, default=2e-5)
    parser.add_argument("--number", type=int, default=768, help="of pairs")
    parser.add_argument(
        "--interpolate", type=float, default=1.0, help="part of the trained weights"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    text, passages = read(options, texts[options.judge])
    start = gains_of(options, options.model, text, options.out / "start.npy")
    systems = {"start": [start]}
    for seed in options.seeds if options.pairs else []:
        rows = rows_of(options, Maker(passages, text.training, seed), passages)
        mixture = "_".join([*options.pairs, *["negatives"] * options.negatives])
        run = options.out / f"{mixture}_{options.rate:g}_{options.number}_{seed}"
        vectors = run / f"{options.interpolate:g}.npy"
        if not vectors.exists():
            gains_of(options, train(options, rows, run, seed), text, vectors)
        systems[f"seed {seed}, {len(rows)} pairs"] = [np.load(vectors)]
    systems["all seeds"] = [gains for name, (gains,) in systems.items() if name != "start"]
    groups = list(text.questions.values())
    print(f"{len(groups)} questions, {len(text.documents)} documents")
    print(f"words {interval(mean_of(start[:, 0], groups)):.3f}")
    for place, column in {"alone": len(WEIGHTS) - 1, "with words": USUAL}.items():
        samples = {
            name: [mean_of(gains[:, column], groups) for gains in of_system]
            for name, of_system in systems.items()
            if of_system
        }
        for name, sample in samples.items():
            gain = difference(sample, samples["start"])
            print(f"{place}, {name}: {interval(*sample):.3f}, gain {gain:.3f}", flush=True)


if __name__ == "__main__":
    main()
