"""Checksums of whole files in corpus.json: right, and not computed twice."""

import json
import os
from pathlib import Path

import google_crc32c
import pytest

from bert_cli.data.records.index import DESCRIPTION, write_corpus, write_index
from bert_cli.data.records.tfrecord import RecordWriter
from bert_cli.data.shards import checksums as module
from bert_cli.data.shards.checksums import Checksums, checksums, file_crc32c


def make_folder(folder: Path) -> dict[str, str]:
    """Two files of records and a vocabulary; a description of them."""
    for number in range(2):
        with RecordWriter(folder / f"{number}.tfrecord") as writer:
            writer.write_all(bytes([number]) * length for length in range(1, 9))
        write_index(folder / f"{number}.tfrecord")
    (folder / "vocab.txt").write_text("[PAD]\n")
    return {key: "x" for key in DESCRIPTION}


def test_a_checksum_is_that_of_the_bytes_however_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", 1000)
    (tmp_path / "check").write_bytes(b"123456789")
    assert file_crc32c(tmp_path / "check") == "e3069283"  # the check value of crc32c's definition
    data = os.urandom(3001)
    (tmp_path / "long").write_bytes(data)
    assert file_crc32c(tmp_path / "long") == f"{google_crc32c.value(data):08x}"


def test_corpus_json_has_the_checksum_of_every_file_that_makes_a_corpus(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, make_folder(tmp_path))
    assert corpus == json.loads((tmp_path / "corpus.json").read_text())
    names = [file["name"] for file in corpus["files"] + corpus["beside"]]
    assert names == ["0.tfrecord", "1.tfrecord", "corpus.offsets", "vocab.txt"]
    for file in corpus["files"] + corpus["beside"]:
        data = (tmp_path / file["name"]).read_bytes()
        assert file["bytes"] == len(data)
        assert file["crc32c"] == f"{google_crc32c.value(data):08x}"


def test_the_fingerprint_does_not_depend_on_checksums(tmp_path: Path) -> None:
    description = make_folder(tmp_path)
    before = write_corpus(tmp_path, description)
    path = tmp_path / "1.tfrecord"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # a record's checksum, in its place and size
    path.write_bytes(data)
    write_index(path)
    after = write_corpus(tmp_path, description)
    assert after["fingerprint"] == before["fingerprint"]
    assert after["files"][1]["crc32c"] != before["files"][1]["crc32c"]


def test_only_what_was_written_since_is_read_again(
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


@pytest.mark.parametrize("text", [None, "{", "[]", '{"files": [{"name": "a", "bytes": 100}]}'])
def test_a_corpus_json_that_says_nothing_of_use_is_passed_over(
    tmp_path: Path, text: str | None
) -> None:
    (tmp_path / "a").write_bytes(b"a" * 100)
    os.utime(tmp_path / "a", ns=(10**9, 10**9))
    if text is not None:
        (tmp_path / "corpus.json").write_text(text)
    (found,) = checksums(tmp_path, "a", Checksums(tmp_path / "corpus.json"))
    assert found["crc32c"] == file_crc32c(tmp_path / "a")
