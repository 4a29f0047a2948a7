#!/usr/bin/env python3
"""Compare `bert search` with bm25s and sentence-transformers with exact search, on one core.

    scripts/bench_search.py make MODEL TEXT                      # words of all passages
    scripts/bench_search.py embed MODEL TEXT                     # vectors of some passages, without loading the model
    scripts/bench_search.py ask MODEL TEXT --passages 100000     # a question, without its vector

TEXT is cut into passages as `bert search make` does, and repeated up to `--passages`; both sides get the same, as JSON
lines. `ask` ranks by words and meaning on both sides, with random vectors of the model's size: exact search does not
depend on their values. Its questions are sentences of the text. Needs `bm25s`, `PyStemmer` and `sentence-transformers`.
"""

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from turns import Pairs, first_cores, in_a_process, run_alternately

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TOKENIZERS_PARALLELISM": "false"}
os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "KERAS_BACKEND": "tensorflow"}
TOP = 10
TOKENS = 110  # of a passage


def write_passages(text: Path, file: Path, number: int) -> None:
    """Write so many passages of a text as JSON lines."""
    from bert_cli.data.io import files, inputs
    from bert_cli.data.search.passages import documents_of, passages_of
    from bert_cli.data.text.preprocess import load_splitter

    reading = files.Reading(documents="files")
    split = load_splitter("sentencex", "en")
    parts, _ = inputs.recognise_all(text, reading, {})
    documents = (document for part in parts for document in documents_of(part, reading))
    texts = [
        passage.text for document in documents for passage in passages_of(document.lines, split)
    ]
    rows = itertools.islice(itertools.cycle(texts), number)
    # Numbered, because an index has a vector of equal texts once.
    lines = (json.dumps({"text": f"{row} {n}"}) + "\n" for n, row in enumerate(rows))
    file.write_text("".join(lines))


def read_passages(options: argparse.Namespace) -> list[str]:
    lines = (options.folder / "passages.jsonl").read_text().splitlines()
    return [json.loads(line)["text"] for line in lines]


def questions_of(options: argparse.Namespace) -> list[str]:
    """Return sentences of the text, without their last word."""
    draw = random.Random(0)
    texts = draw.sample(read_passages(options)[:1000], options.questions)
    return [" ".join(text.split(". ")[0].split()[:12]) for text in texts]


def vectors_of(number: int, size: int) -> Any:
    values = np.random.default_rng(0).normal(size=(number, size)).astype(np.float32)
    return values / np.linalg.norm(values, axis=1, keepdims=True)


def timed(run: Any, *arguments: Any) -> tuple[float, float]:
    clock, used = time.perf_counter(), time.process_time()
    run(*arguments)
    return time.perf_counter() - clock, time.process_time() - used


def ours(options: argparse.Namespace) -> Pairs:
    from bert_cli.config.search import SearchMakeSettings
    from bert_cli.data.search.index import open_index
    from bert_cli.data.search.late import SIZE, Vectors
    from bert_cli.data.search.writing import write_index
    from bert_cli.tasks.search import make
    from bert_cli.tasks.search.vectors import Model

    path = options.folder / "index"
    text = options.folder / "passages.jsonl"
    settings = SearchMakeSettings.model_validate({"index": path, "text": [text]})
    if options.task == "embed":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        model = Model(str(options.model))
        texts = read_passages(options)[: options.embedded]
        model(texts[:32])
        return [timed(model, texts)]
    if options.task == "make":
        path.unlink(missing_ok=True)
        return [timed(make.run, settings)]
    if not path.exists():
        make.run(settings)
    with write_index(path) as index, index.changing():
        if numbers := index.without_vector():
            vectors = vectors_of(len(numbers), options.size)
            index.add_vectors(numbers, Vectors(vectors, [vectors[:0]] * len(numbers)))
            index.record(axes=np.eye(options.size, SIZE, dtype=np.float32).tobytes())
            index.table.execute(f"UPDATE vectors SET tokens = randomblob({SIZE} * {TOKENS})")
    opened = open_index(path)
    question = Vectors(vectors_of(1, options.size), [vectors_of(12, options.size)])
    opened.embed = lambda texts: question
    opened.weights = opened.fact("weights")
    opened.ask("first")
    return [timed(opened.ask, text, TOP) for text in questions_of(options)]


def theirs(options: argparse.Namespace) -> Pairs:
    import bm25s
    import Stemmer

    texts = read_passages(options)

    tokenize = partial(bm25s.tokenize, stemmer=Stemmer.Stemmer("english"), show_progress=False)

    def make() -> Any:
        index = bm25s.BM25()
        index.index(tokenize(texts), show_progress=False)
        return index

    if options.task == "make":
        return [timed(make)]
    import torch
    from sentence_transformers import SentenceTransformer, util

    torch.set_num_threads(1)
    if options.task == "embed":
        model = SentenceTransformer(str(options.model), device="cpu")
        model.encode(texts[:32])
        encode = partial(model.encode, show_progress_bar=False)
        return [timed(encode, texts[: options.embedded])]
    index = make()
    vectors = torch.from_numpy(vectors_of(len(texts), options.size))
    question = vectors[:1]

    def standard(scores: Any) -> Any:
        return (scores - scores.mean()) / scores.std()

    def ask(text: str) -> Any:
        words = tokenize(text, return_ids=False)[0]
        lexical = torch.from_numpy(index.get_scores(words))
        meaning = util.dot_score(question, vectors)[0]
        best = torch.topk(standard(lexical) + standard(meaning), TOP)
        return [texts[row] for row in best.indices.tolist()]

    ask("first")
    return [timed(ask, text) for text in questions_of(options)]


def main() -> None:
    """Run both sides alternately and print their medians and the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("task", choices=("make", "embed", "ask"))
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--passages", type=int, default=10_000)
    parser.add_argument(
        "--embedded", type=int, default=512, help="passages whose vectors are computed"
    )
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.size = json.loads((options.model / "config.json").read_text())["hidden_size"]
    if options.side:
        print(json.dumps(globals()[options.side](options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_passages(options.text, Path(folder) / "passages.jsonl", options.passages)
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder, "--side"]
        cores = first_cores(1)
        sides = {
            side: partial(in_a_process, [*command, side], cores) for side in ("ours", "theirs")
        }
        medians = run_alternately(sides, options.rounds, "{:.4f} s, processor {:.4f} s".format)
    ratios = [b / a for a, b in zip(medians["ours"], medians["theirs"], strict=True)]
    print(
        f"theirs takes {ratios[0]:.2f} times our wall-clock time, {ratios[1]:.2f} our processor time"
    )


if __name__ == "__main__":
    main()
