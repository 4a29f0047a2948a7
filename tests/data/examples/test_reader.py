"""Streams: a batch is a function of (seed, step), whatever the layout, the files or the start."""

import json
import threading
from typing import Any

import numpy as np
import pytest
from support.corpora import (
    WORDS,
    P,
    S,
    assert_equal,
    by_content,
    examples_of,
    make_corpus,
    open_stream,
    sequences_of,
)
from support.settings import plan_of, small_run

from bert_cli.data.examples.reader import Batching, read_ahead
from bert_cli.data.examples.synthetic import SyntheticStream
from bert_cli.data.records.formats import FIELDS, PACKED_FIELDS
from bert_cli.errors import DataError
from bert_cli.facts.masking import Masking, packed_predictions

COUNTS = [100, 7, 0, 142, 1]
WIDE = 2 * S
KINDS: dict[str, dict[str, Any]] = {
    "static": {},
    "dynamic": {},
    "packs": {"max_sequences_per_pack": 3, "sequence_length": WIDE},
    "synthetic": {},
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """250 records of 5 to 16 tokens in files of different sizes, one of them empty."""
    folder = tmp_path_factory.mktemp("corpus")
    return {kind: make_corpus(folder / kind, kind, COUNTS) for kind in ("static", "dynamic")}


def opened(corpora, kind, **changes):
    if kind != "synthetic":
        folder = corpora["static" if kind == "static" else "dynamic"]
        return open_stream(folder, **KINDS[kind] | changes)
    usual = {"examples": 16, "micro": 4, "rank": 0, "world_size": 1}
    batching = Batching(*(changes.pop(name, value) for name, value in usual.items()))
    settings = {"seed": 1984, "vocab_size": WORDS, "sequence_length": S, "predictions": P} | changes
    return SyntheticStream(batching, **settings)


def flat(batch):
    return {name: array.reshape(-1, *array.shape[2:]) for name, array in batch.items()}


def joined(batches):
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_a_function_of_seed_and_step_with_the_shapes_of_its_micro_batches(corpora, kind):
    first = opened(corpora, kind)
    steps = [first[step] for step in range(40)]
    for start in (39, 17, 0, 23):
        resumed = opened(corpora, kind)
        for step in range(start, min(start + 3, 40)):
            assert_equal(resumed[step], steps[step])
    other = opened(corpora, kind, seed=7)[0]
    assert not np.array_equal(other["masked_lm_ids"], steps[0]["masked_lm_ids"])
    is_packed = kind == "packs"
    length, masked = (WIDE, packed_predictions(WIDE, 3, P, 0.15)) if is_packed else (S, P)
    shapes = {"masked_lm": (masked,), "next_sentence": (3,) if is_packed else ()}
    batch = steps[0]
    assert tuple(batch) == (PACKED_FIELDS if is_packed else FIELDS)
    for name, array in batch.items():
        assert array.shape == (4, 4, *shapes.get(name.rpartition("_")[0], (length,))), name
        assert array.dtype == (np.float32 if name.endswith("weights") else np.int32)


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_processes_and_blocks_change_no_example(corpora, kind, monkeypatch):
    stream, twos = (opened(corpora, kind, examples=24, micro=micro) for micro in (4, 2))
    batches = {step: stream[step] for step in (0, 10, 57)}  # step 10 is in two epochs
    monkeypatch.setattr("bert_cli.data.examples.reader.BLOCK", 21)
    for step, batch in batches.items():
        assert_equal(flat(twos[step]), flat(batch))
        for count in (2, 3, 6):
            ranks = ({"rank": rank, "world_size": count} for rank in range(count))
            parts = [opened(corpora, kind, examples=24, **rank)[step] for rank in ranks]
            assert all(len(part["input_ids"]) == 6 // count for part in parts)
            assert_equal(joined(parts), batch)


@pytest.mark.parametrize("kind", ["static", "dynamic", "packs", "synthetic"])
def test_the_stream_does_not_depend_on_the_size_of_the_step(corpora, kind):
    small, large = opened(corpora, kind, examples=8), opened(corpora, kind, examples=40)
    together = joined([flat(small[step]) for step in range(5, 10)])
    assert_equal(flat(large[1]), together)
    some = np.arange(40, 80)[3::5]
    assert_equal(small.rows(some), {name: array[3::5] for name, array in together.items()})
    assert_equal(flat(small.first_micro_batches(2)), small.rows(np.arange(8)))


def test_of_a_growing_batch_the_processes_read_equal_parts_of_each_step():
    batch = {"replicas": 2, "grad_acc_steps_per_replica": 4, "start_fraction": 0.25}
    plan = plan_of(small_run(global_batch=batch, total_num_train_samples=200), None)
    assert len(plan.segments) == 4
    for step in range(plan.total_steps):
        parts = [Batching(16, 2, rank, 2, plan).sample_indices(step) for rank in (0, 1)]
        assert len(parts[0]) == len(parts[1])
        assert np.concatenate(parts).tolist() == [*plan.sample_indices(step)]


def test_every_epoch_reads_every_record_once_in_another_order(corpora):
    reader = opened(corpora, "static")
    assert (reader.epoch_size, reader.sequences_per_example) == (250, 1.0)
    epochs = reader.rows(np.arange(750))["input_ids"][:, 1].reshape(3, 250)
    assert np.array_equal(np.sort(epochs), np.tile(np.arange(250), (3, 1)))
    assert len({tuple(order) for order in [*epochs.tolist(), range(250)]}) == 4


@pytest.mark.parametrize(("most", "unit"), [(2, "token"), (5, "word")])
def test_every_epoch_of_packs_has_each_record_once_masked_as_if_it_were_alone(corpora, most, unit):
    masking = Masking(unit=unit, probability=0.3)
    packed = opened(corpora, "packs", max_sequences_per_pack=most, masking=masking)
    plain = opened(corpora, "dynamic", masking=masking)
    size = packed.epoch_size
    assert round(size * packed.sequences_per_example) == plain.epoch_size == 250 > size
    for epoch in (0, 5):
        rows = packed.rows(np.arange(size) + epoch * size)
        wanted = examples_of(plain.rows(np.arange(250) + epoch * 250))
        assert by_content(sequences_of(rows)) == by_content(wanted)
        counts = rows["input_mask"].max(axis=1)
        assert 1 <= counts.min() <= counts.max() <= most


def test_the_fingerprint_changes_with_records_and_packs(corpora):
    for kind in ("static", "dynamic"):
        stored = json.loads((corpora[kind] / "corpus.json").read_text())["fingerprint"]
        assert opened(corpora, kind).fingerprint == stored
    assert opened(corpora, "synthetic").fingerprint == "generated V 1000 S 16"
    ways: list[dict[str, Any]] = [
        {}, {"max_sequences_per_pack": 2}, {"max_sequences_per_pack": 3},
        {"max_sequences_per_pack": 2, "sequence_length": WIDE},
    ]  # fmt: skip
    prints = [open_stream(corpora["dynamic"], **way).fingerprint for way in ways]
    assert len(set(prints)) == len(ways)


# --- reading ahead


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


def test_the_next_step_is_read_while_the_consumer_works():
    assert list(read_ahead(Steps(), 5, 5)) == []
    steps = Steps(waits_at=2)
    batches = read_ahead(steps, 0, 8)
    assert next(batches)[0] == 0
    # The consumer has step 0 and asks for nothing; step 2 is being read.
    assert steps.started.wait(10)
    assert steps.read == [0, 1, 2]
    steps.released.set()
    rest = list(batches)
    assert [step for step, _, _ in rest] == list(range(1, 8))
    assert all(batch["step"] == [step] and waited >= 0.0 for step, batch, waited in rest)


def test_an_error_is_raised_at_its_step_and_no_thread_remains():
    seen = []
    with pytest.raises(DataError, match="byte 7"):
        for step, _, _ in read_ahead(Steps(fails_at=3), 0, 8):
            seen.append(step)
    assert seen == [0, 1, 2]
    steps = Steps()
    batches = read_ahead(steps, 0, 1000)
    next(batches)
    batches.close()
    assert len(steps.read) <= 3
    assert not [one for one in threading.enumerate() if one.name.startswith("read-ahead")]
