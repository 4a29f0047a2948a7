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
from support.corpora import make_corpus
from support.processes import alive, wait_for

import bert_cli
from bert_cli.config.data import ExecutorSettings, PackSettings, TokenizeSettings
from bert_cli.data.records import pack, tokenize
from bert_cli.data.shards import dask_backend, dask_worker
from bert_cli.data.shards.dask_worker import ChildDiedError, Job, do_shard, end_children
from bert_cli.data.shards.manifest import Manifest, Shard, Stats, package_versions, read_manifest
from bert_cli.data.shards.runner import Convert, run_shards
from bert_cli.errors import ConfigError, DataError

cloudpickle = pytest.importorskip("cloudpickle")
pytest.importorskip("distributed")
# The workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

WORKERS = 3
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(Path(bert_cli.__file__).parents[1]),
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1",  # two deaths, not four, for one shard
}

# Run as a process of its own, to be interrupted.
SCRIPT = """
import functools, sys, time
from pathlib import Path
from bert_cli.data.shards.manifest import Shard, Stats
from bert_cli.data.shards.runner import run_shards

def shout(inputs, output, pause):
    time.sleep(pause)
    output.write_text(inputs[0].read_text().upper())
    return Stats(documents=1)

if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:3])
    todo = [Shard((path,), Path(path.name)) for path in sorted(source.iterdir())]
    convert = functools.partial(shout, pause=float(sys.argv[4]))
    run_shards("shout", todo, convert, out=out, processes=1, settings={}, scheduler=sys.argv[3])
"""


class Cluster:
    """A scheduler and workers, each a process; those that were killed are replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "scheduler.json"
        self.scheduler = self._start("scheduler", "--host", "127.0.0.1", "--port", "0")
        wait_for(self.file.exists, 30.0)
        self.workers: list[subprocess.Popen[bytes]] = []

    def _start(self, part: str, *flags: str) -> "subprocess.Popen[bytes]":
        line = [sys.executable, "-m", f"distributed.cli.dask_{part}"]
        line += ["--scheduler-file", str(self.file), "--no-dashboard", *flags]
        log = (self.folder / f"{part}.log").open("ab")
        with log:
            return subprocess.Popen(line, stdout=log, stderr=log, env=ENVIRONMENT, cwd=self.folder)

    def fill(self) -> None:
        """Have as many workers as the tests want."""
        self.workers = [worker for worker in self.workers if worker.poll() is None]
        flags = ["--no-nanny", "--nthreads", "1", "--local-directory", str(self.folder)]
        flags += ["--death-timeout", "60"]  # where these tests themselves are killed
        while len(self.workers) < WORKERS:
            self.workers.append(self._start("worker", *flags))

    def end(self) -> None:
        for process in (*self.workers, self.scheduler):
            process.kill()
            process.wait()


def children(pid: int) -> list[int]:
    found = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(number) for number in " ".join(found).split() if alive(int(number))]


@pytest.fixture(scope="module")
def one_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.end()


@pytest.fixture
def cluster(one_cluster: Cluster) -> Cluster:
    one_cluster.fill()
    return one_cluster


def make_inputs(folder: Path, count: int) -> list[Shard]:
    (folder / "in").mkdir(exist_ok=True)
    for number in range(count):
        (folder / "in" / f"{number:02}").write_text(f"text {number} " * 50)
    paths = sorted((folder / "in").iterdir())
    return [Shard((path,), Path("AA") / path.name) for path in paths]


def run(
    shards: list[Shard], out: Path, convert: Convert, scheduler: str | Path | None = None
) -> Manifest:
    return run_shards(
        "shout",
        shards,
        convert,
        out=out,
        processes=1,
        settings={},
        versions=("numpy",),
        scheduler=str(scheduler) if scheduler else None,
    )


def tree(out: Path) -> dict[str, bytes]:
    paths = ((path, path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    return {
        str(name): path.read_bytes()
        for path, name in paths
        if not name.parts[0].startswith(".") and name.name != "manifest.json"
    }


def shout(inputs: tuple[Path, ...], output: Path) -> Stats:
    text = inputs[0].read_text()
    output.write_text(text.upper())
    output.with_suffix(".index").write_text(str(len(text)))
    return Stats(documents=1, extra={"letters": len(text)})


def shout_unless_caught(inputs: tuple[Path, ...], output: Path, folder: Path) -> Stats:
    """Whoever comes first writes half its file, tells who it is, and waits for its death."""
    with (folder / "tries").open("a") as file:
        file.write(f"{output.name} {os.getppid()}\n")
    try:
        (folder / "token").unlink()
    except FileNotFoundError:
        return shout(inputs, output)
    output.write_text("HALF")
    beside = folder / "beside"
    beside.write_text(f"{os.getppid()} {os.getpid()} {output.name}")
    beside.rename(folder / "caught")
    time.sleep(60)
    return Stats()


def kill_oneself(inputs: tuple[Path, ...], output: Path) -> Stats:
    if output.name == "01":
        os.kill(os.getpid(), signal.SIGKILL)
    return shout(inputs, output)


def kill_the_worker(inputs: tuple[Path, ...], output: Path) -> Stats:
    if output.name == "01":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    return shout(inputs, output)


def stumble(inputs: tuple[Path, ...], output: Path) -> Stats:
    raise DataError(f"{inputs[0].name}: is bad; mend it")


def break_down(inputs: tuple[Path, ...], output: Path) -> Stats:
    raise ZeroDivisionError("a defect")


def test_a_worker_killed_in_the_middle_of_a_shard_loses_nothing(
    tmp_path: Path, cluster: Cluster
) -> None:
    shards = make_inputs(tmp_path, 9)
    local = run(shards, tmp_path / "local", shout)
    (tmp_path / "token").touch()
    caught: list[str] = []

    def kill_who_is_caught() -> None:
        wait_for((tmp_path / "caught").exists, 30.0)
        caught.extend((tmp_path / "caught").read_text().split())
        os.kill(int(caught[0]), signal.SIGKILL)

    killer = threading.Thread(target=kill_who_is_caught)
    killer.start()
    convert = functools.partial(shout_unless_caught, folder=tmp_path)
    manifest = run(shards, tmp_path / "far", convert, cluster.file)
    killer.join()
    worker, child, name = int(caught[0]), int(caught[1]), caught[2]
    assert worker in [process.pid for process in cluster.workers]
    assert not alive(worker)
    wait_for(lambda: not alive(child), 5.0)
    tries = [line.split() for line in (tmp_path / "tries").read_text().splitlines()]
    assert len(tries) == 10  # one shard twice, elsewhere, and no other one again
    assert len({who for what, who in tries if what == name}) == 2
    assert len({who for _, who in tries}) == WORKERS
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
            " ".join(words[(file * 7 + line * 3 + place * line) % 21] for place in range(12))
            for line in range(60)
        ]
        documents = ("\n".join(lines[first : first + 10]) for first in range(0, 60, 10))
        (tmp_path / "text" / f"{file}.txt").write_text("\n\n".join(documents) + "\n")

    def make(out: Path, **where: str) -> dict[str, bytes]:
        told = {"input": Path("text"), "out": out, "vocab": "vocab.txt", "sequence_length": 32}
        tokenize.run(TokenizeSettings.model_validate({**told, "mask_tokens": 5, **where}))
        return tree(tmp_path / out)

    monkeypatch.chdir(tmp_path)  # relative paths are those of the command, not of the worker
    here = make(Path("here"))
    there = make(Path("there"), executor="dask", scheduler=str(cluster.file))
    assert there == here
    assert {"wiki_000.tfrecord", "wiki_003.index", "corpus.json"} <= set(here)
    assert read_manifest(tmp_path / "here")["processes"] >= 1
    assert read_manifest(tmp_path / "there")["processes"] is None
    # Where the shards are done is no setting of the records: the folder is finished for both.
    make(Path("there"))


def test_prepared_inputs_are_few_at_a_time_on_a_cluster(tmp_path: Path, cluster: Cluster) -> None:
    source, out, most = tmp_path / "source", tmp_path / "out", 0
    source.write_text("dump")

    def cut(folder: Path, number: int) -> tuple[Path, ...]:
        nonlocal most
        (folder / "chunk").write_text(f"chunk {number}")
        most = max(most, len([*(out / ".partial").iterdir()]))
        return (folder / "chunk",)

    cuts = (functools.partial(cut, number=number) for number in range(20))
    todo = [Shard((source,), Path(f"{number:02}"), cut) for number, cut in enumerate(cuts)]
    run(todo, out, shout, cluster.file)
    assert 2 <= most <= 2 * WORKERS
    assert (out / "07").read_text() == "CHUNK 7"


def test_what_is_whole_is_not_sent_away_again(
    tmp_path: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = make_inputs(tmp_path, 4)
    run(shards, tmp_path / "out", shout, cluster.file)
    (tmp_path / "out/AA/02").unlink()
    run(shards, tmp_path / "out", shout, cluster.file)
    assert "3 of 4 shards were done before" in capsys.readouterr().out
    assert (tmp_path / "out/AA/02").exists()


def test_a_shard_that_kills_its_process_each_time_is_named(
    tmp_path: Path, cluster: Cluster
) -> None:
    with pytest.raises(DataError, match=r"shout \(AA/01\): 3 workers were killed .*memory"):
        run(make_inputs(tmp_path, 4), tmp_path / "out", kill_oneself, cluster.file)
    assert all(worker.poll() is None for worker in cluster.workers)
    assert not (tmp_path / "out/manifest.json").exists()
    assert "AA/01" not in tree(tmp_path / "out")


def test_a_shard_that_kills_its_worker_each_time_is_named(tmp_path: Path, cluster: Cluster) -> None:
    with pytest.raises(DataError, match=r"shout \(AA/01\): 2 workers were killed .*tcp://"):
        run(make_inputs(tmp_path, 2), tmp_path / "out", kill_the_worker, cluster.file)
    assert "AA/01" not in tree(tmp_path / "out")


def test_a_mistake_in_a_shard_ends_the_run_as_it_does_locally(
    tmp_path: Path, cluster: Cluster
) -> None:
    with pytest.raises(DataError, match="is bad; mend it"):
        run(make_inputs(tmp_path, 4), tmp_path / "out", stumble, cluster.file)
    with pytest.raises(ZeroDivisionError, match="a defect") as caught:
        run(make_inputs(tmp_path, 4), tmp_path / "out", break_down, cluster.file)
    assert "in break_down" in "".join(caught.value.__notes__)


def test_ctrl_c_ends_the_run_and_the_same_command_continues(
    tmp_path: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = make_inputs(tmp_path, 12)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    line = [sys.executable, str(script), *(str(tmp_path / name) for name in ("in", "out"))]

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
        _, told = process.communicate(timeout=15)
    finally:
        process.kill()
    assert process.returncode == 130
    assert told.startswith("shout: interrupted,") and "Traceback" not in told
    assert 1 <= len([*(tmp_path / "out/.done").glob("*.shard")]) < 12
    wait_for(lambda: not any(children(worker.pid) for worker in cluster.workers))
    todo = [Shard(shard.inputs, Path(shard.output.name)) for shard in shards]
    run(todo, tmp_path / "out", shout, cluster.file)
    assert "of 12 shards were done before" in capsys.readouterr().out
    assert (tmp_path / "out/11").read_text() == "TEXT 11 " * 50


def test_a_shard_that_comes_after_the_end_of_its_run_starts_no_process(tmp_path: Path) -> None:
    end_children("this run")
    job = Job("this run", "00", "00", b"", (), tmp_path, tmp_path, {})
    before = children(os.getpid())
    with pytest.raises(ChildDiedError, match="the run is over"):
        do_shard(job)
    assert children(os.getpid()) == before


def test_a_scheduler_that_is_lost_ends_the_run_with_its_name(tmp_path: Path) -> None:
    lonely = Cluster(tmp_path)
    try:
        killer = threading.Timer(1.0, lonely.scheduler.kill)
        killer.start()
        with pytest.raises(DataError, match=r"shout \(scheduler .*\): was lost"):
            run(make_inputs(tmp_path, 2), tmp_path / "out", shout, lonely.file)
    finally:
        lonely.end()


def test_a_run_waits_for_workers_and_says_so(
    tmp_path: Path,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(dask_backend, "SECONDS_BETWEEN_LOOKS", 0.2)
    for worker in cluster.workers:
        worker.kill()
        worker.wait()
    filler = threading.Timer(2.0, cluster.fill)
    filler.start()
    try:
        run(make_inputs(tmp_path, 2), tmp_path / "out", shout, cluster.file)
    finally:
        filler.join()
    assert capsys.readouterr().err.count("shout: the scheduler has no workers; waiting") == 1
    assert len(tree(tmp_path / "out")) == 4


def test_a_scheduler_that_does_not_answer_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_backend, "SECONDS_TO_ANSWER", 0.5)
    (tmp_path / "scheduler.json").write_text('{"address": "tcp://127.0.0.1:9"}')
    for address in ("tcp://127.0.0.1:9", "nonsense://a:1", str(tmp_path / "scheduler.json")):
        with pytest.raises(DataError, match=r"scheduler \(.*cannot be reached .*dask scheduler"):
            run(make_inputs(tmp_path, 1), tmp_path / "out", shout, address)


def test_without_dask_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ConfigError, match=r"needs the extra 'dask'; pip install"):
        run(make_inputs(tmp_path, 1), tmp_path / "out", shout, "tcp://127.0.0.1:9")


def make_job(folder: Path, **changes: object) -> Job:
    told = {
        "run": "r", "name": "AA/00", "target": "00", "convert": cloudpickle.dumps(shout),
        "inputs": (folder / "00",), "room": folder / "room", "folder": folder,
        "versions": package_versions(["numpy"]),
    }  # fmt: skip
    return Job(**(told | changes))  # type: ignore[arg-type]


def test_a_worker_that_does_not_see_the_folders_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_worker, "SECONDS_TO_APPEAR", 0.0)
    with pytest.raises(DataError, match=r"does not see .*/room; .* file system that all machines"):
        do_shard(make_job(tmp_path))
    (tmp_path / "room").mkdir()
    with pytest.raises(DataError, match=r"does not see .*/00"):
        do_shard(make_job(tmp_path))


def test_a_worker_with_other_versions_is_refused(tmp_path: Path) -> None:
    other = package_versions(["numpy"]) | {"numpy": "1.0", "python": "3.99"}
    with pytest.raises(DataError, match=r"has numpy [\d.]+, not 1\.0; install the same"):
        do_shard(make_job(tmp_path, versions=other))


def test_a_child_is_used_again_within_its_run_and_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "00").write_text("text")
    stats, made = do_shard(make_job(tmp_path))
    assert (stats.documents, (made / "00").read_text()) == (1, "TEXT")
    (child,) = dask_worker.CHILDREN
    _, again = do_shard(make_job(tmp_path))
    assert again != made
    assert {child} == dask_worker.CHILDREN
    dask_worker.end_children("another run")
    assert child.process.poll() is None
    dask_worker.end_children("r")
    assert child.process.poll() is not None and not dask_worker.CHILDREN


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"executor": "dask"}, "needs the scheduler's address"),
        ({"scheduler": "tcp://a:1"}, "has no effect with executor 'local'"),
        ({"executor": "mpi"}, "local"),
    ],
)
def test_an_executor_and_its_scheduler_belong_together(said: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ExecutorSettings.model_validate(said)
    ExecutorSettings(executor="dask", scheduler="tcp://a:1")


@pytest.mark.parametrize(
    ("scheduler", "told"),
    [
        ("nosuch.json", "is neither a file that is there nor an address"),
        ("tcp://host", "is neither a file that is there nor an address"),
        ("broken.json", "is not a file that `dask scheduler --scheduler-file` wrote"),
        ("list.json", "is not a file that `dask scheduler --scheduler-file` wrote"),
        ("other.json", "is not a file that `dask scheduler --scheduler-file` wrote"),
    ],
)
def test_a_scheduler_that_is_no_address_is_refused_before_dask_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("broken", "{"), ("list", "[1]"), ("other", '{"address": "here"}')):
        (tmp_path / f"{name}.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"scheduler \({scheduler}\): {told}"):
        run(make_inputs(tmp_path, 1), tmp_path / "out", shout, scheduler)


def test_a_scheduler_that_is_not_there_leaves_nothing_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_backend, "SECONDS_TO_ANSWER", 1)
    began = time.monotonic()
    for scheduler in ("tcp://127.0.0.1:9", "nonsense://127.0.0.1:9"):
        with pytest.raises(DataError, match="cannot be reached"):
            run(make_inputs(tmp_path, 1), tmp_path / "out", shout, scheduler)
    assert time.monotonic() - began < 10


def test_a_folder_that_is_told_relatively_is_packed_on_a_cluster(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_corpus(tmp_path / "in", "dynamic", [20, 10])
    for out, where in (("here", {}), ("there", {"executor": "dask"})):
        said = where | ({"scheduler": str(cluster.file)} if where else {"processes": 1})
        pack.run(PackSettings(input="in", out=out, **said))  # type: ignore[arg-type]
    assert tree(tmp_path / "here") == tree(tmp_path / "there")
