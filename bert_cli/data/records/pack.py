"""`bert pack`: records of one sequence to records of several, a file at a time.

Each file is packed by itself (`packing.py`), which loses little: 600 records of 512 places in each of
12 files fill 99.5 % of the places, all of them together 99.9 %. So a worker holds a file's lengths and
a block of packs, and reads records of one file only. Static records keep the masks they have. Dynamic
ones keep the number of each sequence in IN, by which its mask is drawn, so that packing changes no mask.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.config.data import PackSettings, packed_predictions
from bert_cli.data.records.columns import pack_columns
from bert_cli.data.records.corpus import RecordFiles, read_corpus
from bert_cli.data.records.formats import (
    DynamicPacks,
    pack_payloads,
    parse_dynamic,
    static_payloads,
)
from bert_cli.data.records.index import DESCRIPTION, write_corpus
from bert_cli.data.records.inspect import copies_of
from bert_cli.data.records.tfrecord import RecordWriter
from bert_cli.data.records.tokenizer import FILES as TOKENIZER
from bert_cli.data.shards.manifest import Shard, Stats
from bert_cli.data.shards.runner import run_shards
from bert_cli.data.stream.packing import Packs
from bert_cli.data.stream.permutation import permute
from bert_cli.errors import DataError
from bert_cli.files import write_atomically

BLOCK = 1024
"""Sequences read and packed at once: 15 MB at 512 places, if they are static."""


@dataclass(frozen=True)
class Recipe:
    """What a worker must know to pack a file."""

    folder: Path
    fingerprint: str
    sequence_length: int
    sequences: int
    seed: int


def run(settings: PackSettings) -> None:
    """Write OUT's packed files under the names of IN's, their indices, the tokenizer, corpus.json."""
    # Workers of a cluster find the records by the names that stand in the shards.
    folder, most = settings.input.absolute(), settings.max_sequences_per_pack
    corpus = read_corpus(folder)
    recipe = Recipe(
        folder, corpus["fingerprint"], _length(settings, corpus), most, settings.random_seed
    )
    files = [file for file in corpus["files"] if file["records"]]
    manifest = run_shards(
        "pack",
        [Shard((folder / file["name"],), Path(file["name"])) for file in files],
        partial(convert, recipe=recipe),
        out=settings.out,
        processes=settings.processes,
        settings={
            "fingerprint": recipe.fingerprint,
            "sequence_length": recipe.sequence_length,
            "max_sequences_per_pack": most,
            "random_seed": settings.random_seed,
        },
        versions=("numpy", "google-crc32c"),
        counted="records",
        needs=sum(file["bytes"] for file in files),  # fewer places, but more columns or lists
        scheduler=settings.scheduler,
    )
    counts = manifest["counts"]
    for name in TOKENIZER:
        if (folder / name).is_file():
            write_atomically(settings.out / name, (folder / name).read_bytes())
    share = counts["tokens"] / (counts["records"] * recipe.sequence_length)
    described = {key: corpus[key] for key in (*DESCRIPTION, "next_sentence") if key in corpus}
    copies = copies_of(folder, corpus)
    write_corpus(
        settings.out,
        described
        | {
            "sequence_length": recipe.sequence_length,
            "max_sequences_per_pack": most,
            "sequences": counts["sequences"],
            "real_token_share": share,
        }
        | ({} if copies is None else {"duplication_factor": copies}),
    )
    alone = counts["tokens"] / (counts["sequences"] * recipe.sequence_length)
    print(
        f"pack: {counts['sequences']:,} sequences in {counts['records']:,} packs of at most {most}; of "
        f"{recipe.sequence_length} places {share:.1%} hold a token, one sequence alone {alone:.1%}"
    )


def _length(settings: PackSettings, corpus: dict[str, Any]) -> int:
    """Places of a pack; DataError for records that cannot be packed."""
    folder, stored = settings.input, int(corpus["sequence_length"])
    if corpus.get("max_sequences_per_pack", 1) > 1:
        raise DataError(
            f"input ({folder}): is packed already, with up to {corpus['max_sequences_per_pack']} "
            "sequences in a pack; give the folder that it was packed from"
        )
    if settings.out.absolute().is_relative_to(folder.absolute()):
        raise DataError(
            f"out ({settings.out}): lies in {folder}, whose records would then be those of both; "
            "choose another folder"
        )
    length = settings.sequence_length or stored
    if length < stored:
        raise DataError(
            f"sequence_length ({length}): the records in {folder} have {stored} places, which may all "
            f"be filled; give {stored} or more"
        )
    return length


def convert(inputs: tuple[Path, ...], output: Path, *, recipe: Recipe) -> Stats:
    """Pack the records of one file."""
    corpus = read_corpus(recipe.folder)
    if corpus["fingerprint"] != recipe.fingerprint:
        raise DataError(f"input ({recipe.folder}): changed while it was packed; start again")
    files = RecordFiles(recipe.folder, corpus)
    first, end = files.numbers_of(inputs[0])
    is_dynamic = corpus["format"] == "dynamic"
    lengths = files.lengths(first, end) if is_dynamic else _static_lengths(files, first, end)
    packs = Packs(lengths, recipe.sequence_length, recipe.sequences, recipe.seed)
    order = permute(np.arange(len(packs)), len(packs), recipe.seed, 0)
    write = _dynamic_blocks if is_dynamic else partial(_static_blocks, recipe=recipe)
    with RecordWriter(output) as writer:
        step = max(1, BLOCK // recipe.sequences)
        for start in range(0, len(order), step):
            chosen = order[start : start + step]
            rows = packs.records(chosen, np.zeros(len(chosen), np.int64))
            counts = (rows >= 0).sum(axis=1)
            within = rows[rows >= 0]
            writer.write_all(write(files, within + first, lengths[within], counts))
    return Stats(
        records=writer.records,
        extra={"sequences": end - first, "tokens": int(lengths.sum(dtype=np.int64))},
    )


def _dynamic_blocks(
    files: RecordFiles,
    numbers: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.uint16],
    counts: npt.NDArray[np.int64],
) -> Iterator[bytes]:
    width = files.corpus["token_bytes"]
    sequences = parse_dynamic(files.payloads(numbers), width)
    assert np.array_equal(sequences.lengths, lengths)
    return pack_payloads(DynamicPacks(sequences, numbers, counts.astype(np.int32)), width)


def _static_blocks(
    files: RecordFiles,
    numbers: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.uint16],
    counts: npt.NDArray[np.int64],
    *,
    recipe: Recipe,
) -> Iterator[bytes]:
    corpus = files.corpus
    predictions = packed_predictions(
        recipe.sequence_length, recipe.sequences, corpus["mask_tokens"], corpus["masked_lm_prob"]
    )
    sequences = files.static(numbers)
    return static_payloads(
        pack_columns(
            sequences,
            lengths.astype(np.int64),
            counts,
            sequence_length=recipe.sequence_length,
            most=recipe.sequences,
            predictions=predictions,
            next_sentence=corpus.get("next_sentence", True),
            pad=corpus["special_ids"]["pad"],
        )
    )


def _static_lengths(files: RecordFiles, first: int, end: int) -> npt.NDArray[np.uint16]:
    """Tokens of static records, from a pass over them; DataError unless padding comes after them."""
    corpus = files.corpus
    places = np.arange(corpus["sequence_length"])
    lengths = np.empty(end - first, np.uint16)
    for start in range(first, end, BLOCK):
        numbers = np.arange(start, min(start + BLOCK, end))
        mask = files.static(numbers)["input_mask"]
        lengths[numbers - first] = mask.sum(axis=1)
        odd = np.flatnonzero(
            (mask != (places < mask.sum(axis=1)[:, None])).any(axis=1) | (mask[:, 0] == 0)
        )
        if len(odd):
            raise DataError(
                f"{files.folder} (record {numbers[odd[0]]}): its input_mask is not ones and then "
                "zeros, so that it is no sequence with padding after it and cannot be packed; make "
                "the records with `bert tokenize`"
            )
    return lengths
