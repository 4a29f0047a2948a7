"""A checkpoint is complete or absent, whatever ends its writing; the newest and the best are kept; a run has a lock."""

import fcntl
import math
import os
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import SCALE, save, state_at

from bert_cli.errors import CheckpointError, DataError, DeviceError
from bert_cli.files import STATE
from bert_cli.text import format_bytes
from bert_cli.train import checkpoint
from bert_cli.train.checkpoint import LOCK, Folder, complete_checkpoints, lock_run, step_of
from bert_cli.train.loop import StateCopy

SMALL = StateCopy({"w": np.ones(3, np.float32)}, {}, SCALE, 7)


@pytest.fixture
def saved(tmp_path):
    return save(tmp_path / "run", SMALL)


def test_the_files_are_readable_like_the_config_and_a_saved_step_is_not_written_again(saved):
    before = {path.name: path.stat() for path in saved.iterdir()}
    assert {file.st_mode for file in before.values()} == {before["config.json"].st_mode}
    assert save(saved.parent, SMALL) == saved
    assert {path.name: path.stat() for path in saved.iterdir()} == before


def test_a_transposed_array_is_written_in_the_order_of_its_rows(tmp_path):
    values = {"kernel": np.arange(6.0).reshape(2, 3).T, "count": np.asarray(3.0)}
    checkpoint.write_tensors(tmp_path / checkpoint.MODEL, values)
    read = checkpoint.read_tensors(tmp_path / checkpoint.MODEL)
    for name, value in values.items():
        np.testing.assert_array_equal(read[name], value, strict=True)


def test_weights_that_cannot_be_read_are_named(tmp_path):
    header = b'{"w": {"dtype": "F8_E8M0", "shape": [1], "data_offsets": [0, 1]}}'
    path, content = tmp_path / "x", len(header).to_bytes(8, "little") + header + b"1"
    for stored, problem in (
        (content, "has weights of the type F8_E8M0, which NumPy"),
        (b"", "cannot"),
    ):
        path.write_bytes(stored)
        with pytest.raises(CheckpointError, match=f"{path}: {problem}"):
            checkpoint.read_tensors(path)


def test_every_file_is_forced_to_disk_before_the_rename_and_the_rename_after_it(
    tmp_path, monkeypatch
):
    calls, real_replace, real_fsync = [], os.replace, os.fsync

    def fsync(descriptor: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_fsync(descriptor)

    def rename(old: Path, new: Path) -> None:
        calls.append("rename")
        real_replace(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    saved = save(tmp_path, state_at(3))
    files = {file.name for file in saved.iterdir()}
    at = calls.index("rename")
    folders = {name for name in calls[:at] if name.startswith(f".partial_{saved.name}.")}
    assert len(folders) == 1 and {*calls[:at]} == files | folders
    assert calls[at + 1 :] == [tmp_path.name]


def test_only_a_complete_folder_of_the_right_name_is_a_checkpoint(saved):
    run = saved.parent
    for step in (12, 8):
        shutil.copytree(saved, run / f".partial_step_{step:08d}")
    (run / ".best.json.0123456789ab.part").touch()
    # The rest of an interrupted save is removed.
    assert checkpoint.remove_partial_checkpoints(run) == ["step_00000008", "step_00000012"]
    assert [*run.iterdir()] == [saved]
    (run / "step_00000011").touch()
    for name in ("step_00000007_copy", "step_00000099.bak", "step_best", "step_00000009"):
        shutil.copytree(saved, run / name)
    (run / "step_00000009" / STATE).unlink()
    assert complete_checkpoints(run) == [saved]
    with pytest.raises(CheckpointError, match=r"step_.*: is a checkpoint without state\.json"):
        checkpoint.remove_partial_checkpoints(run)
    Folder(run).prune(1, None)
    assert len([*run.iterdir()]) == 6


def test_the_newest_the_multiples_and_the_best_are_kept(tmp_path, monkeypatch):
    def save_empty(step: int) -> Path:
        return save(tmp_path, StateCopy({}, {}, SCALE, step))

    def pruned(keep: int, every: int | None = None) -> list[int]:
        Folder(tmp_path).prune(keep, every)
        return [step_of(path) for path in complete_checkpoints(tmp_path)]

    for step in range(1, 9):
        save_empty(step)
    assert pruned(2, every=3) == [3, 6, 7, 8]
    with monkeypatch.context() as patch:  # killed before a file of theirs is removed
        patch.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: None)
        assert pruned(2) == [7, 8]
    assert sorted(tmp_path.glob("step_*")) == complete_checkpoints(tmp_path)
    assert pruned(1) == [8]
    assert Folder(tmp_path).best_checkpoint is None
    # An equal score is not better: the older checkpoint had less time to overfit.
    scores = ((11, 0.5, [11]), (12, 0.7, [12]), (13, 0.7, [12, 13]), (14, 0.6, [12, 14]), (15, 0.8, [15]))  # fmt: skip
    for step, value, left in scores:
        save_empty(step)
        Folder(tmp_path).write_best(step, "f1", value)
        assert pruned(1) == left
    # A score that is no number is never the best, and any number is better.
    save_empty(16)
    Folder(tmp_path).write_best(16, "f1", math.nan)
    assert Folder(tmp_path).best_checkpoint == tmp_path / "step_00000015"
    shutil.rmtree(tmp_path / "step_00000016")
    (tmp_path / "best.json").unlink()
    for value, best in ((math.nan, math.nan), (-1.0, -1.0), (math.nan, -1.0)):
        Folder(tmp_path).write_best(15, "f1", value)
        assert Folder(tmp_path).best.value == pytest.approx(best, nan_ok=True)
    # A best checkpoint that was removed does not hide others.
    assert Folder(tmp_path).best_checkpoint == tmp_path / "step_00000015"
    shutil.rmtree(tmp_path / "step_00000015")
    assert Folder(tmp_path).best_checkpoint is None
    newest = save_empty(16)
    Folder(tmp_path).write_best(16, "f1", 0.3)
    assert Folder(tmp_path).best_checkpoint == newest


# --- errors of the disk


def assert_disk_error(folder: Path) -> str:
    with pytest.raises(DataError) as error:
        save(folder, state_at(3))
    assert str(error.value).startswith(f"{folder / 'step_00000003'}: cannot be written (")
    assert "make room or choose another save_ckpt_path" in str(error.value)
    assert not (folder / "step_00000003").exists()
    return str(error.value)


@pytest.mark.parametrize("fraction", [0.6, 0.99], ids=["moments", "last"])
def test_a_full_disk_is_an_error_and_leaves_nothing_that_looks_complete(
    fraction, tmp_path, small_disk
):
    complete = save(tmp_path / "elsewhere", state_at(3))
    pages = sum(-(-file.stat().st_size // 4096) for file in complete.iterdir())
    disk = small_disk(int(pages * fraction) * 4096)
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    message, size = assert_disk_error(disk / "run"), 24 << 20
    lacks = f"{format_bytes(size - free)} of the {format_bytes(size)} to write are missing"
    assert f"No space left on device, {format_bytes(free)} are free and {lacks}" in message
    assert list((disk / "run").iterdir()) == []
    # With more room the same save succeeds.
    subprocess.run(["mount", "-o", f"remount,size={2 * pages * 4096}", str(disk)], check=True)
    assert save(disk / "run", state_at(3)).is_dir()


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").write_text("a file is in the way")
    assert_disk_error(tmp_path / "file")


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
    good = save(tmp_path, state_at(3))
    for name in ("w", "w/moment1", "w/moment2"):
        bad = state_at(4)
        {**bad.weights, **bad.slots}[name][-1] = np.nan
        with pytest.raises(DeviceError, match=f"step 4: {name}: has values that are not finite"):
            save(tmp_path, bad)
    assert [*tmp_path.iterdir()] == [good]


# --- the lock


def test_two_runs_cannot_have_one_folder_and_a_run_cannot_have_a_file(tmp_path):
    # A run starts while its lock is checked.
    with open(tmp_path / LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        unlock = threading.Timer(0.08, fcntl.flock, (lock, fcntl.LOCK_UN))
        unlock.start()
        with lock_run(tmp_path):
            unlock.join()
            problem = "another process is using it"
            with pytest.raises(CheckpointError, match=problem), lock_run(tmp_path):
                pass
    (tmp_path / "file").touch()
    where = rf"save_ckpt_path \({tmp_path / 'file'}\): "
    with pytest.raises(DataError, match=where), lock_run(tmp_path / "file"):
        pass
