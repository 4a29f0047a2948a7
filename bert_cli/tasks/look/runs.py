"""`bert runs`: the runs below some folders, a line each.

It reads the ends of files only, so that a hundred runs of a million steps are listed within a second. A
run that cannot be read is listed as that and hides no other.
"""

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from bert_cli.config.tools import RunsSettings
from bert_cli.errors import DataError
from bert_cli.files import is_stdout, output_json
from bert_cli.terminal import print_table
from bert_cli.train.history import HELD_OUT, Run, runs_below
from bert_cli.train.metrics import format_duration

HEADS = ("run", "what", "step", "of", "loss", "held out", "state", "written")
NUMBERS = (2, 3)
MOST = 3
"""Figures of a kind on a line; JSON has all."""
NO_RUNS = "no runs here; a run is a folder that --save-ckpt-path named"


def run(settings: RunsSettings) -> None:
    """Print the runs below the folders as a table, or write them as JSON.

    Raises DataError for a folder that is not there.
    """
    for folder in settings.folders:
        if not folder.is_dir():
            raise DataError(f"folders ({folder}): is no folder; give one that runs lie in")
    found = {one.folder.resolve(): one for folder in settings.folders for one in runs_below(folder)}
    told = [told_of(one) for one in found.values()]
    if settings.json_file is not None:
        output_json(settings.json_file, told)
    if not is_stdout(settings.json_file):
        if not told:
            print(f"{', '.join(map(str, settings.folders))}: {NO_RUNS}")
            return
        print_table(HEADS, [_row(one) for one in told], right=NUMBERS)


def told_of(found: Run) -> dict[str, Any]:
    """What there is to say of a run, as JSON; the figures are those of its last step."""
    told: dict[str, Any] = {"run": str(found.folder)}
    try:
        figures = found.last[1]
        told |= {
            "what": found.kind,
            "step": found.step,
            "total_steps": found.total_steps,
            "losses": losses_of(figures),
            "held_out": held_out_of(found),
            "state": found.state,
        }
    except DataError as error:
        told |= {"state": "unreadable", "why": str(error)}
    written = found.written
    told["written"] = (
        datetime.fromtimestamp(written).astimezone().isoformat("T", "seconds") if written else None
    )
    return told


def losses_of(figures: Mapping[str, float | None]) -> dict[str, float | None]:
    """The losses among a step's figures, by what they are of; one that is not finite is None."""
    return {
        name.removesuffix("loss").rstrip("_") or "loss": value
        for name, value in figures.items()
        if name.endswith("loss") and not name.startswith(HELD_OUT)
    }


def held_out_of(found: Run) -> dict[str, float]:
    """The scores that the run ended with, or has come to; else those of its last evaluation."""
    if found.scores:
        return found.scores
    return {
        name.removeprefix(HELD_OUT): value
        for name, value in found.last_evaluated.items()
        if name.startswith(HELD_OUT) and value is not None
    }


def _row(told: Mapping[str, Any]) -> tuple[str, ...]:
    if told["state"] == "unreadable":
        return told["run"], "?", "", "", "", "", told["why"], _ago(told["written"])
    total = told["total_steps"]
    return (
        told["run"],
        told["what"],
        f"{told['step']:,}",
        f"{total:,}" if total is not None else "?",
        _in_words(told["losses"]),
        _in_words(losses_of(told["held_out"]) or told["held_out"]),
        told["state"],
        _ago(told["written"]),
    )


def _in_words(figures: Mapping[str, float | None]) -> str:
    """`mlm 6.3499  nsp 0.6833`; a single loss without its name."""
    shown = {name: "not finite" if v is None else f"{v:.4f}" for name, v in figures.items()}
    if list(shown) == ["loss"]:
        return shown["loss"]
    told = [f"{name} {value}" for name, value in shown.items()]
    return "  ".join(told[:MOST] + ["..."] * (len(told) > MOST))


def _ago(written: str | None) -> str:
    if written is None:
        return "never"
    since = time.time() - datetime.fromisoformat(written).timestamp()
    # The first number with its unit: 5 h, 12 min.
    return "now" if since < 1 else f"{' '.join(format_duration(since).split()[:2])} ago"
