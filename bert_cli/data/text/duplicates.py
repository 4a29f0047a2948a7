"""Which documents say what an earlier one said, over the whole input, whoever reads which part.

A first pass writes 16 bytes per document, a hash of its text with single spaces, a file per shard;
then one sort of all of them finds the equal ones, and the first in input order is kept. The pass is
a step of its own in `OUT/.duplicates`, restartable like any other. A million documents take 16 MB
of disk and 60 MB of memory. Near-duplicates are found by MinHash (Broder 1997) of runs of five
words, 528 bytes of disk per document: those that agree in a band of their signatures are compared,
and one that is estimated to share `threshold` of its runs with an earlier kept one is dropped. That
takes 0.1 kB of memory per document and 5 kB for each that agrees with another in a band.
"""

import hashlib
import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.data.shards.manifest import Stats
from bert_cli.data.shards.runner import run_shards
from bert_cli.data.text.documents import marked_lines
from bert_cli.data.text.files import Reading
from bert_cli.data.text.parts import Outputs, read_parts, shard_of
from bert_cli.errors import ConfigError, needs_extra

FOLDER = ".duplicates"
HASH_BYTES = 16
NO_TEXT = bytes(HASH_BYTES)
"""Stands for a document without text, which is no duplicate of another such."""

# Of datasketch and rensa the second: signatures of the same quality (both within 0.03 of the truth
# on an English article) at 45 MB/s instead of 2.7, no dependencies, equal on every machine.
NUMBERS = 128
"""Of a signature; the standard error of the share that it estimates is at most 0.045."""
SEED = 1
RUN_OF_WORDS = 5
FOUND = 0.99
"""Share of the pairs just at the threshold that agree in a band: decides how wide bands are."""
# A letter of a script that has no spaces between words counts as a word.
WORD = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]|\w+")
NO_WORDS = np.iinfo(np.uint32).max
"""Every number of the signature of a document without words, which is nobody's duplicate."""

Flags = npt.NDArray[np.bool_]
Signatures = Sequence[npt.NDArray[np.uint32]]
"""[documents, NUMBERS] of each shard, most often memory-mapped."""
Numbers = tuple[list[int], list[int]]
"""Of a shard's exact and near duplicates, from 0 in each shard."""


def find_duplicates(
    outputs: Outputs,
    reading: Reading,
    *,
    out: Path,
    processes: int,
    threshold: float | None,
    scheduler: str | None = None,
) -> list[Numbers]:
    """Numbers of the exact and the near duplicates in each of the `outputs` of a step.

    Near-duplicates are looked for where there is a threshold. ConfigError where rensa is then not
    installed.
    """
    near_too = threshold is not None
    if near_too:
        new_signature()
    names = [Path(f"{output}.hashes") for output, _ in outputs]
    run_shards(
        "deduplicate",
        [shard_of(name, parts) for name, (_, parts) in zip(names, outputs, strict=True)],
        partial(sign_documents, reading=reading, near=near_too),
        out=out / FOLDER,
        processes=processes,
        settings={**vars(reading), "near": near_too},
        versions=["rensa"] if near_too else [],
        scheduler=scheduler,
    )
    paths = [out / FOLDER / name for name in names]
    counts = [path.stat().st_size // HASH_BYTES for path in paths]
    exact = equal_to_earlier(np.concatenate([np.fromfile(path, np.uint64) for path in paths]))
    near = np.zeros(len(exact), np.bool_)
    if threshold is not None:
        near = near_to_earlier(list(map(_signatures_beside, paths)), exact, threshold)
    ends = np.cumsum([0, *counts]).tolist()
    return [
        (np.flatnonzero(exact[start:stop]).tolist(), np.flatnonzero(near[start:stop]).tolist())
        for start, stop in pairwise(ends)
    ]


# --- the pass over the text


def sign_documents(
    inputs: tuple[Path, ...], output: Path, *, reading: Reading, near: bool
) -> Stats:
    """Write the hash of every document of a shard, and with `near` its signature beside."""
    parts, _ = read_parts(inputs)
    documents = 0
    beside = output.with_suffix(".signatures")
    with open(output, "wb") as hashes, open(beside if near else "/dev/null", "wb") as signatures:
        text = _Text(near)
        for part in parts:
            for kind, line in marked_lines(part, reading):
                if kind == "body":
                    text.add(line)
                elif kind == "document":
                    if documents:
                        hashes.write(text.hash())
                        signatures.write(text.signature())
                        text = _Text(near)
                    documents += 1
        if documents:
            hashes.write(text.hash())
            signatures.write(text.signature())
    return Stats(documents=documents, bytes_in=sum(part.size for part in parts))


class _Text:
    """A document, line by line: nothing of it is kept but a hash and a signature."""

    def __init__(self, near: bool) -> None:
        self._hash = hashlib.blake2b(digest_size=HASH_BYTES)
        self._said = self._long = False
        self._minhash = new_signature() if near else None
        self._last: list[str] = []

    def add(self, line: str) -> None:
        """Take in a line; how white space parts its words does not matter."""
        words = line.split()
        if not words:
            return
        self._said = True
        self._hash.update(" ".join([*words, ""]).encode())
        if self._minhash is None:
            return
        found = self._last + WORD.findall(line.lower())
        if len(found) >= RUN_OF_WORDS:
            runs = zip(*(found[n:] for n in range(RUN_OF_WORDS)), strict=False)
            self._minhash.update(list(map(" ".join, runs)))
            self._long = True
        self._last = found[1 - RUN_OF_WORDS :]

    def hash(self) -> bytes:
        """16 bytes for the whole text."""
        return self._hash.digest() if self._said else NO_TEXT

    def signature(self) -> bytes:
        """NUMBERS little-endian integers; nothing where no near-duplicates are asked for."""
        if self._minhash is None:
            return b""
        if self._last and not self._long:
            self._minhash.update([" ".join(self._last)])
        return np.array(self._minhash.digest(), "<u4").tobytes()


def new_signature() -> Any:
    """An empty MinHash. ConfigError where rensa is not installed."""
    try:
        from rensa import RMinHash
    except ImportError:
        raise ConfigError(
            f"near_duplicates: {needs_extra('near-duplicates')}, or use --deduplicate alone, which "
            "finds equal documents"
        ) from None
    return RMinHash(num_perm=NUMBERS, seed=SEED)


def _signatures_beside(hashes: Path) -> npt.NDArray[np.uint32]:
    path = hashes.with_suffix(".signatures")
    if not path.stat().st_size:
        return np.zeros((0, NUMBERS), np.uint32)  # nothing cannot be memory-mapped
    return np.memmap(path, "<u4", "r").reshape(-1, NUMBERS)


# --- the whole input


def equal_to_earlier(hashes: npt.NDArray[np.uint64]) -> Flags:
    """[documents] whether an earlier one has the same hash, given as two integers a document."""
    first, second = hashes[0::2], hashes[1::2]
    order = np.lexsort((second, first))  # stable: of equal ones the earliest comes first
    same = np.zeros(len(order), np.bool_)
    same[1:] = first[order[1:]] == first[order[:-1]]
    same[1:] &= second[order[1:]] == second[order[:-1]]
    flags = np.empty(len(order), np.bool_)
    flags[order] = same
    return flags & ((first != 0) | (second != 0))


def near_to_earlier(signatures: Signatures, exact: Flags, threshold: float) -> Flags:
    """[documents] whether an earlier one that is kept has at least `threshold` of the same runs.

    Estimated from the signatures. Exact duplicates are passed over.
    """
    bands = _bands(signatures, exact, threshold)
    near = np.zeros(len(exact), np.bool_)
    candidates = np.flatnonzero((bands >= 0).any(axis=1))
    ends = np.cumsum([len(rows) for rows in signatures])
    starts = ends - [len(rows) for rows in signatures]
    kept: dict[tuple[int, int], list[int]] = {}
    signed: dict[int, npt.NDArray[np.uint32]] = {}
    for document in candidates.tolist():
        shard = int(np.searchsorted(ends, document, side="right"))
        signature = np.array(signatures[shard][document - starts[shard]])
        groups = [(n, group) for n, group in enumerate(bands[document].tolist()) if group >= 0]
        others = {other for group in groups for other in kept.get(group, ())}
        if others:
            shares = (np.stack([signed[other] for other in others]) == signature).mean(axis=1)
            near[document] = shares.max() >= threshold
        if not near[document]:
            signed[document] = signature
            for group in groups:
                kept.setdefault(group, []).append(document)
    return near


def _bands(signatures: Signatures, exact: Flags, threshold: float) -> npt.NDArray[np.int32]:
    """[documents, bands] number of those that agree with it in a band, -1 where none does."""
    width = band_width(threshold)
    alive = ~exact & np.concatenate([rows[:, 0] != NO_WORDS for rows in signatures])
    numbers = np.flatnonzero(alive)
    bands = np.full((len(exact), NUMBERS // width), -1, np.int32)
    mix = np.random.default_rng(SEED).integers(1, 2**63, width, np.uint64) * np.uint64(
        2
    ) + np.uint64(1)
    for band in range(bands.shape[1]):
        columns = slice(band * width, (band + 1) * width)
        # Sums that collide by chance cost a comparison and nothing else.
        keys = np.concatenate([(rows[:, columns] * mix).sum(axis=1) for rows in signatures])[alive]
        order = np.argsort(keys, kind="stable")
        begins = np.append(True, keys[order[1:]] != keys[order[:-1]])[: len(order)]
        which = np.cumsum(begins) - 1
        shared = np.bincount(which)[which] > 1 if len(which) else begins
        bands[numbers[order[shared]], band] = which[shared]
    return bands


def band_width(threshold: float) -> int:
    """Most numbers of a band with which FOUND of the pairs at the threshold still agree in one."""
    widths = [
        width
        for width in range(1, NUMBERS + 1)
        if 1 - (1 - threshold**width) ** (NUMBERS // width) >= FOUND
    ]
    return max(widths, default=1)
