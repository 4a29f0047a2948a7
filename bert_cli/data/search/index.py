"""An index: one file of SQLite with passages, their words and their vectors in 16 bits.

The checksum of a finished index is verified before it answers. BM25 ranks by words, the cosine of vectors by meaning;
for both, the scores of all passages are standardised and added, and token vectors re-rank the best.

Shapes: N passages in the order of their numbers, V different texts of these, D values of a vector, n texts.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np

from bert_cli.arrays import Bools, Floats32, Ints16
from bert_cli.data.search import late, words
from bert_cli.data.search.database import (
    AGAIN,
    check_exists,
    checksum,
    connect,
    report_damage,
)
from bert_cli.data.search.late import NO_MEANING, NO_TOKENS, Meaning, Vectors
from bert_cli.data.search.lexical import Lexical, column_of
from bert_cli.data.search.passages import Hit, page_of
from bert_cli.data.search.ranking import best_of, combined, once, reranked
from bert_cli.errors import ConfigError, DataError, did_you_mean

WEIGHT = 0.6
"""Weight of the meaning, unless held-out questions chose another; `docs/search.md` has what other weights score."""
SCALE = 32767
"""Vectors are stored as integers of 16 bits, from -SCALE for -1 to SCALE for 1: as exact as float16, and NumPy
converts them ten times as fast."""
AROUND = 200  # passages of a document on each side of one
PER_DOCUMENT = 2  # passages in an answer, where other documents answer too
BEST = 100  # passages, among which those of a document are counted
AT_ONCE = 1 << 10  # vectors that are converted to float32 at once
TO_ITS_END = "run `bert search make` to its end"
INSIDE = "instr(name, ?1 || '/') = 1 OR name || suffix = ?1"  # a folder, or a document
LACKING = "SELECT min(id) FROM passages WHERE hash NOT IN (SELECT hash FROM vectors)"
Half = Literal["words", "meaning"]
Embed = Callable[[Sequence[str]], Vectors]
"""Returns the vectors of texts."""


class Index:
    """An open index. `embed` computes the vectors of questions; without it, words alone rank."""

    WRITES = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.embed: Embed | None = None
        self.weights: str | None = None  # checksum of the model behind `embed`
        self._open()

    def _open(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()
        # Open as long as SQLite's own, whose locks end when a process closes any of its handles of the file.
        self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115
        try:
            self.table = connect(self.path, self.WRITES)
        except BaseException:
            self._file.close()
            raise
        self._version = -1  # of the data in memory
        self._has_vectors = False
        self._weights: str | None = None  # of the stored vectors
        self._numbers = self._documents = self._hashes = self._sizes = np.zeros(0, np.int64)  # [N]
        self._repeats = self._numbers  # positions of the texts that several passages have
        self._vectors: Ints16 | None = None  # [V, D]
        self._texts = np.zeros(0, np.int64)  # [N] row of each passage's vector
        self._lexical: Lexical | None = None

    def close(self) -> None:
        """Close the file, unless it is of another process, which has forked this one."""
        if os.getpid() == self._process:
            self.table.close()
            self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "table"):
            self.close()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let one thread read the index as it is at one time, whatever another process writes.

        Raises DataError for an index that has changed since it was sealed.
        """
        # A forked process has a copy of the lock, which a thread of the other process may hold for ever, and of a
        # connection that only the other process may close.
        if os.getpid() != self._process:
            self._of_other_process = self.table, self._file
            self._open()
        with self._lock, report_damage(self.path):
            if self.table.in_transaction:  # within another snapshot
                yield
                return
            check_exists(self.path)
            if not os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno())):
                self.close()
                self._open()
            self.table.execute("BEGIN")
            try:
                self._load()
                yield
            finally:
                self.table.rollback()

    def _value(self, query: str, *values: object) -> Any:
        with report_damage(self.path):
            return (self.table.execute(query, values).fetchone() or [None])[0]

    def fact(self, name: str) -> Any:
        """Return what is recorded under a name, or None."""
        return self._value("SELECT value FROM facts WHERE name = ?", name)

    def count(self, table: str) -> int:
        """Return the number of files, documents, passages or vectors."""
        return int(self._value(f"SELECT count(*) FROM {table}"))

    @property
    def is_empty(self) -> bool:
        """Return whether the index lacks passages."""
        return self._value("SELECT 1 FROM passages LIMIT 1") is None

    @property
    def has_vectors(self) -> bool:
        """Return whether every passage has a vector."""
        return not self.is_empty and self._value(LACKING) is None

    def _load(self) -> None:
        """Verify the index, and forget what is in memory, when another process has changed it."""
        version = self._value("PRAGMA data_version")
        if version == self._version:
            return
        self.verify()
        rows = self.table.execute(
            "SELECT id, document, hash, size FROM passages ORDER BY id"
        ).fetchall()
        columns = np.array(rows, np.int64).reshape(-1, 4).T
        self._numbers, self._documents, self._hashes, self._sizes = columns
        _, places, counts = np.unique(self._hashes, return_inverse=True, return_counts=True)
        self._repeats = np.flatnonzero(counts[places] > 1)
        self._vectors = None
        self._lexical = None
        self._has_vectors = self.has_vectors
        self._weights = self.fact("weights")
        self._version = version

    @property
    def is_sealed(self) -> bool:
        """Return whether the index was written to its end."""
        return self._value("SELECT crc FROM seal") != ""

    def verify(self) -> None:
        """Raise DataError for a sealed index that has changed since, and for one whose seal is gone."""
        sealed = self._value("SELECT crc FROM seal")
        # "" is an index that is still being written; None, a lost seal, differs from any checksum.
        if sealed == "":
            return
        actual = checksum(self.table, self._file)
        if actual != sealed:
            raise DataError(str(self.path), f"is damaged (crc32c {actual}, not {sealed})", AGAIN)

    def texts(self, numbers: Sequence[int]) -> list[str]:
        """Return the texts of passages."""
        return column_of(self.table, numbers, "text")

    @property
    def axes(self) -> Floats32 | None:
        """Return the axes [D, S] of token vectors; None in an index without these."""
        stored = self.fact("axes")
        if stored is None:
            return None
        return late.unpacked_axes(stored)

    # --- ranking

    def ask(
        self,
        question: str,
        top: int = 10,
        half: Half | None = None,
        folder: str = "",
        passage: int | None = None,
    ) -> list[Hit]:
        """Return the best passages by words and meaning or by one half: of all, a folder, or the document of a passage.

        A document has more than PER_DOCUMENT of them only where the others do not have enough.

        Raises ConfigError for a question that cannot be asked, DataError for a damaged index.
        """
        asked = words.parse(question)._replace(folder=folder.rstrip("/"), passage=passage)
        if top < 1:
            raise ConfigError(f"top ({top})", "is less than 1", "set 1 or more")
        with self.snapshot():
            if self.embed and half != "words" and self._weights != self.weights:
                raise ConfigError(
                    "meaning",
                    "the index has vectors of another model since it was opened",
                    "open it again (start `bert serve` again), or ask by words",
                )
            inside = f"SELECT 1 FROM places WHERE {INSIDE} LIMIT 1"
            if asked.folder and self._value(inside, asked.folder) is None:
                otherwise = "take one from the name of a document"
                remedy = did_you_mean(asked.folder, self.folders(), otherwise)
                raise ConfigError(f"folder ({folder!r})", "no document is in it", remedy)
            if passage is not None:
                self.file_of(passage)
            if not half and not (self.embed and self._has_vectors):
                half = "words"
            if half == "words" and not asked.terms:
                raise words.no_word(question)
            if half == "words":
                meaning = NO_MEANING
            else:
                meaning = self.by_meaning([asked])[0]
            weight = {"words": 0.0, "meaning": 1.0}.get(half or "", self.weight)
            (scores,) = self.scores(asked, [weight], meaning)
            terms = self.lexical.terms(asked)
            ranked = [n for n in best_of(scores, max(BEST, 20 * top)) if scores[n] > -np.inf]
            owners = self._documents[ranked].tolist()
            is_beyond = [owners[:n].count(o) >= PER_DOCUMENT for n, o in enumerate(owners)]
            shown = sorted(np.argsort(is_beyond, kind="stable")[:top].tolist())
            hits = [
                self._hit(self._numbers[ranked[n]], float(scores[ranked[n]]), terms) for n in shown
            ]
            counts = [owners[:BEST].count(owners[n]) for n in shown]
            return [hit._replace(of_document=n) for hit, n in zip(hits, counts, strict=True)]

    def scores(
        self, asked: words.Question, weights: Sequence[float], meaning: Meaning = NO_MEANING
    ) -> Iterator[Floats32]:
        """Yield the scores of passages [N] by each weight of their meaning; -inf is not found, excluded or repeated."""
        is_allowed = self.allowed(asked)
        lexical = NO_MEANING.cosines
        if min(weights) < 1.0:
            lexical = self.lexical.scores(asked, is_allowed)
        similarity = np.full(len(self._numbers), np.nan, np.float32)  # of tokens
        for weight in weights:
            scores = np.where(is_allowed, combined(lexical, meaning.cosines, weight), -np.inf)
            if 0.0 < weight < 1.0 and meaning.tokens.size:
                best = np.array(best_of(scores, late.RERANKED), np.int64)
                best = best[scores[best] > -np.inf]
                unknown = best[np.isnan(similarity[best])]
                if len(unknown):
                    stored = column_of(self.table, self._numbers[unknown].tolist(), "tokens")
                    similarity[unknown] = late.similarities(meaning.tokens, stored)
                scores[best] = reranked(scores[best], similarity[best], 1.0)
            scores[self._repeats] = once(scores[self._repeats], self._hashes[self._repeats])
            yield scores

    @property
    def weight(self) -> float:
        """Return the weight of the meaning beside words."""
        weight = self.fact("weight")
        if weight is None:
            return WEIGHT
        return float(weight)

    @property
    def lexical(self) -> Lexical:
        """Return the ranking by words."""
        self._lexical = self._lexical or Lexical(self.table, self._numbers, self._sizes)
        return self._lexical

    def allowed(self, asked: words.Question) -> Bools:
        """Return which passages [N] are where a question seeks, and have nothing that it excludes."""
        is_allowed = np.ones(len(self._numbers), bool)
        for term in asked.excluded:
            is_allowed[self.lexical.find(term)[0]] = False
        if asked.folder or asked.passage is not None:
            others = f"SELECT id FROM places WHERE ?1 != '' AND NOT ({INSIDE})"
            owner = "(SELECT document FROM passages WHERE id = ?2)"
            beyond = f"SELECT id FROM passages WHERE document != {owner}"  # none if ?2 is NULL
            rows = self.table.execute(f"{others} UNION {beyond}", asked[3:])
            is_allowed &= ~np.isin(self._numbers, rows.fetchall())
        return is_allowed

    def folders(self) -> list[str]:
        """Return the folders of files, as in names of documents."""
        names = self.table.execute("SELECT name FROM files").fetchall()
        folders: set[str] = set()
        for (name,) in names:
            folders.update(parent.as_posix() for parent in PurePosixPath(name).parents)
        return sorted(folders - {"."})

    def by_meaning(self, questions: Sequence[words.Question]) -> list[Meaning]:
        """Return how similar each question is to each passage. Raises ConfigError without vectors."""
        if self.embed is None or not self._has_vectors or self._weights != self.weights:
            problem = "the index has no vectors of all passages by its model"
            make = "run `bert search make` with --model to its end and open the index again"
            raise ConfigError("meaning", problem, f"{make}, or ask by words")
        known = self._read_vectors()
        vectors, tokens = self.embed([question.text for question in questions])
        blocks = range(0, len(known), AT_ONCE)
        scores = [known[n : n + AT_ONCE].astype(np.float32) @ vectors.T for n in blocks]
        cosines: Floats32 = np.concatenate(scores)
        cosines /= SCALE
        axes = self.axes
        if axes is None:
            short = [NO_TOKENS] * len(tokens)
        else:
            short = [late.projected(text, axes) for text in tokens]
        return list(map(Meaning, cosines[self._texts].T, short))

    def _read_vectors(self) -> Ints16:
        if self._vectors is not None:
            return self._vectors
        hashes, values = zip(*self.table.execute("SELECT hash, value FROM vectors"), strict=True)
        self._vectors = np.frombuffer(b"".join(values), np.int16).reshape(len(hashes), -1)
        order = np.argsort(hashes)
        self._texts = order[np.searchsorted(np.array(hashes)[order], self._hashes)]
        return self._vectors

    def _hit(self, number: np.int64, score: float, terms: Sequence[str]) -> Hit:
        first = "(SELECT min(id) FROM passages WHERE document = places.document)"
        columns = f"text, title, name || suffix, path || suffix, start, stop, pages, {first}"
        query = f"SELECT {columns} FROM places WHERE id = ?"
        row = self.table.execute(query, [int(number)]).fetchone()
        text, title, document, file, start, stop, pages, first = row
        spans = words.spans(text, terms)
        page = None
        if pages:
            page = page_of(json.loads(pages), spans)
        return Hit(text, title, document, score, file, start, stop, spans, int(number), first, page)

    def document(self, passage: int, around: int = AROUND) -> list[Hit]:
        """Return a passage and `around` of its document on each side; none if the index no longer has it."""
        owner = "(SELECT document FROM passages WHERE id = ?)"
        numbers = f"SELECT id FROM passages WHERE document = {owner}"
        with self.snapshot():
            near = "abs(id - ?) <= ? ORDER BY id"  # the numbers of a document's passages are consecutive
            rows = self.table.execute(f"{numbers} AND {near}", [passage, passage, around])
            return [self._hit(number, 0.0, ()) for (number,) in rows.fetchall()]

    def file_of(self, passage: int) -> tuple[str, str]:
        """Return path and mark of a passage's file. Raises ConfigError if the index no longer has the passage."""
        query = "SELECT path, mark FROM places JOIN files USING (path) WHERE places.id = ?"
        with self.snapshot():
            row: tuple[str, str] | None = self.table.execute(query, [passage]).fetchone()
        if row is None:
            raise ConfigError("passage", "the index no longer has this passage", "search again")
        return row

    def sample(self, size: int) -> list[str]:
        """Return the texts of at most as many passages, evenly spaced."""
        return self.texts(self._numbers[:: -(-len(self._numbers) // size)].tolist())


def hash_of(text: str) -> int:
    """Return the number by which a text is known, whatever its blanks: a PDF has fewer than justified plain text."""
    return number_of(" ".join(text.split()))


def number_of(text: str) -> int:
    """Return a number of 64 bits for a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), signed=True)


# --- the file


def open_index(path: Path) -> Index:
    """Return an index to ask. Raises DataError for a file that is absent, damaged, or no index of this version."""
    check_exists(path)
    with report_damage(path):
        index = Index(path)
        with index.snapshot():  # which verifies it
            return index
