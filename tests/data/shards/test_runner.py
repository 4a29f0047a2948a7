"""Shards: whole or absent, whatever kills the run."""

import errno
import fcntl
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.processes import alive, wait_for

import bert_cli
from bert_cli.data.shards import runner as module
from bert_cli.data.shards.manifest import (
    Manifest,
    Shard,
    Stats,
    finished_files,
    read_manifest,
    write_json_atomically,
)
from bert_cli.data.shards.runner import Progress, run_shards
from bert_cli.errors import DataError

Start = Callable[[int, float], "subprocess.Popen[str]"]

# Run as a process of its own: upper-cases files, slowly, and can be told to die.
SCRIPT = """
import functools, os, signal, sys, time
from pathlib import Path
from bert_cli.data.shards.manifest import Shard, Stats
from bert_cli.data.shards.runner import run_shards
from bert_cli.errors import BertError

def convert(inputs, output, pause):
    text = inputs[0].read_text()
    with open(output, "w") as file:
        file.write(text[: len(text) // 2].upper())
        file.flush()
        (output.parent / (output.name + ".index")).write_text("1")
        time.sleep(pause)
        if "DIE" in text:
            os.kill(os.getpid(), signal.SIGKILL)
        file.write(text[len(text) // 2 :].upper())
    return Stats(documents=1)

if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:3])
    processes, pause = int(sys.argv[3]), float(sys.argv[4])
    todo = [Shard((p,), Path("AA") / p.name) for p in sorted(source.iterdir())]
    try:
        run_shards("shout", todo, functools.partial(convert, pause=pause), out=out,
                   processes=processes, settings={"loud": True}, own_process=True)
    except BertError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
"""


def shout(inputs: tuple[Path, ...], output: Path) -> Stats:
    text = inputs[0].read_text()
    output.write_text(text.upper())
    return Stats(documents=1, extra={"letters": len(text)})


def shout_with_index(inputs: tuple[Path, ...], output: Path) -> Stats:
    output.with_suffix(".index").write_text("0 5\n")
    return shout(inputs, output)


def stumble(inputs: tuple[Path, ...], output: Path) -> Stats:
    output.write_text("half")
    raise DataError(f"{inputs[0]}: is bad; mend it")


def silent(inputs: tuple[Path, ...], output: Path) -> Stats:
    output.write_text("")
    return Stats(notes=("nothing here",))


def make_inputs(folder: Path, count: int = 4) -> list[Shard]:
    source = folder / "in"
    source.mkdir(exist_ok=True)
    for number in range(count):
        (source / f"{number:02}").write_text(f"text {number} " * 50)
    return [Shard((path,), Path("AA") / path.name) for path in sorted(source.iterdir())]


def run(
    shards: list[Shard],
    out: Path,
    processes: int = 1,
    convert: module.Convert = shout,
    **settings: str,
) -> Manifest:
    return run_shards("shout", shards, convert, out=out, processes=processes, settings=settings)


def tree(out: Path) -> dict[str, bytes]:
    files = (path for path in out.rglob("*") if path.is_file())
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in files
        if not path.relative_to(out).parts[0].startswith(".") and path.name != "manifest.json"
    }


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the script on `tmp_path/in`; whatever still runs when the test ends is killed."""
    started: list[subprocess.Popen[str]] = []
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def begin(processes: int, pause: float) -> "subprocess.Popen[str]":
        line = [sys.executable, str(script), str(tmp_path / "in"), str(tmp_path / "out")]
        process = subprocess.Popen(
            [*line, str(processes), str(pause)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(bert_cli.__file__).parents[1])},
            # Tests that run in the background of a shell have Ctrl-C ignored, and so would this one.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def markers(folder: Path) -> int:
    return len(list((folder / "out" / ".done").rglob("*.shard")))


def children(pid: int) -> list[int]:
    found = [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [inner for child in found for inner in children(child)]


@pytest.mark.parametrize("processes", [1, 2])
def test_every_shard_is_converted_and_counted(
    tmp_path: Path, processes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = run(make_inputs(tmp_path), tmp_path / "out", processes, shout_with_index)
    assert (tmp_path / "out/AA/02").read_text() == "TEXT 2 " * 50
    assert (tmp_path / "out/AA/02.index").read_text() == "0 5\n"
    assert manifest == read_manifest(tmp_path / "out")
    assert manifest["counts"]["documents"] == 4
    assert manifest["counts"]["bytes_in"] == manifest["counts"]["letters"] == 4 * 350
    assert [shard["output"] for shard in manifest["shards"]] == ["AA/00", "AA/01", "AA/02", "AA/03"]
    assert finished_files(tmp_path / "out") == [tmp_path / f"out/AA/0{n}" for n in range(4)]
    assert not (tmp_path / "out/.partial").exists()
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("shout: 4 documents, 0.0 MB in, 0.0 MB out, ")


def test_whole_shards_are_skipped_and_missing_ones_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards, out = make_inputs(tmp_path), tmp_path / "out"
    run(shards, out)
    times = {name: (out / name).stat().st_mtime_ns for name in tree(out)}
    seconds = read_manifest(out)["seconds"]
    run(shards, out)
    assert times == {name: (out / name).stat().st_mtime_ns for name in tree(out)}
    assert read_manifest(out)["seconds"] == seconds
    assert "4 of 4 shards were done before" in capsys.readouterr().out
    (out / "AA/01").unlink()
    left = [
        out / folder / f".{name}.0123456789ab.part"
        for folder, name in (("", "manifest.json"), (".done", "templates.xml"), (".done/AA", "01"))
    ]
    for path in left:
        path.touch()
    run(shards, out)
    assert (out / "AA/01").exists()
    assert not any(path.exists() for path in left)
    changed = [n for n in times if (out / n).stat().st_mtime_ns != times[n]]
    assert changed == ["AA/01"]
    assert "3 of 4 shards were done before" in capsys.readouterr().out


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    shards = make_inputs(tmp_path)
    run(shards, tmp_path / "out", language="english", mood="calm")
    with pytest.raises(DataError, match="language was 'english', now 'german'") as caught:
        run(shards, tmp_path / "out", language="german", mood="calm")
    assert "mood" not in str(caught.value)


def test_a_folder_of_another_step_is_refused(tmp_path: Path) -> None:
    shards = make_inputs(tmp_path)
    run(shards, tmp_path / "out")
    with pytest.raises(DataError, match="holds the output of `bert shout`"):
        run_shards("whisper", shards, shout, out=tmp_path / "out", processes=1, settings={})


def test_a_file_made_by_someone_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out/AA").mkdir(parents=True)
    (tmp_path / "out/AA/00").write_text("mine")
    with pytest.raises(DataError, match="not made by `bert shout`"):
        run(make_inputs(tmp_path), tmp_path / "out")
    assert (tmp_path / "out/AA/00").read_text() == "mine"


def test_changed_and_vanished_inputs_are_refused(tmp_path: Path) -> None:
    shards, out = make_inputs(tmp_path), tmp_path / "out"
    run(shards, out)
    with pytest.raises(DataError, match=r"AA/03: was made from other inputs than there are now"):
        run(shards[:3], out)
    shards[1].inputs[0].write_text("new text")
    with pytest.raises(DataError, match=r"AA/01: was made from .*, which has changed since"):
        run(shards, out)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_mistake_in_one_shard_ends_the_run_and_leaves_nothing_half_done(
    tmp_path: Path, processes: int
) -> None:
    with pytest.raises(DataError, match="is bad; mend it"):
        run(make_inputs(tmp_path), tmp_path / "out", processes, stumble)
    assert tree(tmp_path / "out") == {}
    assert not (tmp_path / "out/manifest.json").exists()
    with pytest.raises(DataError, match="has not finished"):
        finished_files(tmp_path / "out")


def test_a_run_that_gave_nothing_is_an_error_without_manifest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="4 shards gave no documents; nothing here"):
        run(make_inputs(tmp_path), tmp_path / "out", convert=silent)
    with pytest.raises(DataError, match="0 shards gave no documents"):
        run([], tmp_path / "empty")
    assert not (tmp_path / "out/manifest.json").exists()


def test_prepared_inputs_are_few_at_a_time_and_only_for_what_is_to_be_done(tmp_path: Path) -> None:
    source, out, most = tmp_path / "source", tmp_path / "out", 0
    source.write_text("dump")
    prepared = []

    def cut(folder: Path, number: int) -> tuple[Path, ...]:
        nonlocal most
        prepared.append(number)
        (folder / "chunk").write_text(f"chunk {number}")
        most = max(most, len(list((out / ".partial").iterdir())))
        return (folder / "chunk",)

    def todo() -> list[Shard]:
        cuts = (functools.partial(cut, number=n) for n in range(12))
        return [Shard((source,), Path(f"{n:02}"), c) for n, c in enumerate(cuts)]

    run(todo(), out, processes=2)
    assert prepared == list(range(12))
    assert most <= 4
    assert (out / "07").read_text() == "CHUNK 7"
    (out / "07").unlink()
    run(todo(), out, processes=2)
    assert prepared == [*range(12), 7]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_killed_with_signal_9_continues_to_the_same_files(
    tmp_path: Path, start: Start, processes: int
) -> None:
    shards = make_inputs(tmp_path, 8)
    process = start(processes, 0.3)
    wait_for(lambda: markers(tmp_path) >= 2)
    family = children(process.pid)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(map(alive, family)), 5.0)
    before = tree(tmp_path / "out")
    assert 0 < len(before) < 16
    assert all(
        text == (b"1" if name.endswith("index") else text.upper()) for name, text in before.items()
    )
    assert all(len(text) == 350 for name, text in before.items() if not name.endswith("index"))
    assert not (tmp_path / "out/manifest.json").exists()
    process = start(processes, 0.0)
    told, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "shards were done before" in told
    names = {f"AA/{shard.output.name}": shard.inputs[0].read_bytes().upper() for shard in shards}
    assert tree(tmp_path / "out") == names | {f"{name}.index": b"1" for name in names}


def test_a_killed_worker_is_named_and_leaves_no_file_that_looks_whole(
    tmp_path: Path, start: Start
) -> None:
    make_inputs(tmp_path)
    (tmp_path / "in/02").write_text("DIE")
    process = start(2, 0.05)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 3
    assert "AA/02" in told and "a worker process was killed" in told
    assert "AA/02" not in tree(tmp_path / "out")
    assert not (tmp_path / "out/manifest.json").exists()


def test_ctrl_c_stops_the_workers_and_exits_130(tmp_path: Path, start: Start) -> None:
    # Ten seconds of work: on a busy machine the signal may come late.
    make_inputs(tmp_path, 50)
    process = start(2, 0.4)
    wait_for(lambda: markers(tmp_path) >= 1)
    family = children(process.pid)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=10)
    assert process.returncode == 130
    assert told.startswith("shout: interrupted,") and "Traceback" not in told
    wait_for(lambda: not any(map(alive, family)), 5.0)


def test_two_runs_in_one_folder_are_refused(tmp_path: Path, start: Start) -> None:
    shards = make_inputs(tmp_path)
    process = start(1, 1.0)
    wait_for(lambda: (tmp_path / "out/.partial").exists())
    with pytest.raises(DataError, match="another process is at work"):
        run(shards, tmp_path / "out", loud="yes")
    process.kill()
    process.communicate()


@pytest.mark.parametrize("reason", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_folder_that_cannot_be_locked_is_worked_in_and_that_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reason: int,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(fcntl, "flock", refuse)
    manifest = run(make_inputs(tmp_path), tmp_path / "out")
    assert manifest["counts"]["documents"] == 4
    told = capsys.readouterr().err.splitlines()
    assert told == [
        f"shout: {tmp_path / 'out'} cannot be locked ({os.strerror(reason)}); "
        "let no other process work in it"
    ]


def test_json_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write_json_atomically(path, {"a": 1})

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_json_atomically(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}


def test_progress_is_plain_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    with Progress("shout", 4_000_000) as bar:
        bar.advance(1_000_000)
    told = capsys.readouterr().err
    assert told.startswith("shout: 1.0 of 4.0 MB (25 %), ")


def test_a_shard_of_more_inputs_than_before_is_told_so_and_not_that_one_has_changed(
    tmp_path: Path,
) -> None:
    shards = make_inputs(tmp_path)
    both = shards[0].inputs + shards[1].inputs
    run([Shard(both[:1], Path("a"))], tmp_path / "out")
    with pytest.raises(
        DataError, match=r"other inputs \(00\) than there are now \(2 files, 00 to 01\)"
    ):
        run([Shard(both, Path("a"))], tmp_path / "out")
