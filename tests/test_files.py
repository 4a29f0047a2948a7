"""Atomic files, locks, JSON, sizes; child processes that end with their parent; text on a terminal."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from pydantic import BaseModel
from support.processes import assert_gone, wait_for
from support.terminal import Terminal

import bert_cli
from bert_cli import files
from bert_cli.disk import free_bytes
from bert_cli.errors import CheckpointError, ConfigError, DataError
from bert_cli.files import (
    atomic_file,
    atomic_folder,
    check_new_folder,
    is_locked,
    lock_file,
    name_path,
    output_json,
    read_json,
    write_atomically,
    write_json_atomically,
)
from bert_cli.processes import kill_program, print_help, print_table, start_program


class State(BaseModel):
    step: int


def test_json_that_does_not_match_is_an_error_with_path_problem_and_remedy(tmp_path):
    path = tmp_path / "state.json"
    for content, problem in (
        (b'{"step": "seven"}', r"state.json \(step\): Input should be a valid integer"),
        (b'{"step": \xff}', "Invalid JSON"),
        (b"[" * 5000, "recursion limit"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=problem) as error:
            read_json(path, State, CheckpointError, "remove it")
        assert str(error.value).startswith(str(path))
        assert error.value.remedy == "remove it"
    path.write_text('{"step": 7}')
    assert read_json(path, State, CheckpointError, "remove it") == State(step=7)
    with pytest.raises(CheckpointError, match=r"absent.json: cannot be read \(No such file"):
        read_json(tmp_path / "absent.json", State, CheckpointError, "remove it")


def test_a_json_report_is_written_or_an_error(tmp_path):
    output_json(tmp_path / "deep" / "a.json", {"a": 1})
    assert json.loads((tmp_path / "deep" / "a.json").read_text()) == {"a": 1}
    with pytest.raises(DataError, match=r"json \(.*\): cannot be written \(.*\); choose another"):
        output_json(tmp_path / "deep" / "a.json" / "b", {})


def test_a_write_that_fails_leaves_the_old_file_and_no_part(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json_atomically(path, {"a": 1})
    with pytest.raises(ValueError, match="midway"), atomic_file(path) as partial:
        partial.write_bytes(b"half")
        raise ValueError("midway")

    def fail(*_):
        raise OSError("disk full")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
            patch.setattr(os, name, fail)
            write_json_atomically(path, {"a": 2})
    assert [json.loads(file.read_text()) for file in tmp_path.iterdir()] == [{"a": 1}]


@pytest.mark.parametrize("before", [None, b"old"])
def test_a_file_is_added_to_a_checkpoint_with_a_kill_before_or_after_any_rename(
    before, tmp_path, monkeypatch
):
    rename, left = os.replace, [0]

    def killed(source, target):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        rename(source, target)

    def read_state():
        return json.loads((tmp_path / "state.json").read_text())

    (tmp_path / "weights").write_bytes(b"weights")
    complete = {
        "format": files.FORMAT,
        "step": 7,
        "crc32c": {"weights": files.file_crc32c(tmp_path / "weights")},
    }
    for renames in range(4):
        write_json_atomically(tmp_path / "state.json", files.with_checksum(complete))
        (tmp_path / "card.md").unlink(missing_ok=True)
        if before is not None:
            files.add_to_checkpoint(tmp_path, "card.md", before)
        left[0] = renames
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(os, "replace", killed)
            files.add_to_checkpoint(tmp_path, "card.md", b"new")
        assert (left[0] < 0) == (renames < 3)
        files.verify_checkpoint(tmp_path)
        if renames == 3:
            assert read_state()["crc32c"].keys() == {"weights", "card.md"}
        files.add_to_checkpoint(tmp_path, "card.md", b"new")
        files.verify_checkpoint(tmp_path)
        assert (tmp_path / "card.md").read_bytes() == b"new" and read_state()["step"] == 7
    (tmp_path / "card.md").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"card.md: has changed since it was saved"):
        files.verify_checkpoint(tmp_path)
    files.verify_checkpoint(tmp_path, but=(".md",))


def test_cores_are_those_that_the_process_may_use():
    may_use = sorted(os.sched_getaffinity(0))
    for cores in (may_use[:1], may_use[:2]):
        code = f"import os; os.sched_setaffinity(0, {cores})"
        code += "; from bert_cli.processes import cpu_count; print(cpu_count())"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert int(done.stdout) == len(cores)


def test_a_file_that_fills_the_disk_leaves_nothing_and_names_path_and_missing_bytes(small_disk):
    path = small_disk(1 << 20) / "vocab.txt"
    write_atomically(path, b"old")
    problem = r"1\.0 MB are free and 2\.0 MB of the 3\.0 MB to write are missing"
    with pytest.raises(OSError, match=problem) as error:
        write_atomically(path, bytes(3_000_000))
    assert error.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert [file.name for file in path.parent.iterdir()] == ["vocab.txt"]
    # An error that has a path keeps it.
    with pytest.raises(FileNotFoundError) as error, name_path(path):
        (path.parent / "absent").read_bytes()
    assert error.value.filename == str(path.parent / "absent")


def test_a_copy_that_fills_the_disk_blames_its_target_and_not_its_source(small_disk, tmp_path):
    source, folder = tmp_path / "source", small_disk(1 << 16)
    source.write_bytes(bytes(1 << 18))
    with pytest.raises(OSError, match="No space left") as error, atomic_folder(folder / "o") as out:
        shutil.copyfile(source, out / "copy")
    assert re.fullmatch(rf"{folder}/\.partial_o\.[0-9a-f]{{12}}/copy", error.value.filename)
    folder = small_disk(1 << 17)
    with pytest.raises(OSError, match=r"No space left.*are free") as error:  # noqa: SIM117
        with atomic_folder(folder / "o") as out:
            shutil.copytree(source.parent, out, dirs_exist_ok=True)
    assert (error.value.errno, [*folder.iterdir()]) == (errno.ENOSPC, [])


WRITE = """
import sys, time
from pathlib import Path
from bert_cli import files
path = Path(sys.argv[2])
with getattr(files, sys.argv[1])(path) as partial:
    (partial / "one" if partial.is_dir() else partial).write_text("theirs")
    print("written", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("write", ["atomic_file", "atomic_folder"])
def test_a_writer_keeps_its_partial_file_beside_another_and_a_killed_one_is_removed(
    write, tmp_path
):
    path = tmp_path / "a[1]"
    (tmp_path / ".a[1].0123.part").touch()  # not a name of ours
    others = {*tmp_path.iterdir()}
    words = [sys.executable, "-c", WRITE, write, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    writers = [subprocess.Popen(words, **pipes) for _ in range(2)]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == b"written\n"
    writers[0].kill()
    writers[0].communicate()
    with pytest.raises(ZeroDivisionError), getattr(files, write)(path):
        raise ZeroDivisionError
    assert writers[1].communicate() and writers[1].returncode == 0
    assert {*tmp_path.iterdir()} == {*others, path}
    assert (path / "one" if path.is_dir() else path).read_text() == "theirs"


def test_a_folder_that_is_not_empty_is_refused_before_and_after_it_is_filled(tmp_path, monkeypatch):
    out = tmp_path / "out"
    check_new_folder(out)
    forced: list[str] = []
    record = lambda paths: forced.extend(f"{path.name} {out.exists()}" for path in paths)  # noqa: E731
    with monkeypatch.context() as patch, atomic_folder(out) as folder:
        patch.setattr(files, "fsync_paths", record)
        (folder / "in").mkdir()
        (folder / "in/file").touch()
    # All is on the disk before the rename, which is forced, too.
    names = ["in", "file", folder.name]
    assert forced == [*(f"{name} False" for name in names), f"{tmp_path.name} True"]
    (out / "file").touch()
    for place in (out, out / "file"):
        with pytest.raises(ConfigError, match="is not an empty folder; use a new one"):
            check_new_folder(place)
    with pytest.raises(ConfigError, match="is not an empty folder"), atomic_folder(out):
        pass


def test_a_lock_is_exclusive_follows_no_link_and_keeps_the_content(tmp_path):
    target = tmp_path / "notes.txt"
    target.write_text("mine")
    (tmp_path / "lock").symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        lock_file(tmp_path / "lock")
    with lock_file(target):
        assert is_locked(target)
        with pytest.raises(BlockingIOError):
            lock_file(target, attempts=2)
    assert not is_locked(target)
    assert not is_locked(tmp_path / "absent")
    assert target.read_text() == "mine"


def test_free_bytes_are_those_of_the_first_folder_that_exists(tmp_path):
    one, other = free_bytes(tmp_path), free_bytes(tmp_path / "not" / "yet")
    assert abs(one - other) < 1 << 28 < one


FAMILY = """
import subprocess, sys, time
from pathlib import Path
child = subprocess.Popen(["sleep", "60"])
Path(sys.argv[1] + ".new").write_text(str(child.pid))
Path(sys.argv[1] + ".new").rename(sys.argv[1])
time.sleep(60)
"""


def test_a_program_has_its_exit_code_and_is_killed_with_its_children(tmp_path):
    for script, code in (("exit 7", 7), ("kill -9 $$", 128 + 9)):
        with start_program(["sh", "-c", script]) as program:
            assert program.wait(20) == code
    program = start_program([sys.executable, "-c", FAMILY, str(tmp_path / "pid")])
    wait_for((tmp_path / "pid").exists)
    kill_program(program)
    assert_gone(tmp_path / "pid")


def test_a_program_ends_with_a_parent_that_is_killed_by_signal_9(tmp_path):
    parent = (
        "import sys, time\n"
        "from bert_cli.processes import start_program\n"
        "start_program([sys.executable, '-c', sys.argv[1], sys.argv[2]])\n"
        "time.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(bert_cli.__file__).parents[1])}
    line = [sys.executable, "-c", parent, FAMILY, str(tmp_path / "pid")]
    with subprocess.Popen(line, env=environment) as process:
        wait_for((tmp_path / "pid").exists)
        process.kill()
    assert_gone(tmp_path / "pid")


HELP = "options:\n  --size INT  a number\n"


def print_on_a_terminal(monkeypatch) -> str:
    """Print a help and a table on a terminal 40 columns wide, and return the text."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stdout", Terminal())
    print_help(HELP)
    print_table(("run", "step"), [("x" * 60, "7")])
    return sys.stdout.getvalue()


def test_a_terminal_gets_cells_of_several_lines_and_colours_unless_it_wants_none(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = print_on_a_terminal(monkeypatch)
    assert "\x1b[1moptions:" in text and "\x1b[36m--size" in text
    lines = text.splitlines()
    assert max(len(line) for line in lines if "x" in line) <= 40
    assert sum(line.count("x") for line in lines if "\x1b" not in line) == 60
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in print_on_a_terminal(monkeypatch)


def test_a_row_is_one_plain_line_where_there_is_no_terminal(capsys):
    long = "/a/very/long/folder" * 20
    print_help(HELP)
    print_table(("run", "step"), [(long, "7"), ("b [bold]", "1,234"), ("\x1b[2J", "0")], right=[1])
    lines = capsys.readouterr().out.removeprefix(HELP).splitlines()
    assert lines[0].split() == ["run", "step"]
    assert lines[1].split() == [long, "7"]
    assert lines[2].startswith("b [bold]") and len(lines[2]) == len(lines[1])
    assert lines[3].split() == ["\\x1b[2J", "0"]
    assert not any(line.endswith(" ") for line in lines)
