"""Names and layouts read both ways, with nothing left over; transformers opens what is written."""

import re

import numpy as np
import pytest
from support.model_inputs import random_blocks, values_of

from bert_cli.errors import CheckpointError
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.groupbert import GroupBertConfig
from bert_cli.model.build import PRETRAINING, Outputs, build_blocks
from bert_cli.model.names.hf import (
    check_hf_config,
    class_files,
    config_of,
    fitting,
    from_hf,
    hf_config,
    to_hf,
    vocabulary_tensors,
)

TEXTS = ("pool", "glue_head")


@pytest.fixture(scope="module")
def weights(tiny):
    return values_of(random_blocks(tiny))


def shapes_of(values):
    return {name: value.shape for name, value in values.items()}


def model_of(config, last_blocks, labels=2):
    outputs = Outputs(labels)
    return values_of(
        build_blocks(config, seed=1, policy="float32", last_blocks=last_blocks, outputs=outputs)
    )


def test_of_an_encoder_without_prefix_a_task_takes_what_it_has(tiny, weights):
    theirs = to_hf(weights, tiny).items()
    bare = {n.removeprefix("bert."): value for n, value in theirs if n.startswith("bert.")}
    assert fitting(bare, shapes_of(model_of(tiny, ("qa_head",))), tiny)[1] == ["pooler"]
    assert fitting(bare, shapes_of(model_of(tiny, TEXTS)), tiny)[1] == []


def test_old_names_buffers_and_tied_copies_are_understood(tiny, weights):
    tensors = to_hf(weights, tiny)
    names = [re.sub(r"LayerNorm\.weight", "LayerNorm.gamma", name) for name in tensors]
    names = [re.sub(r"LayerNorm\.bias", "LayerNorm.beta", name) for name in names]
    old = dict(zip(names, tensors.values(), strict=True))
    old["bert.embeddings.position_ids"] = np.arange(24)[None]
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].copy()
    old["cls.predictions.decoder.bias"] = old.pop("cls.predictions.bias")
    with_pieces = {name for name, value in old.items() if len(value) == tiny.vocab_size}
    assert {name for name in old if name.endswith(vocabulary_tensors(tiny))} == with_pieces
    values, missing = from_hf(old, shapes_of(weights), tiny)
    assert missing == []
    for name, value in weights.items():
        assert values[name].tobytes() == value.tobytes()


def test_a_table_that_is_not_tied_is_refused(tiny, weights):
    tensors = to_hf(weights, tiny)
    table = tensors["bert.embeddings.word_embeddings.weight"]
    tensors["cls.predictions.decoder.weight"] = table + 1
    with pytest.raises(CheckpointError, match=r"\.weight \(file\): differs from bert\."):
        from_hf(tensors, shapes_of(weights), tiny, where="file")


def test_leftovers_missing_and_other_shapes_are_named_together(tiny, weights):
    tensors = to_hf(weights, tiny)
    del tensors["bert.encoder.layer.1.output.dense.bias"]
    del tensors["cls.predictions.bias"]
    tensors["classifier.weight"] = np.zeros((3, 32), np.float32)
    tensors["bert.encoder.layer.0.intermediate.dense.weight"] = np.zeros((48, 32), np.float32)
    with pytest.raises(CheckpointError) as refusal:
        from_hf(tensors, shapes_of(weights), tiny, where="old/model.safetensors")
    for part in (
        "old/model.safetensors: 1 tensors have another shape: bert.encoder.layer.0.intermediate.",
        "((32, 48) there, (32, 64) here",
        "2 tensors are missing: bert.encoder.layer.1.output.dense.bias, cls.predictions.bias;",
        "1 tensors fit no weight of the model: classifier.weight;",
    ):
        assert part in str(refusal.value)
    # Heads alone are left out, and no layers.
    fewer = shapes_of({name: value for name, value in weights.items() if "hid_1/" not in name})
    kept, _ = fitting(to_hf(weights, tiny), fewer, tiny)
    with pytest.raises(CheckpointError, match=r"16 tensors fit no weight .* and 8 more"):
        from_hf(kept, fewer, tiny)


@pytest.mark.parametrize(
    ("there", "here", "left_out", "new"),
    [
        (PRETRAINING, ("qa_head",), ["bert.pooler", "cls.predictions", "cls.seq_relationship"], ["qa_head"]),
        (TEXTS, ("token_head",), ["bert.pooler", "classifier"], ["token_head"]),
        (("qa_head",), PRETRAINING, ["qa_outputs"], ["pool", "heads/masked_lm", "heads/next_sentence"]),
        (TEXTS, TEXTS, ["classifier"], ["glue_head"]),
    ],
)  # fmt: skip
def test_a_task_takes_the_encoder_and_leaves_heads_of_others_and_for_other_labels(
    tiny, there, here, left_out, new
):
    # Three labels there: a head for tokens of two is another one though it has the same name.
    values, wanted = model_of(tiny, there, labels=3), shapes_of(model_of(tiny, here))
    kept, out = fitting(to_hf(values, tiny), wanted, tiny)
    assert out == left_out
    taken, missing = from_hf(kept, wanted, tiny)
    assert missing == new
    encoder = "hid_1/attention/query/kernel"
    assert np.array_equal(taken[encoder], values[encoder])
    assert fitting(to_hf(values, tiny), shapes_of(values), tiny)[1] == []


def test_a_config_made_for_another_model_is_refused(tiny):
    config = hf_config(tiny)
    check_hf_config({**config, "hidden_dropout_prob": 0.0, "use_cache": True}, tiny)
    check_hf_config({}, BertConfig())
    other = {**config, "num_attention_heads": 2, "hidden_act": "gelu_new"}
    with pytest.raises(CheckpointError, match="describes another model") as refusal:
        check_hf_config(other, tiny, where="x/config.json")
    assert "num_attention_heads is 2 there and 4 here" in str(refusal.value)
    assert "hidden_act is 'gelu_new' there and 'gelu' here" in str(refusal.value)


def test_the_shape_is_read_from_a_config_and_a_model_that_cannot_be_run_is_refused(tiny):
    assert config_of(hf_config(tiny)) == tiny
    assert config_of({"hidden_size": 384}) == BertConfig(hidden_size=384)
    for described, message in (
        (
            {"model_type": "mpnet"},
            r"\(model_type mpnet\): is not a supported model type; use one of bert, .*xlm-roberta",
        ),
        ({"hidden_act": "gelu_new"}, r"c\.json \(hidden_act 'gelu_new'\)"),
        ({"hidden_size": 32}, r"c\.json: .*num_attention_heads 12 does not divide"),
    ):
        with pytest.raises(CheckpointError, match=message):
            config_of(described, where="c.json")


def test_a_groupbert_names_its_file_and_is_no_bert(tiny):
    groups = {"conv_group_size": 8, "ffn_groups": 2}
    group = GroupBertConfig(**tiny.model_dump(exclude={"architecture"}), **groups)
    described = hf_config(group)
    assert config_of(described) == group
    check_hf_config(described, group)
    file, _, name = described["auto_map"]["AutoModelForPreTraining"].partition(".")
    assert [f"{file}.py"] == [*class_files(group)] and [name] == described["architectures"]
    assert described["model_type"] == "groupbert" and "architecture" not in described
    assert class_files(tiny) == {} and not {"auto_map", *groups} & {*hf_config(tiny)}
    for there, config, message in (
        (described, tiny, "architecture is 'groupbert' there and 'bert' here"),
        (hf_config(tiny), group, "architecture is 'bert' there and 'groupbert' here"),
        ({**described, "ffn_groups": 4}, group, "ffn_groups is 4 there and 2 here"),
    ):
        with pytest.raises(CheckpointError, match=message):
            check_hf_config(there, config)
    with pytest.raises(CheckpointError, match=r"conv_group_size 7.* does not divide hidden_size"):
        config_of({**described, "conv_group_size": 7})
