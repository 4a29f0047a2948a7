"""The options, the devices, the memory, and the fixtures of all tests."""

import ctypes
import gc
import json
import os
import sqlite3  # noqa: F401  # before TensorFlow, whose own SQLite has no FTS5
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.made import pretrained  # noqa: F401

from bert_cli.files import FORMAT

# Tests import TensorFlow themselves; without this their numbers are not those of `bert` on a CPU with AVX2 alone.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

LOGICAL_DEVICES = 8

REAL_DATA = Path(os.environ.get("BERT_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))

SLOW_TIMEOUT = 1500
"""Seconds for a slow test. A busy machine took more than 300 for one that takes 70 on two quiet cores."""

LONGEST_FIRST = (
    "transcripts", "layouts", "parity", "export", "folds", "calibrated", "finetune", "engine", "task_commands",
    "small_installation", "extract", "search", "embed_loss", "adam", "windows", "damage", "init",
    "modernbert_commands", "dask_backend", "documents", "published", "pretrain", "average", "serve_search",
    "runner", "byte_level_model", "bench", "encoder", "hostile", "comparison", "evaluate", "resume",
    "search_index", "slurm", "runtimes", "properties", "few", "several_labels", "card", "model", "modernbert",
    "serve", "wrapping", "mistakes", "data", "embed", "imports", "duplicates", "torture", "stored_models",
    "preprocess", "embed_teacher", "refused_files", "processes", "own_text", "scaling", "trackers", "launch",
    "jax_mesh", "corpora", "schedules",
)  # fmt: skip
"""Files that take more than 5 s of a core, longest first, without `test_`. `--fast` leaves them out."""

SLOW_FIRST = (
    "slurm_cluster", "docs", "processes", "layouts", "pretrain", "export", "init",
    "wheel", "plan_command", "scaling", "finetune", "schedules", "several_labels",
    "contract", "embed", "serve", "beside_pytorch", "windows", "jax_mesh",
    "modernbert_commands", "adapt",
)  # fmt: skip
"""Files that take half a minute or more with `--slow`: one that began late would keep a worker busy alone."""


WORTH_COLLECTING = 150_000_000
"""Bytes by which a file may let a worker grow before that costs a collection."""

CACHES = {"support.engine_runs", "support.hf_models", "support.layouts"}
"""Modules whose cached functions hold engines and models."""

MEMORY: dict[str, int] = {}
"""The memory of this process `before` the tests of a file."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="no TensorFlow, no long files")
    parser.addoption("--slow", action="store_true", help="the tests marked slow, too")


class SkipTensorFlow(MetaPathFinder):
    """With `--fast`, skip whatever imports TensorFlow, Keras or PyTorch: a test or a test file."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in ("tensorflow", "keras", "torch"):
            pytest.skip(f"--fast: imports {name}", allow_module_level=True)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "slow: a second, fuller check that takes more than six seconds; run by --slow"
    )
    config.addinivalue_line("markers", "tensorflow: starts a process that imports TensorFlow")
    if config.getoption("--fast"):
        sys.meta_path.insert(0, SkipTensorFlow())
        os.environ["BERT_TEST_FAST"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start with the long files, and leave out what the options leave out."""
    names = dict.fromkeys((*(SLOW_FIRST if config.getoption("--slow") else ()), *LONGEST_FIRST))
    order = {f"test_{name}.py": index for index, name in enumerate(names)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    left_out = [] if config.getoption("--slow") else ["slow"]
    left_out += ["tensorflow"] if config.getoption("--fast") else []
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT))
        if config.getoption("--fast") and item.path.stem.removeprefix("test_") in LONGEST_FIRST:
            item.add_marker(pytest.mark.skip(reason="--fast: a long file"))
        for name in left_out:
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=f"marked {name}"))


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1] if Path("/proc/self").exists() else 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After a file that used much memory, drop what it cached: engines, and with them their traced functions."""
    yield
    if nextitem is not None and nextitem.path == item.path:
        return
    if resident_bytes() - MEMORY.get("before", 0) > WORTH_COLLECTING:
        for name, module in list(sys.modules.items()):
            if name in CACHES or name == item.path.stem:
                for value in list(vars(module).values()):
                    getattr(value, "cache_clear", lambda: None)()
        gc.collect()
        with suppress(OSError, AttributeError):  # of another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)
    MEMORY["before"] = resident_bytes()


def pytest_collection_finish() -> None:
    """Cut the CPU into devices for all layouts that are tested: TensorFlow allows it only once."""
    gc.freeze()  # modules: a collection at the end of a file need not look at them
    # At Python's 700, tracing spends 6 % of its time in collections.
    gc.set_threshold(100_000, 20, 50)
    MEMORY["before"] = resident_bytes()
    if "tensorflow" in sys.modules:
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        one = tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(cpu, [one] * LOGICAL_DEVICES)
        # A thread for every stage of every replica, and some to spare.
        tf.config.threading.set_inter_op_parallelism_threads(2 * LOGICAL_DEVICES)


@pytest.fixture(scope="session")
def pins() -> dict[str, Any]:
    """Values and digests that may change only as `test_pins` says."""
    return json.loads(Path(__file__).with_name("pins.json").read_text())


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Root of the real dumps, texts and vocabularies; the test is skipped where they are absent."""
    if not REAL_DATA.is_dir():
        message = f"no real data at {REAL_DATA}; set BERT_SHARED_DATA to a folder that has it"
        if os.environ.get("BERT_REQUIRE_SHARED_DATA") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return REAL_DATA


class Printed(NamedTuple):
    """What a command has printed."""

    out: str
    err: str

    @property
    def rows(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def last(self) -> Any:
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture
def bert(capsys: pytest.CaptureFixture[str]) -> Callable[..., Printed]:
    """A function that runs a command in this process; `code` is its exit code."""

    def run(*words: object, code: int = 0) -> Printed:
        from bert_cli.cli import main

        capsys.readouterr()
        assert main([*map(str, words)]) == code
        return Printed(*capsys.readouterr())

    return run


@pytest.fixture
def write_run() -> Callable[..., Path]:
    """Writes a run's folder as a run leaves it: settings, a line a step, checkpoints, a lock."""

    def write(folder: Path, steps: int, total: int = 10, saved: tuple[int, ...] = (), **settings):
        folder.mkdir(parents=True)
        usual = {"format": FORMAT, "command": "glue" if "glue_task" in settings else "pretrain"}
        usual |= {"seed": 1, "global_batch": {"replicas": 1}, "masking": {}}
        usual |= {"optimizer_opts": {"learning_rate": {"warmup_frac": 0.0}}}
        (folder / "settings.json").write_text(json.dumps(usual | settings))
        (folder / "lock").touch()
        same = {"learning_rate": 1e-4, "gradient_norm": 1.0, "tokens_per_second": 640.0}
        same |= {"examples_per_second": 10.0, "seconds_per_step": 2.0}
        lines = [
            {"step": step, "mlm_loss": 8.0 - 0.5 * step, "mlm_accuracy": 0.01 * step, **same}
            | {"seconds_left": 2.0 * (total - step)}
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
