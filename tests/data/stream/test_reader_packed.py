"""Reading several sequences in an example, or examples of like lengths: nothing is lost, no mask changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import (
    P,
    S,
    by_content,
    dynamic_records,
    examples_of,
    make_corpus,
    sequences_of,
)

from bert_cli.config.data import Masking, packed_predictions
from bert_cli.data.records.columns import FIELDS, PACKED_FIELDS, Batch
from bert_cli.data.stream.reader import Reader
from bert_cli.errors import ConfigError, DataError

COUNTS = [100, 7, 0, 142, 1]
WIDE = 2 * S


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """250 dynamic records of 5 to 16 tokens."""
    return make_corpus(tmp_path_factory.mktemp("corpus") / "dynamic", "dynamic", COUNTS)


def open_reader(folder: Path, *, examples: int = 16, micro: int = 4, **settings: Any) -> Reader:
    settings = {"seed": 1984} | settings
    return Reader(folder, examples_per_step=examples, micro_batch_size=micro, **settings)


def flat(batch: Batch) -> Batch:
    return {name: array.reshape(-1, *array.shape[2:]) for name, array in batch.items()}


def assert_equal(one: Batch, other: Batch) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_a_packed_batch_has_the_columns_shapes_and_types_of_packs(corpus: Path) -> None:
    reader = open_reader(corpus, sequence_length=WIDE, max_sequences_per_pack=3)
    batch = reader[0]
    room = packed_predictions(WIDE, 3, P, 0.15)
    widths = {"masked_lm": room, "next_sentence": 3}
    assert tuple(batch) == PACKED_FIELDS
    for name, array in batch.items():
        assert array.shape == (4, 4, widths.get(name.rpartition("_")[0], WIDE)), name
        assert array.dtype == (np.float32 if name.endswith("weights") else np.int32)
    assert reader.masked_places == room == 7


@pytest.mark.parametrize("most", [2, 3, 5])
@pytest.mark.parametrize("unit", ["token", "word"])
def test_every_epoch_has_each_record_once_masked_as_if_it_stood_alone(
    corpus: Path, most: int, unit: Any
) -> None:
    masking = Masking(unit=unit, probability=0.3)
    packed = open_reader(corpus, sequence_length=WIDE, max_sequences_per_pack=most, masking=masking)
    plain = open_reader(corpus, masking=masking)
    assert packed.sequences == len(plain) == 250
    assert len(packed) < 250
    for epoch in (0, 1, 5):
        rows = packed.rows(np.arange(len(packed)) + epoch * len(packed))
        found = sequences_of(rows)
        wanted = examples_of(plain.rows(np.arange(250) + epoch * 250))
        assert by_content(found) == by_content(wanted)
        counts = rows["input_mask"].max(axis=1)
        assert 1 <= counts.min() <= counts.max() <= most
        there = np.arange(most) < counts[:, None]
        assert np.array_equal(rows["next_sentence_weights"], there)
        assert not rows["next_sentence_labels"][~there].any()
        assert not rows["next_sentence_positions"][~there].any()
        padding = rows["input_mask"] == 0
        for name in ("input_ids", "segment_ids", "position_ids"):
            assert not rows[name][padding].any()
        assert (~padding).mean() == pytest.approx(packed.real_token_share, abs=1e-12)
    alone = open_reader(corpus, sequence_length=WIDE).real_token_share
    assert packed.real_token_share is not None and alone is not None
    assert packed.real_token_share > 1.5 * alone


def test_epochs_have_other_neighbours_and_other_masks(corpus: Path) -> None:
    reader = open_reader(corpus, sequence_length=WIDE, max_sequences_per_pack=3)
    epochs = [reader.rows(np.arange(len(reader)) + epoch * len(reader)) for epoch in range(2)]
    packs = []
    for rows in epochs:
        ids = rows["input_ids"].copy()
        for row in range(len(ids)):
            real = rows["masked_lm_weights"][row] > 0
            ids[row, rows["masked_lm_positions"][row][real]] = rows["masked_lm_ids"][row][real]
        packs.append({row.tobytes() for row in ids})
    assert len(packs[0]) == len(packs[1]) == len(reader)
    assert len(packs[0] & packs[1]) < len(reader) / 10
    assert len({tuple(e["tokens"]) for rows in epochs for e in sequences_of(rows)}) > 400


@pytest.mark.parametrize(
    "settings", [{"max_sequences_per_pack": 3, "sequence_length": WIDE}, {"bins": 2}]
)
def test_packs_and_bins_are_a_function_of_seed_and_step(
    corpus: Path, settings: dict[str, Any]
) -> None:
    straight = open_reader(corpus, **settings)
    steps = [straight[step] for step in range(40)]
    for start in (39, 17, 0, 23):
        resumed = open_reader(corpus, **settings)
        for step in range(start, min(start + 3, 40)):
            assert_equal(resumed[step], steps[step])
    other = open_reader(corpus, seed=7, **settings)[0]
    assert not np.array_equal(other["masked_lm_ids"], steps[0]["masked_lm_ids"])
    twos = open_reader(corpus, micro=2, **settings)
    for step in (0, 9, 15):
        assert_equal(flat(twos[step]), flat(steps[step]))


@pytest.mark.parametrize(
    "settings", [{"max_sequences_per_pack": 3, "sequence_length": WIDE}, {"bins": 3}]
)
@pytest.mark.parametrize("parts", [2, 3, 6])
def test_the_parts_of_a_step_put_together_are_the_step(
    corpus: Path, settings: dict[str, Any], parts: int
) -> None:
    whole = open_reader(corpus, examples=24, **settings)
    readers = [
        open_reader(corpus, examples=24, part=part, parts=parts, **settings)
        for part in range(parts)
    ]
    for step in (0, 6, 10, 57):
        shares = [reader[step] for reader in readers]
        joined = {name: np.concatenate([share[name] for share in shares]) for name in shares[0]}
        assert_equal(joined, whole[step])


def test_packs_are_read_right_over_the_ends_of_the_blocks_they_are_made_in(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"max_sequences_per_pack": 3, "sequence_length": WIDE}
    wanted = open_reader(corpus, **settings).rows(np.arange(300))
    monkeypatch.setattr("bert_cli.data.stream.reader.BLOCK", 21)
    assert_equal(open_reader(corpus, **settings).rows(np.arange(300)), wanted)


def test_a_corpus_without_pairs_has_packs_without_weights(tmp_path: Path) -> None:
    folder = make_corpus(tmp_path / "c", "dynamic", [40], next_sentence=False)
    rows = open_reader(folder, max_sequences_per_pack=2).rows(np.arange(20))
    assert rows["next_sentence_weights"].shape == (20, 2)
    assert not rows["next_sentence_weights"].any()


def test_bins_give_the_examples_of_their_records_with_less_padding(corpus: Path) -> None:
    binned, plain = open_reader(corpus, bins=2), open_reader(corpus)
    assert binned.is_binned and not plain.is_binned
    assert (len(binned), binned.left_out, binned.sequences) == (240, 10, 240)
    wanted = {tuple(e.values()) for e in examples_of(plain.rows(np.arange(250, 500)))}
    found, widths = [], set()
    for step in range(15, 30):  # the second epoch of both
        rows = flat(binned[step])
        assert tuple(rows) == FIELDS
        widths.add(rows["input_ids"].shape[1])
        found += [tuple(example.values()) for example in examples_of(rows)]
    assert len(set(found)) == 240
    assert set(found) <= wanted
    assert widths == {8, 16}
    assert binned.real_token_share is not None and plain.real_token_share is not None
    assert binned.real_token_share > plain.real_token_share


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"max_sequences_per_pack": 0}, ConfigError, r"max_sequences_per_pack \(0\): must be 1"),
        ({"bins": 0}, ConfigError, r"length_bins \(0\): must be 1"),
        (
            {"bins": 2, "max_sequences_per_pack": 2},
            ConfigError,
            r"length_bins \(2\): .* leave out one of the two",
        ),
        (
            {"bins": 2, "examples": 256},
            DataError,
            r"length_bins \(2\): the 250 records .* fewer than a step's 256",
        ),
    ],
)
def test_packs_and_bins_that_cannot_be_are_refused(
    corpus: Path, settings: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        open_reader(corpus, **settings)


def test_static_records_cannot_be_packed_or_binned_when_read(tmp_path: Path) -> None:
    folder = make_corpus(tmp_path / "c", "static", [20])
    with pytest.raises(DataError, match=r"\(2\): .* static and not packed; .*`bert pack"):
        open_reader(folder, max_sequences_per_pack=2)
    with pytest.raises(DataError, match=r"length_bins \(2\): .* static and padded"):
        open_reader(folder, bins=2)
    open_reader(folder, max_sequences_per_pack=1)


def test_how_a_stream_is_packed_is_part_of_its_fingerprint(corpus: Path) -> None:
    ways: list[dict[str, Any]] = [
        {}, {"max_sequences_per_pack": 2}, {"max_sequences_per_pack": 3}, {"bins": 2},
        {"max_sequences_per_pack": 2, "sequence_length": WIDE},
    ]  # fmt: skip
    assert len({open_reader(corpus, **way).fingerprint for way in ways}) == len(ways)
    assert (
        open_reader(corpus, max_sequences_per_pack=1).fingerprint == open_reader(corpus).fingerprint
    )


def test_a_frame_of_a_size_that_no_record_has_is_an_error(tmp_path: Path) -> None:
    folder = make_corpus(tmp_path / "c", "dynamic", [20, 10])
    offsets = np.fromfile(folder / "corpus.offsets", "<u8")
    offsets[7] += 1
    offsets.tofile(folder / "corpus.offsets")
    with pytest.raises(DataError, match=r"no record starts here|is not that of one dynamic record"):
        open_reader(folder, max_sequences_per_pack=2).rows(np.arange(15))


def test_the_lengths_of_records_are_known_without_reading_them(corpus: Path) -> None:
    reader = open_reader(corpus)
    starts = np.cumsum([0, *COUNTS])
    wanted = np.concatenate(
        [dynamic_records(int(s), n).lengths for s, n in zip(starts, COUNTS, strict=False) if n]
    )
    tokens = int(wanted.sum())
    assert reader.real_token_share == pytest.approx(tokens / (250 * S), abs=1e-12)
