"""The output folder of a step: shards, completion markers, the manifest, and checksums of files.

A shard's files are renamed from `OUT/.partial`, then its marker is written in `OUT/.done`; `OUT/manifest.json`
comes last. A folder belongs to one step, one set of settings and one set of inputs; others are rejected.
"""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel

from bert_cli import files
from bert_cli.errors import DataError
from bert_cli.files import JSON, InnerPath, JSONObject
from bert_cli.text import count
from bert_cli.versions import package_versions

MANIFEST = "manifest.json"
DONE = ".done"
COUNTS = ("documents", "sentences", "records", "bytes_in", "bytes_out")
CHECKSUM_THREADS = 4  # for disks that serve several reads at once
Manifest = JSONObject


@dataclass(frozen=True)
class Stats:
    """Counts of one or several shards. A step that leaves `bytes_in` at 0 gets the size of its input files."""

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


Convert = Callable[..., Stats]
"""`convert(inputs, output, **arguments)`: writes `output`, and any files in the same folder."""


@dataclass(frozen=True)
class Shard:
    """Some inputs and the output made from them, relative to the output folder.

    `arguments` are passed to the step's function. `weight` is the shard's part of the progress bar in bytes. The
    parent process calls `prepare(folder)` before the shard is started: it writes the inputs and returns their
    paths.
    """

    inputs: tuple[Path, ...]
    output: Path
    arguments: Mapping[str, object] = field(default_factory=dict)
    weight: int | None = None
    prepare: Callable[[Path], tuple[Path, ...]] | None = None

    def size(self) -> int:
        """Return the shard's part of the progress bar."""
        return files.size_of(self.inputs) if self.weight is None else self.weight


def make_shard(shard: Shard, folder: Path, convert: Convert) -> Stats:
    """Write a shard's files into `folder/out`, force them to the disk and return its counts."""
    target = folder / "out" / shard.output.name
    target.parent.mkdir(parents=True)
    stats = convert(shard.inputs, target, **shard.arguments)
    results = list(target.parent.iterdir())
    files.fsync_paths(results)
    bytes_in = stats.bytes_in or files.size_of(shard.inputs)
    return replace(stats, bytes_in=bytes_in, bytes_out=files.size_of(results))


@dataclass(frozen=True)
class Step:
    """A step, its output folder, and the values that change the bytes that it writes."""

    name: str
    out: Path
    settings: Mapping[str, JSON] = field(default_factory=dict)  # that change the bytes written
    packages: Sequence[str] = ()  # the packages whose versions change the bytes written
    counted: str = "documents"  # the count that must not be 0 at the end
    expected_bytes: int | None = None  # estimated, of all outputs; compared with the free space


class Marker(BaseModel):
    """The completion marker of a shard, `.done/OUTPUT.shard`."""

    output: InnerPath
    files: list[InnerPath]
    inputs: list[list[str | int]]
    stats: Stats
    versions: dict[str, str]


class _StepRecord(BaseModel):
    format: files.OwnFormat = None
    step: str
    settings: JSONObject


class _Output(BaseModel, extra="allow"):
    output: InnerPath


class _Manifest(BaseModel, extra="allow"):
    format: files.OwnFormat = None
    settings: JSONObject = {}
    counts: dict[str, int] = {}
    shards: list[_Output] = []
    notes: list[str] = []


class OutputFolder:
    """The output folder of a step, locked for this process."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.out = step.out
        self.done = self.out / DONE
        self.partial = self.out / ".partial"
        self.settings: JSONObject = json.loads(json.dumps(step.settings))
        self.versions = package_versions(step.packages)
        self.markers: dict[str, Marker | None] = {}  # shards of this run in order; None: incomplete
        shutil.rmtree(self.partial, ignore_errors=True)
        for path in (*self.done.rglob(".*.part"), *self.out.glob(f".{MANIFEST}.*.part")):
            path.unlink(missing_ok=True)  # of a killed run
        self.is_ours = self._check_settings()
        record: JSON = {"format": files.FORMAT, "step": step.name, "settings": self.settings}
        files.write_json_atomically(self.done / "settings.json", record)

    def _check_settings(self) -> bool:
        old = recorded_settings(self.out, self.step.name)
        if old is None:
            return False
        was, now = ({name: repr(value) for name, value in s.items()} for s in (old, self.settings))
        changes = ", ".join(
            f"{name} was {was.get(name, 'the default')}, now {now.get(name, 'the default')}"
            for name in was | now
            if was.get(name) != now.get(name)
        )
        if changes and any(self.done.rglob("*.shard")):
            problem = f"holds shards made with other settings ({changes})"
            remedy = "use the same settings, move the folder away, or choose another"
            raise DataError(f"out ({self.out})", problem, remedy)
        return True

    def completed(self) -> tuple[int, int]:
        """Return the number of shards that earlier runs completed, and the bytes that they wrote."""
        sizes = [_read_marker(path).stats.bytes_out for path in self.done.rglob("*.shard")]
        return len(sizes), sum(sizes)

    def work_folder(self, shard: Shard) -> Path:
        """Return the folder in which a shard is made."""
        # A hash, because outputs in sub-folders and long names are names of one folder here.
        return self.partial / hashlib.sha256(str(shard.output).encode()).hexdigest()[:32]

    def prepare(self, shard: Shard) -> Shard:
        """Return the shard with its inputs written, so that any process can make it."""
        if shard.prepare is None:
            return shard
        folder = self.work_folder(shard) / "in"
        folder.mkdir(parents=True)
        return replace(shard, inputs=shard.prepare(folder), prepare=None)

    def is_complete(self, shard: Shard) -> bool:
        """Return whether a shard is complete. Raises DataError if it was made from other inputs."""
        name = shard.output.as_posix()
        target = self.out / shard.output
        path = self.done / f"{name}.shard"
        self.markers[name] = None
        if not path.exists():
            if target.exists() and not self.is_ours:
                problem = f"exists and was not made by `bert {self.step.name}`"
                raise DataError(str(target), problem, "choose another folder")
            return False
        marker = self.markers[name] = _read_marker(path)
        if marker.inputs != _fingerprint(shard.inputs):
            raise self._changed_inputs(marker)
        return all((self.out / file).exists() for file in marker.files)

    def _changed_inputs(self, marker: Marker) -> DataError:
        names = [str(name) for name, *_ in marker.inputs]
        inputs = names[0] if len(names) == 1 else f"{len(names)} files, {names[0]} to {names[-1]}"
        # A hidden folder belongs to the step that contains it.
        root = self.out.parent if self.out.name.startswith(".") else self.out
        problem = f"was made from inputs ({inputs}) that have changed since"
        remedy = f"move {root} away, or choose another folder (names, sizes and modification times are compared)"
        return DataError(str(self.out / marker.output), problem, remedy)

    def commit(self, shard: Shard, stats: Stats) -> None:
        """Rename the files of a shard to their final paths, its output last, and write its marker."""
        name = shard.output.as_posix()
        target = self.out / shard.output
        path = self.done / f"{name}.shard"
        for old in (self.out / MANIFEST, path):
            old.unlink(missing_ok=True)
        for folder in (target.parent, path.parent):
            folder.mkdir(parents=True, exist_ok=True)
        results = list((self.work_folder(shard) / "out").iterdir())
        results.sort(key=lambda file: file.name == target.name)
        for file in results:
            os.replace(file, target.with_name(file.name))
        marker = self.markers[name] = Marker(
            output=name,
            files=[shard.output.with_name(file.name).as_posix() for file in results],
            inputs=_fingerprint(shard.inputs),
            stats=stats,
            versions=self.versions,
        )
        files.write_json_atomically(path, marker.model_dump(mode="json"))
        # A cluster's worker that was given up may still write into it.
        shutil.rmtree(self.work_folder(shard), ignore_errors=True)

    def total(self, notes: Sequence[str]) -> Stats:
        """Return the total counts of this run's shards, all complete. Raises DataError for none, or other inputs."""
        expected = {self.done / f"{name}.shard" for name in self.markers}
        if unexpected := {*self.done.rglob("*.shard")} - expected:
            raise self._changed_inputs(_read_marker(min(unexpected)))
        markers = [marker for marker in self.markers.values() if marker]
        total = sum((marker.stats for marker in markers), Stats(notes=tuple(notes)))
        if not total.counts().get(self.step.counted):
            details = "".join(f" ({note})" for note in total.notes[:2])
            problem = f"no {self.step.counted} in {count(len(markers), 'shard')}{details}"
            remedy = f"check that the input is what `bert {self.step.name}` reads"
            raise DataError(f"{self.step.name} ({self.out})", problem, remedy)
        different = sum(marker.versions != self.versions for marker in markers)
        note = f"{different} shards were made with other versions of the packages"
        return total + Stats(notes=(note,)) if different else total


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


@contextmanager
def open_output(step: Step) -> Iterator[OutputFolder]:
    """Lock and yield the output folder of a step. The lock ends with the process."""
    out = step.out
    check_is_folder(out)
    (out / DONE).mkdir(parents=True, exist_ok=True)
    busy = DataError(f"out ({out})", "another process is using it", "wait for it")
    with files.hold_lock(out / DONE / "lock", busy):
        output = OutputFolder(step)
        try:
            yield output
        finally:
            shutil.rmtree(output.partial, ignore_errors=True)


def check_is_folder(out: Path) -> None:
    """Raise DataError when OUT or a parent folder is a file."""
    if not (place := files.existing(out)).is_dir():
        problem = "is a file and must be a folder"
        raise DataError(f"out ({place})", problem, "choose another path")


def _read_marker(path: Path) -> Marker:
    return files.read_json(path, Marker, DataError, "remove it; its shard will be made again")


def _fingerprint(inputs: Sequence[Path]) -> list[list[str | int]]:
    # Name, size and time, as make compares them: hashing 90 GB again would cost minutes.
    stats = [(path.name, path.stat()) for path in inputs]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def recorded_settings(out: Path, step: str) -> JSONObject | None:
    """Return the settings that OUT was begun with, None if it is new. Raises DataError for OUT of another step."""
    check_is_folder(out)
    path = out / DONE / "settings.json"
    if not path.exists():
        return None
    remedy = f"move {out} away, or choose another folder"
    record = files.read_json(path, _StepRecord, DataError, remedy)
    if record.step != step:
        raise DataError(f"out ({out})", f"holds the output of `bert {record.step}`", remedy)
    return record.settings


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
