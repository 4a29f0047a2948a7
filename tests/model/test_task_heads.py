"""The heads of fine-tuning equal Hugging Face's models in PyTorch, on the weights that we export."""

import numpy as np
import pytest
from support.model_inputs import assert_gradients_of_pytorch, gradients_of, hidden_of, make_examples

from bert_cli.data.finetune.labels import weights_of
from bert_cli.facts.heads import (
    QUESTION_ANSWERING,
    SEQUENCE_CLASSIFICATION,
    SEVERAL_LABELS,
    TOKEN_CLASSIFICATION,
)
from bert_cli.model.bert import Outputs, build_block, build_blocks, named_weights
from bert_cli.model.hf import hf_config, to_hf
from bert_cli.parallel.engine import count

LABELS = ("one", "two", "three")
KINDS = {
    # The head and its outputs.
    "question answering": (QUESTION_ANSWERING, 2),
    "sequence classification": (SEQUENCE_CLASSIFICATION, 3),
    "several labels": (SEQUENCE_CLASSIFICATION, 3),
    "regression": (SEQUENCE_CLASSIFICATION, 1),
    "token classification": (TOKEN_CLASSIFICATION, 3),
}

# Their losses take the labels as floats.
FLOATS = ("regression", "several labels")


def labels_of(kind, columns):
    """Labels as ours are given them, and as theirs are."""
    draw = np.random.default_rng(0)
    examples, length = columns["input_ids"].shape
    if kind == "question answering":
        # Within the shortest example: their loss has nothing against answers in the padding.
        starts, ends = np.sort(draw.integers(0, length // 2, (2, examples)), axis=0)
        ours = {"start_positions": starts.astype(np.int32), "end_positions": ends.astype(np.int32)}
    elif kind == "sequence classification":
        ours = {"labels": draw.integers(0, 3, examples).astype(np.int32)}
    elif kind == "several labels":
        ours = {"labels": draw.integers(0, 2, (examples, 3)).astype(np.int8)}
    elif kind == "regression":
        ours = {"labels": draw.normal(size=examples).astype(np.float32)}
    else:
        labels = draw.integers(0, 3, (examples, length)).astype(np.int32)
        weights = (draw.random((examples, length)) < 0.5) & (columns["input_mask"] > 0)
        ours = {"labels": labels * weights, "label_weights": weights.astype(np.float32)}
        return ours, {"labels": np.where(weights, labels, -100)}
    return ours, ours


def theirs_of(kind, config, values, columns, labels):
    """Logits, loss and gradients of Hugging Face's model."""
    import torch
    import transformers

    head, outputs = KINDS[kind]
    names = LABELS if outputs == 3 else None
    described = hf_config(config, head=head, label_names=names)
    described |= {"problem_type": SEVERAL_LABELS} if kind == "several labels" else {}
    model = getattr(transformers, head.hf_classes[0])(transformers.BertConfig(**described)).eval()
    tensors = {name: torch.tensor(value) for name, value in to_hf(values, config).items()}
    model.load_state_dict(tensors)
    given = {name: torch.tensor(value) for name, value in columns.items()}
    out = model(
        input_ids=given["input_ids"],
        attention_mask=given["input_mask"],
        token_type_ids=given["segment_ids"],
        **{
            n: torch.tensor(v.astype(np.float32 if kind in FLOATS else int))
            for n, v in labels.items()
        },
    )
    out.loss.backward()
    if kind == "question answering":
        out.logits = torch.stack([out.start_logits, out.end_logits], -1)
    gradients = {name: weight.grad.numpy() for name, weight in model.named_parameters()}
    return out.logits.detach().numpy(), float(out.loss.detach()), gradients


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_equals_hugging_faces(kind, tiny):
    head, outputs = KINDS[kind]
    # Their answers' loss counts the scores of padded places, which ours leaves out: so none here.
    examples = make_examples(tiny.vocab_size, examples=5, seed=3)
    padded = {n: examples[n] for n in ("input_ids", "input_mask", "segment_ids")}
    if kind == "question answering":
        padded["input_mask"] = np.ones_like(padded["input_mask"])
        # Their table of words has no gradient for the padding's.
        padded["input_ids"] = np.maximum(padded["input_ids"], 1)
    blocks = build_blocks(
        tiny, seed=4, policy="float32", last_blocks=head.last_blocks, outputs=Outputs(outputs)
    )
    weights = named_weights(blocks)
    draw = np.random.default_rng(5)
    for weight in weights.values():
        weight.assign(weight.numpy() + draw.normal(0, 0.1, weight.shape))
    values = {name: weight.numpy() for name, weight in weights.items()}
    ours_labels, their_labels = labels_of(kind, padded)
    logits, loss, gradients = theirs_of(kind, tiny, values, padded, their_labels)
    counts = {"examples": np.float32(5), "weighted": np.float32(5)}
    if kind == "token classification":
        counts["words"] = np.float32(ours_labels["label_weights"].sum())
    found, sums, own = gradients_of(blocks, {**padded, **ours_labels}, counts)
    scores = blocks[-1][1].logits(hidden_of(blocks, padded), None)
    assert np.abs(scores.numpy() - logits).max() < 1e-6
    assert float(found) == pytest.approx(loss, rel=1e-6)
    named = to_hf({name: gradient.numpy() for name, gradient in own.items()}, tiny)
    no_gradient = ["qa_outputs.bias", "bert.encoder.layer.1.output.LayerNorm.bias"]
    assert_gradients_of_pytorch(named, gradients, no_gradient if head is QUESTION_ANSWERING else ())
    assert max(np.abs(named[name] - value).max() for name, value in gradients.items()) < 1e-6
    several = kind == "several labels"
    best = logits > 0 if several else logits.argmax(1 if kind == "question answering" else -1)
    expected = {}
    if kind == "question answering":
        for number, end in enumerate(("start", "end")):
            expected[f"{end}_correct"] = best[:, number] == ours_labels[f"{end}_positions"]
    elif kind != "regression":
        weights = ours_labels.get("label_weights", 1)
        expected["correct"] = (best == ours_labels["labels"]) * weights
    right = {name: float(value) for name, value in sums.items() if name.endswith("correct")}
    each = 3 if several else 1
    assert right == pytest.approx({name: value.sum() / each for name, value in expected.items()})


def test_an_answer_is_not_looked_for_in_the_padding(tiny):
    head = build_block(QUESTION_ANSWERING.name, tiny, seed=1, policy="float32")
    hidden = np.random.default_rng(0).normal(size=(1, 6, 32)).astype(np.float32)
    places = {n: np.array([1], np.int32) for n in ("start_positions", "end_positions")}
    losses = []
    for mask in ([1, 1, 1, 1], [1, 1, 1, 1, 0, 0]):
        labels = {"input_mask": np.array([mask], np.int32), **places}
        losses.append(head(hidden[:, : len(mask)], labels, {"examples": np.float32(1)}, None)[0])
    assert abs(float(losses[0]) - float(losses[1])) < 1e-6


def test_the_classifier_has_dropout_before_it(tiny):
    head = build_block(SEQUENCE_CLASSIFICATION.name, tiny, seed=1, policy="float32")
    hidden = np.random.default_rng(0).normal(size=(3, 6, 32)).astype(np.float32)
    dropped = head.logits(hidden, np.array([7, 0], np.int32))
    assert not np.array_equal(dropped, head.logits(hidden, None))


WEIGHTED = {
    # Outputs, and PyTorch's loss from logits, labels and weights.
    "one label": (3, lambda F, z, y, w: F.cross_entropy(z, y, weight=w)),
    "several labels": (
        3,
        lambda F, z, y, w: (
            F.binary_cross_entropy_with_logits(z, y.float(), pos_weight=w, reduction="sum")
            / (1 + y * (w - 1)).sum()
        ),
    ),
}


@pytest.mark.parametrize("kind", WEIGHTED)
def test_the_loss_of_weighted_labels_equals_pytorchs(kind, tiny):
    import tensorflow as tf
    import torch

    outputs, theirs = WEIGHTED[kind]
    block = build_block("glue_head", tiny, seed=4, policy="float32", outputs=Outputs(outputs))
    draw = np.random.default_rng(7)
    hidden = draw.normal(size=(6, 1, tiny.hidden_size)).astype(np.float32)
    labels = np.array([0, 0, 0, 0, 1, 2], np.int32)
    if kind == "several labels":
        labels = (draw.random((6, 3)) < 0.4).astype(np.int8)
    table = {"a": 0.25, "c": 3.0}
    columns = {
        "input_mask": np.ones((6, 1), np.int32),
        "labels": labels,
        "label_weights": weights_of(labels, ("a", "b", "c"), table),
    }
    divisors = {n: np.float32(value) for n, value in count(columns, block.COUNTS).items()}
    tensor = tf.constant(hidden)
    with tf.GradientTape() as tape:
        tape.watch(tensor)
        loss, sums = block(tensor, columns, divisors, None)
    ours = tape.gradient(loss, tensor).numpy()[:, 0]
    kernel, bias = (torch.tensor(weight.numpy()) for weight in block.weights)
    given = torch.tensor(hidden[:, 0], requires_grad=True)
    weights = torch.tensor([0.25, 1.0, 3.0])
    expected = theirs(
        torch.nn.functional, given @ kernel + bias, torch.tensor(labels).long(), weights
    )
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert float(sums["loss"]) / divisors["weighted"] == pytest.approx(float(loss), rel=1e-6)
    assert np.abs(ours - given.grad.numpy()).max() < 1e-6


def test_the_accuracy_leaves_out_labels_that_a_teacher_made(tiny):
    block = build_block("glue_head", tiny, seed=4, policy="float32", outputs=Outputs(3))
    draw = np.random.default_rng(7)
    hidden = draw.normal(size=(6, 1, tiny.hidden_size)).astype(np.float32)
    guesses = np.asarray(block.logits(hidden, None)).argmax(-1)
    ones = np.ones(6, np.float32)
    columns = {
        "input_mask": np.ones((6, 1), np.int32),
        # The third label is wrong; the last three are the model's own guesses.
        "labels": np.where([0, 0, 1, 0, 0, 0], (guesses + 1) % 3, guesses),
        "teacher_logits": draw.normal(size=(6, 3)).astype(np.float32),
        "teacher_weight": 0.5 * ones,
        "teacher_temperature": ones,
    }
    marked = columns | {"is_labelled": np.float32([1, 1, 1, 0, 0, 0])}
    losses = []
    for batch, expected in ((columns, 5 / 6), (marked, 2 / 3)):
        counts = count(batch, block.COUNTS)
        divisors = {name: np.float32(value) for name, value in counts.items()}
        loss, sums = block(hidden, batch, divisors, None)
        losses.append(float(loss))
        over, by = block.MEANS["accuracy"]
        assert float(sums[over]) / counts[by] == pytest.approx(expected)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_against_a_teacher_equals_pytorchs(kind, tiny):
    """Loss, and its gradient with respect to the head's input, for a weight and a temperature of each example."""
    import tensorflow as tf
    import torch
    from torch.nn import functional

    head, outputs = KINDS[kind]
    block = build_block(head.name, tiny, seed=4, policy="float32", outputs=Outputs(outputs))
    columns = make_examples(tiny.vocab_size, examples=5, seed=3)
    mask = columns["input_mask"]
    draw = np.random.default_rng(7)
    hidden = draw.normal(size=(*mask.shape, tiny.hidden_size)).astype(np.float32)
    labels, _ = labels_of(kind, columns)
    shape = (*mask.shape, outputs) if head.is_per_position else (5, outputs)
    teacher = {
        "teacher_logits": 3.0 * draw.normal(size=shape).astype(np.float32),
        "teacher_weight": draw.random(5).astype(np.float32),
        "teacher_temperature": (1.0 + draw.random(5)).astype(np.float32),
    }
    counts = {"examples": np.float32(5), "weighted": np.float32(5)}
    counts |= {"words": labels.get("label_weights", np.ones(1)).sum()}
    tensor = tf.constant(hidden)
    with tf.GradientTape() as tape:
        tape.watch(tensor)
        loss, sums = block(tensor, {"input_mask": mask, **labels, **teacher}, counts, None)
    ours = tape.gradient(loss, tensor).numpy()

    kernel, bias = (torch.tensor(weight.numpy()) for weight in block.weights)
    theirs = torch.tensor(hidden, requires_grad=True)
    logits = theirs @ kernel + bias
    soft = torch.tensor(teacher["teacher_logits"])
    weight, temperature = (torch.tensor(teacher[f"teacher_{n}"]) for n in ("weight", "temperature"))

    def mixed(scores, soft, label, weight, temperature):
        """Of rows [R, L], the loss of each."""
        hard = functional.cross_entropy(scores, torch.tensor(label).long(), reduction="none")
        student = functional.log_softmax(scores / temperature[:, None], -1)
        probabilities = functional.softmax(soft / temperature[:, None], -1)
        divergence = functional.kl_div(student, probabilities, reduction="none").sum(-1)
        return (1 - weight) * hard + weight * temperature**2 * divergence

    if kind == "question answering":
        padding = torch.tensor(mask == 0)[:, :, None]
        logits, soft = (scores.masked_fill(padding, -1e9) for scores in (logits, soft))
        pairs = enumerate(("start_positions", "end_positions"))
        parts = [
            mixed(logits[:, :, n], soft[:, :, n], labels[name], weight, temperature)
            for n, name in pairs
        ]
        expected = sum(parts).sum() / 2 / 5
    elif kind == "token classification":
        rows = [tensor.flatten(0, 1) for tensor in (logits, soft)]
        each = [tensor[:, None].expand(mask.shape).flatten() for tensor in (weight, temperature)]
        losses = mixed(*rows, labels["labels"].reshape(-1), *each)
        words = torch.tensor(labels["label_weights"].reshape(-1))
        expected = (losses * words).sum() / words.sum()
    elif kind == "several labels":
        zeros = torch.zeros_like(soft)
        pairs = [torch.stack([zeros, scores], -1).flatten(0, 1) for scores in (logits[:, 0], soft)]
        each = [tensor.repeat_interleave(3) for tensor in (weight, temperature)]
        expected = mixed(*pairs, labels["labels"].reshape(-1), *each).mean()
    elif kind == "regression":
        hard = (logits[:, 0, 0] - torch.tensor(labels["labels"])) ** 2
        expected = ((1 - weight) * hard + weight * (logits[:, 0, 0] - soft[:, 0]) ** 2).mean()
    else:
        expected = mixed(logits[:, 0], soft, labels["labels"], weight, temperature).mean()
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert float(sums["loss"]) == pytest.approx(
        float(expected.detach()) * counts[block.MEANS["loss"][1]] if "loss" in block.MEANS else 0,
        rel=1e-5,
    )
    gradient = theirs.grad.numpy()
    assert np.linalg.norm(ours - gradient) < 1e-5 * np.linalg.norm(gradient)
