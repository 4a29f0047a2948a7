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

from support.processes import wait_for

import bert_cli
from bert_cli.cli import COMMANDS
from bert_cli.config.load import load
from bert_cli.config.options import split_log_level

ROOT = Path(bert_cli.__file__).parents[1]
TINY: dict[str, object] = {
    "max-seq-length": 16, "max-predictions-per-seq": 3, "global-batch.micro-batch-size": 2,
    "bert-config.vocab-size": 60, "bert-config.hidden-size": 16, "bert-config.num-hidden-layers": 1,
    "bert-config.num-attention-heads": 2, "bert-config.intermediate-size": 32,
    "bert-config.max-position-embeddings": 32, "optimizer-opts.name": "AdamW",
    "optimizer-opts.learning-rate.max-learning-rate": 0.001,
}  # fmt: skip
"""Flags of a training run of milliseconds a step."""
STEPS = 100
JOBS = ROOT / "scripts" / "slurm"
SRUN = """
import os, signal, subprocess, sys

tasks, program = int(os.environ["SLURM_NTASKS"]), sys.argv[1:]
step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_TASKS_PER_NODE": str(tasks),
        "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"]}
while program[0].startswith("--"):
    option = program.pop(0)
    if option == "--distribution=block":
        step["SLURM_DISTRIBUTION"] = "block"
    else:
        sys.exit(f"srun: stand-in does not know {option}")
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


def programs(folder: Path, **more: str) -> Path:
    """Write the programs that a job file calls into a folder; `more` replaces their sources."""
    folder.mkdir()
    for name, source in {
        "srun": SRUN,
        "scontrol": SCONTROL,
        "bert": BERT,
        "dask": DASK,
        **more,
    }.items():
        path = folder / name
        path.write_text(f"#!{sys.executable}\n{source}")
        path.chmod(0o755)
    return folder


def sbatch_lines(text: str) -> list[tuple[str, str]]:
    """Return the options of a job file: those above its first command, as sbatch reads them."""
    found = []
    for line in text.splitlines():
        if line.startswith("#SBATCH "):
            name, _, value = line.removeprefix("#SBATCH ").partition("=")
            found.append((name.removeprefix("--"), value))
        elif line.strip() and not line.startswith("#"):
            break
    return found


class Scheduler:
    """Start job files in a folder, and end all their processes."""

    def __init__(self, folder: Path, **more: str) -> None:
        self.folder, self.bin = folder, programs(folder / "bin", **more)
        self.state("RUNNING")
        self.jobs: list[subprocess.Popen[str]] = []

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
        options = dict(sbatch_lines(text))
        copy = self.folder / f"slurm_script_{len(self.jobs)}"
        copy.write_text(text)
        copy.chmod(0o755)
        tasks = variables.pop("tasks", options["ntasks-per-node"])
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
        log = open(self.folder / f"log_{len(self.jobs)}", "w")  # noqa: SIM115
        path = f"{self.bin}:{os.environ['PATH']}"
        job = subprocess.Popen(
            [copy, *map(str, words)],
            cwd=self.folder,
            env={**inherited, "PYTHONPATH": str(ROOT), "PATH": path, **slurm},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        log.close()
        job.log = Path(log.name).read_text  # type: ignore[attr-defined]
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
    settings = COMMANDS[words[0]].settings_class()
    own = words[1 : words.index("--")] if words[0] == "launch" else words[1:]
    if words[0] == "launch":
        load_command(words[words.index("--") + 1 :])
    return load(settings, split_log_level(own)[1], f"bert {words[0]}")[0]
