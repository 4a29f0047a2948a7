"""Mixtures: the corpus of an example follows from (seed, sample index), in exact fractions."""

import random
from pathlib import Path

import numpy as np
import pytest

from bert_cli.config.data import PackSettings, TokenizeSettings
from bert_cli.data.records import pack, tokenize
from bert_cli.data.stream.mixture import LONGEST_BLOCK, USUAL_BLOCK, Mixture, quotas_of
from bert_cli.data.stream.permutation import record_at
from bert_cli.data.stream.prefetch import read_ahead
from bert_cli.data.stream.reader import Batching, Reader
from bert_cli.data.stream.source import Records, open_records
from bert_cli.errors import ConfigError, DataError

S, P = 32, 5
BATCHING = Batching(8, 4)
WORDS = ["ba", "ke", "lo", "mi", "nu", "ra", "si", "to", "va", "zu"]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_corpus(home: Path, name: str, documents: int, words=tuple(WORDS), **changes) -> Path:
    """A folder of records, of a text whose every line is of the same two words of its own."""
    draw = random.Random(name)
    text = home / f"{name}_text"
    text.mkdir()
    said = [" ".join(draw.choices(words, k=draw.randint(3, 20))) for _ in range(30 * documents)]
    lines = [line + ("\n" if number % 30 == 29 else "") for number, line in enumerate(said)]
    (text / "all").write_text("\n".join(lines) + "\n")
    (home / f"{name}.txt").write_text("\n".join([*SPECIALS, *words]) + "\n")
    given = {"sequence_length": S, "mask_tokens": P, "masking": "dynamic", "processes": 1} | changes
    tokenize.run(
        TokenizeSettings(input=text, out=home / name, vocab=str(home / f"{name}.txt"), **given)
    )
    return home / name


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    make_corpus(folder, "large", 40)
    make_corpus(folder, "middle", 12, masking="static", duplication_factor=2)
    make_corpus(folder, "small", 4)
    return folder


def source(folder, seed=7, **changes):
    return open_records(folder, seed=seed, **changes)


def mixture(home, weights=(5, 3, 2), seed=7, batching=BATCHING):
    names = ("large", "middle", "small")[: len(weights)]
    return Mixture(
        [(source(home / name), weight) for name, weight in zip(names, weights, strict=True)],
        batching,
        seed,
    )


def assert_equal(one, other):
    assert list(one) == list(other)
    for name in one:
        assert one[name].dtype == other[name].dtype
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize(
    ("weights", "quotas"),
    [
        ((1,), [8192]),
        ((1, 1), [4096, 4096]),
        ((0.7, 0.2, 0.1), [5733, 1638, 819]),
        ((1, 2), [2730, 5460]),
        ((3.5, 1e-3), [7000, 2]),
        ((10_000, 1), [10_000, 1]),
        # No common measure below the longest block: to the nearest part of it.
        ((123_456_789, 987_654_321), [7282, 58254]),
        ((2**0.5, 1, 1e-9), [38390, 27146, 0]),
    ],
)
def test_the_quotas_of_a_block_are_in_the_proportions_of_the_weights(weights, quotas):
    found = quotas_of(weights)
    assert found == quotas
    block = sum(found)
    assert USUAL_BLOCK / 2 < block <= LONGEST_BLOCK
    for quota, weight in zip(found, weights, strict=True):
        assert abs(quota - block * weight / sum(weights)) < 1


def test_a_million_positions_have_the_weights_to_within_one_block(home):
    for weights in ((0.9, 0.09, 0.01), (2**0.5, 1, 3**0.5)):
        mixed = mixture(home, weights)
        corpora, _ = mixed.locate(np.arange(1_000_000))
        counts = np.bincount(corpora, minlength=3)
        wanted = 1_000_000 * np.array(weights) / sum(weights)
        assert np.abs(counts - wanted).max() < sum(mixed.quotas)
        assert mixed.counts(1_000_000) == counts.tolist()


def test_every_block_has_exactly_its_quotas_and_another_order(home):
    mixed = mixture(home)
    block = sum(mixed.quotas)
    corpora = mixed.locate(np.arange(20 * block))[0].reshape(20, block)
    for row in corpora:
        assert np.bincount(row).tolist() == mixed.quotas
    # Two blocks agree at as many indices as chance makes them: sum of squared fractions.
    fraction = 0.5**2 + 0.3**2 + 0.2**2
    for number in range(1, 20):
        agree = np.mean(corpora[number] == corpora[number - 1])
        assert abs(agree - fraction) < 5 * np.sqrt(fraction * (1 - fraction) / block)
    # Within a block too the corpora are mixed: every 63rd of it has about the fractions.
    first = np.count_nonzero(corpora.reshape(20, 63, -1) == 0, axis=(0, 2))
    trials = corpora.size / 63
    assert np.abs(first - trials * 0.5).max() < 5 * np.sqrt(trials * 0.25)


def test_each_corpus_is_read_in_order_without_gap_or_repetition(home):
    for weights in ((0.9, 0.09, 0.01), (3, 1), (2**0.5, 1, 3**0.5)):
        mixed = mixture(home, weights)
        start = 5 * sum(mixed.quotas) - 1_000
        corpora, own = mixed.locate(np.arange(start + 40_000))
        for number in range(len(weights)):
            count = np.count_nonzero(corpora == number)
            np.testing.assert_array_equal(own[corpora == number], np.arange(count))
        np.testing.assert_array_equal(
            mixed.locate(np.arange(start, start + 40_000))[1], own[start:]
        )


def test_a_small_corpus_is_read_completely_before_any_of_it_is_repeated(home):
    mixed = mixture(home, (3, 1))
    corpora, own = mixed.locate(np.arange(8 * 677))
    _, records = record_at(own[corpora == 1], 677, seed=7)
    for epoch in records[: 2 * 677].reshape(2, 677):
        assert len(set(epoch.tolist())) == 677


def test_any_sample_index_is_located_without_the_others(home):
    mixed = mixture(home)
    chosen = np.random.default_rng(0).integers(0, 10**12, 200)
    corpora, indices = mixed.locate(chosen)
    for number in range(0, 200, 10):
        one, index = mixed.locate([chosen[number]])
        assert (one[0], index[0]) == (corpora[number], indices[number])
    # Far out the index within a corpus is its fraction of the position, to within a block.
    fractions = np.array(mixed.quotas) / sum(mixed.quotas)
    assert np.abs(indices - chosen * fractions[corpora]).max() < sum(mixed.quotas)


def test_rows_are_those_of_the_sources(home):
    mixed = mixture(home)
    positions = np.random.default_rng(1).integers(0, 50_000, 200)
    rows = mixed.rows(positions)
    corpora, indices = mixed.locate(positions)
    assert set(corpora.tolist()) == {0, 1, 2}
    for number, (corpus, index) in enumerate(zip(corpora, indices, strict=True)):
        own = Reader(mixed.sources[corpus], BATCHING).rows([index])
        assert_equal({name: column[number : number + 1] for name, column in rows.items()}, own)


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_nth_example_of_a_corpus_in_the_stream_is_the_nth_of_its_source(home, is_packed):
    given = {"sequence_length": 2 * S, "max_sequences_per_pack": 4} if is_packed else {}
    corpora = [(source(home / "large", **given), 3), (source(home / "small", **given), 1)]
    mixed = Mixture(corpora, BATCHING, 7)
    small = Reader(mixed.sources[1], BATCHING)
    two_epochs = 2 * small.epoch_size
    drawn = np.flatnonzero(mixed.locate(np.arange(5 * two_epochs))[0] == 1)[:two_epochs]
    assert_equal(mixed.rows(drawn), small.rows(np.arange(two_epochs)))
    assert mixed.counts(int(drawn[-1]) + 1)[1] == two_epochs


def test_micro_batches_processes_and_the_first_step_change_no_example(home):
    whole = mixture(home, batching=Batching(24, 4))
    for step in (0, 171, 10_000):
        batch = whole[step]
        assert batch["input_ids"].shape == (6, 4, S)
        rows = whole.rows(np.arange(24 * step, 24 * step + 24))
        for name, column in batch.items():
            np.testing.assert_array_equal(column.reshape(rows[name].shape), rows[name])
        parts = [mixture(home, batching=Batching(24, 4, rank, 3))[step] for rank in range(3)]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in batch}
        assert_equal(joined, batch)
        finer = mixture(home, batching=Batching(12, 2))
        both = [finer[2 * step][name].reshape(12, -1) for name in ("input_ids",)]
        np.testing.assert_array_equal(both[0], batch["input_ids"].reshape(24, -1)[:12])
    ahead = {step: batch for step, batch, _ in read_ahead(whole, 5, 9)}
    assert list(ahead) == [5, 6, 7, 8]
    assert_equal(ahead[7], whole[7])


def test_the_fingerprint_knows_the_corpora_and_the_weights(home):
    found = {
        mixture(home).fingerprint,
        mixture(home, (5, 3, 1)).fingerprint,
        mixture(home, (5, 3)).fingerprint,
        source(home / "large").fingerprint,
    }
    assert len(found) == 4
    # Weights in the same proportions are the same mixture, and the order is not part of it.
    one, other = mixture(home), mixture(home, seed=8)
    indices = np.arange(sum(one.quotas))
    assert np.mean(one.locate(indices)[0] == other.locate(indices)[0]) < 0.5
    assert (one.quotas, one.fingerprint) == (other.quotas, other.fingerprint)
    assert mixture(home, (0.5, 0.3, 0.2)).fingerprint == mixture(home).fingerprint


def test_sizes_counts_and_the_description(home):
    mixed = mixture(home, (2, 1, 1))
    sizes = [len(one) for one in mixed.sources]
    assert mixed.epoch_size == sum(sizes)
    for examples in (0, 1, 4096, 5000, 12_345):
        counts = mixed.counts(examples)
        assert sum(counts) == examples
        found = np.bincount(mixed.locate(np.arange(examples))[0], minlength=3).tolist()
        assert counts == found
    assert mixed.describe(8192)[0] == (
        f"50.000% from {home / 'large'}: 4,096 examples out of {sizes[0]:,} "
        f"({4096 / sizes[0]:.3g} epochs)"
    )
    assert len(mixed.describe(8192)) == 3


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Corpora that do not go with those of `home`, by what is different."""
    folder = tmp_path_factory.mktemp("others")
    return {
        "positions": make_corpus(folder, "longer", 4, sequence_length=48),
        "masked positions": make_corpus(folder, "fewer", 4, mask_tokens=4),
        "vocabularies": make_corpus(folder, "words", 4, words=tuple(reversed(WORDS))),
    }


def test_corpora_that_do_not_fit_together_are_refused_and_both_are_named(
    home, others, packs, monkeypatch
):
    large, small = source(home / "large"), source(home / "small")
    both = [
        (source(home / "large", sequence_length=48, predictions=4), 1),
        (source(others["positions"], predictions=4), 1),
    ]
    assert Mixture(both, BATCHING, 1)[0]["input_ids"].shape == (2, 4, 48)
    pairs = [(large, source(folder), f" {what}[ ,;]") for what, folder in others.items()]
    wide = source(home / "small", sequence_length=2 * S)
    pairs.append((source(packs), wide, "have 4 and 1 sequences in an example"))
    pairs.append((small, source(home / "large" / ".." / "small"), "hold the same records"))

    class WithMore(Records):
        def examples(self, epochs, numbers):
            return super().examples(epochs, numbers) | {"more": np.zeros((len(numbers), S))}

    more = WithMore(home / "middle", source(home / "middle").corpus, 1)
    pairs.append((large, more, r"columns that do not fit together \(more\)"))
    for one, other, message in pairs:
        with pytest.raises(DataError, match=message) as caught:
            Mixture([(one, 1), (other, 1)], BATCHING, 1)
        assert str(one.folder) in str(caught.value)
        assert str(other.folder) in str(caught.value)


def test_impossible_weights_are_refused(home):
    for weight in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"weight .* of .*middle\): is no positive number"):
            mixture(home, (1, weight, 1))
    with pytest.raises(
        ConfigError, match=r"weight 1e-09 of .*small\): .* nothing of it would be read"
    ):
        mixture(home, (2**0.5, 1, 1e-9))
    with pytest.raises(ConfigError, match="names no corpus"):
        mixture(home, ())


@pytest.fixture(scope="module")
def packs(home):
    """`large` packed on disk, into examples of twice the indices."""
    out = home / "large_packs"
    pack.run(
        PackSettings(
            input=home / "large",
            out=out,
            sequence_length=2 * S,
            max_sequences_per_pack=4,
            processes=1,
        )
    )
    return out


def test_packs_from_disk_and_packs_made_on_the_fly_are_mixed(home, packs):
    corpora = [
        (source(packs), 3),
        (source(home / "small", sequence_length=2 * S, max_sequences_per_pack=4), 1),
    ]
    mixed = Mixture(corpora, BATCHING, 1)
    batch = mixed[3]
    assert batch["input_ids"].shape == (2, 4, 2 * S)
    assert batch["next_sentence_positions"].shape == (2, 4, 4)
    rows = mixed.rows(np.arange(mixed._block))
    held = (rows["next_sentence_weights"] > 0).sum(axis=1)
    # Each corpus has a little more or less than one of its epochs here.
    assert abs(held.mean() - mixed.sequences_per_example) < 0.1
    assert mixture(home).sequences_per_example == 1


def test_packs_and_single_sequences_are_not_mixed(home, packs):
    one = source(home / "small", sequence_length=2 * S)
    with pytest.raises(DataError, match="have 4 and 1 sequences in an example") as caught:
        Mixture([(source(packs), 1), (one, 1)], BATCHING, 1)
    assert str(packs) in str(caught.value)
    assert str(home / "small") in str(caught.value)
