"""Parts of the input: large files cut between documents, small ones together, handed to workers.

So many processes can read one large file, each no more than its share, and a million small ones
make no million shards. Finding the cuts reads a few kilobytes at each. A compressed file cannot be
entered in the middle and stays whole; a Parquet file is cut between its row groups.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel

from bert_cli.data.shards.manifest import Shard
from bert_cli.data.text.files import OPEN, Format, Part, Reading, open_parquet, open_part
from bert_cli.errors import DataError
from bert_cli.files import read_json

# Bytes of text in a byte of the file: 10 MB of English articles, at each program's default level.
EXPANSION = {"": 1.0, "gzip": 2.75, "xz": 3.6, "bzip2": 3.5, "zstandard": 2.8}
PARQUET_EXPANSION = 1.75
"""The same for Parquet with its default compression, snappy; 2.5 with zstandard."""

Outputs = list[tuple[Path, list["Part"]]]
"""The outputs of a step, each with what it is made of."""


def cut(part: Part, size: int, reading: Reading, *, anywhere: bool = False) -> list[Part]:
    """Cut a file of twice `size` or more into ranges of about `size`, between documents.

    With `anywhere` a document may be cut at a line, where no end of one is near. What cannot be
    entered in the middle stays whole: a compressed file, a plain one that is one document.
    """
    one_document = part.format == "plain" and reading.documents == "files" and not anywhere
    if part.compression or one_document or part.size < 2 * size:
        return [part]
    if part.format == "parquet":
        return _row_groups(part, size)
    near = size // 8 if anywhere else part.size
    places = [0]
    with open_part(part) as file:
        for place in range(size, part.size - size // 2, size):
            if place > places[-1]:
                places.append(_document_start(file, place, part.format, near))
    ends = [place for place in places[1:] if place < part.size]
    return [
        replace(part, start=start, stop=stop, size=stop - start)
        for start, stop in zip([0, *ends], [*ends, part.size], strict=True)
    ]


def _document_start(file: IO[bytes], place: int, kind: Format, near: int) -> int:
    """Where the first document at or behind `place` starts, or a line if none does within `near`."""
    file.seek(place - 1)
    at = first = place - 1 + len(file.readline())
    after_blank = False
    for line in file:
        text = line.decode(errors="replace").strip()
        if (
            kind == "json-lines"
            or (kind == "plain" and after_blank and text)
            or (kind == "wikiextractor" and OPEN.fullmatch(text))
        ):
            return at
        if at - first > near:
            return first
        after_blank = not text
        at += len(line)
    return at


def _row_groups(part: Part, size: int) -> list[Part]:
    with open_parquet(part) as file:
        counts = file.metadata.num_row_groups
        sizes = [file.metadata.row_group(n).total_byte_size for n in range(counts)]
    share = part.size / max(1, sum(sizes))  # in the file they are compressed
    parts, start, held = [], 0, 0.0
    for number, unpacked in enumerate(sizes):
        held += unpacked * share
        if held >= size or number == counts - 1:
            parts.append(replace(part, start=start, stop=number + 1, size=round(held)))
            start, held = number + 1, 0.0
    return parts or [part]


def text_bytes(part: Part) -> float:
    """About how many bytes of text a part holds."""
    packed = PARQUET_EXPANSION if part.format == "parquet" else 1.0
    return part.size * EXPANSION[part.compression] * packed


def bundled(parts: Sequence[Part], size: float) -> list[list[Part]]:
    """Neighbours together, as long as they hold no more than `size` bytes of text."""
    bundles: list[list[Part]] = []
    held = 0.0
    for part in parts:
        if not bundles or held + text_bytes(part) > size:
            bundles.append([])
            held = 0.0
        bundles[-1].append(part)
        held += text_bytes(part)
    return bundles


class _Prepared(BaseModel, extra="allow"):
    """parts.json of a shard: its parts, and values of the step beside them."""

    parts: list[Part]


def shard_of(output: Path, parts: Sequence[Part], **more: Any) -> Shard:
    """The shard that makes `output` of these parts; its worker gets them, and `more`, by read_parts."""
    inputs = tuple(dict.fromkeys(part.path for part in parts))
    size = sum(part.size for part in parts)
    return Shard(inputs, output, partial(_write_parts, parts=parts, more=more), size)


def _write_parts(folder: Path, parts: Sequence[Part], more: dict[str, Any]) -> tuple[Path, ...]:
    rows = [asdict(part) | {"path": str(part.path.absolute())} for part in parts]
    path = folder / "parts.json"
    path.write_text(json.dumps({"parts": rows, **more}), encoding="utf-8")
    return (path,)


def read_parts(inputs: Sequence[Path]) -> tuple[list[Part], dict[str, Any]]:
    """The parts of a shard and what was said with them."""
    prepared = read_json(inputs[0], _Prepared, DataError, "run the same command again")
    return prepared.parts, prepared.model_extra or {}
