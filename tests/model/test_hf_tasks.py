"""Models for tasks on disk: their config, what is left out when another task starts from them."""

import numpy as np
import pytest

from bert_cli.config.settings import BertConfig
from bert_cli.errors import CheckpointError
from bert_cli.model.bert import build_blocks, named_weights
from bert_cli.model.hf import config_of, fitting, from_hf, hf_config, to_hf


def values_of(config, last_blocks, labels=2):
    blocks = build_blocks(config, seed=1, policy="float32", last_blocks=last_blocks, labels=labels)
    return {name: weight.numpy() for name, weight in named_weights(blocks).items()}


def shapes_of(values):
    return {name: value.shape for name, value in values.items()}


PRETRAINING = ("enc_out", "pool", "heads")
TEXTS = ("pool", "glue_head")


@pytest.mark.parametrize(
    ("there", "here", "left_out", "new"),
    [
        (PRETRAINING, ("qa_head",), ["bert.pooler", "cls.predictions", "cls.seq_relationship"], ["qa_head"]),
        (PRETRAINING, TEXTS, ["cls.predictions", "cls.seq_relationship"], ["glue_head"]),
        (TEXTS, ("token_head",), ["bert.pooler", "classifier"], ["token_head"]),
        (("qa_head",), PRETRAINING, ["qa_outputs"], ["pool", "heads/masked_lm", "heads/next_sentence"]),
        (TEXTS, TEXTS, [], []),
    ],
)  # fmt: skip
def test_a_task_takes_the_encoder_and_leaves_other_heads(tiny, there, here, left_out, new):
    # Three labels there: a head for tokens of two is another one though it has the same name.
    tensors = to_hf(values_of(tiny, there, labels=3))
    values = values_of(tiny, here, labels=3 if here == there else 2)
    kept, found = fitting(tensors, shapes_of(values))
    assert found == left_out
    taken, missing = from_hf(kept, shapes_of(values))
    assert missing == new
    encoder = "hid_1/attention/query/kernel"
    assert np.array_equal(taken[encoder], values_of(tiny, there, labels=3)[encoder])


def test_a_head_for_other_labels_starts_new(tiny):
    tensors = to_hf(values_of(tiny, TEXTS, labels=3))
    wanted = shapes_of(values_of(tiny, TEXTS, labels=4))
    kept, left_out = fitting(tensors, wanted)
    assert left_out == ["classifier"]
    assert from_hf(kept, wanted)[1] == ["glue_head"]


def test_a_pooler_without_its_prefix_is_left_out_too(tiny):
    tensors = to_hf(values_of(tiny, PRETRAINING))
    bare = {n.removeprefix("bert."): v for n, v in tensors.items() if n.startswith("bert.")}
    assert fitting(bare, shapes_of(values_of(tiny, ("qa_head",))))[1] == ["pooler"]
    assert fitting(bare, shapes_of(values_of(tiny, TEXTS)))[1] == []


def test_a_layer_too_many_is_not_left_out_in_silence(tiny):
    fewer = BertConfig.model_validate({**tiny.model_dump(), "num_hidden_layers": 1})
    wanted = shapes_of(values_of(fewer, TEXTS))
    kept, _ = fitting(to_hf(values_of(tiny, PRETRAINING)), wanted)
    with pytest.raises(CheckpointError, match="16 tensors fit no weight of the model"):
        from_hf(kept, wanted)


def test_the_config_names_the_class_and_the_labels(tiny):
    described = hf_config(tiny, head="glue_head", label_names=("no", "yes"))
    assert described["architectures"] == ["BertForSequenceClassification"]
    assert described["id2label"] == {"0": "no", "1": "yes"}
    assert described["label2id"] == {"no": 0, "yes": 1}
    number = hf_config(tiny, head="glue_head")
    assert (number["problem_type"], len(number["id2label"])) == ("regression", 1)
    assert "id2label" not in hf_config(tiny, head="qa_head")


def test_the_shape_is_read_from_a_config(tiny):
    assert config_of(hf_config(tiny)) == tiny
    assert config_of({"hidden_size": 384}) == BertConfig(hidden_size=384)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"model_type": "roberta"}, r"\(model_type roberta\): is no BERT"),
        ({"hidden_act": "gelu_new"}, r"c\.json \(hidden_act 'gelu_new'\)"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"hidden_size": "wide"}, "hidden_size 'wide'"),
        (
            {"hidden_size": 32},
            r"c\.json: .*num_attention_heads 12 does not divide hidden_size \(32\)",
        ),
    ],
)
def test_a_model_that_cannot_be_run_is_refused_by_name(found, message):
    with pytest.raises(CheckpointError, match=message):
        config_of(found, where="c.json")
