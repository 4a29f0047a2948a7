"""What all tests share: where the real data is, when it is there."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LOGICAL_DEVICES = 8

REAL_DATA = Path(os.environ.get("BERT_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))

LONGEST_FIRST = (
    "tasks/test_processes.py",
    "parallel/test_layouts.py",
    "tasks/test_pretrain.py",
    "tasks/test_finetune.py",
    "train/test_trackers.py",
    "parallel/test_engine.py",
    "test_docs.py",
    "tasks/test_corpora.py",
    "scripts/test_kubernetes.py",
    "scripts/test_slurm.py",
    "tasks/test_bench.py",
    "tasks/test_shipped_layouts.py",
    "tasks/test_plan_command.py",
    "model/test_chunked.py",
    "tasks/test_export.py",
    "tasks/test_pretrain_distributed.py",
    "tasks/test_beside_pytorch.py",
)
"""Files that take three quarters of a minute to five minutes of a core, longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the long files: a worker that comes to one last keeps everybody waiting for it."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Cut the CPU into devices for all layouts that are tested: TensorFlow allows it only once."""
    if "tensorflow" in sys.modules:
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        one = tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(cpu, [one] * LOGICAL_DEVICES)
        # A thread for every stage of every replica, and some to spare.
        tf.config.threading.set_inter_op_parallelism_threads(2 * LOGICAL_DEVICES)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Root of the real dumps, texts and vocabularies; the test is skipped where they are absent."""
    if not REAL_DATA.is_dir():
        message = f"no real data at {REAL_DATA}; set BERT_SHARED_DATA to a folder that has it"
        if os.environ.get("BERT_REQUIRE_SHARED_DATA") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return REAL_DATA


@pytest.fixture
def write_run() -> Callable[..., Path]:
    """Writes a run's folder as a run leaves it: settings, a line a step, checkpoints, a lock."""

    def write(folder: Path, steps: int, total: int = 10, saved: tuple[int, ...] = (), **settings):
        folder.mkdir(parents=True)
        told = {
            "max_predictions_per_seq": 20,
            "seed": 1,
            "global_batch": {"replicas": 1},
            **settings,
        }
        (folder / "settings.json").write_text(json.dumps(told))
        (folder / "lock").touch()
        lines = [
            {
                "step": step,
                "mlm_loss": 8.0 - 0.5 * step,
                "mlm_accuracy": 0.01 * step,
                "learning_rate": 1e-4,
                "gradient_norm": 1.0,
                "tokens_per_second": 640.0,
                "examples_per_second": 10.0,
                "seconds_per_step": 2.0,
                "seconds_left": 2.0 * (total - step),
            }
            for step in range(1, steps + 1)
        ]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        for step in saved:
            (folder / f"step_{step:08d}").mkdir()
            state = {"step": step, "fixed": {"total_steps": total}}
            (folder / f"step_{step:08d}" / "state.json").write_text(json.dumps(state))
        return folder

    return write


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A function that gives a folder on a disk of so many bytes."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk to fill")
    mounted: list[Path] = []

    def mount(size: int) -> Path:
        folder = tmp_path / f"disk_{size}"
        folder.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount a small disk to fill: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)
