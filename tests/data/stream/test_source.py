"""Sources: the examples of a folder of records, and errors for damaged or impossible ones."""

import json
import os
import time
from itertools import pairwise

import numpy as np
import pytest
from support.corpora import PIECES, P, S, dynamic_records, make_corpus, open_stream, static_examples

from bert_cli.config.data import IndexSettings, Masking
from bert_cli.data.records import index
from bert_cli.data.records.example_proto import Feature, parse_features, serialize_examples, varint
from bert_cli.data.records.formats import dynamic_payloads, static_payloads
from bert_cli.data.records.index import write_corpus
from bert_cli.data.records.tfrecord import RecordWriter
from bert_cli.errors import DataError


def test_static_examples_come_back_as_they_were_written(tmp_path):
    counts = [100, 7, 0, 142, 1]
    reader = open_stream(make_corpus(tmp_path / "c", "static", counts))
    starts = np.cumsum([0, *counts])
    parts = [static_examples(s, n) for s, n in zip(starts, counts, strict=False) if n]
    written = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    got = reader.rows(np.arange(250))
    numbers = got["input_ids"][:, 1]
    for name in written:
        np.testing.assert_array_equal(got[name], written[name][numbers], err_msg=name)


def test_dynamic_examples_are_the_pairs_with_a_mask_of_their_epoch(tmp_path):
    folder = make_corpus(tmp_path / "c", "dynamic", [60])
    pairs = dynamic_records(0, 60)
    starts = np.concatenate(([0], np.cumsum(pairs.lengths)))
    written = {tuple(pairs.tokens[a:b]): n for n, (a, b) in enumerate(pairwise(starts))}
    reader = open_stream(folder)
    masks: dict[int, set[bytes]] = {number: set() for number in range(60)}
    for epoch in range(4):
        got = reader.rows(np.arange(60 * epoch, 60 * (epoch + 1)))
        seen = set()
        for row in range(60):
            ids = got["input_ids"][row].copy()
            length = int(got["input_mask"][row].sum())
            real = got["masked_lm_weights"][row] == 1.0
            positions = got["masked_lm_positions"][row][real]
            assert real.sum() == min(P, max(1, round(0.15 * length)))
            assert np.all(np.diff(positions) > 0)
            ids[positions] = got["masked_lm_ids"][row][real]
            number = written[tuple(ids[:length])]
            assert not ids[length:].any()
            assert np.array_equal(got["input_mask"][row], np.arange(S) < length)
            first = pairs.first_lengths[number]
            in_second = (np.arange(S) >= first) & (np.arange(S) < length)
            assert np.array_equal(got["segment_ids"][row], in_second)
            assert got["next_sentence_labels"][row] == pairs.next_sentence_labels[number]
            masks[number].add(got["input_ids"][row].tobytes())
            seen.add(number)
        assert len(seen) == 60
    assert sum(len(kinds) > 1 for kinds in masks.values()) > 50, "epochs share their masks"


def test_all_pieces_of_a_word_are_masked_together_when_the_run_sets_so(tmp_path):
    folder = make_corpus(tmp_path / "c", "dynamic", [200], mask_tokens=8)
    words = Masking(unit="word", probability=0.5)
    got = open_stream(folder, masking=words).rows(np.arange(200))
    plain = open_stream(folder, masking=Masking(probability=0.5)).rows(np.arange(200))
    assert not np.array_equal(got["masked_lm_positions"], plain["masked_lm_positions"])
    for row in range(200):
        ids = got["input_ids"][row].copy()
        real = got["masked_lm_weights"][row] == 1.0
        positions = set(got["masked_lm_positions"][row][real].tolist())
        ids[got["masked_lm_positions"][row][real]] = got["masked_lm_ids"][row][real]
        for position in range(2, S):
            continues = PIECES[ids[position]].startswith("##") and ids[position - 1] not in (2, 3)
            assert not continues or (position in positions) == (position - 1 in positions)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_changed_or_missing_vocabulary_is_noticed_when_opening(tmp_path, kind):
    folder = make_corpus(tmp_path / "c", kind, [5])
    open_stream(folder)
    with (folder / "vocab.txt").open("a") as file:
        file.write("more\n")
    with pytest.raises(DataError, match=r"vocab\.txt \(checksum .*bring back the file"):
        open_stream(folder)
    (folder / "vocab.txt").unlink()
    with pytest.raises(DataError, match=r"vocab\.txt \(missing\)"):
        open_stream(folder)


def test_a_changed_vocabulary_without_checksum_is_noticed_where_it_decides_the_masks(
    tmp_path,
):
    folder = make_corpus(tmp_path / "c", "dynamic", [5])
    words = Masking(unit="word")
    open_stream(folder, masking=words)
    corpus = json.loads((folder / "corpus.json").read_text())
    (folder / "corpus.json").write_text(json.dumps(corpus | {"beside": []}))
    with (folder / "vocab.txt").open("a") as file:
        file.write("more\n")
    open_stream(folder)
    with pytest.raises(DataError, match="is not the vocabulary"):
        open_stream(folder, masking=words)


IMPOSSIBLE = [
    ("input_ids", 999_999),
    ("input_ids", -3),
    ("input_ids", 2**32 + 5),
    ("input_mask", 2),
    ("segment_ids", 7),
    ("masked_lm_positions", 500),
    ("masked_lm_ids", 99_999),
    ("masked_lm_weights", np.nan),
    ("next_sentence_labels", 9),
]


def with_last_value(payload, column, value):
    """A record with another last value in a column, as TensorFlow writes it."""
    import tensorflow as tf

    example = tf.train.Example.FromString(payload)
    example.features.feature[column].int64_list.value[-1] = value
    written = example.SerializeToString()
    return written


@pytest.mark.parametrize(("column", "value"), IMPOSSIBLE)
def test_an_impossible_value_is_named_by_file_record_column_value_and_range(
    tmp_path, column, value
):
    folder = make_corpus(tmp_path / "c", "static", [5, 5])
    examples = static_examples(5, 5)
    examples[column] = examples[column].astype(np.float32 if column.endswith("weights") else int)
    examples[column].reshape(5, -1)[3, -1] = abs(value)
    payloads = list(static_payloads(examples))
    if value < 0:
        payloads[3] = with_last_value(payloads[3], column, int(value))
    with RecordWriter(folder / "wiki_001.tfrecord") as writer:
        writer.write_all(iter(payloads))
    write_corpus(folder, json.loads((folder / "corpus.json").read_text()))
    reader = open_stream(folder)
    shown = "2147483647" if value > 2**31 else f"{value:g}" if value != 999_999 else "999999"
    expected = rf"wiki_001\.tfrecord \(record 3, counted from 0\): {column} has {shown}, which is outside 0 to \d+;"
    with pytest.raises(DataError, match=expected):
        reader[0]
    with pytest.raises(DataError, match=expected):
        index.run(IndexSettings(folder=folder, check=True, processes=1))
    index.run(IndexSettings(folder=folder, processes=1))


@pytest.mark.parametrize("change", [{"vocab_size": 500}, {"sequence_length": S - 1}])
def test_dynamic_records_are_checked_too(tmp_path, change):
    folder = make_corpus(tmp_path / "c", "dynamic", [5, 5], **change)
    with pytest.raises(
        DataError, match=r"(tokens|lengths) has \d+, which is outside 0 to (499|15)"
    ):
        index.run(IndexSettings(folder=folder, check=True, processes=1))
    with pytest.raises(DataError):
        open_stream(folder)[0]


@pytest.mark.parametrize(
    ("extra", "shown"), [(1, r"\d+"), (2**40, "2147483647"), (2**70, "2147483647")]
)
def test_a_first_segment_longer_than_its_record_is_refused(tmp_path, extra: int, shown):
    folder = make_corpus(tmp_path / "c", "dynamic", [5, 5])
    records = dynamic_records(5, 5)
    payloads = list(dynamic_payloads(records))
    features = {name: [data] for name, data in parse_features(payloads[3]).items()}
    columns: list[Feature] = [
        ("first_length", "int64", [varint(int(records.lengths[3]) + extra)]),
        ("next_sentence_labels", "int64", features[b"next_sentence_labels"]),
        ("tokens", "bytes", features[b"tokens"]),
    ]
    (payloads[3],) = serialize_examples(columns, 1)
    with RecordWriter(folder / "wiki_001.tfrecord") as writer:
        writer.write_all(iter(payloads))
    write_corpus(folder, json.loads((folder / "corpus.json").read_text()))
    expected = rf"wiki_001\.tfrecord \(record 3, counted from 0\): first_lengths has {shown}, which is outside 0 to"
    with pytest.raises(DataError, match=expected):
        open_stream(folder)[0]
    with pytest.raises(DataError, match=expected):
        index.run(IndexSettings(folder=folder, check=True, processes=1))


def test_possible_values_pass_the_check(tmp_path, capsys):
    for kind in ("static", "dynamic"):
        folder = make_corpus(tmp_path / kind, kind, [5, 0, 5])
        index.run(IndexSettings(folder=folder, check=True, processes=2))
        assert "the values of all 10 records are possible" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_corrupt_record_is_named_by_file_and_byte(tmp_path, kind):
    folder = make_corpus(tmp_path / "c", kind, [10, 10])
    path = folder / "wiki_001.tfrecord"
    lines = path.with_suffix(".index").read_text().splitlines()
    starts = [int(line.split()[0]) for line in lines]
    data = bytearray(path.read_bytes())
    data[starts[4] + 30] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"wiki_001\.tfrecord \(byte {starts[4]}\).*corrupt"):
        open_stream(folder, examples=20)[0]


def test_files_that_are_missing_or_changed_are_refused_when_opening(tmp_path):
    folder = make_corpus(tmp_path / "c", "static", [10, 10])
    path = folder / "wiki_001.tfrecord"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(DataError, match=rf"{len(data) - 1} bytes.*says {len(data)} bytes"):
        open_stream(folder)
    path.unlink()
    with pytest.raises(DataError, match="missing"):
        open_stream(folder)
    path.write_bytes(data)
    offsets = folder / "corpus.offsets"
    offsets.write_bytes(offsets.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"corpus\.offsets \(152 bytes\).* 20 records"):
        open_stream(folder)
    offsets.unlink()
    with pytest.raises(DataError, match=r"corpus\.offsets \(0 bytes\)"):
        open_stream(folder)
    (folder / "corpus.json").unlink()
    with pytest.raises(DataError, match=r"corpus\.json: does not exist"):
        open_stream(folder)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_offsets_of_another_corpus_give_an_error_and_no_examples(tmp_path, kind):
    """As many records, so that only the records themselves can tell."""
    folder = make_corpus(tmp_path / "c", kind, [20, 10])
    other = make_corpus(tmp_path / "other", kind, [10, 20], sequence_length=S)
    strange = (other / "corpus.offsets").read_bytes()
    assert len(strange) == (folder / "corpus.offsets").stat().st_size
    (folder / "corpus.offsets").write_bytes(strange)
    with pytest.raises(DataError, match=r"damaged or of another|no record starts here"):
        open_stream(folder, examples=32, micro=32)[0]


def test_an_offset_that_cannot_be_is_an_error_and_no_crash(tmp_path):
    folder = make_corpus(tmp_path / "c", "dynamic", [20, 10])
    good = np.fromfile(folder / "corpus.offsets", "<u8")
    for record in (0, 7, 29):
        for offset in (2**63 + 5, 2**40, 1):
            offsets = good.copy()
            offsets[record] = offset
            offsets.tofile(folder / "corpus.offsets")
            with pytest.raises(DataError, match=r"run `bert index"):
                open_stream(folder, examples=30, micro=30)[0]
    offsets = good.copy()
    offsets[7] += 1
    offsets.tofile(folder / "corpus.offsets")
    with pytest.raises(DataError, match=r"no record starts here|is not that of one dynamic record"):
        open_stream(folder, max_sequences_per_pack=2).rows(np.arange(15))


def test_a_file_cut_while_the_run_goes_on_is_an_error_and_no_crash(tmp_path):
    folder = make_corpus(tmp_path / "c", "dynamic", [50])
    reader = open_stream(folder, examples=50, micro=50)
    os.truncate(folder / "wiki_000.tfrecord", 500)
    with pytest.raises(DataError, match=r"wiki_000\.tfrecord \(byte \d+\)"):
        reader[0]


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_examples_of_records_without_pairs_have_no_weight_in_the_next_sentence_loss(tmp_path, kind):
    with_pairs = make_corpus(tmp_path / "a", kind, [40])
    without = make_corpus(tmp_path / "b", kind, [40], next_sentence=False)
    assert np.array_equal(open_stream(with_pairs)[0]["next_sentence_weights"], np.ones((4, 4)))
    assert np.array_equal(open_stream(without)[0]["next_sentence_weights"], np.zeros((4, 4)))
    assert not open_stream(without).has_next_sentences
    assert open_stream(without).fingerprint != open_stream(with_pairs).fingerprint
    if kind == "dynamic":
        weights = open_stream(without, max_sequences_per_pack=2).rows(np.arange(20))[
            "next_sentence_weights"
        ]
        assert weights.shape == (20, 2)
        assert not weights.any()


def test_dynamic_records_are_read_with_other_lengths(tmp_path):
    folder = make_corpus(tmp_path / "c", "dynamic", [100])
    wide, narrow = open_stream(folder, sequence_length=S + 8, predictions=2), open_stream(folder)
    one, other = wide.rows(np.arange(50)), narrow.rows(np.arange(50))
    assert one["input_ids"].shape == (50, S + 8)
    assert one["masked_lm_ids"].shape == (50, 2)
    np.testing.assert_array_equal(one["input_mask"][:, :S], other["input_mask"])
    assert not one["input_mask"][:, S:].any()
    lengths = open_stream(folder, max_sequences_per_pack=2).source.files.lengths()
    np.testing.assert_array_equal(lengths, dynamic_records(0, 100).lengths)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_million_records_give_their_first_batch_within_two_seconds(tmp_path, kind):
    """Forty files of 25,000 real records; they are names of one file, so as not to fill the disk."""
    if kind == "static":
        import tensorflow  # noqa: F401
    folder = make_corpus(tmp_path / "c", kind, [25_000], vocab_size=25_000)
    for number in range(1, 40):
        for suffix in (".tfrecord", ".index"):
            os.link(folder / f"wiki_000{suffix}", folder / f"wiki_{number:03}{suffix}")
    write_corpus(folder, json.loads((folder / "corpus.json").read_text()))
    for text in folder.glob("*.index"):
        text.unlink()  # the text indexes are not for the reader
    began = time.perf_counter()
    reader = open_stream(folder, examples=256, micro=32)
    seconds = time.perf_counter() - began
    assert reader.epoch_size == 1_000_000
    assert reader[3000]["input_ids"].shape == (8, 32, S)
    assert seconds < 0.5
    assert time.perf_counter() - began < 2.0
