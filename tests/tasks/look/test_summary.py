"""Runs are summarized in numbers."""

import numpy as np
from support.metrics import write_metrics

from bert_cli.tasks.look.summary import smoothed, summary_of, window_for

NAN = float("nan")


def test_a_smoothed_value_is_the_mean_of_finite_values_up_to_it():
    assert smoothed(np.array([1.0, 2.0, 3.0, 8.0]), 2).tolist() == [1.0, 1.5, 2.5, 5.5]
    assert smoothed(np.array([1.0, 2.0]), 5).tolist() == [1.0, 1.5]
    found = smoothed(np.array([NAN, 2.0, NAN, 4.0, NAN, NAN]), 2)
    np.testing.assert_array_equal(found, [NAN, 2.0, 2.0, 4.0, 4.0, NAN])


def test_a_summary_has_last_and_best_values_speed_and_time(tmp_path):
    first = {"loss": 3.0, "validation_f1": 0.5, "examples_per_second": 1.0, "seconds_per_step": 2.0}
    second = {"loss": 1.0, "examples_per_second": 9.0}
    third = {"loss": 2.0, "validation_f1": 0.4, "validation_bits_per_byte": 1.5}
    fourth = {"loss": None, "examples_per_second": 8.0, "seconds_per_step": 4.0}
    fourth |= {"validation_bits_per_byte": 1.75}
    lines = [(1, first), (2, second), (3, third), (4, fourth)]
    assert summary_of(write_metrics(tmp_path / "a", lines), 1) == {
        "steps": "4",
        "loss, last": "2.0000",
        "loss, best": "1.0000 in step 2",
        "held-out f1, last": "0.4000",
        "held-out f1, best": "0.5000 in step 1",
        "held-out bits per byte, last": "1.7500",
        "held-out bits per byte, best": "1.5000 in step 3",
        "examples per second, median": "8.0",
        "time in steps": "6 s",
    }
    assert summary_of(write_metrics(tmp_path / "b", []), 5)["steps"] == "0"


def test_a_window_is_a_round_number_of_about_a_fortieth_of_the_longest_run(tmp_path):
    for steps, window in ((1, 1), (79, 1), (80, 2), (400, 10), (12_000, 200)):
        run = write_metrics(tmp_path / f"{steps}", [(n, {}) for n in range(1, steps + 1)])
        assert window_for([run, write_metrics(tmp_path / "b", [])]) == window
