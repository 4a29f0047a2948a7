"""`bert pack`: pack records of one sequence into records of several, a file at a time.

Each file is packed separately, which loses little, so a worker holds the lengths of one file and a block of packs.
Static records keep their masks. Dynamic records keep the number of each sequence in the input; masks are drawn by this
number, so packing changes no mask.
"""

from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bert_cli.config.data import PackSettings, packed_predictions
from bert_cli.config.markers import recorded
from bert_cli.data.examples.source import Packs
from bert_cli.data.io.inputs import refuse_inside
from bert_cli.data.io.manifest import Shard, Stats, Step
from bert_cli.data.io.runner import Workers, run_shards
from bert_cli.data.random import permute
from bert_cli.data.records import formats
from bert_cli.data.records.corpus import RecordFiles, number_of_copies, read_corpus
from bert_cli.data.records.formats import DynamicPacks
from bert_cli.data.records.index import DESCRIPTION, write_corpus
from bert_cli.data.records.tfrecord import RecordWriter
from bert_cli.data.tokens.tokenizer import FILES
from bert_cli.errors import DataError
from bert_cli.files import JSONObject, write_atomically
from bert_cli.processes import print_line
from bert_cli.text import count


def run(settings: PackSettings) -> None:
    """Write the packed files under the names of the input files, their indexes, the tokenizer and corpus.json."""
    # Workers of a cluster find the records by the absolute names in the shards.
    folder = settings.input.absolute()
    out = settings.out
    corpus = read_corpus(folder)
    length = _pack_length(settings, corpus)
    files = [file for file in corpus["files"] if file["records"]]
    recipe = {"fingerprint": corpus["fingerprint"], **recorded(settings), "sequence_length": length}
    pack_size = settings.max_sequences_per_pack
    manifest = run_shards(
        Step(
            "pack",
            out,
            settings=recipe,
            packages=("numpy", "google-crc32c"),
            counted="records",
            # Fewer positions, but more columns or lists.
            expected_bytes=sum(file["bytes"] for file in files),
        ),
        [Shard((folder / file["name"],), Path(file["name"])) for file in files],
        partial(convert, folder=folder, recipe=recipe),
        Workers(settings.processes, settings.scheduler),
    )
    counts = manifest["counts"]
    for name in FILES:
        if (folder / name).is_file():
            write_atomically(out / name, (folder / name).read_bytes())
    filled = counts["tokens"] / (counts["records"] * length)
    description = {key: corpus[key] for key in (*DESCRIPTION, "next_sentence") if key in corpus}
    description |= {
        "sequence_length": length,
        "max_sequences_per_pack": pack_size,
        "sequences": counts["sequences"],
        "real_token_fraction": filled,
    }
    copies = number_of_copies(folder, corpus)
    write_corpus(out, description | ({} if copies is None else {"duplication_factor": copies}))
    unpacked = counts["tokens"] / (counts["sequences"] * length)
    print_line(
        f"pack: {count(counts['sequences'], 'sequence')} in {count(counts['records'], 'pack')} of at most "
        f"{pack_size}; {filled:.1%} of the {length} positions hold a token, {unpacked:.1%} without packing"
    )


def _pack_length(settings: PackSettings, corpus: JSONObject) -> int:
    """Return the sequence length of a pack. Raises DataError for records that cannot be packed."""
    folder = settings.input
    stored = int(corpus["sequence_length"])
    length = settings.sequence_length or stored
    if (pack_size := corpus.get("max_sequences_per_pack", 1)) > 1:
        problem = f"is packed already, with up to {pack_size} sequences in a pack"
        raise DataError(f"input ({folder})", problem, "use the folder that it was packed from")
    refuse_inside(settings.out, folder, "which would then contain the records of both")
    if length < stored:
        problem = f"the records in {folder} have {stored} positions, which may all be filled"
        raise DataError(f"sequence_length ({length})", problem, f"use {stored} or more")
    return length


def convert(inputs: tuple[Path, ...], output: Path, *, folder: Path, recipe: JSONObject) -> Stats:
    """Pack the records of one file; `recipe` has the recorded settings."""
    corpus = read_corpus(folder)
    if corpus["fingerprint"] != recipe["fingerprint"]:
        raise DataError(f"input ({folder})", "changed while it was packed", "start again")
    files = RecordFiles(folder, corpus)
    seed = recipe["random_seed"]
    length = recipe["sequence_length"]
    pack_size = recipe["max_sequences_per_pack"]
    first, end = files.numbers_of(inputs[0])
    is_dynamic = corpus["format"] == "dynamic"
    masks = corpus["mask_tokens"], corpus["masked_lm_prob"]
    sizes = (length, packed_predictions(length, pack_size, *masks), pack_size)
    pad = corpus["special_ids"]["pad"]
    lengths = files.lengths(first, end) if is_dynamic else _static_lengths(files, first, end)
    packs = Packs(lengths, length, pack_size, seed)
    order = permute(np.arange(len(packs)), len(packs), seed, 0)
    with RecordWriter(output) as writer:
        step = max(1, formats.BLOCK // pack_size)
        for start in range(0, len(order), step):
            chosen = order[start : start + step]
            rows = packs.records(chosen, np.zeros(len(chosen), np.int64))
            counts = (rows >= 0).sum(axis=1)
            within = rows[rows >= 0]
            numbers = within + first
            if is_dynamic:
                sequences = formats.parse_dynamic(files.payloads(numbers), corpus["token_bytes"])
                block = DynamicPacks(sequences, numbers, counts.astype(np.int32))
                writer.write_all(formats.pack_payloads(block, corpus["token_bytes"]))
            else:
                packed = formats.pack_columns(files.static(numbers), counts, sizes, pad)
                writer.write_all(formats.static_payloads(packed))
    extra = {"sequences": end - first, "tokens": int(lengths.sum(dtype=np.int64))}
    return Stats(records=writer.records, extra=extra)


def _static_lengths(files: RecordFiles, first: int, end: int) -> npt.NDArray[np.uint16]:
    lengths = np.empty(end - first, np.uint16)
    for start in range(first, end, formats.BLOCK):
        numbers = np.arange(start, min(start + formats.BLOCK, end))
        lengths[numbers - first] = files.static(numbers)["input_mask"].sum(axis=1)
    return lengths
