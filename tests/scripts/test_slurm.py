"""Job files under stand-ins for `srun` and `scontrol`: their options, what they start, and how they end."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support.command_lines import JOBS, ROOT, load_command
from support.processes import wait_for

FILES = sorted(JOBS.iterdir())
# The form of the options of sbatch that the files may use.
OPTIONS = re.compile(
    r"array=\d+-\d+(%\d+)?|(cpus-per-task|gpus-per-node|nodes|ntasks-per-node)=\d+|job-name=[\w-]+"
    r"|mem=\d+[MGT]|(no-)?requeue=|open-mode=append|output=[\w/.-]*(%[jxAau][\w/.-]*)+|signal=TERM@\d+"
    r"|time=(\d+-)?\d\d:\d\d:\d\d"
)
# Their spawned processes import them again, so `main` is guarded.
CONSOLE = "import sys\nfrom {} import main\nif __name__ == '__main__':\n    sys.exit(main())"
SCONTROL = """
import os, sys
with open("requests", "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
restarts = os.environ.get("RESTARTS", os.environ.get("SLURM_RESTART_COUNT", "0"))
print("JobId=4711\\n   JobState=" + os.environ.get("STATE", "RUNNING") + " Reason=None")
print(f"   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0")
"""
PYTHON = "import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
SHOW = "import os, sys; print(os.environ['DATASETS_DIR'], sys.argv[1:])"
STOPPED = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("started", flush=True)
time.sleep(60)
"""


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


class Job(subprocess.Popen[str]):
    """A job file that runs in a folder as SLURM would run it."""

    def __init__(self, folder: Path, name: str, *words: object, srun: str = SHOW, **more: str):
        programs = {"srun": srun, "scontrol": SCONTROL, "dask": CONSOLE.format("dask.__main__")}
        programs["bert"] = CONSOLE.format("bert_cli.cli")
        programs["python"] = PYTHON
        if not (folder / "bin").exists():  # an earlier job of the test may be reading them
            (folder / "bin").mkdir()
            for program, source in programs.items():
                (folder / "bin" / program).write_text(f"#!{sys.executable}\n{source}")
                (folder / "bin" / program).chmod(0o755)
        task = more.get("SLURM_ARRAY_TASK_ID", "")
        self.path = folder / f"log{task}"
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        slurm = {"SLURM_JOB_ID": "4711", "SLURM_CPUS_PER_TASK": "1", "PATH": path}
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **slurm, **more}
        with self.path.open("a") as log:
            super().__init__(
                [JOBS / name, *map(str, words)], cwd=folder, env=environment, text=True,
                start_new_session=True, stdout=log, stderr=log,
            )  # fmt: skip

    def log(self) -> str:
        return self.path.read_text()


@pytest.fixture
def submit(tmp_path):
    jobs: list[Job] = []

    def start(name: str, *words: object, **more: str) -> Job:
        jobs.append(Job(tmp_path, name, *words, **more))
        return jobs[-1]

    yield start
    for job in jobs:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


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
    subprocess.run([checker, "--severity=warning", *FILES, *in_bash], check=True)


@pytest.mark.parametrize(
    "name", ["one_cpu_node.sh", "one_node.sh", "several_nodes.sh", "preemptible.sh"]
)
def test_a_job_file_starts_the_run_in_every_task_with_its_flags(name, submit, tmp_path):
    words = [] if name.startswith("one_") else ["--distribution=block"]
    # Before the arguments, so that --no-require-gpu among them has the last word.
    gpus = [] if "cpu" in name else ["--require-gpu"]
    words += ["bert", "pretrain", *gpus, "--seed", "7", "--no-require-gpu"]
    words += ["--exit-code-when-stopped", "75"] if name == "preemptible.sh" else []
    for more, data in (({}, tmp_path / "data"), ({"DATASETS_DIR": "/corpora"}, "/corpora")):
        job = submit(name, "pretrain", "--seed", "7", "--no-require-gpu", **more)
        assert job.wait() == 0 and job.log().endswith(f"{data} {words}\n"), job.log()
    assert not (tmp_path / "requests").exists()


@pytest.mark.parametrize(
    ("code", "restarts", "exit_code", "requests", "listed"),
    [
        (75, 3, 0, 2, {}),
        (143, 0, 0, 2, {}),
        (5, 0, 0, 2, {}),
        (3, 0, 3, 0, {}),
        (75, 0, 75, 1, {"STATE": "COMPLETING"}),  # cancelled, or requeued by SLURM itself
        (5, 1, 5, 1, {"RESTARTS": "2"}),  # restarted elsewhere while this node had no network
        (5, 1, 5, 1, {"RESTARTS": "12"}),
        (75, 2, 0, 2, {"RESTARTS": "0"}),  # inherited from the job that submitted this one
    ],
)
def test_only_a_run_that_was_stopped_before_its_end_is_requeued(
    code, restarts, exit_code, requests, listed, submit, tmp_path
):
    variables = {"SLURM_RESTART_COUNT": str(restarts), **listed}
    job = submit("preemptible.sh", "pretrain", srun=f"import sys; sys.exit({code})", **variables)
    assert job.wait() == exit_code, job.log()
    path = tmp_path / "requests"
    lines = path.read_text().splitlines() if path.exists() else []
    assert lines == ["show job 4711", "requeue 4711"][:requests]


def test_a_job_ends_when_three_starts_have_not_advanced_the_step(submit):
    steps = "[0, 5, 5, 1234, 1234, 1234, 1234]"
    line = f"print('run: stopped at step', format({steps}[int(restart)], ','), 'and saved')"
    stops = f"import os, sys; restart = os.environ['SLURM_RESTART_COUNT']; {line}; sys.exit(75)"
    codes = []
    for restart in range(8):
        job = submit("preemptible.sh", "pretrain", srun=stops, SLURM_RESTART_COUNT=str(restart))
        codes.append(job.wait())
    assert codes == [0] * 7 + [75], job.log()
    assert "the last 3 starts did not advance step 1,234; allow more time" in job.log()


@pytest.mark.parametrize(("name", "code"), [("one_node.sh", 75), ("preemptible.sh", 0)])
def test_a_job_waits_until_its_run_has_saved_after_a_signal_to_every_process(name, code, submit):
    job = submit(name, "pretrain", srun=STOPPED)
    wait_for(lambda: "started" in job.log())
    os.killpg(job.pid, signal.SIGTERM)
    assert job.wait() == code, job.log()


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


@pytest.fixture
def submit_task(submit, tmp_path):
    pytest.importorskip("distributed")

    def start(number: int, *words: object) -> Job:
        array = {"JOB_ID": "4700", "TASK_ID": str(number), "TASK_MIN": "0"}
        variables = {f"SLURM_ARRAY_{name}": value for name, value in array.items()}
        return submit("data.sh", *words, TMPDIR=str(tmp_path), **variables)

    yield start
    assert not list(tmp_path.glob("dask-*.json"))


def test_a_job_for_cpus_without_a_command_names_one(submit):
    job = submit("one_cpu_node.sh")
    assert job.wait() == 2 and "pretrain --config CONFIG" in job.log()


def test_a_step_that_is_absent_or_fails_ends_its_array_with_the_steps_code(submit_task, tmp_path):
    assert submit_task(0).wait() == 2
    first = submit_task(0, *tokenize(tmp_path / "nowhere", tmp_path / "out"))
    assert first.wait() == 3, first.log()


CLOCK = """
wait() { local code=0; builtin wait "$@" || code=$?; SECONDS=$((SECONDS + 700)); return $code; }
dask() { echo started >> starts; [ "$(wc -l < starts)" -lt 3 ] || touch dask-4700.done; return 1; }
"""
"""Functions of the shell: workers that die after 700 s, and a step that ends while the third works."""


def test_a_worker_that_dies_late_starts_again_however_long_it_has_worked(submit, tmp_path):
    (tmp_path / "clock").write_text(CLOCK)
    (tmp_path / "dask-4700.json").write_text("{}")
    array = {"JOB_ID": "4700", "TASK_ID": "1", "TASK_MIN": "0"}
    variables = {f"SLURM_ARRAY_{name}": value for name, value in array.items()}
    task = submit("data.sh", "x", BASH_ENV=str(tmp_path / "clock"), **variables, PATIENCE="600")
    assert task.wait() == 0, task.log()
    assert (tmp_path / "starts").read_text().count("started") == 3


def test_a_first_task_that_is_stopped_leaves_no_process(submit_task, sentences, tmp_path):
    first = submit_task(0, *tokenize(sentences, tmp_path / "out"))
    wait_for(lambda: list(tmp_path.glob("dask-*.json")) or first.poll() is not None)
    first.send_signal(signal.SIGTERM)
    assert first.wait() == 143, first.log()
    # A worker ends after its nanny.
    wait_for(lambda: subprocess.run(["pgrep", "-g", str(first.pid)]).returncode == 1)
