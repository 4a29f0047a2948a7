"""What settings refuse when they contradict one another."""

import pytest
from pydantic import ValidationError

from bert_cli.config.training import PretrainSettings

SMALL = {
    "max_seq_length": 32,
    "max_predictions_per_seq": 5,
    "bert_config": {"num_hidden_layers": 2, "max_position_embeddings": 64},
    "global_batch": {"micro_batch_size": 2},
    "optimizer_opts": {"name": "LAMB", "learning_rate": {"max_learning_rate": 0.006}},
}


def refusal(**changes: object) -> str:
    with pytest.raises(ValidationError) as caught:
        PretrainSettings.model_validate({**SMALL, **changes})
    return str(caught.value)


def test_small_settings_are_valid():
    assert PretrainSettings.model_validate(SMALL).precision == "float32"


def test_settings_cannot_be_changed():
    with pytest.raises(ValidationError):
        PretrainSettings.model_validate(SMALL).seed = 3


def test_a_sequence_longer_than_the_model_is_refused():
    assert "max_position_embeddings (64)" in refusal(max_seq_length=65)


def test_more_predictions_than_tokens_are_refused():
    assert "max_predictions_per_seq (30)" in refusal(max_predictions_per_seq=30)


def test_stochastic_rounding_without_float16_weights_is_refused():
    options = {**SMALL["optimizer_opts"], "stochastic_rounding": True}
    assert "has no effect" in refusal(optimizer_opts=options)


def test_evaluation_steps_without_a_held_out_corpus_are_refused():
    assert "validation_dir" in refusal(evaluate_every_steps=5)


def test_heads_that_do_not_divide_the_width_are_refused():
    assert "num_attention_heads (5)" in refusal(
        bert_config={"hidden_size": 64, "num_attention_heads": 5}
    )


def layout(stages: list[list[str]], devices: list[int]) -> dict:
    return {"pipeline_stages": stages, "pipeline_device_mapping": devices}


def test_a_tied_word_table_on_two_devices_is_refused_with_the_two_places():
    stages = [["emb"], ["hid*2"], ["enc_out", "pool", "heads"]]
    text = refusal(parallel=layout(stages, [0, 1, 2]))
    assert 'stage 0 "emb" and stage 2 "heads" share the word table' in text
    assert "got 0 and 2" in text


@pytest.mark.parametrize(
    ("stages", "devices", "told"),
    [
        (
            [["emb", "hid*3", "enc_out", "pool", "heads"]],
            [0],
            "lists 3 layers (hid), the model has 2;",
        ),
        ([["emb", "hidden*2", "enc_out", "pool", "heads"]], [0], "hidden*2"),
        ([["hid*2", "emb", "enc_out", "pool", "heads"]], [0], "in another order; give"),
        ([["emb", "hid*2", "enc_out", "pool", "heads"]], [0, 1], "2 devices for 1 stages"),
        ([["emb"], ["hid*2", "enc_out", "pool", "heads"]], [1, 1], "leaves a device out"),
    ],
)
def test_a_layout_that_is_not_the_model_is_refused(stages, devices, told):
    assert told in refusal(parallel=layout(stages, devices))


def test_stages_without_devices_are_refused():
    assert "go together" in refusal(parallel={"pipeline_stages": [["emb"]]})
