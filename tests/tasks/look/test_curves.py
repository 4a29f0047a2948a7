"""Pictures of runs: what is drawn, and that whatever a run left can be."""

import io
import json

import numpy as np
import pytest

from bert_cli.tasks.look.curves import Picture, draw, look, pictures_of
from bert_cli.train.history import Run


def a_run(folder, lines) -> Run:
    folder.mkdir(parents=True)
    text = "".join(f"{json.dumps({'step': step, **told})}\n" for step, told in lines)
    (folder / "metrics.jsonl").write_text(text)
    return Run(folder)


def pixels(png: bytes):
    from matplotlib.image import imread

    return imread(io.BytesIO(png))


def drawn_colours(png: bytes) -> set[tuple[int, ...]]:
    return {
        tuple(pixel) for pixel in np.round(255 * pixels(png)[..., :3]).astype(int).reshape(-1, 3)
    }


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def panels(picture: Picture) -> list[tuple[str, str]]:
    return [(panel.figure, panel.held_out) for panel in picture.panels]


def test_a_pre_training_run_has_a_picture_of_each_kind(tmp_path, write_run):
    run = Run(write_run(tmp_path / "run", 5))
    found = {picture.name: picture for picture in pictures_of([run])}
    assert list(found) == ["loss", "accuracy", "learning_rate", "throughput", "gradient_norm"]
    assert [panel.label for panel in found["loss"].panels] == ["masked-LM loss (nats)"]
    assert [panel.label for panel in found["accuracy"].panels] == ["masked-LM accuracy (%)"]
    assert [panel.label for panel in found["throughput"].panels] == ["tokens / s", "examples / s"]


def test_held_out_figures_stand_on_their_own_and_beside_what_they_are_of(tmp_path):
    run = a_run(
        tmp_path / "run",
        [
            (1, {"loss": 1.0, "accuracy": 0.5}),
            (2, {"validation_accuracy": 0.4, "validation_f1": 0.3}),
        ],
    )
    found = {picture.name: picture for picture in pictures_of([run])}
    assert panels(found["loss"]) == [("loss", "")]
    assert panels(found["accuracy"]) == [("accuracy", "validation_accuracy")]
    assert panels(found["held_out"]) == [("", "validation_accuracy"), ("", "validation_f1")]
    assert [panel.label for panel in found["held_out"].panels][1] == "held-out f1"


def test_each_run_is_drawn_in_its_colour_on_light_and_on_dark(tmp_path, write_run):
    runs = [Run(write_run(tmp_path / name, 5)) for name in ("a", "b")]
    (loss, *_) = pictures_of(runs)
    for ink, paper in (("light", "#ffffff"), ("dark", "#14171c")):
        colours = drawn_colours(draw(loss, runs, ["a", "b"], 1, ink))
        assert {rgb(paper), rgb(look(1)[0])} <= colours


def test_curves_that_are_the_same_are_both_to_be_seen(tmp_path, write_run):
    runs = [Run(write_run(tmp_path / name, 5)) for name in ("a", "b")]
    rate = next(picture for picture in pictures_of(runs) if picture.name == "learning_rate")
    png = pixels(draw(rate, runs, ["a", "b"], 1))
    # Above the legend, which has the colours too.
    curves = np.round(255 * png[: int(0.75 * len(png)), :, :3]).astype(int)
    for number in (0, 1):
        assert (curves == rgb(look(number)[0])).all(axis=-1).any()


@pytest.mark.parametrize(
    "lines",
    [
        [(1, {"loss": 2.0, "gradient_norm": 1.0})],
        [(1, {"loss": None, "gradient_norm": None}), (2, {"loss": None, "gradient_norm": None})],
        [(1, {"loss": 2.0, "gradient_norm": 1e-9}), (2, {"loss": None, "gradient_norm": 1e9})],
        [(n, {"loss": 2.0, "gradient_norm": 0.0}) for n in range(1, 99)],
    ],
    ids=["one line", "nothing finite", "a gap and many decades", "all the same"],
)
@pytest.mark.filterwarnings("error")
def test_whatever_a_run_left_is_drawn_without_a_warning(tmp_path, lines):
    runs = [a_run(tmp_path / "run", lines), a_run(tmp_path / "empty", [])]
    for picture in pictures_of(runs):
        assert draw(picture, runs, ["run", "empty"], 5)[:4] == b"\x89PNG"


def test_a_step_that_was_not_finite_is_a_cross(tmp_path):
    whole = a_run(tmp_path / "whole", [(n, {"loss": 1.0}) for n in (1, 2, 3)])
    broken = a_run(
        tmp_path / "broken", [(1, {"loss": 1.0}), (2, {"loss": None}), (3, {"loss": 1.0})]
    )
    (loss,) = pictures_of([broken])

    def coloured(run: Run) -> int:
        png = np.round(255 * pixels(draw(loss, [run], ["run"], 3))[..., :3]).astype(int)
        # The foot of the panel, above the axis.
        foot = png[int(0.6 * len(png)) : int(0.75 * len(png))]
        return int((foot == rgb(look(0)[0])).all(axis=-1).sum())

    assert coloured(whole) == 0 and coloured(broken) > 0


def test_many_runs_with_long_names_have_looks_of_their_own_and_a_taller_picture(
    tmp_path, write_run
):
    runs = [Run(write_run(tmp_path / f"{n}", 3)) for n in range(15)]
    assert len({look(number) for number in range(28)}) == 28
    (loss, *_) = pictures_of(runs)
    few = pixels(draw(loss, runs[:1], ["short"], 1))
    many = pixels(draw(loss, runs, [f"a/long/path/of/a/run/number_{n}" for n in range(15)], 1))
    assert many.shape[0] > few.shape[0] and many.shape[1] == few.shape[1]
