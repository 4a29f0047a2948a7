"""The files of a run's scores: scores.json with their intervals, and examples.npz by which two runs are compared."""

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bert_cli.data.io.arrays import read_arrays, write_arrays
from bert_cli.files import with_checksum, write_atomically, write_json_atomically
from bert_cli.statistics import Examples, Sample, Score
from bert_cli.train.checkpoint import SCORES

EXAMPLES = "examples.npz"
INTERVALS = "intervals"


def write(
    folder: Path, samples: Mapping[str, Sample], scores: Mapping[str, Score], **counts: int
) -> None:
    """Write the scores of a run with their intervals and other counts, and what each example adds to them."""
    # JSON has no NaN or infinity, as of a run whose loss is not finite.
    values = {}
    for n, score in scores.items():
        values[n] = score.value if math.isfinite(score.value) else None
    bounds = {name: score.bounds for name, score in scores.items()}
    record = with_checksum({**values, **counts, INTERVALS: bounds})
    write_json_atomically(folder / SCORES, record)
    arrays: dict[str, Any] = {}
    for name, (rule, columns, (groups, digest, size)) in samples.items():
        arrays |= {f"{name}/columns": columns, f"{name}/groups": groups}
        arrays[f"{name}/about"] = np.array([rule, digest, str(size)])
    file = io.BytesIO()
    write_arrays(file, arrays)
    write_atomically(folder / EXAMPLES, file.getvalue())


def read_samples(folder: Path) -> dict[str, Sample]:
    """Return what the scores of a run are computed from, or nothing. Raises DataError for a damaged file."""
    samples: dict[str, Sample] = {}
    if not (folder / EXAMPLES).is_file():
        return samples
    arrays = read_arrays(folder / EXAMPLES)
    for name in (key.removesuffix("/about") for key in arrays if key.endswith("/about")):
        rule, digest, size = map(str, arrays[f"{name}/about"])
        examples = Examples(arrays[f"{name}/groups"], digest, int(size))
        samples[name] = Sample(rule, arrays[f"{name}/columns"], examples)
    return samples
