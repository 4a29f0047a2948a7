"""Runs are summarized in numbers."""

import numpy as np
from support.metrics import write_metrics

from bert_cli.tasks.look.summary import smoothed, window_for

NAN = float("nan")


def test_a_smoothed_value_is_the_mean_of_finite_values_up_to_it():
    assert smoothed(np.array([1.0, 2.0, 3.0, 8.0]), 2).tolist() == [1.0, 1.5, 2.5, 5.5]
    assert smoothed(np.array([1.0, 2.0]), 5).tolist() == [1.0, 1.5]
    found = smoothed(np.array([NAN, 2.0, NAN, 4.0, NAN, NAN]), 2)
    np.testing.assert_array_equal(found, [NAN, 2.0, 2.0, 4.0, 4.0, NAN])


def test_a_window_is_a_round_number_of_about_a_fortieth_of_the_longest_run(tmp_path):
    for steps, window in ((1, 1), (79, 1), (80, 2), (400, 10), (12_000, 200)):
        run = write_metrics(tmp_path / f"{steps}", [(n, {}) for n in range(1, steps + 1)])
        assert window_for([run, write_metrics(tmp_path / "b", [])]) == window
