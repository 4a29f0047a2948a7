"""Read the JSON files that the tool writes, and open its lock files.

A file that a run left behind may have been edited, cut or replaced: `read_json` validates it against a
type, so that what is wrong becomes an error with the path and no caller checks fields by hand.
"""

import os
from pathlib import Path
from typing import Any, TextIO, TypeVar

from pydantic import TypeAdapter, ValidationError

from bert_cli.errors import BertError

Value = TypeVar("Value")


def read_json(path: Path, kind: type[Value], error: type[BertError], remedy: str) -> Value:
    """Return the JSON of a file as a value of `kind`: a pydantic model or a type like `dict[str, int]`.

    Raises `error`, with the path, what is wrong and `remedy`, for a file that cannot be read, is not
    UTF-8 or JSON, nests too deeply, or does not match `kind`.
    """
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        value: Value = adapter.validate_json(path.read_bytes())
    except OSError as failure:
        raise error(f"{path}: cannot be read ({failure.strerror}); {remedy}") from failure
    except ValidationError as failure:
        first = failure.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise error(f"{path}{f' ({where})' if where else ''}: {first['msg']}; {remedy}") from None
    return value


def open_lock(path: Path) -> TextIO:
    """Open a lock file for locking, create it if absent, and leave its content as it is.

    Raises OSError for a symbolic link, which would let a lock create or lock a file elsewhere.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "r+", encoding="utf-8")
