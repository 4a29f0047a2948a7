"""Fetch a Wikipedia dump: resumed where it broke off, and verified before it gets its name.

Bytes go to `NAME.part`. What the server calls that version of the file (ETag or date) lies beside it,
and a resume asks for the rest of that very version (`If-Range`), so two versions are never glued
together. `latest` is resolved to its date first, from the dump's own list of checksums. Only a file
whose SHA-1 is the listed one is renamed to NAME, and the manifest comes last.
"""

import hashlib
import os
import re
import shutil
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
from bert_cli.data.shards.manifest import (
    MANIFEST,
    Manifest,
    OutputFolder,
    Stats,
    open_output,
    read_manifest,
)
from bert_cli.data.shards.runner import Progress, summary
from bert_cli.errors import ConfigError, DataError
from bert_cli.files import name_path, read_json, write_atomically, write_json_atomically

if TYPE_CHECKING:
    import httpx

# The dump server answers 403 to the names that libraries send by default.
AGENT = f"bert-cli/{__version__} (command line tool for pre-training BERT; one dump per user)"
KIND = "pages-articles-multistream.xml.bz2"
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0, 60.0)
"""Seconds between tries; they begin anew after each PROGRESS_BYTES received."""
PROGRESS_BYTES = 10_000_000
SECONDS_OF_SILENCE = 60.0
HASH_BLOCK = 1 << 22


Result = TypeVar("Result")


class ConnectionLostError(Exception):
    """The server could not be reached, hung up, or is busy: worth another try."""


@dataclass(frozen=True)
class Listed:
    """One dump file as the list of checksums has it."""

    name: str
    sha1: str


@dataclass(frozen=True)
class Version:
    """What tells one version of a file on the server from another."""

    etag: str | None
    last_modified: str | None
    length: int | None

    @classmethod
    def of(cls, answer: "httpx.Response") -> "Version":
        """Read it from an answer's head. A weak ETag does not stand for the very bytes."""
        etag = answer.headers.get("ETag", "W/")
        length = answer.headers.get("Content-Length")
        if found := re.fullmatch(r"bytes \d+-\d+/(\d+)", answer.headers.get("Content-Range", "")):
            length = found[1]
        return cls(
            None if etag.startswith("W/") else etag,
            answer.headers.get("Last-Modified"),
            int(length) if length is not None else None,
        )

    def agrees(self, other: "Version") -> bool:
        """Whether nothing that both say differs; the head of a part may say less."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return all(a == b or a is None or b is None for a, b in pairs)


def run(settings: DownloadSettings) -> None:
    """Bring one dump into `settings.out`. Raises DataError when it cannot be had whole."""
    packages = [] if settings.sample else ["httpx"]
    asked = {name: getattr(settings, name) for name in ("language", "date", "mirror", "sample")}
    settings.out.mkdir(parents=True, exist_ok=True)
    with open_output(settings.out, "download", asked, packages) as output:
        try:
            if settings.sample:
                _copy_sample(settings, output)
            else:
                _download(settings, output)
        except KeyboardInterrupt:
            print("download: interrupted; the same command continues", file=sys.stderr)
            raise SystemExit(130) from None


def sample_dump() -> Path:
    """Find the sample that ships with the tool: in the package, or in a checkout beside it."""
    package = Path(__file__).parents[2]
    places = (package / "_sample", package.parent / "data" / "sample")
    for place in places:
        found = sorted(place.glob("*.xml.bz2"))
        if found:
            return found[0]
    raise DataError(f"sample ({places[0]}): is missing; install the package again")


def _copy_sample(settings: DownloadSettings, output: OutputFolder) -> None:
    useless = settings.model_fields_set & {"language", "date", "mirror"}
    if useless:
        raise ConfigError(
            f"{min(useless)}: has no effect with --sample, which copies a file; leave one out"
        )
    source, started = sample_dump(), time.monotonic()
    target = settings.out / source.name
    write_atomically(target, source.read_bytes())
    _conclude(output, target, _sha1(target), source.as_posix(), target.stat().st_size, started)


def _download(settings: DownloadSettings, output: OutputFolder) -> None:
    import httpx

    started = time.monotonic()
    wiki = settings.language.replace("-", "_") + "wiki"
    mirror = settings.mirror.rstrip("/")
    timeout = httpx.Timeout(SECONDS_OF_SILENCE, connect=30.0)
    headers = {"User-Agent": f"{AGENT} httpx/{httpx.__version__}", "Accept-Encoding": "identity"}
    with httpx.Client(headers=headers, timeout=timeout, follow_redirects=True) as client:
        listed = _listed(client, mirror, wiki, settings.date)
        target = settings.out / listed.name
        if _is_here(output, target, listed, started):
            return
        date = listed.name.removeprefix(f"{wiki}-").removesuffix(f"-{KIND}")
        url = f"{mirror}/{wiki}/{date}/{listed.name}"
        if settings.date == "latest" and _status(client, url) == 404:
            url = f"{mirror}/{wiki}/latest/{wiki}-latest-{KIND}"  # mirrors that keep no dates
        part = target.with_name(target.name + ".part")
        transfer = _Transfer(client, url, part)
        transfer.fetch()
        sha1 = _sha1(part)
        if sha1 != listed.sha1:
            now = _listed(client, mirror, wiki, settings.date)
            target = settings.out / now.name  # `latest` may have moved since it was looked up
            if sha1 != now.sha1:
                _forget(part)
                why = f"now {now.name}" if now != listed else "a byte was changed on the way"
                raise DataError(
                    f"download ({url}): SHA-1 is {sha1}, the server lists {listed.sha1} ({why}); "
                    "the file was removed; run the command again"
                )
        os.replace(part, target)
        _forget(part)
    _conclude(output, target, sha1, url, transfer.received, started)


def _listed(client: "httpx.Client", mirror: str, wiki: str, date: str) -> Listed:
    """Look the dump up in the list of checksums, which names files by their date."""
    url = f"{mirror}/{wiki}/{date}/{wiki}-{date}-sha1sums.txt"
    text = _tried(url, lambda: _text(client, url), lambda: 0)
    day = r"\d{8}" if date == "latest" else date
    pattern = rf"^([0-9a-f]{{40}}) [ *]({re.escape(wiki)}-{day}-{re.escape(KIND)})\s*$"
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise DataError(
            f"download ({url}): lists no {KIND}; this dump may still be in the making, "
            f"choose an earlier --date from {mirror}/{wiki}/"
        )
    return Listed(found[2], found[1])


def _is_here(output: OutputFolder, target: Path, listed: Listed, started: float) -> bool:
    if not target.exists():
        return False
    with suppress(DataError):
        manifest = read_manifest(output.out)
        if manifest.get("sha1") == listed.sha1 and manifest["counts"]["bytes_out"] == _size(target):
            print(f"download: {target} is here and verified (nothing to do)")
            return True
    if _sha1(target) != listed.sha1:
        raise DataError(
            f"download ({target}): is there, but its SHA-1 is not the listed {listed.sha1}; "
            "remove it and run the command again"
        )
    _conclude(output, target, listed.sha1, "", 0, started)
    return True


class _Transfer:
    """One file on its way into `part`; `received` counts the bytes that came over the wire."""

    def __init__(self, client: "httpx.Client", url: str, part: Path) -> None:
        self.client, self.url, self.part = client, url, part
        self.received = 0

    def fetch(self) -> None:
        """Receive the file, going on after every lost connection."""
        with Progress("download", None, done=_size(self.part)) as bar:
            _tried(self.url, lambda: self.receive(bar), lambda: self.received)

    def receive(self, bar: Progress) -> None:
        """Ask once for what is missing and append it; ConnectionLostError if it breaks off."""
        have, version = _size(self.part), _version_of(self.part)
        headers = {}
        if have and version:
            headers["Range"] = f"bytes={have}-"
            if name := version.etag or version.last_modified:
                headers["If-Range"] = name
        with _answer(self.client, self.url, headers) as answer:
            if answer.status_code == 416 and version and have == version.length:
                return
            told = Version.of(answer)
            goes_on = answer.status_code == 206 and _begin(answer) == have
            if not (goes_on and version and version.agrees(told)):
                # The server ignores ranges, or has another version by now: from the beginning.
                if answer.status_code != 200:
                    _forget(self.part)
                    raise ConnectionLostError("the file changed on the server")
                bar.advance(-have)
                self.part.write_bytes(b"")
                have, version = 0, told
                write_json_atomically(_sidecar(self.part), asdict(told))
            bar.total = version.length
            _check_disk(self.part, (version.length or 0) - have, self.url)
            left = (version.length or 0) - have
            with name_path(self.part, left), open(self.part, "ab") as file:
                for block in answer.iter_raw():
                    file.write(block)
                    self.received += len(block)
                    bar.advance(len(block))
        if version.length is not None and _size(self.part) < version.length:
            raise ConnectionLostError(f"the server hung up after {_size(self.part):,} bytes")


@contextmanager
def _answer(
    client: "httpx.Client", url: str, headers: dict[str, str]
) -> Iterator["httpx.Response"]:
    """Open one request; failures become DataError (final) or ConnectionLostError (try again)."""
    import httpx

    try:
        with client.stream("GET", url, headers=headers) as answer:
            code = answer.status_code
            if code == 429 or code >= 500:
                raise ConnectionLostError(f"the server answers {code}")
            if code == 404:
                raise DataError(
                    f"download ({url}): is not on the server (404); check --language, --date "
                    f"and --mirror against {url.rsplit('/', 2)[0]}/"
                )
            if code >= 300 and code != 416:
                raise DataError(f"download ({url}): the server refuses with {code}; try a --mirror")
            yield answer
    except httpx.UnsupportedProtocol:
        raise ConfigError(
            f"mirror ({url}): is not an http(s) address; begin with https://"
        ) from None
    except (httpx.TransportError, httpx.StreamError) as error:
        raise ConnectionLostError(str(error) or type(error).__name__) from None


def _text(client: "httpx.Client", url: str) -> str:
    with _answer(client, url, {}) as answer:
        return answer.read().decode("utf-8", errors="replace")


def _status(client: "httpx.Client", url: str) -> int:
    import httpx

    try:
        return client.head(url).status_code
    except httpx.TransportError:
        return 0  # let the download itself meet the trouble and try again


def _tried(url: str, attempt: Callable[[], Result], size: Callable[[], int]) -> Result:
    """Try until it works; after PAUSES in a row without progress the last trouble is final."""
    failures, reached = 0, size()
    while True:
        try:
            return attempt()
        except ConnectionLostError as error:
            if size() >= reached + PROGRESS_BYTES:
                failures, reached = 0, size()
            if failures == len(PAUSES):
                raise DataError(
                    f"download ({url}): {error}, {failures + 1} times in a row; check the network and run the "
                    "command again, it continues; or give another server as --mirror, or `bert extract` a "
                    "dump that came in another way"
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
    free = shutil.disk_usage(part.parent).free
    if missing > free:
        raise DataError(
            f"out ({part.parent}): {missing / 1e9:.2f} GB of {url} are still to come, "
            f"{free / 1e9:.2f} GB are free; make room or choose another folder"
        )


def _begin(answer: "httpx.Response") -> int | None:
    found = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
    return int(found[1]) if found else None


def _sidecar(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _version_of(part: Path) -> Version | None:
    with suppress(DataError):
        return read_json(_sidecar(part), Version, DataError, "remove it")
    return None


def _forget(part: Path) -> None:
    part.unlink(missing_ok=True)
    _sidecar(part).unlink(missing_ok=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _sha1(path: Path) -> str:
    digest = hashlib.sha1(usedforsecurity=False)
    with open(path, "rb") as file, Progress("verify", _size(path)) as bar:
        while block := file.read(HASH_BLOCK):
            digest.update(block)
            bar.advance(len(block))
    return digest.hexdigest()


def _conclude(
    output: OutputFolder, target: Path, sha1: str, url: str, received: int, started: float
) -> None:
    seconds, size = time.monotonic() - started, _size(target)
    stats = Stats(bytes_in=size, bytes_out=size)
    manifest: Manifest = {
        "step": "download",
        "settings": output.settings,
        "counts": stats.counts(),
        "seconds": round(seconds, 3),
        "mb_per_second": round(received / 1e6 / max(seconds, 1e-9), 3),
        "bytes_in_this_run": received,
        "url": url,
        "sha1": sha1,
        "versions": output.versions,
        "notes": [],
        "shards": [{"output": target.name, **stats.counts()}],
    }
    write_json_atomically(output.out / MANIFEST, manifest)
    print(f"download: {target}, SHA-1 {sha1}")
    print(summary("download", stats, seconds, received))
