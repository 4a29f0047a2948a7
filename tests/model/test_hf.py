"""Names and layouts read both ways, with nothing left over; transformers opens what is written."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bert_cli.config.settings import BertConfig
from bert_cli.errors import CheckpointError
from bert_cli.model.bert import build_blocks, named_weights
from bert_cli.model.hf import check_hf_config, from_hf, hf_config, hf_name, to_hf


@pytest.fixture(scope="module")
def weights(tiny):
    """Values that are all different from 0 and from one another."""
    draw = np.random.default_rng(0)
    named = named_weights(build_blocks(tiny, seed=1, policy="float32"))
    return {
        name: draw.normal(size=weight.shape).astype(np.float32) for name, weight in named.items()
    }


@pytest.fixture
def shapes(weights):
    return {name: value.shape for name, value in weights.items()}


def encoder_only(tensors):
    return {
        name.removeprefix("bert."): value
        for name, value in tensors.items()
        if name.startswith("bert.")
    }


def test_names_are_those_of_hugging_face(tiny, weights):
    import transformers

    theirs = transformers.BertForPreTraining(transformers.BertConfig(**hf_config(tiny)))
    ours = to_hf(weights)
    assert set(ours) == {name for name, _ in theirs.named_parameters()}
    assert {name: value.shape for name, value in ours.items()} == {
        name: tuple(value.shape) for name, value in theirs.named_parameters()
    }


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_exact_bytes_come_back(dtype, weights, shapes, tmp_path):
    weights = {name: value.astype(dtype) for name, value in weights.items()}
    save_file(to_hf(weights), tmp_path / "model.safetensors")
    values, missing = from_hf(load_file(tmp_path / "model.safetensors"), shapes)
    assert missing == []
    assert list(values) == list(weights)
    for name, value in weights.items():
        assert values[name].dtype == dtype
        assert values[name].tobytes() == value.tobytes()
    save_file(to_hf(values), tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (
        tmp_path / "model.safetensors"
    ).read_bytes()


def test_an_encoder_without_prefix_or_heads_says_what_starts_new(weights, shapes):
    tensors = encoder_only(to_hf(weights))
    assert "embeddings.LayerNorm.weight" in tensors
    values, missing = from_hf(tensors, shapes)
    assert missing == ["heads/masked_lm", "heads/next_sentence"]
    assert set(values) == {name for name in weights if not name.startswith("heads/")}
    for name in [name for name in tensors if name.startswith("pooler")]:
        del tensors[name]
    assert from_hf(tensors, shapes)[1] == ["pool", "heads/masked_lm", "heads/next_sentence"]


def test_old_names_buffers_and_tied_copies_are_understood(weights, shapes):
    tensors = to_hf(weights)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in tensors.items()
    }
    assert sum(name.endswith(("gamma", "beta")) for name in old) == 2 * (1 + 2 * 2 + 1)
    old["bert.embeddings.position_ids"] = np.arange(24)[None]
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].copy()
    old["cls.predictions.decoder.bias"] = old.pop("cls.predictions.bias")
    values, missing = from_hf(old, shapes)
    assert missing == []
    for name, value in weights.items():
        assert values[name].tobytes() == value.tobytes()


def test_a_table_that_is_not_tied_is_refused(weights, shapes):
    tensors = to_hf(weights)
    tensors["cls.predictions.decoder.weight"] = (
        tensors["bert.embeddings.word_embeddings.weight"] + 1
    )
    with pytest.raises(
        CheckpointError, match=r"cls\.predictions\.decoder\.weight \(file\): differs from bert\."
    ):
        from_hf(tensors, shapes, where="file")


def test_a_weight_in_two_copies_is_refused(weights, shapes):
    tensors = to_hf(weights)
    with pytest.raises(CheckpointError, match=r"second tensor for bert\.pooler\.dense\.bias"):
        from_hf({**tensors, "pooler.dense.bias": tensors["bert.pooler.dense.bias"]}, shapes)


def test_leftovers_missing_and_other_shapes_are_named_together(weights, shapes):
    tensors = to_hf(weights)
    del tensors["bert.encoder.layer.1.output.dense.bias"]
    del tensors["cls.predictions.bias"]
    tensors["classifier.weight"] = np.zeros((3, 32), np.float32)
    tensors["bert.encoder.layer.0.intermediate.dense.weight"] = np.zeros((48, 32), np.float32)
    with pytest.raises(CheckpointError) as refusal:
        from_hf(tensors, shapes, where="old/model.safetensors")
    text = str(refusal.value)
    assert text.startswith("old/model.safetensors: 1 tensors have another shape: ")
    for part in (
        "bert.encoder.layer.0.intermediate.dense.weight ((32, 48) there, (32, 64) here",
        "2 tensors are missing: bert.encoder.layer.1.output.dense.bias, cls.predictions.bias;",
        "1 tensors fit no weight of the model: classifier.weight;",
    ):
        assert part in text


def test_another_number_of_layers_is_refused(weights, shapes):
    fewer = {name: shape for name, shape in shapes.items() if not name.startswith("hid_1/")}
    with pytest.raises(
        CheckpointError, match=r"16 tensors fit no weight of the model: .* and 8 more"
    ):
        from_hf(to_hf(weights), fewer)
    without = {name: value for name, value in weights.items() if not name.startswith("hid_1/")}
    with pytest.raises(CheckpointError, match="16 tensors are missing"):
        from_hf(to_hf(without), shapes)


def test_a_weight_without_a_row_in_the_table_is_a_defect():
    for name in ("emb/word/bias_2", "tail/dense/kernel", "hid_0/attention/kernel"):
        with pytest.raises(ValueError, match="has no Hugging Face name"):
            hf_name(name)


def test_a_config_made_for_another_model_is_refused(tiny):
    config = hf_config(tiny)
    check_hf_config({**config, "hidden_dropout_prob": 0.0, "use_cache": True}, tiny)
    check_hf_config({}, BertConfig())
    with pytest.raises(CheckpointError) as refusal:
        check_hf_config(
            {**config, "num_attention_heads": 2, "hidden_act": "gelu_new"},
            tiny,
            where="x/config.json",
        )
    assert str(refusal.value).startswith("x/config.json: describes another model: ")
    assert "num_attention_heads is 2 there and 4 here" in str(refusal.value)
    assert "hidden_act is 'gelu_new' there and 'gelu' here" in str(refusal.value)


def test_transformers_opens_what_is_written(tiny, tmp_path, make_examples, hidden_of):
    import torch
    import transformers

    blocks = build_blocks(tiny, seed=5, policy="float32")
    written = to_hf({name: weight.numpy() for name, weight in named_weights(blocks).items()})
    save_file(written, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(hf_config(tiny)))
    model, report = transformers.AutoModelForPreTraining.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values()), report
    assert type(model).__name__ == "BertForPreTraining"
    assert model.config.vocab_size == 97
    columns = make_examples(tiny)
    with torch.no_grad():
        theirs = model.eval()(
            **{
                "input_ids": torch.tensor(columns["input_ids"]),
                "attention_mask": torch.tensor(columns["input_mask"]),
                "token_type_ids": torch.tensor(columns["segment_ids"]),
            }
        )
    mlm, nsp = blocks[-1][1].logits(hidden_of(blocks, columns))
    at = columns["masked_lm_positions"][..., None]
    np.testing.assert_allclose(
        mlm, np.take_along_axis(theirs.prediction_logits.numpy(), at, 1), atol=1e-6
    )
    np.testing.assert_allclose(nsp, theirs.seq_relationship_logits, atol=1e-6)
