"""The output folder of a step, and the loop that makes its shards, in this process, in others or on a cluster.

A shard's files are renamed from `OUT/.partial`, then its marker is written in `OUT/.done`; `OUT/manifest.json`
comes last. A folder belongs to one step, one set of settings and one set of inputs; others are rejected. A second run
skips what is complete and makes the rest again.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel

from bert_cli import files
from bert_cli.data.io.manifest import (
    COUNTS,
    DONE,
    MANIFEST,
    Convert,
    Manifest,
    Results,
    Shard,
    Stats,
    Step,
    Work,
    make_shard,
    read_manifest,
    write_manifest,
)
from bert_cli.data.workers.dask_backend import run_on_cluster
from bert_cli.data.workers.pool import run_in_processes
from bert_cli.disk import existing, free_bytes
from bert_cli.errors import DataError, logger
from bert_cli.files import JSON, InnerPath, JSONObject, name_path
from bert_cli.progress import Progress
from bert_cli.text import count, format_bytes
from bert_cli.versions import package_versions

NOTES_SHOWN = 5  # the manifest has all of them


@dataclass(frozen=True)
class Workers:
    """The workers that make shards: `processes` of this machine, or the cluster of a dask scheduler."""

    processes: int = 1
    scheduler: str | None = None  # address of the scheduler, or the file that it wrote


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
        self.skipped = 0  # of the shards, complete before this run
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
            raise DataError(
                f"out ({self.out})",
                f"holds shards made with other settings ({changes})",
                "use the same settings, move the folder away, or choose another",
            )
        return True

    def completed(self) -> tuple[int, int]:
        """Return the number of shards that earlier runs completed, and the bytes that they wrote."""
        sizes = [_read_marker(path).stats.bytes_out for path in self.done.rglob("*.shard")]
        return len(sizes), sum(sizes)

    def begin(self, shard: Shard) -> Work:
        """Return a shard with its inputs written, so that any process can make it."""
        # A hash, because outputs in sub-folders and long names are names of one folder here.
        folder = self.partial / hashlib.sha256(str(shard.output).encode()).hexdigest()[:32]
        if shard.prepare is None:
            return Work(shard, shard, folder)
        inputs = folder / "in"
        inputs.mkdir(parents=True)
        return Work(shard, replace(shard, inputs=shard.prepare(inputs), prepare=None), folder)

    def missing(self, shards: Iterable[Shard], bar: Progress) -> Iterator[Work]:
        """Yield the shards that are not complete; the bar passes over the others."""
        for shard in shards:
            if self.is_complete(shard):
                self.skipped += 1
                bar.advance(shard.size)
            else:
                yield self.begin(shard)

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
        inputs = names[0]
        if len(names) > 1:
            inputs = f"{len(names)} files, {names[0]} to {names[-1]}"
        # A hidden folder belongs to the step that contains it.
        root = self.out
        if self.out.name.startswith("."):
            root = self.out.parent
        return DataError(
            str(self.out / marker.output),
            f"was made from inputs ({inputs}) that have changed since",
            f"move {root} away, or choose another folder (names, sizes and modification times are compared)",
        )

    def commit(self, work: Work, stats: Stats) -> None:
        """Rename the files of a shard to their final paths, its output last, and write its marker."""
        shard = work.shard
        name = shard.output.as_posix()
        target = self.out / shard.output
        path = self.done / f"{name}.shard"
        for old in (self.out / MANIFEST, path):
            old.unlink(missing_ok=True)
        for folder in (target.parent, path.parent):
            folder.mkdir(parents=True, exist_ok=True)
        results = list((work.folder / "out").iterdir())
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
        shutil.rmtree(work.folder, ignore_errors=True)

    def counts_of_shards(self) -> list[JSON]:
        """Return the counts of each shard of this run, in their order."""
        markers = (marker for marker in self.markers.values() if marker)
        return [{"output": marker.output, **marker.stats.counts()} for marker in markers]

    def total(self, notes: Sequence[str]) -> Stats:
        """Return the total counts of this run's shards, all complete. Raises DataError for none, or other inputs."""
        expected = {self.done / f"{name}.shard" for name in self.markers}
        unexpected = {*self.done.rglob("*.shard")} - expected
        if unexpected:
            raise self._changed_inputs(_read_marker(min(unexpected)))
        markers = [marker for marker in self.markers.values() if marker]
        total = sum((marker.stats for marker in markers), Stats(notes=tuple(notes)))
        if not total.counts().get(self.step.counted):
            details = "".join(f" ({note})" for note in total.notes[:2])
            raise DataError(
                f"{self.step.name} ({self.out})",
                f"no {self.step.counted} in {count(len(markers), 'shard')}{details}",
                f"check that the input is what `bert {self.step.name}` reads",
            )
        different = sum(marker.versions != self.versions for marker in markers)
        note = f"{different} shards were made with other versions of the packages"
        # Another version may split or tokenize otherwise, which the manifest should say.
        if different:
            total += Stats(notes=(note,))
        return total


def _read_marker(path: Path) -> Marker:
    return files.read_json(path, Marker, DataError, "remove it; its shard will be made again")


def _fingerprint(inputs: Sequence[Path]) -> list[list[str | int]]:
    # Name, size and time, as make compares them: hashing 90 GB again would cost minutes.
    stats = [(path.name, path.stat()) for path in inputs]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


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
    nearest = existing(out)
    if not nearest.is_dir():
        problem = "is a file and must be a folder"
        raise DataError(f"out ({nearest})", problem, "choose another path")


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


def run_shards(
    step: Step,
    shards: Iterable[Shard],
    convert: Convert,
    workers: Workers,
    *,
    total: int | None = None,
    notes: Sequence[str] = (),
    check: Callable[[Stats], None] = lambda _: None,
) -> Manifest:
    """Make every shard, write the manifest, print one summary line; return the manifest.

    `convert(inputs, output, **shard.arguments)` must be picklable. `total`, the sum of the shards' sizes, and
    `notes`, read at the end, are for a generator of shards. `check(counts)` may refuse the result with a DataError
    before the manifest is written; the shards stay.
    """
    if isinstance(shards, Sequence) and total is None:
        total = sum(shard.size for shard in shards)
    started = time.monotonic()
    made = bytes_read = 0
    with open_output(step) as output:
        bytes_left = _report_plan(output, shards)
        try:
            with Progress(step.name, total) as bar:
                works = output.missing(shards, bar)
                with closing(_make(output, works, convert, workers)) as results:
                    for work, stats in results:
                        output.commit(work, stats)
                        made += 1
                        bytes_read += stats.bytes_in
                        bytes_left -= stats.bytes_out
                        bar.advance(work.shard.size)
        except OSError as error:
            shutil.rmtree(output.partial, ignore_errors=True)  # before the free space is measured
            with name_path(output.out, bytes_left):
                raise error
        except KeyboardInterrupt:
            finished = made + output.skipped
            message = f"interrupted, {finished} shards are finished; the same command continues"
            logger.warning(f"{step.name}: {message}")
            raise SystemExit(130) from None
        seconds = time.monotonic() - started
        counts = output.total(notes)
        check(counts)
        path = output.out / MANIFEST
        if made or not path.exists():
            processes = workers.processes if workers.scheduler is None else None
            values = {"bytes_in_this_run": bytes_read, "processes": processes}
            rows = output.counts_of_shards()
            record = write_manifest(path, step, counts, seconds, bytes_read, rows, **values)
        else:  # its times stay the times of the run that did the work
            record = read_manifest(output.out)
    _report_notes(step, record["notes"])
    before = ""
    if output.skipped:
        before = f"{output.skipped} of {made + output.skipped}"
    logger.info(summary(step.name, counts, seconds, bytes_read, before))
    return record


def _report_notes(step: Step, notes: Sequence[str]) -> None:
    for note in notes[:NOTES_SHOWN]:
        logger.info(f"{step.name}: {note}")
    more = len(notes) - NOTES_SHOWN
    if more > 0:
        logger.info(f"{step.name}: {more} more notes in {step.out}/{MANIFEST}")


def _report_plan(output: OutputFolder, shards: Iterable[Shard]) -> int:
    """Log the plan for the disk, and return the estimated bytes that are still to write."""
    expected = output.step.expected_bytes
    if expected is None:
        return 0
    completed, written = output.completed()
    number = None
    if isinstance(shards, Sequence):
        number = len(shards)
    to_write = 0
    if completed != number:
        to_write = max(0, expected - written)
    logger.info(plan_disk_space(output.step.name, number, to_write, written, output.out))
    return to_write


def _make(
    output: OutputFolder, works: Iterable[Work], convert: Convert, workers: Workers
) -> Results:
    name = output.step.name
    if workers.scheduler is not None:
        yield from run_on_cluster(name, works, convert, workers.scheduler, output.versions)
    elif workers.processes > 1:
        yield from run_in_processes(name, works, convert, workers.processes)
    else:
        for work in works:
            yield work, make_shard(work.prepared, work.folder, convert)


def plan_disk_space(
    step: str, number: int | None, to_write: int, written: int, out: Path, unit: str = "shard"
) -> str:
    """Return the plan of a step in one line; `written` are the bytes of complete shards, `number` their number."""
    free = free_bytes(out)
    if to_write > free:
        problem = f"{step} will write about {format_bytes(to_write)}, but only {format_bytes(free)} are free there"
        raise DataError(f"out ({out})", problem, "make room or choose a folder on another disk")
    parts = []
    if number is not None:
        parts.append(count(number, unit))
    rest = f"about {format_bytes(to_write)}"
    if to_write == 0:
        rest = "nothing"
    before = ""
    if written:
        before = f" ({format_bytes(written)} are there)"
    parts += [f"{rest} to write{before}", f"{format_bytes(free)} free in {out}"]
    return f"{step}: plan: {', '.join(parts)}"


def summary(step: str, stats: Stats, seconds: float, bytes_read: int, skipped: str = "") -> str:
    """Return one line with the counts of a step that are not 0, and the speed of this run."""
    counts = [(getattr(stats, name), name.removesuffix("s")) for name in COUNTS[:3]]
    parts = [count(number, what) for number, what in counts if number]
    parts += [f"{stats.bytes_in / 1e6:.1f} MB in", f"{stats.bytes_out / 1e6:.1f} MB out"]
    if bytes_read:
        parts.append(f"{bytes_read / 1e6 / max(seconds, 1e-9):.1f} MB/s")
    parts.append(f"{seconds:.1f} s")
    note = ""
    if skipped:
        note = f" ({skipped} shards were done before)"
    return f"{step}: {', '.join(parts)}{note}"
