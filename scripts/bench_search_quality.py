#!/usr/bin/env python3
"""Measure how well `bert search` and others rank: nDCG@10 with intervals over documents, and paired differences.

    scripts/bench_search_quality.py squad=dev-v1.1.json de=xquad.de.json.gz manuals=FOLDER [--model MODEL]

A text is NAME=FILE of SQuAD's form (.json), where each paragraph is a document; NAME=FOLDER of manuals as `man` prints
them, where the question is the description under NAME, which is left out of the text; or NAME=FILE of packages as
Debian lists them (/var/lib/dpkg/status), where the question is the summary and the text is the description below it; or
NAME=FOLDER in BEIR's form (corpus.jsonl, queries.jsonl, qrels/test.tsv).
Beside `bert search`, and `bert search` with each signal left out, are pipelines of bm25s and sentence-transformers on
the same passages, with and without the stemmer of NAME's language (English but for de, ru, tr and ar). Needs
`bm25s` and `PyStemmer`.
"""

import argparse
import contextlib
import gzip
import json
import os
import random
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
NAMED = re.compile(r"^NAME\n(.*?)(?=^\S)", re.MULTILINE | re.DOTALL)
LANGUAGES = {"de": "german", "ru": "russian", "tr": "turkish", "ar": "arabic"}
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


def read_packages(path: Path, questions: int) -> Iterator[tuple[str, dict[str, str], list[str]]]:
    """Yield the name, the description and the summary of each package that has both."""
    stanzas = path.read_text(encoding="utf-8").split("\n\n")
    random.Random(0).shuffle(stanzas)
    for stanza in stanzas:
        package = re.match("Package: (.*)", stanza)
        description = re.search(r"^Description(?:-en)?: (.*)\n((?: .*\n?)+)", stanza, re.MULTILINE)
        if package and description:
            lines = [line[1:] for line in description[2].splitlines()]
            text = "\n".join("" if line == "." else line for line in lines)
            yield package[1], {"text": text}, [description[1]] * (questions > 0)
            questions -= 1


def read_beir(folder: Path, questions: int) -> Iterator[tuple[str, dict[str, str], list[str]]]:
    """Yield the name, the row and the questions of each document of a folder in BEIR's form, as judged for tests."""
    read = {}
    for name in ("corpus", "queries"):
        lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        read[name] = {row["_id"]: row for row in map(json.loads, lines)}
    judged = (folder / "qrels" / "test.tsv").read_text(encoding="utf-8").splitlines()[1:]
    pairs = [(query, document) for query, document, score in map(str.split, judged) if int(score)]
    asked = list(dict.fromkeys(query for query, _ in pairs))
    random.Random(0).shuffle(asked)
    texts: dict[str, list[str]] = {}
    for query, document in pairs:
        if query in asked[:questions]:
            texts.setdefault(document, []).append(read["queries"][query]["text"])
    for document, row in read["corpus"].items():
        fields = {"text": row["text"], "title": row.get("title", "")}
        # A document without text has no passage, so nothing can find it.
        yield document, fields, texts.get(document, []) if row["text"].strip() else []


def write(name: str, path: Path, folder: Path, options: argparse.Namespace) -> Path:
    """Write documents as `bert search make` reads them, and the questions; return the text."""
    rows: list[dict[str, str]] = []
    with (folder / "questions.jsonl").open("w", encoding="utf-8") as queries:
        is_beir = (path / "corpus.jsonl").exists()
        is_folder = path.is_dir() and not is_beir
        if is_folder:
            text = folder / "text"
            text.mkdir()
            documents = read_manuals(path, options.manuals, options.length)
        else:
            text = folder / f"{name}.jsonl"
            read = read_squad if {".json", ".gz"} & {path.suffix} else read_packages
            documents = (read_beir if is_beir else read)(path, options.questions)
        for number, (document, row, questions) in enumerate(documents, 1):
            if is_folder:
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


def ours(
    index: Any, relevant: Mapping[str, set[int]], meanings: Sequence[Any], weight: float
) -> Any:
    """Return nDCG@10 of each question [n]."""
    from bert_cli.data.search import words
    from bert_cli.tasks.search.score import metrics_of, owners

    owner, _ = owners(index)
    gains = []
    for (question, right), meaning in zip(relevant.items(), meanings, strict=True):
        (scores,) = index.scores(words.parse(question), [weight], meaning)
        gains.append(metrics_of(best_passage(scores, owner), right)[0])
    return np.array(gains)


def best_passage(scores: Any, owner: Any) -> Any:
    """Return the score of each document [M], which is that of its best passage."""
    best = np.full(owner.max() + 1, -np.inf, np.float32)
    np.maximum.at(best, owner, scores)
    return best


def theirs(
    index: Any, relevant: Mapping[str, set[int]], meanings: Sequence[Any], language: str
) -> Iterator[tuple[str, Any]]:
    """Yield the name and nDCG@10 [n] of pipelines of bm25s on the same passages, with the cosines of the same model.

    `tests/tasks/finetune/test_embed.py` compares these cosines with those of sentence-transformers.
    """
    import bm25s
    import Stemmer

    from bert_cli.data.search.ranking import combined
    from bert_cli.tasks.search.score import metrics_of, owners

    owner, _ = owners(index)
    texts = [text for (text,) in index.table.execute("SELECT text FROM passages ORDER BY id")]
    has_vectors = bool(meanings[0].cosines.size)
    for name, stemmer in (("bm25s", None), ("bm25s, stemmer", Stemmer.Stemmer(language))):
        options = {
            "stemmer": stemmer,
            "stopwords": [] if language == "arabic" else language,
            "show_progress": False,
        }
        ranking = bm25s.BM25()
        ranking.index(bm25s.tokenize(texts, **options), show_progress=False)
        gains: dict[str, list[float]] = {}
        for (question, right), meaning in zip(relevant.items(), meanings, strict=True):
            tokens = bm25s.tokenize(question, return_ids=False, **options)[0]
            lexical = ranking.get_scores(tokens) if tokens else np.zeros(len(texts), np.float32)
            rows = {name: lexical}
            if has_vectors:
                rows[f"{name} + sentence-transformers"] = combined(lexical, meaning.cosines, 0.5)
                ranks = [np.argsort(np.argsort(-row)) for row in (lexical, meaning.cosines)]
                rows[f"{name} + sentence-transformers, reciprocal ranks"] = sum(
                    1.0 / (60 + rank) for rank in ranks
                )
            for row, scores in rows.items():
                documents = best_passage(scores, owner)
                gains.setdefault(row, []).append(metrics_of(documents, right)[0])
        yield from ((row, np.array(values)) for row, values in gains.items())


def rankings(
    index: Any, relevant: Mapping[str, set[int]], language: str
) -> Iterator[tuple[str, Any]]:
    """Yield the name and nDCG@10 [n] of each ranking: ours, with each signal left out, and theirs."""
    from bert_cli.data.search import index as indexes
    from bert_cli.data.search import late, lexical, words
    from bert_cli.data.search.late import NO_MEANING

    asked = list(map(words.parse, relevant))
    meanings = [NO_MEANING] * len(asked)
    weight = 0.0
    if index.embed:
        meanings = index.by_meaning(asked)
        weight = indexes.WEIGHT
        yield "both", ours(index, relevant, meanings, weight)
        yield "meaning", ours(index, relevant, meanings, 1.0)
    yield "words", ours(index, relevant, meanings, 0.0)
    for name, module, constant, value in (
        ("without token vectors", late, "RERANKED", 0),
        ("without 4-grams", lexical, "RERANKED", 0),
        ("without word forms", words, "FIRST", words.LONGEST_QUESTION),
    ):
        if module is not late or weight:
            usual = getattr(module, constant)
            setattr(module, constant, value)
            yield name, ours(index, relevant, meanings, weight)
            setattr(module, constant, usual)
    yield from theirs(index, relevant, meanings, language)


def measure(name: str, path: Path, options: argparse.Namespace) -> None:
    """Print a line for each ranking of a text."""
    from bert_cli.config.search import SearchMakeSettings
    from bert_cli.statistics import difference, interval, mean_of
    from bert_cli.tasks.search import make, score
    from bert_cli.tasks.search.opened import open_index

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        text = write(name, path, folder, options)
        values = {"index": folder / "index", "text": [text], "model": options.model}
        with open(os.devnull, "w") as silent, contextlib.redirect_stdout(silent):
            make.run(SearchMakeSettings.model_validate(values))
        index = open_index(folder / "index")
        size = (folder / "index").stat().st_size / index.count("passages")
        with index.snapshot():
            relevant = score.read_queries(folder / "questions.jsonl", index)
            groups = [min(rows) for rows in relevant.values()]
            count = f"{len(relevant):,} questions, {index.count('passages'):,} passages"
            print(f"{name}: {count} of {size / 1000:.1f} kB", flush=True)
            first = None
            for ranking, gains in rankings(index, relevant, LANGUAGES.get(name, "english")):
                sample = mean_of(gains, groups)
                first = first or sample
                gain = f"; to the first {difference([sample], [first]):+.3f}"
                print(f"{name} {ranking}: {interval(sample):.3f}{gain}", flush=True)


def main() -> None:
    """Measure each text in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("texts", nargs="+", metavar="NAME=PATH")
    parser.add_argument("--model", help="of the vectors; without one, words alone")
    parser.add_argument("--questions", type=int, default=2000, help="of SQuAD, packages and BEIR")
    parser.add_argument("--manuals", type=int, default=450)
    parser.add_argument("--length", type=int, help="characters of each manual")
    parser.add_argument(
        "--titles", action="store_true", help="give articles and BEIR's documents their titles"
    )
    options = parser.parse_args()
    for text in options.texts:
        name, _, path = text.partition("=")
        measure(name, Path(path), options)


if __name__ == "__main__":
    main()
