"""Runs as a person has them: stopped, killed and resumed, bit for bit, from start to end."""

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
from pathlib import Path

import pytest

from bert_cli.cli import main
from bert_cli.errors import BertError
from bert_cli.train.checkpoint import MODEL, OPTIMIZER, STATE, whole_checkpoints

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
    """What a run logged, without what depends on the clock."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name not in TIMES}
        for line in lines
    ]


def assert_same_bytes(a: Path, b: Path) -> None:
    """The newest checkpoints of two runs hold the same weights, moments and loss scale."""
    left, right = whole_checkpoints(a)[-1], whole_checkpoints(b)[-1]
    assert left.name == right.name
    for name in (MODEL, OPTIMIZER):
        assert (left / name).read_bytes() == (right / name).read_bytes(), name
    states = [json.loads((path / STATE).read_text()) for path in (left, right)]
    assert states[0]["loss_scale"] == states[1]["loss_scale"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run with a checkpoint at every step."""
    folder = tmp_path_factory.mktemp("whole") / "run"
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
    assert len(whole_checkpoints(reference)) == STEPS
    # Any step in float32; where another precision differs from it a step in the middle shows.
    for step in range(1, STEPS) if not changes else (3,):
        resumed = tmp_path / f"from_{step}"
        resumed.mkdir()
        shutil.copyfile(reference / "metrics.jsonl", resumed / "metrics.jsonl")
        name = f"step_{step:08d}"
        shutil.copytree(reference / name, resumed / name)
        pretrain(resumed, **changes)
        assert_same_bytes(resumed, reference)
        assert metrics(resumed) == metrics(reference)


def test_a_run_whose_gradients_overflow_resumes_bit_for_bit_too(tmp_path):
    """The dynamic scale is halved at each bad step: all of its state has to come back."""
    changes = {"precision": "float16", "optimizer_opts__loss_scaling": "dynamic"}
    reference = tmp_path / "reference"
    # Weights of that size overflow float16 at the scale a run begins with.
    changes |= {"bert_config__initializer_range": 2.0, "total_num_train_samples": 8 * 12}
    pretrain(reference, **changes)
    skipped = [line["skipped"] for line in metrics(reference)]
    scales = [line["loss_scale"] for line in metrics(reference)]
    assert 0 < skipped[-1] < len(skipped)
    assert len(set(scales)) > 1
    for step in (1, skipped[-1] + 1):
        resumed = tmp_path / f"from_{step}"
        name = f"step_{step:08d}"
        shutil.copytree(reference / name, resumed / name)
        shutil.copyfile(reference / "metrics.jsonl", resumed / "metrics.jsonl")
        pretrain(resumed, **changes)
        assert_same_bytes(resumed, reference)
        assert metrics(resumed) == metrics(reference)


def start(words: list[str]) -> subprocess.Popen:
    """The command in a process of its own, as a person starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "bert_cli", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )  # fmt: skip


def wait_for(condition, process: subprocess.Popen, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until, "did not get that far"
        time.sleep(0.005)


def test_a_run_killed_at_any_moment_resumes_as_if_nothing_had_been(tmp_path):
    many = {"total_num_train_samples": 8 * 60}
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    pretrain(reference, **many)
    for kills, steps in enumerate((3, 20, 41)):
        process = start(arguments(killed, **many))
        wait_for(lambda steps=steps: (killed / f"step_{steps:08d}").exists(), process)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, kills
        assert len(whole_checkpoints(killed)) < 60
    pretrain(killed, **many)
    assert_same_bytes(killed, reference)
    assert metrics(killed) == metrics(reference)
    assert not list(killed.glob(".partial*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_asked_to_stop_saves_exits_0_and_goes_on_where_it_was(number, tmp_path):
    many = {"total_num_train_samples": 8 * 2000, "checkpoint_every_steps": 100_000}
    process = start(arguments(tmp_path / "run", **many))
    wait_for((tmp_path / "run" / "metrics.jsonl").exists, process)
    process.send_signal(number)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert "and saved; the same command continues" in told
    (checkpoint,) = whole_checkpoints(tmp_path / "run")
    step = json.loads((checkpoint / STATE).read_text())["step"]
    assert 0 < step < 2000
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, step + 1))
    again = start([*arguments(tmp_path / "run", **many), "--dry-run"])
    told, _ = again.communicate(timeout=120)
    assert f"continues from {checkpoint} (step {step:,})" in told
    assert f"dry run ended at step {step + 2:,}" in told


def test_a_terminal_that_is_gone_does_not_end_a_run(tmp_path):
    words = " ".join(arguments(tmp_path / "run"))
    code = f"{sys.executable} -m bert_cli {words} | head -1; exit ${{PIPESTATUS[0]}}"
    assert subprocess.run(["bash", "-c", code], capture_output=True).returncode == 0
    assert whole_checkpoints(tmp_path / "run")[-1].name == f"step_{STEPS:08d}"
    assert len(metrics(tmp_path / "run")) == STEPS


def on_a_terminal(words: list[str]) -> str:
    """What a command writes to a terminal."""
    ours, its = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen(
        [sys.executable, "-m", "bert_cli", *words], stdout=its, stderr=its, env=environment
    )
    os.close(its)
    told = b""
    # The terminal's other end is an error once it is closed, and not the end of a file.
    with open(ours, "rb", buffering=0) as terminal, suppress(OSError):
        while part := terminal.read(65536):
            told += part
    assert process.wait() == 0, told
    return told.decode()


@pytest.mark.parametrize("changes", [{}, {"log_every_steps": 2}], ids=["not asked", "every 2"])
def test_on_a_terminal_lines_are_printed_where_they_are_asked_for_above_the_foot(changes, tmp_path):
    many = {"total_num_train_samples": 8 * 60, "checkpoint_every_steps": False}
    told = on_a_terminal(arguments(tmp_path / "run", **many, **changes))
    assert f"run: writes into {tmp_path / 'run'}: checkpoints step_*/, metrics.jsonl" in told
    assert " % " in told and "/60 " in told and told.count("examples/s") > 0
    lines = re.findall(r"step +(\d+)/60  mlm .* tokens/s", told)
    assert lines == ([] if not changes else ["1", *map(str, range(2, 61, 2))])
    assert "run: 60 steps done" in told.splitlines()[-1]


def test_two_runs_cannot_share_a_folder(tmp_path, capsys):
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
    time.sleep(5.0)
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    told, _ = process.communicate(timeout=60)
    assert time.monotonic() - asked < 15
    assert process.returncode == 0, told
    assert "stopped at step 0 and saved" in told


def test_a_finished_run_says_so_and_changes_nothing(whole, capsys):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*.safetensors")}
    pretrain(whole)
    assert f"all {STEPS} steps are done" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*.safetensors")} == before


def test_replicas_and_accumulation_are_the_same_run(whole, tmp_path):
    """One replica of two micro-batches and two of one read, mask and drop the same."""
    pretrain(tmp_path / "run", global_batch__replicas=2, global_batch__grad_acc_steps_per_replica=1)
    assert_same_bytes(tmp_path / "run", whole)


def test_a_resumed_run_may_change_what_does_not_change_numbers(whole, tmp_path):
    shutil.copytree(whole / "step_00000003", tmp_path / "run" / "step_00000003")
    pretrain(tmp_path / "run", log_every_steps=3, keep_checkpoints=1)
    assert_same_bytes(tmp_path / "run", whole)
    assert [path.name for path in whole_checkpoints(tmp_path / "run")] == [f"step_{STEPS:08d}"]


@pytest.mark.parametrize("saved_by", ["0.1.0", "0.2.0"])
def test_a_run_that_began_with_another_fall_of_the_learning_rate_says_so(
    saved_by, whole, tmp_path, capsys
):
    shutil.copytree(whole / "step_00000005", tmp_path / "run" / "step_00000005")
    state = tmp_path / "run" / "step_00000005" / STATE
    found = json.loads(state.read_text())
    found["versions"]["bert_cli"] = saved_by
    state.write_text(json.dumps(found))
    pretrain(tmp_path / "run", dry_run=None)
    told = f"it was saved by {saved_by}, and the learning rate falls to 1e-7 on the last step since 0.2.0"
    assert (told in capsys.readouterr().out) == (saved_by == "0.1.0")


def test_a_resumed_run_may_not_change_its_numbers(whole, capsys):
    assert main(arguments(whole, seed=7, bert_config__hidden_dropout_prob=0.3)) == 4
    told = capsys.readouterr().err
    assert "seed was 1984, is 7" in told
    assert "bert_config.hidden_dropout_prob was 0.1, is 0.3" in told
    assert "--pretrained-ckpt-path" in told
    # The refused start has left the run as it was.
    assert json.loads((whole / "settings.json").read_text())["seed"] == 1984


def test_a_resumed_run_may_not_cut_its_steps_into_other_micro_batches(whole, capsys):
    """A micro-batch's dropout is drawn as a whole."""
    other = {"global_batch.micro_batch_size": 8, "global_batch.grad_acc_steps_per_replica": 1}
    assert main(arguments(whole, **other)) == 4
    assert "micro_batch_size was 4, is 8" in capsys.readouterr().err


def test_phase_two_starts_from_the_weights_of_phase_one_with_a_fresh_optimizer(
    whole, tmp_path, capsys
):
    longer = {"max_seq_length": 24, "max_predictions_per_seq": 4}
    pretrain(tmp_path / "run", pretrained_ckpt_path=whole, **longer)
    told = capsys.readouterr().out
    assert (
        f"starts from the weights in {whole / f'step_{STEPS:08d}'} with a fresh optimizer" in told
    )
    # One of five steps is warm-up: the first step's rate is the floor of 1e-7 and moves next to nothing.
    from safetensors.numpy import load_file

    start = load_file(whole / f"step_{STEPS:08d}" / MODEL)
    after = load_file(tmp_path / "run" / "step_00000001" / MODEL)
    assert start.keys() == after.keys()
    assert max(abs(start[name] - after[name]).max() for name in start) < 1e-6
    moments = load_file(tmp_path / "run" / "step_00000001" / OPTIMIZER)
    longer_trained = load_file(whole / f"step_{STEPS:08d}" / OPTIMIZER)
    name = "emb/word/embeddings/moment2"
    assert 0 < moments[name].sum() < longer_trained[name].sum()
    assert json.loads((tmp_path / "run" / "step_00000001" / STATE).read_text())["step"] == 1


def test_weights_of_another_model_are_refused_with_the_difference(whole, tmp_path, capsys):
    other = {"bert_config__intermediate_size": 64, "pretrained_ckpt_path": whole}
    assert main(arguments(tmp_path / "run", **other)) == 4
    assert "intermediate_size" in capsys.readouterr().err


def test_a_start_that_does_not_exist_is_refused(tmp_path, capsys):
    assert main(arguments(tmp_path / "run", pretrained_ckpt_path=tmp_path / "none")) == 4
    assert "is no folder" in capsys.readouterr().err


def test_a_dry_run_shows_settings_with_origins_the_plan_and_two_steps_and_saves_nothing(
    tmp_path, capsys
):
    assert main([*arguments(tmp_path / "run"), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "global_batch.micro_batch_size" in told and "(--global-batch.micro-batch-size)" in told
    assert f"{STEPS} steps of 8 examples" in told
    assert told.count("\nstep ") == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flag", ["--dry-run", "--compile-only"])
def test_weights_that_cannot_be_read_are_named_before_the_real_start(flag, whole, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(whole_checkpoints(whole)[0], model)
    (model / "model.safetensors").write_bytes(b"cut")
    words = [*arguments(tmp_path / "run"), "--pretrained-ckpt-path", str(model), flag]
    assert main(words) == 4
    told = capsys.readouterr()
    assert f"{model / 'model.safetensors'}: cannot be read" in told.err
    assert "compiled in" not in told.out and "\nstep " not in told.out
    assert not (tmp_path / "run").exists()


def test_compile_only_trains_nothing(tmp_path, capsys):
    assert main([*arguments(tmp_path / "run"), "--compile-only"]) == 0
    told = capsys.readouterr().out
    assert "compiled in" in told
    assert "\nstep " not in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "code", "told"),
    [
        ({"generated-dataset": False}, 2, "dataset_dir: is not given"),
        ({"generated-dataset": False, "dataset-dir": "/nowhere"}, 3, "/nowhere"),
        ({"precision": "float8"}, 2, "precision (--precision): got 'float8'"),
    ],
)
def test_a_mistake_is_one_message_and_an_exit_code(changes, code, told, tmp_path, capsys):
    assert main(arguments(tmp_path / "run", **changes)) == code
    error = capsys.readouterr().err
    assert error.startswith("bert: ") and told in error
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_folder_is_refused(tmp_path, capsys):
    words = arguments(tmp_path)
    del words[1:3]
    assert main(words) == 2
    assert "save_ckpt_path: is not given" in capsys.readouterr().err


def test_every_kind_of_mistake_has_its_own_exit_code():
    codes = [kind.exit_code for kind in BertError.__subclasses__()]
    assert sorted(codes) == [2, 3, 4, 5]


def test_metrics_have_the_promised_keys(whole):
    promised = {
        "step", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy", "learning_rate", "gradient_norm",
        "weight_norm", "loss_scale", "skipped", "examples_per_second", "tokens_per_second", "seconds_left",
    }  # fmt: skip
    lines = (whole / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == STEPS
    assert promised <= set(json.loads(lines[0]))


def test_the_run_folder_cannot_be_written(tmp_path, capsys):
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert main(arguments(blocker / "run")) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["file"]
