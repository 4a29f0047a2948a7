"""Pre-training from start to end: stopped, killed and resumed, bit for bit; the shipped layouts."""

import json
import re
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorflow  # noqa: F401 (before the end of the collection, which sets its devices)
from safetensors.numpy import load_file
from support.bert import start_bert
from support.processes import wait_for
from support.runs import assert_same_end, continues_bit_for_bit, numbers_of
from support.settings import plan_of, small_run
from support.tiny_models import TINY_RUN, flags_of, metrics_of

from bert_cli.cli import main
from bert_cli.files import STATE
from bert_cli.parallel.engine import Engine
from bert_cli.planning import layout
from bert_cli.tasks.run import train
from bert_cli.train.checkpoint import MODEL, OPTIMIZER, complete_checkpoints

STEPS = 20
FLAGS = {
    **TINY_RUN,
    "global-batch.micro-batch-size": 4,
    "global-batch.grad-acc-steps-per-replica": 2,
    "optimizer-opts.learning-rate.warmup-frac": 0.2,
    "total-num-train-samples": 8 * STEPS,
    "checkpoint-every-steps": 1,
    # Weights of that size overflow float16 at the initial scale: steps are skipped, and the scale is halved.
    "precision": "float16",
    "optimizer-opts.loss-scaling": "dynamic",
    "bert-config.initializer-range": 2.0,
}
# Changes that leave these flags out.
DEFAULTS = {
    "precision": False,
    "optimizer_opts__loss_scaling": False,
    "bert_config__initializer_range": False,
}


def arguments(folder: Path, **changes: object) -> list[str]:
    """The command line of a small run; a change to False leaves a flag out."""
    return ["pretrain", "--save-ckpt-path", str(folder), *flags_of(FLAGS, **changes)]


def pretrain(folder: Path, **changes: object) -> None:
    assert main(arguments(folder, **changes)) == 0


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    folder = tmp_path_factory.mktemp("complete") / "run"
    pretrain(folder)
    return folder


PRECISIONS = [
    DEFAULTS | {"precision": "mixed_bfloat16", "parallel__recompute": None, "optimizer_opts__name": "AdamW"},
    {"precision": "mixed_float16", "bert_config__initializer_range": False},
    {
        "optimizer_opts__loss_scaling": 64,
        "optimizer_opts__stochastic_rounding": None,
        "bert_config__initializer_range": False,
    },
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("changes", PRECISIONS)
def test_a_run_of_another_precision_resumes_bit_for_bit(changes, tmp_path):
    reference, changes = tmp_path / "reference", changes | {"total_num_train_samples": 8 * 12}
    pretrain(reference, **changes)
    skipped = metrics_of(reference)[-1]["skipped"]
    continues_bit_for_bit(reference, lambda run: main(arguments(run, **changes)), skipped + 1)


@pytest.fixture
def start():
    started = []

    def start_run(folder: Path, **changes: object):
        words = arguments(folder, **changes)
        started.append(start_bert(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        return started[-1]

    yield start_run
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_run_killed_at_any_moment_resumes_bit_for_bit(complete, tmp_path, start):
    """At the kill the scale, the weights and the moments have left their initial values: all have to be restored."""
    first = next(line["step"] for line in metrics_of(complete) if line["skipped"] < line["step"])
    assert len({line["loss_scale"] for line in metrics_of(complete)[:first]}) > 1
    process = start(tmp_path)
    # A reader of its output that ends, as of `| head`, does not end the run.
    process.stdout.readline()
    process.stdout.close()
    wait_for((tmp_path / f"step_{first + 1:08d}").exists, [process])
    process.kill()
    assert process.wait() == -signal.SIGKILL
    kept = complete_checkpoints(tmp_path)
    assert len(kept) < STEPS == len(complete_checkpoints(complete))
    assert all(moment.any() for moment in load_file(kept[-1] / OPTIMIZER).values())
    # Settings that do not change numbers may change.
    pretrain(tmp_path, log_every_steps=3, keep_checkpoints=1, keep_every_steps=STEPS - 1)
    assert_same_end(tmp_path, complete)
    assert numbers_of(tmp_path) == numbers_of(complete)
    names = [path.name for path in complete_checkpoints(tmp_path)]
    assert names == [f"step_{step:08d}" for step in (STEPS - 1, STEPS)]
    assert not list(tmp_path.glob(".partial*"))


def test_a_stop_request_saves_and_no_other_run_has_the_folder(tmp_path, start, bert, monkeypatch):
    run = tmp_path / "run"
    many = {"total_num_train_samples": 8 * 20_000, "checkpoint_every_steps": 100_000}
    process = start(run, **many)
    wait_for((run / "metrics.jsonl").exists, [process])
    assert "another process is using it" in bert(*arguments(run, **many), code=4).err
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate()
    assert process.returncode == 0, text
    assert "and saved; the same command continues" in text
    (checkpoint,) = complete_checkpoints(run)
    step = json.loads((checkpoint / STATE).read_text())["step"]
    assert 0 < step < 20_000
    assert [line["step"] for line in metrics_of(run)] == list(range(1, step + 1))
    ends = []
    monkeypatch.setattr(train, "_train", lambda run, end, *_: not ends.append(end))
    text = bert(*arguments(run, **many, dry_run=None)).out
    assert f"continues from {checkpoint} (step {step:,})" in text
    assert ends == [step + 2]


@pytest.mark.slow
def test_a_run_continues_with_the_micro_batch_that_it_chose(
    complete, tmp_path, monkeypatch, capsys
):
    auto = {"global_batch__micro_batch_size": "auto", "global_batch__examples_per_step": 8}
    auto |= {"global_batch__grad_acc_steps_per_replica": False}
    monkeypatch.setattr(layout, "CPU_POSITIONS", 4 * 16)
    pretrain(tmp_path / "run", **auto)
    assert "micro-batch 4: chosen for 1 x CPU" in capsys.readouterr().out
    assert_same_end(tmp_path / "run", complete)
    monkeypatch.setattr(layout, "CPU_POSITIONS", 8 * 16)
    continues_bit_for_bit(complete, lambda run: main(arguments(run, **auto)), 18)


def test_a_run_says_how_long_it_will_take_before_the_end_of_a_long_step(tmp_path, capsys):
    long = {"global_batch__grad_acc_steps_per_replica": 15, "total_num_train_samples": 10**12}
    pretrain(tmp_path, **long, dry_run=None)
    plan, after = capsys.readouterr().out.split("pace: ")
    assert "step 1/2" not in plan and "step 1/2" in after
    assert "simulated on the CPU" not in plan and "processes from" not in plan
    assert "tracing is part of the first step" in plan
    assert "dry run: two complete steps, 15 micro-batches of each replica" in plan
    pace = r"[\d,.]+ to [\d,.]+ examples/s on this machine, so [\d,]+ d .* for 16,666,666,667 steps"
    assert re.match(pace, after)
    assert "warning: the run takes" in after


def test_a_continued_run_says_how_long_its_remaining_steps_take(capsys):
    # The batch grows from 1 to 4 micro-batches; of all 36, the last 2 steps have 8.
    batch = {"micro_batch_size": 2, "grad_acc_steps_per_replica": 4, "start_fraction": 0.25}
    plan = plan_of(small_run(global_batch=batch, total_num_train_samples=72), None)
    job = SimpleNamespace(plan=plan, evaluate=None)
    state = SimpleNamespace(step=plan.total_steps - 2)
    train._forecast(SimpleNamespace(job=job, state=state)).report(1.0, 2.0)
    assert "so 8 s to 16 s for 2 steps that are left" in capsys.readouterr().out


def test_a_run_scores_the_model_that_it_trains_further_once(monkeypatch):
    scored: list[int] = []
    monkeypatch.setattr(train, "_evaluate", lambda _, info: scored.append(info.step))
    monkeypatch.setattr(train, "_write_score", lambda *_: None)
    task = SimpleNamespace(best=None)
    order = SimpleNamespace(pretrained_ckpt_path="model")
    job = SimpleNamespace(task=task, order=order, evaluate=True)
    for step in (0, 3):
        state = SimpleNamespace(step=step)
        train._score_start(SimpleNamespace(job=job, state=state, is_first_rank=True))
    assert scored == [0]


def test_a_stop_in_the_middle_of_a_long_step_does_not_wait_for_its_end(tmp_path, start):
    # 20,000 micro-batches of 2 ms or more: the signal comes long before the end of the first step.
    long = {"global_batch__grad_acc_steps_per_replica": 20_000, "total_num_train_samples": 80_000}
    process = start(tmp_path / "run", **long)
    while not process.stdout.readline().startswith("built in"):
        assert process.poll() is None
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate()
    assert process.returncode == 0, text
    assert "stopped at step 0 and saved" in text


def test_a_dry_run_has_a_progress_bar_and_saves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    done, update = [], Engine.update

    def first_update(*of):
        """Return what the first update returned: tracing takes 3 s."""
        if not done:
            done.append(update(*of))
        return done[0]

    monkeypatch.setattr(Engine, "update", first_update)
    for changes, lines in (({}, []), ({"log_every_steps": 2}, ["1", "2"])):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", StringIO())
            patch.setattr(sys.stdout, "isatty", lambda: True)
            pretrain(Path("/dev/null/run"), dry_run=None, **changes)  # a folder that cannot be made
            output = sys.stdout.getvalue()
        assert " % " in output and "/2 " in output and "examples/s" in output
        assert re.findall(r"step +(\d+)/2  mlm .* tokens/s", output) == lines
        assert re.search("run: dry run ended at step 2 after .*; nothing was saved\n$", output)
    assert "global_batch.micro_batch_size" in output
    assert "(--global-batch.micro-batch-size)" in output
    assert f"{STEPS} steps of 8 examples" in output
    assert main(arguments(tmp_path / "run", compile_only=None)) == 2
    assert "(--compile-only): a run does not only compile; --dry-run" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["tensorflow", "jax"])
def test_a_run_that_requires_a_gpu_stops_on_a_machine_without(tmp_path, bert, capsys, engine):
    error = bert(*arguments(tmp_path / "run", engine=engine, require_gpu=None), code=5).err
    assert f"engine {engine} finds neither a GPU nor a TPU; check nvidia-smi" in error
    assert not (tmp_path / "run").exists()
    assert main(["doctor", "--engine", engine, "--require-gpu"]) == 5
    assert f"engine {engine} finds neither" in capsys.readouterr().out


def test_a_finished_run_changes_nothing(complete, capsys):
    before = {path: path.stat().st_mtime_ns for path in complete.rglob("*.safetensors")}
    pretrain(complete)
    assert f"all {STEPS} steps are done" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in complete.rglob("*.safetensors")} == before
    documented = {
        "step", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy", "learning_rate", "gradient_norm", "weight_norm"
    }  # fmt: skip
    assert len(metrics_of(complete)) == STEPS and documented <= set(metrics_of(complete)[0])


def test_phase_two_has_the_weights_and_a_fresh_optimizer(complete, tmp_path, capsys):
    longer = {"max_seq_length": 24, "max_predictions_per_seq": 4, "total_num_train_samples": 40}
    pretrain(tmp_path / "run", pretrained_ckpt_path=complete, **DEFAULTS | longer)
    last, first = complete / f"step_{STEPS:08d}", tmp_path / "run" / "step_00000001"
    assert f"starts from the weights in {last}; the optimizer is new" in capsys.readouterr().out
    # One of five steps is warm-up: the rate of the first step is 1e-7.
    before, after = load_file(last / MODEL), load_file(first / MODEL)
    assert before.keys() == after.keys()
    assert max(abs(before[name] - after[name]).max() for name in before) < 1e-6
    name = "emb/word/embeddings/moment2"
    moments, longer_trained = load_file(first / OPTIMIZER), load_file(last / OPTIMIZER)
    assert 0 < moments[name].sum() < longer_trained[name].sum()
    assert json.loads((first / STATE).read_text())["step"] == 1


# --- the layouts of the shipped configs, on a narrow model

NARROW = {
    **TINY_RUN,
    "bert-config.num-hidden-layers": False,  # as the config says
    "global-batch.replicas": 1,
    "global-batch.grad-acc-steps-per-replica": 8,
    "dry-run": None,
}


SLOW = pytest.param("base_128_phase1", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["tiny_128_phase1", SLOW])
def test_a_shipped_layout_runs(name, bert):
    output = bert("pretrain", "--config", f"pretrain_{name}", *flags_of(NARROW)).out
    assert len(re.findall(r"\nstep \d+/", output)) == 2
    # The description of its stages, and micro-batches that pass through them.
    assert "device 0: emb" in output and "devices are idle for" in output
