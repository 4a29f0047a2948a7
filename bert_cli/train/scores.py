"""The files of a run's scores: scores.json with their intervals, and examples.npz by which two runs are compared."""

import io
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bert_cli.errors import DataError
from bert_cli.files import write_atomically, write_json_atomically
from bert_cli.statistics import Examples, Sample, Score
from bert_cli.train.checkpoint import SCORES

EXAMPLES = "examples.npz"
INTERVALS = "intervals"


def write(
    folder: Path, samples: Mapping[str, Sample], scores: Mapping[str, Score], **counts: int
) -> None:
    """Write the scores of a run with their intervals and other counts, and what each example adds to them."""
    # JSON has no NaN or infinity, as of a run whose loss is not finite.
    values = {n: score.value if math.isfinite(score.value) else None for n, score in scores.items()}
    bounds = {name: score.bounds for name, score in scores.items()}
    write_json_atomically(folder / SCORES, {**values, **counts, INTERVALS: bounds})
    arrays: dict[str, Any] = {}
    for name, (rule, columns, (groups, digest, size)) in samples.items():
        arrays |= {f"{name}/columns": columns, f"{name}/groups": groups}
        arrays[f"{name}/about"] = np.array([rule, digest, str(size)])
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    write_atomically(folder / EXAMPLES, file.getvalue())


def read_samples(folder: Path) -> dict[str, Sample]:
    """Return what the scores of a run are computed from, or nothing. Raises DataError for a damaged file."""
    path = folder / EXAMPLES
    samples: dict[str, Sample] = {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            for name in (key.removesuffix("/about") for key in arrays if key.endswith("/about")):
                rule, digest, size = map(str, arrays[f"{name}/about"])
                examples = Examples(arrays[f"{name}/groups"], digest, int(size))
                samples[name] = Sample(rule, arrays[f"{name}/columns"], examples)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(
            str(path), f"is damaged ({error})", "move it out of the run's folder"
        ) from error
    return samples
