"""What a step is and what it wrote: its shards and their counts, the manifest, and checksums of files."""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from bert_cli import disk, files
from bert_cli.data.io.files import Part
from bert_cli.errors import DataError
from bert_cli.files import JSON, InnerPath, JSONObject
from bert_cli.versions import package_versions

MANIFEST = "manifest.json"
DONE = ".done"
COUNTS = ("documents", "sentences", "records", "bytes_in", "bytes_out")
CHECKSUM_THREADS = 4  # for disks that serve several reads at once
Manifest = JSONObject


@dataclass(frozen=True)
class Stats:
    """Counts of one or several shards. A step that leaves `bytes_in` at 0 gets the size of the shard."""

    documents: int = 0
    sentences: int = 0
    records: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    extra: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __add__(self, other: "Stats") -> "Stats":
        """Add the counts and concatenate the notes."""
        counts = {name: getattr(self, name) + getattr(other, name) for name in COUNTS}
        extra = Counter(self.extra)
        extra.update(other.extra)  # keeps zeros
        return Stats(**counts, extra=extra, notes=self.notes + other.notes)

    def counts(self) -> dict[str, int]:
        """Return every count by its name, including the extra counts."""
        return {name: getattr(self, name) for name in COUNTS} | dict(self.extra)


# `convert(inputs, output, **arguments)`: writes `output`, and any files in the same folder.
Convert = Callable[..., Stats]


@dataclass(frozen=True)
class Shard:
    """Some inputs and the output made from them, relative to the output folder.

    `arguments` are passed to the step's function. `size` are the bytes of the inputs for the progress bar. The
    parent process calls `prepare(folder)` before the shard is started: it writes the inputs and returns their
    paths.
    """

    inputs: tuple[Path, ...]
    output: Path
    arguments: Mapping[str, object] = field(default_factory=dict)
    size: int = 0
    prepare: Callable[[Path], tuple[Path, ...]] | None = None


def shard_of(output: Path, parts: Sequence[Part]) -> Shard:
    """Return the shard that makes `output` from `parts`, which its function gets."""
    inputs = tuple(dict.fromkeys(part.path for part in parts))
    return Shard(inputs, output, {"parts": list(parts)}, sum(part.size for part in parts))


class Work(NamedTuple):
    """A shard that is to be made: as the step has it, with its inputs written, and the folder in which it is made."""

    shard: Shard
    prepared: Shard
    folder: Path


# The shards as they are finished, with their counts.
Results = Generator[tuple[Work, Stats], None, None]


def make_shard(shard: Shard, folder: Path, convert: Convert) -> Stats:
    """Write a shard's files into `folder/out`, force them to the disk and return its counts."""
    target = folder / "out" / shard.output.name
    target.parent.mkdir(parents=True)
    stats = convert(shard.inputs, target, **shard.arguments)
    results = list(target.parent.iterdir())
    files.fsync_paths(results)
    return replace(stats, bytes_in=stats.bytes_in or shard.size, bytes_out=disk.size_of(results))


@dataclass(frozen=True)
class Step:
    """A step, its output folder, and the values that change the bytes that it writes."""

    name: str
    out: Path
    settings: Mapping[str, JSON] = field(default_factory=dict)  # that change the bytes written
    packages: Sequence[str] = ()  # the packages whose versions change the bytes written
    counted: str = "documents"  # the count that must not be 0 at the end
    expected_bytes: int | None = None  # estimated, of all outputs; compared with the free space


class _Output(BaseModel, extra="allow"):
    output: InnerPath


class _Manifest(BaseModel, extra="allow"):
    format: files.OwnFormat = None
    settings: JSONObject = {}
    counts: dict[str, int] = {}
    shards: list[_Output] = []
    notes: list[str] = []


def write_manifest(
    path: Path,
    step: Step,
    total: Stats,
    seconds: float,
    bytes_read: int,
    shards: list[JSON],
    **values: JSON,
) -> Manifest:
    """Write the manifest of a step, with further `values`; `seconds` and `bytes_read` count this run only."""
    manifest: Manifest = {
        "format": files.FORMAT,
        "step": step.name,
        "settings": dict(step.settings),
        "counts": total.counts(),
        "seconds": round(seconds, 3),
        "mb_per_second": round(bytes_read / 1e6 / max(seconds, 1e-9), 3),
        **values,
        "versions": package_versions(step.packages),
        "notes": list(total.notes),
        "shards": shards,  # the longest entry comes last
    }
    files.write_json_atomically(path, manifest)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a finished step, empty for another folder. Raises DataError for a damaged file."""
    if not (folder / MANIFEST).exists():
        return {}
    remedy = "move it away and run the step that writes it to its end"
    manifest = files.read_json(folder / MANIFEST, _Manifest, DataError, remedy)
    return manifest.model_dump(exclude_unset=True)


def known_checksums(corpus: Path) -> dict[str, str | None]:
    """Return the checksums in a corpus.json by file name, without files that were written since."""
    known = {}
    with suppress(DataError, FileNotFoundError, KeyError, TypeError):
        before = files.read_json(corpus, JSONObject, DataError, "")
        for file in before["files"]:
            stat = (corpus.parent / file["name"]).stat()
            if stat.st_size == file["bytes"] and stat.st_mtime_ns < corpus.stat().st_mtime_ns:
                known[file["name"]] = file.get("crc32c")
    return known


def checksums(
    folder: Path, names: Sequence[str], known: Mapping[str, str | None]
) -> list[JSONObject]:
    """Return `name`, `bytes` and `crc32c` of files in a folder; files with a `known` checksum are not read."""

    def entry(name: str) -> JSONObject:
        crc = known.get(name) or files.file_crc32c(folder / name)
        return {"name": name, "bytes": (folder / name).stat().st_size, "crc32c": crc}

    with ThreadPoolExecutor(CHECKSUM_THREADS) as pool:
        return list(pool.map(entry, names))
