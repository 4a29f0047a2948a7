"""The same shards on a real scheduler and real workers, some of which are killed."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import shards as support_shards
from support.corpora import make_corpus
from support.processes import alive, wait_for
from support.shards import make_inputs, shout, tree

import bert_cli
from bert_cli.config.data import ExecutorSettings, PackSettings, TokenizeSettings
from bert_cli.data.records import pack, tokenize
from bert_cli.data.shards import dask_backend
from bert_cli.data.shards.manifest import Manifest, Step, package_versions, read_manifest
from bert_cli.data.shards.runner import Workers, run_shards
from bert_cli.data.shards.shard import Convert, Job, Shard, Stats
from bert_cli.errors import ConfigError, DataError

cloudpickle = pytest.importorskip("cloudpickle")
pytest.importorskip("distributed")
# The workers cannot import these files.
for module in (sys.modules[__name__], support_shards):
    cloudpickle.register_pickle_by_value(module)

WORKERS = 3
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(Path(bert_cli.__file__).parents[1]),
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1",  # two deaths, not four, for one shard
}

# Run as a process of its own, to be interrupted.
SCRIPT = """
import sys, time
from pathlib import Path
from bert_cli.data.shards.manifest import Step
from bert_cli.data.shards.runner import Workers, run_shards
from bert_cli.data.shards.shard import Shard, Stats

def shout(inputs, output, pause):
    time.sleep(pause)
    output.write_text(inputs[0].read_text().upper())
    return Stats(documents=1)

if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:3])
    pause = {"pause": float(sys.argv[4])}
    todo = [Shard((path,), Path(path.name), pause) for path in sorted(source.iterdir())]
    run_shards(Step("shout", out), todo, shout, Workers(scheduler=sys.argv[3]))
"""


class Cluster:
    """A scheduler, and workers with nannies, which restart those that are killed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "scheduler.json"
        self.processes = [self._start("scheduler", "--host", "127.0.0.1", "--port", "0")]
        wait_for(self.file.exists, 30.0)

    def _start(self, part: str, *flags: str) -> "subprocess.Popen[bytes]":
        line = [sys.executable, "-m", f"distributed.cli.dask_{part}"]
        line += ["--scheduler-file", str(self.file), "--no-dashboard", *flags]
        with (self.folder / f"{part}.log").open("ab") as log:
            return subprocess.Popen(line, stdout=log, stderr=log, env=ENVIRONMENT, cwd=self.folder)

    def start_workers(self, count: int = WORKERS, threads: int = 1) -> None:
        flags = ["--nworkers", str(count), "--nthreads", str(threads)]
        flags += ["--death-timeout", "60", "--local-directory", str(self.folder)]
        self.processes.append(self._start("worker", *flags))

    def end(self) -> None:
        for process in reversed(self.processes):
            process.kill()  # workers end with their nannies
            process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    cluster.start_workers()
    yield cluster
    cluster.end()


@pytest.fixture
def empty_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A scheduler without workers."""
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.end()


def run(
    shards: list[Shard], out: Path, convert: Convert, scheduler: str | Path | None = None
) -> Manifest:
    workers = Workers(scheduler=str(scheduler) if scheduler else None)
    return run_shards(Step("shout", out, packages=("numpy",)), shards, convert, workers)


def shout_or_wait(inputs: tuple[Path, ...], output: Path, folder: Path) -> Stats:
    """Log the process; the first of all writes half its file and waits to be killed."""
    with (folder / "attempts").open("a") as file:
        file.write(f"{output.name} {os.getpid()}\n")
    try:
        (folder / "token").unlink()
    except FileNotFoundError:
        return shout(inputs, output)
    output.write_text("HALF")
    (folder / "caught.part").write_text(f"{os.getpid()} {output.name}")
    (folder / "caught.part").rename(folder / "caught")
    time.sleep(60)
    return Stats()


def kill_worker(inputs: tuple[Path, ...], output: Path) -> Stats:
    if output.name == "01":
        os.kill(os.getpid(), signal.SIGKILL)
    return shout(inputs, output)


def fail(inputs: tuple[Path, ...], output: Path) -> Stats:
    raise DataError(inputs[0].name, "is bad", "fix it")


def break_down(inputs: tuple[Path, ...], output: Path) -> Stats:
    raise ZeroDivisionError("a defect")


def test_a_worker_killed_in_the_middle_of_a_shard_loses_nothing(
    tmp_path: Path, cluster: Cluster
) -> None:
    shards = make_inputs(tmp_path, 9)
    local = run(shards, tmp_path / "local", shout)
    (tmp_path / "token").touch()
    caught: list[str] = []

    def kill_caught() -> None:
        wait_for((tmp_path / "caught").exists, 30.0)
        caught.extend((tmp_path / "caught").read_text().split())
        os.kill(int(caught[0]), signal.SIGKILL)

    killer = threading.Thread(target=kill_caught)
    killer.start()
    manifest = run(
        shards, tmp_path / "far", functools.partial(shout_or_wait, folder=tmp_path), cluster.file
    )
    killer.join()
    pid, name = int(caught[0]), caught[1]
    assert not alive(pid)
    attempts = [line.split() for line in (tmp_path / "attempts").read_text().splitlines()]
    assert len(attempts) == 10  # that shard twice, in two processes, and no other one again
    assert len({process for shard, process in attempts if shard == name}) == 2
    assert tree(tmp_path / "far") == tree(tmp_path / "local")
    assert manifest["counts"] == local["counts"]
    assert manifest["shards"] == local["shards"]
    assert not (tmp_path / "far/.partial").exists()


def test_records_made_by_a_cluster_are_those_made_here(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"{letter}{number}" for letter in "abc" for number in range(7)]
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    (tmp_path / "text").mkdir()
    for file in range(4):
        lines = [
            " ".join(words[(file * 7 + line * 3 + n * line) % 21] for n in range(12))
            for line in range(60)
        ]
        documents = ("\n".join(lines[first : first + 10]) for first in range(0, 60, 10))
        (tmp_path / "text" / f"{file}.txt").write_text("\n\n".join(documents) + "\n")
    monkeypatch.chdir(tmp_path)  # relative paths are those of the command, not of the worker
    far = {"executor": "dask", "scheduler": str(cluster.file)}

    def make(out: str, **where: str) -> dict[str, bytes]:
        given = {"input": "text", "out": out, "vocab": "vocab.txt", "sequence_length": 32}
        tokenize.run(TokenizeSettings.model_validate({**given, "mask_tokens": 5, **where}))
        return tree(tmp_path / out)

    here, there = make("here"), make("there", **far)
    assert there == here
    assert {"wiki_000.tfrecord", "wiki_003.index", "corpus.json"} <= set(here)
    assert read_manifest(tmp_path / "here")["processes"] >= 1
    assert read_manifest(tmp_path / "there")["processes"] is None
    # Where shards are made does not belong to the settings of the records: the folder is complete.
    make("there")
    make_corpus(tmp_path / "in", "dynamic", [20, 10])
    for out, where in (("packed", {"processes": 1}), ("packed_far", far)):
        pack.run(PackSettings.model_validate({"input": "in", "out": out, **where}))
    assert tree(tmp_path / "packed") == tree(tmp_path / "packed_far")


def test_prepared_inputs_are_few_at_a_time_and_only_for_missing_shards(
    tmp_path: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out, most = tmp_path / "source", tmp_path / "out", 0
    source.write_text("dump")

    def prepare(folder: Path, number: int) -> tuple[Path, ...]:
        nonlocal most
        (folder / "chunk").write_text(f"chunk {number}")
        most = max(most, len([*(out / ".partial").iterdir()]))
        return (folder / "chunk",)

    parts = [functools.partial(prepare, number=number) for number in range(20)]
    shards = [Shard((source,), Path(f"{n:02}"), prepare=part) for n, part in enumerate(parts)]
    run(shards, out, shout, cluster.file)
    assert 2 <= most <= 2 * WORKERS
    (out / "07").unlink()
    run(shards, out, shout, cluster.file)
    assert "19 of 20 shards were done before" in capsys.readouterr().out
    assert (out / "07").read_text() == "CHUNK 7"


def test_a_shard_that_kills_its_worker_each_time_is_named(tmp_path: Path, cluster: Cluster) -> None:
    with pytest.raises(DataError, match=r"shout \(AA/01\): 2 workers were killed .*tcp://.*memory"):
        run(make_inputs(tmp_path, 4), tmp_path / "out", kill_worker, cluster.file)
    assert not (tmp_path / "out/manifest.json").exists()
    assert "AA/01" not in tree(tmp_path / "out")


def test_an_error_in_a_shard_ends_the_run_as_it_does_locally(
    tmp_path: Path, cluster: Cluster
) -> None:
    with pytest.raises(DataError, match="is bad; fix it"):
        run(make_inputs(tmp_path, 4), tmp_path / "out", fail, cluster.file)
    with pytest.raises(ZeroDivisionError, match="a defect") as error:
        run(make_inputs(tmp_path, 4), tmp_path / "out", break_down, cluster.file)
    assert any(entry.name == "break_down" for entry in error.traceback)


def test_ctrl_c_ends_the_run_and_the_same_command_continues(
    tmp_path: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = make_inputs(tmp_path, 12)
    (tmp_path / "script.py").write_text(SCRIPT)
    line = [sys.executable, *(str(tmp_path / name) for name in ("script.py", "in", "out"))]
    process = subprocess.Popen(
        [*line, str(cluster.file), "0.5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_for(lambda: any((tmp_path / "out/.done").glob("*.shard")), 30.0)
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=15)
    finally:
        process.kill()
    assert process.returncode == 130
    assert printed.startswith("shout: interrupted,") and len(printed.splitlines()) == 1
    assert 1 <= len([*(tmp_path / "out/.done").glob("*.shard")]) < 12
    todo = [Shard(shard.inputs, Path(shard.output.name)) for shard in shards]
    run(todo, tmp_path / "out", shout, cluster.file)
    assert "of 12 shards were done before" in capsys.readouterr().out
    assert (tmp_path / "out/11").read_text() == "TEXT 11 " * 50


def test_a_run_waits_for_workers_and_reports_a_scheduler_that_is_lost(
    tmp_path: Path, empty_cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    starter = threading.Timer(1.0, empty_cluster.start_workers, (1,))
    starter.start()
    run(make_inputs(tmp_path, 2), tmp_path / "out", shout, empty_cluster.file)
    starter.join()
    assert capsys.readouterr().err.count("shout: the scheduler has no workers; waiting") == 1
    assert len(tree(tmp_path / "out")) == 4
    threading.Timer(1.0, empty_cluster.processes[0].kill).start()
    (tmp_path / "token").touch()
    convert = functools.partial(shout_or_wait, folder=tmp_path)
    with pytest.raises(DataError, match=r"shout \(scheduler .*\): was lost"):
        run(make_inputs(tmp_path, 2), tmp_path / "lost", convert, empty_cluster.file)


def test_workers_with_several_threads_are_rejected(tmp_path: Path, empty_cluster: Cluster) -> None:
    empty_cluster.start_workers(1, threads=4)
    shards = make_inputs(tmp_path, 9)
    with pytest.raises(DataError, match=r"has 4 threads, .* --nworkers 4 --nthreads 1"):
        run(shards, tmp_path / "out", shout, empty_cluster.file)


# --- without a cluster


def test_a_scheduler_that_cannot_be_reached_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_backend, "CONNECT_SECONDS", 0.5)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "down.json").write_text('{"address": "tcp://127.0.0.1:9"}')
    started = time.monotonic()
    for address in ("tcp://127.0.0.1:9", "nonsense://127.0.0.1:9", "down.json"):
        with pytest.raises(DataError, match=r"scheduler \(.*cannot be reached .*dask scheduler"):
            run(make_inputs(tmp_path, 1), tmp_path / "out", shout, address)
    assert time.monotonic() - started < 10
    for name, text in (("broken", "{"), ("list", "[1]"), ("other", '{"address": "here"}')):
        (tmp_path / f"{name}.json").write_text(text)
    for scheduler, problem in (
        ("nosuch.json", "is neither a file nor an address"),
        ("tcp://host", "is neither a file nor an address"),
        ("broken.json", "was not written by `dask scheduler --scheduler-file`"),
        ("list.json", "was not written by `dask scheduler --scheduler-file`"),
        ("other.json", "was not written by `dask scheduler --scheduler-file`"),
    ):
        with pytest.raises(ConfigError, match=rf"scheduler \({scheduler}\): {problem}"):
            run(make_inputs(tmp_path, 1), tmp_path / "out", shout, scheduler)
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ConfigError, match=r"needs the extra 'dask'; pip install"):
        run(make_inputs(tmp_path, 1), tmp_path / "out", shout, "tcp://127.0.0.1:9")


def test_a_worker_with_other_folders_or_versions_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_backend, "SECONDS_TO_APPEAR", 0.0)
    versions, function = package_versions(["numpy"]), cloudpickle.dumps(shout)
    source = tmp_path / "00"
    job = Job(Shard((source,), Path("AA/00")), (source,), tmp_path / "work")

    def do(**changed: str) -> tuple[Stats, Path]:
        return dask_backend.run_job(job, function, tmp_path, versions | changed)

    with pytest.raises(DataError, match=r"has numpy [\d.]+, not 1\.0; install the same"):
        do(numpy="1.0", python="3.99")
    with pytest.raises(DataError, match=r"does not see .*/work; .* file system that all machines"):
        do()
    job.folder.mkdir()
    with pytest.raises(DataError, match=r"does not see .*/00"):
        do()
    source.write_text("text")
    stats, folder = do(python="3.99")
    assert (stats.documents, (folder / "00").read_text()) == (1, "TEXT")
    assert do()[1] != folder  # a second attempt does not meet the first


def test_an_executor_and_its_scheduler_belong_together() -> None:
    for given, problem in (
        ({"executor": "dask"}, "needs the address of the scheduler"),
        ({"scheduler": "tcp://a:1"}, "has no effect with executor 'local'"),
        ({"executor": "mpi"}, "local"),
    ):
        with pytest.raises(ValueError, match=problem):
            ExecutorSettings.model_validate(given)
    ExecutorSettings(executor="dask", scheduler="tcp://a:1")
