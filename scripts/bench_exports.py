#!/usr/bin/env python3
"""Score ONNX graphs and static vectors of one model, and measure their texts a second on one core.

    bert export MODEL out/float32 --format onnx
    bert export MODEL out/int8 --format onnx --precision int8
    bert export MODEL out/static --format static
    scripts/bench_exports.py out/float32 out/int8 out/static --mrpc glue/MRPC/dev.tsv --squad dev-v1.1.json
    scripts/bench_exports.py out/float32 out/int8 --sst2 glue/SST-2/dev.tsv        # a classifier
    scripts/bench_exports.py out/float32 out/int8 --masks sentences.txt            # a model that fills masks

Vectors: the rank correlation of cosines with "is a paraphrase", and how well a question finds its paragraph among
six of each article. Masks: the fraction of masked words that the first choice is, one word near the middle of each
of 200 sentences. `equal` is the fraction of labels or first choices that equal the first folder's. Speed: processor
time, one thread, the median of three in turn, texts sorted by length in batches of 32.

`--without-amx` keeps ONNX Runtime from the matrix unit of recent Intel processors: Linux gives a process its
registers on request, and a filter of system calls refuses the request. The kernels of AVX-512 are used instead: an
int8 product (512 x 1,024 by 1,024 x 1,024) then runs at 540 instead of 1,350 GOP/s.
"""

import argparse
import ctypes
import json
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from bert_cli.data.finetune import embeddings
from bert_cli.data.finetune.tables import score

Encode = Callable[[Sequence[str]], np.ndarray]
TEXTS = 200
"""Texts whose encoding is timed; static vectors get twenty times as many."""


def refuse_amx() -> None:
    """Refuse this process the registers of AMX (arch_prctl, ARCH_REQ_XCOMP_PERM), with the error EPERM."""
    load, jump_if_equal, answer = 0x20, 0x15, 0x06
    filters = [
        (load, 0, 0, 0),  # number of the system call
        (jump_if_equal, 0, 3, 158),  # arch_prctl
        (load, 0, 0, 16),  # its first argument
        (jump_if_equal, 0, 1, 0x1023),  # ARCH_REQ_XCOMP_PERM
        (answer, 0, 0, 0x00050001),  # EPERM
        (answer, 0, 0, 0x7FFF0000),  # permitted
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in filters))
    described = struct.pack("HP", len(filters), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, described, 0, 0):
        raise SystemExit("this system does not permit a filter of system calls")


def graph(folder: Path) -> Encode:
    """Return the logits of texts or of their one [MASK], or their mean vectors, by an ONNX graph."""
    import onnxruntime  # It requests the registers of AMX while it is imported.

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
            if output == "last_hidden_state":
                values = (values * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
            elif values.ndim == 3:
                values = values[ids == tokenizer.token_to_id("[MASK]")]
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


def labelled_texts(options: argparse.Namespace) -> tuple[list[str], list[int]]:
    """Return sentences of SST-2 and their labels, sentences with a mask and the masked ids, or texts without labels."""
    if options.mrpc:
        return [line.split("\t")[3] for line in lines_of(options.mrpc)], []
    if options.sst2:
        rows = [line.split("\t") for line in lines_of(options.sst2)]
        return [row[0] for row in rows], [int(row[1]) for row in rows]
    vocabulary = Tokenizer.from_file(str(options.folders[0] / "tokenizer.json")).get_vocab()
    texts, labels = [], []
    for words in map(str.split, options.masks.read_text("utf-8").splitlines()):
        middle = len(words) // 2
        if 8 <= len(words) <= 60 and words[middle].lower() in vocabulary:
            labels.append(vocabulary[words[middle].lower()])
            texts.append(" ".join([*words[:middle], "[MASK]", *words[middle + 1 :]]))
    return texts[:TEXTS], labels[:TEXTS]


def scores_of(encode: Encode, options: argparse.Namespace) -> dict[str, float]:
    """Return the scores of vectors."""
    scores: dict[str, float] = {}
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
    parser.add_argument("--without-amx", action="store_true")
    for name in ("mrpc", "squad", "sst2", "masks"):
        parser.add_argument(f"--{name}", type=Path)
    options = parser.parse_args()
    if options.without_amx:
        refuse_amx()
    texts, labels = labelled_texts(options)
    exports = {
        folder: (graph if (folder / "model.onnx").is_file() else static)(folder)
        for folder in options.folders
    }
    speeds: dict[Path, list[float]] = {folder: [] for folder in exports}
    for _ in range(3):
        for folder, encode in exports.items():
            timed = texts[:TEXTS] * (1 if (folder / "model.onnx").is_file() else 20)
            start = time.process_time()
            encode(timed)
            speeds[folder].append(len(timed) / (time.process_time() - start))
    first: np.ndarray | None = None
    for folder, encode in exports.items():
        if labels:
            best = encode(texts).argmax(1)
            first = best if first is None else first
            scores = {"correct": (best == labels).mean(), "equal": (best == first).mean()}
        else:
            scores = scores_of(encode, options)
        size = max(file.stat().st_size for file in folder.iterdir()) / 1e6
        rounded = {name: round(float(value), 4) for name, value in scores.items()}
        speed = np.median(speeds[folder])
        print(f"{folder}: {size:.1f} MB, {speed:.0f} texts/s, {rounded}", flush=True)


if __name__ == "__main__":
    main()
