"""`bert average`: the mean of a run's newest checkpoints, and its score next to that of the newest."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow  # noqa: F401 (before conftest.py cuts the CPU into devices)
from safetensors.numpy import load_file, save_file

from bert_cli.cli import main
from bert_cli.files import OWN_CHECKSUM, STATE
from bert_cli.statistics import Score
from bert_cli.tasks.use.average import verdict_of
from bert_cli.train.card import CARD
from bert_cli.train.checkpoint import MODEL, OPTIMIZER, SETTINGS, complete_checkpoints

LAST = 3


@pytest.fixture(scope="module")
def home(pretrained, tmp_path_factory):
    """The run, and the mean of its last checkpoints."""
    mean = tmp_path_factory.mktemp("average") / "mean"
    assert main(average(pretrained / "run", mean)) == 0
    return SimpleNamespace(path=pretrained, mean=mean)


def average(run, out, *flags):
    return ["average", str(run), str(out), "--last", str(LAST), *map(str, flags)]


@pytest.fixture
def copied(home, tmp_path):
    return shutil.copytree(home.path / "run", tmp_path / "run")


def test_the_mean_is_that_of_numpy_beside_the_other_files_of_the_newest_checkpoint(home):
    out, paths = home.mean, complete_checkpoints(home.path / "run")
    assert len(paths) == 6 and [*out.parent.iterdir()] == [out]
    weights, mean = [load_file(path / MODEL) for path in paths[-LAST:]], load_file(out / MODEL)
    assert mean.keys() == weights[-1].keys()
    for name, value in mean.items():
        expected = np.mean([one[name] for one in weights], 0, np.float64).astype(np.float32)
        assert value.dtype == np.float32 and np.array_equal(value, expected), name
    files = {path.name for path in paths[-1].iterdir()} - {OPTIMIZER, STATE}
    assert {path.name for path in out.iterdir()} == files | {SETTINGS}
    weights_row = "| weights | mean of step_00000004, step_00000005, step_00000006 |\n"
    assert (out / CARD).read_text() == (paths[-1] / CARD).read_text() + weights_row
    for name in files - {MODEL, CARD}:
        assert (out / name).read_bytes() == (paths[-1] / name).read_bytes()
    assert (out / MODEL).stat().st_mode == (out / "config.json").stat().st_mode


@pytest.mark.parametrize(
    ("low", "high", "better"),
    [
        (-2, -1, "the average is better"),
        (-1, 0, "no difference"),
        (-1, 1, "no difference"),
        (0, 1, "no difference"),
        (1, 2, "the newest is better"),
    ],
)
def test_the_interval_of_the_change_says_which_is_better(low, high, better):
    assert verdict_of(Score((low + high) / 2, low, high, 9, 9)).startswith(better)


def test_a_checkpoint_of_another_shape_is_refused(copied, tmp_path, bert):
    old = complete_checkpoints(copied)[-2]
    tensors = load_file(old / MODEL)
    name = "bert.pooler.dense.bias"
    save_file({**tensors, name: tensors[name][1:]}, old / MODEL)
    state = json.loads((old / STATE).read_text())
    del state[OWN_CHECKSUM]
    (old / STATE).write_text(json.dumps({**state, "crc32c": {}}))
    error = bert(*average(copied, tmp_path / "out"), code=4).err
    assert f"{old / MODEL}: differs from step_00000004" in error and name in error
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
