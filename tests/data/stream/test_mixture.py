"""A mixture: whose a position is follows from (seed, position), in shares that are exact."""

import random
from pathlib import Path

import numpy as np
import pytest

from bert_cli.config.data import PackSettings, TokenizeSettings
from bert_cli.data.records import pack, tokenize
from bert_cli.data.stream.mixture import LONGEST_BLOCK, USUAL_BLOCK, Mixture, quotas_of
from bert_cli.data.stream.permutation import record_at
from bert_cli.data.stream.prefetch import read_ahead
from bert_cli.data.stream.reader import Reader
from bert_cli.errors import ConfigError, DataError

S, P = 32, 5
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


def reader(folder, seed=7, **given):
    return Reader(folder, seed=seed, examples_per_step=8, micro_batch_size=4, **given)


def mixture(home, weights=(5, 3, 2), seed=7, examples=8, micro=4, **given):
    names = ("large", "middle", "small")[: len(weights)]
    corpora = [(reader(home / name), weight) for name, weight in zip(names, weights, strict=True)]
    return Mixture(corpora, seed=seed, examples_per_step=examples, micro_batch_size=micro, **given)


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
def test_a_block_has_whole_quotas_as_the_weights_are(weights, quotas):
    found = quotas_of(weights)
    assert found == quotas
    block = sum(found)
    assert USUAL_BLOCK / 2 < block <= LONGEST_BLOCK
    for quota, weight in zip(found, weights, strict=True):
        assert abs(quota - block * weight / sum(weights)) < 1


def test_a_million_positions_have_the_weights_to_within_one_block(home):
    for weights in ((0.9, 0.09, 0.01), (2**0.5, 1, 3**0.5)):
        mixed = mixture(home, weights)
        corpora, _ = mixed.sources(np.arange(1_000_000))
        counts = np.bincount(corpora, minlength=3)
        wanted = 1_000_000 * np.array(weights) / sum(weights)
        assert np.abs(counts - wanted).max() < sum(mixed.quotas)
        assert mixed.read_of(1_000_000) == counts.tolist()


def test_every_block_has_exactly_its_quotas_and_an_order_of_its_own(home):
    mixed = mixture(home)
    block = sum(mixed.quotas)
    corpora = mixed.sources(np.arange(20 * block))[0].reshape(20, block)
    for row in corpora:
        assert np.bincount(row).tolist() == mixed.quotas
    # Two blocks agree at as many places as chance makes them: sum of squared shares.
    share = 0.5**2 + 0.3**2 + 0.2**2
    for number in range(1, 20):
        agree = np.mean(corpora[number] == corpora[number - 1])
        assert abs(agree - share) < 5 * np.sqrt(share * (1 - share) / block)
    # Within a block too the corpora are mixed: every 63rd of it has about the shares.
    first = np.count_nonzero(corpora.reshape(20, 63, -1) == 0, axis=(0, 2))
    trials = corpora.size / 63
    assert np.abs(first - trials * 0.5).max() < 5 * np.sqrt(trials * 0.25)


def test_each_corpus_is_read_in_order_without_gap_or_repetition(home):
    for weights in ((0.9, 0.09, 0.01), (3, 1), (2**0.5, 1, 3**0.5)):
        mixed = mixture(home, weights)
        start = 5 * sum(mixed.quotas) - 1_000
        corpora, own = mixed.sources(np.arange(start + 40_000))
        for number in range(len(weights)):
            count = np.count_nonzero(corpora == number)
            np.testing.assert_array_equal(own[corpora == number], np.arange(count))
        np.testing.assert_array_equal(
            mixed.sources(np.arange(start, start + 40_000))[1], own[start:]
        )


def test_a_small_corpus_is_read_completely_before_any_of_it_is_repeated(home):
    mixed = mixture(home, (3, 1))
    corpora, own = mixed.sources(np.arange(8 * 677))
    _, records = record_at(own[corpora == 1], 677, seed=7)
    for epoch in records[: 2 * 677].reshape(2, 677):
        assert len(set(epoch.tolist())) == 677


def test_a_position_can_be_asked_anywhere_and_needs_no_others(home):
    mixed = mixture(home)
    asked = np.random.default_rng(0).integers(0, 10**12, 200)
    corpora, places = mixed.sources(asked)
    for number in range(0, 200, 10):
        one, place = mixed.sources([asked[number]])
        assert (one[0], place[0]) == (corpora[number], places[number])
    # Far out the place within a corpus is its share of the position, to within a block.
    shares = np.array(mixed.quotas) / sum(mixed.quotas)
    assert np.abs(places - asked * shares[corpora]).max() < sum(mixed.quotas)


def test_rows_are_the_readers_own(home):
    mixed = mixture(home)
    positions = np.random.default_rng(1).integers(0, 50_000, 200)
    rows = mixed.rows(positions)
    corpora, places = mixed.sources(positions)
    assert set(corpora.tolist()) == {0, 1, 2}
    for number, (corpus, place) in enumerate(zip(corpora, places, strict=True)):
        own = mixed.readers[corpus].rows([place])
        assert_equal({name: column[number : number + 1] for name, column in rows.items()}, own)


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_nth_example_of_a_corpus_in_the_stream_is_the_nth_of_its_reader(home, is_packed):
    given = {"sequence_length": 2 * S, "max_sequences_per_pack": 4} if is_packed else {}
    corpora = [(reader(home / "large", **given), 3), (reader(home / "small", **given), 1)]
    mixed = Mixture(corpora, seed=7, examples_per_step=8, micro_batch_size=4)
    small = mixed.readers[1]
    two_epochs = 2 * len(small)
    drawn = np.flatnonzero(mixed.sources(np.arange(5 * two_epochs))[0] == 1)[:two_epochs]
    assert_equal(mixed.rows(drawn), small.rows(np.arange(two_epochs)))
    assert mixed.epochs(int(drawn[-1]) + 1)[1] == 2.0


def test_a_step_is_the_same_however_it_is_cut_and_wherever_a_run_starts(home):
    whole = mixture(home, examples=24, micro=4)
    for step in (0, 171, 10_000):
        batch = whole[step]
        assert batch["input_ids"].shape == (6, 4, S)
        rows = whole.rows(np.arange(24 * step, 24 * step + 24))
        for name, column in batch.items():
            np.testing.assert_array_equal(column.reshape(rows[name].shape), rows[name])
        parts = [mixture(home, examples=24, micro=4, part=part, parts=3)[step] for part in range(3)]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in batch}
        assert_equal(joined, batch)
        finer = mixture(home, examples=12, micro=2)
        both = [finer[2 * step][name].reshape(12, -1) for name in ("input_ids",)]
        np.testing.assert_array_equal(both[0], batch["input_ids"].reshape(24, -1)[:12])
    ahead = {step: batch for step, batch, _ in read_ahead(whole, 5, 9)}
    assert list(ahead) == [5, 6, 7, 8]
    assert_equal(ahead[7], whole[7])


def test_another_seed_gives_another_order_with_the_same_shares(home):
    one, other = mixture(home), mixture(home, seed=8)
    positions = np.arange(sum(one.quotas))
    assert np.mean(one.sources(positions)[0] == other.sources(positions)[0]) < 0.5
    assert one.quotas == other.quotas
    assert one.fingerprint == other.fingerprint


def test_the_fingerprint_knows_the_corpora_and_the_weights(home):
    found = {
        mixture(home).fingerprint,
        mixture(home, (5, 3, 1)).fingerprint,
        mixture(home, (5, 3)).fingerprint,
        reader(home / "large").fingerprint,
    }
    assert len(found) == 4
    # What is said in other numbers is the same mixture.
    assert mixture(home, (0.5, 0.3, 0.2)).fingerprint == mixture(home).fingerprint


def test_length_epochs_and_the_text_of_a_plan(home):
    mixed = mixture(home, (2, 1, 1))
    sizes = [len(one) for one in mixed.readers]
    assert len(mixed) == sum(sizes)
    for examples in (0, 1, 4096, 5000, 12_345):
        counts = mixed.read_of(examples)
        assert sum(counts) == examples
        found = np.bincount(mixed.sources(np.arange(examples))[0], minlength=3).tolist()
        assert counts == found
        wanted = [count / size for count, size in zip(counts, sizes, strict=True)]
        assert mixed.epochs(examples) == wanted
    assert mixed.describe(8192)[0] == (
        f"50.000% from {home / 'large'}: 4,096 examples out of {sizes[0]:,} "
        f"({4096 / sizes[0]:.3g} epochs)"
    )
    assert len(mixed.describe(8192)) == 3


def test_it_is_dynamic_only_where_all_corpora_are(home):
    assert not mixture(home).is_dynamic
    both = [(reader(home / name), 1) for name in ("large", "small")]
    assert Mixture(both, seed=1, examples_per_step=8, micro_batch_size=4).is_dynamic
    assert mixture(home).sequence_length == S
    assert mixture(home).predictions == P
    assert mixture(home).corpus["vocab_size"] == 15


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_a_weight_that_is_no_positive_number_is_refused(home, weight):
    with pytest.raises(ConfigError, match=r"weight .* of .*middle\): is no positive number"):
        mixture(home, (1, weight, 1))


def test_a_weight_too_small_to_be_read_is_refused(home):
    with pytest.raises(ConfigError, match=r"weight 1e-09 of .*small\): .* nothing would be read"):
        mixture(home, (2**0.5, 1, 1e-9))


def test_no_corpus_and_a_step_that_cannot_be_cut_are_refused(home):
    with pytest.raises(ConfigError, match="names no corpus"):
        mixture(home, ())
    with pytest.raises(ConfigError, match="is no multiple of"):
        mixture(home, examples=10)
    with pytest.raises(ConfigError, match="cannot be divided among 3 processes"):
        mixture(home, parts=3)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Corpora that do not go with those of `home`, by what is different."""
    folder = tmp_path_factory.mktemp("others")
    return {
        "places": make_corpus(folder, "longer", 4, sequence_length=48),
        "masked places": make_corpus(folder, "fewer", 4, mask_tokens=4),
        "vocabularies": make_corpus(folder, "words", 4, words=tuple(reversed(WORDS))),
    }


@pytest.mark.parametrize("differs", ["places", "masked places", "vocabularies"])
def test_corpora_that_do_not_go_together_are_refused_and_both_are_named(home, others, differs):
    one, other = reader(home / "large"), reader(others[differs])
    with pytest.raises(DataError, match=f" {differs}[ ,;]") as caught:
        Mixture([(one, 1), (other, 1)], seed=1, examples_per_step=8, micro_batch_size=4)
    assert str(one.folder) in str(caught.value)
    assert str(other.folder) in str(caught.value)


def test_dynamic_records_may_be_read_at_one_length_and_mixed(home, others):
    both = [
        (reader(home / "large", sequence_length=48, predictions=4), 1),
        (reader(others["places"], predictions=4), 1),
    ]
    mixed = Mixture(both, seed=1, examples_per_step=8, micro_batch_size=4)
    assert mixed[0]["input_ids"].shape == (2, 4, 48)


def test_the_same_records_twice_are_refused(home):
    twice = [(reader(home / "small"), 1), (reader(home / "large" / ".." / "small"), 2)]
    with pytest.raises(DataError, match="hold the same records"):
        Mixture(twice, seed=1, examples_per_step=8, micro_batch_size=4)


@pytest.fixture(scope="module")
def packs(home):
    """`large` packed on disk, into examples of twice the places."""
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
        (reader(packs), 3),
        (reader(home / "small", sequence_length=2 * S, max_sequences_per_pack=4), 1),
    ]
    mixed = Mixture(corpora, seed=1, examples_per_step=8, micro_batch_size=4)
    batch = mixed[3]
    assert batch["input_ids"].shape == (2, 4, 2 * S)
    assert batch["next_sentence_positions"].shape == (2, 4, 4)
    assert mixed.max_sequences_per_pack == 4
    assert batch["masked_lm_ids"].shape == (2, 4, mixed.masked_places)
    rows = mixed.rows(np.arange(mixed._block))
    held = (rows["next_sentence_weights"] > 0).sum(axis=1)
    # Each corpus has a little more or less than one of its epochs here.
    assert abs(held.mean() - mixed.sequences_per_example) < 0.1
    real = (rows["input_mask"] > 0).mean()
    assert abs(real - mixed.real_token_share) < 0.02


def test_the_share_of_real_tokens_is_known_where_all_corpora_know_it(home):
    assert mixture(home).real_token_share is None
    assert mixture(home).sequences_per_example == 1
    both = [(reader(home / name), 1) for name in ("large", "small")]
    shares = [corpus.real_token_share for corpus, _ in both]
    mixed = Mixture(both, seed=1, examples_per_step=8, micro_batch_size=4)
    assert mixed.real_token_share == pytest.approx(sum(shares) / 2)


def test_packs_and_single_sequences_are_not_mixed(home, packs):
    one = reader(home / "small", sequence_length=2 * S)
    with pytest.raises(DataError, match="have 4 and 1 sequences in an example") as caught:
        Mixture([(reader(packs), 1), (one, 1)], seed=1, examples_per_step=8, micro_batch_size=4)
    assert str(packs) in str(caught.value)
    assert str(home / "small") in str(caught.value)


def test_bins_are_not_mixed(home):
    corpora = [(reader(home / "large"), 1), (reader(home / "small", bins=2), 1)]
    with pytest.raises(ConfigError, match=r"bins: cannot be had with several corpora.*small"):
        Mixture(corpora, seed=1, examples_per_step=8, micro_batch_size=4)


def test_columns_that_differ_are_refused(home):
    class WithMore(Reader):
        def rows(self, positions):
            return super().rows(positions) | {"more": np.zeros((len(positions), S))}

    more = WithMore(home / "small", seed=1, examples_per_step=8, micro_batch_size=4)
    with pytest.raises(DataError, match=r"columns that do not fit together \(more\)"):
        Mixture(
            [(reader(home / "large"), 1), (more, 1)],
            seed=1,
            examples_per_step=8,
            micro_batch_size=4,
        )
