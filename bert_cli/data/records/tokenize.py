"""`bert tokenize`: sentences to records of masked pairs, a group of files at a time.

A group's text is one flat array of tokens (`groups.py`); pairs are integers that point into it; and
only a block of examples at a time becomes rows, masks and bytes. So memory grows with a group (51
MB of text in one: 292 MB) and not with the corpus, and one core turns ten megabytes of text into
108,000 records in two seconds. Everything random follows from the seed, the group's name and the
number of the copy and of the pair, never from who did the work.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

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
from bert_cli.data.records.random_bits import row_keys
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
from bert_cli.data.shards.manifest import Stats
from bert_cli.data.shards.runner import run_shards
from bert_cli.data.text.files import Reading, refuse_without_effect
from bert_cli.data.text.parts import read_parts, shard_of, text_bytes
from bert_cli.errors import DataError

BLOCK_PLACES = 1 << 17
"""Places of the rows that are masked and serialised at once; twice as many are no faster."""

# What the plan of the step reckons with: fits what is written for 12 MB of English articles and
# Google's uncased vocabulary within a tenth, static and dynamic, at 128, 384 and 512 places.
TEXT_BYTES_PER_TOKEN = 4.4
RECORDS_PER_FULL = {True: 1.25, False: 1.1}
"""Records made, by next_sentence, where all tokens would fill one."""
STATIC_BYTES, DYNAMIC_BYTES = 200, 100
"""Of a record beside its places: names, frame, its line in the index and its offset."""
FILLED = 0.9
"""Share of the places that hold a token."""
MUCH_CUT = 0.4
"""Share of the tokens that is worth a warning; of Wikipedia's sentences 13 % are
cut at 128 places and 24 % at 64, of paragraphs of eight sentences 74 % at 128."""


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
    next_sentence: bool
    reading: Reading


def run(settings: TokenizeSettings) -> None:
    """Write OUT/wiki_000.tfrecord, ... and their indices, the tokenizer's files, corpus.json."""
    vocabulary = find_vocabulary(settings.vocab, cased=settings.cased)
    dynamic = settings.masking == "dynamic"
    unit: Literal["word", "token"] = "word" if settings.whole_word_masking else "token"
    masks = Masking(unit=unit, probability=settings.masked_lm_prob)
    recipe = Recipe(
        vocab=vocabulary.path.absolute(),
        cased=settings.cased,
        sequence_length=settings.sequence_length,
        mask_tokens=settings.mask_tokens,
        masking=settings.masking,
        copies=1 if dynamic else settings.duplication_factor,
        short_seq_prob=settings.short_seq_prob,
        static_masks=None if dynamic else masks,
        random_seed=settings.random_seed,
        vocab_sha256=vocabulary.sha256,
        next_sentence=settings.nsp,
        reading=Reading(settings.input_format, settings.text_field, settings.documents),
    )
    said = settings.group_files if "group_files" in settings.model_fields_set else None
    groups, notes = plan_groups(settings.input, said, recipe.reading, pairs=settings.nsp)
    parts = [part for _, group in groups for part in group]
    refuse_without_effect(parts, settings.model_fields_set)
    documents = sum(counted_documents(settings.input, parts, recipe.reading).values())
    manifest = run_shards(
        "tokenize",
        [shard_of(output, group) for output, group in groups],
        partial(convert, recipe=recipe),
        out=settings.out,
        processes=settings.processes,
        settings=_kept(settings)
        | {"duplication_factor": recipe.copies, "vocab_sha256": vocabulary.sha256},
        versions=("numpy", "tokenizers", "google-crc32c"),
        counted="records",
        notes=notes,
        needs=bytes_written(sum(map(text_bytes, parts)), documents, recipe, len(vocabulary.pieces)),
        scheduler=settings.scheduler,
    )
    write_vocabulary(settings.out, vocabulary.path.read_bytes(), cased=settings.cased)
    write_corpus(settings.out, describe(recipe, vocabulary))
    counts = manifest["counts"]
    cut = counts.get("tokens_cut", 0) / max(1, counts.get("tokens", 0))
    if cut > MUCH_CUT:
        print(
            f"tokenize: warning: {cut:.0%} of the tokens of the pairs did not fit into {settings.sequence_length} "
            "places and are in no record: the lines of the text are too long for that; split sentences first, with "
            "`bert preprocess`, or give --no-nsp, which uses every token"
        )


def bytes_written(text: float, documents: int, recipe: Recipe, words: int) -> int:
    """About how many bytes the records of so many bytes of text and their indices take.

    `documents` are those that were counted before, and 0 where none were: of each the last record
    is not full, which is most of what many short ones write.
    """
    longest = recipe.sequence_length - (3 if recipe.next_sentence else 2)
    records = text / TEXT_BYTES_PER_TOKEN / longest * RECORDS_PER_FULL[recipe.next_sentence]
    records = (records + documents) * recipe.copies
    if recipe.static_masks is None:
        size = DYNAMIC_BYTES + FILLED * recipe.sequence_length * token_bytes(words)
    else:
        size = STATIC_BYTES + 4 * recipe.sequence_length + 7 * recipe.mask_tokens
    return round(records * size)


def _kept(settings: TokenizeSettings) -> dict[str, Any]:
    """The settings that change the bytes written.

    Of those that came later only what departs from the default: folders begun before go on.
    """
    elsewhere = {"input", "out", "vocab", "processes", "executor", "scheduler"}
    later = ("nsp", "input_format", "text_field", "documents")
    fields = TokenizeSettings.model_fields
    usual = {name for name in later if getattr(settings, name) == fields[name].default}
    return settings.model_dump(mode="json", exclude=elsewhere | usual)


def describe(recipe: Recipe, vocabulary: Vocabulary) -> dict[str, Any]:
    """What corpus.json says about the records beside their files and counts."""
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


def convert(inputs: tuple[Path, ...], output: Path, *, recipe: Recipe) -> Stats:
    """Make the records of one group, and their index; `inputs` tell of its parts."""
    parts, _ = read_parts(inputs)
    least = 2 if recipe.next_sentence else 1
    documents = sentences = tokens = cut = 0
    # Millions of strings and integers come and go and none refers to another: looking for cycles
    # among them costs 18 % of the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        encoder, vocabulary = _encoder(recipe.vocab, recipe.vocab_sha256, recipe.cased)
        limit = HELD_BYTES * len(parts)
        groups = encode_groups(parts, encoder, recipe.reading, limit=limit, least=least)
        with RecordWriter(output) as writer:
            for number, group in enumerate(groups):
                if recipe.next_sentence:
                    check_documents(len(group.documents) - 1, parts)
                name = f"{output.stem} {number}" if number else output.stem
                pairs, keys, drawn = pair_group(group, recipe, name)
                tokens += drawn
                cut += drawn - pairs.tokens
                for block in blocks(group, pairs, keys, recipe, vocabulary):
                    writer.write_all(block)
                documents += len(group.documents) - 1
                sentences += len(group.sentences) - 1
    finally:
        if collecting:
            gc.enable()
    size = sum(part.size for part in parts)
    extra = {"tokens": tokens, "tokens_cut": cut}
    return Stats(documents, sentences, writer.records, bytes_in=size, extra=extra)


@lru_cache(maxsize=1)
def _encoder(vocab: Path, sha256: str, cased: bool) -> tuple[Encoder, Vocabulary]:
    """A worker's encoder, which knows more words with each group."""
    vocabulary = read_vocabulary(vocab)
    if vocabulary.sha256 != sha256:
        raise DataError(f"vocabulary ({vocab}): changed while records were made; start again")
    return Encoder(vocabulary.ids, cased=cased), vocabulary


def pair_group(
    group: Group, recipe: Recipe, name: str
) -> tuple[Pairs, npt.NDArray[np.uint64], int]:
    """Pairs of all copies in shuffled order, cut to length, with the keys of their random bits.

    And how many tokens they had before they were cut.
    """
    sentences, documents = group.sentences.tolist(), group.documents.tolist()
    copies, keys = [], []
    drawn = 0
    for copy in range(recipe.copies):
        random = Random(f"{recipe.random_seed} {name} {copy}")
        pairs = (pair_sentences if recipe.next_sentence else fill_sentences)(
            sentences,
            documents,
            sequence_length=recipe.sequence_length,
            short_seq_prob=recipe.short_seq_prob,
            random=random,
        )
        keys.append(row_keys(np.arange(len(pairs.is_random)), recipe.random_seed, name, copy))
        longest = recipe.sequence_length - (3 if recipe.next_sentence else 2)
        drawn += pairs.tokens
        copies.append(truncate_pairs(pairs, longest, keys[-1]))
    all_pairs = Pairs(*(np.concatenate(columns) for columns in zip(*copies, strict=True)))
    all_keys = np.concatenate(keys)
    places = row_keys(np.arange(len(all_keys)), recipe.random_seed, name, "order")
    order = np.argsort(places, kind="stable")
    return all_pairs.take(order), all_keys[order], drawn


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
        first_lengths_B = block.first_length + 2  # all of it where there is no second
        if masks is None:
            yield _dynamic_block(
                tokens_BS, lengths_B, first_lengths_B, block.is_random, token_bytes(size)
            )
            continue
        examples = mask_examples(
            tokens_BS,
            lengths_B,
            first_lengths_B,
            block.is_random,
            keys[rows],
            kinds=TokenKinds(special, size, continuation),
            masking=masks,
            predictions=recipe.mask_tokens,
        )
        yield static_payloads(examples)


def _dynamic_block(
    tokens_BS: npt.NDArray[np.int32],
    lengths_B: npt.NDArray[np.int64],
    first_lengths_B: npt.NDArray[np.int64],
    is_random_B: npt.NDArray[np.bool_],
    width: int,
) -> Iterator[bytes]:
    held_BS = np.arange(tokens_BS.shape[1]) < lengths_B[:, None]
    return dynamic_payloads(
        DynamicRecords(
            tokens_BS[held_BS],
            lengths_B.astype(np.int32),
            first_lengths_B.astype(np.int32),
            is_random_B.astype(np.int32),
        ),
        width,
    )
