"""JSON files of the tool and lock files."""

import pytest
from pydantic import BaseModel

from bert_cli.errors import CheckpointError
from bert_cli.files import open_lock, read_json


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
        open_lock(tmp_path / "lock")
    open_lock(target).close()
    assert target.read_text() == "mine"
