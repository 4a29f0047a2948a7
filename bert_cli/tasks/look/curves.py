"""Pictures of runs: what is drawn over the steps, and how.

A picture is panels one below the other over the same steps; a run has its colour in all of them. Each
step is drawn faintly, the mean over a window of steps boldly, and the picture says how long the window
is. Held-out figures are points on a dashed line; a step whose figure was not finite is a cross below.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_cli.train.history import (
    ACCURACY,
    HELD_OUT,
    LOSS,
    Array,
    Run,
    held_out_names,
    metric_names,
    series,
    smoothed,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart also by those who see no red and green (Okabe and Ito 2008), on white and on dark.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C8C8C")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))
INKS = {"light": ("#ffffff", "#1f2328", "#d8dce1"), "dark": ("#14171c", "#dfe4ea", "#363c45")}
"""Paper, ink and lines of the grid."""
WIDTH, PANEL_HEIGHT, DOTS = 9.0, 2.7, 120
LETTERS_OF_A_LEGEND = 105
BOLD = 1.8
TURN = 5
"""Length of a dash where curves that are the same take turns."""
WORDS = {"mlm": "masked-LM", "nsp": "next-sentence"}
DECADES = 2.0
"""A panel whose figures span more of them than this has a logarithmic scale."""


@dataclass(frozen=True)
class Panel:
    """One figure of several runs over their steps."""

    label: str
    """What its axis says, with the unit."""
    figure: str
    """The figure's name in metrics.jsonl; empty where there is only a held-out one."""
    held_out: str = ""
    factor: float = 1.0
    is_smoothed: bool = True
    from_zero: bool = False
    may_be_logarithmic: bool = False


@dataclass(frozen=True)
class Picture:
    """Panels over the same steps."""

    name: str
    title: str
    panels: list[Panel] = field(default_factory=list)


def pictures_of(runs: Sequence[Run]) -> list[Picture]:
    """What there is to draw of some runs; a picture without any figure is left out."""
    held_out = held_out_names(runs)
    there = set(metric_names(runs))
    loss = [Panel(_label(n), n, _if_in(held_out, n)) for n in metric_names(runs, LOSS)]
    right = [
        Panel(f"{_label(n)} (%)", n, _if_in(held_out, n), 100.0)
        for n in metric_names(runs, ACCURACY)
    ]
    rate = [Panel("learning rate", "learning_rate", is_smoothed=False)]
    speed = [
        Panel(f"{what} / s", f"{what}_per_second", from_zero=True)
        for what in ("tokens", "examples")
    ]
    gradient = [Panel("norm of the gradient", "gradient_norm", may_be_logarithmic=True)]
    scored = [
        Panel(f"held-out {_label(name.removeprefix(HELD_OUT))}", "", name) for name in held_out
    ]
    found = [
        Picture("loss", "Loss", loss),
        Picture("accuracy", "Accuracy", right),
        Picture("held_out", "Held-out figures", scored),
        Picture("learning_rate", "Learning rate", [p for p in rate if p.figure in there]),
        Picture("throughput", "Throughput", [p for p in speed if p.figure in there]),
        Picture("gradient_norm", "Gradient", [p for p in gradient if p.figure in there]),
    ]
    return [picture for picture in found if picture.panels]


def draw(
    picture: Picture, runs: Sequence[Run], names: Sequence[str], window: int, ink: str = "light"
) -> bytes:
    """Return a picture as PNG, in `light` or `dark`."""
    from matplotlib.figure import Figure

    paper, pen, grid = INKS[ink]
    columns = max(1, min(len(names), LETTERS_OF_A_LEGEND // (max(map(len, names)) + 7)))
    rows = math.ceil(len(names) / columns) + 1
    height = 0.9 + PANEL_HEIGHT * len(picture.panels) + 0.22 * rows
    figure = Figure(figsize=(WIDTH, height), dpi=DOTS, layout="constrained", facecolor=paper)
    axes = figure.subplots(len(picture.panels), 1, sharex=True, squeeze=False)[:, 0]
    for panel, place in zip(picture.panels, axes, strict=True):
        _style(place, paper, pen, grid)
        place.set_ylabel(panel.label, color=pen)
        for number, run in enumerate(runs):
            _draw_run(place, panel, run, window, look(number)[0], _dashes(panel, runs, number))
        _scale(place, panel, runs)
    axes[-1].set_xlabel("step", color=pen)
    axes[-1].set_xlim(left=0)
    figure.suptitle(picture.title, color=pen, x=0.01, ha="left", fontweight="bold")
    figure.align_ylabels(axes)
    told = [
        name if run.steps else f"{name} (no step yet)"
        for run, name in zip(runs, names, strict=True)
    ]
    _legend(figure, told, columns, pen, _note(picture, runs, window))
    out = io.BytesIO()
    figure.savefig(out, format="png", facecolor=paper)
    return out.getvalue()


def look(number: int) -> tuple[str, Any]:
    """Colour and dashes of a run: no two of 28 have both the same."""
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def _dashes(panel: Panel, runs: Sequence[Run], number: int) -> Any:
    """The dashes of a run's line; one that is the same as an earlier one leaves gaps for it."""
    if panel.is_smoothed:
        return look(number)[1]
    own, alike = series(runs[number], panel.figure), []
    for other, run in enumerate(runs):
        if other == number or _are_same(own, series(run, panel.figure)):
            alike.append(other)
    if alike[0] == number:
        return look(number)[1]
    return (TURN * alike.index(number), (TURN, TURN * (len(alike) - 1)))


def _are_same(one: tuple[Array, Array], other: tuple[Array, Array]) -> bool:
    """Whether two curves agree on the steps that both have, as far as a picture shows it."""
    both, here, there = np.intersect1d(one[0], other[0], return_indices=True)
    # A single step in common says nothing.
    return len(both) > 1 and np.allclose(one[1][here], other[1][there], rtol=1e-3, atol=0.0)


def _draw_run(place: "Axes", panel: Panel, run: Run, window: int, colour: str, dashes: Any) -> None:
    if panel.figure:
        steps, values = series(run, panel.figure)
        values = panel.factor * values
        whole = np.isfinite(values)
        bold = smoothed(values, window) if panel.is_smoothed else values
        if panel.is_smoothed and window > 1:
            place.plot(steps, values, color=colour, linewidth=0.7, alpha=0.22, zorder=2)
        # A single point makes no line.
        marker = "o" if whole.sum() == 1 else None
        place.plot(
            steps, bold, color=colour, linestyle=dashes, linewidth=BOLD, zorder=3, marker=marker
        )
        _crosses(place, steps[~whole], colour)
    if panel.held_out:
        steps, values = series(run, panel.held_out)
        place.plot(
            steps,
            panel.factor * values,
            color=colour,
            linestyle=(0, (2, 2)),
            linewidth=1.0,
            marker="o",
            markersize=5,
            markerfacecolor=place.get_facecolor(),
            zorder=4,
        )
        _crosses(place, steps[~np.isfinite(values)], colour)


def _crosses(place: "Axes", steps: Array, colour: str) -> None:
    """A cross at the foot of the panel for each step whose figure was not finite."""
    if len(steps):
        foot = place.get_xaxis_transform()
        heights = np.full(len(steps), 0.03)
        place.plot(steps, heights, "x", color=colour, transform=foot, zorder=5, clip_on=False)


def _scale(place: "Axes", panel: Panel, runs: Sequence[Run]) -> None:
    values = np.concatenate([series(run, panel.figure or panel.held_out)[1] for run in runs])
    values = values[np.isfinite(values)]
    positive = values[values > 0]
    if (
        panel.may_be_logarithmic
        and len(positive) == len(values) > 0
        and positive.max() > positive.min() * 10**DECADES
    ):
        place.set_yscale("log")
    elif panel.from_zero:
        place.set_ylim(bottom=0.0)
        place.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    if len(values) == 0:
        ink = place.yaxis.label.get_color()
        place.text(0.5, 0.5, "no finite figure", transform=place.transAxes, ha="center", color=ink)


def _style(place: "Axes", paper: str, pen: str, grid: str) -> None:
    from matplotlib.ticker import MaxNLocator

    place.set_facecolor(paper)
    place.grid(color=grid, linewidth=0.6)
    place.set_axisbelow(True)
    place.tick_params(colors=pen, labelsize=9)
    place.xaxis.set_major_locator(MaxNLocator(integer=True))
    place.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for side, spine in place.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(grid)
    place.ticklabel_format(axis="y", style="sci", scilimits=(-3, 6), useMathText=True)
    place.yaxis.get_offset_text().set_color(pen)


def _legend(figure: "Figure", names: Sequence[str], columns: int, pen: str, note: str) -> None:
    """The runs by colour below the picture, and above them what the kinds of lines mean."""
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], color=look(n)[0], linestyle=look(n)[1], linewidth=BOLD)
        for n in range(len(names))
    ]
    figure.legend(
        lines, names, loc="outside lower left", ncols=columns, frameon=False, labelcolor=pen,
        fontsize=9, title=note, alignment="left", title_fontsize=8.5,
    ).get_title().set_color(pen)  # fmt: skip


def _note(picture: Picture, runs: Sequence[Run], window: int) -> str:
    """What the kinds of lines in a picture mean."""
    told = []
    if any(panel.figure and panel.is_smoothed for panel in picture.panels):
        told.append(
            f"bold: mean of the last {window:,} steps, faint: each step"
            if window > 1
            else "each step, not smoothed"
        )
    names = [name for panel in picture.panels for name in (panel.figure, panel.held_out) if name]
    if any(panel.held_out for panel in picture.panels):
        told.append("circles: held out")
    if any(not np.isfinite(series(run, name)[1]).all() for run in runs for name in names):
        told.append("crosses: not finite")
    return "; ".join(told)


def _label(name: str) -> str:
    """`mlm_loss` as people say it, with its unit."""
    first, _, rest = name.partition("_")
    told = f"{WORDS[first]} {rest}" if first in WORDS else name
    unit = " (nats)" if told.endswith(LOSS) and first in WORDS else ""
    return told.replace("_", " ") + unit


def _if_in(held_out: Sequence[str], name: str) -> str:
    return HELD_OUT + name if HELD_OUT + name in held_out else ""
