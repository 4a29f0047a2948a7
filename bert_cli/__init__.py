"""`bert`: from a Wikipedia dump, or text of your own, to a pre-trained BERT."""

import os
from contextlib import suppress
from typing import TYPE_CHECKING

with suppress(ImportError):
    import _sqlite3  # noqa: F401  # before TensorFlow, which brings an SQLite without FTS5

if TYPE_CHECKING:  # loads NumPy
    from bert_cli.data.search.index import Index

__version__ = "0.2.0"


def open_index(path: "str | os.PathLike[str]") -> "Index":
    """Return an index of `bert search make`; `open_index(path).ask(question, top=10)` returns its best passages.

    Raises DataError, ConfigError or CheckpointError (of `bert_cli.errors`) for an index that cannot be asked.
    """
    from bert_cli.tasks.search import opened

    return opened.open_index(os.fspath(path))
