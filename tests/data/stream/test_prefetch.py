"""Reading ahead in a thread."""

import threading

import numpy as np
import pytest

from bert_cli.data.stream.prefetch import read_ahead
from bert_cli.errors import DataError


class Steps:
    """Batches that hold their step; step `fails_at` fails, and step `waits_at` waits for `released`."""

    fingerprint, epoch_size = "steps", None

    def __init__(self, fails_at=None, waits_at=None):
        self.fails_at, self.waits_at, self.read = fails_at, waits_at, []
        self.started, self.released = threading.Event(), threading.Event()

    def __getitem__(self, step):
        self.read.append(step)
        if step == self.waits_at:
            self.started.set()
            assert self.released.wait(10)
        if step == self.fails_at:
            raise DataError("records (byte 7)", "are corrupt", "make them again")
        return {"step": np.array([step])}


def reading_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("read-ahead")]


def test_the_steps_come_in_order_with_their_batches():
    for first, end in ((5, 12), (5, 5), (3, 4)):
        found = list(read_ahead(Steps(), first, end))
        assert [step for step, _, _ in found] == list(range(first, end))
        assert all(batch["step"] == [step] and waited >= 0.0 for step, batch, waited in found)


def test_the_next_step_is_read_while_the_consumer_works():
    steps = Steps(waits_at=2)
    batches = read_ahead(steps, 0, 8)
    assert next(batches)[0] == 0
    # The consumer has step 0 and asks for nothing; step 2 is being read.
    assert steps.started.wait(10)
    assert steps.read == [0, 1, 2]
    steps.released.set()
    assert [step for step, _, _ in batches] == list(range(1, 8))
    assert reading_threads() == []


def test_an_error_is_raised_at_its_step():
    seen = []
    with pytest.raises(DataError, match="byte 7"):
        for step, _, _ in read_ahead(Steps(fails_at=3), 0, 8):
            seen.append(step)
    assert seen == [0, 1, 2]
    assert reading_threads() == []


def test_a_consumer_that_stops_early_leaves_no_thread():
    steps = Steps()
    batches = read_ahead(steps, 0, 1000)
    next(batches)
    batches.close()
    assert reading_threads() == []
    assert len(steps.read) <= 3
