"""Frames and their index, judged by TensorFlow and by the tfrecord package; nothing damaged is read."""

import mmap

import numpy as np
import pytest
from support.processes import index_of_tfrecord_package

from bert_cli.data.records.tfrecord import RecordWriter, read_payload, read_payloads
from bert_cli.errors import DataError


def written(path, rows=100):
    """Payloads of sizes that differ, written to a file."""
    numbers = np.random.default_rng(0)
    payloads = [numbers.bytes(int(size)) for size in numbers.integers(1, 400, rows)]
    with RecordWriter(path) as writer:
        for payload in payloads:
            writer.write(payload)
    assert writer.records == rows
    assert writer.bytes == path.stat().st_size
    return payloads


def test_the_index_is_what_the_tfrecord_package_makes(tmp_path):
    # More records than the writer holds back at once.
    path = tmp_path / "a.tfrecord"
    written(path, 3000)
    assert path.with_suffix(".index").read_text() == index_of_tfrecord_package(path)


def test_tensorflow_reads_the_file(tmp_path):
    import tensorflow as tf

    path = tmp_path / "a.tfrecord"
    payloads = written(path)
    assert [x.numpy() for x in tf.data.TFRecordDataset(str(path))] == payloads


def test_each_record_is_found_by_the_index(tmp_path):
    path = tmp_path / "a.tfrecord"
    payloads = written(path)
    index = np.loadtxt(path.with_suffix(".index"), np.int64)
    assert index.sum(axis=1).tolist()[:-1] == index[1:, 0].tolist()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for number in (0, 99, 50):
            assert read_payload(data, int(index[number, 0]), path) == payloads[number]


def test_no_records_make_two_empty_files(tmp_path):
    with RecordWriter(tmp_path / "a.tfrecord"):
        pass
    assert (tmp_path / "a.tfrecord").read_bytes() == b""
    assert (tmp_path / "a.index").read_bytes() == b""


def test_every_flipped_byte_and_every_cut_is_refused_with_its_place(tmp_path):
    path = tmp_path / "a.tfrecord"
    payloads = written(path, 2)
    first, second = np.loadtxt(path.with_suffix(".index"), np.int64)[:, 0].tolist()
    data = path.read_bytes()
    assert first == 0
    assert read_payloads([data[second:], data[:second]]) == payloads[::-1]
    assert read_payloads([]) == []
    for place in range(second):
        flipped = bytearray(data)
        flipped[place] ^= 1 << (place % 8)
        with pytest.raises(DataError, match=r"a\.tfrecord \(byte 0\)"):
            read_payload(flipped, 0, path)
        assert read_payloads([data[second:], bytes(flipped[:second])]) is None
    for end in (*range(20), second - 1, second - 4, second - 5):
        with pytest.raises(DataError, match=r"ends before|cut within"):
            read_payload(data[:end], 0, path)
        assert read_payloads([data[:end]]) is None
    with pytest.raises(DataError, match=r"byte 7.*no record starts here"):
        read_payload(data, 7, path)
