"""Groups: the documents that are paired and shuffled together, as one flat array of tokens.

A group is some input files, or a range of a large one, and becomes one record file. Its text is
encoded piece by piece into two bytes a token; sentences are prefix sums and documents ranges of
sentences. What cannot be cut beforehand, a large compressed file, is cut on the way, between
documents, so memory grows with a group's limit (64 MB of text a file: 0.4 GB) and never with the
input.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bert_cli.data.records.wordpiece import Encoder
from bert_cli.data.shards.manifest import read_manifest
from bert_cli.data.text.documents import text_pieces
from bert_cli.data.text.files import Part, Reading, recognise_all
from bert_cli.data.text.parts import Outputs, bundled, cut
from bert_cli.errors import DataError

RANGE_BYTES = 32_000_000
"""About a range of a large file; twice as much stays in one."""
HELD_BYTES = 2 * RANGE_BYTES
"""Text of a file that is held at once; a larger compressed one is cut there."""
BUNDLE_BYTES = 16_000_000
"""Text of files that are a document each and go into one group."""


@dataclass(frozen=True)
class Group:
    """Documents as one flat array of tokens."""

    tokens: npt.NDArray[np.uint16 | np.uint32]
    sentences: npt.NDArray[np.int64]
    """[sentences + 1] place of each sentence's first token, and of the end."""
    documents: npt.NDArray[np.int64]
    """[documents + 1] number of each document's first sentence, and of the end."""


# --- which files are a group


def plan_groups(
    given: Path, group_files: int | None, reading: Reading | None = None, *, pairs: bool = True
) -> tuple[Outputs, list[str]]:
    """Make every N input files, in their order, the inputs of one record file; tell what to note.

    Where N is not said it is 1, but of files that are a document each as many as BUNDLE_BYTES.
    Empty files are left out. The tail of a dump is often one file with one article, which cannot
    make pairs: where the manifest beside the files tells so, it joins the group before it, and a
    note says so. Any other group of one document is a DataError: better said now than after hours
    of work.
    """
    reading = reading or Reading()
    files, notes = recognise_all(given, reading)
    parts = [
        piece for part in files for piece in cut(part, RANGE_BYTES, reading, anywhere=not pairs)
    ]
    if group_files is None and reading.documents == "files":
        groups = bundled(parts, BUNDLE_BYTES)
    else:
        step = group_files or 1
        groups = [parts[first : first + step] for first in range(0, len(parts), step)]
    if pairs:
        notes += _check_beforehand(groups, counted_documents(given, parts, reading))
    return [(output_name(n, len(groups)), group) for n, group in enumerate(groups)], notes


def output_name(number: int, count: int) -> Path:
    """Name of a group's records: names of `count` groups sort in their order."""
    return Path(f"wiki_{number:0{max(3, len(str(count - 1)))}d}.tfrecord")


def counted_documents(given: Path, parts: Sequence[Part], reading: Reading) -> dict[Path, int]:
    """Documents of each file, where the step that wrote them counted or the setting says it."""
    if reading.documents == "files":
        return {part.path: 1 for part in parts if part.format == "plain"}
    if not (given / "manifest.json").exists():
        return {}
    told = read_manifest(given).get("shards", [])
    return {given / shard["output"]: shard.get("documents", 0) for shard in told}


def _check_beforehand(groups: list[list[Part]], documents: dict[Path, int]) -> list[str]:
    """Join a last group of one document to the one before it; refuse any other. Notes what it did."""
    notes = []
    last = groups[-1]
    if len(groups) > 1 and sum(documents.get(part.path, 2) for part in last) < 2:
        groups[-2:] = [groups[-2] + last]
        notes.append(
            f"{_span(last)}: holds fewer than two documents, which cannot make pairs, so it went "
            f"into the group before it, {output_name(len(groups) - 1, len(groups))}"
        )
    for group in groups:
        whole = all(not part.start and part.stop is None for part in group)
        if whole and all(part.path in documents for part in group):
            check_documents(sum(documents[part.path] for part in group), group)
    return notes


def check_documents(count: int, parts: Sequence[Part]) -> None:
    """Raise DataError for a group that cannot make pairs."""
    if count >= 2:
        return
    raise DataError(
        f"{_span(parts)} ({count} document{'' if count == 1 else 's'} in the group): a random next "
        "sentence must come from another document; raise --group-files so that every group holds "
        "several, see that documents are separated by blank lines, or give --no-nsp"
    )


def _span(parts: Sequence[Part]) -> str:
    first, last = parts[0].path, parts[-1].path
    return str(first) if first == last else f"{first} to {last.name}"


# --- from text to tokens


def encode_groups(
    parts: Sequence[Part], encoder: Encoder, reading: Reading, *, limit: int, least: int
) -> Iterator[Group]:
    """Encode all sentences of some parts; a new group begins where `limit` bytes of text are reached.

    A blank line or the end of a part ends a document. Every group holds `least` documents or more
    where there are as many: the last ones of a group go into the next. With `least` 1 a document
    that alone reaches the limit is cut between sentences.
    """
    held = _Held(encoder)
    for part in parts:
        for text in text_pieces(part, reading):
            held.add(text)
            if held.size >= limit:
                group = held.take(least)
                if group is not None:
                    yield group
        held.end_document()
    yield held.rest()


class _Held:
    """Sentences that wait to become a group: their tokens, lengths and numbers of documents."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.size = 0
        self._document = 0
        self._tokens: list[npt.NDArray[np.uint16 | np.uint32]] = []
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._documents: list[npt.NDArray[np.int64]] = []

    def add(self, text: str) -> None:
        """Encode some lines."""
        encoded = self._encoder.encode(text)
        number_of_line = self._document + np.cumsum(encoded.blank)
        self._document = int(number_of_line[-1])
        said = encoded.lengths > 0
        self._tokens.append(encoded.tokens)
        self._lengths.append(encoded.lengths[said])
        self._documents.append(number_of_line[said])
        self.size += len(text)

    def end_document(self) -> None:
        """What comes next is another document."""
        self._document += 1

    def rest(self) -> Group:
        """All that is held."""
        return self._group(sum(map(len, self._lengths)))

    def take(self, least: int) -> Group | None:
        """What is held but for the last `least` documents, if that leaves as many; they stay.

        Of one document, with `least` 1, everything.
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
        kept = np.concatenate(self._tokens)[int(lengths[:stop].sum()) :].copy()
        self.size = int(self.size * len(kept) / max(1, len(kept) + len(group.tokens)))
        self._tokens, self._lengths = [kept], [lengths[stop:]]
        self._documents = [documents[stop:]]
        return group

    def _group(self, stop: int) -> Group:
        """The first `stop` sentences."""
        lengths = np.concatenate([np.zeros(1, np.int64), *self._lengths])[: stop + 1]
        ends = np.cumsum(lengths)
        # Documents that hold nothing have numbers too, so each change is one document.
        numbers = np.concatenate([np.array([-1]), *self._documents])[: stop + 1]
        begins = np.flatnonzero(np.diff(numbers))
        tokens = np.concatenate(self._tokens) if self._tokens else np.zeros(0, np.uint16)
        return Group(tokens[: int(ends[-1])], ends, np.append(begins, len(ends) - 1))
