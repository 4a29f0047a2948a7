"""What changes over a run: batch, masks, learning rate. Each resumes bit for bit."""

import numpy as np
import pytest
import tensorflow  # noqa: F401 (before the end of the collection, which sets its devices)
from support.runs import continues_bit_for_bit, run_command
from support.settings import plan_of, small_run
from support.tiny_models import PIECES, TINY_RUN, flags_of, metrics_of, write_model, write_records

from bert_cli.tasks.run import corpora

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
    "optimizer-opts.learning-rate.final-fraction": 0.1,
    "total-num-train-samples": 72,
}
"""A batch of 2, 4, 6 and then 8 examples, and a decay of the last steps."""


def write_corpora(folder):
    """Write a model, and two folders of records with its vocabulary; return these."""
    model = write_model(folder / "model")
    records = []
    for number in range(2):
        words = " ".join(["the", "good", "bad", "film"][number:])
        sentences = [f"{words} was very good, and a plot is fine {n}." for n in range(40)]
        records.append(write_records(folder / f"records{number}", sentences, model, 32))
    return records


def pretrain(folder, **changes):
    words = ["pretrain", "--save-ckpt-path", str(folder), *flags_of(CHANGING, **changes)]
    return run_command(words)


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """An uninterrupted run with all changes."""
    folder = tmp_path_factory.mktemp("changing") / "run"
    assert pretrain(folder) == 0
    return folder


@pytest.mark.slow
def test_a_run_with_all_changes_resumes_exactly_across_each(complete, capsys):
    lines = metrics_of(complete)
    assert [line["examples"] for line in lines] == [2] * 6 + [4] * 3 + [6] * 2 + [8] * 5
    rates = [line["learning_rate"] for line in lines]
    assert rates[5] == max(rates) and rates[-1] < rates[-2] < rates[-3] < max(rates)
    assert rates[-1] == pytest.approx(0.1 * max(rates))
    # The batch grows after step 9, and the learning rate decays from 12 on.
    continues_bit_for_bit(complete, pretrain, 8, 14)
    assert pretrain(complete, global_batch__growth_frac=0.7) != 0
    assert "step_sizes (of the growth of global_batch" in capsys.readouterr().err


def test_masks_of_a_mixture_follow_the_plan(tmp_path):
    records = write_corpora(tmp_path)
    settings = small_run(
        dataset_dir=[{"path": str(records[0])}, {"path": str(records[1]), "weight": 3}],
        max_seq_length=32,
        max_predictions_per_seq=16,
        masking={"start_probability": 0.5, "probability": 0.1},
        bert_config={"vocab_size": len(PIECES), "max_position_embeddings": 64},
        global_batch={"micro_batch_size": 8, "grad_acc_steps_per_replica": 4},
        total_num_train_samples=320,
    )
    stream, again = corpora.open_stream(settings), corpora.open_stream(settings)
    plan = plan_of(settings, stream.epoch_size, stream.sequences_per_example)
    assert plan.total_steps == 10
    stream.follow(plan)
    again.follow(plan)
    for step in reversed(range(plan.total_steps)):
        batch = stream[step]
        assert batch["input_ids"].shape == (4, 8, 32)
        tokens = batch["input_mask"].astype(bool).sum(-1)
        expected = np.rint(tokens * plan.mask_probability(step)).clip(1)
        np.testing.assert_array_equal(batch["masked_lm_weights"].sum(-1), expected)
        for name, column in again[step].items():
            np.testing.assert_array_equal(column, batch[name])
