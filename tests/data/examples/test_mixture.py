"""Mixtures: the corpus of an example follows from (seed, sample index), in exact fractions."""

import numpy as np
import pytest
from support.corpora import assert_equal, make_corpus

from bert_cli.data.examples.reader import Batching, ExampleStream, quotas_of, shuffled
from bert_cli.data.examples.source import Records
from bert_cli.data.records.corpus import RecordFiles

S = 32
PACKED = {"sequence_length": S, "max_sequences_per_pack": 4}
BATCHING = Batching(8, 4)
NAMES = ("large", "middle", "small")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    make_corpus(folder / "large", "dynamic", [400, 300])
    make_corpus(folder / "middle", "static", [200])
    make_corpus(folder / "small", "dynamic", [67])
    return folder


def source(folder, seed=7, **changes):
    return Records(RecordFiles(folder), seed=seed, **changes)


def mixture(home, weights=(5, 3, 2), seed=7, batching=BATCHING):
    sources = [source(home / name) for name in NAMES[: len(weights)]]
    return ExampleStream(sources, batching, weights, seed)


def test_the_quotas_of_a_block_are_in_the_proportions_of_the_weights():
    for weights, quotas in (
        ((1,), [8192]),
        ((0.7, 0.2, 0.1), [5733, 1638, 819]),
        ((3.5, 1e-3), [7000, 2]),
        ((10_000, 1), [10_000, 1]),
        # No common measure below the longest block: to the nearest part of it.
        ((123_456_789, 987_654_321), [7282, 58254]),
        ((2**0.5, 1, 1e-9), [38390, 27146, 0]),
    ):
        assert quotas_of(weights) == quotas


def test_every_block_has_exactly_its_quotas_and_another_order(home):
    mixed = mixture(home)
    block = sum(mixed.quotas)
    corpora = mixed.locate(np.arange(20 * block))[0].reshape(20, block)
    for row in corpora:
        assert np.bincount(row).tolist() == mixed.quotas
    # Two blocks agree at as many indices as chance makes them: sum of squared fractions.
    assert np.mean(corpora[1:] == corpora[:-1]) == pytest.approx(0.5**2 + 0.3**2 + 0.2**2, abs=0.01)
    other = mixture(home, seed=8).locate(np.arange(block))[0]
    assert np.mean(corpora[0] == other) < 0.5


def test_each_corpus_is_read_in_order_without_gap_or_repetition(home):
    for weights in ((0.9, 0.09, 0.01), (2**0.5, 1, 3**0.5)):
        mixed = mixture(home, weights)
        start, size = 2 * sum(mixed.quotas) - 1_000, 2 * sum(mixed.quotas) + 9_000
        corpora, own = mixed.locate(np.arange(size))
        for number, count in enumerate(np.bincount(corpora)):
            np.testing.assert_array_equal(own[corpora == number], np.arange(count))
        np.testing.assert_array_equal(mixed.locate(np.arange(start, size))[1], own[start:])


def test_rows_are_those_of_the_sources(home):
    mixed = mixture(home)
    indices = np.random.default_rng(1).integers(0, 10**12, 100)
    rows, (corpora, own) = mixed.rows(indices), mixed.locate(indices)
    assert set(corpora.tolist()) == {0, 1, 2}
    for number, one in enumerate(mixed.sources):
        chosen = corpora == number
        columns = {name: column[chosen] for name, column in rows.items()}
        assert_equal(columns, ExampleStream([one], BATCHING).rows(own[chosen]))
        assert_equal(columns, shuffled(one, own[chosen]))


def test_packs_are_mixed(home):
    corpora = [source(home / name, **PACKED) for name in ("large", "small")]
    mixed = ExampleStream(corpora, BATCHING, (3, 1), 7)
    small = ExampleStream(corpora[1:], BATCHING)
    drawn = np.flatnonzero(mixed.locate(np.arange(500))[0] == 1)[: small.epoch_size]
    assert_equal(mixed.rows(drawn), small.rows(np.arange(small.epoch_size)))
    assert mixed[3]["input_ids"].shape == (2, 4, S)
    assert mixed[3]["next_sentence_positions"].shape == (2, 4, 4)
    counts = (mixed.rows(np.arange(8000))["next_sentence_weights"] > 0).sum(axis=1)
    assert counts.mean() == pytest.approx(mixed.sequences_per_example, abs=0.1)


def test_the_fingerprint_knows_the_corpora_and_the_weights(home):
    one = mixture(home)
    different = (one, mixture(home, (5, 3, 1)), mixture(home, (5, 3)), one.sources[0])
    assert len({each.fingerprint for each in different}) == 4
    # Weights in the same proportions are the same mixture, and the order is not part of it.
    for same in (mixture(home, seed=8), mixture(home, (0.5, 0.3, 0.2))):
        assert (one.quotas, one.fingerprint) == (same.quotas, same.fingerprint)


def test_the_description_counts_the_examples_of_each_corpus(home):
    mixed = mixture(home, (2, 1, 1))
    assert mixed.epoch_size == 967
    counts = np.bincount(mixed.locate(np.arange(12_345))[0], minlength=3)
    for line, count in zip(mixed.describe(12_345), counts, strict=True):
        assert f": {count:,} examples, " in line
    line = f"50.000% from {home / 'large'}: 4,096 examples, {4096 / 700:.3g} epochs of 700"
    assert mixed.describe(8192)[0] == line
