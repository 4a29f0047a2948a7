"""The tiny model trained beside the same model in PyTorch: every step's loss agrees to 1e-4.

`scripts/parity` draws the plot from the same functions; here on fewer examples a step.
"""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
MICRO_BATCH_SIZE = 4


@pytest.fixture(scope="module")
def parity():
    """The script as a module; its name has no ending by which it could be imported."""
    loader = SourceFileLoader("parity", str(ROOT / "scripts" / "parity"))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def records(parity, tmp_path_factory):
    return parity.make_records(tmp_path_factory.mktemp("sample"))


@pytest.mark.parametrize(("optimizer", "steps", "fall"), [("AdamW", 100, 1.0), ("LAMB", 30, 0.3)])
def test_the_losses_are_those_of_pytorch_at_every_step(optimizer, steps, fall, parity, records):
    ours, theirs = parity.compare(records, optimizer, steps, MICRO_BATCH_SIZE)
    assert ours.shape == theirs.shape == (steps,)
    assert np.abs(ours - theirs).max() <= parity.LIMIT
    # They agree on something: the model learns.
    assert ours[-5:].mean() < ours[0] - fall


def test_a_learning_rate_that_is_off_by_a_hundredth_is_seen(parity, records, monkeypatch):
    right = parity.step_in_torch

    def wrong(model, optimizer, batch, rate):
        return right(model, optimizer, batch, 1.01 * rate)

    monkeypatch.setattr(parity, "step_in_torch", wrong)
    ours, theirs = parity.compare(records, "AdamW", 10, MICRO_BATCH_SIZE)
    assert np.abs(ours - theirs).max() > parity.LIMIT


def test_the_table_and_the_plot_are_written(parity, tmp_path):
    ours = np.linspace(9.0, 7.0, 4)
    found = {"AdamW": (ours, ours), "LAMB": (ours, ours + 1e-6)}
    parity.write_table(tmp_path / "parity.csv", found)
    rows = (tmp_path / "parity.csv").read_text().splitlines()
    assert rows[0] == "step,AdamW_ours,AdamW_pytorch,LAMB_ours,LAMB_pytorch"
    assert rows[1] == "1,9.0000000,9.0000000,9.0000000,9.0000010" and len(rows) == 5
    parity.draw(tmp_path / "parity.png", found)
    assert (tmp_path / "parity.png").read_bytes().startswith(b"\x89PNG")
