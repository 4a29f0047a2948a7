"""Draw the bar charts of the documentation, docs/pictures/*.svg, from numbers of docs/lab."""

from html import escape
from pathlib import Path
from typing import NamedTuple

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
BAR, GAP, LEFT, WIDTH = 22, 10, 300, 720  # pixels
COLOURS = "text{fill:#333}.own{fill:#3f51b5}.other{fill:#9fa8da}@media(prefers-color-scheme:dark){text{fill:#ddd}}"


class Chart(NamedTuple):
    """A title, the format of the numbers, and a value for each bar; the bars of this tool begin with `bert`."""

    title: str
    form: str
    bars: dict[str, float]


CHARTS = {
    # docs/lab/measured.md#against-the-strongest-peers-without-amx, first row
    "training": Chart(
        "Forward and backward of BERT-base, one core of an AMD EPYC: seconds, less is better",
        ".2f",
        {
            "bert": 3.20,
            "PyTorch, the fastest that we wrote": 3.62,
            "PyTorch, scores of masked positions": 3.72,
            "Hugging Face Transformers": 4.77,
        },
    ),
    # docs/lab/models.md#pairs-that-look-like-questions
    "search": Chart(
        "nDCG@10 of 300 questions in 300 manuals: more is better",
        ".3f",
        {
            "words alone (BM25)": 0.783,
            "MiniLM as published alone": 0.820,
            "bert: the trained model alone": 0.844,
            "words and MiniLM": 0.847,
            "bert: words and the trained model": 0.853,
        },
    ),
}


def draw(chart: Chart) -> str:
    """Return the chart as SVG."""
    scale = (WIDTH - LEFT - 80) / max(chart.bars.values())
    rows = [f'<text x="0" y="16" font-weight="bold">{escape(chart.title)}</text>']
    for number, (label, value) in enumerate(chart.bars.items()):
        top = 32 + number * (BAR + GAP)
        kind, end = "own" if label.startswith("bert") else "other", LEFT + value * scale
        rows += [
            f'<text x="{LEFT - 8}" y="{top + 16}" text-anchor="end">{escape(label)}</text>',
            f'<rect class="{kind}" x="{LEFT}" y="{top}" width="{value * scale:.0f}" height="{BAR}"/>',
            f'<text x="{end + 6:.0f}" y="{top + 16}">{value:{chart.form}}</text>',
        ]
    height = 32 + len(chart.bars) * (BAR + GAP)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
    style = f'font-family="sans-serif" font-size="14"><style>{COLOURS}</style>'
    return "\n".join([f"{head} {style}", *rows, "</svg>\n"])


if __name__ == "__main__":
    for name, chart in CHARTS.items():
        (PICTURES / f"{name}.svg").write_text(draw(chart), encoding="utf-8")
