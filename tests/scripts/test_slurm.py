"""Job files under a stand-in for SLURM that starts real processes: their options, and how they end."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import wait_for
from support.stand_in import (
    DASK,
    JOBS,
    ROOT,
    STEPS,
    TINY,
    Scheduler,
    begun,
    load_command,
    sbatch_lines,
)

from bert_cli.cli import main
from bert_cli.train.history import Run

FILES = sorted(JOBS.iterdir())
# Options of sbatch that the files may use, with the form of their values.
OPTIONS = {
    "array": r"\d+-\d+(%\d+)?",
    "cpus-per-task": r"\d+",
    "gpus-per-node": r"\d+",
    "job-name": r"[\w-]+",
    "mem": r"\d+[MGT]",
    "no-requeue": "",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "open-mode": "append|truncate",
    "output": r"[\w/.-]*(%[jxAau][\w/.-]*)+",
    "requeue": "",
    "signal": r"TERM@\d+",
    "time": r"(\d+-)?\d\d:\d\d:\d\d",
}
# Variables that SLURM sets for the script of every job, and for that of an array.
OF_JOB = {"SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", "SLURM_RESTART_COUNT"}
OF_ARRAY = {"SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN"}


@pytest.fixture
def slurm(tmp_path):
    scheduler = Scheduler(tmp_path)
    yield scheduler
    scheduler.end()


def flags(replicas: int) -> list[object]:
    samples = 2 * replicas * STEPS
    words = [f"--{name}={value}" for name, value in TINY.items()]
    words += ["--generated-dataset", f"--global-batch.replicas={replicas}"]
    return [*words, f"--total-num-train-samples={samples}"]


def faults(text: str) -> list[str]:
    """Return what sbatch would not accept in a job file, and contradictions in it."""
    lines, wrong = sbatch_lines(text), []
    options, body = dict(lines), re.sub(r"^#.*", "", text, flags=re.MULTILINE)
    if len(lines) < text.count("\n#SBATCH"):
        wrong.append("sbatch does not read an #SBATCH line after the first command")
    if len(options) < len(lines):
        wrong.append("an option is given twice")
    wrong += [
        f"--{name}={value}"
        for name, value in lines
        if name not in OPTIONS or not re.fullmatch(OPTIONS[name], value)
    ]
    if wrong:
        return wrong
    known = OF_JOB | (OF_ARRAY if "array" in options else set())
    wrong += sorted(set(re.findall(r"\bSLURM_\w+", body)) - known)
    number = "%A_%a" if "array" in options else "%j"
    if number not in options["output"]:
        wrong.append("jobs write over one another's output")
    if int(options["nodes"]) * int(options["ntasks-per-node"]) > 1 and "srun --dist" not in body:
        wrong.append("several tasks and no srun")
    if ("requeue" in options) == ("no-requeue" in options):
        wrong.append("neither requeue nor no-requeue")
    if "requeue" in options and options.get("open-mode") != "append":
        wrong.append("a restart empties the log")
    if "scontrol requeue" in body and "requeue" not in options:
        wrong.append("calls scontrol requeue with no-requeue")
    if "signal" in options and "trap" not in body:
        wrong.append("the signal ends the script")
    return wrong


def test_a_job_file_has_options_of_slurm_and_uses_them():
    for path in FILES:
        assert faults(path.read_text()) == [], path
        assert os.access(path, os.X_OK)


def test_a_mistake_in_a_job_file_is_found():
    text = (JOBS / "preemptible.sh").read_text()
    for old, new, fault in (
        ("#SBATCH --requeue\n", "", "neither requeue nor no-requeue"),
        ("--open-mode=append", "--open-mode=truncate", "a restart empties the log"),
        ("#SBATCH --time", "#SBATCH --tme", "--tme="),
        ("%j", "", "jobs write over one another"),
        ("SLURM_JOB_ID", "SLURM_JOB", "SLURM_JOB"),
        ("srun --dist", "mpirun --dist", "several tasks and no srun"),
        ("trap", ":", "the signal ends the script"),
    ):
        assert any(one.startswith(fault) for one in faults(text.replace(old, new))), fault


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
    checked = subprocess.run(words, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.tensorflow
def test_a_run_of_two_tasks_that_is_preempted_is_requeued_and_completes(slurm, tmp_path):
    """As before the time limit: SLURM signals the tasks and not the script."""
    words = ["pretrain", *flags(2), "--save-ckpt-path", "run"]
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


STUB = """
import signal, sys, time
received = []
signal.signal(signal.SIGTERM, lambda *_: received.append(1))
print("started", flush=True)
while not received:
    time.sleep(0.01)
time.sleep(0.2)
print(f"{len(received)} signals", flush=True)
sys.exit(75)
"""


def test_a_cancelled_job_passes_the_signal_on_and_is_not_requeued(tmp_path):
    """As at the end of a job: SLURM signals every process of it, and srun passes signals on."""
    slurm = Scheduler(tmp_path, bert=STUB)
    job = slurm.submit("preemptible.sh", "pretrain", tasks="1")
    wait_for(lambda: "started" in job.log())
    slurm.state("COMPLETING")
    os.killpg(job.pid, signal.SIGTERM)
    assert job.wait() == 75, job.log()
    assert "signals" in job.log() and "SLURM decides" in job.log() and slurm.requests == []


def test_the_job_files_for_one_and_for_several_nodes_start_a_process_for_each_task(tmp_path):
    slurm = Scheduler(tmp_path, bert="import sys; print(sys.argv[1:])")
    for name, tasks in (("one_node.sh", "1"), ("several_nodes.sh", "3")):
        job = slurm.submit(name, "pretrain", "--seed", "7", tasks=tasks)
        assert job.wait() == 0, job.log()
        assert job.log().count("['pretrain', '--seed', '7'") == int(tasks)
    assert slurm.requests == []


def test_only_a_run_that_was_stopped_before_its_end_is_requeued(tmp_path):
    cases = (
        (75, "RUNNING", 3, 0, True),
        (75, "COMPLETING", 3, 75, False),  # cancelled, or requeued by SLURM
        (75, "RUNNING", 7, 75, False),  # too often
        (143, "RUNNING", 0, 0, True),
        (5, "RUNNING", 0, 5, False),
    )
    for number, (code, state, restarts, ends, requeued) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        slurm = Scheduler(folder, srun=f"import sys; sys.exit({code})")
        slurm.state(state)
        variables = {"SLURM_RESTART_COUNT": str(restarts), "MOST_RESTARTS": "7"}
        job = slurm.submit("preemptible.sh", "pretrain", **variables)
        assert job.wait() == ends, job.log()
        assert slurm.requests == (["requeue 4711"] if requeued else [])


@pytest.fixture(scope="module")
def sentences(tmp_path_factory) -> Path:
    """Six files of sentences, and a vocabulary with their words."""
    folder = tmp_path_factory.mktemp("sentences")
    (folder / "in").mkdir()
    words = [f"word{number}" for number in range(40)]
    for part in range(6):
        documents = [
            "\n".join(
                " ".join(words[(part + row * column) % 40] for column in range(1, 9)) + "."
                for row in range(1, 12)
            )
            for _ in range(4)
        ]
        (folder / "in" / f"part{part}.txt").write_text("\n\n".join(documents) + "\n")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *words]
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    return folder


def tokenize(folder: Path, out: Path) -> list[str]:
    words = ["tokenize", folder / "in", out, "--vocab", folder / "vocab.txt"]
    return [*map(str, words), "--sequence-length", "32", "--mask-tokens", "5"]


def array_task(slurm: Scheduler, number: int, *words: object) -> "subprocess.Popen[str]":
    variables = {
        "SLURM_ARRAY_JOB_ID": "4700",
        "SLURM_ARRAY_TASK_ID": str(number),
        "SLURM_ARRAY_TASK_MIN": "0",
        "TMPDIR": str(slurm.folder),
    }
    return slurm.submit("data.sh", *words, **variables)


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


def test_a_step_that_fails_ends_its_array_with_the_steps_code(slurm, sentences, tmp_path):
    pytest.importorskip("distributed")
    first = array_task(slurm, 0, *tokenize(sentences / "nowhere", tmp_path / "out"))
    assert first.wait(timeout=120) == 3, first.log()
    assert not list(tmp_path.glob("dask-*.json"))


def test_a_first_task_that_is_stopped_leaves_no_process_and_no_address(slurm, sentences, tmp_path):
    pytest.importorskip("distributed")
    first = array_task(slurm, 0, *tokenize(sentences, tmp_path / "out"))
    wait_for(lambda: list(tmp_path.glob("dask-*.json")) or first.poll() is not None, 120)
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=60) == 143, first.log()
    assert not list(tmp_path.glob("dask-*.json"))

    def has_ended() -> bool:
        try:
            os.killpg(first.pid, 0)
        except ProcessLookupError:
            return True
        return False

    wait_for(has_ended, seconds=20)  # a worker ends after its nanny


def test_a_first_task_whose_worker_fails_ends(sentences, tmp_path):
    pytest.importorskip("distributed")
    slurm = Scheduler(tmp_path, dask=f"import sys\nif sys.argv[1] == 'worker': sys.exit(9)\n{DASK}")
    first = array_task(slurm, 0, *tokenize(sentences, tmp_path / "out"))
    assert first.wait(timeout=60) == 5, first.log()
    assert "the worker of this task ended (exit code 9)" in first.log()
    slurm.end()


def test_an_array_without_a_step_prints_how_to_submit_it(slurm):
    job = array_task(slurm, 0)
    assert job.wait() == 2 and "no step is given" in job.log()
