"""The plan of a run: its number of steps and their sizes, constant or growing."""

from functools import partial

import pytest
from support.settings import RUN, merged, plan_of, small_run

from bert_cli.errors import ConfigError
from bert_cli.planning.plan import describe

EIGHT = {
    "max_seq_length": 64,
    "max_predictions_per_seq": 20,
    "global_batch": {"grad_acc_steps_per_replica": 8},
    "total_num_train_samples": 1000,
}
settings_of = partial(small_run, merged(RUN, EIGHT))


def assert_consecutive(plan):
    """Every micro-batch and every example of the run belongs to one step, in order."""
    micro_batch = example = 0
    for step in range(plan.total_steps):
        numbers, indices = plan.micro_batches(step), plan.sample_indices(step)
        assert numbers.start == micro_batch and indices.start == example
        assert len(indices) == len(numbers) * plan.micro_batch_size
        micro_batch, example = numbers.stop, indices.stop
    assert example == plan.examples


def test_a_plain_run_has_equal_steps():
    plan = plan_of(settings_of(), 500)
    assert plan.total_steps == 63 and plan.examples == 1008 and plan.step_sizes is None
    assert plan.sample_indices(5) == range(80, 96) and plan.micro_batches(5) == range(40, 48)
    assert_consecutive(plan)


def test_a_batch_grows_linearly_in_the_examples_that_were_read():
    plan = plan_of(settings_of(global_batch={"start_fraction": 0.25, "growth_frac": 0.6}), 500)
    sizes = [len(plan.micro_batches(step)) for step in range(plan.total_steps)]
    assert sizes == sorted(sizes) and sorted(set(sizes)) == [2, 3, 4, 5, 6, 7, 8]
    # Each of the six smaller sizes reads a sixth of 60 % of the examples, in complete steps.
    assert [2 * size * sizes.count(size) for size in range(2, 8)] == [100, 102, 104, 100, 96, 98]
    assert_consecutive(plan)
    assert 1000 <= plan.examples < 1016
    many = settings_of(global_batch={"start_fraction": 0.01, "grad_acc_steps_per_replica": 500})
    assert len(plan_of(many, 500).segments) <= 17


def test_the_fraction_of_masked_tokens_changes_linearly_from_the_first_to_the_last_step():
    plan = plan_of(settings_of(masking={"start_probability": 0.3, "probability": 0.15}), 500)
    values = [plan.mask_probability(step) for step in (0, 31, 62, 70)]
    assert values == pytest.approx([0.3, 0.225, 0.15, 0.15])
    assert plan_of(settings_of(), 500).mask_probability(3) is None


def test_the_fingerprint_of_the_steps_changes_with_their_sizes():
    growing = {"global_batch": {"start_fraction": 0.25}}
    plans = [plan_of(settings_of(**growing, total_num_train_samples=n), 500) for n in (1000, 2000)]
    assert len(plans[0].segments) == len(plans[1].segments)
    assert plans[0].step_sizes != plans[1].step_sizes


# --- the numbers of the original: 4 replicas of 510 micro-batches of 32

ORIGINAL = {
    "global_batch": {"micro_batch_size": 32, "replicas": 4, "grad_acc_steps_per_replica": 510},
    "optimizer_opts": {"learning_rate": {"max_learning_rate": 0.006, "warmup_frac": 0.28}},
}
planned = partial(small_run, merged(RUN, ORIGINAL))


def test_epochs_are_a_number_of_examples_that_the_records_decide():
    for epochs, records, sequences, samples in ((2.5, 130_560, 1.0, 326_400), (3, 1000, 2.5, 7500)):
        # Of a small batch: steps of 65,280 examples would not show the packs.
        plan = plan_of(small_run(num_epochs=epochs), records, sequences)
        assert plan == plan_of(small_run(total_num_train_samples=samples), records, sequences)
    assert plan_of(planned(num_epochs=0.001), 10).total_steps == 1
    with pytest.raises(ConfigError, match=r"num_epochs \(3\).*synthetic.*total-num-train-samples"):
        plan_of(planned(num_epochs=3), None)
    problem = "num_epochs: is not set, and neither is total_num_train_samples; set --num-epochs"
    with pytest.raises(ConfigError, match=problem):
        plan_of(planned(), 10**6)


def test_the_plan_describes_epochs_and_packs_scale_the_learning_rate():
    text = describe(plan_of(planned(total_num_train_samples=65_280), 130_560))
    assert "1 step of 65,280 examples" in text and "65,280 examples, 0.5 epochs of 130,560" in text
    rate = {"optimizer_opts": {"learning_rate": {"reference_batch_size": 1024}}}
    scaled = plan_of(planned(num_epochs=1, **rate), 1000, 2.5)
    assert scaled.peak_learning_rate == pytest.approx(0.006 * 2.5 * 65_280 / 1024)
    packs = describe(plan_of(small_run(num_epochs=1), 1000, 2.4))
    assert "500 steps of 2 packs, 5 sequences (1 micro-batch of 2)" in packs
    assert "1,000 packs, 1 epoch of 1,000" in packs
