"""`bert plot`: draw the metrics of some runs over their steps, and write an HTML page with the pictures.

A thin line shows each step, a bold line the mean of the last steps, circles on a dashed line held-out metrics, and a
cross a step whose metric was not finite. The page is one file without scripts; its pictures are SVG with text in
the colour of the page's text, so that both follow the reader's light or dark scheme.
"""

import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from bert_cli.config.tools import PlotSettings
from bert_cli.errors import DataError, printable
from bert_cli.files import write_output
from bert_cli.processes import print_line
from bert_cli.tasks.look import summary
from bert_cli.text import count
from bert_cli.train import history
from bert_cli.train.checkpoint import METRICS
from bert_cli.train.history import Run
from bert_cli.train.metrics import HELD_OUT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = "index.html"
TEMPLATE = Path(__file__).with_name("page.html")
# Distinguishable also with red-green colour blindness (Okabe and Ito 2008).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C8C8C")
Line = Literal["-", "--", ":", "-."]
LINES: tuple[Line, ...] = ("-", "--", ":", "-.")
WIDTH = 9.0
PANEL_HEIGHT = 2.7
LEGEND_LETTERS = 105
FOREGROUND = "#000000"  # as matplotlib writes the colour of text and axes
# Light and dark colours, also for a picture outside the page.
SCHEMES = (
    "<style>svg { color: #1f2328; fill: currentColor; color-scheme: light dark }"
    "@media (prefers-color-scheme: dark) { svg { color: #e6edf3 } }</style>"
)
# Ratio of the largest to the smallest gradient norm above which the scale is logarithmic.
LOG_RATIO = 100.0


class Panel(NamedTuple):
    """A metric of several runs over their steps, and its held-out metric if there is one."""

    label: str
    metric: str  # as metrics.jsonl names it
    factor: float = 1.0
    smooth: bool = True


def run(settings: PlotSettings) -> None:
    """Write the pictures and the page. Raises DataError for runs without a step, and other folders."""
    runs = history.open_runs(settings.runs, "runs")
    names = summary.names_of(runs)
    empty = [str(entry.folder) for entry in runs if not entry.steps]
    if len(empty) == len(runs):
        remedy = "wait for the first one, or name other runs"
        raise DataError(f"runs ({', '.join(empty)})", f"have no step in {METRICS} yet", remedy)
    window = summary.window_for(runs)
    panels = pictures_of(runs).items()
    pictures = {title: draw(title, rows, runs, names, window) for title, rows in panels}
    pages = {f"{re.sub('[ -]', '_', title.lower())}.svg": svg for title, svg in pictures.items()}
    files = ", ".join(pages)
    pages[PAGE] = page_of(runs, names, pictures, window)
    for name, content in pages.items():
        write_output(settings.output / name, content, "output")
    for folder in empty:
        print_line(f"{printable(folder)}: has no step yet; it is only in the tables")
    page = printable(str(settings.output / PAGE))
    smoothing = summary.window_in_words(window)
    print_line(f"{page}: {count(len(runs), 'run')}, {files}; {smoothing}")


def pictures_of(runs: Sequence[Run]) -> dict[str, list[Panel]]:
    """Return title -> panels of each picture for which the runs have a metric."""
    losses = summary.metric_names(runs, summary.LOSS)
    accuracies = summary.metric_names(runs, summary.ACCURACY)
    held_out = summary.metric_names(runs, held_out=True)
    pictures = {
        "Loss": [Panel(f"{_label(name)} (nats)", name) for name in losses],
        "Accuracy": [Panel(f"{_label(name)} (%)", name, factor=100.0) for name in accuracies],
        "Held out": [Panel(_label(name), name) for name in held_out],
        "Learning rate": [Panel("learning rate", "learning_rate", smooth=False)],
        "Throughput": [Panel(f"{n} / s", f"{n}_per_second") for n in ("tokens", "examples")],
        "Gradient norm": [Panel("gradient norm", "gradient_norm")],
    }
    known = {*summary.metric_names(runs), *held_out}
    rows = {title: [p for p in panels if p.metric in known] for title, panels in pictures.items()}
    return {title: panels for title, panels in rows.items() if panels}


def _plain(text: str) -> str:
    """Return text that Matplotlib draws as it is: no formula between dollars, no control character."""
    return printable(text).replace("$", r"\$")


def _label(name: str) -> str:
    words = {HELD_OUT: "held-out ", "mlm_": "masked-LM ", "nsp_": "next-sentence ", "_": " "}
    for part, text in words.items():
        name = name.replace(part, text)
    return name


def style_of(number: int) -> tuple[str, Line]:
    """Return the colour and line style of a run; the styles of 28 runs differ."""
    return COLOURS[number % len(COLOURS)], LINES[number // len(COLOURS) % len(LINES)]


def draw(
    title: str, panels: Sequence[Panel], runs: Sequence[Run], names: Sequence[str], window: int
) -> str:
    """Return a picture as SVG: its panels one below the other, and a legend."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    names = list(map(_plain, names))
    columns = max(1, min(len(names), LEGEND_LETTERS // (max(map(len, names)) + 7)))
    # Inches: the title and the axis, the panels, and 0.22 for each line of the legend.
    height = 0.9 + PANEL_HEIGHT * len(panels) + 0.22 * (math.ceil(len(names) / columns) + 1)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for panel, axis in zip(panels, axes, strict=True):
        axis.set_ylabel(_plain(panel.label))
        axis.grid(color=FOREGROUND, alpha=0.15, linewidth=0.6)
        axis.set_facecolor("none")
        axis.spines[["top", "right"]].set_visible(False)
        for number, values in enumerate(runs):
            # Learning rates are often equal: earlier lines are wider and stay visible.
            width = 1.8 if panel.smooth else 1.8 + min(6.0, 2.0 * (len(runs) - 1 - number))
            _draw_run(axis, panel, values, window if panel.smooth else 1, style_of(number), width)
        _set_scale(axis, panel, runs)
    axes[-1].set_xlabel("step")
    axes[-1].set_xlim(left=0)
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[-1].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    styles = [style_of(number) for number in range(len(runs))]
    lines = "each step, not smoothed"
    if window > 1:
        lines = f"bold: mean of the last {window:,} steps; thin: each step"
    figure.legend(
        [Line2D([], [], color=colour, linestyle=dashes) for colour, dashes in styles],
        [n if r.steps else f"{n} (no step yet)" for n, r in zip(names, runs, strict=True)],
        loc="outside lower left",
        ncols=columns,
        frameon=False,
        fontsize=9,
        title=f"{lines}; circles: held out; crosses: not finite",
        alignment="left",
        title_fontsize=8.5,
    )
    out = io.StringIO()
    # Text stays text. The salt makes equal pictures equal files, and the ids of two pictures in a page different.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].replace(FOREGROUND, "currentColor")
    return svg.replace("<defs>", f"<title>{title} over the steps</title>{SCHEMES}<defs>", 1)


def _draw_run(
    axes: "Axes", panel: Panel, run: Run, window: int, style: tuple[str, Line], width: float
) -> None:
    colour, dashes = style
    for name in (panel.metric, HELD_OUT + panel.metric):
        steps, values = summary.series(run, name)
        if len(steps) == 0:
            continue
        values = panel.factor * values
        is_finite = np.isfinite(values)
        if name.startswith(HELD_OUT):
            circles: dict[str, Any] = {"linewidth": 1, "markersize": 5, "mfc": "none", "zorder": 4}
            axes.plot(steps, values, "--o", color=colour, **circles)
        else:
            if window > 1:
                axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.22)
                values = summary.smoothed(values, window)
            # A single point has no line.
            marker = "o" if is_finite.sum() == 1 else None
            (line,) = axes.plot(steps, values, color=colour, linestyle=dashes, marker=marker)
            line.set(linewidth=width, zorder=3)
        crosses = steps[~is_finite]
        if len(crosses):
            heights = np.full(len(crosses), 0.03)
            bottom = axes.get_xaxis_transform()
            axes.plot(
                crosses, heights, "x", color=colour, transform=bottom, zorder=5, clip_on=False
            )


def _set_scale(axes: "Axes", panel: Panel, runs: Sequence[Run]) -> None:
    values = np.concatenate([summary.series(entry, panel.metric)[1] for entry in runs])
    values = values[np.isfinite(values)]
    if len(values) == 0:
        axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center")
    elif panel.metric == "gradient_norm" and 0 < LOG_RATIO * values.min() < values.max():
        axes.set_yscale("log")
    elif panel.metric.endswith("per_second"):
        axes.set_ylim(bottom=0.0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")


def page_of(
    runs: Sequence[Run], names: Sequence[str], pictures: Mapping[str, str], window: int
) -> str:
    """Return the HTML page: metrics, pictures, differing settings, all settings of each run."""
    columns = [summary.summary_of(entry, window) for entry in runs]
    metrics = {
        "folder": [str(entry.folder.resolve()) for entry in runs],
        "command": [entry.kind for entry in runs],
        "state": [entry.state if entry.steps else f"{entry.state}, no step yet" for entry in runs],
    }
    for name in dict.fromkeys(chain.from_iterable(columns)):
        metrics[name] = [column.get(name, "") for column in columns]
    differing = summary.differing_settings([entry.flat_settings for entry in runs])
    texts = [json.dumps(entry.settings, indent=1, ensure_ascii=False) for entry in runs]
    return render(
        TEMPLATE,
        title=names[0] if len(runs) == 1 else f"{len(runs)} runs",
        runs=[(name, style_of(number)[0]) for number, name in enumerate(names)],
        metrics=metrics,
        window=summary.window_in_words(window),
        differing={name: map(summary.value_in_words, values) for name, values in differing.items()},
        pictures=pictures.values(),
        settings=zip(names, texts, strict=True),
    )


def render(template: Path, **values: object) -> str:
    """Return an HTML page, or a text of another kind, from its template with values; `made` is the time."""
    from jinja2 import Environment

    is_html = template.suffix == ".html"
    environment = Environment(autoescape=is_html, trim_blocks=True, lstrip_blocks=True)
    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return environment.from_string(template.read_text(encoding="utf-8")).render(values, made=made)
