"""Reading ahead in a thread, and made-up examples: what a run needs of a reader beside a corpus."""

import threading
import time
from typing import Any

import numpy as np
import pytest

from bert_cli.data.records.columns import Batch
from bert_cli.data.stream.prefetch import read_ahead
from bert_cli.data.stream.synthetic import GeneratedReader
from bert_cli.errors import BertError, ConfigError, DataError

S, P, WORDS = 16, 4, 1000


def made_up(**changes: Any) -> GeneratedReader:
    settings = {"vocab_size": WORDS, "seed": 1984, "sequence_length": S, "predictions": P}
    return GeneratedReader(examples_per_step=16, micro_batch_size=4, **(settings | changes))


def test_reading_ahead_gives_the_steps_asked_for_in_order() -> None:
    reader = made_up()
    got = list(read_ahead(reader, 5, 12))
    assert [step for step, _, _ in got] == list(range(5, 12))
    for step, batch, waited in got:
        assert waited >= 0.0
        for name, array in reader[step].items():
            np.testing.assert_array_equal(batch[name], array, err_msg=name)
    assert list(read_ahead(reader, 5, 5)) == []
    assert [step for step, _, _ in read_ahead(reader, 3, 4)] == [3]


class SlowReader:
    """Takes 50 ms a step, fails at one, and remembers what it was asked."""

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at, self.asked = fails_at, list[int]()

    def __getitem__(self, step: int) -> Batch:
        self.asked.append(step)
        time.sleep(0.05)
        if step == self.fails_at:
            raise DataError("records (byte 7): corrupt")
        return {"step": np.array([step])}


def reading_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("read-ahead")]


def test_reading_goes_on_while_the_consumer_works() -> None:
    waits = []
    for _, _, waited in read_ahead(SlowReader(), 0, 8):
        time.sleep(0.07)
        waits.append(waited)
    assert waits[0] > 0.04
    assert sum(waits[1:]) < 0.1, "seven batches of 50 ms were read behind 70 ms of work each"
    assert reading_threads() == []


def test_an_error_while_reading_ahead_is_raised_at_its_step() -> None:
    seen = []
    with pytest.raises(BertError, match="byte 7"):
        for step, _, _ in read_ahead(SlowReader(fails_at=3), 0, 8):
            seen.append(step)
    assert seen == [0, 1, 2]
    assert reading_threads() == []


def test_a_consumer_that_stops_early_leaves_no_thread_and_no_reading() -> None:
    reader = SlowReader()
    batches = read_ahead(reader, 0, 1000)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert reading_threads() == []
    asked = len(reader.asked)
    assert asked <= 3
    time.sleep(0.1)
    assert len(reader.asked) == asked


def test_made_up_examples_look_like_real_ones() -> None:
    rows = made_up().rows(np.arange(4000))
    ids, mask, segments = rows["input_ids"], rows["input_mask"], rows["segment_ids"]
    lengths = mask.sum(axis=1)
    assert lengths.min() >= 6
    assert 0.6 < (lengths == S).mean() < 0.9
    assert not ids[mask == 0].any()
    assert np.all(ids[:, 0] == 2)
    assert np.all(ids[np.arange(4000), lengths - 1] == 3)
    assert np.all((ids == 3).sum(axis=1) <= 2 + P)
    first = (segments == 0).argmin(axis=1)
    assert np.all(ids[np.arange(4000), first - 1] == 3)
    assert np.all(segments[mask == 0] == 0)
    assert ids.min() == 0
    assert ids.max() < WORDS
    assert rows["next_sentence_labels"].mean() == pytest.approx(0.5, abs=0.05)
    counts = rows["masked_lm_weights"].sum(axis=1)
    assert np.array_equal(counts, np.clip(np.rint(0.15 * lengths), 1, P))
    real = rows["masked_lm_weights"] == 1
    places = np.where(real, rows["masked_lm_positions"], S + np.arange(P))
    assert np.all(np.diff(places, axis=1) > 0)
    targets = rows["masked_lm_ids"][real]
    assert targets.min() >= 5
    values = np.take_along_axis(ids, rows["masked_lm_positions"], axis=1)[real]
    assert (values == 4).mean() == pytest.approx(0.8, abs=0.03)
    assert made_up(vocab_size=8, sequence_length=8)[3]["input_ids"].max() < 8
    with pytest.raises(ConfigError, match="at least 8"):
        made_up(vocab_size=7)
