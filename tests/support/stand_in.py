"""A stand-in for SLURM in the tests of job files: its variables, and real processes on this host.

`srun` starts a process for each task and passes SIGTERM on; `scontrol` prints the state that the test wrote
and records requests; `bert` is that of this checkout.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.processes import wait_for

import bert_cli
from bert_cli.cli import COMMANDS
from bert_cli.config.load import load
from bert_cli.config.options import split_log_level

ROOT = Path(bert_cli.__file__).parents[1]
STEPS = 100
JOBS = ROOT / "scripts" / "slurm"
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
DASK, BERT = CONSOLE.format("dask.__main__"), CONSOLE.format("bert_cli.cli")


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


def load_command(words: list[str]) -> object:
    """Return the settings of a command line; raises the errors of the tool."""
    if words[0] == "launch":
        load_command(words[words.index("--") + 1 :])
        words = words[: words.index("--")]
    settings = COMMANDS[words[0]].settings_class()
    return load(settings, split_log_level(words[1:])[1], f"bert {words[0]}")[0]
