"""`bert tokenize`: sentences to records of masked pairs, a group of files at a time.

A group's text is one flat array of tokens (`groups.py`), pairs are integers that point into it, and only a block of
examples at a time becomes rows, masks and bytes. So memory grows with a group (51 MB of text: 292 MB) and not with the
corpus, and one core turns ten megabytes of text into 108,000 records in two seconds. Everything random follows from the
seed, the group's name and the numbers of copy and pair, never from the process that does the work.
"""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np

from bert_cli.config.data import Masking, TokenizeSettings
from bert_cli.data.records.formats import (
    DynamicRecords,
    dynamic_payloads,
    static_payloads,
    token_bytes,
)
from bert_cli.data.records.groups import (
    HELD_BYTES,
    Group,
    check_documents,
    counted_documents,
    encode_groups,
    plan_groups,
)
from bert_cli.data.records.index import write_corpus
from bert_cli.data.records.masking import TokenKinds, mask_examples
from bert_cli.data.records.random_bits import Keys, row_keys
from bert_cli.data.records.sentence_pairs import (
    Pairs,
    fill_sentences,
    gather,
    pair_sentences,
    truncate_pairs,
)
from bert_cli.data.records.tfrecord import RecordWriter
from bert_cli.data.records.vocab import (
    Vocabulary,
    find_vocabulary,
    read_vocabulary,
    tokenizer_config,
    write_vocabulary,
)
from bert_cli.data.records.wordpiece import Encoder
from bert_cli.data.shards.manifest import Stats, Step
from bert_cli.data.shards.runner import Workers, run_shards
from bert_cli.data.text.files import Part, Reading, refuse_without_effect, shard_of, text_bytes
from bert_cli.errors import DataError

BLOCK_POSITIONS = 1 << 17
"""Positions of the rows that are masked and serialized at once; twice as many are no faster."""

# For the estimate of the bytes to write: within a tenth of what is written for 12 MB of English articles with Google's
# uncased vocabulary, static and dynamic, at 128, 384 and 512 positions.
TEXT_BYTES_PER_TOKEN = 4.4
RECORDS_PER_FULL = {True: 1.25, False: 1.1}
"""Records, by next_sentence, for the tokens that would fill one."""
STATIC_BYTES, DYNAMIC_BYTES = 200, 100
"""Bytes of a record besides its positions: names, frame, its line in the index and its offset."""
FILLED = 0.9
"""Fraction of the positions that hold a token."""
MUCH_TRUNCATED = 0.4
"""Fraction of truncated tokens above which a warning is printed. Of Wikipedia's sentences 13 % are truncated at 128
positions and 24 % at 64, of paragraphs of eight sentences 74 % at 128."""


@dataclass(frozen=True)
class Recipe:
    """The values that a worker needs to make the records of a group."""

    vocab: Path
    cased: bool
    sequence_length: int
    mask_tokens: int
    masking: str
    copies: int
    short_seq_prob: float
    static_masks: Masking | None
    """How masks are drawn; None for dynamic records, which are masked when they are read."""
    random_seed: int
    vocab_sha256: str
    next_sentence: bool
    reading: Reading


def run(settings: TokenizeSettings) -> None:
    """Write OUT/wiki_000.tfrecord, ... with their indexes, the tokenizer's files and corpus.json."""
    vocabulary = find_vocabulary(settings.vocab, cased=settings.cased)
    recipe = _recipe(settings, vocabulary)
    group_files = settings.group_files if "group_files" in settings.model_fields_set else None
    groups, notes = plan_groups(settings.input, group_files, recipe.reading, pairs=settings.nsp)
    parts = [part for _, group in groups for part in group]
    refuse_without_effect(parts, settings.model_fields_set)
    documents = sum(counted_documents(settings.input, parts, recipe.reading).values())
    manifest = run_shards(
        Step(
            "tokenize",
            settings.out,
            settings=_recorded_settings(settings)
            | {"duplication_factor": recipe.copies, "vocab_sha256": vocabulary.sha256},
            packages=("numpy", "tokenizers", "google-crc32c"),
            counted="records",
            expected_bytes=bytes_written(
                sum(map(text_bytes, parts)), documents, recipe, len(vocabulary.pieces)
            ),
        ),
        [shard_of(output, group) for output, group in groups],
        partial(convert, recipe=recipe),
        Workers(settings.processes, settings.scheduler),
        notes=notes,
    )
    write_vocabulary(settings.out, vocabulary.path.read_bytes(), cased=settings.cased)
    write_corpus(settings.out, _describe(recipe, vocabulary))
    counts = manifest["counts"]
    truncated = counts.get("tokens_cut", 0) / max(1, counts.get("tokens", 0))
    if truncated > MUCH_TRUNCATED:
        print(
            f"tokenize: warning: {truncated:.0%} of the tokens of the pairs did not fit into "
            f"{settings.sequence_length} positions and are in no record: the lines of the text are too long; split "
            "sentences first, with `bert preprocess`, or give --no-nsp, which uses every token"
        )


def _recipe(settings: TokenizeSettings, vocabulary: Vocabulary) -> Recipe:
    is_dynamic = settings.masking == "dynamic"
    unit: Literal["word", "token"] = "word" if settings.whole_word_masking else "token"
    masks = Masking(unit=unit, probability=settings.masked_lm_prob)
    return Recipe(
        vocab=vocabulary.path.absolute(),
        cased=settings.cased,
        sequence_length=settings.sequence_length,
        mask_tokens=settings.mask_tokens,
        masking=settings.masking,
        copies=1 if is_dynamic else settings.duplication_factor,
        short_seq_prob=settings.short_seq_prob,
        static_masks=None if is_dynamic else masks,
        random_seed=settings.random_seed,
        vocab_sha256=vocabulary.sha256,
        next_sentence=settings.nsp,
        reading=Reading(settings.input_format, settings.text_field, settings.documents),
    )


def bytes_written(text: float, documents: int, recipe: Recipe, vocab_size: int) -> int:
    """Estimate the bytes of the records and indexes of so many bytes of text.

    `documents` is 0 where they were not counted. The last record of each is not full, which matters for short ones.
    """
    longest = recipe.sequence_length - (3 if recipe.next_sentence else 2)
    records = text / TEXT_BYTES_PER_TOKEN / longest * RECORDS_PER_FULL[recipe.next_sentence]
    records = (records + documents) * recipe.copies
    if recipe.static_masks is None:
        size = DYNAMIC_BYTES + FILLED * recipe.sequence_length * token_bytes(vocab_size)
    else:
        size = STATIC_BYTES + 4 * recipe.sequence_length + 7 * recipe.mask_tokens
    return round(records * size)


def _recorded_settings(settings: TokenizeSettings) -> dict[str, Any]:
    """Return the settings that change the bytes written.

    Newer ones only where they differ from their defaults, so that older folders can be continued.
    """
    without_effect = {"input", "out", "vocab", "processes", "executor", "scheduler"}
    newer = ("nsp", "input_format", "text_field", "documents")
    fields = TokenizeSettings.model_fields
    defaults = {name for name in newer if getattr(settings, name) == fields[name].default}
    return settings.model_dump(mode="json", exclude=without_effect | defaults)


def _describe(recipe: Recipe, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the description of the records for corpus.json."""
    masks = recipe.static_masks
    return {
        "format": recipe.masking,
        "sequence_length": recipe.sequence_length,
        "mask_tokens": recipe.mask_tokens,
        "next_sentence": recipe.next_sentence,
        "masked_lm_prob": masks.probability if masks else None,
        "whole_word_masking": masks.unit == "word" if masks else None,
        "vocab_size": len(vocabulary.pieces),
        "vocab_sha256": vocabulary.sha256,
        "token_bytes": token_bytes(len(vocabulary.pieces)),
        "special_ids": vars(vocabulary.special),
        "tokenizer": tokenizer_config(cased=recipe.cased),
    }


# --- the work on one group


def convert(
    inputs: tuple[Path, ...], output: Path, *, parts: Sequence[Part], recipe: Recipe
) -> Stats:
    """Write the records of one group and their index."""
    documents = sentences = tokens = truncated = 0
    # Garbage collection would take 18 % of the time to search millions of strings for cycles.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        encoder, vocabulary = _encoder(recipe.vocab, recipe.vocab_sha256, recipe.cased)
        limit, least = HELD_BYTES * len(parts), 2 if recipe.next_sentence else 1
        groups = encode_groups(parts, encoder, recipe.reading, limit=limit, least=least)
        with RecordWriter(output) as writer:
            for number, group in enumerate(groups):
                if recipe.next_sentence:
                    check_documents(len(group.documents) - 1, parts)
                name = f"{output.stem} {number}" if number else output.stem
                pairs, keys, drawn = _pair_group(group, recipe, name)
                tokens += drawn
                truncated += drawn - pairs.tokens
                for block in _blocks(group, pairs, keys, recipe, vocabulary):
                    writer.write_all(block)
                documents += len(group.documents) - 1
                sentences += len(group.sentences) - 1
    finally:
        if was_enabled:
            gc.enable()
    size = sum(part.size for part in parts)
    extra = {"tokens": tokens, "tokens_cut": truncated}
    return Stats(documents, sentences, writer.records, bytes_in=size, extra=extra)


@lru_cache(maxsize=1)
def _encoder(vocab: Path, sha256: str, cased: bool) -> tuple[Encoder, Vocabulary]:
    """Return a worker's encoder, which remembers the words of earlier groups."""
    vocabulary = read_vocabulary(vocab)
    if vocabulary.sha256 != sha256:
        raise DataError(f"vocabulary ({vocab})", "changed while records were made", "start again")
    return Encoder(vocabulary.ids, cased=cased), vocabulary


def _pair_group(group: Group, recipe: Recipe, name: str) -> tuple[Pairs, Keys, int]:
    """Return the truncated pairs of all copies in shuffled order, their keys, and their tokens before truncation."""
    sentences, documents = group.sentences.tolist(), group.documents.tolist()
    make_pairs = pair_sentences if recipe.next_sentence else fill_sentences
    longest = recipe.sequence_length - (3 if recipe.next_sentence else 2)
    copies, keys = [], []
    tokens = 0
    for copy in range(recipe.copies):
        pairs = make_pairs(
            sentences,
            documents,
            sequence_length=recipe.sequence_length,
            short_seq_prob=recipe.short_seq_prob,
            random=Random(f"{recipe.random_seed} {name} {copy}"),
        )
        keys.append(row_keys(np.arange(len(pairs.is_random)), recipe.random_seed, name, copy))
        tokens += pairs.tokens
        copies.append(truncate_pairs(pairs, longest, keys[-1]))
    all_pairs = Pairs(*(np.concatenate(columns) for columns in zip(*copies, strict=True)))
    all_keys = np.concatenate(keys)
    shuffled = row_keys(np.arange(len(all_keys)), recipe.random_seed, name, "order")
    order = np.argsort(shuffled, kind="stable")
    return all_pairs.take(order), all_keys[order], tokens


def _blocks(
    group: Group, pairs: Pairs, keys: Keys, recipe: Recipe, vocabulary: Vocabulary
) -> Iterator[Iterator[bytes]]:
    """Yield the serialized records of all pairs, in their order, a block at a time."""
    masks, length = recipe.static_masks, recipe.sequence_length
    is_continuation = vocabulary.is_continuation if masks and masks.unit == "word" else None
    kinds = TokenKinds(vocabulary.special, len(vocabulary.pieces), is_continuation)
    step = max(1, BLOCK_POSITIONS // length)
    for first in range(0, len(keys), step):
        rows = slice(first, first + step)
        block = pairs.take(rows)
        tokens_BS, lengths_B = gather(group.tokens, block, kinds.special, length)
        first_lengths_B = block.first_length + 2  # of a single segment all of it
        if masks is None:
            is_token_BS = np.arange(length) < lengths_B[:, None]
            records = DynamicRecords(
                tokens_BS[is_token_BS],
                lengths_B.astype(np.int32),
                first_lengths_B.astype(np.int32),
                block.is_random.astype(np.int32),
            )
            yield dynamic_payloads(records, token_bytes(kinds.vocab_size))
            continue
        examples = mask_examples(
            tokens_BS,
            lengths_B,
            first_lengths_B,
            block.is_random,
            keys[rows],
            kinds=kinds,
            masking=masks,
            predictions=recipe.mask_tokens,
        )
        yield static_payloads(examples)
