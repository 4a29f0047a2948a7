"""Pre-training from start to end: stopped, killed and resumed, bit for bit."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.bert import Process, start_bert

from bert_cli.cli import main
from bert_cli.errors import BertError
from bert_cli.train.checkpoint import MODEL, OPTIMIZER
from bert_cli.train.folder import STATE, complete_checkpoints

TIMES = {
    "examples_per_second",
    "tokens_per_second",
    "seconds_per_step",
    "seconds_left",
    "seconds_waited",
}
STEPS = 5
FLAGS = {
    "generated-dataset": None,
    "max-seq-length": 16,
    "max-predictions-per-seq": 3,
    "bert-config.vocab-size": 60,
    "bert-config.hidden-size": 16,
    "bert-config.num-hidden-layers": 2,
    "bert-config.num-attention-heads": 2,
    "bert-config.intermediate-size": 32,
    "bert-config.max-position-embeddings": 32,
    "global-batch.micro-batch-size": 4,
    "global-batch.grad-acc-steps-per-replica": 2,
    "optimizer-opts.name": "LAMB",
    "optimizer-opts.learning-rate.max-learning-rate": 0.01,
    "optimizer-opts.learning-rate.warmup-frac": 0.2,
    "total-num-train-samples": 8 * STEPS,
    "checkpoint-every-steps": 1,
    "keep-checkpoints": 100,
}


def arguments(folder: Path, **changes: object) -> list[str]:
    """The command line of a small run; a change to False leaves a flag out."""
    changed = {name.replace("__", ".").replace("_", "-"): value for name, value in changes.items()}
    words = ["pretrain", "--save-ckpt-path", str(folder)]
    for name, value in {**FLAGS, **changed}.items():
        if value is not False:
            words += [f"--{name}"] if value is None else [f"--{name}", str(value)]
    return words


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


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """An uninterrupted run with a checkpoint at every step."""
    folder = tmp_path_factory.mktemp("complete") / "run"
    pretrain(folder)
    return folder


PRECISIONS = [
    {},
    {"precision": "mixed_bfloat16"},
    {"precision": "mixed_float16", "optimizer_opts__loss_scaling": "dynamic"},
    {"precision": "float16", "optimizer_opts__loss_scaling": 64, "optimizer_opts__stochastic_rounding": None},
    {"parallel__recompute": None, "optimizer_opts__name": "AdamW"},
]  # fmt: skip


@pytest.mark.parametrize(
    "changes", PRECISIONS, ids=lambda c: "-".join(map(str, c.values())) or "float32"
)
def test_a_run_resumed_at_any_step_is_the_uninterrupted_run_bit_for_bit(changes, tmp_path):
    reference = tmp_path / "reference"
    pretrain(reference, **changes)
    assert len(complete_checkpoints(reference)) == STEPS
    # Every step in float32; for other precisions one in the middle is enough.
    for step in range(1, STEPS) if not changes else (3,):
        assert_resumes_from(step, reference, tmp_path, changes)


def assert_resumes_from(step: int, reference: Path, folder: Path, changes: dict) -> None:
    """A run that continues from a checkpoint of another ends with the same bytes and metrics."""
    resumed = folder / f"from_{step}"
    name = f"step_{step:08d}"
    shutil.copytree(reference / name, resumed / name)
    shutil.copyfile(reference / "metrics.jsonl", resumed / "metrics.jsonl")
    pretrain(resumed, **changes)
    assert_same_bytes(resumed, reference)
    assert metrics(resumed) == metrics(reference)


def test_a_run_whose_gradients_overflow_resumes_bit_for_bit_too(tmp_path):
    """The dynamic scale is halved at each skipped step: all of its state has to be restored."""
    changes = {"precision": "float16", "optimizer_opts__loss_scaling": "dynamic"}
    reference = tmp_path / "reference"
    # Weights of that size overflow float16 at the initial scale.
    changes |= {"bert_config__initializer_range": 2.0, "total_num_train_samples": 8 * 12}
    pretrain(reference, **changes)
    skipped = [line["skipped"] for line in metrics(reference)]
    scales = [line["loss_scale"] for line in metrics(reference)]
    assert 0 < skipped[-1] < len(skipped)
    assert len(set(scales)) > 1
    for step in (1, skipped[-1] + 1):
        assert_resumes_from(step, reference, tmp_path, changes)


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


def wait_for(condition, process: Process, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until, "took too long"
        time.sleep(0.005)


def test_a_run_killed_at_any_moment_resumes_bit_for_bit(tmp_path):
    many = {"total_num_train_samples": 8 * 60}
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    pretrain(reference, **many)
    for kills, steps in enumerate((3, 20, 41)):
        process = start(arguments(killed, **many))
        wait_for(lambda steps=steps: (killed / f"step_{steps:08d}").exists(), process)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, kills
        assert len(complete_checkpoints(killed)) < 60
    pretrain(killed, **many)
    assert_same_bytes(killed, reference)
    assert metrics(killed) == metrics(reference)
    assert not list(killed.glob(".partial*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_request_saves_and_the_same_command_continues(number, tmp_path):
    many = {"total_num_train_samples": 8 * 2000, "checkpoint_every_steps": 100_000}
    process = start(arguments(tmp_path / "run", **many))
    wait_for((tmp_path / "run" / "metrics.jsonl").exists, process)
    process.send_signal(number)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    assert "and saved; the same command continues" in text
    (checkpoint,) = complete_checkpoints(tmp_path / "run")
    step = json.loads((checkpoint / STATE).read_text())["step"]
    assert 0 < step < 2000
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, step + 1))
    again = start([*arguments(tmp_path / "run", **many), "--dry-run"])
    text, _ = again.communicate(timeout=120)
    assert f"continues from {checkpoint} (step {step:,})" in text
    assert f"dry run ended at step {step + 2:,}" in text


def test_a_reader_of_the_output_that_ends_does_not_end_the_run(tmp_path):
    process = start(arguments(tmp_path / "run"))
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert complete_checkpoints(tmp_path / "run")[-1].name == f"step_{STEPS:08d}"
    assert len(metrics(tmp_path / "run")) == STEPS


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


@pytest.mark.parametrize("changes", [{}, {"log_every_steps": 2}], ids=["default", "every 2"])
def test_a_terminal_has_a_progress_bar_and_the_lines_that_are_set(changes, tmp_path):
    many = {"total_num_train_samples": 8 * 60, "checkpoint_every_steps": False}
    output = on_a_terminal(arguments(tmp_path / "run", **many, **changes))
    assert f"run: writes into {tmp_path / 'run'}: checkpoints step_*/, metrics.jsonl" in output
    assert " % " in output and "/60 " in output and output.count("examples/s") > 0
    lines = re.findall(r"step +(\d+)/60  mlm .* tokens/s", output)
    assert lines == ([] if not changes else ["1", *map(str, range(2, 61, 2))])
    assert "run: 60 steps done" in output.splitlines()[-1]


def test_two_runs_cannot_have_one_folder(tmp_path, capsys):
    many = {"total_num_train_samples": 8 * 2000}
    process = start(arguments(tmp_path / "run", **many))
    wait_for((tmp_path / "run" / "metrics.jsonl").exists, process)
    assert main(arguments(tmp_path / "run", **many)) == 4
    assert "another process is at work in it" in capsys.readouterr().err
    assert process.poll() is None
    process.kill()
    process.communicate()


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


def test_a_finished_run_changes_nothing(complete, capsys):
    before = {path: path.stat().st_mtime_ns for path in complete.rglob("*.safetensors")}
    pretrain(complete)
    assert f"all {STEPS} steps are done" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in complete.rglob("*.safetensors")} == before


def test_replicas_and_accumulation_are_the_same_run(complete, tmp_path):
    """One replica of two micro-batches reads, masks and drops the same as two of one."""
    pretrain(tmp_path / "run", global_batch__replicas=2, global_batch__grad_acc_steps_per_replica=1)
    assert_same_bytes(tmp_path / "run", complete)


def test_a_resumed_run_may_change_settings_that_do_not_change_numbers(complete, tmp_path):
    shutil.copytree(complete / "step_00000003", tmp_path / "run" / "step_00000003")
    pretrain(tmp_path / "run", log_every_steps=3, keep_checkpoints=1)
    assert_same_bytes(tmp_path / "run", complete)
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == [f"step_{STEPS:08d}"]


def test_a_run_of_version_0_1_reports_the_changed_end_of_the_learning_rate(
    complete, tmp_path, capsys
):
    shutil.copytree(complete / "step_00000005", tmp_path / "run" / "step_00000005")
    state = tmp_path / "run" / "step_00000005" / STATE
    record = json.loads(state.read_text())
    for version in ("0.1.0", "0.2.0"):
        record["versions"]["bert_cli"] = version
        state.write_text(json.dumps(record))
        pretrain(tmp_path / "run", dry_run=None)
        text = f"it was saved by {version}, and the learning rate falls to 1e-7 on the last step since 0.2.0"
        assert (text in capsys.readouterr().out) == (version == "0.1.0")


def test_a_resumed_run_may_not_change_its_numbers(complete, capsys):
    assert main(arguments(complete, seed=7, bert_config__hidden_dropout_prob=0.3)) == 4
    error = capsys.readouterr().err
    assert "seed was 1984, is 7" in error
    assert "bert_config.hidden_dropout_prob was 0.1, is 0.3" in error
    assert "--pretrained-ckpt-path" in error
    # The run is unchanged.
    assert json.loads((complete / "settings.json").read_text())["seed"] == 1984
    # Dropout is drawn for a complete micro-batch.
    other = {"global_batch.micro_batch_size": 8, "global_batch.grad_acc_steps_per_replica": 1}
    assert main(arguments(complete, **other)) == 4
    assert "micro_batch_size was 4, is 8" in capsys.readouterr().err


def test_phase_two_starts_from_the_weights_of_phase_one_with_a_fresh_optimizer(
    complete, tmp_path, capsys
):
    longer = {"max_seq_length": 24, "max_predictions_per_seq": 4}
    pretrain(tmp_path / "run", pretrained_ckpt_path=complete, **longer)
    output = capsys.readouterr().out
    assert (
        f"starts from the weights in {complete / f'step_{STEPS:08d}'} with a fresh optimizer"
        in output
    )
    # One of five steps is warm-up: the rate of the first step is 1e-7.
    from safetensors.numpy import load_file

    start = load_file(complete / f"step_{STEPS:08d}" / MODEL)
    after = load_file(tmp_path / "run" / "step_00000001" / MODEL)
    assert start.keys() == after.keys()
    assert max(abs(start[name] - after[name]).max() for name in start) < 1e-6
    moments = load_file(tmp_path / "run" / "step_00000001" / OPTIMIZER)
    longer_trained = load_file(complete / f"step_{STEPS:08d}" / OPTIMIZER)
    name = "emb/word/embeddings/moment2"
    assert 0 < moments[name].sum() < longer_trained[name].sum()
    assert json.loads((tmp_path / "run" / "step_00000001" / STATE).read_text())["step"] == 1


def test_initial_weights_of_another_model_or_absent_ones_are_an_error(complete, tmp_path, capsys):
    other = {"bert_config__intermediate_size": 64, "pretrained_ckpt_path": complete}
    assert main(arguments(tmp_path / "run", **other)) == 4
    assert "intermediate_size" in capsys.readouterr().err
    assert main(arguments(tmp_path / "run", pretrained_ckpt_path=tmp_path / "none")) == 4
    assert "is no folder" in capsys.readouterr().err


def test_a_dry_run_prints_settings_plan_and_two_steps_and_saves_nothing(tmp_path, capsys):
    assert main([*arguments(tmp_path / "run"), "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert (
        "global_batch.micro_batch_size" in output and "(--global-batch.micro-batch-size)" in output
    )
    assert f"{STEPS} steps of 8 examples" in output
    assert output.count("\nstep ") == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flag", ["--dry-run", "--compile-only"])
def test_weights_that_cannot_be_read_are_named_without_a_real_start(
    flag, complete, tmp_path, capsys
):
    model = tmp_path / "model"
    shutil.copytree(complete_checkpoints(complete)[0], model)
    (model / "model.safetensors").write_bytes(b"cut")
    words = [*arguments(tmp_path / "run"), "--pretrained-ckpt-path", str(model), flag]
    assert main(words) == 4
    told = capsys.readouterr()
    assert f"{model / 'model.safetensors'}: cannot be read" in told.err
    assert "compiled in" not in told.out and "\nstep " not in told.out
    assert not (tmp_path / "run").exists()


def test_compile_only_trains_nothing(tmp_path, capsys):
    assert main([*arguments(tmp_path / "run"), "--compile-only"]) == 0
    output = capsys.readouterr().out
    assert "compiled in" in output and "\nstep " not in output
    assert not (tmp_path / "run").exists()


def test_a_mistake_is_one_message_and_an_exit_code(tmp_path, capsys):
    for changes, code, message in (
        ({"generated-dataset": False}, 2, "dataset_dir: is missing"),
        ({"generated-dataset": False, "dataset-dir": "/nowhere"}, 3, "/nowhere"),
        ({"precision": "float8"}, 2, "precision (--precision): got 'float8'"),
    ):
        assert main(arguments(tmp_path / "run", **changes)) == code
        error = capsys.readouterr().err
        assert error.startswith("bert: ") and message in error
        assert not (tmp_path / "run").exists()
    words = arguments(tmp_path)
    del words[1:3]
    assert main(words) == 2
    assert "save_ckpt_path: is not given" in capsys.readouterr().err
    assert sorted(kind.exit_code for kind in BertError.__subclasses__()) == [2, 3, 4, 5]


def test_metrics_have_the_documented_keys(complete):
    documented = {
        "step", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy", "learning_rate", "gradient_norm",
        "weight_norm", "loss_scale", "skipped", "examples_per_second", "tokens_per_second", "seconds_left",
    }  # fmt: skip
    lines = (complete / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == STEPS
    assert documented <= set(json.loads(lines[0]))


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, capsys):
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert main(arguments(blocker / "run")) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["file"]
