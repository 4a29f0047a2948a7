"""The output folder of a step: completion markers, and the manifest of a complete folder.

Files are written in `OUT/.partial` and renamed to their final paths; then the shard's marker is written in
`OUT/.done`, so a shard with a marker is complete. `OUT/manifest.json` is written when every shard is
complete: counts, settings, versions. A folder with markers and no manifest is unfinished. A folder
belongs to one step, one set of settings and one set of inputs; others are rejected.
"""

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bert_cli import __version__
from bert_cli.data.shards.shard import Job, Shard, Stats
from bert_cli.errors import DataError
from bert_cli.files import (
    JSON,
    InnerPath,
    LockUnsupportedError,
    lock_file,
    read_json,
    write_json_atomically,
)

MANIFEST = "manifest.json"
DONE, PARTIAL = ".done", ".partial"
Manifest = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A step, its output folder, and what changes the bytes that it writes."""

    name: str
    out: Path
    settings: Mapping[str, JSON] = field(default_factory=dict)
    """The settings that change the bytes written."""
    packages: Sequence[str] = ()
    """The packages whose versions change the bytes written."""
    counted: str = "documents"
    """The count that must not be 0 at the end."""
    expected_bytes: int | None = None
    """Estimated size of all outputs; the step is rejected when the disk has less space."""


class Marker(BaseModel):
    """The completion marker of one shard, `.done/OUTPUT.shard`."""

    output: InnerPath
    files: list[InnerPath]
    inputs: list[list[str | int]]
    stats: Stats
    versions: dict[str, str]


class _StepRecord(BaseModel):
    """`.done/settings.json`: the step and the settings that a folder was begun with."""

    step: str
    settings: dict[str, Any]


class _Output(BaseModel, extra="allow"):
    output: InnerPath


class _Manifest(BaseModel, extra="allow"):
    """The fields of a manifest that are read again."""

    settings: dict[str, Any] = {}
    counts: dict[str, int] = {}
    shards: list[_Output] = []
    notes: list[str] = []


class OutputFolder:
    """The output folder of a step, locked for this process. Open it with `open_output`."""

    def __init__(self, step: Step) -> None:
        self.step, self.out = step, step.out
        self.done, self.partial = self.out / DONE, self.out / PARTIAL
        # The folder to remove for a new start: a hidden folder belongs to the step that contains it.
        self.root = self.out.parent if self.out.name.startswith(".") else self.out
        self.settings: dict[str, Any] = json.loads(json.dumps(step.settings))
        self.versions = package_versions(step.packages)
        self.seen: dict[str, Marker | None] = {}  # shards of this run in order; None: not complete
        shutil.rmtree(self.partial, ignore_errors=True)
        for path in (*self.done.rglob(".*.part"), *self.out.glob(f".{MANIFEST}.*.part")):
            path.unlink(missing_ok=True)  # of a killed run
        self.is_ours = self._check_settings()
        record = {"step": step.name, "settings": self.settings}
        write_json_atomically(self.done / "settings.json", record)

    def _check_settings(self) -> bool:
        old, new = recorded_settings(self.out, self.step.name), self.settings
        if old is None:
            return False
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        if names and any(self._markers()):

            def value(settings: Mapping[str, Any], name: str) -> str:
                # Later settings are recorded only where they differ from their default.
                return repr(settings[name]) if name in settings else "the default"

            changes = ", ".join(f"{n} was {value(old, n)}, now {value(new, n)}" for n in names)
            raise DataError(
                f"out ({self.out})",
                f"holds shards made with other settings ({changes})",
                "use the same settings, remove the folder or choose another",
            )
        return True

    def _markers(self) -> Iterator[Path]:
        return self.done.rglob("*.shard")

    def completed(self) -> tuple[int, int]:
        """Return the number of shards that earlier runs completed, and the bytes that they wrote."""
        sizes = [_read_marker(path).stats.bytes_out for path in self._markers()]
        return len(sizes), sum(sizes)

    def work_folder(self, shard: Shard) -> Path:
        """Return the folder in which a shard is made."""
        return self.partial / shard.output.as_posix().replace("/", "+")

    def job(self, shard: Shard) -> Job:
        """Prepare the inputs of a shard, and return its work."""
        folder, inputs = self.work_folder(shard), shard.inputs
        if shard.prepare is not None:
            (folder / "in").mkdir(parents=True)
            inputs = shard.prepare(folder / "in")
        return Job(replace(shard, prepare=None), inputs, folder)

    def is_complete(self, shard: Shard) -> bool:
        """Return whether a shard is complete. Raises DataError if it was made from other inputs."""
        name, target = shard.output.as_posix(), self.out / shard.output
        path = self._marker_path(shard)
        if name in self.seen:
            raise ValueError(f"two shards have the same output {name}")
        self.seen[name] = None
        if not path.exists():
            if target.exists() and not self.is_ours:
                problem = f"exists and was not made by `bert {self.step.name}`"
                raise DataError(str(target), problem, "choose another folder")
            return False
        marker = _read_marker(path)
        self._check_inputs(shard, marker)
        self.seen[name] = marker
        return all((self.out / file).exists() for file in marker.files)

    def _check_inputs(self, shard: Shard, marker: Marker) -> None:
        inputs = _fingerprint(shard.inputs)
        if marker.inputs == inputs:
            return
        before, now = ([str(name) for name, *_ in rows] for rows in (marker.inputs, inputs))
        if before == now:
            pairs = zip(shard.inputs, marker.inputs, inputs, strict=True)
            changed = next(path for path, old, new in pairs if old != new)
            problem = f"was made from {changed}, which has changed since"
        else:
            problem = (
                f"was made from other inputs ({_span(before)}) than there are now ({_span(now)})"
            )
        remedy = f"remove {self.root} or choose another folder"
        raise DataError(str(self.out / shard.output), problem, remedy)

    def _marker_path(self, shard: Shard) -> Path:
        return self.done / f"{shard.output.as_posix()}.shard"

    def commit(self, shard: Shard, stats: Stats) -> None:
        """Rename the files of a shard to their final paths, its output last, and write its marker."""
        path, target = self._marker_path(shard), self.out / shard.output
        for old in (self.out / MANIFEST, path):
            old.unlink(missing_ok=True)
        for folder in (target.parent, path.parent):
            folder.mkdir(parents=True, exist_ok=True)
        files = list((self.work_folder(shard) / "out").iterdir())
        files.sort(key=lambda file: file.name == target.name)
        for file in files:
            os.replace(file, target.with_name(file.name))
        marker = Marker(
            output=shard.output.as_posix(),
            files=[shard.output.with_name(file.name).as_posix() for file in files],
            inputs=_fingerprint(shard.inputs),
            stats=stats,
            versions=self.versions,
        )
        write_json_atomically(path, marker.model_dump(mode="json"))
        self.seen[shard.output.as_posix()] = marker
        # A cluster's worker that was given up may still write in there.
        shutil.rmtree(self.work_folder(shard), ignore_errors=True)

    def shards(self) -> dict[str, Stats]:
        """Return the counts of the complete shards of this run, in order.

        Raises DataError when the folder holds a shard that is not one of this run's.
        """
        others = {*self._markers()} - {self.done / f"{name}.shard" for name in self.seen}
        if others:
            name = min(others).relative_to(self.done).with_suffix("")
            raise DataError(
                str(self.out / name),
                "was made from other inputs than there are now "
                f"(one of {len(others)} such), so the inputs have changed",
                f"remove {self.root} or choose another folder",
            )
        return {name: marker.stats for name, marker in self.seen.items() if marker is not None}

    def total(self, notes: Sequence[str]) -> Stats:
        """Return the sum of all shards. Raises DataError when the step gave nothing."""
        shards = self.shards()
        total = sum(shards.values(), Stats(notes=tuple(notes)))
        if not total.counts().get(self.step.counted):
            details = "".join(f" ({note})" for note in total.notes[:2])
            raise DataError(
                f"{self.step.name} ({self.out})",
                f"{len(shards)} shards gave no {self.step.counted}{details}",
                f"check that the input is what `bert {self.step.name}` reads",
            )
        different = sum(
            marker is not None and marker.versions != self.versions for marker in self.seen.values()
        )
        note = f"{different} shards were made by other versions of the packages"
        return total + Stats(notes=(note,)) if different else total

    def write_manifest(
        self,
        total: Stats,
        seconds: float,
        bytes_read: int,
        shards: Mapping[str, Stats],
        **more: JSON,
    ) -> Manifest:
        """Write the manifest of a complete folder. `seconds` and `bytes_read` are those of this run."""
        manifest: Manifest = {
            "step": self.step.name,
            "settings": self.settings,
            "counts": total.counts(),
            "seconds": round(seconds, 3),
            "mb_per_second": round(bytes_read / 1e6 / max(seconds, 1e-9), 3),
            "bytes_in_this_run": bytes_read,
            **more,
            "versions": self.versions,
            "notes": list(total.notes),
            "shards": [{"output": name, **stats.counts()} for name, stats in shards.items()],
        }
        write_json_atomically(self.out / MANIFEST, manifest)
        return manifest


@contextmanager
def open_output(step: Step) -> Iterator[OutputFolder]:
    """Lock and yield the output folder of a step. The lock ends with the process.

    Raises DataError when it is a file, when another process holds the lock, or when it belongs to
    another step or other settings. Some network file systems have no locks; a line says so.
    """
    out = step.out
    check_is_folder(out)
    (out / DONE).mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_file(out / DONE / "lock"))
        except BlockingIOError:
            problem = "another process is at work in it"
            raise DataError(f"out ({out})", problem, "wait for it") from None
        except LockUnsupportedError as error:
            print(
                f"{step.name}: {out} cannot be locked ({error.strerror}); let no other process work in it",
                file=sys.stderr,
            )
        output = OutputFolder(step)
        try:
            yield output
        finally:
            shutil.rmtree(output.partial, ignore_errors=True)


def check_is_folder(out: Path) -> None:
    """Raise DataError when OUT, or a folder that it lies in, is a file."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise DataError(
            f"out ({existing})", "is a file and must be a folder", "choose another path"
        )


def _read_marker(path: Path) -> Marker:
    return read_json(path, Marker, DataError, "remove it; its shard is then made again")


def _read_step(out: Path) -> _StepRecord:
    remedy = f"remove {out} or choose another folder"
    return read_json(out / DONE / "settings.json", _StepRecord, DataError, remedy)


def recorded_step(out: Path) -> str | None:
    """Return the step that an output folder was begun by, None for a new one."""
    with suppress(DataError):
        return _read_step(out).step
    return None


def recorded_settings(out: Path, step: str) -> dict[str, Any] | None:
    """Return the settings that an output folder was begun with, None for a new one.

    Raises DataError for a file and for the folder of another step.
    """
    check_is_folder(out)
    if not (out / DONE / "settings.json").exists():
        return None
    record = _read_step(out)
    if record.step != step:
        problem = f"holds the output of `bert {record.step}`"
        raise DataError(f"out ({out})", problem, "choose another folder")
    return record.settings


def finished_files(folder: Path) -> list[Path]:
    """Return the output files of a finished step in their order, or the files of any other folder.

    Raises DataError when the folder is missing, is empty, or holds the output of an unfinished step.
    """
    where = f"input ({folder})"
    remedy = "give a text, or the output folder of the previous step"
    if not folder.exists():
        raise DataError(where, "does not exist", remedy)
    if folder.is_file():
        return [folder]
    if (folder / MANIFEST).exists():
        files = [folder / shard["output"] for shard in read_manifest(folder).get("shards", [])]
    elif (folder / DONE).exists():
        problem = "the step that writes it has not finished"
        raise DataError(where, problem, "run that step again; it continues")
    else:
        paths = ((path, path.relative_to(folder).parts) for path in folder.rglob("*"))
        files = sorted(p for p, parts in paths if p.is_file() and parts[0][0] != "." != p.name[0])
    if not files:
        raise DataError(where, "holds no files", remedy)
    return files


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a finished step. Raises DataError where there is none."""
    path = folder / MANIFEST
    if not path.exists():
        raise DataError(str(path), "does not exist", "run the step that writes it to its end")
    manifest = read_json(path, _Manifest, DataError, "remove it and run the step again")
    return manifest.model_dump(exclude_unset=True)


def package_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of this package, of Python and of `packages`."""
    versions = {"bert_cli": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} files, {names[0]} to {names[-1]}"


def _fingerprint(inputs: Sequence[Path]) -> list[list[str | int]]:
    # Name, size and time, as make compares them: hashing 90 GB again would cost minutes.
    stats = [(path.name, path.stat()) for path in inputs]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
