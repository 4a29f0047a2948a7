"""Copies of remote records: whole and verified, whoever is killed and whatever is damaged."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bert_cli
from bert_cli import files
from bert_cli.config.data import TokenizeSettings
from bert_cli.config.settings import is_remote
from bert_cli.data.records import tokenize
from bert_cli.data.records.corpus import read_corpus
from bert_cli.data.stream import remote
from bert_cli.data.stream.reader import Batching, Reader
from bert_cli.data.stream.remote import local_copy
from bert_cli.data.stream.source import open_records
from bert_cli.errors import ConfigError, DataError

fsspec = pytest.importorskip("fsspec")

SHARDS = 4
FILES = SHARDS + 3  # corpus.offsets, vocab.txt, tokenizer_config.json
SCRIPT = """
import sys
from pathlib import Path
from bert_cli.data.stream.remote import local_copy
print(local_copy(sys.argv[1], Path(sys.argv[2])))
"""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of records in four shards."""
    folder = tmp_path_factory.mktemp("records")
    words = [f"{letter}{number}" for letter in "abc" for number in range(7)]
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n")
    (folder / "text").mkdir()
    for file in range(SHARDS):
        lines = [
            " ".join(words[(file * 7 + line * 3 + place * line) % 21] for place in range(12))
            for line in range(40)
        ]
        documents = ("\n".join(lines[first : first + 10]) for first in range(0, 40, 10))
        (folder / "text" / f"{file}.txt").write_text("\n\n".join(documents) + "\n")
    out = folder / "out"
    tokenize.run(
        TokenizeSettings(
            input=folder / "text",
            out=out,
            vocab=str(folder / "vocab.txt"),
            sequence_length=32,
            mask_tokens=5,
            processes=1,
        )
    )
    return out


@pytest.fixture
def url(records: Path, tmp_path: Path) -> str:
    """The records in fsspec's memory, at an address of this test's own."""
    url = f"memory://bucket/{tmp_path.name}/records"
    files, root = fsspec.core.url_to_fs(url)
    for path in records.iterdir():
        if path.is_file():
            files.pipe_file(f"{root}/{path.name}", path.read_bytes())
    return url


def change(url: str, name: str, edit: Callable[[bytes], bytes]) -> None:
    files, root = fsspec.core.url_to_fs(url)
    files.pipe_file(f"{root}/{name}", edit(files.cat_file(f"{root}/{name}")))


def edit_corpus(edit: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def edited(data: bytes) -> bytes:
        corpus = json.loads(data)
        edit(corpus)
        return json.dumps(corpus).encode()

    return edited


def without_checksums(corpus: dict[str, Any]) -> None:
    del corpus["beside"]
    for file in corpus["files"]:
        del file["crc32c"]


def flip(data: bytes) -> bytes:
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were fetched, in order."""
    names: list[str] = []
    plain = remote.Remote.fetch

    def fetch(self: remote.Remote, name: str, target: Path) -> None:
        names.append(name)
        plain(self, name, target)

    monkeypatch.setattr(remote.Remote, "fetch", fetch)
    return names


def same_examples(first: Path, second: Path) -> None:
    ours, theirs = (
        Reader(open_records(folder, seed=3), Batching(8, 8)) for folder in (first, second)
    )
    assert ours.fingerprint == theirs.fingerprint
    for name, column in ours[5].items():
        assert np.array_equal(column, theirs[5][name])


class Handler(SimpleHTTPRequestHandler):
    """Serves files, counts them, and holds back one until it may go."""

    asked: Counter[str]
    held: str | None
    released: threading.Event

    def do_GET(self) -> None:
        name = self.path.rsplit("/", 1)[-1]
        type(self).asked[name] += 1
        if name == type(self).held:
            type(self).released.wait(30)
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(records: Path) -> Iterator[tuple[str, type[Handler]]]:
    """A web server on the records: its address, and its handler with what it was asked for."""
    kind = type("CountingHandler", (Handler,), {"asked": Counter(), "held": None})
    kind.released = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(kind, directory=str(records))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", kind
        kind.released.set()
        server.shutdown()
        thread.join()


def start(url: str, cache: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, url, str(cache)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(bert_cli.__file__).parents[1])},
    )


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("s3://bucket/a", True),
        ("memory://a", True),
        ("simplecache::s3://a/b", True),
        ("data/128", False),
        ("/data/a:b", False),
    ],
)
def test_an_address_is_told_from_a_folder(name: str, answer: bool) -> None:
    assert is_remote(name) is answer


def test_a_copy_is_read_like_the_folder_itself(url: str, records: Path, tmp_path: Path) -> None:
    folder = local_copy(url, tmp_path / "cache")
    assert folder.parent == tmp_path / "cache"
    assert read_corpus(folder) == read_corpus(records)
    same_examples(folder, records)
    left = {path.name for path in folder.iterdir()} - {path.name for path in records.iterdir()}
    assert left == {".lock"}


def test_files_of_this_machine_have_addresses_too(records: Path, tmp_path: Path) -> None:
    same_examples(local_copy(f"file://{records}", tmp_path / "cache"), records)


def test_a_whole_copy_is_not_fetched_again(
    url: str, tmp_path: Path, fetched: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = local_copy(url, tmp_path)
    assert len(fetched) == FILES
    assert "fetch: plan: 7 files, about " in capsys.readouterr().out
    assert local_copy(url + "/", tmp_path) == folder
    assert len(fetched) == FILES and capsys.readouterr().out == ""
    (folder / "wiki_002.tfrecord").unlink()
    (folder / "wiki_001.tfrecord").write_bytes(b"cut")
    assert local_copy(url, tmp_path) == folder
    assert sorted(fetched[FILES:]) == ["wiki_001.tfrecord", "wiki_002.tfrecord"]


def test_what_is_whole_is_kept_when_the_rest_fails(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetched: list[str]
) -> None:
    plain = remote.Remote.fetch

    def fail(self: remote.Remote, name: str, target: Path) -> None:
        if name == "wiki_002.tfrecord":
            target.write_bytes(b"half")
            with self.errors_at(name):
                raise ConnectionResetError("connection lost")
        plain(self, name, target)

    with monkeypatch.context() as patch:
        patch.setattr(remote, "CONNECTIONS", 1)
        patch.setattr(remote.Remote, "fetch", fail)
        with pytest.raises(DataError, match=r"wiki_002.*ConnectionResetError: connection lost"):
            local_copy(url, tmp_path)
    (folder,) = tmp_path.glob("records-*")
    assert not (folder / "corpus.json").exists()
    assert not [*folder.glob(".*.part")]
    assert FILES - 2 <= len(fetched) < FILES  # the last may have begun when the one before failed
    local_copy(url, tmp_path)
    assert len(fetched) == len({*fetched}) == FILES


def test_a_damaged_file_is_fetched_again_once(
    url: str, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, tries = remote.Remote.fetch, Counter[str]()

    def damage_once(self: remote.Remote, name: str, target: Path) -> None:
        tries[name] += 1
        plain(self, name, target)
        if tries[name] == 1 and name == "wiki_001.tfrecord":
            target.write_bytes(flip(target.read_bytes()))

    monkeypatch.setattr(remote.Remote, "fetch", damage_once)
    same_examples(local_copy(url, tmp_path), records)
    assert tries == Counter({name: 1 for name in tries}) + Counter(["wiki_001.tfrecord"])


@pytest.mark.parametrize("name", ["wiki_001.tfrecord", "corpus.offsets", "vocab.txt"])
def test_a_file_that_stays_damaged_is_refused_by_name(
    url: str, tmp_path: Path, fetched: list[str], name: str
) -> None:
    change(url, name, lambda data: data[:-1] + b"?")
    with pytest.raises(DataError, match=rf"{url}/{name}: has the checksum \w+, not \w+ as"):
        local_copy(url, tmp_path)
    assert fetched.count(name) == 2
    change(url, name, lambda data: data[:-1])
    with pytest.raises(DataError, match=rf"{name}: has \d+ bytes, not \d+ as in its corpus.json"):
        local_copy(url, tmp_path)


def test_a_corpus_that_changed_gets_a_folder_of_its_own(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = local_copy(url, tmp_path)
    change(url, "corpus.json", edit_corpus(lambda corpus: corpus.update(fingerprint="another")))
    second = local_copy(url, tmp_path)
    assert second != first and (first / "corpus.json").exists()
    assert read_corpus(second)["fingerprint"] == "another"
    assert f"{url} has changed since it was copied to {first}" in capsys.readouterr().out


def test_records_without_checksums_are_compared_by_size_and_that_is_said(
    url: str, records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fetched: list[str]
) -> None:
    change(url, "corpus.json", edit_corpus(without_checksums))
    folder = local_copy(url, tmp_path)
    assert "has no checksums, so sizes alone are compared" in capsys.readouterr().out
    same_examples(folder, records)
    assert (folder / "tokenizer_config.json").exists()
    assert not (folder / "tokenizer.json").exists()
    count = len(fetched)
    local_copy(url, tmp_path)
    assert len(fetched) == count
    change(url, "wiki_003.tfrecord", lambda data: data[:-1])
    (folder / "wiki_003.tfrecord").unlink()
    with pytest.raises(DataError, match=r"wiki_003.tfrecord: has \d+ bytes"):
        local_copy(url, tmp_path)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda data: b"{", "corpus.json: Invalid JSON"),
        (lambda data: b"[]", "corpus.json: Input should be an object"),
        (edit_corpus(lambda corpus: corpus.pop("files")), r"corpus.json \(files\): Field required"),
        (
            edit_corpus(lambda c: c["files"][0].update(name="../../evil")),
            "a file outside the folder is named",
        ),
        (
            edit_corpus(lambda c: c["beside"][0].update(name="/etc/evil")),
            "a file outside the folder is named",
        ),
    ],
)
def test_a_corpus_json_that_is_none_is_refused(
    url: str, tmp_path: Path, edit: Callable[[bytes], bytes], told: str
) -> None:
    change(url, "corpus.json", edit)
    with pytest.raises(DataError, match=told):
        local_copy(url, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_an_address_with_nothing_there_is_an_error_that_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"memory://no/where/corpus\.json: does not exist; give"):
        local_copy("memory://no/where", tmp_path)


def test_a_file_that_is_missing_there_is_named(url: str, tmp_path: Path) -> None:
    files, root = fsspec.core.url_to_fs(url)
    files.rm_file(f"{root}/wiki_002.tfrecord")
    with pytest.raises(DataError, match=r"wiki_002\.tfrecord: does not exist"):
        local_copy(url, tmp_path)


@pytest.mark.parametrize(("module", "package"), [("fsspec.core", "fsspec"), ("s3fs", "s3fs")])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ConfigError, match=rf"package {package} is not installed; .*pip install .*'fsspec=="
    ):
        local_copy("s3://bucket/records", tmp_path)


def test_an_unknown_kind_of_address_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nonsense://a.*Protocol not known"):
        local_copy("nonsense://a/b", tmp_path)


def test_a_disk_too_small_is_refused_before_the_first_file(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetched: list[str]
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: usage(1000))
    with pytest.raises(DataError, match="make room or choose a folder on another disk"):
        local_copy(url, tmp_path)
    assert fetched == []


def test_records_are_fetched_from_a_web_server(
    server: tuple[str, type[Handler]], records: Path, tmp_path: Path
) -> None:
    pytest.importorskip("aiohttp")
    address, handler = server
    same_examples(local_copy(address, tmp_path), records)
    with pytest.raises(DataError, match=r"/nothing/corpus\.json: does not exist"):
        local_copy(f"{address}/nothing", tmp_path)
    assert all(handler.asked[f"wiki_00{shard}.tfrecord"] == 1 for shard in range(SHARDS))


def test_a_web_server_that_is_down_is_no_traceback(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    with pytest.raises(DataError, match=r"cannot be fetched \(Client.*check the address"):
        local_copy("http://127.0.0.1:9/records", tmp_path)


def test_a_copy_killed_with_signal_9_is_continued(
    server: tuple[str, type[Handler]], records: Path, tmp_path: Path
) -> None:
    pytest.importorskip("aiohttp")
    address, handler = server
    handler.held = "wiki_003.tfrecord"
    process = start(address, tmp_path)
    try:
        wait_for(lambda: len([*tmp_path.glob("*/[a-z]*")]) == FILES - 1)
        wait_for(lambda: handler.asked["wiki_003.tfrecord"] == 1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    (folder,) = tmp_path.iterdir()
    assert not (folder / "corpus.json").exists()
    (folder / ".wiki_003.tfrecord.host.1.2.part").write_bytes(b"what was killed over")
    handler.held = None
    handler.released.set()
    assert local_copy(address, tmp_path) == folder
    same_examples(folder, records)
    assert not [*folder.glob(".*.part")]
    assert {name: n for name, n in handler.asked.items() if n > 1 and name != "corpus.json"} == {
        "wiki_003.tfrecord": 2
    }


def test_of_several_processes_one_fetches_and_the_others_wait(
    server: tuple[str, type[Handler]], records: Path, tmp_path: Path
) -> None:
    pytest.importorskip("aiohttp")
    address, handler = server
    handler.held = "wiki_003.tfrecord"
    processes = [start(address, tmp_path) for _ in range(3)]
    try:
        wait_for(lambda: handler.asked["corpus.json"] == 3)
        wait_for(lambda: handler.asked["wiki_003.tfrecord"] == 1)
        handler.released.set()
        told = [process.communicate(timeout=30) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum("another process fetches" in errors for _, errors in told) == 2
    assert len({out.splitlines()[-1] for out, _ in told}) == 1
    assert all(handler.asked[f"wiki_00{shard}.tfrecord"] == 1 for shard in range(SHARDS))
    same_examples(Path(told[0][0].splitlines()[-1]), records)


@pytest.mark.parametrize("name", ["corpus.json", "vocab.txt", "corpus.offsets"])
def test_a_small_file_of_a_copy_that_is_damaged_later_is_fetched_again(
    url: str, records: Path, tmp_path: Path, fetched: list[str], name: str
) -> None:
    folder = local_copy(url, tmp_path)
    for damage in (lambda data: data[:-1] + b"?", lambda data: data[:-1]):
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
        before = len(fetched)
        assert local_copy(url, tmp_path) == folder
        assert fetched[before:] == ([] if name == "corpus.json" else [name])
        same_examples(folder, records)


def test_a_shard_of_a_copy_that_is_damaged_later_says_what_fetches_it_again(
    url: str, records: Path, tmp_path: Path
) -> None:
    folder = local_copy(url, tmp_path)
    for path in folder.glob("*.tfrecord"):
        path.write_bytes(flip(path.read_bytes()))
    told = rf"\.tfrecord \(byte \d+\): .*; remove {folder}, it will be fetched again"
    with pytest.raises(DataError, match=told):
        same_examples(folder, records)
    shutil.rmtree(folder)
    same_examples(local_copy(url, tmp_path), records)
