"""Arrays that are read back: a flipped bit is an error, or changes nothing."""

import io

import numpy as np
import pytest

from bert_cli.data.io.arrays import NAMES, read_arrays, write_arrays
from bert_cli.errors import DataError


def test_a_flipped_bit_is_an_error_or_changes_no_array(tmp_path):
    arrays = {"a/b": np.arange(40, dtype=np.float32).reshape(8, 5), "names": np.array(["x", "yz"])}
    file = io.BytesIO()
    write_arrays(file, arrays)
    data = file.getvalue()
    detected = 0
    directory = data.index(b"PK\1\2")  # of the archive, where a flip may lose an array
    places = [*range(0, 8 * directory, 61), *range(8 * directory, 8 * len(data), 3)]
    for place in places:
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        (tmp_path / "arrays.npz").write_bytes(damaged)
        try:
            found = read_arrays(tmp_path / "arrays.npz")
        except DataError:
            detected += 1
            continue
        assert {name: (of.dtype, of.tolist()) for name, of in found.items()} == {
            name: (of.dtype, of.tolist()) for name, of in arrays.items()
        }, place
    assert detected > len(places) / 2
    np.savez(tmp_path / "lost.npz", **{NAMES: np.array(["a", "b"]), "a": np.zeros(2)})
    with pytest.raises(DataError, match=r"lost.npz: is damaged \(arrays are missing\)"):
        read_arrays(tmp_path / "lost.npz")
    with pytest.raises(FileNotFoundError):
        read_arrays(tmp_path / "absent")
