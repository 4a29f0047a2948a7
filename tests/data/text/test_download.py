"""Downloading: a real server that misbehaves in every way a real one does."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import bert_cli
from bert_cli.cli import main
from bert_cli.config.data import DownloadSettings
from bert_cli.data.shards.manifest import finished_files, read_manifest
from bert_cli.data.text import download
from bert_cli.errors import ConfigError, DataError

KIND = "pages-articles-multistream.xml.bz2"
NAME = f"xxwiki-20240101-{KIND}"
BODY = bytes(range(256)) * 4096  # 1 MiB
SHA1 = hashlib.sha1(BODY).hexdigest()


class DumpServer(ThreadingHTTPServer):
    """Serves `files` (path -> bytes); the other attributes say how it misbehaves."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answerer)
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.hang_up_after: list[int] = []  # bytes of body, one entry a request for a dump
        self.statuses: list[int] = []
        self.ranges = True
        self.etag = True
        self.seconds_per_block = 0.0
        self.after_checksums: Callable[[], None] = lambda: None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def asked(self, part: str) -> list[dict[str, str]]:
        return [headers for verb, path, headers in self.requests if verb == "GET" and part in path]

    def publish(self, date: str, body: bytes, *, latest: bool = True, dated: bool = True) -> None:
        name = f"xxwiki-{date}-{KIND}"
        sums = f"{'0' * 40}  xxwiki-{date}-other.gz\n{hashlib.sha1(body).hexdigest()}  {name}\n"
        if dated:
            self.files[f"/xxwiki/{date}/{name}"] = body
            self.files[f"/xxwiki/{date}/xxwiki-{date}-sha1sums.txt"] = sums.encode()
        if latest:
            self.files[f"/xxwiki/latest/xxwiki-latest-{KIND}"] = body
            self.files["/xxwiki/latest/xxwiki-latest-sha1sums.txt"] = sums.encode()


class Answerer(BaseHTTPRequestHandler):
    """One request."""

    server: DumpServer

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def answer(self, with_body: bool) -> None:
        server, headers = self.server, dict(self.headers.items())
        server.requests.append((self.command, self.path, headers))
        body = server.files.get(self.path)
        is_dump = self.path.endswith(".bz2")
        status = server.statuses.pop(0) if server.statuses and is_dump and with_body else 200
        if body is None or status != 200:
            self.send_error(404 if body is None else status)
            return
        etag = f'"{hashlib.md5(body).hexdigest()}"'
        start = 0
        wanted = re.fullmatch(r"bytes=(\d+)-", headers.get("Range", ""))
        if wanted and server.ranges and headers.get("If-Range", etag) == etag:
            start = int(wanted[1])
            if start >= len(body):
                self.send_error(416)
                return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        if server.etag:
            self.send_header("ETag", etag)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if not with_body:
            return
        if self.path.endswith("sha1sums.txt"):
            server.after_checksums()  # before the client has read them: what it asks next comes later
        end = len(body)
        if is_dump and server.hang_up_after:
            end = min(end, start + server.hang_up_after.pop(0))
        for place in range(start, end, 1 << 16):
            self.wfile.write(body[place : min(place + (1 << 16), end)])
            time.sleep(server.seconds_per_block if is_dump else 0)
        self.close_connection = True


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[DumpServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "PAUSES", (0.0, 0.0, 0.0))
    with DumpServer() as made:
        made.publish("20240101", BODY)
        thread = threading.Thread(target=made.serve_forever, args=(0.05,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def fetch(server: DumpServer, out: Path, date: str = "latest") -> None:
    download.run(DownloadSettings(out=out, language="xx", date=date, mirror=server.address))


def left(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir() if path.name[0] != ".")


@pytest.mark.parametrize("date", ["latest", "20240101"])
def test_a_dump_arrives_under_its_dated_name_with_a_manifest(
    server: DumpServer, tmp_path: Path, date: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(server, tmp_path, date)
    assert (tmp_path / NAME).read_bytes() == BODY
    assert left(tmp_path) == ["manifest.json", NAME]
    manifest = read_manifest(tmp_path)
    assert manifest["sha1"] == SHA1
    assert manifest["url"].endswith(f"/xxwiki/20240101/{NAME}")
    assert finished_files(tmp_path) == [tmp_path / NAME]
    assert "download: 1.0 MB in, 1.0 MB out" in capsys.readouterr().out
    agent = server.asked(NAME)[0]["User-Agent"]
    assert agent.startswith("bert-cli/") and "pre-training BERT" in agent


def test_a_second_run_finds_the_verified_file_and_fetches_nothing(
    server: DumpServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(server, tmp_path)
    fetch(server, tmp_path)
    assert len(server.asked(NAME)) == 1
    assert "is here and verified (nothing to do)" in capsys.readouterr().out
    (tmp_path / "manifest.json").unlink()
    fetch(server, tmp_path)
    assert len(server.asked(NAME)) == 1
    assert read_manifest(tmp_path)["sha1"] == SHA1


def test_a_connection_dropped_half_way_is_resumed_from_there(
    server: DumpServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.hang_up_after = [len(BODY) // 2, 1000]
    fetch(server, tmp_path)
    assert (tmp_path / NAME).read_bytes() == BODY
    first, second, third = server.asked(NAME)
    assert "Range" not in first
    assert second["Range"] == f"bytes={len(BODY) // 2}-"
    assert second["If-Range"].strip('"') == hashlib.md5(BODY).hexdigest()
    assert third["Range"] == f"bytes={len(BODY) // 2 + 1000}-"
    assert read_manifest(tmp_path)["bytes_in_this_run"] == len(BODY)
    assert capsys.readouterr().err.count("trying again") == 2


def test_a_server_that_always_hangs_up_ends_in_an_error_that_keeps_what_came(
    server: DumpServer, tmp_path: Path
) -> None:
    server.hang_up_after = [1000] * 9
    with pytest.raises(DataError, match="4 times in a row"):
        fetch(server, tmp_path)
    assert (tmp_path / f"{NAME}.part").read_bytes() == BODY[:4000]
    server.hang_up_after = []
    fetch(server, tmp_path)
    assert (tmp_path / NAME).read_bytes() == BODY
    assert read_manifest(tmp_path)["bytes_in_this_run"] == len(BODY) - 4000


def test_a_busy_server_is_asked_again(server: DumpServer, tmp_path: Path) -> None:
    server.statuses = [503, 429]
    fetch(server, tmp_path)
    assert (tmp_path / NAME).read_bytes() == BODY


def test_a_server_without_ranges_starts_the_file_over(server: DumpServer, tmp_path: Path) -> None:
    server.ranges = False
    server.hang_up_after = [300_000]
    fetch(server, tmp_path)
    assert (tmp_path / NAME).read_bytes() == BODY
    assert read_manifest(tmp_path)["bytes_in_this_run"] == len(BODY) + 300_000


def test_a_file_changed_on_the_server_is_not_glued_to_the_old_half(
    server: DumpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.hang_up_after = [300_000]
    monkeypatch.setattr(download, "PAUSES", ())
    with pytest.raises(DataError):
        fetch(server, tmp_path)
    new = BODY[::-1]
    server.publish("20240101", new)
    fetch(server, tmp_path)
    assert (tmp_path / NAME).read_bytes() == new


def test_a_part_of_unknown_version_is_not_trusted(server: DumpServer, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(b"of another time")
    fetch(server, tmp_path)
    assert (tmp_path / NAME).read_bytes() == BODY


def test_a_part_that_is_complete_is_only_verified(server: DumpServer, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(BODY)
    told = {"etag": None, "last_modified": None, "length": len(BODY)}
    (tmp_path / f"{NAME}.part.json").write_text(json.dumps(told))
    fetch(server, tmp_path)
    assert (tmp_path / NAME).read_bytes() == BODY
    assert read_manifest(tmp_path)["bytes_in_this_run"] == 0


def test_a_wrong_byte_is_caught_and_the_file_removed(server: DumpServer, tmp_path: Path) -> None:
    wrong = BODY[:1000] + bytes([BODY[1000] ^ 1]) + BODY[1001:]
    server.files[f"/xxwiki/20240101/{NAME}"] = wrong
    with pytest.raises(DataError, match=f"the server lists {SHA1}"):
        fetch(server, tmp_path)
    assert left(tmp_path) == []
    server.publish("20240101", BODY)
    fetch(server, tmp_path)
    assert (tmp_path / NAME).read_bytes() == BODY


def test_latest_that_moves_while_it_is_fetched_gets_its_new_name(
    server: DumpServer, tmp_path: Path
) -> None:
    server.files.clear()
    server.publish("20240101", BODY, dated=False)
    new = BODY[::-1]

    def move() -> None:
        server.publish("20240201", new, dated=False)

    server.after_checksums = move
    fetch(server, tmp_path)
    assert left(tmp_path) == ["manifest.json", NAME.replace("20240101", "20240201")]
    assert (tmp_path / NAME.replace("20240101", "20240201")).read_bytes() == new


def test_a_dump_that_is_not_there_says_where_to_look(server: DumpServer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"404.*check --language, --date"):
        fetch(server, tmp_path, "20200101")
    server.files["/xxwiki/latest/xxwiki-latest-sha1sums.txt"] = b"nothing here\n"
    with pytest.raises(DataError, match="may still be in the making"):
        fetch(server, tmp_path)


def test_no_server_at_all_is_an_error_after_some_tries(
    server: DumpServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = DownloadSettings(out=tmp_path, language="xx", mirror="http://127.0.0.1:9")
    told = r"\(http://127.0.0.1:9/xxwiki/.*check the network.* --mirror, or `bert extract`"
    with pytest.raises(DataError, match=told):
        download.run(settings)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(re.match("download: 127.0.0.1:9: .*; trying again", line) for line in lines)
    with pytest.raises(ConfigError, match="not an http"):
        download.run(DownloadSettings(out=tmp_path, language="xx", mirror="127.0.0.1"))


def test_too_little_disk_is_seen_before_the_first_byte(
    server: DumpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 0, len(BODY) - 1))
    with pytest.raises(DataError, match="make room or choose another folder"):
        fetch(server, tmp_path)
    assert (tmp_path / f"{NAME}.part").stat().st_size == 0


def test_a_download_killed_with_signal_9_goes_on_where_it_was(
    server: DumpServer, tmp_path: Path
) -> None:
    server.seconds_per_block = 0.1
    out = tmp_path / "out"
    program = (
        "from bert_cli.config.data import DownloadSettings as S\n"
        "from bert_cli.data.text.download import run\n"
        f"run(S(out={str(out)!r}, language='xx', mirror={server.address!r}))"
    )
    root = str(Path(bert_cli.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": root}
    ) as process:
        part, end = out / f"{NAME}.part", time.monotonic() + 20
        while not (part.exists() and part.stat().st_size > 200_000):
            assert time.monotonic() < end
            time.sleep(0.01)
        process.kill()
    had = part.stat().st_size
    assert left(out) == [f"{NAME}.part", f"{NAME}.part.json"]
    server.seconds_per_block = 0.0
    fetch(server, out)
    assert (out / NAME).read_bytes() == BODY
    assert server.asked(NAME)[-1]["Range"] == f"bytes={had}-"


def test_the_sample_is_copied_and_needs_no_network(tmp_path: Path) -> None:
    download.run(DownloadSettings(out=tmp_path, sample=True))
    sample = download.sample_dump()
    assert (tmp_path / sample.name).read_bytes() == sample.read_bytes()
    assert finished_files(tmp_path) == [tmp_path / sample.name]
    with pytest.raises(ConfigError, match="language: has no effect with --sample"):
        download.run(DownloadSettings(out=tmp_path, sample=True, language="de"))


class Circle(BaseHTTPRequestHandler):
    """A server whose every address is another name of itself."""

    def do_GET(self) -> None:
        self.send_response(302)
        self.send_header("Location", self.path)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_redirect_that_comes_back_to_itself_is_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Circle) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        mirror = f"http://127.0.0.1:{server.server_port}"
        assert main(["download", str(tmp_path / "out"), "--mirror", mirror]) == 3
        server.shutdown()
    assert f"bert: {mirror}/enwiki/" in (told := capsys.readouterr().err) and "redirects" in told
