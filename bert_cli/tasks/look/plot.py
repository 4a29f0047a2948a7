"""`bert plot`: pictures of one run or several over one another, and a page that holds them.

Each picture is a PNG file of its own; the page has them inside, with the figures that the runs have come
to and the settings in which they differ.
"""

from pathlib import Path

from bert_cli.config.tools import PlotSettings
from bert_cli.errors import DataError
from bert_cli.files import write_atomically
from bert_cli.tasks.look.curves import draw, pictures_of
from bert_cli.tasks.look.page import page_of
from bert_cli.train.folder import METRICS
from bert_cli.train.history import names_of, open_runs, window_for

PAGE = "index.html"


def run(settings: PlotSettings) -> None:
    """Draw the runs and write the pictures and the page.

    Raises DataError for what is no run, for runs that have no step yet, and for a folder that cannot be
    written.
    """
    runs = open_runs(settings.runs, "runs")
    names = names_of(runs)
    without = [str(one.folder) for one in runs if not one.steps]
    if len(without) == len(runs):
        raise DataError(
            f"runs ({', '.join(without)}): have no step in {METRICS} yet; wait for the first, or give other runs"
        )
    window = window_for(runs, settings.smoothing)
    drawn = []
    for picture in pictures_of(runs):
        light, dark = (draw(picture, runs, names, window, ink) for ink in ("light", "dark"))
        _write(settings.output / f"{picture.name}.png", light)
        drawn.append((picture, light, dark))
    page = settings.output / PAGE
    _write(page, page_of(runs, names, drawn, window).encode("utf-8"))
    for folder in without:
        print(f"{folder}: has no step yet; it stands in the tables only")
    told = ", ".join(f"{picture.name}.png" for picture, _, _ in drawn)
    print(f"{page}: {len(runs)} run{'s' * (len(runs) > 1)}, {told}; smoothed over {window:,} steps")


def _write(path: Path, content: bytes) -> None:
    """Write beside and rename, so that a page that is being read stays whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise DataError(
            f"output ({path}): cannot be written ({error.strerror}); choose another folder"
        ) from error
