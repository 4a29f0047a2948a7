"""Downloading: a real server that misbehaves in every way a real one does."""

import hashlib
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bert_cli.config.data import DownloadSettings
from bert_cli.data.io.inputs import find_files
from bert_cli.data.io.manifest import read_manifest
from bert_cli.data.steps.download import run
from bert_cli.data.text import download
from bert_cli.errors import ConfigError, DataError

KIND = "pages-articles-multistream.xml.bz2"
NAME = f"xxwiki-20240101-{KIND}"
BODY = bytes(range(256)) * 4096  # 1 MiB
HALF = len(BODY) // 2
SHA1 = hashlib.sha1(BODY).hexdigest()
PART = f"{NAME}.{SHA1}.part"


class DumpServer(ThreadingHTTPServer):
    """Serves `files` (path -> bytes); the other attributes are its faults."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {}
        self.dump_requests = []
        self.hang_up_after = []  # bytes of body, one entry a request for a dump
        self.statuses = []
        self.pages = []  # (headers, body) of an answer 200 instead of a dump, one entry a request
        self.shifts = []  # bytes by which an answer to a range begins too early
        self.seconds_per_block = 0.0
        self.after_checksums = lambda: None

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def publish(self, date, body):
        name = f"xxwiki-{date}-{KIND}"
        sums = f"{'0' * 40}  xxwiki-{date}-other.gz\n{hashlib.sha1(body).hexdigest()}  {name}\n"
        for folder in (date, "latest"):
            self.files[f"/xxwiki/{folder}/xxwiki-{folder}-{KIND}"] = body
            self.files[f"/xxwiki/{folder}/xxwiki-{folder}-sha1sums.txt"] = sums.encode()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): ...

    def do_GET(self):
        server, body, start = self.server, self.server.files.get(self.path), 0
        is_dump = self.path.endswith(".bz2")
        status = 200 if body else 404
        if is_dump:
            server.dump_requests.append(dict(self.headers.items()))
            status = server.statuses.pop(0) if server.statuses else status
        if is_dump and server.pages:
            headers, page = server.pages.pop(0)
            self.send_response(200)
            for header in {"Content-Length": str(len(page)), **headers}.items():
                self.send_header(*header)
            self.end_headers()
            self.wfile.write(page)
            return
        if wanted := re.match(r"bytes=(\d+)-$", self.headers.get("Range", "")):
            start = int(wanted[1])
            status = 416 if start >= len(body) else status
        if status != 200:
            self.send_error(status)
            return
        self.send_response(206 if start else 200)
        if start:
            start -= server.shifts.pop(0) if server.shifts else 0
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if self.path.endswith("sha1sums.txt"):
            server.after_checksums()  # before the client has read them, and so before its next request
        end = len(body)
        if is_dump and server.hang_up_after:
            end = min(end, start + server.hang_up_after.pop(0))
        for offset in range(start, end, 1 << 16):
            self.wfile.write(body[offset : min(offset + (1 << 16), end)])
            time.sleep(server.seconds_per_block if is_dump else 0)
        self.close_connection = True


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "PAUSES", (0.0,) * 4)
    with DumpServer() as made:
        made.publish("20240101", BODY)
        monkeypatch.setattr(download, "SERVER", made.address)
        thread = threading.Thread(target=made.serve_forever, args=(0.05,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def fetch(server, out, date="latest"):
    run(DownloadSettings(out=out, language="xx", date=date))


def assert_fetched(out, body=BODY, name=NAME):
    assert visible(out) == ["manifest.json", name]
    assert (out / name).read_bytes() == body


def visible(out):
    return sorted(path.name for path in out.iterdir() if path.name[0] != ".")


@pytest.mark.parametrize("date", ["latest", "20240101"])
def test_a_dump_arrives_under_its_dated_name_and_is_fetched_once(server, tmp_path, date, capsys):
    fetch(server, tmp_path, date)
    assert_fetched(tmp_path)
    manifest = read_manifest(tmp_path)
    assert manifest["sha1"] == SHA1
    assert manifest["url"].endswith(f"/xxwiki/20240101/{NAME}")
    assert find_files(tmp_path, manifest) == [tmp_path / NAME]
    assert server.dump_requests[0]["User-Agent"].startswith("bert-cli/")
    assert "download: plan: 1 file, about 1.0 MB to write" in capsys.readouterr().out
    fetch(server, tmp_path, date)
    assert "is here and verified (nothing to do)" in capsys.readouterr().out
    (tmp_path / "manifest.json").unlink()
    fetch(server, tmp_path, date)
    assert len(server.dump_requests) == 1
    assert read_manifest(tmp_path)["sha1"] == SHA1
    (tmp_path / NAME).write_bytes(BODY[1:])
    with pytest.raises(DataError, match=f"{NAME}.*exists, but its SHA-1 is not the listed {SHA1}"):
        fetch(server, tmp_path, date)
    assert (tmp_path / NAME).read_bytes() == BODY[1:]


def test_a_busy_server_is_asked_again_and_a_broken_connection_resumed(server, tmp_path, capsys):
    server.statuses = [503, 429]
    server.hang_up_after = [HALF, 1000]
    fetch(server, tmp_path)
    assert_fetched(tmp_path)
    ranges = [headers.get("Range") for headers in server.dump_requests]
    assert ranges == [None, None, None, f"bytes={HALF}-", f"bytes={HALF + 1000}-"]
    assert read_manifest(tmp_path)["bytes_in_this_run"] == len(BODY)
    printed = capsys.readouterr()
    assert "1 file, about 524.3 kB to write (524.3 kB are there), " in printed.out
    waits = [line for line in printed.err.splitlines() if "again" in line]
    host = server.address.removeprefix("http://")
    for number, (line, error) in enumerate(zip(waits, ("503", "429", ".*", ".*"), strict=True), 1):
        ending = rf"trying again in 0 s \({number} of 4\)"
        assert re.fullmatch(f"download: {host}: .*{error}; {ending}", line)


def test_what_was_received_before_too_many_hang_ups_is_kept_and_a_complete_part_verified(
    server, tmp_path, monkeypatch
):
    server.hang_up_after = [1000] * 5
    with pytest.raises(DataError, match="5 times in a row"):
        fetch(server, tmp_path)
    assert (tmp_path / PART).read_bytes() == BODY[:5000]
    for part, missing in ((BODY[:5000], len(BODY) - 5000), (BODY, 0)):
        (tmp_path / NAME).unlink(missing_ok=True)
        (tmp_path / PART).write_bytes(part)
        fetch(server, tmp_path)
        assert_fetched(tmp_path)
        assert read_manifest(tmp_path)["bytes_in_this_run"] == missing
    monkeypatch.setattr(download, "PROGRESS_BYTES", 1000)  # after so many the count begins again
    (tmp_path / NAME).unlink()
    server.hang_up_after = [1000] * 9
    fetch(server, tmp_path)
    assert_fetched(tmp_path)
    (tmp_path / NAME).unlink()
    server.hang_up_after = [1000, *[0] * 5]  # and not without any more
    with pytest.raises(DataError, match="5 times in a row"):
        fetch(server, tmp_path)


def test_a_range_that_begins_elsewhere_is_not_joined(server, tmp_path):
    # The total length of this answer is right, only its first byte is another than the requested one.
    server.hang_up_after, server.shifts = [300_000], [7]
    with pytest.raises(DataError, match=r"does not continue .*, or remove that file to start over"):
        fetch(server, tmp_path)
    (tmp_path / PART).unlink()
    fetch(server, tmp_path)
    assert_fetched(tmp_path)


def test_a_file_changed_on_the_server_is_not_joined_to_the_old_half(server, tmp_path, monkeypatch):
    server.hang_up_after = [300_000]
    monkeypatch.setattr(download, "PAUSES", ())
    with pytest.raises(DataError):
        fetch(server, tmp_path)
    new = BODY[::-1]
    server.publish("20240101", new)
    fetch(server, tmp_path)
    assert_fetched(tmp_path, new)  # and the old half is removed


ANSWERS = {
    "login page": ({"Content-Type": "text/html"}, b"<html>Welcome to the hotel</html>"),
    "cut login page": ({"Content-Type": "text/html", "Content-Length": "900"}, b"<html>Wel"),
    "empty": ({}, b""),
    "longer than the part": ({}, b"<html>" * 200_000),
    "another version": ({"ETag": '"2"'}, BODY[::-1]),
    "without a length": ({"Connection": "close", "Content-Length": ""}, b"<html>"),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=list(ANSWERS))
def test_an_answer_that_is_not_the_file_leaves_the_part(server, tmp_path, answer):
    (tmp_path / PART).write_bytes(BODY[:HALF])
    server.pages = [answer] * 9
    with pytest.raises(DataError, match=r"in a row|does not continue"):
        fetch(server, tmp_path)
    assert (tmp_path / PART).read_bytes() == BODY[:HALF]
    server.pages.clear()
    fetch(server, tmp_path)
    assert server.dump_requests[-1]["Range"] == f"bytes={HALF}-"
    assert_fetched(tmp_path)


def test_a_part_of_another_file_is_removed(server, tmp_path):
    (tmp_path / PART).write_bytes(BODY[:HALF][::-1])
    with pytest.raises(DataError, match=f"the server lists {SHA1} .* file was removed;"):
        fetch(server, tmp_path)
    assert visible(tmp_path) == []
    fetch(server, tmp_path)
    assert_fetched(tmp_path)


def test_an_absent_or_wrong_dump_is_an_error_with_a_remedy(server, tmp_path):
    with pytest.raises(DataError, match=r"404.*check --language and --date"):
        fetch(server, tmp_path, "20200101")
    for path, content, problem in (
        (f"20240101/{NAME}", BODY[:-1] + b"x", f"the server lists {SHA1} .* file was removed;"),
        ("latest/xxwiki-latest-sha1sums.txt", b"nothing here\n", "may not be finished yet"),
    ):
        server.files[f"/xxwiki/{path}"] = content
        with pytest.raises(DataError, match=problem):
            fetch(server, tmp_path)
        assert visible(tmp_path) == []


def test_a_server_that_cannot_be_reached_is_an_error_after_some_attempts(
    server, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(download, "SERVER", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"\(http://127.0.0.1:9/xxwiki/.*check the network"):
        fetch(server, tmp_path)
    assert capsys.readouterr().err.count("download: 127.0.0.1:9: ") == 4


def test_the_sample_is_copied_and_needs_no_network(tmp_path):
    run(DownloadSettings(out=tmp_path, sample=True))
    sample = download.sample_dump()
    copy, before = tmp_path / sample.name, (tmp_path / sample.name).stat()
    assert copy.read_bytes() == sample.read_bytes()
    run(DownloadSettings(out=tmp_path, sample=True))
    assert copy.stat().st_mtime_ns == before.st_mtime_ns  # `bert extract` compares it
    copy.write_bytes(b"x" * before.st_size)
    run(DownloadSettings(out=tmp_path, sample=True))
    assert copy.read_bytes() == sample.read_bytes()
    assert find_files(tmp_path, read_manifest(tmp_path)) == [tmp_path / sample.name]
    for name, value in {"language": "de", "date": "latest"}.items():
        with pytest.raises(ConfigError, match=f"{name}: has no effect with --sample, which"):
            run(DownloadSettings(out=tmp_path, sample=True, **{name: value}))
