"""Where every record lies, so that nothing ever counts or finds records by reading them.

Each `NAME.tfrecord` has a `NAME.index` beside it, a line `offset size` per record, as the tfrecord
package writes it. A folder has `corpus.offsets`, all offsets as little-endian uint64 to be
memory-mapped, and, written last, `corpus.json`: what the records are, how many, and a fingerprint.
`bert index` makes what is missing or older than its records by reading only the frames: 1.5 million
records/s on one core when the file is in memory.
"""

import hashlib
import json
import mmap
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.config.data import IndexSettings
from bert_cli.data.records.corpus import CORPUS, read_corpus, refuse_unfinished
from bert_cli.data.records.formats import STATIC_FEATURES, parse_static, token_bytes
from bert_cli.data.records.tfrecord import FRAME_BYTES, HEAD_BYTES, payload_bytes, read_payload
from bert_cli.data.records.tokenizer import FILES as TOKENIZER
from bert_cli.data.records.vocab import (
    VOCAB_FILE,
    Vocabulary,
    find_vocabulary,
    read_vocabulary,
    tokenizer_config,
    write_vocabulary,
)
from bert_cli.data.shards.checksums import Checksums, checksums
from bert_cli.data.shards.manifest import Stats, package_versions
from bert_cli.data.shards.runner import run_in_threads, summary
from bert_cli.errors import ConfigError, DataError
from bert_cli.files import atomic_file, write_json_atomically
from bert_cli.imports import quiet_imports

OFFSETS = "corpus.offsets"
MANIFEST = "index_manifest.json"  # manifest.json is that of the step that made the records

INDEX_SHARE = 0.05
"""Bytes of an index for a byte of records, at most: 0.05 for dynamic records of 128 tokens."""
OFFSETS_SHARE = 0.6
"""Bytes of corpus.offsets for a byte of the indexes, whose lines have 13 bytes or more."""

# What the maker of the records knows about them; the rest of corpus.json follows from the files.
DESCRIPTION = (
    "format",
    "sequence_length",
    "mask_tokens",
    "masked_lm_prob",
    "whole_word_masking",
    "vocab_size",
    "vocab_sha256",
    "token_bytes",
    "special_ids",
    "tokenizer",
)
# What only some records have: labels of pairs unless it is false; packs of several sequences.
OPTIONAL = ("next_sentence", "max_sequences_per_pack", "sequences", "real_token_share")
# What some say beside, and what is no part of the fingerprint, which older folders have without it.
BESIDE = ("duplication_factor",)
Offsets = npt.NDArray[np.int64]
"""[records + 1] byte where each record's frame starts, and the end of the file."""


def run(settings: IndexSettings) -> None:
    """Index every record file of a folder and write corpus.offsets and corpus.json."""
    started = time.monotonic()
    folder = settings.folder
    paths = record_files(folder)
    description = _description(folder, settings.vocab)
    stale = [path for path in paths if read_index(path) is None]
    read = _write_indexes(stale, settings.processes)
    corpus = write_corpus(folder, description)
    if settings.check:
        from bert_cli.data.records.record_files import RecordFiles  # which needs what is here

        files, size = RecordFiles(folder, corpus), sum(path.stat().st_size for path in paths)
        read += run_in_threads("check", size, files.check_file, paths, settings.processes)
        print(f"check: the values of all {corpus['records']:,} records are possible")
    seconds = time.monotonic() - started
    indexed = {path.relative_to(folder).as_posix() for path in stale}
    whole = Stats(
        records=corpus["records"],
        bytes_in=sum(file["bytes"] for file in corpus["files"]),
        bytes_out=8 * corpus["records"]
        + sum(p.with_suffix(".index").stat().st_size for p in stale),
    )
    write_json_atomically(
        folder / MANIFEST,
        {
            "step": "index",
            "settings": {"vocab": settings.vocab},
            "counts": whole.counts(),
            "seconds": round(seconds, 3),
            "mb_per_second": round(read / 1e6 / max(seconds, 1e-9), 3),
            "versions": package_versions(["numpy", "google-crc32c"]),
            "notes": [],
            "shards": [file | {"indexed": file["name"] in indexed} for file in corpus["files"]],
        },
    )
    kept = len(paths) - len(stale)
    before = f"{kept} of {len(paths)}" if kept else ""
    print(summary("index", whole, seconds, read, before))


def record_files(folder: Path) -> list[Path]:
    """Return the record files below a folder in the order that numbers their records: by name.

    Hidden folders (half-written shards) are passed over. DataError when there are none.
    """
    if not folder.is_dir():
        raise DataError(f"folder ({folder}): does not exist; give a folder of .tfrecord files")
    seen = ((path.relative_to(folder), path) for path in folder.rglob("*.tfrecord"))
    whole = {
        name.as_posix(): path
        for name, path in seen
        if not any(part.startswith(".") for part in name.parts)
    }
    if not whole:
        raise DataError(f"folder ({folder}): holds no .tfrecord files; give a folder of records")
    return [whole[name] for name in sorted(whole)]


def read_index(path: Path) -> Offsets | None:
    """Return the offsets that the index beside a record file says, or None when it is of no use.

    It is of no use when it is missing, older than the records, not numbers, or when its records do
    not follow each other from the first byte of the file to the last.
    """
    index = path.with_suffix(".index")
    try:
        records, text = path.stat(), index.stat()
    except FileNotFoundError:
        return None
    if text.st_mtime_ns < records.st_mtime_ns:
        return None
    if text.st_size == 0:
        return np.zeros(1, np.int64) if records.st_size == 0 else None
    try:
        lines = np.loadtxt(index, np.int64, ndmin=2)
    except ValueError:
        return None
    if lines.shape[1] != 2:
        return None
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lines[:, 1])))
    if not np.array_equal(offsets[:-1], lines[:, 0]) or offsets[-1] != records.st_size:
        return None
    return offsets


def write_index(path: Path) -> int:
    """Write the index beside a record file from its frames alone; return the bytes gone through.

    Raises DataError naming the file and the byte where a frame is corrupt or cut.
    """
    size = path.stat().st_size
    with (
        atomic_file(path.with_suffix(".index"), INDEX_SHARE * size) as partial,
        partial.open("wb", buffering=1 << 18) as out,
    ):
        for offset, length in _frames(path, size):
            out.write(b"%d %d\n" % (offset, length))
    return size


def _frames(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """Yield offset and size of each frame, reading its length and skipping its payload."""
    # A few hundred lengths in a file: each head of length and checksum is verified once.
    known: dict[bytes, int] = {}
    offset = 0
    with path.open("rb", buffering=1 << 20) as file:
        while offset < size:
            head = file.read(HEAD_BYTES)
            length = known.get(head)
            if length is None:
                # A head that the file's end cuts is too long for what is left, too.
                payload = payload_bytes(head) if len(head) == HEAD_BYTES else size
                if payload is None:
                    raise DataError(
                        f"{path} (byte {offset}): no record starts here (wrong checksum of its "
                        "length); the file is corrupt, rebuild it"
                    )
                length = known[head] = payload + FRAME_BYTES
            if offset + length > size:
                raise DataError(
                    f"{path} (byte {offset}): the file of {size} bytes is cut within this record; "
                    "rebuild it"
                )
            yield offset, length
            offset += length
            file.seek(length - HEAD_BYTES, os.SEEK_CUR)


def _write_indexes(stale: list[Path], processes: int) -> int:
    # Threads: the time goes into reading, which other threads do not wait for.
    size = sum(path.stat().st_size for path in stale)
    return run_in_threads("index", size, write_index, stale, processes)


def write_corpus(folder: Path, description: Mapping[str, Any]) -> dict[str, Any]:
    """Write corpus.offsets and then corpus.json of a folder whose files are all indexed.

    `description` has the keys of DESCRIPTION and any of OPTIONAL and BESIDE. Returns the content of
    corpus.json. Its fingerprint is a hash of format, lengths, vocabulary and each file's name, size
    and index: it changes when any record's place or size does. There is a checksum of each file's
    bytes, too, by which copies of the folder are verified. Raises DataError for a file without a
    fresh index.
    """
    paths, before = record_files(folder), Checksums(folder / CORPUS)
    (folder / CORPUS).unlink(missing_ok=True)
    size = sum(path.stat().st_size for path in folder.rglob("*.index"))
    files: list[dict[str, Any]] = []
    hashes: list[str] = []
    with (
        atomic_file(folder / OFFSETS, OFFSETS_SHARE * size) as partial,
        partial.open("wb") as out,
    ):
        for path in paths:
            offsets = read_index(path)
            if offsets is None:
                raise DataError(
                    f"{path}: its index is missing or does not fit it; run `bert index {folder}`"
                )
            starts = offsets[:-1].astype("<u8").tobytes()
            out.write(starts)
            name = path.relative_to(folder).as_posix()
            files.append({"name": name, "records": len(offsets) - 1, "bytes": int(offsets[-1])})
            hashes.append(hashlib.sha256(starts).hexdigest())
    corpus: dict[str, Any] = {key: description[key] for key in DESCRIPTION}
    more = {key: description[key] for key in OPTIONAL if key in description}
    corpus |= more | {key: description[key] for key in BESIDE if key in description}
    corpus |= {"files": files, "records": sum(file["records"] for file in files)}
    if not corpus["records"]:
        raise DataError(f"folder ({folder}): its {len(files)} files hold no records; rebuild them")
    # All of it: the masks of dynamic records follow from every one of these.
    told = [corpus[key] for key in DESCRIPTION if key != "tokenizer"]
    told += [more] if more else []
    told += [[*file.values(), digest] for file, digest in zip(files, hashes, strict=True)]
    corpus["fingerprint"] = hashlib.sha256(json.dumps(told).encode()).hexdigest()
    # Not part of the fingerprint, which older folders have without them.
    for file, check in zip(
        files, checksums(folder, [f["name"] for f in files], before), strict=True
    ):
        file["crc32c"] = check["crc32c"]
    beside_records = [name for name in (OFFSETS, *TOKENIZER) if (folder / name).is_file()]
    corpus["beside"] = checksums(folder, beside_records)
    write_json_atomically(folder / CORPUS, corpus)
    return corpus


def _description(folder: Path, vocab: str | None) -> dict[str, Any]:
    """What is known of the records: from corpus.json, or the first record and the vocabulary."""
    refuse_unfinished(folder)
    if (folder / CORPUS).exists():
        corpus = read_corpus(folder)
        if vocab is not None and _vocabulary(vocab)[0].sha256 != corpus["vocab_sha256"]:
            raise DataError(
                f"vocab ({vocab}): is not the vocabulary that {folder / CORPUS} names; leave it out"
            )
        beside = folder / VOCAB_FILE
        if beside.exists() and read_vocabulary(beside).sha256 != corpus["vocab_sha256"]:
            raise DataError(
                f"{beside}: is not the vocabulary that the records were made with; bring it back"
            )
        return {key: corpus[key] for key in (*DESCRIPTION, *OPTIONAL, *BESIDE) if key in corpus}
    if vocab is None:
        raise DataError(
            f"folder ({folder}): has no corpus.json, so another tool made its records; "
            "say with which vocabulary: --vocab vocab.txt"
        )
    return _describe_foreign(folder, vocab)


def _describe_foreign(folder: Path, vocab: str) -> dict[str, Any]:
    """Describe another tool's records by the first of them; put the vocabulary beside them."""
    path = next((path for path in record_files(folder) if path.stat().st_size), None)
    if path is None:
        raise DataError(f"folder ({folder}): its files hold no records; rebuild them")
    sizes = _feature_sizes(path)
    missing = [name for name in STATIC_FEATURES if name not in sizes]
    if missing:
        raise DataError(
            f"{path} (first record): has no {', '.join(missing)}, only {', '.join(sorted(sizes))}; "
            "give records of masked examples"
        )
    vocabulary, cased = _vocabulary(vocab)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        first = parse_static(
            [read_payload(data, 0, path)], sizes["input_ids"], sizes["masked_lm_positions"]
        )["input_ids"][0]
    words, start = len(vocabulary.pieces), vocabulary.special.cls
    if first[0] != start or first.max() >= words:
        raise DataError(
            f"vocab ({vocab}): is not that of {path}, whose first record starts with id {first[0]} "
            f"and goes up to {first.max()}, while [CLS] is {start} of {words}; give the vocabulary "
            "that the records were made with"
        )
    write_vocabulary(folder, vocabulary.path.read_bytes(), cased=cased)
    return {
        "format": "static",
        "sequence_length": sizes["input_ids"],
        "mask_tokens": sizes["masked_lm_positions"],
        "masked_lm_prob": None,  # the records do not say
        "whole_word_masking": None,
        "vocab_size": words,
        "vocab_sha256": vocabulary.sha256,
        "token_bytes": token_bytes(words),
        "special_ids": vars(vocabulary.special),
        "tokenizer": tokenizer_config(cased=cased),
    }


def _feature_sizes(path: Path) -> dict[str, int]:
    """Names of the features of a file's first record, with the number of their values."""
    with quiet_imports():
        import tensorflow as tf
    from google.protobuf.message import DecodeError

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        payload = read_payload(data, 0, path)
    try:
        features = tf.train.Example.FromString(payload).features.feature
    except DecodeError:
        raise DataError(
            f"{path} (first record): is no tf.train.Example; give BERT records"
        ) from None
    kinds = ("int64_list", "float_list", "bytes_list")
    return {
        name: sum(len(getattr(feature, kind).value) for kind in kinds)
        for name, feature in features.items()
    }


def _vocabulary(name: str) -> tuple[Vocabulary, bool]:
    """The vocabulary that --vocab names, and whether it tells capital letters from small ones."""
    try:
        vocabulary = find_vocabulary(name, cased=False)
    except ConfigError:  # it says itself that it is cased
        return find_vocabulary(name, cased=True), True
    ordinary = (piece for piece in vocabulary.pieces if not piece.startswith("["))
    return vocabulary, any(piece != piece.lower() for piece in ordinary)
