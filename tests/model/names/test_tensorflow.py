"""Google's TensorFlow 1 checkpoints: real ones, written by TensorFlow 1's own saver, of a model of PyTorch."""

import json
import re

import numpy as np
import pytest
from support.model_inputs import values_of

from bert_cli.errors import CheckpointError
from bert_cli.model.build import build_blocks, named_weights
from bert_cli.model.names.hf import config_of, from_hf, hf_config, to_hf
from bert_cli.model.names.tensorflow import architecture_of, from_tf1
from bert_cli.model.names.tensorflow import config_of as tf1_config_of

TEXTS = ("pool", "glue_head")


@pytest.fixture(scope="module")
def judge(tiny):
    import torch
    import transformers

    torch.manual_seed(0)
    return transformers.BertForPreTraining(transformers.BertConfig(**hf_config(tiny))).eval()


@pytest.fixture(scope="module")
def variables(judge):
    """Its weights under the names and in the shapes of google-research/bert."""
    google = {}
    for name, weight in judge.named_parameters():
        layer, _, leaf = name.replace(".layer.", ".layer_").replace(".", "/").rpartition("/")
        value = weight.detach().numpy().copy()
        if layer.endswith("_embeddings"):
            google[layer] = value
        elif layer.endswith("LayerNorm"):
            # At first all gammas are 1 and all betas 0.
            weight.data.normal_(1.0, 0.3)
            google[f"{layer}/{'gamma' if leaf == 'weight' else 'beta'}"] = weight.detach().numpy()
        elif layer in ("cls/predictions", "cls/seq_relationship"):
            google[f"{layer}/output_{'weights' if leaf == 'weight' else leaf}"] = value
        else:
            google[f"{layer}/{'kernel' if leaf == 'weight' else leaf}"] = value.T
    return google


def write_checkpoint(folder, variables, config):
    """A checkpoint by the saver of TensorFlow 1, with what its optimizer leaves in it."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        for name, value in variables.items():
            v1.get_variable(name, initializer=value, use_resource=False)
            for slot in ("adam_m", "MyOptimizer_1"):
                zeros = np.zeros_like(value)
                v1.get_variable(f"{name}/{slot}", initializer=zeros, use_resource=False)
        v1.get_variable("global_step", initializer=np.int64(7), use_resource=False)
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, str(folder / "bert_model.ckpt"), write_meta_graph=False)
    described = config.model_dump(exclude={"layer_norm_eps", "position_embedding_type"})
    (folder / "bert_config.json").write_text(json.dumps({**described, "directionality": "bidi"}))


def test_a_real_checkpoint_has_the_weights_of_pytorch_by_prefix_index_and_folder(
    tiny, judge, variables, tmp_path
):
    from bert_cli.tasks.model.models import find_source, load_weights

    write_checkpoint(tmp_path, variables, tiny)
    for name in ("bert_model.ckpt", "bert_model.ckpt.index", "."):
        source = find_source(str(tmp_path / name))
        assert source.weights == tmp_path / "bert_model.ckpt"
        assert source.config == tiny
    blocks = build_blocks(source.config, seed=1, policy="float32")
    assert load_weights(source, named_weights(blocks)) == ([], [])
    tensors = to_hf(values_of(blocks), tiny)
    for name, weight in judge.named_parameters():
        np.testing.assert_array_equal(tensors[name], weight.detach().numpy())


def test_data_that_is_cut_or_missing_is_refused(tiny, tmp_path):
    from bert_cli.tasks.model.models import find_source

    write_checkpoint(tmp_path, {"bert/pooler/dense/kernel": np.zeros((32, 32), np.float32)}, tiny)
    (data,) = tmp_path.glob("*.data-*")
    for damage in (lambda: data.write_bytes(data.read_bytes()[:100]), data.unlink):
        damage()
        with pytest.raises(CheckpointError, match=r"have only|bert_model\.ckpt: cannot be read"):
            find_source(str(tmp_path)).tensors()


@pytest.mark.parametrize(
    ("prefix", "blocks", "part"),
    [("cls/squad/", ("qa_head",), "qa_head/span"), ("", TEXTS, "glue_head/classifier")],
)
def test_fine_tuned_heads_are_read(tiny, variables, prefix, blocks, part):
    left_out = ("cls/",) if "pool" in blocks else ("cls/", "bert/pooler")
    encoder = {name: value for name, value in variables.items() if not name.startswith(left_out)}
    weights, bias = np.random.default_rng(0).normal(size=(2, 32)), np.ones(2)
    tensors = from_tf1(
        {**encoder, f"{prefix}output_weights": weights, f"{prefix}output_bias": bias}
    )
    wanted = named_weights(build_blocks(tiny, seed=1, policy="float32", last_blocks=blocks))
    shapes = {name: weight.shape for name, weight in wanted.items()}
    values, missing = from_hf(tensors, shapes, tiny)
    assert missing == []
    assert np.array_equal(values[f"{part}/kernel"], weights.T)
    assert np.array_equal(values[f"{part}/bias"], bias)


def test_what_an_optimizer_leaves_is_left_behind_and_strangers_are_named(variables):
    names = ("global_step", "bert/pooler/dense/kernel/adam_m", "beta1_power")
    zeros = dict.fromkeys(names, np.zeros(1))
    assert set(from_tf1({**variables, **zeros})) == set(from_tf1(variables))
    with pytest.raises(CheckpointError, match=r"x: 2 variables are not BERT's: albert/x, bert/y;"):
        from_tf1({**variables, "bert/y": np.zeros(1), "albert/x": np.zeros(1)}, where="x")
    with pytest.raises(CheckpointError, match="holds no variables of BERT"):
        from_tf1(zeros)
    # A name is known only with the last word of its layer.
    layer = "bert/encoder/layer_/output/dense/kernel"
    for name in ("bert/pooler/dense/gamma", "pool/kernel", layer):
        with pytest.raises(CheckpointError, match=f"are not BERT's: {re.escape(name)};"):
            from_tf1({name: np.zeros((2, 2))})


def test_googles_config_is_read_and_a_stranger_refused():
    ignored = dict.fromkeys(("directionality", "pooler_fc_size", "pooler_num_fc_layers"), 3)
    described = {"hidden_size": 96, **ignored}
    assert config_of(tf1_config_of(described), where="c").hidden_size == 96
    with pytest.raises(CheckpointError, match=r"bert_config\.json \(embedding_size, pooler_x\)"):
        tf1_config_of({"embedding_size": 128, "pooler_x": 1})


def test_what_a_checkpoint_is_for_follows_from_its_variables():
    labels = {"0": "LABEL_0", "1": "LABEL_1"}
    for shapes, architecture, more in (
        ({"cls/predictions/output_bias": [9]}, "BertForPreTraining", {}),
        ({"bert/pooler/dense/bias": [9]}, "BertModel", {}),
        ({"cls/squad/output_weights": [2, 32]}, "BertForQuestionAnswering", {}),
        ({"output_weights": [2, 32]}, "BertForSequenceClassification", {"id2label": labels}),
    ):
        assert architecture_of(shapes) == {"architectures": [architecture], **more}
