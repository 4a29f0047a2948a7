"""Copies of remote records: complete and verified, whoever is killed and whatever is damaged."""

import json
import os
import subprocess
import sys
import threading
from collections import Counter, namedtuple
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.corpora import assert_equal, make_corpus, open_stream
from support.processes import wait_for

import bert_cli
from bert_cli import files
from bert_cli.data.examples import remote
from bert_cli.data.examples.remote import local_copy
from bert_cli.data.records.corpus import read_corpus
from bert_cli.errors import ConfigError, DataError

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

SHARDS = 4
FILES = SHARDS + 3  # corpus.offsets, vocab.txt, tokenizer_config.json


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """A folder of eight records, as many as a batch has, in four shards."""
    return make_corpus(tmp_path_factory.mktemp("records") / "out", "static", [2] * SHARDS)


@pytest.fixture
def url(records, tmp_path):
    """The records in fsspec's memory, at an address of this test's own."""
    url = f"memory://bucket/{tmp_path.name}/records"
    files, root = fsspec.core.url_to_fs(url)
    for path in records.iterdir():
        if path.is_file():
            files.pipe_file(f"{root}/{path.name}", path.read_bytes())
    return url


@pytest.fixture
def fetched(monkeypatch):
    """Names of the files that were fetched, in order."""
    names: list[str] = []
    plain = remote.Remote.fetch

    def fetch(self, name, target):
        names.append(name)
        plain(self, name, target)

    monkeypatch.setattr(remote.Remote, "fetch", fetch)
    return names


def same_examples(first, second):
    ours, theirs = (open_stream(folder, examples=8, micro=8) for folder in (first, second))
    assert ours.fingerprint == theirs.fingerprint
    assert_equal(ours[5], theirs[5])


class Handler(SimpleHTTPRequestHandler):
    """Serves files, counts them, and holds back one until it may go."""

    asked: Counter[str]
    held: str | None
    released: threading.Event

    def do_GET(self):
        name = self.path.rsplit("/", 1)[-1]
        type(self).asked[name] += 1
        if name == type(self).held:
            type(self).released.wait(30)
        super().do_GET()

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server(records):
    """A web server on the records: its address, and its handler with what it was asked for."""
    kind = type("CountingHandler", (Handler,), {"asked": Counter(), "held": None})
    kind.released = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(kind, directory=str(records))) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}", kind
        kind.released.set()
        server.shutdown()


def start(url, cache, output):
    """Start a process that fetches and writes its output and errors to a file."""
    code = "import sys; from pathlib import Path; from bert_cli.data.examples.remote import local_copy; "
    code += "print(local_copy(sys.argv[1], Path(sys.argv[2])))"
    environment = os.environ | {"PYTHONPATH": str(Path(bert_cli.__file__).parents[1])}
    with output.open("wb") as file:
        command = [sys.executable, "-c", code, url, str(cache)]
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment)


def test_a_copy_is_read_like_the_folder_itself(url, records, tmp_path, fetched, capsys):
    cache = tmp_path / "cache"
    folder = local_copy(url, cache)
    assert folder.parent == cache
    assert read_corpus(folder) == read_corpus(records)
    same_examples(folder, records)
    more = {path.name for path in folder.iterdir()} - {path.name for path in records.iterdir()}
    assert more == {".lock"}
    assert len(fetched) == FILES
    assert "fetch: plan: 7 files, about " in capsys.readouterr().out
    # A complete copy is not fetched again, of another one the files that are not.
    assert local_copy(url + "/", cache) == folder
    assert len(fetched) == FILES and capsys.readouterr().out == ""
    (folder / "wiki_002.tfrecord").unlink()
    (folder / "wiki_001.tfrecord").write_bytes(b"cut")
    assert local_copy(url, cache) == folder
    assert sorted(fetched[FILES:]) == ["wiki_001.tfrecord", "wiki_002.tfrecord"]
    same_examples(local_copy(f"file://{records}", tmp_path / "another"), records)


def test_a_damaged_file_is_fetched_again_once_and_then_refused_by_name(
    url, records, tmp_path, monkeypatch, fetched
):
    counting, name, damages = remote.Remote.fetch, "corpus.offsets", [b"?"]

    def damaging(self, file, target):
        counting(self, file, target)
        if file == name and damages:
            target.write_bytes(target.read_bytes()[:-1] + damages.pop())

    monkeypatch.setattr(remote.Remote, "fetch", damaging)
    same_examples(local_copy(url, tmp_path / "once"), records)
    assert len(fetched) == FILES + 1 and fetched.count(name) == 2
    damages += [b"?", b""]
    received = r"has \d+ bytes and checksum \w+ after two downloads"
    with pytest.raises(DataError, match=f"{url}/{name}: {received}; corpus.json has "):
        local_copy(url, tmp_path / "twice")
    assert damages == [] and fetched.count(name) == 4


def test_a_corpus_that_changed_gets_a_folder_of_its_own(url, tmp_path, capsys):
    first = local_copy(url, tmp_path)
    files, root = fsspec.core.url_to_fs(url)
    data = files.cat_file(f"{root}/corpus.json")
    changed = data.replace(b'"fingerprint": "', b'"fingerprint": "x')
    files.pipe_file(f"{root}/corpus.json", changed)
    second = local_copy(url, tmp_path)
    assert second != first and (first / "corpus.json").exists()
    assert read_corpus(second)["fingerprint"] == "x" + read_corpus(first)["fingerprint"]
    assert f"{url} has changed since it was copied to {first}" in capsys.readouterr().out


def test_a_corpus_json_that_describes_no_copy_is_refused(url, tmp_path):
    files, root = fsspec.core.url_to_fs(url)
    good = files.cat_file(f"{root}/corpus.json")
    outside = "the file is outside the folder"
    for edit, message in (
        (lambda corpus: corpus.pop("files"), r"corpus.json \(files\): Field required"),
        (lambda corpus: corpus["files"][0].update(name="../../evil"), outside),
        (lambda corpus: corpus["other_files"][0].update(name="/etc/evil"), outside),
        (lambda corpus: corpus.pop("other_files"), "has no checksums; run `bert index`"),
        (lambda corpus: corpus["files"][1].pop("crc32c"), "has no checksums"),
    ):
        corpus = json.loads(good)
        edit(corpus)
        files.pipe_file(f"{root}/corpus.json", json.dumps(corpus).encode())
        with pytest.raises(DataError, match=message):
            local_copy(url, tmp_path / "cache")
        assert not (tmp_path / "cache").exists()
    files.pipe_file(f"{root}/corpus.json", good)
    files.rm_file(f"{root}/wiki_002.tfrecord")
    for address, message in (
        (url, r"wiki_002\.tfrecord: does not exist"),
        ("memory://no/where", r"memory://no/where/corpus\.json: does not exist; use"),
        ("nonsense://a/b", r"nonsense://a.*Protocol not known"),
        ("http://127.0.0.1:9/records", r"cannot be fetched \(Client.*check the address"),
    ):
        with pytest.raises(DataError, match=message):
            local_copy(address, tmp_path)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    for module in ("s3fs", "fsspec.core"):
        monkeypatch.setitem(sys.modules, module, None)
        message = rf"not installed \(.*{module}.*\); .*pip install .*'fsspec=="
        with pytest.raises(ConfigError, match=message):
            local_copy("s3://bucket/records", tmp_path)


def test_a_disk_too_small_is_refused_before_the_first_file(url, tmp_path, monkeypatch, fetched):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: usage(1000))
    with pytest.raises(DataError, match="make room or choose a folder on another disk"):
        local_copy(url, tmp_path)
    assert fetched == []


def test_a_copy_killed_with_signal_9_is_continued(server, records, tmp_path):
    (address, handler), cache = server, tmp_path / "cache"
    handler.held = "wiki_003.tfrecord"
    process = start(address, cache, tmp_path / "output")
    try:
        wait_for(lambda: len([*cache.glob("*/[a-z]*")]) == FILES - 1)
        wait_for(lambda: handler.asked["wiki_003.tfrecord"] == 1)
    finally:
        process.kill()
        process.wait()
    (folder,) = cache.iterdir()
    assert not (folder / "corpus.json").exists()
    (folder / ".wiki_003.tfrecord.host.1.2.part").write_bytes(b"what was killed over")
    handler.held = None
    handler.released.set()
    assert local_copy(address, cache) == folder
    same_examples(folder, records)
    assert not [*folder.glob(".*.part")]
    again = {name for name, count in handler.asked.items() if count > 1}
    assert again == {"corpus.json", "wiki_003.tfrecord"}


def test_of_several_processes_one_fetches_and_the_others_wait(server, records, tmp_path):
    address, handler = server
    handler.held = "wiki_003.tfrecord"
    outputs = [tmp_path / f"output {number}" for number in range(3)]
    processes = [start(address, tmp_path / "cache", output) for output in outputs]

    def waiting():
        return sum("another process fetches" in output.read_text() for output in outputs)

    try:
        wait_for(lambda: waiting() == 2)
        wait_for(lambda: handler.asked["wiki_003.tfrecord"] == 1)
        handler.released.set()
        assert [process.wait(30) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert waiting() == 2
    (folder,) = {output.read_text().splitlines()[-1] for output in outputs}
    assert all(handler.asked[f"wiki_00{shard}.tfrecord"] == 1 for shard in range(SHARDS))
    same_examples(Path(folder), records)


def test_a_file_of_a_copy_that_is_damaged_later_is_fetched_again(url, records, tmp_path, fetched):
    folder = local_copy(url, tmp_path)
    for name in ("corpus.json", "vocab.txt", "corpus.offsets"):
        (folder / name).write_bytes((folder / name).read_bytes()[:-1] + b"?")
        before = len(fetched)
        assert local_copy(url, tmp_path) == folder
        assert fetched[before:] == ([] if name == "corpus.json" else [name])
        same_examples(folder, records)
    for path in folder.glob("*.tfrecord"):
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    with pytest.raises(DataError, match=rf"remove {folder}, it will be fetched again"):
        same_examples(folder, records)
