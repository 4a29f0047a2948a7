"""`bert runs`: list the runs below some folders.

Only the ends of files are read, so that a hundred runs of a million steps are listed within a second. A run
that cannot be read is listed with the reason.
"""

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from bert_cli.config.tools import RunsSettings
from bert_cli.errors import DataError
from bert_cli.files import is_stdout, output_json
from bert_cli.processes import print_table
from bert_cli.train.history import HELD_OUT, Run, runs_below
from bert_cli.train.metrics import format_duration

COLUMNS = ("run", "command", "step", "of", "loss", "held out", "state", "last written")
MAX_METRICS = 3
"""Metrics in a cell of the table; JSON has all."""


def run(settings: RunsSettings) -> None:
    """Print the runs below the folders as a table or write them as JSON.

    Raises DataError for a folder that does not exist.
    """
    for folder in settings.folders:
        if not folder.is_dir():
            raise DataError(f"folders ({folder})", "is no folder", "give one that contains runs")
    found = {one.folder.resolve(): one for folder in settings.folders for one in runs_below(folder)}
    described = [describe(one) for one in found.values()]
    if settings.json_file is not None:
        output_json(settings.json_file, described)
    if is_stdout(settings.json_file):
        return
    if described:
        print_table(COLUMNS, [_row(one) for one in described], right=(2, 3))
    else:
        folders = ", ".join(map(str, settings.folders))
        print(f"{folders}: no runs; a run is a folder that was given as --save-ckpt-path")


def describe(run: Run) -> dict[str, Any]:
    """Return a run as JSON, with the metrics of its last step."""
    described: dict[str, Any] = {"run": str(run.folder)}
    try:
        described |= {
            "what": run.kind,
            "step": run.step,
            "total_steps": run.total_steps,
            "losses": losses_of(run.last[1]),
            "held_out": held_out_of(run),
            "state": run.state,
        }
    except DataError as error:
        described |= {"state": "unreadable", "why": str(error)}
    written = datetime.fromtimestamp(run.written).astimezone() if run.written else None
    described["written"] = None if written is None else written.isoformat("T", "seconds")
    return described


def losses_of(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the losses of a step by short name; None for one that is not finite."""
    return {
        name.removesuffix("loss").rstrip("_") or "loss": value
        for name, value in metrics.items()
        if name.endswith("loss") and not name.startswith(HELD_OUT)
    }


def held_out_of(run: Run) -> dict[str, float]:
    """Return the scores of the run, or else the metrics of its last evaluation."""
    return run.scores or {
        name.removeprefix(HELD_OUT): value
        for name, value in run.last_evaluated.items()
        if name.startswith(HELD_OUT) and value is not None
    }


def _row(described: Mapping[str, Any]) -> tuple[str, ...]:
    written = _age(described["written"])
    if described["state"] == "unreadable":
        return described["run"], "?", "", "", "", "", described["why"], written
    total = described["total_steps"]
    return (
        described["run"],
        described["what"],
        f"{described['step']:,}",
        "?" if total is None else f"{total:,}",
        _cell(described["losses"]),
        _cell(losses_of(described["held_out"]) or described["held_out"]),
        described["state"],
        written,
    )


def _cell(metrics: Mapping[str, float | None]) -> str:
    """Return `mlm 6.3499  nsp 0.6833`, or a single loss without its name."""
    texts = {name: "not finite" if v is None else f"{v:.4f}" for name, v in metrics.items()}
    if list(texts) == ["loss"]:
        return texts["loss"]
    cells = [f"{name} {text}" for name, text in texts.items()]
    return "  ".join(cells[:MAX_METRICS] + ["..."] * (len(cells) > MAX_METRICS))


def _age(written: str | None) -> str:
    if written is None:
        return "never"
    seconds = time.time() - datetime.fromisoformat(written).timestamp()
    # The first number with its unit: 5 h, 12 min.
    return "now" if seconds < 1 else f"{' '.join(format_duration(seconds).split()[:2])} ago"
