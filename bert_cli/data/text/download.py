"""Download a Wikipedia dump, resumed where the connection broke, and verify its SHA-1.

Bytes are written to `NAME.SHA1.part`, so a part is continued only while the server lists the same SHA-1. An answer
that does not continue it, such as the login page of a network, is refused.
"""

import filecmp
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from bert_cli import __version__
from bert_cli.data.io import manifest
from bert_cli.data.io.manifest import Stats, Step
from bert_cli.data.workers.runner import plan_disk_space, summary
from bert_cli.errors import DataError, logger
from bert_cli.files import JSON, JSONObject, name_path, write_atomically
from bert_cli.progress import Progress

if TYPE_CHECKING:
    import httpx2

# The dump server answers 403 to the default names of HTTP libraries.
AGENT = f"bert-cli/{__version__} (command line tool for pre-training BERT; one dump per user)"
SERVER = "https://dumps.wikimedia.org"
KIND = "pages-articles-multistream.xml.bz2"
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0, 60.0)  # seconds between attempts
PROGRESS_BYTES = 10_000_000
READ_SECONDS = 60.0
CONNECT_SECONDS = 30.0
HASH_BLOCK = 1 << 22

Result = TypeVar("Result")


class ConnectionLostError(Exception):
    """The server is unreachable or busy, or closed the connection; another attempt may work."""


def sample_dump() -> Path:
    """Return the sample that is part of the package, or of a checkout."""
    package = Path(__file__).parents[2]
    folders = (package / "_sample", package.parent / "data" / "sample")
    dumps: list[Path] = []
    for folder in folders:
        dumps += sorted(folder.glob("*.xml.bz2"))
    if not dumps:
        raise DataError(f"sample ({folders[0]})", "is missing", "install the package again")
    return dumps[0]


def copy_sample(step: Step) -> None:
    """Copy the sample into the folder of a step, and write its manifest."""
    source = sample_dump()
    started = time.monotonic()
    target = step.out / source.name
    if not target.exists() or not filecmp.cmp(source, target, shallow=False):
        write_atomically(target, source.read_bytes())
    _write_manifest(step, target, _sha1(target), source.as_posix(), _size(target), started)


def download(step: Step, language: str, date: str) -> None:
    """Download a dump into the folder of a step, and write its manifest. Raises DataError if it cannot be verified."""
    import httpx2

    started = time.monotonic()
    wiki = language.replace("-", "_") + "wiki"
    timeout = httpx2.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
    headers = {"User-Agent": f"{AGENT} httpx2/{httpx2.__version__}", "Accept-Encoding": "identity"}
    with httpx2.Client(headers=headers, timeout=timeout, follow_redirects=True) as client:
        name, listed = _listed(client, wiki, date)
        target = step.out / name
        if target.exists():
            record = manifest.read_manifest(step.out)
            if record.get("sha1") == listed and record["counts"]["bytes_out"] == _size(target):
                logger.info(f"download: {target} is here and verified (nothing to do)")
                return
            if _sha1(target) != listed:
                raise DataError(
                    f"download ({target})",
                    f"exists, but its SHA-1 is not the listed {listed}",
                    "remove it and run the command again",
                )
            _write_manifest(step, target, listed, "", 0, started)
            return
        day = name.removeprefix(f"{wiki}-").removesuffix(f"-{KIND}")
        url = f"{SERVER}/{wiki}/{day}/{name}"
        part = step.out / f"{name}.{listed}.part"
        for outdated in {*step.out.glob(f"{wiki}-*.part")} - {part}:
            outdated.unlink()  # of a dump that the server no longer lists
        received = _transfer(client, url, part)
        sha1 = _sha1(part)
        if sha1 != listed:
            part.unlink()
            raise DataError(
                f"download ({url})",
                f"SHA-1 is {sha1}, the server lists {listed} for {name}",
                "the received file was removed; check the network and run the command again",
            )
        os.replace(part, target)
    _write_manifest(step, target, sha1, url, received, started)


def _listed(client: "httpx2.Client", wiki: str, date: str) -> tuple[str, str]:
    """Return name and SHA-1 of the dump in the list of checksums, which names files by their date."""
    url = f"{SERVER}/{wiki}/{date}/{wiki}-{date}-sha1sums.txt"

    def read() -> str:
        with _get(client, url, {}) as response:
            return response.read().decode("utf-8", errors="replace")

    text = _retry(url, read)
    day = date
    if date == "latest":
        day = r"\d{8}"
    pattern = rf"^([0-9a-f]{{40}}) [ *]({re.escape(wiki)}-{day}-{re.escape(KIND)})\s*$"
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise DataError(
            f"download ({url})",
            f"lists no {KIND}; this dump may not be finished yet",
            f"choose an earlier --date from {SERVER}/{wiki}/",
        )
    return match[2], match[1]


def _transfer(client: "httpx2.Client", url: str, part: Path) -> int:
    """Receive the bytes that a part lacks, over as many connections as it takes, and return their number."""

    def request() -> None:
        earlier = _size(part)
        headers = {"Range": f"bytes={earlier}-"} if earlier else {}
        with _get(client, url, headers) as response:
            if response.status_code == 416:
                return  # nothing is missing; the SHA-1 shows whether it is the file
            begin = response.headers.get("Content-Range", "bytes 0-")
            if not begin.startswith(f"bytes {earlier}-"):
                raise DataError(
                    f"download ({url})",
                    f"the answer does not continue {part}",
                    "check the network and run the command again, or remove that file to start over",
                )
            missing = int(response.headers.get("Content-Length", 0))
            bar.total = earlier + missing or None
            logger.info(plan_disk_space("download", 1, missing, earlier, part.parent, "file"))
            with name_path(part, missing), open(part, "ab") as file:
                for block in response.iter_raw():
                    file.write(block)
                    bar.advance(len(block))

    before = _size(part)
    with Progress("download", None, done=before) as bar:
        _retry(url, request, part)
    return _size(part) - before


@contextmanager
def _get(client: "httpx2.Client", url: str, headers: dict[str, str]) -> Iterator["httpx2.Response"]:
    """Yield a response. Raises DataError for a final failure, ConnectionLostError for another attempt."""
    import httpx2

    where = f"download ({url})"
    try:
        with client.stream("GET", url, headers=headers) as response:
            code = response.status_code
            if code == 429 or code >= 500:
                raise ConnectionLostError(f"the server answers {code}")
            if code >= 300 and code != 416:
                folder = url.rsplit("/", 2)[0]
                remedy = f"check --language and --date against {folder}/"
                raise DataError(where, f"the server refuses with {code}", remedy)
            yield response
    except (httpx2.TransportError, httpx2.StreamError) as error:
        raise ConnectionLostError(str(error) or type(error).__name__) from None


def _retry(url: str, attempt: Callable[[], Result], part: Path | None = None) -> Result:
    """Call `attempt` until it succeeds. Raises DataError when all PAUSES are used up while no `part` has grown."""
    failures = 0
    reached = _size(part)
    while True:
        try:
            return attempt()
        except ConnectionLostError as error:
            if _size(part) >= reached + PROGRESS_BYTES:
                failures = 0
                reached = _size(part)
            if failures == len(PAUSES):
                raise DataError(
                    f"download ({url})",
                    f"{error}, {failures + 1} times in a row",
                    "check the network and run the command again, it continues; or `bert extract` a dump that "
                    "you have",
                ) from None
            pause = PAUSES[failures]
            failures += 1
            again = f"trying again in {pause:.0f} s ({failures} of {len(PAUSES)})"
            logger.warning(f"download: {urlsplit(url).netloc}: {error}; {again}")
            time.sleep(pause)


def _size(path: Path | None) -> int:
    if not path or not path.exists():
        return 0
    return path.stat().st_size


def _sha1(path: Path) -> str:
    digest = hashlib.sha1(usedforsecurity=False)
    with open(path, "rb") as file, Progress("verify", _size(path)) as bar:
        while block := file.read(HASH_BLOCK):
            digest.update(block)
            bar.advance(len(block))
    return digest.hexdigest()


def _write_manifest(
    step: Step, target: Path, sha1: str, url: str, received: int, started: float
) -> None:
    seconds = time.monotonic() - started
    stats = Stats(bytes_in=_size(target), bytes_out=_size(target))
    shards: list[JSON] = [{"output": target.name, **stats.counts()}]
    values: JSONObject = {"bytes_in_this_run": received, "url": url, "sha1": sha1}
    path = step.out / manifest.MANIFEST
    manifest.write_manifest(path, step, stats, seconds, received, shards, **values)
    logger.info(f"download: {target}, SHA-1 {sha1}")
    logger.info(summary("download", stats, seconds, received))
