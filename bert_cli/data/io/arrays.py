"""Files of arrays that a command reads back: the archive of NumPy, whose damage is always noticed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bert_cli.errors import DataError

NAMES = "names of the arrays"


def write_arrays(file: BinaryIO, arrays: Mapping[str, Any]) -> None:
    """Write arrays of NumPy as .npz, with their names, for `read_arrays`."""
    np.savez(file, allow_pickle=False, **arrays, **{NAMES: np.array([*arrays], np.str_)})


def read_arrays(path: Path) -> dict[str, Any]:
    """Return the arrays of a file of `write_arrays`. Raises DataError for one that has changed since.

    The archive has a checksum of each array; damage to its directory may only lose some.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as opened:
            arrays = dict(opened)
        if {*arrays.pop(NAMES).tolist()} != arrays.keys():
            raise ValueError("arrays are missing")
    except FileNotFoundError:
        raise
    except Exception as error:  # of a class for each part of the archive that is damaged
        raise DataError(str(path), f"is damaged ({error})", "move it away") from error
    return arrays
