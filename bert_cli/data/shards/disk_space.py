"""Will it fit? Said before the first byte is written, not by a full disk after hours.

A step estimates what it will write; what an earlier run of it left whole counts as written. The
plan is one line, and a disk with clearly less room than the rest needs is refused. An estimate is
no promise and a quota is not seen: a step may still find the disk full.
"""

from pathlib import Path

from bert_cli.errors import DataError
from bert_cli.files import format_bytes, free_bytes


def plan_disk_space(
    step: str, count: int | None, to_write: int, there: int, out: Path, of: str = "shard"
) -> str:
    """Return the plan of a step in one line: shards, bytes it will still write, bytes free in OUT.

    `to_write` is what is still to come, `there` what is whole already; `count` None where the number
    of shards, or whatever the work is made `of`, is not known. Raises DataError where the disk of
    OUT has less room than `to_write`.
    """
    free = free_bytes(out)
    if to_write > free:
        raise DataError(
            f"out ({out}): {step} is to write about {format_bytes(to_write)} and {format_bytes(free)} are free "
            "there; make room or choose a folder on another disk"
        )
    parts = [] if count is None else [f"{count:,} {of}{'' if count == 1 else 's'}"]
    rest = "nothing" if to_write == 0 else f"about {format_bytes(to_write)}"
    before = f" ({format_bytes(there)} are there)" if there else ""
    parts += [f"{rest} to write{before}", f"{format_bytes(free)} free in {out}"]
    return f"{step}: plan: {', '.join(parts)}"
