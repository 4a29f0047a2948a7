"""A shard is complete or absent, however a run ends."""

import errno
import fcntl
import functools
import os
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.processes import alive, wait_for
from support.shards import make_inputs, shout, tree

import bert_cli
from bert_cli import files
from bert_cli.data.shards import progress
from bert_cli.data.shards.manifest import (
    Manifest,
    Step,
    finished_files,
    open_output,
    read_manifest,
)
from bert_cli.data.shards.progress import Progress, plan_disk_space
from bert_cli.data.shards.runner import Workers, run_shards
from bert_cli.data.shards.shard import Convert, Shard, Stats
from bert_cli.errors import DataError

Start = Callable[[int, float], "subprocess.Popen[str]"]
Usage = namedtuple("Usage", "total used free")

# Upper-cases files slowly; an input with DIE kills its worker.
SCRIPT = """
import functools, os, signal, sys, time
from pathlib import Path
from bert_cli.data.shards.manifest import Step
from bert_cli.data.shards.runner import Workers, run_shards
from bert_cli.data.shards.shard import Shard, Stats
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
    todo = [Shard((p,), Path("AA") / p.name, {"pause": float(sys.argv[4])}) for p in sorted(source.iterdir())]
    try:
        run_shards(Step("shout", out), todo, convert, Workers(int(sys.argv[3])))
    except BertError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
"""


def fail(inputs: tuple[Path, ...], output: Path) -> Stats:
    output.write_text("half")
    raise DataError(str(inputs[0]), "is bad", "fix it")


def give_nothing(inputs: tuple[Path, ...], output: Path) -> Stats:
    output.write_text("")
    return Stats(notes=("nothing here",))


def run(
    shards: list[Shard],
    out: Path,
    processes: int = 1,
    convert: Convert = shout,
    expected_bytes: int | None = None,
    **settings: str,
) -> Manifest:
    step = Step("shout", out, settings, expected_bytes=expected_bytes)
    return run_shards(step, shards, convert, Workers(processes))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the script on `tmp_path/in`; what still runs when the test ends is killed."""
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
            # A background job of a shell ignores Ctrl-C, and so would its children.
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


def descendants(pid: int) -> list[int]:
    children = [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [inner for child in children for inner in descendants(child)]


@pytest.mark.parametrize("processes", [1, 2])
def test_every_shard_is_converted_and_counted(
    tmp_path: Path, processes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = run(make_inputs(tmp_path), tmp_path / "out", processes)
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


def test_complete_shards_are_skipped_and_missing_ones_made(
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
    names = (("", "manifest.json"), (".done", "templates.xml"), (".done/AA", "01"))
    leftovers = [out / folder / f".{name}.0123456789ab.part" for folder, name in names]
    for path in leftovers:
        path.touch()
    run(shards, out)
    assert not any(path.exists() for path in leftovers)
    changed = sorted(n for n in times if (out / n).stat().st_mtime_ns != times[n])
    assert changed == ["AA/01", "AA/01.index"]
    assert "3 of 4 shards were done before" in capsys.readouterr().out


def test_a_folder_of_other_settings_inputs_or_steps_is_rejected(tmp_path: Path) -> None:
    shards, out = make_inputs(tmp_path), tmp_path / "out"
    run(shards, out, language="english", mood="calm")
    with pytest.raises(DataError, match="language was 'english', now 'german'") as error:
        run(shards, out, language="german", mood="calm")
    assert "mood" not in str(error.value)
    with pytest.raises(DataError, match=r"mood was 'calm', now the default"):
        run(shards, out, language="english")
    with pytest.raises(DataError, match="holds the output of `bert shout`"):
        run_shards(Step("whisper", out), shards, shout, Workers())
    same = {"language": "english", "mood": "calm"}
    with pytest.raises(DataError, match=r"AA/03: was made from other inputs than there are now"):
        run(shards[:3], out, **same)
    both = Shard(shards[0].inputs + shards[1].inputs, shards[0].output)
    with pytest.raises(
        DataError, match=r"other inputs \(00\) than there are now \(2 files, 00 to 01\)"
    ):
        run([both], out, **same)
    shards[1].inputs[0].write_text("new text")
    with pytest.raises(DataError, match=r"AA/01: was made from .*, which has changed since"):
        run(shards, out, **same)


def test_files_of_others_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out/AA").mkdir(parents=True)
    (tmp_path / "out/AA/00").write_text("mine")
    with pytest.raises(DataError, match="not made by `bert shout`"):
        run(make_inputs(tmp_path), tmp_path / "out")
    assert (tmp_path / "out/AA/00").read_text() == "mine"
    for out in (tmp_path / "in/00", tmp_path / "in/00/deeper"):
        with pytest.raises(DataError, match=r"in/00\): is a file and must be a folder"):
            run(make_inputs(tmp_path), out)


def test_an_error_in_a_shard_ends_the_run_and_leaves_nothing_half_done(tmp_path: Path) -> None:
    for processes in (1, 2):
        with pytest.raises(DataError, match="is bad; fix it"):
            run(make_inputs(tmp_path), tmp_path / "out", processes, fail)
        assert tree(tmp_path / "out") == {}
    with pytest.raises(DataError, match="has not finished"):
        finished_files(tmp_path / "out")


def test_a_run_that_gave_nothing_is_an_error_without_manifest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"4 shards gave no documents \(nothing here\)"):
        run(make_inputs(tmp_path), tmp_path / "out", convert=give_nothing)
    with pytest.raises(DataError, match="0 shards gave no documents"):
        run([], tmp_path / "empty")
    assert not (tmp_path / "out/manifest.json").exists()


def test_prepared_inputs_are_few_at_a_time_and_only_for_missing_shards(tmp_path: Path) -> None:
    source, out, most = tmp_path / "source", tmp_path / "out", 0
    source.write_text("dump")
    prepared = []

    def prepare(folder: Path, number: int) -> tuple[Path, ...]:
        nonlocal most
        prepared.append(number)
        (folder / "chunk").write_text(f"chunk {number}")
        most = max(most, len(list((out / ".partial").iterdir())))
        return (folder / "chunk",)

    def shards() -> list[Shard]:
        parts = (functools.partial(prepare, number=n) for n in range(12))
        return [Shard((source,), Path(f"{n:02}"), prepare=part) for n, part in enumerate(parts)]

    run(shards(), out, processes=2)
    assert prepared == list(range(12))
    assert most <= 4
    assert (out / "07").read_text() == "CHUNK 7"
    (out / "07").unlink()
    run(shards(), out)
    assert prepared == [*range(12), 7]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_killed_by_signal_9_continues_to_the_same_files(
    tmp_path: Path, start: Start, processes: int
) -> None:
    shards = make_inputs(tmp_path, 8)
    process = start(processes, 0.2)
    wait_for(lambda: markers(tmp_path) >= 2)
    family = descendants(process.pid)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(map(alive, family)), 5.0)
    before = tree(tmp_path / "out")
    wanted = {f"AA/{shard.output.name}": shard.inputs[0].read_bytes().upper() for shard in shards}
    wanted |= {f"{name}.index": b"1" for name in wanted}
    assert 0 < len(before) < 16
    assert before.items() <= wanted.items()
    assert not (tmp_path / "out/manifest.json").exists()
    process = start(processes, 0.0)
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "shards were done before" in printed
    assert tree(tmp_path / "out") == wanted


def test_a_killed_worker_is_named_and_its_shard_is_absent(tmp_path: Path, start: Start) -> None:
    make_inputs(tmp_path)
    (tmp_path / "in/02").write_text("DIE")
    process = start(2, 0.05)
    _, printed = process.communicate(timeout=30)
    assert process.returncode == 3
    assert "AA/02" in printed and "a worker process was killed" in printed
    assert "AA/02" not in tree(tmp_path / "out")
    assert not (tmp_path / "out/manifest.json").exists()


def test_ctrl_c_stops_the_workers_and_exits_130(tmp_path: Path, start: Start) -> None:
    # Ten seconds of work: on a busy machine the signal may come late.
    make_inputs(tmp_path, 50)
    process = start(2, 0.4)
    wait_for(lambda: markers(tmp_path) >= 1)
    family = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=10)
    assert process.returncode == 130
    assert printed.startswith("shout: interrupted,") and "Traceback" not in printed
    wait_for(lambda: not any(map(alive, family)), 5.0)


def test_two_runs_in_one_folder_are_rejected(tmp_path: Path) -> None:
    with open_output(Step("shout", tmp_path / "out")), pytest.raises(DataError, match="is at work"):
        run(make_inputs(tmp_path), tmp_path / "out")


@pytest.mark.parametrize("reason", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_reported_and_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reason: int,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert run(make_inputs(tmp_path), tmp_path / "out")["counts"]["documents"] == 4
    message = f"cannot be locked ({os.strerror(reason)}); let no other process work in it"
    assert capsys.readouterr().err.splitlines() == [f"shout: {tmp_path / 'out'} {message}"]


# --- what is printed


def test_progress_is_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with Progress("shout", 4_000_000) as bar:
        bar.advance(1_000_000)
    assert capsys.readouterr().err.startswith("shout: 1.0 of 4.0 MB (25 %), ")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Free bytes of the disk, to be set."""
    free = [0]
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: Usage(0, 0, free[0]))
    return free


def test_the_plan_is_one_line_and_a_full_disk_is_rejected_before_the_first_shard(
    free: list[int], tmp_path: Path
) -> None:
    free[0] = 120_000_000_000
    assert (
        plan_disk_space("tokenize", 12, 3_400_000_000, 0, tmp_path)
        == f"tokenize: plan: 12 shards, about 3.4 GB to write, 120 GB free in {tmp_path}"
    )
    assert ": plan: about 3.4 GB to" in plan_disk_space("extract", None, 3_400_000_000, 0, tmp_path)
    shards, out = make_inputs(tmp_path), tmp_path / "out"
    free[0] = 1_399
    with pytest.raises(DataError, match=r"write about 1\.4 kB and 1\.4 kB are free there; make"):
        run(shards, out, expected_bytes=1_400)
    assert tree(out) == {}
    free[0] = 1_400
    run(shards, out, expected_bytes=1_400)
    assert len(tree(out)) == 8


def test_complete_shards_need_no_space(
    free: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards, out = make_inputs(tmp_path, 3), tmp_path / "out"
    free[0] = 10_000
    with pytest.raises(DataError, match="0 shards"):
        run([], out)
    run(shards[:2], out)  # 350 bytes and an index of 4 each
    free[0] = 353
    with pytest.raises(DataError, match=r"about 354 bytes"):
        run(shards, out, expected_bytes=3 * 354)
    free[0] = 354
    capsys.readouterr()
    run(shards, out, expected_bytes=3 * 354)
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(
        "shout: plan: 3 shards, about 354 bytes to write (708 bytes are there), "
    )
    free[0] = 0  # nothing is left to write, however wrong the estimate was
    run(shards, out, expected_bytes=9_000)
    assert "3 shards, nothing to write (1.1 kB are there)" in capsys.readouterr().out
