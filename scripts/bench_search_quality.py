#!/usr/bin/env python3
"""Measure how well `bert search` ranks: nDCG@10 of words, meaning and both, with intervals over documents.

    scripts/bench_search_quality.py squad=dev-v1.1.json de=xquad.de.json.gz manuals=FOLDER [--model MODEL]

A text is NAME=FILE of SQuAD's form, where each paragraph is a document, or NAME=FOLDER of manuals as `man` prints them,
where the question is the description under NAME, which is left out of the text. The documents are halved by a fixed
permutation: what is chosen on the first half is confirmed on the second.
"""

import argparse
import contextlib
import gzip
import json
import os
import random
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
NAMED = re.compile(r"^NAME\n(.*?)(?=^\S)", re.MULTILINE | re.DOTALL)
DASH = re.compile(r"\s[-\u2010-\u2014\u2212]{1,2}\s")


def read_squad(path: Path, questions: int) -> Iterator[tuple[str, dict[str, str], list[str]]]:
    """Yield the name, the row and the questions of each paragraph."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        articles = json.load(file)["data"]
    paragraphs = [(article, part) for article in articles for part in article["paragraphs"]]
    asked = [(n, one["question"]) for n, (_, part) in enumerate(paragraphs) for one in part["qas"]]
    random.Random(0).shuffle(asked)
    for number, (article, part) in enumerate(paragraphs):
        row = {"text": part["context"], "title": article.get("title", "")}
        yield f"{number}", row, [text for n, text in asked[:questions] if n == number]


def read_manuals(
    folder: Path, questions: int, length: int
) -> Iterator[tuple[str, dict[str, str], list[str]]]:
    """Yield the name, the text and the description of each manual."""
    pages = sorted(folder.iterdir())
    random.Random(0).shuffle(pages)
    for page in pages:
        text = page.read_text(encoding="utf-8")
        named = NAMED.search(text)
        parts = DASH.split(" ".join(named[1].split()), maxsplit=1) if named else []
        if named and len(parts) == 2 and len(parts[1].split()) > 2 and questions:
            questions -= 1
            rest = text[: named.start()] + text[named.end() :]
            yield page.name, {"text": rest[:length]}, [parts[1]]


def write(name: str, path: Path, folder: Path, options: argparse.Namespace) -> Path:
    """Write documents as `bert search make` reads them, and the questions; return the text."""
    rows: list[dict[str, str]] = []
    with (folder / "questions.jsonl").open("w", encoding="utf-8") as queries:
        if path.is_dir():
            text = folder / "text"
            text.mkdir()
            documents = read_manuals(path, options.manuals, options.length)
        else:
            text = folder / f"{name}.jsonl"
            documents = read_squad(path, options.questions)
        for number, (document, row, questions) in enumerate(documents, 1):
            if path.is_dir():
                (text / document).write_text(row["text"], encoding="utf-8")
            else:
                document = f"{text}:{number}"
                rows.append(row if options.titles else {"text": row["text"]})
            for question in questions:
                # A quotation mark without its other is an error.
                question = question if question.count('"') % 2 == 0 else question.replace('"', " ")
                queries.write(f"{json.dumps({'question': question, 'document': document})}\n")
    if rows:
        text.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return text


def measure(name: str, path: Path, options: argparse.Namespace) -> None:
    """Print a line for each ranking of a text."""
    import sqlite3  # noqa: F401  # before TensorFlow, whose SQLite lacks FTS5

    from bert_cli.config.search import SearchMakeSettings
    from bert_cli.data.random import chooses
    from bert_cli.data.search.index import WEIGHT
    from bert_cli.statistics import interval, mean_of
    from bert_cli.tasks.search import make, score
    from bert_cli.tasks.search.opened import open_index

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        text = write(name, path, folder, options)
        values = {"index": folder / "index", "text": [text], "model": options.model}
        with open(os.devnull, "w") as silent, contextlib.redirect_stdout(silent):
            make.run(SearchMakeSettings.model_validate(values))
        index = open_index(folder / "index")
        with index.snapshot():
            relevant = score.read_queries(folder / "questions.jsonl", index)
            begun = time.process_time()
            gains = score.question_scores(index, relevant)[:, :, 0]
            milliseconds = 1000 * (time.process_time() - begun) / len(relevant)
        groups = np.array([min(rows) for rows in relevant.values()])
        halves = chooses(groups)
        columns = {"words": 0}
        if options.model:
            columns |= {"meaning": -1, "both": round(10 * WEIGHT)}
        size = f"{len(relevant):,} questions, {index.count('passages'):,} passages"
        for ranking, column in columns.items():
            row = gains[:, column]
            mean = interval(mean_of(row, groups.tolist()))
            parts = f"{row[halves].mean():.3f} {row[~halves].mean():.3f}"
            print(f"{name} {ranking}: {mean:.3f}; halves {parts}; {size}", flush=True)
        print(f"{name}: {milliseconds:.1f} ms of processor time a question", flush=True)
        if options.save:
            np.save(f"{options.save}-{name}.npy", gains)


def main() -> None:
    """Measure each text in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("texts", nargs="+", metavar="NAME=PATH")
    parser.add_argument("--model", help="of the vectors; without one, words alone")
    parser.add_argument("--questions", type=int, default=2000, help="of SQuAD")
    parser.add_argument("--manuals", type=int, default=450)
    parser.add_argument("--length", type=int, help="characters of each manual")
    parser.add_argument("--titles", action="store_true", help="give articles their titles")
    parser.add_argument("--save", help="beginning of the names of files with the gains [n, W]")
    options = parser.parse_args()
    for text in options.texts:
        name, _, path = text.partition("=")
        measure(name, Path(path), options)


if __name__ == "__main__":
    main()
