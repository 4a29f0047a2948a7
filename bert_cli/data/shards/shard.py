"""A shard of a step: some inputs, the output that they become, and the counts that result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bert_cli.files import fsync_paths

COUNTS = ("documents", "sentences", "records")


@dataclass(frozen=True)
class Stats:
    """Counts of one shard, or of several added up.

    `bytes_in` and `bytes_out` that a step leaves at 0 are the sizes of the files.
    """

    documents: int = 0
    sentences: int = 0
    records: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    extra: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __add__(self, other: "Stats") -> "Stats":
        """Add the counts and concatenate the notes."""
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
        """Return every count by its name, the extra ones too."""
        names = (*COUNTS, "bytes_in", "bytes_out")
        return {name: getattr(self, name) for name in names} | dict(self.extra)


@dataclass(frozen=True)
class Shard:
    """Some inputs and the one output that they become.

    `output` is relative to the output folder. `arguments` are passed to the step's function. `weight`
    is the shard's part of the progress bar in bytes, by default the size of its inputs.

    `prepare(folder)` writes the files that the function reads and returns their paths. It is called in
    the parent process just before the shard is started, and only if the shard is not complete. The
    folder is removed afterwards.
    """

    inputs: tuple[Path, ...]
    output: Path
    arguments: Mapping[str, Any] = field(default_factory=dict)
    weight: int | None = None
    prepare: Callable[[Path], tuple[Path, ...]] | None = None

    def size(self) -> int:
        """Return the shard's part of the progress bar."""
        if self.weight is not None:
            return self.weight
        return sum(path.stat().st_size for path in self.inputs)


Convert = Callable[..., Stats]
"""`convert(inputs, output, **arguments)`: writes `output`, and any files in the same folder."""


@dataclass(frozen=True)
class Job:
    """The work of one shard, which any process can do."""

    shard: Shard
    inputs: tuple[Path, ...]
    folder: Path
    """A folder of this job alone: `in` for prepared inputs, `out` for the results."""

    def run(self, convert: Convert) -> Stats:
        """Convert the inputs, force the results to the disk and count their bytes."""
        target = self.folder / "out" / self.shard.output.name
        target.parent.mkdir(parents=True)
        stats = convert(self.inputs, target, **self.shard.arguments)
        if not target.exists():
            raise RuntimeError(f"{self.shard.output}: the step wrote no such file")
        results = list(target.parent.iterdir())
        fsync_paths(results)
        return replace(
            stats,
            bytes_in=stats.bytes_in or sum(path.stat().st_size for path in self.inputs),
            bytes_out=stats.bytes_out or sum(path.stat().st_size for path in results),
        )
