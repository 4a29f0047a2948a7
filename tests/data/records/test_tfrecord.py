"""Frames, judged by TensorFlow; no damaged record is read. `test_index` has the judge of the index."""

import mmap

import numpy as np
import pytest

from bert_cli.data.records.tfrecord import RecordWriter, read_payload, read_payloads
from bert_cli.errors import DataError


def written(path, rows=100):
    """Write payloads of different sizes to a file and return them."""
    numbers = np.random.default_rng(0)
    payloads = [numbers.bytes(int(size)) for size in numbers.integers(1, 400, rows)]
    with RecordWriter(path) as writer:
        for payload in payloads:
            writer.write(payload)
    assert writer.records == rows
    assert writer.bytes == path.stat().st_size
    return payloads


def test_tensorflow_reads_the_file_and_the_index_has_every_record(tmp_path):
    import tensorflow as tf

    path = tmp_path / "a.tfrecord"
    payloads = written(path)
    assert [x.numpy() for x in tf.data.TFRecordDataset(str(path))] == payloads
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


def test_every_flipped_byte_and_every_cut_is_rejected_with_its_byte(tmp_path):
    path = tmp_path / "a.tfrecord"
    payloads = written(path, 2)
    first, second = np.loadtxt(path.with_suffix(".index"), np.int64)[:, 0].tolist()
    data = path.read_bytes()
    assert first == 0
    assert read_payloads([data[second:], data[:second]]) == payloads[::-1]
    assert read_payloads([]) == []
    for byte in range(second):
        flipped = bytearray(data)
        flipped[byte] ^= 1 << (byte % 8)
        with pytest.raises(DataError, match=r"a\.tfrecord \(byte 0\)"):
            read_payload(flipped, 0, path)
        assert read_payloads([data[second:], bytes(flipped[:second])]) is None
    for end in (*range(20), second - 1, second - 4, second - 5):
        with pytest.raises(DataError, match=r"\(byte 90\): .*(ends before|cut within)"):
            read_payload(data[:end], 0, path, base=90)
        assert read_payloads([data[:end]]) is None
    with pytest.raises(DataError, match=r"byte 7.*no record starts here"):
        read_payload(data, 7, path)
