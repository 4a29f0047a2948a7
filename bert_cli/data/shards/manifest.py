"""What the output folder of a step holds, and what may be said about it.

Files are written in `OUT/.partial`, renamed into place, and a marker in `OUT/.done` comes last, so
whatever has a marker is whole. `OUT/manifest.json` comes when every shard is whole: what was done,
with which settings, by which versions. A folder with markers and no manifest is unfinished.
A folder belongs to one step, one set of settings and one set of inputs; others are refused.
"""

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bert_cli import __version__
from bert_cli.commands import COMMANDS
from bert_cli.errors import DataError
from bert_cli.files import (
    JSON,
    InnerPath,
    LockUnsupportedError,
    lock_file,
    read_json,
    write_json_atomically,
)

Manifest = dict[str, Any]

COUNTS = ("documents", "sentences", "records")
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Stats:
    """What one shard gave. `bytes_in` and `bytes_out` left at 0 are filled in from the files."""

    documents: int = 0
    sentences: int = 0
    records: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    extra: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __add__(self, other: "Stats") -> "Stats":
        """Add the counts and put the notes one after the other."""
        names = {**self.extra, **other.extra}
        return Stats(
            self.documents + other.documents,
            self.sentences + other.sentences,
            self.records + other.records,
            self.bytes_in + other.bytes_in,
            self.bytes_out + other.bytes_out,
            {name: self.extra.get(name, 0) + other.extra.get(name, 0) for name in names},
            self.notes + other.notes,
        )

    def counts(self) -> dict[str, int]:
        """Every count by its name, the extra ones too."""
        names = (*COUNTS, "bytes_in", "bytes_out")
        return {name: getattr(self, name) for name in names} | dict(self.extra)


class Marker(BaseModel):
    """The completion marker of one shard, `.done/OUTPUT.shard`."""

    output: InnerPath
    files: list[InnerPath]
    inputs: list[list[str | int]]
    stats: Stats
    versions: dict[str, str]


class _Begun(BaseModel):
    """`.done/settings.json`: the step and the settings that a folder was begun with."""

    step: str
    settings: dict[str, Any]


class _Output(BaseModel, extra="allow"):
    output: InnerPath


class _Manifest(BaseModel, extra="allow"):
    """The parts of a manifest that are read again."""

    settings: dict[str, Any] = {}
    counts: dict[str, int] = {}
    shards: list[_Output] = []
    notes: list[str] = []


@dataclass(frozen=True)
class Shard:
    """Some inputs and the one output they become; `output` is relative to OUT.

    `prepare(folder)`, where given, is called in the parent process just before the shard is handed
    out, and only if it has to be done: it writes the files that `convert` is to read into `folder`,
    which is removed afterwards. `weight` is the shard's part of the progress bar in bytes; by
    default the size of its inputs.
    """

    inputs: tuple[Path, ...]
    output: Path
    prepare: Callable[[Path], tuple[Path, ...]] | None = None
    weight: int | None = None


class OutputFolder:
    """The markers of one output folder. Open it with `open_output`, which keeps other processes out."""

    def __init__(
        self, out: Path, step: str, settings: Mapping[str, JSON], packages: Sequence[str]
    ) -> None:
        self.out, self.step = out, step
        self.done, self.partial = out / ".done", out / ".partial"
        # What is removed to begin anew: a hidden folder is part of the step whose OUT it lies in.
        self.whole = out.parent if out.name.startswith(".") else out
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.versions = package_versions(packages)
        self.order: dict[str, int] = {}
        self.known: dict[str, Marker] = {}  # of the complete shards
        shutil.rmtree(self.partial, ignore_errors=True)
        for path in (*self.done.rglob(".*.part"), *out.glob(f".{MANIFEST}.*.part")):
            path.unlink(missing_ok=True)  # of a killed run
        self.is_ours = self._check_settings()
        write_json_atomically(
            self.done / "settings.json", {"step": step, "settings": self.settings}
        )

    def _check_settings(self) -> bool:
        old, new = recorded_settings(self.out, self.step), self.settings
        if old is None:
            return False
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        if names and any(self._markers()):
            # Some are recorded only where they depart from what they are by default.
            before, now = _defaults(self.step) | old, _defaults(self.step) | new
            told = "; ".join(f"{n} was {before.get(n)!r}, now {now.get(n)!r}" for n in names)
            raise DataError(
                f"out ({self.out}): holds shards made with other settings ({told}); "
                "use the same settings, remove the folder or choose another"
            )
        return True

    def _markers(self) -> Iterator[Path]:
        return self.done.rglob("*.shard")

    def completed(self) -> tuple[int, int]:
        """Number of the shards that earlier runs left whole, and the bytes they wrote."""
        sizes = [self._read(path).stats.bytes_out for path in self._markers()]
        return len(sizes), sum(sizes)

    def _read(self, marker: Path) -> Marker:
        return read_json(marker, Marker, DataError, "remove it, its shard is then made again")

    def _marker(self, shard: Shard) -> Path:
        return self.done / f"{shard.output.as_posix()}.shard"

    def work_folder(self, shard: Shard) -> Path:
        """Name the shard's private folder: `in` for prepared inputs, `out` for the results."""
        return self.partial / shard.output.as_posix().replace("/", "+")

    def is_complete(self, shard: Shard) -> bool:
        """Whether the shard is finished; DataError if it was made from other inputs than these."""
        name, target, marker = shard.output.as_posix(), self.out / shard.output, self._marker(shard)
        if name in self.order:
            raise ValueError(f"two shards have the same output {name}")
        self.order[name] = len(self.order)
        if not marker.exists():
            if target.exists() and not self.is_ours:
                raise DataError(
                    f"{target}: is there already and was not made by `bert {self.step}`; "
                    "choose another folder"
                )
            return False
        entry = self._read(marker)
        inputs = _fingerprint(shard.inputs)
        if entry.inputs != inputs:
            before, now = ([str(name) for name, *_ in one] for one in (entry.inputs, inputs))
            if before == now:
                pairs = zip(shard.inputs, entry.inputs, inputs, strict=True)
                changed = next(path for path, old, new in pairs if old != new)
                told = f"was made from {changed}, which has changed since"
            else:
                told = f"was made from other inputs ({_span(before)}) than there are now ({_span(now)})"
            raise DataError(f"{target}: {told}; remove {self.whole} or choose another folder")
        self.known[name] = entry
        return all((self.out / file).exists() for file in entry.files)

    def commit(self, shard: Shard, stats: Stats) -> None:
        """Rename the shard's files into place, the named output last, then write its marker."""
        marker, target = self._marker(shard), self.out / shard.output
        for old in (self.out / MANIFEST, marker):
            old.unlink(missing_ok=True)
        for folder in (target.parent, marker.parent):
            folder.mkdir(parents=True, exist_ok=True)
        made = sorted(
            (self.work_folder(shard) / "out").iterdir(), key=lambda p: p.name == target.name
        )
        for path in made:
            os.replace(path, target.with_name(path.name))
        entry = Marker(
            output=shard.output.as_posix(),
            files=[shard.output.with_name(path.name).as_posix() for path in made],
            inputs=_fingerprint(shard.inputs),
            stats=stats,
            versions=self.versions,
        )
        write_json_atomically(marker, entry.model_dump(mode="json"))
        self.known[shard.output.as_posix()] = entry
        # A worker of a cluster that was given up for dead may still write in there.
        shutil.rmtree(self.work_folder(shard), ignore_errors=True)

    def close(
        self,
        fresh: Stats,
        seconds: float,
        processes: int | None,
        counted: str,
        notes: Sequence[str],
    ) -> tuple[Manifest, Stats]:
        """Check that the folder holds this run's shards and no others; write the manifest.

        `processes` is None where a cluster did the work. A run that found everything done leaves
        the manifest, with its times, as it is.
        """
        strangers = {*self._markers()} - {self.done / f"{name}.shard" for name in self.order}
        if strangers:
            name = min(strangers).relative_to(self.done).with_suffix("")
            raise DataError(
                f"{self.out / name}: was made from other inputs than there are now (one of "
                f"{len(strangers)} such), so the inputs have changed; remove {self.whole} or choose another folder"
            )
        entries = sorted(self.known.values(), key=lambda entry: self.order[entry.output])
        whole = sum((entry.stats for entry in entries), Stats(notes=tuple(notes)))
        if not whole.counts().get(counted):
            why = "".join("; " + note for note in whole.notes[:2])
            raise DataError(
                f"{self.step} ({self.out}): {len(entries)} shards gave no {counted}{why}; "
                f"check that the input is what `bert {self.step}` reads"
            )
        path = self.out / MANIFEST
        if fresh == Stats() and path.exists():
            return read_manifest(self.out), whole
        others = sum(entry.versions != self.versions for entry in entries)
        if others:
            whole += Stats(notes=(f"{others} shards were made by other versions of the parts",))
        manifest: Manifest = {
            "step": self.step,
            "settings": self.settings,
            "counts": whole.counts(),
            "seconds": round(seconds, 3),
            "mb_per_second": round(fresh.bytes_in / 1e6 / max(seconds, 1e-9), 3),
            "bytes_in_this_run": fresh.bytes_in,
            "processes": processes,
            "versions": self.versions,
            "notes": list(whole.notes),
            "shards": [{"output": entry.output, **entry.stats.counts()} for entry in entries],
        }
        write_json_atomically(path, manifest)
        return manifest, whole


@contextmanager
def open_output(
    out: Path, step: str, settings: Mapping[str, JSON], packages: Sequence[str]
) -> Iterator[OutputFolder]:
    """Open the ledger of OUT for this process alone; the open_output ends with the process, however.

    Some network file systems have no locks: there it is said in one line that nobody keeps a second
    process out. Raises DataError while another process has the open_output.
    """
    (out / ".done").mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_file(out / ".done" / "lock"))
        except BlockingIOError:
            problem = "another process is at work in it"
            raise DataError(f"out ({out})", problem, "wait for it") from None
        except LockUnsupportedError as error:
            print(
                f"{step}: {out} cannot be locked ({error.strerror}); let no other process work in it",
                file=sys.stderr,
            )
        ledger = OutputFolder(out, step, settings, packages)
        try:
            yield ledger
        finally:
            shutil.rmtree(ledger.partial, ignore_errors=True)


def _defaults(step: str) -> dict[str, Any]:
    """What the settings of a step are where nothing is said of them."""
    if step not in COMMANDS:
        return {}
    fields = COMMANDS[step].settings_class().model_fields
    return {name: field.default for name, field in fields.items() if not field.is_required()}


def recorded_step(out: Path) -> str | None:
    """The step that OUT was begun by, None where none has begun."""
    with suppress(DataError):
        return _begun(out).step
    return None


def _begun(out: Path) -> _Begun:
    remedy = f"remove {out} or choose another folder"
    return read_json(out / ".done" / "settings.json", _Begun, DataError, remedy)


def recorded_settings(out: Path, step: str) -> dict[str, Any] | None:
    """Return the settings OUT was begun with, None if it is new; DataError if by another step."""
    if not (out / ".done" / "settings.json").exists():
        return None
    before = _begun(out)
    if before.step != step:
        raise DataError(
            f"out ({out}): holds the output of `bert {before.step}`; choose another folder"
        )
    return before.settings


def finished_files(folder: Path) -> list[Path]:
    """List a step's output files in a fixed order; another tool's folder is just walked.

    Raises DataError when the folder is missing, empty, or the step that writes it did not finish.
    """
    wanted = "give a text, or the folder that the step before this one wrote"
    if not folder.exists():
        raise DataError(f"input ({folder}): does not exist; {wanted}")
    if folder.is_file():
        return [folder]
    if (folder / MANIFEST).exists():
        files = [folder / shard["output"] for shard in read_manifest(folder).get("shards", [])]
    elif (folder / ".done").exists():
        raise DataError(
            f"input ({folder}): the step that writes it has not finished; run it again to go on"
        )
    else:
        seen = ((path, path.relative_to(folder).parts) for path in folder.rglob("*"))
        files = sorted(p for p, parts in seen if p.is_file() and parts[0][0] != "." != p.name[0])
    if not files:
        raise DataError(f"input ({folder}): holds no files; {wanted}")
    return files


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a finished step; DataError where there is none."""
    path = folder / MANIFEST
    if not path.exists():
        raise DataError(f"{path}: does not exist; run the step that writes it to its end")
    manifest = read_json(path, _Manifest, DataError, "remove it and run the step again")
    return manifest.model_dump(exclude_unset=True)


def package_versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of Python, of this package and of the parts named."""
    found = {"bert_cli": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} files, {names[0]} to {names[-1]}"


def _fingerprint(inputs: Sequence[Path]) -> list[list[str | int]]:
    # Name, size and time, as make does it: reading 90 GB again to hash it would cost minutes.
    found = [(path.name, path.stat()) for path in inputs]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in found]
