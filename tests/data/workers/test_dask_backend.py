"""The same shards on a real scheduler and real workers, some of which are killed."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from support import shards as support_shards
from support.bert import ROOT
from support.processes import wait_for
from support.shards import make_inputs, prepared_shards, shout, start_shout, tree

from bert_cli.config.data import TokenizeSettings
from bert_cli.data.io.manifest import Shard, Stats, Step, read_manifest
from bert_cli.data.steps.tokenize import run as tokenize
from bert_cli.data.workers import dask_backend
from bert_cli.data.workers.runner import Workers, run_shards
from bert_cli.errors import ConfigError, DataError
from bert_cli.versions import package_versions

cloudpickle = pytest.importorskip("cloudpickle")
pytest.importorskip("distributed")
# The workers cannot import these files.
for module in (sys.modules[__name__], support_shards):
    cloudpickle.register_pickle_by_value(module)

WORKERS = 2
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(ROOT),
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1",  # two deaths, not four, for one shard
}


class Cluster:
    """A scheduler, and workers with nannies, which restart those that are killed."""

    def __init__(self, folder):
        self.folder, self.file = folder, folder / "scheduler.json"
        self.processes = [self._start("scheduler", "--host", "127.0.0.1", "--port", "0")]
        wait_for(lambda: self.file.exists() and self.file.stat().st_size > 0)  # made, then written

    def _start(self, part, *flags):
        line = [sys.executable, "-m", f"distributed.cli.dask_{part}"]
        line += ["--scheduler-file", str(self.file), "--no-dashboard", *flags]
        with (self.folder / f"{part}.log").open("ab") as log:
            return subprocess.Popen(line, stdout=log, stderr=log, env=ENVIRONMENT, cwd=self.folder)

    def start_workers(self, count=WORKERS, threads=1):
        flags = ["--nworkers", str(count), "--nthreads", str(threads)]
        flags += ["--death-timeout", "60", "--local-directory", str(self.folder)]
        self.processes.append(self._start("worker", *flags))

    def close(self):
        for process in reversed(self.processes):
            process.kill()  # workers end with their nannies
            process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with closing(Cluster(tmp_path_factory.mktemp("cluster"))) as cluster:
        cluster.start_workers()
        yield cluster


@pytest.fixture
def empty_cluster(tmp_path):
    with closing(Cluster(tmp_path)) as cluster:
        yield cluster


def run(shards, out, convert, scheduler=None):
    workers = Workers(scheduler=str(scheduler) if scheduler else None)
    return run_shards(Step("shout", out, packages=("numpy",)), shards, convert, workers)


def shout_or_wait(inputs, output, folder):
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


def break_down(inputs, output):
    raise ZeroDivisionError("a defect")


def test_a_worker_killed_in_the_middle_of_a_shard_loses_nothing(tmp_path, cluster):
    shards = make_inputs(tmp_path, 9)
    local = run(shards, tmp_path / "local", shout)
    (tmp_path / "token").touch()
    caught = []

    def kill_caught():
        wait_for((tmp_path / "caught").exists)
        caught.extend((tmp_path / "caught").read_text().split())
        os.kill(int(caught[0]), signal.SIGKILL)

    killer = threading.Thread(target=kill_caught)
    killer.start()
    convert = functools.partial(shout_or_wait, folder=tmp_path)
    manifest = run(shards, tmp_path / "far", convert, cluster.file)
    killer.join()
    attempts = [line.split() for line in (tmp_path / "attempts").read_text().splitlines()]
    assert len(attempts) == 10  # that shard twice, in two processes, and no other one again
    assert len({process for shard, process in attempts if shard == caught[1]}) == 2
    assert tree(tmp_path / "far") == tree(tmp_path / "local")
    assert manifest["shards"] == local["shards"]
    assert not (tmp_path / "far/.partial").exists()


def test_records_made_by_a_cluster_are_those_made_here(tmp_path, cluster, monkeypatch):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    (tmp_path / "text").mkdir()
    for file in range(4):
        document = "a b c d e f g h\n" * 4 + f"{pieces[5 + file]} h\n" * 6
        (tmp_path / "text" / f"{file}.txt").write_text(f"{document}\n" * 6)
    monkeypatch.chdir(tmp_path)  # relative paths are those of the command, not of the worker
    address = json.loads(cluster.file.read_text())["address"]
    assert address.startswith("tcp://")
    far = {"executor": "dask", "scheduler": address}

    def make(out, **where):
        given = {"input": "text", "out": out, "vocab": "vocab.txt", "sequence_length": 32}
        tokenize(TokenizeSettings.model_validate({**given, "mask_tokens": 5, **where}))
        return tree(tmp_path / out)

    here, there = make("here"), make("there", **far)
    assert there == here
    assert {"wiki_000.tfrecord", "wiki_003.index", "corpus.json"} <= set(here)
    assert read_manifest(tmp_path / "there")["processes"] is None
    # Where shards are made does not belong to the settings of the records: the folder is complete.
    make("there")


def test_prepared_inputs_are_few_at_a_time(tmp_path, cluster):
    shards, prepared = prepared_shards(tmp_path, tmp_path / "out")
    run(shards, tmp_path / "out", shout, cluster.file)
    assert 2 <= max(most for _, most in prepared) <= 2 * WORKERS
    assert (tmp_path / "out/07").read_text() == "CHUNK 7"


def test_a_shard_that_kills_its_worker_or_fails_ends_the_run(tmp_path, cluster):
    shards = make_inputs(tmp_path, 4)
    with pytest.raises(ZeroDivisionError, match="a defect") as error:
        run(shards, tmp_path / "other", break_down, cluster.file)
    assert any(entry.name == "break_down" for entry in error.traceback)
    (tmp_path / "in/01").write_text("DIE")
    # Dask counts a killed worker for every shard that it had, also for those that had not begun.
    problem = r"shout \(AA/0\d\): 2 workers were killed .*tcp://.*memory"
    with pytest.raises(DataError, match=problem):
        run(shards, tmp_path / "out", shout, cluster.file)
    assert not (tmp_path / "out/manifest.json").exists()
    assert "AA/01" not in tree(tmp_path / "out")


def test_ctrl_c_ends_the_run_and_leaves_the_workers_of_other_users_alone(tmp_path, cluster):
    """A task of another client holds a worker; ours run beside it and wait for it, too."""
    from distributed import Client

    with Client(scheduler_file=str(cluster.file), set_as_default=False) as other:
        wait_for(lambda: len(other.nthreads()) == WORKERS)
        command = f"echo $PPID >> {tmp_path}/log; until test -e {tmp_path}/go; do sleep 0.1; done; echo $PPID"
        task = other.submit(subprocess.check_output, ["sh", "-c", command], pure=False)
        wait_for((tmp_path / "log").exists)
        make_inputs(tmp_path, 12)
        process = start_shout(tmp_path, cluster.file, 1.0)
        wait_for(lambda: any((tmp_path / "out/.done").rglob("*.shard")))
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate()
        assert process.returncode == 130
        assert printed.splitlines()[-1].startswith("shout: interrupted,")
        assert "Traceback" not in printed
        (tmp_path / "go").touch()
        assert task.result() == (tmp_path / "log").read_bytes()  # it ran once


def test_ctrl_c_ends_the_run_though_the_scheduler_does_not_answer(tmp_path, empty_cluster, capsys):
    def interrupted_shards():
        yield from make_inputs(tmp_path, 1)
        empty_cluster.processes[0].send_signal(signal.SIGSTOP)
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="130"):
        run(interrupted_shards(), tmp_path / "out", shout, empty_cluster.file)
    printed = capsys.readouterr().err
    assert "shout: interrupted, 0 shards" in printed


def test_a_run_waits_for_workers_and_reports_a_scheduler_that_is_lost(
    tmp_path, empty_cluster, capsys
):
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


def test_workers_with_several_threads_are_rejected(tmp_path, empty_cluster):
    empty_cluster.start_workers(1, threads=4)
    with pytest.raises(DataError, match=r"has 4 threads, .* --nworkers 4 --nthreads 1"):
        run(make_inputs(tmp_path, 9), tmp_path / "out", shout, empty_cluster.file)


def test_a_scheduler_that_cannot_be_reached_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(dask_backend, "CONNECT_SECONDS", 0.5)
    monkeypatch.chdir(tmp_path)
    Path("down.json").write_text('{"address": "tcp://127.0.0.1:9"}')
    Path("broken.json").write_text("{")
    Path("other.json").write_text('{"address": "here"}')
    for scheduler, kind, problem in (
        ("nonsense://127.0.0.1:9", DataError, "cannot be reached"),
        ("down.json", DataError, "cannot be reached"),
        ("broken.json", ConfigError, "broken.json: Invalid JSON"),
        ("other.json", DataError, "cannot be reached"),
    ):
        with pytest.raises(kind, match=rf"{problem}.*dask scheduler"):
            run(make_inputs(tmp_path, 1), tmp_path / "out", shout, scheduler)
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ConfigError, match=r"needs the extra 'dask'; pip install"):
        run(make_inputs(tmp_path, 1), tmp_path / "out", shout, "tcp://127.0.0.1:9")


@pytest.mark.slow
def test_a_worker_with_other_folders_or_versions_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(dask_backend, "SECONDS_TO_APPEAR", 0.0)
    versions, function = package_versions(["numpy"]), cloudpickle.dumps(shout)
    source, work = tmp_path / "00", tmp_path / "work"
    shard = Shard((source,), Path("AA/00"))

    def do(**changed):
        return dask_backend.run_on_worker(shard, work, function, tmp_path, versions | changed)

    with pytest.raises(DataError, match=r"has numpy [\d.]+, not 1\.0; install the same"):
        do(numpy="1.0", python="3.99")
    with pytest.raises(DataError, match=r"does not see .*/work; .* file system that all machines"):
        do()
    work.mkdir()
    with pytest.raises(DataError, match=r"does not see .*/00"):
        do()
    source.write_text("text")
    stats, folder = do(python="3.99")
    assert (stats.documents, (folder / "00").read_text()) == (1, "TEXT")
    assert do()[1] != folder  # a second attempt does not meet the first
