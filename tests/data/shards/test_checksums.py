"""Checksums of files in corpus.json: right, and not computed twice."""

import json
import os
from pathlib import Path

import google_crc32c
import pytest

from bert_cli.data.records.index import DESCRIPTION, write_corpus, write_index
from bert_cli.data.records.tfrecord import RecordWriter
from bert_cli.data.shards import checksums as module
from bert_cli.data.shards.checksums import Checksums, checksums, file_crc32c


def test_a_checksum_is_that_of_the_bytes_however_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 1000)
    (tmp_path / "check").write_bytes(b"123456789")
    assert file_crc32c(tmp_path / "check") == "e3069283"  # the check value of crc32c's definition
    data = os.urandom(3001)
    (tmp_path / "long").write_bytes(data)
    assert file_crc32c(tmp_path / "long") == f"{google_crc32c.value(data):08x}"


def test_corpus_json_has_a_checksum_of_every_file_but_not_in_its_fingerprint(
    tmp_path: Path,
) -> None:
    for number in range(2):
        with RecordWriter(tmp_path / f"{number}.tfrecord") as writer:
            writer.write_all(bytes([number]) * length for length in range(1, 9))
        write_index(tmp_path / f"{number}.tfrecord")
    (tmp_path / "vocab.txt").write_text("[PAD]\n")
    description = {key: "x" for key in DESCRIPTION}
    before = write_corpus(tmp_path, description)
    assert before == json.loads((tmp_path / "corpus.json").read_text())
    entries = before["files"] + before["beside"]
    names = [entry["name"] for entry in entries]
    assert names == ["0.tfrecord", "1.tfrecord", "corpus.offsets", "vocab.txt"]
    for entry in entries:
        data = (tmp_path / entry["name"]).read_bytes()
        assert entry["bytes"] == len(data)
        assert entry["crc32c"] == f"{google_crc32c.value(data):08x}"
    path = tmp_path / "1.tfrecord"
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1  # in a record's checksum: no position or size changes
    path.write_bytes(changed)
    write_index(path)
    after = write_corpus(tmp_path, description)
    assert after["fingerprint"] == before["fingerprint"]
    assert after["files"][1]["crc32c"] != before["files"][1]["crc32c"]


def test_only_files_written_since_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 100)
        os.utime(tmp_path / name, ns=(10**9, 10**9))
    first = checksums(tmp_path, "abc")
    (tmp_path / "corpus.json").write_text(json.dumps({"files": first[:2], "beside": first[2:]}))
    os.utime(tmp_path / "corpus.json", ns=(2 * 10**9, 2 * 10**9))
    os.utime(tmp_path / "b", ns=(2 * 10**9, 2 * 10**9))  # in doubt it counts as newer
    (tmp_path / "c").write_bytes(b"c" * 101)
    os.utime(tmp_path / "c", ns=(10**9, 10**9))
    read: list[str] = []

    def count(path: Path) -> str:
        read.append(path.name)
        return file_crc32c(path)

    monkeypatch.setattr(module, "file_crc32c", count)
    again = checksums(tmp_path, "abc", Checksums(tmp_path / "corpus.json"))
    assert sorted(read) == ["b", "c"]
    assert again[:2] == first[:2] and again[2]["bytes"] == 101
    for text in ("{", "[]", '{"files": [{"name": "a", "bytes": 100}]}'):
        (tmp_path / "corpus.json").write_text(text)
        (entry,) = checksums(tmp_path, "a", Checksums(tmp_path / "corpus.json"))
        assert entry["crc32c"] == file_crc32c(tmp_path / "a")
