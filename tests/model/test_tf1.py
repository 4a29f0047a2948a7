"""Google's TensorFlow 1 checkpoints: real ones, written by TensorFlow 1's own saver, judged by PyTorch."""

import json
import re

import numpy as np
import pytest

from bert_cli.errors import CheckpointError
from bert_cli.model.bert import build_blocks, named_weights
from bert_cli.model.hf import config_of, from_hf, hf_config
from bert_cli.model.tf1 import config_of as tf1_config_of
from bert_cli.model.tf1 import to_hf_names


def variables_of(config, seed=0):
    """Random values under the names and in the shapes of google-research/bert."""
    draw = np.random.default_rng(seed)
    width, inner = config.hidden_size, config.intermediate_size
    shapes = {
        "bert/embeddings/word_embeddings": (config.vocab_size, width),
        "bert/embeddings/position_embeddings": (config.max_position_embeddings, width),
        "bert/embeddings/token_type_embeddings": (2, width),
        "bert/pooler/dense/kernel": (width, width),
        "bert/pooler/dense/bias": (width,),
        "cls/predictions/transform/dense/kernel": (width, width),
        "cls/predictions/transform/dense/bias": (width,),
        "cls/predictions/output_bias": (config.vocab_size,),
        "cls/seq_relationship/output_weights": (2, width),
        "cls/seq_relationship/output_bias": (2,),
    }
    norms = ["bert/embeddings/LayerNorm", "cls/predictions/transform/LayerNorm"]
    for layer in range(config.num_hidden_layers):
        above = f"bert/encoder/layer_{layer}"
        for name in ("query", "key", "value"):
            shapes[f"{above}/attention/self/{name}/kernel"] = (width, width)
            shapes[f"{above}/attention/self/{name}/bias"] = (width,)
        for name, inputs, outputs in (
            ("attention/output/dense", width, width),
            ("intermediate/dense", width, inner),
            ("output/dense", inner, width),
        ):
            shapes[f"{above}/{name}/kernel"] = (inputs, outputs)
            shapes[f"{above}/{name}/bias"] = (outputs,)
        norms += [f"{above}/attention/output/LayerNorm", f"{above}/output/LayerNorm"]
    for name in norms:
        shapes |= {f"{name}/gamma": (width,), f"{name}/beta": (width,)}
    return {name: draw.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def in_pytorch(config, variables):
    """Hugging Face's model with each value put to its place by hand, as its conversion script did."""
    import torch
    import transformers

    model = transformers.BertForPreTraining(transformers.BertConfig(**hf_config(config))).eval()
    for name, value in variables.items():
        place = model
        for part in name.split("/"):
            if part.startswith("layer_"):
                place = place.layer[int(part.removeprefix("layer_"))]
            elif part in ("kernel", "gamma", "output_weights"):
                place = place.weight
            elif part in ("beta", "output_bias"):
                place = place.bias
            else:
                place = getattr(place, part)
        place = getattr(place, "weight", place)
        with torch.no_grad():
            place.copy_(torch.tensor(value.T if name.endswith("kernel") else value))
    return model


def write_checkpoint(folder, variables, config):
    """A checkpoint by the saver of TensorFlow 1, with what its optimizer leaves in it."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        for name, value in variables.items():
            v1.get_variable(name, initializer=value, use_resource=False)
            for slot in ("adam_m", "adam_v"):
                v1.get_variable(
                    f"{name}/{slot}", initializer=np.zeros_like(value), use_resource=False
                )
        v1.get_variable("global_step", initializer=np.int64(7), use_resource=False)
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, str(folder / "bert_model.ckpt"), write_meta_graph=False)
    described = {n: v for n, v in config.model_dump().items() if n not in ("layer_norm_eps",)}
    described.pop("position_embedding_type")
    (folder / "bert_config.json").write_text(json.dumps({**described, "directionality": "bidi"}))


@pytest.fixture(scope="module")
def published(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("google")
    variables = variables_of(tiny)
    write_checkpoint(folder, variables, tiny)
    return folder, variables


def test_a_real_checkpoint_gives_the_logits_of_pytorch(tiny, published, make_examples, hidden_of):
    import torch

    from bert_cli.tasks.run.start import find_source, load_weights

    folder, variables = published
    source = find_source(str(folder))
    assert source.config == tiny
    blocks = build_blocks(source.config, seed=1, policy="float32")
    assert load_weights(source, named_weights(blocks)) == ([], [])
    columns = make_examples(tiny)
    with torch.no_grad():
        theirs = in_pytorch(tiny, variables)(
            input_ids=torch.tensor(columns["input_ids"]),
            attention_mask=torch.tensor(columns["input_mask"]),
            token_type_ids=torch.tensor(columns["segment_ids"]),
        )
    mlm, nsp = blocks[-1][1].logits(hidden_of(blocks, columns))
    at = columns["masked_lm_positions"][..., None]
    expected = np.take_along_axis(theirs.prediction_logits.numpy(), at, 1)
    np.testing.assert_allclose(mlm, expected, atol=2e-5)
    np.testing.assert_allclose(nsp, theirs.seq_relationship_logits, atol=2e-5)


@pytest.mark.parametrize("name", ["bert_model.ckpt", "bert_model.ckpt.index", "."])
def test_a_checkpoint_is_found_by_its_prefix_its_index_and_its_folder(published, name):
    from bert_cli.tasks.run.start import find_source

    folder, variables = published
    source = find_source(str(folder / name))
    assert source.weights == folder / "bert_model.ckpt"
    assert len(source.tensors()) == len(variables)


def test_a_checkpoint_without_its_data_is_named(tiny, tmp_path):
    from bert_cli.tasks.run.start import find_source

    write_checkpoint(tmp_path, {"bert/pooler/dense/bias": np.zeros(32, np.float32)}, tiny)
    for path in tmp_path.glob("*.data-*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"bert_model\.ckpt: cannot be read"):
        find_source(str(tmp_path)).tensors()


def test_nothing_is_left_over_on_either_side(tiny):
    tensors = to_hf_names(variables_of(tiny))
    wanted = named_weights(build_blocks(tiny, seed=1, policy="float32"))
    values, missing = from_hf(tensors, {name: w.shape for name, w in wanted.items()})
    assert missing == []
    assert set(values) == set(wanted)


@pytest.mark.parametrize(
    ("names", "last", "part"),
    [
        (("cls/squad/output_weights", "cls/squad/output_bias"), "qa_head", "qa_head/span"),
        (("output_weights", "output_bias"), "glue_head", "glue_head/classifier"),
    ],
)
def test_fine_tuned_heads_are_read(tiny, names, last, part):
    draw = np.random.default_rng(0)
    blocks = ("pool", last) if last == "glue_head" else (last,)
    variables = {n: v for n, v in variables_of(tiny).items() if not n.startswith("cls/")}
    weights, bias = draw.normal(size=(2, 32)), draw.normal(size=2)
    tensors = to_hf_names({**variables, names[0]: weights, names[1]: bias})
    wanted = named_weights(build_blocks(tiny, seed=1, policy="float32", last_blocks=blocks))
    shapes = {name: weight.shape for name, weight in wanted.items()}
    if last == "qa_head":
        tensors = {n: v for n, v in tensors.items() if not n.startswith("bert.pooler")}
    values, missing = from_hf(tensors, shapes)
    assert missing == []
    assert np.array_equal(values[f"{part}/kernel"], weights.T)
    assert np.array_equal(values[f"{part}/bias"], bias)


def test_what_an_optimizer_leaves_is_left_behind_and_strangers_are_named(tiny):
    variables = variables_of(tiny)
    beside = {"global_step": 0, "bert/pooler/dense/kernel/adam_m": 0, "beta1_power": 0}
    zeros = {name: np.zeros(1) for name in beside}
    assert set(to_hf_names({**variables, **zeros})) == set(to_hf_names(variables))
    with pytest.raises(CheckpointError, match=r"x: 2 variables are not BERT's: albert/x, bert/y;"):
        to_hf_names({**variables, "bert/y": np.zeros(1), "albert/x": np.zeros(1)}, where="x")
    with pytest.raises(CheckpointError, match="holds no variables of BERT"):
        to_hf_names(zeros)


@pytest.mark.parametrize(
    "name",
    [
        "bert/pooler/dense",
        "bert/pooler/dense/gamma",
        "bert/embeddings/LayerNorm/kernel",
        "bert/embeddings/word_embeddings/kernel",
        "bert/encoder/layer_/output/dense/kernel",
        "output_weights/bias",
    ],
)
def test_a_name_is_known_only_with_the_last_word_of_its_layer(tiny, name):
    with pytest.raises(CheckpointError, match=f"1 variables are not BERT's: {re.escape(name)};"):
        to_hf_names({**variables_of(tiny), name: np.zeros((2, 2))})


def test_every_stranger_is_named():
    strangers = [f"stranger_{number:02}" for number in range(30)]
    with pytest.raises(CheckpointError) as told:
        to_hf_names({name: np.zeros(1) for name in strangers})
    assert ", ".join(strangers) in str(told.value)


def test_googles_config_is_read_and_a_stranger_refused(tiny):
    # All keys beyond BERT's of the multilingual and Chinese models.
    described = {
        "hidden_size": 96,
        "directionality": "bidi",
        "pooler_fc_size": 768,
        "pooler_num_attention_heads": 12,
        "pooler_num_fc_layers": 3,
        "pooler_size_per_head": 128,
        "pooler_type": "first_token_transform",
    }
    assert config_of(tf1_config_of(described), where="c").hidden_size == 96
    with pytest.raises(CheckpointError, match=r"bert_config\.json \(embedding_size, pooler_x\)"):
        tf1_config_of({"embedding_size": 128, "pooler_x": 1})
    with pytest.raises(CheckpointError, match=r"bert_config\.json \(list\): is no JSON object"):
        tf1_config_of([described])


@pytest.mark.parametrize(
    ("extra", "architecture", "labels"),
    [
        ({}, "BertForPreTraining", None),
        ({"cls/squad/output_weights": (2, 32)}, "BertForQuestionAnswering", None),
        ({"output_weights": (3, 32)}, "BertForSequenceClassification", ("LABEL_0", "LABEL_1", "LABEL_2")),
    ],
)  # fmt: skip
def test_what_a_checkpoint_is_for_follows_from_its_variables(
    tiny, tmp_path, extra, architecture, labels
):
    from bert_cli.tasks.run.start import find_source

    heads = {name: np.zeros(shape, np.float32) for name, shape in extra.items()}
    write_checkpoint(tmp_path, {**variables_of(tiny), **heads}, tiny)
    source = find_source(str(tmp_path))
    assert (source.architecture, source.label_names) == (architecture, labels)


def test_a_folder_of_several_checkpoints_is_refused(tiny, tmp_path):
    from bert_cli.tasks.run.start import find_source

    write_checkpoint(tmp_path, {"bert/pooler/dense/bias": np.zeros(32, np.float32)}, tiny)
    for path in list(tmp_path.glob("bert_model*")):
        path.with_name(path.name.replace(".ckpt", ".ckpt-7")).write_bytes(path.read_bytes())
    (tmp_path / "checkpoint").unlink()  # which names one of them
    with pytest.raises(
        CheckpointError, match=r"holds 2 checkpoints \(bert_model\.ckpt-7, bert_model\.ckpt\)"
    ):
        find_source(str(tmp_path))


def test_a_data_file_that_was_cut_is_named(tiny, tmp_path):
    from bert_cli.tasks.run.start import find_source

    write_checkpoint(tmp_path, variables_of(tiny), tiny)
    (data,) = tmp_path.glob("*.data-*")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"bert_model\.ckpt: cannot be read"):
        find_source(str(tmp_path)).tensors()
