"""Job files under a stand-in for SLURM that starts real processes: their options, and how they end.

`srun` starts a process for each task and passes SIGTERM on; `scontrol` prints the state that the test wrote
and records requests; `bert` is that of this checkout.
"""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.command_lines import JOBS, ROOT, load_command
from support.processes import wait_for
from support.tiny_models import TINY_RUN, flags_of

from bert_cli.cli import main
from bert_cli.train.history import Run

FILES = sorted(JOBS.iterdir())
# The form of the options of sbatch that the files may use.
OPTIONS = re.compile(
    r"array=\d+-\d+(%\d+)?|(cpus-per-task|gpus-per-node|nodes|ntasks-per-node)=\d+|job-name=[\w-]+"
    r"|mem=\d+[MGT]|(no-)?requeue=|open-mode=append|output=[\w/.-]*(%[jxAau][\w/.-]*)+|signal=TERM@\d+"
    r"|time=(\d+-)?\d\d:\d\d:\d\d"
)
STEPS = 100
SRUN = """
import os, signal, subprocess, sys

tasks, program = int(os.environ["SLURM_NTASKS"]), sys.argv[1:]
step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_TASKS_PER_NODE": str(tasks),
        "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"]}
if program[0] == "--distribution=block":
    step["SLURM_DISTRIBUTION"] = program.pop(0).partition("=")[2]
children = []

def pass_on(number, frame):
    for child in children:
        child.send_signal(number)

signal.signal(signal.SIGTERM, pass_on)
for rank in range(tasks):
    identity = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
    children.append(subprocess.Popen(program, env={**os.environ, **step, **identity}))
pids = os.path.join(os.environ["STAND_IN"], "pids")
with open(pids + ".new", "w") as file:
    file.write(" ".join(str(child.pid) for child in children))
os.replace(pids + ".new", pids)
codes = [child.wait() for child in children]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = """
import os, sys

with open(os.path.join(os.environ["STAND_IN"], "requests"), "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1] == "show":
    state = open(os.path.join(os.environ["STAND_IN"], "state")).read()
    print(f"JobId={sys.argv[3]} JobName=bert\\n   UserId=me(1)\\n   JobState={state} Reason=None Dependency=(null)")
"""
# Their spawned processes import them again, so `main` is guarded.
CONSOLE = "import sys\nfrom {} import main\nif __name__ == '__main__':\n    sys.exit(main())"
DASK = CONSOLE.format("dask.__main__")
# The node of the tests has no GPU.
NO_GPU = "import sys\nsys.argv[1:] = [word for word in sys.argv[1:] if word != '--require-gpu']\n"
BERT = NO_GPU + CONSOLE.format("bert_cli.cli")


def write_program(path: Path, source: str) -> Path:
    path.write_text(source)
    path.chmod(0o755)
    return path


def sbatch_lines(text: str) -> list[tuple[str, str]]:
    """Return the options of a job file: those above its first command, as sbatch reads them."""
    options = []
    for line in text.splitlines():
        if line.startswith("#SBATCH "):
            name, _, value = line.removeprefix("#SBATCH ").partition("=")
            options.append((name.removeprefix("--"), value))
        elif line.strip() and not line.startswith("#"):
            break
    return options


class Scheduler:
    """Start job files in a folder, and end all their processes."""

    def __init__(self, folder: Path, **more: str) -> None:
        """Write the programs that a job file calls; `more` replaces their sources."""
        self.folder, self.bin = folder, folder / "bin"
        self.state("RUNNING")
        self.jobs: list[subprocess.Popen[str]] = []
        self.bin.mkdir()
        sources = {"srun": SRUN, "scontrol": SCONTROL, "bert": BERT, "dask": DASK, **more}
        for name, source in sources.items():
            write_program(self.bin / name, f"#!{sys.executable}\n{source}")

    def state(self, name: str) -> None:
        """Set the state that `scontrol show job` prints."""
        (self.folder / "state").write_text(name)

    @property
    def requests(self) -> list[str]:
        """Return the requests to scontrol, without queries."""
        path = self.folder / "requests"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if not line.startswith("show ")]

    def submit(self, name: str, *words: object, **variables: str) -> "subprocess.Popen[str]":
        """Run a copy of a job file as SLURM would, with its number of tasks or that of `variables`."""
        (self.folder / "pids").unlink(missing_ok=True)
        text = (JOBS / name).read_text()
        copy = write_program(self.folder / f"slurm_script_{len(self.jobs)}", text)
        tasks = variables.pop("tasks", dict(sbatch_lines(text))["ntasks-per-node"])
        slurm = {
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_NTASKS": tasks,
            "SLURM_TASKS_PER_NODE": tasks,
            "SLURM_CPUS_PER_TASK": "1",
            "SLURM_SUBMIT_DIR": str(self.folder),
            "STAND_IN": str(self.folder),
            **variables,
        }
        inherited = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        path, log = f"{self.bin}:{os.environ['PATH']}", self.folder / f"log_{len(self.jobs)}"
        environment = {**inherited, "PYTHONPATH": str(ROOT), "PATH": path, **slurm}
        with open(log, "w") as out:
            streams: dict[str, Any] = {"stdout": out, "stderr": subprocess.STDOUT, "text": True}
            job = subprocess.Popen(
                [copy, *map(str, words)],
                cwd=self.folder,
                env=environment,
                start_new_session=True,
                **streams,
            )
        job.log = log.read_text  # type: ignore[attr-defined]
        self.jobs.append(job)
        return job

    def tasks(self) -> list[int]:
        """Return the processes of srun, once they are started."""
        wait_for((self.folder / "pids").exists, 120)
        return [int(number) for number in (self.folder / "pids").read_text().split()]

    def end(self) -> None:
        """Kill the processes of a failed test."""
        for job in self.jobs:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def begun(folder: Path) -> bool:
    """Return whether a run has made some steps."""
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and len(metrics.read_text().splitlines()) > 3


@pytest.fixture
def slurm(tmp_path):
    scheduler = Scheduler(tmp_path)
    yield scheduler
    scheduler.end()


def test_a_job_file_has_options_of_slurm_and_uses_them():
    for path in FILES:
        assert os.access(path, os.X_OK)
        text = path.read_text()
        lines, body = sbatch_lines(text), re.sub(r"^#.*", "", text, flags=re.MULTILINE)
        options = dict(lines)
        assert len(options) == len(lines) == text.count("\n#SBATCH"), path
        assert all(OPTIONS.fullmatch("=".join(line)) for line in lines), path
        # SLURM sets the first variables for the script of every job, the others for that of an array.
        known = {"SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", "SLURM_RESTART_COUNT"}
        if "array" in options:
            known |= {f"SLURM_ARRAY_{name}" for name in ("JOB_ID", "TASK_ID", "TASK_MIN")}
        assert set(re.findall(r"\bSLURM_\w+", body)) <= known, path
        assert ("%A_%a" if "array" in options else "%j") in options["output"], path
        several = int(options["nodes"]) * int(options["ntasks-per-node"]) > 1
        assert "srun --dist" in body or not several, path
        assert ("requeue" in options) != ("no-requeue" in options), path
        assert "requeue" in options or "scontrol requeue" not in body, path
        assert "requeue" not in options or options["open-mode"] == "append", path
        assert "signal" not in options or "trap" in body, path


def test_bert_accepts_the_command_lines_of_the_job_files(monkeypatch):
    monkeypatch.setenv("DATASETS_DIR", "/corpora")
    for path in FILES:
        form = r"(?:\|\| set -- |^#   .*scripts/slurm/\w+\.sh )(.+)$"
        lines = re.findall(form, path.read_text(), re.MULTILINE)
        assert lines, path
        for words in map(str.split, lines):
            load_command(words if not words[0].startswith("--") else ["pretrain", *words])


def test_job_files_pass_shellcheck():
    checker = Path(sys.executable).with_name("shellcheck")
    if not checker.exists():
        pytest.skip("no shellcheck beside this Python; the extra test brings it")
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    in_bash = [path for path in scripts if path.read_text().startswith("#!/usr/bin/env bash")]
    assert len(in_bash) > 3
    words = [checker, "--severity=warning", *FILES, *in_bash]
    subprocess.run(words, check=True)


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_run_of_two_tasks_that_is_preempted_is_requeued_and_completes(slurm, tmp_path):
    """As before the time limit: SLURM signals the tasks and not the script."""
    sizes = {"global_batch__replicas": 2, "total_num_train_samples": 4 * STEPS}
    words = ["pretrain", *flags_of(TINY_RUN, **sizes, save_ckpt_path="run")]
    job = slurm.submit("preemptible.sh", *words, tasks="2")
    wait_for(lambda: begun(tmp_path / "run") or job.poll() is not None, 120)
    for task in slurm.tasks():
        os.kill(task, signal.SIGTERM)
    assert job.wait() == 0, job.log()
    assert "2 processes" in job.log()
    run = Run(tmp_path / "run")
    assert run.state == "stopped" and 0 < run.step < STEPS and len(run.checkpoints) == 1
    assert slurm.requests == ["requeue 4711"]

    job = slurm.submit("preemptible.sh", *words, tasks="2", SLURM_RESTART_COUNT="1")
    assert job.wait() == 0, job.log()
    assert "restart 1" in job.log() and "continues from run/step_" in job.log()
    complete = Run(tmp_path / "run")
    assert complete.state == "done" and list(complete.steps) == list(range(1, STEPS + 1))
    assert slurm.requests == ["requeue 4711"]


STOPPED = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("started", flush=True)
time.sleep(60)
"""


def test_a_cancelled_job_passes_the_signal_on_and_is_not_requeued(tmp_path):
    """As at the end of a job: SLURM signals every process of it."""
    slurm = Scheduler(tmp_path, srun=STOPPED)
    job = slurm.submit("preemptible.sh", "pretrain")
    wait_for(lambda: "started" in job.log())
    slurm.state("COMPLETING")
    os.killpg(job.pid, signal.SIGTERM)
    assert job.wait() == 75, job.log()
    assert "SLURM decides" in job.log() and slurm.requests == []


def test_the_job_files_for_one_and_for_several_nodes_start_a_process_for_each_task(tmp_path):
    source = "import os, sys; print(os.environ['DATASETS_DIR'], sys.argv[1:])"
    slurm = Scheduler(tmp_path, bert=source)
    for name, tasks in (("one_node.sh", "1"), ("several_nodes.sh", "3")):
        job = slurm.submit(name, "pretrain", "--seed", "7", tasks=tasks)
        assert job.wait() == 0, job.log()
        words = f"{tmp_path}/data ['pretrain', '--seed', '7', '--require-gpu']"
        assert job.log().count(words) == int(tasks)
    job = slurm.submit("one_node.sh", "pretrain", tasks="1", DATASETS_DIR="/corpora")
    assert job.wait() == 0 and job.log().startswith("/corpora ['pretrain'"), job.log()
    assert slurm.requests == []


def test_only_a_run_that_was_stopped_before_its_end_is_requeued(tmp_path):
    cases = (
        (75, 3, 0, True),
        (75, 7, 75, False),  # too often
        (143, 0, 0, True),
        (5, 0, 5, False),
    )
    for number, (code, restarts, ends, requeued) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        slurm = Scheduler(folder, srun=f"import sys; sys.exit({code})")
        variables = {"SLURM_RESTART_COUNT": str(restarts), "MOST_RESTARTS": "7"}
        job = slurm.submit("preemptible.sh", "pretrain", **variables)
        assert job.wait() == ends, job.log()
        assert slurm.requests == (["requeue 4711"] if requeued else [])


@pytest.fixture(scope="module")
def sentences(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sentences")
    (folder / "in").mkdir()
    words = [f"word{number}" for number in range(40)]
    for part in range(6):
        sentences = [" ".join(words[part + row : part + row + 8]) + ".\n" for row in range(11)]
        (folder / "in" / f"part{part}.txt").write_text("\n".join(["".join(sentences)] * 4))
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *words]
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    return folder


def tokenize(folder: Path, out: Path) -> list[str]:
    words = ["tokenize", folder / "in", out, "--vocab", folder / "vocab.txt"]
    return [*map(str, words), "--sequence-length", "32", "--mask-tokens", "5"]


def array_task(slurm: Scheduler, number: int, *words: object) -> "subprocess.Popen[str]":
    array = {"JOB_ID": "4700", "TASK_ID": str(number), "TASK_MIN": "0"}
    variables = {f"SLURM_ARRAY_{name}": value for name, value in array.items()}
    return slurm.submit("data.sh", *words, TMPDIR=str(slurm.folder), **variables)


def test_the_tasks_of_an_array_prepare_data_together_and_all_end(slurm, sentences, tmp_path):
    pytest.importorskip("distributed")
    words = tokenize(sentences, tmp_path / "out")
    (tmp_path / "dask-4700.json").write_text("")  # left by an earlier start of the first task
    tasks = [array_task(slurm, number, *words) for number in (2, 0, 1)]
    for task in tasks:
        assert task.wait(timeout=120) == 0, task.log()
    assert "Start worker at" in tasks[0].log() and "tokenize: " in tasks[1].log()
    assert not list(tmp_path.glob("dask-*.json"))
    assert main(tokenize(sentences, tmp_path / "here")) == 0
    made = sorted((tmp_path / "here").glob("*.tfrecord"))
    assert len(made) == 6
    for path in made:
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_a_step_that_is_absent_or_fails_ends_its_array_with_the_steps_code(slurm, tmp_path):
    pytest.importorskip("distributed")
    assert array_task(slurm, 0).wait() == 2
    first = array_task(slurm, 0, *tokenize(tmp_path / "nowhere", tmp_path / "out"))
    assert first.wait(timeout=120) == 3, first.log()
    assert not list(tmp_path.glob("dask-*.json"))


def test_a_first_task_that_is_stopped_leaves_no_process_and_no_address(slurm, sentences, tmp_path):
    pytest.importorskip("distributed")
    first = array_task(slurm, 0, *tokenize(sentences, tmp_path / "out"))
    wait_for(lambda: list(tmp_path.glob("dask-*.json")) or first.poll() is not None, 120)
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=60) == 143, first.log()
    assert not list(tmp_path.glob("dask-*.json"))
    # A worker ends after its nanny.
    wait_for(lambda: subprocess.run(["pgrep", "-g", str(first.pid)]).returncode == 1)
