"""The file of an index: its tables in SQLite, its checksum, and failures of SQLite as errors."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from urllib.parse import quote

import google_crc32c

from bert_cli.errors import DataError
from bert_cli.files import BLOCK_BYTES, FORMAT, check_format

APPLICATION = 0x62657274  # "bert", which marks the file as an index
BUSY_SECONDS = 60.0  # while another process commits
NO_INDEX = "was not made by `bert search make`", "make one with `bert search make INDEX TEXT`"
AGAIN = "move it away and make it again with `bert search make`"
COUNTERS = ((24, 28), (92, 100))
"""Bytes of a file of SQLite that count changes and name the program; they decide nothing that is read."""
VERSION = FORMAT + 6  # since all words are in the postings
GONE = "ON DELETE CASCADE"
TABLES = f"""
BEGIN;
CREATE TABLE seal(crc TEXT);  -- empty while the index is written
INSERT INTO seal VALUES ('');
CREATE TABLE facts(name TEXT PRIMARY KEY, value);
CREATE TABLE files(id INTEGER PRIMARY KEY, path TEXT UNIQUE, name TEXT, mark TEXT);  -- without a path it is replaced
CREATE TABLE documents(
    id INTEGER PRIMARY KEY, file INTEGER REFERENCES files {GONE}, number INTEGER, title TEXT, hash INTEGER);
CREATE TABLE passages(
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- no number is used again
    document INTEGER REFERENCES documents {GONE}, pages TEXT, start INTEGER, stop INTEGER,
    title TEXT, text TEXT, hash INTEGER, size INTEGER);  -- in words, with the title
CREATE TABLE vectors(  -- of equal texts once
    id INTEGER PRIMARY KEY, hash INTEGER UNIQUE, value BLOB, tokens BLOB);
CREATE TABLE postings(
    block INTEGER, word TEXT, offsets BLOB, times BLOB, positions BLOB, PRIMARY KEY(block, word)) WITHOUT ROWID;
CREATE INDEX documents_of_files ON documents(file, hash);
CREATE INDEX passages_of_documents ON passages(document);
CREATE INDEX passages_of_texts ON passages(hash);
CREATE VIEW places AS
    SELECT passages.id, document, documents.title, path, name, pages, start, stop, text, passages.hash,
    CASE WHEN number = 1 AND NOT EXISTS (SELECT 1 FROM documents AS d WHERE d.file = files.id AND d.id != document)
    THEN '' ELSE ':' || number END AS suffix
    FROM passages JOIN documents ON documents.id = document JOIN files ON files.id = file;
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION};
COMMIT;
"""


def state_of(path: Path) -> str:
    """Return the size of a file and the time of its last change, with which its mark in an index begins."""
    stat = path.stat()
    return f"{stat.st_size} {stat.st_mtime_ns} "


@contextmanager
def report_damage(path: Path) -> Iterator[None]:
    """Raise DataError for a failure of SQLite."""
    try:
        yield
    except sqlite3.OperationalError as error:
        remedy = "check the disk and the permissions, and end other commands that write it"
        raise DataError(str(path), f"cannot be read or written ({error})", remedy) from error
    except (sqlite3.Error, UnicodeDecodeError) as error:  # a message may quote a damaged table
        if "not a database" in str(error):
            raise DataError(str(path), *NO_INDEX) from error
        raise DataError(str(path), f"is damaged ({error})", AGAIN) from error


def check_exists(path: Path) -> None:
    """Raise DataError for a file that is absent or empty."""
    if not path.is_file() or not path.stat().st_size:
        raise DataError(str(path), "no such index", "make it with `bert search make`")


def connect(path: Path, writes: bool) -> sqlite3.Connection:
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
        check_format(str(path), version, VERSION)
    except BaseException:
        table.close()
        raise
    return table


def checksum(table: sqlite3.Connection, file: FileIO) -> str:
    """Return the CRC32C of an index, but for the page of its seal and the counters of changes."""
    root = "SELECT rootpage FROM sqlite_master WHERE name = 'seal'"
    page, size = (table.execute(query).fetchone()[0] for query in (root, "PRAGMA page_size"))
    crc = google_crc32c.Checksum()
    file.seek(0)
    head = bytearray(file.read(page * size))
    for start, stop in (*COUNTERS, ((page - 1) * size, page * size)):
        head[start:stop] = bytes(stop - start)
    crc.update(bytes(head))
    while block := file.read(BLOCK_BYTES):
        crc.update(block)
    return str(crc.digest().hex())
