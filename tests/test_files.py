"""JSON files of the tool, files written whole or not at all, and lock files."""

import errno

import pytest
from pydantic import BaseModel

from bert_cli.errors import CheckpointError
from bert_cli.files import atomic_file, lock_file, name_path, read_json, write_atomically


class State(BaseModel):
    step: int


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"step": "seven"}', r"state.json \(step\): Input should be a valid integer"),
        (b'{"step": \xff}', "Invalid JSON"),
        (b"[" * 5000, "recursion limit"),
        (b"", "Invalid JSON"),
    ],
)
def test_json_that_does_not_match_is_an_error_with_path_problem_and_remedy(
    tmp_path, content, problem
):
    path = tmp_path / "state.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=problem) as raised:
        read_json(path, State, CheckpointError, "remove it")
    assert str(raised.value).startswith(str(path))
    assert str(raised.value).endswith("; remove it")


def test_json_that_matches_is_a_value_of_its_type(tmp_path):
    path = tmp_path / "state.json"
    path.write_text('{"step": 7}')
    assert read_json(path, State, CheckpointError, "remove it") == State(step=7)
    assert read_json(path, dict[str, int], CheckpointError, "remove it") == {"step": 7}


def test_an_absent_json_file_is_an_error_with_its_path(tmp_path):
    with pytest.raises(CheckpointError, match=r"absent.json: cannot be read \(No such file"):
        read_json(tmp_path / "absent.json", State, CheckpointError, "remove it")


def test_a_lock_is_not_opened_through_a_symbolic_link_and_keeps_its_content(tmp_path):
    target = tmp_path / "notes.txt"
    target.write_text("mine")
    (tmp_path / "lock").symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        lock_file(tmp_path / "lock")
    lock_file(target).close()
    assert target.read_text() == "mine"


def test_a_file_that_fills_the_disk_leaves_nothing_and_names_path_and_missing_bytes(small_disk):
    path = small_disk(1 << 20) / "vocab.txt"
    write_atomically(path, b"old")
    told = (
        r"No space left on device, 1\.0 MB are free and 2\.0 MB of the 3\.0 MB to write are missing"
    )
    with pytest.raises(OSError, match=told) as raised:
        write_atomically(path, bytes(3_000_000))
    assert raised.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert [file.name for file in path.parent.iterdir()] == ["vocab.txt"]


def test_a_write_that_is_refused_gets_a_path_and_one_that_has_a_path_keeps_it(tmp_path):
    path = tmp_path / "a"
    with pytest.raises(OSError, match="read-only") as raised, name_path(path):
        raise OSError(errno.EROFS, "read-only")
    assert raised.value.filename == str(path)
    with pytest.raises(FileNotFoundError) as raised, name_path(path):
        (tmp_path / "absent").read_bytes()
    assert raised.value.filename == str(tmp_path / "absent")
    with pytest.raises(OSError, match="no errno") as raised, name_path(path):
        raise OSError("no errno")
    assert raised.value.filename is None


def test_a_write_that_fails_for_any_reason_leaves_the_old_file_and_no_part(tmp_path):
    write_atomically(tmp_path / "a", b"old")
    with pytest.raises(ValueError, match="midway"), atomic_file(tmp_path / "a") as partial:
        partial.write_bytes(b"half")
        raise ValueError("midway")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"old"]
