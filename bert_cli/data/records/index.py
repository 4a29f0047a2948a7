"""`bert index`: where every record starts, so that nothing finds or counts records by reading them.

Each record file has an index (`tfrecord.py`). A folder has `corpus.offsets`, all offsets as little-endian uint64 to be
memory-mapped, and, written last, `corpus.json`: what the records are, how many, and a fingerprint. Indexes that are
absent or older than their records are made by reading only the frames: 1.5 million records/s on one core when the file
is in memory.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.config.data import IndexSettings
from bert_cli.data.records.corpus import (
    CORPUS,
    OFFSETS,
    RecordFiles,
    read_corpus,
    refuse_unfinished,
)
from bert_cli.data.records.formats import STATIC_FEATURES, parse_static, tensorflow, token_bytes
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
from bert_cli.data.shards.manifest import Stats, checksums, known_checksums, package_versions
from bert_cli.data.shards.runner import run_in_threads, summary
from bert_cli.errors import ConfigError, DataError
from bert_cli.files import atomic_file, write_json_atomically

MANIFEST = "index_manifest.json"
"""manifest.json is that of the step that made the records."""
INDEX_FRACTION = 0.05
"""Bytes of an index for a byte of records, at most: 0.05 for dynamic records of 128 tokens."""
OFFSETS_FRACTION = 0.6
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
OPTIONAL = ("next_sentence", "max_sequences_per_pack", "sequences", "real_token_share")
"""Part of the fingerprint only where they are present."""
INFORMATION = ("duplication_factor",)
"""Never part of the fingerprint, which older folders have without them."""
Offsets = npt.NDArray[np.int64]
"""[records + 1] byte where each record's frame starts, and the end of the file."""


def run(settings: IndexSettings) -> None:
    """Index every record file of a folder and write corpus.offsets and corpus.json."""
    started = time.monotonic()
    folder, processes = settings.folder, settings.processes
    paths = record_files(folder)
    description = _description(folder, settings.vocab)
    stale = [path for path in paths if read_index(path) is None]
    # Threads, because the time is spent reading, during which other threads run.
    read = run_in_threads("index", _bytes(stale), write_index, stale, processes)
    corpus = write_corpus(folder, description)
    if settings.check:
        files = RecordFiles(folder, corpus)
        read += run_in_threads("check", _bytes(paths), files.check_file, paths, processes)
        print(f"check: the values of all {corpus['records']:,} records are possible")
    seconds = time.monotonic() - started
    stats = Stats(
        records=corpus["records"],
        bytes_in=sum(file["bytes"] for file in corpus["files"]),
        bytes_out=8 * corpus["records"] + _bytes([path.with_suffix(".index") for path in stale]),
    )
    indexed = {path.relative_to(folder).as_posix() for path in stale}
    write_json_atomically(
        folder / MANIFEST,
        {
            "step": "index",
            "settings": {"vocab": settings.vocab},
            "counts": stats.counts(),
            "seconds": round(seconds, 3),
            "mb_per_second": round(read / 1e6 / max(seconds, 1e-9), 3),
            "versions": package_versions(["numpy", "google-crc32c"]),
            "notes": [],
            "shards": [file | {"indexed": file["name"] in indexed} for file in corpus["files"]],
        },
    )
    fresh = len(paths) - len(stale)
    print(summary("index", stats, seconds, read, f"{fresh} of {len(paths)}" if fresh else ""))


def _bytes(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def record_files(folder: Path) -> list[Path]:
    """Return the record files below a folder, ordered by name, which is the order of their records.

    Hidden folders, which hold partial shards, are skipped. DataError when there are no record files.
    """
    if not folder.is_dir():
        raise DataError(f"folder ({folder})", "does not exist", "give a folder of .tfrecord files")
    paths = {path.relative_to(folder): path for path in folder.rglob("*.tfrecord")}
    visible = {
        name.as_posix(): path
        for name, path in paths.items()
        if not any(part.startswith(".") for part in name.parts)
    }
    if not visible:
        raise DataError(
            f"folder ({folder})", "holds no .tfrecord files", "give a folder of records"
        )
    return [visible[name] for name in sorted(visible)]


# --- the index of a file


def read_index(path: Path) -> Offsets | None:
    """Return the offsets in the index of a record file, or None when the index is unusable.

    It is unusable when it is absent, older than the records, not numbers, or when its records do not follow each other
    from the first byte of the file to the last.
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
    """Write the index of a record file from its frames and return the size of the file.

    DataError, with file and byte, where a frame is corrupt or cut.
    """
    size = path.stat().st_size
    with (
        atomic_file(path.with_suffix(".index"), INDEX_FRACTION * size) as partial,
        partial.open("wb", buffering=1 << 18) as out,
    ):
        for offset, length in _frames(path, size):
            out.write(b"%d %d\n" % (offset, length))
    return size


def _frames(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """Yield offset and size of each frame; payloads are skipped."""
    # A file has a few hundred different sizes: each head, with its checksum, is verified once.
    lengths: dict[bytes, int] = {}
    offset = 0
    with path.open("rb", buffering=1 << 20) as file:
        while offset < size:
            head = file.read(HEAD_BYTES)
            length = lengths.get(head)
            if length is None:
                # A head that the end of the file cuts is too long for what is left, too.
                payload = payload_bytes(head) if len(head) == HEAD_BYTES else size
                if payload is None:
                    raise DataError(
                        f"{path} (byte {offset})",
                        "no record starts here (wrong checksum of its length)",
                        "the file is corrupt, rebuild it",
                    )
                length = lengths[head] = payload + FRAME_BYTES
            if offset + length > size:
                raise DataError(
                    f"{path} (byte {offset})",
                    f"the file of {size} bytes is cut within this record",
                    "rebuild it",
                )
            yield offset, length
            offset += length
            file.seek(length - HEAD_BYTES, os.SEEK_CUR)


# --- corpus.json


def write_corpus(folder: Path, description: Mapping[str, Any]) -> dict[str, Any]:
    """Write corpus.offsets and corpus.json of a folder whose files are all indexed; return the latter.

    `description` has the keys of DESCRIPTION and any of OPTIONAL and INFORMATION. The fingerprint is a hash of the
    description and of each file's name, size and index, so it changes when any record moves or changes its size. A
    checksum of each file's bytes verifies copies of the folder. DataError for a file without a usable index.
    """
    paths, before = record_files(folder), known_checksums(folder / CORPUS)
    (folder / CORPUS).unlink(missing_ok=True)
    files: list[dict[str, Any]] = []
    hashes: list[str] = []
    size = OFFSETS_FRACTION * _bytes(list(folder.rglob("*.index")))
    with atomic_file(folder / OFFSETS, size) as partial, partial.open("wb") as out:
        for path in paths:
            offsets = read_index(path)
            if offsets is None:
                raise DataError(
                    str(path),
                    "its index is missing or does not fit it",
                    f"run `bert index {folder}`",
                )
            starts = offsets[:-1].astype("<u8").tobytes()
            out.write(starts)
            name = path.relative_to(folder).as_posix()
            files.append({"name": name, "records": len(offsets) - 1, "bytes": int(offsets[-1])})
            hashes.append(hashlib.sha256(starts).hexdigest())
    corpus: dict[str, Any] = {key: description[key] for key in DESCRIPTION}
    optional = {key: description[key] for key in OPTIONAL if key in description}
    corpus |= optional | {key: description[key] for key in INFORMATION if key in description}
    corpus |= {"files": files, "records": sum(file["records"] for file in files)}
    if not corpus["records"]:
        raise DataError(
            f"folder ({folder})", f"its {len(files)} files hold no records", "rebuild them"
        )
    # Everything that the masks of dynamic records depend on.
    hashed = [corpus[key] for key in DESCRIPTION if key != "tokenizer"]
    hashed += [optional] if optional else []
    hashed += [[*file.values(), digest] for file, digest in zip(files, hashes, strict=True)]
    corpus["fingerprint"] = hashlib.sha256(json.dumps(hashed).encode()).hexdigest()
    sums = checksums(folder, [file["name"] for file in files], before)
    for file, checksum in zip(files, sums, strict=True):
        file["crc32c"] = checksum["crc32c"]
    others = [name for name in (OFFSETS, *TOKENIZER) if (folder / name).is_file()]
    corpus["beside"] = checksums(folder, others, {})
    write_json_atomically(folder / CORPUS, corpus)
    return corpus


def _description(folder: Path, vocab: str | None) -> dict[str, Any]:
    """Return what corpus.json says of the records, or what their first one and the vocabulary say."""
    refuse_unfinished(folder)
    if not (folder / CORPUS).exists():
        if vocab is None:
            raise DataError(
                f"folder ({folder})",
                "has no corpus.json, so another tool made its records",
                "name their vocabulary: --vocab vocab.txt",
            )
        return _describe_foreign(folder, vocab)
    corpus = read_corpus(folder)
    if vocab is not None and _vocabulary(vocab)[0].sha256 != corpus["vocab_sha256"]:
        raise DataError(
            f"vocab ({vocab})",
            f"is not the vocabulary that {folder / CORPUS} names",
            "leave it out",
        )
    path = folder / VOCAB_FILE
    if path.exists() and read_vocabulary(path).sha256 != corpus["vocab_sha256"]:
        raise DataError(
            str(path), "is not the vocabulary that the records were made with", "bring it back"
        )
    return {key: corpus[key] for key in (*DESCRIPTION, *OPTIONAL, *INFORMATION) if key in corpus}


def _describe_foreign(folder: Path, vocab: str) -> dict[str, Any]:
    """Describe another tool's records by the first one; write the vocabulary into their folder."""
    path = next((path for path in record_files(folder) if path.stat().st_size), None)
    if path is None:
        raise DataError(f"folder ({folder})", "its files hold no records", "rebuild them")
    with path.open("rb") as file:
        size = payload_bytes(file.read(HEAD_BYTES)) or 0
        file.seek(0)
        payload = read_payload(file.read(size + FRAME_BYTES), 0, path)
    sizes = _feature_sizes(payload, path)
    missing = [name for name in STATIC_FEATURES if name not in sizes]
    if missing:
        raise DataError(
            f"{path} (first record)",
            f"has no {', '.join(missing)}, only {', '.join(sorted(sizes))}",
            "give records of masked examples",
        )
    vocabulary, cased = _vocabulary(vocab)
    columns = parse_static([payload], sizes["input_ids"], sizes["masked_lm_positions"])
    ids, cls, count = columns["input_ids"][0], vocabulary.special.cls, len(vocabulary.pieces)
    if ids[0] != cls or ids.max() >= count:
        raise DataError(
            f"vocab ({vocab})",
            f"is not that of {path}, whose first record starts with id {ids[0]} and goes up to {ids.max()}, "
            f"while [CLS] is {cls} of {count}",
            "give the vocabulary that the records were made with",
        )
    write_vocabulary(folder, vocabulary.path.read_bytes(), cased=cased)
    return {
        "format": "static",
        "sequence_length": sizes["input_ids"],
        "mask_tokens": sizes["masked_lm_positions"],
        "masked_lm_prob": None,  # unknown
        "whole_word_masking": None,
        "vocab_size": count,
        "vocab_sha256": vocabulary.sha256,
        "token_bytes": token_bytes(count),
        "special_ids": vars(vocabulary.special),
        "tokenizer": tokenizer_config(cased=cased),
    }


def _feature_sizes(payload: bytes, path: Path) -> dict[str, int]:
    """Return the names of a record's features with the number of their values."""
    from google.protobuf.message import DecodeError

    try:
        features = tensorflow().train.Example.FromString(payload).features.feature
    except DecodeError:
        raise DataError(
            f"{path} (first record)", "is no tf.train.Example", "give BERT records"
        ) from None
    kinds = ("int64_list", "float_list", "bytes_list")
    return {
        name: sum(len(getattr(feature, kind).value) for kind in kinds)
        for name, feature in features.items()
    }


def _vocabulary(name: str) -> tuple[Vocabulary, bool]:
    """Return the vocabulary that --vocab names, and whether it is cased."""
    try:
        vocabulary = find_vocabulary(name, cased=False)
    except ConfigError:  # its files or pieces are those of a cased one
        return find_vocabulary(name, cased=True), True
    ordinary = (piece for piece in vocabulary.pieces if not piece.startswith("["))
    return vocabulary, any(piece != piece.lower() for piece in ordinary)
