"""Where every record starts, so that records are found and counted without reading them.

Each record file has an index (`tfrecord.py`). A folder has `corpus.offsets`, all offsets as little-endian uint64 to be
memory-mapped, and, written last, `corpus.json`: the description, number and fingerprint of the records. Indexes that
are absent or older than their records are made by reading only the frames.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bert_cli.arrays import Ints64
from bert_cli.data.io.files import compression_of
from bert_cli.data.io.inputs import visible_files
from bert_cli.data.io.manifest import checksums, known_checksums
from bert_cli.data.records import tfrecord
from bert_cli.data.records.corpus import CORPUS, OFFSETS, refuse_unfinished
from bert_cli.data.records.formats import STATIC_FEATURES, find_features, parse_static, token_bytes
from bert_cli.data.tokens import tokenizer
from bert_cli.data.tokens.notation import WORDPIECE
from bert_cli.data.tokens.tokenizer import Vocabulary
from bert_cli.data.tokens.vocab import find_of_any_case
from bert_cli.disk import size_of
from bert_cli.errors import DataError
from bert_cli.files import FORMAT, JSON, JSONObject, atomic_file, write_json_atomically

INDEX_FRACTION = 0.05  # bytes of an index for a byte of records, at most
OFFSETS_FRACTION = 0.6  # bytes of corpus.offsets for a byte of the indexes, at most

# Known only to the program that made the records; the rest of corpus.json follows from the files.
DESCRIPTION = (
    *("masking", "sequence_length", "mask_tokens", "masked_lm_prob", "whole_word_masking"),
    *("vocab_size", "vocab_sha256", "token_bytes", "special_ids", "tokenizer"),
    "next_sentence",  # absent where another tool made the records
)


def record_files(folder: Path) -> list[Path]:
    """Return the record files below a folder, ordered by name; hidden folders hold partial shards."""
    paths = visible_files(folder, "*.tfrecord")
    if not paths:
        problem = "does not exist"
        if folder.is_dir():
            problem = "holds no .tfrecord files"
        raise DataError(
            f"folder ({folder})",
            problem,
            "use a folder of records, and unpack those that are compressed",
        )
    return sorted(paths, key=lambda path: path.relative_to(folder).as_posix())


# --- the index of a file


def read_index(path: Path) -> Ints64 | None:
    """Return the offsets [records + 1] in the index of a file; None where it is absent, older or does not fit."""
    index = path.with_suffix(".index")
    records = path.stat()
    try:
        if index.stat().st_mtime_ns < records.st_mtime_ns:
            return None
        lines = np.array(index.read_bytes().split(), np.int64).reshape(-1, 2)
    except (FileNotFoundError, ValueError):
        return None
    offsets = np.append(0, np.cumsum(lines[:, 1]))
    fits = np.array_equal(offsets[:-1], lines[:, 0]) and offsets[-1] == records.st_size
    if not fits:
        return None
    return offsets


def refuse_compressed(path: Path) -> None:
    """Raise DataError for a record file that was written compressed, in which no record can be found by its byte."""
    with path.open("rb") as file:
        head = file.read(tfrecord.HEAD_BYTES)
    is_zlib = head[:1] == b"x" and int.from_bytes(head[:2]) % 31 == 0
    kind = "zlib"
    if not is_zlib:
        kind = compression_of(path)
    if kind and tfrecord.payload_bytes(head) is None:
        raise DataError(str(path), f"is compressed with {kind}", "unpack it first")


def write_index(path: Path) -> int:
    """Write the index of a record file from its frames, without the payloads; return the size of the file."""
    size = path.stat().st_size
    offset = 0
    with (
        atomic_file(path.with_suffix(".index"), INDEX_FRACTION * size) as partial,
        partial.open("wb", buffering=1 << 18) as out,
        path.open("rb", buffering=1 << 20) as file,
    ):
        while offset < size:
            payload = tfrecord.payload_bytes(file.read(tfrecord.HEAD_BYTES))
            length = tfrecord.FRAME_BYTES + (payload or 0)
            if payload is None or offset + length > size:
                refuse_compressed(path)
                raise DataError(
                    f"{path} (byte {offset} of {size})",
                    "no record starts here, or the record is truncated",
                    "make or copy the file again, it is damaged",
                )
            out.write(b"%d %d\n" % (offset, length))
            offset += length
            file.seek(length - tfrecord.HEAD_BYTES, os.SEEK_CUR)
    return size


# --- corpus.json


def write_corpus(folder: Path, description: JSONObject) -> JSONObject:
    """Write corpus.offsets and corpus.json of a folder whose files are all indexed; return corpus.json.

    `description` has the keys of DESCRIPTION. The checksums verify copies of the folder.
    """
    paths = record_files(folder)
    before = known_checksums(folder / CORPUS)
    files, digests = _write_offsets(folder, paths)
    corpus: JSONObject = {"format": FORMAT}
    corpus |= {key: description[key] for key in DESCRIPTION if key in description}
    corpus |= {"files": files, "records": sum(file["records"] for file in files)}
    corpus["fingerprint"] = _fingerprint(corpus, files, digests)
    copied = [name for name in (OFFSETS, *tokenizer.FILES) if (folder / name).is_file()]
    sums = checksums(folder, [file["name"] for file in files] + copied, before)
    for file, row in zip(files, sums[: len(files)], strict=True):
        file["crc32c"] = row["crc32c"]
    corpus["other_files"] = sums[len(files) :]
    write_json_atomically(folder / CORPUS, corpus)
    return corpus


def _write_offsets(folder: Path, paths: Sequence[Path]) -> tuple[list[JSONObject], list[str]]:
    """Write corpus.offsets; return name, records and bytes of each file, and the SHA-256 of its offsets."""
    files: list[JSONObject] = []
    digests: list[str] = []
    size = OFFSETS_FRACTION * size_of(folder.rglob("*.index"))
    with atomic_file(folder / OFFSETS, size) as partial, partial.open("wb") as out:
        for path in paths:
            offsets = read_index(path)
            if offsets is None:
                problem = "its index is missing or does not match the file"
                raise DataError(str(path), problem, f"run `bert index {folder}`")
            starts = offsets[:-1].astype("<u8").tobytes()
            out.write(starts)
            name = path.relative_to(folder).as_posix()
            files.append({"name": name, "records": len(offsets) - 1, "bytes": int(offsets[-1])})
            digests.append(hashlib.sha256(starts).hexdigest())
        if not out.tell():
            raise DataError(f"folder ({folder})", "its files contain no records", "rebuild them")
        # Nothing else knows what the records are.
        (folder / CORPUS).unlink(missing_ok=True)
    return files, digests


def _fingerprint(
    description: JSONObject, files: Sequence[JSONObject], digests: Sequence[str]
) -> str:
    """Return a hash of all that the masks of dynamic records depend on, and of each file's name, size and offsets."""
    *keys, _, optional = DESCRIPTION
    hashed: list[JSON] = [description[key] for key in keys]
    if optional in description:
        hashed.append({optional: description[optional]})
    hashed += [[*file.values(), digest] for file, digest in zip(files, digests, strict=True)]
    return hashlib.sha256(json.dumps(hashed).encode()).hexdigest()


def describe(vocabulary: Vocabulary, **values: object) -> JSONObject:
    """Return the description of records: the values that follow from their vocabulary, and `values`."""
    config = {"tokenizer_class": tokenizer.LIBRARY_CLASS, **tokenizer.TOKENS}
    if vocabulary.notation is WORDPIECE:
        config = tokenizer.tokenizer_config(vocabulary.normalization)
    return {
        "masked_lm_prob": None,  # unknown
        "whole_word_masking": None,
        "vocab_size": len(vocabulary.pieces),
        "vocab_sha256": vocabulary.sha256,
        "token_bytes": token_bytes(len(vocabulary.pieces)),
        "special_ids": vars(vocabulary.special),
        "tokenizer": config,
        **values,
    }


def description_of(folder: Path, corpus: JSONObject, vocab: str | None) -> JSONObject:
    """Return the description of the records from corpus.json, `vocab`, if set, must be its vocabulary."""
    if vocab is not None and _find_vocabulary(vocab).sha256 != corpus["vocab_sha256"]:
        problem = "is not the vocabulary that the records were made with"
        raise DataError(f"vocab ({vocab})", problem, "leave it out")
    if tokenizer.has_tokenizer(folder):
        tokenizer.read_vocabulary(tokenizer.vocabulary_path(folder), corpus["vocab_sha256"])
    return {key: corpus[key] for key in DESCRIPTION if key in corpus}


def describe_foreign(folder: Path, paths: Sequence[Path], vocab: str | None) -> JSONObject:
    """Describe another tool's records by their first record; write the vocabulary into their folder."""
    refuse_unfinished(folder)
    if vocab is None:
        problem = "has no corpus.json, so another tool made its records"
        raise DataError(f"folder ({folder})", problem, "pass their vocabulary: --vocab vocab.txt")
    path = max(paths, key=lambda path: path.stat().st_size > 0)  # the first of these
    refuse_compressed(path)
    with path.open("rb") as file:
        head = file.read(tfrecord.HEAD_BYTES)
        frame = head + file.read((tfrecord.payload_bytes(head) or 0) + tfrecord.CHECKSUM_BYTES)
    where = f"{path} (first record)"
    (payload,) = tfrecord.read_payloads([frame], lambda _: where, "rebuild the file")
    features = {name: lists[0] for name, lists in find_features([payload], STATIC_FEATURES).items()}
    missing = [name for name, values in features.items() if not values]
    if missing:
        problem = f"is not a tf.train.Example with {', '.join(missing)}"
        raise DataError(where, problem, "use records of masked examples")
    vocabulary = _find_vocabulary(vocab)
    lists = [features["input_ids"], features["masked_lm_positions"]]
    length, predictions = tfrecord.parse_varints(lists)[1].tolist()
    ids = parse_static([payload], length, predictions, lambda _: where)["input_ids"][0]
    cls = vocabulary.special.cls
    count = len(vocabulary.pieces)
    if ids[0] != cls or ids.max() >= count:
        first = f"the first record starts with id {ids[0]} and has ids up to {ids.max()}"
        raise DataError(
            f"vocab ({vocab})",
            f"is not the vocabulary of {path}: {first}, but [CLS] has id {cls} of {count}",
            "use the vocabulary that the records were made with",
        )
    sizes = {"sequence_length": length, "mask_tokens": predictions}
    description = describe(vocabulary, masking="static", **sizes)
    vocabulary.save(folder)
    return description


def _find_vocabulary(name: str) -> Vocabulary:
    """Return the vocabulary that --vocab names, cased or not."""
    vocabulary = find_of_any_case(name)
    if vocabulary.normalization.cased:
        return vocabulary
    ordinary = (piece for piece in vocabulary.pieces if not piece.startswith("["))
    cased = any(piece != piece.lower() for piece in ordinary)
    return replace(vocabulary, normalization=replace(vocabulary.normalization, cased=cased))
