"""Download a Wikipedia dump, resumed where the connection broke, and verify its SHA-1.

Bytes are written to `NAME.part`. The version of the file on the server (ETag or date) is recorded next to
it, and a resumed request asks for the rest of that version (`If-Range`), so two versions are never mixed.
`latest` is resolved to its date first, from the dump's list of checksums. Only a file with the listed
SHA-1 is renamed to NAME, and the manifest comes last.
"""

import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from bert_cli import __version__
from bert_cli.config.data import DownloadSettings
from bert_cli.data.shards.manifest import OutputFolder, Stats, Step, open_output, read_manifest
from bert_cli.data.shards.runner import Progress, summary
from bert_cli.errors import ConfigError, DataError
from bert_cli.files import (
    format_bytes,
    free_bytes,
    name_path,
    read_json,
    write_atomically,
    write_json_atomically,
)

if TYPE_CHECKING:
    import httpx

# The dump server answers 403 to the default names of HTTP libraries.
AGENT = f"bert-cli/{__version__} (command line tool for pre-training BERT; one dump per user)"
KIND = "pages-articles-multistream.xml.bz2"
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0, 60.0)
"""Seconds between attempts; they start again after PROGRESS_BYTES are received."""
PROGRESS_BYTES = 10_000_000
READ_SECONDS, CONNECT_SECONDS = 60.0, 30.0
HASH_BLOCK = 1 << 22

Result = TypeVar("Result")


class ConnectionLostError(Exception):
    """The server is not reachable, hung up, or is busy; another attempt may work."""


@dataclass(frozen=True)
class Listed:
    """A dump file in the list of checksums."""

    name: str
    sha1: str


@dataclass(frozen=True)
class Version:
    """The version of a file on the server."""

    etag: str | None
    last_modified: str | None
    length: int | None

    @classmethod
    def of(cls, response: "httpx.Response") -> "Version":
        """Return the version in the headers of a response. A weak ETag does not identify the bytes."""
        etag = response.headers.get("ETag", "W/")
        length = response.headers.get("Content-Length")
        if match := re.fullmatch(r"bytes \d+-\d+/(\d+)", response.headers.get("Content-Range", "")):
            length = match[1]
        return cls(
            None if etag.startswith("W/") else etag,
            response.headers.get("Last-Modified"),
            int(length) if length is not None else None,
        )

    def agrees(self, other: "Version") -> bool:
        """Return whether no field that both have differs; a partial response may have fewer."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return all(a == b or a is None or b is None for a, b in pairs)


def run(settings: DownloadSettings) -> None:
    """Download one dump to `settings.out`. Raises DataError when it cannot be verified."""
    names = ("language", "date", "mirror", "sample")
    recorded = {name: getattr(settings, name) for name in names}
    packages = [] if settings.sample else ["httpx"]
    with open_output(Step("download", settings.out, recorded, packages)) as output:
        try:
            if settings.sample:
                _copy_sample(settings, output)
            else:
                _download(settings, output)
        except KeyboardInterrupt:
            print("download: interrupted; the same command continues", file=sys.stderr)
            raise SystemExit(130) from None


def sample_dump() -> Path:
    """Return the sample that is part of the package, or of a checkout."""
    package = Path(__file__).parents[2]
    folders = (package / "_sample", package.parent / "data" / "sample")
    for folder in folders:
        if dumps := sorted(folder.glob("*.xml.bz2")):
            return dumps[0]
    raise DataError(f"sample ({folders[0]})", "is missing", "install the package again")


def _copy_sample(settings: DownloadSettings, output: OutputFolder) -> None:
    useless = settings.model_fields_set & {"language", "date", "mirror"}
    if useless:
        problem = "has no effect with --sample, which copies a file"
        raise ConfigError(min(useless), problem, "leave one out")
    source, started = sample_dump(), time.monotonic()
    target = settings.out / source.name
    write_atomically(target, source.read_bytes())
    _write_manifest(output, target, _sha1(target), source.as_posix(), _size(target), started)


def _download(settings: DownloadSettings, output: OutputFolder) -> None:
    import httpx

    started = time.monotonic()
    wiki = settings.language.replace("-", "_") + "wiki"
    mirror = settings.mirror.rstrip("/")
    timeout = httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
    headers = {"User-Agent": f"{AGENT} httpx/{httpx.__version__}", "Accept-Encoding": "identity"}
    with httpx.Client(headers=headers, timeout=timeout, follow_redirects=True) as client:
        listed = _listed(client, mirror, wiki, settings.date)
        target = settings.out / listed.name
        if _is_complete(output, target, listed, started):
            return
        date = listed.name.removeprefix(f"{wiki}-").removesuffix(f"-{KIND}")
        url = f"{mirror}/{wiki}/{date}/{listed.name}"
        if settings.date == "latest" and _status(client, url) == 404:
            url = f"{mirror}/{wiki}/latest/{wiki}-latest-{KIND}"  # mirrors without dated folders
        part = target.with_name(target.name + ".part")
        transfer = _Transfer(client, url, part)
        transfer.run()
        sha1 = _sha1(part)
        if sha1 != listed.sha1:
            now = _listed(client, mirror, wiki, settings.date)
            target = settings.out / now.name  # `latest` may have moved since it was resolved
            if sha1 != now.sha1:
                _remove(part)
                reason = f"now {now.name}" if now != listed else "a byte changed in transit"
                problem = f"SHA-1 is {sha1}, the server lists {listed.sha1} ({reason})"
                remedy = "the file was removed; run the command again"
                raise DataError(f"download ({url})", problem, remedy)
        os.replace(part, target)
        _remove(part)
    _write_manifest(output, target, sha1, url, transfer.received, started)


def _listed(client: "httpx.Client", mirror: str, wiki: str, date: str) -> Listed:
    """Return the dump's entry in the list of checksums, which names files by their date."""
    url = f"{mirror}/{wiki}/{date}/{wiki}-{date}-sha1sums.txt"
    text = _retry(url, lambda: _text(client, url), lambda: 0)
    day = r"\d{8}" if date == "latest" else date
    pattern = rf"^([0-9a-f]{{40}}) [ *]({re.escape(wiki)}-{day}-{re.escape(KIND)})\s*$"
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        problem = f"lists no {KIND}; this dump may not be finished yet"
        remedy = f"choose an earlier --date from {mirror}/{wiki}/"
        raise DataError(f"download ({url})", problem, remedy)
    return Listed(match[2], match[1])


def _is_complete(output: OutputFolder, target: Path, listed: Listed, started: float) -> bool:
    if not target.exists():
        return False
    with suppress(DataError):
        manifest = read_manifest(output.out)
        if manifest.get("sha1") == listed.sha1 and manifest["counts"]["bytes_out"] == _size(target):
            print(f"download: {target} is here and verified (nothing to do)")
            return True
    if _sha1(target) != listed.sha1:
        problem = f"exists, but its SHA-1 is not the listed {listed.sha1}"
        raise DataError(f"download ({target})", problem, "remove it and run the command again")
    _write_manifest(output, target, listed.sha1, "", 0, started)
    return True


class _Transfer:
    """The transfer of one file to `part`; `received` counts the bytes that came over the network."""

    def __init__(self, client: "httpx.Client", url: str, part: Path) -> None:
        self.client, self.url, self.part = client, url, part
        self.received = 0

    def run(self) -> None:
        """Receive the file, and resume after every lost connection."""
        with Progress("download", None, done=_size(self.part)) as bar:
            _retry(self.url, lambda: self._request(bar), lambda: self.received)

    def _request(self, bar: Progress) -> None:
        """Request the missing bytes once and append them. Raises ConnectionLostError if it breaks off."""
        size, version = _size(self.part), _version_of(self.part)
        headers = {}
        if size and version:
            headers["Range"] = f"bytes={size}-"
            if condition := version.etag or version.last_modified:
                headers["If-Range"] = condition
        with _get(self.client, self.url, headers) as response:
            if response.status_code == 416 and version and size == version.length:
                return
            current = Version.of(response)
            is_rest = response.status_code == 206 and _first_byte(response) == size
            if not (is_rest and version and version.agrees(current)):
                # The server ignores ranges, or has another version by now: start over.
                if response.status_code != 200:
                    _remove(self.part)
                    raise ConnectionLostError("the file changed on the server")
                bar.advance(-size)
                self.part.write_bytes(b"")
                size, version = 0, current
                write_json_atomically(_version_path(self.part), asdict(current))
            bar.total = version.length
            missing = (version.length or 0) - size
            _check_disk(self.part, missing, self.url)
            with name_path(self.part, missing), open(self.part, "ab") as file:
                for block in response.iter_raw():
                    file.write(block)
                    self.received += len(block)
                    bar.advance(len(block))
        if version.length is not None and _size(self.part) < version.length:
            raise ConnectionLostError(f"the server hung up after {_size(self.part):,} bytes")


@contextmanager
def _get(client: "httpx.Client", url: str, headers: dict[str, str]) -> Iterator["httpx.Response"]:
    """Yield a response. Raises DataError for a final failure, ConnectionLostError for another attempt."""
    import httpx

    where = f"download ({url})"
    try:
        with client.stream("GET", url, headers=headers) as response:
            code = response.status_code
            if code == 429 or code >= 500:
                raise ConnectionLostError(f"the server answers {code}")
            if code == 404:
                remedy = f"check --language, --date and --mirror against {url.rsplit('/', 2)[0]}/"
                raise DataError(where, "is not on the server (404)", remedy)
            if code >= 300 and code != 416:
                raise DataError(where, f"the server refuses with {code}", "try a --mirror")
            yield response
    except httpx.UnsupportedProtocol:
        problem, remedy = "is not an http(s) address", "begin with https://"
        raise ConfigError(f"mirror ({url})", problem, remedy) from None
    except (httpx.TransportError, httpx.StreamError) as error:
        raise ConnectionLostError(str(error) or type(error).__name__) from None


def _text(client: "httpx.Client", url: str) -> str:
    with _get(client, url, {}) as response:
        return response.read().decode("utf-8", errors="replace")


def _status(client: "httpx.Client", url: str) -> int:
    import httpx

    try:
        return client.head(url).status_code
    except httpx.TransportError:
        return 0  # the download itself handles the failure


def _retry(url: str, attempt: Callable[[], Result], received: Callable[[], int]) -> Result:
    """Call `attempt` until it works. After as many failures as PAUSES without progress raise DataError."""
    failures, reached = 0, received()
    while True:
        try:
            return attempt()
        except ConnectionLostError as error:
            if received() >= reached + PROGRESS_BYTES:
                failures, reached = 0, received()
            if failures == len(PAUSES):
                raise DataError(
                    f"download ({url})",
                    f"{error}, {failures + 1} times in a row",
                    "check the network and run the command again, it continues; or give another server as "
                    "--mirror, or `bert extract` a dump that you have",
                ) from None
            pause = PAUSES[failures]
            failures += 1
            print(
                f"download: {urlsplit(url).netloc}: {error}; trying again in {pause:.0f} s "
                f"({failures} of {len(PAUSES)})",
                file=sys.stderr,
            )
            time.sleep(pause)


def _check_disk(part: Path, missing: int, url: str) -> None:
    free = free_bytes(part.parent)
    if missing > free:
        problem = f"{format_bytes(missing)} of {url} are missing and {format_bytes(free)} are free"
        raise DataError(f"out ({part.parent})", problem, "make room or choose another folder")


def _first_byte(response: "httpx.Response") -> int | None:
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _version_path(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _version_of(part: Path) -> Version | None:
    with suppress(DataError):
        return read_json(_version_path(part), Version, DataError, "remove it")
    return None


def _remove(part: Path) -> None:
    part.unlink(missing_ok=True)
    _version_path(part).unlink(missing_ok=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _sha1(path: Path) -> str:
    digest = hashlib.sha1(usedforsecurity=False)
    with open(path, "rb") as file, Progress("verify", _size(path)) as bar:
        while block := file.read(HASH_BLOCK):
            digest.update(block)
            bar.advance(len(block))
    return digest.hexdigest()


def _write_manifest(
    output: OutputFolder, target: Path, sha1: str, url: str, received: int, started: float
) -> None:
    seconds, size = time.monotonic() - started, _size(target)
    stats = Stats(bytes_in=size, bytes_out=size)
    output.write_manifest(stats, seconds, received, {target.name: stats}, url=url, sha1=sha1)
    print(f"download: {target}, SHA-1 {sha1}")
    print(summary("download", stats, seconds, received))
