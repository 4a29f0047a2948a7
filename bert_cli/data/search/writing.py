"""Writing an index: each change is a transaction, so that the file is complete after a kill at any moment.

An index that was written to its end is sealed with the checksum of its file.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from bert_cli.data.search import late, words
from bert_cli.data.search.database import AGAIN, checksum, report_damage
from bert_cli.data.search.index import LACKING, SCALE, Index, hash_of, number_of
from bert_cli.data.search.late import Vectors
from bert_cli.data.search.passages import Document, Passage, pages_of
from bert_cli.data.search.postings import write_postings
from bert_cli.errors import DataError
from bert_cli.files import hold_lock

AT_MOST_UNSTORED = 1 << 16  # passages, whose words are in memory when their postings are written


class WritableIndex(Index):
    """An open index that is written; `write_index` opens it."""

    WRITES = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._added = 0  # passages without postings
        self._has_earlier = False  # a file with the path of the last one that was added

    def record(self, **facts: object) -> None:
        """Record values under names."""
        self.table.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Commit what the block writes; the index is sealed again at the end of `write_index`."""
        with self.table:
            self.table.execute("UPDATE seal SET crc = ''")
            yield
            self.table.execute("DELETE FROM files WHERE path IS NULL")
            if self._added >= AT_MOST_UNSTORED:
                self.store_postings()

    def check_unsealed(self) -> None:
        """Raise DataError for damage in an index that was not written to its end."""
        fault = self.table.execute("PRAGMA quick_check(1)").fetchone()[0]
        rows = self.table.execute("SELECT text, hash FROM passages")
        if fault != "ok" or not all(hash_of(text) == number for text, number in rows):
            raise DataError(str(self.path), f"is damaged ({fault})", AGAIN)
        with self.changing():
            self.table.execute("DELETE FROM postings")
            self.record(stored=0)
            self.store_postings()

    def seal(self) -> None:
        """Record the checksum of the file."""
        if self._added:
            with self.changing():
                self.store_postings()
        with self.table:
            self.table.execute("UPDATE seal SET crc = ?", [checksum(self.table, self._file)])

    def store_postings(self) -> None:
        """Write the postings of new passages, at most about AT_MOST_UNSTORED."""
        write_postings(self.table)
        self._added = 0

    def add_file(self, path: str, name: str, mark: str) -> int:
        """Add a file in place of its earlier content, and return its number; `mark` tells whether it has changed."""
        query = "UPDATE files SET path = NULL WHERE path = ?"
        self._has_earlier = self.table.execute(query, [path]).rowcount > 0
        return self._add("files(path, name, mark)", path, name, mark)

    def reuse(self, file: int, document: Document) -> bool:
        """Move a document of a file's earlier content to its new content; return whether there was one."""
        if not self._has_earlier:
            return False
        earlier = "file = (SELECT id FROM files WHERE path IS NULL) AND hash = ?"
        query = f"UPDATE documents SET file = ?, number = ? WHERE id = (SELECT min(id) FROM documents WHERE {earlier})"
        row = file, document.number, hash_of_document(document)
        return self.table.execute(query, row).rowcount > 0

    def add(self, file: int, document: Document, passages: Sequence[Passage]) -> None:
        """Add a document of a file."""
        values = document.number, document.title, hash_of_document(document)
        owner = self._add("documents(file, number, title, hash)", file, *values)
        title = ""
        if document.is_named:
            title = document.title
        self._added += len(passages)
        for passage in passages:
            pages = pages_of(document, passage)
            text = passage.text
            row = (
                owner,
                pages and json.dumps(pages),
                passage.start,
                passage.stop,
                title,
                text,
                hash_of(text),
                sum(len(words.all_words_of(field)) for field in (title, text)),
            )
            self._add("passages(document, pages, start, stop, title, text, hash, size)", *row)

    def _add(self, columns: str, *row: object) -> int:
        marks = ", ".join("?" * len(row))
        return self.table.execute(f"INSERT INTO {columns} VALUES ({marks})", row).lastrowid or 0

    def without_vector(self) -> list[int]:
        """Return the number of a passage for each text without a vector."""
        rows = self.table.execute(f"{LACKING} GROUP BY hash ORDER BY min(id)")
        return [number for (number,) in rows]

    def add_vectors(self, numbers: Sequence[int], vectors: Vectors) -> None:
        """Add the vectors of the texts of passages."""
        values = np.rint(SCALE * vectors.texts).astype(np.int16)
        axes = self.axes
        tokens: list[bytes | None] = [None] * len(vectors.tokens)
        if axes is not None:
            tokens = [late.packed(text, axes) for text in vectors.tokens]
        rows = zip(map(bytes, values), tokens, numbers, strict=True)
        columns = "vectors(hash, value, tokens) SELECT hash, ?, ? FROM passages WHERE id = ?"
        self.table.executemany(f"INSERT OR REPLACE INTO {columns}", rows)

    def forget_unused_vectors(self) -> None:
        """Remove the vectors of texts that no passage has."""
        self.table.execute("DELETE FROM vectors WHERE hash NOT IN (SELECT hash FROM passages)")


def hash_of_document(document: Document) -> int:
    """Return the number by which a document is known, wherever it stands in its file."""
    known = document.title, document.is_named, document.pages
    return number_of(repr((known, document.lines)))


@contextmanager
def write_index(path: Path) -> Iterator[WritableIndex]:
    """Yield an index to write, new if the file is absent or empty; the block commits.

    A new one is removed if the block fails before it has a passage.

    Raises DataError as `open_index`, for a damaged one, and while another process writes it.
    """
    if path.is_dir():
        raise DataError(str(path), "is a folder", "name the file of the index: manuals.index")
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    problem = "another `bert search make` writes it"
    busy = DataError(str(path), problem, "wait for it, or end it")
    with hold_lock(path, busy), report_damage(path), closing(WritableIndex(path)) as index:
        index.verify()
        if not index.is_sealed:
            index.check_unsealed()
        try:
            yield index
        except BaseException:
            if is_new and index.is_empty:
                path.unlink()
            raise
        if not index.is_sealed:
            index.seal()
