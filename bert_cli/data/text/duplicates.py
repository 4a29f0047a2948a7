"""Find documents that repeat an earlier one, over the complete input.

A first pass, a step in `OUT/.duplicates`, writes a hash of each document's text; sorting finds equal hashes.
Near-duplicates are found by MinHash (Broder 1997) of runs of five words: documents that agree in a band of their
signatures are compared, with the last COMPARED kept ones of a band where many agree, as pages of one template do: the
time is linear. A million documents take 60 MB of memory; the search for near-duplicates adds 0.1 kB for each document,
and up to 5 kB for each document that agrees in a band and is not among many.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bert_cli.arrays import Bools, Ints32, UInts32, UInts64
from bert_cli.data.io.documents import marked_lines
from bert_cli.data.io.files import Part, Reading
from bert_cli.data.io.manifest import Shard, Stats, Step
from bert_cli.data.workers.runner import Workers, run_shards
from bert_cli.errors import import_extra
from bert_cli.progress import Progress

FOLDER = ".duplicates"
# Of a thousand million documents two have the same 128 bits with a probability of 1e-21.
HASH_BYTES = 16
NO_TEXT = bytes(HASH_BYTES)  # hash of a document without text, which is never a duplicate

# rensa, not datasketch: signatures of the same quality (both within 0.03 of the true similarity on an
# English article) at 45 MB/s instead of 2.7, no dependencies, equal on every machine.
SIGNATURE_SIZE = 128  # numbers; the standard error of the similarity is at most 0.045
SIGNATURE_BYTES = 4 * SIGNATURE_SIZE
# Fixed, so that a continued step finds the same duplicates.
SEED = 1
WORDS_PER_RUN = 5
COMPARED = 64  # documents of a band; near duplicates agree in several bands, and rarely all of them are so large
RECALL = 0.99  # fraction of pairs at the threshold to detect; decides the band width
# In scripts without spaces between words, each letter counts as a word.
WORD = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]|\w+")
NO_WORDS = np.iinfo(np.uint32).max  # in the signature of a document without words

Signatures = Sequence[UInts32]  # [documents, SIGNATURE_SIZE] by shard


def mark_duplicates(
    shards: Sequence[Shard], reading: Reading, out: Path, workers: Workers, threshold: float | None
) -> tuple[list[Shard], str]:
    """Return shards with the argument `duplicates`, and a note; without a threshold none are near-duplicates."""
    with_near = threshold is not None
    if with_near:
        new_signature()  # fails early where rensa is not installed
    settings = vars(reading) | {"near": with_near}
    packages = ["rensa"] if with_near else []
    run_shards(
        Step("deduplicate", out / FOLDER, settings, packages),
        [replace(shard, output=Path(f"{shard.output}.hashes")) for shard in shards],
        partial(sign_documents, reading=reading, near=with_near),
        workers,
    )
    paths = [out / FOLDER / f"{shard.output}.hashes" for shard in shards]
    counts = [path.stat().st_size // HASH_BYTES for path in paths]
    exact = equal_to_earlier(np.concatenate([np.fromfile(path, np.uint64) for path in paths]))
    note = f"dropped documents: {exact.sum():,} equal to an earlier document"
    near = np.zeros(len(exact), np.bool_)
    if threshold is not None:
        near = near_to_earlier(list(map(_read_signatures, paths)), exact, threshold)
        note += f", and {near.sum():,} nearly equal"
    marked: list[Shard] = []
    start = 0
    for shard, number in zip(shards, counts, strict=True):
        rows = slice(start, start + number)
        duplicates = tuple(np.flatnonzero(kind[rows]).tolist() for kind in (exact, near))
        marked.append(replace(shard, arguments={**shard.arguments, "duplicates": duplicates}))
        start += number
    return marked, note


def sign_documents(
    inputs: tuple[Path, ...], output: Path, *, parts: Sequence[Part], reading: Reading, near: bool
) -> Stats:
    """Write the hash of every document of a shard, and with `near` a file of signatures."""
    count = 0
    signatures_path = Path("/dev/null")
    if near:
        signatures_path = output.with_suffix(".signatures")
    with open(output, "wb") as hashes, open(signatures_path, "wb") as signatures:
        for document in _documents(parts, reading, near):
            hashes.write(document.hash())
            signatures.write(document.signature())
            count += 1
    return Stats(documents=count)


def _documents(parts: Sequence[Part], reading: Reading, near: bool) -> Iterator["_Document"]:
    document: _Document | None = None
    for part in parts:
        for kind, line in marked_lines(part, reading):
            if kind == "body" and document:
                document.add(line)
            elif kind == "document":
                if document:
                    yield document
                document = _Document(near)
    if document:
        yield document


class _Document:
    """Hash and signature of a document that is read line by line."""

    def __init__(self, near: bool) -> None:
        self._hash = hashlib.blake2b(digest_size=HASH_BYTES)
        self._has_text = self._has_run = False
        self._minhash = new_signature() if near else None
        self._last: list[str] = []

    def add(self, line: str) -> None:
        """Add a line; the kind of white space between words does not matter."""
        words = line.split()
        if not words:
            return
        self._has_text = True
        self._hash.update(" ".join([*words, ""]).encode())
        if self._minhash is None:
            return
        words = self._last + WORD.findall(line.lower())
        if len(words) >= WORDS_PER_RUN:
            runs = zip(*(words[n:] for n in range(WORDS_PER_RUN)), strict=False)
            self._minhash.update(list(map(" ".join, runs)))
            self._has_run = True
        # The last four words begin the runs that end in the next line.
        self._last = words[1 - WORDS_PER_RUN :]

    def hash(self) -> bytes:
        """Return 16 bytes for the text."""
        if not self._has_text:
            return NO_TEXT
        return self._hash.digest()

    def signature(self) -> bytes:
        """Return SIGNATURE_SIZE little-endian integers, or nothing without near-duplicates."""
        if self._minhash is None:
            return b""
        if self._last and not self._has_run:
            self._minhash.update([" ".join(self._last)])
        return np.array(self._minhash.digest(), "<u4").tobytes()


def signature_of(lines: Iterable[str]) -> UInts32:
    """Return the signature [SIGNATURE_SIZE] of a document. Raises ConfigError where rensa is not installed."""
    document = _Document(near=True)
    for line in lines:
        document.add(line)
    return np.frombuffer(document.signature(), "<u4")


def new_signature() -> Any:
    """Return an empty MinHash. Raises ConfigError where rensa is not installed."""
    rensa = import_extra("rensa", "near-duplicates", "near_duplicates")
    return rensa.RMinHash(num_perm=SIGNATURE_SIZE, seed=SEED)


def _read_signatures(hashes: Path) -> UInts32:
    path = hashes.with_suffix(".signatures")
    if not path.stat().st_size:
        return np.zeros((0, SIGNATURE_SIZE), np.uint32)  # an empty file cannot be memory-mapped
    return np.memmap(path, "<u4", "r").reshape(-1, SIGNATURE_SIZE)


def equal_to_earlier(hashes: UInts64) -> Bools:
    """Return for each document whether an earlier document has the same hash (two integers)."""
    texts = hashes.view(f"S{HASH_BYTES}")
    order = np.argsort(texts, kind="stable")  # of equal hashes the earliest comes first
    ordered = texts[order]
    is_equal = np.zeros(len(texts), np.bool_)
    is_equal[order[1:]] = ordered[1:] == ordered[:-1]
    return is_equal & (texts != NO_TEXT)


def near_to_earlier(signatures: Signatures, exact: Bools, threshold: float) -> Bools:
    """Return for each document whether it shares `threshold` of its runs with an earlier document that is kept.

    The similarity is estimated from the signatures. Exact duplicates are skipped.
    """
    bands = _bands(signatures, exact, threshold)
    near = np.zeros(len(exact), np.bool_)
    candidates = np.flatnonzero((bands >= 0).any(axis=1))
    ends = np.cumsum([len(rows) for rows in signatures])
    starts = ends - [len(rows) for rows in signatures]
    kept: dict[tuple[int, int], list[tuple[int, UInts32]]] = {}
    with Progress("near-duplicates", len(candidates) * SIGNATURE_BYTES) as bar:
        for document in candidates.tolist():
            shard = int(np.searchsorted(ends, document, side="right"))
            signature = np.array(signatures[shard][document - starts[shard]])
            groups = [(n, group) for n, group in enumerate(bands[document].tolist()) if group >= 0]
            earlier = dict(chain.from_iterable(kept.get(group, ()) for group in groups))
            if earlier:
                compared = np.stack(list(earlier.values()))
                near[document] = (compared == signature).mean(axis=1).max() >= threshold
            if not near[document]:
                for group in groups:
                    pairs = kept.setdefault(group, [])
                    pairs.append((document, signature))
                    # Bounds the work of a document: bands times COMPARED comparisons.
                    del pairs[:-COMPARED]
            bar.advance(SIGNATURE_BYTES)
    return near


def _bands(signatures: Signatures, exact: Bools, threshold: float) -> Ints32:
    """Return [documents, bands]: the group of documents that agree in a band, -1 for a single one."""
    width = band_width(threshold)
    is_compared = ~exact & np.concatenate([rows[:, 0] != NO_WORDS for rows in signatures])
    documents = np.flatnonzero(is_compared)
    bands = np.full((len(exact), SIGNATURE_SIZE // width), -1, np.int32)
    random = np.random.default_rng(SEED).integers(1, 2**63, width, np.uint64)
    multipliers = random * np.uint64(2) + np.uint64(1)
    for band in range(bands.shape[1]):
        columns = slice(band * width, (band + 1) * width)
        # A chance collision of sums costs one comparison.
        sums = [(rows[:, columns] * multipliers).sum(axis=1) for rows in signatures]
        keys = np.concatenate(sums)[is_compared]
        _, groups, sizes = np.unique(keys, return_inverse=True, return_counts=True)
        agrees = sizes[groups] > 1
        bands[documents[agrees], band] = groups[agrees]
    return bands


def band_width(threshold: float) -> int:
    """Return the largest band width at which RECALL of the pairs at the threshold agree in some band."""
    widths = np.arange(1, SIGNATURE_SIZE + 1)
    # The probability that two documents of this similarity agree in all numbers of some band.
    recall = 1 - (1 - threshold**widths) ** (SIGNATURE_SIZE // widths)
    return int(widths[recall >= RECALL].max(initial=1))
