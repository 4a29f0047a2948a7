"""The whole numbers of a run."""

import pytest

from bert_cli.config.training import PretrainSettings, describe, make_plan
from bert_cli.errors import ConfigError


def settings(**changes: object) -> PretrainSettings:
    return PretrainSettings.model_validate(
        {
            "max_seq_length": 128,
            "max_predictions_per_seq": 20,
            "global_batch": {
                "micro_batch_size": 32,
                "replicas": 4,
                "grad_acc_steps_per_replica": 510,
            },
            "optimizer_opts": {
                "name": "LAMB",
                "learning_rate": {"max_learning_rate": 0.006, "warmup_frac": 0.28},
            },
            **changes,
        }
    )


def test_phase_one_of_the_original_has_its_numbers():
    plan = make_plan(settings(), None)
    assert plan.examples_per_step == 65_280
    assert plan.total_steps == 7_060
    assert plan.warmup_steps == 1_976
    assert plan.micro_batches_per_step == 2_040


def test_phase_two_of_the_original_divides_evenly():
    batch = {"micro_batch_size": 8, "replicas": 4, "grad_acc_steps_per_replica": 510}
    plan = make_plan(settings(max_seq_length=384, global_batch=batch), None)
    assert (plan.total_steps, plan.examples) == (2_098, 34_239_360)


def test_samples_are_rounded_up_to_whole_steps_never_down():
    plan = make_plan(settings(total_num_train_samples=65_281), None)
    assert plan.total_steps == 2
    assert plan.examples == 130_560


def test_the_same_product_of_replicas_and_accumulation_is_the_same_run():
    one = {"micro_batch_size": 32, "replicas": 1, "grad_acc_steps_per_replica": 2040}
    a, b = make_plan(settings(), 10**6), make_plan(settings(global_batch=one), 10**6)
    assert (a.total_steps, a.examples_per_step) == (b.total_steps, b.examples_per_step)


def test_the_linear_scaling_rule_multiplies_the_rate_by_the_batch():
    options = {
        "name": "AdamW",
        "learning_rate": {"max_learning_rate": 1e-4, "reference_batch_size": 256},
    }
    plan = make_plan(settings(optimizer_opts=options), None)
    assert plan.peak_learning_rate == pytest.approx(1e-4 * 65_280 / 256)


def test_a_length_without_a_default_number_of_examples_is_refused():
    config = {"max_position_embeddings": 1024}
    with pytest.raises(ConfigError, match="total-num-train-samples"):
        make_plan(settings(max_seq_length=1024, bert_config=config), None)


def test_the_plan_says_how_often_the_corpus_is_read():
    text = describe(make_plan(settings(total_num_train_samples=65_280), 130_560))
    assert "1 step of 65,280 examples" in text
    assert "(0.5 epochs)" in text
    assert "(2,040 micro-batches of 32)" in text
    one = {"micro_batch_size": 32, "replicas": 1, "grad_acc_steps_per_replica": 1}
    assert "2,040 steps of 32 examples (1 micro-batch of 32)" in describe(
        make_plan(settings(total_num_train_samples=65_280, global_batch=one), 130_560)
    )


def test_a_plan_of_packs_says_that_the_batch_has_grown():
    packed = make_plan(settings(), 1000, 2.5)
    assert "a pack holds 2.50 sequences" in describe(packed)
    rate = {"max_learning_rate": 0.006, "reference_batch_size": 1024}
    scaled = make_plan(settings(optimizer_opts={"name": "LAMB", "learning_rate": rate}), 1000, 2.5)
    wanted = 0.006 * 2.5 * scaled.examples_per_step / 1024
    assert scaled.peak_learning_rate == pytest.approx(wanted)
    assert "a pack holds" not in describe(scaled)
    assert "a pack holds" not in describe(make_plan(settings(), 1000))
