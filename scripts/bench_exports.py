#!/usr/bin/env python3
"""Score ONNX graphs and static vectors of one model, and measure their texts a second on one core.

    bert export MODEL out/float32 --format onnx
    bert export MODEL out/int8 --format onnx --precision int8
    bert export MODEL out/static --format static
    scripts/bench_exports.py out/float32 out/int8 out/static --mrpc glue/MRPC/dev.tsv --squad dev-v1.1.json
    scripts/bench_exports.py out/float32 out/int8 --sst2 glue/SST-2/dev.tsv        # a classifier

Vectors: the rank correlation of cosines with "is a paraphrase", and how well a question finds its paragraph among
six of each article. Processor time, one thread, the best of three in turn, texts sorted by length in batches of 32.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import onnxruntime
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from bert_cli.data.finetune import embeddings
from bert_cli.data.finetune.tables import score

Encode = Callable[[Sequence[str]], np.ndarray]
TEXTS = 200
"""Texts whose encoding is timed; static vectors get twenty times as many."""


def graph(folder: Path) -> Encode:
    """Return the logits of texts, or their mean vectors, by an ONNX graph."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(folder / "model.onnx", options)
    output = session.get_outputs()[0].name
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()

    def encode(texts: Sequence[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        results: list[np.ndarray | None] = [None] * len(texts)
        for first in range(0, len(order), 32):
            numbers = order[first : first + 32]
            encoded = tokenizer.encode_batch([texts[number] for number in numbers])
            ids = np.array([row.ids for row in encoded])
            mask = np.array([row.attention_mask for row in encoded])
            inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids * 0}
            (values,) = session.run([output], inputs)
            if values.ndim == 3:
                values = (values * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
            for number, row in zip(numbers, values, strict=True):
                results[number] = row
        return np.stack([row for row in results if row is not None])

    return encode


def static(folder: Path) -> Encode:
    """Return the mean vectors of texts by one vector for each piece."""
    table = load_file(folder / "model.safetensors")["embeddings"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(texts: Sequence[str]) -> np.ndarray:
        rows = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return np.stack([table[row.ids].mean(0) for row in rows])

    return encode


def scores_of(encode: Encode, options: argparse.Namespace) -> dict[str, float]:
    """Return the scores of one export."""
    scores: dict[str, float] = {}
    if options.sst2:
        rows = [line.split("\t") for line in lines_of(options.sst2)]
        best = encode([row[0] for row in rows]).argmax(1)
        scores["accuracy"] = float((best == [int(row[1]) for row in rows]).mean())
    if options.mrpc:
        rows = [line.split("\t") for line in lines_of(options.mrpc)]
        first, second = (encode([row[column] for row in rows]) for column in (3, 4))
        labels = np.array([int(row[0]) for row in rows])
        scores |= score(["spearman"], labels, embeddings.cosines(first, second))
    if options.squad:
        articles = json.loads(options.squad.read_text())["data"]
        pairs = [
            (paragraph["qas"][0]["question"], paragraph["context"])
            for article in articles
            for paragraph in article["paragraphs"][:6]
            if paragraph["qas"]
        ]
        task = embeddings.retrieval_of_pairs(pairs)
        vectors = encode(task.queries), encode(task.documents)
        scores |= embeddings.retrieval_scores(*vectors, task.relevant)
    return scores


def lines_of(path: Path) -> list[str]:
    """Return the lines of a table without its header."""
    return path.read_text("utf-8-sig").splitlines()[1:]


def main() -> None:
    """Print size, scores and texts a second of each folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+")
    for name in ("mrpc", "squad", "sst2"):
        parser.add_argument(f"--{name}", type=Path)
    options = parser.parse_args()
    rows = lines_of(options.sst2 or options.mrpc)
    texts = [line.split("\t")[0 if options.sst2 else 3] for line in rows][:TEXTS]
    exports = {
        folder: (graph if (folder / "model.onnx").is_file() else static)(folder)
        for folder in options.folders
    }
    speeds: dict[Path, list[float]] = {folder: [] for folder in exports}
    for _ in range(3):
        for folder, encode in exports.items():
            timed = texts if (folder / "model.onnx").is_file() else texts * 20
            start = time.process_time()
            encode(timed)
            speeds[folder].append(len(timed) / (time.process_time() - start))
    for folder, encode in exports.items():
        size = max(file.stat().st_size for file in folder.iterdir()) / 1e6
        scores = {
            name: round(float(value), 4) for name, value in scores_of(encode, options).items()
        }
        print(f"{folder}: {size:.1f} MB, {max(speeds[folder]):.0f} texts/s, {scores}", flush=True)


if __name__ == "__main__":
    main()
