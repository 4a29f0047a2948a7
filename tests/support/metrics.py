"""Folders of runs that hold only metrics, and the scores of runs."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bert_cli.statistics import Sample
from bert_cli.train.history import Run


def scores_of(folder: Path) -> dict[str, float]:
    scores = json.loads((folder / "scores.json").read_text())
    assert scores.pop("own_crc32c") and scores.pop("intervals").keys() <= scores.keys()
    return scores


def printed_scores(out: str) -> dict[str, float]:
    """Return the scores of the last line, which the line of scores has with their intervals and n."""
    scores: dict[str, float] = json.loads(out.splitlines()[-1])
    (line,) = [line for line in out.splitlines() if line.startswith("scores: ")]
    for name, value in scores.items():
        found = re.search(rf" {name} {value:.4f} \[(\S+), (\S+)\]", line)
        if not name.endswith("total"):
            assert found and float(found[1]) <= value + 1e-4 and value <= float(found[2]) + 1e-4
    assert re.search(r"; n \d+( in \d+ groups)?( and |, |; )", line)
    return scores


def values(samples: Mapping[str, Sample]) -> dict[str, float]:
    return {name: sample.value for name, sample in samples.items()}


def write_metrics(
    folder: Path, lines: Iterable[tuple[int, dict[str, Any]]], mode: str = "w"
) -> Run:
    """Write these metrics of steps, or add them with mode "a", and return the run."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{json.dumps({'step': step, **metrics})}\n" for step, metrics in lines)
    with open(folder / "metrics.jsonl", mode, encoding="utf-8") as file:
        file.write(text)
    return Run(folder)
