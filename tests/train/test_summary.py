"""Runs in a few numbers."""

import json
import time

import numpy as np
import pytest

from bert_cli.train.history import Run
from bert_cli.train.summary import (
    differing_settings,
    figure_names,
    held_out_names,
    in_words,
    series,
    smoothed,
    spread,
    summary_of,
    value_in_words,
    window_for,
)

NAN = float("nan")


def a_run(folder, lines, settings=None) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{json.dumps({'step': step, **told})}\n" for step, told in lines)
    (folder / "metrics.jsonl").write_text(text)
    if settings is not None:
        (folder / "settings.json").write_text(json.dumps(settings))
    return Run(folder)


def test_a_mean_is_of_a_value_and_those_before_it():
    found = smoothed(np.array([1.0, 2.0, 3.0, 8.0]), 2)
    assert found.tolist() == [1.0, 1.5, 2.5, 5.5]


def test_what_is_not_finite_is_left_out_of_a_mean():
    found = smoothed(np.array([NAN, 2.0, NAN, 4.0, NAN, NAN]), 2)
    np.testing.assert_array_equal(found, [NAN, 2.0, 2.0, 4.0, 4.0, NAN])


@pytest.mark.parametrize(("steps", "window"), [(1, 1), (79, 1), (80, 2), (400, 10), (12_000, 200)])
def test_a_window_is_a_round_number_of_about_a_fortieth_of_the_longest_run(tmp_path, steps, window):
    runs = [
        a_run(tmp_path / "a", [(n, {}) for n in range(1, steps + 1)]),
        a_run(tmp_path / "b", []),
    ]
    assert window_for(runs, None) == window
    assert window_for(runs, 7) == 7


def test_figures_keep_their_order_and_held_out_ones_are_apart(tmp_path):
    run = a_run(
        tmp_path,
        [(1, {"mlm_loss": 1, "nsp_loss": 1, "loss_scale": 1}), (2, {"validation_mlm_loss": 2})],
    )
    assert figure_names([run], "loss") == ["mlm_loss", "nsp_loss"]
    assert held_out_names([run]) == ["validation_mlm_loss"]
    steps, values = series(run, "validation_mlm_loss")
    assert (steps.tolist(), values.tolist()) == ([2.0], [2.0])


def test_the_best_loss_is_the_lowest_and_the_best_accuracy_the_highest(tmp_path):
    lines = [
        (1, {"loss": 3.0, "accuracy": 0.1, "validation_f1": 0.5}),
        (2, {"loss": 1.0, "accuracy": 0.4, "validation_loss": 2.0}),
        (3, {"loss": 2.0, "accuracy": 0.3, "validation_f1": 0.4, "validation_loss": 2.5}),
    ]
    told = summary_of(a_run(tmp_path, lines), 1)
    assert told["loss, last"] == 2.0 and told["loss, best"] == 1.0
    assert told["loss, step of the best"] == 2
    assert told["accuracy, best"] == 0.4
    assert told["held-out f1, best"] == 0.5 and told["held-out f1, last"] == 0.4
    assert told["held-out loss, best"] == 2.0


def test_speed_is_a_median_and_time_a_sum(tmp_path):
    lines = [
        (n, {"tokens_per_second": s, "seconds_per_step": 2.0})
        for n, s in ((1, 1.0), (2, 9.0), (3, 8.0))
    ]
    told = summary_of(a_run(tmp_path, lines), 1)
    assert told["tokens per second, median"] == 8.0
    assert told["seconds in steps"] == 6.0


def test_steps_that_were_skipped_or_not_finite_are_counted(tmp_path):
    lines = [(1, {"loss": None, "skipped": 1}), (2, {"loss": 2.0, "skipped": 1})]
    told = summary_of(a_run(tmp_path, lines), 1)
    assert told["steps whose loss is not finite"] == 1 and told["steps skipped"] == 1
    assert told["loss, last"] == 2.0


def test_a_summary_of_a_long_run_takes_no_longer_for_each_step(tmp_path):
    run = a_run(tmp_path, [(n, {"loss": 1.0, "seconds_per_step": 1.0}) for n in range(1, 20_001)])
    assert len(run.steps) == 20_000
    began = time.process_time()
    summary_of(run, 10)
    assert time.process_time() - began < 2.0


def test_a_run_without_a_finite_figure_or_a_step_has_a_summary_too(tmp_path):
    told = summary_of(a_run(tmp_path / "a", [(1, {"loss": None})]), 5)
    assert "loss, last" not in told and told["steps"] == 1
    assert summary_of(a_run(tmp_path / "b", []), 5) == {"steps": 0.0}


def test_a_spread_is_of_what_all_have():
    assert spread([{"a": 1.0, "b": 2.0}, {"a": 3.0}]) == {"a": (2.0, pytest.approx(2**0.5))}
    assert spread([{"a": 1.0}]) == {"a": (1.0, None)}


def test_settings_that_differ_are_found_also_where_one_run_has_none(tmp_path):
    first = {"seed": 1, "group": {"a": 1, "b": 2}, "save_ckpt_path": "x", "about": {"what": "x"}}
    second = {"seed": 1, "group": {"a": 1, "b": 3}, "save_ckpt_path": "y", "new": None}
    runs = [a_run(tmp_path / "a", [], first), a_run(tmp_path / "b", [], second)]
    assert differing_settings(runs) == {"group.b": [2, 3], "new": ["not set", None]}
    assert differing_settings(runs[:1]) == {}


def test_figures_are_said_with_their_units():
    assert in_words("loss, last", 1.23456) == "1.2346"
    assert in_words("held-out accuracy, best", 0.5) == "50.00 %"
    assert in_words("loss, step of the best", 1234.0) == "1,234"
    assert in_words("tokens per second, median", 12345.67) == "12,345.7"
    assert in_words("seconds in steps", 90.0) == "1 min 30 s"
    assert in_words("loss, last", None) == ""
    assert [value_in_words(value) for value in ("a", None, [1], 2.0)] == ["a", "null", "[1]", "2.0"]
