"""`bert plot`: the pictures, the page, and the messages."""

import html
import re

import numpy as np
import pytest
from support.metrics import write_metrics

from bert_cli.tasks.look.plot import Panel, draw, page_of, pictures_of, style_of
from bert_cli.train.history import Run

RATE = Panel("learning rate", "learning_rate", smooth=False)


def lines_of(svg: str, number: int) -> int:
    return svg.count(f"stroke: {style_of(number)[0].lower()}; stroke-width")


def test_each_run_has_its_colour_and_equal_learning_rates_are_both_visible(tmp_path, write_run):
    runs = [Run(write_run(tmp_path / name, 5)) for name in ("a", "b")]
    for title, panels in pictures_of(runs).items():
        svg = draw(title, panels, runs, ["a", "b"], 1)
        # One more in the legend.
        assert all(lines_of(svg, number) == len(panels) + 1 for number in (0, 1))
    widths = re.findall(r"stroke-width: ([\d.]+)", draw("Learning rate", [RATE], runs, "ab", 1))
    assert widths.index("3.8") < widths.index("1.8")  # the wider one is drawn first
    assert len({style_of(number) for number in range(28)}) == 28
    # The picture is as much taller as its legend has lines, so that they cover no curve; 72 points are an inch.
    inches = [
        float(re.findall(r'height="([\d.]+)pt"', draw("Loss", [RATE] * panels, runs, names, 1))[0])
        / 72
        for panels, names in ((1, "ab"), (2, "ab"), (1, ["a" * 60, "b" * 60]))
    ]
    assert inches[1] - inches[0] == pytest.approx(2.7, abs=0.01)
    assert inches[2] - inches[0] == pytest.approx(0.22, abs=0.01)
    assert inches[0] == pytest.approx(0.9 + 2.7 + 2 * 0.22, abs=0.01)


def test_a_line_has_each_step_another_their_means_and_circles_the_held_out_values(tmp_path):
    values, means, held_out = [0.4, 0.3, 0.1, 0.1], [0.4, 0.35, 0.2, 0.1], {1: 0.3, 3: 0.05}
    lines = [(n, {"accuracy": value}) for n, value in enumerate(values, 1)]
    for n, value in held_out.items():
        lines[n - 1][1]["validation_accuracy"] = value
    runs = [write_metrics(tmp_path / "run", lines)]
    svg = draw("Accuracy", pictures_of(runs)["Accuracy"], runs, ["run"], 2)
    colour = style_of(0)[0].lower()
    drawn = re.findall(rf'<path d="([^"]+)" clip-path[^>]*stroke: {colour}[^>]*>', svg)
    thin, bold, dashed = (np.array(re.findall(r"[ML] (\S+) (\S+)", d), float).T for d in drawn)
    circles = re.findall(rf'<use [^>]*x="(\S+)" y="(\S+)"[^>]*stroke: {colour}', svg)
    np.testing.assert_allclose(np.array(circles, float).T, dashed)
    # The thin line shows the scale of the axes, by which the others are read; it falls where the values fall.
    x, y = np.polyfit([1, 2, 3, 4], thin[0], 1), np.polyfit(values, thin[1], 1)
    assert x[0] > 0 > y[0]
    for (across, up), steps, heights in (
        (thin, [1, 2, 3, 4], values), (bold, [1, 2, 3, 4], means), (dashed, [*held_out], [*held_out.values()])
    ):  # fmt: skip
        np.testing.assert_allclose(across, np.polyval(x, steps), atol=0.01)
        np.testing.assert_allclose(up, np.polyval(y, heights), atol=0.01)
    assert ">40</text>" in svg  # percent


@pytest.mark.filterwarnings("error")
def test_any_metrics_are_drawn_without_a_warning_and_a_cross_where_they_are_not_finite(tmp_path):
    empty = write_metrics(tmp_path / "empty", [])
    gap = [(1, {"loss": 2.0, "gradient_norm": 1e-9}), (2, {"loss": None, "gradient_norm": 1e9})]
    crosses = {}
    for name, lines in {
        "one line": [(1, {"loss": 2.0, "gradient_norm": 1.0})],
        "nothing finite": [(1, {"loss": None, "gradient_norm": None})],
        "a gap": [*gap, (3, {"loss": 2.0})],
        "constant": [(n, {"loss": 2.0, "gradient_norm": 0.0}) for n in range(1, 99)],
    }.items():
        runs = [write_metrics(tmp_path / name, lines), empty]
        for title, panels in pictures_of(runs).items():
            svg = draw(title, panels, runs, ["run", "empty"], 5)
            if title == "Loss":
                if name == "nothing finite":
                    assert re.search("text-anchor: middle[^<]*no finite value</text>", svg)
                crosses[name] = len(re.findall(r'<use [^>]*style="fill: #0072b2', svg))
    assert crosses["a gap"] == crosses["nothing finite"] == 1 and crosses["constant"] == 0


def rows_of(page: str) -> dict[str, list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    cells = [re.findall(r"<t[dh]>(.*?)</t[dh]>", row, re.DOTALL) for row in rows]
    return {row[0]: [html.unescape(cell) for cell in row[1:]] for row in cells}


def test_a_page_has_its_pictures_and_tables_and_fetches_nothing(tmp_path, write_run):
    bad = "<script>alert(1)</script>&\"'"
    runs = [
        Run(write_run(tmp_path / "a", 10, saved=(10,), note=bad)),
        Run(write_run(tmp_path / "b", 8, seed=2, rate=None)),
        Run(write_run(tmp_path / "c", 0)),
    ]
    names = ["a", bad, "c"]
    pictures = {t: draw(t, p, runs, names, 5) for t, p in pictures_of(runs).items()}
    page = page_of(runs, names, pictures, 5)
    assert not re.search(r"<(script|link|iframe|img)", page)
    assert all(path[0] == "#" for path in re.findall(r'(?:src|href|url)[=(]"?(.*?)[")]', page))
    assert page.count("<svg") == len(pictures) > 3
    assert all(style_of(number)[0] in page.partition("<svg")[0] for number in range(3))
    rows = rows_of(page)
    assert rows["note"] == [bad, "not set", "not set"]
    assert "Settings that differ" not in page_of(runs[:1], ["a"], {}, 1)


def test_a_page_starts_with_the_end_of_the_run_and_follows_the_readers_scheme(tmp_path, write_run):
    runs = [Run(write_run(tmp_path / "a", 10, saved=(10,)))]
    svg = draw("Loss", pictures_of(runs)["Loss"], runs, ["a"], 1)
    page = page_of(runs, ["a"], {"Loss": svg}, 1)
    headings = [page.index(f"<h2>{name}<") for name in ("Curves", "All settings")]
    assert headings == sorted(headings)
    for text in (page, svg):
        assert "@media (prefers-color-scheme: dark)" in text
    # Text and axes have no colour of their own, text is no drawing of letters.
    assert "#000000" not in svg and "currentColor" in svg
    assert re.search("<text [^>]*>masked-LM loss", svg)
    assert draw("Loss", pictures_of(runs)["Loss"], runs, ["a"], 1) == svg
