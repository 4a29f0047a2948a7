"""Small corpora for tests: folders of records with known numbers."""

from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from bert_cli.data.examples.reader import Batching, ExampleStream
from bert_cli.data.examples.source import Records
from bert_cli.data.random import row_keys
from bert_cli.data.records.corpus import RecordFiles, read_corpus
from bert_cli.data.records.formats import Batch, DynamicRecords, dynamic_payloads, static_payloads
from bert_cli.data.records.index import write_corpus
from bert_cli.data.records.masking import MaskRecipe, mask_examples
from bert_cli.data.records.tfrecord import RecordWriter
from bert_cli.data.tokens.tokenizer import (
    Normalization,
    SpecialIds,
    read_vocabulary,
    write_vocabulary,
)
from bert_cli.facts.masking import Masking

S, P, WORDS = 16, 4, 1000
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES += [("##" if number % 3 == 0 else "") + f"w{number}" for number in range(5, WORDS)]


def static_examples(first: int, count: int) -> dict[str, np.ndarray]:
    """Return examples whose record number is the token at position 1, after [CLS]."""
    rng = np.random.default_rng(first)
    least = 2 * P
    inside = np.tile(np.arange(1, least), (count, 1))
    examples = {
        "input_ids": rng.integers(5, WORDS, (count, S)),
        "input_mask": (np.arange(S) < rng.integers(least, S + 1, (count, 1))).astype(int),
        "segment_ids": rng.integers(0, 2, (count, S)),
        "masked_lm_positions": rng.permuted(inside, axis=1)[:, :P],
        "masked_lm_ids": rng.integers(5, WORDS, (count, P)),
        "masked_lm_weights": rng.integers(0, 2, (count, P)).astype(np.float32),
        "next_sentence_labels": rng.integers(0, 2, count),
    }
    examples["input_ids"][:, 0] = 2
    examples["input_ids"][:, 1] = np.arange(first, first + count)
    return examples


def dynamic_records(first: int, count: int) -> DynamicRecords:
    """Return pairs of 5 to S tokens: [CLS] a [SEP] b [SEP]; the label is the record number's last bit."""
    rng = np.random.default_rng(first)
    lengths = rng.integers(5, S + 1, count)
    lengths[0] = S
    first_lengths = rng.integers(3, lengths - 1)
    rows = [rng.integers(5, WORDS, length) for length in lengths]
    for row, cut in zip(rows, first_lengths, strict=True):
        row[0], row[cut - 1], row[-1] = 2, 3, 3
    columns = np.concatenate(rows), lengths, first_lengths, np.arange(first, first + count) % 2
    return DynamicRecords(*(column.astype(np.int32) for column in columns))


def masked_examples(
    records: DynamicRecords, length: int, predictions: int, vocab_size: int
) -> Batch:
    """Return pairs as static examples of so many positions, padded and masked."""
    tokens = np.zeros((len(records.lengths), length), np.int32)
    tokens[np.arange(length) < records.lengths[:, None]] = records.tokens
    recipe = MaskRecipe(SpecialIds(*range(5)), vocab_size, Masking(), predictions)
    return mask_examples(tokens, *records[1:], row_keys(np.arange(len(tokens)), 1), recipe)


def write_folder(
    folder: Path, kind: str, shards: list[Iterable[bytes]], pieces: list[str], **described: Any
) -> Path:
    """Write a folder of records like `bert tokenize`, one file for each shard of payloads."""
    folder.mkdir(parents=True)
    for number, payloads in enumerate(shards):
        with RecordWriter(folder / f"wiki_{number:03}.tfrecord") as writer:
            writer.write_all(payloads)
    write_vocabulary(folder, "\n".join(pieces).encode() + b"\n", Normalization())
    defaults = {
        "masking": kind,
        "sequence_length": S,
        "mask_tokens": P,
        "masked_lm_prob": 0.15,
        "whole_word_masking": False,
        "vocab_size": len(pieces),
        "vocab_sha256": read_vocabulary(folder / "vocab.txt").sha256,
        "token_bytes": 2,
        "special_ids": {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4},
        "tokenizer": {},
    }
    write_corpus(folder, defaults | described)
    return folder


def make_corpus(folder: Path, kind: str, counts: list[int], **changes: Any) -> Path:
    """Write records of known numbers, one file for each count."""
    shards: list[Iterable[bytes]] = []
    for first, count in zip(accumulate([0, *counts]), counts, strict=False):
        if kind == "static":
            shards.append(static_payloads(static_examples(first, count)) if count else ())
        else:
            shards.append(dynamic_payloads(dynamic_records(first, count)) if count else ())
    return write_folder(folder, kind, shards, PIECES, **changes)


def payloads(folder: Path) -> list[bytes]:
    files = RecordFiles(folder, read_corpus(folder))
    return files.payloads(np.arange(files.records))


def _example(rows: Batch, row: int, tokens: Any, chosen: Any, number: int | None) -> dict[str, Any]:
    """Return an example of a batch; positions are relative to its first token."""
    return {
        "tokens": tuple(rows["input_ids"][row, tokens].tolist()),
        "segments": tuple(rows["segment_ids"][row, tokens].tolist()),
        "masked": tuple((rows["masked_lm_positions"][row][chosen] - tokens[0]).tolist()),
        "masked_ids": tuple(rows["masked_lm_ids"][row][chosen].tolist()),
        "label": int(rows["next_sentence_labels"][row if number is None else (row, number)]),
    }


def sequences_of(rows: Batch) -> list[dict[str, Any]]:
    """Return the sequences of packs, each as if it were alone."""
    sequences = []
    for row in range(len(rows["input_ids"])):
        for number in range(rows["input_mask"][row].max()):
            positions = np.flatnonzero(rows["input_mask"][row] == number + 1)
            start, end = positions[0], positions[-1] + 1
            assert np.array_equal(positions, np.arange(start, end))
            assert np.array_equal(rows["position_ids"][row, positions], np.arange(len(positions)))
            assert rows["next_sentence_positions"][row, number] == start
            assert rows["input_ids"][row, start] == rows["input_ids"][0, 0]  # [CLS], never masked
            masked = rows["masked_lm_positions"][row]
            chosen = (rows["masked_lm_weights"][row] > 0) & (masked >= start) & (masked < end)
            sequences.append(_example(rows, row, positions, chosen, number))
    return sequences


def examples_of(rows: Batch) -> list[dict[str, Any]]:
    """Return unpacked examples in the same form."""
    return [
        _example(rows, row, np.arange(length), rows["masked_lm_weights"][row] > 0, None)
        for row, length in enumerate(rows["input_mask"].sum(axis=1))
    ]


def by_content(examples: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return sorted(tuple(example.values()) for example in examples)


def open_stream(
    folder: Path,
    *,
    examples: int = 16,
    micro: int = 4,
    rank: int = 0,
    world_size: int = 1,
    **settings: Any,
) -> ExampleStream:
    """A stream over a folder of records, with a small step."""
    source = Records(RecordFiles(folder), **{"seed": 1984} | settings)
    return ExampleStream([source], Batching(examples, micro, rank, world_size))


def assert_equal(one: Batch, other: Batch) -> None:
    """Assert that two batches have the same columns in the same order, types and values."""
    assert list(one) == list(other)
    for name in one:
        assert one[name].dtype == other[name].dtype
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
