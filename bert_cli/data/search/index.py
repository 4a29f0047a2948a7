"""An index: one file of SQLite with passages, their words (FTS5) and their vectors in 16 bits.

Each change is a transaction, so that the file is complete after a kill at any moment. BM25 ranks by words, the cosine
of vectors by meaning; for both, the scores of all passages are standardised and added.

Shapes: N passages in the order of their numbers, D values of a vector, n texts.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from bert_cli.data.search import words
from bert_cli.data.search.passages import Document, Passage
from bert_cli.errors import ConfigError, DataError
from bert_cli.files import LockUnsupportedError, lock_file

VERSION = 1
APPLICATION = 0x62657274  # "bert", which marks the file as an index
WEIGHT = 0.5
"""Weight of the meaning, unless held-out questions chose another."""
CANDIDATES = 10_000
"""Passages that BM25 ranks, about: those with the rarest words of a question. It takes a microsecond for each."""
SCALE = 32767
"""Vectors are stored as integers of 16 bits, from -SCALE for -1 to SCALE for 1: as exact as float16, and NumPy
converts them ten times as fast."""
AROUND = 200  # passages of a document on each side of one
AT_ONCE = 1 << 10  # vectors that are converted to float32 at once
BUSY_SECONDS = 60.0  # while another process commits
NO_INDEX = "was not made by `bert search make`", "make one with `bert search make INDEX TEXT`"
AGAIN = "move it away and make it again with `bert search make`"
Half = Literal["words", "meaning"]
Floats = npt.NDArray[np.float32]
Embed = Callable[[Sequence[str]], Floats]
"""Returns the vectors [n, D] of texts, of length 1."""
GONE = "ON DELETE CASCADE"
TABLES = f"""
BEGIN;
CREATE TABLE facts(name TEXT PRIMARY KEY, value);
CREATE TABLE files(id INTEGER PRIMARY KEY, path TEXT UNIQUE, name TEXT, mark TEXT);
CREATE TABLE documents(id INTEGER PRIMARY KEY, file REFERENCES files {GONE}, number INTEGER, title TEXT);
CREATE TABLE passages(
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- no number is used again
    document REFERENCES documents {GONE}, start INTEGER, stop INTEGER);
CREATE TABLE vectors(id INTEGER PRIMARY KEY REFERENCES passages {GONE}, value BLOB);
CREATE VIRTUAL TABLE words USING fts5(text, tokenize="{words.TOKENIZER}");
CREATE TRIGGER forget AFTER DELETE ON passages BEGIN DELETE FROM words WHERE rowid = old.id; END;
CREATE INDEX documents_of_files ON documents(file);
CREATE INDEX passages_of_documents ON passages(document);
CREATE VIEW places AS SELECT passages.id, document, title, path, name, start, stop,
    CASE WHEN number = 1 AND documents.id = (SELECT max(id) FROM documents AS d WHERE d.file = files.id)
    THEN '' ELSE ':' || number END AS suffix
    FROM passages JOIN documents ON documents.id = document JOIN files ON files.id = file;
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION};
COMMIT;
"""


class Hit(NamedTuple):
    """A passage that answers a question."""

    text: str
    title: str
    document: str
    """Name of the file below the folder of its texts, and `:NUMBER` of the document if the file has several."""
    score: float
    """BM25 of words, the cosine of meaning, or the weighted sum of both, standardised."""
    file: str
    """Path of the file, with the number too."""
    start: int
    stop: int
    """Characters of the passage in the text of its document."""
    words: list[tuple[int, int]]
    """Characters of the passage that are words of the question."""
    passage: int
    """Number of the passage in the index, of which `document` returns the rest."""


class Index:
    """An open index. `embed` computes the vectors of questions; without it, words alone rank."""

    def __init__(self, path: Path, table: sqlite3.Connection) -> None:
        self.path = path
        self.table = table
        self.embed: Embed | None = None
        self.weights: str | None = None  # checksum of the model behind `embed`
        self._lock = threading.RLock()
        self._version = -1  # of the data in memory
        self._is_complete = False  # each passage has a vector by the model behind `embed`
        self._numbers = np.zeros(0, np.int64)
        self._vectors: npt.NDArray[np.int16] | None = None
        self._frequencies: dict[str, int] = {}

    def __del__(self) -> None:
        self.table.close()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let one thread read the index as it is at one time, whatever another process writes."""
        with self._lock, report_damage(self.path):
            if self.table.in_transaction:  # within another snapshot
                yield
                return
            self.table.execute("BEGIN")
            try:
                yield
            finally:
                self.table.rollback()

    def _value(self, query: str, *values: object) -> Any:
        with report_damage(self.path):
            return (self.table.execute(query, values).fetchone() or [None])[0]

    def fact(self, name: str) -> Any:
        """Return what is recorded under a name, or None."""
        return self._value("SELECT value FROM facts WHERE name = ?", name)

    def record(self, **facts: object) -> None:
        """Record values under names."""
        self.table.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())

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
        return 0 < self.count("passages") == self.count("vectors")

    # --- writing

    def add_file(self, path: str, name: str, mark: str) -> int:
        """Add a file in place of its earlier content, and return its number; `mark` tells whether it has changed."""
        self.table.execute("DELETE FROM files WHERE path = ?", [path])
        return self._add("files(path, name, mark)", path, name, mark)

    def add(self, file: int, number: int, document: Document, passages: Sequence[Passage]) -> None:
        """Add the `number`-th document of a file."""
        owner = self._add("documents(file, number, title)", file, number, document.title)
        for start, stop, text in passages:
            key = self._add("passages(document, start, stop)", owner, start, stop)
            self._add("words(rowid, text)", key, words.indexed(text))

    def _add(self, columns: str, *row: object) -> int:
        marks = ", ".join("?" * len(row))
        return self.table.execute(f"INSERT INTO {columns} VALUES ({marks})", row).lastrowid or 0

    def without_vector(self, most: int) -> list[tuple[int, str]]:
        """Return the numbers and texts of the first passages without a vector."""
        lacking = "rowid NOT IN (SELECT id FROM vectors) LIMIT ?"
        rows = self.table.execute(f"SELECT rowid, text FROM words WHERE {lacking}", [most])
        return [(number, words.plain(text)) for number, text in rows]

    def add_vectors(self, numbers: Sequence[int], vectors: Floats) -> None:
        """Add the vectors [n, D] of passages, of length 1."""
        rows = zip(numbers, np.rint(SCALE * vectors).astype(np.int16), strict=True)
        added = ((number, vector.tobytes()) for number, vector in rows)
        self.table.executemany("INSERT INTO vectors VALUES (?, ?)", added)

    # --- ranking

    def ask(self, question: str, top: int = 10, half: Half | None = None) -> list[Hit]:
        """Return the best passages, by words and meaning or by one half.

        Raises ConfigError for a question that cannot be asked, DataError for a damaged index.
        """
        words.check(question)
        if top < 1:
            raise ConfigError(f"top ({top})", "is less than 1", "set 1 or more")
        with self.snapshot():
            self._load()
            half = half or (None if self.embed and self._is_complete else "words")
            meaning = self.by_meaning([question])[0] if half != "words" else None
            lexical = self.by_words(question) if half != "meaning" else None
            scores = combined(lexical, meaning, self.weight)
            hits = [n for n in best_of(scores, top) if half != "words" or scores[n] > 0]
            return [self._hit(self._numbers[n], float(scores[n]), question) for n in hits]

    @property
    def weight(self) -> float:
        """Return the weight of the meaning beside words."""
        weight = self.fact("weight")
        return WEIGHT if weight is None else float(weight)

    def by_words(self, question: str) -> Floats:
        """Return the BM25 of each passage [N]; 0 without a word of the question or, in a large index, a rare one."""
        self._load()
        scores = np.zeros(len(self._numbers), np.float32)
        terms = self._terms(question)
        sizes = np.cumsum([self._frequency(term) for term in terms])
        rare = max(1, int(np.searchsorted(sizes, CANDIDATES, "right")))
        first = words.any_of(terms[:rare])
        others = words.any_of(terms[rare:])
        for query in [first, f"({first}) AND ({others})"] if others else [first]:
            ranking = "SELECT rowid, -bm25(words) FROM words WHERE words MATCH ?"
            if rows := self.table.execute(ranking, [query]).fetchall():
                numbers, values = zip(*rows, strict=True)
                scores[np.searchsorted(self._numbers, numbers)] = values
        return scores

    def _terms(self, question: str) -> list[str]:
        """Return the words of a question, rare ones first, without those to which BM25 gives no weight.

        These are in half of the passages or more; they are returned where no passage has a rarer word.
        """
        self._load()
        terms = sorted(words.words_of(question), key=self._frequency)
        present = [t for t in terms if self._frequency(t)]
        rare = [t for t in present if 2 * self._frequency(t) < len(self._numbers)]
        return rare or present or terms

    def _frequency(self, term: str) -> int:
        if term not in self._frequencies:
            counted = "SELECT count(*) FROM words WHERE words MATCH ?"
            self._frequencies[term] = self._value(counted, words.any_of([term]))
        return self._frequencies[term]

    def by_meaning(self, questions: Sequence[str]) -> Floats:
        """Return the cosine of each question and each passage [n, N]. Raises ConfigError without vectors."""
        self._load()
        if self.embed is None or not self._is_complete:
            problem = "the index has no vectors of all passages by its model"
            make = "run `bert search make` with --model to its end and open the index again"
            raise ConfigError("meaning", problem, f"{make}, or ask by words")
        if self._vectors is None:
            rows = self.table.execute("SELECT value FROM vectors ORDER BY id")
            joined = np.frombuffer(b"".join(value for (value,) in rows), np.int16)
            self._vectors = joined.reshape(len(self._numbers), -1)
        vectors = self.embed(questions)
        if (size := vectors.shape[1]) != (stored := self._vectors.shape[1]):
            problem = f"the index has vectors of {stored} values, and its model makes {size}"
            raise ConfigError("meaning", problem, "run `bert search make` again")
        blocks = range(0, len(self._vectors), AT_ONCE)
        scores = [self._vectors[n : n + AT_ONCE].astype(np.float32) @ vectors.T for n in blocks]
        cosines: Floats = np.concatenate(scores)
        cosines /= SCALE
        return cosines.T

    def _load(self) -> None:
        """Forget what is in memory when another process has changed the index."""
        version = self._value("PRAGMA data_version")
        if version != self._version:
            rows = self.table.execute("SELECT id FROM passages ORDER BY id").fetchall()
            self._numbers = np.array(rows, np.int64).reshape(-1)
            self._vectors = None
            self._is_complete = self.has_vectors and self.fact("weights") == self.weights
            self._frequencies = {}
            self._version = version

    def _hit(self, number: np.int64, score: float, question: str) -> Hit:
        key = int(number)
        text = words.plain(self._value("SELECT text FROM words WHERE rowid = ?", key))
        columns = "title, name || suffix, path || suffix, start, stop"
        row = self.table.execute(f"SELECT {columns} FROM places WHERE id = ?", [key]).fetchone()
        title, document, file, start, stop = row
        marking = f"SELECT highlight(words, 0, '{words.OPEN}', '{words.CLOSE}') FROM words"
        asked = words.any_of(self._terms(question))
        marked = self._value(f"{marking} WHERE words MATCH ? AND rowid = ?", asked, key)
        spans = words.spans(marked or "")
        return Hit(text, title, document, score, file, start, stop, spans, key)

    def document(self, passage: int) -> list[str]:
        """Return a passage and up to AROUND of its document on each side; none if the index no longer has it."""
        owner = "(SELECT document FROM passages WHERE id = ?)"
        text = f"SELECT text FROM words JOIN passages ON id = words.rowid WHERE document = {owner}"
        with self.snapshot():
            near = "abs(id - ?) <= ? ORDER BY id"  # the numbers of a document's passages are consecutive
            rows = self.table.execute(f"{text} AND {near}", [passage, passage, AROUND]).fetchall()
        return [words.plain(text) for (text,) in rows]

    def owners(self) -> tuple[npt.NDArray[np.int64], dict[int, tuple[str, str, str, str, str]]]:
        """Return the document of each passage [N], and the names of each document by its number.

        These are its title, its name and its path with its number in the file, and name and path of the file.
        """
        columns = "document, title, name || suffix, path || suffix, name, path"
        rows = self.table.execute(f"SELECT {columns} FROM places ORDER BY id").fetchall()
        return np.array([row[0] for row in rows], np.int64), {row[0]: row[1:] for row in rows}


def combined(lexical: Floats | None, meaning: Floats | None, weight: float) -> Floats:
    """Return the scores of passages [N] by both halves, of which one may be absent."""
    if lexical is None or meaning is None:
        scores = meaning if lexical is None else lexical
        assert scores is not None
        return scores
    return weight * _standardised(meaning) + (1.0 - weight) * _standardised(lexical)


def _standardised(scores: Floats) -> Floats:
    return (scores - scores.mean()) / (scores.std() + np.float32(1e-9))


def best_of(scores: Floats, top: int) -> list[int]:
    """Return the positions of the highest scores, highest first; equal ones in the order of the passages."""
    top = min(top, len(scores))
    best = np.flatnonzero(scores >= np.partition(scores, -top)[-top]) if top else np.zeros(0, int)
    return best[np.argsort(-scores[best], kind="stable")][:top].tolist()


# --- the file


@contextmanager
def report_damage(path: Path) -> Iterator[None]:
    """Raise DataError for a failure of SQLite."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "fts5" in str(error):
            problem = "SQLite has no FTS5 in this process"
            remedy = "import sqlite3 before TensorFlow, or use a Python whose SQLite has it"
            raise DataError(str(path), problem, remedy) from error
        remedy = "check the disk and the permissions, and end other commands that write it"
        raise DataError(str(path), f"cannot be read or written ({error})", remedy) from error
    except sqlite3.Error as error:
        if "not a database" in str(error):
            raise DataError(str(path), *NO_INDEX) from error
        raise DataError(str(path), f"is damaged ({error})", AGAIN) from error


def open_index(path: Path) -> Index:
    """Return an index to ask. Raises DataError for a file that is absent, damaged, or no index of this version."""
    if not path.is_file() or not path.stat().st_size:
        raise DataError(str(path), "no such index", "make it with `bert search make`")
    with report_damage(path):
        return Index(path, _connect(path, writes=False))


@contextmanager
def write_index(path: Path) -> Iterator[Index]:
    """Yield an index to write, new if the file is absent or empty; the block commits.

    Raises DataError as `open_index`, for a file that fails SQLite's check, and while another process writes it.
    """
    if path.is_dir():
        raise DataError(str(path), "is a folder", "name the file of the index: manuals.index")
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_file(path))
        except LockUnsupportedError:
            pass
        except BlockingIOError:
            problem = "another `bert search make` writes it"
            raise DataError(str(path), problem, "wait for it, or end it") from None
        stack.enter_context(report_damage(path))
        table = stack.enter_context(closing(_connect(path, writes=True)))
        if (fault := table.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise DataError(str(path), f"is damaged ({fault})", AGAIN)
        yield Index(path, table)


def _connect(path: Path, writes: bool) -> sqlite3.Connection:
    """Return the connection to an index; to write, an empty file becomes one."""
    address = f"file:{quote(str(path.absolute()))}?mode=rw"
    table = sqlite3.connect(address, BUSY_SECONDS, uri=True, check_same_thread=False)
    try:
        table.execute("PRAGMA foreign_keys = ON")
        table.execute("PRAGMA cache_spill = OFF")  # before a commit, which would lock readers out
        if writes and path.stat().st_size == 0:
            table.executescript(TABLES)
        kinds = ("application_id", "user_version")
        kind, version = (table.execute(f"PRAGMA {name}").fetchone()[0] for name in kinds)
        if kind != APPLICATION:
            raise DataError(str(path), *NO_INDEX)
        if version != VERSION:
            problem = f"is an index of version {version}, and this `bert` reads version {VERSION}"
            raise DataError(str(path), problem, AGAIN)
    except BaseException:
        table.close()
        raise
    return table
