"""Arrays of NumPy by the type of their values: one name for one type."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Ints8 = npt.NDArray[np.int8]
Ints16 = npt.NDArray[np.int16]
Ints32 = npt.NDArray[np.int32]
Ints64 = npt.NDArray[np.int64]
UInts8 = npt.NDArray[np.uint8]
UInts16 = npt.NDArray[np.uint16]
UInts32 = npt.NDArray[np.uint32]
UInts64 = npt.NDArray[np.uint64]
Floats32 = npt.NDArray[np.float32]
Floats64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.floating[Any]]
Array = npt.NDArray[Any]
Shape = tuple[int, ...]
# Arrays by the names of weights.
Tensors = Mapping[str, Array]
