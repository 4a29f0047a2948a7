"""Sentences to records of masked pairs, a group of files at a time.

A group is an input file, or a range of a large one, whose documents are paired and shuffled together; it becomes one
record file. Its text is one flat array of tokens, pairs are integers that point into it, and only a block of
examples at a time becomes rows, masks and bytes. So memory grows with a group and not with the corpus. All
randomness follows from the seed, the group's name and the numbers of copy and pair, never from the process.
"""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bert_cli.arrays import Ints64, UInts64
from bert_cli.data.io.documents import sentence_blocks
from bert_cli.data.io.files import Part, Reading, split_part, text_bytes
from bert_cli.data.io.inputs import Sentences
from bert_cli.data.io.manifest import Shard, Stats, shard_of
from bert_cli.data.random import row_keys
from bert_cli.data.records import formats, sentence_pairs
from bert_cli.data.records.formats import DynamicRecords
from bert_cli.data.records.masking import MaskRecipe, mask_examples
from bert_cli.data.records.sentence_pairs import Pairs
from bert_cli.data.records.tfrecord import RecordWriter
from bert_cli.data.tokens.encoder import LineEncoder, encoder_of
from bert_cli.data.tokens.notation import BYTE_LEVEL
from bert_cli.data.tokens.tokenizer import Normalization, Vocabulary, read_vocabulary
from bert_cli.data.tokens.vocab import find_vocabulary
from bert_cli.errors import ConfigError, DataError
from bert_cli.facts.masking import Masking
from bert_cli.text import count

RANGE_BYTES = 32_000_000  # of a range of a large file; less than twice that is one range
# 256 examples of 512 positions: arrays of a megabyte each, which stay in a cache.
BLOCK_POSITIONS = 1 << 17  # positions of the rows that are masked and serialized at once

# For the estimate of the bytes to write, of English articles with Google's uncased vocabulary.
TEXT_BYTES_PER_TOKEN = 4.4
# Number of records made of the tokens that fill one record, by next_sentence.
RECORDS_PER_FULL = {True: 1.25, False: 1.1}
# Bytes of a record besides its positions: names, frame, its line in the index and its offset.
STATIC_BYTES = 200
DYNAMIC_BYTES = 100
FILLED = 0.9  # fraction of the positions that hold a token


class Recipe(NamedTuple):
    """The values that a worker needs to make the records of a group."""

    vocabulary: tuple[Path, str, Normalization]  # its path, its hash, the normalization of the text
    sequence_length: int
    mask_tokens: int
    masking: Masking | None  # None for dynamic records, which are masked when they are read
    copies: int  # passes over the text
    has_pairs: bool
    short_seq_prob: float
    seed: int

    @property
    def longest(self) -> int:
        """Tokens of an example without [CLS] and [SEP]."""
        special = 3 if self.has_pairs else 2
        return self.sequence_length - special


def vocabulary_of(name: str, *, cased: bool, pairs: bool) -> Vocabulary:
    """Return the vocabulary of records. Raises ConfigError for one that suits neither the case nor sentence pairs."""
    vocabulary = find_vocabulary(name, cased=cased)
    if pairs and vocabulary.notation is BYTE_LEVEL:
        raise ConfigError(
            f"nsp (true, with the vocabulary {name})",
            f"models with {BYTE_LEVEL.name} have no sentence pairs",
            "pass --no-nsp",
        )
    return vocabulary


def bytes_written(text: Sentences, recipe: Recipe, vocab_size: int) -> int:
    """Estimate the bytes of the records and indexes of a text; each of its documents adds a record."""
    length = recipe.sequence_length
    tokens = sum(map(text_bytes, text.parts)) / TEXT_BYTES_PER_TOKEN
    records = tokens / recipe.longest * RECORDS_PER_FULL[recipe.has_pairs]
    # Bytes of varints: 2 for an id, 1 for the mask and 1 for the segment of a position; 2 + 1 + 4 of a mask.
    size: float = STATIC_BYTES + 4 * length + 7 * recipe.mask_tokens
    if recipe.masking is None:
        size = DYNAMIC_BYTES + FILLED * length * formats.token_bytes(vocab_size)
    return round((records + sum(text.documents.values())) * recipe.copies * size)


# --- groups of files


def plan_groups(text: Sentences, *, pairs: bool = True) -> tuple[list[Shard], list[str]]:
    """Return the shards, each of which makes a file of records, and notes for the user.

    A group has one file, or a range of it. The last file of a dump often has a single article, which cannot make pairs:
    where the manifest of the input says so, it joins the group before it. Raises DataError for any other group of one
    document, before hours of work.
    """
    split = partial(split_part, size=RANGE_BYTES, reading=Reading(), anywhere=not pairs)
    groups: list[list[Part]] = []
    for part in text.parts:
        groups += [[piece] for piece in split(part)]
    last = groups[-1]
    counted = text.documents
    joins = pairs and len(groups) > 1 and sum(counted.get(part.path, 2) for part in last) < 2
    if joins:
        groups[-2:] = [groups[-2] + last]
    checked = groups if pairs else ()
    for group in checked:
        is_complete = all(not part.start and part.stop is None for part in group)
        if is_complete and all(part.path in counted for part in group):
            _check_documents(sum(counted[part.path] for part in group), group)
    # Names are a part of the order: a folder is read in the order of its names.
    digits = max(3, len(str(len(groups) - 1)))  # so that the names sort in the order of the groups
    shards = [shard_of(Path(f"wiki_{n:0{digits}d}.tfrecord"), g) for n, g in enumerate(groups)]
    notes = list(text.notes)
    if joins:
        notes.append(
            f"{_span(last)}: has fewer than two documents, too few for sentence pairs, so it was "
            f"joined to the group before it, {shards[-1].output}"
        )
    return shards, notes


def _check_documents(number: int, parts: Sequence[Part]) -> None:
    """Raise DataError for a group of fewer than two documents, which cannot make pairs."""
    if number < 2:
        raise DataError(
            f"{_span(parts)} ({count(number, 'document')} in the group)",
            "a random next sentence must come from another document",
            "join the file to another, separate documents by blank lines, or pass --no-nsp",
        )


def _span(parts: Sequence[Part]) -> str:
    first = parts[0].path
    last = parts[-1].path
    if first == last:
        return str(first)
    return f"{first} to {last.name}"


# --- from text to tokens


@dataclass(frozen=True)
class Group:
    """Documents as one flat array of tokens."""

    tokens: npt.NDArray[np.uint16 | np.uint32]
    sentences: Ints64  # index of each sentence's first token, and the end
    documents: Ints64  # number of each document's first sentence, and the end


def encode_parts(parts: Sequence[Part], encoder: LineEncoder) -> Group:
    """Return all sentences of some parts, encoded. The end of a part ends a document."""
    tokens: list[npt.NDArray[np.uint16 | np.uint32]] = [np.zeros(0, np.uint16)]
    # The length of each sentence and the number of its document; empty documents have numbers, too.
    columns = [np.zeros((2, 0), np.int64)]
    document = 0
    for part in parts:
        for text in sentence_blocks(part):
            encoded = encoder.encode(text)
            # A blank line ends a document, so each one raises the number of what follows.
            numbers = document + np.cumsum(encoded.blank)
            document = int(numbers[-1])
            tokens.append(encoded.tokens)
            columns.append(np.stack([encoded.lengths, numbers])[:, encoded.lengths > 0])
        document += 1
    lengths, documents = np.concatenate(columns, axis=1)
    # The sentences at which the number of the document changes.
    begins = np.flatnonzero(np.diff(documents, prepend=-1))
    ends = np.append(0, np.cumsum(lengths))
    return Group(np.concatenate(tokens), ends, np.append(begins, len(lengths)))


# --- the work on one group


def convert(
    inputs: tuple[Path, ...], output: Path, *, parts: Sequence[Part], recipe: Recipe
) -> Stats:
    """Write the records of one group and their index."""
    # Garbage collection would take 18 % of the time to search millions of strings for cycles.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        encoder, vocabulary = _encoder(*recipe.vocabulary)
        group = encode_parts(parts, encoder)
        documents = len(group.documents) - 1
        if recipe.has_pairs:
            _check_documents(documents, parts)
        pairs, keys, tokens = _pair_group(group, recipe, output.stem)
        with RecordWriter(output) as writer:
            for block in _blocks(group, pairs, keys, recipe, vocabulary):
                writer.write_all(block)
    finally:
        if was_enabled:
            gc.enable()
    extra = {"tokens": tokens, "tokens_cut": tokens - pairs.tokens}
    sentences = len(group.sentences) - 1
    return Stats(documents, sentences, writer.records, extra=extra)


@lru_cache(maxsize=1)
def _encoder(
    vocab: Path, sha256: str, normalization: Normalization
) -> tuple[LineEncoder, Vocabulary]:
    """Return a worker's encoder, which remembers the words of earlier groups."""
    vocabulary = replace(read_vocabulary(vocab, sha256), normalization=normalization)
    return encoder_of(vocabulary), vocabulary


def _pair_group(group: Group, recipe: Recipe, name: str) -> tuple[Pairs, UInts64, int]:
    """Return the truncated pairs of all copies in shuffled order, their keys, and their tokens before truncation."""
    seed = recipe.seed
    sentences = group.sentences.tolist()
    documents = group.documents.tolist()
    make_pairs = sentence_pairs.fill_sentences
    if recipe.has_pairs:
        make_pairs = sentence_pairs.pair_sentences
    copies = []
    keys = []
    tokens = 0
    for copy in range(recipe.copies):
        random = Random(f"{seed} {name} {copy}")
        pairs = make_pairs(sentences, documents, recipe.longest, recipe.short_seq_prob, random)
        keys.append(row_keys(np.arange(len(pairs.is_random)), seed, name, copy))
        tokens += pairs.tokens
        copies.append(sentence_pairs.truncate_pairs(pairs, recipe.longest, keys[-1]))
    all_pairs = Pairs(*(np.concatenate(columns) for columns in zip(*copies, strict=True)))
    all_keys = np.concatenate(keys)
    order = np.argsort(row_keys(np.arange(len(all_keys)), seed, name, "order"), kind="stable")
    return all_pairs.take(order), all_keys[order], tokens


def _blocks(
    group: Group, pairs: Pairs, keys: UInts64, recipe: Recipe, vocabulary: Vocabulary
) -> Iterator[Iterator[bytes]]:
    """Yield the serialized records of all pairs, in their order, a block at a time."""
    length = recipe.sequence_length
    special = vocabulary.special
    size = len(vocabulary.pieces)
    masks = None
    if recipe.masking:
        continuations = vocabulary.is_continuation
        masks = MaskRecipe(special, size, recipe.masking, recipe.mask_tokens, continuations)
    step = max(1, BLOCK_POSITIONS // length)
    for first in range(0, len(keys), step):
        rows = slice(first, first + step)
        block = pairs.take(rows)
        tokens_BS, lengths_B = sentence_pairs.gather(group.tokens, block, special, length)
        first_lengths_B = block.first_length + 2  # of a single segment all of it
        if masks is None:
            is_token_BS = np.arange(length) < lengths_B[:, None]
            records = DynamicRecords(
                tokens_BS[is_token_BS],
                lengths_B.astype(np.int32),
                first_lengths_B.astype(np.int32),
                block.is_random.astype(np.int32),
            )
            yield formats.dynamic_payloads(records, formats.token_bytes(size))
        else:
            pairs_B = tokens_BS, lengths_B, first_lengths_B, block.is_random
            yield formats.static_payloads(mask_examples(*pairs_B, keys[rows], masks))
