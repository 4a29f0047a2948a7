"""Groups of documents that are paired and shuffled together, as one flat array of tokens.

A group is some input files, or a range of a large one, and becomes one record file. Its text is encoded piece by piece
into two bytes a token. A large compressed file cannot be split beforehand; it is split between documents while it is
read. So memory grows with the limit of a group (64 MB of text a file: 0.4 GB) and never with the input.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bert_cli.data.records.wordpiece import Encoder
from bert_cli.data.shards.manifest import read_manifest
from bert_cli.data.text.documents import text_blocks
from bert_cli.data.text.files import Outputs, Part, Reading, bundle, recognise_all, split_part
from bert_cli.errors import DataError

RANGE_BYTES = 32_000_000
"""Approximate size of a range of a large file. A file of less than twice that is one range."""
HELD_BYTES = 2 * RANGE_BYTES
"""Text of a file that is held in memory at once; a larger compressed file is split there."""
BUNDLE_BYTES = 16_000_000
"""Text of a group of files that are one document each."""


@dataclass(frozen=True)
class Group:
    """Documents as one flat array of tokens."""

    tokens: npt.NDArray[np.uint16 | np.uint32]
    sentences: npt.NDArray[np.int64]
    """[sentences + 1] index of each sentence's first token, and the end."""
    documents: npt.NDArray[np.int64]
    """[documents + 1] number of each document's first sentence, and the end."""


# --- which files are a group


def plan_groups(
    folder: Path, group_files: int | None, reading: Reading | None = None, *, pairs: bool = True
) -> tuple[Outputs, list[str]]:
    """Return the record files with the input files of each, in order, and notes for the user.

    A group has `group_files` files; by default one, or BUNDLE_BYTES of files that are one document each. Empty files
    are skipped. The last file of a dump often has a single article, which cannot make pairs: where the manifest of the
    input says so, it joins the group before it. DataError for any other group of one document, because an error before
    hours of work is better than one afterwards.
    """
    reading = reading or Reading()
    files, notes = recognise_all(folder, reading)
    parts = [
        piece
        for part in files
        for piece in split_part(part, RANGE_BYTES, reading, anywhere=not pairs)
    ]
    if group_files is None and reading.documents == "files":
        groups = bundle(parts, BUNDLE_BYTES)
    else:
        step = group_files or 1
        groups = [parts[first : first + step] for first in range(0, len(parts), step)]
    if pairs:
        notes += _join_last_document(groups, counted_documents(folder, parts, reading))
    return [(_output_name(n, len(groups)), group) for n, group in enumerate(groups)], notes


def _output_name(number: int, count: int) -> Path:
    """Return the name of a group's records; names of `count` groups sort in their order."""
    return Path(f"wiki_{number:0{max(3, len(str(count - 1)))}d}.tfrecord")


def counted_documents(folder: Path, parts: Sequence[Part], reading: Reading) -> dict[Path, int]:
    """Return the number of documents of each file, where the manifest or the settings say it."""
    if reading.documents == "files":
        return {part.path: 1 for part in parts if part.format == "plain"}
    if not (folder / "manifest.json").exists():
        return {}
    shards = read_manifest(folder).get("shards", [])
    return {folder / shard["output"]: shard.get("documents", 0) for shard in shards}


def _join_last_document(groups: list[list[Part]], documents: dict[Path, int]) -> list[str]:
    """Join a last group of one document to the one before it and return a note; reject other such groups."""
    notes = []
    last = groups[-1]
    if len(groups) > 1 and sum(documents.get(part.path, 2) for part in last) < 2:
        groups[-2:] = [groups[-2] + last]
        notes.append(
            f"{_span(last)}: holds fewer than two documents, which cannot make pairs, so it went "
            f"into the group before it, {_output_name(len(groups) - 1, len(groups))}"
        )
    for group in groups:
        has_complete_files = all(not part.start and part.stop is None for part in group)
        if has_complete_files and all(part.path in documents for part in group):
            check_documents(sum(documents[part.path] for part in group), group)
    return notes


def check_documents(count: int, parts: Sequence[Part]) -> None:
    """Raise DataError for a group of fewer than two documents, which cannot make pairs."""
    if count < 2:
        raise DataError(
            f"{_span(parts)} ({count} document{'' if count == 1 else 's'} in the group)",
            "a random next sentence must come from another document",
            "raise --group-files so that every group holds several, see that documents are separated by blank "
            "lines, or give --no-nsp",
        )


def _span(parts: Sequence[Part]) -> str:
    first, last = parts[0].path, parts[-1].path
    return str(first) if first == last else f"{first} to {last.name}"


# --- from text to tokens


def encode_groups(
    parts: Sequence[Part], encoder: Encoder, reading: Reading, *, limit: int, least: int
) -> Iterator[Group]:
    """Encode all sentences of some parts; a new group begins after `limit` bytes of text.

    A blank line or the end of a part ends a document. Every group holds at least `least` documents if there are as
    many: the last ones of a group go into the next. With `least` 1 a document that alone reaches the limit is split
    between sentences.
    """
    pending = _PendingSentences(encoder)
    for part in parts:
        for text in text_blocks(part, reading):
            pending.add(text)
            if pending.size >= limit:
                group = pending.take(least)
                if group is not None:
                    yield group
        pending.end_document()
    yield pending.rest()


class _PendingSentences:
    """Sentences that are not in a group yet: their tokens, lengths and numbers of documents."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.size = 0
        """Approximate bytes of their text."""
        self._document = 0
        self._tokens: list[npt.NDArray[np.uint16 | np.uint32]] = []
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._documents: list[npt.NDArray[np.int64]] = []

    def add(self, text: str) -> None:
        """Encode some lines."""
        encoded = self._encoder.encode(text)
        documents = self._document + np.cumsum(encoded.blank)
        self._document = int(documents[-1])
        has_tokens = encoded.lengths > 0
        self._tokens.append(encoded.tokens)
        self._lengths.append(encoded.lengths[has_tokens])
        self._documents.append(documents[has_tokens])
        self.size += len(text)

    def end_document(self) -> None:
        """Begin another document."""
        self._document += 1

    def rest(self) -> Group:
        """Return all sentences."""
        return self._group(sum(map(len, self._lengths)))

    def take(self, least: int) -> Group | None:
        """Remove and return all but the last `least` documents, or None if there are fewer than twice as many.

        With `least` 1 a single document is returned.
        """
        documents = np.concatenate(self._documents)
        begins = np.flatnonzero(np.diff(documents, prepend=-1))
        if least == 1 and len(begins) == 1:
            stop = len(documents)
        elif len(begins) >= 2 * least:
            stop = int(begins[-least])
        else:
            return None
        group = self._group(stop)
        lengths = np.concatenate(self._lengths)
        tokens = np.concatenate(self._tokens)[int(lengths[:stop].sum()) :].copy()
        self.size = int(self.size * len(tokens) / max(1, len(tokens) + len(group.tokens)))
        self._tokens, self._lengths = [tokens], [lengths[stop:]]
        self._documents = [documents[stop:]]
        return group

    def _group(self, stop: int) -> Group:
        """Return the first `stop` sentences."""
        lengths = np.concatenate([np.zeros(1, np.int64), *self._lengths])[: stop + 1]
        ends = np.cumsum(lengths)
        # Empty documents have numbers too, so each change of the number is one document.
        numbers = np.concatenate([np.array([-1]), *self._documents])[: stop + 1]
        begins = np.flatnonzero(np.diff(numbers))
        tokens = np.concatenate(self._tokens) if self._tokens else np.zeros(0, np.uint16)
        return Group(tokens[: int(ends[-1])], ends, np.append(begins, len(ends) - 1))
