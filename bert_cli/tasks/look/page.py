"""One HTML page of some runs: their pictures, their last figures, the settings that differ.

The page is one file: pictures are inside it, there is no script, and nothing is fetched. It is light or
dark as the reader's system is, and so are its pictures. Everything that comes from a run is escaped.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape

from bert_cli.tasks.look.curves import Picture, look
from bert_cli.train.history import (
    Run,
    differing_settings,
    in_words,
    label_of,
    summary_of,
    value_in_words,
    window_in_words,
)

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --faint: #59636e; --line: #d8dce1; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171c; --ink: #dfe4ea; --faint: #98a2ae; --line: #363c45; }
}
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
       max-width: 80rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p.note, figcaption, .faint { color: var(--faint); }
figure { margin: 1.2rem 0; } img { max-width: 100%; height: auto; display: block; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .25rem 1.2rem .25rem 0; min-width: 7rem;
         max-width: 24rem; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
tbody th { font-weight: normal; color: var(--faint); }
th:first-child { position: sticky; left: 0; background: var(--paper); min-width: 11rem; }
.swatch { display: inline-block; width: 1.1em; height: .35em; margin-right: .45em;
          vertical-align: middle; border-radius: 2px; }
code, pre { font: 13px/1.45 ui-monospace, monospace; } pre { overflow-x: auto; }
"""


def page_of(
    runs: Sequence[Run],
    names: Sequence[str],
    pictures: Sequence[tuple[Picture, bytes, bytes]],
    window: int,
) -> str:
    """The page as text; each picture comes in light and in dark."""
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    figures = [_shown(picture, *drawn) for picture, *drawn in pictures]
    body = [
        f"<h1>bert: {escape(title)}</h1>",
        f'<p class="note">Made {escape(made)} by <code>bert plot</code>.</p>',
        "<h2>Figures</h2>",
        _table(names, _figures(runs, window)),
        f'<p class="note">{escape(_note(window))}</p>',
        *_settings(runs, names),
        "<h2>Pictures</h2>",
        *(figures or ['<p class="note">There is no step to draw yet.</p>']),
        *_all_settings(runs, names),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>bert: {escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _note(window: int) -> str:
    smoothed = f"Losses, accuracies and gradient norms are {window_in_words(window)}"
    return f"{smoothed}; held-out figures and scores are as measured."


def _figures(runs: Sequence[Run], window: int) -> dict[str, list[str]]:
    told = [summary_of(run, window) for run in runs]
    rows: dict[str, list[str]] = {
        "folder": [str(run.folder.resolve()) for run in runs],
        "what": [run.kind for run in runs],
        "state": [run.state if run.steps else f"{run.state}, no step yet" for run in runs],
    }
    for name in dict.fromkeys(name for one in told for name in one):
        rows[label_of(name)] = [in_words(name, one.get(name)) for one in told]
    return rows


def _settings(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    if len(runs) == 1:
        return []
    differing = differing_settings(runs)
    head = "<h2>Settings that differ</h2>"
    if not differing:
        return [head, '<p class="note">None: the runs have the same settings.</p>']
    rows = {name: [value_in_words(value) for value in values] for name, values in differing.items()}
    return [head, _table(names, rows)]


def _all_settings(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    found = ["<h2>All settings</h2>"]
    for run, name in zip(runs, names, strict=True):
        text = json.dumps(run.settings, indent=1, ensure_ascii=False)
        found.append(
            f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>"
        )
    return found


def _table(names: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """A table with a column for each run, under its name and colour."""
    heads = "".join(
        f'<th><span class="swatch" style="background:{look(number)[0]}"></span>{_text(name)}</th>'
        for number, name in enumerate(names)
    )
    lines = [
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>"
        for name, cells in rows.items()
    ]
    return (
        f'<div class="wide"><table>\n<thead><tr><th></th>{heads}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody>\n</table></div>"
    )


def _text(text: str) -> str:
    """A cell's text; a path may go on in the next line behind each of its parts."""
    return escape(text).replace("/", "/<wbr>").replace("_", "_<wbr>")


def _shown(picture: Picture, light: bytes, dark: bytes) -> str:
    """A picture inside the page, the dark one for readers whose system is dark."""
    return (
        '<figure><picture>\n<source media="(prefers-color-scheme: dark)" '
        f'srcset="{_inside(dark)}">\n<img src="{_inside(light)}" alt="{escape(_spoken(picture))}">\n'
        "</picture></figure>"
    )


def _spoken(picture: Picture) -> str:
    labels = ", ".join(panel.label for panel in picture.panels)
    return f"{picture.title} over the steps: {labels}"


def _inside(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
