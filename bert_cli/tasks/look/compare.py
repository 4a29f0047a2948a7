"""`bert compare`: what differs between two runs, in what was asked and in what came of it.

Each side is a run, or the runs of several seeds, whose figures are then told with their standard
deviation: fine-tuning differs from seed to seed by more than most settings change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_cli.config.tools import CompareSettings
from bert_cli.errors import DataError
from bert_cli.files import is_stdout, output_json
from bert_cli.terminal import print_table
from bert_cli.train.folder import METRICS
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

Figure = tuple[float, float | None]


@dataclass(frozen=True)
class Side:
    """One of the two: a run, or the seeds of one."""

    name: str
    runs: Sequence[Run]

    @property
    def values(self) -> dict[str, Any]:
        """Its settings by dotted names; of one that its seeds do not share a list."""
        return {**self.runs[0].flat_settings, **differing_settings(self.runs)}


def run(settings: CompareSettings) -> None:
    """Print what differs in settings and results, or write it as JSON.

    Raises DataError for what is no run and for runs that have no step yet.
    """
    runs = [_open(settings.first, "first"), _open(settings.second, "second")]
    everything = [one for side in runs for one in side]
    names = _names(settings, runs)
    sides = [Side(name, own) for name, own in zip(names, runs, strict=True)]
    window = window_for(everything, settings.smoothing)
    differing = _differing(sides)
    results = [spread([summary_of(one, window) for one in side.runs]) for side in sides]
    figures = list(dict.fromkeys(name for result in results for name in result))
    if settings.json_file is not None:
        output_json(settings.json_file, _as_json(sides, differing, results, figures, window))
    if not is_stdout(settings.json_file):
        _show(sides, differing, results, figures, window)


def _open(folder: Path, where: str) -> list[Run]:
    found = open_runs([folder], where)
    below = [one for one in found if one.folder != folder]
    if any(one.folder.parent != folder or not one.folder.name.startswith("seed_") for one in below):
        raise DataError(
            f"{where} ({folder}): holds {len(below)} runs; give one of them, as {below[0].folder}"
        )
    for one in found:
        if not one.steps:
            raise DataError(
                f"{where} ({one.folder}): has no step in {METRICS} yet; wait for the first, or give another run"
            )
    return found


def _names(settings: CompareSettings, runs: Sequence[Sequence[Run]]) -> list[str]:
    """What tells the two apart. Raises DataError where they are one."""
    folders = [settings.first, settings.second]
    if folders[0].resolve() == folders[1].resolve():
        raise DataError(f"second ({folders[1]}): is the first one again; give another run")
    told = names_of([Run(folder) for folder in folders])
    return [
        f"{name} ({len(own)} seeds)" if len(own) > 1 else name
        for name, own in zip(told, runs, strict=True)
    ]


def _differing(sides: Sequence[Side]) -> dict[str, list[Any]]:
    """Dotted name of each setting that differs -> its value on each side."""
    values = [side.values for side in sides]
    names = dict.fromkeys([*values[0], *values[1]])
    return {
        name: [own.get(name, ABSENT) for own in values]
        for name in names
        if name.partition(".")[0] not in NAMES_ONLY
        and values[0].get(name, ABSENT) != values[1].get(name, ABSENT)
    }


def _as_json(
    sides: Sequence[Side],
    differing: Mapping[str, Sequence[Any]],
    results: Sequence[Mapping[str, Figure]],
    figures: Sequence[str],
    window: int,
) -> dict[str, Any]:
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
        "settings": {name: list(values) for name, values in differing.items()},
        "results": {
            name: [
                {"mean": own[name][0], "standard_deviation": own[name][1]} if name in own else None
                for own in results
            ]
            for name in figures
        },
    }


def _show(
    sides: Sequence[Side],
    differing: Mapping[str, Sequence[Any]],
    results: Sequence[Mapping[str, Figure]],
    figures: Sequence[str],
    window: int,
) -> None:
    names = [side.name for side in sides]
    kinds = [side.runs[0].kind for side in sides]
    states = [", ".join(dict.fromkeys(one.state for one in side.runs)) for side in sides]
    if differing:
        rows = [(name, *map(value_in_words, values)) for name, values in differing.items()]
        print_table(("settings", *names), rows)
    else:
        print("settings: the same")
    print()
    rows = [("what", *kinds), ("state", *states)] if kinds[0] != kinds[1] else [("state", *states)]
    print_table(("results", *names, "difference"), [*_padded(rows), *_results(results, figures)])
    print(f"\nlosses, accuracies and gradient norms are {window_in_words(window)}")


def _padded(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [(*row, "") for row in rows]


def _results(
    results: Sequence[Mapping[str, Figure]], figures: Sequence[str]
) -> list[tuple[str, ...]]:
    """A row for each figure: both sides, and by how much the second is more."""
    rows = []
    for name in figures:
        own = [result.get(name) for result in results]
        shown = [_with_deviation(name, figure) for figure in own]
        difference = ""
        if own[0] is not None and own[1] is not None:
            by = own[1][0] - own[0][0]
            difference = ("+" if by > 0 else "-" if by < 0 else "") + in_words(name, abs(by))
        rows.append((label_of(name), *shown, difference))
    return rows


def _with_deviation(name: str, figure: Figure | None) -> str:
    if figure is None:
        return "-"
    mean, deviation = figure
    return in_words(name, mean) + (f" +- {in_words(name, deviation)}" if deviation else "")
