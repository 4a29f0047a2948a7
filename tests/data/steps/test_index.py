"""Frames, judged by TensorFlow; the index, by the tfrecord package; what is corrupt or does not fit is rejected."""

import bz2
import gzip
import json
import os
import subprocess
import sys
import zlib

import numpy as np
import pytest

from bert_cli.config.data import IndexSettings
from bert_cli.data.records import tfrecord
from bert_cli.data.records.corpus import read_corpus
from bert_cli.data.records.index import read_index, record_files, write_corpus, write_index
from bert_cli.data.records.tfrecord import RecordWriter
from bert_cli.data.steps.index import run
from bert_cli.errors import DataError

DESCRIBED = {
    "masking": "static",
    "sequence_length": 8,
    "mask_tokens": 2,
    "masked_lm_prob": 0.15,
    "whole_word_masking": False,
    "vocab_size": 30,
    "vocab_sha256": "ab" * 32,
    "token_bytes": 2,
    "special_ids": {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4},
    "tokenizer": {"do_lower_case": True},
}
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "wiki", "##pedia", "and", "so", "on"]


def index_of_tfrecord_package(path):
    """Return the tfrecord package's index of a record file; it cannot be imported together with TensorFlow."""
    index = path.with_suffix(".reference")
    # Its protobuf classes are older than protobuf 7, which supports them in Python only.
    environment = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    command = [sys.executable, "-m", "tfrecord.tools.tfrecord2idx", str(path), str(index)]
    subprocess.run(command, check=True, env=environment)
    text = index.read_text()
    index.unlink()
    return text


def write_records(path, count, seed=0):
    """Write payloads of many lengths, from none to longer than a read buffer; return them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 3000, count).tolist()
    lengths[count // 2] = (1 << 20) + 17
    payloads = [rng.bytes(length) for length in lengths]
    with RecordWriter(path) as writer:
        writer.write_all(payloads[: count // 2])
        writer.write_all(payloads[count // 2 :])
    assert (writer.records, writer.bytes) == (count, path.stat().st_size)
    return payloads


def test_a_compressed_record_file_is_named_with_what_to_do(tmp_path):
    path = tmp_path / "a.tfrecord"
    write_records(path, 3)
    plain = path.read_bytes()
    for kind, pack in (("gzip", gzip.compress), ("zlib", zlib.compress), ("bzip2", bz2.compress)):
        path.write_bytes(pack(plain))
        with pytest.raises(DataError, match=rf"a.tfrecord: is compressed with {kind}; unpack it"):
            write_index(path)
    path.rename(tmp_path / "a.tfrecord.gz")
    path.with_suffix(".index").unlink()
    with pytest.raises(DataError, match=r"no .tfrecord files; use a folder of records, and unpack"):
        record_files(tmp_path)


def write_foreign(folder):
    """Write records as another tool does: by TensorFlow, features in any order, no index."""
    import tensorflow as tf

    columns = {
        "input_ids": [2, 5, 4, 3, 7, 8, 3, 0],
        "input_mask": [1, 1, 1, 1, 1, 1, 1, 0],
        "segment_ids": [0, 0, 0, 0, 1, 1, 1, 0],
        "masked_lm_positions": [2, 0],
        "masked_lm_ids": [6, 0],
        "next_sentence_labels": [1],
    }
    example = tf.train.Example()
    for column, values in columns.items():
        example.features.feature[column].int64_list.value.extend(values)
    example.features.feature["masked_lm_weights"].float_list.value.extend([1.0, 0.0])
    folder.mkdir()
    for name in ("b.tfrecord", "a.tfrecord"):
        with tf.io.TFRecordWriter(str(folder / name)) as writer:
            for _ in range(3):
                writer.write(example.SerializeToString())


def index(folder, vocab=None):
    run(IndexSettings(folder=folder, vocab=None if vocab is None else str(vocab), processes=2))


# --- frames and the index of a file


def test_tensorflow_and_the_tfrecord_package_read_the_same_records_and_index(tmp_path):
    import tensorflow as tf

    path = tmp_path / "x.tfrecord"
    payloads = write_records(path, 200)
    assert [x.numpy() for x in tf.data.TFRecordDataset(str(path))] == payloads
    by_the_writer = (tmp_path / "x.index").read_bytes()
    (tmp_path / "x.index").unlink()
    assert write_index(path) == path.stat().st_size
    from_the_frames = (tmp_path / "x.index").read_bytes()
    assert from_the_frames == index_of_tfrecord_package(path).encode() == by_the_writer
    assert np.array_equal(np.diff(read_index(path)), [len(payload) + 16 for payload in payloads])
    path.write_bytes(b"")
    write_index(path)
    assert read_index(path).tolist() == [0]


def test_every_flipped_byte_and_every_cut_of_a_frame_is_rejected(tmp_path):
    path = tmp_path / "x.tfrecord"
    with RecordWriter(path) as writer:
        writer.write_all((b"the first payload", b"second!"))
    data, start = path.read_bytes(), 17 + 16
    first, second = data[:start], data[start:]

    def read(*frames):
        return tfrecord.read_payloads(frames, "row {}".format, "rebuild it")

    assert read(second, first) == [b"second!", b"the first payload"]
    assert read() == []
    flipped = [
        first[:at] + bytes([first[at] ^ 1 << at % 8]) + first[at + 1 :] for at in range(start)
    ]
    cut = [first[:end] for end in range(start)]
    for frame in (*flipped, *cut, data[7:start], data):
        with pytest.raises(DataError, match=r"row 1: no record .* corrupt .*; rebuild it"):
            read(second, frame)
    # The index is made from the heads and the sizes alone.
    path.with_suffix(".index").unlink()
    for frame in (*flipped[:12], *cut[1:]):
        path.write_bytes(second + frame)
        with pytest.raises(DataError, match=r"x\.tfrecord \(byte 23 of \d+\): no record starts"):
            write_index(path)
        assert not path.with_suffix(".index").exists()


def test_indexing_skips_the_payloads(tmp_path):
    """A sparse file of a terabyte, which nothing could read in the time of a test."""
    path = tmp_path / "x.tfrecord"
    length = (1 << 40).to_bytes(8, "little")
    path.write_bytes(length + tfrecord.masked_crc(length))
    os.truncate(path, (1 << 40) + 16)
    assert write_index(path) == (1 << 40) + 16
    assert (tmp_path / "x.index").read_text() == f"0 {(1 << 40) + 16}\n"


def test_an_index_that_does_not_fit_its_file_is_not_used(tmp_path):
    path, text = tmp_path / "x.tfrecord", tmp_path / "x.index"
    write_records(path, 6)
    good, data, time = text.read_text(), path.read_bytes(), path.stat().st_mtime_ns
    lines = good.splitlines(keepends=True)
    wrong = [lines[:-1], lines[1:], [lines[1], lines[0], *lines[2:]]]
    for lines_of_text in (*wrong, ["offsets and sizes"], ["0 1 2"], []):
        text.write_text("".join(lines_of_text))
        assert read_index(path) is None, lines_of_text
    text.write_text(good)
    assert read_index(path) is not None
    os.utime(text, ns=(0, time - 1))
    assert read_index(path) is None, "it is older than its records"
    # The file grew or shrank and has its old time, as copies have: only the sizes differ.
    text.write_text(good)
    for changed in (data + data[:21], data[:-24]):
        path.write_bytes(changed)
        os.utime(path, ns=(time, time))
        with pytest.raises(DataError, match=r"does not match the file; run `bert index"):
            write_corpus(tmp_path, DESCRIBED)


# --- corpus.json


def test_a_corpus_lists_its_files_by_name_and_every_offset(tmp_path, monkeypatch):
    counts = {"b.tfrecord": 4, "a.tfrecord": 3, "sub/c.tfrecord": 5, ".partial/half.tfrecord": 2}
    for name, count in counts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_records(tmp_path / name, count)
    corpus = write_corpus(tmp_path, DESCRIBED)
    listed = [(file["name"], file["records"]) for file in corpus["files"]]
    assert listed == [("a.tfrecord", 3), ("b.tfrecord", 4), ("sub/c.tfrecord", 5)]
    assert corpus["records"] == 12
    assert corpus == read_corpus(tmp_path) == json.loads((tmp_path / "corpus.json").read_text())
    assert {key: corpus[key] for key in DESCRIBED} == DESCRIBED
    offsets = np.fromfile(tmp_path / "corpus.offsets", "<u8")
    each = [read_index(path)[:-1] for path in record_files(tmp_path)]
    assert np.array_equal(offsets, np.concatenate(each))
    # A call that is killed leaves no description of other offsets.
    monkeypatch.setattr("bert_cli.data.records.index.checksums", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        write_corpus(tmp_path, DESCRIBED)
    assert not (tmp_path / "corpus.json").exists()


def test_the_fingerprint_changes_with_what_the_records_are_and_with_nothing_else(tmp_path):
    write_records(tmp_path / "a.tfrecord", 4)
    fingerprints = {write_corpus(tmp_path, DESCRIBED)["fingerprint"]}
    # Also what decides the masks of dynamic records, which their bytes do not show.
    changes = {"sequence_length": 9, "mask_tokens": 3, "masked_lm_prob": 0.3, "token_bytes": 4}
    changes |= {"vocab_sha256": "cd" * 32, "whole_word_masking": True, "next_sentence": False}
    changes |= {"special_ids": {**DESCRIBED["special_ids"], "mask": 9}}
    for key, value in changes.items():
        fingerprints.add(write_corpus(tmp_path, DESCRIBED | {key: value})["fingerprint"])
    for seed in (0, 1):
        write_records(tmp_path / "b.tfrecord", 4, seed)
        fingerprints.add(write_corpus(tmp_path, DESCRIBED)["fingerprint"])
    for sizes in ((10, 20), (20, 10)):  # files of one size
        with RecordWriter(tmp_path / "b.tfrecord") as writer:
            writer.write_all(map(bytes, sizes))
        fingerprints.add(write_corpus(tmp_path, DESCRIBED)["fingerprint"])
    assert len(fingerprints) == 13


def test_an_unfinished_folder_or_an_invalid_corpus_json_is_rejected_with_the_command(tmp_path):
    write_records(tmp_path / "a.tfrecord", 4)
    (tmp_path / "corpus.json").write_text('{"format": 1, "masking": "static"}')
    with pytest.raises(DataError, match=r"corpus\.json.*`bert index .* --vocab vocab\.txt`"):
        read_corpus(tmp_path)
    (tmp_path / ".done").mkdir()
    for refused in (read_corpus, index):
        with pytest.raises(DataError, match="the step that writes it is not complete"):
            refused(tmp_path)


def test_folders_without_records_are_rejected(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        index(tmp_path / "no")
    with pytest.raises(DataError, match=r"no \.tfrecord files"):
        index(tmp_path)
    (tmp_path / "a.tfrecord").touch()
    (tmp_path / "a.index").touch()
    (tmp_path / "corpus.json").write_text("{}")
    with pytest.raises(DataError, match="no records"):
        write_corpus(tmp_path, DESCRIBED)
    assert (tmp_path / "corpus.json").exists()


def test_bert_index_makes_only_what_is_absent_and_stops_at_a_corrupt_file(tmp_path, capsys):
    for name in "abc":
        write_records(tmp_path / f"{name}.tfrecord", 6)
    before = write_corpus(tmp_path, DESCRIBED)
    time_of_a = (tmp_path / "a.index").stat().st_mtime_ns
    text_of_b = (tmp_path / "b.index").read_bytes()
    (tmp_path / "b.index").unlink()
    (tmp_path / "corpus.offsets").unlink()
    data = (tmp_path / "b.tfrecord").read_bytes()
    (tmp_path / "b.tfrecord").write_bytes(data[:-1])
    with pytest.raises(DataError, match=r"b\.tfrecord \(byte \d+"):
        index(tmp_path)
    (tmp_path / "b.tfrecord").write_bytes(data)
    index(tmp_path)
    assert (tmp_path / "a.index").stat().st_mtime_ns == time_of_a
    assert (tmp_path / "b.index").read_bytes() == text_of_b
    assert read_corpus(tmp_path) == before
    assert capsys.readouterr().out.startswith("index: 18 records")
    manifest = json.loads((tmp_path / "index_manifest.json").read_text())
    assert manifest["counts"]["records"] == 18
    # All indexes count, also those that an earlier start made.
    sizes = [path.stat().st_size for path in tmp_path.glob("*.index")]
    assert len(sizes) == 3 and manifest["counts"]["bytes_out"] == 8 * 18 + sum(sizes)
    assert [shard["indexed"] for shard in manifest["shards"]] == [False, True, False]


def test_a_check_compares_a_copy_with_its_corpus_json(tmp_path):
    """A shard that is missing, and one without its last record, which are both valid records."""
    for name in "ab":
        write_records(tmp_path / f"{name}.tfrecord", 6)
    write_corpus(tmp_path, DESCRIBED)
    data = (tmp_path / "b.tfrecord").read_bytes()
    end = int(read_index(tmp_path / "b.tfrecord")[-2])
    for change in (data[:end], None):
        (tmp_path / "b.tfrecord").unlink()
        if change is not None:
            (tmp_path / "b.tfrecord").write_bytes(change)
        with pytest.raises(DataError, match=r"b\.tfrecord \((checksum|missing).*corpus.json says"):
            run(IndexSettings(folder=tmp_path, check=True))


# --- records of other tools


def test_records_of_another_tool_are_described_by_the_first_one_and_the_vocabulary(tmp_path):
    folder, vocab = tmp_path / "records", tmp_path / "vocab.txt"
    write_foreign(folder)
    with pytest.raises(DataError, match="--vocab"):
        index(folder)
    for pieces, message in (
        (PIECES[1:], r"\[PAD\]"),
        (["a", *PIECES], r"starts with id 2 and has ids up to 8, but \[CLS\] has id 3"),
        (PIECES[:7], r"\[CLS\] has id 2 of 7"),
    ):
        vocab.write_text("\n".join(pieces))
        with pytest.raises(DataError, match=message):
            index(folder, vocab)
    assert not (folder / "corpus.json").exists()
    vocab.write_text("\n".join(PIECES) + "\n")
    index(folder, vocab)
    corpus = read_corpus(folder)
    expected = {"records": 6, "masking": "static", "sequence_length": 8, "mask_tokens": 2}
    expected |= {"vocab_size": 10, "special_ids": DESCRIBED["special_ids"]}
    assert {key: corpus[key] for key in expected} == expected
    assert (folder / "vocab.txt").read_bytes() == vocab.read_bytes()
    assert json.loads((folder / "tokenizer_config.json").read_text())["do_lower_case"] is True
    for again in (None, vocab):
        index(folder, again)
        assert read_corpus(folder) == corpus
    (tmp_path / "other.txt").write_text("\n".join([*PIECES, "More"]) + "\n")
    with pytest.raises(DataError, match="is not the vocabulary"):
        index(folder, tmp_path / "other.txt")
    # The command in the message for an invalid corpus.json writes it again.
    (folder / "corpus.json").write_text("{")
    with pytest.raises(DataError, match=rf"`bert index {folder} --vocab {folder}/vocab\.txt`"):
        index(folder)
    (folder / "corpus.json").unlink()
    index(folder, folder / "vocab.txt")
    assert read_corpus(folder) == corpus
    with (folder / "vocab.txt").open("a") as file:
        file.write("more\n")
    problem = r"vocab\.txt\): is not the vocabulary .*; restore the original file"
    with pytest.raises(DataError, match=problem):
        index(folder)
    # Capital letters show a cased vocabulary.
    vocab.write_text("\n".join([*PIECES, "Wiki"]) + "\n")
    (folder / "corpus.json").unlink()
    index(folder, vocab)
    assert read_corpus(folder)["tokenizer"]["do_lower_case"] is False


def test_files_without_bert_records_are_rejected(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES))
    for payload in (b"\xff\xff", *tfrecord.serialize_examples([("image", "bytes", [b"x"])])):
        with RecordWriter(tmp_path / "a.tfrecord") as writer:
            writer.write_all([payload])
        with pytest.raises(DataError, match=r"is not a tf\.train\.Example with input_ids"):
            index(tmp_path, tmp_path / "vocab.txt")
