"""The reader: a batch is a function of (seed, step), whatever the layout, the files or the start."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import PIECES, WORDS, P, S, dynamic_records, make_corpus, static_examples

from bert_cli.config.data import IndexSettings, Masking
from bert_cli.data.records import index
from bert_cli.data.records.columns import Batch
from bert_cli.data.records.example_proto import Feature, parse_features, serialize_examples, varint
from bert_cli.data.records.formats import dynamic_payloads, static_payloads
from bert_cli.data.records.index import write_corpus
from bert_cli.data.records.tfrecord import RecordWriter
from bert_cli.data.stream.reader import Reader
from bert_cli.data.stream.synthetic import GeneratedReader
from bert_cli.errors import ConfigError, DataError

SHAPES = {
    "input_ids": S,
    "input_mask": S,
    "segment_ids": S,
    "masked_lm_positions": P,
    "masked_lm_ids": P,
    "masked_lm_weights": P,
    "next_sentence_labels": None,
    "next_sentence_weights": None,
}


@pytest.fixture(scope="module", params=["static", "dynamic"])
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """250 records in files of different sizes, one of them empty."""
    folder = tmp_path_factory.mktemp("corpus") / request.param
    return make_corpus(folder, request.param, [100, 7, 0, 142, 1])


def open_reader(
    folder: Path | None, *, examples: int = 16, micro: int = 4, **settings: Any
) -> Reader | GeneratedReader:
    settings = {"seed": 1984} | settings
    if folder is None:
        return GeneratedReader(
            vocab_size=WORDS,
            examples_per_step=examples,
            micro_batch_size=micro,
            sequence_length=S,
            predictions=P,
            **settings,
        )
    return Reader(folder, examples_per_step=examples, micro_batch_size=micro, **settings)


def assert_equal(one: Batch, other: Batch) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def flat(batch: Batch) -> Batch:
    return {name: array.reshape(-1, *array.shape[2:]) for name, array in batch.items()}


def test_a_batch_has_the_shapes_and_types_of_its_micro_batches(corpus: Path) -> None:
    for reader in (open_reader(corpus), open_reader(None)):
        batch = reader[0]
        assert list(batch) == list(SHAPES)
        for name, width in SHAPES.items():
            assert batch[name].shape == ((4, 4) if width is None else (4, 4, width))
            assert batch[name].dtype == (np.float32 if name.endswith("weights") else np.int32)


def test_a_reader_opened_later_gives_the_same_steps_in_any_order(corpus: Path) -> None:
    for folder in (corpus, None):
        straight = open_reader(folder)
        steps = [straight[step] for step in range(40)]
        for start in (39, 17, 0, 23):
            resumed = open_reader(folder)
            for step in range(start, min(start + 3, 40)):
                assert_equal(resumed[step], steps[step])
        different = open_reader(folder, seed=7)[0]
        assert not np.array_equal(different["input_ids"], steps[0]["input_ids"])


def test_how_a_step_is_cut_into_micro_batches_changes_no_example(corpus: Path) -> None:
    for folder in (corpus, None):
        ones, twos = open_reader(folder, micro=8), open_reader(folder, micro=2)
        for step in (0, 3, 15):
            assert_equal(flat(ones[step]), flat(twos[step]))


def test_the_stream_does_not_depend_on_the_size_of_the_step(corpus: Path) -> None:
    small, large = open_reader(corpus, examples=8), open_reader(corpus, examples=40)
    joined = [flat(small[step]) for step in range(5, 10)]
    together = {name: np.concatenate([part[name] for part in joined]) for name in joined[0]}
    assert_equal(flat(large[1]), together)


def test_a_replica_can_read_its_share_alone(corpus: Path) -> None:
    for reader in (open_reader(corpus), open_reader(None)):
        whole = flat(reader[15])  # positions 240 to 255 lie in two epochs of the 250 records
        share = np.arange(15 * 16, 16 * 16)[3::5]
        got = reader.rows(share)
        assert_equal(got, {name: array[3::5] for name, array in whole.items()})


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_the_parts_of_a_step_put_together_are_the_step(corpus: Path, parts: int) -> None:
    for folder in (corpus, None):
        whole = open_reader(folder, examples=24, micro=4)
        readers = [
            open_reader(folder, examples=24, micro=4, part=part, parts=parts)
            for part in range(parts)
        ]
        for step in (0, 10, 57):  # step 10 lies in two epochs of the 250 records
            shares = [reader[step] for reader in readers]
            assert all(len(share["input_ids"]) == 6 // parts for share in shares)
            joined = {name: np.concatenate([share[name] for share in shares]) for name in shares[0]}
            assert_equal(joined, whole[step])


def test_a_step_that_cannot_be_divided_among_the_parts_is_refused(corpus: Path) -> None:
    for folder in (corpus, None):
        with pytest.raises(
            ConfigError, match=r"\(4 micro-batches a step\): cannot be divided among 3 processes"
        ):
            open_reader(folder, examples=16, micro=4, part=0, parts=3)


def test_every_epoch_reads_every_record_once(tmp_path: Path) -> None:
    folder = make_corpus(tmp_path / "c", "static", [100, 7, 0, 142, 1])
    reader = open_reader(folder, examples=25, micro=25)
    assert isinstance(reader, Reader)
    assert len(reader) == 250
    orders = []
    for epoch in range(3):
        steps = range(10 * epoch, 10 * epoch + 10)
        numbers = np.concatenate([reader[step]["input_ids"][0, :, 1] for step in steps])
        assert np.array_equal(np.sort(numbers), np.arange(250))
        orders.append(numbers)
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], np.arange(250))


def test_static_examples_come_back_as_they_were_written(tmp_path: Path) -> None:
    counts = [100, 7, 0, 142, 1]
    reader = open_reader(make_corpus(tmp_path / "c", "static", counts))
    starts = np.cumsum([0, *counts])
    parts = [static_examples(s, n) for s, n in zip(starts, counts, strict=False) if n]
    written = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    got = reader.rows(np.arange(250))
    numbers = got["input_ids"][:, 1]
    for name in written:
        np.testing.assert_array_equal(got[name], written[name][numbers], err_msg=name)


def test_dynamic_examples_are_the_pairs_with_a_mask_of_their_epoch(tmp_path: Path) -> None:
    folder = make_corpus(tmp_path / "c", "dynamic", [60])
    pairs = dynamic_records(0, 60)
    starts = np.concatenate(([0], np.cumsum(pairs.lengths)))
    written = {tuple(pairs.tokens[a:b]): n for n, (a, b) in enumerate(pairwise(starts))}
    reader = open_reader(folder)
    masks: dict[int, set[bytes]] = {number: set() for number in range(60)}
    for epoch in range(4):
        got = reader.rows(np.arange(60 * epoch, 60 * (epoch + 1)))
        seen = set()
        for row in range(60):
            ids = got["input_ids"][row].copy()
            length = int(got["input_mask"][row].sum())
            real = got["masked_lm_weights"][row] == 1.0
            places = got["masked_lm_positions"][row][real]
            assert real.sum() == min(P, max(1, round(0.15 * length)))
            assert np.all(np.diff(places) > 0)
            ids[places] = got["masked_lm_ids"][row][real]
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


def test_a_dynamic_corpus_is_read_with_other_lengths_and_a_static_one_is_not(
    corpus: Path,
) -> None:
    shape = {"sequence_length": S + 8, "predictions": 2}
    if corpus.name == "dynamic":
        wide, narrow = open_reader(corpus, **shape), open_reader(corpus)
        one, other = wide.rows(np.arange(50)), narrow.rows(np.arange(50))
        assert one["input_ids"].shape == (50, S + 8)
        assert one["masked_lm_ids"].shape == (50, 2)
        np.testing.assert_array_equal(one["input_mask"][:, :S], other["input_mask"])
        assert not one["input_mask"][:, S:].any()
    else:
        with pytest.raises(DataError, match=r"max_seq_length \(24\).* 16 places"):
            open_reader(corpus, sequence_length=S + 8)
        with pytest.raises(DataError, match=r"max_predictions_per_seq \(2\).* 4 masked"):
            open_reader(corpus, predictions=2)
    with pytest.raises(DataError, match=r"max_seq_length \(12\).* 16 places"):
        open_reader(corpus, sequence_length=12)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_examples_of_a_corpus_without_pairs_have_no_weight_in_the_next_sentence_loss(
    tmp_path: Path, kind: str
) -> None:
    with_pairs = make_corpus(tmp_path / "a", kind, [20])
    without = make_corpus(tmp_path / "b", kind, [20], next_sentence=False)
    assert np.array_equal(open_reader(with_pairs)[0]["next_sentence_weights"], np.ones((4, 4)))
    assert np.array_equal(open_reader(without)[0]["next_sentence_weights"], np.zeros((4, 4)))
    told = json.loads((without / "corpus.json").read_text())
    assert told["next_sentence"] is False
    assert open_reader(without).fingerprint != open_reader(with_pairs).fingerprint


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_reader_knows_its_sequences_and_real_tokens_where_the_files_tell_them(
    tmp_path: Path, kind: str
) -> None:
    reader = open_reader(make_corpus(tmp_path / "c", kind, [100, 7, 0, 142, 1]))
    assert isinstance(reader, Reader)
    assert (len(reader), reader.sequences, reader.left_out) == (250, 250, 0)
    if kind == "static":
        assert reader.real_token_share is None
    else:
        real = reader.rows(np.arange(250))["input_mask"].mean()
        assert reader.real_token_share == pytest.approx(real, abs=1e-12)


def test_whole_words_are_masked_whole_when_the_run_says_so(tmp_path: Path) -> None:
    folder = make_corpus(tmp_path / "c", "dynamic", [200], mask_tokens=8)
    words = Masking(unit="word", probability=0.5)
    got = open_reader(folder, masking=words).rows(np.arange(200))
    plain = open_reader(folder, masking=Masking(probability=0.5)).rows(np.arange(200))
    assert not np.array_equal(got["masked_lm_positions"], plain["masked_lm_positions"])
    for row in range(200):
        ids = got["input_ids"][row].copy()
        real = got["masked_lm_weights"][row] == 1.0
        places = set(got["masked_lm_positions"][row][real].tolist())
        ids[got["masked_lm_positions"][row][real]] = got["masked_lm_ids"][row][real]
        for place in range(2, S):
            continues = PIECES[ids[place]].startswith("##") and ids[place - 1] not in (2, 3)
            assert not continues or (place in places) == (place - 1 in places)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_changed_or_missing_vocabulary_is_noticed_when_opening(tmp_path: Path, kind: str) -> None:
    folder = make_corpus(tmp_path / "c", kind, [5])
    open_reader(folder)
    with (folder / "vocab.txt").open("a") as file:
        file.write("more\n")
    with pytest.raises(DataError, match=r"vocab\.txt \(checksum .*bring back the file"):
        open_reader(folder)
    (folder / "vocab.txt").unlink()
    with pytest.raises(DataError, match=r"vocab\.txt \(missing\)"):
        open_reader(folder)


def test_a_changed_vocabulary_without_checksum_is_noticed_where_it_decides_the_masks(
    tmp_path: Path,
) -> None:
    folder = make_corpus(tmp_path / "c", "dynamic", [5])
    words = Masking(unit="word")
    open_reader(folder, masking=words)
    corpus = json.loads((folder / "corpus.json").read_text())
    (folder / "corpus.json").write_text(json.dumps(corpus | {"beside": []}))
    with (folder / "vocab.txt").open("a") as file:
        file.write("more\n")
    open_reader(folder)
    with pytest.raises(DataError, match="is not the vocabulary"):
        open_reader(folder, masking=words)


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


def with_last_value(payload: bytes, column: str, value: int) -> bytes:
    """A record with another last value in a column, as TensorFlow writes it."""
    import tensorflow as tf

    example = tf.train.Example.FromString(payload)
    example.features.feature[column].int64_list.value[-1] = value
    written: bytes = example.SerializeToString()
    return written


@pytest.mark.parametrize(("column", "value"), IMPOSSIBLE)
def test_an_impossible_value_is_named_by_file_record_column_value_and_range(
    tmp_path: Path, column: str, value: float
) -> None:
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
    reader = open_reader(folder)
    shown = "2147483647" if value > 2**31 else f"{value:g}" if value != 999_999 else "999999"
    told = rf"wiki_001\.tfrecord \(record 3, counted from 0\): {column} has {shown}, which is outside 0 to \d+;"
    with pytest.raises(DataError, match=told):
        reader[0]
    with pytest.raises(DataError, match=told):
        index.run(IndexSettings(folder=folder, check=True, processes=1))
    index.run(IndexSettings(folder=folder, processes=1))


@pytest.mark.parametrize("change", [{"vocab_size": 500}, {"sequence_length": S - 1}])
def test_dynamic_records_are_checked_too(tmp_path: Path, change: dict[str, int]) -> None:
    folder = make_corpus(tmp_path / "c", "dynamic", [5, 5], **change)
    with pytest.raises(
        DataError, match=r"(tokens|lengths) has \d+, which is outside 0 to (499|15)"
    ):
        index.run(IndexSettings(folder=folder, check=True, processes=1))
    with pytest.raises(DataError):
        open_reader(folder)[0]


@pytest.mark.parametrize(
    ("extra", "shown"), [(1, r"\d+"), (2**40, "2147483647"), (2**70, "2147483647")]
)
def test_a_first_segment_longer_than_its_record_is_refused(
    tmp_path: Path, extra: int, shown: str
) -> None:
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
    told = rf"wiki_001\.tfrecord \(record 3, counted from 0\): first_lengths has {shown}, which is outside 0 to"
    with pytest.raises(DataError, match=told):
        open_reader(folder)[0]
    with pytest.raises(DataError, match=told):
        index.run(IndexSettings(folder=folder, check=True, processes=1))


def test_possible_values_pass_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("static", "dynamic"):
        folder = make_corpus(tmp_path / kind, kind, [5, 0, 5])
        index.run(IndexSettings(folder=folder, check=True, processes=2))
        assert "the values of all 10 records are possible" in capsys.readouterr().out


def test_a_step_must_be_whole_micro_batches(corpus: Path) -> None:
    for folder in (corpus, None):
        with pytest.raises(ConfigError, match=r"10 examples a step.*micro_batch_size 4"):
            open_reader(folder, examples=10, micro=4)


def test_a_corpus_smaller_than_a_step_is_read_several_times_within_it(tmp_path: Path) -> None:
    folder = make_corpus(tmp_path / "c", "static", [3])
    numbers = open_reader(folder, examples=12, micro=12)[0]["input_ids"][0, :, 1]
    assert [sorted(numbers[i : i + 3]) for i in range(0, 12, 3)] == [[0, 1, 2]] * 4


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_corrupt_record_is_named_by_file_and_byte(tmp_path: Path, kind: str) -> None:
    folder = make_corpus(tmp_path / "c", kind, [10, 10])
    path = folder / "wiki_001.tfrecord"
    lines = path.with_suffix(".index").read_text().splitlines()
    starts = [int(line.split()[0]) for line in lines]
    data = bytearray(path.read_bytes())
    data[starts[4] + 30] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"wiki_001\.tfrecord \(byte {starts[4]}\).*corrupt"):
        open_reader(folder, examples=20)[0]


def test_files_that_are_missing_or_changed_are_refused_when_opening(tmp_path: Path) -> None:
    folder = make_corpus(tmp_path / "c", "static", [10, 10])
    path = folder / "wiki_001.tfrecord"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(DataError, match=rf"{len(data) - 1} bytes.*says {len(data)} bytes"):
        open_reader(folder)
    path.unlink()
    with pytest.raises(DataError, match="missing"):
        open_reader(folder)
    path.write_bytes(data)
    offsets = folder / "corpus.offsets"
    offsets.write_bytes(offsets.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"corpus\.offsets \(152 bytes\).* 20 records"):
        open_reader(folder)
    offsets.unlink()
    with pytest.raises(DataError, match=r"corpus\.offsets \(0 bytes\)"):
        open_reader(folder)
    (folder / "corpus.json").unlink()
    with pytest.raises(DataError, match=r"corpus\.json: does not exist"):
        open_reader(folder)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_offsets_of_another_corpus_give_an_error_and_no_examples(tmp_path: Path, kind: str) -> None:
    """As many records, so that only the records themselves can tell."""
    folder = make_corpus(tmp_path / "c", kind, [20, 10])
    other = make_corpus(tmp_path / "other", kind, [10, 20], sequence_length=S)
    strange = (other / "corpus.offsets").read_bytes()
    assert len(strange) == (folder / "corpus.offsets").stat().st_size
    (folder / "corpus.offsets").write_bytes(strange)
    with pytest.raises(DataError, match=r"damaged or of another|no record starts here"):
        open_reader(folder, examples=32, micro=32)[0]


@pytest.mark.parametrize("place", [0, 7, 29])
@pytest.mark.parametrize("offset", [2**63 + 5, 2**40, 1])
def test_an_offset_that_cannot_be_is_an_error_and_no_crash(
    tmp_path: Path, place: int, offset: int
) -> None:
    folder = make_corpus(tmp_path / "c", "dynamic", [20, 10])
    offsets = np.fromfile(folder / "corpus.offsets", "<u8")
    offsets[place] = offset
    offsets.tofile(folder / "corpus.offsets")
    with pytest.raises(DataError, match=r"run `bert index"):
        open_reader(folder, examples=30, micro=30)[0]


def test_a_file_cut_while_the_run_goes_on_is_an_error_and_no_crash(tmp_path: Path) -> None:
    folder = make_corpus(tmp_path / "c", "dynamic", [50])
    reader = open_reader(folder, examples=50, micro=50)
    os.truncate(folder / "wiki_000.tfrecord", 500)
    with pytest.raises(DataError, match=r"wiki_000\.tfrecord \(byte \d+\)"):
        reader[0]


def test_the_fingerprint_is_that_of_the_corpus_or_the_made_up_shape(corpus: Path) -> None:
    told = json.loads((corpus / "corpus.json").read_text())["fingerprint"]
    assert open_reader(corpus).fingerprint == told
    assert open_reader(None).fingerprint == "generated V 1000 S 16 P 4"


FIRST_BATCH = """
import json, sys, time
from pathlib import Path
import numpy
if sys.argv[2] == "static":
    import tensorflow
from bert_cli.data.stream.reader import Reader
began = time.perf_counter()
reader = Reader(Path(sys.argv[1]), seed=3, examples_per_step=256, micro_batch_size=32)
opened = time.perf_counter() - began
batch = reader[3000]
first = time.perf_counter() - began
print(json.dumps({
    "records": len(reader), "opened": opened, "first": first, "shape": batch["input_ids"].shape,
    "tensorflow": "tensorflow" in sys.modules,
}))
"""


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_million_records_give_their_first_batch_within_two_seconds(
    tmp_path: Path, kind: str
) -> None:
    """Forty files of 25,000 real records; they are names of one file, so as not to fill the disk."""
    folder = make_corpus(tmp_path / "c", kind, [25_000], vocab_size=25_000)
    for number in range(1, 40):
        for suffix in (".tfrecord", ".index"):
            name = folder / f"wiki_{number:03}{suffix}"
            os.link(folder / f"wiki_000{suffix}", name)
    described = json.loads((folder / "corpus.json").read_text())
    write_corpus(folder, described)
    for text in folder.glob("*.index"):
        text.unlink()  # the text indexes are not for the reader
    done = subprocess.run(
        [sys.executable, "-c", FIRST_BATCH, str(folder), kind],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    told = json.loads(done.stdout)
    print(told)
    assert told["records"] == 1_000_000
    assert told["shape"] == [8, 32, S]
    assert told["opened"] < 0.5
    assert told["first"] < 2.0
    assert told["tensorflow"] == (kind == "static")
