"""`bert compare`: show the differences between two runs in their settings and in their results.

Each side is a run, or the runs of several seeds. Those are shown with their mean and standard deviation, because
results of fine-tuning often differ more between seeds than between settings.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bert_cli.config.tools import CompareSettings
from bert_cli.errors import DataError
from bert_cli.files import is_stdout, output_json
from bert_cli.processes import print_table
from bert_cli.train.checkpoint import METRICS
from bert_cli.train.history import (
    ABSENT,
    NAMES_ONLY,
    Run,
    differing_settings,
    in_words,
    label_of,
    names_of,
    open_runs,
    spread,
    summary_of,
    value_in_words,
    window_for,
    window_in_words,
)

Metric = tuple[float, float | None]
"""Mean and, of several seeds, standard deviation."""


class Side(NamedTuple):
    """A run, or one run for each of several seeds."""

    name: str
    runs: Sequence[Run]
    results: dict[str, Metric]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by dotted name; a list of values where the seeds differ."""
        return {**self.runs[0].flat_settings, **differing_settings(self.runs)}


def run(settings: CompareSettings) -> None:
    """Print the differences as tables or write them as JSON.

    Raises DataError for a folder that is no run and for a run without a step.
    """
    folders = {"first": settings.first, "second": settings.second}
    both = [_open(folder, where) for where, folder in folders.items()]
    if settings.first.resolve() == settings.second.resolve():
        raise DataError(
            f"second ({settings.second})", "is the same run as the first", "give another run"
        )
    window = window_for([*both[0], *both[1]], settings.smoothing)
    names = names_of([Run(folder) for folder in folders.values()])
    sides = [
        Side(
            f"{name} ({len(runs)} seeds)" if len(runs) > 1 else name,
            runs,
            spread([summary_of(one, window) for one in runs]),
        )
        for name, runs in zip(names, both, strict=True)
    ]
    differing = _differing_settings(sides)
    if settings.json_file is not None:
        output_json(settings.json_file, _as_json(sides, differing, window))
    if not is_stdout(settings.json_file):
        _print(sides, differing)
        print(f"\nLosses, accuracies and gradient norms are {window_in_words(window)}.")


def _open(folder: Path, where: str) -> list[Run]:
    runs = open_runs([folder], where)
    inner = [one.folder for one in runs if one.folder != folder]
    if any(one.parent != folder or not one.name.startswith("seed_") for one in inner):
        problem = f"contains {len(inner)} runs"
        raise DataError(f"{where} ({folder})", problem, f"give one of them, as {inner[0]}")
    for one in runs:
        if not one.steps:
            remedy = "wait for the first one, or give another run"
            raise DataError(f"{where} ({one.folder})", f"has no step in {METRICS} yet", remedy)
    return runs


def _differing_settings(sides: Sequence[Side]) -> dict[str, list[Any]]:
    """Return dotted name -> values of both sides, of the settings that differ."""
    first, second = (side.settings for side in sides)
    pairs = {
        name: [first.get(name, ABSENT), second.get(name, ABSENT)] for name in {**first, **second}
    }
    return {
        name: pair
        for name, pair in pairs.items()
        if name.partition(".")[0] not in NAMES_ONLY and pair[0] != pair[1]
    }


def _metrics(sides: Sequence[Side]) -> list[str]:
    return list(dict.fromkeys(name for side in sides for name in side.results))


def _as_json(sides: Sequence[Side], differing: dict[str, list[Any]], window: int) -> dict[str, Any]:
    def values(result: Metric | None) -> dict[str, float | None] | None:
        return result and dict(zip(("mean", "standard_deviation"), result, strict=True))

    return {
        "runs": [
            {
                "name": side.name,
                "folders": [str(one.folder) for one in side.runs],
                "what": side.runs[0].kind,
                "states": [one.state for one in side.runs],
            }
            for side in sides
        ],
        "smoothed_over_steps": window,
        "settings": differing,
        "results": {
            name: [values(side.results.get(name)) for side in sides] for name in _metrics(sides)
        },
    }


def _print(sides: Sequence[Side], differing: dict[str, list[Any]]) -> None:
    names = [side.name for side in sides]
    if differing:
        rows = [(name, *map(value_in_words, values)) for name, values in differing.items()]
        print_table(("settings that differ", *names), rows)
    else:
        print("Both have the same settings.")
    print()
    kinds = [side.runs[0].kind for side in sides]
    states = [", ".join(dict.fromkeys(one.state for one in side.runs)) for side in sides]
    rows = [("command", *kinds, "")] if kinds[0] != kinds[1] else []
    rows.append(("state", *states, ""))
    for name in _metrics(sides):
        results = [side.results.get(name) for side in sides]
        difference = ""
        if results[0] is not None and results[1] is not None:
            change = results[1][0] - results[0][0]
            difference = "+" * (change > 0) + "-" * (change < 0) + in_words(name, abs(change))
        rows.append((label_of(name), *(_cell(name, one) for one in results), difference))
    print_table(("results", *names, "difference"), rows)


def _cell(name: str, result: Metric | None) -> str:
    if result is None:
        return "-"
    mean, deviation = result
    return in_words(name, mean) + (f" +- {in_words(name, deviation)}" if deviation else "")
