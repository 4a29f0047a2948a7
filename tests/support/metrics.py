"""Folders of runs that hold only metrics."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bert_cli.train.history import Run


def write_metrics(
    folder: Path, lines: Iterable[tuple[int, dict[str, Any]]], mode: str = "w"
) -> Run:
    """Write these metrics of steps, or add them with mode "a", and return the run."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{json.dumps({'step': step, **metrics})}\n" for step, metrics in lines)
    with open(folder / "metrics.jsonl", mode, encoding="utf-8") as file:
        file.write(text)
    return Run(folder)
