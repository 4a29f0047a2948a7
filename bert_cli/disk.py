"""The disk of a path: sizes of files, free space, and whether a folder can be written."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path


def size_of(files: Iterable[Path]) -> int:
    """Return the bytes of some files together."""
    return sum(path.stat().st_size for path in files)


def existing(path: Path) -> Path:
    """Return a path, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def is_writable(folder: Path) -> bool:
    """Return whether files can be written into a folder, which may be absent."""
    return existing(folder).is_dir() and os.access(existing(folder), os.W_OK)


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user may still write on a folder's disk; the folder may be absent."""
    return shutil.disk_usage(existing(folder)).free
