"""`bert runs` lists the runs below some folders, `bert compare` shows the differences between two runs.

The list reads only the ends of files, so that a hundred runs of a million steps are listed within a second. Each
side of a comparison is a run, or the runs of several seeds, which are shown with their mean and standard deviation,
because results of fine-tuning often differ more between seeds than between settings.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from bert_cli.config.tools import CompareSettings, RunsSettings
from bert_cli.errors import DataError, printable
from bert_cli.files import JSONObject, is_stdout, output_json
from bert_cli.processes import print_line, print_table
from bert_cli.statistics import Score, describe, difference
from bert_cli.tasks.look import summary
from bert_cli.text import count, format_duration
from bert_cli.train import health, history
from bert_cli.train.history import Run
from bert_cli.train.metrics import BITS_PER_BYTE, HELD_OUT
from bert_cli.train.scores import read_samples

COLUMNS = ("run", "command", "step", "of", "loss", "held out", "state", "last written")
Value = TypeVar("Value")
MAX_METRICS = 3  # metrics in a cell of the list; JSON has all


# --- the list


def run(settings: RunsSettings) -> None:
    """Print the runs as a table or write them as JSON. Raises DataError for a folder that does not exist."""
    for folder in settings.folders:
        if not folder.is_dir():
            raise DataError(f"folders ({folder})", "no such folder", "use one that contains runs")
    runs = {
        entry.folder.resolve(): entry
        for folder in settings.folders
        for entry in history.runs_below(folder)
    }
    described = [_describe(entry) for entry in runs.values()]
    output_json(settings.json_file, described)
    if is_stdout(settings.json_file):
        return
    if described:
        print_table(COLUMNS, [_row(entry) for entry in described], right=(2, 3))
        for entry in described:
            if "warning" in entry:
                print_line(printable(f"{entry['run']}: {entry['warning']}"))
    else:
        folders = ", ".join(map(str, settings.folders))
        print_line(f"{printable(folders)}: no runs; a run is the folder of a --save-ckpt-path")


def _describe(run: Run) -> JSONObject:
    described: JSONObject = {"run": str(run.folder)}
    try:
        described |= {
            "what": run.kind,
            "step": run.step,
            "total_steps": run.total_steps,
            "losses": _losses(run.last[1]),
            "held_out": run.scores or history.held_out(run.last_evaluated),
            "state": run.state,
        }
        if run.intervals:
            described["intervals"] = {name: score.bounds for name, score in run.intervals.items()}
        warning = health.warning_of(run)
        if warning:
            described["warning"] = warning
    except Exception as error:  # an edited file may hold anything; the other runs are still listed
        described |= {"state": "unreadable", "why": str(error)}
    described["written"] = None
    with suppress(OSError):
        if run.written:
            written = datetime.fromtimestamp(run.written).astimezone()
            described["written"] = written.isoformat("T", "seconds")
    return described


def _losses(metrics: Mapping[str, Value]) -> dict[str, Value]:
    """Return losses by short name, and bits per byte."""
    return {
        name.removesuffix("loss").rstrip("_").replace("_", " ") or "loss": value
        for name, value in metrics.items()
        if name.endswith(("loss", BITS_PER_BYTE)) and not name.startswith(HELD_OUT)
    }


def _row(described: JSONObject) -> tuple[str, ...]:
    written = "never"
    if described["written"] is not None:
        seconds = time.time() - datetime.fromisoformat(described["written"]).timestamp()
        # The first number with its unit: 5 h, 12 min.
        age = " ".join(format_duration(seconds).split()[:2])
        # Clocks of hosts with one file system differ by some seconds.
        written = f"{age} ago"
        if seconds < 1:
            written = "now"
    if described["state"] == "unreadable":
        return described["run"], "?", "", "", "", "", described["why"], written
    # Absent for a run that has no settings.json yet.
    total = described["total_steps"]
    held_out = described["held_out"]
    # Scores as `accuracy 0.8125 [0.7344, 0.8906]; n 64`.
    bounds = described.get("intervals", {})
    with_bounds = {name: Score.of(held_out[name], of) for name, of in bounds.items()}
    scores = _losses(with_bounds) or with_bounds
    ending = "  ..." if len(scores) > MAX_METRICS else ""
    cell = describe(dict([*scores.items()][:MAX_METRICS])) + ending
    return (
        described["run"],
        described["what"],
        f"{described['step']:,}",
        "?" if total is None else f"{total:,}",
        _metrics_cell(described["losses"]),
        cell if scores else _metrics_cell(_losses(held_out) or held_out),
        described["state"],
        written,
    )


def _metrics_cell(metrics: Mapping[str, float | None]) -> str:
    """Return `mlm 6.3499  nsp 0.6833`, or a single loss without its name."""
    texts = {name: "not finite" if v is None else f"{v:.4f}" for name, v in metrics.items()}
    if list(texts) == ["loss"]:
        return texts["loss"]
    cells = [f"{name} {text}" for name, text in texts.items()]
    if len(cells) > MAX_METRICS:
        cells[MAX_METRICS:] = ["..."]
    return "  ".join(cells)


# --- the comparison


def compare(settings: CompareSettings) -> None:
    """Print the settings that differ between two runs, and how much their scores differ, or write both as JSON.

    Raises DataError for other folders.
    """
    folders = {"first": settings.first, "second": settings.second}
    sides = [_open(folder, where) for where, folder in folders.items()]
    if settings.first.resolve() == settings.second.resolve():
        where = f"second ({settings.second})"
        raise DataError(where, "is the same run as the first", "name another run")
    names = summary.names_of([Run(folder) for folder in folders.values()])
    # A setting whose value differs between the seeds of a side is a list.
    rows = [[entry.flat_settings for entry in runs] for runs in sides]
    differing = summary.differing_settings(
        [row[0] | summary.differing_settings(row) for row in rows]
    )
    # The difference of each score that all runs have on the same examples.
    samples = [[read_samples(entry.folder) for entry in runs] for runs in sides]
    of_all = [*samples[0], *samples[1]]
    gains = {}
    for name in of_all[0]:
        if len({scored[name].examples.digest if name in scored else "" for scored in of_all}) == 1:
            before, after = ([scored[name] for scored in runs] for runs in samples)
            gains[name] = difference(after, before)
    values: JSONObject = {
        "runs": names,
        "settings": differing,
        "differences": {name: gain.as_json for name, gain in gains.items()},
    }
    output_json(settings.json_file, values)
    if is_stdout(settings.json_file):
        return
    titles = [
        f"{name} ({len(runs)} seeds)" if len(runs) > 1 else name
        for name, runs in zip(names, sides, strict=True)
    ]
    if differing:
        cells = [(name, *map(summary.value_in_words, pair)) for name, pair in differing.items()]
        print_table(("settings that differ", *titles), cells)
    else:
        print_line("Both have the same settings.")
    if gains:
        print_line(f"\nDifferences of {titles[1]} from {titles[0]}, with 95 % intervals:")
        for name, gain in gains.items():
            print_line(f"{name.replace('_', ' ')}: {gain:+.4f}, n {gain.n:,}")
    else:
        print_line("\nNo score of both is of the same examples; `bert plot` draws their losses.")


def _open(folder: Path, where: str) -> list[Run]:
    runs = history.open_runs([folder], where)
    inner = [entry.folder for entry in runs if entry.folder != folder]
    if any(entry.parent != folder or not entry.name.startswith("seed_") for entry in inner):
        problem = f"contains {count(len(inner), 'run')}"
        raise DataError(f"{where} ({folder})", problem, f"name one of them, such as {inner[0]}")
    return runs
