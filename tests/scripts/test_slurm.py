"""Job files under a stand-in for SLURM that starts real processes: what they ask for, and how they end."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.stand_in import DASK, JOBS, ROOT, Scheduler, load_command, sbatch_lines, wait_for

from bert_cli.cli import main
from bert_cli.train.history import Run

FILES = sorted(JOBS.iterdir())
# Options of sbatch that the files may use, and what each takes.
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
# Variables that SLURM gives to a script of every job, and to one of an array.
OF_JOB = {"SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", "SLURM_RESTART_COUNT"}
OF_ARRAY = {"SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN"}
STEPS = 300
TINY = [
    "--generated-dataset", "--max-seq-length", 16, "--max-predictions-per-seq", 3,
    "--bert-config.vocab-size", 60, "--bert-config.hidden-size", 16, "--bert-config.num-hidden-layers", 1,
    "--bert-config.num-attention-heads", 2, "--bert-config.intermediate-size", 32,
    "--bert-config.max-position-embeddings", 32, "--global-batch.micro-batch-size", 2,
    "--optimizer-opts.name", "AdamW", "--optimizer-opts.learning-rate.max-learning-rate", 0.001,
]  # fmt: skip


@pytest.fixture
def slurm(tmp_path):
    scheduler = Scheduler(tmp_path)
    yield scheduler
    scheduler.end()


def flags(replicas: int = 1, steps: int = STEPS) -> list[object]:
    return [
        *TINY,
        "--global-batch.replicas",
        replicas,
        "--total-num-train-samples",
        2 * replicas * steps,
    ]


def begun(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and len(metrics.read_text().splitlines()) > 3


def seconds_of(text: str) -> int:
    hours, minutes, seconds = map(int, text.rpartition("-")[2].split(":"))
    return 3600 * hours + 60 * minutes + seconds


def faults(text: str) -> list[str]:
    """What sbatch would refuse in a job file, or what does not fit together."""
    given, wrong = sbatch_lines(text), []
    options, body = dict(given), re.sub(r"^#.*", "", text, flags=re.MULTILINE)
    if len(given) < text.count("\n#SBATCH"):
        wrong.append("an #SBATCH line stands where sbatch does not read it")
    if len(options) < len(given):
        wrong.append("an option is given twice")
    wrong += [
        f"--{name}={value}"
        for name, value in given
        if name not in OPTIONS or not re.fullmatch(OPTIONS[name], value)
    ]
    if wrong:
        return wrong
    known = OF_JOB | (OF_ARRAY if "array" in options else set())
    wrong += sorted(set(re.findall(r"\bSLURM_\w+", body)) - known)
    number = "%A_%a" if "array" in options else "%j"
    if number not in options["output"]:
        wrong.append("jobs write over one another's output")
    if int(options.get("gpus-per-node", 0)) % int(options["ntasks-per-node"]):
        wrong.append("GPUs cannot be divided among the tasks")
    if int(options["nodes"]) * int(options["ntasks-per-node"]) > 1 and "srun --dist" not in body:
        wrong.append("several tasks and no srun")
    if ("requeue" in options) == ("no-requeue" in options):
        wrong.append("whether it may come back is left to the cluster")
    if "requeue" in options and options.get("open-mode") != "append":
        wrong.append("a restart empties the log")
    if "scontrol requeue" in body and "requeue" not in options:
        wrong.append("asks for a requeue that it forbids")
    if "signal" in options:
        warned = int(options["signal"].partition("@")[2])
        if not 60 <= warned < seconds_of(options["time"]) / 2:
            wrong.append("the signal leaves no time to save or to work")
        if "trap" not in body:
            wrong.append("the script does not outlive the signal")
    return wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_job_file_asks_for_what_slurm_knows_and_its_body_uses(path):
    assert faults(path.read_text()) == []
    assert os.access(path, os.X_OK)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("#SBATCH --mem=64G", "#SBATCH --memory=64G"),
        ("#SBATCH --time=04:00:00", "#SBATCH --time=4h"),
        ("#SBATCH --gpus-per-node=4", "#SBATCH --gpus-per-node=2"),
        ("#SBATCH --open-mode=append\n", ""),
        ("#SBATCH --requeue", "#SBATCH --no-requeue"),
        ("set -euo pipefail", "set -euo pipefail\n#SBATCH --exclusive"),
        ("%x-%j", "%x"),
        ("trap : TERM", ""),
        ("$SLURM_JOB_ID", "$SLURM_ARRAY_TASK_ID"),
        ("#SBATCH --nodes=1", "#SBATCH --nodes=1\n#SBATCH --nodes=2"),
        ("TERM@300", "B:TERM@300"),
    ],
)
def test_the_test_of_job_files_sees_a_mistake(old, new):
    text = (JOBS / "preemptible.sh").read_text()
    assert old in text and faults(text) == []
    assert faults(text.replace(old, new))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_a_job_file_runs_by_default_or_shows_is_a_command_line_of_bert(path, monkeypatch):
    monkeypatch.setenv("DATASETS_DIR", "/corpora")
    text = path.read_text()
    lines = re.findall(r"(?:\|\| set -- |^#   .*scripts/slurm/\w+\.sh )(.+)$", text, re.MULTILINE)
    assert lines
    for line in lines:
        words = line.split()
        load_command(words if not words[0].startswith("--") else ["pretrain", *words])


def tell_tasks_to_stop(slurm, job, run):
    """As SLURM does when a job has to make room; the job's end is waited for."""
    wait_for(lambda: begun(run) or job.poll() is not None)
    for task in slurm.tasks():
        os.kill(task, signal.SIGTERM)
    assert job.wait() == 0, job.told()


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


def test_a_run_on_one_node_is_one_process_and_comes_to_its_end(slurm, tmp_path):
    words = ["pretrain", *flags(steps=3), "--save-ckpt-path", "run"]
    job = slurm.submit("one_node.sh", *words)
    assert job.wait() == 0, job.told()
    assert Run(tmp_path / "run").state == "done"
    assert "3 steps done" in job.told() and "processes, as" not in job.told()


def test_a_run_over_nodes_is_as_many_processes_as_srun_starts_and_saves_once_when_told_to_stop(
    slurm, tmp_path
):
    words = ["pretrain", *flags(2), "--save-ckpt-path", "run"]
    job = slurm.submit("several_nodes.sh", *words, tasks="2")
    tell_tasks_to_stop(slurm, job, tmp_path / "run")
    assert "2 processes, as SLURM says" in job.told()
    run = Run(tmp_path / "run")
    assert run.state == "stopped" and 0 < run.step < STEPS and len(run.checkpoints) == 1
    assert slurm.asked == []


def test_a_run_that_has_to_make_room_goes_back_into_the_queue_and_on_to_its_end(slurm, tmp_path):
    """As before the time limit: SLURM tells the tasks, and not the script."""
    words = ["pretrain", *flags(2), "--save-ckpt-path", "run"]
    job = slurm.submit("preemptible.sh", *words, tasks="2")
    tell_tasks_to_stop(slurm, job, tmp_path / "run")
    run = Run(tmp_path / "run")
    assert run.state == "stopped" and 0 < run.step < STEPS
    assert slurm.asked == ["requeue 4711"]

    job = slurm.submit("preemptible.sh", *words, tasks="2", SLURM_RESTART_COUNT="1")
    assert job.wait() == 0, job.told()
    assert "restart 1" in job.told() and "continues from run/step_" in job.told()
    finished = Run(tmp_path / "run")
    assert finished.state == "done" and list(finished.steps) == list(range(1, STEPS + 1))
    assert slurm.asked == ["requeue 4711"]


def test_a_job_that_is_cancelled_saves_though_it_is_told_thrice_and_does_not_come_back(
    slurm, tmp_path
):
    """As at the end of a job: SLURM tells every process of it, and srun passes on what it hears."""
    words = ["pretrain", *flags(), "--save-ckpt-path", "run"]
    job = slurm.submit("preemptible.sh", *words, tasks="1")
    wait_for(lambda: begun(tmp_path / "run") or job.poll() is not None)
    slurm.state("COMPLETING")
    (task,) = slurm.tasks()
    os.kill(task, signal.SIGTERM)
    os.killpg(job.pid, signal.SIGTERM)
    assert job.wait() == 75, job.told()
    assert Run(tmp_path / "run").state == "stopped", job.told()
    assert "SLURM decides" in job.told() and slurm.asked == []


@pytest.mark.parametrize(
    ("code", "state", "restarts", "ends", "requeued"),
    [
        (0, "RUNNING", 3, 0, False),
        (75, "RUNNING", 3, 0, True),
        (75, "COMPLETING", 3, 75, False),  # cancelled, or put back by SLURM itself
        (75, "RUNNING", 7, 75, False),  # too often
        (143, "RUNNING", 0, 0, True),
        (2, "RUNNING", 0, 2, False),
        (5, "RUNNING", 0, 5, False),
        (137, "RUNNING", 0, 137, False),
    ],
)
def test_only_a_run_that_was_stopped_before_its_end_goes_back_into_the_queue(
    code, state, restarts, ends, requeued, tmp_path
):
    slurm = Scheduler(tmp_path, srun=f"import sys; sys.exit({code})")
    slurm.state(state)
    variables = {"SLURM_RESTART_COUNT": str(restarts), "MOST_RESTARTS": "7"}
    job = slurm.submit("preemptible.sh", "pretrain", **variables)
    assert job.wait() == ends, job.told()
    assert slurm.asked == (["requeue 4711"] if requeued else [])


@pytest.fixture(scope="module")
def sentences(tmp_path_factory) -> Path:
    """Six files of sentences, and a vocabulary that knows their words."""
    folder = tmp_path_factory.mktemp("sentences")
    (folder / "in").mkdir()
    words = [f"word{number}" for number in range(40)]
    for part in range(6):
        documents = [
            "\n".join(
                " ".join(words[(part + row * place) % 40] for place in range(1, 9)) + "."
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
    (tmp_path / "dask-4700.json").write_text(
        ""
    )  # as an earlier try of the first task may leave one
    tasks = [array_task(slurm, number, *words) for number in (2, 0, 1)]
    for task in tasks:
        assert task.wait(timeout=120) == 0, task.told()
    assert "Start worker at" in tasks[0].told() and "tokenize: " in tasks[1].told()
    assert not list(tmp_path.glob("dask-*.json"))
    assert main(tokenize(sentences, tmp_path / "here")) == 0
    made = sorted((tmp_path / "here").glob("*.tfrecord"))
    assert len(made) == 6
    for path in made:
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_a_step_that_fails_ends_its_array_with_the_steps_code(slurm, sentences, tmp_path):
    pytest.importorskip("distributed")
    first = array_task(slurm, 0, *tokenize(sentences / "nowhere", tmp_path / "out"))
    assert first.wait(timeout=120) == 3, first.told()
    assert not list(tmp_path.glob("dask-*.json"))


def test_a_first_task_that_is_stopped_leaves_no_process_and_no_address(slurm, sentences, tmp_path):
    pytest.importorskip("distributed")
    first = array_task(slurm, 0, *tokenize(sentences, tmp_path / "out"))
    wait_for(lambda: list(tmp_path.glob("dask-*.json")) or first.poll() is not None)
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=60) == 143, first.told()
    assert not list(tmp_path.glob("dask-*.json"))
    with pytest.raises(ProcessLookupError):
        os.killpg(first.pid, 0)


def test_a_first_task_whose_worker_cannot_work_does_not_wait_for_ever(sentences, tmp_path):
    pytest.importorskip("distributed")
    slurm = Scheduler(tmp_path, dask=f"import sys\nif sys.argv[1] == 'worker': sys.exit(9)\n{DASK}")
    first = array_task(slurm, 0, *tokenize(sentences, tmp_path / "out"))
    assert first.wait(timeout=60) == 5, first.told()
    assert "the worker of this task ended (exit code 9)" in first.told()
    slurm.end()


def test_an_array_without_a_step_says_how_it_is_submitted(slurm):
    job = array_task(slurm, 0)
    assert job.wait() == 2 and "no step is given" in job.told()


def test_the_stand_in_gives_the_variables_that_the_tool_reads(slurm):
    """Else the tests above would see processes that are alone."""
    show = "import json, os\nprint(json.dumps({n: v for n, v in os.environ.items() if n[:6] == 'SLURM_'}))"
    (slurm.bin / "bert").write_text(f"#!{sys.executable}\n{show}")
    job = slurm.submit("several_nodes.sh", "x", tasks="2")
    assert job.wait() == 0
    said = [json.loads(line) for line in job.told().splitlines()]
    assert sorted(one["SLURM_PROCID"] for one in said) == ["0", "1"]
    assert {one["SLURM_STEP_NODELIST"] for one in said} == {"localhost"}
