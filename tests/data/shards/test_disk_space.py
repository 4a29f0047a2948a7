"""The plan of a step: what it will write, against what the disk has."""

from collections import namedtuple
from pathlib import Path

import pytest

from bert_cli import files
from bert_cli.data.shards.disk_space import plan_disk_space
from bert_cli.data.shards.manifest import Shard, Stats
from bert_cli.data.shards.runner import run_shards
from bert_cli.errors import DataError
from bert_cli.files import format_bytes, free_bytes

Usage = namedtuple("Usage", "total used free")


def copy(inputs: tuple[Path, ...], output: Path) -> Stats:
    output.write_bytes(inputs[0].read_bytes())
    return Stats(documents=1)


def make_inputs(folder: Path, count: int) -> list[Shard]:
    (folder / "in").mkdir(exist_ok=True)
    paths = [folder / "in" / f"{number:02}" for number in range(count)]
    for path in paths:
        path.write_bytes(b"x" * 1000)
    return [Shard((path,), Path(path.name)) for path in paths]


def run(shards: list[Shard], out: Path, needs: int) -> None:
    run_shards("copy", shards, copy, out=out, processes=1, settings={}, needs=needs)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that the disk has free, to be set."""
    told = [0]
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: Usage(0, 0, told[0]))
    return told


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (9_949, "9.9 kB"),
        (12_345, "12 kB"),
        (999_600, "1.0 MB"),
        (3_400_000_000, "3.4 GB"),
        (120_000_000_000, "120 GB"),
        (5_000_000_000_000_000, "5,000 TB"),
    ],
)
def test_bytes_are_said_as_people_do(size: int, told: str) -> None:
    assert format_bytes(size) == told


def test_the_plan_is_one_line(free: list[int], tmp_path: Path) -> None:
    free[0] = 120_000_000_000
    assert (
        plan_disk_space("tokenize", 12, 3_400_000_000, 0, tmp_path)
        == f"tokenize: plan: 12 shards, about 3.4 GB to write, 120 GB free in {tmp_path}"
    )
    assert "plan: about 3.4 GB to write, " in plan_disk_space(
        "extract", None, 3_400_000_000, 0, tmp_path
    )


def test_the_room_of_a_folder_to_come_is_that_of_its_disk(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "yet") > 0


def test_a_disk_too_small_is_refused_before_the_first_shard(
    free: list[int], tmp_path: Path
) -> None:
    shards = make_inputs(tmp_path, 4)
    free[0] = 3_999
    with pytest.raises(DataError, match=r"about 4\.0 kB and 4\.0 kB are free|make room"):
        run(shards, tmp_path / "out", 4_000)
    assert not any((tmp_path / "out").glob("[0-9]*"))
    free[0] = 4_000
    run(shards, tmp_path / "out", 4_000)
    assert len([*(tmp_path / "out").glob("[0-9]*")]) == 4


def test_what_is_whole_already_needs_no_room(
    free: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = make_inputs(tmp_path, 3)

    def fail_at_the_third(inputs: tuple[Path, ...], output: Path) -> Stats:
        if output.name == "02":
            raise DataError("no further")
        return copy(inputs, output)

    free[0] = 3_000
    with pytest.raises(DataError, match="no further"):
        run_shards(
            "copy",
            shards,
            fail_at_the_third,
            out=tmp_path / "out",
            processes=1,
            settings={},
            needs=3_000,
        )
    free[0] = 999
    with pytest.raises(DataError, match=r"about 1\.0 kB"):
        run(shards, tmp_path / "out", 3_000)
    free[0] = 1_000
    capsys.readouterr()
    run(shards, tmp_path / "out", 3_000)
    told = capsys.readouterr().out.splitlines()[0]
    assert told.startswith("copy: plan: 3 shards, about 1.0 kB to write (2.0 kB are there), 1.0 kB")
    free[0] = 0  # nothing is left to write, however wrong the estimate was
    run(shards, tmp_path / "out", 9_000)
    assert "3 shards, nothing to write (3.0 kB are there)" in capsys.readouterr().out
