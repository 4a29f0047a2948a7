"""The job files in a real SLURM of three hosts, which are namespaces of this machine: see support/slurm_hosts.sh."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command_lines import JOBS, ROOT
from support.processes import wait_for
from support.runs import assert_same_end
from support.tiny_models import TINY_RUN, flags_of, metrics_of

from bert_cli.cli import main

pytestmark = pytest.mark.slow

PROGRAMS = (
    "slurmctld", "slurmd", "sbatch", "srun", "munged", "ip", "nsenter", "setpriv", "unshare"
)  # fmt: skip
NAMESPACES = ("--net", "--mount", "--uts", "--pid")
SECONDS = 240.0
"""For a job, on a busy machine."""
STEPS = 200
RUN = {
    **TINY_RUN,
    "bert-config.initializer-range": 0.2,
    "global-batch.replicas": 2,
    "total-num-train-samples": 4 * STEPS,
    "checkpoint-every-steps": 20,
    "keep-checkpoints": 2,
    "cluster.lost-after-seconds": 10,
}
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
TWO_HOSTS = ("--nodes=2", "--ntasks-per-node=1")


def poll(
    condition: Callable[[], object],
    report: Callable[[], str],
    can_hold: Callable[[], bool] = lambda: True,
) -> None:
    """Wait until the condition holds; fail with the report after too long, or when it can no longer hold."""
    latest = time.monotonic() + SECONDS
    while True:
        is_last = not can_hold() or time.monotonic() >= latest
        if condition():
            return
        assert not is_last, report()
        time.sleep(0.2)


class Slurm:
    """A SLURM that runs, and the folder in which jobs are submitted and write their logs."""

    def __init__(self, folder: Path, head: int):
        self.folder = folder
        self.enter = ["nsenter", "--target", str(head), *NAMESPACES, f"--wd={folder}", "--"]

    def call(self, *words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.enter, *map(str, words)],
            text=True, capture_output=True, cwd=self.folder, timeout=SECONDS,
        )  # fmt: skip

    def submit(self, *words: object) -> str:
        done = self.call("sbatch", "--parsable", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def show(self, job: str) -> str:
        return self.call("scontrol", "show", "job", job).stdout

    def field(self, job: str, name: str) -> str:
        return re.search(rf"\b{name}=(\S+)", self.show(job))[1]

    def log(self, job: str) -> str:
        paths = [self.folder / f"slurm-{name}-{job}.out" for name in ("bert", "bert-data")]
        return "".join(path.read_text() for path in paths if path.exists())

    def report(self, job: str) -> str:
        return self.show(job) + self.log(job)

    def has_ended(self, job: str) -> bool:
        """Return whether SLURM lists the job as ended; it does not while SLURM does not answer."""
        return re.search(rf"\bJobState=({'|'.join(ENDED)})\b", self.show(job)) is not None

    def end(self, job: str) -> str:
        poll(lambda: self.has_ended(job), lambda: self.report(job))
        return f"{self.field(job, 'JobState')} {self.field(job, 'ExitCode')}"

    def wait_before_end(self, job: str, condition: Callable[[], object]) -> None:
        """Wait until the condition holds; if the job ends without it, the test fails with its log."""
        poll(condition, lambda: self.report(job), lambda: not self.has_ended(job))

    def wait_for_hosts(self) -> None:
        """Wait until all hosts are up and free: one that was cut off comes back after some seconds."""
        hosts = ("sinfo", "--noheader", "--Node", "--partition=main")
        poll(
            lambda: self.call(*hosts, "--format=%T").stdout.split() == ["idle"] * 3,
            lambda: self.call(*hosts, "--list-reasons").stdout + self.call(*hosts).stdout,
        )

    def kill_host(self, name: str) -> None:
        """End all processes and connections of a host at once."""
        self.call("kill", "-KILL", (self.folder / f"{name}.pid").read_text().strip())

    def connect(self, name: str, state: str) -> None:
        """Set the links of a host to `down`, which ends no process and no connection, or to `up`."""
        for link in ("ib0", "eth1"):
            self.call("ip", "link", "set", f"{name}-{link}", state)


def start(folder: Path) -> "subprocess.Popen[str]":
    """Start SLURM; all of it ends with the process, and the process with this one."""
    words = ["setpriv", "--pdeathsig", "KILL", "unshare", *NAMESPACES, "--fork", "--kill-child"]
    words += ["--mount-proc", str(ROOT / "tests" / "support" / "slurm_hosts.sh"), "head", folder]
    with (folder / "head.out").open("w") as log:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if os.geteuid() != 0:
        pytest.skip("only root can make the hosts of a SLURM cluster")
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"SLURM is not installed: no {', '.join(missing)}")
    allowed = subprocess.run(["unshare", *NAMESPACES, "--fork", "true"], capture_output=True)
    if allowed.returncode:
        pytest.skip(f"no namespaces for hosts: {allowed.stderr.decode().strip()}")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / ".venv").symlink_to(sys.prefix)
    for path in JOBS.iterdir():
        (folder / path.name).write_text(path.read_text())
    process = start(folder)
    try:
        wait_for((folder / "ready").exists, [process])
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        yield Slurm(folder, int(children))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def pretrain(run: str, **changes: object) -> list[str]:
    # The hosts have no GPU.
    return ["pretrain", "--save-ckpt-path", run, *flags_of(RUN, **changes), "--no-require-gpu"]


@pytest.fixture(scope="module")
def undisturbed(slurm):
    """A function that makes a run of an engine in one process, by the job for one node."""
    made: dict[str, Path] = {}

    def make(engine: str) -> Path:
        if engine not in made:
            file = "one_cpu_node.sh" if engine == "jax" else "one_node.sh"
            job = slurm.submit(file, *pretrain(f"one_{engine}", engine=engine))
            assert slurm.end(job) == "COMPLETED 0:0", slurm.log(job)
            made[engine] = slurm.folder / f"one_{engine}"
        return made[engine]

    return make


def step_of(run: Path) -> int:
    return metrics_of(run)[-1]["step"] if (run / "metrics.jsonl").exists() else 0


def test_two_nodes_end_with_the_bytes_of_one(slurm, undisturbed):
    job = slurm.submit(*TWO_HOSTS, "several_nodes.sh", *pretrain("several"))
    assert slurm.end(job) == "COMPLETED 0:0", slurm.log(job)
    assert "2 processes from SLURM" in slurm.log(job)
    assert_same_end(slurm.folder / "several", undisturbed("tensorflow"))


@pytest.mark.parametrize(
    ("engine", "partition", "events"),
    [
        ("jax", "main", ["stop", "preempt"]),
        ("tensorflow", "abrupt", ["preempt", "cut"]),
        ("tensorflow", "main", ["preempt", "kill"]),
    ],
)
def test_a_disturbed_run_ends_with_the_bytes_of_an_undisturbed_one(
    engine, partition, events, slurm, undisturbed
):
    """It gets SIGTERM, from a person or for an urgent job, or loses a host or its network; the job goes on."""
    run = slurm.folder / f"disturbed_{engine}_{partition}"
    options = (*TWO_HOSTS, f"--partition={partition}")
    slurm.wait_for_hosts()
    job = slurm.submit(*options, "preemptible.sh", *pretrain(run.name, engine=engine))
    reached = 0
    for number, event in enumerate(events, 1):
        slurm.wait_before_end(job, lambda at=reached + 25: step_of(run) >= at)
        if event == "stop":
            slurm.call("scancel", "--signal=TERM", job)
        elif event == "preempt":
            slurm.submit("--partition=urgent", "--nodes=3", "--exclusive", "--wrap=true")
        else:
            host = slurm.field(job, "BatchHost")
            slurm.kill_host(host) if event == "kill" else slurm.connect(host, "down")
        restart = re.compile(rf"preemptible: job {job}, restart {number}, step (\d+)")
        slurm.wait_before_end(job, lambda of=restart: of.search(slurm.log(job)))
        saved, reached = int(restart.search(slurm.log(job))[1]), step_of(run)
        has_time = event == "stop" or (event, partition) == ("preempt", "main")
        assert saved >= 25 or not has_time, slurm.log(job)
    ended = slurm.end(job)
    # Not before: the `srun` of the host that was cut off would cancel the step of the same number in the new start.
    if "cut" in events:
        slurm.connect(host, "up")
    assert ended == "COMPLETED 0:0", slurm.log(job)
    assert slurm.log(job).count("2 processes from SLURM") == len(events) + 1
    assert_same_end(run, undisturbed(engine))


def test_the_workers_of_an_array_come_back_when_its_first_task_is_requeued(slurm):
    (slurm.folder / "in").mkdir()
    words = [f"word{number}" for number in range(40)]
    sentences = "".join(" ".join(words[row : row + 8]) + ".\n" for row in range(11)) + "\n"
    for part in range(8):
        (slurm.folder / "in" / f"part{part}.txt").write_text(sentences * 800)
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *words]
    (slurm.folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))

    def tokenize(out: Path) -> list[str]:
        flags = {"vocab": slurm.folder / "vocab.txt", "sequence-length": 32, "mask-tokens": 5}
        return ["tokenize", str(slurm.folder / "in"), str(out), *flags_of(flags)]

    options = ("--array=0-2", "--cpus-per-task=1", "data.sh")
    job = slurm.submit(*options, *tokenize(slurm.folder / "shared"))
    others = [f"{job}_1", f"{job}_2"]
    for task in others:
        slurm.wait_before_end(task, lambda of=task: "Registered to" in slurm.log(of))
    slurm.call("scontrol", "requeue", f"{job}_0")
    for task in (f"{job}_0", *others):
        assert slurm.end(task) == "COMPLETED 0:0", slurm.log(task)
    assert all(slurm.log(task).count("Registered to") == 2 for task in others)
    assert main(tokenize(slurm.folder / "alone")) == 0
    alone = sorted((slurm.folder / "alone").glob("*.tfrecord"))
    assert len(alone) == 8
    for path in alone:
        assert path.read_bytes() == (slurm.folder / "shared" / path.name).read_bytes()
