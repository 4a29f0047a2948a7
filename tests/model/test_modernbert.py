"""ModernBERT equals transformers' classes in PyTorch: logits, losses, every gradient, and the files of a checkpoint."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.hf_models import need
from support.model_inputs import counts_of, gradients_of, hidden_of, make_examples
from support.tiny_models import PIECES, write_model

from bert_cli.data.records.formats import pack_columns
from bert_cli.errors import CheckpointError
from bert_cli.facts.architectures import ARCHITECTURES, shape_of
from bert_cli.model import modernbert
from bert_cli.model.bert import Outputs, build_block, build_blocks, named_weights
from bert_cli.model.hf import config_of, from_hf, hf_config, to_hf
from bert_cli.planning.memory import weights_of

SHAPE = {
    "architecture": "modernbert",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 5,  # global, local, local, global, local
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 80,
    "layer_norm_eps": 0.1,
    "local_attention": 8,
    "global_rope_theta": 160.0,
    "local_rope_theta": 10.0,
}
SHORT, LONG = 24, 44  # all scores, and blocks of 8 positions that the length does not fill
TOLERANCE = 5e-6
RECORD = ARCHITECTURES["modernbert"]
HEAD = RECORD.heads["heads"]


@pytest.fixture(scope="module")
def config():
    return shape_of(SHAPE)


@pytest.fixture(scope="module")
def blocks(config):
    return random_blocks(config, HEAD)


def random_blocks(config, head, labels=2):
    blocks = build_blocks(
        config, seed=4, policy="float32", last_blocks=head.last_blocks, outputs=Outputs(labels)
    )
    draw = np.random.default_rng(5)
    for weight in named_weights(blocks).values():
        weight.assign(weight.numpy() + draw.normal(0, 0.1, weight.shape))
    return blocks


def values_of(blocks):
    return {name: weight.numpy() for name, weight in named_weights(blocks).items()}


def theirs_of(config, head, values, labels=None):
    """Return transformers' model with our weights."""
    need("torch", "transformers")
    import torch
    import transformers

    names = [f"label {number}" for number in range(labels)] if labels else None
    described = hf_config(config, head=head, label_names=names)
    name = RECORD.class_name(head)
    theirs = transformers.ModernBertConfig(**described, attn_implementation="eager")
    model = getattr(transformers, name)(theirs).eval()
    tensors = {name: torch.tensor(value) for name, value in to_hf(values, config).items()}
    absent, surplus = model.load_state_dict(tensors, strict=False)
    assert not surplus and {*absent} <= {"decoder.weight"}
    return model


def assert_equal_gradients(ours, model, config, zero=()):
    ours = to_hf({name: value.numpy() for name, value in ours.items()}, config)
    theirs = {name: weight.grad.numpy() for name, weight in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        distance = np.linalg.norm(ours[name] - gradient)
        scale = 0.02 if name in zero else np.linalg.norm(gradient)
        assert distance < TOLERANCE * scale, name


@pytest.fixture
def queries_apart(monkeypatch):
    """Global layers compute 16 queries at a time."""
    monkeypatch.setattr(modernbert, "MAX_SCORED", 16)
    monkeypatch.setattr(modernbert, "QUERIES", 16)


def test_masked_lm_with_few_queries_at_a_time_equals_transformers(config, blocks, queries_apart):
    test_masked_lm_equals_transformers(LONG, config, blocks)


def test_one_graph_for_all_lengths_computes_as_a_graph_for_each(config, blocks, queries_apart):
    """Its outputs are those of all scores, and it has the branches that save memory."""
    import tensorflow as tf

    body = [block for name, block in blocks if name == "emb" or name.startswith("hid_")]

    def encoder(columns):
        hidden = None
        for block in body:
            hidden = block(hidden, columns, None)
        return hidden

    any_shape = tf.TensorSpec([None, None], tf.int32)
    names = ("input_ids", "input_mask")
    traced = tf.function(encoder, [dict.fromkeys(names, any_shape)], autograph=False)
    for length in (2, 7, 16, 17, SHORT, 39, 40, LONG, 80):
        columns = make_examples(config.vocab_size, length=max(length, 20))
        columns = {name: tf.constant(columns[name][:, :length], tf.int32) for name in names}
        inside = columns["input_mask"].numpy() > 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(modernbert, "MAX_SCORED", 1000)
            patch.setattr(modernbert, "MIN_BLOCKS", 1000)
            expected = encoder(columns).numpy()
        for outputs in (traced(columns).numpy(), encoder(columns).numpy()):
            assert np.abs(outputs - expected)[inside].max() < 1e-6 * np.abs(expected).max(), length


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_masked_lm_equals_transformers(length, config, blocks):
    columns = make_examples(config.vocab_size, length=length)
    model = theirs_of(config, HEAD, values_of(blocks))
    import torch

    inputs = {name: torch.tensor(column).long() for name, column in columns.items()}
    rows = torch.arange(len(inputs["input_ids"]))[:, None]
    used = inputs["masked_lm_weights"] > 0
    labels = torch.full(inputs["input_ids"].shape, -100)
    positions = inputs["masked_lm_positions"]
    labels[rows.expand_as(used)[used], positions[used]] = inputs["masked_lm_ids"][used]
    out = model(input_ids=inputs["input_ids"], attention_mask=inputs["input_mask"], labels=labels)
    out.loss.backward()
    loss, sums, gradients = gradients_of(blocks, columns, counts_of(columns))
    (scores,) = blocks[-1][1].logits(hidden_of(blocks, columns))
    theirs = out.logits.detach()[rows, positions].numpy()
    assert np.abs(scores.numpy() - theirs).max() < TOLERANCE * np.abs(theirs).max()
    assert abs(float(loss) - float(out.loss.detach())) < TOLERANCE
    right = (theirs.argmax(-1) == columns["masked_lm_ids"]) * columns["masked_lm_weights"]
    assert float(sums["mlm_correct"]) == right.sum()
    assert_equal_gradients(gradients, model, config)


TASKS = {
    # The head, its outputs, and the pooling of texts.
    "question answering": ("qa_head", 2, "cls"),
    "text classification": ("glue_head", 3, "cls"),
    "text classification of means": ("glue_head", 3, "mean"),
    "token classification": ("token_head", 3, "cls"),
}


def task_labels(name, columns):
    """Return the labels of a task for our head and for transformers' class."""
    draw = np.random.default_rng(0)
    examples, length = columns["input_ids"].shape
    if name == "qa_head":
        ours = {f"{end}_positions": draw.integers(0, length, examples) for end in ("start", "end")}
        return ours, ours
    if name == "glue_head":
        ours = {"labels": draw.integers(0, 3, examples)}
        return ours, ours
    labels = draw.integers(0, 3, (examples, length))
    is_used = columns["input_mask"] > 0
    weights = is_used.astype(np.float32)
    return {"labels": labels, "label_weights": weights}, {"labels": np.where(is_used, labels, -100)}


@pytest.mark.parametrize("task", TASKS)
def test_a_head_of_a_task_equals_transformers(task, config):
    name, outputs, pooling = TASKS[task]
    config = config.model_copy(update={"classifier_pooling": pooling})
    head = RECORD.heads[name]
    examples = make_examples(config.vocab_size, examples=5, seed=3)
    columns = {column: examples[column] for column in ("input_ids", "input_mask")}
    if name == "qa_head":  # their loss counts the scores of padding
        columns["input_mask"] = np.ones_like(columns["input_mask"])
        columns["input_ids"] = np.maximum(columns["input_ids"], 1)
    blocks = random_blocks(config, head, outputs)
    ours, labels = task_labels(name, columns)
    model = theirs_of(config, head, values_of(blocks), outputs)
    import torch

    mask = torch.tensor(columns["input_mask"])
    targets = {column: torch.tensor(value).long() for column, value in labels.items()}
    out = model(input_ids=torch.tensor(columns["input_ids"]), attention_mask=mask, **targets)
    out.loss.backward()
    counts = {
        "examples": np.float32(5),
        "weighted": np.float32(5),
        "words": np.float32(columns["input_mask"].sum()),
    }
    loss, _, gradients = gradients_of(blocks, columns | ours, counts)
    scores = blocks[-1][1].logits(hidden_of(blocks, columns), None).numpy()
    theirs = (
        torch.stack([out.start_logits, out.end_logits], -1) if name == "qa_head" else out.logits
    )
    real = columns["input_mask"] > 0 if head.is_per_position else slice(None)
    apart = np.abs(scores - theirs.detach().numpy())[real].max()
    assert apart < TOLERANCE * np.abs(scores).max()
    assert abs(float(loss) - float(out.loss.detach())) < TOLERANCE
    # What adds the same to the scores of all positions changes nothing.
    zero = ["classifier.bias"] if name == "qa_head" else []
    assert_equal_gradients(gradients, model, config, zero)


@pytest.mark.parametrize("length", [12, LONG])
def test_the_loss_logits_and_gradients_of_a_pack_are_those_of_its_sequences(
    length, config, blocks, queries_apart
):
    """A pack is computed in blocks; its sequences alone with all scores, or in blocks."""
    alone = make_examples(config.vocab_size, examples=6, length=length, predictions=4)
    packed = pack_columns(
        {**alone, "next_sentence_weights": np.ones(6, np.float32)},
        np.array([3, 2, 1]),
        (4 * length, 3 * 4, 3),
        pad=0,
    )
    results = []
    for columns in (alone, packed):
        loss, _, gradients = gradients_of(blocks, columns, counts_of(alone))
        (scores,) = blocks[-1][1].logits(hidden_of(blocks, columns))
        results.append((scores[columns["masked_lm_weights"] > 0].numpy(), loss, gradients))
    (scores, loss, gradients), (packed_scores, packed_loss, packed_gradients) = results
    assert np.abs(scores).max() > 1
    np.testing.assert_allclose(packed_scores, scores, atol=TOLERANCE)
    np.testing.assert_allclose(packed_loss, loss, atol=TOLERANCE)
    for name, gradient in gradients.items():
        distance = np.linalg.norm(packed_gradients[name] - gradient)
        assert distance < TOLERANCE * np.linalg.norm(gradient), name


@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize("window", [1, 4, None])
def test_a_position_reads_exactly_its_window(length, window, config):
    changes = {"local_attention": 2 * (window or 4), "global_attn_every_n_layers": 2}
    number = 0 if window is None else 1
    block = build_block(
        f"hid_{number}", config.model_copy(update=changes), seed=1, policy="float32"
    )
    draw = np.random.default_rng(0)
    for weight in block.weights:
        weight.assign(draw.normal(0, 0.2, weight.shape))
    x = draw.normal(size=(1, length, config.hidden_size)).astype(np.float32)
    columns = {"input_mask": np.ones((1, length), np.int32)}
    expected = block.attention(x, columns).numpy()
    for position in (0, 5, length // 2, length - 1):
        changed = x.copy()
        changed[0, position] += 1.0
        differs = np.abs(block.attention(changed, columns).numpy() - expected)[0].max(-1) > 0
        distance = np.abs(np.arange(length) - position)
        assert np.array_equal(differs, distance <= (length if window is None else window))


def test_rotary_positions_are_exact_where_products_have_16_bits(config):
    attention = build_block("hid_1", config, seed=1, policy="mixed_bfloat16").attention
    positions = np.arange(4001, 4001 + SHORT, dtype=np.int32)
    columns = {"position_ids": positions[None], "input_mask": np.ones((1, SHORT), np.int32)}
    angles = positions[:, None] / 10.0 ** np.array([0.0, 0.25, 0.5, 0.75])
    for turned, function in zip(attention._rotation(columns, 8), (np.cos, np.sin), strict=True):
        np.testing.assert_allclose(turned[0, :, 0], function(angles), atol=5e-4)
    # The scores depend on distances alone.
    draw = np.random.default_rng(0)
    for weight in attention.weights:
        weight.assign(draw.normal(0, 0.5, weight.shape))
    x = draw.normal(size=(1, SHORT, 32)).astype(np.float32)
    far, near = (
        np.float32(attention(x, columns | {"position_ids": columns["position_ids"] - first}))
        for first in (0, 4001)
    )
    assert np.linalg.norm(far - near) < 0.01 * np.linalg.norm(near)


def test_rotary_positions_and_the_last_layer_are_their_own_trace(config):
    names = [f"hid_{number}" for number in range(5)]
    keys = [build_block(name, config, seed=1, policy="float32").trace_key for name in names]
    assert keys[1] == keys[2] and len({*keys}) == 4
    theta = config.model_copy(update={"local_rope_theta": 11.0})
    assert build_block("hid_1", theta, seed=1, policy="float32").trace_key != keys[1]


def test_the_weights_of_transformers_come_back_byte_for_byte(config, tmp_path):
    need("torch", "transformers")
    import transformers

    described = hf_config(config) | {"tie_word_embeddings": True}
    theirs = transformers.ModernBertConfig(**described)
    transformers.ModernBertForMaskedLM(theirs).save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert "global_rope_theta" not in described  # transformers 5 writes its own spelling alone
    read = config_of(described)
    assert read == config
    tensors = load_file(tmp_path / "model.safetensors")
    weights = named_weights(
        build_blocks(read, seed=0, policy="float32", last_blocks=HEAD.last_blocks)
    )
    shapes = {name: weight.shape for name, weight in weights.items()}
    values, missing = from_hf(tensors, shapes, read)
    assert missing == []
    again = to_hf(values, read)
    assert again.keys() == tensors.keys() - {"decoder.weight"}
    assert all(again[name].tobytes() == tensors[name].tobytes() for name in again)
    # Where a file has the encoder or the masked-LM head alone, a classifier takes what there is.
    head = RECORD.heads["token_head"]
    blocks = build_blocks(read, seed=0, policy="float32", last_blocks=head.last_blocks)
    shapes = {name: weight.shape for name, weight in named_weights(blocks).items()}
    for start, expected in (("decoder.", []), (("head.", "decoder."), ["token_head/transform"])):
        kept = {name: value for name, value in tensors.items() if not name.startswith(start)}
        assert from_hf(kept, shapes, read)[1] == [*expected, "token_head/classifier"]


@pytest.mark.parametrize("layers", [1, 2, 5, 22])
@pytest.mark.parametrize("every", [1, 2, 3, 30])
def test_both_spellings_of_a_config_describe_the_same_shape(layers, every):
    config = shape_of(SHAPE | {"num_hidden_layers": layers, "global_attn_every_n_layers": every})
    described = hf_config(config)
    spelling_5 = ("layer_types", "rope_parameters")
    old = {name: value for name, value in described.items() if name not in spelling_5}
    spelling_4 = ("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta")
    new = {name: value for name, value in described.items() if name not in spelling_4}
    assert config_of(old) == config_of(described) == config
    types = [layer % every == 0 for layer in range(layers)]
    read = config_of(new)
    assert types == [layer % read.global_attn_every_n_layers == 0 for layer in range(layers)]
    assert read.local_rope_theta == config.local_rope_theta


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"norm_bias": True}, "norm_bias True"),
        ({"hidden_activation": "relu"}, "hidden_act 'relu'"),
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 3}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_parameters"),
    ],
)
def test_a_model_with_other_blocks_is_refused_by_the_name_of_its_entry(changes, problem, config):
    with pytest.raises(CheckpointError, match=problem):
        config_of(hf_config(config) | changes)


def test_the_weights_of_modernbert_base_are_counted_and_start_as_in_transformers(config, blocks):
    counted = weights_of(shape_of({"architecture": "modernbert"}))
    total = counted["emb"] + 22 * counted["hid"] + counted["final_norm"] + counted["heads"]
    assert total == 149_655_232
    counted = weights_of(config)
    total = counted["emb"] + 5 * counted["hid"] + counted["final_norm"] + counted["heads"]
    assert total == sum(value.size for value in values_of(blocks).values())
    deviations = {
        "hid_1/attention/query/kernel": 0.02,
        "hid_1/feed_forward/output/kernel": 0.02 / 10**0.5,
        "heads/masked_lm/transform/dense/kernel": 0.02 / 10**0.5,
        "token_head/classifier/kernel": 32**-0.5,
    }
    for name, deviation in deviations.items():
        assert config.deviation_of(name) == pytest.approx(deviation), name


def test_a_checkpoint_opens_in_transformers(config, tmp_path):
    need("torch", "transformers")
    import torch
    import transformers

    config = config.model_copy(update={"vocab_size": len(PIECES)})
    blocks = random_blocks(config, HEAD)
    folder = write_model(tmp_path / "model", config, blocks=blocks)
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    columns = make_examples(config.vocab_size, length=SHORT)
    mask = torch.tensor(columns["input_mask"])
    with torch.no_grad():
        out = model(input_ids=torch.tensor(columns["input_ids"]), attention_mask=mask).logits
    rows = np.arange(len(mask))[:, None]
    (scores,) = blocks[-1][1].logits(hidden_of(blocks, columns))
    theirs = out.numpy()[rows, columns["masked_lm_positions"]]
    assert np.abs(scores.numpy() - theirs).max() < TOLERANCE * np.abs(theirs).max()
