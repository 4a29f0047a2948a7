"""`bert tokenize`: sentences to records of masked pairs, a group of files at a time.

A group's text is encoded piece by piece into one flat array of tokens (two bytes each); pairs are
integers that point into it; and only a block of examples at a time becomes rows, masks and bytes.
So memory grows with a group (51 MB of text in one: 292 MB) and not with the corpus, and one core
turns ten megabytes of text into 108,000 records in two seconds. Everything random follows from the
seed, the group's name and the number of the copy and of the pair, never from who did the work.
"""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bert_cli.config.data import Masking, TokenizeSettings
from bert_cli.data.index import write_corpus
from bert_cli.data.instances import Pairs, gather, pair_sentences, truncate_pairs
from bert_cli.data.ledger import Shard, Stats, finished_files, read_manifest
from bert_cli.data.masks import mask_examples
from bert_cli.data.random_bits import row_keys
from bert_cli.data.records import (
    DynamicRecords,
    RecordWriter,
    dynamic_payloads,
    static_payloads,
    token_bytes,
)
from bert_cli.data.shards import run_shards
from bert_cli.data.vocab import (
    Vocabulary,
    find_vocabulary,
    read_vocabulary,
    tokenizer_config,
    write_vocabulary,
)
from bert_cli.data.wordpiece import Encoder, text_pieces
from bert_cli.errors import DataError

BLOCK_PLACES = 1 << 17
"""Places of the rows that are masked and serialised at once; twice as many are no faster."""


@dataclass(frozen=True)
class Recipe:
    """What a worker must know to make the records of a group."""

    vocab: Path
    cased: bool
    sequence_length: int
    mask_tokens: int
    masking: str
    copies: int
    short_seq_prob: float
    static_masks: Masking | None
    """How masks are drawn that are written; None where they are drawn when records are read."""
    random_seed: int
    vocab_sha256: str


@dataclass(frozen=True)
class Group:
    """The documents of some files as one flat array of tokens."""

    tokens: npt.NDArray[np.uint16 | np.uint32]
    sentences: npt.NDArray[np.int64]
    """[sentences + 1] place of each sentence's first token, and of the end."""
    documents: npt.NDArray[np.int64]
    """[documents + 1] number of each document's first sentence, and of the end."""


def run(settings: TokenizeSettings) -> None:
    """Write OUT/wiki_000.tfrecord, ... and their indices, the tokenizer's files, corpus.json."""
    vocabulary = find_vocabulary(settings.vocab, cased=settings.cased)
    dynamic = settings.masking == "dynamic"
    unit: Literal["word", "token"] = "word" if settings.whole_word_masking else "token"
    masks = Masking(unit=unit, probability=settings.masked_lm_prob)
    recipe = Recipe(
        vocab=vocabulary.path,
        cased=settings.cased,
        sequence_length=settings.sequence_length,
        mask_tokens=settings.mask_tokens,
        masking=settings.masking,
        copies=1 if dynamic else settings.duplication_factor,
        short_seq_prob=settings.short_seq_prob,
        static_masks=None if dynamic else masks,
        random_seed=settings.random_seed,
        vocab_sha256=vocabulary.sha256,
    )
    groups, notes = plan_groups(settings.input, settings.group_files)
    kept = settings.model_dump(mode="json", exclude={"input", "out", "vocab", "processes"})
    run_shards(
        "tokenize",
        groups,
        partial(convert, recipe=recipe),
        out=settings.out,
        processes=settings.processes,
        settings=kept | {"duplication_factor": recipe.copies, "vocab_sha256": vocabulary.sha256},
        versions=("numpy", "tokenizers", "google-crc32c"),
        counted="records",
        notes=notes,
    )
    write_vocabulary(settings.out, vocabulary.path.read_bytes(), cased=settings.cased)
    write_corpus(settings.out, describe(recipe, vocabulary))


def describe(recipe: Recipe, vocabulary: Vocabulary) -> dict[str, Any]:
    """What corpus.json says about the records beside their files and counts."""
    masks = recipe.static_masks
    return {
        "format": recipe.masking,
        "sequence_length": recipe.sequence_length,
        "mask_tokens": recipe.mask_tokens,
        "masked_lm_prob": masks.probability if masks else None,
        "whole_word_masking": masks.unit == "word" if masks else None,
        "vocab_size": len(vocabulary.pieces),
        "vocab_sha256": vocabulary.sha256,
        "token_bytes": token_bytes(len(vocabulary.pieces)),
        "special_ids": vars(vocabulary.special),
        "tokenizer": tokenizer_config(cased=recipe.cased),
    }


def plan_groups(folder: Path, group_files: int) -> tuple[list[Shard], list[str]]:
    """Make every N input files, in their order, the inputs of one record file; tell what to note.

    Empty files are left out. The tail of a dump is often one file with one article, which cannot
    make pairs: where the manifest beside the files tells so, it joins the group before it, and a
    note says so. Any other group of one document is a DataError: better said now than after hours
    of work.
    """
    files = [path for path in finished_files(folder) if path.stat().st_size]
    if not files:
        raise DataError(
            f"input ({folder}): holds no text; give a folder that `bert preprocess` wrote"
        )
    groups = [
        tuple(files[first : first + group_files]) for first in range(0, len(files), group_files)
    ]
    documents: dict[Path, int] = {}
    if (folder / "manifest.json").exists():
        told = read_manifest(folder).get("shards", [])
        documents = {folder / shard["output"]: shard.get("documents", 0) for shard in told}
    last = groups[-1]
    joins = len(groups) > 1 and sum(documents.get(path, 2) for path in last) < 2
    if joins:
        groups[-2:] = [groups[-2] + last]
    for inputs in groups:
        if all(path in documents for path in inputs):
            _check_documents(sum(documents[path] for path in inputs), inputs)
    width = max(3, len(str(len(groups) - 1)))
    shards = [
        Shard(inputs, Path(f"wiki_{number:0{width}d}.tfrecord"))
        for number, inputs in enumerate(groups)
    ]
    notes = [
        f"{_span(last)}: holds fewer than two documents, which cannot make pairs, so it went into "
        f"the group before it, {shards[-1].output}"
    ]
    return shards, notes if joins else []


def _span(inputs: Sequence[Path]) -> str:
    return str(inputs[0]) if len(inputs) == 1 else f"{inputs[0]} to {inputs[-1].name}"


def _check_documents(count: int, inputs: Sequence[Path]) -> None:
    if count >= 2:
        return
    raise DataError(
        f"{_span(inputs)} ({count} document{'' if count == 1 else 's'} in the group): a random next "
        "sentence must come from another document; raise --group-files so that every group holds "
        "several, and see that documents are separated by blank lines"
    )


def convert(inputs: Sequence[Path], output: Path, *, recipe: Recipe) -> Stats:
    """Make the records of one group, and their index."""
    # Millions of strings and integers come and go and none refers to another: looking for cycles
    # among them costs 18 % of the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        encoder, vocabulary = _encoder(recipe.vocab, recipe.vocab_sha256, recipe.cased)
        group = encode_group(inputs, encoder)
        documents = len(group.documents) - 1
        _check_documents(documents, inputs)
        pairs, keys = pair_group(group, recipe, output.stem)
        with RecordWriter(output) as writer:
            for block in blocks(group, pairs, keys, recipe, vocabulary):
                writer.write_all(block)
    finally:
        if collecting:
            gc.enable()
    return Stats(documents=documents, sentences=len(group.sentences) - 1, records=writer.records)


@lru_cache(maxsize=1)
def _encoder(vocab: Path, sha256: str, cased: bool) -> tuple[Encoder, Vocabulary]:
    """A worker's encoder, which knows more words with each group."""
    vocabulary = read_vocabulary(vocab)
    if vocabulary.sha256 != sha256:
        raise DataError(f"vocabulary ({vocab}): changed while records were made; start again")
    return Encoder(vocabulary.ids, cased=cased), vocabulary


def encode_group(inputs: Sequence[Path], encoder: Encoder) -> Group:
    """Encode all sentences of some files; a blank line or the end of a file ends a document."""
    tokens, lengths, documents = [], [], []
    document = 0
    for path in inputs:
        for text, _ in text_pieces(path):
            encoded = encoder.encode(text)
            number_of_line = document + np.cumsum(encoded.blank)
            document = int(number_of_line[-1])
            said = encoded.lengths > 0
            tokens.append(encoded.tokens)
            lengths.append(encoded.lengths[said])
            documents.append(number_of_line[said])
        document += 1
    # Documents that hold nothing have numbers too, so each change is one document.
    numbers = np.concatenate([np.array([-1]), *documents])
    first_sentences = np.flatnonzero(np.diff(numbers))
    ends = np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]))
    return Group(np.concatenate(tokens), ends, np.append(first_sentences, len(ends) - 1))


def pair_group(group: Group, recipe: Recipe, name: str) -> tuple[Pairs, npt.NDArray[np.uint64]]:
    """Pairs of all copies in shuffled order, cut to length, with the keys of their random bits."""
    sentences, documents = group.sentences.tolist(), group.documents.tolist()
    copies, keys = [], []
    for copy in range(recipe.copies):
        random = Random(f"{recipe.random_seed} {name} {copy}")
        pairs = pair_sentences(
            sentences,
            documents,
            sequence_length=recipe.sequence_length,
            short_seq_prob=recipe.short_seq_prob,
            random=random,
        )
        keys.append(row_keys(np.arange(len(pairs.is_random)), recipe.random_seed, name, copy))
        copies.append(truncate_pairs(pairs, recipe.sequence_length - 3, keys[-1]))
    all_pairs = Pairs(*(np.concatenate(columns) for columns in zip(*copies, strict=True)))
    all_keys = np.concatenate(keys)
    places = row_keys(np.arange(len(all_keys)), recipe.random_seed, name, "order")
    order = np.argsort(places, kind="stable")
    return all_pairs.take(order), all_keys[order]


def blocks(
    group: Group, pairs: Pairs, keys: npt.NDArray[np.uint64], recipe: Recipe, vocabulary: Vocabulary
) -> Iterator[Iterator[bytes]]:
    """Serialised records of all pairs, in their order, a block at a time."""
    special = vocabulary.special
    size = len(vocabulary.pieces)
    masks = recipe.static_masks
    continuation = vocabulary.is_continuation if masks and masks.unit == "word" else None
    length = recipe.sequence_length
    step = max(1, BLOCK_PLACES // length)
    for first in range(0, len(keys), step):
        rows = slice(first, first + step)
        block = pairs.take(rows)
        tokens_BS, lengths_B = gather(group.tokens, block, special, length)
        if masks is None:
            yield _dynamic_block(tokens_BS, lengths_B, block, token_bytes(size))
            continue
        examples = mask_examples(
            tokens_BS,
            lengths_B,
            block.first_length + 2,
            block.is_random,
            keys[rows],
            special=special,
            vocab_size=size,
            predictions=recipe.mask_tokens,
            masking=masks,
            is_continuation=continuation,
        )
        yield static_payloads(examples)


def _dynamic_block(
    tokens_BS: npt.NDArray[np.int32], lengths_B: npt.NDArray[np.int64], block: Pairs, width: int
) -> Iterator[bytes]:
    held_BS = np.arange(tokens_BS.shape[1]) < lengths_B[:, None]
    return dynamic_payloads(
        DynamicRecords(
            tokens_BS[held_BS],
            lengths_B.astype(np.int32),
            (block.first_length + 2).astype(np.int32),
            block.is_random.astype(np.int32),
        ),
        width,
    )
