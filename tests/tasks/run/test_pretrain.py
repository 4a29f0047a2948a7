"""Pre-training from start to end: stopped, killed and resumed, bit for bit."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from io import StringIO
from pathlib import Path

import pytest
import tensorflow  # noqa: F401 (before the end of the collection, which sets its devices)
from safetensors.numpy import load_file
from support.bert import Process, start_bert
from support.processes import wait_for
from support.tiny_models import TINY_RUN, flags_of

from bert_cli.cli import main
from bert_cli.errors import BertError
from bert_cli.train.checkpoint import MODEL, OPTIMIZER, STATE, complete_checkpoints

TIMES = {
    "examples_per_second", "tokens_per_second", "seconds_per_step", "seconds_left", "seconds_waited"
}  # fmt: skip
STEPS = 5
FLAGS = {
    **TINY_RUN,
    "global-batch.micro-batch-size": 4,
    "global-batch.grad-acc-steps-per-replica": 2,
    "optimizer-opts.learning-rate.warmup-frac": 0.2,
    "total-num-train-samples": 8 * STEPS,
    "checkpoint-every-steps": 1,
}


def arguments(folder: Path, **changes: object) -> list[str]:
    """The command line of a small run; a change to False leaves a flag out."""
    return ["pretrain", "--save-ckpt-path", str(folder), *flags_of(FLAGS, **changes)]


def pretrain(folder: Path, **changes: object) -> None:
    assert main(arguments(folder, **changes)) == 0


def metrics(folder: Path) -> list[dict]:
    """The metrics of a run, without those that depend on the clock."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name not in TIMES}
        for line in lines
    ]


def assert_same_bytes(a: Path, b: Path) -> None:
    """The newest checkpoints of two runs hold the same weights, moments and loss scale."""
    left, right = complete_checkpoints(a)[-1], complete_checkpoints(b)[-1]
    assert left.name == right.name
    for name in (MODEL, OPTIMIZER):
        assert (left / name).read_bytes() == (right / name).read_bytes(), name
    states = [json.loads((path / STATE).read_text()) for path in (left, right)]
    assert states[0]["loss_scale"] == states[1]["loss_scale"]


def assert_resumes_from(step: int, reference: Path, folder: Path, changes: dict) -> None:
    """A run that continues from a checkpoint of another ends with the same bytes and metrics."""
    resumed = folder / f"from_{step}"
    name = f"step_{step:08d}"
    shutil.copytree(reference / name, resumed / name)
    shutil.copyfile(reference / "metrics.jsonl", resumed / "metrics.jsonl")
    pretrain(resumed, **changes)
    assert_same_bytes(resumed, reference)
    assert metrics(resumed) == metrics(reference)


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """An uninterrupted run with a checkpoint at every step."""
    folder = tmp_path_factory.mktemp("complete") / "run"
    pretrain(folder)
    return folder


@pytest.mark.parametrize("step", [1, 4])
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(step, complete, tmp_path):
    # Settings that do not change numbers may change.
    others = {"log_every_steps": 3, "keep_checkpoints": 1} if step == 4 else {}
    assert_resumes_from(step, complete, tmp_path, others)
    names = [path.name for path in complete_checkpoints(tmp_path / f"from_{step}")]
    assert names == [f"step_{n:08d}" for n in range(1, 6)] if step == 1 else ["step_00000005"]


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "mixed_bfloat16", "parallel__recompute": None, "optimizer_opts__name": "AdamW"},
        {"precision": "mixed_float16", "optimizer_opts__loss_scaling": "dynamic"},
        {"precision": "float16", "optimizer_opts__loss_scaling": 64, "optimizer_opts__stochastic_rounding": None},
    ],
    ids=lambda changes: changes["precision"],
)  # fmt: skip
def test_a_run_of_another_precision_resumes_bit_for_bit(changes, tmp_path):
    changes = changes | {"total_num_train_samples": 8 * 3}
    pretrain(tmp_path / "reference", **changes)
    assert_resumes_from(2, tmp_path / "reference", tmp_path, changes)


def test_a_run_whose_gradients_overflow_resumes_bit_for_bit_too(tmp_path):
    """The dynamic scale is halved at each skipped step: all of its state has to be restored."""
    changes = {"precision": "float16", "optimizer_opts__loss_scaling": "dynamic"}
    reference = tmp_path / "reference"
    # Weights of that size overflow float16 at the initial scale.
    changes |= {"bert_config__initializer_range": 2.0, "total_num_train_samples": 8 * 12}
    pretrain(reference, **changes)
    skipped = [line["skipped"] for line in metrics(reference)]
    assert 0 < skipped[-1] < len(skipped)
    assert len({line["loss_scale"] for line in metrics(reference)}) > 1
    assert_resumes_from(skipped[-1] + 1, reference, tmp_path, changes)


STARTED: list[Process] = []


@pytest.fixture(autouse=True)
def _end_started():
    """End the processes of a test and close their outputs."""
    yield
    for process in STARTED:
        process.kill()
        process.wait()
        process.stdout.close()
    STARTED.clear()


def start(words: list[str]) -> Process:
    STARTED.append(start_bert(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    return STARTED[-1]


def test_a_run_killed_at_any_moment_resumes_bit_for_bit(tmp_path):
    many = {"total_num_train_samples": 8 * 30}
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    pretrain(reference, **many)
    for steps in (3, 14):
        process = start(arguments(killed, **many))
        # A reader of its output that ends, as of `| head`, does not end the run.
        process.stdout.readline()
        process.stdout.close()
        path = killed / f"step_{steps:08d}"
        until = time.monotonic() + 120
        while not path.exists():
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.002)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert len(complete_checkpoints(killed)) < 30
    pretrain(killed, **many)
    assert_same_bytes(killed, reference)
    assert metrics(killed) == metrics(reference)
    assert not list(killed.glob(".partial*"))


def test_a_stop_request_saves_the_same_command_continues_and_no_other_run_has_the_folder(
    tmp_path, capsys
):
    run = tmp_path / "run"
    many = {"total_num_train_samples": 8 * 20_000, "checkpoint_every_steps": 100_000}
    process = start(arguments(run, **many))
    wait_for((run / "metrics.jsonl").exists, 120, [process])
    assert main(arguments(run, **many)) == 4
    assert "another process is at work in it" in capsys.readouterr().err
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    assert "and saved; the same command continues" in text
    (checkpoint,) = complete_checkpoints(run)
    step = json.loads((checkpoint / STATE).read_text())["step"]
    assert 0 < step < 20_000
    assert [line["step"] for line in metrics(run)] == list(range(1, step + 1))
    pretrain(run, **many, dry_run=None)
    text = capsys.readouterr().out
    assert f"continues from {checkpoint} (step {step:,})" in text
    assert f"dry run ended at step {step + 2:,}" in text


def test_a_stop_in_the_middle_of_a_long_step_does_not_wait_for_its_end(tmp_path):
    # 20,000 micro-batches of 2 ms or more: a step of 40 s and longer.
    long = {"global_batch__grad_acc_steps_per_replica": 20_000, "total_num_train_samples": 80_000}
    process = start(arguments(tmp_path / "run", **long))
    for line in process.stdout:
        if line.startswith("built in"):
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    requested = time.monotonic()
    text, _ = process.communicate(timeout=60)
    assert time.monotonic() - requested < 15
    assert process.returncode == 0, text
    assert "stopped at step 0 and saved" in text


def on_a_terminal(words: list[str]) -> str:
    """The output of a command on a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    process = start_bert(*words, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    output = b""
    # A closed terminal is an error and not the end of a file.
    with open(ours, "rb", buffering=0) as terminal, suppress(OSError):
        while part := terminal.read(65536):
            output += part
    assert process.wait() == 0, output
    return output.decode()


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


LINE = re.compile(r"step +(\d+)/12  mlm .* tokens/s")


def test_a_terminal_has_a_progress_bar_and_the_lines_that_are_set(tmp_path, monkeypatch):
    many = {"total_num_train_samples": 8 * 12, "checkpoint_every_steps": False}
    output = on_a_terminal(arguments(tmp_path / "run", **many, log_every_steps=2))
    assert f"run: writes into {tmp_path / 'run'}: checkpoints step_*/, metrics.jsonl" in output
    assert " % " in output and "/12 " in output and output.count("examples/s") > 0
    assert LINE.findall(output) == ["1", "2", "4", "6", "8", "10", "12"]
    assert "run: 12 steps done" in output.splitlines()[-1]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    pretrain(tmp_path / "again", **many)
    assert LINE.findall(sys.stdout.getvalue()) == []


def test_a_finished_run_changes_nothing(complete, capsys):
    before = {path: path.stat().st_mtime_ns for path in complete.rglob("*.safetensors")}
    pretrain(complete)
    assert f"all {STEPS} steps are done" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in complete.rglob("*.safetensors")} == before
    documented = {
        "step", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy", "learning_rate", "gradient_norm",
        "weight_norm", "loss_scale", "skipped", "examples_per_second", "tokens_per_second", "seconds_left",
    }  # fmt: skip
    lines = (complete / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == STEPS and documented <= set(json.loads(lines[0]))


def test_replicas_and_accumulation_are_the_same_run(complete, tmp_path):
    """One replica of two micro-batches reads, masks and drops the same as two of one."""
    pretrain(tmp_path / "run", global_batch__replicas=2, global_batch__grad_acc_steps_per_replica=1)
    assert_same_bytes(tmp_path / "run", complete)


def test_a_resumed_run_may_not_change_its_numbers(complete, capsys):
    # Dropout is drawn for a complete micro-batch.
    other = {"global_batch__micro_batch_size": 8, "global_batch__grad_acc_steps_per_replica": 1}
    changes = {"seed": 7, "bert_config__hidden_dropout_prob": 0.3}
    assert main(arguments(complete, **changes, **other)) == 4
    error = capsys.readouterr().err
    assert "seed was 1984, is 7" in error
    assert "bert_config.hidden_dropout_prob was 0.1, is 0.3" in error
    assert "micro_batch_size was 4, is 8" in error
    assert "--pretrained-ckpt-path" in error
    # The run is unchanged.
    assert json.loads((complete / "settings.json").read_text())["seed"] == 1984


def test_phase_two_starts_from_the_weights_of_phase_one_with_a_fresh_optimizer(
    complete, tmp_path, capsys
):
    longer = {"max_seq_length": 24, "max_predictions_per_seq": 4}
    pretrain(tmp_path / "run", pretrained_ckpt_path=complete, **longer)
    last, first = complete / f"step_{STEPS:08d}", tmp_path / "run" / "step_00000001"
    assert f"starts from the weights in {last} with a fresh optimizer" in capsys.readouterr().out
    # One of five steps is warm-up: the rate of the first step is 1e-7.
    before, after = load_file(last / MODEL), load_file(first / MODEL)
    assert before.keys() == after.keys()
    assert max(abs(before[name] - after[name]).max() for name in before) < 1e-6
    name = "emb/word/embeddings/moment2"
    moments, longer_trained = load_file(first / OPTIMIZER), load_file(last / OPTIMIZER)
    assert 0 < moments[name].sum() < longer_trained[name].sum()
    assert json.loads((first / STATE).read_text())["step"] == 1


def test_initial_weights_that_do_not_fit_are_an_error_before_anything_is_written(
    complete, tmp_path, capsys
):
    cut = shutil.copytree(complete_checkpoints(complete)[0], tmp_path / "model")
    (cut / MODEL).write_bytes(b"cut")
    for changes, message in (
        ({"bert_config__intermediate_size": 64, "pretrained_ckpt_path": complete}, "intermediate_size"),
        ({"pretrained_ckpt_path": tmp_path / "none"}, "is no folder"),
        ({"pretrained_ckpt_path": cut, "dry_run": None}, f"{cut / MODEL}: cannot be read"),
        ({"pretrained_ckpt_path": cut, "compile_only": None}, f"{cut / MODEL}: cannot be read"),
    ):  # fmt: skip
        assert main(arguments(tmp_path / "run", **changes)) == 4
        output = capsys.readouterr()
        assert message in output.err
        assert "compiled in" not in output.out and "\nstep " not in output.out
    assert list((tmp_path / "run").glob("*")) in ([], [tmp_path / "run" / "lock"])


def test_a_dry_run_prints_settings_plan_and_two_steps_and_saves_nothing(tmp_path, capsys):
    pretrain(tmp_path / "run", dry_run=None)
    output = capsys.readouterr().out
    assert "global_batch.micro_batch_size" in output
    assert "(--global-batch.micro-batch-size)" in output
    assert f"{STEPS} steps of 8 examples" in output
    assert output.count("\nstep ") == 2
    pretrain(tmp_path / "run", compile_only=None)
    output = capsys.readouterr().out
    assert "compiled in" in output and "\nstep " not in output
    assert not (tmp_path / "run").exists()


def test_a_mistake_is_one_message_and_an_exit_code(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for changes, code, message in (
        ({"generated-dataset": False}, 2, "dataset_dir: is missing"),
        ({"generated-dataset": False, "dataset-dir": "/nowhere"}, 3, "/nowhere"),
        ({"precision": "float8"}, 2, "precision (--precision): got 'float8'"),
        ({"save-ckpt-path": tmp_path / "file" / "run"}, 2, "cannot be written"),
    ):
        assert main(arguments(tmp_path / "run", **changes)) == code
        error = capsys.readouterr().err
        assert error.startswith("bert: ") and message in error
    assert main(["pretrain", *flags_of(FLAGS)]) == 2
    assert "save_ckpt_path: is not given" in capsys.readouterr().err
    assert sorted(kind.exit_code for kind in BertError.__subclasses__()) == [2, 3, 4, 5]
    assert os.listdir(tmp_path) == ["file"]
