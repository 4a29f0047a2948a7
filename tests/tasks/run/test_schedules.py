"""What changes over a run: batch, masks, sequence lengths, learning rate. Each resumes bit for bit."""

import itertools
import json
import shutil
import subprocess
import sys

import pytest
from support.tiny_models import TINY_RUN, flags_of, metrics_of

from bert_cli.cli import main
from bert_cli.tasks.run import budget
from bert_cli.train.checkpoint import MODEL, OPTIMIZER, complete_checkpoints

STAGES = [{"max_seq_length": 24, "max_predictions_per_seq": 8, "total_num_train_samples": 24}]
CHANGING = {
    **TINY_RUN,
    "max-predictions-per-seq": 6,
    "checkpoint-every-steps": 1,
    "global-batch.grad-acc-steps-per-replica": 4,
    "global-batch.start-fraction": 0.25,
    "masking.start-probability": 0.35,
    "optimizer-opts.learning-rate.schedule-name": "wsd",
    "optimizer-opts.learning-rate.warmup-frac": 0.1,
    "optimizer-opts.learning-rate.decay-frac": 0.3,
    "total-num-train-samples": 48,
    "stages": json.dumps(STAGES),
}
"""A batch of 2, 4, 6 and then 8 examples, a stage of longer ones, and a decay of the last steps."""


def pretrain(folder, flags=CHANGING, **changes):
    words = ["pretrain", "--save-ckpt-path", str(folder), *flags_of(flags, **changes)]
    if changes.get("engine") != "jax":
        return main(words)
    return subprocess.run([sys.executable, "-m", "bert_cli", *words], check=False).returncode


def assert_same_end(one, other):
    ends = [complete_checkpoints(folder)[-1] for folder in (one, other)]
    assert ends[0].name == ends[1].name
    for file in (MODEL, OPTIMIZER):
        assert (ends[0] / file).read_bytes() == (ends[1] / file).read_bytes()


def assert_resumes_exactly(whole, *steps, **changes):
    for step in steps:
        again = whole.with_name(f"again_{step}")
        shutil.copytree(whole, again)
        for folder in complete_checkpoints(again)[step:]:
            shutil.rmtree(folder)
        assert pretrain(again, **changes) == 0
        assert_same_end(whole, again)


def test_a_run_with_all_changes_resumes_exactly_across_each(tmp_path, capsys):
    whole = tmp_path / "whole"
    assert pretrain(whole) == 0
    lines = metrics_of(whole)
    assert [line["examples"] for line in lines] == [2] * 6 + [4] * 3 + [6] * 2 + [8] * 5
    rates = [line["learning_rate"] for line in lines]
    assert rates[5] == max(rates) and rates[-1] == 1e-7 and rates[-2] < rates[-3] < max(rates)
    # The batch grows after step 9, the learning rate decays from 12 on, and the lengths change after 13.
    assert_resumes_exactly(whole, 8, 12, 14)
    assert pretrain(whole, global_batch__growth_frac=0.7) != 0
    assert "step_sizes (of the growth of global_batch" in capsys.readouterr().err


@pytest.mark.slow
def test_jax_does_the_same_and_resumes_exactly_too(tmp_path):
    ours, theirs = tmp_path / "tensorflow", tmp_path / "jax"
    assert pretrain(ours) == pretrain(theirs, engine="jax") == 0
    losses = [[line["mlm_loss"] for line in metrics_of(run)] for run in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert_resumes_exactly(theirs, 8, engine="jax")


def test_a_finished_constant_run_can_be_decayed_from_any_step_as_a_new_run(tmp_path, capsys):
    flags = {**TINY_RUN, "checkpoint-every-steps": 1, "total-num-train-samples": 20}
    name = "optimizer-opts.learning-rate.schedule-name"
    constant, wsd, branch = (tmp_path / one for one in ("constant", "wsd", "branch"))
    assert pretrain(constant, flags | {name: "constant"}) == 0
    assert pretrain(wsd, flags | {name: "wsd", "optimizer-opts.learning-rate.decay-frac": 0.4}) == 0
    decayed = flags | {name: "constant", "pretrained-ckpt-path": constant, "decay-from": 6}
    assert pretrain(branch, decayed) == 0
    assert "with a decaying learning rate" in capsys.readouterr().out
    # The same bytes as of a run that was planned so.
    assert_same_end(wsd, branch)
    assert [line["step"] for line in metrics_of(branch)] == [7, 8, 9, 10]
    # A longer decay of the end, which is interrupted and continued.
    longer = decayed | {"decay-from": 10, "total-num-train-samples": 28}
    assert pretrain(tmp_path / "longer", longer) == 0
    shutil.copytree(tmp_path / "longer", tmp_path / "again")
    shutil.rmtree(complete_checkpoints(tmp_path / "again")[-1])
    assert pretrain(tmp_path / "again", longer) == 0
    assert_same_end(tmp_path / "longer", tmp_path / "again")
    for wrong, message in ({"decay-from": 3}, "there is no"), ({"seed": 3}, "seed was 1984, is 3"):
        shutil.rmtree(constant / "step_00000003", ignore_errors=True)
        assert pretrain(tmp_path / "wrong", decayed | wrong) != 0
        assert message in capsys.readouterr().err


def test_a_budget_of_hours_fixes_the_plan_from_the_pace_also_of_a_run_that_continues(
    tmp_path, monkeypatch, capsys
):
    # Each measured step of 4 examples takes 2 seconds, whatever its length.
    ticks = itertools.count(0, 2)
    monkeypatch.setattr(budget, "monotonic", lambda: float(next(ticks)))
    flags = {**TINY_RUN, "global-batch.micro-batch-size": 4, "checkpoint-every-steps": 1}
    flags |= {"total-num-train-samples": 300, "stages": json.dumps(STAGES), "budget-hours": 0.01}
    run = tmp_path / "run"
    assert pretrain(run, flags) == 0
    monkeypatch.undo()
    # 97 % of 36 s are 69.84 examples, of which stages have 300 and 24 of 324.
    samples = [int(69.84 * share / 324) for share in (300, 24)]
    assert json.loads((run / "budget.json").read_text()) == {"hours": 0.01, "samples": samples}
    assert len(metrics_of(run)) == 16 + 2
    shutil.copytree(run, tmp_path / "again")
    for folder in complete_checkpoints(tmp_path / "again")[9:]:
        shutil.rmtree(folder)
    assert pretrain(tmp_path / "again", flags) == 0
    assert_same_end(run, tmp_path / "again")
    assert capsys.readouterr().out.count("budget: measuring") == 1
    for hours, message in ((0.02, "was planned for 0.01"), (1e-9, "less than one fits")):
        folder = run if hours > 0.01 else tmp_path / "short"
        assert pretrain(folder, flags, budget_hours=hours) != 0
        assert message in capsys.readouterr().err
